"""Bounds, alignment, gaps, flags, and what may be touched before the PDL wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from skinny_core.testing.ptx import EarlyAccess, Machine, Memory, MemoryFault, UninitialisedRead

Execute = Callable[..., Memory]
EACH = "mul.wide.u32 %rd9, %r0, 4; add.s64 %rd8, %rd0, %rd9; add.s64 %rd10, %rd1, %rd9;"


def u32(n: int) -> np.ndarray:
    return np.arange(n, dtype="u4")


def test_a_copy(execute: Execute) -> None:
    out = np.zeros(32, "u4")
    execute(EACH + "ld.global.b32 %r1, [%rd8]; st.global.b32 [%rd10], %r1;", u32(32), out)
    assert (out == u32(32)).all()


def test_out_of_bounds_names_everything(execute: Execute) -> None:
    with pytest.raises(MemoryFault) as caught:
        execute(EACH + "\nld.global.b32 %r1, [%rd8+4];", u32(32), u32(1), threads=32)
    message = str(caught.value)
    assert "4 bytes at offset 128 of `p0`, which has 128" in message
    assert "thread 31" in message
    assert "`ld.global.b32 %r1, [%rd8+4]`" in message
    assert f"line {caught.value.site.line}:" in message


def test_just_before_a_region(execute: Execute) -> None:
    with pytest.raises(MemoryFault, match="offset -4 of `p0`"):
        execute("ld.global.b32 %r1, [%rd0+-4];", u32(32))


@pytest.mark.parametrize("body", ["ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+8];", "ld.global.b16 %rs1, [%rd0+1];"])
def test_misaligned(execute: Execute, body: str) -> None:
    with pytest.raises(MemoryFault, match="misaligned"):
        execute(body, u32(32))


def test_a_base_that_is_not_aligned_is_read_where_it_is(execute: Execute) -> None:
    data, out = np.arange(5, dtype="u2"), np.zeros(1, "u2")
    body = "ld.global.b16 %rs1, [%rd0+4]; st.global.b16 [%rd1], %rs1;"
    execute(body, data, out, flags={0: {"misalign": 2}})
    assert out[0] == 2
    with pytest.raises(MemoryFault, match="misaligned"):
        execute("ld.global.b32 %r1, [%rd0];", data, flags={0: {"misalign": 2}})


def test_gaps_between_rows_are_outside(execute: Execute) -> None:
    rows = np.arange(40, dtype="u4").reshape(4, 10)[:, :8]
    out = np.zeros(32, "u4")
    execute("ld.global.b32 %r1, [%rd0+68]; st.global.b32 [%rd1], %r1;", rows, out)
    assert out[0] == 17
    with pytest.raises(MemoryFault, match="between the rows: 4 bytes at offset 32 of `p0`"):
        execute("ld.global.b32 %r1, [%rd0+32];", rows)


def test_lanes_in_different_regions(execute: Execute) -> None:
    out = np.zeros(32, "u4")
    body = EACH + (
        "and.b32 %r1, %r0, 1; setp.eq.b32 %p1, %r1, 0; add.s64 %rd11, %rd2, %rd9;"
        "selp.b64 %rd8, %rd8, %rd10, %p1; ld.global.b32 %r2, [%rd8]; st.global.b32 [%rd11], %r2;"
    )
    execute(body, u32(32), u32(32) + 100, out)
    assert (out == np.where(np.arange(32) % 2 == 0, u32(32), u32(32) + 100)).all()


def test_read_only(execute: Execute) -> None:
    with pytest.raises(MemoryFault, match="read-only"):
        execute("st.global.b32 [%rd0], %r0;", u32(1), flags={0: {"read_only": True}})


def test_narrow_values_extend_by_their_sign(execute: Execute) -> None:
    data, out = np.array([-3], "i1").repeat(4), np.zeros(2, "i4")
    execute(
        "ld.global.s8 %r1, [%rd0]; ld.global.u8 %r2, [%rd0]; st.global.v2.b32 [%rd1], {%r1, %r2};",
        data,
        out,
        flags={},
    )
    assert out.tolist() == [-3, 253]


class TestWait:
    """x is `produced`: another kernel may be writing it until griddepcontrol.wait."""

    LOAD = "ld.global.b32 %r1, [%rd0];"
    FLAGS = {0: {"produced": True}}  # noqa: RUF012

    def test_read_before(self, execute: Execute) -> None:
        with pytest.raises(EarlyAccess, match="a read of its result"):
            execute(self.LOAD + "griddepcontrol.wait;", u32(1), dependent=True, flags=self.FLAGS)

    def test_read_after(self, execute: Execute) -> None:
        execute("griddepcontrol.wait;" + self.LOAD, u32(1), dependent=True, flags=self.FLAGS)

    def test_an_ordinary_launch(self, execute: Execute) -> None:
        execute(self.LOAD, u32(1), flags=self.FLAGS)

    def test_weights_may_be_read_before(self, execute: Execute) -> None:
        execute(self.LOAD + "griddepcontrol.wait;", u32(1), dependent=True)

    def test_the_non_coherent_path(self, execute: Execute) -> None:
        load = "griddepcontrol.wait; ld.global.nc.L1::no_allocate.b32 %r1, [%rd0];"
        with pytest.raises(EarlyAccess, match="non-coherent"):
            execute(load, u32(1), dependent=True, flags=self.FLAGS)
        execute(load, u32(1), flags=self.FLAGS)
        execute(load, u32(1), dependent=True)

    def test_store_before(self, execute: Execute) -> None:
        with pytest.raises(EarlyAccess, match="a store"):
            execute("st.global.b32 [%rd0], %r0; griddepcontrol.wait;", u32(1), dependent=True)

    def test_only_one_warp_waited(self, execute: Execute) -> None:
        body = "setp.lt.u32 %p1, %r0, 32; @!%p1 bra AFTER; griddepcontrol.wait; AFTER: {}" + self.LOAD
        with pytest.raises(EarlyAccess, match="thread 32"):
            execute(body.replace("{}", ""), u32(1), threads=64, dependent=True, flags=self.FLAGS)
        # A barrier passes on what one warp knows.
        execute(body.replace("{}", "bar.sync 0;"), u32(1), threads=64, dependent=True, flags=self.FLAGS)


def test_shared_memory_must_be_written_first(execute: Execute) -> None:
    out = np.zeros(32, "u4")
    body = "mov.b32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2;"
    store, load = "st.shared.b32 [%r1], %r0;", "ld.shared.b32 %r3, [%r1];" + EACH + "st.global.b32 [%rd8], %r3;"
    execute(body + store + load, out, out, shared=128)
    assert (out == u32(32)).all()
    with pytest.raises(UninitialisedRead, match="offset 0 was never written"):
        execute(body + load, out, out, shared=128)
    execute(body + load, out, out, shared=128, uninitialised=False)
    with pytest.raises(MemoryFault, match="offset 124 of shared memory, which has 124"):
        execute(body + store, out, shared=124)


def test_dynamic_shared_memory_follows_the_static(text: Callable[..., str]) -> None:
    body = "mov.b32 %r1, more; st.shared.b32 [%r1+60], %r0;"
    ptx = text(body, 0, 8).replace(".visible", ".extern .shared .align 64 .b8 more[];\n.visible")
    Machine(ptx).run(1, 32, [], Memory(), dynamic_shared=64)
    with pytest.raises(MemoryFault):
        Machine(ptx).run(1, 32, [], Memory(), dynamic_shared=60)
