"""What others reported: kept once, as published; the packages' plans are made from that and say that it is theirs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from skinny_core import device, env, family, kernels, plan, rules, table
from skinny_core.problem import MAX_M
from skinny_lab.bench import reported

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT / "benchmarks" / "reported" / "seed_h200_nvl.csv"
NVL = device.product("h200-nvl")


def _command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reported_plans", ROOT / "benchmarks" / "reported_plans.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> reported.Report:
    return reported.read(SEED)


def test_the_committed_plans_are_the_generated_ones() -> None:
    generated = _command().generated()
    assert {path.name for path in generated} == {"h200-nvl.toml"}
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"run `python benchmarks/reported_plans.py`: {path} is stale"
    committed = {path for path in ROOT.glob("models/*/src/*/plans/*.toml") if plan.load(path).only_reported}
    assert committed == set(generated), "a plan of reported cells that no report gives"


def test_every_cell_is_there_once_as_published(report: reported.Report) -> None:
    """By hand: 22 shapes in the table, each at M = 1 and 2, and 8 of them at M = 4; 7 cells in the text."""
    assert Counter(cell.m for cell in report.cells) == dict.fromkeys((1, 2, 4, 8, 16), 25)
    assert len({(cell.n, cell.k) for cell in report.cells}) == 25
    in_text = [cell for cell in report.kept if cell.models == "qwen3-30b-a3b"]
    in_table = [cell for cell in report.kept if cell.models != "qwen3-30b-a3b"]
    assert (len(in_table), len(in_text)) == (52, 7)
    assert Counter(cell.m for cell in in_table) == {1: 22, 2: 22, 4: 8}
    assert Counter(cell.m for cell in in_text) == {1: 3, 2: 3, 4: 1}
    for cell in report.kept:  # printed to 2 digits, of medians printed to 1 (0.05 of 6.9 us are 0.7 %) or of pairs
        assert cell.cublas_us
        assert cell.plan_us
        assert cell.cublas_us / cell.plan_us == pytest.approx(cell.speedup, rel=0.012)
        assert (cell.m == 4 and cell in in_table) == (cell.in_model_plan_us is not None)
    assert sum(cell.in_model_plan_us is not None for cell in report.cells if not cell.is_kept) == 2, "dropped ones"


def test_cells_are_those_of_their_models_and_nothing_that_was_not_published_is_claimed(report: reported.Report) -> None:
    found = reported.plans(report, family.discover().packages)
    assert {name: len(p.cells) for name, p in found.items()} == {"qwen3": 53, "llama31": 11}
    shapes = {name: {(c.n, c.k, c.m) for c in p.cells} for name, p in found.items()}
    assert len(shapes["qwen3"] & shapes["llama31"]) == 5, "QKV and o of both 8B models"
    assert len(shapes["qwen3"] | shapes["llama31"]) == 59
    configs = {p.name: set(p.configs) for p in family.discover().packages}
    for name, made in found.items():
        assert made.key == NVL
        for cell in made.cells:
            e = cell.evidence
            assert (cell.status, cell.kernel, cell.config) == ("reported", "vllm_cute", {})
            assert {use.split("/")[0] for use in cell.used_by} <= configs[name]
            assert "vLLM pull request, SM90_SKINNY_GEMM_PLANS, H200 NVL" in e.source
            assert "no spread was published" in e.source
            assert e.candidate.p20 == e.candidate.p50 == e.candidate.p80
            assert (e.candidate_hot, e.baseline_hot, e.rel_rmse, e.in_model_us, e.peers) == (None, None, None, None, {})
    shared = next(c for c in found["qwen3"].cells if (c.n, c.k, c.m) == (151936, 5120, 1))
    assert shared.used_by == ("qwen3-14b/lm_head", "qwen3-32b/lm_head")


@pytest.mark.parametrize("name", ["qwen3", "llama31"])
@pytest.mark.parametrize("settings", [env.Settings(), env.Settings(reported=True)], ids=["off", "reported"])
def test_no_shipped_reported_cell_runs(name: str, settings: env.Settings) -> None:
    package = next(p for p in family.discover().packages if p.name == name)
    built = table.build(name, package, settings)
    (theirs,) = (p for p in built.plans_for(NVL) if p.only_reported)
    assert {kernels.known(cell.kernel) for cell in theirs.cells} == {False}
    for cell in theirs.cells:
        for m in range(1, MAX_M + 1):
            problem = cell.problem(None)
            assert not table.judge(built.lookup(problem, m, NVL, settings), problem, m, NVL, settings).ok
        found = built.lookup(cell.problem(None), cell.m, NVL, settings)
        verdict = table.judge(found, cell.problem(None), cell.m, NVL, settings)
        assert verdict.reason is rules.Reason.REPORTED


def test_measured_wins_of_the_sxm_are_reached_from_the_nvl_by_opting_in() -> None:
    """Whatever plan is shipped for the SXM: each of its wins runs on an NVL, also where a reported cell is exact."""
    settings = env.Settings(neighbour=True)
    for package in family.discover().packages:
        built = table.build(package.name, package, settings)
        wins = [c for p in built.plans_for(device.product("h200")) for c in p.cells if c.status == "win"]
        for cell in wins:
            found = built.lookup(cell.problem(None), cell.m, NVL, settings)
            assert found
            assert found.cell is cell
            assert table.judge(found, cell.problem(None), cell.m, NVL, settings).ok
        if wins:
            assert "measured on h200" in table.offer(built, NVL)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("12.0,8.8", "12.0,", "seed.csv:2: column kept: 'yes'"),
        ("1.37,7,yes", "1.37,7,perhaps", "seed.csv:2: column kept: 'perhaps'"),
        ("qwen3-4b,6144,2560,1,", "qwen9-4b,6144,2560,1,", "no installed model package has a config named qwen9-4b"),
        ("qwen3-4b,6144,2560,1,", "qwen3-4b,6144,2048,1,", r"qwen3-4b/qkv is \(6144, 2560\), not \(6144, 2048\)"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = SEED.read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "seed.csv").write_text(text.replace(old, new))
    (tmp_path / "seed.toml").write_text(SEED.with_suffix(".toml").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match=says):
        reported.plans(reported.read(tmp_path / "seed.csv"), family.discover().packages)
