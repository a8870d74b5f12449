"""The declarations: found by their entry points, data packaged, nothing run in a host, no two in each other's way."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter

import pytest

from skinny_core import device, explain, family, plan
from skinny_core.env import Settings
from tests.models.packages import NAMES, found

each = pytest.mark.parametrize("name", NAMES)


@each
def test_found_by_its_entry_point(name: str) -> None:
    package = importlib.import_module(f"skinny_{name}.package").PACKAGE
    assert found(name) is package
    assert package.architectures
    assert [family.for_architecture(a) for a in package.architectures] == [package] * len(package.architectures)


def test_no_two_packages_claim_the_same() -> None:
    packages = [found(name) for name in NAMES]
    for claims in ((a for p in packages for a in p.architectures), (c for p in packages for c in p.configs)):
        assert [claim for claim, count in Counter(claims).items() if count > 1] == []


@each
def test_architectures_of_the_named_configs_are_the_declared_ones(name: str) -> None:
    package = found(name)
    assert {a for config in package.configs.values() for a in config["architectures"]} == set(package.architectures)


@each
def test_every_shipped_plan_is_of_this_family(name: str) -> None:
    assert [file.name for file in found(name).plan_files() if plan.load(file).family != name] == []


@each
def test_every_config_can_be_explained(name: str) -> None:
    """Every line runs or says why not; a package without a plan says that there is no cell, and saves nothing."""
    package = found(name)
    for config, content in package.configs.items():
        said = explain.explain(config, package, content, key=device.product("h200"), settings=Settings())
        assert said.lines
        assert [line for line in said.lines if line.runs == bool(line.reason)] == []
        if not package.plan_files():
            assert {line.reason for line in said.lines} == {"off_table"}
            assert said.saving_us(1) == 0


@each
def test_the_declaration_imports_neither_torch_nor_a_host(name: str) -> None:
    unwanted = "{'torch', 'vllm', 'transformers', 'triton'}"
    code = f"import skinny_{name}.package, sys; print(sorted({unwanted} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
