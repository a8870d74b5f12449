"""Each gate passes what is right and fails the fault it exists for."""

from __future__ import annotations

import math

import pytest
import torch

from skinny_core.testing import numerics
from skinny_core.testing.numerics import TOLERANCE, assert_bit_equal, assert_t1, guarded_output, rel_rmse

DTYPES = [torch.bfloat16, torch.float16]


def _operands(dtype: torch.dtype, m: int = 4, n: int = 2048, k: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, k, generator=generator).to(dtype)


def _exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding_passes_and_two_fail(dtype: torch.dtype) -> None:
    x, w = _operands(dtype)
    residual = (64 * torch.randn(4, 2048, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert_t1(_exact(x, w).to(dtype), x, w)
    assert_t1((_exact(x, w) + residual.double()).to(dtype), x, w, residual)
    twice = (_exact(x, w).to(dtype).double() + residual.double()).to(dtype)
    with pytest.raises(AssertionError, match="rel-RMSE"):
        assert_t1(twice, x, w, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lost_element_fails_up_to_the_longest_k(dtype: torch.dtype) -> None:
    x, w = _operands(dtype, n=256, k=25600)
    with pytest.raises(AssertionError, match="rel-RMSE"):
        assert_t1(_exact(x[:, 1:], w[:, 1:]).to(dtype), x, w)


def test_fp32_tolerance_needs_fp32_accumulation() -> None:
    x, w = _operands(torch.bfloat16, n=256)
    assert_t1(x.float() @ w.float().T, x, w)
    halves = _exact(x[:, :2048], w[:, :2048]).bfloat16().float() + _exact(x[:, 2048:], w[:, 2048:]).float()
    with pytest.raises(AssertionError, match="rel-RMSE"):
        assert_t1(halves, x, w)


def test_small_outputs_have_room_for_scatter() -> None:
    failures = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(1, 64, generator=generator).bfloat16(), torch.randn(7, 64, generator=generator).bfloat16()
        y = _exact(x, w).bfloat16()
        failures += rel_rmse(y, x, w) > TOLERANCE[torch.bfloat16]
        assert_t1(y, x, w)
    assert failures > 0, "without the room some of these would fail, so it is needed"


def test_nan_and_shape_fail() -> None:
    x, w = _operands(torch.bfloat16, n=8, k=64)
    y = _exact(x, w).bfloat16()
    with pytest.raises(AssertionError, match="shape"):
        assert_t1(y[:, :7], x, w)
    y[2, 5] = float("nan")
    with pytest.raises(AssertionError, match=r"worst at \(2, 5\)"):
        assert_t1(y, x, w)
    assert math.isnan(rel_rmse(y, x, w))
    assert rel_rmse(torch.zeros(4, 8), torch.zeros(4, 64), w.float()) == 0.0


def test_bit_equality_sees_signs_and_nan() -> None:
    a = torch.tensor([[1.0, 0.0, float("nan")]])
    assert_bit_equal(a, a.clone())
    with pytest.raises(AssertionError, match=r"first at \(0, 1\)"):
        assert_bit_equal(a, torch.tensor([[1.0, -0.0, float("nan")]]))
    with pytest.raises(AssertionError, match="dtypes"):
        assert_bit_equal(a, a.half())
    with pytest.raises(AssertionError, match="shapes"):
        assert_bit_equal(a, a[0])


def test_one_hot_finds_what_the_tolerance_hides() -> None:
    w = _operands(torch.bfloat16, n=32, k=512)[1]

    def shuffled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, [100, 101]] = x[:, [101, 100]]
        return _exact(x, w).bfloat16()

    numerics.one_hot_columns_exact(lambda x, w: _exact(x, w).bfloat16(), w, rows=5)
    numerics.one_hot_columns_exact(shuffled, w, columns=[0, 99, 102, 511])
    with pytest.raises(AssertionError, match="differ"):
        numerics.one_hot_columns_exact(shuffled, w, rows=3)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3.0e38])
def test_row_isolation_finds_a_shared_scale(fill: float) -> None:
    x, w = _operands(torch.bfloat16, n=32, k=64)

    def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().amax() / 448
        codes = (x.float() / scale).to(torch.float8_e4m3fn)
        return (codes.float() @ w.float().T * scale).bfloat16()

    numerics.rows_isolated(lambda x, w: torch.stack([w.float() @ row.float() for row in x]), x, w, row=1, fill=fill)
    with pytest.raises(AssertionError, match="differ"):
        numerics.rows_isolated(shared, x, w, row=1, fill=fill)


def test_row_isolation_wants_nan_to_stay_nan() -> None:
    x, w = _operands(torch.bfloat16, n=32, k=64)
    with pytest.raises(AssertionError, match="came out with 32 numbers"):
        numerics.rows_isolated(lambda x, w: _exact(x.nan_to_num(), w), x, w, row=1, fill=float("nan"))


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_guards(dtype: torch.dtype, gap: int) -> None:
    out = guarded_output(3, 7, dtype, row_gap=gap)
    assert bool(out.y.isnan().all())
    out.y.zero_()
    out.check()
    for place in (0, 63, 64 + 3 * (7 + gap), len(out.buffer) - 1, *([64 + 7] if gap else [])):
        spoilt = guarded_output(3, 7, dtype, row_gap=gap)
        spoilt.buffer[place] = 1.0
        with pytest.raises(AssertionError, match=rf"1 elements outside y were written, first at y offset {place - 64}"):
            spoilt.check()


def test_padded_rows_hide_nan() -> None:
    values = torch.randn(3, 8)
    view = numerics.padded_rows(values, 8)
    assert view.stride() == (16, 1)
    assert_bit_equal(view, values)
    assert bool(view.as_strided((3, 8), (16, 1), 8)[:2].isnan().all())


def test_poisoned_allocations_are_nan_and_end() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with numerics.poisoned_allocations():
        assert bool(torch.empty(64).isnan().all())
        assert bool(torch.empty_like(torch.ones(64, dtype=torch.bfloat16)).isnan().all())
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
