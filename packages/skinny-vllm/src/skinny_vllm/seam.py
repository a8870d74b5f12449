"""The one place where vLLM's code is touched: a function that it calls once per constructed model.

`initialize_model` calls `record_metadata_for_reloading(model)` right after the model's `__init__`, inside
`set_current_vllm_config` and before any weight is loaded, for every model: targets, drafts, inner models of multimodal
wrappers, pipeline stages. Its callers hold `initialize_model` by several names; this callee has one name, looked up at
each call. Loaders of 0.26 and 0.33 were read for this.

The module is not imported here: at the time plug-ins are registered that would be slow, and on some platforms it would
initialise CUDA in a process that is about to fork. It is patched when vLLM itself imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MODULE = "vllm.model_executor.model_loader.utils"
FUNCTION = "record_metadata_for_reloading"
_MARK = "skinny_original"

Callback = Callable[[Any], None]


class SeamMissingError(RuntimeError):
    """vLLM has no such function any more, although its version is in a tested range."""


def attach(callback: Callback) -> None:
    """Call `callback(model)` after each model construction from now on. Attaching twice is once."""
    module = sys.modules.get(MODULE)
    if module is not None and getattr(module, FUNCTION, None) is not None:
        wrap(module, callback)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(callback))


def detach() -> None:
    """Undo `attach`, whether or not vLLM has imported the module meanwhile."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    module = sys.modules.get(MODULE)
    original = getattr(getattr(module, FUNCTION, None), _MARK, None)
    if module is not None and original is not None:
        setattr(module, FUNCTION, original)


def wrap(module: ModuleType, callback: Callback) -> None:
    """Make `module`'s function call `callback(model)` first. Raises `SeamMissingError`."""
    original = getattr(module, FUNCTION, None)
    if original is None:
        raise SeamMissingError(f"{module.__name__} has no {FUNCTION}")
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def constructed(model: Any, *args: Any, **kwargs: Any) -> Any:
        callback(model)
        return original(model, *args, **kwargs)

    setattr(constructed, _MARK, original)
    setattr(module, FUNCTION, constructed)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, patches it after its own loader ran, and leaves the import system."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's ordinary spec with a loader that patches afterwards; None for any other module."""
        if fullname != MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _PatchingLoader(spec.loader, self.callback)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    """Runs the real loader, then patches. Everything else is the real loader's."""

    def __init__(self, loader: Any, callback: Callback) -> None:
        self.loader = loader
        self.callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The real loader's module."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute, give the module its own loader back, patch."""
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        from skinny_vllm.plugin import guarded

        guarded(wrap, module, self.callback)
