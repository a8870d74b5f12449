"""A capture for people: a row per kind of layer, shape and phase, with the M it was issued with."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from skinny_lab.capture.document import Capture, Record

_LEFT = {"layer", "phase", "M"}


def blocks(capture: Capture) -> Iterator[RenderableType]:
    """Title, table, notes."""
    c = capture
    weights = ", random weights" if c.random else ""
    tp = f", TP {c.tp}" if c.tp > 1 else ""
    batches = ", ".join(map(str, c.batches))
    yield Text(f"{c.model} in {c.host} {c.versions.get(c.host, '')} on {c.device}{tp}{weights}", "bold")
    yield Text(f"batch {batches}; {c.prompt_tokens} prompt tokens, {c.new_tokens} new ones per sequence\n")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layer", "N", "K", "layers", "calls", "dtypes", "phase", "M"):
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in c.records:
        r = record
        key = (r.layer, r.n, r.k, r.layers, r.calls, _dtypes(r), r.phase)
        groups.setdefault(key, []).append(record)
    for key, records in groups.items():
        table.add_row(*map(str, key), ",".join(str(r.m) for r in records))
    yield table
    yield Text("\ncalls: per forward pass, of all these layers; dtypes: activation, weight, output", "dim")
    for note in c.notes:
        yield Text(f"note: {note}", "yellow")


def _dtypes(r: Record) -> str:
    """ "bf16", or each where they differ; a bias is said."""
    names = dict.fromkeys((r.activation, r.weight, r.output))
    return (r.activation if len(names) == 1 else f"{r.activation},{r.weight},{r.output}") + ("+bias" if r.bias else "")
