"""What a replay prints: the machine, a line per cell, what is not confirmed, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skinny_core.device import DeviceKey
from skinny_core.plan import Environment, Plan
from skinny_lab.replay.measure import Replayed
from skinny_lab.replay.rule import Outcome, share

COLOUR = {
    Outcome.CONFIRMED: "green",
    Outcome.MARGINAL: "green",
    Outcome.LOST: "bold red",
    Outcome.WOULD_WIN: "bold yellow",
    Outcome.DECODE_STEP: "dim",
    Outcome.HELD_BACK: "dim",
    Outcome.FAILED: "bold red",
}
URGENT = (Outcome.FAILED, Outcome.LOST, Outcome.WOULD_WIN, Outcome.MARGINAL, Outcome.DECODE_STEP, Outcome.HELD_BACK)
"""Outcomes that get a sentence each, in this order."""
MANY = 100
"""Cells of which every one gets a line; of more, those that are confirmed without reservation get none."""
CLOCK_DRIFT = 0.03
"""An SM clock this much away from the plan's is told: small weights are bound by it."""


def show_start(
    console: Console,
    path: Path,
    plan: Plan,
    key: DeviceKey,
    environment: Environment,
    *,
    others: int,
    missing: str,
) -> None:
    """Which plan, which machine, and what may disturb the numbers. others: other processes on the GPU."""
    then = plan.environment
    console.print(Text.assemble("plan: ", (str(path), "bold"), f", {plan.family} on {plan.key}"), soft_wrap=True)
    console.print(Text(_machine("then", then)), soft_wrap=True)
    console.print(Text(_machine("now", environment)), soft_wrap=True)
    warnings = []
    if key != plan.key:
        warnings.append(f"ANOTHER DEVICE than the plan's: {key}; this neither confirms nor refutes it for {plan.key}")
    if plan.digest != plan.seal():
        warnings.append("the digest does not fit: the file was edited after it was measured")
    if others:
        warnings.append(f"{others} other process{'es' * (others > 1)} on this GPU: times may be wrong")
    for text in warnings:
        console.print(Text(f"warning: {text}", "yellow"), soft_wrap=True)
    if missing:
        console.print(Text(missing, "dim"), soft_wrap=True)


def show_end(
    console: Console,
    found: Sequence[Replayed],
    left_out: Mapping[str, str],
    *,
    require: float,
    asked: int,
    interrupted: bool,
    out: Path | None,
) -> bool:
    """Table, notes, summary. Returns whether at least `require` percent are confirmed."""
    shown = found if len(found) <= MANY else [row for row in found if row.outcome != Outcome.CONFIRMED]
    if shown:
        console.print(_table(shown))
    if len(shown) < len(found):
        where = f": {out}" if out is not None else ", write all rows with --out"
        console.print(Text(f"{len(found) - len(shown)} more cells, confirmed by their medians{where}", "dim"))
    for outcome in URGENT:
        for row in found:
            if row.outcome == outcome and row.note:
                console.print(Text.assemble((f"{outcome.value}: ", COLOUR[outcome]), f"{row.cell}: {row.note}"))
    for why in dict.fromkeys(left_out.values()):
        names = [name for name, said in left_out.items() if said == why]
        console.print(Text(f"left out: {_few(names)}: {why}", "dim"))
    if clocks := _clocks(found):
        console.print(clocks)
    if out is not None and found:
        console.print(Text(f"{len(found)} rows in {out}"), soft_wrap=True)
    if interrupted:
        console.print(Text(f"interrupted: {len(found)} of {asked} cells measured", "yellow"))
    holding, counted, percent = share([Outcome(row.outcome) for row in found])
    enough = counted > 0 and percent >= require
    text = Text(f"{holding} of {counted} confirmed ({percent:.1f} %, required {require:g} %)")
    text.stylize("bold green" if enough and not interrupted else "bold red")
    marginal = sum(row.outcome == Outcome.MARGINAL for row in found)
    open_ones = len(found) - counted
    text.append(f"; {marginal} of them marginal" if marginal else "")
    text.append(f"; {open_ones} rest on a decode step or on another M and are not counted" if open_ones else "")
    if any(row.m >= 3 and row.status == "win" for row in found):
        text.append("; the decode steps of M >= 3 were not repeated")
    if any(row.key != row.plan_key for row in found):
        text.append("; on another device than the plan's", "yellow")
    console.print(text, soft_wrap=True)
    return enough


def _table(found: Sequence[Replayed]) -> Table:
    """Speed-ups over the baseline with cold and hot L2: the plan's, now's, and the longer half of now's spread. Fits 80
    columns; the CSV has both ends of the spread."""
    title = "speed-up over cublas, L2 cold and hot: the plan's, now's, \u00b1 its spread"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold")
    table.add_column("plan")
    for name in ("cold", "now", "\u00b1", "hot", "now", "\u00b1"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in found:
        table.add_row(
            Text(row.cell),
            row.status,
            *_ratios(row.cold_then, row.cold_now, row.cold_low, row.cold_high),
            *_ratios(row.hot_then, row.hot_now, row.hot_low, row.hot_high),
            Text(row.outcome, COLOUR[Outcome(row.outcome)]),
        )
    return table


def _ratios(then: float | None, mid: float | None, low: float | None, high: float | None) -> tuple[str, str, str]:
    before = "-" if then is None else f"{then:.3f}"
    if mid is None or low is None or high is None:
        return before, "-", "-"
    return before, f"{mid:.3f}", f"{max(mid - low, high - mid):.3f}"


def _machine(when: str, environment: Environment) -> str:
    e = environment
    facts = (e.gpu, f"driver {e.driver}", f"torch {e.torch}", e.dsl, e.date, f"commit {e.commit}" if e.commit else "")
    return f"{when}: " + ", ".join(fact for fact in facts if fact)


def _clocks(found: Sequence[Replayed]) -> Text | None:
    """SM clocks of the plan and of now, yellow where they are apart; None where they are not known."""
    now = [clock for row in found for clock in (row.sm_mhz_low, row.sm_mhz_high) if clock]
    then = [row.sm_mhz_then for row in found if row.sm_mhz_then]
    if not now:
        return None
    text = Text(f"SM clock now {_span(now)} MHz" + (f", then {_span(then)}" if then else ""))
    drifted = [
        row.cell
        for row in found
        if row.sm_mhz_then and row.sm_mhz_low and abs(row.sm_mhz_low / row.sm_mhz_then - 1) > CLOCK_DRIFT
    ]
    if drifted:
        text.append(f": apart by more than {CLOCK_DRIFT:.0%} in {_few(drifted)}", "yellow")
    return text


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _few(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
