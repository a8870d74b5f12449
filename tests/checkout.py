"""Use a source checkout where nothing can be installed (a GPU machine without a network).

`eval "$(python3 -m tests.checkout)"` sets PYTHONPATH for this shell and its children.

Puts each member's `src` on the path and writes a small `NAME-VERSION.dist-info`, so that entry points (`skinny.models`,
the vLLM plug-in) and version look-ups work as they do for an installed wheel, in child processes too.
"""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def members(root: Path = ROOT) -> list[Path]:
    """Folders of the workspace's wheels, from the root pyproject."""
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    found = (folder for pattern in workspace["members"] for folder in sorted(root.glob(pattern)))
    return [folder for folder in found if (folder / "pyproject.toml").is_file()]


def project(member: Path) -> dict[str, object]:
    """The `[project]` table of a member."""
    table: dict[str, object] = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    return table


def register(into: Path, root: Path = ROOT) -> list[str]:
    """Write a dist-info folder per member under `into`; returns the path entries to use, `into` first."""
    into.mkdir(parents=True, exist_ok=True)
    for member in members(root):
        table = project(member)
        info = into / f"{str(table['name']).replace('-', '_')}-{table['version']}.dist-info"
        info.mkdir(exist_ok=True)
        _write(info / "METADATA", f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n")
        groups: dict[str, dict[str, str]] = dict(table.get("entry-points", {}))  # type: ignore[call-overload]
        if "scripts" in table:
            groups["console_scripts"] = table["scripts"]  # type: ignore[assignment]
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
        ]
        _write(info / "entry_points.txt", "\n".join(lines) + "\n")
    return [str(into), *(str(member / "src") for member in members(root))]


def _write(file: Path, text: str) -> None:
    """Leave a file alone that is right already: another process may be reading it."""
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


def is_installed(root: Path = ROOT) -> bool:
    """Whether pip (or an earlier `register`) already provides every member."""
    try:
        for member in members(root):
            metadata.distribution(str(project(member)["name"]))
    except metadata.PackageNotFoundError:
        return False
    return True


def activate(root: Path = ROOT) -> None:
    """Make the checkout importable in this process and in its children. Does nothing where it is installed."""
    if is_installed(root):
        return
    entries = register(root / ".checkout", root)
    sys.path[:0] = entries
    os.environ["PYTHONPATH"] = os.pathsep.join([*entries, *filter(None, [os.environ.get("PYTHONPATH")])])


if __name__ == "__main__":
    path = os.pathsep.join(register(ROOT / ".checkout"))
    print(f'export PYTHONPATH={shlex.quote(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
