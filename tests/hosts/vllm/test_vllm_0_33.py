"""vLLM 0.33.0: its own classes and engine, on the CPU."""

from __future__ import annotations

import pytest

from tests.hosts.vllm.suite import *  # noqa: F403

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def version() -> str:
    return "0.33.0"
