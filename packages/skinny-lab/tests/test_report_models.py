"""`skinny report` of a plan for many models and tensor-parallel sizes: sections, overview, narrowing, folding."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.plan import Cell, Evidence, Plan, Quantiles
from skinny_lab.bench import rows
from skinny_lab.bench.rows import Row
from skinny_lab.report import charts, content, results, sections, svg

pytest.importorskip("matplotlib")

Skinny = Callable[..., Result]
GPU = "Made-up GPU"


def _cell(n: int, k: int, m: int, *users: str, ours: float = 8.0, status: str = "win") -> Cell:
    """A made-up cell: 10 us are replaced."""
    q = lambda p50: Quantiles(round(p50 - 0.1, 3), p50, round(p50 + 0.1, 3))  # noqa: E731
    evidence = Evidence(
        candidate=q(ours), baseline=q(10.0), baseline_name="cublas", candidate_hot=q(ours), baseline_hot=q(10.0),
        rounds=15, rel_rmse=1.66e-3, in_model_us=-1.0,
    )  # fmt: skip
    return Cell(
        id=f"{users[0]}/M{m}", n=n, k=k, m=m, status=status, kernel="bf16_simt",  # type: ignore[arg-type]
        config={"threads": 128, "rows": 1, "chunks": 1}, why="" if status == "win" else "lost", evidence=evidence,
        used_by=users,
    )  # fmt: skip


def _shapes(model: str, tp: int) -> list[tuple[str, int, int]]:
    package = next(p for p in family.discover().packages if p.name == "qwen3")
    label = model if tp == 1 else f"{model}-tp{tp}"
    found = package.projections(package.configs[model], tp)
    return [(f"{label}/{p.name}", p.n, p.k) for p in found if not p.part_of]


def _plan(*wanted: tuple[str, int], ms: tuple[int, ...] = (1, 2)) -> Plan:
    """Every shape of these models and sizes, one cell for all that share it, in the order of the sizes."""
    users: dict[tuple[int, int], list[str]] = {}
    for model, tp in wanted:
        for name, n, k in _shapes(model, tp):
            users.setdefault((n, k), []).append(name)
    cells = [_cell(n, k, m, *names) for (n, k), names in users.items() for m in ms]
    key = device.product("h200")
    return Plan(
        family="qwen3", product="h200", environment=plan.Environment(gpu=GPU), cell=tuple(cells),
        device=plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class),
    )  # fmt: skip


MANY = [(model, tp) for tp in (1, 2) for model in ("qwen3-8b", "qwen3-4b")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One drawing for all charts of single shapes: their content is tested with one model."""
    monkeypatch.setattr(charts, "times", lambda name, model, *_: svg.Picture(name, model, "<svg />", 100.0))


def _report(skinny: Skinny, folder: Path, made: Plan, *options: str) -> tuple[Result, str, list[str]]:
    plan.dump(made, folder / "made-up.toml")
    result = skinny("report", str(folder / "made-up.toml"), "--out", str(folder / "out"), *options)
    page = folder / "out" / "index.html"
    files = sorted(f.stem for f in (folder / "out").glob("*.svg"))
    return result, page.read_text(encoding="utf-8") if page.is_file() else "", files


def test_a_model_has_a_section_for_each_size_one_beside_the_other(skinny: Skinny, tmp_path: Path) -> None:
    result, page, files = _report(skinny, tmp_path, _plan(*MANY))
    assert result.exit_code == 0, result.output
    titles = re.findall(r"<h3[^>]*>(.*?)</h3>", page)[:4]
    assert titles == ["qwen3-8b, h200", "qwen3-8b, TP 2, h200", "qwen3-4b, h200", "qwen3-4b, TP 2, h200"]
    listed = re.findall(r'<li>((?:<a href="#qwen3-h200-[^"]*">[^<]*</a>(?:, )?)+)</li>', page)
    assert [re.sub("<.*?>", "", one) for one in listed] == ["qwen3-8b, TP 2", "qwen3-4b, TP 2"]
    assert {f"qwen3-h200-{name}-speedup" for name in ("qwen3-8b", "qwen3-8b-tp2", "qwen3-4b", "qwen3-4b-tp2")} <= {
        *files
    }


def test_the_saving_of_a_size_stands_in_its_own_section_and_only_there(skinny: Skinny, tmp_path: Path) -> None:
    _, page, files = _report(skinny, tmp_path, _plan(*MANY))
    assert [f for f in files if "predicted" in f] == [
        f"qwen3-h200-{name}-predicted" for name in ("qwen3-4b", "qwen3-4b-tp2", "qwen3-8b", "qwen3-8b-tp2")
    ]
    assert "no installed package knows" not in page
    (source,) = content.open_sources([str(tmp_path / "made-up.toml")])
    ((tp, steps),) = content.predicted(source, "qwen3-8b-tp2")
    # qkv, o, gate_up and down of 36 layers and the head, 2 us each; one rank
    assert (tp, steps[0].saved_us) == (2, 2.0 * (4 * 36 + 1))
    _, page, files = _report(skinny, tmp_path / "alone", _plan(("qwen3-8b", 1)))
    assert [f for f in files if "predicted" in f] == ["qwen3-h200-qwen3-8b-predicted"]


def test_one_map_shows_all_models_and_counts_what_does_not_run_as_1(
    skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _plan(*MANY)
    _, _, files = _report(skinny, tmp_path, made)
    assert "qwen3-h200-models" in files
    drawn = (tmp_path / "out" / "qwen3-h200-models.svg").read_text(encoding="utf-8")
    assert drawn.count(">1.25</text>") == 8 + 1, "4 models x 2 values of M, and the end of the scale"
    assert ">qwen3-8b, TP 2</text>" in drawn
    seen: dict[tuple[int, int], charts.Tile] = {}
    monkeypatch.setattr(charts, "heat", lambda name, alt, title, rows, ms, tiles, *_: seen.update(tiles))
    lost = [_cell(4096, 4096, 1, "a/o", ours=20.0, status="refused"), _cell(8192, 4096, 1, "a/qkv")]
    told = _cell(4096, 4096, 1, "b/o", status="reported")
    charts.means("x", "qwen3", {"a": lost, "b": [told]}, GPU)
    assert {place: round(tile.value, 3) for place, tile in seen.items()} == {(0, 0): round(1.25**0.5, 3)}
    _, _, files = _report(skinny, tmp_path / "alone", _plan(("qwen3-8b", 1)))
    assert "qwen3-h200-models" not in files


def test_many_models_are_folded_and_few_are_not(skinny: Skinny, tmp_path: Path) -> None:
    _, page, _ = _report(skinny, tmp_path, _plan(*MANY))
    assert len(MANY) == sections.FOLDED_FROM
    assert (page.count("<details>"), page.count("<details open>")) == (8, 0)
    assert page.count("</details>") == 8
    assert "<summary>All 10 cells of qwen3-8b, TP 2</summary>" in page
    _, page, _ = _report(skinny, tmp_path / "few", _plan(*MANY[:2]))
    assert (page.count("<details>"), page.count("<details open>")) == (0, 4)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--model", "qwen3-8b"), ["qwen3-8b", "qwen3-8b, TP 2"]),
        (("--tp", "2"), ["qwen3-8b, TP 2", "qwen3-4b, TP 2"]),
        (("--model", "qwen3-4b", "--tp", "1"), ["qwen3-4b"]),
        (("--tp", "1", "--tp", "2", "--model", "qwen3-8b"), ["qwen3-8b", "qwen3-8b, TP 2"]),
    ],
)
def test_a_report_can_be_narrowed(skinny: Skinny, tmp_path: Path, options: tuple[str, ...], shown: list[str]) -> None:
    result, page, _ = _report(skinny, tmp_path, _plan(*MANY), *options)
    assert result.exit_code == 0, result.output
    titles = re.findall(r"<h3 id[^>]*>(.*?), h200</h3>", page)
    assert titles == shown


def test_a_narrowing_that_leaves_nothing_names_the_choice(skinny: Skinny, tmp_path: Path) -> None:
    result, page, _ = _report(skinny, tmp_path, _plan(*MANY), "--model", "qwen3-8b", "--tp", "4")
    assert result.exit_code == 2
    assert page == ""
    what, fix = result.stderr.splitlines()
    assert "no model of the plans" in what
    assert "choose from: qwen3-8b, qwen3-8b-tp2, qwen3-4b, qwen3-4b-tp2" in fix


def _row(kind: str, what: str, m: int, provider: str, p50: float) -> Row:
    return Row(
        kind=kind, what=what, n=4096, k=4096, m=m, provider=provider, config="", state="cold", status="", unit="us",
        p20=p50 * 0.99, p50=p50, p80=p50 * 1.01, rounds=9, device=GPU, driver="570.1", torch="2.11.0", commit="0123abc",
        date="2026-01-01",
    )  # fmt: skip


def test_the_race_to_the_limit_has_a_map_for_each_size(skinny: Skinny, tmp_path: Path) -> None:
    of = [
        _row("limit", what, m, name, us)
        for what in ("q8b.o", "q4b.o", "q8b.o.tp2", "q8b.o.tp8")
        for m in (1, 2)
        for name, us in (("skinny", 8.0), ("cublas", 10.0))
    ]
    rows.write_csv(tmp_path / "limit.csv", of)
    _, page, files = _report(skinny, tmp_path, _plan(("qwen3-8b", 1)), "--limit", str(tmp_path / "limit.csv"))
    assert [f for f in files if f.startswith("limit")] == ["limit-heatmap", "limit-heatmap-tp2", "limit-heatmap-tp8"]
    assert "cold L2, TP 8</text>" in (tmp_path / "out" / "limit-heatmap-tp8.svg").read_text(encoding="utf-8")
    assert "q8b.o.tp2</text>" not in (tmp_path / "out" / "limit-heatmap.svg").read_text(encoding="utf-8")
    assert page.count("All cells of limit.csv") == 2, "one table, and its label"


def test_a_third_arm_is_told_and_changes_nothing_else(skinny: Skinny, tmp_path: Path) -> None:
    pages = []
    for folder, arms in (("two", ("stock", "skinny")), ("three", ("stock", "skinny", "vllm_cute"))):
        of = [_row("tpot", "qwen3-8b", 1, arm, {"stock": 5.0, "skinny": 4.0}.get(arm, 4.5)) for arm in arms]
        (tmp_path / folder).mkdir()
        rows.write_csv(tmp_path / folder / "tpot.csv", of)
        given = ("--tpot", str(tmp_path / folder / "tpot.csv"))
        result, page, _ = _report(skinny, tmp_path / folder, _plan(("qwen3-8b", 1)), *given)
        assert result.exit_code == 0, result.output
        pages.append(page)
    name = "qwen3-h200-qwen3-8b-tpot.svg"
    two, three = ((tmp_path / folder / "out" / name).read_text(encoding="utf-8") for folder in ("two", "three"))
    assert two == three
    assert "<td>vllm_cute 4.500</td>" in pages[1]
    assert "no comparison" not in pages[1]
    alone = results.arms([row for row in of if row.provider != "skinny"])
    assert alone == []


def test_colours_of_markers_change_on_dark_paper() -> None:
    """A marker stands in the shadow tree of `<use>`: a selector with an ancestor does not reach it (Chromium)."""
    selectors = re.findall(r"([^{}]+)\{(?:fill|stroke):", svg.THEME)
    assert len(selectors) == 2 * len(svg.DARK)
    assert all(re.fullmatch(r'\[style\*="(fill|stroke): #\w{6}"\]', selector) for selector in selectors)


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("qwen3-8b", ("qwen3-8b", 1)), ("qwen3-8b-tp2", ("qwen3-8b", 2)), ("q8b.o.tp16", ("q8b.o", 16)),
        ("-tp2", ("-tp2", 1)), ("mytp2", ("mytp2", 1)),
    ],
)  # fmt: skip
def test_the_size_is_read_from_the_end_of_a_name(label: str, parts: tuple[str, int]) -> None:
    assert content.split(label) == parts
