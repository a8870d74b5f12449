"""Named barriers, mbarriers and outstanding bulk copies of one block."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from skinny_core.testing.ptx.faults import BarrierFault
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.warp import Warp

MAX_COUNT = 2**20 - 1
"""Largest arrival count and largest transaction count of an mbarrier."""


@dataclass(slots=True)
class NamedBarrier:
    """One of the 16 barriers. expected: threads of the current round, `expected_all`: no count was given;
    generation: rounds completed.
    """

    clock: Array
    expected: int = 0
    expected_all: bool = False
    arrived: int = 0
    generation: int = 0
    waited: bool = False
    members: list[Warp] = field(default_factory=list)

    def arrive(self, warp: Warp, count: int, expected: int, *, stays: bool) -> None:
        """`count` threads of a warp arrive; `stays`: they wait for the rest."""
        if self.arrived and expected != self.expected:
            raise BarrierFault(f"a barrier of {expected} threads, which another warp uses with {self.expected}")
        self.expected = expected
        self.arrived += count
        if self.arrived > expected:
            raise BarrierFault(f"{self.arrived} threads arrived at a barrier of {expected}")
        self.clock[:] = _join(self.clock, warp.clock)
        self.waited = self.waited or bool(warp.waited.any())
        warp.tick()
        if stays:
            self.members.append(warp)

    def settle(self, missing: int = 0) -> bool:
        """Complete the round if everyone is there; `missing`: threads that ended and count as arrived."""
        if not self.arrived or self.arrived + missing < self.expected:
            return False
        for warp in self.members:
            warp.observe(self.clock, waited=self.waited)
        self.members.clear()
        self.clock[:] = 0  # the next round may have other members
        self.arrived, self.generation, self.waited = 0, self.generation + 1, False
        return True


def _join(a: Array, b: Array) -> Array:
    joined: Array = np.maximum(a, b)
    return joined


@dataclass(slots=True, eq=False)
class Mbarrier:
    """An mbarrier object. pending: arrivals left in this phase; transactions: bytes expected and not yet arrived."""

    address: int
    count: int
    agent: int
    creator: int
    created: int
    clock: Array
    done: Array
    pending: int = 0
    transactions: int = 0
    phase: int = 0
    fenced: bool = False
    waited: bool = False
    done_waited: bool = False

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def text(self) -> str:
        """For messages."""
        return f"mbarrier at {self.address}, phase {self.phase}, {self.pending} of {self.count} arrivals left, " + (
            f"{self.transactions} bytes expected"
        )

    def arrive(self, warp: Warp, count: int, *, release: bool, lane: int) -> None:
        """`count` arrivals, which do not complete the phase by themselves: call `settle`."""
        if count < 1 or count > self.pending:
            raise BarrierFault(f"{count} arrivals at {self.text}", lane=lane)
        self.pending -= count
        if release:
            self.clock[:] = _join(self.clock, warp.clock)
            self.waited = self.waited or bool(warp.waited[lane])

    def expect(self, size: int, lane: int | None = None) -> None:
        """Expect `size` more bytes (fewer, where negative)."""
        self.transactions += size
        if abs(self.transactions) > MAX_COUNT:
            raise BarrierFault(f"the transaction count leaves its range: {self.text}", lane=lane)

    def settle(self) -> bool:
        """Complete the phase if all arrivals and bytes are there."""
        if self.pending or self.transactions:
            return False
        self.done[:] = self.clock
        self.done[self.agent] = self.phase + 1
        self.done_waited = self.done_waited or self.waited
        self.phase, self.pending = self.phase + 1, self.count
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """An outstanding bulk copy into shared memory."""

    address: int
    source: Array
    barrier: Mbarrier
    text: str
