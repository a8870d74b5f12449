"""The charts of committed rows: time per output token, and the race to the memory's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skinny_lab.bench.rows import LIMIT_TBPS
from skinny_lab.report.charts import Tile, heat
from skinny_lab.report.results import Arms, LimitCell
from skinny_lab.report.svg import BLUE, GREY, LINE, MUTED, ORANGE, PHONE, Picture, draw

FASTER = "#009e73"


def waterfall(name: str, model: str, found: Sequence[Arms], device: str) -> Picture:
    """By concurrency: the stock step, what changes, the step with skinny. Milliseconds from 0."""

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.subplots()
        whiskers = {"ecolor": MUTED, "capsize": 2.5, "error_kw": {"elinewidth": 1.1}}
        for x, a in enumerate(found):
            for shift, value, spread, colour in (
                (-0.28, a.stock, a.stock_spread, GREY),
                (0.28, a.ours, a.ours_spread, BLUE),
            ):
                # The median of several processes may lie outside what one of them saw.
                error = [[max(0.0, value - spread[0])], [max(0.0, spread[1] - value)]]
                axes.bar(x + shift, value, 0.27, color=colour, yerr=error, **whiskers)
            colour = FASTER if a.ours < a.stock else ORANGE
            bottom, top = sorted((a.stock, a.ours))
            axes.bar(
                x, top - bottom, 0.27, bottom=bottom, facecolor=colour if a.apart else "none", edgecolor=colour,
                hatch="" if a.apart else "////",
            )  # fmt: skip
            high = max(a.stock_spread[1], a.ours_spread[1])
            said = f"{100 * a.change:+.1f} %".replace("-", "−")
            axes.annotate(
                said if a.apart else f"({said})", (x, high), (0, 5), textcoords="offset points", ha="center", fontsize=9
            )
        axes.set_xticks(range(len(found)), [str(a.concurrency) for a in found])
        axes.set_xlabel("concurrency (sequences)")
        axes.set_ylabel("ms per output token")
        axes.set_ylim(0, 1.16 * max(max(a.stock_spread[1], a.ours_spread[1]) for a in found))
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", color=LINE, linewidth=0.7)
        axes.set_axisbelow(True)
        keys = [Patch(color=GREY, label="stock"), Patch(color=BLUE, label="with skinny")]
        if any(a.apart and a.change < 0 for a in found):
            keys.append(Patch(color=FASTER, label="faster"))
        if any(a.apart and a.change > 0 for a in found):
            keys.append(Patch(color=ORANGE, label="slower"))
        if not all(a.apart for a in found):
            said = "(within the spread of the steps)"
            keys.append(Patch(facecolor="none", edgecolor=MUTED, hatch="////", label=said))
        figure.suptitle(f"{model}: time per output token, measured\n{device}", x=0.01, ha="left", fontsize=10.5)
        figure.legend(handles=keys, loc="outside lower left", ncols=2, fontsize=9, columnspacing=1.2)

    said = "; ".join(
        f"concurrency {a.concurrency}: {a.stock:.3f} to {a.ours:.3f} ms, {100 * a.change:+.1f} percent"
        + ("" if a.apart else ", within the spread of the steps")
        for a in found
    )
    alt = f"Measured time per output token of {model} on {device}, stock and with skinny. {said}."
    return draw(name, alt, max(PHONE, 0.7 + 0.66 * len(found)), 3.8, paint)


def limit(name: str, cells: Sequence[LimitCell], device: str, tp: int = 1) -> Picture:
    """Fraction of the memory's limit that ours reaches, shape x M, of one tensor-parallel size."""
    shapes = list(dict.fromkeys((cell.what, cell.n, cell.k) for cell in cells))
    ms = sorted({cell.m for cell in cells})
    tiles = {
        (shapes.index((c.what, c.n, c.k)), ms.index(c.m)): Tile(c.fraction, "", bool(c.ahead))
        for c in cells
        if c.fraction is not None
    }
    ahead = sum(tile.ahead for tile in tiles.values())
    alt = (
        f"Heat map of the fraction of the memory's limit that skinny reaches on {device}, {len(shapes)} shapes by"
        f" {len(ms)} values of M; a peer or cuBLAS is ahead in {ahead} of {len(tiles)} cells."
    )
    size = "" if tp == 1 else f", TP {tp}"
    title = f"Fraction of the memory's limit, cold L2{size}\n{device}; weight bytes at {LIMIT_TBPS:.2f} TB/s"
    rows = [f"{what}  {2 * n * k / 1e6:.0f} MB" for what, n, k in shapes]
    return heat(
        name,
        alt,
        title,
        rows,
        ms,
        tiles,
        (0.5, 0.75, 1.0),
        "fraction of the memory's limit",
    )
