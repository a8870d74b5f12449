"""`skinny plans`: are plan files sound, and do their digests seal what is in them?"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from skinny_core import env, family, kernels, plan, toml_text
from skinny_core.device import DeviceKey
from skinny_core.errors import PlanError, SkinnyError
from skinny_core.plan import Cell, Plan
from skinny_core.problem import Problem
from skinny_lab import output
from skinny_lab.explain.target import RequestError


@dataclass(frozen=True, slots=True)
class Checked:
    """One plan file. `faults`: what, fix, file and line (0 = unknown) of each thing that is wrong; `error`: the first
    of them, or None."""

    path: str
    family: str = ""
    product: str = ""
    digest: str = ""
    cells: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    faults: tuple[dict[str, Any], ...] = ()


def check(files: list[Path], *, as_json: bool) -> int:
    """Check these files, or every shipped plan; prints a table or JSON. Returns 1 if one is broken, else 0."""
    chosen = files or [file for package in family.discover().packages for file in package.plan_files()]
    results = [check_file(file) for file in chosen]
    if as_json:
        output.print_json({"schema": 1, "files": [asdict(r) for r in results]})
    else:
        _show(results)
    return 1 if any(r.error for r in results) else 0


def check_file(path: Path) -> Checked:
    """Schema, kernel predicates, duplicates, evidence (all by `plan.load`), then the digest and what M costs."""
    try:
        loaded = plan.load(path)
        text = path.read_text(encoding="utf-8")
    except (PlanError, OSError) as error:
        fault = output.fault(path, error)
        return Checked(str(path), error=fault, faults=(fault,))
    faults = []
    lines = toml_text.Lines(text)  # once: a plan may have as many faults as cells
    if loaded.digest != (sealing := loaded.seal()):
        what = f"digest is {loaded.digest or 'missing'}, the content gives {sealing}"
        fix = f"if the edit is meant: skinny plans seal {path}"
        line = lines.of(("digest",))
        faults.append({"what": what, "fix": fix, "file": str(path), "line": line})
    index = {cell.id: i for i, cell in enumerate(loaded.cells)}
    for small, large in slower_than_larger(loaded):
        here, there = small.evidence.candidate, large.evidence.candidate
        what = (
            f"cell {small.id}: {here.p50} us at M = {small.m}, yet {large.id} takes {there.p50} us at M = {large.m},"
            f" beyond the spreads (p20 {here.p20} > {DRIFT} * p80 {there.p80}): padding would be faster"
        )
        line = lines.of(("cell", index[small.id], "evidence", "candidate"))
        faults.append({"what": what, "fix": _fix_slower(path, loaded, small, large), "file": str(path), "line": line})
    cells = dict(Counter(cell.status for cell in loaded.cells))
    error = faults[0] if faults else None
    return Checked(str(path), loaded.family, loaded.product, loaded.digest, cells, error, tuple(faults))


DRIFT = 1.02
"""Cells of different M are races of their own, minutes apart; a spread is that of one race."""


def slower_than_larger(found: Plan) -> list[tuple[Cell, Cell]]:
    """(cell, the fastest of larger M that beats it) for each `win` cell that is slower, cold, than a `win` cell of the
    same Problem at a larger M, beyond the spreads and `DRIFT`. Rows can be padded, so a smaller M never has to cost
    more."""
    wins: dict[Problem, list[Cell]] = {}
    for cell in found.cells:
        if cell.status == "win":
            wins.setdefault(cell.problem(None), []).append(cell)
    pairs = []
    for group in wins.values():
        for small in group:
            bound = small.evidence.candidate.p20 / DRIFT
            beating = [c for c in group if c.m > small.m and c.evidence.candidate.p80 < bound]
            if beating:
                pairs.append((small, min(beating, key=lambda c: c.evidence.candidate.p50)))
    return pairs


def hold_back(found: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with every `win` that one at a larger M beats `refused`, and the ids of those."""
    held: list[str] = []
    while pairs := slower_than_larger(found):
        refused = {}
        for small, large in pairs:
            here, there = small.evidence.candidate.p50, large.evidence.candidate.p50
            why = f"{here:.2f} us, slower than M = {large.m} ({there:.2f} us): measure it again"
            refused[small.id] = msgspec.structs.replace(small, status="refused", why=why)
        held += refused
        cells = tuple(refused.get(cell.id, cell) for cell in found.cells)
        found = msgspec.structs.replace(found, cell=cells)
    return found, tuple(held)


def _fix_slower(path: Path, found: Plan, small: Cell, large: Cell) -> str:
    again = f"measure again (skinny replay {path} --cell {small.id} --cell {large.id})"
    config = large.kernel_config
    if config == small.kernel_config or kernels.refuses(config, small.problem(found.key), small.m):
        return again
    return f"{again}, or use the config of M = {large.m}: {config}"


def open_plan(text: str, key: DeviceKey | None = None) -> tuple[Path, Plan]:
    """The plan of a file, or the one that the model package of that name ("qwen3") ships: for device `key`, else its
    only one with more than reported cells, else its only one. Raises `RequestError` for a name or path that leads to no
    plan, `PlanError` for an unsound file.
    """
    path = env.expand(text)
    package = next((p for p in family.discover().packages if p.name == text), None)
    if package is not None and not path.is_file():
        shipped = [(file, plan.load(file)) for file in package.plan_files()]
        here = [(file, found) for file, found in shipped if found.key == key]
        measured = [(file, found) for file, found in shipped if not found.only_reported]
        for fitting in (here, measured, shipped):
            if len(fitting) == 1:
                return fitting[0]
        names = ", ".join(str(file) for file, _ in shipped)
        fix = f"give the path of one: {names}" if names else "give the path of a plan file"
        raise RequestError(f"{text} ships {len(shipped)} plans, none of them for this device", fix)
    try:
        return path, plan.load(path)
    except OSError as error:
        known = ", ".join(p.name for p in family.discover().packages)
        fix = "give the path of a plan file" + (f", or the name of a model package: {known}" if known else "")
        raise RequestError(f"{path}: {error.strerror}", fix) from None


def seal(files: list[Path]) -> None:
    """Rewrite the digest line of each file, comments and layout kept; through a link, the file it points to.

    Raises `PlanError` for an unsound file.
    """
    for path in files:
        try:
            loaded = plan.load(path)
        except OSError as error:
            raise SkinnyError(f"{path}: cannot be read: {error.strerror}", "check the path") from None
        if loaded.digest == loaded.seal():
            output.console().print(f"{path}: unchanged, {loaded.digest}", soft_wrap=True)
            continue
        _replace(path.resolve(), sealed(path.read_text(encoding="utf-8"), loaded.seal()))
        output.console().print(f"{path}: {loaded.digest or 'no digest'} -> {loaded.seal()}", soft_wrap=True)


def sealed(text: str, digest: str) -> str:
    """The text of a plan file with this digest, in the line that had one or before the first table."""
    lines = text.splitlines()
    new = f'digest = "{digest}"'
    if line := toml_text.line_of(text, ("digest",)):
        lines[line - 1] = new
    else:
        first_table = next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
        lines.insert(first_table, new)
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    plan.parse(text, str(path))
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _show(results: list[Checked]) -> None:
    console = output.console()
    if not results:
        console.print("No plan files: no model package is installed, or none ships a plan.")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("file", "family", "device", "cells", "state"):
        table.add_column(name, overflow="fold")
    for r in results:
        cells = ", ".join(f"{count} {status}" for status, count in sorted(r.cells.items()))
        state = Text("broken", "red") if r.error else Text("sound", "green")
        table.add_row(Path(r.path).name, r.family, r.product, cells, state)
    console.print(table)
    for r in results:
        for fault in r.faults:
            place, fix = (output.place(fault), "bold"), ("\n  fix: ", "bold green")
            console.print(Text.assemble("\n", place, fault["what"], fix, fault["fix"]))
