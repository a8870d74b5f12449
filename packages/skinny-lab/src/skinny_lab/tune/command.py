"""`skinny tune`: what is asked for, where the plan goes, the exit status."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from skinny_core import device, env, kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import KernelUnavailableError
from skinny_lab import output
from skinny_lab.explain.target import RequestError, find_rows
from skinny_lab.tune import request

if TYPE_CHECKING:
    from skinny_lab.bench.entrants import Entrant

DONE, FAILED, BUDGET = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Options:
    """Of the command line. rows: text of -M, "" for all. budget: seconds. kernels: entrants as text, none for all."""

    rows: str = ""
    budget: float = 120.0
    out: Path | None = None
    kernels: Sequence[str] = ()
    peer_folder: Path | None = None
    resume: bool = False
    force: bool = False


def run(target: request.Target, options: Options) -> int:
    """Measure and write. Returns 0 where every cell was decided, 3 where the budget ended first, 1 where a cell failed
    or somebody interrupted. Raises `RequestError`, or `KernelUnavailableError` without a CUDA device.
    """
    ms = find_rows(options.rows) if options.rows else None
    if options.budget <= 0:
        raise RequestError(f"--time-budget {options.budget:g}", "give seconds above 0")
    if options.peer_folder is not None and not (options.peer_folder / "skinny_gemm.py").is_file():
        raise RequestError(f"{options.peer_folder} holds no skinny_gemm.py", "give the folder of vLLM's kernels")
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("tuning needs a CUDA device, and torch sees none", "run on the machine it is for")
    out = options.out or default_path(target, key)

    from skinny_lab.bench import entrants as racing
    from skinny_lab.bench import machine, model_plan
    from skinny_lab.bench.peers import peer_maker
    from skinny_lab.tune import order, result, view
    from skinny_lab.tune.run import Session, Settings, undone
    from skinny_lab.tune.store import Store, partial_path

    try:
        entrants = tuple(racing.Entrant.parse(text) for text in options.kernels) or racing.DEFAULT
    except ValueError as error:
        raise RequestError(f"--kernels: {error}", "write bf16_mma or bf16_simt:1-4") from None
    entrants, absent = available(entrants)
    cells = order.order(target.sites, ms)
    _must_be_accepted(cells, entrants, key)
    partial = partial_path(out)
    check_out(out, partial, resume=options.resume, force=options.force)
    store = Store(partial, target, key, machine.environment())
    resumed = store.read() if options.resume else 0
    console = output.console()
    peers = peer_maker(options.peer_folder)
    view.show_start(
        console, target, key, store.environment, cells=len(cells), resumed=resumed, missing=peers.said()
    )  # fmt: skip
    for stem, why in absent.items():
        view.warn(console, f"{stem} does not race: {why}")
    ended = "interrupted"
    with _progress(console) as progress:
        task = progress.add_task("", total=len(cells))

        def step(text: str) -> None:
            progress.update(task, description=text, completed=len(cells) - len(list(undone(cells, store))))

        session = Session(
            target, cells, Settings(options.budget, entrants, peers=peers, folder=options.peer_folder), store, key,
            say=lambda text: view.warn(console, text), step=step,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):  # everything before the cell that it was in is in the store
            ended = session.run()
    found = result.make(target, store)
    if found.plan.cells:
        model_plan.save(found.plan, out)
    wanted = {result.cell_id(site.name, m) for site, m in cells}
    left = [name for name in undone(cells, store) if name not in session.failed]
    waiting = [name for name in found.open if name in wanted]
    view.show_cells(console, found.plan, waiting, session.failed)
    view.show_unmeasured(console, left, WHY.get(ended, ended))
    if session.busy:
        view.warn(console, f"{session.busy} other process(es) used this GPU meanwhile: times may be wrong")
    if found.plan.cells:
        console.print(Text.assemble("plan: ", (str(out), "bold"), f", {len(found.plan.cells)} cells"), soft_wrap=True)
        view.show_explanation(console, target, out, key, sorted({m for _, m in cells}))
    failed = any(not why.startswith(NOT_OURS) for why in session.failed.values())
    if ended == "done" and not left and not waiting and not failed:
        if not found.open:  # those of an earlier run over other M wait for their decode step
            partial.unlink(missing_ok=True)
        return DONE
    if partial.exists():
        console.print(Text(f"go on with the same command and --resume; measurements: {partial}"), soft_wrap=True)
    return BUDGET if ended == "budget" else FAILED


NOT_OURS = "no kernel accepts it"
"""Such a cell is decided: the original call runs."""
WHY = {
    "budget": "the time budget ended",
    "device": "the device stopped answering",
    "interrupted": "interrupted",
    "done": "left out",
}


def available(entrants: Sequence[Entrant]) -> tuple[tuple[Entrant, ...], dict[str, str]]:
    """The entrants whose kernel can be compiled here, and why the others cannot. Raises `KernelUnavailableError` where
    none can."""
    states = {entrant.stem: kernels.get(entrant.stem).availability() for entrant in entrants}
    absent = {stem: " ".join(why.split()) for stem, (usable, why) in states.items() if not usable}
    found = tuple(entrant for entrant in entrants if entrant.stem not in absent)
    if not found:
        what = f"no kernel can be compiled here: {next(iter(absent.values()))}"
        raise KernelUnavailableError(what, "pip install 'skinny-core[cute]', see `skinny doctor`")
    return found, absent


def default_path(target: request.Target, key: DeviceKey) -> Path:
    """Below the user plan folder: "qwen3-8b-tp2-h200.toml"."""
    try:
        return env.user_plan_folder() / f"{target.stem}-{device.product_name(key) or key.slug}.toml"
    except OSError as error:
        raise RequestError(f"no user plan folder: {error}", "name a file with --out") from None


def check_out(out: Path, partial: Path, *, resume: bool, force: bool) -> None:
    """Raise `RequestError` now if the plan could not be written, or would replace what somebody wants to keep."""
    if resume and force:
        raise RequestError("--resume and --force", "go on with --resume, or begin anew with --force")
    if out.is_dir():
        raise RequestError(f"{out} is a folder", "name a file in it with --out")
    if partial.exists() and not (resume or force):
        raise RequestError(f"{partial} is of a run that did not end", "go on with --resume, or begin anew with --force")
    if out.exists() and not (force or (resume and partial.exists())):
        raise RequestError(f"{out} exists already", "name another file with --out, or overwrite it with --force")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror}", "give another --out") from None


def _must_be_accepted(cells: Sequence[tuple[request.Site, int]], entrants: Sequence[Entrant], key: DeviceKey) -> None:
    """Raise where no kernel takes any cell, on a GPU that nothing was written for say."""
    from skinny_lab.tune.order import accepted

    why = ""
    for site, m in cells:
        found, refusal = accepted(entrants, site.problem, m, key)
        if found:
            return
        why = why or refusal
    what = f"no kernel accepts any of these shapes on {key}"
    raise RequestError(
        f"{what}{': ' + why if why else ''}", "docs/devices.md lists GPUs; the original calls keep running"
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
