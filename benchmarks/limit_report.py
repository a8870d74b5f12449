"""Table and pictures of a race to the memory's limit: `python benchmarks/limit_report.py limit.csv --out DIR`.

Writes `limit.md`, `limit-heatmap.svg` and `limit-geomean.svg`; the same rows give the same bytes with one version of
matplotlib. `--check` writes nothing and exits with 1 if a file differs.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skinny_lab.bench.rows import LIMIT_TBPS, OURS, Row, limit_fraction, read_csv, write_text
from skinny_lab.report.results import LimitCell

GOALS = {1: 0.92, 2: 0.91, 4: 0.90, 8: 0.89, 16: 0.86}
"""Geometric mean of the limit fraction that the kernels are to reach, by M."""
BASELINE = "cublas"
COLOURS = {OURS: "#0b6e4f", "best peer": "#c8553d", BASELINE: "#7a7f87", "goal": "#1f2933"}


def cells_of(rows: Sequence[Row]) -> list[LimitCell]:
    """Cells by weight size, then M. Raises ValueError for rows of another kind."""
    if wrong := sorted({row.kind for row in rows} - {"limit"}):
        raise ValueError(f"rows of kind {', '.join(wrong)}: this reports the race to the limit")
    points: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        points.setdefault((row.what, row.m), []).append(row)
    found = []
    for (what, m), at in points.items():
        ours = next((row for row in at if row.provider == OURS), None)
        peers = sorted((row for row in at if row.provider != OURS), key=lambda row: row.p50)
        found.append(LimitCell(what, at[0].n, at[0].k, m, ours, tuple(peers)))
    return sorted(found, key=lambda cell: (cell.n * cell.k, cell.what, cell.m))


@dataclass(frozen=True)
class Summary:
    """Of one M, over the shapes where ours and cuBLAS were raced: geometric means of the limit fraction."""

    m: int
    shapes: int
    ours: float
    cublas: float
    best_peer: float
    speedup: float
    """Geometric mean of the best peer's time over ours."""
    ahead: int


def summarise(cells: Sequence[LimitCell]) -> list[Summary]:
    """One Summary per M that has a complete cell."""
    found = []
    for m in sorted({cell.m for cell in cells}):
        whole = [c for c in cells if c.m == m and c.ours and any(p.provider == BASELINE for p in c.peers)]
        if not whole:
            continue
        ours = [limit_fraction(c.ours) for c in whole if c.ours]
        cublas = [limit_fraction(p) for c in whole for p in c.peers if p.provider == BASELINE]
        best = [limit_fraction(c.peers[0]) for c in whole]
        mean = statistics.geometric_mean
        found.append(
            Summary(
                m, len(whole), mean(ours), mean(cublas), mean(best), mean(ours) / mean(best),
                sum(bool(c.ahead) for c in whole),
            )
        )  # fmt: skip
    return found


def heading(rows: Sequence[Row]) -> str:
    """The machines, dates and commits of the rows, one line."""
    seen = [", ".join(sorted({getattr(row, name) for row in rows})) for name in ("device", "driver", "torch", "date")]
    commits = ", ".join(sorted({row.commit for row in rows if row.commit})) or "unknown"
    return f"{seen[0]}, driver {seen[1]}, torch {seen[2]}, {seen[3]}, commit {commits}"


def overview(found: Sequence[Summary]) -> list[str]:
    """Markdown table of the geometric means."""
    lines = [
        "| M | shapes | skinny | cuBLAS | best peer | goal | reached | skinny vs best peer | cells with a peer ahead |",
        "|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for s in found:
        goal = GOALS.get(s.m)
        reached = "" if goal is None else "yes" if s.ours >= goal else f"no ({s.ours - goal:+.3f})"
        lines.append(
            f"| {s.m} | {s.shapes} | {s.ours:.3f} | {s.cublas:.3f} | {s.best_peer:.3f} |"
            f" {'' if goal is None else f'{goal:.2f}'} | {reached} | {s.speedup:.3f}x | {s.ahead} |"
        )
    return lines


def behind(cells: Sequence[LimitCell]) -> list[str]:
    """Markdown list of the cells where a peer is ahead beyond the spread, the worst first."""
    pairs = [(c, c.ours, next(p for p in c.peers if p.provider == c.ahead)) for c in cells if c.ours and c.ahead]
    return [
        f"- {cell.what} M = {cell.m}: {peer.provider} {peer.p50:.2f} us, skinny {ours.p50:.2f} us"
        f" ({100 * (ours.p50 / peer.p50 - 1):+.1f} %), {ours.config}"
        for cell, ours, peer in sorted(pairs, key=lambda pair: pair[2].p50 / pair[1].p50)
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The whole report."""
    cells = cells_of(rows)
    late = behind(cells)
    fastest = Counter((cell.m, cell.peers[0].provider) for cell in cells if cell.peers)
    names = sorted({name for _, name in fastest})
    lines = [
        "# Race to the memory's limit",
        "",
        f"Measured on {heading(rows)}. Cold L2, CUDA-graph replay, rotating order, medians of"
        f" {min(row.rounds for row in rows)} rounds or more. Fraction of the limit: weight bytes at {LIMIT_TBPS:.2f}"
        " TB/s over the time; means are geometric. Best peer: the fastest of cuBLAS and the libraries, cell by cell.",
        "",
        *overview(summarise(cells)),
        "",
        "![geometric means](limit-geomean.svg)",
        "",
        "![fraction of the limit by shape and M](limit-heatmap.svg)",
        "",
        "## Cells where a peer is ahead beyond the spread",
        "",
        *(late or ["None."]),
        "",
        "## Fastest peer, number of cells",
        "",
        f"| M | {' | '.join(names)} |",
        f"|---:|{'---:|' * len(names)}",
        *(
            f"| {m} | " + " | ".join(str(fastest[m, name]) for name in names) + " |"
            for m in sorted({c.m for c in cells})
        ),
        "",
        "## All cells",
        "",
        "| shape | N x K | M | skinny, us | of the limit | cuBLAS, us | best peer, us | vs best peer | config |",
        "|---|---|---:|---:|---:|---:|---|---:|---|",
        *(_cell_line(cell) for cell in cells),
    ]
    return "\n".join(lines) + "\n"


def _cell_line(cell: LimitCell) -> str:
    ours, best = cell.ours, cell.peers[0] if cell.peers else None
    cublas = next((row for row in cell.peers if row.provider == BASELINE), None)
    return (
        f"| {cell.what} | {cell.n} x {cell.k} | {cell.m} | {f'{ours.p50:.2f}' if ours else ''} |"
        f" {f'{limit_fraction(ours):.3f}' if ours else ''} | {f'{cublas.p50:.2f}' if cublas else ''} |"
        f" {f'{best.provider} {best.p50:.2f}' if best else ''} |"
        f" {f'{best.p50 / ours.p50:.3f}x' if ours and best else ''}{' (behind)' if cell.ahead else ''} |"
        f" {ours.config if ours else ''} |"
    )


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update(mpl.rcParamsDefault)
    mpl.rcParams.update(
        {
            "svg.hashsalt": "skinny",  # names of clip paths and markers; random otherwise
            "svg.fonttype": "path",
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#9aa0a6",
            "axes.labelcolor": COLOURS["goal"],
            "xtick.color": "#4a4f57",
            "ytick.color": "#4a4f57",
        }
    )
    return pyplot.subplots(1, columns, figsize=(width, height), sharey=columns > 1, layout="constrained")


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def geomean_svg(rows: Sequence[Row]) -> str:
    """Geometric means against M: ours, the best peer of each cell, cuBLAS, and the goals."""
    found = summarise(cells_of(rows))
    figure, axes = _figure(6.4, 3.8)
    at = {m: i for i, m in enumerate(s.m for s in found)}
    values = {OURS: [s.ours for s in found], "best peer": [s.best_peer for s in found]}
    values[BASELINE] = [s.cublas for s in found]
    for name, line in values.items():
        label = "best peer of each cell" if name == "best peer" else "cuBLAS" if name == BASELINE else name
        style = {"marker": "o", "markersize": 5, "linewidth": 2.2 if name == OURS else 1.6}
        axes.plot(range(len(at)), line, color=COLOURS[name], label=label, **style)
    for x, value in enumerate(values[OURS]):
        axes.annotate(
            f"{value:.3f}", (x, value), (0, 7), textcoords="offset points", ha="center", color=COLOURS[OURS],
            fontsize=8, bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}, zorder=5,
        )  # fmt: skip
    for number, m in enumerate(m for m in GOALS if m in at):
        axes.hlines(
            GOALS[m], at[m] - 0.22, at[m] + 0.22, color=COLOURS["goal"], linewidth=1.6, linestyle=(0, (2, 1)),
            label="" if number else "goal",
        )  # fmt: skip
    axes.set_xticks(range(len(at)), [str(m) for m in at])
    axes.set_xlim(-0.4, len(at) - 0.6)
    everything = [v for line in values.values() for v in line]
    axes.set_ylim(min([*everything, 0.7]) - 0.04, 1.0)
    axes.set_xlabel("M (rows of activation)")
    axes.set_ylabel("fraction of the memory's limit")
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    shapes = sorted({s.shapes for s in found})
    count = f"{shapes[0]}" if len(shapes) == 1 else f"{shapes[0]} to {shapes[-1]}"
    axes.set_title(f"Geometric mean over {count} shapes, {rows[0].device}, cold L2", loc="left", fontsize=10)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8.5)
    return _svg(figure)


def heatmap_svg(rows: Sequence[Row]) -> str:
    """Fraction of the limit by shape (small weights first) and M: ours beside the best peer."""
    import math

    cells = cells_of(rows)
    at = {(cell.what, cell.m): cell for cell in cells}
    shapes = list(dict.fromkeys((cell.what, cell.n, cell.k) for cell in cells))
    ms = sorted({cell.m for cell in cells})
    figure, panels = _figure(max(6.8, 2.4 + 0.9 * len(ms)), 1.5 + 0.245 * len(shapes), 2)
    image = None
    for axes, title in zip(panels, (OURS, "best peer"), strict=True):
        grid = []
        for what, _, _ in shapes:
            chosen = [at.get((what, m)) for m in ms]
            picked = [c and (c.ours if title == OURS else c.peers[0] if c.peers else None) for c in chosen]
            grid.append([limit_fraction(row) if row else math.nan for row in picked])
        image = axes.imshow(grid, vmin=0.5, vmax=1.0, cmap="viridis", aspect="auto", interpolation="nearest")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                if value == value:
                    cell = at[shapes[y][0], ms[x]]
                    behind_here = title == OURS and bool(cell.ahead)
                    ink = "#1f2933" if value > 0.78 else "white"
                    text = f"{value:.2f}" + ("*" if behind_here else "")
                    weight = "bold" if behind_here else "normal"
                    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=7.5, fontweight=weight)
        axes.set_xticks(range(len(ms)), [str(m) for m in ms])
        axes.set_yticks(range(len(shapes)), [f"{what}  {2 * n * k / 1e6:.0f} MB" for what, n, k in shapes], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xticks([i - 0.5 for i in range(1, len(ms))], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, len(shapes))], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("M")
        axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    bar = figure.colorbar(image, ax=panels, shrink=0.5, aspect=26, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label("fraction of the memory's limit", fontsize=8)
    note = "\n* a peer is ahead beyond the spread" if any(cell.ahead for cell in cells) else ""
    title = f"Weight bytes at {LIMIT_TBPS:.2f} TB/s over the time, {rows[0].device}, cold L2{note}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return _svg(figure)


def generated(path: Path, out: Path) -> dict[Path, str]:
    """Every file of the report with its text."""
    rows = read_csv(path)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return {
        out / "limit.md": markdown(rows),
        out / "limit-heatmap.svg": heatmap_svg(rows),
        out / "limit-geomean.svg": geomean_svg(rows),
    }


def main() -> int:
    """Print the table, write the files, or with --check compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="limit.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    given = parser.parse_args()
    try:
        files = generated(given.csv, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not given.check:
            write_text(path, files[path])
    cells = cells_of(read_csv(given.csv))
    print("\n".join([*overview(summarise(cells)), "", *behind(cells)]))
    print("\n".join(f"{'stale' if given.check else 'written'}: {path}" for path in stale))
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
