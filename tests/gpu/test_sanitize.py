"""When is a sanitizer run clean? With a made-up compute-sanitizer, since CI has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from skinny_core import kernels
from skinny_core.problem import Problem
from tests.gpu import sanitize, sanitized

CLEAN = "ran 7 configs\n========= ERROR SUMMARY: 0 errors\n"
RACES = "ran 7 configs\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"


def _tool(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    (folder / "text").write_text(text)
    script = folder / "compute-sanitizer"
    script.write_text(f'#!/bin/sh\ntest "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 && cat {folder}/text\nexit {code}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(
    ("text", "code", "status", "says"),
    [
        (CLEAN, 0, 0, "memcheck: clean, 0 errors, 7 configs"),
        (CLEAN.replace("0 errors", "3 errors"), 9, 1, "RED, 3 errors"),
        (RACES, 0, 1, "RED, 2 errors"),
        ("Device not supported\n", 0, 1, "RED, -1 errors, 0 configs"),
        (CLEAN.replace("ran 7 configs", ""), 0, 1, "RED, 0 errors, 0 configs"),
        (CLEAN, 1, 1, "exit 1"),
    ],
)
def test_what_counts_as_clean(
    text: str, code: int, status: int, says: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _tool(tmp_path, monkeypatch, text, code)
    record = tmp_path / "record.json"
    assert sanitize.main(["--tools", "memcheck", "--record", str(record)]) == status
    assert says in capsys.readouterr().out
    assert '"tool": "memcheck"' in record.read_text()


def test_a_missing_tool_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main([]) == 1
    assert "nothing was checked" in capsys.readouterr().out


def test_a_tool_that_hangs_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tool(tmp_path, monkeypatch, CLEAN)
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\nexec sleep 60\n")
    assert sanitize.main(["--tools", "memcheck", "--timeout", "0.5"]) == 1


def test_every_kernel_is_watched() -> None:
    assert {config.kernel for config in sanitized.CONFIGS} == set(kernels.stems())
    for config in sanitized.CONFIGS:
        shapes = [shape for shape in sanitized.SHAPES if config.kernel != "bf16_simt" or shape[0] <= 4]
        assert [kernels.refuses(config, Problem(n=n, k=k), m) for m, n, k in shapes] == [None] * len(shapes)
