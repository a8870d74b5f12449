"""`skinny plans diff`: each kind of change, their order, and what is none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.plan import Cell, Evidence, Plan, Quantiles
from skinny_lab import plan_diff

Skinny = Callable[..., Result]
CONFIG = {"threads": 128, "rows": 2, "chunks": 4}
replace = msgspec.structs.replace


def _cell(
    m: int, ours: float = 8.0, status: str = "win", *, n: int = 4096, spread: float = 0.1, **changes: object
) -> Cell:
    q = lambda p50: Quantiles(round(p50 - spread, 3), p50, round(p50 + spread, 3))  # noqa: E731
    evidence = Evidence(
        candidate=q(ours), baseline=q(10.0), baseline_name="cublas", candidate_hot=q(ours), baseline_hot=q(10.0),
        rounds=15, rel_rmse=1.66e-3, in_model_us=-1.0,
    )  # fmt: skip
    found = Cell(
        id=f"o{n}/M{m}", n=n, k=4096, m=m, status=status, kernel="bf16_simt", config=CONFIG,  # type: ignore[arg-type]
        why="" if status == "win" else "1.010x cold, needs 1.05x", evidence=evidence, used_by=("qwen3-8b/o",),
    )  # fmt: skip
    return replace(found, **changes)


def _plan(*cells: Cell, product: str = "h200", **changes: object) -> Plan:
    key = device.product(product)
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    environment = plan.Environment(driver="570.1", date="2026-01-01")
    return replace(Plan(family="qwen3", product=product, device=table, environment=environment, cell=cells), **changes)


OLD = _plan(_cell(1), _cell(2), _cell(3), _cell(4, 9.9, "refused"))


def _diff(skinny: Skinny, folder: Path, old: Plan, new: Plan, *options: str) -> Result:
    plan.dump(old, folder / "old.toml")
    plan.dump(new, folder / "new.toml")
    return skinny("plans", "diff", str(folder / "old.toml"), str(folder / "new.toml"), *options)


def test_the_same_plan_is_the_same(skinny: Skinny, tmp_path: Path) -> None:
    result = _diff(skinny, tmp_path, OLD, OLD)
    assert result.exit_code == 0
    assert "4 cells unchanged" in result.output
    assert "measured again" not in result.output


def test_numbers_within_the_spreads_and_software_are_no_difference(skinny: Skinny, tmp_path: Path) -> None:
    again = _plan(
        _cell(1, 8.1), *OLD.cells[1:], environment=plan.Environment(driver="580.2", date="2026-02-02")
    )  # fmt: skip
    result = _diff(skinny, tmp_path, OLD, again)
    assert result.exit_code == 0
    assert "driver: 570.1 -> 580.2; date: 2026-01-01 -> 2026-02-02" in result.output
    assert "4 cells unchanged, 1 of them measured again" in result.output


@pytest.mark.parametrize(
    ("new", "kinds", "says"),
    [
        (_plan(*OLD.cells[:3], _cell(4, 8.0)), ("status", "speed"), "refused -> win; 1.010 [0.990, 1.031] -> 1.250"),
        (_plan(_cell(1, 9.9, "refused"), *OLD.cells[1:]), ("status", "speed"), "win -> refused (1.010x cold, needs"),
        (_plan(_cell(1, config={**CONFIG, "chunks": 2}), *OLD.cells[1:]), ("config",), "chunks=4, "),
        (_plan(_cell(1, 8.5), *OLD.cells[1:]), ("speed",), "1.250 [1.222, 1.278] -> 1.176 [1.151, 1.202] x"),
        (_plan(*OLD.cells[1:]), ("removed",), "win at 1.250x, bf16_simt("),
        (_plan(*OLD.cells, _cell(1, n=6144)), ("added",), "win at 1.250x, bf16_simt("),
        (_plan(_cell(1, id="attn/M1"), *OLD.cells[1:]), ("name",), "was called o4096/M1"),
        (_plan(_cell(1, used_by=("x/o",)), *OLD.cells[1:]), ("name",), "used by qwen3-8b/o -> x/o"),
    ],
    ids=["won", "lost", "config", "speed", "removed", "added", "id", "users"],
)  # fmt: skip
def test_each_kind_of_change(skinny: Skinny, tmp_path: Path, new: Plan, kinds: tuple[str, ...], says: str) -> None:
    result = _diff(skinny, tmp_path, OLD, new)
    assert result.exit_code == 1
    assert f"{plan_diff.KINDS[kinds[0]]}: 1" in result.output
    assert says in result.output
    (change,) = plan_diff.compare(OLD, new).changes
    assert change.kinds == kinds


def test_cells_of_another_id_are_matched_by_problem_and_m() -> None:
    renamed = _plan(*(replace(cell, id=f"x/M{cell.m}") for cell in OLD.cells))
    assert {change.kinds for change in plan_diff.compare(OLD, renamed).changes} == {("name",)}


def test_the_most_important_comes_first(skinny: Skinny, tmp_path: Path) -> None:
    old = _plan(
        _cell(1), _cell(2), _cell(3, 9.9, "refused"), _cell(4), _cell(1, n=2048), _cell(2, n=2048),
        _cell(1, 9.9, "refused", n=1024), _cell(2, n=1024),
    )  # fmt: skip
    new = _plan(
        _cell(1, 8.5), _cell(2, 9.0), _cell(3), _cell(4, 9.9, "refused"), _cell(1, n=2048, id="new/M1"),
        _cell(2, n=2048, config={**CONFIG, "chunks": 2}), _cell(1, n=512),
    )  # fmt: skip
    found = plan_diff.compare(old, new)
    assert [(c.kinds[0], c.cell) for c in found.changes] == [
        ("status", "o4096/M4"), ("status", "o4096/M3"), ("removed", "o1024/M2"), ("removed", "o1024/M1"),
        ("added", "o512/M1"), ("config", "o2048/M2"), ("speed", "o4096/M2"), ("speed", "o4096/M1"), ("name", "new/M1"),
    ]  # fmt: skip
    output = _diff(skinny, tmp_path, old, new).output
    places = [output.index(f"{title}: ") for title in plan_diff.KINDS.values()]
    assert places == sorted(places)


def test_a_plan_that_grew_by_many_shapes_is_told_by_shape(skinny: Skinny, tmp_path: Path) -> None:
    """One line for a shape, not one for each of its cells: from 160 to 1300 cells that was 1200 lines (2026-12-01)."""
    ms = (1, 2, 3, 4, 8)
    config = {**CONFIG, "chunks": 1}
    grown = [_cell(m, 8.0 + m / 10, n=512 * i, config=config) for i in range(1, 75) for m in ms if 512 * i != 4096]
    grown[4] = _cell(8, 9.9, "refused", n=512, config=config)
    shared = [replace(cell, used_by=("qwen3-8b/o", "qwen3-4b-tp2/o")) for cell in OLD.cells]
    result = _diff(skinny, tmp_path, OLD, _plan(*shared, *grown))
    lines = result.output.splitlines()
    assert "365 added, 4 id or users changed, 0 cells unchanged" in lines
    assert "  o512  512 x 4096, M 1-4, 8: 4 win, 1 refused; 1.010x to 1.235x" in lines
    told = "3 win, 1 refused; 1.010x to 1.250x; used by qwen3-8b/o -> qwen3-8b/o, qwen3-4b-tp2/o"
    assert f"  o4096  4096 x 4096, M 1-4: {told}" in lines
    assert len(lines) < 90
    assert sum(c.kinds == ("added",) for c in plan_diff.compare(OLD, _plan(*shared, *grown)).changes) == 365


def test_another_device_or_family_is_said_first(skinny: Skinny, tmp_path: Path) -> None:
    other = _plan(*OLD.cells, product="h100-sxm", family="llama31")
    result = _diff(skinny, tmp_path, OLD, other)
    assert result.exit_code == 1
    first, second = result.output.splitlines()[:2]
    assert first.startswith("different devices: h200 (")
    assert "h100-sxm (" in first
    assert second == "different families: qwen3 and llama31"


def test_json_says_all_of_it(skinny: Skinny, tmp_path: Path) -> None:
    new = _plan(_cell(1, 9.9, "refused"), *OLD.cells[2:])
    found = json.loads(_diff(skinny, tmp_path, OLD, new, "--json").stdout)
    assert found["same"] is False
    assert found["counts"] == {"status": 1, "removed": 1, "added": 0, "config": 0, "speed": 0, "name": 0}
    assert found["unchanged"] == 2
    assert (found["old"]["cells"], found["new"]["cells"]) == (4, 3)
    status, removed = found["changes"]
    assert (status["cell"], status["kinds"], status["m"]) == ("o4096/M1", ["status", "speed"], 1)
    assert (status["old"]["status"], status["new"]["status"]) == ("win", "refused")
    assert status["old"]["speedup"] == [1.2222, 1.25, 1.2785]
    assert removed["new"] is None
    same = _diff(skinny, tmp_path, OLD, OLD, "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["same"] is True


def test_a_plan_that_cannot_be_read_is_2_and_two_lines(skinny: Skinny, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[device")
    plan.dump(OLD, tmp_path / "old.toml")
    for name in ("broken.toml", "gone.toml"):
        result = skinny("plans", "diff", str(tmp_path / "old.toml"), str(tmp_path / name))
        assert result.exit_code == 2
        assert name in result.stderr
        assert len(result.stderr.splitlines()) == 2


def test_a_package_name_stands_for_its_plan_of_the_same_device(
    skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here.toml", tmp_path / "there.toml"
    plan.dump(OLD, here)
    plan.dump(_plan(*OLD.cells, product="h100-sxm"), there)
    package = dataclasses.replace(family.discover().packages[0], name="two", plan_files=lambda: (there, here))
    monkeypatch.setattr(family, "discover", lambda: family.Discovery((package,)))
    for names in (("two", str(here)), (str(there), "two")):
        result = skinny("plans", "diff", *names)
        assert result.exit_code == 0, result.output


def test_help_fits_80_columns(skinny: Skinny) -> None:
    result = skinny("plans", "diff", "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
