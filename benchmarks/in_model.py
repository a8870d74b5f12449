"""What kernels, fused epilogues and prefetching are worth in a decode step, together and each alone.

`python benchmarks/in_model.py --out DIR --model qwen3-8b --config bf16_mma:warps=8:parts=2:loads=2:unroll=2`

A captured step of a few layers and the LM head (`decode_step.py`), for every M in these arms:

    stock          torch for everything
    ours           every projection by the given config, by the fastest of the given ones where there are several
    ours again     the same once more: how far apart equal arms lie
    gated          ours, with SiLU-and-multiply in gate_up's kernel
    residual       ours, with the residual add in the kernels of o and down
    prefetch X     ours, with X MB of the next weight loaded on a side stream beside what lies between
    all X          everything together

`--prefetch 16 o=33,qkv=8`: MB (1e6 bytes) for every projection, or for the named ones; one arm each. Every arm's logits
are compared with stock's before a clock starts; a wrong arm is written down as wrong and not timed (exit status 1).
`--compiled` fuses adds with norms, and SiLU with its product, as hosts do: without it those two epilogues and the gaps
that a prefetch uses are worth more than they are in a host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from skinny_core import device, family, kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError
from skinny_core.family import Projection
from skinny_core.plan import Environment
from skinny_core.problem import Epilogue, KernelConfig, Problem
from skinny_core.testing import numerics
from skinny_lab.bench import contestants, decode_step, limit, machine, prepare, race, rows, tuning
from skinny_lab.bench.decode_step import LAYERS, PROJECTIONS, Arm

COMPILE_SECONDS = 300.0
QUICK_ROUNDS = 5
NOISE = 2.0
"""Two BF16 steps with independent roundings, each `noise` away from the FP32 step, are about 1.4 * noise apart."""


@dataclass(frozen=True, slots=True)
class Point:
    """One arm at one M. Times in microseconds, None for an arm that was not timed; layer: without the LM head, over the
    number of layers. rel_rmse: of its logits against stock's, allowed up to `allowed`."""

    model: str
    m: int
    arm: str
    status: str
    step_p20: float | None
    step_us: float | None
    step_p80: float | None
    layer_p20: float | None
    layer_us: float | None
    layer_p80: float | None
    rounds: int
    rel_rmse: float
    allowed: float
    layers: int
    context: int
    compiled: int
    configs: str
    device: str
    driver: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs at one M: the config of each projection, of the gated gate_up, and of o and down with a residual."""

    plain: Mapping[str, KernelConfig] = field(default_factory=dict)
    gated: KernelConfig | None = None
    added: Mapping[str, KernelConfig] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}={config}" for name, config in self.plain.items()]
        parts += [f"gated={self.gated}"] if self.gated else []
        return " ".join([*parts, *(f"{name}+residual={config}" for name, config in self.added.items())])


def prefetch_of(text: str) -> dict[str, int]:
    """Bytes by projection from "16" or "o=33,qkv=8", in MB; raises ValueError."""
    if "=" not in text:
        return dict.fromkeys(PROJECTIONS, int(float(text) * 1e6))
    pairs = [item.split("=") for item in text.split(",")]
    found = {name: int(float(mb) * 1e6) for name, mb in pairs}
    Arm(prefetch=found)  # raises for a name that is none
    return found


def problem_of(projection: Projection, epilogue: Epilogue = Epilogue.NONE) -> Problem:
    """The BF16 problem of a projection."""
    return replace(tuning.problem_of(projection.n, projection.k), epilogue=epilogue)


def forms(projection: Projection) -> list[Problem]:
    """Every problem that an arm may run for it."""
    extra = {"gate_up": Epilogue.SILU_MUL, "o": Epilogue.RESIDUAL, "down": Epilogue.RESIDUAL}.get(projection.name)
    return [problem_of(projection, epilogue) for epilogue in (Epilogue.NONE, extra) if epilogue is not None]


def call_of(config: KernelConfig, problem: Problem, m: int) -> Callable[..., torch.Tensor]:
    """`call(x, w)` or `call(x, w, residual)`, compiled or loaded now. The weights of a step never change, so that they
    may be read before the kernel in front has ended."""
    kernel = kernels.get(config.kernel)
    index = torch.cuda.current_device()
    launch = kernel.compile(kernel.config_from(dict(config.params)), problem, m, index=index, prewait=True)

    def call(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = x.new_empty(x.shape[0], problem.outputs, dtype=problem.output.torch)
        launch(x, w, y, residual, x.stride(0), y.stride(0), 0 if residual is None else residual.stride(0), True)
        return y

    return call


def choose(
    step: decode_step.DecodeStep,
    projections: Mapping[str, Projection],
    entrants: Sequence[limit.Entrant],
    m: int,
    key: DeviceKey,
    say: Callable[[str], None],
) -> Chosen:
    """The fastest right config of each projection, and the best ranked one that computes each epilogue rightly."""
    plain: dict[str, KernelConfig] = {}
    added: dict[str, KernelConfig] = {}
    gated = None
    for name, projection in projections.items():
        w = step.lm_head if name == "lm_head" else step.layers[0][name]
        ranked = _ranked(projection, limit.candidates(entrants, problem_of(projection), m), w, m, key, say)
        if not ranked:
            say(f"M={m} {name}: none of the configs, stays with stock")
            continue
        plain[name] = ranked[0]
        for problem in forms(projection)[1:]:
            able = (c for c in ranked if not kernels.refuses(c, problem, m) and _right(c, problem, w, m, say))
            best = next(able, None)
            if best is None:
                say(f"M={m} {name}: no config with {problem.epilogue.value}")
            elif problem.epilogue is Epilogue.SILU_MUL:
                gated = best
            else:
                added[name] = best
    return Chosen(plain, gated, added)


def _ranked(
    projection: Projection,
    configs: Sequence[KernelConfig],
    w: torch.Tensor,
    m: int,
    key: DeviceKey,
    say: Callable[[str], None],
) -> list[KernelConfig]:
    """Configs with right results, fastest first by a quick cold race where there are several."""
    problem = problem_of(projection)
    right = {str(c): c for c in configs if _right(c, problem, w, m, say)}
    if len(right) < 2:
        return list(right.values())
    arena = race.Arena(projection.n, projection.k, torch.bfloat16, key.l2_bytes)
    runs = {name: contestants.ours(config, problem, m) for name, config in right.items()}
    times = race.race(arena, m, runs, rounds=QUICK_ROUNDS, target_us=limit.SCREEN_US)
    del arena
    torch.cuda.empty_cache()
    return [right[name] for name in sorted(right, key=lambda name: times[name].p50)]


def _right(config: KernelConfig, problem: Problem, w: torch.Tensor, m: int, say: Callable[[str], None]) -> bool:
    """The numerics gate of one kernel on one weight, DESIGN 6."""
    generator = torch.Generator(w.device).manual_seed(2)
    x = torch.randn(m, problem.k, dtype=w.dtype, device=w.device, generator=generator)
    extra = torch.randn(m, problem.n, dtype=w.dtype, device=w.device, generator=generator) if problem.adds else None
    gated = problem.epilogue is Epilogue.SILU_MUL
    try:
        # The bound of few elements is wider: a gate on 2.0e-3 alone refuses right results of a tiny shape by chance.
        numerics.assert_t1(call_of(config, problem, m)(x, w, extra), x, w, extra, gated=gated)
    except AssertionError as wrong:
        say(f"{problem} M={m}: {config} is wrong, {wrong}")
        return False
    except SkinnyError as raised:
        say(f"{problem} M={m}: {config} does not run: {raised.what}")
        return False
    return True


def arms_of(chosen: Chosen, projections: Mapping[str, Projection], m: int, prefetches: Sequence[str]) -> dict[str, Arm]:
    """The arms of one M, stock first; epilogues that no config computes are left out."""
    linears = {name: call_of(config, problem_of(projections[name]), m) for name, config in chosen.plain.items()}
    ours = Arm(linears)
    found = {"stock": Arm(), "ours": ours, "ours again": ours}
    everything = ours
    if chosen.gated is not None:
        gated = call_of(chosen.gated, problem_of(projections["gate_up"], Epilogue.SILU_MUL), m)
        found["gated"] = replace(ours, gated=gated)
        everything = replace(everything, gated=gated)
    if chosen.added:
        added = {
            name: call_of(config, problem_of(projections[name], Epilogue.RESIDUAL), m)
            for name, config in chosen.added.items()
        }
        found["residual"] = replace(ours, added=added)
        everything = replace(everything, added=added)
    for text in prefetches:
        found[f"prefetch {text}"] = replace(ours, prefetch=prefetch_of(text))
    for text in prefetches:
        found[f"all {text}"] = replace(everything, prefetch=prefetch_of(text))
    return found


def gate(step: decode_step.DecodeStep, arms: Mapping[str, Arm]) -> tuple[dict[str, float], float]:
    """rel-RMSE of every arm's logits against stock's, infinity for NaN, and how large it may be: `NOISE` times what
    stock's own roundings put between it and the same step in FP32. Raises SystemExit where stock has no finite logits.
    """
    with torch.inference_mode():
        stock = step.run(arms["stock"]).double()
        allowed = NOISE * _apart(stock, step.exact().double())
        if not 0 < allowed < float("inf"):
            raise SystemExit(f"the stock step gives no usable logits (noise {allowed / NOISE})")
        return {name: _apart(step.run(arm).double(), stock) for name, arm in arms.items()}, allowed


def _apart(y: torch.Tensor, reference: torch.Tensor) -> float:
    error = float(torch.linalg.vector_norm(y - reference) / torch.linalg.vector_norm(reference))
    return error if error == error else float("inf")


def measure(
    step: decode_step.DecodeStep, arms: Mapping[str, Arm], rounds: int
) -> tuple[dict[str, race.Times], dict[str, race.Times]]:
    """Times of a whole step and of its layers alone, both of every arm in every round."""
    both = {**arms, **{f"{name}|layers": replace(arm, head=False) for name, arm in arms.items()}}
    times = step.times(both, rounds=rounds)
    return {name: times[name] for name in arms}, {name: times[f"{name}|layers"] for name in arms}


def points_of(
    step: decode_step.DecodeStep, arms: Mapping[str, Arm], rounds: int, chosen: Chosen, given: Any, env: Environment
) -> list[Point]:
    """Gate, then time what passed."""
    errors, allowed = gate(step, arms)
    right = {name: arm for name, arm in arms.items() if errors[name] <= allowed}
    steps, layers = measure(step, right, rounds)
    found = []
    for name in arms:
        whole, part = steps.get(name), layers.get(name)
        per = [None, None, None] if part is None else [round(v / LAYERS, 3) for v in (part.p20, part.p50, part.p80)]
        point = Point(
            model=given.model, m=step.m, arm=name, status="timed" if whole else "wrong",
            step_p20=whole and whole.p20, step_us=whole and whole.p50, step_p80=whole and whole.p80,
            layer_p20=per[0], layer_us=per[1], layer_p80=per[2], rounds=rounds if whole else 0,
            rel_rmse=errors[name], allowed=allowed, layers=LAYERS, context=decode_step.CONTEXT,
            compiled=int(given.compiled), configs="" if name == "stock" else str(chosen), device=env.gpu,
            driver=env.driver, torch=env.torch, commit=env.commit, date=env.date,
        )  # fmt: skip
        found.append(point)
    return found


def table(points: Sequence[Point]) -> str:
    """One line per arm; gains in microseconds a layer against stock and against ours."""
    by_name = {point.arm: point for point in points}
    lines = [f"M={points[0].m}  step us (p20-p80)          layer us (p20-p80)      vs stock  vs ours  rel-RMSE  arm"]
    for p in points:
        if p.step_us is None or p.layer_us is None:
            lines.append(f"WRONG: rel-RMSE {p.rel_rmse:.2e}, allowed {p.allowed:.2e}{'':32}{p.arm}")
            continue
        base = [by_name[name].layer_us for name in ("stock", "ours")]
        gains = "".join(f"{'':9}" if b is None else f"{p.layer_us - b:+9.2f}" for b in base)
        lines.append(
            f"{p.step_us:8.1f} ({p.step_p20:.1f}-{p.step_p80:.1f})  {p.layer_us:8.2f} ({p.layer_p20:.2f}-"
            f"{p.layer_p80:.2f})  {gains}  {p.rel_rmse:.2e}  {p.arm}"
        )
    return "\n".join(lines)


def prepare_all(
    projections: Mapping[str, Projection], entrants: Sequence[limit.Entrant], ms: Sequence[int], key: DeviceKey
) -> prepare.Prepared:
    """Compile in worker processes whatever the arms may run."""
    jobs = [
        (config, problem, m)
        for m in ms
        for projection in projections.values()
        for config in limit.candidates(entrants, problem_of(projection), m)
        for problem in forms(projection)
        if not kernels.refuses(config, problem, m)
    ]
    # Machine code mostly does not depend on N; what does is compiled where it is first used, before any capture.
    unique = {(config, replace(problem, n=2), m): (config, problem, m) for config, problem, m in jobs}
    return prepare.prepare(prepare.missing(unique.values(), key), [], key, seconds=COMPILE_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, choose, check, measure; `in_model.csv` is whole after every M. Returns 1 where an arm was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16], help="values of M")
    parser.add_argument("--config", nargs="+", required=True, help="as limit_race.py's --kernels, with a grid")
    parser.add_argument("--prefetch", nargs="*", default=["8", "16", "33"], help="MB, or o=33,qkv=8; one arm each")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="fuse what lies between the projections")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    given = parser.parse_args(argv)
    try:
        entrants = [limit.Entrant.parse(text) for text in given.config]
        for text in given.prefetch:
            prefetch_of(text)
    except (ValueError, LookupError, RuntimeError) as error:
        parser.error(str(error))
    if given.rounds < 15:
        parser.error("medians of fewer than 15 rounds are not kept")
    owner = next((p for p in family.discover().packages if given.model in p.configs), None)
    if owner is None:
        parser.error(f"unknown model {given.model!r}")
    config = owner.configs[given.model]
    every = owner.projections(config, 1)
    projections = {p.name: p for p in every if not p.part_of and p.name in PROJECTIONS}
    if len(projections) != len(PROJECTIONS):
        parser.error(f"{given.model} has no step of {', '.join(PROJECTIONS)}")
    key = device.current_key()
    if key is None:
        parser.error("measuring needs a CUDA device")

    def say(text: str) -> None:
        print(text, flush=True)

    made = prepare_all(projections, entrants, given.rows, key)
    say(f"{made.compiled} kernels compiled{'' if made.complete else ', cut short'}")
    for complaint in made.complaints:
        say(complaint)
    env = machine.environment(commit=given.commit)
    points: list[Point] = []
    for m in given.rows:
        step = decode_step.DecodeStep(config, every, m, compiled=given.compiled)
        chosen = choose(step, projections, entrants, m, key, say)
        say(f"M={m}: {chosen}")
        arms = arms_of(chosen, projections, m, given.prefetch)
        points += points_of(step, arms, given.rounds, chosen, given, env)
        rows.write_table(given.out / "in_model.csv", Point, points)
        say(table([point for point in points if point.m == m]))
        del step, arms
        torch.cuda.empty_cache()
    return 1 if any(point.status == "wrong" for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
