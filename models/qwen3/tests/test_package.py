"""The declaration itself: found by its entry point, data packaged, nothing run in a host."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib

import pytest

from skinny_core import family
from skinny_qwen3 import package


def test_found_by_its_entry_point():
    names = {p.name: p for p in family.discover().packages}
    if "qwen3" not in names:
        pytest.skip('run from a source tree without entry points (`eval "$(python3 -m tests.checkout)"`)')
    assert names["qwen3"] is package.PACKAGE
    assert family.for_architecture("Qwen3ForCausalLM") is package.PACKAGE
    assert family.for_architecture("Qwen3MoeForCausalLM") is package.PACKAGE


def test_plan_files_are_the_packaged_toml_files(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    for name in ("b.toml", "a.toml", "notes.md"):
        (tmp_path / "plans" / name).touch()
    monkeypatch.setattr(package, "_FOLDER", tmp_path)
    assert [p.name for p in package.plan_files()] == ["a.toml", "b.toml"]


def test_no_plan_folder_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "_FOLDER", tmp_path)
    assert package.plan_files() == ()


def test_every_shipped_plan_is_toml_of_this_family():
    for path in package.plan_files():
        assert tomllib.loads(path.read_text())["family"] == "qwen3", path.name


def test_parity_module_exists():
    assert hasattr(importlib.import_module(package.PACKAGE.parity), "check_model")


def test_declaration_imports_neither_torch_nor_a_host():
    unwanted = "{'torch', 'vllm', 'transformers', 'triton'}"
    code = f"import skinny_qwen3.package, sys; print(sorted({unwanted} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
