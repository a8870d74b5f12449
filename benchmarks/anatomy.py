"""Where the fixed microseconds of a small weight go: `python benchmarks/anatomy.py --out DIR [--kernels ...]`.

Times weights of one K and growing N, cold, in the same race as the limit's, and fits time = fixed + bytes / rate. The
forms differ in one thing each, so their differences are its cost:

    prewait      weights are requested before the dependency wait
    wait first   the wait comes before any read
    no pdl       an ordinary launch, which starts when the kernel before has ended and its stores are flushed

The time at a few KB is launch, latency and tail with nothing to stream; what the fit's intercept has beyond it is ramp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from skinny_core import device
from skinny_core.problem import KernelConfig, Problem
from skinny_lab.bench import contestants, limit, machine, race, rows, tuning

DEFAULT = (
    "bf16_simt:threads=128:rows=2:chunks=4",
    "bf16_mma:warps=8:parts=2:loads=2:unroll=2",
    "bf16_mma:warps=4:parts=8:loads=2:unroll=2:blocks=8",
)
MEGABYTES = (0, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sizes of the weight; 0 stands for one row of N per SM."""
FORMS = {"prewait": (1, True), "wait first": (1, False), "no pdl": (0, False)}
"""Config key `pdl`, and whether weights may be read early. bf16_stream has no such key and cannot race here."""


@dataclass(frozen=True, slots=True)
class Point:
    """One contestant at one size. mb: bytes of the weight / 1e6. p20, p50, p80: microseconds."""

    provider: str
    form: str
    n: int
    k: int
    m: int
    mb: float
    p20: float
    p50: float
    p80: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Fit:
    """time = fixed_us + bytes / rate. tiny_us: measured at the smallest size."""

    fixed_us: float
    rate_tbps: float
    tiny_us: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> Fit:
        """Least squares over the sizes from 8 MB on, where the ramp is over; needs two of them."""
        ordered = sorted(points, key=lambda point: point.mb)
        line = [(point.mb, point.p50) for point in ordered if point.mb >= 8]
        count = len(line)
        mean_x, mean_y = sum(x for x, _ in line) / count, sum(y for _, y in line) / count
        slope = sum((x - mean_x) * (y - mean_y) for x, y in line) / sum((x - mean_x) ** 2 for x, _ in line)
        return cls(mean_y - slope * mean_x, 1 / slope, ordered[0].p50)


def forms(config: KernelConfig, problem: Problem, m: int) -> dict[str, race.Run]:
    """Every form of a config, by "config|form". The config is named without `pdl`, which the form says."""
    params = {key: value for key, value in config.params if key != "pdl"}
    plain = KernelConfig.of(config.kernel, params)
    return {
        f"{plain}|{name}": contestants.ours(
            KernelConfig.of(config.kernel, params | {"pdl": pdl}), problem, m, prewait=prewait
        )
        for name, (pdl, prewait) in FORMS.items()
    }


def measure(entrants: Sequence[limit.Entrant], k: int, m: int, sizes: Sequence[int], rounds: int) -> Iterator[Point]:
    """Race every entrant in every form, and cuBLAS, at every size."""
    key = device.current_key()
    if key is None:
        raise SystemExit("measuring needs a CUDA device")
    for size in sizes:
        # Whole rows per SM, so that no wave is broken.
        n = key.sm_count * max(1, round(size * 1e6 / (2 * k * key.sm_count)))
        problem = tuning.problem_of(n, k)
        arena = race.Arena(n, k, torch.bfloat16, key.l2_bytes)
        runs: dict[str, race.Run] = {f"{contestants.BASELINE}|": contestants.cublas()}
        for entrant in entrants:
            for config in entrant.configs(problem, m):
                runs |= forms(config, problem, m)
        wrong = [name for name, error in tuning.check(arena, problem, m, runs).items() if error > 5e-3]
        if wrong:
            raise SystemExit(f"wrong results at N = {n}: {wrong}")
        for label, times in race.race(arena, m, runs, rounds=rounds).items():
            provider, which = label.split("|")
            yield Point(provider, which, n, k, m, 2 * n * k / 1e6, times.p20, times.p50, times.p80, times.rounds)


def table(points: Sequence[Point]) -> str:
    """One line per contestant and form."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.provider, point.form), []).append(point)
    lines = ["fixed us  rate TB/s  tiny us  form        config"]
    for (provider, which), found in groups.items():
        fit = Fit.of(found)
        lines.append(f"{fit.fixed_us:8.2f}  {fit.rate_tbps:9.2f}  {fit.tiny_us:7.2f}  {which:10}  {provider}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, write `anatomy.csv` and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", nargs="+", default=list(DEFAULT), help="as limit_race.py takes them, with a grid")
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--m", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(argv)
    entrants = [limit.Entrant.parse(text) for text in given.kernels]
    points: list[Point] = []
    for point in measure(entrants, given.k, given.m, MEGABYTES, given.rounds):
        points.append(point)
        rows.write_table(given.out / "anatomy.csv", Point, points)
    print(machine.environment().gpu)
    print(table(points))


if __name__ == "__main__":
    main()
