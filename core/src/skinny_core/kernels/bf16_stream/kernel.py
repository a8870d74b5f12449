"""The device code of `bf16_stream`: y[m, n] = sum_k w[n, k] * x[m, k] (+ residual[m, n]).

One program owns BLOCK_N rows of the weight and walks all of K in one order, so the sum of an output never depends on
how the grid was scheduled. This module imports Triton; only `host.py` imports it, and only on demand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def stream_kernel(
    x,  # [M, K], row stride stride_x
    w,  # [N, K], row stride stride_w
    y,  # [M, N], row stride stride_y
    residual,  # [M, N], row stride stride_r; not read unless HAS_RESIDUAL
    M,
    N,
    K,
    stride_x,
    stride_w,
    stride_y,
    stride_r,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    rows_m = tl.arange(0, BLOCK_M)
    rows_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = rows_m < M
    cols = tl.arange(0, BLOCK_K)
    # Rows past N repeat the last row instead of being masked: the loads stay legal and unpredicated, and their results
    # are dropped by the store mask. 64-bit offsets, since N * K passes 2**31 for the largest LM heads.
    row_w = w + tl.minimum(rows_n, N - 1).to(tl.int64)[:, None] * stride_w
    row_x = x + rows_m.to(tl.int64)[None, :] * stride_x

    if PREFETCH:
        # Into L2 only, which is the point of coherence: should a predecessor still be writing w, the loads below, which
        # come after the wait, see the new bytes. One request per row for the bytes of the first STAGES tiles: never
        # past the row, and a multiple of 16, since K % 8 == 0.
        first = tl.minimum(K, STAGES * BLOCK_K) * (w.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [row_w, first], tl.int32, False, 1
        )
    if PDL:
        # Every thread waits: x and residual are written, and y may still be read, by the kernel before this one.
        cuda.gdc_wait()

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = k + cols
        if EVEN_K:
            tile_w = tl.load(row_w + at[None, :], eviction_policy="evict_first")
            tile_x = tl.load(row_x + at[:, None], mask=in_m[None, :], other=0.0)
        else:
            # Both operands are masked: whatever lies behind a padded row may be NaN, and 0 * NaN is NaN.
            in_k = at < K
            tile_w = tl.load(row_w + at[None, :], mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
            tile_x = tl.load(row_x + at[:, None], mask=in_k[:, None] & in_m[None, :], other=0.0)
        acc = tl.dot(tile_w, tile_x, acc)

    keep = (rows_n < N)[:, None] & in_m[None, :]
    column = rows_m.to(tl.int64)[None, :]
    if HAS_RESIDUAL:
        # Added in FP32, before the only rounding.
        acc += tl.load(residual + column * stride_r + rows_n[:, None], mask=keep, other=0.0).to(tl.float32)
    tl.store(y + column * stride_y + rows_n[:, None], acc.to(y.dtype.element_ty), mask=keep)
