"""The race to the memory's limit: shapes x M, all candidates of chosen kernels and all peers, cold L2, in one run.

A cell: numerics of every contestant, a quick race of all candidates, then a full one of the best few of each kernel
with cuBLAS and the peers. Results are on disk after every cell; a run stops before its time budget and is resumable.
"""

from __future__ import annotations

import csv
import gc
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.plan import Environment
from skinny_core.problem import KernelConfig, Problem
from skinny_core.testing.numerics import TOLERANCE
from skinny_lab.bench import contestants, machine, prepare, race, tuning
from skinny_lab.bench.entrants import Entrant, candidates
from skinny_lab.bench.limit_files import Files, Tried
from skinny_lab.bench.peers import Peers
from skinny_lab.bench.rows import OURS, Row, limit_fraction

ORDER = (1, 4, 16, 8, 2)
"""Values of M by how much a partial run should say; others follow in ascending order."""
SCREEN_US = 300.0
ARENA_BYTES = 60 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """A projection `[N, K]`. name: "q4b.qkv"; tp: the tensor-parallel size it belongs to."""

    name: str
    tp: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Settings:
    """How to race. keep: finalists per kernel. budget: seconds of the whole run. prepare_share: of what is left of the
    budget, the part that compiling for one M may take. prepare_only: compile and try, race nothing. near: (N, K) -> the
    configs to race there, see `near`; shapes that it lacks race everything."""

    entrants: tuple[Entrant, ...]
    keep: int = 4
    rounds: int = 9
    screen_rounds: int = 3
    budget: float = 400.0
    prepare_share: float = 0.5
    prepare_only: bool = False
    peer_folder: Path | None = None
    near: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Raced:
    """What one cell gave. rows: of the full race. tried: every contestant and every one that was left out."""

    rows: list[Row] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)


def read_shapes(path: Path) -> list[Shape]:
    """Shapes of a CSV with the columns name, tp, n, k."""
    with path.open(encoding="utf-8", newline="") as f:
        return [Shape(r["name"], int(r["tp"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(f)]


def order(shapes: Iterable[Shape], ms: Iterable[int]) -> list[tuple[Shape, int]]:
    """All cells, M by M as in `ORDER`, small weights first: a run cut short has whole columns."""
    wanted = sorted(set(ms), key=lambda m: (ORDER.index(m) if m in ORDER else len(ORDER), m))
    by_size = sorted(shapes, key=lambda s: (s.n * s.k, s.name))
    return [(shape, m) for m in wanted for shape in by_size]


class Arenas:
    """Rotating weights by shape, kept for the next M; the longest unused go where `limit` bytes would be passed."""

    def __init__(self, l2_bytes: int, limit: int = ARENA_BYTES) -> None:
        self.l2_bytes, self.limit = l2_bytes, limit
        self._kept: OrderedDict[tuple[int, int], race.Arena] = OrderedDict()

    def get(self, shape: Shape) -> race.Arena:
        """The arena of a shape, filled anew where it is not there."""
        at = shape.n, shape.k
        if at not in self._kept:
            while self._kept and sum(map(self._bytes, [*self._kept, at])) > self.limit:
                self._kept.popitem(last=False)
                torch.cuda.empty_cache()
            self._kept[at] = race.Arena(*at, torch.bfloat16, self.l2_bytes)
        self._kept.move_to_end(at)
        return self._kept[at]

    def _bytes(self, at: tuple[int, int]) -> int:
        return 2 * at[0] * at[1] * race.copies_for(*at, self.l2_bytes)


def near(tried: Iterable[Tried], top: int) -> dict[tuple[int, int], frozenset[str]]:
    """(N, K) -> the `top` fastest configs of each kernel at every M that an earlier run raced. What wins at one M wins
    or nearly wins at the next, so a run over the others need not race everything again."""
    cells: dict[tuple[int, int, int, str], list[tuple[float, str]]] = {}
    for t in tried:
        time = t.screen_us if t.p50 is None else t.p50
        if time is not None and t.provider in kernels.stems():
            cells.setdefault((t.n, t.k, t.m, t.provider), []).append((time, t.config))
    found: dict[tuple[int, int], set[str]] = {}
    for (n, k, _, _), times in cells.items():
        found.setdefault((n, k), set()).update(config for _, config in sorted(times)[:top])
    return {at: frozenset(configs) for at, configs in found.items()}


def run(
    cells: Sequence[tuple[Shape, int]],
    settings: Settings,
    peers: Peers,
    key: DeviceKey,
    files: Files,
    *,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Race the cells that `files` does not hold yet; returns why it ended: "done", "budget" or "device".

    "device": a contestant broke the CUDA context; what was raced is on disk, a new process can resume.
    """
    begun = clock()
    environment = files.environment
    # Every graph capture may collect garbage: what was imported so far need not be looked at each time.
    gc.collect()
    gc.freeze()
    arenas = Arenas(key.l2_bytes)
    todo = [(shape, m) for shape, m in cells if (shape.name, m) not in files.done | files.broke]
    for name, m in sorted(files.broke):
        say(f"{name} M={m}: left out, it broke the device in an earlier run")
    needed: dict[str, float] = {}
    trials = _trials(todo, peers)  # of every M at once: a process that tries them takes long to start
    for m, group in itertools.groupby(todo, key=lambda cell: cell[1]):
        shapes = [shape for shape, _ in group]
        left = begun + settings.budget - clock()
        if left <= 0:
            return "budget"
        made = _prepare(shapes, m, trials, settings, peers, key, left * settings.prepare_share)
        trials = []
        files.note_prepared(m, made)
        say(
            f"M={m}: {made.compiled} candidates compiled{'' if made.complete else ' (cut short)'}, {made.tried} peers"
            f" tried, {clock() - begun:.0f} s"
        )
        if settings.prepare_only:
            continue
        for shape in shapes:
            # A shape takes about as long at every M; a new one (they grow) longer than the last ones.
            guess = needed.get(shape.name) or max(list(needed.values())[-3:], default=3.0)
            if begun + settings.budget - clock() < 1.5 * guess:
                return "budget"
            start = clock()
            try:
                raced = race_cell(arenas.get(shape), shape, m, settings, peers, key, environment, made.complete)
            except Exception as error:  # one cell's failure must not lose the cells behind it
                files.fail(shape.name, m, f"{type(error).__name__}: {error}")
                say(f"{shape.name} M={m} failed: {type(error).__name__}: {str(error)[:300]}")
                if not machine.alive():
                    return "device"
                continue
            needed[shape.name] = clock() - start
            files.add(shape.name, m, raced.rows, raced.tried, seconds=needed[shape.name], sm_mhz=machine.sm_clock())
            say(f"{clock() - begun:5.0f} s  {line(raced.rows) or f'{shape.name} M={m}: nothing to race'}")
    return "done"


def race_cell(
    arena: race.Arena,
    shape: Shape,
    m: int,
    settings: Settings,
    peers: Peers,
    key: DeviceKey,
    environment: Environment,
    all_compiled: bool = True,
) -> Raced:
    """One cell. all_compiled: False where compiling was cut short; what is not in the disk cache is then left out."""
    problem = tuning.problem_of(shape.n, shape.k)
    base = contestants.BASELINE
    tried: dict[str, Tried] = {}

    def note(name: str, provider: str, config: str, text: str = "") -> None:
        tried[name] = Tried(shape.name, shape.n, shape.k, m, provider, config, None, None, None, None, None, 0, text)

    configs = {str(c): c for c in candidates(settings.entrants, problem, m, settings.near)}
    absent = set() if all_compiled else {str(j[0]) for j in prepare.missing(_jobs(configs.values(), problem, m), key)}
    ours: dict[str, race.Run] = {}
    for name, config in configs.items():
        note(name, config.kernel, name, "not compiled in time" if name in absent else "")
        try:
            if name not in absent:
                ours[name] = contestants.ours(config, problem, m)
        except Exception as error:  # a DSL can fail in any way; the others can still race
            note(name, config.kernel, name, f"{type(error).__name__}: {error}")
    rivals = {base: contestants.cublas(), **peers(problem, m)}
    note(base, base, "")
    for name in peers.by_name:
        refusal = peers.refusal(name, problem, m)
        note(name, name, "" if refusal else peers.by_name[name].config(problem, m), refusal or "")
    failed: dict[str, str] = {}
    errors = tuning.check(arena, problem, m, {**ours, **rivals}, failed=failed)
    for name, rmse in errors.items():
        tried[name] = replace(tried[name], rel_rmse=rmse if rmse < float("inf") else None, note=failed.get(name, ""))
    right = {name: run for name, run in ours.items() if errors[name] <= TOLERANCE[problem.output.torch]}
    rivals = tuning.right_rivals(rivals, errors, problem)
    for name in errors:
        if name not in right and name not in rivals and not tried[name].note:
            tried[name] = replace(tried[name], note="wrong results")
    finalists = _finalists(arena, m, right, configs, settings, tried)
    times = race.race(arena, m, {**{n: right[n] for n in finalists}, **rivals}, rounds=settings.rounds)
    for name, t in times.items():
        tried[name] = replace(tried[name], p20=t.p20, p50=t.p50, p80=t.p80, rounds=t.rounds)
    best = min(finalists, key=lambda name: times[name].p50, default=None)
    return Raced(_rows(shape, m, best, {n: times[n] for n in rivals}, times, tried, environment), list(tried.values()))


def _finalists(
    arena: race.Arena,
    m: int,
    right: Mapping[str, race.Run],
    configs: Mapping[str, KernelConfig],
    settings: Settings,
    tried: dict[str, Tried],
) -> list[str]:
    """The best `keep` of each kernel by a quick race, whose medians go into `tried`; all where there are few."""
    by_kernel: dict[str, list[str]] = {}
    for name in right:
        by_kernel.setdefault(configs[name].kernel, []).append(name)
    if all(len(names) <= settings.keep for names in by_kernel.values()):
        return list(right)
    quick = race.race(arena, m, right, rounds=settings.screen_rounds, target_us=SCREEN_US)
    for name, times in quick.items():
        tried[name] = replace(tried[name], screen_us=times.p50)
    return [
        name
        for names in by_kernel.values()
        for name in sorted(names, key=lambda name: quick[name].p50)[: settings.keep]
    ]


def _rows(
    shape: Shape,
    m: int,
    best: str | None,
    rivals: Mapping[str, race.Times],
    times: Mapping[str, race.Times],
    tried: Mapping[str, Tried],
    environment: Environment,
) -> list[Row]:
    found = []
    for name in ([best] if best else []) + list(rivals):
        mine, t = name == best, times[name]
        ahead = "peer_ahead" if mine and tuning.peer_ahead(t, rivals) else ""
        found.append(
            Row(
                kind="limit", what=shape.name, n=shape.n, k=shape.k, m=m, provider=OURS if mine else name,
                config=tried[name].config, state="cold", status=ahead, unit="us", p20=t.p20, p50=t.p50, p80=t.p80,
                rounds=t.rounds, device=environment.gpu, driver=environment.driver, torch=environment.torch,
                commit=environment.commit, date=environment.date,
            )
        )  # fmt: skip
    return found


def line(found: Sequence[Row]) -> str:
    """One line of text about a cell, "" where nothing was raced."""
    if not found:
        return ""
    mine = next((r for r in found if r.provider == OURS), None)
    others = sorted((r for r in found if r.provider != OURS), key=lambda r: r.p50)
    text = f"{found[0].what} M={found[0].m}: " + " ".join(f"{r.provider} {r.p50:.2f}" for r in others)
    if mine is None:
        return f"{text} ours none"
    ratio = others[0].p50 / mine.p50 if others else 1.0
    ahead = " PEER AHEAD" if mine.status else ""
    return f"{text} ours {mine.p50:.2f} us = {limit_fraction(mine):.3f} of the limit, {ratio:.3f}x{ahead} {mine.config}"


def _jobs(configs: Iterable[KernelConfig], problem: Problem, m: int) -> list[prepare.CompileJob]:
    return [(config, problem, m) for config in configs]


def _trials(cells: Iterable[tuple[Shape, int]], peers: Peers) -> list[prepare.PeerJob]:
    """What has to be tried in other processes; what may hang comes last, where it cannot hold up the others."""
    return [
        (name, shape.n, shape.k, m)
        for warned in (False, True)
        for shape, m in cells
        for name, peer in peers.by_name.items()
        if peer.vendor_warns is warned and peer.jit
        if not peers.refusal(name, tuning.problem_of(shape.n, shape.k), m)
    ]


def _prepare(
    shapes: Sequence[Shape],
    m: int,
    trials: Sequence[prepare.PeerJob],
    settings: Settings,
    peers: Peers,
    key: DeviceKey,
    seconds: float,
) -> prepare.Prepared:
    """Everything that is to be raced at M = m: compile, try; tell `peers` what not to race."""
    problems = [tuning.problem_of(s.n, s.k) for s in shapes]
    every = [job for p in problems for job in _jobs(candidates(settings.entrants, p, m, settings.near), p, m)]
    jobs = prepare.missing(every, key)
    # Shapes of one K mostly share their machine code; a kernel whose code depends on N is left for a second wave.
    first = list({(config, replace(problem, n=1), m): (config, problem, m) for config, problem, m in jobs}.values())
    begun = time.monotonic()
    made = prepare.prepare(first, trials, key, seconds=seconds, folder=settings.peer_folder)
    if made.complete and first:
        made_first = set(first)
        rest = [job for job in prepare.missing(jobs, key) if job not in made_first]
        more = prepare.prepare(rest, [], key, seconds=seconds - (time.monotonic() - begun))
        made.compiled, made.complete = made.compiled + more.compiled, more.complete
    for (name, n, k, at), why in made.refused.items():
        peers.exclude(name, n, k, at, why)
    return made
