"""What a wheel declares, taken literally: a folder with exactly the distributions that its requirements lead to."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "skinny-"


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that these requirements need, extras and markers applied, ours left out.

    Raises `PackageNotFoundError` for one that is declared and not installed here.
    """
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name.startswith(OURS) or (name, extras) in done:
            continue
        done.add((name, extras))
        for text in metadata.distribution(name).requires or ():
            needed = Requirement(text)
            if any(applies(needed, extra) for extra in ("", *extras)):
                todo.append(needed)
    return {name for name, _ in done}


def applies(requirement: Requirement, extra: str = "") -> bool:
    """Whether the requirement's marker holds here, for one extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def link(distributions: Iterable[str], folder: Path) -> None:
    """Link the files of these distributions into a folder that can serve as site-packages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in distributions:
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            target = Path(str(found.locate_file(top)))
            place = folder / top
            if target.exists() and not place.exists():
                place.symlink_to(target)
