"""Which plan speaks: order of precedence, other devices, files that cannot be used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from skinny_core import env, plan, table
from skinny_core.device import DeviceKey, key_from_properties, product, products
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell
from skinny_core.problem import Problem
from skinny_core.rules import Reason
from skinny_core.table import Source, Table, judge
from skinny_core.testing.stand_in import StandIn, cell, plan_of

H200, H100, B200 = product("h200"), product("h100-sxm"), product("b200")
PROBLEM = Problem(n=64, k=64)


def _write(path: Path, *cells: Cell, name: str = "h200", family: str = "test") -> Path:
    plan.dump(plan_of(*cells, key=product(name), product=name, family=family), path)
    return path


def _package(*paths: Path) -> ModelPackage:
    return ModelPackage("test", "1", (), {}, lambda config, tp: (), lambda: paths)


def _table(*sources: tuple[str, tuple[Cell, ...]]) -> Table:
    return Table("test", tuple(Source(Path(), "user", plan_of(*c, key=product(n), product=n)) for n, c in sources))


def _reason(t: Table, key: DeviceKey | None, settings: env.Settings = env.Settings(), m: int = 1) -> Reason | None:  # noqa: B008
    return judge(t.lookup(PROBLEM, m, key, settings), PROBLEM, m, key, settings).reason


def test_skinny_before_user_before_package(kernel: StandIn, tmp_path: Path, skinny: Callable[[str], None]) -> None:
    package = _package(_write(tmp_path / "c.toml", *(cell(64, 64, m, variant=3) for m in (1, 2, 3))))
    user = _write(env.user_plan_folder() / "b.toml", *(cell(64, 64, m, variant=2) for m in (1, 2)))
    skinny(f"plan={_write(tmp_path / 'a.toml', cell(64, 64, 1, variant=1))}")
    try:
        built = table.build("test", package, env.settings())
    finally:
        user.unlink()
    assert [s.origin for s in built.sources] == ["SKINNY", "user", "package"]
    assert built.notes == ()
    found = [built.lookup(PROBLEM, m, H200, env.Settings()) for m in (1, 2, 3, 4)]
    assert [f and f.cell.config["variant"] for f in found] == [1, 2, 3, None]
    assert built.shapes() == {(64, 64)}


def test_a_refusal_of_higher_precedence_hides_a_win(kernel: StandIn) -> None:
    built = _table(("h200", (cell(64, 64, 1, "refused"),)), ("h200", (cell(64, 64, 1),)))
    assert _reason(built, H200) is Reason.REFUSED


def test_an_exact_plan_of_lower_precedence_beats_a_neighbours(kernel: StandIn) -> None:
    built = _table(("h100-sxm", (cell(64, 64, 1, variant=1),)), ("h200", (cell(64, 64, 1, variant=2),)))
    found = built.lookup(PROBLEM, 1, H200, env.Settings(neighbour=True))
    assert found is not None
    assert (found.exact, found.cell.config) == (True, {"variant": 2})


def test_other_device_or_off_table(kernel: StandIn) -> None:
    built = _table(("h200", (cell(64, 64, 1), cell(64, 64, 2, "reported"), cell(64, 64, 4, "refused"))))
    assert _reason(built, H200) is None
    assert _reason(built, H100) is Reason.OTHER_DEVICE
    assert _reason(built, B200) is Reason.OTHER_DEVICE, (
        "another capability: never offered, but the reason is the device"
    )
    assert _reason(built, H200, m=3) is Reason.OFF_TABLE
    assert _reason(built, H100, m=3) is Reason.OFF_TABLE
    assert _reason(built, H200, m=2) is Reason.REPORTED
    assert _reason(built, H200, m=4) is Reason.REFUSED
    assert _reason(built, H200, m=17) is Reason.M_RANGE
    assert _reason(built, None) is Reason.NOT_CUDA
    assert _reason(built, None, m=3) is Reason.NOT_CUDA


def test_opting_in(kernel: StandIn) -> None:
    built = _table(("h200", (cell(64, 64, 1), cell(64, 64, 2, "reported"))))
    assert _reason(built, H100, env.Settings(neighbour=True)) is None
    assert _reason(built, B200, env.Settings(neighbour=True)) is Reason.OTHER_DEVICE
    assert _reason(built, H100, env.Settings(neighbour=True), m=2) is Reason.REPORTED
    assert _reason(built, H100, env.Settings(neighbour=True, reported=True), m=2) is None
    assert _reason(built, H200, env.Settings(reported=True), m=2) is None


@pytest.mark.parametrize("m", [1, 3])
def test_settings_come_first_also_off_the_table(kernel: StandIn, m: int) -> None:
    built = _table(("h200", (cell(64, 64, 1),)))
    assert _reason(built, H200, env.Settings(enabled=False), m=m) is Reason.DISABLED
    assert _reason(built, H200, env.Settings(batch_invariant=True), m=m) is Reason.BATCH_INVARIANT


def test_offers(kernel: StandIn) -> None:
    built = _table(("h200", (cell(64, 64, 1),)), ("h20", (cell(64, 64, 1),)))
    offered = table.offer(built, H100)
    assert offered.startswith("no plan for h100-sxm")
    assert "measured on h20, h200" in offered
    assert "SKINNY=neighbour=on" in offered
    assert table.offer(built, H200) == table.offer(built, None) == ""
    assert table.offer(built, B200).startswith("no plan of test for b200")
    assert "the original calls run" in table.offer(built, B200)
    assert table.device_name(None) == "no CUDA device"


SLICE = key_from_properties(
    SimpleNamespace(
        name="NVIDIA H200 MIG 1g.18gb", major=9, minor=0, multi_processor_count=16, L2_cache_size=7864320,
        total_memory=int(16.25 * 2**30),
    )
)  # fmt: skip


@pytest.mark.parametrize("name", [*products(), "a MIG slice of an h200"])
def test_the_plan_of_an_h200_is_offered_by_name_to_its_neighbours_and_off(kernel: StandIn, name: str) -> None:
    """Neither offered nor opted in to across capabilities, of which 10.0 and 10.3 are two."""
    built = _table(("h200", (cell(64, 64, 1),)))
    key = product(name) if name in products() else SLICE
    if name == "h200":
        assert (_reason(built, key), table.offer(built, key)) == (None, "")
        return
    near = name in ("h200-nvl", "h100-sxm", "h100-pcie", "h100-nvl", "gh200", "h20") or key is SLICE
    assert near == (name not in ("b200", "b300", "gb10"))
    assert ("measured on h200: try it with SKINNY=neighbour=on" in table.offer(built, key)) is near
    assert str(key) in table.offer(built, key)
    assert _reason(built, key) is Reason.OTHER_DEVICE
    assert _reason(built, key, env.Settings(neighbour=True)) is (None if near else Reason.OTHER_DEVICE)


def test_families(kernel: StandIn, tmp_path: Path) -> None:
    own = _write(tmp_path / "own.toml", cell(64, 64, 1))
    every = _write(tmp_path / "every.toml", cell(64, 64, 2), family="*")
    other = _write(tmp_path / "other.toml", cell(64, 64, 3), family="another")
    built = table.build("test", _package(own, every, other), env.Settings())
    assert [s.path for s in built.sources] == [own, every]


@pytest.mark.parametrize(
    ("text", "says"),
    [("schema = ", "bad.toml:1: not TOML"), ("x = " + "[" * 99999, "bad.toml: not TOML"), (None, "No such file")],
)
def test_a_users_file_that_cannot_be_used_warns_once_and_is_noted(
    kernel: StandIn, tmp_path: Path, text: str | None, says: str
) -> None:
    bad = tmp_path / "bad.toml"
    if text is not None:
        bad.write_text(text)
    settings = env.Settings(plans=(str(bad),))
    good = _write(tmp_path / "good.toml", cell(64, 64, 1))
    with pytest.warns(RuntimeWarning, match="skinny: plan ignored") as seen:
        built = table.build("test", _package(good), settings)
    assert len(seen) == 1
    assert says in built.notes[0]
    assert str(bad) in built.notes[0]
    assert built.lookup(PROBLEM, 1, H200, settings) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.build("test", None, settings).notes == built.notes


def test_a_folder_or_an_unknown_user_as_plan_is_noted(tmp_path: Path) -> None:
    settings = env.Settings(plans=(str(tmp_path), "~no-such-user-here/a.toml"))
    with pytest.warns(RuntimeWarning, match="plan ignored"):
        notes = table.build("test", None, settings).notes
    assert len(notes) == 2


def test_a_shipped_file_that_cannot_be_used_is_noted_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("family = 1")
    assert "a.toml:1" in table.build("test", _package(tmp_path / "a.toml"), env.Settings()).notes[0]


def test_a_package_that_cannot_say_where_its_plans_are_is_noted(tmp_path: Path) -> None:
    def broken() -> tuple[Path, ...]:
        raise FileNotFoundError("no plans folder")

    package = ModelPackage("test", "1", (), {}, lambda config, tp: (), broken)
    assert table.build("test", package, env.Settings()).notes == (
        "plans of test not found: FileNotFoundError: no plans folder",
    )
