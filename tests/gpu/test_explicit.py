"""Kernels asked for by name: both stems run and are right, and what they cannot take is an error, never a wrong
number.
"""

from __future__ import annotations

import pytest
import torch

from skinny_core import explicit, kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import CompileForbiddenError, KernelRefusedError
from skinny_core.problem import KernelConfig, Problem
from skinny_core.testing import numerics

pytestmark = pytest.mark.sm90
N, K = 1000, 1536
SIMT = KernelConfig.of("bf16_simt", {"threads": 64, "rows": 2, "chunks": 2})


def _stream_configs(m: int) -> list[KernelConfig]:
    kernel = kernels.get("bf16_stream")
    found = [kernel.params_of(c) for c in kernel.candidates(Problem(n=N, k=K), m)]
    return [KernelConfig.of("bf16_stream", params) for params in found[::7]]


def _data(m: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m)
    return torch.randn(m, K, dtype=dtype, device="cuda"), torch.randn(N, K, dtype=dtype, device="cuda") * K**-0.5


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16])
def test_both_kernels(gpu: DeviceKey, m: int) -> None:
    x, w = _data(m)
    configs = _stream_configs(m)
    assert configs
    if m * 2 <= 16:
        configs.append(SIMT)
    for config in configs:
        y = explicit.run(config, x, w)
        numerics.assert_t1(y, x, w)
        for _ in range(20):
            numerics.assert_bit_equal(explicit.run(config, x, w), y)


@pytest.mark.parametrize("stem", ["bf16_simt", "bf16_stream"])
def test_options(gpu: DeviceKey, stem: str) -> None:
    config = SIMT if stem == "bf16_simt" else _stream_configs(2)[0]
    for dtype in (torch.bfloat16, torch.float16):
        x, w = _data(2, dtype)
        residual = torch.randn(2, N, dtype=dtype, device="cuda")
        for out in (None, torch.float32):
            numerics.assert_t1(explicit.run(config, x, w, residual=residual, out_dtype=out), x, w, residual)
        three = explicit.run(config, x.view(1, 2, K), w.requires_grad_())
        assert three.shape == (1, 2, N)
        numerics.assert_t1(three[0], x, w.detach())


@pytest.mark.parametrize("stem", ["bf16_simt", "bf16_stream"])
def test_captured(gpu: DeviceKey, stem: str) -> None:
    config = SIMT if stem == "bf16_simt" else _stream_configs(2)[0]
    x, w = _data(2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 0
        with pytest.raises(CompileForbiddenError, match="before the capture"):
            explicit.run(config, x, w[:999])
    explicit.run(config, x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = explicit.run(config, x * 1.0, w)
    for _ in range(3):
        x.normal_()
        graph.replay()
        numerics.assert_t1(y, x, w)


@pytest.mark.parametrize("stem", ["bf16_simt", "bf16_stream"])
def test_refusals(gpu: DeviceKey, stem: str) -> None:
    config = SIMT if stem == "bf16_simt" else _stream_configs(2)[0]
    x, w = _data(2)
    shifted = torch.randn(2 * K + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, K)
    for a, b in (
        (x.half(), w),
        (x[:, :-8], w),
        (shifted, w),
        (x.t().contiguous().t(), w),
        (x.repeat(9, 1), w),
        (x[:0], w),
    ):
        with pytest.raises(KernelRefusedError):
            explicit.run(config, a, b)
    numerics.assert_t1(explicit.run(config, x, w), x, w)
