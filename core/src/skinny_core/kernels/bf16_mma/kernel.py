"""The CuTe DSL code of `bf16_mma`; imported only when a kernel is compiled.

A block computes 8 * tiles outputs for all M activation rows: its warps split K, and every lane loads 16 contiguous
bytes of a weight row straight into the registers that `mma.sync.m16n8k16` multiplies (the weight as its 8-column
operand, README.md says why). Partial sums meet in shared memory in a fixed order; no atomics.

Words: a *step* is 32 elements of K (two matrix instructions); a *round* is the `unroll` steps that each warp of the
block holds in registers. The registers are a ring: a step is multiplied and at once refilled with the same step of the
next round, so no second buffer is needed to keep a round in flight.

Functions without a decorator run while the kernel is traced (their loops unroll); decorated ones hold run-time
branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, L2PrefetchSize
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

from skinny_core.kernels.bf16_mma.config import LANE_ROWS, STEP, VECTOR, WARP

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
_L2 = {0: L2PrefetchSize.NONE, 128: L2PrefetchSize.SIZE_128B, 256: L2PrefetchSize.SIZE_256B}
BYTES = 2


@dataclass(frozen=True)
class _Stream:
    """One operand: how its rows are read and the registers they go to.

    frag: flat, [8, rows, unroll]. at: per row, the byte address of this lane's first piece of the round in `frag`.
    """

    atom: cute.CopyAtom
    frag: cute.Tensor
    at: cute.Tensor
    rows: int


def _lane_and_warp():
    """From the thread's number alone: `warp_idx` also reads the other dimensions of the block, which has only one."""
    tid, _, _ = cute.arch.thread_idx()
    return tid % WARP, tid // WARP


def _element(pointer):
    """The one element at `pointer` as a tensor."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def _slot(stream, u, r, config):
    """The registers of row r of step u."""
    at = (u % config.unroll * stream.rows + r) * VECTOR
    return cute.make_tensor(stream.frag.iterator + at, cute.make_layout(VECTOR))


def _operand(tensor, offset, shape, stride):
    """An operand of a matrix instruction, (V, 1, 1), over the registers of `tensor` from element `offset` on."""
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout((shape, 1, 1), stride=(stride, 0, 0)))


def _request(stream, u, config):
    """Load step u into its registers: 16 bytes of each row."""
    for r in range(stream.rows):
        pointer = cute.make_ptr(stream.frag.element_type, stream.at[r], cute.AddressSpace.gmem, assumed_align=16)
        piece = cute.make_tensor(pointer + config.distance(u), cute.make_layout(VECTOR))
        cute.copy(stream.atom, piece, _slot(stream, u, r, config))


@cute.jit
def _request_inside(stream: cutlass.Constexpr, u: cutlass.Constexpr, left: Int32, config: cutlass.Constexpr):
    """The same where this lane's piece lies before `left` (elements of K from its first piece of this round on), else
    zeros: for both operands, since what lies behind a row may be NaN. K % 8 == 0: a piece is inside or outside whole.
    """
    for r in cutlass.range_constexpr(stream.rows):
        _slot(stream, u, r, config).fill(0)
    if left > config.distance(u):
        _request(stream, u, config)


@cute.jit
def _begin(stream: cutlass.Constexpr, left: Int32, k: Int32, config: cutlass.Constexpr):
    """Request the first round; checked only where K is shorter than that."""
    if k >= config.round:
        for u in cutlass.range_constexpr(config.unroll):
            _request(stream, u, config)
    else:
        for u in cutlass.range_constexpr(config.unroll):
            _request_inside(stream, u, left, config)


def _advance(stream, config):
    """Move on by one round."""
    for r in range(stream.rows):
        stream.at[r] = stream.at[r] + config.round * BYTES


def _multiply(mma, acc, w, x, u, zero, spec):
    """acc += x @ w of step u. acc: flat, [4, tiles]; zero: see below.

    The order of K within a step is free as long as both operands agree, so the weight is taken as it was loaded: words
    0, 1 of a lane's piece in the first instruction, words 2, 3 in the second. The activation's four registers have to
    be brought together; for M <= 8 rows 8 to 15 of the instruction are zero, and so are their results.
    """
    words = cute.recast_tensor(x.frag, Uint32)
    at = u * x.rows * 4
    for half in range(2):
        # Plain moves would be repeated for every tile (ptxas copies the operands of each instruction anew: 167
        # instead of 103 instructions in the loop of 4 steps, 4 tiles, M > 8). An operation on a value that is zero,
        # which the compiler does not know, is done once.
        quad = cute.make_rmem_tensor(4, Uint32)
        for v in range(2):
            low = at + 2 * half + v
            quad[2 * v] = words[low] ^ zero
            quad[2 * v + 1] = words[low + 4] ^ zero if spec.m_tiles == 2 else zero
        a = _operand(cute.recast_tensor(quad, x.frag.element_type), 0, (2, 2, 2), (1, 2, 4))
        for tile in range(w.rows):
            b = _operand(w.frag, (u * w.rows + tile) * VECTOR + 4 * half, (2, 2), (1, 2))
            c = _operand(acc, 4 * tile, (2, 2), (1, 2))
            cute.gemm(mma, c, a, b, c)


@cute.jit
def _walk(
    mma: cutlass.Constexpr,
    acc: cute.Tensor,
    w: cutlass.Constexpr,
    x: cutlass.Constexpr,
    first: Int32,
    full: Int32,
    k: Int32,
    zero: Uint32,
    spec: cutlass.Constexpr,
):
    """Multiply all rounds but the last, which is left in the registers. full: rounds inside K for every lane.

    The streams point nowhere in particular afterwards.
    """
    config = spec.config
    acc.fill(0.0)
    for _ in cutlass.range(full - 1, unroll=1):
        for u in cutlass.range_constexpr(config.unroll):
            _multiply(mma, acc, w, x, u, zero, spec)
            _request(w, u + config.unroll, config)
            _request(x, u + config.unroll, config)
        _advance(w, config)
        _advance(x, config)
    if full > 0 and full * config.round < k:
        left = k - (full - 1) * config.round - first
        for u in cutlass.range_constexpr(config.unroll):
            _multiply(mma, acc, w, x, u, zero, spec)
            _request_inside(w, u + config.unroll, left, config)
            _request_inside(x, u + config.unroll, left, config)


@cute.jit
def _finish(
    mma: cutlass.Constexpr,
    acc: cute.Tensor,
    w: cutlass.Constexpr,
    x: cutlass.Constexpr,
    zero: Uint32,
    more: Boolean,
    spec: cutlass.Constexpr,
):
    """Multiply the last round. more: refill with the first round of the next group, to which `w` and `x` already point;
    it is on its way while this group is reduced.
    """
    for u in cutlass.range_constexpr(spec.config.unroll):
        _multiply(mma, acc, w, x, u, zero, spec)
        if cutlass.const_expr(spec.config.blocks_per_sm > 0):
            if more:
                _request(w, u, spec.config)
                _request(x, u, spec.config)


def _point(stream, base, rows, stride, first):
    """Point a stream at its rows' first pieces. base: address; stride: elements.

    Unsigned, since a signed row takes two instructions more: all this lies between a block's start and its first load.
    """
    for r, row in enumerate(rows):
        stream.at[r] = base + (Int64(Uint32(row)) * stride + first) * BYTES


def _weight_rows(group, n, config):
    """This lane's weight rows; a row past N reads the last one again and is never stored."""
    first = group * config.rows + _lane_and_warp()[0] // 4
    return [cutlass.min(first + tile * LANE_ROWS, n - 1) for tile in range(config.tiles)]


def _activation_rows(m, m_tiles):
    """This lane's activation rows; past M it is the last one again, whose results are never stored."""
    return [cutlass.min(_lane_and_warp()[0] // 4 + j * LANE_ROWS, m - 1) for j in range(m_tiles)]


def _output(o, config):
    """(activation row, weight row within the group) of output o of this thread; neighbours store neighbours."""
    tid, _, _ = cute.arch.thread_idx()
    index = tid + o * config.threads
    return index // config.rows, index % config.rows


@cute.jit
def _read_residual(
    added: cute.Tensor,
    residual: cute.Pointer,
    group: Int32,
    n: Int32,
    m: Int32,
    stride: Int64,
    spec: cutlass.Constexpr,
):
    """added[o] = the residual of output o; read while the last weights are still on their way."""
    for o in cutlass.range_constexpr(spec.outputs):
        i, r = _output(o, spec.config)
        row = group * spec.config.rows + r
        if i < m and row < n:
            added[o] = _element(residual + (Int64(i) * stride + row))[0]


@cute.jit
def _reduce(
    acc: cute.Tensor,
    added: cute.Tensor,
    sums: cute.Tensor,
    y: cute.Pointer,
    group: Int32,
    n: Int32,
    m: Int32,
    stride: Int64,
    turn: Int32,
    spec: cutlass.Constexpr,
):
    """Sum acc over the warps, add the residual, store rounded once. sums: shared, [2, rows / 2, 8 * m_tiles, warps,
    turns].

    One barrier is enough with two buffers: to reach buffer `turn` again, a warp has to pass the other buffer's barrier.
    """
    config = spec.config
    lane, warp = _lane_and_warp()
    for tile in cutlass.range_constexpr(config.tiles):
        for j in cutlass.range_constexpr(spec.m_tiles):
            pair = cute.make_tensor(acc.iterator + (4 * tile + 2 * j), cute.make_layout(2))
            cute.autovec_copy(pair, sums[None, 4 * tile + lane % 4, LANE_ROWS * j + lane // 4, warp, turn])
    cute.arch.sync_threads()
    for o in cutlass.range_constexpr(spec.outputs):
        i, r = _output(o, config)
        row = group * config.rows + r
        if i < m and row < n:
            out = sums[r % 2, r // 2, i, 0, turn]
            for j in cutlass.range_constexpr(1, config.warps):
                out = out + sums[r % 2, r // 2, i, j, turn]
            if cutlass.const_expr(spec.residual):
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
    k: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    groups: Int32,
    grid: Int32,
    spec: cutlass.Constexpr,
):
    config, m_tiles, dtype = spec.config, spec.m_tiles, DTYPES[spec.dtype]
    group, _, _ = cute.arch.block_idx()
    lane, warp = _lane_and_warp()
    first = warp * (config.run * STEP) + lane % 4 * VECTOR

    # The weight is read once: keep it out of L1, where the activation should stay. Neither load may use the
    # non-coherent path: under PDL a predecessor can still be writing both when this block starts.
    w_atom = cute.make_copy_atom(
        CopyG2ROp(),
        dtype,
        num_bits_per_copy=128,
        l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE,
        l2_prefetch_size=_L2[config.l2],
    )
    x_atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=128)
    mma = cute.make_mma_atom(MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    columns = LANE_ROWS * m_tiles
    sums = cute.make_tensor(
        cute.arch.alloc_smem(Float32, spec.shared_bytes // 4, alignment=16),
        cute.make_layout(
            (2, config.rows // 2, columns, config.warps, config.turns),
            stride=(1, 2, spec.pitch, spec.pitch * columns, spec.pitch * columns * config.warps),
        ),
    )
    w_frag = cute.make_rmem_tensor(VECTOR * config.tiles * config.unroll, dtype)
    x_frag = cute.make_rmem_tensor(VECTOR * m_tiles * config.unroll, dtype)
    w = _Stream(w_atom, w_frag, cute.make_rmem_tensor(config.tiles, Int64), config.tiles)
    x = _Stream(x_atom, x_frag, cute.make_rmem_tensor(m_tiles, Int64), m_tiles)
    acc = cute.make_rmem_tensor(4 * config.tiles, Float32)
    added = cute.make_rmem_tensor(spec.outputs, dtype)
    full = k // config.round
    zero = Uint32(k % VECTOR)

    _point(w, w_at, _weight_rows(group, n, config), w_stride, first)
    _point(x, x_at, _activation_rows(m, m_tiles), x_stride, first)
    if cutlass.const_expr(spec.prewait):
        _begin(w, k - first, k, config)
        cute.arch.griddepcontrol_wait()
    else:
        if cutlass.const_expr(spec.pdl):
            cute.arch.griddepcontrol_wait()
        _begin(w, k - first, k, config)
    _begin(x, k - first, k, config)

    if cutlass.const_expr(config.blocks_per_sm > 0):
        turn = Int32(0)
        while group < groups:
            _walk(mma, acc, w, x, first, full, k, zero, spec)
            if cutlass.const_expr(spec.residual):
                _read_residual(added, residual, group, n, m, residual_stride, spec)
            following = group + grid
            _point(w, w_at, _weight_rows(following, n, config), w_stride, first)
            _point(x, x_at, _activation_rows(m, m_tiles), x_stride, first)
            _finish(mma, acc, w, x, zero, following < groups, spec)
            _reduce(acc, added, sums, y, group, n, m, y_stride, turn, spec)
            turn = 1 - turn
            group = following
    else:
        _walk(mma, acc, w, x, first, full, k, zero, spec)
        if cutlass.const_expr(spec.residual):
            _read_residual(added, residual, group, n, m, residual_stride, spec)
        _finish(mma, acc, w, x, zero, False, spec)
        _reduce(acc, added, sums, y, group, n, m, y_stride, Int32(0), spec)


@cute.jit
def bf16_mma(
    x: Int64,
    w: Int64,
    y: Int64,
    residual: Int64,
    m: Int32,
    n: Int32,
    k: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    grid_cap: Int32,
    stream: CUstream,
    spec: cutlass.Constexpr,
):
    """Launch on `stream`. Pointers are addresses, strides are in elements between rows; `grid_cap` limits the grid."""
    groups = cute.ceil_div(n, spec.config.rows)
    grid = cutlass.min(groups, grid_cap) if cutlass.const_expr(spec.config.blocks_per_sm > 0) else groups
    bf16_mma_kernel(
        x,
        w,
        cute.make_ptr(DTYPES[spec.output], y, cute.AddressSpace.gmem),
        cute.make_ptr(DTYPES[spec.dtype], residual, cute.AddressSpace.gmem),
        m,
        n,
        k,
        x_stride,
        w_stride,
        y_stride,
        residual_stride,
        groups,
        grid,
        spec,
    ).launch(
        grid=(grid, 1, 1),
        block=(spec.config.threads, 1, 1),
        # Larger than the block: limits the registers to what lets `resident` blocks live on one SM.
        max_number_threads=(spec.resident_threads, 1, 1),
        stream=stream,
        use_pdl=spec.pdl,
    )
