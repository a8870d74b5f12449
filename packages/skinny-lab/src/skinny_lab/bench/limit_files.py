"""What the race to the memory's limit leaves: `limit.csv` (rows), `tried.csv` (every contestant), `limit.json`.

All are written whole and renamed after every cell, so that a process that is killed loses the cell it was in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skinny_core.plan import Environment
from skinny_lab.bench.prepare import Prepared
from skinny_lab.bench.rows import Row, read_csv, read_table, write_csv, write_table, write_text

ROWS, TRIED, RUNS = "limit.csv", "tried.csv", "limit.json"
PEER_PACKAGES = ("flashinfer-python", "sgl-deep-gemm", "deep-gemm", "vllm", "quack-kernels")


@dataclass(frozen=True, slots=True)
class Tried:
    """One contestant in one cell: it steers lists of candidates. provider: a kernel of ours, cuBLAS or a peer.

    rel_rmse: against the float64 product, None where it did not run. screen_us: median of the quick race. p20, p50,
    p80: of the full race, microseconds; None where it was not in it. note: why it was left out, or "".
    """

    what: str
    n: int
    k: int
    m: int
    provider: str
    config: str
    rel_rmse: float | None
    screen_us: float | None
    p20: float | None
    p50: float | None
    p80: float | None
    rounds: int
    note: str


class Files:
    """The three files of a folder, and what is in them so far."""

    def __init__(
        self,
        folder: Path,
        environment: Environment,
        options: Mapping[str, Any],
        *,
        missing: Mapping[str, str] | None = None,
        resume: Path | None = None,
    ) -> None:
        """resume: a `limit.csv`; its rows, and those of the files beside it, are kept and their cells not raced again.

        Raises ValueError for a file that is not one, OSError where it cannot be read or `folder` not be written.
        """
        self.folder, self.environment = folder, environment
        self.rows: list[Row] = []
        self.tried: list[Tried] = []
        self._earlier: list[dict[str, Any]] = []
        if resume is not None:
            self._read(resume)
        self.done = frozenset(self.raced)
        self._run: dict[str, Any] = {
            "environment": {name: getattr(environment, name) for name in environment.__struct_fields__},
            "packages": {name: found for name in PEER_PACKAGES if (found := _version(name))},
            "options": dict(options),
            "missing": dict(missing or {}),
            "prepared": {},
            "cells": {},
            "failed": {},
            "ended": "killed",
        }
        self.write()

    def _read(self, path: Path) -> None:
        self.rows = read_csv(path)
        if wrong := sorted({row.kind for row in self.rows} - {"limit"}):
            raise ValueError(f"{path} holds rows of kind {', '.join(wrong)}: give a {ROWS}")
        if (beside := path.with_name(TRIED)).is_file():
            self.tried = read_table(beside, Tried)
        if (beside := path.with_name(RUNS)).is_file():
            self._earlier = json.loads(beside.read_text(encoding="utf-8"))["runs"]

    @property
    def raced(self) -> set[tuple[str, int]]:
        """(shape, M) of every cell that is there, earlier runs' included."""
        return {(row.what, row.m) for row in self.rows}

    @property
    def broke(self) -> frozenset[tuple[str, int]]:
        """(shape, M) of the cells at which earlier runs lost the device: it would be lost there again."""
        found = set()
        for run in self._earlier:
            if run.get("ended") == "device" and run.get("failed"):
                name, m = list(run["failed"])[-1].rsplit("/M", 1)
                found.add((name, int(m)))
        return frozenset(found)

    def note_prepared(self, m: int, made: Prepared) -> None:
        """What compiling and trying gave for one M."""
        refused: dict[str, list[str]] = {}
        for (name, n, k, _), why in made.refused.items():
            refused.setdefault(f"{name}: {why}", []).append(f"{n}x{k}")
        self._run["prepared"][str(m)] = {
            "compiled": made.compiled,
            "complete": made.complete,
            "complaints": list(made.complaints),
            "peers_tried": made.tried,
            "peers_refused": refused,
        }
        self.write()

    def add(
        self, what: str, m: int, found: Sequence[Row], tried: Iterable[Tried], *, seconds: float, sm_mhz: int
    ) -> None:
        """A raced cell. Without rows (nothing could be raced) it is only noted, and raced again by a resumed run."""
        tried = list(tried)
        self.rows += found
        self.tried += tried
        left_out = {t.provider: t.note for t in tried if t.note}
        self._run["cells"][f"{what}/M{m}"] = {
            "seconds": round(seconds, 2),
            "sm_mhz": sm_mhz,
            "contestants": len(tried),
            "left_out": left_out,
        }
        self.write()

    def fail(self, what: str, m: int, error: str) -> None:
        """A cell that could not be raced."""
        self._run["failed"][f"{what}/M{m}"] = error[:2000]
        self.write()

    def end(self, why: str) -> None:
        """The last word of the run: "done", "budget" or "device"."""
        self._run["ended"] = why
        self.write()

    def write(self) -> None:
        """All three, each atomically."""
        write_csv(self.folder / ROWS, self.rows)
        write_table(self.folder / TRIED, Tried, self.tried)
        write_text(self.folder / RUNS, json.dumps({"runs": [*self._earlier, self._run]}, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
