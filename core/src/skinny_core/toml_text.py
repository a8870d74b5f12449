"""Plain TOML output, and the line of a key in TOML text.

The standard parser gives no lines and does not write; the usual writers put every array on several lines and know no
inline tables, which makes a cell 40 lines long instead of 15.
"""

from __future__ import annotations

import json
import re
from typing import Any

PathItem = str | int
_HEADER = re.compile(r"^\s*(\[\[|\[)\s*([A-Za-z0-9_.\-]+)\s*\]{1,2}")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-]+)\s*=")


def parse_path(message: str) -> tuple[PathItem, ...]:
    """The path in a validation message: "... - at `$.cell[3].config`" is ("cell", 3, "config")."""
    found = re.search(r"at `\$([^`]*)`", message)
    if not found:
        return ()
    items = re.findall(r"\[(\d+)\]|\.([A-Za-z0-9_\-]+)", found.group(1))
    return tuple(int(index) if index else name for index, name in items)


class Lines:
    """Lines of the headers and keys of one text, read once: for who asks about many of them."""

    def __init__(self, text: str) -> None:
        self._first: dict[tuple[PathItem, ...], int] = {}
        for line, place in _places(text):
            self._first.setdefault(place, line)

    def of(self, path: tuple[PathItem, ...]) -> int:
        """1-based line of the longest prefix of `path` that stands in the text; 0 if none does."""
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        return next((self._first[prefix] for prefix in prefixes if prefix in self._first), 0)


def line_of(text: str, path: tuple[PathItem, ...]) -> int:
    """`Lines.of` for a single path; reads the whole text, so it is for an error and not for a loop."""
    return Lines(text).of(path)


def render(data: dict[str, Any], header: str = "") -> str:
    """TOML text of a mapping: scalars first, then tables, then arrays of tables. Tables below an array's items are
    inline unless they hold tables themselves."""
    lines = [f"# {header}"] if header else []
    _table(data, (), lines)
    return "\n".join(lines).strip() + "\n"


def _places(text: str) -> list[tuple[int, tuple[PathItem, ...]]]:
    """(line, path) of every header and key."""
    found: list[tuple[int, tuple[PathItem, ...]]] = []
    counts: dict[str, int] = {}
    current: tuple[PathItem, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            names = header.group(2).split(".")
            if header.group(1) == "[[":
                counts[header.group(2)] = counts.get(header.group(2), -1) + 1
            current = ()
            for depth, name in enumerate(names, 1):
                array = ".".join(names[:depth])
                current += (name, counts[array]) if array in counts else (name,)
            found.append((number, current))
        elif key := _KEY.match(line):
            found.append((number, (*current, key.group(1))))
    return found


def _table(data: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    data = {key: value for key, value in data.items() if value is not None}
    deep = {key: value for key, value in data.items() if _is_table(value, path) or _is_array(value)}
    for key, value in data.items():
        if key not in deep:
            lines.append(f"{key} = {_value(value)}")
    for key, value in deep.items():
        name = ".".join((*path, key))
        for item in value if _is_array(value) else [value]:
            lines += ["", f"[[{name}]]" if _is_array(value) else f"[{name}]"]
            _table(item, (*path, key), lines)


def _is_table(value: Any, path: tuple[str, ...]) -> bool:
    if not isinstance(value, dict):
        return False
    return not path or any(isinstance(v, dict) for v in value.values())


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
            if value
            else "{}"
        )
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_\-]+", key) else _value(key)
