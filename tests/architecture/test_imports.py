"""Import arrows: models -> packages -> core. Imports inside functions count."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import Wheel, imports, tree, wheels
from tests.checkout import ROOT

WHEELS = wheels()
CORE_MAY_IMPORT = {"torch", "triton", "numpy", "msgspec", "platformdirs", "filelock", "cutlass", "cuda", "tvm_ffi"}
"""Third-party roots of the core: what it declares, and the DSLs it imports lazily. No host, no command-line toolkit."""
HOSTS = {"vllm", "transformers", "sglang", "peft", "accelerate"}
SIDEWAYS = {("skinny_lab", "skinny_transformers")}
"""A tool may drive a host package (the demo does), never the other way round."""


def crossings(wheel: Wheel, file: Path) -> list[str]:
    """Imports of other wheels of this project that the arrows do not allow."""
    levels = {w.module: w.level for w in WHEELS}
    found = []
    for line, module in imports(file):
        root = module.partition(".")[0]
        if root == wheel.module or root not in levels:
            continue
        if levels[root] >= wheel.level and (wheel.module, root) not in SIDEWAYS:
            found.append(f"{file}:{line}: {wheel.module} imports {root}")
    return found


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda w: w.name)
def test_arrows(wheel: Wheel) -> None:
    assert [c for file in wheel.files() for c in crossings(wheel, file)] == []


def test_the_tree_has_all_wheels() -> None:
    assert {w.level for w in WHEELS} == {0, 1, 2}
    assert all(w.files() for w in WHEELS), [w.name for w in WHEELS if not w.files()]


def test_core_imports_only_what_it_may() -> None:
    core = next(w for w in WHEELS if w.level == 0)
    allowed = CORE_MAY_IMPORT | set(sys.stdlib_module_names) | {core.module}
    found = [(f, line, m) for f in core.files() for line, m in imports(f) if m.partition(".")[0] not in allowed]
    plugins = {f for f, _, m in found if m == "pytest" and "testing" in f.parts}
    assert [(str(f), line, m) for f, line, m in found if f not in plugins] == []
    names = {".".join(f.relative_to(core.source.parent).with_suffix("").parts) for f in plugins}
    users = [(str(f), line) for f in core.files() for line, m in imports(f) if m in names]
    assert users == [], "a pytest plug-in that ships for other wheels' tests is imported by the core itself"


@pytest.mark.parametrize("wheel", [w for w in WHEELS if w.level == 2], ids=lambda w: w.name)
def test_models_name_a_host_only_in_a_hooks_module(wheel: Wheel) -> None:
    files = [f for f in wheel.files() if not f.stem.startswith("hooks_")]
    assert [(str(f), line, m) for f in files for line, m in imports(f) if m.partition(".")[0] in HOSTS] == []


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda w: w.name)
def test_every_public_module_has_a_docstring(wheel: Wheel) -> None:
    assert [str(f) for f in wheel.files() if not ast.get_docstring(tree(f))] == []


def test_public_names_are_documented() -> None:
    """At least nine in ten public functions and classes say what they promise."""
    documented, missing = 0, []
    for wheel in WHEELS:
        for file in wheel.files():
            for node in ast.walk(tree(file)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
                    if ast.get_docstring(node):
                        documented += 1
                    else:
                        missing.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(missing) <= 0.1 * (documented + len(missing)), missing


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    import skinny_vllm.install\n    import_module('skinny_qwen3')\n")
    core = next(w for w in WHEELS if w.level == 0)
    assert len(crossings(core, file)) == 2
