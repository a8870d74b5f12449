"""`skinny bench`: time planned cells against the call they replace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from skinny_core import device, env, family, table
from skinny_core.device import DeviceKey
from skinny_core.errors import KernelUnavailableError, SkinnyError
from skinny_core.plan import Cell, Plan, load
from skinny_lab.bench.rows import OURS, Row
from skinny_lab.explain.target import RequestError, find_rows

app = typer.Typer(
    add_completion=False, no_args_is_help=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


@app.command(name="skinny bench")
def bench(
    models: Annotated[
        list[str] | None, typer.Argument(help="Packaged configs ('qwen3-8b') to restrict to; default: all.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file; default: every plan found for this device.")] = None,
    rows: Annotated[str, typer.Option("-M", help="Values of M, such as 1,2 or 1-4.")] = "1-16",
    out: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    cold_only: Annotated[bool, typer.Option("--cold-only", help="Skip the hot-L2 race.")] = False,
    peer_folder: Annotated[
        Path | None, typer.Option(help="Folder with vLLM's skinny_gemm.py, if vLLM lacks it.")
    ] = None,
) -> None:
    """Time planned cells: ours, cuBLAS and the peers that can be loaded, in one race with rotated order.

    Weights are rotated through more than three times the L2, every call is a CUDA-graph replay behind a small
    elementwise kernel whose time is subtracted. Median of 15 rounds; nothing is printed for a cell with wrong results.
    """
    from skinny_lab.bench import cells as measured
    from skinny_lab.bench.peers import peer_maker

    console = Console()
    wanted = find_rows(rows)
    if peer_folder is not None and not (peer_folder / "skinny_gemm.py").is_file():
        raise RequestError(f"{peer_folder} holds no skinny_gemm.py", "give the folder of vLLM's cute_dsl kernels")
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("measuring needs a CUDA device", "run on the machine the plan is for")
    chosen = [(p, c) for p, c in find_cells(plan, models or [], key) if c.m in wanted]
    if not chosen:
        raise RequestError("no planned cell for this device, these models and M", "see `skinny doctor` for plans found")
    if out is not None:
        _must_be_writable(out)
    failures: list[str] = []
    peers = peer_maker(peer_folder)
    if peers.missing:
        console.print(peers.said(), style="dim", markup=False)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(chosen))

        def step(cell: Cell) -> None:
            progress.update(task, advance=1, description=cell.id)

        def failed(cell: Cell, error: SkinnyError) -> None:
            failures.append(f"{cell.id}: {error}")

        result = measured.run(chosen, peers=peers, hot=not cold_only, progress=step, failed=failed)
    if result:
        console.print(result_table(result))
    if out is not None:
        from skinny_lab.bench.rows import write_csv

        write_csv(out, result)
        console.print(f"{len(result)} rows in {out}")
    for failure in failures:
        console.print(f"not measured: {failure}", style="red", markup=False)
    if failures:
        raise typer.Exit(1)


def find_cells(path: Path | None, models: list[str], key: DeviceKey) -> list[tuple[Plan, Cell]]:
    """Cells of a file, or of every plan measured on device `key`, restricted to those some named config uses; without
    reported ones, whose kernel need not be ours."""
    if path is not None:
        try:
            plans = [load(path)]
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror}", "give the path of a plan file") from None
        if plans[0].key != key:
            raise RequestError(f"{path} is for {plans[0].key}, this is {key}", "measure on the device of the plan")
    else:
        packages = family.discover().packages
        tables = [table.build(p.name, p, env.settings()) for p in packages]
        plans = [s.plan for t in tables for s in t.sources if s.plan.key == key]
    used = [(p, c) for p in plans for c in p.cells if c.status != "reported"]
    if not models:
        return used
    known = {name for p in family.discover().packages for name in p.configs}
    for model in models:
        if model not in known:
            raise RequestError(f"unknown model {model!r}", f"use one of: {', '.join(sorted(known))}")
    return [(p, c) for p, c in used if any(user.split("/")[0] in models for user in c.used_by)]


def _must_be_writable(path: Path) -> None:
    """Raise `RequestError` now rather than after minutes of measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}", "give another --out") from None


def result_table(rows: list[Row]) -> Table:
    """One line per cell: medians of all providers (cold), the ratio to cuBLAS cold and hot."""
    found = Table(title="cold L2, microseconds per call (median)")
    providers = [p for p in dict.fromkeys(r.provider for r in rows) if p not in (OURS, "cublas")]
    for name in ("cell", "M", "cublas", *providers, OURS, "x cold", "x hot"):
        found.add_column(name, justify="left" if name == "cell" else "right", overflow="fold")
    points: dict[tuple[str, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        points.setdefault((row.what, row.m), {})[row.provider, row.state] = row
    for (what, m), at in points.items():
        ours, base = at[OURS, "cold"], at["cublas", "cold"]
        hot = at.get((OURS, "hot")), at.get(("cublas", "hot"))
        others = [f"{at[p, 'cold'].p50:.2f}" if (p, "cold") in at else "" for p in providers]
        ratio = f"{hot[1].p50 / hot[0].p50:.3f}" if hot[0] and hot[1] else ""
        found.add_row(what, str(m), f"{base.p50:.2f}", *others, f"{ours.p50:.2f}", f"{base.p50 / ours.p50:.3f}", ratio)
    return found


def main(arguments: list[str]) -> int:
    """Run with arguments; returns the exit status. Errors of this project propagate to the `skinny` command."""
    try:
        app(arguments, standalone_mode=False, prog_name="skinny bench")
    except typer.Exit as stop:
        return stop.exit_code
    except SkinnyError:
        raise
    return 0
