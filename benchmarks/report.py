"""Generate `results/<device>/summary.json` and the table in README from the rows: `python benchmarks/report.py
[--check]`.

`--check` writes nothing and exits with 1 if a generated file differs from what the rows give.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skinny_core import family
from skinny_core.plan import load
from skinny_lab.bench import cells, generated_files, rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def main() -> int:
    """Write, or with --check compare; returns the exit status."""
    return generated_files.run(__doc__, generated, ROOT)


def generated() -> dict[Path, str]:
    """Every generated file with the text it should have."""
    files: dict[Path, str] = {}
    sections = []
    for folder in sorted(p for p in RESULTS.iterdir() if p.is_dir()):
        found = summary(read(folder))
        files[folder / "summary.json"] = json.dumps(found, indent=1) + "\n"
        sections.append(section(found, folder.name))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    files[ROOT / "README.md"] = f"{before}{BEGIN}\n{''.join(sections)}{END}{after}"
    return files


def read(folder: Path) -> list[rows.Row]:
    """All rows of one device: those of the plans that were measured on it, each shape once, and of its engines."""
    found: dict[tuple[object, ...], rows.Row] = {}
    for package in family.discover().packages:
        for path in package.plan_files():
            plan = load(path)
            if plan.product == folder.name and not plan.only_reported:
                for row in cells.planned_rows(plan):  # two packages have the same cell for a shape that both use
                    found.setdefault((row.n, row.k, row.m, row.provider, row.state), row)
    engines = [row for path in sorted(folder.glob("tpot-*.csv")) for row in rows.read_csv(path)]
    return [*found.values(), *engines]


def summary(every: Sequence[rows.Row]) -> dict[str, Any]:
    """`rows.summarise` of the shapes of one GPU and of the engines; beside it cells and speed-ups of each TP size."""
    by_tp: dict[int, list[rows.Row]] = {}
    for row in every:
        by_tp.setdefault(tp_of(row), []).append(row)
    split = {str(tp): rows.summarise(by_tp[tp]) for tp in sorted(by_tp)}
    cells_of = {tp: found["cells"] for tp, found in split.items()}
    speeds = {tp: found["vs_cublas"] for tp, found in split.items() if tp != "1"}
    return {**split["1"], "cells_by_tp": cells_of, "vs_cublas_by_tp": speeds}


def tp_of(row: rows.Row) -> int:
    """Tensor-parallel size of the first model that has the shape: 2 for "qwen3-8b-tp2/o"; 1 for an engine."""
    found = re.search(r"-tp(\d+)/", row.what)
    return int(found[1]) if found else 1


def section(found: dict[str, Any], name: str) -> str:
    """Markdown of one device: kernels by M, then time per token by model and concurrency."""
    where = f"[benchmarks/results/{name}](benchmarks/results/{name})"
    tps = list(found["vs_cublas_by_tp"])
    lines = [
        f"Measured on one {found['device']} ({found['date']}, commit `{found['commit'][:12]}`; {where}): speed against"
        " cuBLAS, cold L2, geometric mean over all shapes; for the shapes of one GPU also against the best peer"
        f" ({', '.join(found['peers']) or 'none'}), and as a fraction of the memory's limit.",
        "",
        f"| M | one GPU | vs best peer | of the limit | {' | '.join(f'TP {tp}' for tp in tps)} |",
        "|---:|---:|---:|---:|" + "---:|" * len(tps),
    ]
    for m in found["vs_cublas"]:
        columns = [f"{found['vs_cublas'][m]:.3f}x"]
        columns += [f"{found['vs_best_peer'][m]:.3f}x" if m in found["vs_best_peer"] else ""]
        columns += [f"{found['limit_fraction'][m]:.2f}"]
        columns += [f"{found['vs_cublas_by_tp'][tp][m]:.3f}x" for tp in tps]
        lines.append(f"| {m} | {' | '.join(columns)} |")
    win, refused = (sum(of[status] for of in found["cells_by_tp"].values()) for status in ("win", "refused"))
    lines += [
        "",
        f"{win} cells run, {refused} are listed as refused. Limit: weight bytes at {found['limit_tbps']:.2f} TB/s. A"
        " shape that several models or TP sizes have is counted once, at the smallest.",
        "",
        f"Milliseconds per output token of a real vLLM engine (commit `{found['tpot_commit']}`, dummy weights, context"
        " 1024, median of engine steps), stock -> with skinny:",
        "",
        *engine_table(found["tpot"]),
    ]
    return "\n".join(lines) + "\n"


def engine_table(tpot: dict[str, Any]) -> list[str]:
    """A row per model, a column per concurrency."""
    levels = sorted({int(level) for at in tpot.values() for level in at})
    lines = [
        f"| model | {' | '.join(f'concurrency {level}' for level in levels)} | turns per arm |",
        "|---|" + "---|" * len(levels) + "---:|",
    ]
    for model, at in tpot.items():
        columns = []
        for level in levels:
            t = at.get(str(level))
            change = 100 * (t["skinny_ms"] / t["stock_ms"] - 1) if t else 0.0
            columns.append(f"{t['stock_ms']:.2f} -> {t['skinny_ms']:.2f} ({change:+.1f} %)" if t else "")
        turns = min(t["runs"] for t in at.values())
        lines.append(f"| {model} | {' | '.join(columns)} | {turns} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
