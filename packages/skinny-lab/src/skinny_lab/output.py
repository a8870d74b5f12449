"""Where text goes: tables and prose to stdout through rich, JSON to stdout untouched, errors to stderr in two lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skinny_core.errors import PlanError, SkinnyError


def console() -> Console:
    """A console for stdout. Rich takes the terminal's width, 80 columns where there is none."""
    return Console(highlight=False, soft_wrap=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document, indented, nothing else on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_error(error: SkinnyError) -> None:
    """What is wrong and what to do, on stderr."""
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    stderr.print(Text.assemble(("error: ", "bold red"), error.what))
    stderr.print(Text.assemble(("  fix: ", "bold green"), error.fix))


def fault(path: Path, error: PlanError | OSError) -> dict[str, Any]:
    """Why a plan file is not used: `what`, `fix`, `file`, `line` (1-based, 0 = unknown). `what` does not repeat the
    place; `place` writes it."""
    if isinstance(error, OSError):
        what = f"cannot be read: {error.strerror or error}"
        return {"what": what, "fix": "check the path", "file": str(path), "line": 0}
    said = {"what": error.what, "fix": error.fix, "file": error.file or str(path), "line": error.line}
    return said | {"what": error.what.removeprefix(place(said))}


def place(said: Mapping[str, Any]) -> str:
    """ "FILE:LINE: " of a fault, "FILE: " where the line is not known."""
    return f"{said['file']}:{said['line']}: " if said["line"] else f"{said['file']}: "


def facts(title: str, rows: Mapping[str, str | Text]) -> Table:
    """A borderless two-column table: names on the left, values folded on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def one_line(error: Exception) -> str:
    """What went wrong, short enough for a cell of a table or a file."""
    text = error.what if isinstance(error, SkinnyError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]
