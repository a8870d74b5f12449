"""One row schema for every measurement, its CSV, and the summary that is generated from it."""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

LIMIT_TBPS = 4.60
"""Highest streaming rate seen on an H200 SXM by any kernel (LM head, M = 1), in TB/s: the ruler of `limit_fraction`."""
OURS = "skinny"


@dataclass(frozen=True, slots=True)
class Row:
    """One provider at one point. kind: "cell" (us per call of a planned cell), "limit" (the same, of the race to the
    memory's limit) or "tpot" (ms per output token).

    what: "qwen3-8b/o", a shape or a model. m: rows, or concurrency for tpot. state: "cold", "hot" or "engine". config:
    how it was launched. status: of the plan cell, for ours; of kind "limit": "peer_ahead" or "". p20, p50, p80: in
    `unit` over `rounds`; None where no spread was kept.
    """

    kind: str
    what: str
    n: int
    k: int
    m: int
    provider: str
    config: str
    state: str
    status: str
    unit: str
    p20: float | None
    p50: float
    p80: float | None
    rounds: int
    device: str
    driver: str
    torch: str
    commit: str
    date: str


Record = TypeVar("Record")


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows atomically."""
    write_table(path, Row, rows)


def read_csv(path: Path) -> list[Row]:
    """Read rows; raises ValueError naming the file, the line and the column of a value that does not fit."""
    return read_table(path, Row)


def write_table(path: Path, kind: type[Any], records: Iterable[Any]) -> None:
    """Write flat dataclasses of one kind as CSV, atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    write_text(path, text.getvalue())


def read_table(path: Path, kind: type[Record]) -> list[Record]:
    """Read what `write_table` wrote: fields of int, float, str and optional floats. Raises as `read_csv`."""
    specs = {spec.name: _CONVERT[str(spec.type)] for spec in fields(kind)}  # type: ignore[arg-type]
    found = []
    with path.open(encoding="utf-8", newline="") as f:
        for number, record in enumerate(csv.DictReader(f), 2):
            values: dict[str, Any] = {}
            for name, convert in specs.items():
                try:
                    values[name] = convert(record[name])
                except (KeyError, TypeError, ValueError):
                    raise ValueError(f"{path}:{number}: column {name}: {record.get(name)!r}") from None
            found.append(kind(**values))
    return found


def _optional(text: str) -> float | None:
    return float(text) if text else None


_CONVERT: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "float | None": _optional}


def write_text(path: Path, text: str) -> None:
    """Write a whole file beside its name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def limit_fraction(row: Row) -> float:
    """Weight bytes (2 per element) at `LIMIT_TBPS`, over the median time: 1.0 is the memory's limit."""
    return 2 * row.n * row.k / LIMIT_TBPS / 1e6 / row.p50


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of one device: cell counts, geometric means keyed by M, TPOT.

    limit_fraction: weight bytes / LIMIT_TBPS / time. vs_cublas, vs_best_peer: their time / ours. All cold, over the
    cells of that M that were measured with our kernel, whatever their status.
    """
    cells = [r for r in rows if r.kind == "cell"]
    points: dict[tuple[str, int], dict[str, Row]] = {}
    for row in cells:
        if row.state == "cold":
            points.setdefault((row.what, row.m), {})[row.provider] = row
    by_m: dict[str, dict[int, list[float]]] = {"limit_fraction": {}, "vs_cublas": {}, "vs_best_peer": {}}
    for (_, m), found in points.items():
        ours = found.get(OURS)
        if ours is None:
            continue
        by_m["limit_fraction"].setdefault(m, []).append(limit_fraction(ours))
        if "cublas" in found:
            by_m["vs_cublas"].setdefault(m, []).append(found["cublas"].p50 / ours.p50)
        peers = [r.p50 for name, r in found.items() if name not in (OURS, "cublas")]
        if peers:
            by_m["vs_best_peer"].setdefault(m, []).append(min(peers) / ours.p50)
    status = [r.status for r in cells if r.provider == OURS and r.state == "cold"]
    engine = [r for r in rows if r.kind == "tpot"]
    newest = max(cells or rows, key=lambda r: r.date)
    return {
        "device": newest.device,
        "date": newest.date,
        "commit": newest.commit,
        "tpot_commit": max(engine, key=lambda r: r.date).commit if engine else "",
        "peers": sorted({r.provider for r in cells} - {OURS, "cublas"}),
        "limit_tbps": LIMIT_TBPS,
        "cells": {name: status.count(name) for name in ("win", "refused", "reported")},
        **{
            name: {str(m): round(statistics.geometric_mean(values), 4) for m, values in sorted(found.items())}
            for name, found in by_m.items()
        },
        "tpot": tpot(engine),
    }


def write_summary(path: Path, rows: Sequence[Row]) -> None:
    """Write `summarise(rows)` as JSON, atomically."""
    write_text(path, json.dumps(summarise(rows), indent=1) + "\n")


def tpot(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Median over processes of the median TPOT in ms, {model: {concurrency: {stock_ms, skinny_ms, runs}}}."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model in dict.fromkeys(r.what for r in rows):
        for concurrency in sorted({r.m for r in rows if r.what == model}):
            arms = {
                arm: [r for r in rows if (r.what, r.m, r.provider) == (model, concurrency, arm)]
                for arm in ("stock", OURS)
            }
            if all(arms.values()):
                found.setdefault(model, {})[str(concurrency)] = {
                    "stock_ms": round(statistics.median(r.p50 for r in arms["stock"]), 4),
                    "skinny_ms": round(statistics.median(r.p50 for r in arms[OURS]), 4),
                    "runs": min(len(rows) for rows in arms.values()),
                }
    return found
