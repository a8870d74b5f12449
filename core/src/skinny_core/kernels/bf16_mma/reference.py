"""What `bf16_mma` computes, in plain torch."""

from __future__ import annotations

from skinny_core.kernels.dense_reference import product_f32, product_f64

__all__ = ["product_f32", "product_f64"]
