"""Tests of the other Triton mode are run in a child and reported one by one; a child that dies fails what it owed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = "from skinny_core.testing.triton_mode import pytest_configure, pytest_runtest_protocol\n"
TESTS = """
import os
import pytest

pytestmark = pytest.mark.triton("interpreter")

def test_in_the_mode():
    assert os.environ["TRITON_INTERPRET"] == "1"

@pytest.mark.parametrize("n", [1, 2])
def test_param(n):
    assert n == 1, "n is two"

def test_skipped():
    pytest.skip("for a reason")

@pytest.mark.triton("compiler")
def test_here():
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
"""
DYING = "def test_dies():\n    os._exit(3)\n\ndef test_after():\n    pass\n"


def _pytest(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir=.", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_reports_come_back_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_other.py").write_text(TESTS, encoding="utf-8")
    said = _pytest(tmp_path)
    assert "FAILED test_other.py::test_param[2] - AssertionError: n is two" in said
    assert "for a reason" in said
    assert "1 failed, 3 passed, 1 skipped" in said


def test_a_replayed_test_may_be_the_last_of_its_folder(tmp_path: Path) -> None:
    """What a test of this process has set up for the folder is torn down before the next folder begins."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "conftest.py").write_text("", encoding="utf-8")
    (inner / "test_a_here.py").write_text("def test_here():\n    pass\n", encoding="utf-8")
    (inner / "test_b_there.py").write_text(TESTS.split("@pytest")[0], encoding="utf-8")
    (tmp_path / "test_c_next.py").write_text("def test_next():\n    pass\n", encoding="utf-8")
    assert "3 passed" in _pytest(tmp_path)


def test_a_dead_child_fails_what_it_owed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_other.py").write_text(TESTS + DYING, encoding="utf-8")
    said = _pytest(tmp_path, "-k", "in_the_mode or dies or after or here")
    assert "2 failed, 2 passed" in said
    assert "never finished this test: exit status 3" in said
