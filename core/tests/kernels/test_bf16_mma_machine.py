"""`bf16_mma` run on the CPU: the very PTX that ships, in a machine that checks every access, order and barrier."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_mma.config import MmaConfig
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import numerics
from skinny_core.testing.ptx import EarlyAccess, Machine, Memory

PLAIN = MmaConfig(4, 2, 2)
"""Rounds of 256 elements, groups of 16 rows."""
PERSISTENT = MmaConfig(2, 3, 2, 2, 1)
"""Rounds of 128 elements, groups of 24 rows."""


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


@functools.cache
def _compiled(config: MmaConfig, problem: Problem, wide: bool, prewait: bool) -> Binary:
    return KERNEL.cross_compile(config, problem, 16 if wide else 8, "sm_90a", prewait=prewait)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as unsigned integers, strides included."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(integers).numpy().view(f"u{tensor.element_size()}")


def run(
    config: MmaConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    output: torch.dtype | None = None,
    sms: int = 2,
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
    # N, K and M are read at run time: one binary for all of this module's shapes.
    same = Problem(n=64, k=4096, weight=problem.weight, activation=kind, output=out, epilogue=epilogue)
    binary = _compiled(config, same, m > 8, prewait)
    y = numerics.guarded_output(m, n, out.torch, row_gap=5)
    memory = Memory()
    addresses = [
        memory.add("x", _bits(x), read_only=True, produced=True),
        memory.add("w", _bits(w), read_only=True, produced=weight_is_new),
        memory.add("y", _bits(y.y)),
        0 if added is None else memory.add("added", _bits(added), read_only=True, produced=True),
    ]
    added_stride = 0 if added is None or added.dim() == 1 else added.stride(0)
    strides = [x.stride(0), w.stride(0), y.y.stride(0), added_stride]
    groups = -(-n // config.rows)
    grid = min(groups, sms * config.blocks_per_sm) if config.blocks_per_sm else groups
    arguments = [addresses[0], addresses[1], addresses[2], addresses[3], m, n, k, *strides, groups, grid]
    Machine(binary.ptx, order=order).run(grid, config.threads, arguments, memory)
    y.check()
    return y.y.contiguous()


def _data(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype) * k**-0.5
    return numerics.padded_rows(x, 8), numerics.padded_rows(w, 24)


CASES: dict[str, tuple[MmaConfig, int, int, int]] = {
    "whole rounds": (PLAIN, 8, 32, 1024),
    "K and N tails": (PLAIN, 3, 41, 776),
    "K shorter than a round": (PLAIN, 1, 17, 200),
    "one piece": (PLAIN, 16, 5, 8),
    "one round and one piece": (PLAIN, 11, 20, 264),
    "one round": (PLAIN, 16, 20, 256),
    "runs, deep": (MmaConfig(4, 1, 8, 4), 2, 9, 2056),
    "one warp, odd tiles": (MmaConfig(1, 3, 4, 2), 7, 50, 904),
    "five warps, eight tiles": (MmaConfig(5, 8, 1), 4, 70, 488),
    "sixteen warps": (MmaConfig(16, 1, 2), 16, 12, 1544),
    "persistent, tails": (PERSISTENT, 11, 100, 312),
    "persistent, whole rounds, one block without work to follow": (PERSISTENT, 1, 70, 384),
    "persistent, exactly one round": (PERSISTENT, 8, 200, 128),
    "persistent, two blocks an SM": (MmaConfig(4, 2, 1, 1, 2), 5, 140, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numerics_in_any_order_of_warps(name: str) -> None:
    config, m, n, k = CASES[name]
    x, w = _data(m, n, k)
    first = run(config, x, w)
    numerics.assert_t1(first, x, w)
    for order in ("eager", 1):
        numerics.assert_bit_equal(run(config, x, w, order=order), first)


@pytest.mark.parametrize("config", [PLAIN, PERSISTENT])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RESIDUAL, Epilogue.BIAS])
@pytest.mark.parametrize("output", [None, torch.float32])
def test_epilogues(config: MmaConfig, epilogue: Epilogue, output: torch.dtype | None) -> None:
    m, n, k = 11, 70, 776
    x, w = _data(m, n, k)
    extra = numerics.padded_rows(torch.randn(m, n, dtype=torch.bfloat16), 6)
    added = {Epilogue.RESIDUAL: extra, Epilogue.BIAS: extra[0].clone()}.get(epilogue)
    y = run(config, x, w, added, epilogue=epilogue, output=output)
    numerics.assert_t1(y, x, w, added)


def test_fp16() -> None:
    x, w = _data(3, 50, 520, torch.float16)
    numerics.assert_t1(run(PLAIN, x, w), x, w)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("config", [PLAIN, PERSISTENT])
def test_one_hot_columns(config: MmaConfig, rows: int) -> None:
    """Every place of a lane, a warp and a round, and the tail; a lost or doubled slice of K cannot hide."""
    _, w = _data(16, 30, 536)
    columns = [*range(0, 64), 127, 128, 255, 256, 257, 384, 511, 512, 519, 520, 527, 528, 535]
    numerics.one_hot_columns_exact(lambda x, weight: run(config, x, weight, sms=1), w, columns=columns, rows=rows)


@pytest.mark.parametrize("m", [6, 12])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_rows_do_not_see_each_other(fill: float, m: int) -> None:
    x, w = _data(m, 40, 520)
    numerics.rows_isolated(lambda a, b: run(PLAIN, a, b), x.clone(), w, row=2, fill=fill)


@pytest.mark.parametrize("config", [PLAIN, PERSISTENT])
def test_the_bits_of_a_row_do_not_depend_on_m_or_the_grid(config: MmaConfig) -> None:
    """One order of summation for every M from 1 to 16: what batch-invariant serving needs."""
    x, w = _data(16, 90, 1032)
    whole = run(config, x, w, output=torch.float32)
    for m, sms in ((1, 3), (2, 1), (8, 2), (9, 5), (15, 3)):
        numerics.assert_bit_equal(run(config, x[:m], w, output=torch.float32, sms=sms), whole[:m])
    numerics.assert_bit_equal(run(config, x[7:8], w[50:], output=torch.float32), whole[7:8, 50:].contiguous())


@pytest.mark.parametrize("config", [PLAIN, PERSISTENT])
def test_the_weight_is_read_early_only_in_the_form_that_may(config: MmaConfig) -> None:
    x, w = _data(4, 100, 1024)
    numerics.assert_t1(run(config, x, w, prewait=False, weight_is_new=True), x, w)
    with pytest.raises(EarlyAccess, match="`w`"):
        run(config, x, w, prewait=True, weight_is_new=True)


def test_without_the_wait_the_activation_would_be_read_early() -> None:
    """The check above can fail: the same code with its wait taken out."""
    x, w = _data(4, 16, 1024)
    text = KERNEL.cross_compile(PLAIN, Problem(n=64, k=4096), 8, "sm_90a").ptx
    assert "griddepcontrol.wait" in text
    memory = Memory()
    addresses = [memory.add("x", _bits(x), produced=True), memory.add("w", _bits(w))]
    addresses.append(memory.add("y", np.zeros((4, 16), np.uint16)))
    arguments = [*addresses, 0, 4, 16, 1024, x.stride(0), w.stride(0), 16, 0, 1, 1]
    with pytest.raises(EarlyAccess, match="`x`"):
        Machine(text.replace("griddepcontrol.wait;", "")).run(1, PLAIN.threads, arguments, memory)
