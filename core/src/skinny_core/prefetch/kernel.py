"""The device code of the prefetch: read the first bytes of a weight, keep none of them. Imports Triton; only `build.py`
imports it, and only on demand.

Real loads, because requests for L2 alone (`prefetch.global.L2`, `cp.async.bulk.prefetch.L2`) were measured to do
nothing for the GEMM behind them (H200, `decode_anatomy.md`). A load whose result nobody uses is removed by the
compiler, so all of them are mixed into one word per thread, which would be stored if a run-time argument asked for it.
It never does.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def l2_prefetch(
    w,  # first byte of the weight, 16-byte aligned
    sink,  # not written unless never != 0: may be null
    vectors,  # 16-byte vectors to read, at least 1
    row_vectors,  # vectors of a row; not used unless PADDED
    stride,  # bytes from row to row; not used unless PADDED
    never,  # 0
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    PADDED: tl.constexpr,
    READ_NEXT: tl.constexpr,  # PTX: LOADS vectors that are THREADS vectors apart, from one address
    READ_EACH: tl.constexpr,  # PTX: LOADS vectors, from an address each
    OPERANDS_EACH: tl.constexpr,  # of READ_EACH: LOADS words, LOADS addresses
):
    BATCH: tl.constexpr = LOADS * THREADS
    first = tl.program_id(0) * BATCH
    step = tl.num_programs(0) * BATCH
    whole = vectors // BATCH * BATCH
    lanes = tl.arange(0, BATCH)
    seen = tl.zeros((BATCH,), tl.int32)
    if PADDED:
        for at in tl.range(first, whole, step):
            seen ^= _each(w, at + lanes, row_vectors, stride, PADDED, READ_EACH, OPERANDS_EACH, LOADS)
    else:
        lane = w + tl.arange(0, THREADS).to(tl.int64) * 16
        words = tl.zeros((THREADS,), tl.int32)
        for at in tl.range(first, whole, step):
            here = lane + at.to(tl.int64) * 16
            words ^= tl.inline_asm_elementwise(READ_NEXT, "=r,l", [here], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(sink + tl.arange(0, THREADS), words, mask=(words == never) & (never != 0))
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (whole < vectors):
        # What is left is less than a batch, and for the block with the least to do. Instead of a mask, the last vector
        # again.
        seen ^= _each(
            w, tl.minimum(whole + lanes, vectors - 1), row_vectors, stride, PADDED, READ_EACH, OPERANDS_EACH, LOADS
        )
    tl.store(sink + lanes, seen, mask=(seen == never) & (never != 0))


@triton.jit
def _each(
    w,
    index,
    row_vectors,
    stride,
    PADDED: tl.constexpr,
    READ_EACH: tl.constexpr,
    OPERANDS_EACH: tl.constexpr,
    LOADS: tl.constexpr,
):
    """One word for every vector at `index`, counted along the rows without what lies between them."""
    if PADDED:
        row = index // row_vectors
        here = w + row.to(tl.int64) * stride + (index - row * row_vectors).to(tl.int64) * 16
    else:
        here = w + index.to(tl.int64) * 16
    return tl.inline_asm_elementwise(READ_EACH, OPERANDS_EACH, [here], dtype=tl.int32, is_pure=False, pack=LOADS)
