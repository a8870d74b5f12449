"""Timing one projection: CUDA-graph replay, weights rotated through more than three times the L2, order rotated.

Each call follows a small elementwise kernel that writes the activation, as in a model; that kernel's own time, measured
in the same rounds, is subtracted. A contestant is anything that can compute `y[M, N] = x[M, K] @ w[N, K].T`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(x, w, y) -> None: writes y on the current stream, may be captured."""

Enough = Callable[[Mapping[str, "Times"]], bool]
"""Whether these times allow a decision."""
MORE = 4
"""Rounds added at a time while they do not."""
TARGET_US = 1000.0
PLACES = 4
"""Copies of a weight that take turns in a hot race. Near the L2's size one copy says little: weights of 40 to 52 MB
gave 1.02x hot on one H200 and 0.86x on another, cold times within 1 % (2026-12-01): where it lies seems to decide."""
L2_FACTOR = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds per call over the rounds: 20th, 50th and 80th percentile, and how many rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        """Percentiles of a list of measurements in microseconds."""
        ordered = sorted(values)
        pick = lambda q: ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]  # noqa: E731
        return cls(round(pick(0.2), 3), round(statistics.median(ordered), 3), round(pick(0.8), 3), len(ordered))


class Arena:
    """Weights and activations of one (N, K): enough copies of the weight that none is still in L2 when its turn
    comes.
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype, l2_bytes: int, *, seed: int = 0) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.copies = copies_for(n, k, l2_bytes)
        self.places = min(self.copies, PLACES) if 2 * n * k <= l2_bytes else 1
        generator = torch.Generator("cuda").manual_seed(seed)
        # One block, so that copies are far apart; scaled like a trained weight. Zeros would run faster than real data.
        self.weights = torch.empty(self.copies, n, k, dtype=dtype, device="cuda")
        for copy in self.weights:
            copy.normal_(0, k**-0.5, generator=generator)
        self.generator = generator

    def activation(self, m: int) -> torch.Tensor:
        """A random activation [m, K]."""
        return torch.randn(m, self.k, dtype=self.dtype, device="cuda", generator=self.generator)


def copies_for(n: int, k: int, l2_bytes: int) -> int:
    """Weights [N, K] of 2-byte elements to rotate through, so that what lies between two uses of one is more than
    `L2_FACTOR` times the L2."""
    return max(2, -(-L2_FACTOR * l2_bytes // (2 * n * k)) + 1)


def race(
    arena: Arena,
    m: int,
    contestants: Mapping[str, Run],
    *,
    rounds: int,
    hot: bool = False,
    out: torch.dtype | None = None,
    target_us: float = TARGET_US,
    enough: Enough | None = None,
    most: int = 0,
) -> dict[str, Times]:
    """Time every contestant at M = m in every round, starting each round one further along.

    hot: one weight at a time, so that what fits stays in L2; each round another of a few, see `PLACES`. target_us:
    about how long one replay lasts; at least one rotation of the weights. enough: after `rounds`, and after each `MORE`
    further ones up to `most`, says whether the times so far allow a decision; without it there are `rounds`. Returns
    percentiles in microseconds per call.
    """
    x_in = arena.activation(m)
    x = torch.empty_like(x_in)
    y = torch.empty(m, arena.n, dtype=out or arena.dtype, device="cuda")
    sets = [arena.weights[i : i + 1] for i in range(arena.places)] if hot else [arena.weights]
    names = ["", *contestants]
    repeats = _repeats(arena, len(sets[0]), target_us)
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
    for name in names:
        graphs[name] = [_capture(contestants.get(name), x_in, x, weights, y, repeats) for weights in sets]

    def measure(name: str, turn: int) -> float:
        return _replay(graphs[name][turn % len(sets)]) / repeats

    return repeated(names, measure, less="", rounds=rounds, enough=enough, most=most)


def repeated(
    names: Sequence[str],
    measure: Callable[[str, int], float],
    *,
    rounds: int,
    less: str | None = None,
    enough: Enough | None = None,
    most: int = 0,
) -> dict[str, Times]:
    """`measure(name, round)` of every name in every round, each round starting one name further along; see `race`.

    less: the name whose median is subtracted from the others and that is left out of the answer.
    """
    values: dict[str, list[float]] = {name: [] for name in names}
    done = 0
    while True:
        for turn in range(done, rounds):
            at = turn % len(names)
            for name in [*names[at:], *names[:at]]:
                values[name].append(measure(name, turn))
        done = rounds
        idle = statistics.median(values[less]) if less is not None else 0.0
        found = {name: Times.of([v - idle for v in taken]) for name, taken in values.items() if name != less}
        if enough is None or done >= most or enough(found):
            return found
        rounds = min(most, done + MORE)


def _repeats(arena: Arena, copies: int, target_us: float) -> int:
    """Calls per graph: whole rotations that last about `target_us`."""
    guess = max(4.0, arena.n * arena.k * 2 / 4.0e6)
    return copies * max(1, round(target_us / (guess * copies)))


def _capture(
    run: Run | None, x_in: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, repeats: int
) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mul(x_in, 1.0, out=x)
        if run is not None:
            run(x, weights[0], y)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(repeats):
            torch.mul(x_in, 1.0, out=x)
            if run is not None:
                run(x, weights[i % len(weights)], y)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
