"""Built wheels and clean environments, each made once."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.sources import wheels
from tests.checkout import members, project
from tests.packaging.closure import applies, closure, link


@dataclass(frozen=True, slots=True)
class Built:
    """A built wheel file and its requirements as METADATA states them, those of extras left out."""

    name: str
    module: str
    file: Path
    requires: tuple[str, ...]

    @property
    def own_requirements(self) -> set[str]:
        """Names of the other wheels of this project that it needs."""
        return {Requirement(text).name for text in self.requires if text.startswith("skinny-")}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Every wheel of the workspace, built from its folder."""
    folder = tmp_path_factory.mktemp("dist")
    modules = {w.name: w.module for w in wheels()}
    found = {}
    for member in members():
        name = str(project(member)["name"])
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        run(command, cwd=member)
        (file,) = folder.glob(f"{modules[name]}-*.whl")
        with zipfile.ZipFile(file) as archive:
            (entry,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            headers = Parser().parsestr(archive.read(entry).decode())
        requires = tuple(text for text in headers.get_all("Requires-Dist") or () if applies(Requirement(text)))
        found[name] = Built(name, modules[name], file, requires)
    return found


@pytest.fixture(scope="session")
def environment(built: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`environment(*names)`: the Python of a clean environment that holds these wheels and what they declare."""
    made: dict[frozenset[str], Path] = {}

    def make(*names: str) -> Path:
        wanted = set(names)
        while more := {n for name in wanted for n in built[name].own_requirements} - wanted:
            wanted |= more
        key = frozenset(wanted)
        if key not in made:
            made[key] = _make(tmp_path_factory.mktemp("env"), [built[name] for name in sorted(wanted)])
        return made[key]

    return make


def clean() -> dict[str, str]:
    """This environment without PYTHONPATH: pip takes a checkout that it finds there for the wheel and installs none."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command; its stdout. What it said is shown when it fails."""
    done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _make(folder: Path, wanted: list[Built]) -> Path:
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    third_party = folder / "declared"
    link(closure(requirement for b in wanted for requirement in _expanded(b, wanted)), third_party)
    (site,) = folder.glob("lib/python*/site-packages")
    # addsitedir, so that .pth files of the linked distributions work as they do after a real installation
    (site / "declared.pth").write_text(f"import site; site.addsitedir({str(third_party)!r})\n")
    files = [str(b.file) for b in wanted]
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", *files])
    return python


def _expanded(wheel: Built, wanted: list[Built]) -> list[str]:
    """Requirements of a wheel, with the extras of our own wheels that it asks for (`skinny-core[cute]`) spelled out."""
    found = list(wheel.requires)
    for text in wheel.requires:
        requirement = Requirement(text)
        if requirement.extras and requirement.name.startswith("skinny-"):
            other = next(b for b in wanted if b.name == requirement.name)
            found += _extra_requirements(other, requirement.extras)
    return found


def _extra_requirements(wheel: Built, extras: set[str]) -> list[str]:
    with zipfile.ZipFile(wheel.file) as archive:
        (entry,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(entry).decode())
    texts = headers.get_all("Requires-Dist") or ()
    needed = [Requirement(text) for text in texts if not applies(Requirement(text))]
    return [
        f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}"
        for r in needed
        if any(applies(r, extra) for extra in extras)
    ]
