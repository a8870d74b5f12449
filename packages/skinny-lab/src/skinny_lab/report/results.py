"""Committed rows that a report takes: the race to the memory's limit, and time per output token. No matplotlib."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skinny_lab.bench.rows import OURS, Row, limit_fraction, read_csv
from skinny_lab.explain.target import RequestError

BASELINE = "cublas"


@dataclass(frozen=True, slots=True)
class File:
    """One CSV. digest: first 16 hex digits of SHA-256 of its bytes."""

    label: str
    digest: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Arms:
    """Time per output token of one model at one concurrency, ms. stock, ours: median over processes of the median
    step. Spreads: outermost p20 and p80 of their steps. others: further arms. runs: processes per arm."""

    model: str
    concurrency: int
    stock: float
    ours: float
    stock_spread: tuple[float, float]
    ours_spread: tuple[float, float]
    others: tuple[tuple[str, float], ...]
    runs: int

    @property
    def change(self) -> float:
        """Ours over stock, minus 1: negative is faster."""
        return self.ours / self.stock - 1

    @property
    def apart(self) -> bool:
        """Whether the spreads of the steps do not touch."""
        return self.ours_spread[1] < self.stock_spread[0] or self.stock_spread[1] < self.ours_spread[0]


@dataclass(frozen=True, slots=True)
class LimitCell:
    """One shape at one M of the race. ours: None where no kernel of ours was raced. peers: fastest first."""

    what: str
    n: int
    k: int
    m: int
    ours: Row | None
    peers: tuple[Row, ...]

    @property
    def fraction(self) -> float | None:
        """Of the memory's limit, ours."""
        return limit_fraction(self.ours) if self.ours else None

    @property
    def ahead(self) -> str:
        """The fastest contestant whose slow end is before our fast end, or ""."""
        if self.ours is None:
            return ""
        ours = self.ours.p50 if self.ours.p20 is None else self.ours.p20
        return next((r.provider for r in self.peers if (r.p50 if r.p80 is None else r.p80) < ours), "")


def read(path: Path, kind: str) -> File:
    """Rows of one kind ("limit", "tpot"). Raises `RequestError` naming the file for what cannot be used."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        rows = read_csv(path)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}", "give the path of a CSV of rows") from None
    except ValueError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise RequestError(text, "give a CSV as `skinny bench --out` or benchmarks/ write it") from None
    if not rows:
        raise RequestError(f"{path}: holds no rows", "give a CSV that was measured")
    if wrong := sorted({row.kind for row in rows} - {kind}):
        raise RequestError(f"{path}: rows of kind {', '.join(wrong)}", f"--{kind} takes rows of kind {kind}")
    if bad := next((row for row in rows if not 0 < row.p50 < float("inf")), None):
        raise RequestError(f"{path}: {bad.what} M = {bad.m}: a time of {bad.p50}", "a time is positive: measure again")
    return File(path.name, digest, tuple(rows))


def arms(rows: Sequence[Row]) -> list[Arms]:
    """By model, then concurrency; only where stock and ours were both measured."""
    found = []
    for model in dict.fromkeys(row.what for row in rows):
        for concurrency in sorted({row.m for row in rows if row.what == model}):
            at = [row for row in rows if (row.what, row.m) == (model, concurrency)]
            by = {name: [r for r in at if r.provider == name] for name in sorted({r.provider for r in at})}
            if "stock" not in by or OURS not in by:
                continue
            middle = {name: statistics.median(r.p50 for r in of) for name, of in by.items()}
            found.append(
                Arms(
                    model, concurrency, middle["stock"], middle[OURS], _spread(by["stock"]), _spread(by[OURS]),
                    tuple((name, ms) for name, ms in middle.items() if name not in ("stock", OURS)),
                    min(len(by["stock"]), len(by[OURS])),
                )
            )  # fmt: skip
    return found


def one_armed(rows: Sequence[Row]) -> list[str]:
    """ "qwen3-8b at 4: only stock" for points that were measured with one arm: nothing can be said of them."""
    points: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        points.setdefault((row.what, row.m), set()).add(row.provider)
    return [
        f"{model} at concurrency {m}: only {', '.join(sorted(names))}"
        for (model, m), names in sorted(points.items())
        if not {"stock", OURS} <= names
    ]


def limit_cells(rows: Sequence[Row]) -> list[LimitCell]:
    """By weight size, shape, M."""
    points: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        points.setdefault((row.what, row.m), []).append(row)
    found = []
    for (what, m), at in points.items():
        ours = next((row for row in at if row.provider == OURS), None)
        peers = tuple(sorted((row for row in at if row.provider != OURS), key=lambda row: row.p50))
        found.append(LimitCell(what, at[0].n, at[0].k, m, ours, peers))
    return sorted(found, key=lambda cell: (cell.n * cell.k, cell.what, cell.m))


def _spread(rows: Sequence[Row]) -> tuple[float, float]:
    lows = [row.p50 if row.p20 is None else row.p20 for row in rows]
    return min(lows), max(row.p50 if row.p80 is None else row.p80 for row in rows)
