"""What is written is read back, and a key's line is the line it stands on."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skinny_core import toml_text

KEY = st.from_regex(r"\A[a-z_]{1,8}\Z")
SCALAR = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=20))
INLINE = st.dictionaries(st.text(max_size=6), SCALAR, max_size=3)
ITEM = st.dictionaries(KEY, st.one_of(SCALAR, st.lists(SCALAR, max_size=3), INLINE), max_size=4)
DATA = st.fixed_dictionaries(
    {"title": st.text(), "table": ITEM, "cell": st.lists(st.fixed_dictionaries({"id": st.text(), "evidence": ITEM}))}
)


@settings(max_examples=50, deadline=None)
@given(DATA)
def test_round_trip(data: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text.render(data, "a comment")) == data


@pytest.mark.parametrize(
    "text", ['"', "\\", "\n", "\r\n", "\x00", "\x7f", "\x85", "\u2028", "\ufeff", "🜚", "'''", '"""']
)
def test_awkward_strings_as_values_and_keys(text: str) -> None:
    data = {"a": text, "b": {"c": {text: 1.0}}, "cell": [{"evidence": {"peers": {f"x{text}": 2.5}}}]}
    assert tomllib.loads(toml_text.render(data)) == data


def test_empty_tables_survive() -> None:
    data = {"device": {}, "cell": [{"config": {}, "id": "a"}], "none": []}
    assert tomllib.loads(toml_text.render(data)) == data


def test_none_is_left_out_and_other_objects_are_refused() -> None:
    assert toml_text.render({"a": None, "b": {"c": None, "d": 1}}) == "[b]\nd = 1\n"
    with pytest.raises(TypeError, match="bytes"):
        toml_text.render({"a": b""})


TEXT = """# comment with [brackets]
schema = 1

[device]
sm_count = 132
[[cell]]
id = "a"
  config = { rows = 2 }
[cell.evidence]
candidate = { p20 = 1 }
[[cell]]
id = "b"
[cell.evidence]
candidate = { p20 = 1 }
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("schema",), 2),
        (("device",), 4),
        (("device", "sm_count"), 5),
        (("device", "missing"), 4),
        (("cell", 0), 6),
        (("cell", 0, "config"), 8),
        (("cell", 0, "config", "rows"), 8),
        (("cell", 0, "evidence", "candidate", "p20"), 10),
        (("cell", 1, "evidence"), 13),
        (("cell", 1, "id"), 12),
        (("cell", 7), 0),
        (("nowhere",), 0),
        ((), 0),
    ],
)
def test_line_of(path: tuple[str | int, ...], line: int) -> None:
    assert toml_text.line_of(TEXT, path) == line


def test_a_text_is_read_once_for_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = toml_text._places
    monkeypatch.setattr(toml_text, "_places", lambda text: read.append(1) or real(text))
    lines = toml_text.Lines(TEXT)
    assert [lines.of(path) for path in (("schema",), ("cell", 1, "id"), ("cell", 0, "config", "rows"))] == [2, 12, 8]
    assert len(read) == 1


def test_lines_are_counted_as_toml_counts_them() -> None:
    text = 'a = "\u2028 \x85"\nb = 1\n'
    assert toml_text.line_of(text, ("b",)) == 2


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("Expected `int`, got `str` - at `$.cell[3].n`", ("cell", 3, "n")),
        ("Object contains unknown field `x`", ()),
        ("... - at `$.cell[12].evidence.candidate`", ("cell", 12, "evidence", "candidate")),
        ("... - at `$.device.capability[1]`", ("device", "capability", 1)),
    ],
)
def test_parse_path(message: str, path: tuple[str | int, ...]) -> None:
    assert toml_text.parse_path(message) == path
