"""`bf16_mma` run on the CPU: the very PTX that ships, in a machine that checks every access, order and barrier."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_mma.config import MmaConfig
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import numerics
from skinny_core.testing.ptx import EarlyAccess, Machine, Memory, Race, UninitialisedRead

PLAIN = MmaConfig(4, 2, 2, 2)
"""Rounds of 512 elements, blocks of 8 rows, four activation rows a group."""
EIGHT = MmaConfig(2, 8, 1, 2, 2)
"""Rounds of 1024 elements, blocks of one row, one activation row a group."""
DEPENDENT = replace(PLAIN, ahead=2, pdl=1)


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


@functools.cache
def _compiled(config: MmaConfig, problem: Problem, m: int, prewait: bool) -> Binary:
    return KERNEL.cross_compile(config, problem, m, "sm_90a", prewait=prewait)


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
    prewait: bool = True,
    weight_is_new: bool = False,
    order: str | int = "latest",
    without: str = "",
) -> torch.Tensor:
    """`x @ w.T` and the epilogue; x, w and added may have padded rows, whose pads are out of bounds.

    With `pdl` the kernel before this one may still run: it writes x and added, and w where `weight_is_new`. Output rows
    are 5 elements apart; nothing between may change. without: instruction to take out of the PTX.
    """
    (m, k), n = x.shape, w.shape[0]
    kind = DType.of(x.dtype)
    out = DType.of(output or x.dtype)
    assert kind
    assert out
    problem = Problem(n=n, k=k, weight=WeightScheme(kind.value), activation=kind, output=out, epilogue=epilogue)
    assert KERNEL.refuses(config, problem, m) is None
    spec = KERNEL.spec(config, problem, m, pdl=True)
    # N, and M within its groups, are read at run time: one binary for all of them.
    text = _compiled(config, replace(problem, n=64), min(spec.columns, 32), prewait).ptx
    if without:
        assert text.count(without) == 1
        text = text.replace(without, "")
    y = numerics.guarded_output(m, problem.outputs, out.torch, row_gap=5)
    memory, dependent = Memory(), bool(config.pdl)
    addresses = [
        memory.add("x", _bits(x), read_only=True, produced=dependent),
        memory.add("w", _bits(w), read_only=True, produced=weight_is_new),
        memory.add("y", _bits(y.y)),
        0 if added is None else memory.add("added", _bits(added), read_only=True, produced=dependent),
    ]
    added_stride = 0 if added is None or added.dim() == 1 else added.stride(0)
    strides = [x.stride(0), w.stride(0), y.y.stride(0), added_stride]
    grid = -(-problem.outputs // spec.block_outputs)
    arguments = [*addresses, m, problem.outputs, *strides]
    Machine(text, order=order).run(grid, config.threads, arguments, memory, dependent=dependent)
    y.check()
    return y.y.contiguous()


def _data(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype) * k**-0.5
    return numerics.padded_rows(x, 8), numerics.padded_rows(w, 24)


CASES: dict[str, tuple[MmaConfig, int, int, int]] = {
    "whole rounds": (PLAIN, 8, 32, 1024),
    "many rounds, two steps of activation ahead": (replace(PLAIN, ahead=2), 5, 9, 3072),
    "K and N tails": (PLAIN, 3, 41, 776),
    "K shorter than a round": (PLAIN, 1, 17, 200),
    "K of a round and a step": (PLAIN, 4, 8, 768),
    "one piece": (MmaConfig(4, 4, 4, 1), 16, 12, 8),
    "one round and one piece": (PLAIN, 11, 20, 520),
    "one round": (PLAIN, 16, 20, 512),
    "one part, deep": (MmaConfig(1, 1, 2, 4, 1), 16, 33, 264),
    "one part, odd loads": (MmaConfig(1, 1, 3, 2, 2), 7, 50, 904),
    "one part, eight loads": (MmaConfig(4, 1, 8, 1), 16, 70, 488),
    "two parts, five warps": (MmaConfig(5, 2, 5, 2, 2), 6, 23, 1288),
    "four parts": (MmaConfig(2, 4, 2, 2), 4, 17, 1032),
    "four parts, two ahead, six loads": (MmaConfig(3, 4, 6, 2, 2), 9, 13, 1936),
    "eight parts": (MmaConfig(2, 8, 2, 2), 2, 7, 2056),
    "eight parts, odd M, one load": (MmaConfig(2, 8, 1, 4, 2), 3, 5, 520),
    "eight parts, M16": (EIGHT, 16, 8, 520),
    "sixteen warps": (MmaConfig(16, 2, 2, 1), 16, 12, 2056),
    "programmatic launch, tails": (MmaConfig(4, 2, 3, 2, 1, 2, 1), 11, 41, 200),
    "programmatic launch, whole rounds": (DEPENDENT, 13, 40, 1024),
    "M17": (PLAIN, 17, 11, 520),
    "M24": (MmaConfig(3, 2, 1, 2), 24, 9, 392),
    "M32": (MmaConfig(4, 1, 2, 2), 32, 17, 264),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numerics_in_any_order_of_warps(name: str) -> None:
    config, m, n, k = CASES[name]
    x, w = _data(m, n, k)
    first = run(config, x, w)
    numerics.assert_t1(first, x, w)
    for order in ("eager", 1):
        numerics.assert_bit_equal(run(config, x, w, order=order), first)


@pytest.mark.parametrize("m", range(1, 17))
def test_every_m(m: int) -> None:
    x, w = _data(m, 13, 584)
    for config in (MmaConfig(2, 1, 2, 2), MmaConfig(2, 2, 2, 2), MmaConfig(2, 4, 2, 2), EIGHT):
        numerics.assert_t1(run(config, x, w), x, w)


@pytest.mark.parametrize("config", [PLAIN, replace(EIGHT, loads=2), DEPENDENT])
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("output", [None, torch.float32])
def test_epilogues(config: MmaConfig, epilogue: Epilogue, output: torch.dtype | None) -> None:
    m, n, k = 5, 38, 776
    x, w = _data(m, n, k)
    extra = numerics.padded_rows(torch.randn(m, n, dtype=torch.bfloat16), 6)
    added = {Epilogue.RESIDUAL: extra, Epilogue.BIAS: extra[0].clone()}.get(epilogue)
    gated = epilogue is Epilogue.SILU_MUL
    y = run(config, x, w, added, epilogue=epilogue, output=output)
    # The exponential of a gated product is the fast one of the device: a few units of the last place of FP32.
    numerics.assert_t1(y, x, w, added, gated=gated)


def test_fp16() -> None:
    x, w = _data(3, 50, 520, torch.float16)
    numerics.assert_t1(run(PLAIN, x, w), x, w)
    extra = torch.randn(3, 50, dtype=torch.float16)
    numerics.assert_t1(run(PLAIN, x, w, extra, epilogue=Epilogue.RESIDUAL), x, w, extra)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("config", [PLAIN, EIGHT, MmaConfig(2, 4, 2, 2), MmaConfig(4, 1, 2, 2)])
def test_one_hot_columns(config: MmaConfig, rows: int) -> None:
    """Every place of a lane, a part, a warp and a round, and the tail; a lost or doubled slice of K cannot hide."""
    _, w = _data(16, 10, 1048)
    edges = [127, 128, 255, 256, 257, 383, 384, 511, 512, 519, 520, 767, 768, 1023, 1024, 1031, 1032, 1039, 1040, 1047]
    columns = [*range(64), *range(64, 536, 8), *edges]
    numerics.one_hot_columns_exact(lambda x, weight: run(config, x, weight), w, columns=columns, rows=rows)


@pytest.mark.parametrize("config", [PLAIN, EIGHT])
@pytest.mark.parametrize("m", [6, 12])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_rows_do_not_see_each_other(config: MmaConfig, fill: float, m: int) -> None:
    """Also where two parts of a row meet those of another: the products of unequal parts are dropped, not weighed."""
    x, w = _data(m, 20, 520)
    numerics.rows_isolated(lambda a, b: run(config, a, b), x.clone(), w, row=2, fill=fill)


@pytest.mark.parametrize("config", [PLAIN, EIGHT])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_weight_rows_do_not_see_each_other(config: MmaConfig, fill: float) -> None:
    x, w = _data(6, 20, 520)
    dirty = w.clone()
    dirty[3] = fill
    clean, got = run(config, x, w), run(config, x, dirty)
    others = [row for row in range(20) if row != 3]
    numerics.assert_bit_equal(got[:, others].contiguous(), clean[:, others].contiguous())
    assert not bool(got[:, 3].isfinite().any())


@pytest.mark.parametrize("config", [PLAIN, EIGHT, replace(PLAIN, ahead=2)])
def test_the_bits_of_a_row_do_not_depend_on_m_or_n(config: MmaConfig) -> None:
    """One order of summation for every M: what batch-invariant serving needs."""
    x, w = _data(16, 30, 1032)
    whole = run(config, x, w, output=torch.float32)
    for m in (1, 2, 4, 5, 8, 9, 15):
        numerics.assert_bit_equal(run(config, x[:m], w, output=torch.float32), whole[:m])
    numerics.assert_bit_equal(run(config, x[7:8], w[17:], output=torch.float32), whole[7:8, 17:].contiguous())


def test_the_weight_is_read_early_only_in_the_form_that_may() -> None:
    x, w = _data(4, 20, 1024)
    numerics.assert_t1(run(DEPENDENT, x, w, prewait=False, weight_is_new=True), x, w)
    with pytest.raises(EarlyAccess, match="`w`"):
        run(DEPENDENT, x, w, prewait=True, weight_is_new=True)


@pytest.mark.parametrize("k", [1024, 8])
def test_nothing_but_the_weight_is_read_early(k: int) -> None:
    """A round, and the checked step that is all of a short K."""
    x, w = _data(4, 20, k)
    residual = torch.randn(4, 20, dtype=torch.bfloat16)
    y = run(DEPENDENT, x, w, residual, epilogue=Epilogue.RESIDUAL)
    numerics.assert_t1(y, x, w, residual)


def test_without_the_wait_the_activation_would_be_read_early() -> None:
    """The check above can fail: the same code with its wait taken out."""
    x, w = _data(4, 16, 1024)
    with pytest.raises(EarlyAccess, match="`x`"):
        run(DEPENDENT, x, w, without="griddepcontrol.wait;")


def test_an_ordinary_kernel_may_not_be_launched_as_a_dependent_one() -> None:
    """It has no wait: whoever launches it so reads what is not written yet."""
    x, w = _data(4, 16, 1024)
    memory = Memory()
    addresses = [memory.add("x", _bits(x), produced=True), memory.add("w", _bits(w))]
    addresses.append(memory.add("y", np.zeros((4, 16), np.uint16)))
    arguments = [*addresses, 0, 4, 16, x.stride(0), w.stride(0), 16, 0]
    text = _compiled(PLAIN, Problem(n=64, k=1024), 4, prewait=False).ptx
    with pytest.raises(EarlyAccess, match="`x`"):
        Machine(text).run(2, PLAIN.threads, arguments, memory)


def test_without_the_barrier_sums_are_read_before_they_are_written() -> None:
    x, w = _data(4, 16, 1024)
    text = _compiled(PLAIN, Problem(n=64, k=1024), 4, prewait=True).ptx
    barrier = next(line for line in text.splitlines() if "bar.sync" in line or "barrier.sync" in line)
    with pytest.raises((Race, UninitialisedRead)):
        run(PLAIN, x, w, without=barrier)
