"""Re-measure planned cells: the cell's config, cuBLAS and peers in one race, cold and hot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from skinny_core import device
from skinny_core.errors import KernelRefusedError, KernelUnavailableError, SkinnyError
from skinny_core.plan import Cell, Environment, Plan
from skinny_core.problem import DType, Epilogue
from skinny_lab.bench import contestants, machine, race, tuning
from skinny_lab.bench.rows import OURS, Row

ROUNDS = 15


def run(
    cells: Sequence[tuple[Plan, Cell]],
    *,
    peers: tuning.PeerMaker | None = None,
    rounds: int = ROUNDS,
    hot: bool = True,
    progress: Callable[[Cell], None] = lambda _: None,
    failed: Callable[[Cell, SkinnyError], None] | None = None,
) -> list[Row]:
    """Rows for every cell that has a kernel of ours, on the current device.

    failed: called with a cell that cannot be measured and its error; the others go on. Without it the error is raised:
    `NumericsError` for wrong results (no speed of it is reported), `KernelRefusedError` for a residual. Raises
    `KernelUnavailableError` without a CUDA device.
    """
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("measuring needs a CUDA device", "run on the machine the plan is for")
    environment = machine.environment()
    rows: list[Row] = []
    by_shape: dict[tuple[int, int, DType], list[Cell]] = {}
    for _, cell in cells:
        if cell.status != "reported":
            by_shape.setdefault((cell.n, cell.k, cell.activation), []).append(cell)
    for (n, k, dtype), group in by_shape.items():
        arena = race.Arena(n, k, dtype.torch, key.l2_bytes)
        for cell in group:
            try:
                rows += _measure(arena, cell, peers, rounds, hot, environment)
            except SkinnyError as error:
                if failed is None:
                    raise
                failed(cell, error)
            progress(cell)
        del arena
        torch.cuda.empty_cache()
    return rows


def planned_rows(plan: Plan) -> list[Row]:
    """The measurements that a plan already carries, as rows."""
    rows: list[Row] = []
    for cell in plan.cells:
        e = cell.evidence
        named = [(OURS, "cold", e.candidate), (e.baseline_name, "cold", e.baseline)]
        named += [(OURS, "hot", e.candidate_hot), (e.baseline_name, "hot", e.baseline_hot)]
        for provider, state, q in named:
            if q is not None:
                times = race.Times(q.p20, q.p50, q.p80, e.rounds)
                rows.append(_row(cell, provider, state, times, plan.environment))
        for name, p50 in e.peers.items():  # a plan keeps no spread of a peer
            rows.append(_row(cell, name, "cold", race.Times(p50, p50, p50, e.rounds), plan.environment, spread=False))
    return rows


def _measure(
    arena: race.Arena, cell: Cell, peers: tuning.PeerMaker | None, rounds: int, hot: bool, environment: Environment
) -> Iterable[Row]:
    problem = cell.problem(None)
    if problem.epilogue is not Epilogue.NONE:
        raise KernelRefusedError(
            f"cell {cell.id} has the epilogue {problem.epilogue.value}", "bench measures plain products only"
        )
    rivals: Mapping[str, race.Run] = peers(problem, cell.m) if peers else {}
    runs = {
        OURS: contestants.ours(cell.kernel_config, problem, cell.m),
        contestants.BASELINE: contestants.cublas(),
        **rivals,
    }
    failed: dict[str, str] = {}
    errors = tuning.check(arena, problem, cell.m, runs, failed=failed)
    rivals = tuning.right_rivals(rivals, errors, problem)
    if not errors[OURS] <= tuning.TOLERANCE[problem.output.torch]:
        raise tuning.NumericsError(
            f"cell {cell.id}: {failed.get(OURS) or f'rel-RMSE {errors[OURS]:.2e}'}, so that its speed means nothing",
            "switch it off (SKINNY=off) and report it with the output of `skinny doctor`",
        )
    out = problem.output.torch
    runs = {name: run for name, run in runs.items() if name in rivals or name in (OURS, contestants.BASELINE)}
    for name, times in race.race(arena, cell.m, runs, rounds=rounds, out=out).items():
        yield _row(cell, name, "cold", times, environment)
    if hot:
        pair = {name: runs[name] for name in (OURS, contestants.BASELINE)}
        for name, times in race.race(arena, cell.m, pair, rounds=rounds, hot=True, out=out).items():
            yield _row(cell, name, "hot", times, environment)


def _row(
    cell: Cell, provider: str, state: str, times: race.Times, environment: Environment, *, spread: bool = True
) -> Row:
    ours = provider == OURS
    return Row(
        kind="cell",
        what=cell.id.rsplit("/M", 1)[0],
        n=cell.n,
        k=cell.k,
        m=cell.m,
        provider=provider,
        config=str(cell.kernel_config) if ours else "",
        state=state,
        status=cell.status if ours else "",
        unit="us",
        p20=times.p20 if spread else None,
        p50=times.p50,
        p80=times.p80 if spread else None,
        rounds=times.rounds,
        device=environment.gpu,
        driver=environment.driver,
        torch=environment.torch,
        commit=environment.commit,
        date=environment.date,
    )
