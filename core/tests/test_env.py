"""The one environment variable: what it can say, what it cannot, and when it is read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import env
from skinny_core.env import Settings, parse
from skinny_core.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Settings()),
        ("  ", Settings()),
        ("on", Settings()),
        ("1", Settings()),
        ("Yes", Settings()),
        ("off", Settings(enabled=False)),
        ("OFF", Settings(enabled=False)),
        ("0", Settings(enabled=False)),
        ("false", Settings(enabled=False)),
        ("plan=/a.toml", Settings(plans=("/a.toml",))),
        ("plan=/a.toml, plan=b=c.toml", Settings(plans=("/a.toml", "b=c.toml"))),
        ("neighbour=on", Settings(neighbour=True)),
        ("NEIGHBOUR=On,reported=1,", Settings(neighbour=True, reported=True)),
        ("batch_invariant=on,pdl=off", Settings(batch_invariant=True, pdl=False)),
        ("cache=/tmp/x", Settings(cache="/tmp/x")),
        ("neighbour=on,neighbour=off", Settings()),
    ],
)
def test_values(text: str, expected: Settings) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("of", "'of'"),
        ("neighbor=on", "'neighbor=on'"),
        ("plan", "'plan'"),
        ("plan=", "'plan='"),
        ("neighbour=maybe", "neighbour is 'maybe'"),
        ("on,neighbour=on", "'on'"),
        ("plan=/a.toml,=on", "'=on'"),
    ],
)
def test_errors_name_the_item_and_the_keys(text: str, item: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert item in caught.value.what
    assert "SKINNY" in caught.value.what
    assert "write" in caught.value.fix


@given(st.text())
def test_any_text_is_settings_or_a_settings_error(text: str) -> None:
    with contextlib.suppress(SettingsError):
        assert isinstance(parse(text), Settings)


def test_every_key_is_documented_and_understood() -> None:
    for key in env.KEYS:
        assert parse(f"{key}=on") != Settings() or key == "pdl"


def test_cached_until_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "neighbour=on")
    assert env.settings().neighbour
    monkeypatch.setenv("SKINNY", "off")
    assert env.settings().neighbour
    assert not env.reload().enabled
    assert not env.settings().enabled


def test_folders(skinny: Callable[[str], None], tmp_path: Path) -> None:
    assert env.user_plan_folder().name == "plans"
    assert env.cache_folder().name == "skinny"
    skinny(f"cache={tmp_path}")
    assert env.cache_folder() == tmp_path
    skinny("cache=~/kernels")
    assert env.cache_folder() == Path.home() / "kernels"
    assert not env.user_plan_folder().exists()


def test_a_path_of_an_unknown_user_is_not_found_rather_than_raised(skinny: Callable[[str], None]) -> None:
    skinny("cache=~no-such-user-here/kernels")
    assert env.cache_folder() == Path("~no-such-user-here/kernels")


def test_nothing_is_read_at_import() -> None:
    """Every module of the core imports with a SKINNY that cannot be understood."""
    code = (
        "import skinny_core.op, skinny_core.warmup, skinny_core.explain, skinny_core.plan, skinny_core.env\n"
        "try: skinny_core.env.settings()\n"
        "except skinny_core.SkinnyError as error: print(error.what)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SKINNY": "nonsense", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "SKINNY: cannot read 'nonsense'"
