"""Every shipped `win` cell on its own device: right, really run by its kernel, capturable, bit-equal 1000 times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from skinny_core import dispatch, family, op, warmup
from skinny_core.device import DeviceKey
from skinny_core.testing import numerics
from tests import checkout
from tests.gpu.shipped import Shipped, shipped_cells

checkout.activate()
SM90 = shipped_cells((9, 0))
RUNS = 1000
pytestmark = pytest.mark.sm90
each_cell = pytest.mark.parametrize("shipped", SM90, ids=[s.cell.id for s in SM90])


@cache
def _weight(n: int, k: int) -> torch.Tensor:
    torch.manual_seed(n ^ k)
    return torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5


@pytest.fixture(scope="module", autouse=True)
def _free_weights() -> Iterator[None]:
    yield
    _weight.cache_clear()


@pytest.fixture
def ready(shipped: Shipped, gpu: DeviceKey) -> str:
    """Family name, activated as vLLM activates it, with the cell warm."""
    if gpu != shipped.device:
        pytest.skip(f"cell of {shipped.device}, running on {gpu}")
    package = next(p for p in family.discover().packages if shipped.cell.id.startswith(p.name))
    dispatch.activate(package, static_weights=True)
    cell = shipped.cell
    warmup.warm(package.name, [(cell.n, cell.k, cell.activation)], [cell.m])
    return package.name


def _outcomes(name: str, shipped: Shipped) -> dict[str, int]:
    cell = shipped.cell
    key = (name, cell.n, cell.k, cell.m)
    return {k[-1]: v for k, v in dispatch.counters().items() if k[:4] == key}


@each_cell
@torch.inference_mode()
def test_right_and_really_run(shipped: Shipped, ready: str) -> None:
    cell, w = shipped.cell, _weight(shipped.cell.n, shipped.cell.k)
    x = torch.randn(cell.m, cell.k, dtype=torch.bfloat16, device="cuda")
    y = op.linear(x, w, ready)
    assert _outcomes(ready, shipped) == {f"kernel:{cell.kernel}": 1}
    numerics.assert_t1(y, x, w)


@each_cell
@torch.inference_mode()
def test_one_hot_columns_are_exact(shipped: Shipped, ready: str) -> None:
    cell, w = shipped.cell, _weight(shipped.cell.n, shipped.cell.k)
    columns = sorted({0, 7, 8, cell.k // 2 - 1, cell.k // 2, cell.k - 8, cell.k - 1})
    numerics.one_hot_columns_exact(lambda x, w: dispatch.linear(x, w, ready), w, columns=columns, rows=cell.m)
    assert set(_outcomes(ready, shipped)) == {f"kernel:{cell.kernel}"}


@each_cell
@torch.inference_mode()
def test_replays_of_a_captured_graph(shipped: Shipped, ready: str) -> None:
    cell, w = shipped.cell, _weight(shipped.cell.n, shipped.cell.k)
    x = torch.randn(cell.m, cell.k, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a = x * 1.0  # the activation comes from a kernel in the same graph, as in a model
        y = dispatch.linear(a, w, ready)
    assert _outcomes(ready, shipped) == {f"kernel:{cell.kernel}": 1}
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        numerics.assert_t1(y, x, w)


@each_cell
@torch.inference_mode()
def test_bit_equal_over_many_runs(shipped: Shipped, ready: str) -> None:
    cell, w = shipped.cell, _weight(shipped.cell.n, shipped.cell.k)
    x = torch.randn(cell.m, cell.k, dtype=torch.bfloat16, device="cuda")
    first = dispatch.linear(x, w, ready).clone()
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS - 1):
        differences += (dispatch.linear(x, w, ready).view(torch.int16) != first.view(torch.int16)).sum()
    assert differences.item() == 0
    assert _outcomes(ready, shipped) == {f"kernel:{cell.kernel}": RUNS}


@each_cell
@torch.inference_mode()
def test_other_rows_do_not_matter(shipped: Shipped, ready: str) -> None:
    cell, w = shipped.cell, _weight(shipped.cell.n, shipped.cell.k)
    if cell.m == 1:
        pytest.skip("one row has no other")
    x = torch.randn(cell.m, cell.k, dtype=torch.bfloat16, device="cuda")
    expected = dispatch.linear(x, w, ready)[0].clone()
    for poison in (float("nan"), float("inf"), 3.0e38, 0.0):
        x[1:] = poison
        numerics.assert_bit_equal(dispatch.linear(x, w, ready)[0], expected)
    assert set(_outcomes(ready, shipped)) == {f"kernel:{cell.kernel}"}


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
        "cells = [s.cell for s in shipped_cells((9, 0)) if s.device == current_key()][:4]\n"
        "package = next(p for p in family.discover().packages if cells and cells[0].id.startswith(p.name))\n"
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
