"""Figures in files are generated from committed rows, and shipped plans are the measurements that the rows hold."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from skinny_core import kernels, plan
from skinny_core.problem import Problem
from skinny_lab import plans
from skinny_lab.bench import rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DEVICES = sorted(p.name for p in RESULTS.iterdir() if p.is_dir())
PLANS = sorted(path for path in ROOT.glob("models/*/src/*/plans/*.toml") if not plan.load(path).only_reported)
"""Plans that we measured; what others reported is in test_reported_plans.py."""


IDS = [f"{path.parents[1].name}-{path.stem}" for path in PLANS]


def _command(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_results() -> None:
    assert DEVICES
    assert PLANS


def test_summary_and_readme_are_what_the_rows_give() -> None:
    for path, text in _command("report").generated().items():
        assert path.read_text() == text, f"run `python benchmarks/report.py`: {path.name} is stale"


@pytest.mark.parametrize("path", PLANS, ids=IDS)
def test_a_shipped_plan_is_sealed(path: Path) -> None:
    shipped = plan.load(path)
    assert shipped.digest == shipped.seal(), "cells were edited after they were measured"


def test_shipped_plans_are_those_of_the_committed_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nox -s plans-write` would change nothing, and no measured plan is left out."""
    command = _command("measure_plan")
    monkeypatch.setattr(
        sys, "argv",
        ["", "--from", str(RESULTS / "h200" / "measurements.jsonl.xz"), "--out", str(tmp_path)],
    )  # fmt: skip
    assert command.main() == 0
    made = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*.toml")}
    shipped = {Path(path.parents[1].name.removeprefix("skinny_")) / path.name: path.read_bytes() for path in PLANS}
    assert made == shipped


@pytest.mark.parametrize("path", PLANS, ids=IDS)
def test_a_shipped_plan_names_its_machine(path: Path) -> None:
    environment = plan.load(path).environment
    for name in ("gpu", "driver", "torch", "cuda", "dsl", "commit", "date", "command"):
        assert getattr(environment, name), f"{path.name}: environment.{name} is empty"


@pytest.mark.parametrize("path", PLANS, ids=IDS)
def test_every_win_obeys_the_keep_rule(path: Path) -> None:
    found = plan.load(path)
    judged: dict[str, bool] = {}
    for cell in found.cells:
        e = cell.evidence
        assert e.candidate_hot
        assert e.baseline_hot
        hot = e.baseline_hot.p50 / e.candidate_hot.p50
        wins = e.speedup >= 1.05 and hot >= (1.03 if cell.m <= 2 else 1.0)
        if cell.m >= 3 and wins:
            assert e.in_model_us is not None, f"{cell.id} passes alone and was in no decode step"
            wins = e.in_model_us <= 0
        judged[cell.id] = wins
    alone = tuple(msgspec.structs.replace(c, status="win" if judged[c.id] else "refused") for c in found.cells)
    together, _ = plans.hold_back(msgspec.structs.replace(found, cell=alone))
    assert [c.status for c in together.cells] == [c.status for c in found.cells]


def test_each_tp_size_has_its_own_speeds() -> None:
    report = _command("report")

    def row(what: str, provider: str, p50: float, kind: str = "cell") -> rows.Row:
        state, status = ("cold", "win" if provider == "skinny" else "") if kind == "cell" else ("engine", "")
        return rows.Row(
            kind, what, 2300, 1000, 1, provider, "", state, status, "us", p50, p50, p50, 9, "GPU", "1", "2", "c",
            "2026-01-01",
        )  # fmt: skip

    found = report.summary(
        [
            row("m-8b/o", "skinny", 2.0), row("m-8b/o", "cublas", 3.0), row("m-8b-tp4/o", "skinny", 1.0),
            row("m-8b-tp4/o", "cublas", 2.0), row("m-8b", "stock", 5.0, "tpot"), row("m-8b", "skinny", 4.0, "tpot"),
        ]
    )  # fmt: skip
    assert (found["vs_cublas"], found["vs_cublas_by_tp"]) == ({"1": 1.5}, {"4": {"1": 2.0}})
    assert {tp: of["win"] for tp, of in found["cells_by_tp"].items()} == {"1": 1, "4": 1}
    text = report.section(found, "gpu")
    assert "| 1 | 1.500x |  | 0.50 | 2.000x |" in text
    assert "2 cells run, 0 are listed as refused" in text
    assert "| m-8b | 5.00 -> 4.00 (-20.0 %) | 1 |" in text


def test_summary_by_hand() -> None:
    """Two shapes at one M: geometric means of 2x and 8x, of 1.5x and 6x, and floors of 1 us."""

    def row(what: str, provider: str, p50: float, kind: str = "cell", m: int = 1) -> rows.Row:
        return rows.Row(
            kind, what, 2300, 1000, m, provider, "", "cold" if kind == "cell" else "engine",
            "win" if provider == "skinny" and kind == "cell" else "", "us", p50, p50, p50, 9,
            "GPU", "1", "2", "c", "2026-01-01",
        )  # fmt: skip

    found = rows.summarise(
        [
            row("a", "skinny", 2.0), row("a", "cublas", 4.0), row("a", "peer", 3.0),
            row("b", "skinny", 8.0), row("b", "cublas", 64.0), row("b", "peer", 48.0), row("b", "other", 99.0),
            row("model", "stock", 5.0, "tpot", 2), row("model", "stock", 7.0, "tpot", 2),
            row("model", "skinny", 3.0, "tpot", 2),
        ]
    )  # fmt: skip
    assert found["vs_cublas"] == {"1": 4.0}
    assert found["vs_best_peer"] == {"1": 3.0}
    assert found["limit_fraction"] == {"1": 0.25}
    assert found["cells"] == {"win": 2, "refused": 0, "reported": 0}
    assert found["tpot"] == {"model": {"2": {"stock_ms": 6.0, "skinny_ms": 3.0, "runs": 1}}}


def test_the_candidates_of_bf16_simt_hold_what_a_wide_sweep_found() -> None:
    kernel = kernels.get("bf16_simt")
    swept: dict[tuple[int, int, int], dict[str, float]] = {}
    with (RESULTS / "h200" / "sweeps" / "2026-11-30-first.csv").open(encoding="utf-8") as f:
        for row in csv.DictReader(f):
            if "/" in row["who"]:  # ours; the second phase comes later in the file and was measured longer
                cell = swept.setdefault((int(row["n"]), int(row["k"]), int(row["m"])), {})
                cell[row["who"]] = float(row["p50"])
    assert len(swept) == 30
    for (n, k, m), times in swept.items():
        found = [kernel.params_of(c) for c in kernel.candidates(Problem(n=n, k=k), m)]
        names = {"/".join(str(c[p]) for p in ("threads", "rows", "chunks", "blocks_per_sm", "l2")) for c in found}
        assert min(times[name] for name in names & set(times)) <= 1.015 * min(times.values()), (n, k, m)
