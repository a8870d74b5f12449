"""The product's source files, wheel by wheel, and what their syntax trees say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.checkout import ROOT, members, project

FOLDERS = ("core", "models", "packages", "tests", "benchmarks", "docs")
"""Where Python files of this project live, beside the ones in the root."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One member of the workspace. `level`: 0 core, 1 packages, 2 models; imports go to a lower level only."""

    name: str
    module: str
    level: int
    source: Path

    def files(self) -> list[Path]:
        """Python files that the wheel ships."""
        return sorted(self.source.rglob("*.py"))


def wheels() -> list[Wheel]:
    """Every wheel of the workspace."""
    levels = {"core": 0, "packages": 1, "models": 2}
    found = []
    for member in members():
        name = str(project(member)["name"])
        module = name.replace("-", "_")
        level = levels[member.relative_to(ROOT).parts[0]]
        found.append(Wheel(name, module, level, member / "src" / module))
    return found


def project_files() -> list[Path]:
    """Every Python file of the project, tests included."""
    files = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*.py")
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(ROOT).parts))


def tree(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import anywhere in the file: at the top, in functions, under TYPE_CHECKING, and
    `importlib.import_module("literal")`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            yield node.lineno, _literal(node.args[0])


@dataclass(frozen=True, slots=True)
class EnvironmentUse:
    """One access to the process environment. `name` is None for the whole mapping (a copy for a child process)."""

    path: Path
    line: int
    name: str | None
    writes: bool


def environment_uses(path: Path) -> list[EnvironmentUse]:
    """Each `os.environ` or `os.getenv` in a file, with the variable's name ("?" where the file does not spell it)."""
    found: list[EnvironmentUse] = []
    module = tree(path)
    constants = _constants(module)
    parents = {child: parent for parent in ast.walk(module) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(module):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        if text not in ("os.environ", "environ", "os.getenv", "getenv", "os.putenv"):
            continue
        parent = parents.get(node)
        if isinstance(parent, ast.Attribute) and ast.unparse(parent) in ("os.environ", "os.getenv"):
            continue
        name, writes = _accessed(node, parent, parents)
        name = constants.get(name, "?") if name and name.startswith("$") else name
        found.append(EnvironmentUse(path, node.lineno, name, writes or text == "os.putenv"))
    return found


def _accessed(node: ast.AST, parent: ast.AST | None, parents: dict[ast.AST, ast.AST]) -> tuple[str | None, bool]:
    if isinstance(parent, ast.Subscript):
        return _literal(parent.slice), not isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Call) and parent.func is node:
        return _literal(parent.args[0]) if parent.args else "?", False
    if isinstance(parent, ast.Compare):
        return _literal(parent.left), False
    if isinstance(parent, ast.Attribute):
        call = parents.get(parent)
        arguments = call.args if isinstance(call, ast.Call) else []
        if parent.attr in ("copy", "items"):
            return None, False
        writes = parent.attr in ("setdefault", "pop", "update", "clear", "__setitem__")
        return (_literal(arguments[0]) if arguments else "?"), writes
    return None, False


def _imports_by_name(call: ast.Call) -> bool:
    return bool(call.args) and ast.unparse(call.func) in ("import_module", "importlib.import_module")


def _literal(node: ast.AST) -> str:
    """The string a node spells (of an f-string its fixed start), "$NAME" for a possible constant, "?" for the rest."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return str(node.values[0].value)
    return f"${node.id}" if isinstance(node, ast.Name) else "?"


def _constants(module: ast.Module) -> dict[str, str]:
    """Module-level `NAME = "text"`, keyed "$NAME"."""
    return {
        f"${target.id}": str(node.value.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
