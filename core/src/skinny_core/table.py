"""The cells of one model family, from every plan file that speaks about it, in order of precedence:

1. files named in `SKINNY=plan=...`, 2. `*.toml` in the user plan folder, 3. the files its package ships.

A file that cannot be used is noted and left out; it never stops a host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from skinny_core import env, kernels, rules
from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError, warn
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell, Plan, load
from skinny_core.problem import Problem
from skinny_core.rules import OFF_TABLE, Context, Verdict

ANY_FAMILY = "*"
"""Family of a plan that counts for every model (a user's own shapes)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A plan file that was read. origin: "SKINNY", "user" or "package"."""

    path: Path
    origin: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Lookup:
    """The cell found for a Problem and M, the plan it is from, and whether that plan is for exactly this device."""

    cell: Cell
    plan: Plan
    exact: bool


@dataclass(slots=True)
class Table:
    """Cells of one family for every device; `notes` says what was left out and why."""

    family: str
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    _index: dict[tuple[Problem, int], list[Lookup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for source in self.sources:
            for cell in source.plan.cells:
                key = (cell.problem(None), cell.m)
                self._index.setdefault(key, []).append(Lookup(cell, source.plan, False))

    def lookup(self, problem: Problem, m: int, key: DeviceKey | None, settings: env.Settings) -> Lookup | None:
        """The cell that speaks for device `key`: the first of an exact plan, else, as opted in, of a neighbour's.

        A `reported` cell that cannot run hides neither: it speaks where nothing else does. Where no cell speaks, one
        that says what exists: reported for this device; else of another one, nearest capability and measured first.
        """
        found = self._index.get((replace(problem, device=None), m), ())
        exact = [replace(c, exact=True) for c in found if key is not None and c.plan.key == key]
        by_distance = sorted(
            found, key=lambda c: (key is None or not _same_capability(c.plan.key, key), c.cell.status == "reported")
        )
        near = [c for c in found if settings.neighbour and key is not None and _same_capability(c.plan.key, key)]
        speaking = [c for c in (*exact, *near) if not _is_dormant(c.cell, settings)]
        return next(iter((*speaking, *exact, *by_distance)), None)

    def shapes(self) -> set[tuple[int, int]]:
        """All (N, K) with a cell."""
        return {(problem.n, problem.k) for problem, _ in self._index}

    def plans_for(self, key: DeviceKey | None) -> tuple[Plan, ...]:
        """Plans measured on exactly this device."""
        return tuple(s.plan for s in self.sources if s.plan.key == key)


def _same_capability(a: DeviceKey, b: DeviceKey) -> bool:
    return a.capability == b.capability


def _is_dormant(cell: Cell, settings: env.Settings) -> bool:
    """Whether a cell is somebody else's number and no more: not opted in to, or of a kernel that we do not have."""
    return cell.status == "reported" and not (settings.reported and kernels.known(cell.kernel))


def judge(found: Lookup | None, problem: Problem, m: int, key: DeviceKey | None, settings: env.Settings) -> Verdict:
    """What the plan side says about a Problem at M = m on device `key`: settings, device and cell rules."""
    if found is None:
        context = Context(
            enabled=settings.enabled,
            batch_invariant=settings.batch_invariant,
            m=m,
            on_cuda=key is not None,
            cell_status=OFF_TABLE,
        )
        return rules.decide(problem, context)
    measured_on = found.plan.key
    allowed = found.exact or (settings.neighbour and key is not None and _same_capability(measured_on, key))
    return rules.decide(
        replace(problem, device=key if allowed else measured_on),
        Context(
            enabled=settings.enabled,
            batch_invariant=settings.batch_invariant,
            m=m,
            on_cuda=key is not None,
            device=key,
            cell_status=found.cell.status,
            reported_allowed=settings.reported,
            foreign_kernel=None if kernels.known(found.cell.kernel) else found.cell.kernel,
        ),
    )


def build(family: str, package: ModelPackage | None, settings: env.Settings) -> Table:
    """Read every plan file for a family. Never raises for a file: it is noted, and a user's file also warns once."""
    sources: list[Source] = []
    notes: list[str] = []
    for path, origin in _files(package, settings, notes):
        try:
            plan = load(path)
        except (SkinnyError, OSError) as error:
            note = f"plan ignored: {error}" if str(path) in str(error) else f"plan ignored: {path}: {error}"
            notes.append(note)
            if origin != "package":
                _warn_once(note)
            continue
        if plan.family in (family, ANY_FAMILY):
            sources.append(Source(path, origin, plan))
    return Table(family, tuple(sources), tuple(notes))


def offer(table: Table, key: DeviceKey | None) -> str:
    """One line that offers a neighbour's plan, or says that there is none; "" where there is an exact one.

    A plan of nothing but reported cells is no plan in this sense, neither here nor of a neighbour.
    """
    if key is None or not all(plan.only_reported for plan in table.plans_for(key)):
        return ""
    measured = [s.plan for s in table.sources if not s.plan.only_reported]
    near = ", ".join(sorted({plan.product for plan in measured if _same_capability(plan.key, key)}))
    reported = sum(len(plan.cells) for plan in table.plans_for(key))
    but = f" but {reported} cells reported by somebody else" if reported else ""
    if not near:
        return (
            f"no plan of {table.family} for {key}{but}: the original calls run; to measure one: `skinny tune` on this"
            " device, see docs/tuning.md"
        )
    return (
        f"no plan for {key}{but}; measured on {near}: try it with SKINNY=neighbour=on, or measure: `skinny tune` on"
        " this device (docs/tuning.md)"
    )


def _files(package: ModelPackage | None, settings: env.Settings, notes: list[str]) -> Iterable[tuple[Path, str]]:
    yield from ((env.expand(p), "SKINNY") for p in settings.plans)
    try:
        yield from ((path, "user") for path in sorted(env.user_plan_folder().glob("*.toml")))
    except OSError as error:
        notes.append(f"user plans not read: {error}")
    if package is not None:
        try:
            shipped = package.plan_files()
        except Exception as error:
            notes.append(f"plans of {package.name} not found: {type(error).__name__}: {error}")
            return
        yield from ((path, "package") for path in shipped)


_warned: set[str] = set()


def _warn_once(note: str) -> None:
    if note not in _warned:
        _warned.add(note)
        warn(note)


def device_name(key: DeviceKey | None) -> str:
    """For people: "h200 (sm90-...)", or "no CUDA device"."""
    return str(key) if key is not None else "no CUDA device"
