"""`skinny plans check` and `seal` on files of every kind of health."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from skinny_core import kernels, plan, toml_text
from skinny_lab import plans

Skinny = Callable[..., Result]
TEXT = """\
# made by hand
schema = 1
family = "qwen3"
product = "h200"

[device]
capability = [9, 0]
sm_count = 132
l2_bytes = 62914560
memory_class = "141gb"

[[cell]]
id = "o/M1"
n = 4096
k = 4096
m = 1
status = "refused"
why = "slower than cuBLAS"
kernel = "bf16_simt"
config = { threads = 128, rows = 2, chunks = 4 } # the best of 40

[cell.evidence]
baseline_name = "cublas"
candidate = { p20 = 14.0, p50 = 14.1, p80 = 14.2 }
baseline = { p20 = 13.0, p50 = 13.2, p80 = 13.4 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "h200.toml"
    path.write_text(TEXT)
    return path


def test_shipped_plans_are_sound(skinny: Skinny) -> None:
    result = skinny("plans", "check")
    assert result.exit_code == 0, result.output


def test_a_file_without_a_digest_is_broken_and_seal_mends_it(skinny: Skinny, file: Path) -> None:
    assert skinny("plans", "check", str(file)).exit_code == 1
    assert skinny("plans", "seal", str(file)).exit_code == 0
    assert skinny("plans", "check", str(file)).exit_code == 0
    assert plan.load(file).digest == plan.load(file).seal()


def test_seal_keeps_comments_and_is_idempotent(skinny: Skinny, file: Path) -> None:
    skinny("plans", "seal", str(file))
    once = file.read_text()
    assert "# made by hand" in once
    assert "# the best of 40" in once
    skinny("plans", "seal", str(file))
    assert file.read_text() == once


def test_an_edit_after_sealing_is_seen(skinny: Skinny, file: Path) -> None:
    skinny("plans", "seal", str(file))
    file.write_text(file.read_text().replace("p50 = 14.1", "p50 = 14.05"))
    result = skinny("plans", "check", str(file), "--json")
    assert result.exit_code == 1
    (entry,) = json.loads(result.stdout)["files"]
    assert "digest" in entry["error"]["what"]
    assert "skinny plans seal" in entry["error"]["fix"]


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [
        ("n = 4096", "n = 4096\nrows = 4", "rows"),
        ("p50 = 14.1", "p50 = -14.1", "candidate"),
        ("threads = 128", "threads = 100", "config"),
        ("sm_count = 132", "sm_count = 78", "[device]"),
        ('why = "slower than cuBLAS"\n', "", "[[cell]]"),
        ("[device]", "[device", "[device"),
    ],
    ids=["unknown-key", "negative-time", "config", "device", "no-why", "syntax"],
)
def test_a_broken_file_is_shown_with_line_and_fix(skinny: Skinny, file: Path, old: str, new: str, at: str) -> None:
    text = TEXT.replace(old, new)
    file.write_text(text)
    result = skinny("plans", "check", str(file), "--json")
    assert result.exit_code == 1
    (entry,) = json.loads(result.stdout)["files"]
    assert text.splitlines()[entry["error"]["line"] - 1].startswith(at)
    assert entry["error"]["fix"]
    shown = skinny("plans", "check", str(file)).output
    assert "broken" in shown
    assert "fix:" in shown


def test_seal_refuses_a_broken_file_and_leaves_it(skinny: Skinny, file: Path) -> None:
    file.write_text(TEXT.replace("n = 4096", "n = -1"))
    before = file.read_text()
    result = skinny("plans", "seal", str(file))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert file.read_text() == before


def test_seal_writes_through_a_link(skinny: Skinny, file: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "mine.toml"
    link.parent.mkdir()
    link.symlink_to(Path("..") / file.name)
    assert skinny("plans", "seal", str(link)).exit_code == 0
    assert link.is_symlink()
    assert plan.load(file).digest == plan.load(file).seal()
    assert list(link.parent.iterdir()) == [link]


@pytest.mark.parametrize("kind", ["syntax", "digest", "unsealed", "folder"])
def test_the_place_of_a_fault_is_shown_once(skinny: Skinny, file: Path, kind: str) -> None:
    if kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "syntax":
        file.write_text("[device")
    elif kind == "digest":
        file.write_text('digest = "0"\n' + TEXT)
    (entry,) = json.loads(skinny("plans", "check", str(file), "--json").stdout)["files"]
    assert entry["error"]["file"] == str(file)
    assert str(file) not in entry["error"]["what"]
    shown = "".join(skinny("plans", "check", str(file)).output.split())
    assert shown.partition("fix:")[0].count(str(file)) == 1


def test_a_missing_file_is_named(skinny: Skinny, tmp_path: Path) -> None:
    assert "gone.toml" in skinny("plans", "check", str(tmp_path / "gone.toml"), "--json").stdout
    assert skinny("plans", "seal", str(tmp_path / "gone.toml")).exit_code == 2


def _win(
    m: int, p50: float, config: str = "chunks = 4", k: int = 4096, status: str = "win", spread: float = 0.1
) -> str:
    """The text of a cell of [4096, k] that takes p50 us where cuBLAS takes 20, cold and hot."""
    time, base = (f"{{ p20 = {t - spread}, p50 = {t}, p80 = {t + spread} }}" for t in (p50, 20.0))
    return f"""
[[cell]]
id = "o{k}/M{m}"
n = 4096
k = {k}
m = {m}
status = "{status}"
why = "told"
kernel = "bf16_simt"
config = {{ threads = 128, rows = 2, {config} }}

[cell.evidence]
baseline_name = "cublas"
candidate = {time}
baseline = {base}
candidate_hot = {time}
baseline_hot = {base}
rounds = 15
rel_rmse = 1.66e-3
in_model_us = -1.0
"""


def _check(skinny: Skinny, path: Path, *cells: str) -> list[dict[str, str]]:
    """Faults of a sealed file with these cells."""
    path.write_text(TEXT.partition("[[cell]]")[0] + "".join(cells))
    assert skinny("plans", "seal", str(path)).exit_code == 0
    result = skinny("plans", "check", str(path), "--json")
    (entry,) = json.loads(result.stdout)["files"]
    assert result.exit_code == bool(entry["faults"])
    assert entry["error"] == (entry["faults"][0] if entry["faults"] else None)
    found: list[dict[str, str]] = entry["faults"]
    return found


def test_a_win_that_is_slower_than_a_larger_m_is_a_fault(skinny: Skinny, file: Path) -> None:
    (fault,) = _check(
        skinny, file, _win(1, 8.0), _win(2, 10.0), _win(3, 9.5, "chunks = 2"), _win(4, 9.0, "chunks = 1")
    )[1:]
    assert "o4096/M3: 9.5 us at M = 3, yet o4096/M4 takes 9.0 us at M = 4" in fault["what"]
    assert "p20 9.4 > 1.02 * p80 9.1" in fault["what"]
    assert "use the config of M = 4: bf16_simt(chunks=1, " in fault["fix"]
    assert file.read_text().splitlines()[int(fault["line"]) - 1] == "candidate = { p20 = 9.4, p50 = 9.5, p80 = 9.6 }"
    shown = " ".join(skinny("plans", "check", str(file)).output.split())
    assert "broken" in shown
    assert shown.count("padding would be faster") == 2, "M = 2 and M = 3, each against the fastest of those above"
    assert shown.count("yet o4096/M4") == 2


def test_a_file_of_many_faults_is_read_once(skinny: Skinny, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each fault stands was looked up by a walk through the whole text: 21 s for 1500 faults (2026-12-01)."""
    read: list[int] = []
    real = toml_text._places
    monkeypatch.setattr(toml_text, "_places", lambda text: read.append(1) or real(text))
    ks = [4096 + 1024 * i for i in range(10)]
    cells = [_win(m, 10.0 if m < 8 else 9.0, "chunks = 1", k=k) for k in ks for m in range(1, 9)]
    _check(skinny, file, *cells)
    read.clear()
    assert len(plans.check_file(file).faults) == 70
    assert len(read) == 1


def test_a_plan_that_holds_such_cells_back_is_sound(skinny: Skinny, file: Path) -> None:
    """What the tuner and `measure_plan.py` write."""
    _check(skinny, file, _win(1, 8.0), _win(2, 10.0), _win(3, 9.5), _win(4, 9.0))
    judged, held = plans.hold_back(plan.load(file))
    assert held == ("o4096/M2", "o4096/M3")
    assert [cell.status for cell in judged.cells] == ["win", "refused", "refused", "win"]
    assert judged.cells[1].why == "10.00 us, slower than M = 4 (9.00 us): measure it again"
    assert plans.slower_than_larger(judged) == []
    assert plans.hold_back(judged) == (judged, ())


@pytest.mark.parametrize(
    "cells",
    [
        (_win(1, 8.0), _win(2, 8.0), _win(4, 9.0)),
        (_win(1, 9.2), _win(2, 9.0)),
        (_win(1, 9.4), _win(2, 9.04)),
        (_win(1, 15.0, k=8192), _win(2, 9.0)),
        (_win(1, 15.0, status="refused"), _win(2, 9.0)),
        (_win(1, 15.0), _win(2, 9.0, status="refused")),
    ],
    ids=["rising", "within-the-spreads", "within-the-drift", "another-shape", "small-refused", "large-refused"],
)
def test_times_that_do_not_fall_with_m_are_sound(skinny: Skinny, file: Path, cells: tuple[str, ...]) -> None:
    assert _check(skinny, file, *cells) == []


def test_the_fix_names_only_a_config_that_is_another_one_and_runs(
    skinny: Skinny, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = _check(skinny, file, _win(1, 10.0), _win(2, 9.0))
    assert "use the config" not in fault["fix"], "it is the config that was measured"
    assert f"skinny replay {file} --cell o4096/M1 --cell o4096/M2" in fault["fix"]
    refuses = kernels.refuses
    monkeypatch.setattr(
        kernels, "refuses", lambda c, p, m: "M >= 2 only" if (m, c.params[0][1]) == (1, 2) else refuses(c, p, m)
    )
    (fault,) = _check(skinny, file, _win(1, 10.0), _win(2, 9.0, "chunks = 2"))
    assert "use the config" not in fault["fix"], "the kernel does not take it at M = 1"


def test_every_fault_of_a_file_is_told(skinny: Skinny, file: Path) -> None:
    _check(skinny, file, _win(1, 10.0), _win(2, 9.0))
    file.write_text(file.read_text().replace("p50 = 10.0", "p50 = 10.05"))
    (entry,) = json.loads(skinny("plans", "check", str(file), "--json").stdout)["files"]
    assert ["digest" in f["what"] for f in entry["faults"]] == [True, False]
    assert " ".join(skinny("plans", "check", str(file)).output.split()).count("fix:") == 2


def test_the_printed_schema_is_the_one_that_ships_with_the_core(skinny: Skinny) -> None:
    """`nox -s plans-schema` writes it."""
    written = Path(plan.__file__).with_name("plan.schema.json").read_text()
    assert json.loads(skinny("plans", "schema").stdout) == json.loads(written)
