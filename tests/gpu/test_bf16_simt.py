"""`bf16_simt` called directly, over the whole of its contract: every edge of M, N and K, strides, dtypes, epilogues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from skinny_core.device import DeviceKey
from skinny_core.kernels.bf16_simt.config import SimtConfig
from skinny_core.kernels.bf16_simt.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import numerics

pytestmark = pytest.mark.sm90
BLOCK = SimtConfig(threads=64, rows=2, chunks=2)
PERSISTENT = SimtConfig(threads=512, rows=2, chunks=1, blocks_per_sm=2, pdl=1)


def _problem(n: int, k: int, dtype: DType = DType.BF16, output: DType | None = None, residual: bool = False) -> Problem:
    epilogue = Epilogue.RESIDUAL if residual else Epilogue.NONE
    return Problem(
        n=n, k=k, weight=WeightScheme(dtype.value), activation=dtype, output=output or dtype, epilogue=epilogue
    )  # fmt: skip


def _runner(config: SimtConfig, problem: Problem, m: int) -> Callable[..., None]:
    launch = KERNEL.compile(config, problem, m, index=torch.cuda.current_device(), prewait=False)

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        stride = 0 if residual is None else residual.stride(0)
        launch(x, w, y, residual, x.stride(0), y.stride(0), stride, False)

    return run


def _data(m: int, n: int, k: int, dtype: DType = DType.BF16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    x = torch.randn(m, k, dtype=dtype.torch, device="cuda")
    return x, torch.randn(n, k, dtype=dtype.torch, device="cuda") * k**-0.5


def _config_for(k: int, m: int) -> SimtConfig:
    """A small config that takes any K: the tail of the last chunk is partly outside."""
    row_chunks = -(-k // (64 * 8))
    return SimtConfig(threads=64, rows=1 if m > 4 else 2, chunks=1 if m > 4 else min(2, row_chunks))


@pytest.mark.parametrize("m", range(1, 17))
def test_every_m(gpu: DeviceKey, m: int) -> None:
    x, w = _data(m, 1030, 1536)
    y = torch.full((m, 1030), float("nan"), dtype=torch.bfloat16, device="cuda")
    _runner(_config_for(1536, m), _problem(1030, 1536), m)(x, w, y)
    numerics.assert_t1(y, x, w)


@pytest.mark.parametrize("k", [8, 16, 72, 504, 512, 520, 576, 1000, 2432, 4104, 9728])
@pytest.mark.parametrize("n", [1, 7, 60, 1027])
def test_edges_of_n_and_k_with_guards(gpu: DeviceKey, n: int, k: int) -> None:
    for m in (1, 3, 4):
        x, w = _data(m, n, k)
        out = numerics.guarded_output(m, n, torch.bfloat16, device="cuda", row_gap=5)
        _runner(_config_for(k, m), _problem(n, k), m)(x, w, out.y)
        numerics.assert_t1(out.y, x, w)
        out.check()


@pytest.mark.parametrize("n", [1, 500, 529, 4095])
@pytest.mark.parametrize("k", [4096, 4088, 2048 + 8])
def test_persistent_grid(gpu: DeviceKey, n: int, k: int) -> None:
    for m in (1, 4):
        x, w = _data(m, n, k)
        out = numerics.guarded_output(m, n, torch.bfloat16, device="cuda", row_gap=3)
        _runner(PERSISTENT, _problem(n, k), m)(x, w, out.y)
        numerics.assert_t1(out.y, x, w)
        out.check()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("output", [None, DType.FP32])
@pytest.mark.parametrize("residual", [False, True])
def test_dtypes_and_residual(gpu: DeviceKey, dtype: DType, output: DType | None, residual: bool) -> None:
    m, n, k = 2, 257, 1032
    x, w = _data(m, n, k, dtype)
    problem = _problem(n, k, dtype, output, residual)
    extra = torch.randn(m, n, dtype=dtype.torch, device="cuda") if residual else None
    y = torch.full((m, n), float("nan"), dtype=problem.output.torch, device="cuda")
    _runner(_config_for(k, m), problem, m)(x, w, y, extra)
    numerics.assert_t1(y, x, w, extra)


@pytest.mark.parametrize("pad", [8, 64, 128])
def test_row_strides_are_read_at_call_time(gpu: DeviceKey, pad: int) -> None:
    """Padded weight and activation rows; the pads hold NaN, so a wrong stride cannot pass."""
    m, n, k = 2, 300, 1024
    x0, w0 = _data(m, n, k)
    x = torch.full((m, k + pad), float("nan"), dtype=torch.bfloat16, device="cuda")[:, :k].copy_(x0)
    w = torch.full((n, k + pad), float("nan"), dtype=torch.bfloat16, device="cuda")[:, :k].copy_(w0)
    run = _runner(BLOCK, _problem(n, k), m)
    for a, b in ((x0, w0), (x, w), (x0, w), (x, w0)):
        y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        run(a, b, y)
        numerics.assert_t1(y, x0, w0)


@pytest.mark.parametrize("config", [BLOCK, SimtConfig(threads=256, rows=1, chunks=1), PERSISTENT])
def test_one_hot_columns(gpu: DeviceKey, config: SimtConfig) -> None:
    n, k, m = 130, 4096, 4
    _, w = _data(m, n, k)
    run = _runner(config, _problem(n, k), m)

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        run(x, weight, y)
        return y

    numerics.one_hot_columns_exact(linear, w, rows=m)


def test_every_candidate_is_right(gpu: DeviceKey) -> None:
    """All configs that a tuner may pick, at one odd N and a K with a tail."""
    for m in (1, 2, 4):
        n, k = 263, 4096
        x, w = _data(m, n, k)
        problem = _problem(n, k)
        for config in KERNEL.candidates(problem, m)[::3]:
            y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            _runner(config, problem, m)(x, w, y)
            assert numerics.rel_rmse(y, x, w) <= numerics.TOLERANCE[torch.bfloat16], config
