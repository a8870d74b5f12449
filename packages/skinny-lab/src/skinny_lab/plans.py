"""`skinny plans`: are plan files sound, and do their digests seal what is in them?"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from skinny_core import family, plan, toml_text
from skinny_core.errors import PlanError, SkinnyError
from skinny_lab import output


@dataclass(frozen=True, slots=True)
class Checked:
    """One plan file. `error`: what, fix, file and line (0 = unknown) of the first thing that is wrong, or None."""

    path: str
    family: str = ""
    product: str = ""
    digest: str = ""
    cells: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None


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
    """Schema, kernel predicates, duplicates, evidence (all by `plan.load`), then the digest."""
    try:
        loaded = plan.load(path)
    except (PlanError, OSError) as error:
        return Checked(str(path), error=output.fault(path, error))
    error = None
    if loaded.digest != loaded.seal():
        what = f"digest is {loaded.digest or 'missing'}, the content gives {loaded.seal()}"
        fix = f"if the edit is meant: skinny plans seal {path}"
        line = toml_text.line_of(path.read_text(encoding="utf-8"), ("digest",))
        error = {"what": what, "fix": fix, "file": str(path), "line": line}
    cells = dict(Counter(cell.status for cell in loaded.cells))
    return Checked(str(path), loaded.family, loaded.product, loaded.digest, cells, error)


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
        if r.error:
            place, fix = (output.place(r.error), "bold"), ("\n  fix: ", "bold green")
            console.print(Text.assemble("\n", place, r.error["what"], fix, r.error["fix"]))
