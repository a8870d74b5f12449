"""Every shipped cell compiles for its device's architecture, on a machine without that device."""

from __future__ import annotations

from typing import Any

import pytest

from skinny_core import device, family, kernels, plan
from skinny_core.plan import Cell, Evidence, Quantiles
from tests.gpu import run
from tests.gpu.gate import CAPABILITIES
from tests.gpu.shipped import Shipped, cross_compile, shipped_cells

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


@pytest.mark.parametrize("shipped", SHIPPED, ids=[s.cell.id for s in SHIPPED])
def test_a_shipped_cell_cross_compiles(shipped: Shipped) -> None:
    assert cross_compile(shipped) is None


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
