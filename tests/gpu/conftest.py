"""Fixtures of the GPU tests. Without a CUDA device every test here skips; `tests.gpu.run` makes a run of skips red."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from skinny_core import device, dispatch
from skinny_core.device import DeviceKey


@pytest.fixture
def gpu() -> Iterator[DeviceKey]:
    """Key of the current device; afterwards no CUDA error is pending and no family is left active."""
    key = device.current_key()
    if key is None:
        pytest.skip("needs a CUDA device")
    dispatch.reset_counters()
    yield key
    torch.cuda.synchronize()  # raises what a kernel left behind
    for family in list(dispatch.active()):
        dispatch.deactivate(family)
