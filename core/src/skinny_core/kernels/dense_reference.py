"""Plain torch for every kernel that computes `y = x @ w.T` and an epilogue with FP32 accumulation and one rounding."""

from __future__ import annotations

import torch


def product_f64(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`[M, N]` float64 product of the exact inputs x `[M, K]` and w `[N, K]`, plus residual `[M, N]`; no rounding."""
    y = x.double() @ w.double().T
    return y if residual is None else y + residual.double()


def product_f32(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`[M, N]` with a kernel's own promise: FP32 accumulation, residual added in FP32, one rounding to `out_dtype`
    (default: the dtype of x). The order of summation is torch's, not the kernel's."""
    y = x.float() @ w.float().T
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)
