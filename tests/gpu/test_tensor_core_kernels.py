"""`bf16_bulk` and `bf16_mma` called directly, over the whole of their contract: M, N, K, strides, dtypes, epilogues."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from skinny_core import device, explicit, kernels, warmup
from skinny_core.device import DeviceKey
from skinny_core.problem import DType, Epilogue, KernelConfig, Problem, WeightScheme
from skinny_core.testing import numerics

pytestmark = pytest.mark.sm90

SMALL = [
    KernelConfig.of("bf16_bulk", {"rows": 16, "cols": 128, "warps": 4, "blocks_per_sm": 2}),
    KernelConfig.of("bf16_bulk", {"rows": 64, "cols": 256, "warps": 8, "resident": 1}),
    KernelConfig.of("bf16_bulk", {"rows": 32, "cols": 128, "warps": 2, "interleaved": 1, "evict_first": 1}),
    KernelConfig.of("bf16_mma", {"warps": 2, "tiles": 2, "unroll": 1}),
    KernelConfig.of("bf16_mma", {"warps": 4, "tiles": 1, "unroll": 2, "blocks_per_sm": 2}),
]
"""Configs that take the smallest K; every other shape fits them too."""
each = pytest.mark.parametrize("config", SMALL, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What most tests below need, compiled on all cores instead of one by one."""
    key = device.current_key()
    if key is None:
        return
    jobs = [
        (config, Problem(n=258, k=1032, weight=WeightScheme(half.value), activation=half, output=out, epilogue=e), m)
        for config, half, e, m in itertools.product(SMALL, (DType.BF16, DType.FP16), Epilogue, (8, 16))
        for out in (half, DType.FP32)
    ]
    warmup.prepare_in_parallel([job for job in jobs if _takes(*job)], key, prewait=False)


def _data(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 31 + n * 7 + k)
    return torch.randn(m, k, dtype=dtype, device="cuda"), torch.randn(n, k, dtype=dtype, device="cuda") * k**-0.5


def _into(config: KernelConfig, problem: Problem, m: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    kernel = kernels.get(config.kernel)
    parsed = kernel.config_from(dict(config.params))
    launch = kernel.compile(parsed, problem, m, index=torch.cuda.current_device(), prewait=False)

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        launch(x, w, y, None, x.stride(0), y.stride(0), 0, False)

    return run


def _takes(config: KernelConfig, problem: Problem, m: int) -> bool:
    return kernels.refuses(config, problem, m) is None


@each
def test_every_m(gpu: DeviceKey, config: KernelConfig) -> None:
    for m in range(1, 17):
        x, w = _data(m, 1030, 1536)
        numerics.assert_t1(explicit.run(config, x, w), x, w)


@pytest.mark.parametrize("m", [17, 24, 32])
def test_more_rows_than_a_plan_has(gpu: DeviceKey, m: int) -> None:
    """What `bf16_bulk` takes beyond 16, to be raced."""
    config = SMALL[0]
    x, w = _data(m, 1030, 1544)
    out = numerics.guarded_output(m, 1030, torch.bfloat16, device="cuda", row_gap=5)
    _into(config, Problem(n=1030, k=1544, device=gpu), m)(x, w, out.y)
    numerics.assert_t1(out.y, x, w)
    out.check()


@each
@pytest.mark.parametrize("k", [8, 16, 72, 504, 520, 1000, 2432, 4104, 9728])
def test_edges_of_n_and_k_with_guards(gpu: DeviceKey, config: KernelConfig, k: int) -> None:
    tried = 0
    for n in (1, 7, 60, 1027, 5000):
        for m in (1, 3, 8, 11, 16):
            problem = Problem(n=n, k=k, device=gpu)
            if not _takes(config, problem, m):
                continue
            tried += 1
            x, w = _data(m, n, k)
            out = numerics.guarded_output(m, n, torch.bfloat16, device="cuda", row_gap=5)
            _into(config, problem, m)(x, w, out.y)
            numerics.assert_t1(out.y, x, w)
            out.check()
    assert tried >= 5


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_dtypes_and_epilogues(gpu: DeviceKey, config: KernelConfig, dtype: torch.dtype, out: torch.dtype) -> None:
    m, n, k = 9, 258, 1032
    x, w = _data(m, n, k, dtype)
    residual, bias = torch.randn(m, n, dtype=dtype, device="cuda"), torch.randn(n, dtype=dtype, device="cuda")
    numerics.assert_t1(explicit.run(config, x, w, out_dtype=out), x, w)
    numerics.assert_t1(explicit.run(config, x, w, residual=residual, out_dtype=out), x, w, residual)
    numerics.assert_t1(explicit.run(config, x, w, bias=bias, out_dtype=out), x, w, bias)
    if _takes(config, Problem(n=n, k=k, epilogue=Epilogue.SILU_MUL, device=gpu), m):
        numerics.assert_t1(explicit.run(config, x, w, gated=True, out_dtype=out), x, w, gated=True)
    else:
        assert config.kernel == "bf16_mma", "bf16_bulk is the kernel of gated products"


@each
@pytest.mark.parametrize("k", [9728, 25600])
def test_fp32_output_over_a_long_k(gpu: DeviceKey, config: KernelConfig, k: int) -> None:
    """Tensor cores truncate at every one of K / 16 additions; the sum over a warp's share has to stay within 5e-6."""
    x, w = _data(2, 520, k)
    if _takes(config, Problem(n=520, k=k, output=DType.FP32, device=gpu), 2):
        numerics.assert_t1(explicit.run(config, x, w, out_dtype=torch.float32), x, w)
    else:
        assert config.kernel == "bf16_bulk", "only an activation kept in shared memory limits K"


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


@pytest.mark.parametrize("stem", ["bf16_bulk", "bf16_mma"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2560, 9728), (2051, 2560)])
def test_candidates_are_right(gpu: DeviceKey, stem: str, n: int, k: int) -> None:
    """Configs that a tuner may pick, in the form that reads weights early."""
    kernel = kernels.get(stem)
    problem = Problem(n=n, k=k, device=gpu)
    chosen = {m: kernel.candidates(problem, m)[m % 3 :: 3] for m in (1, 4, 16)}
    jobs = [(KernelConfig.of(stem, kernel.params_of(c)), problem, m) for m, found in chosen.items() for c in found]
    warmup.prepare_in_parallel(jobs, gpu, prewait=True)
    for m, found in chosen.items():
        assert found
        x, w = _data(m, n, k)
        for config in found:
            y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            launch = kernel.compile(config, problem, m, index=torch.cuda.current_device(), prewait=True)
            launch(x, w, y, None, k, n, 0, True)
            assert numerics.rel_rmse(y, x, w) <= numerics.TOLERANCE[torch.bfloat16], config
