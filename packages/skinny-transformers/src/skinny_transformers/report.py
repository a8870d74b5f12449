"""What `install` and `status` answer: every linear layer, installed or the reason why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from skinny_core.rules import Reason


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer. path: dotted module path ("" for a model that is itself the layer). n, k: weight `[N, K]`.

    installed: calls of this layer are offered to skinny. reason, detail: why not; for an installed layer, what would
    send its calls to the original now (a bias, an attached adapter, an offloaded weight), or None.
    """

    path: str
    n: int
    k: int
    installed: bool
    reason: Reason | None = None
    detail: str = ""

    def __str__(self) -> str:
        state = "installed" if self.installed else "left alone"
        why = f": {self.reason.value}" if self.reason else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path or '(root)'} [{self.n}, {self.k}] {state}{why}{detail}"


@dataclass(frozen=True, slots=True)
class Report:
    """All linear layers of a model in `named_modules` order.

    family: the plan family that calls are looked up under. notes: what the plan loader had to say.
    compiled: kernels compiled during this call (empty when all came from the cache, or without a GPU).
    """

    family: str
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()

    @property
    def installed(self) -> tuple[LayerReport, ...]:
        """Layers whose calls are offered to skinny."""
        return tuple(layer for layer in self.layers if layer.installed)

    @property
    def refused(self) -> tuple[LayerReport, ...]:
        """Layers that were left alone."""
        return tuple(layer for layer in self.layers if not layer.installed)

    def __getitem__(self, path: str) -> LayerReport:
        """The layer at a module path; raises `KeyError`."""
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(path)

    def __str__(self) -> str:
        """One line: how many layers, and the reasons of the others."""
        why = Counter(layer.reason.value for layer in self.refused if layer.reason)
        rest = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
        return (
            f"skinny: {len(self.installed)} of {len(self.layers)} linear layers installed"
            f" (family {self.family or 'unknown'})" + (f"; left alone: {rest}" if rest else "")
        )

    def text(self) -> str:
        """The summary, a line per layer, and the notes."""
        return "\n".join(
            [str(self), *(f"  {layer}" for layer in self.layers), *(f"  note: {note}" for note in self.notes)]
        )
