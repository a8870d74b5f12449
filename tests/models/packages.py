"""The model packages of this workspace, for tests that go through all of them."""

from __future__ import annotations

import csv
from pathlib import Path

from skinny_core import family
from tests.architecture.sources import wheels
from tests.checkout import ROOT

NAMES = [wheel.name.removeprefix("skinny-") for wheel in wheels() if wheel.level == 2]
"""Family names, from the folders: a package that its entry point does not lead to is a failure, not an absence."""


def found(name: str) -> family.ModelPackage:
    """The package as its entry point gives it."""
    return next(package for package in family.discover().packages if package.name == name)


def table(name: str) -> list[dict[str, str]]:
    """Rows of the package's `tests/shapes/<name>.csv`: config, tp, then "NxK" per fused projection or nothing."""
    file: Path = ROOT / "models" / name / "tests" / "shapes" / f"{name}.csv"
    return list(csv.DictReader(file.read_text().splitlines()))
