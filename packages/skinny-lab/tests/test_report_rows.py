"""`skinny report --tpot --limit`: measured time per token, the race to the limit, and rows that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from skinny_core import device, plan
from skinny_core.plan import Cell, Evidence, Plan, Quantiles
from skinny_lab.bench import rows
from skinny_lab.bench.rows import Row
from skinny_lab.report import results

pytest.importorskip("matplotlib")

Skinny = Callable[..., Result]
GPU = "Made-up GPU"


def _row(kind: str, what: str, m: int, provider: str, p50: float, **changes: object) -> Row:
    values: dict[str, object] = {
        "kind": kind, "what": what, "n": 0, "k": 0, "m": m, "provider": provider, "config": "", "state": "engine",
        "status": "", "unit": "ms", "p20": p50 * 0.99, "p50": p50, "p80": p50 * 1.01, "rounds": 9, "device": GPU,
        "driver": "570.1", "torch": "2.11.0", "commit": "0123abc", "date": "2026-01-01", **changes,
    }  # fmt: skip
    return Row(**values)  # type: ignore[arg-type]


def _tpot(m: int, stock: float, ours: float, **changes: object) -> list[Row]:
    return [_row("tpot", "qwen3-8b", m, name, ms, **changes) for name, ms in (("stock", stock), ("skinny", ours))]


def _limit(what: str, m: int, ours: float | None, **peers: float) -> list[Row]:
    times = {**({} if ours is None else {"skinny": ours}), **peers}
    return [
        _row("limit", what, m, name, us, n=4096, k=4096, state="cold", unit="us", device="NVIDIA H200")
        for name, us in times.items()
    ]


@pytest.fixture
def made_up(tmp_path: Path) -> str:
    """The path of a plan with one made-up cell of qwen3-8b."""
    key = device.product("h200")
    q = Quantiles(7.9, 8.0, 8.1)
    evidence = Evidence(
        candidate=q, baseline=Quantiles(9.9, 10.0, 10.1), baseline_name="cublas", candidate_hot=q,
        baseline_hot=Quantiles(9.9, 10.0, 10.1), rounds=15, rel_rmse=1.66e-3,
    )  # fmt: skip
    cell = Cell(
        id="qwen3-8b/o/M1", n=4096, k=4096, m=1, status="win", kernel="bf16_simt",
        config={"threads": 128, "rows": 2, "chunks": 1}, used_by=("qwen3-8b/o",), evidence=evidence,
    )  # fmt: skip
    made = Plan(
        family="qwen3", product="h200", environment=plan.Environment(gpu=GPU), cell=(cell,),
        device=plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class),
    )  # fmt: skip
    plan.dump(made, tmp_path / "made-up.toml")
    return str(tmp_path / "made-up.toml")


def _report(skinny: Skinny, folder: Path, made_up: str, kind: str, of: list[Row]) -> tuple[Result, str]:
    rows.write_csv(folder / f"{kind}.csv", of)
    result = skinny("report", made_up, f"--{kind}", str(folder / f"{kind}.csv"), "--out", str(folder / "out"))
    page = folder / "out" / "index.html"
    return result, page.read_text(encoding="utf-8") if page.is_file() else ""


def _cells(*texts: str) -> str:
    return "".join(f'<td class="number">{text}</td>' for text in texts)


def test_measured_time_per_token_takes_the_place_of_the_prediction(
    skinny: Skinny, tmp_path: Path, made_up: str
) -> None:
    result, page = _report(skinny, tmp_path, made_up, "tpot", [*_tpot(1, 5.0, 4.0), *_tpot(8, 6.0, 6.003)])
    assert result.exit_code == 0, result.output
    assert _cells("1", "5.000", "4.000", "-20.0 %") + "<td>beyond it</td>" in page
    assert _cells("8", "6.000", "6.003", "+0.0 %") + "<td>within it: no difference shown</td>" in page
    assert "predicted from cells, Made-up" not in page
    assert not (tmp_path / "out" / "qwen3-h200-qwen3-8b-predicted.svg").exists()
    drawn = (tmp_path / "out" / "qwen3-h200-qwen3-8b-tpot.svg").read_text(encoding="utf-8")
    for said in (">−20.0 %</text>", ">(+0.0 %)</text>", ">(within the spread of the steps)</text>", ">faster</text>"):
        assert said in drawn, said
    assert ">slower</text>" not in drawn


def test_a_slower_engine_is_drawn_as_slower(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    _, page = _report(skinny, tmp_path, made_up, "tpot", _tpot(1, 5.0, 6.0))
    assert "+20.0 %" in page
    drawn = (tmp_path / "out" / "qwen3-h200-qwen3-8b-tpot.svg").read_text(encoding="utf-8")
    assert ">slower</text>" in drawn
    assert ">faster</text>" not in drawn


def test_rows_of_another_device_or_model_stand_apart(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    _, page = _report(skinny, tmp_path, made_up, "tpot", _tpot(1, 5.0, 4.0, device="Another made-up GPU"))
    assert "without a plan above" in page
    assert "predicted from cells" in page  # of the plan's device nothing was measured
    assert "Another made-up GPU" in page


def test_one_arm_alone_is_no_comparison(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    result, page = _report(skinny, tmp_path, made_up, "tpot", _tpot(1, 5.0, 4.0)[:1])
    assert result.exit_code == 0, result.output
    assert "qwen3-8b at concurrency 1: only stock was measured: no comparison" in page
    assert "predicted from cells, Made-up GPU" in page


def test_several_processes_give_the_median_and_the_outermost_spread() -> None:
    of = [*_tpot(1, 5.0, 4.0), *_tpot(1, 5.2, 4.2), *_tpot(1, 6.0, 4.3)]
    (arms,) = results.arms(of)
    assert (arms.stock, arms.ours, arms.runs) == (5.2, 4.2, 3)
    assert arms.stock_spread == pytest.approx((4.95, 6.06))


def test_the_race_to_the_limit(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    of = [*_limit("q.o", 1, 8.0, cublas=10.0, a_peer=9.0), *_limit("q.o", 2, 9.0, cublas=10.0, a_peer=8.0)]
    of += _limit("q.o", 4, None, cublas=10.0)
    result, page = _report(skinny, tmp_path, made_up, "limit", of)
    assert result.exit_code == 0, result.output
    assert _cells("4096 x 4096", "1", "8.00", "0.912", "10.00", "a_peer 9.00", "1.125") + "<td></td>" in page
    ahead = _cells("4096 x 4096", "2", "9.00", "0.810", "10.00", "a_peer 8.00", "0.889")
    assert f'{ahead}<td><span class="warn">a_peer ahead</span></td>' in page
    assert _cells("4096 x 4096", "4", "not raced", "", "10.00", "cublas 10.00", "") in page
    drawn = tmp_path / "out" / "limit-heatmap.svg"
    assert ">0.81*</text>" in drawn.read_text(encoding="utf-8")


def test_within_the_spread_nobody_is_ahead() -> None:
    (cell,) = results.limit_cells(_limit("q.o", 1, 8.0, cublas=10.0, a_peer=7.9))
    assert cell.ahead == ""
    assert cell.peers[0].provider == "a_peer"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rows.csv: No such file"),
        ("kind,what\ntpot,x\n", "rows.csv:2: column n"),
        ("", "holds no rows"),
        ("\x00\xff", "rows.csv"),
    ],
    ids=["absent", "other columns", "empty", "bytes"],
)
@pytest.mark.parametrize("option", ["--tpot", "--limit"])
def test_rows_that_cannot_be_read_are_named(
    skinny: Skinny, tmp_path: Path, made_up: str, option: str, text: str | None, says: str
) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    result = skinny("report", made_up, option, str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_rows_of_another_kind_are_refused(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    result, _ = _report(skinny, tmp_path, made_up, "limit", _tpot(1, 5.0, 4.0))
    assert result.exit_code == 2
    assert "limit.csv: rows of kind tpot" in result.stderr


def test_a_time_that_is_none_is_refused(skinny: Skinny, tmp_path: Path, made_up: str) -> None:
    result, _ = _report(skinny, tmp_path, made_up, "tpot", _tpot(1, 5.0, 0.0))
    assert result.exit_code == 2
    assert "a time of 0.0" in result.stderr
