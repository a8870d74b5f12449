"""Configs of `bf16_mma` for the GPU tests, and what they run; needs no GPU, so that CI asks the predicates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from skinny_core.kernels.bf16_mma.config import MmaConfig
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

SMALL = [
    KernelConfig.of(KERNEL.stem, {"warps": 2, "parts": 1, "loads": 2, "unroll": 1, "pdl": 1}),
    KernelConfig.of(KERNEL.stem, {"warps": 3, "parts": 2, "loads": 2, "unroll": 2, "ahead": 2, "pdl": 0}),
    KernelConfig.of(KERNEL.stem, {"warps": 4, "parts": 4, "loads": 4, "unroll": 2, "blocks": 2, "pdl": 1}),
    KernelConfig.of(KERNEL.stem, {"warps": 2, "parts": 8, "loads": 1, "unroll": 2, "ahead": 2, "pdl": 0}),
]
"""Every number of parts; all take every M of a plan. Each also runs with the other `pdl` (test_every_m)."""
EDGES_K = (8, 16, 72, 504, 520, 1000, 2432, 4104, 9728)
EDGES_M = (1, 3, 8, 11, 16)
MS = range(1, MAX_M + 1)
PLAIN = Problem(n=258, k=1032)


def parsed(config: KernelConfig) -> MmaConfig:
    """The kernel's own type."""
    return MmaConfig.from_params(dict(config.params))


def changed(config: KernelConfig, **params: int) -> KernelConfig:
    """With other values of some keys."""
    return KernelConfig.of(config.kernel, dict(config.params) | params)


def gated(config: KernelConfig) -> KernelConfig:
    """For a gated product, which needs as many loads for up as for gate."""
    return changed(config, loads=max(2, parsed(config).loads))


def jobs() -> Iterator[tuple[KernelConfig, Problem, int]]:
    """What the tests of these configs run at M up to 16, most of it. A binary is for one K, and for any N."""
    for config in SMALL:
        yield from ((changed(config, pdl=pdl), replace(PLAIN, k=1536), m) for pdl, m in itertools.product((0, 1), MS))
        yield from ((config, replace(PLAIN, k=k), m) for k, m in itertools.product(EDGES_K, EDGES_M))
        yield from ((config, replace(PLAIN, k=2056, output=DType.FP32), m) for m in MS)
        for half, epilogue, fp32 in itertools.product((DType.BF16, DType.FP16), Epilogue, (False, True)):
            problem = replace(
                PLAIN, weight=WeightScheme(half.value), activation=half, output=DType.FP32 if fp32 else half,
                epilogue=epilogue,
            )  # fmt: skip
            yield gated(config) if epilogue is Epilogue.SILU_MUL else config, problem, 9
