"""File sizes and names, and that the checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import sizes
from tests.architecture.sources import project_files
from tests.checkout import ROOT


def test_every_figure_is_within_its_limit() -> None:
    assert sizes.complaints(project_files()) == []


def test_a_long_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    long = tmp_path / "long.py"
    long.write_text("x = 1\n" * 501)
    assert [c for c in sizes.complaints([long]) if "cap" in c] == ["long.py: 501 lines, the cap is 500"]


@pytest.mark.parametrize("name", ["utils.py", "core/helpers.py", "common/x.py", "cache_manager.py", "_misc.py"])
def test_a_name_that_says_nothing_is_found(name: str) -> None:
    assert sizes.says_nothing(ROOT / name)


@pytest.mark.parametrize("name", ["plan.py", "core/kernels/bf16_simt/host.py", "commonly_used.py"])
def test_a_name_that_says_something_passes(name: str) -> None:
    assert not sizes.says_nothing(ROOT / name)
