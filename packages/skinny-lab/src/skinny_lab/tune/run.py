"""The run: compile, race, check in a decode step, settle; M by M, within the time budget, on disk after every cell."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError
from skinny_core.problem import KernelConfig
from skinny_lab import plans
from skinny_lab.bench import machine, prepare, race, tuning
from skinny_lab.bench.entrants import DEFAULT, Entrant
from skinny_lab.bench.peers import Peers
from skinny_lab.output import one_line
from skinny_lab.tune import compiling, memory, result
from skinny_lab.tune.order import ANCHORS, NEAR, accepted, beside
from skinny_lab.tune.request import Site, Target
from skinny_lab.tune.steps import Steps
from skinny_lab.tune.store import Entry, Store

FIRST_CELL, FIRST_STEP = 3.0, 6.0
"""Seconds that a cell and a decode step are thought to take before one was seen."""
MARGIN = 1.5
"""Something is begun only where this many times its expected seconds are left."""
Cell = tuple[Site, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """budget: seconds of the whole run. prepare_share: of what is left of it, the part that compiling for one M may
    take. peers: who else races, with those that compile at their first call tried in other processes. folder: with
    vLLM's kernel."""

    budget: float = 120.0
    entrants: tuple[Entrant, ...] = DEFAULT
    prepare_share: float = 0.5
    peers: Peers | None = None
    folder: Path | None = None


@dataclass
class Session:
    """One run over `cells`, in their order. say: a line for people. step: (cell, seconds left) of a progress bar.

    failed: cell id -> why it could not be measured. busy: most other processes seen on the GPU. clock: of seconds.
    """

    target: Target
    cells: Sequence[Cell]
    settings: Settings
    store: Store
    key: DeviceKey
    say: Callable[[str], None] = print
    step: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    failed: dict[str, str] = field(default_factory=dict)
    busy: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._arenas = memory.Arenas(self.key.l2_bytes, int(memory.device_bytes() * memory.SHARE))
        self._steps = Steps(self.target, self.key.l2_bytes, self._arenas.clear)
        self._seconds: dict[tuple[str, bool], float] = {}
        self._step_seconds = FIRST_STEP
        self._too_large: dict[str, str] = {}
        self._idle = True
        self._warm = False
        self._tried = self.settings.peers is None
        self._broken = False
        self._cut = False

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._begun + self.settings.budget - self.clock()

    def run(self) -> str:
        """Returns why it ended: "done", "budget", or "device" where the CUDA context broke: a new process can resume.

        A KeyboardInterrupt passes through; the store holds all cells before it.
        """
        # Every graph capture may collect garbage: what was imported so far need not be looked at each time.
        gc.collect()
        gc.freeze()
        self._look_at_others()
        for m, group in itertools.groupby(self.cells, key=lambda cell: cell[1]):
            self._measure([site for site, _ in group], m)
            if not self._broken:
                self._check_steps(m)
            self._look_at_others()
            if self._broken or self._cut:
                return "device" if self._broken else "budget"
        self._settle()
        return "device" if self._broken else "budget" if self._cut else "done"

    def _measure(self, sites: Sequence[Site], m: int) -> None:
        """Race every site at one M that the store lacks; sets `_cut` where the budget does not suffice."""
        racing = {site.name: self._racing(site, m) for site in sites if self.store.get(site, m) is None}
        todo = [site for site in sites if racing.get(site.name)]
        if not todo:
            return
        if self.left <= 0:
            self._cut = True
            return
        complete = self._compile([(site, m, racing[site.name]) for site in todo])
        for site in todo:
            if not self._fits(site, m):
                self._cut = True
                return
            configs = racing[site.name]
            if not complete:
                configs = compiling.in_cache(configs, site.problem, m, self.key)
                if not configs:
                    self._cut = True
                    continue
            self._race(site, m, configs)
            if self._broken:
                return

    def _racing(self, site: Site, m: int) -> list[KernelConfig]:
        """What races in a cell; notes why where that is nothing."""
        near = beside(m, self.store.finalists(site), self.settings.entrants, replace(site.problem, device=self.key))
        if near:
            return near
        found, why = accepted(self.settings.entrants, site.problem, m, self.key)
        if not found:
            self._fail(site, m, f"no kernel accepts it{': ' + why if why else ''}")
        return found

    def _compile(self, cells: Sequence[tuple[Site, int, list[KernelConfig]]]) -> bool:
        jobs = [(config, site.problem, m) for site, m, configs in cells for config in configs]
        self.step(f"M={cells[0][1]}: compiling")
        self._idle = True
        ends = self.clock() + self.left * self.settings.prepare_share
        complete = prepare.compile_all(jobs, self.key, ends - self.clock())
        if not self._tried and self.settings.peers is not None:  # all M at once: such a process takes long to start
            self._tried = True
            todo = [(site.problem, m) for site, m in self.cells if self.store.get(site, m) is None]
            lost = compiling.try_peers(todo, self.settings.peers, self.key, ends - self.clock(), self.settings.folder)
            if lost:
                self.say(f"{lost} peer cells do not race: not compiled in time, or they failed")
        if not complete:
            self.say(f"M={cells[0][1]}: compiling was cut short, what is not compiled does not race")
        return complete

    def _race(self, site: Site, m: int, configs: Sequence[KernelConfig], *, settled: bool = False) -> None:
        """One cell, into the store or among the failures."""
        name, begun = result.cell_id(site.name, m), self.clock()
        if site.name in self._too_large:
            self._fail(site, m, self._too_large[site.name])
            return
        self.step(name)
        try:
            arena = self._arena(site)
            if self._idle:
                memory.spin(arena)
                self._idle = False
            found = tuning.measure(
                arena, site.problem, m, self.settings.entrants, peers=self.settings.peers, configs=configs, clock=sm_mhz
            )
            if min(t.p20 for times in (found.cold, found.hot) for t in times.values()) <= 0:
                raise SkinnyError("a call is shorter than what is subtracted for the one before it", "leave it out")
        except Exception as error:  # one cell's failure, of whatever kind, must not lose the cells behind it
            self._fail(site, m, one_line(error))
            del error
            self._arenas.clear()
            self._broken = not machine.alive()
            return
        seconds = self.clock() - begun
        if self._warm:  # the first cell also loads libraries: it says nothing about the next
            self._seconds[site.name, m in ANCHORS] = seconds
        self._warm = True
        self.store.add(Entry(site.name, found, round(seconds, 2), settled=settled))
        if drift(found.clocks) > DRIFT:
            self.say(f"{name}: the SM clock went from {found.clocks[1]} to {found.clocks[0]} MHz or back")

    def _arena(self, site: Site) -> race.Arena:
        try:
            return self._arenas.get(site)
        except torch.OutOfMemoryError:
            need = self._arenas.bytes_for(site) / 2**30
            why = self._too_large[site.name] = f"out of memory: its rotating weights take {need:.1f} GiB"
            raise SkinnyError(why, "free memory of the GPU, or tune with a larger --tp") from None

    def _fits(self, site: Site, m: int) -> bool:
        """Whether a cell, and the decode step behind it, still fit into the budget."""
        recent = list(self._seconds.values())[-3:]
        expected = self._seconds.get((site.name, m in ANCHORS)) or max(recent, default=FIRST_CELL)
        later = self._step_seconds * len(result.steps(self.target, site)) if m >= 3 else 0.0
        return self.left >= MARGIN * (expected + later)

    def _check_steps(self, m: int) -> None:
        """The decode steps of every cell at this M that passes alone and lacks one; sets `_cut` where one does not
        fit."""
        waiting: dict[str, list[Site]] = {}
        for site in self.target.sites:
            entry = self.store.get(site, m)
            for label in result.needed_steps(self.target, site, entry) if entry is not None else ():
                waiting.setdefault(label, []).append(site)
        for label, sites in waiting.items():
            if self.left < MARGIN * self._step_seconds:
                self._cut = True
                return
            self.step(f"M={m}: decode step" + (f" of {label}" if self.target.models else ""))
            begun = self.clock()
            self._idle = True
            try:
                found = self._steps.changes(label, m, {site.name: self._entry(site, m).measured for site in sites})
            except Exception as error:  # the cells are refused and say so, the other M go on
                self.store.add(*(replace(self._entry(site, m), stepped=one_line(error)) for site in sites))
                self.failed[f"decode step of {label} at M = {m}"] = one_line(error)
                self._broken = not machine.alive()
                if self._broken:
                    return
                continue
            self._step_seconds = self.clock() - begun
            changed = []
            for site in sites:
                entry = self._entry(site, m)
                in_model = {**entry.in_model, label: round(found[site.name], 3)}
                changed.append(replace(entry, in_model=in_model))  # why another model's step failed stays
            self.store.add(*changed)

    def _entry(self, site: Site, m: int) -> Entry:
        entry = self.store.get(site, m)
        assert entry is not None, f"{site.name} was not measured at M = {m}"
        return entry

    def _settle(self) -> None:
        """Measure once more, with the larger M's config, what is slower than a larger M."""
        by_id = {result.cell_id(site.name, e.m): (site, e) for site in self.target.sites for e in self.store.of(site)}
        again = [
            (*by_id[small.id], large)
            for small, large in plans.slower_than_larger(result.raw_plan(self.target, self.store))
            if not by_id[small.id][1].settled
        ]
        for site, entry, large in again:
            if not self._fits(site, entry.m):
                self._cut = True
                break
            configs = list(dict.fromkeys([*entry.measured.finalists[:NEAR], large.kernel_config]))
            here = replace(site.problem, device=self.key)
            configs = [c for c in configs if kernels.refuses(c, here, entry.m) is None]
            self._race(site, entry.m, configs, settled=True)
            if self._broken:
                return
        for m in sorted({entry.m for _, entry, _ in again}):
            if not self._broken:
                self._check_steps(m)

    def _fail(self, site: Site, m: int, why: str) -> None:
        self.failed[result.cell_id(site.name, m)] = why

    def _look_at_others(self) -> None:
        others = machine.gpu().others
        if others > self.busy:
            self.busy = others
            plural = "es" if others > 1 else ""
            self.say(f"{others} other process{plural} on this GPU: times may be wrong, measure again on an idle one")


DRIFT = 0.03
"""A change of the SM clock that is told: small weights are bound by it."""


def drift(clocks: Sequence[int]) -> float:
    """How far the highest of some clocks is above the lowest, 0 where one is not known."""
    return max(clocks) / min(clocks) - 1 if clocks and min(clocks) > 0 else 0.0


def sm_mhz() -> int:
    """SM clock in MHz, 0 unknown."""
    return machine.sm_clock() or machine.gpu().sm_mhz


def undone(cells: Sequence[Cell], store: Store) -> Iterator[str]:
    """Ids of the cells that were not measured."""
    return (result.cell_id(site.name, m) for site, m in cells if store.get(site, m) is None)
