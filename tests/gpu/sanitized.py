"""What `tests.gpu.sanitize` watches: one cell of every kernel and config family, small, with tails in N and K.

Prints one line per config, then `ran N configs`; exits with 1 where a result is wrong.
"""

from __future__ import annotations

import sys

import torch

from skinny_core import explicit
from skinny_core.problem import KernelConfig
from skinny_core.testing import numerics

CONFIGS = [
    KernelConfig.of("bf16_simt", {"threads": 64, "rows": 2, "chunks": 2}),
    KernelConfig.of("bf16_simt", {"threads": 256, "rows": 1, "chunks": 1, "blocks_per_sm": 2}),
    KernelConfig.of("bf16_stream", {"block_n": 16, "block_k": 128, "num_warps": 4, "num_stages": 3}),
    KernelConfig.of("bf16_mma", {"warps": 2, "parts": 1, "loads": 1, "unroll": 1, "blocks": 2}),
    KernelConfig.of("bf16_mma", {"warps": 4, "parts": 2, "loads": 2, "unroll": 2, "pdl": 1}),
    KernelConfig.of("bf16_mma", {"warps": 4, "parts": 4, "loads": 2, "unroll": 2, "ahead": 2}),
    KernelConfig.of("bf16_mma", {"warps": 2, "parts": 8, "loads": 1, "unroll": 2, "ahead": 2}),
]
"""Families: streaming and persistent; a load of 8, 4, 2 and 1 rows; with and without dependent launch."""
SHAPES = [(1, 300, 1032), (3, 301, 1160), (16, 299, 776)]
"""M, N, K."""


def main() -> int:
    """Run every config on every shape that it takes."""
    wrong = ran = 0
    for config in CONFIGS:
        for m, n, k in SHAPES:
            if config.kernel == "bf16_simt" and m > 4:
                continue
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
            y = explicit.run(config, x, w)
            torch.cuda.synchronize()
            try:
                numerics.assert_t1(y, x, w)
            except AssertionError as error:
                wrong += 1
                print(f"{config}: {error}")
        ran += 1
        print(config, flush=True)
    print(f"ran {ran} configs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
