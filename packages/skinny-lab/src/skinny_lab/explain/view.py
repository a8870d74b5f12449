"""An explanation for people: a row per projection and M, neighbouring M with the same answer on one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from skinny_core.explain import Explanation, Line
from skinny_core.rules import Reason

COLUMNS = ("projection", "N", "K", "M", "what runs", "base", "ours", "gain", "saves")
NUMBERS = {"N", "K", "base", "ours", "gain", "saves"}


def blocks(explanation: Explanation, ms: Sequence[int], note: str, *, cells: bool) -> Iterator[RenderableType]:
    """Title, the projections of a host that fuses, those of one that does not, savings, and what the words mean.

    note: one more line for the end, or "". cells: also list each cell with its launch parameters.
    """
    e = explanation
    yield Text(f"{e.model} ({e.family}) on {e.device}, TP {e.tp}\n", "bold")
    yield table([line for line in e.lines if not line.part_of])
    parts = [line for line in e.lines if line.part_of]
    if parts:
        yield Text("\nWhere the host does not fuse them (Transformers):\n")
        yield table(parts)
    if cells:
        yield _cells(e.lines)
    yield _savings(e, ms)
    yield _legend(e.lines)
    for text in filter(None, (note, *e.notes)):
        yield Text(f"note: {text}", "yellow")


def table(lines: Sequence[Line]) -> Table:
    """One table of lines. Times are cold medians of the cell's evidence; savings are per decode step, all layers."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        shown.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    before = ""
    for group in grouped(lines):
        line = group[0]
        first = line.projection != before
        before = line.projection
        shape = (line.projection, str(line.n), str(line.k)) if first else ("", "", "")
        shown.add_row(*shape, _rows(group), _what(line), *_numbers(line))
    return shown


def grouped(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Runs of lines that say the same; a line with times of its own stands alone."""
    for _, group in groupby(lines, key=_sameness):
        members = list(group)
        yield from ([members] if members[0].baseline_us is None else ([line] for line in members))


def _sameness(line: Line) -> tuple[object, ...]:
    return line.projection, line.runs, line.reason, line.baseline_us is None


def _rows(group: Sequence[Line]) -> str:
    return str(group[0].m) if len(group) == 1 else f"{group[0].m}-{group[-1].m}"


def _what(line: Line) -> Text:
    if line.runs:
        return Text(line.config.partition("(")[0], "green")
    return Text(f"host: {line.reason}", "dim")


def _numbers(line: Line) -> tuple[str, ...]:
    candidate_us = line.ours_us or line.reported_us
    if line.baseline_us is None or candidate_us is None:
        return "", "", "", ""
    mark = "r" if line.reported_us is not None else "*" if line.peer_ahead else ""
    saves = f"{line.saving_us:.1f}" if line.runs else ""
    return f"{line.baseline_us:.2f}", f"{candidate_us:.2f}", f"{line.baseline_us / candidate_us:.2f}x{mark}", saves


def _savings(explanation: Explanation, ms: Sequence[int]) -> Text:
    saved = {m: explanation.saving_us(m) for m in ms}
    if not any(saved.values()):
        return Text("\nNothing runs here, so nothing is saved.\n", "bold")
    said = ", ".join(f"{value:.0f} at M={m}" for m, value in saved.items() if value)
    return Text(f"\nPredicted saving per decode step (us, all layers): {said}\n", "bold")


def _cells(lines: Sequence[Line]) -> Text:
    found = {line.cell: f"{line.cell}: {line.config}" + (f" - {line.detail}" if line.detail else "") for line in lines}
    return Text("\n" + "\n".join(text for cell, text in found.items() if cell))


def _legend(lines: Sequence[Line]) -> Text:
    reasons = dict.fromkeys(line.reason for line in lines if line.reason)
    said = [f"{reason}: {Reason(reason).meaning}" for reason in reasons]
    if any(line.baseline_us for line in lines):
        said.append("base, ours: us per call, the call that is replaced and the kernel, cold L2; saves: us per step")
    for source in dict.fromkeys(line.source for line in lines if line.reported_us is not None):
        said.append(f"r: both times as somebody else reported them, the second of their kernel: {source}")
    peers = dict.fromkeys(line.peer_ahead for line in lines if line.peer_ahead)
    if peers:
        said.append(f"*: in the same run a library that the host does not use here was faster: {', '.join(peers)}")
    return Text("\n".join(said), "dim")
