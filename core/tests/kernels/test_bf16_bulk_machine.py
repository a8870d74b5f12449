"""`bf16_bulk` run on the CPU: the very PTX that ships, in a machine that checks every access, order and barrier."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_bulk.config import BulkConfig, Shape, m_tiles
from skinny_core.kernels.bf16_bulk.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import numerics
from skinny_core.testing.ptx import EarlyAccess, Machine, Memory

WIDE = BulkConfig(32, 256, 4)
"""Fits every shape below."""


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


@functools.cache
def _compiled(config: BulkConfig, problem: Problem, tiles: int, prewait: bool) -> Binary:
    return KERNEL.cross_compile(config, problem, 8 * tiles, "sm_90a", prewait=prewait)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as unsigned integers, strides included."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(integers).numpy().view(f"u{tensor.element_size()}")


def run(
    config: BulkConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    output: torch.dtype | None = None,
    sms: int = 3,
    prewait: bool = True,
    weight_is_new: bool = False,
    order: str | int = "latest",
) -> torch.Tensor:
    """`x @ w.T` on a device of `sms` SMs; x, w and added may have padded rows, whose pads are out of bounds.

    weight_is_new: the kernel before this one writes w. Output rows are 5 elements apart; nothing between may change.
    """
    (m, k), n = x.shape, w.shape[0]
    kind = DType.of(x.dtype)
    out = DType.of(output or x.dtype)
    assert kind
    assert out
    problem = Problem(n=n, k=k, weight=WeightScheme(kind.value), activation=kind, output=out, epilogue=epilogue)
    assert KERNEL.refuses(config, problem, m) is None
    shared = config.shared_bytes((9, 0))
    shape = Shape.of(config, problem, m, shared, sms)
    same = Problem(n=64, k=4096, weight=problem.weight, activation=kind, output=out, epilogue=epilogue)
    binary = _compiled(config, same, m_tiles(m), prewait)
    y = numerics.guarded_output(m, shape.outputs, out.torch, row_gap=5)
    memory = Memory()
    addresses = [
        memory.add("x", _bits(x), read_only=True, produced=True),
        memory.add("w", _bits(w), read_only=True, produced=weight_is_new),
        memory.add("y", _bits(y.y)),
        0 if added is None else memory.add("added", _bits(added), read_only=True, produced=True),
    ]
    added_stride = 0 if added is None or added.dim() == 1 else added.stride(0)
    strides = [x.stride(0), w.stride(0), y.y.stride(0), added_stride]
    arguments = [*addresses, m, shape.outputs, k, *strides, *shape.arguments]
    machine = Machine(binary.ptx, order=order)
    machine.run(shape.grid, 32 * (config.warps + 1), arguments, memory, dynamic_shared=shared)
    y.check()
    return y.y.contiguous()


def _data(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype) * k**-0.5
    return numerics.padded_rows(x, 8), numerics.padded_rows(w, 24)


CASES: dict[str, tuple[BulkConfig, int, int, int]] = {
    "one group, ring larger than the work": (WIDE, 8, 40, 1024),
    "ring used many times, K tail in the middle of a step": (BulkConfig(32, 512, 4), 5, 200, 2056),
    "K below one block of columns": (BulkConfig(16, 128, 4, 2), 1, 7, 8),
    "uneven groups, odd N, four tiles": (BulkConfig(64, 256, 8), 3, 211, 776),
    "resident activation, 16 rows": (BulkConfig(16, 256, 4, 1, 1), 16, 100, 1000),
    "resident activation, two blocks an SM, three tiles": (BulkConfig(48, 256, 2, 2, 1), 2, 301, 520),
    "M 9, two blocks an SM": (BulkConfig(16, 512, 4, 2), 9, 65, 1544),
    "M 17, three tiles of rows": (WIDE, 17, 40, 520),
    "M 32, resident": (BulkConfig(16, 128, 4, 1, 1), 32, 40, 520),
    "16 warps": (BulkConfig(32, 512, 16), 4, 70, 1032),
    "interleaved, some blocks a group fewer": (BulkConfig(16, 256, 4, 2, 0, 1, 1), 2, 100, 520),
    "interleaved, blocks without a row, trigger": (BulkConfig(16, 256, 4, 2, 1, 1, 0, 1), 2, 34, 520),
}  # fmt: skip


@pytest.mark.parametrize("order", ["latest", "eager", 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_numerics_in_any_order_of_warps_and_arrivals(name: str, order: str | int) -> None:
    config, m, n, k = CASES[name]
    x, w = _data(m, n, k)
    numerics.assert_t1(run(config, x, w, sms=2, order=order), x, w)


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("output", [None, torch.float32])
def test_epilogues(epilogue: Epilogue, output: torch.dtype | None) -> None:
    m, n, k = 11, 70, 776
    x, w = _data(m, n, k)
    extra = numerics.padded_rows(torch.randn(m, n, dtype=torch.bfloat16), 6)
    added = {Epilogue.RESIDUAL: extra, Epilogue.BIAS: extra[0].clone()}.get(epilogue)
    y = run(WIDE, x, w, added, epilogue=epilogue, output=output)
    numerics.assert_t1(y, x, w, added, gated=epilogue is Epilogue.SILU_MUL)


def test_fp16() -> None:
    x, w = _data(3, 50, 520, torch.float16)
    numerics.assert_t1(run(WIDE, x, w), x, w)


@pytest.mark.parametrize("config", [WIDE, BulkConfig(16, 128, 4, 1, 1)])
def test_one_hot_columns(config: BulkConfig) -> None:
    """Every place of a lane, a warp and a stage, and the tail; a lost or doubled slice of K cannot hide."""
    _, w = _data(16, 40, 536)
    columns = [*range(0, 64), 127, 128, 255, 256, 257, 384, 511, 512, 519, 520, 527, 528, 535]
    numerics.one_hot_columns_exact(lambda x, weight: run(config, x, weight, sms=1), w, columns=columns, rows=16)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_rows_do_not_see_each_other(fill: float) -> None:
    x, w = _data(6, 40, 520)
    numerics.rows_isolated(lambda a, b: run(WIDE, a, b), x.clone(), w, row=2, fill=fill)


@pytest.mark.parametrize("config", [WIDE, BulkConfig(16, 128, 4, 1, 1)])
def test_the_bits_of_a_row_do_not_depend_on_m_or_the_grid(config: BulkConfig) -> None:
    """One order of summation for every M: what batch-invariant serving needs."""
    x, w = _data(32, 90, 1032)
    whole = run(config, x, w, output=torch.float32)
    for m, sms in ((1, 3), (2, 1), (8, 2), (9, 5), (15, 3), (16, 4), (17, 1)):
        numerics.assert_bit_equal(run(config, x[:m], w, output=torch.float32, sms=sms), whole[:m])
    numerics.assert_bit_equal(run(config, x[7:8], w[50:], output=torch.float32), whole[7:8, 50:].contiguous())


def test_the_weight_is_read_early_only_in_the_form_that_may() -> None:
    x, w = _data(4, 40, 1024)
    numerics.assert_t1(run(WIDE, x, w, prewait=False, weight_is_new=True), x, w)
    with pytest.raises(EarlyAccess, match="`w`"):
        run(WIDE, x, w, prewait=True, weight_is_new=True)


def test_without_the_wait_the_activation_would_be_read_early() -> None:
    """The check above can fail: the same code with its waits taken out."""
    x, w = _data(4, 40, 1024)
    problem = Problem(n=64, k=4096)
    text = KERNEL.cross_compile(WIDE, problem, 8, "sm_90a").ptx
    assert "griddepcontrol.wait" in text
    shape = Shape.of(WIDE, Problem(n=40, k=1024), 4, WIDE.shared_bytes((9, 0)), 1)
    memory = Memory()
    addresses = [memory.add("x", _bits(x), produced=True), memory.add("w", _bits(w))]
    addresses.append(memory.add("y", np.zeros((4, 40), np.uint16)))
    arguments = [*addresses, 0, 4, 40, 1024, x.stride(0), w.stride(0), 40, 0, *shape.arguments]
    machine = Machine(text.replace("griddepcontrol.wait;", ""))
    with pytest.raises(EarlyAccess, match="`x`"):
        machine.run(1, 160, arguments, memory, dynamic_shared=WIDE.shared_bytes((9, 0)))
