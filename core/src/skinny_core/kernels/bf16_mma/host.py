"""Host side of `bf16_mma`: which configs are worth racing, and what a launch passes."""

from __future__ import annotations

from dataclasses import replace

from skinny_core.kernels import cute_objects
from skinny_core.kernels.bf16_mma import config as _config
from skinny_core.kernels.bf16_mma.config import STEM, MmaConfig, Spec
from skinny_core.kernels.cute_kernel import MEASURED, Call, CuteKernel, with_pdl
from skinny_core.problem import Problem

SOURCE = cute_objects.Source(STEM, (f"{STEM}/config.py", "contract.py"))

SHAPES: tuple[tuple[int, int, int, int, int, int], ...] = (
    # warps, parts, loads, unroll, ahead, blocks
    (8, 8, 2, 2, 1, 4),
    (8, 4, 2, 2, 1, 4),
    (8, 4, 2, 4, 1, 3),
    (8, 2, 2, 2, 1, 4),
    (8, 2, 2, 2, 2, 2),
    (16, 2, 2, 2, 1, 2),
    (16, 2, 2, 2, 2, 2),
    (8, 2, 2, 4, 1, 3),
    (4, 2, 3, 2, 1, 6),
    (8, 2, 3, 2, 2, 2),
    (4, 2, 4, 2, 2, 4),
    (4, 2, 4, 4, 1, 2),
    (8, 2, 4, 2, 2, 2),
    (8, 2, 4, 4, 2, 1),
    (10, 2, 4, 2, 2, 1),
    (8, 2, 5, 2, 1, 2),
    (4, 2, 5, 4, 2, 2),
    (8, 2, 6, 2, 1, 2),
    (4, 2, 6, 2, 2, 3),
)
"""Blocks that won a cell on an H200, most parts first. What decides between them is how evenly N / rows fills the SMs
(benchmarks/NOTES.md 8)."""


class Bf16Mma(CuteKernel):
    """The kernel as the dispatcher, the tuner and the tests see it."""

    def spec(
        self, config: MmaConfig, problem: Problem, m: int, *, pdl: bool, capability: tuple[int, int] = MEASURED
    ) -> Spec:
        """Everything the code depends on."""
        if capability != MEASURED:
            # ptxas needs more registers elsewhere: it would spill to let that many blocks in.
            config = replace(config, blocks=1)
        return _config.spec_of(config, problem, m, pdl=pdl)

    def name(self, spec: Spec) -> str:
        """One binary for every N, and for the M of as many groups."""
        return f"{STEM}-m{spec.columns}-k{spec.k}"

    def call(self, spec: Spec, problem: Problem, m: int, sm_count: int) -> Call:
        """M and the number of outputs."""
        return Call((m, problem.outputs))

    def shared_bytes(self, spec: Spec, m: int) -> int:
        """Partial sums."""
        return spec.shared_bytes

    def refuses(self, config: MmaConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def candidates(self, problem: Problem, m: int) -> tuple[MmaConfig, ...]:
        """Configs worth racing: those of `SHAPES` that read the activation at most twice as often as the weight."""
        able = [MmaConfig(*shape) for shape in SHAPES]
        found = [c for c in able if m <= 2 * c.rows and self.refuses(c, problem, m) is None]
        return with_pdl(found, problem)


KERNEL = Bf16Mma(SOURCE, MmaConfig)
