"""Device functions of the multiplying warps of `bf16_bulk`: operands from 16-byte pieces, products, the warps' sum."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

from skinny_core.kernels.bf16_bulk.config import VECTOR

WARP = 32
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}


def piece(pointer, offset):
    """The 8 elements at `pointer + offset`, a multiple of 8, as a tensor."""
    return cute.make_tensor(pointer + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))


def _element(pointer, offset):
    """The one element at `pointer + offset` as a tensor."""
    return cute.make_tensor(pointer + offset, cute.make_layout(1))


def _operand(low, high, part):
    """4 registers of an A operand: K elements 4 * part to 4 * part + 3 of both row pieces of this lane."""
    lows, highs = cute.recast_tensor(low, Uint32), cute.recast_tensor(high, Uint32)
    words = cute.make_rmem_tensor(4, Uint32)
    for j in range(2):
        words[2 * j] = lows[2 * part + j]
        words[2 * j + 1] = highs[2 * part + j]
    return cute.recast_tensor(words, low.element_type)


def _half(piece, part):
    """2 registers of a B operand, as `_operand` permutes them."""
    words = cute.recast_tensor(piece, Uint32)
    half = cute.make_rmem_tensor(2, Uint32)
    half[0], half[1] = words[2 * part], words[2 * part + 1]
    return cute.recast_tensor(half, piece.element_type)


@cute.jit
def zero_outside(piece: cute.Tensor, inside: cutlass.Boolean):
    """Zero a piece that lies past K: what was read instead may be anything, and 0 * NaN is NaN."""
    words = cute.recast_tensor(piece, Uint32)
    for j in cutlass.range_constexpr(4):
        words[j] = words[j] if inside else Uint32(0)


@cute.jit
def multiply(
    acc: cute.Tensor,
    stage: cute.Pointer,
    offsets: cute.Tensor,
    at: Int32,
    xs: cute.Tensor,
    inside: cutlass.Boolean,
    tail: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """acc[:, i, j] += rows of tile j times activation tile i over 32 elements of K, `at` elements into the stage."""
    dtype = DTYPES[spec.dtype]
    atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=128)
    mma = cute.make_mma_atom(MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    for j in cutlass.range_constexpr(spec.config.rows // 16):
        low, high = cute.make_rmem_tensor(VECTOR, dtype), cute.make_rmem_tensor(VECTOR, dtype)
        cute.copy(atom, piece(stage, offsets[2 * j] + at), low)
        cute.copy(atom, piece(stage, offsets[2 * j + 1] + at), high)
        if cutlass.const_expr(tail):
            zero_outside(low, inside)
            zero_outside(high, inside)
        for part in cutlass.range_constexpr(2):
            a = _operand(low, high, part)
            for i in cutlass.range_constexpr(spec.m_tiles):
                total = acc[None, i, j]
                cute.mma_atom_call(mma, total, a, _half(xs[None, i], part), total)


def _total(sums, row, column, warps):
    """The warps' sums of one product, added in their order."""
    total = sums[row, column, 0]
    for j in range(1, warps):
        total = total + sums[row, column, j]
    return total


@cute.jit
def reduce(
    acc: cute.Tensor,
    sums: cute.Tensor,
    y: cute.Pointer,
    residual: cute.Pointer,
    row: Int32,
    rows: Int32,
    m: Int32,
    y_stride: Int64,
    residual_stride: Int64,
    spec: cutlass.Constexpr,
):
    """Sum the warps' accumulators in their order and store them, rounded once. sums: shared [rows, 8 m_tiles, warps].

    rows: outputs of the group. A gated product is stored as silu(gate) * up, where output r has its gate in row r of
    the stage and its up projection in row `rows + r`.
    """
    tile, warps = spec.config.rows, spec.config.warps
    tid, _, _ = cute.arch.thread_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    g, t = lane // 4, lane % 4
    for j in cutlass.range_constexpr(tile // 16):
        for i in cutlass.range_constexpr(spec.m_tiles):
            for v in cutlass.range_constexpr(4):
                sums[16 * j + 8 * (v // 2) + g, 8 * i + 2 * t + v % 2, warp] = acc[v, i, j]
    cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)
    place = Int32(tid)
    while place < m * (tile // spec.parts):
        i, r = place // (tile // spec.parts), place % (tile // spec.parts)
        if r < rows:
            out = _total(sums, r, i, warps)
            if cutlass.const_expr(spec.epilogue == "silu_mul"):
                out = out / (1.0 + cute.math.exp(-out, fastmath=True)) * _total(sums, rows + r, i, warps)
            if cutlass.const_expr(spec.epilogue == "add"):
                out = out + _element(residual, Int64(i) * residual_stride + Int64(row + r))[0].to(Float32)
            _element(y, Int64(i) * y_stride + Int64(row + r))[0] = out.to(DTYPES[spec.output])
        place += warps * WARP
