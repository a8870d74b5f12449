"""The charts of plan cells: speed-up heat map, time against the byte floor, predicted saving."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skinny_core.plan import Cell, Plan
from skinny_lab.report.content import Shape, Step, floor_us, speedup, titled
from skinny_lab.report.svg import BLUE, INK, LINE, MUTED, ORANGE, PALETTE, PEER, PHONE, Picture, draw


@dataclass(frozen=True, slots=True)
class Tile:
    """One square of a heat map. value: None where nothing was measured. state: "" is coloured by value, "refused" and
    "reported" are grey. ahead: a peer was faster, beyond the spreads."""

    value: float
    state: str = ""
    ahead: bool = False


def heat(
    name: str, alt: str, title: str, rows: Sequence[str], ms: Sequence[int], tiles: Mapping[tuple[int, int], Tile],
    scale: tuple[float, float, float], label: str,
) -> Picture:  # fmt: skip
    """rows: labels. tiles: by (row, column). scale: lowest, middle and highest value of the colours."""
    longest = max((len(row) for row in rows), default=8)
    width, height = max(4.6, 0.4 + 0.078 * longest + 0.56 * len(ms)), 1.95 + 0.34 * len(rows)

    def paint(figure: Any) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        stops = list(zip((0, 0.5, 0.5, 1), (ORANGE, "#fbe6d6", "#d9eefb", BLUE), strict=True))
        colours = LinearSegmentedColormap.from_list("skinny", stops, N=40)  # from 50 on the bar is a bitmap
        norm = TwoSlopeNorm(scale[1], scale[0], scale[2])
        for (y, x), tile in tiles.items():
            face, hatch = (0.89, 0.90, 0.91), {"refused": "////", "reported": "...."}.get(tile.state)
            if not tile.state:
                face = colours(norm(tile.value))[:3]
            box = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, facecolor=face, edgecolor="#b9bfc6", linewidth=0)
            box.set(hatch=hatch) if hatch else None
            axes.add_patch(box)
            if tile.ahead:
                edge = Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor="#b3006b", linewidth=1.8)
                axes.add_patch(edge)
            light = 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2] > 0.5
            paper = {"boxstyle": "square,pad=0.12", "facecolor": face, "edgecolor": "none"} if hatch else None
            axes.text(
                x, y, f"{tile.value:.2f}{'*' if tile.ahead else ''}", ha="center", va="center", fontsize=9.5,
                color="#111519" if light else "#ffffff", bbox=paper,
            )  # fmt: skip
        axes.set_xlim(-0.5, len(ms) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xticks(range(len(ms)), [str(m) for m in ms])
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("M (rows of activation)")
        keys = []
        if any(t.state == "refused" for t in tiles.values()):
            keys.append(
                Rectangle((0, 0), 1, 1, facecolor="#e3e5e8", edgecolor="#b9bfc6", hatch="////", label="refused")
            )
        if any(t.state == "reported" for t in tiles.values()):
            said = "reported by somebody else, off"
            keys.append(Rectangle((0, 0), 1, 1, facecolor="#e3e5e8", edgecolor="#b9bfc6", hatch="....", label=said))
        if any(t.ahead for t in tiles.values()):
            said = "* a peer is ahead"
            keys.append(Rectangle((0, 0), 1, 1, fill=False, edgecolor="#b3006b", linewidth=1.8, label=said))
        bar = figure.colorbar(
            ScalarMappable(norm, colours), ax=axes, location="bottom", fraction=0.14 / height, aspect=34,
            pad=0.1 / height, ticks=scale,
        )  # fmt: skip
        bar.set_ticklabels([f"{value:.2f}" for value in scale])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label(label, fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
        if keys:
            figure.legend(handles=keys, loc="outside lower left", ncols=2, fontsize=9, handlelength=1.6)

    return draw(name, alt, width, height, paint)


def speedups(name: str, model: str, shapes: Sequence[Shape], device: str) -> Picture:
    """Shape x M: cold speed-up over the call that is replaced."""
    ms = sorted({cell.m for shape in shapes for cell in shape.cells})
    tiles = {
        (y, ms.index(cell.m)): Tile(
            speedup(cell).mid, "" if cell.status == "win" else cell.status, bool(cell.evidence.peer_ahead)
        )
        for y, shape in enumerate(shapes)
        for cell in shape.cells
    }
    cells = [cell for shape in shapes for cell in shape.cells]
    count = {status: sum(cell.status == status for cell in cells) for status in ("win", "refused", "reported")}
    alt = (
        f"Heat map of the speed-up of {model} on {device}, {len(shapes)} shapes by {len(ms)} values of M: "
        f"{count['win']} cells run, {count['refused']} are refused, {count['reported']} are reported; a peer is ahead "
        f"in {sum(tile.ahead for tile in tiles.values())}. All numbers are in the table of cells."
    )
    title = f"{model}: speed-up, cold L2\n{device}; uncoloured cells do not run"
    label = "median time of the replaced call / ours"
    high = max([1.2, *(tile.value for tile in tiles.values() if not tile.state)])
    return heat(name, alt, title, [s.title for s in shapes], ms, tiles, (0.8, 1.0, round(high + 0.005, 2)), label)


def means(name: str, family: str, known: Mapping[str, Sequence[Cell]], device: str) -> Picture:
    """Model and tensor-parallel size x M: geometric mean of the cold speed-ups over its shapes. known: cells by label.
    A cell that does not run counts as 1: the call stays the host's own."""
    measured = {label: [c for c in cells if c.status != "reported"] for label, cells in known.items()}
    labels = [label for label, cells in measured.items() if cells]
    ms = sorted({cell.m for cells in measured.values() for cell in cells})
    tiles = {}
    for y, label in enumerate(labels):
        for x, m in enumerate(ms):
            at = [cell for cell in measured[label] if cell.m == m]
            if at:
                gains = [speedup(cell).mid if cell.status == "win" else 1.0 for cell in at]
                tiles[y, x] = Tile(statistics.geometric_mean(gains))
    high = max([1.2, *(tile.value for tile in tiles.values())])
    best = max(tiles, key=lambda place: tiles[place].value)
    alt = (
        f"Heat map of the mean speed-up of {len(labels)} models and tensor-parallel sizes of {family} on {device} by"
        f" {len(ms)} values of M. The highest is {tiles[best].value:.2f}, of {titled(labels[best[0]])} at"
        f" M = {ms[best[1]]}."
    )
    title = f"{family}: speed-up, cold L2, geometric mean over shapes\n{device}; what does not run counts as 1"
    rows = [titled(label) for label in labels]
    label = "median time of the replaced call / what runs"
    return heat(name, alt, title, rows, ms, tiles, (0.8, 1.0, round(high + 0.005, 2)), label)


def times(name: str, model: str, found: Plan, shape: Shape) -> Picture:
    """One shape: microseconds against M, with the time in which the memory could deliver the weight."""
    ms = [cell.m for cell in shape.cells]
    floor = floor_us(found, shape)
    baseline = shape.cells[0].evidence.baseline_name

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        at = range(len(ms))
        _line(axes, at, [c.evidence.baseline for c in shape.cells], ORANGE, "s", _known(baseline))
        _line(axes, at, [c.evidence.candidate for c in shape.cells], BLUE, "o", "skinny")
        off = [(x, c.evidence.candidate.p50) for x, c in enumerate(shape.cells) if c.status != "win"]
        if off:
            axes.plot(*zip(*off, strict=True), "o", markersize=7, markerfacecolor="#ffffff", markeredgecolor=BLUE,
                      markeredgewidth=1.6, label="skinny, does not run", zorder=4)  # fmt: skip
        peers = [(x, min(c.evidence.peers.values())) for x, c in enumerate(shape.cells) if c.evidence.peers]
        if peers:
            axes.plot(*zip(*peers, strict=True), "x", color=PEER, markersize=6, label="fastest peer", zorder=5)
        if floor is not None:
            axes.axhline(floor, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label=f"byte floor {floor:.1f} µs")
        axes.set_xticks(at, [str(m) for m in ms], fontsize=10 if len(ms) < 11 else 8)
        axes.set_xlim(-0.4, len(ms) - 0.6)
        top = max(c.evidence.baseline.p80 for c in shape.cells)
        axes.set_ylim(0, 1.08 * max([top, *(c.evidence.candidate.p80 for c in shape.cells), *(y for _, y in peers)]))
        axes.set_xlabel("M")
        axes.set_ylabel("µs per call")
        axes.grid(axis="y", color=LINE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_title(shape.title)
        figure.legend(loc="outside lower left", ncols=2, fontsize=8.5, columnspacing=1.2, handlelength=1.6)

    best = min(shape.cells, key=lambda c: c.evidence.candidate.p50 / c.evidence.baseline.p50)
    alt = (
        f"Time per call of {model} {shape.title} against M, cold L2: {_known(baseline)} and skinny"
        + (f", and the byte floor of {floor:.1f} microseconds" if floor is not None else "")
        + f". The largest speed-up is {speedup(best).mid:.2f} at M = {best.m}"
        + ("." if best.status == "win" else ", and that cell does not run.")
    )
    return draw(name, alt, 3.7, 3.0, paint)


def _line(axes: Any, at: Sequence[int], of: Sequence[Any], colour: str, marker: str, label: str) -> None:
    below, above = [q.p50 - q.p20 for q in of], [q.p80 - q.p50 for q in of]
    axes.errorbar(
        at, [q.p50 for q in of], yerr=[below, above], color=colour, marker=marker, markersize=5, linewidth=1.7,
        capsize=2.5, elinewidth=1.1, label=label,
    )  # fmt: skip


def _known(name: str) -> str:
    return "cuBLAS" if name == "cublas" else name


def saving(name: str, title: str, steps: Sequence[Step], device: str) -> Picture:
    """Waterfall of each M: from the stock step (0) down by what each projection saves."""
    names = list(dict.fromkeys(part.name for step in steps for part in step.parts))

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.subplots()
        for y, step in enumerate(steps):
            reached = 0.0
            for part in step.parts:
                if part.saved_us:
                    colour = PALETTE[names.index(part.name) % len(PALETTE)]
                    axes.barh(y, -part.saved_us, left=reached, height=0.62, color=colour, edgecolor="#ffffff")
                    reached -= part.saved_us
            said = f"−{step.saved_us:.0f} µs " if step.saved_us else "nothing runs "
            axes.text(reached, y, said, ha="right", va="center", fontsize=9.5)
        axes.axvline(0, color=MUTED, linewidth=1.2)
        axes.set_yticks(range(len(steps)), [f"M = {step.m}" for step in steps])
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_xlim(-1.28 * max([1.0, *(step.saved_us for step in steps)]), 0)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("change of one decode step, µs (0: stock)")
        axes.grid(axis="x", color=LINE, linewidth=0.7)
        axes.set_axisbelow(True)
        figure.suptitle(f"{title}\npredicted from cells, {device}", x=0.01, ha="left", fontsize=10.5)
        shown = [n for n in names if any(p.name == n and p.saved_us for s in steps for p in s.parts)]
        if shown:
            keys = [Patch(color=PALETTE[names.index(n) % len(PALETTE)], label=n) for n in shown]
            figure.legend(handles=keys, loc="outside lower left", ncols=min(3, len(shown)), fontsize=9)

    best = max(steps, key=lambda step: step.saved_us)
    alt = (
        f"Predicted from cells, not measured in an engine: what one decode step of {title} saves on {device}, by"
        f" projection. The most is {best.saved_us:.0f} microseconds at M = {best.m}."
        if best.saved_us
        else f"Predicted from cells: no cell of {title} runs on {device}, so nothing is saved."
    )
    return draw(name, alt, PHONE, 1.9 + 0.42 * len(steps), paint)
