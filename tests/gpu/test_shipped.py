"""Every shipped cell compiles for its device's architecture and spills nothing, on a machine without that device."""

from __future__ import annotations

from typing import Any

import pytest

from skinny_core import device, family, kernels, plan
from skinny_core.plan import Cell, Evidence, Quantiles
from skinny_core.testing import sass
from tests.gpu import run
from tests.gpu.gate import CAPABILITIES
from tests.gpu.shipped import Shape, Shipped, by_code, by_shape, cross_compile, shipped_cells

SHIPPED = [shipped for capability in CAPABILITIES.values() for shipped in shipped_cells(capability)]


def made(**changes: Any) -> Shipped:
    """A small cell that compiles, with changes."""
    us = Quantiles(1.0, 1.0, 1.0)
    fields: dict[str, Any] = {
        "id": "made/M1", "n": 64, "k": 1024, "m": 1, "status": "win", "kernel": "bf16_simt",
        "config": {"threads": 128, "rows": 1, "chunks": 1},
        "evidence": Evidence(candidate=us, baseline=us, baseline_name="cublas"),
    }  # fmt: skip
    return Shipped(Cell(**{**fields, **changes}), device.product("h200"))


CODES = by_code(SHIPPED)


@pytest.mark.parametrize("group", CODES, ids=[group[0].name for group in CODES])
def test_shipped_cells_cross_compile(group: list[Shipped]) -> None:
    """Each machine code once: cells that differ in N, or in M within a group of rows, share one."""
    assert cross_compile(group[0]) is None, f"serves {', '.join(one.name for one in group)}"


def test_every_shipped_cell_is_in_one_group_of_code_and_one_shape() -> None:
    names = sorted((one.device.slug, one.name) for one in SHIPPED)
    assert sorted((one.device.slug, one.name) for group in CODES for one in group) == names
    shapes = by_shape(SHIPPED)
    assert sorted((s.device.slug, f"{s.family}:{cell.id}") for s in shapes for cell in s.cells) == names
    assert len({(s.name, s.device) for s in shapes}) == len(shapes)


def test_code_is_compiled_once_for_the_cells_that_share_it() -> None:
    mma = {"kernel": "bf16_mma", "config": {"warps": 4, "parts": 2, "loads": 2, "unroll": 2}}
    cells = [made(id=f"n{n}/M{m}", n=n, m=m, **mma) for n in (64, 128) for m in (2, 3, 5)]
    assert [[one.cell.id for one in group] for group in by_code(cells)] == [
        ["n64/M2", "n64/M3", "n128/M2", "n128/M3"], ["n64/M5", "n128/M5"],
    ]  # fmt: skip
    assert len(by_code([made(k=1024), made(k=2048)])) == 2
    assert len(by_code([made(id="a"), made(id="b", kernel="unknown"), made(id="c", config={"threads": 7})])) == 3


def test_each_failing_cell_of_a_shape_is_named() -> None:
    shape = Shape("f", device.product("h200"), 64, 1024, tuple(made(id=f"o/M{m}", m=m).cell for m in (1, 2, 3)))
    seen = []

    def check(cell: Cell) -> None:
        seen.append(cell.m)
        assert cell.m == 2, f"{cell.m} is not 2"

    with pytest.raises(AssertionError) as failed:
        shape.each(check)
    first, *lines = str(failed.value).splitlines()
    assert first.startswith("2 of 3 cells")
    assert lines[0].startswith(
        "o/M1 (64 x 1024, M = 1, bf16_simt(chunks=1, rows=1, threads=128)): AssertionError: 1 is"
    )
    assert lines[1].startswith("o/M3 (")
    assert seen == [1, 2, 3]

    def fault(cell: Cell) -> None:
        seen.append(cell.m)
        raise RuntimeError("CUDA error: an illegal memory access")

    seen.clear()
    with pytest.raises(AssertionError, match=r"o/M1 .*illegal memory access"):
        shape.each(fault)
    assert seen == [1], "no later call survives a fault of the GPU"


def test_win_cells_of_every_plan_are_found() -> None:
    files = [file for package in family.discover().packages for file in package.plan_files()]
    wins = {(str(file), cell.id) for file in files for cell in plan.load(file).cells if cell.status == "win"}
    assert len(SHIPPED) == len(wins)


def test_a_good_cell_passes_and_a_bad_one_is_named_in_one_line() -> None:
    assert cross_compile(made()) is None
    error = cross_compile(made(id="made/M9", config={"threads": 7, "rows": 1, "chunks": 1}))
    assert error is not None
    assert error.startswith("made/M9: ConfigError")
    assert "\n" not in error


def test_a_compiler_that_makes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels.get("bf16_simt")
    monkeypatch.setattr(type(kernel), "cross_compile", lambda *a, **k: kernels.Binary("", b"", 0))
    assert "no machine code" in str(cross_compile(made()))


def test_registers_that_spilled_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "resources", lambda cubin: sass.Resources(255, 40, 0, 0))
    assert cross_compile(made()) == "made/M1: 40 bytes of stack and 0 of local memory per thread"
    monkeypatch.setattr(sass, "resources", lambda cubin: sass.Resources(255, 0, 8, 0))
    assert cross_compile(made()) == "made/M1: 0 bytes of stack and 8 of local memory per thread"
    monkeypatch.setattr(sass, "resources", lambda cubin: sass.Resources(255, 24, 0, 0))
    assert cross_compile(made()) is None, "it was measured to win all the same"


@pytest.mark.parametrize(
    ("cells", "code"), [([made()], 0), ([made(), made(config={"threads": 7})], 1)], ids=["good", "bad"]
)
def test_without_a_device_the_gate_compiles_and_says_what_was_not_run(
    cells: list[Shipped], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "matching_device", lambda arch: None)
    monkeypatch.setattr("tests.gpu.shipped.shipped_cells", lambda capability: cells)
    assert run.main(["--arch", "sm90", "--allow-skip"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("1 cells NOT RUN" if code == 0 else "1 of 2 shipped cells do not compile") in last
