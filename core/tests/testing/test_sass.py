"""The SASS gate fails what it exists for: spills, narrow loads, a missing matrix instruction, an unreadable cubin."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from skinny_core.kernels import triton_objects
from skinny_core.kernels.bf16_stream import build
from skinny_core.kernels.bf16_stream.config import Spec, StreamConfig
from skinny_core.problem import Problem
from skinny_core.testing import sass
from skinny_core.testing.sass import SassError, assert_before, assert_streaming, inspect

pytestmark = pytest.mark.triton("compiler")

WIDE = StreamConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)


def _binary(config: StreamConfig, capability: int = 90) -> Any:
    return triton_objects.binary(
        build.SOURCE, Spec.of(config, Problem(n=4096, k=4096), pdl=True, prefetch=True), capability
    )


@pytest.fixture(scope="module")
def wide() -> Any:
    return _binary(WIDE)


def test_a_streaming_kernel_passes(wide: Any) -> None:
    report = inspect(wide.cubin)
    assert_streaming(report, mma="HGMMA")
    assert report.arch == "sm_90a"
    assert report.decoded
    assert not report.note
    assert report.mma == Counter({"HGMMA.64x16x16.F32.BF16": 8})
    assert set(report.loads) == {"LDGSTS.128"}
    assert report.opcodes[-1] in ("NOP", "BRA")
    assert_before(report, "ACQBULK", "LDGSTS")


def test_spills_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamConfig, "max_registers", property(lambda self: 32))
    report = inspect(_binary(StreamConfig(block_n=16, block_k=256, num_warps=4, num_stages=6)).cubin)
    assert report.stack_bytes > 0
    assert report.spills
    with pytest.raises(AssertionError, match="STACK"):
        assert_streaming(report)
    with pytest.raises(AssertionError, match="local memory is used"):
        assert_streaming(replace(report, stack_bytes=0))
    with pytest.raises(AssertionError, match="LOCAL"):
        assert_streaming(replace(report, stack_bytes=0, local_bytes=8))


def test_narrow_loads_fail() -> None:
    narrow = StreamConfig(block_n=128, block_k=64, num_warps=8, num_stages=4)  # refused by the kernel's own predicate
    report = inspect(_binary(narrow).cubin)
    with pytest.raises(AssertionError, match="narrow loads"):
        assert_streaming(report)
    assert_streaming(report, narrow_loads=report.loads["LDGSTS.64"])
    with pytest.raises(AssertionError, match="no 128-bit global load"):
        assert_streaming(replace(report, loads=Counter({"LDG.64": 3})))


def test_the_wrong_matrix_instruction_fails(wide: Any) -> None:
    report = inspect(wide.cubin)
    with pytest.raises(AssertionError, match="wanted UTCHMMA"):
        assert_streaming(report, mma="UTCHMMA")
    with pytest.raises(AssertionError, match="no matrix instruction"):
        assert_streaming(replace(report, mma=Counter()), mma="HGMMA")


def test_order_fails_when_reversed_or_absent(wide: Any) -> None:
    report = inspect(wide.cubin)
    with pytest.raises(AssertionError, match="comes before"):
        assert_before(report, "LDGSTS", "ACQBULK")
    with pytest.raises(AssertionError, match="missing"):
        assert_before(report, "ACQBULK", "UTMALDG")


def test_an_unknown_architecture_is_said_and_read_from_the_ptx(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sass._run

    def without_sm103(tool: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
        if tool == "nvdisasm":
            said = "nvdisasm fatal   : Cannot decode architecture 'SM103a'"
            return subprocess.CompletedProcess([tool], 255, "", said)
        return run(tool, *arguments)

    decoded = inspect(wide.cubin)
    monkeypatch.setattr(sass, "_run", without_sm103)
    report = inspect(wide.cubin, ptx=wide.ptx)
    assert not report.decoded
    assert report.arch == "sm_103a"
    assert "cannot decode SM103a" in report.note
    assert (report.registers, report.stack_bytes) == (decoded.registers, decoded.stack_bytes)
    assert report.loads == decoded.loads
    assert_streaming(report, mma="UTCHMMA")
    with pytest.raises(AssertionError, match="cannot decode"):
        assert_before(report, "ACQBULK", "LDGSTS")
    with pytest.raises(AssertionError, match="no 128-bit global load"):
        assert_streaming(inspect(wide.cubin))


def test_ptx_load_widths() -> None:
    text = """
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
        ld.global.nc.L1::no_allocate.v2.f32 {%f1, %f2}, [%rd2];
        @%p1 ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
        ld.global.u8 %r5, [%rd4];
        cp.async.cg.shared.global [ %r20 + 0 ], [ %rd14 + 0 ], 0x10, %r21;
        cp.async.ca.shared.global [ %r20 + 0 ], [ %rd14 + 0 ], 8, %r21;
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
        cp.async.bulk.prefetch.L2.global [%rd13], %r18;
        cp.async.commit_group;
    """
    expected = {"LDG.128": 1, "LDG.64": 1, "LDG.16": 1, "LDG.8": 1, "LDGSTS.128": 1, "LDGSTS.64": 1, "UTMALDG": 1}
    assert sass._ptx_loads(text) == expected


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E.128.CONSTANT", "LDG.128"),
        ("LDG.E.ENL2.256", "LDG.256"),
        ("LDG.E.U16", "LDG.16"),
        ("LDG.E.EF.U8", "LDG.8"),
        ("LDG.E", "LDG.32"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.128"),
        ("LDGSTS.E.64", "LDGSTS.64"),
        ("UTMALDG.2D", "UTMALDG"),
        ("UBLKCP.S.G", "UBLKCP"),
        ("LDGDEPBAR", None),
        ("LDS.128", None),
    ],
)
def test_sass_load_widths(opcode: str, width: str | None) -> None:
    assert sass._load_width(opcode) == width


def test_not_a_cubin() -> None:
    with pytest.raises(SassError, match="cuobjdump could not read"):
        inspect(b"not an object")


def test_missing_tool_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "_TOOLS", ("nowhere",))
    with pytest.raises(SassError, match="no cuobjdump at"):
        inspect(b"")
