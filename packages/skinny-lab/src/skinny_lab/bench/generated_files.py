"""Files that a command generates from committed data: written, or with `--check` compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from skinny_lab.bench import rows


def run(said: str | None, generated: Callable[[], Mapping[Path, str]], root: Path) -> int:
    """Parse the command line and write, or with --check compare; returns the exit status, 1 where --check found one.

    said: help text. generated: every file with the text it should have. root: what printed paths are relative to.
    """
    parser = argparse.ArgumentParser(description=said)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a file differs")
    check = parser.parse_args().check
    wanted = generated().items()
    stale = {path: text for path, text in wanted if not path.is_file() or path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(root)}")
        if not check:
            rows.write_text(path, text)
    return 1 if check and stale else 0
