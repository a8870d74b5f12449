"""`bf16_mma` called directly, over the whole of their contract: M, N, K, strides, dtypes, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from skinny_core import device, explicit, kernels, warmup
from skinny_core.device import DeviceKey
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, KernelConfig, Problem
from skinny_core.testing import numerics
from tests.gpu import mma

pytestmark = pytest.mark.sm90

each = pytest.mark.parametrize("config", mma.SMALL, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What most tests below need, compiled on all cores instead of one by one."""
    key = device.current_key()
    if key is None:
        return
    unique = {
        KERNEL.spec(mma.parsed(config), problem, m, pdl=True): (config, problem, m) for config, problem, m in mma.jobs()
    }
    warmup.prepare_in_parallel(list(unique.values()), key, prewait=False)


def _data(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    return torch.randn(m, k, dtype=dtype, device="cuda"), torch.randn(n, k, dtype=dtype, device="cuda") * k**-0.5


def _into(config: KernelConfig, problem: Problem, m: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    launch = KERNEL.compile(mma.parsed(config), problem, m, index=torch.cuda.current_device(), prewait=False)

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        launch(x, w, y, None, x.stride(0), y.stride(0), 0, False)

    return run


@each
def test_every_m(gpu: DeviceKey, config: KernelConfig) -> None:
    for m in mma.MS:
        x, w = _data(m, 1030, 1536)
        numerics.assert_t1(explicit.run(config, x, w), x, w)
        other = mma.changed(config, pdl=1 - mma.parsed(config).pdl)
        numerics.assert_bit_equal(explicit.run(other, x, w), explicit.run(config, x, w))


@pytest.mark.parametrize("m", [17, 24, 32])
def test_more_rows_than_a_plan_has(gpu: DeviceKey, m: int) -> None:
    """What the kernel takes beyond 16, to be raced."""
    config = mma.SMALL[0]
    x, w = _data(m, 1030, 1544)
    out = numerics.guarded_output(m, 1030, torch.bfloat16, device="cuda", row_gap=5)
    _into(config, Problem(n=1030, k=1544, device=gpu), m)(x, w, out.y)
    numerics.assert_t1(out.y, x, w)
    out.check()


@each
@pytest.mark.parametrize("k", mma.EDGES_K)
def test_edges_of_n_and_k_with_guards(gpu: DeviceKey, config: KernelConfig, k: int) -> None:
    for n in (1, 7, 60, 1027, 5000):
        for m in mma.EDGES_M:
            x, w = _data(m, n, k)
            out = numerics.guarded_output(m, n, torch.bfloat16, device="cuda", row_gap=5)
            _into(config, Problem(n=n, k=k, device=gpu), m)(x, w, out.y)
            numerics.assert_t1(out.y, x, w)
            out.check()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_dtypes_and_epilogues(gpu: DeviceKey, config: KernelConfig, dtype: torch.dtype, out: torch.dtype) -> None:
    m, n, k = 9, mma.PLAIN.n, mma.PLAIN.k
    x, w = _data(m, n, k, dtype)
    residual, bias = torch.randn(m, n, dtype=dtype, device="cuda"), torch.randn(n, dtype=dtype, device="cuda")
    numerics.assert_t1(explicit.run(config, x, w, out_dtype=out), x, w)
    numerics.assert_t1(explicit.run(config, x, w, residual=residual, out_dtype=out), x, w, residual)
    numerics.assert_t1(explicit.run(config, x, w, bias=bias, out_dtype=out), x, w, bias)
    numerics.assert_t1(explicit.run(mma.gated(config), x, w, gated=True, out_dtype=out), x, w, gated=True)


@each
@pytest.mark.parametrize("k", [9728, 25600])
def test_fp32_output_over_a_long_k(gpu: DeviceKey, config: KernelConfig, k: int) -> None:
    """Tensor cores truncate every addition: a config whose sums are too long is refused, the others hold 5e-6."""
    x, w = _data(2, 520, k)
    problem = Problem(n=520, k=k, output=DType.FP32, device=gpu)
    if why := kernels.refuses(config, problem, 2):
        assert "additions in a row" in why
    else:
        numerics.assert_t1(explicit.run(config, x, w, out_dtype=torch.float32), x, w)


@each
@pytest.mark.parametrize("pad", [8, 64])
def test_row_strides_are_read_at_call_time(gpu: DeviceKey, config: KernelConfig, pad: int) -> None:
    """The pads hold NaN, so a wrong stride cannot pass."""
    x, w = _data(5, 300, 1024)
    for a in (x, numerics.padded_rows(x, pad)):
        for b in (w, numerics.padded_rows(w, pad)):
            numerics.assert_t1(explicit.run(config, a, b), x, w)


@each
def test_one_hot_columns(gpu: DeviceKey, config: KernelConfig) -> None:
    _, w = _data(1, 130, 1544)
    numerics.one_hot_columns_exact(lambda x, weight: explicit.run(config, x, weight), w, rows=16)


@each
def test_the_same_bits_every_time_and_for_every_m(gpu: DeviceKey, config: KernelConfig) -> None:
    x, w = _data(16, 1000, 2056)
    whole = explicit.run(config, x, w, out_dtype=torch.float32)
    for _ in range(20):
        numerics.assert_bit_equal(explicit.run(config, x, w, out_dtype=torch.float32), whole)
    for m in range(1, 16):
        numerics.assert_bit_equal(explicit.run(config, x[:m], w, out_dtype=torch.float32), whole[:m])


@each
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_rows_do_not_see_each_other(gpu: DeviceKey, config: KernelConfig, fill: float) -> None:
    x, w = _data(7, 300, 1024)
    numerics.rows_isolated(lambda a, b: explicit.run(config, a, b), x, w, row=2, fill=fill)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2560, 9728), (2051, 2560)])
def test_candidates_are_right(gpu: DeviceKey, n: int, k: int) -> None:
    """Configs that a tuner may pick, as they are and in the form that reads weights early."""
    problem = Problem(n=n, k=k, device=gpu)
    picked = {m: KERNEL.candidates(problem, m)[m % 3 :: 3] for m in (1, 4, 16)}
    chosen = {m: [replace(c, pdl=pdl) for c in found for pdl in (0, 1)] for m, found in picked.items()}
    jobs = [(KernelConfig.of(KERNEL.stem, c.to_params()), problem, m) for m, found in chosen.items() for c in found]
    warmup.prepare_in_parallel(jobs, gpu, prewait=True)
    for m, found in chosen.items():
        assert found
        x, w = _data(m, n, k)
        for config in found:
            y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            launch = KERNEL.compile(config, problem, m, index=torch.cuda.current_device(), prewait=True)
            launch(x, w, y, None, k, n, 0, True)
            assert numerics.rel_rmse(y, x, w) <= numerics.TOLERANCE[torch.bfloat16], config
