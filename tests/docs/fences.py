"""Fenced blocks of a document that are marked to be run: an info string of a language and the word `run`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Fence:
    """One block: where it starts, its language ("sh", "python"), its text."""

    file: Path
    line: int
    language: str
    body: str


def runnable(file: Path) -> list[Fence]:
    """Blocks marked `sh run` or `python run`, in order."""
    text = file.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        if "run" in words:
            found.append(Fence(file, text[: match.start()].count("\n") + 1, language, match["body"]))
    return found


def links(file: Path) -> list[str]:
    """Targets of links to other files, anchors cut off."""
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    targets = (match["target"].partition("#")[0] for match in LINK.finditer(text))
    return [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
