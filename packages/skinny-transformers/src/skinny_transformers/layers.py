"""Which linear layers a model has, where each belongs, and what speaks against swapping its class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from skinny_core.problem import DType
from skinny_core.rules import Reason
from skinny_transformers import seam
from skinny_transformers.report import LayerReport

_ADAPTED = "base_layer"  # under this name PEFT keeps the layer that an adapter wraps


@dataclass(frozen=True, slots=True)
class Found:
    """A linear layer and its place `parent._modules[name]` (no parent: it is the whole model).

    A layer inside a PEFT adapter has the adapter's place: the one it had before and gets back when the adapter is
    removed. is_adapter: it is a part of an adapter, not of the model."""

    path: str
    layer: nn.Module
    parent: nn.Module | None
    name: str
    is_adapter: bool = False

    def unsuitable(self) -> tuple[Reason | None, str]:
        """Why this layer cannot be installed on, with a detail; (None, "") where it can."""
        kind = type(self.layer)
        if self.is_adapter:
            return Reason.LORA, "part of an adapter"
        if kind is nn.Linear or isinstance(self.layer, seam.Linear):
            return None, ""
        weight = getattr(self.layer, "weight", None)
        packed = not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point
        return Reason.QUANTISED if packed else Reason.HOOKED, f"class {kind.__module__}.{kind.__qualname__}"

    def report(self, installed: bool, reason: Reason | None = None, detail: str = "") -> LayerReport:
        """Row of the report."""
        n, k = int(self.layer.out_features), int(self.layer.in_features)  # type: ignore[arg-type]
        return LayerReport(self.path, n, k, installed, reason, detail)

    def state(self) -> LayerReport:
        """Row of the report for what is true now."""
        site = self.layer.__dict__.get(seam.SITE)
        if not isinstance(self.layer, seam.Linear) or site is None:
            return self.report(False, *self.unsuitable())
        reason = seam.standing(self.layer, site, self.layer.weight)
        if reason is None and self.dtype() is None:
            reason = Reason.DTYPE
        return self.report(True, reason)

    def dtype(self) -> DType | None:
        """16-bit dtype of the weight, or None for one that no kernel takes."""
        found = DType.of(self.layer.weight.dtype)  # type: ignore[union-attr]
        return None if found is DType.FP32 else found

    def cuda_index(self) -> int | None:
        """CUDA device that this layer computes on: the weight's, or the one that accelerate moves it to."""
        hook = self.layer.__dict__.get("_hf_hook")
        for place in (getattr(hook, "execution_device", None), getattr(self.layer.weight, "device", None)):
            if place is None:
                continue
            device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
            if device.type == "cuda":
                return device.index if device.index is not None else torch.cuda.current_device()
        return None


def linears(model: nn.Module) -> Iterator[Found]:
    """Every linear layer of a model, each object once, in `named_modules` order. An adapter is not one; what it wraps
    is."""
    modules: dict[str, nn.Module] = {}
    places: dict[str, tuple[nn.Module | None, str]] = {"": (None, "")}
    adapters: set[str] = set()
    for path, module in model.named_modules():
        modules[path] = module
        if path:
            above, _, name = path.rpartition(".")
            parent = modules[above]
            wrapped = name == _ADAPTED
            places[path] = places[above] if wrapped else (parent, name)
            # An adapter that is the whole model has no place in which it could be seen later, so what it wraps stays
            # stock.
            if above in adapters or (_ADAPTED in parent._modules and (not wrapped or not above)):
                adapters.add(path)
        if _is_linear(module):
            yield Found(path, module, *places[path], is_adapter=path in adapters)


def _is_linear(module: nn.Module) -> bool:
    if _ADAPTED in module._modules:
        return False
    # quantised and host-specific layers need not derive from nn.Linear, and are reported all the same
    named = "Linear" in type(module).__name__ and hasattr(module, "in_features") and hasattr(module, "out_features")
    return isinstance(module, nn.Linear) or named
