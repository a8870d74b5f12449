"""Somebody else's numbers: what such a cell may do (say what exists), and what it must never do (run, hide a win)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import linear as torch_linear

from skinny_core import dispatch, env, explain, kernels, plan, table, warmup
from skinny_core.device import DeviceKey, product
from skinny_core.family import ModelPackage, Projection
from skinny_core.plan import Cell
from skinny_core.problem import DType, Problem
from skinny_core.rules import Reason
from skinny_core.table import Source, Table, judge
from skinny_core.testing.numerics import assert_bit_equal
from skinny_core.testing.stand_in import STEM, StandIn, cell, plan_of

H200, NVL, H100 = product("h200"), product("h200-nvl"), product("h100-sxm")
N, K = 64, 64
PROBLEM = Problem(n=N, k=K)
THEIRS = "vllm_cute"
NOTHING, NEIGHBOUR, REPORTED = env.Settings(), env.Settings(neighbour=True), env.Settings(reported=True)
BOTH = env.Settings(neighbour=True, reported=True)


def _theirs(m: int = 1) -> Cell:
    return msgspec.structs.replace(cell(N, K, m, "reported", kernel=THEIRS), config={})


def _table(*sources: tuple[str, Cell]) -> Table:
    """Sources in this order of precedence."""
    return Table("test", tuple(Source(Path(n), "user", plan_of(c, key=product(n), product=n)) for n, c in sources))


def _says(built: Table, key: DeviceKey, settings: env.Settings) -> str:
    """The product whose cell runs, or the reason."""
    found = built.lookup(PROBLEM, 1, key, settings)
    verdict = judge(found, PROBLEM, 1, key, settings)
    assert found
    return found.plan.product if verdict.ok else str(verdict.reason and verdict.reason.value)


@pytest.mark.parametrize(
    ("settings", "theirs", "ours"),
    [
        (NOTHING, "reported", "reported"),
        (NEIGHBOUR, "h200", "h200"),
        (REPORTED, "reported", "h200-nvl"),
        (BOTH, "h200", "h200-nvl"),
    ],
    ids=["nothing", "neighbour", "reported", "both"],
)
@pytest.mark.parametrize("first", ["h200-nvl", "h200"])
def test_a_reported_cell_that_cannot_run_does_not_hide_a_neighbours_win(
    kernel: StandIn, settings: env.Settings, theirs: str, ours: str, first: str
) -> None:
    """theirs, ours: what runs on the NVL where its reported cell is of their kernel, and of one of ours."""
    for reported, expected in ((_theirs(), theirs), (cell(N, K, 1, "reported"), ours)):
        sources = [("h200-nvl", reported), ("h200", cell(N, K, 1))]
        built = _table(*(sources if first == "h200-nvl" else reversed(sources)))
        assert _says(built, NVL, settings) == expected
        assert _says(built, H200, settings) == "h200", "the device of the win is as ever"


def test_on_a_third_device_the_measured_neighbour_speaks(kernel: StandIn) -> None:
    built = _table(("h200-nvl", _theirs()), ("h200", cell(N, K, 1)))
    assert _says(built, H100, NEIGHBOUR) == "h200"
    assert _says(built, H100, NOTHING) == "other_device"
    found = built.lookup(PROBLEM, 1, H100, NOTHING)
    assert found
    assert found.plan.product == "h200", "what is shown of other devices is measured where anything is"
    alone = _table(("h200-nvl", _theirs()))
    assert (_says(alone, H100, NOTHING), _says(alone, H100, BOTH)) == ("other_device", "reported")


def test_a_reported_cell_does_not_hide_a_measured_one_of_the_same_device(kernel: StandIn) -> None:
    win = _table(("h200", cell(N, K, 1, "reported")), ("h200", cell(N, K, 1)))
    lost = _table(("h200", cell(N, K, 1, "reported")), ("h200", cell(N, K, 1, "refused")))
    assert (_says(win, H200, NOTHING), _says(lost, H200, NOTHING)) == ("h200", "refused")


def test_a_refusal_of_this_device_hides_a_neighbours_win(kernel: StandIn) -> None:
    built = _table(("h200-nvl", _theirs()), ("h200-nvl", cell(N, K, 1, "refused")), ("h200", cell(N, K, 1)))
    assert _says(built, NVL, NEIGHBOUR) == "refused"


def test_a_neighbour_is_offered_beside_reported_cells(kernel: StandIn) -> None:
    built = _table(("h200-nvl", _theirs()), ("h200", cell(N, K, 1)))
    offered = table.offer(built, NVL)
    assert offered.startswith("no plan for h200-nvl (")
    assert "1 cells reported by somebody else; measured on h200: try it with SKINNY=neighbour=on" in offered
    assert "`skinny tune`" in offered
    assert table.offer(built, H200) == ""
    assert "reported" not in table.offer(built, H100)
    alone = table.offer(_table(("h200-nvl", _theirs())), H100)
    assert alone.startswith("no plan of test for h100-sxm"), "a reported plan is none to offer"
    measured = _table(("h200-nvl", cell(N, K, 1, "refused")), ("h200-nvl", _theirs(2)), ("h200", cell(N, K, 1)))
    assert table.offer(measured, NVL) == ""


@pytest.fixture
def package(tmp_path: Path, kernel: StandIn) -> ModelPackage:
    """Their kernel's cells for this device at M = 1 and 2, and a neighbour's win at M = 1."""
    plan.dump(plan_of(_theirs(1), _theirs(2), key=H200, product="h200"), tmp_path / "h200.toml")
    plan.dump(plan_of(cell(N, K, 1), key=NVL, product="h200-nvl"), tmp_path / "h200-nvl.toml")
    files = (tmp_path / "h200.toml", tmp_path / "h200-nvl.toml")
    projections = (Projection("o", ("*.o",), N, K, 3),)
    return ModelPackage("test", "1", (), {"small": {}}, lambda config, tp: projections, lambda: files)


def _call(m: int) -> str:
    dispatch.reset_counters()
    x, w = torch.randn(m, K).bfloat16(), torch.randn(N, K).bfloat16()
    y = dispatch.linear(x, w, "test")
    ((*_, outcome),) = dispatch.counters()
    if outcome.startswith("fallback"):
        assert_bit_equal(y, torch_linear(x, w))
    assert sum(dispatch.counters().values()) == 1
    return outcome


@pytest.mark.parametrize(
    ("value", "wins", "outcomes"),
    [
        ("on", 0, ("fallback:reported", "fallback:reported")),
        ("reported=on", 0, ("fallback:reported", "fallback:reported")),
        ("neighbour=on", 1, ("kernel:stand_in", "fallback:reported")),
        ("neighbour=on,reported=on", 1, ("kernel:stand_in", "fallback:reported")),
    ],
)
def test_their_kernel_is_never_run_compiled_or_complained_about(
    package: ModelPackage,
    h200: DeviceKey,
    kernel: StandIn,
    skinny: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    value: str,
    wins: int,
    outcomes: tuple[str, str],
) -> None:
    skinny(value)
    with caplog.at_level(logging.WARNING):
        activation = dispatch.activate(package)
        warmup.warm("test", [(N, K, DType.BF16)])
    assert activation.wins == wins
    assert kernel.compiled == [(K, 1)] * wins
    assert caplog.text == ""
    assert (_call(1), _call(2)) == outcomes
    assert any("`skinny tune`" in note for note in activation.notes) == ("neighbour" not in value)


@pytest.mark.parametrize("settings", [NOTHING, REPORTED], ids=["off", "on"])
def test_explain_predicts_nothing_from_it_and_says_what_to_do(package: ModelPackage, settings: env.Settings) -> None:
    found = explain.explain("small", package, {}, key=H200, ms=(1, 2), settings=settings)
    assert [(line.runs, line.reason, line.saving_us) for line in found.lines] == [(False, "reported", 0.0)] * 2
    assert [(line.ours_us, line.reported_us) for line in found.lines] == [(None, 8.0)] * 2
    assert found.lines[0].detail == f"measured with {THEIRS}, which is none of our kernels"
    assert any("`skinny tune` on this device" in note for note in found.notes)
    assert "`skinny tune` on this device" in Reason.REPORTED.meaning
    assert found.saving_us(1) == 0.0


def test_a_plan_of_theirs_is_read_and_says_that_nothing_runs(package: ModelPackage) -> None:
    theirs, ours = (plan.load(file) for file in package.plan_files())
    assert (theirs.only_reported, ours.only_reported) == (True, False)
    heads = [file.read_text().splitlines()[0] for file in package.plan_files()]
    assert heads == [f"# {plan.REPORTED_HEADER}", f"# {plan.HEADER}"]
    assert plan.render(theirs) == package.plan_files()[0].read_text()
    mixed = msgspec.structs.replace(ours, cell=(*ours.cell, _theirs(3)))
    assert not mixed.only_reported
    assert not msgspec.structs.replace(ours, cell=()).only_reported


def test_known_kernels(kernel: StandIn) -> None:
    assert [kernels.known(stem) for stem in ("bf16_simt", STEM, THEIRS, "../bf16_simt", "")] == [
        True, True, False, False, False,
    ]  # fmt: skip
