"""What a tuning prints: the machine, a line per cell, what was not measured, what `skinny explain` will say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skinny_core import env
from skinny_core.device import DeviceKey
from skinny_core.explain import explain
from skinny_core.plan import Cell, Environment, Plan
from skinny_lab.tune.request import Target
from skinny_lab.tune.run import DRIFT, drift

COLOUR = {"win": "green", "refused": "dim"}


def show_start(
    console: Console,
    target: Target,
    key: DeviceKey,
    environment: Environment,
    *,
    cells: int,
    resumed: int,
    missing: str,
) -> None:
    """What is measured and on what. missing: peers that do not race."""
    tp = f", TP {target.tp}" if target.tp > 1 else ""
    shapes = f"{len(target.sites)} shape{'s' * (len(target.sites) != 1)}"
    console.print(Text.assemble((target.name, "bold"), f"{tp}: {shapes}, {cells} cells on {key}"), soft_wrap=True)
    facts = (environment.gpu, f"driver {environment.driver}", f"torch {environment.torch}", environment.dsl)
    console.print(Text(", ".join(filter(None, facts)), "dim"), soft_wrap=True)
    if resumed:
        console.print(Text(f"resumed: {resumed} cells are there already"))
    for note in filter(None, (*target.notes, missing)):
        console.print(Text(note, "dim"), soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Something that may spoil numbers."""
    console.print(Text(f"warning: {text}", "yellow"), soft_wrap=True)


def table(cells: Iterable[Cell], waiting: Sequence[str]) -> Table:
    """A row per cell: cold medians in microseconds. waiting: ids whose verdict is not final."""
    title = "cold L2, microseconds per call (median)"
    found = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    found.add_column("shape", overflow="fold")
    found.add_column("M", justify="right", no_wrap=True)
    found.add_column("config", overflow="fold", ratio=1)
    for name in ("cublas", "ours", "gain"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    before = ""
    for cell in cells:
        shape = f"{cell.id.rpartition('/')[0]} ({cell.n}, {cell.k})"
        e = cell.evidence
        verdict = Text("open" if cell.id in waiting else cell.status, COLOUR.get(cell.status, ""))
        ahead = "*" if e.peer_ahead else ""
        found.add_row(
            Text("" if shape == before else shape), str(cell.m), Text(str(cell.kernel_config)),
            f"{e.baseline.p50:.2f}", f"{e.candidate.p50:.2f}", f"{e.speedup:.3f}x{ahead}", verdict,
        )  # fmt: skip
        before = shape
    return found


def show_cells(console: Console, plan: Plan, waiting: Sequence[str], failed: Mapping[str, str]) -> None:
    """The table, why cells were refused, and what went wrong."""
    if plan.cells:
        console.print(table(plan.cells, waiting))
    if any(cell.evidence.peer_ahead for cell in plan.cells):
        console.print(Text("* a peer is faster beyond the spread; the plan names it", "dim"))
    for cell in plan.cells:
        if cell.why:
            said = "open" if cell.id in waiting else "refused"
            console.print(Text.assemble((said, "bold"), f": {cell.id}: {cell.why}"))
    for name, why in failed.items():
        console.print(Text.assemble(("not measured", "red"), f": {name}: {why}"))
    clocks = [mhz for cell in plan.cells for mhz in cell.evidence.clock_mhz or ()]
    if drift(clocks) > DRIFT:
        text = (
            f"the SM clock drifted by {drift(clocks):.0%} ({min(clocks)} to {max(clocks)} MHz): measure again, cooler"
        )
        warn(console, text)


def show_unmeasured(console: Console, names: Sequence[str], why: str) -> None:
    """Cells that are still to do."""
    if not names:
        return
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    console.print(Text(f"{why}: {len(names)} cells not measured: {', '.join(names[:8])}{more}", "yellow"))


def show_explanation(console: Console, target: Target, out: Path, key: DeviceKey, ms: Sequence[int]) -> None:
    """What `skinny explain` says with this plan; for shapes that belong to no package, where they count."""
    settings = env.settings()
    by_user = in_user_folder(out)
    prefix = "" if by_user else f"SKINNY=plan={out} "
    if not by_user:
        settings = replace(settings, plans=(str(out), *settings.plans))
    if not target.models:
        where = "every process of yours" if by_user else f"processes with {prefix.strip()}"
        console.print(Text(f"its cells count for these shapes in every model, in {where}"), soft_wrap=True)
        return
    rows = ",".join(map(str, ms))
    tp = f" --tp {target.tp}" if target.tp > 1 else ""
    console.print(Text(f"{prefix}skinny explain {target.name}{tp} -M {rows} will say:", "bold"), soft_wrap=True)
    (model,) = target.models
    said = explain(target.name, model.package, model.config, tp=target.tp, key=key, ms=ms, settings=settings)
    for m in ms:
        lines = [line for line in said.lines if line.m == m and not line.part_of]
        running = [line.projection for line in lines if line.runs]
        names = ", ".join(running) or "none"
        console.print(f"  M={m:<2} {len(running)} of {len(lines)} projections run a kernel ({names}), saves "
                      f"{said.saving_us(m):.1f} us per step")  # fmt: skip


def in_user_folder(out: Path) -> bool:
    """Whether hosts read this file by themselves."""
    try:
        return out.suffix == ".toml" and out.resolve().parent == env.user_plan_folder().resolve()
    except OSError:
        return False
