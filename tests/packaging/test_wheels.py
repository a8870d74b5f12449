"""Contents of each wheel, and each wheel alone with exactly what it declares."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.sources import wheels
from tests.checkout import ROOT, members, project
from tests.packaging.conftest import Built, clean

NAMES = [w.name for w in wheels()]
LIMIT_BYTES = 2_000_000
MODELS = [w.name for w in wheels() if w.level == 2]


def entries(wheel: Built) -> list[str]:
    with zipfile.ZipFile(wheel.file) as archive:
        return archive.namelist()


@pytest.mark.parametrize("name", NAMES)
def test_contents(built: dict[str, Built], name: str) -> None:
    wheel = built[name]
    names = entries(wheel)
    assert f"{wheel.module}/py.typed" in names
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    assert [n for n in names if "test_" in n or n.startswith("tests/") or "conftest" in n] == []
    assert [n for n in names if not n.startswith((f"{wheel.module}/", f"{wheel.module}-"))] == []
    assert wheel.file.stat().st_size < LIMIT_BYTES


@pytest.mark.parametrize("name", MODELS)
def test_a_model_wheel_carries_its_plans(built: dict[str, Built], name: str) -> None:
    wheel = built[name]
    source = next(w for w in wheels() if w.name == name).source
    shipped = {f"{wheel.module}/plans/{f.name}" for f in source.glob("plans/*.toml")}
    assert shipped == {n for n in entries(wheel) if n.startswith(f"{wheel.module}/plans/") and n.endswith(".toml")}
    assert shipped or "**No plan yet.**" in (source.parents[1] / "README.md").read_text(), "no plan, and no word of it"


@pytest.mark.parametrize("name", NAMES)
def test_every_data_file_of_the_source_is_shipped(built: dict[str, Built], name: str) -> None:
    wheel = built[name]
    source = next(w for w in wheels() if w.name == name).source
    files = (f for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    assert {f"{wheel.module}/{f.relative_to(source).as_posix()}" for f in files} <= set(entries(wheel))


@pytest.mark.parametrize("name", NAMES)
def test_no_path_of_the_building_machine(built: dict[str, Built], name: str) -> None:
    with zipfile.ZipFile(built[name].file) as archive:
        assert [n for n in archive.namelist() if str(ROOT).encode() in archive.read(n)] == []


@pytest.mark.parametrize("name", NAMES)
def test_alone(environment: Callable[..., Path], built: dict[str, Built], name: str) -> None:
    """Importable with its declared requirements and nothing else, and its version is the one it declares."""
    version = next(project(m)["version"] for m in members() if project(m)["name"] == name)
    code = f"import importlib.metadata as m, {built[name].module}; print(m.version({name!r}))"
    python = environment(name)
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == version


@pytest.mark.parametrize("name", NAMES)
def test_licence_is_the_same_everywhere(name: str) -> None:
    folder = next(m for m in members() if project(m)["name"] == name)
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_changelog_has_the_version(name: str) -> None:
    folder = next(m for m in members() if project(m)["name"] == name)
    assert f"## {project(folder)['version']}" in (folder / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("config", ["qwen3-8b", "llama-3.1-8b"])
def test_the_command_works_from_wheels(environment: Callable[..., Path], config: str) -> None:
    """With every model package installed, one with plans and one without."""
    python = environment("skinny-lab", *MODELS)
    command = [str(python.with_name("skinny")), "explain", config, "--device", "h200", "-M", "1"]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gate_up" in done.stdout


@pytest.mark.parametrize("name", MODELS)
def test_a_model_package_needs_no_other(built: dict[str, Built], name: str) -> None:
    """Not through the other wheels of the project either."""
    needed, todo = set(), [name]
    while todo:
        needed |= (more := built[todo.pop()].own_requirements - needed)
        todo += more
    assert needed & set(MODELS) == set()
