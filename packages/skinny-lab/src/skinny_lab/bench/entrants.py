"""Which of our kernels race, at which M, with which configs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from skinny_core import device, kernels
from skinny_core.problem import MAX_M, KernelConfig, Problem


@dataclass(frozen=True, slots=True)
class Entrant:
    """A kernel of ours and the M it is raced at, both ends included. grid: config keys and their values, of which every
    combination is raced that the kernel does not refuse; without one, the kernel's own candidates."""

    stem: str
    low: int = 1
    high: int = MAX_M
    grid: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Entrant:
        """From "bf16_stream", "bf16_simt:1-4" or "bf16_mma:1-16:warps=4,8:parts=2:loads=2:unroll=2"; raises
        ValueError, `UnknownKernelError`, `ConfigError`."""
        found = re.fullmatch(r"(\w+)(?::(\d+)-(\d+))?((?::\w+=\d+(?:,\d+)*)*)", text)
        if found is None:
            example = "bf16_mma:1-4:warps=4,8:parts=2:loads=2:unroll=2"
            raise ValueError(f"{text!r}: write a kernel, with its M or a grid of configs: {example}")
        if int(found[2] or 1) > int(found[3] or MAX_M):
            raise ValueError(f"{text!r}: no M lies from {found[2]} to {found[3]}")
        kernel = kernels.get(found[1])
        keys = [key.split("=") for key in found[4].split(":")[1:]]
        grid = tuple((key, tuple(map(int, values.split(",")))) for key, values in keys)
        entrant = cls(found[1], int(found[2] or 1), int(found[3] or MAX_M), grid)
        for params in entrant.combinations():
            kernel.config_from(params)
        return entrant

    def combinations(self) -> list[dict[str, int]]:
        """Every combination of the grid's values, none without a grid."""
        names = [name for name, _ in self.grid]
        product = itertools.product(*(values for _, values in self.grid))
        return [dict(zip(names, values, strict=True)) for values in product] if self.grid else []

    def configs(self, problem: Problem, m: int) -> list[KernelConfig]:
        """What to race for a problem at M = m."""
        if not self.low <= m <= self.high:
            return []
        kernel = kernels.get(self.stem)
        typed = [kernel.config_from(params) for params in self.combinations()]
        chosen = (
            [c for c in typed if kernel.refuses(c, problem, m) is None] if self.grid else kernel.candidates(problem, m)
        )
        return [KernelConfig.of(self.stem, kernel.params_of(config)) for config in chosen]


DEFAULT = (Entrant("bf16_simt", 1, 2), Entrant("bf16_mma"), Entrant("bf16_stream"))
"""What is raced unless somebody says otherwise. bf16_simt ends at M = 2: what its FMA units have to do grows with M,
where tensor cores wait for the memory at every M (vLLM's kernel of the same kind has 0.62x of cuBLAS's speed at M = 8).
"""


def candidates(
    entrants: Iterable[Entrant], problem: Problem, m: int, near: Mapping[tuple[int, int], frozenset[str]] | None = None
) -> list[KernelConfig]:
    """Everything of ours that is raced at this M; of a shape in `near`, only what that names.

    A problem that names no device is judged for the current one: SM count and shared memory decide what can run.
    """
    if problem.device is None:
        problem = replace(problem, device=device.current_key())
    found = dict.fromkeys(config for entrant in entrants for config in entrant.configs(problem, m))
    chosen = (near or {}).get((problem.n, problem.k))
    return [config for config in found if chosen is None or str(config) in chosen]
