"""The seed's claims beside our measurements: counts and verdicts by hand; the committed files are generated ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from skinny_core import family, plan
from skinny_core.device import product
from skinny_core.plan import Cell, Evidence, Plan, Quantiles
from skinny_core.testing.stand_in import plan_of
from skinny_lab.bench import reported, rows

ROOT = Path(__file__).resolve().parents[2]
H200 = product("h200")


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("seed_cells", ROOT / "benchmarks" / "seed_cells.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "seed_cells", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_committed_files_are_the_generated_ones(seed: ModuleType) -> None:
    for path, text in seed.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"run `python benchmarks/seed_cells.py`: {path.name} is stale"


def test_every_cell_of_the_seed_is_listed(seed: ModuleType) -> None:
    text = seed.generated()
    found = rows.read_table(seed.RESULTS / "seed.csv", seed.Line)
    kept = [line for line in found if line.kept == "yes"]
    assert (sum(not line.is_moe for line in kept), sum(line.is_moe for line in kept)) == (52, 7)
    assert len(found) == 125
    assert {(line.kept, line.m) for line in found if line.kept == "no"} == {("no", 4), ("no", 8), ("no", 16)}
    page = text[seed.RESULTS / "seed.md"]
    table_part, rest = page.split("## The 52 cells of the table")[1].split("## The 7 cells of qwen3-30b-a3b")
    moe_part, left_part = rest.split("## Cells that the seed left to cuBLAS")
    counts = [
        sum(line.startswith("| ") for line in part.splitlines()) - 1 for part in (table_part, moe_part, left_part)
    ]
    assert counts == [52, 7, 66]


def _report() -> reported.Report:
    def cell(m: int, kept: str, *nvl: float, models: str = "qwen3-8b llama-3.1-8b") -> reported.ReportedCell:
        times = nvl or (None, None)
        model = (511.0, 427.0) if m == 4 else (None, None)
        return reported.ReportedCell("o", models, 4096, 4096, m, *times, 1.5 if nvl else None, 7, kept, *model, "")

    cells = (cell(1, "yes", 15.0, 10.0), cell(2, "yes", 15.0, 10.0), cell(4, "no"), cell(8, "no"))
    return reported.Report("h200-nvl", "vllm_cute", "cublas", "a report", "in model", plan.Environment(), cells)


def _row(m: int, provider: str, p50: float) -> rows.Row:
    return rows.Row(
        "limit", "q8b.o", 4096, 4096, m, provider, "", "cold", "", "us", p50, p50, p50, 9, "GPU", "1", "2", "c", "today"
    )


def _plan(name: str, *cells: tuple[int, str, float | None]) -> Plan:
    def flat(time: float) -> Quantiles:
        return Quantiles(time, time, time)

    made = [
        Cell(
            id=f"o/M{m}", n=4096, k=4096, m=m, status=status, kernel="bf16_simt", config={}, why="measured",
            evidence=Evidence(
                candidate=flat(8.0), baseline=flat(12.0), candidate_hot=flat(4.0), baseline_hot=flat(10.0),
                baseline_name="cublas", in_model_us=in_model,
            ),
        )
        for m, status, in_model in cells
    ]  # fmt: skip
    return plan_of(*made, key=H200, product="h200", family=name)


RACE = [
    _row(1, "cublas", 12.6), _row(1, "vllm_cute", 12.0), _row(1, "skinny", 9.0),
    _row(2, "cublas", 12.5), _row(2, "vllm_cute", 12.0), _row(2, "skinny", 12.0),
    _row(4, "cublas", 12.0), _row(4, "skinny", 10.0),
]  # fmt: skip


def _lines(seed: ModuleType, shipped: Sequence[Plan]) -> dict[int, object]:
    return {line.m: line for line in seed.compare(_report(), RACE, family.discover().packages, shipped)}


def test_verdicts_by_hand(seed: ModuleType) -> None:
    shipped = [
        _plan("qwen3", (1, "win", None), (4, "win", -3.0)),
        _plan("llama31", (1, "win", None), (4, "refused", 2.0)),
    ]
    lines = _lines(seed, shipped)
    verdicts = {m: (line.claim, line.race, line.plan_status) for m, line in lines.items()}  # type: ignore[attr-defined]
    assert verdicts == {
        1: ("holds", "wins", "win"),
        2: ("does not hold", "does not win", "not measured"),
        4: ("", "wins", "llama31 refused, qwen3 win"),
        8: ("", "not measured", "not measured"),
    }
    first, fourth = lines[1], lines[4]
    assert (first.sxm_theirs_x, first.sxm_ours_x) == (1.05, 1.4)  # type: ignore[attr-defined]
    assert (first.plan_cold_x, first.plan_hot_x, first.plan_in_model_us) == (1.5, 2.5, None)  # type: ignore[attr-defined]
    assert fourth.plan_in_model_us == 2.0, "the worst of the families"  # type: ignore[attr-defined]
    page = seed.markdown(list(lines.values()), _report(), RACE, shipped)
    assert (
        "- qwen3-8b, llama-3.1-8b o (4096, 4096) M = 2: 1.50x there, 1.042x here. cuBLAS 15.0 us on the NVL, 12.50 us"
        " on the SXM: 1.20x faster; their kernel 10.0 and 12.00 us: 1.20x slower. Ours 1.042x."
    ) in page
    assert "511 -> 427" in page
    assert "| left to cuBLAS | 8 | 1 |" in page


def test_without_any_measurement_it_says_so(seed: ModuleType) -> None:
    """No plan, no race: nothing is claimed. Plans of other devices and reported cells are none."""
    elsewhere = msgspec.structs.replace(
        _plan("qwen3", (1, "win", None)), device=plan_of(key=product("h20"), product="h20").device
    )
    theirs = _plan("qwen3", (2, "reported", None))
    found = seed.compare(_report(), [], family.discover().packages, [elsewhere, theirs])
    assert {(line.race, line.plan_status) for line in found} == {("not measured", "not measured")}
    assert [line.claim for line in found] == ["not measured", "not measured", "", ""]
    page = seed.markdown(found, _report(), [], [])
    assert "None." in page
    assert "the plans shipped for `h200`: none." in page
