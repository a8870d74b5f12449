"""From measurements to a plan: the keep rule, and what M >= 3 and a faster larger M add to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from skinny_core.plan import Cell, Plan
from skinny_lab import plans
from skinny_lab.bench import model_plan, tuning
from skinny_lab.tune.request import Site, Target
from skinny_lab.tune.store import Entry, Store

CHAIN = "all"
"""Label of the decode step of shapes and captures."""


@dataclass(frozen=True, slots=True)
class Result:
    """A plan, and the ids of its cells whose verdict is not final."""

    plan: Plan
    open: tuple[str, ...]


def cell_id(site: str, m: int) -> str:
    """ "qwen3-8b/qkv/M4"."""
    return f"{site}/M{m}"


def passes_alone(entry: Entry) -> bool:
    """Whether the keep rule holds, the decode step left aside."""
    return tuning.verdict(entry.measured, None)[0] == "win"


def steps(target: Target, site: Site) -> tuple[str, ...]:
    """Labels of the decode steps that check a site's cells: of every model that uses it; else of all sites in turn."""
    if not target.models:
        return (CHAIN,)
    return tuple(model.label for model in target.models if site.projections(model))


def needed_steps(target: Target, site: Site, entry: Entry) -> tuple[str, ...]:
    """Labels of the decode steps for which the verdict still waits."""
    if entry.m < 3 or not passes_alone(entry):
        return ()
    return tuple(label for label in steps(target, site) if label not in entry.in_model)


def make(target: Target, store: Store) -> Result:
    """The plan of what was measured. A cell that may not run yet, or not at all, is `refused` and says why.

    A `win` that is slower than one at a larger M, beyond the spreads, is refused, too: rows can be padded. Of a target
    that is a part of what was measured, the plan is of that part.
    """
    pairs = {cell_id(site.name, e.m): (site, e) for site, e in _entries(target, store)}
    judged, held = plans.hold_back(raw_plan(target, store))
    waiting = {name for name, (site, e) in pairs.items() if needed_steps(target, site, e)}
    waiting |= {name for name in held if not pairs[name][1].settled}
    return Result(judged, tuple(name for name in pairs if name in waiting))


def raw_plan(target: Target, store: Store) -> Plan:
    """The plan of what was measured, each cell judged alone; sites in the target's order, then M."""
    cells = [_cell(target, site, entry) for site, entry in _entries(target, store)]
    return model_plan.make_plan(target.family, cells, store.key, store.environment)


def _entries(target: Target, store: Store) -> Iterable[tuple[Site, Entry]]:
    for site in target.sites:
        yield from ((site, entry) for entry in store.of(site))


def _cell(target: Target, site: Site, entry: Entry) -> Cell:
    wanted = steps(target, site)
    # The worst of several models: a cell of a plan counts in all of them.
    slowest = max((us for label, us in entry.in_model.items() if label in wanted), default=None)
    complete = set(wanted) <= set(entry.in_model)
    found = tuning.cell(entry.measured, cell_id(site.name, entry.m), site.used_by, slowest)
    if found.status != "win" or entry.m < 3 or complete:
        return found
    gain = f"{found.evidence.speedup:.3f}x cold alone, but "
    if entry.stepped:
        why = f"its decode step failed: {entry.stepped}"
    else:
        why = "its decode step was not measured: go on with `skinny tune --resume`"
    return msgspec.structs.replace(found, status="refused", why=gain + why)
