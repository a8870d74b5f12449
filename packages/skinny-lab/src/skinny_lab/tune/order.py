"""Which cell comes next, and what races in it: a run that is cut short should leave a plan that is of use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.problem import KernelConfig, Problem
from skinny_lab.bench.entrants import Entrant
from skinny_lab.tune.request import Site

ANCHORS = (1, 2, 4, 8, 16)
"""M that race every candidate, and first: what hosts pad to. The others race what was fastest beside them."""
NEAR = 3
"""Configs taken over from each neighbouring M."""


def order(sites: Iterable[Site], ms: Sequence[int] | None) -> list[tuple[Site, int]]:
    """All cells, M by M: anchors first, then ascending; within an M the sites that read most bytes per step first.

    ms: for every site, None for what each site asks for (all from 1 to 16 where it asks for nothing).
    """
    by_bytes = sorted(sites, key=lambda site: -site.step_bytes)
    cells = [(site, m) for site in by_bytes for m in (ms or site.ms or range(1, 17))]
    return sorted(cells, key=lambda cell: (cell[1] not in ANCHORS, cell[1]))


def beside(
    m: int, finalists: Mapping[int, Sequence[KernelConfig]], entrants: Iterable[Entrant], problem: Problem
) -> list[KernelConfig]:
    """The `NEAR` fastest at the nearest measured M below and above that can run at this one; none for an anchor.

    finalists: M -> configs of the shape, fastest first. Rows can be padded, so a config of a larger M is as good here.
    """
    if m in ANCHORS:
        return []
    below = max((other for other in finalists if other < m), default=None)
    above = min((other for other in finalists if other > m), default=None)
    ranges: dict[str, list[Entrant]] = {}
    for entrant in entrants:
        ranges.setdefault(entrant.stem, []).append(entrant)
    found: dict[KernelConfig, None] = {}
    for other in (below, above):
        for config in finalists[other][:NEAR] if other is not None else ():
            enters = any(e.low <= m <= e.high for e in ranges.get(config.kernel, ()))
            if enters and kernels.refuses(config, problem, m) is None:
                found[config] = None
    return list(found)


def accepted(entrants: Iterable[Entrant], problem: Problem, m: int, key: DeviceKey) -> tuple[list[KernelConfig], str]:
    """What may race at M = m on a device, and why the first of the others may not ("" where there are none)."""
    found: dict[KernelConfig, None] = {}
    here = replace(problem, device=key)
    why = ""
    for entrant in entrants:
        for config in entrant.configs(here, m):
            refusal = kernels.refuses(config, here, m)
            if refusal is None:
                found[config] = None
            why = why or refusal or ""
        if not found and not why and entrant.low <= m <= entrant.high:
            why = _refusal(entrant.stem, here, m)
    return list(found), why


def _refusal(stem: str, problem: Problem, m: int) -> str:
    """Why a kernel has no candidate for a problem: what it says of a config that fits a problem of plain size."""
    kernel = kernels.get(stem)
    for config in kernel.candidates(Problem(n=4096, k=4096), 1)[:1]:
        said = kernel.refuses(config, problem, m)
        if said:
            return f"{stem}: {said}"
    return ""
