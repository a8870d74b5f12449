"""A pretended vLLM: a package of that name with a version, and nothing else unless a test adds it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest

from skinny_core import env
from skinny_vllm import plugin, seam


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No SKINNY, no state, no seam, before and after."""
    monkeypatch.delenv("SKINNY", raising=False)
    env.settings.cache_clear()
    monkeypatch.setattr(plugin, "_state", None)
    monkeypatch.setattr(plugin, "_detail", "")
    monkeypatch.setattr(plugin, "_models", [])
    yield
    seam.detach()
    env.settings.cache_clear()


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Make `import vllm` give a module of this version. allowed: plug-ins that vLLM may load, None for all."""

    def make(version: str = "0.33.0", allowed: list[str] | None = None) -> types.ModuleType:
        module = types.ModuleType("vllm")
        module.__version__ = version  # type: ignore[attr-defined]
        module.__path__ = []
        module.envs = types.SimpleNamespace(VLLM_PLUGINS=allowed)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)
        return module

    return make
