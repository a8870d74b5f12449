"""Which linear layers a model has, where each belongs, and what speaks against swapping its class."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        if isinstance(self.layer, seam.Linear):
            return None, ""
        if kind is nn.Linear:
            if self.weight() is None:
                return Reason.HOOKED, "no weight among its parameters"
            foreign = seam.is_foreign(self.layer)
            return (Reason.HOOKED, "forward was replaced on the instance") if foreign else (None, "")
        weight = _ask(self.layer, "weight")
        packed = not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point
        return Reason.QUANTISED if packed else Reason.HOOKED, f"class {kind.__module__}.{kind.__qualname__}"

    def report(self, installed: bool, reason: Reason | None = None, detail: str = "") -> LayerReport:
        """Row of the report."""
        n, k = _size(self.layer, "out_features"), _size(self.layer, "in_features")
        return LayerReport(self.path, n, k, installed, reason, detail)

    def state(self) -> LayerReport:
        """Row of the report for what is true now."""
        site = self.layer.__dict__.get(seam.SITE)
        if not isinstance(self.layer, seam.Linear) or site is None:
            return self.report(False, *self.unsuitable())
        reason = seam.standing(self.layer, site)
        if reason is None and self.dtype() is None:
            reason = Reason.DTYPE
        return self.report(True, reason)

    def weight(self) -> torch.Tensor | None:
        """The registered weight; nothing is computed, as the attribute of a parametrised layer would be."""
        return self.layer._parameters.get("weight")

    def dtype(self) -> DType | None:
        """16-bit dtype of the weight, or None for one that no kernel takes."""
        weight = self.weight()
        found = None if weight is None else DType.of(weight.dtype)
        return None if found is DType.FP32 else found

    def problem(self) -> tuple[int, int, DType] | None:
        """(N, K, dtype) of a weight that a kernel could take."""
        weight, dtype = self.weight(), self.dtype()
        if weight is None or dtype is None or weight.ndim != 2:
            return None
        return weight.shape[0], weight.shape[1], dtype

    def cuda_index(self) -> int | None:
        """CUDA device that this layer computes on: the weight's, or the one that accelerate moves it to."""
        hook = self.layer.__dict__.get("_hf_hook")
        for place in (getattr(hook, "execution_device", None), getattr(self.weight(), "device", None)):
            if place is None:
                continue
            device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
            if device.type == "cuda":
                if device.index is not None:
                    return device.index
                return torch.cuda.current_device() if torch.cuda.is_available() else None
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
    sizes = ("in_features", "out_features")
    named = "Linear" in type(module).__name__ and all(_ask(module, size) is not None for size in sizes)
    return isinstance(module, nn.Linear) or named


def _ask(module: nn.Module, name: str) -> Any:
    """An attribute, or None: a foreign layer may compute it, and fail at that."""
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def _size(module: nn.Module, name: str) -> int:
    """An attribute as a whole number, 0 where it is none."""
    try:
        return operator.index(_ask(module, name))
    except TypeError:
        return 0
