"""What `skinny doctor` says, as plain frozen data: the text view and the JSON document are both made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One visible GPU: its key, the product that has this key, and products that are only similar."""

    index: int
    name: str
    key: str
    product: str | None
    neighbours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel folder and whether its DSL imports here; `error` is the original message."""

    stem: str
    available: bool
    error: str


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One plan file that would be looked at. `error` holds `what`, `fix`, `file`, `line` for one that is ignored."""

    path: str
    origin: str
    family: str = ""
    product: str = ""
    digest: str = ""
    cells: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """The folder of compiled kernels. `writable`: an entry could be added there now."""

    path: str
    exists: bool
    writable: bool
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """A host adapter that is installed, and what its `status()` says: for people and as data."""

    name: str
    text: str
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `skinny doctor` says. `problems` are (what, fix) pairs."""

    schema: int
    python: str
    platform: str
    driver: str | None
    settings: dict[str, Any]
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    kernels: tuple[Kernel, ...]
    models: dict[str, str]
    broken_models: dict[str, str]
    plans: tuple[PlanFile, ...]
    cache: Cache
    hosts: tuple[Host, ...]
    problems: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, documented in docs/explain.md."""
        return asdict(self)
