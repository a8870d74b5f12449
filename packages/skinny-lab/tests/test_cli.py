"""The command itself: help, version, errors in two lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import Result

Skinny = Callable[..., Result]


@pytest.mark.parametrize(
    "command", [(), ("doctor",), ("explain",), ("demo",), ("plans",), ("plans", "check"), ("plans", "seal")]
)
def test_help_fits_80_columns(skinny: Skinny, command: tuple[str, ...]) -> None:
    result = skinny(*command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_help_names_every_command(skinny: Skinny) -> None:
    output = skinny("--help").output
    assert [c for c in ("doctor", "explain", "bench", "demo", "plans") if c not in output] == []
    assert "SKINNY" in output


def test_version(skinny: Skinny) -> None:
    assert "skinny-core 0." in skinny("--version").output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("explain", "qwen9-8b", "--device", "h200"), "qwen3-8b"),
        (("explain", "qwen3-8b", "--device", "h900"), "h200"),
        (("explain", "qwen3-8b", "--device", "h200", "--tp", "7"), "tp"),
        (("explain", "qwen3-8b", "--device", "h200", "-M", "0-3"), "1 to 16"),
        (("explain", "qwen3-8b", "--device", "h200", "-M", "many"), "1-16"),
        (("explain", "qwen3-8b", "--device", "h200", "-M", "²"), "1-16"),
        (("explain", "qwen3-8b", "--device", "h200", "-M", "9" * 5000), "1-16"),
        (("explain", "~nosuchuser/x", "--device", "h200"), "qwen3-8b"),
        (("demo", "--device", "bogus"), "auto, cpu"),
        (("demo", "--device", "mps"), "auto, cpu"),
        (("demo", "--device", "cuda:99"), "auto or cpu"),
    ],
    ids=[
        "model",
        "device",
        "tp",
        "zero-rows",
        "not-rows",
        "superscript",
        "long-number",
        "user",
        "demo-bogus",
        "demo-mps",
        "demo-cuda-99",
    ],
)
def test_an_error_is_two_lines_with_the_known_names(skinny: Skinny, arguments: tuple[str, ...], names: str) -> None:
    result = skinny(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    what, fix = result.stderr.splitlines()
    assert what.startswith("error: ")
    assert fix.startswith("  fix: ")
    assert names in result.stderr.lower()


def test_demo_passes_its_options_on_and_exits_with_its_result(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    from skinny_lab import demo

    asked: dict[str, object] = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: asked.update(options) or 1)
    assert skinny("demo", "--tokens", "3", "--device", "cpu").exit_code == 1
    assert asked == {"tokens": 3, "device": "cpu"}


def test_bench_passes_its_arguments_on(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    from skinny_lab.bench import cli as bench

    asked: list[str] = []
    monkeypatch.setattr(bench, "main", lambda arguments: asked.extend(arguments) or 0)
    assert skinny("bench", "qwen3-8b", "-M", "1,2", "--help").exit_code == 0
    assert asked == ["qwen3-8b", "-M", "1,2", "--help"]


def test_bench_without_a_planned_cell_is_two_lines(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    from skinny_core import device

    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    result = skinny("bench")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
