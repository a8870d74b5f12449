"""The CuTe DSL code of `bf16_mma`; imported only when a kernel is compiled.

A block computes `rows` outputs for all M activation rows: its warps split K, and every lane loads 16 contiguous bytes
of a weight row straight into the registers that `mma.sync.m16n8k16` multiplies, the weight as its 8-column operand. One
load of a warp covers 8 / parts rows; a column of the instruction is one *part* of a row's K, and only products of equal
parts are kept (README.md says why). Partial sums meet in shared memory in a fixed order; no atomics.

Words: in a *step* every warp of the block takes `32 * parts` elements of K, next to those of its neighbours; a *round*
is the `unroll` steps that a warp holds in registers; a *group* is the 8 / parts activation rows of one load. The
registers are a ring: a step is multiplied and at once refilled with the same step of the next round.

Functions without a decorator run while the kernel is traced (their loops unroll); decorated ones hold run-time
branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp
from cutlass.cute.nvgpu.warp import MmaF16BF16Op
from cutlass.cute.runtime import make_fake_stream

from skinny_core.kernels.bf16_mma.config import LANE_ROWS, SPAN, WARP
from skinny_core.kernels.contract import VECTOR

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
BYTES = 2


@dataclass(frozen=True)
class _Stream:
    """One operand: how its rows are read and the registers they go to.

    frag: flat, [8, rows, depth], a ring of `depth` steps. at: per row, the byte address of this lane's piece of the
    first step of the round that is multiplied.
    """

    atom: cute.CopyAtom
    frag: cute.Tensor
    at: cute.Tensor
    rows: int
    depth: int


def _lane_and_warp():
    """From the thread's number alone: `warp_idx` also reads the other dimensions of the block, which has only one."""
    tid, _, _ = cute.arch.thread_idx()
    return tid % WARP, tid // WARP


def _row_and_part(config):
    """(row within a load, part of its K) that this lane reads."""
    lane, _ = _lane_and_warp()
    return lane // 4 // config.parts, lane // 4 % config.parts


def _element(pointer):
    """The one element at `pointer` as a tensor."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def _slot(stream, u, r):
    """The registers of row r of step u."""
    at = (u % stream.depth * stream.rows + r) * VECTOR
    return cute.make_tensor(stream.frag.iterator + at, cute.make_layout(VECTOR))


def _operand(tensor, offset, shape, stride):
    """An operand of a matrix instruction, (V, 1, 1), over the registers of `tensor` from element `offset` on."""
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout((shape, 1, 1), stride=(stride, 0, 0)))


def _request(stream, u, spec, base=0):
    """Load step u into its registers: 16 bytes of each row. base: the step that `stream.at` points to."""
    for r in range(stream.rows):
        pointer = cute.make_ptr(stream.frag.element_type, stream.at[r], cute.AddressSpace.gmem, assumed_align=16)
        piece = cute.make_tensor(pointer + (u - base) * spec.config.stride, cute.make_layout(VECTOR))
        cute.copy(stream.atom, piece, _slot(stream, u, r))


@cute.jit
def _request_checked(
    stream: cutlass.Constexpr, u: cutlass.Constexpr, base: cutlass.Constexpr, inside: Boolean, spec: cutlass.Constexpr
):
    """The same with a look at K in the last step: zeros where this lane's piece lies past it, in both operands, since
    what is there instead may be NaN. K % 8 == 0: a piece is inside or outside whole.
    """
    if cutlass.const_expr(spec.tail and u == spec.steps - 1):
        for r in cutlass.range_constexpr(stream.rows):
            _slot(stream, u, r).fill(0)
        if inside:
            _request(stream, u, spec, base)
    else:
        _request(stream, u, spec, base)


def _begin(stream, inside, spec):
    """Request the first steps."""
    for u in range(min(stream.depth, spec.steps)):
        _request_checked(stream, u, 0, inside, spec)


def _advance(stream, spec):
    """Move on by one round."""
    for r in range(stream.rows):
        stream.at[r] = stream.at[r] + spec.config.unroll * spec.config.stride * BYTES


def _multiply(mma, acc, w, x, u, zero, spec):
    """acc += x @ w of step u. acc: flat, [4, loads, tiles]; zero: see below.

    The order of K within a step is free as long as both operands agree, so the weight is taken as it was loaded: words
    0, 1 of a lane's piece in the first instruction, words 2, 3 in the second. Two groups of the activation make the 16
    rows of a tile; where there is no second one, rows 8 to 15 are zero, and so are their results.
    """
    dtype = x.frag.element_type
    for tile in range(spec.tiles):
        low = cute.recast_tensor(_slot(x, u, 2 * tile), Uint32)
        high = cute.recast_tensor(_slot(x, u, 2 * tile + 1), Uint32) if 2 * tile + 1 < x.rows else None
        for half in range(2):
            # Plain moves would be repeated for every load (ptxas copies the operands of each instruction anew). An
            # operation on a value that is zero, which the compiler does not know, is done once.
            quad = cute.make_rmem_tensor(4, Uint32)
            for v in range(2):
                quad[2 * v] = low[2 * half + v] ^ zero
                quad[2 * v + 1] = zero if high is None else high[2 * half + v] ^ zero
            a = _operand(cute.recast_tensor(quad, dtype), 0, (2, 2, 2), (1, 2, 4))
            for i in range(w.rows):
                b = _operand(_slot(w, u, i), 4 * half, (2, 2), (1, 2))
                c = _operand(acc, 4 * (tile * w.rows + i), (2, 2), (1, 2))
                cute.gemm(mma, c, a, b, c)


@cute.jit
def _walk(
    mma: cutlass.Constexpr,
    acc: cute.Tensor,
    w: cutlass.Constexpr,
    x: cutlass.Constexpr,
    inside: Boolean,
    zero: Uint32,
    spec: cutlass.Constexpr,
):
    """Multiply all of K. inside: whether this lane's piece of the last step lies before K."""
    unroll, ahead = spec.config.unroll, spec.config.ahead
    acc.fill(0.0)
    # The count must look unknown, and the loop must be there where it is 0: in straight code ptxas moves loads down to
    # their use, so that fewer are in flight.
    for _ in cutlass.range(spec.rounds + Int32(zero), unroll=1):
        for u in cutlass.range_constexpr(unroll):
            _multiply(mma, acc, w, x, u, zero, spec)
            _request(w, u + unroll, spec)
            _request(x, u + ahead, spec)
        _advance(w, spec)
        _advance(x, spec)
    base = spec.rounds * unroll
    for u in cutlass.range_constexpr(base, spec.steps):
        _multiply(mma, acc, w, x, u, zero, spec)
        if cutlass.const_expr(u + unroll < spec.steps):
            _request_checked(w, u + unroll, base, inside, spec)
        if cutlass.const_expr(u + ahead < spec.steps):
            _request_checked(x, u + ahead, base, inside, spec)


def _point(stream, base, rows, stride, first):
    """Point a stream at its rows' first pieces. base: address; stride: elements.

    Unsigned, since a signed row takes two instructions more: all this lies between a block's start and its first load.
    """
    for r, row in enumerate(rows):
        stream.at[r] = base + (Int64(Uint32(row)) * stride + first) * BYTES


def _weight_rows(block, n, spec):
    """This lane's weight rows; a row past N reads the last one again and is never stored.

    n: outputs. Of a gated product, the first half of a block's loads are gate rows, the others up rows, which lie n
    further on.
    """
    config = spec.config
    loads = config.loads // spec.output_rows
    first = block * spec.block_outputs + _row_and_part(config)[0]
    rows = [cutlass.min(first + i * config.load_rows, n - 1) for i in range(loads)]
    return [row + part * n for part in range(spec.output_rows) for row in rows]


def _activation_rows(m, spec):
    """This lane's activation rows; past M it is the last one again, whose results are never stored."""
    first = _row_and_part(spec.config)[0]
    return [cutlass.min(first + j * spec.config.load_rows, m - 1) for j in range(spec.groups)]


def _output(o, spec):
    """(activation row, output within the block) of output o of this thread; neighbours store neighbours."""
    tid, _, _ = cute.arch.thread_idx()
    index = tid + o * spec.config.threads
    return index // spec.block_outputs, index % spec.block_outputs


@cute.jit
def _read_added(
    added: cute.Tensor,
    residual: cute.Pointer,
    block: Int32,
    n: Int32,
    m: Int32,
    stride: Int64,
    spec: cutlass.Constexpr,
):
    """added[o] = what is added to output o; read while the weights are still on their way."""
    for o in cutlass.range_constexpr(spec.outputs):
        i, r = _output(o, spec)
        row = block * spec.block_outputs + r
        if i < m and row < n:
            added[o] = _element(residual + (Int64(i) * stride + row))[0]


def _own_part(acc, at, config):
    """Of two neighbouring results of a lane, the one whose weight part is the lane's own activation part; summed over
    the parts of the same output. Every lane of those gets the sum.

    Lane (g, t) holds rows g (part g % parts of its activation row) by columns 2t, 2t + 1 (part of the weight row).
    """
    lane, _ = _lane_and_warp()
    part, t = _row_and_part(config)[1], lane % 4
    value = cutlass.select_(part % 2 == 1, acc[at + 1], acc[at])
    if config.parts > 2:
        value = cutlass.select_(t % (config.parts // 2) == part // 2, value, Float32(0.0))
    offset = 4
    while offset < 4 * config.parts:
        value, offset = value + cute.arch.shuffle_sync_bfly(value, offset=offset), 2 * offset
    offset = 1
    while offset < config.parts // 2:
        value, offset = value + cute.arch.shuffle_sync_bfly(value, offset=offset), 2 * offset
    return value


@cute.jit
def _share(acc: cute.Tensor, sums: cute.Tensor, spec: cutlass.Constexpr):
    """Write this warp's sums. sums: shared, [rows, M in groups, warps]."""
    config = spec.config
    lane, warp = _lane_and_warp()
    row, part = _row_and_part(config)
    t = lane % 4
    for j in cutlass.range_constexpr(spec.groups):
        for i in cutlass.range_constexpr(config.loads):
            at = 4 * (j // 2 * config.loads + i) + 2 * (j % 2)
            if cutlass.const_expr(config.parts == 1):
                for v in cutlass.range_constexpr(2):
                    sums[LANE_ROWS * i + 2 * t + v, LANE_ROWS * j + row, warp] = acc[at + v]
            else:
                value = _own_part(acc, at, config)
                if part == 0 and t % (config.parts // 2) == 0:
                    column = config.load_rows * i + t // (config.parts // 2)
                    sums[column, config.load_rows * j + row, warp] = value


def _total(sums, row, column, warps):
    """The warps' sums of one product, added in their order."""
    total = sums[row, column, 0]
    for j in range(1, warps):
        total = total + sums[row, column, j]
    return total


@cute.jit
def _store(
    added: cute.Tensor,
    sums: cute.Tensor,
    y: cute.Pointer,
    block: Int32,
    n: Int32,
    m: Int32,
    stride: Int64,
    spec: cutlass.Constexpr,
):
    """Sum over the warps, apply the epilogue, store rounded once."""
    warps = spec.config.warps
    for o in cutlass.range_constexpr(spec.outputs):
        i, r = _output(o, spec)
        row = block * spec.block_outputs + r
        if i < m and row < n:
            out = _total(sums, r, i, warps)
            if cutlass.const_expr(spec.epilogue == "silu_mul"):
                out = out / (1.0 + cute.math.exp(-out, fastmath=True)) * _total(sums, spec.block_outputs + r, i, warps)
            if cutlass.const_expr(spec.epilogue == "add"):
                out = out + added[o].to(Float32)
            _element(y + (Int64(i) * stride + row))[0] = out.to(DTYPES[spec.output])


@cute.kernel
def bf16_mma_kernel(
    x_at: Int64,
    w_at: Int64,
    y: cute.Pointer,
    residual: cute.Pointer,
    m: Int32,
    n: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    spec: cutlass.Constexpr,
):
    config, dtype = spec.config, DTYPES[spec.dtype]
    block, _, _ = cute.arch.block_idx()
    lane, warp = _lane_and_warp()
    first = warp * config.span + _row_and_part(config)[1] * SPAN + lane % 4 * VECTOR

    # The weight is read once: keep it out of L1, where the activation should stay. Neither load may use the
    # non-coherent path: under PDL a predecessor can still be writing both when this block starts.
    w_atom = cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=128, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE
    )
    x_atom = cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=128, l1c_evict_priority=CacheEvictionPriority.EVICT_LAST
    )
    mma = cute.make_mma_atom(MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    sums = cute.make_tensor(
        cute.arch.alloc_smem(Float32, spec.shared_bytes // 4, alignment=16),
        cute.make_layout((config.rows, spec.columns, config.warps), stride=(1, spec.pitch, spec.pitch * spec.columns)),
    )
    w_frag = cute.make_rmem_tensor(VECTOR * config.loads * config.unroll, dtype)
    x_frag = cute.make_rmem_tensor(VECTOR * spec.groups * config.ahead, dtype)
    w = _Stream(w_atom, w_frag, cute.make_rmem_tensor(config.loads, Int64), config.loads, config.unroll)
    x = _Stream(x_atom, x_frag, cute.make_rmem_tensor(spec.groups, Int64), spec.groups, config.ahead)
    acc = cute.make_rmem_tensor(4 * config.loads * spec.tiles, Float32)
    added = cute.make_rmem_tensor(spec.outputs, dtype)
    zero = Uint32(m) >> 8
    inside = first + (spec.steps - 1) * config.stride < spec.k

    _point(w, w_at, _weight_rows(block, n, spec), w_stride, first)
    _point(x, x_at, _activation_rows(m, spec), x_stride, first)
    if cutlass.const_expr(spec.prewait):
        _begin(w, inside, spec)
        cute.arch.griddepcontrol_wait()
    else:
        if cutlass.const_expr(spec.pdl):
            cute.arch.griddepcontrol_wait()
        _begin(w, inside, spec)
    _begin(x, inside, spec)
    if cutlass.const_expr(spec.epilogue == "add"):
        _read_added(added, residual, block, n, m, residual_stride, spec)
    _walk(mma, acc, w, x, inside, zero, spec)
    _share(acc, sums, spec)
    cute.arch.sync_threads()
    _store(added, sums, y, block, n, m, y_stride, spec)


@cute.jit
def bf16_mma(
    x: Int64,
    w: Int64,
    y: Int64,
    residual: Int64,
    m: Int32,
    n: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    stream: CUstream,
    spec: cutlass.Constexpr,
):
    """Launch on `stream`. Pointers are addresses, strides are in elements between rows; n counts outputs."""
    bf16_mma_kernel(
        x,
        w,
        cute.make_ptr(DTYPES[spec.output], y, cute.AddressSpace.gmem),
        cute.make_ptr(DTYPES[spec.dtype], residual, cute.AddressSpace.gmem),
        m,
        n,
        x_stride,
        w_stride,
        y_stride,
        residual_stride,
        spec,
    ).launch(
        grid=(cute.ceil_div(n, spec.block_outputs), 1, 1),
        block=(spec.config.threads, 1, 1),
        # The threads of all blocks that one SM is to hold: limits the registers to what allows it.
        # (`min_blocks_per_mp` would ask the driver, and compiling needs none.)
        max_number_threads=(spec.config.threads * spec.config.blocks, 1, 1),
        stream=stream,
        use_pdl=spec.pdl,
    )


def example():
    """Arguments of `bf16_mma` in front of the spec, for a compilation."""
    addresses, sizes, strides = [Int64(0)] * 4, [Int32(1)] * 2, [Int64(0)] * 4
    return (*addresses, *sizes, *strides, make_fake_stream())
