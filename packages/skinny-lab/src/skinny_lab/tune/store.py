"""What has been measured so far, on disk after every cell: `PLAN.partial`, beside the plan, JSON lines.

It holds whole measurements rather than plan cells: a verdict at M >= 3 also waits for a decode step. The first line
says of what; each further one is a cell, in place of an earlier line for the same cell. A last line that was cut short
is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from skinny_lab.tune.request import Shape, Site, Target

SCHEMA: Literal[2] = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured cell. seconds: what it took. in_model: microseconds by which it changes a decode step, by the label
    of each step in which it was measured.

    settled: measured a second time because a larger M was faster. stepped: "" or why a decode step failed.
    """

    site: str
    measured: Measured
    seconds: float
    in_model: Mapping[str, float] = field(default_factory=dict)
    settled: bool = False
    stepped: str = ""

    @property
    def m(self) -> int:
        """Rows of the activation."""
        return self.measured.m

    @property
    def shape(self) -> Shape:
        """What was measured, whatever it is called."""
        return self.measured.problem.n, self.measured.problem.k, self.measured.problem.activation


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
    in_model: dict[str, float]
    settled: bool
    measured: _Saved


class _Head(Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal[2]
    target: str
    device: DeviceKey
    environment: Environment


class Store:
    """Entries by shape and M; `add` also writes them."""

    def __init__(self, path: Path, target: Target, key: DeviceKey, environment: Environment) -> None:
        self.path, self.key, self.environment = path, key, environment
        self._target = fingerprint(target)
        self.entries: dict[tuple[Shape, int], Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def get(self, site: Site, m: int) -> Entry | None:
        """The entry of a cell."""
        return self.entries.get((site.shape, m))

    def of(self, site: Site) -> list[Entry]:
        """The entries of a site, M ascending."""
        return sorted((e for e in self if e.shape == site.shape), key=lambda e: e.m)

    def finalists(self, site: Site) -> Mapping[int, tuple[KernelConfig, ...]]:
        """M -> the configs of the long race, fastest first."""
        return {entry.m: entry.measured.finalists for entry in self.of(site)}

    def add(self, *entries: Entry) -> None:
        """Take entries in, in place of older ones, and write them. Raises `OSError`; what was on disk survives."""
        anew = not self.entries
        for entry in entries:
            self._take(entry)
        if anew:
            self.write(self.path)
            return
        with self.path.open("ab") as f:
            f.write(b"".join(_line(_record(entry)) for entry in entries))

    def write(self, path: Path) -> None:
        """Everything, each cell once, as a new file; atomically."""
        head = _Head(SCHEMA, self._target, self.key, self.environment)
        lines = [_line(head), *(_line(_record(entry)) for entry in self)]
        rows.write_text(path, b"".join(lines).decode())

    def read(self) -> int:
        """Take over what an earlier run left; returns how many cells. Raises `RequestError` where it is of another
        request, device or software, or no such file at all."""
        anew = f"begin anew with --force, or remove {self.path}"
        try:
            head, records = _parse(self.path.read_bytes())
        except OSError as error:
            raise RequestError(f"{self.path}: nothing to resume: {error.strerror}", "leave --resume out") from None
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise RequestError(f"{self.path}: not of `skinny tune`: {error}", anew) from None
        if head.target != self._target:
            raise RequestError(f"{self.path} is of other shapes", f"ask for the same as then, or {anew}")
        if head.device != self.key:
            raise RequestError(f"{self.path} was measured on {head.device.slug}, this is {self.key.slug}", anew)
        for name in ("gpu", "driver", "torch", "cuda", "dsl", "commit"):
            then, now = getattr(head.environment, name), getattr(self.environment, name)
            if then != now:
                what = f"{self.path} was measured with {name} {then or 'unknown'}, this is {now or 'unknown'}"
                raise RequestError(what, f"one plan is of one machine and its software: {anew}")
        for record in records:
            self._take(_entry(record))
        if self.entries:
            self.write(self.path)  # without a last line that was cut short, so that the next one begins a line
        return len(self.entries)

    def _take(self, entry: Entry) -> None:
        self.entries[entry.shape, entry.m] = entry


def load(path: Path, target: Target) -> Store:
    """What a run over `target` left, wherever and whenever that was; for plans of it. Raises `OSError`, `RequestError`
    for a file of something else."""
    try:
        head, records = _parse(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise RequestError(f"{path}: not of `skinny tune`: {error}", "give a file of measurements") from None
    found = Store(path, target, head.device, head.environment)
    if head.target != fingerprint(target):
        raise RequestError(f"{path} is of other shapes", "ask for the same models and TP sizes as then")
    for record in records:
        found._take(_entry(record))
    return found


def _line(record: Struct) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def _parse(data: bytes) -> tuple[_Head, list[_Record]]:
    head, *lines = data.split(b"\n")
    complete = lines[:-1]  # behind the last line's end there is nothing, or a line that was cut short
    return msgspec.json.decode(head, type=_Head), [msgspec.json.decode(line, type=_Record) for line in complete]


def fingerprint(target: Target) -> str:
    """Names a request: family, TP size, shapes and who uses them."""
    sites = [(s.name, s.n, s.k, s.dtype.value, s.used_by) for s in target.sites]
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
    return _Record(entry.site, entry.m, entry.seconds, dict(entry.in_model), entry.settled, saved)


def _entry(record: _Record) -> Entry:
    s = record.measured
    problem = problem_of(s.n, s.k, s.dtype)
    measured = Measured(
        problem=problem, m=record.m, config=s.config, rel_rmse=s.rel_rmse, cold=s.cold, hot=s.hot, clocks=s.clocks,
        tried=s.tried, finalists=s.finalists,
    )  # fmt: skip
    return Entry(record.site, measured, record.seconds, record.in_model, record.settled)
