"""Barriers, mbarriers, bulk copies, races and deadlocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from skinny_core.testing.ptx import (
    BarrierFault,
    Deadlock,
    EarlyAccess,
    InFlightAccess,
    Memory,
    MemoryFault,
    Race,
    UninitialisedRead,
)

Execute = Callable[..., Memory]
ORDERS = ["latest", "eager", *range(6)]
EACH = "mov.b32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r2, %r1, %r2; mul.wide.u32 %rd9, %r0, 4;"
"""%r1 the start of shared memory, %r2 this thread's word of it, %rd9 the thread's offset in bytes."""

REVERSE = """
    st.shared.b32 [%r2], %r0; {barrier}
    sub.s32 %r3, 63, %r0; shl.b32 %r3, %r3, 2; add.s32 %r3, %r1, %r3;
    ld.shared.b32 %r4, [%r3]; add.s64 %rd8, %rd0, %rd9; st.global.b32 [%rd8], %r4;
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync.aligned 3, 64;", "barrier.cta.sync 1;"])
def test_barriers(execute: Execute, order: str | int, barrier: str) -> None:
    out = np.zeros(64, "u4")
    execute(EACH + REVERSE.format(barrier=barrier), out, threads=64, shared=256, order=order)
    assert (out == np.arange(64)[::-1]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_barrier_it_is_a_race_or_unwritten(execute: Execute, order: str | int) -> None:
    with pytest.raises((Race, UninitialisedRead)):
        execute(EACH + REVERSE.format(barrier=""), np.zeros(64, "u4"), threads=64, shared=256, order=order)


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_a_write_after_a_read_needs_a_barrier_too(execute: Execute, barrier: str) -> None:
    body = (
        EACH
        + f"""
    st.shared.b32 [%r2], %r0; bar.sync 0;
    setp.lt.u32 %p1, %r0, 32; @%p1 bra FIRST;
    ld.shared.b32 %r3, [%r2+-128]; {barrier} bra END;
FIRST:
    {barrier} st.shared.b32 [%r2], 7;
END:
    """
    )
    if barrier:
        execute(body, threads=64, shared=256)
        return
    with pytest.raises(Race, match=r"warp 0 writes shared byte at offset 0, which warp 1 read with no barrier"):
        execute(body, threads=64, shared=256)


def test_arrive_does_not_wait(execute: Execute) -> None:
    body = (
        EACH
        + """
    setp.lt.u32 %p1, %r0, 32; @%p1 bra FIRST;
    bar.sync 1, 64; ld.shared.b32 %r3, [%r1]; st.global.b32 [%rd0], %r3; bra END;
FIRST:
    st.shared.b32 [%r1], 9; bar.arrive 1, 64;
END:
    """
    )
    out = np.zeros(1, "u4")
    execute(body, out, threads=64, shared=4)
    assert out[0] == 9


def test_warps_that_ended_do_not_hold_up_the_block(execute: Execute) -> None:
    execute("setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0;", threads=96)


def test_a_barrier_that_one_warp_never_reaches(execute: Execute) -> None:
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; bra END; OTHER: bar.sync 2, 64; END:"
    with pytest.raises(Deadlock, match=r"warp 0: barrier 2.*warp 1: barrier 1") as caught:
        execute(body, threads=64)
    assert "bar.sync 2, 64" in str(caught.value)


def test_counts_that_do_not_agree(execute: Execute) -> None:
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; bra END; OTHER: bar.sync 1, 96; END:"
    with pytest.raises(BarrierFault, match="another warp uses with"):
        execute(body, threads=64)


# A ring of two stages of 64 bytes, filled by warp 1 and read by warp 0: full barriers at +256, empty ones at +272.
RING = EACH + """
    setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1+256], 1; mbarrier.init.shared::cta.b64 [%r1+264], 1;
    mbarrier.init.shared.b64 [%r1+272], {consumers}; mbarrier.init.shared.b64 [%r1+280], {consumers};
    {fence}
READY:
    bar.sync 0;
    {wait}
    mov.b32 %r10, 0;
    setp.lt.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
    setp.ne.b32 %p1, %r0, 32; @%p1 bra END;
PRODUCE:
    and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r13, %r12, 1;
    shl.b32 %r14, %r11, 3; add.s32 %r14, %r1, %r14; shl.b32 %r15, %r11, 6; add.s32 %r15, %r1, %r15;
    {{
    .reg .pred P1;
    AGAIN:
    {produce_wait}
    @P1 bra DONE;
    bra AGAIN;
    DONE:
    }}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r14+256], {bytes};
    mul.wide.u32 %rd8, %r10, 64; add.s64 %rd8, %rd1, %rd8;
    createpolicy.fractional.L2::evict_first.b64 %rd7, 1.0;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
        [%r15], [%rd8], 64, [%r14+256], %rd7;
    add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 7; @%p2 bra PRODUCE;
    bra END;
CONSUMER:
    and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
    shl.b32 %r14, %r11, 3; add.s32 %r14, %r1, %r14; shl.b32 %r15, %r11, 6; and.b32 %r16, %r0, 15;
    shl.b32 %r16, %r16, 2; add.s32 %r15, %r15, %r16; add.s32 %r15, %r15, %r1;
    {{
    .reg .pred P1;
    AGAIN:
    {consume_wait}
    @P1 bra DONE;
    bra AGAIN;
    DONE:
    }}
    ld.shared.b32 %r17, [%r15];
    {release}
    setp.gt.u32 %p3, %r0, 15; @%p3 bra NEXT;
    mul.wide.u32 %rd8, %r10, 64; cvt.u64.u32 %rd10, %r16; add.s64 %rd8, %rd8, %rd10; add.s64 %rd8, %rd0, %rd8;
    st.global.b32 [%rd8], %r17;
NEXT:
    add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 7; @%p2 bra CONSUMER;
END:
"""  # fmt: skip
GOOD = {
    "consumers": "32",
    "fence": "fence.mbarrier_init.release.cluster;",
    "wait": "",
    "produce_wait": "mbarrier.try_wait.parity.shared::cta.b64 P1, [%r14+272], %r13;",
    "consume_wait": "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%r14+256], %r12, 10000000;",
    "bytes": "64",
    "release": "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r14+272];",
}


def ring(execute: Execute, *, order: str | int = "latest", length: int = 112, **changes: str) -> bool:
    """Run the ring with changes to GOOD; returns whether all 7 pieces arrived."""
    source, out = np.arange(length, dtype="u4") + 5, np.zeros(112, "u4")
    dependent = "wait" in changes
    flags = {1: {"produced": dependent, "read_only": True}}
    body = RING.format(**GOOD | changes)
    execute(body, out, source, threads=64, shared=512, order=order, flags=flags, dependent=dependent)
    return bool((out == source).all())


@pytest.mark.parametrize("order", [*ORDERS, *range(6, 20)])
def test_a_ring_of_bulk_copies(execute: Execute, order: str | int) -> None:
    assert ring(execute, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_polling_without_standing_still(execute: Execute, order: str | int) -> None:
    waits = {key: GOOD[key] for key in ("produce_wait", "consume_wait")}
    polls = {key: text.replace("try_wait", "test_wait").replace(", 10000000", "") for key, text in waits.items()}
    assert ring(execute, order=order, **polls)


def test_reading_before_the_copy_has_landed(execute: Execute) -> None:
    with pytest.raises((InFlightAccess, UninitialisedRead)):
        ring(execute, consume_wait="setp.eq.b32 P1, 0, 0;")


@pytest.mark.parametrize("order", range(8))
def test_reading_too_early_is_found_at_any_moment(execute: Execute, order: int) -> None:
    """Before the copy, during it, or after it without having waited: the kind of fault differs."""
    with pytest.raises((InFlightAccess, UninitialisedRead, Race, Deadlock)):
        ring(execute, order=order, consume_wait="setp.eq.b32 P1, 0, 0;")


@pytest.mark.parametrize("order", ORDERS)
def test_refilling_a_stage_that_may_still_be_read(execute: Execute, order: str | int) -> None:
    with pytest.raises((InFlightAccess, Race, BarrierFault)):
        ring(execute, order=order, produce_wait="setp.eq.b32 P1, 0, 0;")


@pytest.mark.parametrize("order", ["latest", 3])
def test_waiting_for_more_bytes_than_come(execute: Execute, order: str | int) -> None:
    with pytest.raises(Deadlock, match="16 bytes expected"):
        ring(execute, order=order, bytes="80")


def test_consumers_that_never_release(execute: Execute) -> None:
    with pytest.raises(Deadlock, match=r"mbarrier at \d+, phase 0, 32 of 32 arrivals left"):
        ring(execute, release="")


def test_the_async_proxy_must_be_shown_the_barrier(execute: Execute) -> None:
    with pytest.raises(BarrierFault, match="no fence"):
        ring(execute, fence="")
    assert ring(execute, fence="fence.proxy.async;")


def test_a_bulk_copy_past_the_end(execute: Execute) -> None:
    with pytest.raises(MemoryFault, match="64 bytes at offset 384 of `p1`, which has 432"):
        ring(execute, length=108)


def test_a_bulk_copy_of_the_result_of_the_kernel_before(execute: Execute) -> None:
    assert ring(execute, wait="griddepcontrol.wait;")
    with pytest.raises(EarlyAccess, match="bulk read"):
        ring(execute, wait="setp.lt.u32 %p4, %r0, 32; @%p4 griddepcontrol.wait;")


COPY = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r1];"
SIMPLE = EACH + """
    setp.ne.b32 %p1, %r0, 0; @%p1 bra END;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    {}
END:
"""  # fmt: skip


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (COPY + " [%r1+16], [%rd0+8], 16, [%r1];", MemoryFault, "source"),
        (COPY + " [%r1+24], [%rd0], 16, [%r1];", MemoryFault, "dest"),
        (COPY + " [%r1+16], [%rd0], 8, [%r1];", MemoryFault, "size"),
        (COPY + " [%r1+16], [%rd0], 16, [%r1]; ld.shared.b32 %r3, [%r1+28];", InFlightAccess, "offset 28 while"),
        (COPY + " [%r1+16], [%rd0], 16, [%r1]; st.shared.b32 [%r1+16], 0;", InFlightAccess, "write to shared byte"),
        (2 * (COPY + " [%r1+16], [%rd0], 16, [%r1];"), InFlightAccess, "offset 16 while a bulk copy into it"),
        ("cp.async.bulk.prefetch.L2.global [%rd0], 512;", MemoryFault, "512 bytes at offset 0"),
        (COPY + " [%r1+16], [%rd0], 16, [%r1];", BarrierFault, "ended"),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;" + ARRIVE, BarrierFault, "1 arrivals at"),
        ("mbarrier.init.shared.b64 [%r1], 1;", BarrierFault, "already"),
        ("ld.shared.b64 %rd8, [%r1];", MemoryFault, "part of an mbarrier"),
        ("st.shared.b32 [%r1+4], 0;", MemoryFault, "part of an mbarrier"),
        ("mbarrier.arrive.shared.b64 %rd8, [%r1+8];", BarrierFault, "no mbarrier at"),
        ("mbarrier.inval.shared.b64 [%r1];" + ARRIVE, BarrierFault, "no mbarrier at"),
        ("mbarrier.init.shared.b64 [%r1+12], 1;", MemoryFault, "misaligned"),
    ],
)  # fmt: skip
def test_rules(execute: Execute, body: str, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        execute(SIMPLE.format(body), np.zeros(64, "u4"), shared=256)


def test_phases(execute: Execute) -> None:
    """A new barrier's phase 0 is open: parity 1 counts as over, parity 0 does not, until the arrival."""
    body = SIMPLE.format("""
    mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 1; selp.b32 %r3, 1, 0, %p2;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.b32 %r4, 1, 0, %p2;
    mbarrier.arrive.shared::cta.b64 %rd8, [%r1];
    mbarrier.test_wait.shared.b64 %p2, [%r1], %rd8; selp.b32 %r5, 1, 0, %p2;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 1; selp.b32 %r6, 1, 0, %p2;
    st.global.v4.b32 [%rd0], {%r3, %r4, %r5, %r6};
    """)
    out = np.zeros(4, "u4")
    execute(body, out, shared=256)
    assert out.tolist() == [1, 0, 1, 0]


def test_a_barrier_that_others_cannot_know_of_yet(execute: Execute) -> None:
    body = EACH + """
    setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER;
    setp.ne.b32 %p1, %r0, 0; @%p1 bra END;
    mbarrier.init.shared.b64 [%r1], 1; bra END;
OTHER:
    setp.ne.b32 %p1, %r0, 32; @%p1 bra END; mbarrier.arrive.shared.b64 %rd8, [%r1];
END:
    """  # fmt: skip
    with pytest.raises(Race, match="initialised"):
        execute(body, threads=64, shared=8)


def test_a_loop_without_end(execute: Execute) -> None:
    with pytest.raises(Deadlock, match="polls in a row"):
        execute(SIMPLE.format("AGAIN: mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra AGAIN;"), shared=8)
