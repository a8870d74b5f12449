"""`skinny replay`: which cells, on which device, into which file; the exit status."""

from __future__ import annotations

import difflib
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from skinny_core import device
from skinny_core.errors import KernelUnavailableError
from skinny_core.plan import Cell, Plan
from skinny_lab import output, plans
from skinny_lab.explain.target import RequestError
from skinny_lab.replay import view

COMPILE_SECONDS = 600.0
"""What is not compiled by then is compiled when it is raced."""
WRITE_SECONDS = 2.0
"""Between two writings of the CSV: it has a thousand rows, and a cell takes a tenth of a second."""


def run(
    text: str, *, cells: Sequence[str], out: Path | None, peer_folder: Path | None, require: float, any_device: bool
) -> int:
    """Replay a plan on this machine's GPU. cells: ids or patterns, none for all. require: percent of verdicts.

    Returns 0 where at least `require` percent hold, 1 where fewer do or the run was interrupted. Raises `RequestError`,
    `PlanError`, or `KernelUnavailableError` without a CUDA device.
    """
    key = device.current_key()
    path, plan = plans.open_plan(text, key)
    chosen = select(plan, cells, str(path))
    if peer_folder is not None and not (peer_folder / "skinny_gemm.py").is_file():
        raise RequestError(f"{peer_folder} holds no skinny_gemm.py", "give the folder of vLLM's cute_dsl kernels")
    if key is None:
        raise KernelUnavailableError("measuring needs a CUDA device", "run on the machine the plan is for")
    if key != plan.key and not any_device:
        raise RequestError(
            f"{path} is for {plan.key}, this is {key}",
            "measure on the device of the plan, or go on with --any-device: the results then say so",
        )
    if out is not None:
        _must_be_writable(out)

    from skinny_lab.bench import machine, prepare, rows
    from skinny_lab.bench.peers import peer_maker
    from skinny_lab.replay import measure

    console = output.console()
    left_out = {cell.id: why for cell in chosen if (why := measure.why_left_out(cell))}
    racing = [cell for cell in chosen if cell.id not in left_out]
    if not racing:
        first, why = next(iter(left_out.items()))
        raise RequestError(f"no cell to measure: {first}: {why}", "choose `win` or `refused` cells")
    peers = peer_maker(peer_folder)
    environment, gpu = machine.environment(), machine.gpu()
    view.show_start(console, path, plan, key, environment, others=gpu.others, missing=peers.said())
    found: list[measure.Replayed] = []
    interrupted, written = False, -WRITE_SECONDS
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("compiling", total=len(racing))
            jobs = [(cell.kernel_config, cell.problem(None), cell.m) for cell in racing]
            prepare.compile_all(jobs, key, COMPILE_SECONDS)
            for row in measure.run(measure.Setting(plan, key, environment, peers), racing):
                found.append(row)
                progress.update(task, advance=1, description=row.cell)
                if out is not None and time.monotonic() - written > WRITE_SECONDS:  # a killed run loses no more
                    rows.write_table(out, measure.Replayed, found)
                    written = time.monotonic()
    except KeyboardInterrupt:
        interrupted = True
    place = {cell.id: i for i, cell in enumerate(racing)}
    found.sort(key=lambda row: place[row.cell])
    if out is not None and found:
        rows.write_table(out, measure.Replayed, found)
    enough = view.show_end(
        console, found, left_out, require=require, asked=len(racing), interrupted=interrupted, out=out
    )
    return 0 if enough and not interrupted else 1


def select(plan: Plan, wanted: Sequence[str], where: str) -> list[Cell]:
    """The cells of these ids or shell patterns ("qwen3-8b/*"), all without any, in the plan's order.

    Raises `RequestError` for one that names no cell, with the ids that are like it.
    """
    ids = [cell.id for cell in plan.cells]
    chosen: set[str] = set()
    for pattern in wanted:
        named = {name for name in ids if fnmatchcase(name, pattern)}
        if not named:
            like = difflib.get_close_matches(pattern, ids, 3, 0.3) or ids[:3]
            raise RequestError(f"{where} has no cell {pattern!r}", f"use an id of the plan, such as {', '.join(like)}")
        chosen |= named
    return [cell for cell in plan.cells if not wanted or cell.id in chosen]


def _must_be_writable(path: Path) -> None:
    """Raise `RequestError` now rather than after minutes of measuring."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}", "give another --out") from None
