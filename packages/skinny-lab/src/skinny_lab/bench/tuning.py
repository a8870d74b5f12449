"""From candidates to cells: check, race, keep or refuse. The keep rule is DESIGN section 5, stated in `verdict()`.

numerics gate, then a short race of everything (cold), then a long one of the best few, cuBLAS and peers (cold), then a
hot one of the best of those and cuBLAS; for M >= 3 a captured decode step with the cell's projection swapped. The long
races take more rounds until their spreads leave no doubt about the verdict and the config, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from skinny_core.errors import SkinnyError
from skinny_core.plan import Cell, Evidence, Quantiles
from skinny_core.problem import DType, KernelConfig, Problem, WeightScheme
from skinny_core.testing.numerics import TOLERANCE, reference
from skinny_lab.bench import contestants, race
from skinny_lab.bench.entrants import DEFAULT, Entrant, candidates
from skinny_lab.bench.machine import gpu

COLD_GAIN = 1.05
HOT_GAIN = 1.03
HOT_GAIN_FROM_M3 = 1.0
FINALISTS = 6
SHORT_ROUNDS, LONG_ROUNDS, MOST_ROUNDS = 3, 8, 32
"""Of the short race, of a long one at least, and at most."""
HOT_FINALISTS = 3
LEVEL = 1.01
"""Configs nearer than this need not be told apart: it is less than two boards of one kind differ."""
SHORT_US = 300.0
"""About how long one replay of the short race lasts: it only has to find the finalists among a hundred or more."""
PEER_FACTOR = 2.0
"""A peer may round partial sums to BF16 once more (2.35e-3); one lost element of K = 25600 gives 5.2e-3."""


class NumericsError(SkinnyError, RuntimeError):
    """Results are wrong, so that a time would mean nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Best config of one kernel for one Problem and M, with its rivals. clocks: SM clock in MHz, lowest and highest of
    before and after. finalists: every config of the long race, fastest cold one first."""

    problem: Problem
    m: int
    config: KernelConfig
    rel_rmse: float
    cold: Mapping[str, race.Times]
    hot: Mapping[str, race.Times]
    clocks: tuple[int, int]
    tried: int
    wrong: tuple[str, ...] = field(default=())
    finalists: tuple[KernelConfig, ...] = field(default=())

    @property
    def ours(self) -> race.Times:
        """Cold times of the chosen config."""
        return self.cold[str(self.config)]


PeerMaker = Callable[[Problem, int], Mapping[str, race.Run]]


def measure(
    arena: race.Arena,
    problem: Problem,
    m: int,
    entrants: Iterable[Entrant] = DEFAULT,
    *,
    peers: PeerMaker | None = None,
    configs: Iterable[KernelConfig] | None = None,
    clock: Callable[[], int] | None = None,
) -> Measured:
    """Race every candidate of the entrants (or just `configs`) with cuBLAS and the peers at M = m.

    clock: reads the SM clock in MHz; default `nvidia-smi`, which takes a good part of a second.
    Raises `NumericsError` where no candidate gives right results.
    """
    clock = clock or (lambda: gpu().sm_mhz)
    before = clock()
    configs = candidates(entrants, problem, m) if configs is None else list(configs)
    runs: dict[str, race.Run] = {}
    failed: dict[str, str] = {}
    for config in configs:
        try:
            runs[str(config)] = contestants.ours(config, problem, m)
        except SkinnyError as error:  # one kernel without its DSL: the others can still race
            failed[str(config)] = str(error)
    by_name = {str(c): c for c in configs}
    base = contestants.BASELINE
    rivals = {base: contestants.cublas(), **(dict(peers(problem, m)) if peers else {})}
    errors = check(arena, problem, m, {**runs, **rivals}, failed=failed)
    right = {name: run for name, run in runs.items() if errors[name] <= TOLERANCE[problem.output.torch]}
    if not right:
        raise NumericsError(
            f"{problem} at M = {m}: none of {len(configs)} candidates passes the numerics gate"
            + "".join(f"; {name}: {why}" for name, why in list(failed.items())[:1]),
            "run `python3 -m tests.gpu.run --arch sm90`: a kernel, the driver or the DSL is broken here",
        )
    rivals = right_rivals(rivals, errors, problem)
    out = problem.output.torch
    finalists = list(right)
    if len(right) > FINALISTS:
        short = race.race(arena, m, right, rounds=SHORT_ROUNDS, target_us=SHORT_US, out=out)
        finalists = sorted(right, key=lambda name: short[name].p50)[:FINALISTS]
    chosen = {name: right[name] for name in finalists}
    cold = race.race(
        arena, m, {**chosen, **rivals}, rounds=LONG_ROUNDS, out=out, most=MOST_ROUNDS,
        enough=lambda times: decided(times, finalists, COLD_GAIN),
    )  # fmt: skip
    nearest = sorted(finalists, key=lambda name: cold[name].p50)[:HOT_FINALISTS]
    hot = race.race(
        arena, m, {**{name: chosen[name] for name in nearest}, base: rivals[base]}, rounds=LONG_ROUNDS, hot=True,
        out=out, most=MOST_ROUNDS, enough=lambda times: decided(times, nearest[:1], hot_gain(m)),
    )  # fmt: skip
    best = choose(nearest, cold, hot, m)
    after = clock()
    return Measured(
        problem=problem,
        m=m,
        config=by_name[best],
        rel_rmse=errors[best],
        cold={name: cold[name] for name in (best, *rivals)},
        hot={name: hot[name] for name in (best, base)},
        clocks=(min(before, after), max(before, after)),
        tried=len(runs),
        wrong=tuple(name for name in errors if name not in right and name not in rivals),
        finalists=tuple(by_name[name] for name in sorted(finalists, key=lambda name: cold[name].p50)),
    )


def decided(times: Mapping[str, race.Times], names: Sequence[str], gain: float) -> bool:
    """Whether the spreads leave no doubt that the fastest of `names` is, or is not, `gain` times as fast as the
    baseline, and that it is the fastest of them or level with it."""
    base = times[contestants.BASELINE]
    best, *others = sorted((times[name] for name in names), key=lambda t: t.p50)
    verdict = base.p20 / best.p80 >= gain or base.p80 / best.p20 < gain
    return verdict and all(t.p50 <= LEVEL * best.p50 or t.p20 > best.p80 for t in others)


def choose(names: Sequence[str], cold: Mapping[str, race.Times], hot: Mapping[str, race.Times], m: int) -> str:
    """The config to keep: the fastest cold one among those that also pass the hot rule, else the fastest cold one.

    Near the L2's size the fastest cold config can be slower than cuBLAS hot where its runner-up is not.
    """
    baseline = hot[contestants.BASELINE].p50
    passing = [name for name in names if baseline / hot[name].p50 >= hot_gain(m)]
    return min(passing or names, key=lambda name: cold[name].p50)


def hot_gain(m: int) -> float:
    """Least gain over the baseline with a hot L2."""
    return HOT_GAIN if m <= 2 else HOT_GAIN_FROM_M3


def verdict(found: Measured, in_model_us: float | None) -> tuple[str, str]:
    """("win", "") or ("refused", why): against the call it replaces, 5 % cold; hot 3 % at M <= 2, else not slower; for
    M >= 3 not slower inside a captured decode step."""
    base, best = contestants.BASELINE, str(found.config)
    cold = found.cold[base].p50 / found.cold[best].p50
    hot = found.hot[base].p50 / found.hot[best].p50
    needed = hot_gain(found.m)
    if cold < COLD_GAIN:
        return "refused", f"{cold:.3f}x cold, needs {COLD_GAIN}x"
    if hot < needed:
        return "refused", f"{hot:.3f}x hot, needs {needed}x ({cold:.3f}x cold)"
    if found.m >= 3 and in_model_us is not None and in_model_us > 0:
        return "refused", f"{cold:.3f}x alone, but the decode step is {in_model_us:.1f} us slower"
    return "win", ""


def cell(found: Measured, name: str, used_by: tuple[str, ...], in_model_us: float | None) -> Cell:
    """The plan cell of a measurement."""
    base, best = contestants.BASELINE, str(found.config)
    peers = {n: t for n, t in found.cold.items() if n not in (base, best)}
    ours = found.ours
    status, why = verdict(found, in_model_us)
    return Cell(
        id=name,
        n=found.problem.n,
        k=found.problem.k,
        m=found.m,
        weight=found.problem.weight,
        activation=found.problem.activation,
        output=found.problem.output,
        epilogue=found.problem.epilogue,
        status=status,  # type: ignore[arg-type]
        kernel=found.config.kernel,
        config=dict(found.config.params),
        used_by=used_by,
        why=why,
        evidence=Evidence(
            candidate=_quantiles(ours),
            baseline=_quantiles(found.cold[base]),
            baseline_name=base,
            candidate_hot=_quantiles(found.hot[best]),
            baseline_hot=_quantiles(found.hot[base]),
            peers={n: t.p50 for n, t in peers.items()},
            peer_ahead=peer_ahead(ours, peers),
            rounds=ours.rounds,
            rel_rmse=round(found.rel_rmse, 6),
            in_model_us=None if in_model_us is None else round(in_model_us, 2),
            clock_mhz=found.clocks if all(found.clocks) else None,
        ),
    )


def peer_ahead(ours: race.Times, peers: Mapping[str, race.Times]) -> str:
    """The fastest peer that is ahead beyond the spread, or "": only where the spreads do not touch, that is where its
    slow end is faster than our fast end."""
    ahead = [name for name, times in peers.items() if times.p80 < ours.p20]
    return min(ahead, key=lambda name: peers[name].p50) if ahead else ""


def right_rivals(rivals: Mapping[str, race.Run], errors: Mapping[str, float], problem: Problem) -> dict[str, race.Run]:
    """The baseline, whatever its rounding is (a host runs it), and the peers whose results are right: within
    `PEER_FACTOR` times our own gate."""
    limit = PEER_FACTOR * TOLERANCE[problem.output.torch]
    return {name: run for name, run in rivals.items() if name == contestants.BASELINE or errors[name] <= limit}


def problem_of(n: int, k: int, dtype: DType = DType.BF16) -> Problem:
    """The plain projection of a shape: output in the input dtype, no epilogue."""
    return Problem(n=n, k=k, weight=WeightScheme(dtype.value), activation=dtype, output=dtype)


def check(
    arena: race.Arena,
    problem: Problem,
    m: int,
    runs: Mapping[str, race.Run],
    *,
    failed: dict[str, str] | None = None,
) -> dict[str, float]:
    """rel-RMSE of every contestant on fresh random inputs; infinity for one that leaves an element unwritten.

    failed: takes the error of a contestant that raises, whose rel-RMSE is then infinity; without it the error is
    raised.
    """
    x, w = arena.activation(m), arena.weights[0]
    ref = reference(x, w)
    scale = torch.linalg.vector_norm(ref)
    errors = {}
    for name, run in runs.items():
        y = torch.full((m, problem.n), float("nan"), dtype=problem.output.torch, device=x.device)
        try:
            run(x, w, y)
            error = float(torch.linalg.vector_norm(y.double() - ref) / scale)
        except Exception as raised:  # a DSL or a library can fail in any way; the others can still race
            if failed is None:
                raise
            failed[name] = f"{type(raised).__name__}: {raised}"
            error = float("nan")
        errors[name] = error if error == error else float("inf")
    return errors


def _quantiles(times: race.Times) -> Quantiles:
    return Quantiles(times.p20, times.p50, times.p80)
