"""The commands of the race to the limit: arguments and exit status, the report's figures, its bytes. All rows here are
made up.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skinny_core import device, plan
from skinny_core.plan import Environment
from skinny_lab.bench import cells, limit, machine, peers, rows

ROOT = Path(__file__).resolve().parents[2]


def _command(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report() -> ModuleType:
    return _command("limit_report")


def _row(what: str, m: int, provider: str, of_limit: float, spread: float = 0.01) -> rows.Row:
    """A time at that fraction of the limit, for N = 2300, K = 1000 (the limit is 1 us)."""
    time = 1 / of_limit
    config = "made_up(x=1)" if provider == "skinny" else ""
    return rows.Row(
        "limit", what, 2300, 1000, m, provider, config, "cold", "", "us", time - spread, time, time + spread, 9,
        "made-up GPU", "1", "2", "c", "2026-01-01",
    )  # fmt: skip


MADE_UP = [
    _row("a", 1, "skinny", 0.8), _row("a", 1, "cublas", 0.4), _row("a", 1, "peer", 0.5),
    _row("b", 1, "skinny", 0.45), _row("b", 1, "cublas", 0.9), _row("b", 1, "other", 0.3),
    _row("a", 4, "skinny", 0.95), _row("a", 4, "cublas", 0.7), _row("a", 4, "peer", 0.951),
    _row("b", 4, "cublas", 0.7),
]  # fmt: skip

PLANNED = cells.planned_rows(plan.load(ROOT / "models" / "qwen3" / "src" / "skinny_qwen3" / "plans" / "h200.toml"))


def test_figures_by_hand(report: ModuleType) -> None:
    found = report.cells_of(MADE_UP)
    first, second = report.summarise(found)
    assert (first.m, first.shapes, first.ahead) == (1, 2, 1)
    assert first.ours == pytest.approx(0.6)
    assert first.cublas == pytest.approx(0.6)
    assert first.best_peer == pytest.approx(math.sqrt(0.5 * 0.9))
    assert first.speedup == pytest.approx(0.6 / math.sqrt(0.45))
    assert (second.m, second.shapes, second.ahead) == (4, 1, 0), (
        "b has none of ours; the peer of a is within the spread"
    )
    assert report.behind(found) == ["- b M = 1: cublas 1.11 us, skinny 2.22 us (+100.0 %), made_up(x=1)"]
    table = report.overview([first, second])
    assert "| 1 | 2 | 0.600 | 0.600 | 0.671 | 0.92 | no (-0.320) | 0.894x | 1 |" in table
    assert "| 4 | 1 | 0.950 | 0.700 | 0.951 | 0.90 | yes | 0.999x | 0 |" in table


def test_goals_are_those_of_the_issue(report: ModuleType) -> None:
    assert report.GOALS == {1: 0.92, 2: 0.91, 4: 0.90, 8: 0.89, 16: 0.86}


def test_other_rows_are_not_reported(report: ModuleType) -> None:
    with pytest.raises(ValueError, match="rows of kind cell"):
        report.cells_of(PLANNED)


def test_limit_rows_do_not_change_the_summary_of_planned_cells() -> None:
    assert rows.summarise([*PLANNED, *MADE_UP]) == rows.summarise(PLANNED)


def test_the_same_rows_give_the_same_bytes(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_csv(tmp_path / "limit.csv", MADE_UP)

    def run(*more: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["limit_report.py", str(tmp_path / "limit.csv"), "--out", str(tmp_path), *more]
        )
        return int(report.main())

    assert run("--check") == 1
    assert run() == 0
    assert {p.name for p in tmp_path.iterdir()} == {"limit.csv", "limit.md", "limit-heatmap.svg", "limit-geomean.svg"}
    heatmap = (tmp_path / "limit-heatmap.svg").read_text()
    assert "<dc:date>" not in heatmap
    assert run("--check") == 0
    (tmp_path / "limit-heatmap.svg").write_text(heatmap + "<!-- edited -->")
    capsys.readouterr()
    assert run("--check") == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"stale: {tmp_path / 'limit-heatmap.svg'}"
    assert "made-up GPU, driver 1, torch 2, 2026-01-01, commit c" in (tmp_path / "limit.md").read_text()


@pytest.mark.parametrize(("ended", "status"), [("done", 0), ("budget", 3), ("device", 1)])
def test_the_race_command(ended: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _command("limit_race")
    seen: dict[str, Any] = {}

    def run(cells: object, settings: object, contestants: object, key: object, files: object, **options: object) -> str:
        seen.update(cells=cells, settings=settings)
        return ended

    monkeypatch.setattr(device, "current_key", lambda index=None: device.product("h200"))
    monkeypatch.setattr(machine, "environment", lambda index=0, commit="": Environment(commit=commit))
    monkeypatch.setattr(peers, "peer_maker", lambda folder, only_safe: peers.Peers([], {"deepgemm": "absent"}))
    monkeypatch.setattr(limit, "run", run)
    arguments = ["--out", str(tmp_path), "--shapes", "q8b.o", "q4b.o.tp8", "--rows", "16", "1", "--kernels"]
    monkeypatch.setattr(sys, "argv", ["limit_race.py", *arguments, "bf16_stream", "bf16_simt:1-2"])
    assert command.main() == status
    assert [(s.name, s.n, s.k, m) for s, m in seen["cells"]] == [
        ("q4b.o.tp8", 2560, 512, 1), ("q8b.o", 4096, 4096, 1), ("q4b.o.tp8", 2560, 512, 16), ("q8b.o", 4096, 4096, 16),
    ]  # fmt: skip
    assert [str(e.stem) for e in seen["settings"].entrants] == ["bf16_stream", "bf16_simt"]
    assert f'"ended": "{ended}"' in (tmp_path / "limit.json").read_text()


@pytest.mark.parametrize("wrong", [["--shapes", "q9b.o"], ["--kernels", "bf16_nothing"], ["--rounds", "3"]])
def test_wrong_arguments_end_before_anything_is_measured(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: device.product("h200"))
    monkeypatch.setattr(sys, "argv", ["limit_race.py", "--out", str(tmp_path / "out"), *wrong])
    with pytest.raises(SystemExit) as stopped:
        _command("limit_race").main()
    assert stopped.value.code == 2
    assert not (tmp_path / "out").exists()
    assert "error" in capsys.readouterr().err
