"""Lists in documents are complete: reasons, keys of the variable, sessions, members."""

from __future__ import annotations

import ast

from skinny_core import device, env
from skinny_core.rules import Reason
from tests.checkout import ROOT, members, project


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def test_every_reason_is_explained() -> None:
    assert [r.value for r in Reason if f"`{r.value}`" not in text("docs/dispatch.md")] == []


def test_every_key_of_the_variable_is_explained() -> None:
    assert [key for key in env.KEYS if f"`{key}=" not in text("docs/dispatch.md")] == []


def test_every_wheel_is_in_the_readme() -> None:
    names = [str(project(m)["name"]) for m in members()]
    assert [name for name in names if f"`{name}`" not in text("README.md")] == []


def test_every_nox_session_has_a_docstring_of_one_line() -> None:
    functions = [n for n in ast.parse(text("noxfile.py")).body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    assert len(functions) >= 10
    assert [f.name for f in functions if "\n" in (ast.get_docstring(f) or "\n")] == []


def test_the_device_of_the_examples_is_known() -> None:
    assert device.is_measured("h200")


def test_results_go_between_the_markers() -> None:
    readme = text("README.md")
    assert readme.count("<!-- results:begin -->") == readme.count("<!-- results:end -->") == 1
    assert readme.index("<!-- results:begin -->") < readme.index("<!-- results:end -->")
