"""Writing generated files, or comparing them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skinny_lab.bench import generated_files


def test_files_are_written_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {tmp_path / "a.md": "new\n", tmp_path / "b.md": "same\n"}
    (tmp_path / "b.md").write_text("same\n")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        return generated_files.run("what it does", lambda: files, tmp_path)

    assert run("--check") == 1
    assert not (tmp_path / "a.md").exists()
    assert run() == 0
    assert (tmp_path / "a.md").read_text() == "new\n"
    assert run("--check") == 0
    assert capsys.readouterr().out == "stale: a.md\nwritten: a.md\n", "what is as it should be is not named"
