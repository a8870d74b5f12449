"""skinny for vLLM: the plug-in that puts measured kernels behind a model's dense projections.

Nothing has to be called: vLLM finds `skinny_vllm.plugin:register` by itself, in every process. `status()` says what the
plug-in does or would do here; `install(model, vllm_config)` and `uninstall(model)` are for tests and notebooks.
Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skinny_vllm.installer import Installation
    from skinny_vllm.report import HostStatus

__version__ = "0.1.0"
__all__ = ["__version__", "install", "status", "uninstall"]


def status() -> HostStatus:
    """What the plug-in does in this process, or would do if vLLM started here. Imports vLLM if it is installed."""
    from skinny_vllm.plugin import status as current

    return current()


def install(model: Any, vllm_config: Any) -> Installation | None:
    """Replace the method objects of a constructed vLLM model. Twice is once. None: declined, see `status()`."""
    from skinny_vllm.installer import install as put

    return put(model, vllm_config)


def uninstall(model: Any) -> int:
    """Put every original method object back; returns how many layers were restored."""
    from skinny_vllm.installer import uninstall as remove

    return remove(model)
