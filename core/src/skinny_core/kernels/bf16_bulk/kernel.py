"""The CuTe DSL code of `bf16_bulk`; imported only when a kernel is compiled.

A persistent grid: every block owns a contiguous run of weight rows, or every grid-th group of them, so that the bytes
per SM hardly differ. One warp keeps a ring of shared-memory stages full with bulk copies of long row segments; it never
waits for anything but a free stage, so reductions and stores cost no bandwidth. The other warps split each stage's K
among them and feed tensor cores, the weight as the 16-row operand.

K is permuted within each run of 32 elements: lane (g, t) of a warp reads the 16 contiguous bytes of row g at 8 t.
Weight and activation are read alike, so the sum is over the same products. The order of the sum depends on the config
and K only: it is the same for every M, every row of the weight and every grid.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import CopyG2ROp, CopyUniversalOp

from skinny_core.kernels.bf16_bulk.config import BARRIER_BYTES, MAX_STAGES, PAD, STEP, VECTOR
from skinny_core.kernels.bf16_bulk.multiply import DTYPES, WARP, multiply, piece, reduce, zero_outside


@cute.jit
def _bulk_copy(
    target: cute.Pointer,
    source: cute.Pointer,
    size: Int32,
    barrier: cute.Pointer,
    policy: Int64,
    spec: cutlass.Constexpr,
):
    """`size` bytes (a multiple of 16) from global to shared memory; their arrival counts on the barrier."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if cutlass.const_expr(spec.config.evict_first):
        cute.arch.inline_ptx(
            copy + ".L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[target, source, size, barrier, policy],
        )
    else:
        cute.arch.inline_ptx(
            copy + " [{$r0}], [{$r1}], {$r2}, [{$r3}];", read_only_args=[target, source, size, barrier]
        )


@cute.jit
def _produce(
    w: cute.Pointer,
    ring: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    first: Int32,
    last: Int32,
    n: Int32,
    k: Int32,
    w_stride: Int64,
    group: Int32,
    stages: Int32,
    step: Int32,
    spec: cutlass.Constexpr,
):
    """One warp: for each group of outputs, for each block of columns, one stage. A bulk copy moves one row's segment.

    A stage holds the `group` rows of its outputs, and for a gated product then those that lie `n` further on.
    """
    cols, stage = spec.config.cols, spec.parts * group * (spec.config.cols + PAD)
    policy = Int64(0)
    if cutlass.const_expr(spec.config.evict_first):
        policy = cute.arch.inline_ptx(
            "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64]
        )
    slot, parity, issued = Int32(0), Int32(1), Int32(0)
    row = first
    while row < last:
        rows = cutlass.min(group, last - row)
        col = Int32(0)
        while col < k:
            width = cutlass.min(Int32(cols), k - col)
            if issued == stages:
                cute.arch.sync_threads()  # the ring is full for the first time: the others may look at the barriers
            if issued >= stages:
                cute.arch.mbarrier_wait(empty + slot, parity)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, spec.parts * rows * width * 2)
                target = slot * stage
                for part in cutlass.range_constexpr(spec.parts):
                    source = Int64(row + part * n) * w_stride + Int64(col)
                    r = Int32(0)
                    while r < rows:
                        _bulk_copy(
                            ring + cute.assume(target, divby=VECTOR),
                            w + cute.assume(source, divby=VECTOR),
                            width * 2,
                            full + slot,
                            policy,
                            spec,
                        )
                        target += cols + PAD
                        source += w_stride
                        r += 1
            issued += 1
            slot += 1
            if slot == stages:
                slot = Int32(0)
                parity = parity ^ 1
            col += cols
        row += step
    if cutlass.const_expr(spec.pdl and spec.config.trigger):
        # What may start now waits for all of this grid before it reads our output. It may not start beside the kernel
        # before this one, of which it knows nothing.
        if cutlass.const_expr(spec.prewait):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    if issued <= stages:
        cute.arch.sync_threads()


@cute.jit
def _load_x(
    atom: cute.CopyAtom,
    frag: cute.Tensor,
    x: cute.Pointer,
    offsets: cute.Tensor,
    col: Int32,
    k: Int32,
    spec: cutlass.Constexpr,
):
    """frag[:, s, i] = this lane's pieces of the activation for a block of columns, straight from global memory.

    A piece past K reads the last one instead; the caller drops it.
    """
    for s in cutlass.range_constexpr(spec.steps):
        at = cutlass.min(col + s * (spec.config.warps * STEP), k - VECTOR)
        for i in cutlass.range_constexpr(spec.m_tiles):
            cute.copy(atom, piece(x, offsets[i] + Int64(at)), frag[None, s, i])


@cute.jit
def _keep_x(x: cute.Pointer, shared: cute.Pointer, m: Int32, k: Int32, x_stride: Int64, spec: cutlass.Constexpr):
    """Copy the activation [m, k] to shared memory, rows `spec.x_row(k)` apart; every consumer thread takes part.

    8 loads of a thread leave together, so that 4 rows of a K up to 2 * 8 elements per thread cost one latency.
    """
    rows, columns, turn = 4, 2, spec.config.warps * WARP * VECTOR
    tid, _, _ = cute.arch.thread_idx()
    source = cute.make_copy_atom(CopyG2ROp(), DTYPES[spec.dtype], num_bits_per_copy=128)
    target = cute.make_copy_atom(CopyUniversalOp(), DTYPES[spec.dtype], num_bits_per_copy=128)
    frag = cute.make_rmem_tensor((VECTOR, columns, rows), DTYPES[spec.dtype])
    i = Int32(0)
    while i < m:
        at = tid * VECTOR
        while at < k:
            for j in cutlass.range_constexpr(rows):
                for c in cutlass.range_constexpr(columns):
                    if i + j < m and at + c * turn < k:
                        where = Int64(i + j) * x_stride + Int64(at + c * turn)
                        cute.copy(source, piece(x, where), frag[None, c, j])
            for j in cutlass.range_constexpr(rows):
                for c in cutlass.range_constexpr(columns):
                    if i + j < m and at + c * turn < k:
                        cute.copy(target, frag[None, c, j], piece(shared, (i + j) * spec.x_row(k) + at + c * turn))
            at += columns * turn
        i += rows


@cute.jit
def _consume(
    x: cute.Pointer,
    y: cute.Pointer,
    residual: cute.Pointer,
    ring: cute.Pointer,
    x_shared: cute.Pointer,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    first: Int32,
    last: Int32,
    m: Int32,
    k: Int32,
    x_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    group: Int32,
    stages: Int32,
    step: Int32,
    spec: cutlass.Constexpr,
):
    """The multiplying warps: warp i of W takes steps i, i + W, ... of 32 elements in every stage."""
    config, dtype = spec.config, DTYPES[spec.dtype]
    warps, cols, tiles = config.warps, config.cols, config.rows // 16
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    g, t = lane // 4, lane % 4
    own = warp * STEP + t * VECTOR  # this lane's first element in a block of columns
    global_atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=128)
    shared_atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=128)

    x_offsets = cute.make_rmem_tensor(spec.m_tiles, Int64)
    x_places = cute.make_rmem_tensor(spec.m_tiles, Int32)
    for i in cutlass.range_constexpr(spec.m_tiles):
        # An activation row past M repeats the last one; that column of the result is never stored.
        x_row = cutlass.min(8 * i + g, m - 1)
        x_offsets[i] = Int64(x_row) * x_stride
        x_places[i] = x_row * spec.x_row(k)
    x_next = cute.make_rmem_tensor((VECTOR, spec.steps, spec.m_tiles), dtype)
    x_frag = cute.make_rmem_tensor((VECTOR, spec.steps, spec.m_tiles), dtype)

    if cutlass.const_expr(config.resident):
        _keep_x(x, x_shared, m, k, x_stride, spec)
    else:
        _load_x(global_atom, x_next, x, x_offsets, own, k, spec)
    cute.arch.sync_threads()

    acc = cute.make_rmem_tensor((4, spec.m_tiles, tiles), Float32)
    offsets = cute.make_rmem_tensor(2 * tiles, Int32)
    slot, parity = Int32(0), Int32(0)
    row = first
    while row < last:
        rows = cutlass.min(group, last - row)
        held = spec.parts * rows
        for j in cutlass.range_constexpr(2 * tiles):
            offsets[j] = cutlass.min(8 * j + g, held - 1) * (cols + PAD)
        acc.fill(0.0)
        col = Int32(0)
        while col < k:
            if cutlass.const_expr(not config.resident):
                x_frag.store(x_next.load())
                following = col + cols
                if following >= k:
                    following = Int32(0)
                _load_x(global_atom, x_next, x, x_offsets, following + own, k, spec)
            stage = ring + cute.assume(slot * (spec.parts * group * (cols + PAD)), divby=VECTOR)
            cute.arch.mbarrier_wait(full + slot, parity)
            if col + cols <= k:
                for s in cutlass.range_constexpr(spec.steps):
                    at = own + s * (warps * STEP)
                    if cutlass.const_expr(config.resident):
                        for i in cutlass.range_constexpr(spec.m_tiles):
                            cute.copy(shared_atom, piece(x_shared, x_places[i] + (col + at)), x_frag[None, s, i])
                    multiply(acc, stage, offsets, at, x_frag[None, s, None], True, False, spec)
            else:
                for s in cutlass.range_constexpr(spec.steps):
                    at = own + s * (warps * STEP)
                    if col + at - t * VECTOR < k:
                        inside = col + at < k
                        if not inside:
                            at = Int32(0)
                        if cutlass.const_expr(config.resident):
                            for i in cutlass.range_constexpr(spec.m_tiles):
                                cute.copy(shared_atom, piece(x_shared, x_places[i] + (col + at)), x_frag[None, s, i])
                        for i in cutlass.range_constexpr(spec.m_tiles):
                            zero_outside(x_frag[None, s, i], inside)
                        multiply(acc, stage, offsets, at, x_frag[None, s, None], inside, True, spec)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + slot)
            slot += 1
            if slot == stages:
                slot = Int32(0)
                parity = parity ^ 1
            col += cols
        if row > first:
            cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)  # the last group's sums have been read
        reduce(acc, sums, y, residual, row, rows, m, y_stride, residual_stride, spec)
        row += step


@cute.kernel
def bf16_bulk_kernel(
    x: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    residual: cute.Pointer,
    m: Int32,
    n: Int32,
    k: Int32,
    x_stride: Int64,
    w_stride: Int64,
    y_stride: Int64,
    residual_stride: Int64,
    own: Int32,
    longer: Int32,
    group: Int32,
    stages: Int32,
    x_elements: Int32,
    grid: Int32,
    spec: cutlass.Constexpr,
):
    config, dtype = spec.config, DTYPES[spec.dtype]
    block, _, _ = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cute.arch.get_dyn_smem(Uint8, alignment=128)
    full = cute.recast_ptr(shared, dtype=Int64)
    empty = full + MAX_STAGES
    width = 8 * spec.m_tiles
    sums = cute.make_tensor(
        cute.recast_ptr(shared + BARRIER_BYTES, dtype=Float32),
        cute.make_layout((config.rows, width, config.warps), stride=(1, config.rows + 4, width * (config.rows + 4))),
    )
    x_shared = cute.recast_ptr(shared + spec.fixed_bytes, dtype=dtype)
    ring = x_shared + cute.assume(x_elements, divby=64)
    if cutlass.const_expr(config.interleaved):
        first, last, step = block * group, n, grid * group
    else:
        # No division: the first `longer` blocks have one output more.
        first = block * own + cutlass.min(block, longer)
        last = first + own
        if block < longer:
            last += 1
        step = group

    if warp == config.warps:
        if lane == 0:
            slot = Int32(0)
            while slot < stages:
                cute.arch.mbarrier_init(full + slot, 1)
                cute.arch.mbarrier_init(empty + slot, config.warps)
                slot += 1
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if cutlass.const_expr(spec.pdl and not spec.prewait):
            cute.arch.griddepcontrol_wait()
        _produce(w, ring, full, empty, first, last, n, k, w_stride, group, stages, step, spec)
    else:
        if cutlass.const_expr(spec.pdl):
            cute.arch.griddepcontrol_wait()
        _consume(
            x,
            y,
            residual,
            ring,
            x_shared,
            sums,
            full,
            empty,
            first,
            last,
            m,
            k,
            x_stride,
            y_stride,
            residual_stride,
            group,
            stages,
            step,
            spec,
        )


@cute.jit
def bf16_bulk(
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
    own: Int32,
    longer: Int32,
    group: Int32,
    stages: Int32,
    x_elements: Int32,
    grid: Int32,
    stream: CUstream,
    spec: cutlass.Constexpr,
):
    """Launch on `stream`. Pointers are addresses; strides are in elements between rows; n counts
    outputs; own to grid are `config.Shape.arguments`.
    """
    dtype, output = DTYPES[spec.dtype], DTYPES[spec.output]
    gmem = cute.AddressSpace.gmem
    bf16_bulk_kernel(
        cute.make_ptr(dtype, x, gmem, assumed_align=16),
        cute.make_ptr(dtype, w, gmem, assumed_align=16),
        cute.make_ptr(output, y, gmem),
        cute.make_ptr(dtype, residual, gmem),
        m,
        n,
        k,
        x_stride,
        w_stride,
        y_stride,
        residual_stride,
        own,
        longer,
        group,
        stages,
        x_elements,
        grid,
        spec,
    ).launch(
        grid=(grid, 1, 1),
        block=((spec.config.warps + 1) * WARP, 1, 1),
        smem=spec.shared_bytes,
        min_blocks_per_mp=spec.config.blocks_per_sm,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=spec.pdl,
    )
