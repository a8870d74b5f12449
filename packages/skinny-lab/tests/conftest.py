"""A command line whose output is 80 columns wide, and an environment that holds nothing of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from skinny_core import env
from skinny_lab.cli import app


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No SKINNY, user folders below tmp_path, 80 columns, no colour."""
    monkeypatch.delenv("SKINNY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    env.settings.cache_clear()
    yield
    env.settings.cache_clear()


@pytest.fixture
def skinny() -> Callable[..., Result]:
    """`skinny("doctor", "--json")`: run the command in this process."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
