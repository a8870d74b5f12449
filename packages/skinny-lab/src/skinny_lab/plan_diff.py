"""`skinny plans diff`: what another measurement changed. Cells are matched by Problem and M, whatever their ids say.

A speed-up has moved where the spreads of old and new (`replay.spread`) do not touch. Numbers that moved within them are
no difference, nor is the software they were measured with: that is told, and decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skinny_core import env
from skinny_core.plan import Cell, Plan
from skinny_lab import output
from skinny_lab.plans import open_plan
from skinny_lab.replay.spread import Speedup

KINDS = {
    "status": "status changed",
    "removed": "removed",
    "added": "added",
    "config": "config changed",
    "speed": "speed-up moved by more than the spreads",
    "name": "id or users changed",
}
"""Kinds of change and their titles, most important first."""
WHOLE_SHAPES = ("removed", "added", "name")
"""Kinds that are shown by shape; the JSON document has every cell."""
ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "dsl", "commit", "date")


@dataclass(frozen=True, slots=True)
class Change:
    """One cell that differs. kinds: all that apply, most important first; it is listed under the first. cell: its id in
    NEW, in OLD where NEW lacks it. old, new: status, config, speedup [low, median, high] (cold); None where absent."""

    kinds: tuple[str, ...]
    cell: str
    n: int
    k: int
    m: int
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    text: str
    rank: tuple[float, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Difference:
    """foreign: why the plans can hardly be compared (device, family). software: what else was not the same. again: how
    many unchanged cells were measured again, and agree within the spreads."""

    changes: tuple[Change, ...]
    foreign: tuple[str, ...]
    software: tuple[str, ...]
    unchanged: int
    again: int

    @property
    def same(self) -> bool:
        """Whether the exit status is 0."""
        return not self.changes and not self.foreign


def run(old: str, new: str, *, as_json: bool) -> int:
    """Print what NEW changes; 0 where nothing differs, 1 otherwise. Raises `RequestError` or `PlanError`."""
    # A package may ship a plan per device: the one of the device that the other side's file is for.
    files = {text: open_plan(text) for text in dict.fromkeys((new, old)) if env.expand(text).is_file()}
    key = next((found.key for _, found in files.values()), None)
    (old_path, before), (new_path, after) = (files.get(text) or open_plan(text, key) for text in (old, new))
    found = compare(before, after)
    if as_json:
        output.print_json(to_json(found, (old_path, before), (new_path, after)))
    else:
        _show(output.console(), found, (old_path, before), (new_path, after))
    return 0 if found.same else 1


def compare(old: Plan, new: Plan) -> Difference:
    """What `new` changes, in the order in which it is shown."""
    before = {(cell.problem(None), cell.m): cell for cell in old.cells}
    after = {(cell.problem(None), cell.m): cell for cell in new.cells}
    changes, again = [], 0
    for place in before | after:
        was, now = before.get(place), after.get(place)
        change = _change(was, now)
        if change is not None:
            changes.append(change)
        elif was is not None and now is not None:
            again += was.evidence != now.evidence
    order = list(KINDS)
    changes.sort(key=lambda c: (order.index(c.kinds[0]), *c.rank, c.cell))
    foreign = []
    if old.key != new.key:
        foreign.append(f"different devices: {old.key} and {new.key}; their times cannot be compared")
    if old.family != new.family:
        foreign.append(f"different families: {old.family} and {new.family}")
    software = []
    for name in ENVIRONMENT:
        values = getattr(old.environment, name), getattr(new.environment, name)
        if values[0] != values[1]:
            software.append(f"{name}: {values[0] or 'not told'} -> {values[1] or 'not told'}")
    in_both = len(before.keys() & after.keys())
    unchanged = in_both - sum(c.old is not None and c.new is not None for c in changes)
    return Difference(tuple(changes), tuple(foreign), tuple(software), unchanged, again)


def to_json(found: Difference, old: tuple[Path, Plan], new: tuple[Path, Plan]) -> dict[str, Any]:
    """The JSON document of `--json`."""
    return {
        "schema": 1,
        "same": found.same,
        **{name: _head(*one) for name, one in (("old", old), ("new", new))},
        "foreign": list(found.foreign),
        "software": list(found.software),
        "counts": {kind: sum(c.kinds[0] == kind for c in found.changes) for kind in KINDS},
        "unchanged": found.unchanged,
        "measured_again": found.again,
        "changes": [{key: value for key, value in asdict(c).items() if key != "rank"} for c in found.changes],
    }


def _head(path: Path, plan: Plan) -> dict[str, Any]:
    return {
        "file": str(path), "family": plan.family, "product": plan.product, "key": plan.key.slug, "digest": plan.digest,
        "date": plan.environment.date, "cells": len(plan.cells),
    }  # fmt: skip


def _change(was: Cell | None, now: Cell | None) -> Change | None:
    cell = now or was
    assert cell is not None
    differs: Callable[[str], bool] = lambda name: getattr(was, name) != getattr(now, name)  # noqa: E731
    if was is None or now is None:
        kinds: tuple[str, ...] = ("added" if was is None else "removed",)
    else:
        kinds = tuple(
            kind
            for kind, applies in (
                ("status", was.status != now.status),
                ("config", was.kernel_config != now.kernel_config),
                ("speed", not _speedup(was).overlaps(_speedup(now))),
                ("name", differs("id") or differs("used_by")),
            )
            if applies
        )
    if not kinds:
        return None
    return Change(
        kinds, cell.id, cell.n, cell.k, cell.m, _facts(was), _facts(now), _text(was, now, kinds), _rank(was, now)
    )


def _rank(was: Cell | None, now: Cell | None) -> tuple[float, ...]:
    """What is lost first (a `win` that is gone), then what moved most."""
    lost = was is not None and was.status == "win" and (now is None or now.status != "win")
    won = now is not None and now.status == "win" and (was is None or was.status != "win")
    moved = abs(math.log(_speedup(now).mid / _speedup(was).mid)) if was and now else 0.0
    return (0.0 if lost else 1.0 if won else 2.0, -moved)


def _text(was: Cell | None, now: Cell | None, kinds: Sequence[str]) -> str:
    if was is None or now is None:
        one = was or now
        assert one is not None
        return f"{one.status} at {_speedup(one).mid:.3f}x, {one.kernel_config}"
    parts = []
    if "status" in kinds:
        parts.append(f"{was.status} -> {now.status}" + (f" ({now.why})" if now.why else ""))
    moved = "" if "speed" in kinds else ", within the spreads"
    parts.append(f"{_speedup(was)} -> {_speedup(now)} x{moved}")
    if "config" in kinds:
        parts.append(f"{was.kernel_config} -> {now.kernel_config}")
    if was.id != now.id:
        parts.append(f"was called {was.id}")
    if was.used_by != now.used_by:
        parts.append(f"used by {', '.join(was.used_by) or 'nobody'} -> {', '.join(now.used_by) or 'nobody'}")
    return "; ".join(parts)


def _facts(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    speed = _speedup(cell)
    return {
        "id": cell.id, "status": cell.status, "config": str(cell.kernel_config), "used_by": list(cell.used_by),
        "speedup": [round(value, 4) for value in (speed.low, speed.mid, speed.high)],
    }  # fmt: skip


def _speedup(cell: Cell) -> Speedup:
    return Speedup.of(cell.evidence.baseline, cell.evidence.candidate)


def _show(console: Console, found: Difference, old: tuple[Path, Plan], new: tuple[Path, Plan]) -> None:
    for reason in found.foreign:
        console.print(Text(reason, "bold yellow"), soft_wrap=True)
    for mark, (path, plan) in (("---", old), ("+++", new)):
        date = f", {plan.environment.date}" if plan.environment.date else ""
        console.print(Text(f"{mark} {path}  ({plan.family} on {plan.key}, {len(plan.cells)} cells{date})", "bold"),
                      soft_wrap=True)  # fmt: skip
    if found.software:
        console.print(Text("    " + "; ".join(found.software), "dim"), soft_wrap=True)
    by_kind = {kind: [change for change in found.changes if change.kinds[0] == kind] for kind in KINDS}
    rest = f"{found.unchanged} cells unchanged"
    rest += f", {found.again} of them measured again with the same verdict within the spreads" if found.again else ""
    counted = [f"{len(group)} {KINDS[kind]}" for kind, group in by_kind.items() if group]
    console.print(Text(", ".join((*counted, rest))), soft_wrap=True)
    for kind, group in by_kind.items():
        if group:
            console.print(Text(f"\n{KINDS[kind]}: {len(group)}", "bold"))
        lines = _by_shape(group) if kind in WHOLE_SHAPES else [(c.cell, c.text) for c in group]
        for name, text in lines:
            console.print(Text.assemble("  ", (name, "cyan"), f"  {text}"), soft_wrap=True)


def _by_shape(group: Sequence[Change]) -> Iterator[tuple[str, str]]:
    """(name, text) of the changes, those of one shape in one: a plan that grows gains every M of many shapes."""
    shapes: dict[tuple[int, int, str], list[Change]] = {}
    for change in group:
        shapes.setdefault((change.n, change.k, change.cell.rpartition("/M")[0]), []).append(change)
    for (n, k, name), of in shapes.items():
        if len(of) == 1:
            yield of[0].cell, of[0].text
            continue
        facts = [fact for c in of if (fact := c.new or c.old)]
        gains = [fact["speedup"][1] for fact in facts]
        count = Counter(fact["status"] for fact in facts)
        statuses = ", ".join(f"{number} {status}" for status, number in sorted(count.items(), reverse=True))
        said = f"{n} x {k}, M {_ranges([c.m for c in of])}: {statuses}; {min(gains):.3f}x to {max(gains):.3f}x"
        texts = {c.text.rpartition("; ")[2] for c in of}
        yield name or of[0].cell, f"{said}; {texts.pop()}" if len(texts) == 1 and of[0].kinds[0] == "name" else said


def _ranges(ms: Sequence[int]) -> str:
    """ "1-4, 8" of 1, 2, 3, 4, 8."""
    found: list[list[int]] = []
    for m in sorted(ms):
        if found and m == found[-1][1] + 1:
            found[-1][1] = m
        else:
            found.append([m, m])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)
