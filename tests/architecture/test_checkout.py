"""A checkout that is used without pip offers the same modules, versions and entry points as installed wheels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import checkout
from tests.architecture.sources import wheels

CODE = """
from importlib.metadata import entry_points, version
import skinny_core, skinny_vllm
from skinny_core.family import discover
print(version("skinny-core"))
print(*sorted(f"skinny-{p.name}" for p in discover().packages))
print(*(e.value for e in entry_points(group="console_scripts") if e.name == "skinny"))
"""


def test_entry_points_and_versions_in_a_child_process(tmp_path: Path) -> None:
    entries = checkout.register(tmp_path / "info")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, models, command = done.stdout.splitlines()
    assert version == checkout.project(checkout.ROOT / "core")["version"]
    assert models.split() == [w.name for w in wheels() if w.level == 2]
    assert command == "skinny_lab.cli:main"


def test_register_leaves_right_files_alone(tmp_path: Path) -> None:
    checkout.register(tmp_path)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()}
    checkout.register(tmp_path)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()} == before
    assert len(before) == 2 * len(checkout.members())
