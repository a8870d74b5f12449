"""When a cell's verdict is confirmed. This is the one place that says it; docs/measuring.md repeats it.

The keep rule (`tuning`: `COLD_GAIN`, `hot_gain`) asks for a speed-up cold and one hot. A replay has each with its
spread, [baseline p20 / candidate p80, baseline p80 / candidate p20] of the new run. A verdict holds "within the spread"
while the spread does not contradict it:

- a `win` holds while the upper end of both spreads reaches what is needed; marginal where a median does not;
- a `refused` holds while the lower end of one spread misses what is needed; marginal where both medians reach it.

The decode step of M >= 3 is not repeated, nor is a cell held against other M. A cell that the plan refused for its
decode step, or because a larger M was faster, and that passes alone is therefore neither confirmed nor contradicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from skinny_core.plan import Cell
from skinny_lab.bench import tuning
from skinny_lab.replay.spread import Speedup


class Outcome(str, Enum):
    """What a replay says about one cell."""

    CONFIRMED = "confirmed"
    MARGINAL = "marginal"
    """Confirmed, but only thanks to the spread: its median is on the other side of the rule."""
    LOST = "lost"
    """A `win` that would be refused now."""
    WOULD_WIN = "would win now"
    """A `refused` that passes now."""
    DECODE_STEP = "decode step"
    """Refused for its decode step, which is not repeated; it passes alone, as it did. Not counted."""
    HELD_BACK = "held back"
    """Refused because a larger M was faster, which is not repeated; it passes alone, as it did. Not counted."""
    FAILED = "not measured"
    """Wrong results, or an error. Counts as not confirmed."""

    @property
    def holds(self) -> bool:
        """Whether the plan's verdict is confirmed."""
        return self in (Outcome.CONFIRMED, Outcome.MARGINAL)

    @property
    def counts(self) -> bool:
        """Whether the cell is one of the M in "N of M confirmed"."""
        return self not in (Outcome.DECODE_STEP, Outcome.HELD_BACK)


@dataclass(frozen=True, slots=True)
class Judgement:
    """An outcome, and one sentence where there is more to say than the outcome does."""

    outcome: Outcome
    note: str = ""


def judge(cell: Cell, cold: Speedup, hot: Speedup) -> Judgement:
    """Does the verdict of a `win` or `refused` cell hold, by the speed-ups that were just measured?"""
    needed = tuning.hot_gain(cell.m)
    sides = (("cold", cold, tuning.COLD_GAIN), ("hot", hot, needed))
    missed = ", ".join(f"{speed.mid:.3f}x {name}, needs {gain}x" for name, speed, gain in sides if speed.mid < gain)
    if cell.status == "win":
        beyond = ", ".join(f"{s.high:.3f}x {name} at best, needs {gain}x" for name, s, gain in sides if s.high < gain)
        if beyond:
            return Judgement(Outcome.LOST, beyond)
        return Judgement(Outcome.MARGINAL, missed) if missed else Judgement(Outcome.CONFIRMED)
    in_model = cell.evidence.in_model_us
    if cell.m >= 3 and in_model is not None and in_model > 0 and not missed:
        return Judgement(Outcome.DECODE_STEP, f"passes alone; its decode step was {in_model:.1f} us slower")
    if not missed and _passed(cell):
        return Judgement(Outcome.HELD_BACK, f"passes alone, as it did: {cell.why}")
    if all(speed.low >= gain for _, speed, gain in sides):
        return Judgement(Outcome.WOULD_WIN, "unless the decode step is slower" if cell.m >= 3 else "")
    if missed:
        return Judgement(Outcome.CONFIRMED)
    return Judgement(Outcome.MARGINAL, f"{cold.mid:.3f}x cold and {hot.mid:.3f}x hot pass by their medians")


def _passed(cell: Cell) -> bool:
    """Whether a cell's own evidence obeys the keep rule, so that it was refused for another cell's sake."""
    e = cell.evidence
    if e.baseline_hot is None or e.candidate_hot is None:
        return False
    if cell.m >= 3 and (e.in_model_us is None or e.in_model_us > 0):
        return False
    return e.speedup >= tuning.COLD_GAIN and e.baseline_hot.p50 / e.candidate_hot.p50 >= tuning.hot_gain(cell.m)


def share(outcomes: list[Outcome]) -> tuple[int, int, float]:
    """(confirmed, counted, percent confirmed); 0 percent where none counts."""
    counted = [outcome for outcome in outcomes if outcome.counts]
    holding = sum(outcome.holds for outcome in counted)
    return holding, len(counted), 100.0 * holding / len(counted) if counted else 0.0
