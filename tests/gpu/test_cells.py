"""Every shipped `win` cell on its own device: right, really run by its kernel, capturable, bit-equal 1000 times.

A test is one check of one weight shape: it goes through all its cells with one weight, and names each that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from skinny_core import device, dispatch, family, op, warmup
from skinny_core.device import DeviceKey
from skinny_core.plan import Cell
from skinny_core.problem import MAX_M
from skinny_core.testing import numerics
from tests import checkout
from tests.gpu.shipped import Shape, by_shape, shipped_cells

checkout.activate()
SM90 = shipped_cells((9, 0))
SHAPES = by_shape(SM90)
RUNS = 1000
BATCH = 100
"""Outputs that are kept and compared at once: one comparison per call took four times as long as the calls."""
pytestmark = pytest.mark.sm90
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])


@pytest.fixture(scope="module")
def families() -> Iterator[dict[str, int]]:
    """Every family with shipped cells for this device, activated as vLLM activates it: name -> cells that can run.
    Read once, and the machine code of all cells made beforehand on all cores."""
    key = device.current_key()
    if key is None:
        pytest.skip("needs a CUDA device")
    here = [one for one in SM90 if one.device == key]
    wins = {}
    for package in family.discover().packages:
        if any(one.family == package.name for one in here):
            wins[package.name] = dispatch.activate(package, static_weights=True).wins
    jobs = [(one.cell.kernel_config, one.cell.problem(key), one.cell.m) for one in here]
    warmup.prepare_in_parallel(jobs, key, prewait=True)
    yield wins
    torch.cuda.synchronize()  # raises what a kernel left behind
    for name in wins:
        dispatch.deactivate(name)


Record = Callable[[str, object], None]


@pytest.fixture
def weight(shape: Shape, families: dict[str, int], record_property: Record) -> torch.Tensor:
    """The shape's weight, its cells warm. The gate counts the cells by what is recorded here."""
    if shape.device != (here := device.current_key()):
        pytest.skip(f"cells of {shape.device}, running on {here}")
    warmup.warm(shape.family, [(shape.n, shape.k, shape.cells[0].activation)], [cell.m for cell in shape.cells])
    for cell in shape.cells:
        record_property("cell", f"{shape.family}:{cell.id}")
    torch.manual_seed(shape.n ^ shape.k)
    w = torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda")
    return w.mul_(shape.k**-0.5)


def _x(cell: Cell) -> torch.Tensor:
    return torch.randn(cell.m, cell.k, dtype=torch.bfloat16, device="cuda")


def _assert_ran(shape: Shape, cell: Cell, times: int | None = None) -> None:
    """Every call of this M went to the cell's kernel, and there were so many."""
    key = (shape.family, cell.n, cell.k, cell.m)
    outcomes = {k[-1]: v for k, v in dispatch.counters().items() if k[:4] == key}
    assert set(outcomes) == {f"kernel:{cell.kernel}"}, f"ran as {outcomes}"
    assert times is None or outcomes[f"kernel:{cell.kernel}"] == times, f"ran as {outcomes}, wanted {times}"


def test_every_shipped_cell_is_active(families: dict[str, int]) -> None:
    """No plan was ignored and no cell hidden by another: what the tests below go through is what a host would run."""
    if not families:
        pytest.skip("no shipped cell for this device")
    here = [one for one in SM90 if one.device == device.current_key()]
    assert families == {name: sum(one.family == name for one in here) for name in families}


@each_shape
@torch.inference_mode()
def test_right_and_really_run(shape: Shape, weight: torch.Tensor) -> None:
    x = torch.randn(MAX_M, shape.k, dtype=torch.bfloat16, device="cuda")

    def check(cell: Cell) -> None:
        dispatch.reset_counters()
        y = op.linear(x[: cell.m], weight, shape.family)
        _assert_ran(shape, cell, 1)
        numerics.assert_t1(y, x[: cell.m], weight)

    shape.each(check)


@each_shape
@torch.inference_mode()
def test_one_hot_columns_are_exact(shape: Shape, weight: torch.Tensor) -> None:
    k = shape.k
    columns = sorted({0, 7, 8, k // 2 - 1, k // 2, k - 8, k - 1})

    def check(cell: Cell) -> None:
        dispatch.reset_counters()
        ours = lambda x, w: dispatch.linear(x, w, shape.family)  # noqa: E731
        numerics.one_hot_columns_exact(ours, weight, columns=columns, rows=cell.m)
        _assert_ran(shape, cell)

    shape.each(check)


@each_shape
@torch.inference_mode()
def test_replays_of_a_captured_graph(shape: Shape, weight: torch.Tensor) -> None:
    def check(cell: Cell) -> None:
        dispatch.reset_counters()
        x = _x(cell)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a = x * 1.0  # the activation comes from a kernel in the same graph, as in a model
            y = dispatch.linear(a, weight, shape.family)
        _assert_ran(shape, cell, 1)
        for _ in range(3):
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            numerics.assert_t1(y, x, weight)
        # The form in a graph may read the weight before its dependency wait; the sums are the same.
        numerics.assert_bit_equal(dispatch.linear(x, weight, shape.family), y)

    shape.each(check)


@each_shape
@torch.inference_mode()
def test_bit_equal_over_many_runs(shape: Shape, weight: torch.Tensor) -> None:
    def check(cell: Cell) -> None:
        dispatch.reset_counters()
        x = _x(cell)
        first = dispatch.linear(x, weight, shape.family).view(torch.int16)
        differences = torch.zeros((), dtype=torch.int64, device="cuda")
        for done in range(1, RUNS, BATCH):
            runs = [dispatch.linear(x, weight, shape.family) for _ in range(min(BATCH, RUNS - done))]
            differences += (torch.stack(runs).view(torch.int16) != first).sum()
        assert differences.item() == 0, f"{differences.item()} elements of {RUNS} runs differ from the first run"
        _assert_ran(shape, cell, RUNS)

    shape.each(check)


@each_shape
@torch.inference_mode()
def test_other_rows_do_not_matter(shape: Shape, weight: torch.Tensor) -> None:
    def check(cell: Cell) -> None:
        if cell.m == 1:
            return  # one row has no other
        dispatch.reset_counters()
        x = _x(cell)
        expected = dispatch.linear(x, weight, shape.family)[0].clone()
        for poison in (float("nan"), float("inf"), 3.0e38, 0.0):
            x[1:] = poison
            numerics.assert_bit_equal(dispatch.linear(x, weight, shape.family)[0], expected)
        _assert_ran(shape, cell)

    shape.each(check)


@pytest.mark.skipif(not SM90, reason="no shipped cell")
@torch.inference_mode()
def test_a_second_process_compiles_nothing(gpu: DeviceKey, tmp_path: object) -> None:
    """Warm-up in a new process, same cache folder: everything comes from disk."""
    import os
    import subprocess
    import sys

    code = (
        "from tests import checkout; checkout.activate()\n"
        "from skinny_core import cache, dispatch, family, warmup\n"
        "from skinny_core.problem import DType\n"
        "from tests.gpu.shipped import shipped_cells\n"
        "from skinny_core.device import current_key\n"
        "here = [s for s in shipped_cells((9, 0)) if s.device == current_key()][:4]\n"
        "package = next(p for p in family.discover().packages if here[0].family == p.name)\n"
        "cells = [s.cell for s in here if s.family == package.name]\n"
        "dispatch.activate(package, static_weights=True)\n"
        "made = sum((warmup.warm(package.name, [(c.n, c.k, DType.BF16)], [c.m]) for c in cells), [])\n"
        "print(len(made), cache.COUNTS.compiled, cache.COUNTS.loaded)\n"
    )
    if not any(s.device == gpu for s in SM90):
        pytest.skip("no shipped cell for this device")
    environment = {**os.environ, "SKINNY": f"cache={tmp_path}"}
    printed = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append([int(n) for n in done.stdout.split()])
    (made, _, _), (again, compiled, loaded) = printed
    assert made > 0
    assert (again, compiled) == (0, 0)
    assert loaded > 0
