"""Host side of `bf16_simt`: which configs are worth racing, and what a launch passes."""

from __future__ import annotations

import itertools

from skinny_core.kernels import cute_objects
from skinny_core.kernels.bf16_simt import config as _config
from skinny_core.kernels.bf16_simt.config import STEM, SimtConfig, Spec
from skinny_core.kernels.contract import VECTOR
from skinny_core.kernels.cute_kernel import MEASURED, Call, CuteKernel, with_pdl
from skinny_core.problem import Problem

SOURCE = cute_objects.Source(STEM, (f"{STEM}/config.py", "contract.py"))


class Bf16Simt(CuteKernel):
    """The kernel as the dispatcher, the tuner and the tests see it."""

    def spec(
        self, config: SimtConfig, problem: Problem, m: int, *, pdl: bool, capability: tuple[int, int] = MEASURED
    ) -> Spec:
        """Everything the code depends on."""
        return Spec(
            config=config,
            m=m,
            k=problem.k,
            dtype=problem.activation.value,
            output=problem.output.value,
            residual=problem.adds,
            pdl=pdl and bool(config.pdl),
            prewait=False,
        )

    def name(self, spec: Spec) -> str:
        """One binary for every N."""
        return f"{STEM}-m{spec.m}-k{spec.k}"

    def call(self, spec: Spec, problem: Problem, m: int, sm_count: int) -> Call:
        """The number of outputs, and the largest grid of a persistent config."""
        return Call((problem.n,), (max(1, sm_count * spec.config.blocks_per_sm),))

    def shared_bytes(self, spec: Spec, m: int) -> int:
        """The two buffers of partial sums."""
        return 2 * (spec.config.threads // 32) * m * spec.config.rows * 4

    def refuses(self, config: SimtConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def candidates(self, problem: Problem, m: int) -> tuple[SimtConfig, ...]:
        """Configs worth racing: at most a tenth of the threads' reach past K is wasted, 2 to 10 loads of 16 bytes in
        flight per thread, and persistent grids of about 1024 threads per SM where a row fits in registers.

        Their best is within 1.5 % of the best of 558 configs in each of 30 cells (benchmarks/results/h200/sweeps; a
        test compares).
        """
        found = []
        for threads in (64, 128, 160, 256, 320, 512):
            row_chunks = -(-problem.k // (threads * VECTOR))
            waste = row_chunks * threads * VECTOR / problem.k - 1
            if waste > 0.1 and threads != 64:
                continue
            for rows, chunks in itertools.product((1, 2, 4), sorted({1, 2, 4, row_chunks})):
                if chunks > min(row_chunks, 5) or rows * chunks not in (2, 3, 4, 8, 10):
                    continue
                resident = chunks == row_chunks
                for blocks in (
                    (0, 1024 // threads) if resident and 1024 // threads in _config.ALLOWED["blocks_per_sm"] else (0,)
                ):
                    config = SimtConfig(threads, rows, chunks, blocks)
                    if self.refuses(config, problem, m) is None:
                        found.append(config)
        return with_pdl(found, problem)


KERNEL = Bf16Simt(SOURCE, SimtConfig)
