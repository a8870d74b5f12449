"""Figures about the tree: `python -m tests.architecture.sizes` prints them and fails when one is over its limit."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from tests.architecture.sources import environment_uses, project_files, wheels
from tests.checkout import ROOT

CAP = 500
MEDIAN = 150
FORBIDDEN = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "stuff"}
"""Words that say nothing about what is in a file."""


def lines(path: Path) -> int:
    """Number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def says_nothing(path: Path) -> bool:
    """Whether a part of the file's path below the root consists of, or ends in, a forbidden word."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return any(word in FORBIDDEN for part in parts for word in part.strip("_").lower().replace("-", "_").split("_"))


def environment_names() -> set[str]:
    """Variables that the shipped code reads or writes, by name."""
    uses = (use for wheel in wheels() for file in wheel.files() for use in environment_uses(file))
    return {use.name for use in uses if use.name is not None}


def complaints(files: list[Path]) -> list[str]:
    """One line per figure over its limit."""
    sizes = {file: lines(file) for file in files}
    found = [f"{file.relative_to(ROOT)}: {n} lines, the cap is {CAP}" for file, n in sizes.items() if n > CAP]
    # Empty package markers would make the median mean nothing.
    median = statistics.median(n for n in sizes.values() if n > 1)
    if median > MEDIAN:
        found.append(f"median file length is {median:.0f} lines, the limit is {MEDIAN}")
    found += [
        f"{file.relative_to(ROOT)}: the name says nothing about the content" for file in files if says_nothing(file)
    ]
    return found


def main() -> int:
    """Print the figures; returns 1 when one is over its limit."""
    files = project_files()
    sizes = sorted(((lines(file), file) for file in files), reverse=True)
    median = statistics.median(n for n, _ in sizes if n > 1)
    print(f"{len(files)} files, {sum(n for n, _ in sizes)} lines, median {median:.0f}")
    print("longest:", ", ".join(f"{file.relative_to(ROOT)} {n}" for n, file in sizes[:5]))
    print("environment variables in shipped code:", ", ".join(sorted(environment_names())))
    found = complaints(files)
    print("\n".join(found) or "all within limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
