"""A warp: registers as rows of 32 lanes, and groups of lanes that share a program counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skinny_core.testing.ptx.faults import Divergence
from skinny_core.testing.ptx.memory import Array

if TYPE_CHECKING:
    from skinny_core.testing.ptx.block import Block

LANES = 32
ALL: list[int] = list(range(LANES))
Where = Array | bool
"""The `where` of numpy's ufuncs: True for all lanes, else a mask."""

PRED, U16, S16, F16, U32, S32, F32, U64, S64, F64 = range(10)
"""Indices into `Warp.rows`: the same bits, seen as different types."""
_VIEWS = {U16: "u2", S16: "i2", F16: "f2", U32: "u4", S32: "i4", F32: "f4", U64: "u8", S64: "i8", F64: "f8"}

DIVERGE, EXIT, WAIT, PARK, YIELD = -1, -2, -3, -4, -5
"""What a step returns besides None (go on) and an index (jump).

DIVERGE: the lanes `taken` go to `target`. EXIT: the active lanes end. WAIT: block on `wait`. PARK: the instruction
needs more lanes; let the others come. YIELD: go on, but let other warps run first.
"""

Step = Callable[["Warp"], int | None]


@dataclass(slots=True)
class Waiting:
    """Why a group stands still. advance: whether the instruction is done once `ready` holds, or runs again."""

    ready: Callable[[], bool]
    what: str
    advance: bool
    patient: bool = True
    """False: the instruction may also return without success, if nothing else can run."""


@dataclass(slots=True, eq=False)
class Group:
    """Lanes at one program counter."""

    pc: int
    lanes: Array
    wait: Waiting | None = None
    parked: bool = False
    late: bool = False
    """It has had its turn: another group of the warp goes first."""


class Warp:
    """State of one warp. `where` are the active lanes of the instruction being executed."""

    def __init__(self, block: Block, index: int, counts: tuple[int, int, int, int]) -> None:
        self.block, self.index = block, index
        self.rows: list[list[Array]] = [[] for _ in range(10)]
        files = {16: np.zeros((counts[1], LANES), "u2"), 32: np.zeros((counts[2], LANES), "u4")}
        files[64] = np.zeros((counts[3], LANES), "u8")
        self.rows[PRED] = list(np.zeros((counts[0], LANES), bool))
        for kind, name in _VIEWS.items():
            file = files[int(name[1]) * 8]
            file[...] = ~np.zeros((), file.dtype)  # an unset register is NaN, or an address outside everything
            self.rows[kind] = list(file.view(name))
        self.where: Where = True
        self.lanes = np.ones(LANES, bool)
        self.alive = np.ones(LANES, bool)
        self.waited = np.zeros(LANES, bool)
        self.clock = np.zeros(0, np.int32)
        self.groups: list[Group] = []
        self.wait: Waiting | None = None
        self.timed_out = False
        self.target, self.taken = 0, self.lanes
        self.wide = (np.zeros(LANES), np.zeros(LANES))  # scratch

    def start(self, threads: int, clock: Array) -> None:
        """Begin at instruction 0 with the first `threads` lanes."""
        self.alive = np.arange(LANES) < threads
        self.clock = clock
        self.groups = [Group(0, self.alive.copy())]

    def active(self) -> Array:
        """Mask of the active lanes."""
        return self.lanes if self.where is True else np.asarray(self.where)

    def selected(self) -> tuple[list[int], Array | slice]:
        """The active lanes as a list, and as an index into a row."""
        if self.where is True:
            return ALL, slice(None)
        index = np.flatnonzero(self.where)
        return index.tolist(), index

    def enter(self, group: Group) -> None:
        """Make a group's lanes the active ones."""
        self.lanes = group.lanes
        self.where = True if np.count_nonzero(group.lanes) == LANES else group.lanes

    def next_group(self) -> Group | None:
        """The group of the lowest program counter among those that can run; groups that meet are joined first."""
        for group in self.groups:
            if group.wait is not None and group.wait.ready():
                group.pc += group.wait.advance
                group.wait = None
        if len(self.groups) > 1:
            self._join()
        ready = [group for group in self.groups if group.wait is None and not group.parked]
        if len(ready) < 2:
            return ready[0] if ready else None
        chosen = min(ready, key=lambda group: (group.late, group.pc))
        for group in ready:
            group.late = False
        return chosen

    def _join(self) -> None:
        found: dict[int, Group] = {}
        kept = []
        for group in self.groups:
            other = found.get(group.pc)
            if group.wait is None and other is not None:
                other.lanes = other.lanes | group.lanes
                other.parked = False
            else:
                kept.append(group)
                if group.wait is None:
                    found[group.pc] = group
        self.groups = kept

    def limit(self, group: Group) -> int:
        """The program counter at which the group meets another one."""
        return min((g.pc for g in self.groups if g is not group and g.pc > group.pc), default=1 << 60)

    def exit(self, group: Group, mask: Array) -> None:
        """Lanes of a group end."""
        self.alive = self.alive & ~mask
        group.lanes = group.lanes & ~mask
        for one in self.groups:
            one.parked = False  # they may have waited for the lanes that are gone
        if not group.lanes.any():
            self.groups.remove(group)

    def observe(self, clock: Array, *, waited: bool) -> None:
        """Acquire what another agent released. waited: it knew that the kernel before has ended."""
        np.maximum(self.clock, clock, out=self.clock)
        if waited and not self.waited.all():
            self.waited = np.ones(LANES, bool)

    def tick(self) -> None:
        """Release: what this warp does from now on is later than what it has done."""
        self.clock[self.index] += 1

    def meet(self, mask: int | None = None) -> int | None:
        """None if the lanes of `mask` (None: all that have not ended) are the active ones; PARK if some must still
        come. Raises `Divergence` where an active lane is not in the mask, or a lane of the mask has ended.
        """
        if self.where is True and mask in (None, 0xFFFFFFFF):
            return None
        needed = self.alive if mask is None else (mask >> np.arange(LANES)) & 1 == 1
        active = self.active()
        if (active & ~needed).any():
            raise Divergence(f"a lane that is not in the mask {mask:#x}", lane=int(np.argmax(active & ~needed)))
        if (needed & ~self.alive).any():
            raise Divergence(f"the mask {mask:#x} names lane {int(np.argmax(needed & ~self.alive))}, which has ended")
        return PARK if (needed & ~active).any() else None
