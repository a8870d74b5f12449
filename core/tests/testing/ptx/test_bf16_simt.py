"""The very PTX of `bf16_simt`, run on the CPU: numerics, bounds, shared memory, and order at the PDL wait."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from skinny_core.kernels.bf16_simt.config import SimtConfig
from skinny_core.kernels.bf16_simt.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import numerics
from skinny_core.testing.ptx import EarlyAccess, Machine, Memory, MemoryFault, Race, UninitialisedRead


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


@dataclass(frozen=True)
class Case:
    """A kernel at a small size. sms: what a persistent grid is told about the device."""

    config: SimtConfig
    problem: Problem
    m: int
    prewait: bool = True
    sms: int = 1


FP16 = {"weight": WeightScheme.FP16, "activation": DType.FP16, "output": DType.FP16}
CASES = {
    # K = 264 is one piece more than 256: all but one thread of the second chunk are past the end. N is odd.
    "M1, K tail of one piece": Case(SimtConfig(32, 2, 2, pdl=1), Problem(n=25, k=264), 1),
    "M2 streaming, K tail": Case(SimtConfig(32, 2, 1), Problem(n=26, k=536), 2),
    "M4 streaming in chunks, to FP32": Case(SimtConfig(64, 2, 2, l2=256), Problem(n=25, k=1296, output=DType.FP32), 4),
    "M3 waits first, no power of two, residual": Case(
        SimtConfig(64, 1, 1, pdl=1), Problem(n=24, k=1024, epilogue=Epilogue.RESIDUAL), 3, prewait=False
    ),
    "M2 persistent, groups left over": Case(SimtConfig(64, 2, 2, 3, pdl=1), Problem(n=39, k=1000), 2, sms=2),
    "M1 FP16, residual": Case(
        SimtConfig(32, 4, 1, pdl=1), Problem(n=26, k=256, **FP16, epilogue=Epilogue.RESIDUAL), 1
    ),
}  # fmt: skip


@functools.cache
def ptx(case: Case) -> str:
    assert KERNEL.refuses(case.config, case.problem, case.m) is None
    return KERNEL.cross_compile(case.config, case.problem, case.m, "sm_90a", prewait=case.prewait).ptx


def bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as integers, strides kept."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()]).numpy()


def launch(
    case: Case,
    x: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    text: str | None = None,
    machine: Machine | None = None,
    order: str | int = "latest",
    produced: tuple[str, ...] = ("x", "residual"),
) -> numerics.Guarded:
    """Run the kernel on x [M, K] and w [N, K] as the host does; every array has gaps behind its rows, which fault.

    produced: what the kernel before this one writes. Without `pdl` that kernel has ended, and there is no wait.
    """
    problem, config = case.problem, case.config
    dependent = bool(config.pdl)
    # Row strides stay multiples of 8 elements, so that every row is aligned to 16 bytes.
    x, w = numerics.padded_rows(x, 24), numerics.padded_rows(w, 8)
    out = numerics.guarded_output(case.m, problem.n, problem.output.torch, row_gap=5)
    memory = Memory()
    tensors = {"x": x, "w": w, "y": out.y}
    if residual is not None:
        tensors["residual"] = residual = numerics.padded_rows(residual, 3)
    at = {
        name: memory.add(name, bits(tensor), read_only=name != "y", produced=name in produced)
        for name, tensor in tensors.items()
    }
    groups = -(-problem.n // config.rows)
    grid = min(groups, case.sms * config.blocks_per_sm) if config.blocks_per_sm else groups
    strides = [x.stride(0), w.stride(0), out.y.stride(0), residual.stride(0) if residual is not None else 0]
    args = [at["x"], at["w"], at["y"], at.get("residual", 0), problem.n, *strides, groups, grid]
    machine = machine or Machine(text or ptx(case), order=order)
    machine.run(grid, config.threads, args, memory, dependent=dependent)
    return out


def data(case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gaussian x, w and, where the problem has one, residual."""
    random = torch.Generator().manual_seed(seed)
    n, k, dtype = case.problem.n, case.problem.k, case.problem.activation.torch
    x, w, r = (torch.randn(shape, generator=random).to(dtype) for shape in ((case.m, k), (n, k), (case.m, n)))
    return x, w, r if case.problem.epilogue is Epilogue.RESIDUAL else None


@pytest.mark.parametrize("order", ["latest", 1])
@pytest.mark.parametrize("name", CASES)
def test_t1(name: str, order: str | int) -> None:
    """Also: nothing is read behind a row of x, w or the residual, and nothing written beside y."""
    case = CASES[name]
    x, w, residual = data(case)
    out = launch(case, x, w, residual, order=order)
    numerics.assert_t1(out.y, x, w, residual)
    out.check()


@pytest.mark.parametrize("name", CASES)
def test_one_hot_activations_return_columns_of_w(name: str) -> None:
    case = CASES[name]
    k = case.problem.k
    machine = Machine(ptx(case))

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(case.m, case.problem.n, dtype=x.dtype)
        residual = zeros if case.problem.epilogue is Epilogue.RESIDUAL else None
        return launch(case, x, w, residual, machine=machine).y

    # The first and last elements, all places of a piece, and the ends of warps, chunks and tails.
    edges = {edge + d for edge in range(0, k + 1, 256) for d in (-8, -1, 0, 7) if 0 <= edge + d < k}
    columns = sorted({*range(8), *range(k - 8, k), *edges})
    numerics.one_hot_columns_exact(linear, data(case)[1], columns=columns, rows=case.m)


@pytest.mark.parametrize("name", ["M2 streaming, K tail", "M2 persistent, groups left over"])
def test_rows_do_not_touch_each_other(name: str) -> None:
    case = CASES[name]
    machine = Machine(ptx(case))
    x, w, _ = data(case)
    numerics.rows_isolated(lambda x, w: launch(case, x, w, machine=machine).y, x, w, row=1, fill=float("nan"))


@pytest.mark.parametrize("prewait", [True, False])
@pytest.mark.parametrize("name", ["M1, K tail of one piece", "M2 persistent, groups left over"])
def test_the_weight_is_read_before_the_wait_in_one_form_only(name: str, prewait: bool) -> None:
    case = replace(CASES[name], prewait=prewait)
    x, w, _ = data(case)
    if not prewait:
        out = launch(case, x, w, produced=("x", "w"))
        numerics.assert_t1(out.y, x, w)
        return
    with pytest.raises(EarlyAccess, match="`w`"):
        launch(case, x, w, produced=("x", "w"))


@pytest.mark.parametrize("name", CASES)
def test_there_is_a_wait_in_the_configs_that_ask_for_it(name: str) -> None:
    case = CASES[name]
    assert ptx(case).count("griddepcontrol") == case.config.pdl
    assert "griddepcontrol" not in ptx(replace(case, config=replace(case.config, pdl=0)))


def test_an_ordinary_kernel_may_not_be_launched_as_a_dependent_one() -> None:
    """It has no wait: whoever launches it so reads what is not written yet."""
    ordinary = ptx(replace(BROKEN, config=replace(BROKEN.config, pdl=0)))
    with pytest.raises(EarlyAccess, match="`x`"):
        launch(BROKEN, *data(BROKEN), text=ordinary)


BROKEN = CASES["M1, K tail of one piece"]
ROW_OF_THREADS = CASES["M3 waits first, no power of two, residual"]


def test_without_the_wait_the_activation_is_read_too_early() -> None:
    text = ptx(BROKEN)
    assert text.count("griddepcontrol.wait;") == 1
    with pytest.raises(EarlyAccess, match="`x`"):
        launch(BROKEN, *data(BROKEN), text=text.replace("griddepcontrol.wait;", ""))


def test_without_the_tail_test_the_next_row_is_read() -> None:
    """Branches around the loads past K are dropped."""
    text = ptx(BROKEN)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "bra" in line)
    assert "@" in lines[first]
    lines[first] = ""
    with pytest.raises(MemoryFault, match=r"between the rows: 16 bytes at offset \d+ of `w`"):
        launch(BROKEN, *data(BROKEN), text="\n".join(lines))


def test_a_kernel_built_for_a_larger_k_reads_out_of_bounds() -> None:
    wrong = replace(BROKEN, problem=replace(BROKEN.problem, k=272))
    with pytest.raises(MemoryFault, match="between the rows"):
        launch(BROKEN, *data(BROKEN), text=ptx(wrong))


def test_without_the_barrier_sums_are_read_before_they_are_written() -> None:
    text = ptx(ROW_OF_THREADS)
    assert text.count("bar.sync") == 1
    lines = [line for line in text.splitlines() if "bar.sync" not in line]
    with pytest.raises((Race, UninitialisedRead)):
        launch(ROW_OF_THREADS, *data(ROW_OF_THREADS), text="\n".join(lines))


def test_a_lost_product_is_seen() -> None:
    """The numerics gates have teeth here too: one of the multiply-adds keeps its old sum."""
    text = ptx(BROKEN)
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if "fma.rn.f32" in line][3]
    target, _, _, total = lines[at].replace("fma.rn.f32", "").strip(" \t;").split(", ")
    lines[at] = f"mov.b32 {target}, {total};"
    x, w, _ = data(BROKEN)
    out = launch(BROKEN, x, w, text="\n".join(lines))
    with pytest.raises(AssertionError, match="rel-RMSE"):
        numerics.assert_t1(out.y, x, w)
