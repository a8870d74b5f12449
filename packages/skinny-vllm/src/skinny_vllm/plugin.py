"""`register()`: what vLLM calls in every process before it has a configuration, and the state that follows from it.

It decides whether the plug-in is on (SKINNY, vLLM's version) and attaches the seam. It touches no device, imports no
part of vLLM, and never raises into the host.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from skinny_vllm import seam, versions
from skinny_vllm.report import HostStatus, ModelStatus, State

# A child of vLLM's own logger, so that its handler and level apply.
log = logging.getLogger("vllm.skinny")
ENTRY_POINT = "skinny"

_state: State | None = None
_detail = ""
# Weak: an installation holds vLLM's whole configuration, which must go when the engine goes.
_models: list[tuple[weakref.ref[Any], Callable[[Any], ModelStatus]]] = []


def register() -> None:
    """Entry point of `vllm.general_plugins`. Idempotent; harmless where vLLM is absent."""
    guarded(_register)


def guarded(function: Callable[..., None], *args: Any) -> None:
    """Run `function(*args)`; an exception becomes one log line and the state FAILED, and vLLM goes on without us."""
    try:
        function(*args)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace("\n", "; ")
        _set(State.FAILED, text)
        log.warning("skinny is off: %s", text)


def _register() -> None:
    state, detail = _decide()
    if state is State.UNSUPPORTED and _state is not state:
        log.warning("skinny is off: %s", detail)
    if state is State.IDLE:
        seam.attach(lambda model: guarded(_constructed, model))
        state = State.READY
    _set(state, detail)


def _constructed(model: Any) -> None:
    # Imports the host's layers: by now vLLM has them, at registration it may not.
    from skinny_vllm.installer import on_constructed

    on_constructed(model)


def _set(state: State, detail: str) -> None:
    global _state, _detail
    _state, _detail = state, detail


def _decide() -> tuple[State, str]:
    """IDLE if nothing stands against it, else the state and the one-line reason."""
    version = host_version()
    if version is None:
        return State.ABSENT, ""
    from skinny_core.env import settings

    if not settings().enabled:
        return State.DISABLED, ""
    refusal = versions.refusal(version)
    return (State.UNSUPPORTED, refusal) if refusal else (State.IDLE, "")


def host_version() -> str | None:
    """`vllm.__version__` (the distribution may have another name), None where vLLM is not installed."""
    if "vllm" not in sys.modules:
        try:
            if importlib.util.find_spec("vllm") is None:
                return None
        except ValueError:
            return None
    import vllm

    return str(vllm.__version__)


def note_model(owner: Any, describe: Callable[[Any], ModelStatus]) -> None:
    """Add one constructed model to `status()`: `describe(owner)` is asked whenever somebody looks, as long as `owner`
    lives. `describe` must not hold the owner."""
    _models[:] = [*((held, ask) for held, ask in _models if held() is not None), (weakref.ref(owner), describe)]


def status() -> HostStatus:
    """State here, with the models that are alive. Before `register()` it is what `register()` would find."""
    supported = tuple(str(item) for item in versions.SUPPORTED)
    state, detail, version = _state, _detail, None
    try:
        version = host_version()
        if state is None:
            state, detail = _decide()
            if state is State.IDLE:
                allowed = sys.modules["vllm"].envs.VLLM_PLUGINS
                if allowed is not None and ENTRY_POINT not in allowed:
                    state = State.EXCLUDED
    except Exception as error:
        state, detail = State.FAILED, f"{type(error).__name__}: {error}".replace("\n", "; ")
    models = tuple(ask(owner) for held, ask in list(_models) if (owner := held()) is not None)
    return HostStatus(state or State.ABSENT, version, detail, supported, models)
