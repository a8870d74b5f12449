"""Measure a model's projections at one TP size and write its plan; also the quick plan of the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from skinny_core import device, dispatch, plan
from skinny_core.errors import KernelUnavailableError
from skinny_core.family import ModelPackage, Projection
from skinny_core.kernels import get
from skinny_core.plan import Cell, Plan
from skinny_core.problem import DType, KernelConfig, Problem
from skinny_lab import plans
from skinny_lab.bench import contestants, decode_step, machine, race, tuning
from skinny_lab.bench.entrants import DEFAULT, Entrant

Progress = Callable[[str], None]


def tune_models(
    package: ModelPackage,
    names: Sequence[str],
    ms: Iterable[int],
    *,
    peers: tuning.PeerMaker | None,
    progress: Progress,
    commit: str = "",
    entrants: Sequence[Entrant] = DEFAULT,
) -> Plan:
    """A plan for the fused projections of named configs at TP 1 on the current device, every (N, K) measured once.

    Raises `KernelUnavailableError` without a CUDA device.
    """
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("tuning needs a CUDA device", "run on the machine you want a plan for")
    shapes: dict[tuple[int, int], list[tuple[str, Projection]]] = {}
    for name in names:
        for projection in package.projections(package.configs[name], 1):
            if not projection.part_of:
                shapes.setdefault((projection.n, projection.k), []).append((name, projection))
    ms = tuple(ms)
    count = tuning.prepare_all(((tuning.problem_of(n, k), m) for n, k in shapes for m in ms), entrants)
    progress(f"compiled {count} candidates")
    found: list[tuple[tuning.Measured, list[tuple[str, Projection]]]] = []
    for (n, k), users in shapes.items():
        arena = race.Arena(n, k, torch.bfloat16, key.l2_bytes)
        for m in ms:
            measured = tuning.measure(arena, tuning.problem_of(n, k), m, entrants, peers=peers)
            found.append((measured, users))
            progress(_line(users, measured))
        del arena
        torch.cuda.empty_cache()
    in_model = _in_model(package, [f for f in found if f[0].m >= 3], progress)
    cells = []
    for measured, users in found:
        name, projection = users[0]
        used_by = tuple(f"{config}/{p.name}" for config, p in users)
        delta = in_model.get((measured.problem, measured.m))
        cells.append(tuning.cell(measured, f"{name}/{projection.name}/M{measured.m}", used_by, delta))
    return plans.hold_back(make_plan(package.name, cells, commit=commit))[0]


def make_plan(family: str, cells: Iterable[Cell], *, commit: str = "") -> Plan:
    """A plan of cells measured here and now."""
    key = device.current_key()
    assert key is not None
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    product = device.product_name(key) or key.slug
    return Plan(
        family=family, product=product, device=table, environment=machine.environment(commit=commit), cell=tuple(cells)
    )


def quick_plan(shapes: Iterable[tuple[int, int]], ms: Iterable[int], *, family: str = "demo") -> Plan:
    """Race a handful of configs per shape [N, K] on the current device and keep what passes the keep rule.

    For the demo: few configs, no peers, M <= 2 only (a larger M would need an in-model check).
    """
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("a quick plan needs a CUDA device", "run on a machine with one")
    kernel = get("bf16_simt")
    cells = []
    for n, k in dict.fromkeys(shapes):
        arena = race.Arena(n, k, torch.bfloat16, key.l2_bytes)
        for m in ms:
            if m > 2:
                raise ValueError(f"M = {m}: a quick plan has no in-model check, so M is 1 or 2")
            problem = tuning.problem_of(n, k)
            few = [c for c in kernel.candidates(problem, m) if not kernel.params_of(c)["blocks_per_sm"]][::4][:6]
            configs = [KernelConfig.of("bf16_simt", kernel.params_of(c)) for c in few]
            measured = tuning.measure(arena, problem, m, configs=configs)
            cells.append(tuning.cell(measured, f"{family}/{n}x{k}/M{m}", (), None))
        del arena
    return make_plan(family, cells)


def save(found: Plan, path: Path) -> None:
    """Write the plan, sealed, atomically."""
    plan.dump(found, path)


def _in_model(
    package: ModelPackage, found: Sequence[tuple[tuning.Measured, list[tuple[str, Projection]]]], progress: Progress
) -> Mapping[tuple[Problem, int], float]:
    """Change of a captured decode step of the first model that uses each cell, in microseconds of the whole model."""
    deltas: dict[tuple[Problem, int], float] = {}
    groups: dict[tuple[str, int], list[tuple[tuning.Measured, Projection]]] = {}
    for measured, users in found:
        name, projection = users[0]
        groups.setdefault((name, measured.m), []).append((measured, projection))
    for (name, m), members in groups.items():
        config = package.configs[name]
        swaps = {projection.name: ((projection.name,), measured) for measured, projection in members}
        found_us = in_step(config, package.projections(config, 1), m, swaps)
        for measured, projection in members:
            delta = deltas[measured.problem, m] = found_us[projection.name]
            progress(f"{name}/{projection.name} M={m} in a decode step: {delta:+.1f} us")
    return deltas


def has_step(projections: Iterable[Projection]) -> bool:
    """Whether a decode step can be made of a model's projections: all those of a dense decoder are there."""
    return set(decode_step.PROJECTIONS) <= {p.name for p in projections if not p.part_of}


def in_step(
    config: Mapping[str, Any],
    projections: tuple[Projection, ...],
    m: int,
    swaps: Mapping[str, tuple[Sequence[str], tuning.Measured]],
    *,
    tp: int = 1,
) -> dict[str, float]:
    """Change of a captured decode step of one rank, in microseconds of the whole model, per swap.

    swaps: name -> (the projections, all of one shape, that run the measured config instead, the measurement). tp: of
    `projections`; the step has the rank's heads and no all-reduce.
    """
    step = decode_step.DecodeStep(rank_config(config, tp), projections, m)
    arms: dict[str, dict[str, decode_step.Linear]] = {"original": {}}
    for name, (swapped, measured) in swaps.items():
        arms[name] = dict.fromkeys(swapped, _as_linear(measured))
    times = step.compare(arms, rounds=tuning.LONG_ROUNDS)
    found = {name: (times[name] - times["original"]) * step.scale(names[0]) for name, (names, _) in swaps.items()}
    del step
    torch.cuda.empty_cache()
    return found


def rank_config(config: Mapping[str, Any], tp: int) -> Mapping[str, Any]:
    """The config with the attention heads of one of `tp` ranks."""
    size = decode_step.Dimensions.of(config)
    return config if tp == 1 else {
        **config, "head_dim": size.head_dim, "num_attention_heads": size.heads // tp,
        "num_key_value_heads": max(1, size.kv_heads // tp),
    }  # fmt: skip


def _as_linear(measured: tuning.Measured) -> decode_step.Linear:
    run = contestants.ours(measured.config, measured.problem, measured.m)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0], w.shape[0])
        run(x, w, y)
        return y

    return linear


def _line(users: list[tuple[str, Projection]], found: tuning.Measured) -> str:
    name, projection = users[0]
    base = found.cold[contestants.BASELINE].p50
    rivals = " ".join(f"{n} {t.p50:.2f}" for n, t in found.cold.items() if n not in (str(found.config), "cublas"))
    return (
        f"{name}/{projection.name} M={found.m}: cublas {base:.2f} {rivals} ours {found.ours.p50:.2f} us"
        f" ({base / found.ours.p50:.3f}x) {found.config}"
    )


def warm_models(package: ModelPackage, names: Sequence[str], ms: Iterable[int]) -> dispatch.Activation:
    """Activate a package with a promise of static weights and make its cells ready."""
    from skinny_core import warmup

    state = dispatch.activate(package, static_weights=True)
    problems = [(p.n, p.k, DType.BF16) for name in names for p in package.projections(package.configs[name], 1)]
    warmup.warm(package.name, problems, ms)
    return state
