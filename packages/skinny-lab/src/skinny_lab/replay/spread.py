"""A speed-up and its spread, from the percentiles of two contestants of one race. `plans diff` compares with it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Percentiles(Protocol):
    """Microseconds per call: `plan.Quantiles` or `race.Times`."""

    @property
    def p20(self) -> float:
        """20th percentile."""

    @property
    def p50(self) -> float:
        """Median."""

    @property
    def p80(self) -> float:
        """80th percentile."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """Baseline over candidate. mid: of the medians. low, high: of the ends that speak most against and most for the
    candidate (baseline p20 / candidate p80, baseline p80 / candidate p20)."""

    low: float
    mid: float
    high: float

    @classmethod
    def of(cls, baseline: Percentiles, candidate: Percentiles) -> Speedup:
        """From one race's percentiles, microseconds."""
        return cls(baseline.p20 / candidate.p80, baseline.p50 / candidate.p50, baseline.p80 / candidate.p20)

    def overlaps(self, other: Speedup) -> bool:
        """Whether the two spreads touch: the speed-up has not moved by more than them."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{self.mid:.3f} [{self.low:.3f}, {self.high:.3f}]"
