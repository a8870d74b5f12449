"""Every error says what is wrong and what to do, in two lines, and is caught by its builtin kind too."""

from __future__ import annotations

import inspect

import pytest

from skinny_core import errors
from skinny_core.errors import PlanError, SkinnyError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, SkinnyError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_two_lines(kind: type[SkinnyError]) -> None:
    error = kind("the plan is empty", "run `skinny tune`")
    assert str(error) == "the plan is empty\n  fix: run `skinny tune`"
    assert (error.what, error.fix) == ("the plan is empty", "run `skinny tune`")
    assert kind.__doc__


@pytest.mark.parametrize("kind", [c for c in CLASSES if issubclass(c, PlanError)], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("file", "line", "start"), [("", 0, ""), ("", 3, ""), ("a.toml", 0, "a.toml: "), ("a.toml", 3, "a.toml:3: ")]
)
def test_plan_errors_say_where(kind: type[PlanError], file: str, line: int, start: str) -> None:
    error = kind("wrong", "right", file=file, line=line)
    assert str(error) == f"{start}wrong\n  fix: right"
    assert (error.file, error.line) == (file, line)


def test_builtin_kinds() -> None:
    assert issubclass(errors.SettingsError, ValueError)
    assert issubclass(errors.PlanError, ValueError)
    assert issubclass(errors.UnknownDeviceError, LookupError)
    assert issubclass(errors.KernelUnavailableError, RuntimeError)
