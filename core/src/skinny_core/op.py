"""`torch.ops.skinny.linear`: the dispatcher as one opaque torch op. Importing this module registers it.

A traced graph holds the op, never a choice: M and the plan are read when it runs. Where a gradient is needed the op
steps aside before autograd records anything, so the graph holds the original call and its exact gradients.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad as _forward_ad

from skinny_core import dispatch

NAMESPACE = "skinny"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    family: str = "",
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # A parameter class of a host arrives here as it is; what it means under dispatch has been asked before. Its `data`
    # is the same memory as a plain tensor.
    plain = weight if type(weight) in _PLAIN else weight.data
    return dispatch.linear(x, plain, family, residual=residual, out_dtype=out_dtype)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    family: str = "",
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    torch._check(weight.dim() == 2, lambda: f"weight must be [N, K], got {weight.dim()} dimensions")
    torch._check(
        x.shape[-1] == weight.shape[1], lambda: f"x has {x.shape[-1]} columns, weight has K = {weight.shape[1]}"
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    family: str = "",
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    operands = [t for t in (x, weight, residual) if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    # A traced graph enters forward-mode levels without torch's Python level being set: ask the tensors too.
    if wanted or _forward_ad._current_level >= 0 or any(_has_tangent(t) for t in operands):
        return dispatch.original(x, weight, residual, out_dtype)
    with torch._C._AutoDispatchBelowAutograd():
        y: torch.Tensor = torch.ops.skinny.linear.default(x, weight, family, residual=residual, out_dtype=out_dtype)
    return y


def _has_tangent(tensor: torch.Tensor) -> bool:
    return torch._VF._unpack_dual(tensor, level=0)[1] is not None


def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    family: str = "",
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # The casts have to be part of a traced graph: autocast is off again when the graph runs.
    return dispatch.original(x, weight, residual, out_dtype)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(dispatch.OP_SCHEMA)
    library.impl("linear", _run, "CompositeExplicitAutograd")  # every backend: other devices get the original call
    library.impl("linear", _autograd, "Autograd")
    for key in ("AutocastCUDA", "AutocastCPU"):
        library.impl("linear", _autocast, key)
    torch.library.register_fake(f"{NAMESPACE}::linear", _fake, lib=library)
    return library


# The op lives as long as this object. A reload of the module finds it and registers nothing twice.
if "_library" not in globals():
    _library = _register()

linear = torch.ops.skinny.linear
"""The registered op. Adapters call it through this name, so that using it is importing this module."""
