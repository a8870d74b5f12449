"""Plain torch for `bf16_simt`: what every result is compared with, and the arithmetic it stands for."""

from __future__ import annotations

import torch


def product(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Float64 `x @ w.T (+ residual)` of the exact inputs. x: [M, K], w: [N, K], residual: [M, N]; returns [M, N]."""
    y = x.double() @ w.double().T
    return y if residual is None else y + residual.double()


def simt(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None, out: torch.dtype | None = None
) -> torch.Tensor:
    """The kernel's arithmetic: products and sums in FP32, one rounding to `out` (default: x's dtype) at the end."""
    y = x.float() @ w.float().T
    return (y if residual is None else y + residual.float()).to(out or x.dtype)
