"""A command line whose output is 80 columns wide, an environment that holds nothing of this machine, and `fakes`, which
stands for the GPU, the compilers and the clock in tests of `skinny tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from skinny_core import device, env
from skinny_core.problem import Problem
from skinny_lab.bench import contestants, decode_step, machine, peers, prepare, race, tuning
from skinny_lab.bench.libraries import Peer
from skinny_lab.cli import app
from skinny_lab.tune import run, steps

H200 = device.product("h200")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No SKINNY, user folders below tmp_path, 80 columns, no colour."""
    monkeypatch.delenv("SKINNY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    env.settings.cache_clear()
    yield
    env.settings.cache_clear()


@pytest.fixture
def skinny() -> Callable[..., Result]:
    """`skinny("doctor", "--json")`: run the command in this process."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


class Fakes:
    """Stands for the device and the clock. speeds: microseconds by contestant or (N, contestant); others take 9, the
    baseline 10. steps: microseconds that a projection adds to the decode step, others take 1 off.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.cell_seconds, self.step_seconds = 1.0, 2.0
        self.first_seconds = 1.0
        self.rmse = 1.66e-3
        self.raced: list[set[str]] = []
        self.refused: dict[prepare.PeerJob, str] = {}
        self.speeds: dict[object, float] = {"cublas": 10.0, "peer": 9.5}
        self.steps: dict[str, float] = {}
        self.cells: list[tuple[int, int, int]] = []
        """(N, M, candidates) of each cell that was raced."""
        self.stepped: list[tuple[int, tuple[str, ...]]] = []
        self.large: set[int] = set()
        self.interrupt_at = 10**6
        self.others = 0
        self.mhz = [1980]
        self.complete = True
        self.spun = 0
        self.alive = True
        self.made = 0
        """Decode steps built."""
        self.no_room = 0
        """How many of the next ones do not fit."""

    def arena(self, n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> SimpleNamespace:
        if n in self.large:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(n=n, k=k, dtype=dtype)

    def check(
        self, arena: SimpleNamespace, problem: Problem, m: int, runs: Mapping[str, object], **options: object
    ) -> dict[str, float]:
        if len(self.cells) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.cells.append((problem.n, m, len(set(runs) - {"cublas", "peer"})))
        self.raced.append(set(runs))
        self.now += self.first_seconds if len(self.cells) == 1 else self.cell_seconds
        return dict.fromkeys(runs, self.rmse)

    def race(
        self, arena: SimpleNamespace, m: int, runs: Mapping[str, object], *, rounds: int, **options: object
    ) -> dict[str, race.Times]:
        times: dict[str, float] = {}
        for name in runs:
            for at in ((arena.n, m, name), (arena.n, m), (arena.n, name), name):
                if at in self.speeds and not (name in ("cublas", "peer") and at != name):
                    times[name] = self.speeds[at]
                    break
            else:
                times[name] = 9.0
        return {name: race.Times(t - 0.1, t, t + 0.1, rounds) for name, t in times.items()}

    def clock_rate(self, index: int = 0) -> int:
        return self.mhz.pop(0) if len(self.mhz) > 1 else self.mhz[0]

    def synchronize(self) -> None:
        if not self.alive:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def step(self) -> type:
        fakes = self

        class Step:
            """Of a model, with the config it is made of; or of links."""

            def __init__(self, made_of: Any, *rest: object, depth: int = 1, device: str = "") -> None:
                self.layers = decode_step.Dimensions.of(made_of).layers if isinstance(made_of, Mapping) else depth
                self.depth = depth
                fakes.made += 1
                if fakes.no_room:
                    fakes.no_room -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory")

            def at(self, m: int) -> Step:
                self.m = m
                return self

            def scale(self, name: str) -> float:
                return 1.0 if name == "lm_head" else self.layers / self.depth

            def compare(self, arms: Mapping[str, Mapping[str, object]], *, rounds: int) -> dict[str, float]:
                fakes.now += fakes.step_seconds
                names = {name: tuple(arm) for name, arm in arms.items()}
                fakes.stepped.append((self.m, tuple(n for group in names.values() for n in group)))
                return {
                    name: 100.0 + (fakes.steps.get(group[0], -1.0) if group else 0.0) for name, group in names.items()
                }

        return Step


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Patch the GPU, the compilers and the clock out."""
    found = Fakes()

    def spin(arena: object) -> None:
        found.spun += 1

    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    for name, value in {
        "empty_cache": lambda: None, "mem_get_info": lambda: (141 << 30, 141 << 30), "clock_rate": found.clock_rate,
        "synchronize": found.synchronize,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(machine, "gpu", lambda index=0: machine.Gpu(1980, 3201, "580.1", found.others))
    monkeypatch.setattr(machine, "checkout_commit", lambda: "abc")
    monkeypatch.setattr(race, "Arena", found.arena)
    monkeypatch.setattr(race, "race", found.race)
    monkeypatch.setattr(tuning, "check", found.check)
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(decode_step, "DecodeStep", found.step())
    monkeypatch.setattr(steps, "ChainStep", found.step())
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: [] if found.complete else list(jobs)[1:])
    made = lambda *args, **options: prepare.Prepared(complete=False, refused=found.refused)  # noqa: E731
    monkeypatch.setattr(prepare, "prepare", made)
    monkeypatch.setattr(run.memory, "spin", spin)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: found.now))
    peer = Peer("peer", lambda problem, m: None, lambda *_: lambda x, w, y: None, lambda *_: "", jit=True)
    monkeypatch.setattr(peers, "peer_maker", lambda folder=None: peers.Peers([peer]))
    return found
