"""The race of a replay: the tuner's own (`tuning.measure`) with one candidate, the cell's config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import KernelRefusedError
from skinny_core.plan import Cell, Environment, Plan
from skinny_core.problem import DType, Epilogue
from skinny_lab.bench import contestants, machine, race, tuning
from skinny_lab.output import one_line
from skinny_lab.replay.rule import Judgement, Outcome, judge
from skinny_lab.replay.spread import Speedup


@dataclass(frozen=True, slots=True)
class Replayed:
    """One cell, as a row of the CSV. status: the plan's; outcome: a value of `rule.Outcome`; note: why.

    cold_*, hot_*: speed-ups over the baseline, then (medians of the plan) and now with the ends of the spread. ours_*,
    base_*: microseconds per call now. None where nothing was measured. sm_mhz_*: SM clock in MHz, 0 unknown.
    peer_ahead_*: fastest peer beyond the spread, or "". plan_key, key: slugs of the plan's device and of this one.
    """

    cell: str
    n: int
    k: int
    m: int
    config: str
    status: str
    outcome: str
    note: str
    cold_then: float
    cold_now: float | None
    cold_low: float | None
    cold_high: float | None
    hot_then: float | None
    hot_now: float | None
    hot_low: float | None
    hot_high: float | None
    ours_p20: float | None
    ours_p50: float | None
    ours_p80: float | None
    base_p20: float | None
    base_p50: float | None
    base_p80: float | None
    ours_hot_p50: float | None
    base_hot_p50: float | None
    rel_rmse: float | None
    rounds: int
    sm_mhz_then: int
    sm_mhz_low: int
    sm_mhz_high: int
    peer_ahead_then: str
    peer_ahead_now: str
    family: str
    digest: str
    plan_key: str
    key: str
    gpu: str
    driver: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells of a replay share."""

    plan: Plan
    key: DeviceKey
    environment: Environment
    peers: tuning.PeerMaker | None


def why_left_out(cell: Cell) -> str:
    """Why a cell is not for this race at all, or ""."""
    if cell.status == "reported":
        return "reported: measured by others, elsewhere"
    if cell.epilogue is not Epilogue.NONE:
        return f"epilogue {cell.epilogue.value}: the race has plain products only"
    if cell.evidence.baseline_name != contestants.BASELINE:
        return f"its baseline {cell.evidence.baseline_name} is not in the race"
    return ""


def run(setting: Setting, cells: Sequence[Cell]) -> Iterator[Replayed]:
    """Measure each cell; those of one shape follow each other. A cell that fails is told, the others go on.

    Where the device itself no longer answers, the cells behind it are told as failed without being tried.
    """
    by_shape: dict[tuple[int, int, DType], list[Cell]] = {}
    for cell in cells:
        by_shape.setdefault((cell.n, cell.k, cell.activation), []).append(cell)
    dead = ""
    for (n, k, dtype), group in by_shape.items():
        arena: race.Arena | None = None
        for cell in group:
            if dead:
                yield _failed(setting, cell, f"the device stopped answering at {dead}")
                continue
            try:
                if arena is None:
                    arena = race.Arena(n, k, dtype.torch, setting.key.l2_bytes)
                yield _measure(setting, arena, cell)
            except Exception as error:  # one cell's failure, of whatever kind, must not lose the cells behind it
                yield _failed(setting, cell, one_line(error))
                dead = "" if machine.alive() else cell.id
        del arena
        if not dead:
            torch.cuda.empty_cache()


def _measure(setting: Setting, arena: race.Arena, cell: Cell) -> Replayed:
    refusal = kernels.refuses(cell.kernel_config, cell.problem(setting.key), cell.m)
    if refusal:  # on another device than the plan's
        raise KernelRefusedError(f"{cell.kernel_config} cannot run on this device: {refusal}", "tune here")
    problem, config = cell.problem(None), cell.kernel_config
    found = tuning.measure(arena, problem, cell.m, configs=[config], peers=setting.peers)
    base, ours = contestants.BASELINE, str(config)
    cold = Speedup.of(found.cold[base], found.cold[ours])
    hot = Speedup.of(found.hot[base], found.hot[ours])
    peers = {name: times for name, times in found.cold.items() if name not in (base, ours)}
    return replace(
        _row(setting, cell, judge(cell, cold, hot)),
        cold_now=round(cold.mid, 4), cold_low=round(cold.low, 4), cold_high=round(cold.high, 4),
        hot_now=round(hot.mid, 4), hot_low=round(hot.low, 4), hot_high=round(hot.high, 4),
        ours_p20=found.cold[ours].p20, ours_p50=found.cold[ours].p50, ours_p80=found.cold[ours].p80,
        base_p20=found.cold[base].p20, base_p50=found.cold[base].p50, base_p80=found.cold[base].p80,
        ours_hot_p50=found.hot[ours].p50, base_hot_p50=found.hot[base].p50,
        rel_rmse=round(found.rel_rmse, 6), rounds=found.ours.rounds,
        sm_mhz_low=found.clocks[0], sm_mhz_high=found.clocks[1],
        peer_ahead_now=tuning.peer_ahead(found.ours, peers),
    )  # fmt: skip


def _failed(setting: Setting, cell: Cell, why: str) -> Replayed:
    return _row(setting, cell, Judgement(Outcome.FAILED, why))


def _row(setting: Setting, cell: Cell, said: Judgement) -> Replayed:
    """Everything that is known without a clock."""
    e, environment = cell.evidence, setting.environment
    hot_then = None
    if e.baseline_hot is not None and e.candidate_hot is not None:
        hot_then = round(e.baseline_hot.p50 / e.candidate_hot.p50, 4)
    return Replayed(
        cell=cell.id, n=cell.n, k=cell.k, m=cell.m, config=str(cell.kernel_config), status=cell.status,
        outcome=said.outcome.value, note=said.note,
        cold_then=round(e.speedup, 4), cold_now=None, cold_low=None, cold_high=None,
        hot_then=hot_then, hot_now=None, hot_low=None, hot_high=None,
        ours_p20=None, ours_p50=None, ours_p80=None, base_p20=None, base_p50=None, base_p80=None,
        ours_hot_p50=None, base_hot_p50=None, rel_rmse=None, rounds=0,
        sm_mhz_then=min(e.clock_mhz) if e.clock_mhz else 0, sm_mhz_low=0, sm_mhz_high=0,
        peer_ahead_then=e.peer_ahead, peer_ahead_now="",
        family=setting.plan.family, digest=setting.plan.digest, plan_key=setting.plan.key.slug, key=setting.key.slug,
        gpu=environment.gpu, driver=environment.driver, torch=environment.torch, commit=environment.commit,
        date=environment.date,
    )  # fmt: skip
