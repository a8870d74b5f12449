"""From measurements to a plan: the keep rule, and what M >= 3 and a faster larger M add to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from skinny_core.plan import Cell, Plan
from skinny_lab import plans
from skinny_lab.bench import model_plan, tuning
from skinny_lab.tune.request import Site, Target
from skinny_lab.tune.store import Entry


@dataclass(frozen=True, slots=True)
class Result:
    """A plan, and the ids of its cells whose verdict is not final."""

    plan: Plan
    open: tuple[str, ...]


NO_STEP = "M >= 3 also needs a decode step, which only a packaged dense model has"


def cell_id(site: str, m: int) -> str:
    """ "qwen3-8b/qkv/M4"."""
    return f"{site}/M{m}"


def passes_alone(entry: Entry) -> bool:
    """Whether the keep rule holds, the decode step left aside."""
    return tuning.verdict(entry.measured, None)[0] == "win"


def needs_step(entry: Entry, steps: bool) -> bool:
    """Whether the verdict still waits for a decode step. steps: whether the model has one."""
    return steps and entry.m >= 3 and entry.in_model_us is None and passes_alone(entry)


def has_steps(target: Target) -> bool:
    """Whether a decode step can be made of the target."""
    return target.package is not None and model_plan.has_step(target.projections)


def make(target: Target, entries: Iterable[Entry]) -> Result:
    """The plan of what was measured. A cell that may not run yet, or not at all, is `refused` and says why.

    A `win` that is slower than one at a larger M, beyond the spreads, is refused, too: rows can be padded.
    """
    by_id = {cell_id(e.site, e.m): e for e in entries}
    steps = has_steps(target)
    waiting = {name for name, e in by_id.items() if needs_step(e, steps)}
    judged, held = plans.hold_back(raw_plan(target, by_id.values()))
    waiting |= {name for name in held if not by_id[name].settled}
    cells = {cell.id: cell for cell in judged.cells}
    place = {site.name: i for i, site in enumerate(target.sites)}
    ordered = sorted(by_id, key=lambda name: (place[by_id[name].site], by_id[name].m))
    plan = model_plan.make_plan(target.family, [cells[name] for name in ordered])
    return Result(plan, tuple(name for name in ordered if name in waiting))


def raw_plan(target: Target, entries: Iterable[Entry]) -> Plan:
    """The plan of what was measured, each cell judged alone."""
    sites = {site.name: site for site in target.sites}
    steps = has_steps(target)
    return model_plan.make_plan(target.family, [_cell(sites[e.site], e, steps) for e in entries])


def _cell(site: Site, entry: Entry, steps: bool) -> Cell:
    found = tuning.cell(entry.measured, cell_id(site.name, entry.m), site.used_by, entry.in_model_us)
    if found.status != "win" or entry.m < 3 or entry.in_model_us is not None:
        return found
    gain = f"{found.evidence.speedup:.3f}x cold alone, but "
    if not steps:
        why = NO_STEP
    elif entry.stepped:
        why = f"its decode step failed: {entry.stepped}"
    else:
        why = "its decode step was not measured: go on with `skinny tune --resume`"
    return msgspec.structs.replace(found, status="refused", why=gain + why)
