"""The CuTe DSL code of `bf16_simt`; imported only when a kernel is compiled.

One block computes `rows` outputs for all M activation rows: its threads split K into 16-byte pieces, so each weight row
is read once, as a contiguous stream of `threads * 16` bytes per step. Partial sums meet in a butterfly over the warp,
then in shared memory in a fixed order; no atomics.

Functions without a decorator run while the kernel is traced (their loops unroll); decorated ones hold run-time
branches.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, L2PrefetchSize
from cutlass.cute.runtime import make_fake_stream

VECTOR = 8  # elements of 2 bytes in one 16-byte load
WARP = 32
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
_L2 = {0: L2PrefetchSize.NONE, 128: L2PrefetchSize.SIZE_128B, 256: L2PrefetchSize.SIZE_256B}


def _piece(pointer):
    """The 8 elements at `pointer` as a tensor."""
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


def _element(pointer):
    """The one element at `pointer` as a tensor."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def _widen(piece):
    """The 8 elements of a register piece as FP32 values, exactly.

    BF16 is the upper half of an FP32, so one shift or one mask per element does it; the generic conversion takes half
    as many instructions again (seen in the SASS of sm_90a).
    """
    if piece.element_type is not cutlass.BFloat16:
        values = piece.load().to(Float32)
        return [values[v] for v in range(VECTOR)]
    words = cute.recast_tensor(piece, Uint32)
    wide = cute.make_rmem_tensor(VECTOR, Uint32)
    for j in range(VECTOR // 2):
        wide[2 * j] = words[j] << 16
        wide[2 * j + 1] = words[j] & Uint32(0xFFFF0000)
    values = cute.recast_tensor(wide, Float32)
    return [values[v] for v in range(VECTOR)]


def _accumulate(acc, w, x, m, rows, chunks):
    """acc[i, r] += sum over the fragment of w[:, c, r] * x[:, c, i], in a fixed order. w: [8, chunks, rows]; x: [8,
    chunks, m].
    """
    for c in range(chunks):
        xs = [_widen(x[None, c, i]) for i in range(m)]
        for r in range(rows):
            ws = _widen(w[None, c, r])
            for i in range(m):
                total = acc[i, r]
                for v in range(VECTOR):
                    total = total + ws[v] * xs[i][v]
                acc[i, r] = total


def _fold(values, lane):
    """Sum each of `values` over the 32 lanes. Returns (total, width): lane `j * width` holds the sum of value j.

    Each exchange halves the values that a lane still owns, so 16 values take 16 shuffles instead of 80. Needs a power
    of two.
    """
    offset, width = WARP // 2, WARP
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = []
        for a, b in zip(values[:half], values[half:], strict=True):
            mine, theirs = cutlass.select_(upper, b, a), cutlass.select_(upper, a, b)
            kept.append(mine + cute.arch.shuffle_sync_bfly(theirs, offset=offset))
        values, width, offset = kept, offset, offset // 2
    total = values[0]
    while offset > 0:
        total, offset = total + cute.arch.shuffle_sync_bfly(total, offset=offset), offset // 2
    return total, width


@cute.jit
def _load(
    atom: cute.CopyAtom,
    frag: cute.Tensor,
    base: cute.Pointer,
    offsets: cute.Tensor,
    first: Int32,
    left: Int32,
    step: cutlass.Constexpr,
    chunks: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    full: cutlass.Constexpr,
):
    """frag[:, c, r] = 8 elements of row r at element `first + c * step`.

    `full`: how many of the chunks lie inside K for every thread; a later one is read only where this thread's piece
    lies before `left` (elements from the row's start to K), else zero. K % 8 == 0, so a piece is inside or outside as
    a whole.
    """
    for c in cutlass.range_constexpr(chunks):
        at = first + c * step
        for r in cutlass.range_constexpr(rows):
            if cutlass.const_expr(c < full):
                cute.copy(atom, _piece(base + cute.assume(offsets[r] + Int64(at), divby=VECTOR)), frag[None, c, r])
            else:
                frag[None, c, r].fill(0)
                if at < left:
                    cute.copy(atom, _piece(base + cute.assume(offsets[r] + Int64(at), divby=VECTOR)), frag[None, c, r])


@cute.jit
def _row_offsets(offsets: cute.Tensor, group: Int32, n: Int32, stride: Int64, rows: cutlass.Constexpr):
    """Element offsets of a group's weight rows; a row past N reads the last one again and is never stored."""
    for r in cutlass.range_constexpr(rows):
        row = group * rows + r
        if row >= n:
            row = n - 1
        offsets[r] = Int64(row) * stride


@cute.jit
def _reduce(
    acc: cute.Tensor,
    sums: cute.Tensor,
    y: cute.Pointer,
    residual: cute.Pointer,
    group: Int32,
    n: Int32,
    y_stride: Int64,
    residual_stride: Int64,
    turn: Int32,
    spec: cutlass.Constexpr,
):
    """Sum acc[m, rows] over the block and store it, rounded once. sums: shared, [m * rows, warps, 2].

    One barrier is enough with two buffers: to reach buffer `turn` again, a warp has to pass the other buffer's barrier.
    """
    m, rows, warps = spec.m, spec.config.rows, spec.config.threads // WARP
    count = m * rows
    tid, _, _ = cute.arch.thread_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    values = [acc[i, r] for i in range(m) for r in range(rows)]
    if cutlass.const_expr(count & (count - 1) == 0):
        total, width = _fold(values, lane)
        if lane % width == 0:
            sums[lane // width, warp, turn] = total
    else:
        for i in cutlass.range_constexpr(count):
            total = cute.arch.warp_reduction_sum(values[i])
            if lane == 0:
                sums[i, warp, turn] = total
    cute.arch.sync_threads()
    if tid < count:
        row = group * rows + tid % rows
        if row < n:
            out = sums[tid, 0, turn]
            for j in cutlass.range_constexpr(1, warps):
                out = out + sums[tid, j, turn]
            i = Int64(tid // rows)
            if cutlass.const_expr(spec.residual):
                out = out + _element(residual + (i * residual_stride + row))[0].to(Float32)
            _element(y + (i * y_stride + row))[0] = out.to(DTYPES[spec.output])


@cute.kernel
def bf16_simt_kernel(
    x: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    residual: cute.Pointer,
    n: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    groups: Int32,
    grid: Int32,
    spec: cutlass.Constexpr,
):
    m, k, rows, threads, chunks = spec.m, spec.k, spec.config.rows, spec.config.threads, spec.chunks
    warps, step = threads // WARP, threads * VECTOR
    tid, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = tid * VECTOR

    dtype = DTYPES[spec.dtype]
    # The weight is read once: keep it out of L1, where the activation should stay. Neither load may use the
    # non-coherent path: under PDL a predecessor can still be writing both when this block starts.
    w_atom = cute.make_copy_atom(
        CopyG2ROp(),
        dtype,
        num_bits_per_copy=128,
        l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE,
        l2_prefetch_size=_L2[spec.config.l2],
    )
    x_atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=128)
    sums = cute.make_tensor(
        cute.arch.alloc_smem(Float32, 2 * warps * m * rows, alignment=16), cute.make_layout((m * rows, warps, 2))
    )
    w_offsets = cute.make_rmem_tensor(rows, Int64)
    x_offsets = cute.make_rmem_tensor(m, Int64)
    for i in cutlass.range_constexpr(m):
        x_offsets[i] = Int64(i) * x_stride
    w_frag = cute.make_rmem_tensor((VECTOR, chunks, rows), dtype)
    x_frag = cute.make_rmem_tensor((VECTOR, chunks, m), dtype)
    acc = cute.make_rmem_tensor((m, rows), Float32)

    _row_offsets(w_offsets, group, n, w_stride, rows)
    if cutlass.const_expr(spec.prewait):
        _load(w_atom, w_frag, w, w_offsets, first, Int32(k), step, chunks, rows, spec.full_chunks)
        cute.arch.griddepcontrol_wait()
    else:
        if cutlass.const_expr(spec.pdl):
            cute.arch.griddepcontrol_wait()
        _load(w_atom, w_frag, w, w_offsets, first, Int32(k), step, chunks, rows, spec.full_chunks)
    _load(x_atom, x_frag, x, x_offsets, first, Int32(k), step, chunks, m, spec.full_chunks)

    if cutlass.const_expr(spec.config.blocks_per_sm > 0):
        turn = Int32(0)
        while group < groups:
            acc.fill(0.0)
            _accumulate(acc, w_frag, x_frag, m, rows, chunks)
            # The fragment is free: the next group's loads are in flight while this group is reduced.
            following = group + grid
            if following < groups:
                _row_offsets(w_offsets, following, n, w_stride, rows)
                _load(w_atom, w_frag, w, w_offsets, first, Int32(k), step, chunks, rows, spec.full_chunks)
            _reduce(acc, sums, y, residual, group, n, y_stride, residual_stride, turn, spec)
            turn = 1 - turn
            group = following
    else:
        acc.fill(0.0)
        if cutlass.const_expr(spec.resident):
            _accumulate(acc, w_frag, x_frag, m, rows, chunks)
        else:
            for s in cutlass.range(spec.full_stages, unroll=1):
                _accumulate(acc, w_frag, x_frag, m, rows, chunks)
                if s + 1 < spec.full_stages:
                    at = first + (s + 1) * (chunks * step)
                    _load(w_atom, w_frag, w, w_offsets, at, Int32(k), step, chunks, rows, chunks)
                    _load(x_atom, x_frag, x, x_offsets, at, Int32(k), step, chunks, m, chunks)
            if cutlass.const_expr(spec.tail_chunks > 0):
                at = first + spec.full_stages * (chunks * step)
                tail, full = spec.tail_chunks, spec.tail_full
                w_tail = cute.make_rmem_tensor((VECTOR, tail, rows), dtype)
                x_tail = cute.make_rmem_tensor((VECTOR, tail, m), dtype)
                _load(w_atom, w_tail, w, w_offsets, at, Int32(k), step, tail, rows, full)
                _load(x_atom, x_tail, x, x_offsets, at, Int32(k), step, tail, m, full)
                _accumulate(acc, w_tail, x_tail, m, rows, tail)
        _reduce(acc, sums, y, residual, group, n, y_stride, residual_stride, Int32(0), spec)


@cute.jit
def bf16_simt(
    x: Int64,
    w: Int64,
    y: Int64,
    residual: Int64,
    n: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    grid_cap: Int32,
    stream: CUstream,
    spec: cutlass.Constexpr,
):
    """Launch on `stream`. Pointers are addresses, strides are in elements between rows; `grid_cap` limits the grid."""
    dtype, output = DTYPES[spec.dtype], DTYPES[spec.output]
    groups = cute.ceil_div(n, spec.config.rows)
    grid = cutlass.min(groups, grid_cap) if cutlass.const_expr(spec.config.blocks_per_sm > 0) else groups
    gmem = cute.AddressSpace.gmem
    bf16_simt_kernel(
        cute.make_ptr(dtype, x, gmem, assumed_align=16),
        cute.make_ptr(dtype, w, gmem, assumed_align=16),
        cute.make_ptr(output, y, gmem),
        cute.make_ptr(dtype, residual, gmem),
        n,
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
        stream=stream,
        use_pdl=spec.pdl,
    )


def example():
    """Arguments of `bf16_simt` in front of the spec, for a compilation."""
    addresses, sizes, strides = [Int64(0)] * 4, [Int32(1)], [Int64(0)] * 4
    return (*addresses, *sizes, *strides, Int32(1), make_fake_stream())
