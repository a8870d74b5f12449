"""Every test of the core starts from an empty SKINNY, empty user folders and no active family, and leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skinny_core import device, dispatch, env, kernels, table
from skinny_core.device import DeviceKey
from skinny_core.testing import stand_in

H200 = DeviceKey((9, 0), 132, 62914560, "141gb")
_VARIABLES = ("SKINNY", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")


@pytest.fixture(scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _untouched(_home: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.pop("SKINNY", None)
    os.environ["XDG_CONFIG_HOME"], os.environ["XDG_CACHE_HOME"] = str(_home / "config"), str(_home / "cache")
    _forget()
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _forget()


def _forget() -> None:
    env.settings.cache_clear()
    table._warned.clear()
    for family in {*dispatch._families, *(key[0] for key in dispatch._rows)}:
        dispatch.deactivate(family)
    dispatch._counts.clear()
    kernels.unregister(stand_in.STEM)


@pytest.fixture
def skinny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the variable SKINNY for this test."""

    def set_to(value: str) -> None:
        monkeypatch.setenv("SKINNY", value)
        env.settings.cache_clear()

    return set_to


@pytest.fixture
def kernel() -> stand_in.StandIn:
    """The stand-in kernel, registered."""
    return stand_in.register()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> DeviceKey:
    """Tensors of this process pretend to be on CUDA device 0, an H200, wherever the dispatcher asks."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    return H200
