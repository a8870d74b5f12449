"""`skinny report`: structure and numbers of the page against made-up plans, and what goes wrong."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.plan import Cell, Evidence, Plan, Quantiles
from skinny_lab.report import content

pytest.importorskip("matplotlib")

Skinny = Callable[..., Result]
CONFIG = {"threads": 128, "rows": 2, "chunks": 1}
replace = msgspec.structs.replace
VOID = {"meta", "br", "img", "hr", "link", "input"}


def _q(p50: float) -> Quantiles:
    return Quantiles(round(p50 - 0.1, 3), p50, round(p50 + 0.1, 3))


def _cell(m: int, ours: float = 8.0, status: str = "win", **changes: object) -> Cell:
    """A made-up cell of qwen3-8b's o: baseline 10 us, one peer at 9 us."""
    evidence = Evidence(
        candidate=_q(ours), baseline=_q(10.0), baseline_name="cublas", candidate_hot=_q(ours), baseline_hot=_q(10.0),
        peers={"made_up_peer": 9.0}, rounds=15, rel_rmse=1.66e-3, in_model_us=-1.0,
    )  # fmt: skip
    found = Cell(
        id=f"qwen3-8b/o/M{m}", n=4096, k=4096, m=m, status=status, kernel="bf16_simt", config=CONFIG,  # type: ignore[arg-type]
        why="" if status == "win" else "1.010x cold, <needs> 1.05x", evidence=evidence, used_by=("qwen3-8b/o",),
    )  # fmt: skip
    return replace(found, **changes)


def _plan(*cells: Cell, product: str = "h200", **changes: object) -> Plan:
    key = device.product(product)
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    environment = plan.Environment(
        gpu="Made-up GPU", driver="570.1", commit="0123abc", date="2026-01-01", command="made --up <here>"
    )
    return replace(Plan(family="qwen3", product=product, device=table, environment=environment, cell=cells), **changes)


_AHEAD = replace(_cell(2).evidence, peer_ahead="made_up_peer", peers={"made_up_peer": 7.0})
PLAN = _plan(_cell(1), _cell(2, evidence=_AHEAD), _cell(4, 9.9, "refused"))


def _report(skinny: Skinny, folder: Path, made: Plan, *options: str) -> tuple[Result, str]:
    plan.dump(made, folder / "made-up.toml")
    result = skinny("report", str(folder / "made-up.toml"), "--out", str(folder / "out"), *options)
    page = folder / "out" / "index.html"
    return result, page.read_text(encoding="utf-8") if page.is_file() else ""


class Reader(HTMLParser):
    """Table rows as texts, ids, external references, and whether tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.rows: list[list[str]] = []
        self.nests = True
        self.feed(text)
        self.nests &= not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(given["id"] or "")
        self.targets += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        self.nests &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_numbers_of_a_made_up_plan(skinny: Skinny, tmp_path: Path) -> None:
    result, page = _report(skinny, tmp_path, PLAN)
    assert result.exit_code == 0, result.output
    assert "3 cells: 2 run, 1 were measured and refused, 0 are reported" in page
    rows = Reader(page).rows
    first = next(row for row in rows if row[:4] == ["o", "4096 x 4096", "1", "runs"])
    # 2 * 4096 * 4096 bytes at 4.60 TB/s are 7.295 us, 0.912 of 8 us; the spread is 9.9 / 8.1 to 10.1 / 7.9
    assert first[4:] == [
        "", "10.00", "8.00", "1.250 [1.222, 1.278]", "0.91", "1.250", "-1.0", "made_up_peer 9.00",
        "bf16_simt(chunks=1, rows=2, threads=128)",
    ]  # fmt: skip
    ahead = next(row for row in rows if row[:3] == ["o", "4096 x 4096", "2"])
    assert (ahead[4], ahead[11]) == ("peer ahead: made_up_peer", "made_up_peer 7.00 ahead")
    lost = next(row for row in rows if row[:3] == ["o", "4096 x 4096", "4"])
    assert lost[3:5] == ["refused", "1.010x cold, <needs> 1.05x"]
    # the means hold the refused cell too
    assert ["4", "0", "1", "1.010", "", "0.74"] in rows


def test_a_saving_is_labelled_as_predicted_and_counts_only_what_runs(skinny: Skinny, tmp_path: Path) -> None:
    _, page = _report(skinny, tmp_path, PLAN)
    rows = Reader(page).rows
    # 36 layers x 2 us; no cell of the other projections was measured
    assert ["1", *["not measured"] * 1, "72.0", *["not measured"] * 3, "72.0"] in rows
    assert ["4", "not measured", "refused", *["not measured"] * 3, "0.0"] in rows
    assert "microseconds saved per decode step, predicted from cells" in page
    assert "hold no engine with and without skinny" in page
    drawn = (tmp_path / "out" / "qwen3-h200-qwen3-8b-predicted.svg").read_text(encoding="utf-8")
    assert "predicted from cells" in drawn


def test_the_page_stands_alone_and_is_well_formed(skinny: Skinny, tmp_path: Path) -> None:
    _, page = _report(skinny, tmp_path, PLAN)
    read = Reader(page)
    assert read.nests
    assert len(read.ids) == len(set(read.ids))
    assert [t for t in read.targets if not t.startswith("#")] == []
    assert {t[1:] for t in read.targets} <= set(read.ids)
    for bad in ("<script", "@import", "<here>", "<needs>", "url(http"):
        assert bad not in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_every_picture_has_words_and_is_a_file_of_its_own(skinny: Skinny, tmp_path: Path) -> None:
    _, page = _report(skinny, tmp_path, PLAN)
    files = sorted((tmp_path / "out").glob("*.svg"))
    assert [f.name.removeprefix("qwen3-h200-qwen3-8b-") for f in files] == [
        "o-4096x4096.svg", "predicted.svg", "speedup.svg",
    ]  # fmt: skip
    assert len(re.findall(r'role="img" aria-label="[^"]{40,}"', page)) == len(files)
    for file in files:
        root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
        assert root.get("role") == "img"
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert "prefers-color-scheme" in file.read_text(encoding="utf-8")


def test_the_heat_map_hatches_refused_cells_and_marks_a_peer(skinny: Skinny, tmp_path: Path) -> None:
    _report(skinny, tmp_path, PLAN)
    text = (tmp_path / "out" / "qwen3-h200-qwen3-8b-speedup.svg").read_text(encoding="utf-8")
    for said in ("1.25", "1.25*", "1.01", "refused", "* a peer is ahead"):
        assert f">{said}</text>" in text, said
    assert text.count("fill: url(#") == 2  # the cell, and its key
    plain = _plan(_cell(1))
    _report(skinny, tmp_path, plain)
    text = (tmp_path / "out" / "qwen3-h200-qwen3-8b-speedup.svg").read_text(encoding="utf-8")
    assert "refused</text>" not in text
    assert "<pattern" not in text


def test_evidence_says_machine_software_commit_date_command(skinny: Skinny, tmp_path: Path) -> None:
    _, page = _report(skinny, tmp_path, PLAN)
    foot = page[page.index('id="evidence"') :]
    for said in ("Made-up GPU", "570.1", "0123abc", "2026-01-01", "made --up &lt;here&gt;", "seals the cells"):
        assert said in foot, said
    assert "<dt>torch</dt><dd>not told</dd>" in foot
    assert "skinny replay made-up.toml" in foot


def test_a_plan_without_wins_says_so(skinny: Skinny, tmp_path: Path) -> None:
    result, page = _report(skinny, tmp_path, _plan(_cell(1, 9.9, "refused"), _cell(2, 12.0, "refused")))
    assert result.exit_code == 0, result.output
    assert "No cell of this plan runs" in page
    assert "0 run, 2 were measured and refused" in page
    assert "so nothing is saved" in page
    assert "0.833 [0.818, 0.849]" in "".join(cell for row in Reader(page).rows for cell in row)


def test_a_plan_without_cells(skinny: Skinny, tmp_path: Path) -> None:
    result, page = _report(skinny, tmp_path, _plan())
    assert result.exit_code == 0, result.output
    assert "0 cells" in page


def test_a_reported_cell_names_its_source_and_counts_nowhere(skinny: Skinny, tmp_path: Path) -> None:
    told = _cell(1, status="reported", why="", evidence=replace(_cell(1).evidence, source="somebody's table 3"))
    _, page = _report(skinny, tmp_path, _plan(told))
    assert "reported, off" in page
    assert "measured by somebody else: somebody&#x27;s table 3" in page
    assert "Geometric means" not in page


def test_a_device_without_a_known_limit_has_no_floor(skinny: Skinny, tmp_path: Path) -> None:
    _, page = _report(skinny, tmp_path, _plan(_cell(1), product="h100-sxm"))
    assert "no limit known" in page
    assert "byte floor 7" not in page
    assert "no byte floor is drawn" in page


def test_an_edited_plan_is_told(skinny: Skinny, tmp_path: Path) -> None:
    plan.dump(PLAN, tmp_path / "made-up.toml")
    text = (tmp_path / "made-up.toml").read_text().replace("p50 = 9.9,", "p50 = 9.91,")
    (tmp_path / "made-up.toml").write_text(text)
    result = skinny("report", str(tmp_path / "made-up.toml"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert "edited after they were measured" in page
    assert "does NOT seal the cells" in page


def test_the_same_bytes_again_and_check(skinny: Skinny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result, _ = _report(skinny, tmp_path, PLAN, "--check")
    assert result.exit_code == 1
    assert not out.exists()
    _report(skinny, tmp_path, PLAN)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    result, _ = _report(skinny, tmp_path, PLAN, "--check")
    assert result.exit_code == 0, result.output
    command = [sys.executable, "-m", "skinny_lab", "report", str(tmp_path / "made-up.toml"), "--out"]
    subprocess.run([*command, str(tmp_path / "again")], check=True, capture_output=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()} == before
    page = out / "index.html"
    page.write_text(page.read_text() + " ")
    result, _ = _report(skinny, tmp_path, PLAN, "--check")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == f"stale: {page}"
    assert page.read_text().endswith(" ")


def test_the_shipped_plan_of_qwen3(skinny: Skinny, tmp_path: Path) -> None:
    # One of its models: all of them take half a minute to draw.
    result = skinny("report", "qwen3", "--model", "qwen3-8b", "--tp", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert read.nests
    assert len(read.ids) == len(set(read.ids))
    (source,) = content.open_sources(["qwen3"])
    listed = [row for row in read.rows if len(row) == 13 and row[2].isdigit()]
    assert len(listed) == sum(len(shape.cells) for shape in content.models(source.plan)["qwen3-8b"]) >= 80
    assert "skinny replay qwen3" in page


def test_without_a_name_all_shipped_plans(
    skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    default = content.open_sources([])
    assert {source.plan.family for source in default} >= {"qwen3"}
    monkeypatch.setattr(family, "discover", lambda: family.Discovery(()))
    result = skinny("report", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "no installed model package ships a plan" in result.stderr


def test_names_are_text_and_nothing_else(skinny: Skinny, tmp_path: Path) -> None:
    odd = _cell(1, used_by=("my<b>$model$&/o",))
    result, page = _report(skinny, tmp_path, _plan(odd))
    assert result.exit_code == 0, result.output
    assert "my<b>" not in page
    assert Reader(page).nests
    drawn = (tmp_path / "out" / "qwen3-h200-my-b-model-speedup.svg").read_text(encoding="utf-8")
    assert ">my&lt;b&gt;$model$&amp;: speed-up, cold L2</text>" in drawn  # not as mathematics
    ElementTree.fromstring(drawn)


def test_two_plans_of_one_device_keep_apart(skinny: Skinny, tmp_path: Path) -> None:
    for name, made in (("old", _plan(_cell(1, 9.0))), ("new", PLAN)):
        plan.dump(made, tmp_path / f"{name}.toml")
    paths = [str(tmp_path / f"{name}.toml") for name in ("old", "new")]
    result = skinny("report", *paths, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "qwen3-h200-2-qwen3-8b-speedup.svg").is_file()
    read = Reader((tmp_path / "out" / "index.html").read_text())
    assert len(read.ids) == len(set(read.ids))


@pytest.mark.parametrize(("text", "says"), [("[device", "broken.toml:1"), (None, "broken.toml: No such file")])
def test_an_unreadable_plan_is_named(skinny: Skinny, tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "broken.toml").write_text(text)
    result = skinny("report", str(tmp_path / "broken.toml"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(skinny: Skinny, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    result, _ = _report(skinny, tmp_path, PLAN)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_without_matplotlib_it_says_what_to_install(
    skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, page = _report(skinny, tmp_path, PLAN)
    assert result.exit_code == 2
    assert page == ""
    what, fix = result.stderr.splitlines()
    assert "matplotlib" in what
    assert "pip install 'skinny-lab[report]'" in fix


def test_no_other_command_imports_matplotlib() -> None:
    code = (
        "import sys, skinny_lab.cli, skinny_lab.plans, skinny_lab.explain.command, skinny_lab.report.command;"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_fits_80_columns(skinny: Skinny) -> None:
    result = skinny("report", "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
