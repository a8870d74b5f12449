"""Engines of several arms take turns: all of a group are loaded, exactly one decodes at a time, the others wait.

Arms alternate run by run (on, off, off, on; three arms rotate and reverse), so a drift of the machine favours none.
Rows and a JSON record of a model are on disk after every turn.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skinny_core.plan import Environment
from skinny_lab.bench import libraries, rows
from skinny_lab.bench.engine_memory import Group
from skinny_lab.bench.engine_process import EngineError, EngineProcess
from skinny_lab.bench.rows import OURS, Row

STOCK = "stock"
CUTE = libraries.VLLM_CUTE
ARMS = (OURS, STOCK, CUTE)
"""Every arm, in the order of the first run."""
START_SECONDS = 90.0
"""Guess for the start of a group before one was seen; a cold start alone took 86 s on an H200 (November 2026)."""
START_TIMEOUT = 300.0
TURN_TIMEOUT = 180.0

Launch = Callable[[str, str], EngineProcess]
"""(model, arm) -> its engine, starting."""


def order(arms: Sequence[str], run: int) -> list[str]:
    """The arms of one run. Two: on off, off on, off on, on off. Three: abc, cba, bca, acb, cab, bac."""
    shift = run // 2 % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned[::-1] if run % 2 else turned


def must_be(arm: str, found: Mapping[str, Any]) -> None:
    """Raises `EngineError` for an arm in which something else ran than its name says: it would measure nothing.

    found: an answer of the child, with `active` (the plug-in's lines) and `counters` (calls by outcome).
    """
    stems = {key.rpartition("/kernel:")[2] for key in found.get("counters", {}) if "/kernel:" in key}
    if arm == STOCK:
        if found.get("active") or stems:
            raise EngineError(f"the plug-in is active in the {STOCK} arm")
        return
    wrong = stems - {CUTE} if arm == CUTE else stems & {CUTE}
    if wrong:
        raise EngineError(f"{', '.join(sorted(wrong))} ran in the {arm} arm")
    if not stems:
        raise EngineError(f"no kernel ran in the {arm} arm: see `skinny doctor` for plans of this device")


@dataclass
class Record:
    """What was measured of one model. about: settings and the like for the JSON file, dataclasses among them."""

    model: str
    out: Path
    environment: Environment
    about: dict[str, Any]
    found: list[Row] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    def add(self, run: int, arm: str, result: Mapping[str, Any]) -> None:
        """One turn: `result["tpot"]` maps concurrency to p20, p50, p80 (ms) and steps."""
        self.turns.append({"run": run, "arm": arm, **result})
        self.found += [self._row(int(c), arm, t) for c, t in result["tpot"].items()]
        self.write()

    def _row(self, concurrency: int, arm: str, t: Mapping[str, float]) -> Row:
        e = self.environment
        return Row(
            kind="tpot", what=self.model, n=0, k=0, m=concurrency, provider=arm, config="", state="engine", status="",
            unit="ms", p20=round(t["p20"], 4), p50=round(t["p50"], 4), p80=round(t["p80"], 4), rounds=int(t["steps"]),
            device=e.gpu, driver=e.driver, torch=e.torch, commit=e.commit, date=e.date,
        )  # fmt: skip

    def write(self) -> None:
        """`tpot-<model>.csv` and `.json`, each atomically."""
        data = {
            "model": self.model,
            "environment": self.environment,
            **self.about,
            "order": [f"{t['run']}:{t['arm']}" for t in self.turns],
            "starts": self.starts,
            "turns": self.turns,
            "failure": self.failure,
        }
        rows.write_text(self.out / f"tpot-{self.model}.json", json.dumps(msgspec.to_builtins(data), indent=1) + "\n")
        if self.found:
            rows.write_csv(self.out / f"tpot-{self.model}.csv", self.found)

    def lines(self) -> list[str]:
        """Medians over processes by concurrency, all arms."""
        said = []
        for c in sorted({r.m for r in self.found}):
            of = {a: [r.p50 for r in self.found if r.m == c and r.provider == a] for a in ARMS}
            middle = {arm: statistics.median(times) for arm, times in of.items() if times}
            base = middle.get(STOCK)
            changes = [
                f"{arm} {ms:.3f}" + (f" ({100 * (ms / base - 1):+.1f} %)" if base and arm != STOCK else "")
                for arm, ms in middle.items()
            ]
            said.append(f"{self.model} concurrency {c}: {', '.join(changes)} ms")
        return said


@dataclass
class Turns:
    """The driver. arms: by model. guess: seconds of one turn by model, until one was seen. budget: seconds of all, 0
    for none. check: raises `EngineError` for an engine that is not what its arm says."""

    launch: Launch
    records: Mapping[str, Record]
    arms: Mapping[str, Sequence[str]]
    guess: dict[str, float]
    runs: int = 2
    budget: float = 0.0
    check: Callable[[str, Mapping[str, Any]], None] = must_be
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = print
    begun: float | None = None
    start_seconds: float = START_SECONDS
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, groups: Iterable[Group]) -> None:
        """Measure group by group. A model that fails is noted and ended; the others go on."""
        self.begun = self.clock() if self.begun is None else self.begun
        for number, group in enumerate(groups):
            # The first is begun whatever the guess says: nothing was seen yet.
            if number and not self._time_for(self._seconds(group)):
                self.left_out += group.models
                self.say(f"{self._elapsed():5.0f}s  {', '.join(group.models)} not begun: would not end in time")
                continue
            self._group(group)

    def _group(self, group: Group) -> None:
        running: dict[tuple[str, str], EngineProcess] = {}
        try:
            if not group.in_turn:
                begun = self.clock()
                for model in group.models:
                    running |= {(model, arm): self.launch(model, arm) for arm in self.arms[model]}
                for model in group.models:
                    self._guarded(model, running, lambda m=model: self._all_ready(m, running))  # type: ignore[misc]
                self.start_seconds = self.clock() - begun
            for model in group.models:
                if not self.records[model].failure:
                    self._guarded(model, running, lambda m=model: self._model(m, group, running))  # type: ignore[misc]
            for process in running.values():
                process.dismiss()
            for process in running.values():
                process.end()
        finally:
            # Interrupted or told to end: there may be no time for anybody's grace. Else all have ended.
            for process in running.values():
                process.end(0.0)

    def _guarded(self, model: str, running: dict[tuple[str, str], EngineProcess], work: Callable[[], None]) -> None:
        """Run `work`; where it fails, end the arms of that model, note why, and let the other models go on."""
        try:
            work()
        except EngineError as error:
            for at in [at for at in running if at[0] == model]:
                running.pop(at).end(0.0)
            record = self.records[model]
            record.failure = str(error)
            record.write()
            self.failures.append(f"{model}: {error}")
            self.say(f"{self._elapsed():5.0f}s  {model} FAILED: {error}")

    def _all_ready(self, model: str, running: Mapping[tuple[str, str], EngineProcess]) -> None:
        for arm in self.arms[model]:
            self._is_ready(model, arm, running[model, arm])

    def _is_ready(self, model: str, arm: str, process: EngineProcess) -> None:
        left = self.budget - self._elapsed() if self.budget else START_TIMEOUT
        found = process.answer(max(1.0, min(START_TIMEOUT, left)))
        self.check(arm, found)
        self.records[model].starts.append({"arm": arm, **found})
        told = " ".join(str(found.get(name, "-")) for name in ("start_s", "reserved_gb", "active"))
        self.say(f"{self._elapsed():5.0f}s  {model} {arm} ready: {told}")

    def _model(self, model: str, group: Group, running: dict[tuple[str, str], EngineProcess]) -> None:
        arms = self.arms[model]
        for run in range(self.runs):
            if not self._time_for(self.guess[model] * len(arms) + self.start_seconds * len(arms) * group.in_turn):
                self.left_out.append(f"{model} from run {run} on")
                self.say(f"{self._elapsed():5.0f}s  {model}: cut before run {run}")
                break
            for arm in order(arms, run):
                process = self._engine(model, arm, group, running)
                begun = self.clock()
                result = process.ask({"do": "decode", "run": run}, TURN_TIMEOUT)
                self.guess[model] = self.clock() - begun
                self.check(arm, result)
                self.records[model].add(run, arm, result)
                medians = {c: round(t["p50"], 3) for c, t in result["tpot"].items()}
                self.say(f"{self._elapsed():5.0f}s  {model} run {run} {arm}: {medians} ({self.guess[model]:.1f} s)")
        for line in self.records[model].lines():
            self.say(line)

    def _engine(
        self, model: str, arm: str, group: Group, running: dict[tuple[str, str], EngineProcess]
    ) -> EngineProcess:
        """The running one; in turn: the one that runs is kept where it is this arm's, else it makes room."""
        if group.in_turn and (model, arm) not in running:
            for at in list(running):
                running.pop(at).end()
            begun = self.clock()
            running[model, arm] = self.launch(model, arm)
            self._is_ready(model, arm, running[model, arm])
            self.start_seconds = self.clock() - begun
        return running[model, arm]

    def _seconds(self, group: Group) -> float:
        """How long a group will take: its start and all its turns."""
        turns = sum(self.guess[m] * len(self.arms[m]) * self.runs for m in group.models)
        # In turn, the last arm of a run is the first of the next.
        starts = sum((len(self.arms[m]) - 1) * self.runs + 1 for m in group.models) if group.in_turn else 1
        return turns + starts * self.start_seconds

    def _elapsed(self) -> float:
        return self.clock() - (self.begun or 0.0)

    def _time_for(self, seconds: float) -> bool:
        return not self.budget or self._elapsed() + seconds <= self.budget
