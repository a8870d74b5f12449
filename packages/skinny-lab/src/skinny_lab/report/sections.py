"""The sections of the page, as HTML, with the pictures that stand in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from skinny_core.plan import Cell
from skinny_lab.bench.rows import LIMIT_TBPS, Row
from skinny_lab.report import charts, engine_charts, results
from skinny_lab.report.content import (
    RULER,
    Shape,
    Source,
    floor_us,
    predicted,
    slug,
    speedup,
    split,
    titled,
    verdict,
)
from skinny_lab.report.markup import Html, facts, fold, join, picture, table, tag
from skinny_lab.report.svg import Picture

Piece = Html | Picture


def overview(source: Source) -> Iterator[Piece]:
    """Counts and geometric means of a plan, by M; refused cells count in the means."""
    cells = source.plan.cells
    count = {status: sum(cell.status == status for cell in cells) for status in ("win", "refused", "reported")}
    ahead = sum(bool(cell.evidence.peer_ahead) for cell in cells)
    said = (
        f"{len(cells)} cells: {count['win']} run, {count['refused']} were measured and refused, {count['reported']} are"
        f" reported by others and off. A peer is ahead beyond the spread in {ahead}."
    )
    yield tag("p", said)
    if not count["win"]:
        yield tag("p", "No cell of this plan runs: every call stays the host's own.", kind="warn")
    if not source.sealed:
        said = "The digest does not seal these cells: they were edited after they were measured."
        yield tag("p", said, kind="warn")
    rows = []
    measured = [cell for cell in cells if cell.status != "reported"]
    for m in sorted({cell.m for cell in measured}):
        at = [cell for cell in measured if cell.m == m]
        fractions = [f / cell.evidence.candidate.p50 for cell in at if (f := floor_us(source.plan, cell))]
        wins = [speedup(cell).mid for cell in at if cell.status == "win"]
        rows.append(
            (
                m, len(wins), len(at) - len(wins), f"{statistics.geometric_mean(speedup(c).mid for c in at):.3f}",
                f"{statistics.geometric_mean(wins):.3f}" if wins else "",
                f"{statistics.geometric_mean(fractions):.2f}" if fractions else "no limit known",
            )
        )  # fmt: skip
    if rows:
        heads = ("M", "run", "refused", "speed-up, all measured", "of those that run", "fraction of the limit")
        yield table("Geometric means over shapes, cold L2, by M", heads, rows, ["number"] * 6)


def means(source: Source, by_model: Mapping[str, Sequence[Shape]]) -> Iterator[Piece]:
    """All models of a plan at a glance: geometric mean of the speed-ups over the shapes of each, by M."""
    known = {label: [c for shape in shapes for c in shape.cells] for label, shapes in by_model.items()}
    if len(known) > 1 and any(cell.status != "reported" for cells in known.values() for cell in cells):
        device = source.plan.environment.gpu or source.plan.product
        yield charts.means(f"{source.slug}-models", source.plan.family, known, device)


FOLDED_FROM = 4
"""With so many models the charts by shape and the tables of cells are folded: 28 of them are 130 screens."""


def model(
    source: Source, name: str, shapes: Sequence[Shape], engine: results.File | None, *, unfolded: bool = True
) -> Iterator[Piece]:
    """One model of a plan: heat map, time per token, times by shape, table of cells."""
    prefix = f"{source.slug}-{slug(name)}"
    device = source.plan.environment.gpu or source.plan.product
    title = titled(name)
    yield tag("h3", f"{title}, {source.plan.product}", id=prefix)
    yield charts.speedups(f"{prefix}-speedup", title, shapes, device)
    yield tag("h4", "Time per output token")
    if engine is not None:
        yield from tokens(f"{prefix}-tpot", name, engine.rows)
    if engine is None or not results.arms([row for row in engine.rows if row.what == name]):
        yield from _predicted(source, prefix, name, device)
    opening, closing = fold("Time per call against the byte floor", unfolded=unfolded)
    yield opening
    yield tag("p", _floor_note(source), kind="note")
    yield Html('<div class="charts">')
    for shape in shapes:
        yield charts.times(f"{prefix}-{shape.slug}", title, source.plan, shape)
    yield Html("</div>")
    yield closing
    opening, closing = fold(f"All {sum(len(shape.cells) for shape in shapes)} cells of {title}", unfolded=unfolded)
    yield opening
    yield tag("p", CELLS_NOTE, kind="note")
    yield _cells(source, title, shapes)
    yield closing


def tokens(prefix: str, name: str, rows: Sequence[Row]) -> Iterator[Piece]:
    """Measured time per output token of one model."""
    of_model = [row for row in rows if row.what == name]
    found = results.arms(of_model)
    device = ", ".join(sorted({row.device for row in of_model}))
    if found:
        yield engine_charts.waterfall(prefix, name, found, device)
        lines = [
            (
                a.concurrency, f"{a.stock:.3f}", f"{a.ours:.3f}", f"{100 * a.change:+.1f} %",
                "beyond it" if a.apart else "within it: no difference shown",
                "; ".join(f"{other} {ms:.3f}" for other, ms in a.others), a.runs,
            )
            for a in found
        ]  # fmt: skip
        heads = ("concurrency", "stock, ms", "skinny, ms", "change", "spread of the steps", "other arms, ms", "runs")
        kinds = ("number", "number", "number", "number", "", "", "number")
        yield table(f"{name}: measured time per output token; runs: processes per arm", heads, lines, kinds)
    for line in results.one_armed(of_model):
        yield tag("p", f"{line} was measured: no comparison.", kind="note")


def _predicted(source: Source, prefix: str, name: str, device: str) -> Iterator[Piece]:
    every = list(predicted(source, name))
    if not every:
        why = (
            f"no installed package knows how often {name} calls each projection"
            if source.package is None or split(name)[0] not in source.package.configs
            else "its cells do not fit the shapes that its package declares"
        )
        yield tag("p", f"Not measured, and not predicted: {why}.", kind="note")
        return
    said = (
        "The rows given hold no engine with and without skinny here. Predicted from cells: calls per decode step times"
        " the difference of cold medians, over the cells that run. An engine may show less."
    )
    yield tag("p", said, kind="note")
    model, own = split(name)
    for tp, steps in every:
        title = model if tp == 1 else f"{model}, TP {tp}"
        yield charts.saving(f"{prefix}-predicted{'' if tp == own else f'-tp{tp}'}", title, steps, device)
        heads = ("M", *(part.name for part in steps[0].parts), "sum, µs")
        lines = [(s.m, *(_part(p.state, p.saved_us) for p in s.parts), f"{s.saved_us:.1f}") for s in steps]
        caption = f"{title}: microseconds saved per decode step, predicted from cells"
        yield table(caption, heads, lines, ["number"] * len(heads))


def _part(state: str, saved: float) -> str:
    return f"{saved:.1f}" if state == "runs" else state


def _floor_note(source: Source) -> str:
    if source.plan.product != RULER:
        return "Nobody measured the limit of this device's memory: no byte floor is drawn. Bars: p20 to p80."
    return (
        f"Byte floor: the weight's bytes at {LIMIT_TBPS:.2f} TB/s, the highest rate that any kernel reached on an H200."
        " Bars: p20 to p80. Hollow: measured, and does not run."
    )


CELLS_NOTE = (
    "Medians in microseconds; cold L2, except “hot speed-up”. Spread: from replaced p20 / ours p80 to replaced p80 /"
    " ours p20. “In the model”: change of a captured decode step, negative is faster. Ahead: beyond the spreads."
)
HEADS = (
    "projection", "N x K", "M", "verdict", "why", "cuBLAS, µs", "ours, µs", "speed-up [spread]", "of the limit",
    "hot speed-up", "in the model, µs", "fastest peer, µs", "config",
)  # fmt: skip
KINDS = ("", "number", "number", "", "why", *["number"] * 7, "config")


def _cells(source: Source, name: str, shapes: Sequence[Shape]) -> Html:
    rows = [_row(source, shape, cell) for shape in shapes for cell in shape.cells]
    plain = all(cell.evidence.baseline_name == results.BASELINE for shape in shapes for cell in shape.cells)
    heads = [head if plain else head.replace("cuBLAS", "replaced call") for head in HEADS]
    return table(f"{name}: every measured cell", heads, rows, KINDS)


def _row(source: Source, shape: Shape, cell: Cell) -> tuple[object, ...]:
    e, word_why = cell.evidence, verdict(cell)
    gain = speedup(cell)
    floor = floor_us(source.plan, cell)
    peer = min(e.peers, key=lambda name: e.peers[name], default="")
    ahead = tag("span", " ahead", kind="warn") if e.peer_ahead == peer and peer else ""
    hot = e.baseline_hot.p50 / e.candidate_hot.p50 if e.baseline_hot and e.candidate_hot else None
    why: list[object] = [word_why[1]] if word_why[1] else []
    if e.peer_ahead:
        why.append(tag("span", f"peer ahead: {e.peer_ahead}", kind="warn"))
    baseline = f"{e.baseline.p50:.2f}" + ("" if e.baseline_name == "cublas" else f" ({e.baseline_name})")
    return (
        f"{', '.join(shape.names)}{f' {shape.note}' if shape.note else ''}",
        f"{cell.n} x {cell.k}",
        cell.m,
        tag("span", word_why[0], kind="runs" if cell.status == "win" else "off"),
        join(why, "; "),
        baseline,
        f"{e.candidate.p50:.2f}",
        join((f"{gain.mid:.3f} ", tag("span", f"[{gain.low:.3f}, {gain.high:.3f}]", kind="spread")), ""),
        f"{floor / e.candidate.p50:.2f}" if floor else "",
        f"{hot:.3f}" if hot else "",
        "" if e.in_model_us is None else f"{e.in_model_us:+.1f}",
        join((f"{peer} {e.peers[peer]:.2f}", ahead), "") if peer else "",
        tag("code", str(cell.kernel_config)),
    )


def limit(file: results.File, name: str) -> Iterator[Piece]:
    """The race to the memory's limit. name: of the section and its picture, unique."""
    cells = results.limit_cells(file.rows)
    device = ", ".join(sorted({row.device for row in file.rows}))
    yield tag("h2", "Race to the memory's limit", id=name)
    said = (
        f"{file.label}: every candidate and every peer in one run, cold L2. Not every time here belongs to a cell;"
        " what runs is in the plan."
    )
    yield tag("p", said)
    if any(RULER.upper() not in row.device for row in file.rows):
        said = f"The limit of {LIMIT_TBPS:.2f} TB/s was measured on an H200 SXM; these rows are of {device}."
        yield tag("p", said, kind="warn")
    by_tp: dict[int, list[results.LimitCell]] = {}
    for cell in cells:
        by_tp.setdefault(split(cell.what)[1], []).append(cell)
    for tp, of in sorted(by_tp.items()):
        if any(cell.ours for cell in of):
            yield engine_charts.limit(f"{name}-heatmap{'' if tp == 1 else f'-tp{tp}'}", of, device, tp)
    rows = []
    for cell in cells:
        best = cell.peers[0] if cell.peers else None
        base = next((row for row in cell.peers if row.provider == results.BASELINE), None)
        rows.append(
            (
                cell.what, f"{cell.n} x {cell.k}", cell.m,
                f"{cell.ours.p50:.2f}" if cell.ours else "not raced",
                f"{cell.fraction:.3f}" if cell.fraction is not None else "",
                f"{base.p50:.2f}" if base else "",
                f"{best.provider} {best.p50:.2f}" if best else "",
                f"{best.p50 / cell.ours.p50:.3f}" if best and cell.ours else "",
                tag("span", f"{cell.ahead} ahead", kind="warn") if cell.ahead else "",
                tag("code", cell.ours.config) if cell.ours else "",
            )
        )  # fmt: skip
    heads = (
        "shape", "N x K", "M", "ours, µs", "of the limit", "cuBLAS, µs", "fastest other, µs", "its time / ours", "note",
        "config",
    )  # fmt: skip
    yield table(
        f"All cells of {file.label}", heads, rows, ("", *["number"] * 7, "", "config"),
    )  # fmt: skip


def evidence(sources: Sequence[Source], files: Sequence[tuple[str, results.File]]) -> Iterator[Piece]:
    """Where each number was measured."""
    yield tag("h2", "Evidence", id="evidence")
    for source in sources:
        e, cells = source.plan.environment, source.plan.cells
        rounds = sorted({cell.evidence.rounds for cell in cells})
        clocks = [mhz for cell in cells if cell.evidence.clock_mhz for mhz in cell.evidence.clock_mhz]
        seals = "seals" if source.sealed else "does NOT seal"
        yield tag("h3", f"{source.label} ({source.plan.family}, {source.plan.product})")
        yield facts(
            (
                ("device", f"{e.gpu or 'not told'}; key {source.plan.key.slug}"), ("driver", e.driver),
                ("torch", e.torch), ("CUDA", e.cuda), ("kernel DSLs", e.dsl), ("commit", e.commit), ("date", e.date),
                ("command", tag("code", e.command) if e.command else ""),
                ("rounds", " to ".join(str(r) for r in dict.fromkeys((rounds[0], rounds[-1]))) if rounds else ""),
                ("SM clock seen", f"{min(clocks)} to {max(clocks)} MHz" if clocks else ""),
                ("digest", f"{source.plan.digest or 'none'}: {seals} the cells"),
                ("repeat it", tag("code", f"skinny replay {source.again}")),
            )
        )  # fmt: skip
    for kind, file in files:
        told = [
            (name, ", ".join(sorted({getattr(row, name) for row in file.rows} - {""})))
            for name in ("device", "driver", "torch", "commit", "date")
        ]
        yield tag("h3", f"{file.label} ({kind} rows)")
        yield facts((*told, ("rows", str(len(file.rows))), ("SHA-256", file.digest)))


def render(pieces: Sequence[Piece]) -> Iterator[Html]:
    """Pictures become figures."""
    return (picture(piece) if isinstance(piece, Picture) else piece for piece in pieces)
