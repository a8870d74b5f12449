"""The one place that says which vLLM versions the plug-in was tested with, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostRange:
    """Versions from `first` up to, but not including, `below`. `tested`: those the test suite drives."""

    first: str
    below: str
    tested: tuple[str, ...]

    def __str__(self) -> str:
        return f">={self.first},<{self.below}"


SUPPORTED = (
    HostRange("0.26.0", "0.27", tested=("0.26.0",)),
    HostRange("0.33.0", "0.34", tested=("0.33.0",)),
)

# A release, a post release or a local build ("+cu129") of one. Development and release candidates sort before their
# release and may differ from it, so they count as outside.
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?")


def _parts(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def refusal(version: str) -> str | None:
    """Why this vLLM version is outside every declared range, in one line; None if it is inside one."""
    match = _RELEASE.fullmatch(version.strip())
    ranges = " or ".join(str(item) for item in SUPPORTED)
    if match is None:
        return f"vLLM {version} is not a release; tested are {ranges}"
    parts = _parts(match[1])
    if any(_parts(item.first) <= parts < _parts(item.below) for item in SUPPORTED):
        return None
    return f"vLLM {version} is outside the tested ranges ({ranges})"
