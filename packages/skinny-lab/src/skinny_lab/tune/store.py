"""What has been measured so far, on disk after every cell: `PLAN.partial`, beside the plan, JSON.

It holds whole measurements rather than plan cells: a verdict at M >= 3 also waits for a decode step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from skinny_core.device import DeviceKey
from skinny_core.plan import Environment
from skinny_core.problem import DType, KernelConfig
from skinny_lab.bench import race, rows
from skinny_lab.bench.tuning import Measured, problem_of
from skinny_lab.explain.target import RequestError
from skinny_lab.tune.request import Site, Target

SCHEMA: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured cell. seconds: what it took. in_model_us: change of a decode step, None where not (yet) measured.

    settled: measured a second time because a larger M was faster. stepped: "" or why the decode step failed.
    """

    site: str
    measured: Measured
    seconds: float
    in_model_us: float | None = None
    settled: bool = False
    stepped: str = ""

    @property
    def m(self) -> int:
        """Rows of the activation."""
        return self.measured.m


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    """`Measured` of a plain product, as JSON can hold it."""

    n: int
    k: int
    dtype: DType
    config: KernelConfig
    rel_rmse: float
    cold: dict[str, race.Times]
    hot: dict[str, race.Times]
    clocks: tuple[int, int]
    tried: int
    finalists: tuple[KernelConfig, ...]


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    site: str
    m: int
    seconds: float
    in_model_us: float | None
    settled: bool
    measured: _Saved


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal[1]
    target: str
    device: str
    environment: Environment
    records: tuple[_Record, ...]


class Store:
    """Entries by (site, M); `add` writes them all, atomically."""

    def __init__(self, path: Path, target: Target, key: DeviceKey, environment: Environment) -> None:
        self.path, self.environment = path, environment
        self._target, self._device = fingerprint(target), key.slug
        self.entries: dict[tuple[str, int], Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def get(self, site: Site, m: int) -> Entry | None:
        """The entry of a cell."""
        return self.entries.get((site.name, m))

    def finalists(self, site: Site) -> Mapping[int, tuple[KernelConfig, ...]]:
        """M -> the configs of the long race, fastest first."""
        return {entry.m: entry.measured.finalists for entry in self if entry.site == site.name}

    def add(self, *entries: Entry) -> None:
        """Take entries in, in place of older ones, and write. Raises `OSError`; the old file survives."""
        for entry in entries:
            self.entries[entry.site, entry.m] = entry
        found = _File(
            SCHEMA, self._target, self._device, self.environment, tuple(_record(entry) for entry in self)
        )  # fmt: skip
        rows.write_text(self.path, msgspec.json.format(msgspec.json.encode(found), indent=0).decode() + "\n")

    def read(self) -> int:
        """Take over what an earlier run left; returns how many cells. Raises `RequestError` where it is of another
        request, device or software, or no such file at all."""
        anew = f"begin anew with --force, or remove {self.path}"
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except OSError as error:
            raise RequestError(f"{self.path}: nothing to resume: {error.strerror}", "leave --resume out") from None
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise RequestError(f"{self.path}: not of `skinny tune`: {error}", anew) from None
        if found.target != self._target:
            raise RequestError(f"{self.path} is of other shapes", f"ask for the same as then, or {anew}")
        if found.device != self._device:
            raise RequestError(f"{self.path} was measured on {found.device}, this is {self._device}", anew)
        for name in ("gpu", "driver", "torch", "cuda", "dsl", "commit"):
            then, now = getattr(found.environment, name), getattr(self.environment, name)
            if then != now:
                what = f"{self.path} was measured with {name} {then or 'unknown'}, this is {now or 'unknown'}"
                raise RequestError(what, f"one plan is of one machine and its software: {anew}")
        for record in found.records:
            self.entries[record.site, record.m] = _entry(record)
        return len(found.records)


def fingerprint(target: Target) -> str:
    """Names a request: family, TP size and shapes."""
    sites = [(s.name, s.n, s.k, s.dtype.value) for s in target.sites]
    return hashlib.sha256(repr((target.family, target.tp, sites)).encode()).hexdigest()[:16]


def partial_path(out: Path) -> Path:
    """Where the measurements of a plan lie until it is complete. Not `*.toml`: no host reads it."""
    return out.with_name(out.name + ".partial")


def _record(entry: Entry) -> _Record:
    m = entry.measured
    saved = _Saved(
        m.problem.n,
        m.problem.k,
        m.problem.activation,
        m.config,
        m.rel_rmse,
        dict(m.cold),
        dict(m.hot),
        m.clocks,
        m.tried,
        m.finalists,
    )
    return _Record(entry.site, entry.m, entry.seconds, entry.in_model_us, entry.settled, saved)


def _entry(record: _Record) -> Entry:
    s = record.measured
    problem = problem_of(s.n, s.k, s.dtype)
    measured = Measured(
        problem=problem, m=record.m, config=s.config, rel_rmse=s.rel_rmse, cold=s.cold, hot=s.hot, clocks=s.clocks,
        tried=s.tried, finalists=s.finalists,
    )  # fmt: skip
    return Entry(record.site, measured, record.seconds, record.in_model_us, record.settled)
