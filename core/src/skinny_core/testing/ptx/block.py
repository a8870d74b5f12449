"""One block while it runs: shared memory, barriers, outstanding copies, and who may go next."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from skinny_core.testing.ptx.barriers import Copy, Mbarrier, NamedBarrier
from skinny_core.testing.ptx.faults import BarrierFault, Deadlock, Divergence, PtxFault, Race, Site
from skinny_core.testing.ptx.memory import Memory
from skinny_core.testing.ptx.parse import Instruction
from skinny_core.testing.ptx.shared import SharedMemory
from skinny_core.testing.ptx.warp import DIVERGE, EXIT, PARK, WAIT, YIELD, Group, Step, Waiting, Warp

AGENTS = 128
"""Mbarriers that a block can have for the race check."""
PATIENCE = 8
"""Times that everything may stand still and a polling wait give up before it is a deadlock."""
LATENCY = 100
"""Failed polls in a row after which an outstanding copy arrives."""
SPINS = 50_000
"""Failed polls in a row that are a deadlock too: nothing they could wait for has happened in between."""


class Block:
    """A block of `threads` threads that runs `code`. order: "latest", "eager" or a seed (see `Machine`)."""

    def __init__(
        self,
        code: Sequence[Step],
        listing: Sequence[Instruction],
        warps: list[Warp],
        shared: SharedMemory,
        memory: Memory,
        order: str | int,
    ) -> None:
        self.code, self.listing, self.warps = code, listing, warps
        self.shared, self.memory = shared, memory
        self.params, self.dependent = b"", True
        self.index = (0, 0, 0)
        self.eager = order == "eager"
        self.random = random.Random(order) if isinstance(order, int) else None
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.copies: list[Copy] = []
        self.agents = len(warps)
        self.steps = self.stalls = self.spins = 0

    def run(self, max_steps: int) -> None:
        """Until every thread has ended. Raises a `PtxFault` with its place."""
        while any(warp.groups for warp in self.warps):
            moved = False
            for warp in self.random.sample(self.warps, len(self.warps)) if self.random else self.warps:
                group = warp.next_group()
                if group is None:
                    continue
                moved = True
                self._slice(warp, group, self.random.randint(1, 48) if self.random else 4096)
                if self.random and self.copies and self.random.random() < 0.2:
                    self.land(self.random.choice(self.copies))
            if self.steps > max_steps:
                raise Deadlock(f"block {self.index} has not ended after {self.steps} warp instructions")
            if moved:
                continue
            if self.copies:
                # Nobody can go on: now, and not before, a copy has to arrive.
                self.land(self.random.choice(self.copies) if self.random else self.copies[0])
            elif not self._settle_after_exits():
                self._give_up_or_fail()
        for copy in self.copies:
            raise BarrierFault(f"the block ended while a bulk copy into it was outstanding: {copy.text}")

    def _slice(self, warp: Warp, group: Group, budget: int) -> None:
        """Run one group for up to `budget` instructions."""
        warp.enter(group)
        code, pc, limit, first = self.code, group.pc, warp.limit(group), budget
        try:
            while budget:
                budget -= 1
                out = code[pc](warp)
                if out is None:
                    pc += 1
                    if pc == limit:
                        break
                elif out >= 0:
                    pc = out
                    if len(warp.groups) > 1:
                        break
                else:
                    pc = self._signal(warp, group, out, pc)
                    break
        except PtxFault as fault:
            if fault.site is None:
                fault.site = self._site(warp, pc, fault.lane)
            raise
        except IndexError:
            if pc < len(code):
                raise
            raise PtxFault("the program ran past its last instruction") from None
        self.steps += first - budget
        group.pc, group.late = pc, group.late or not budget

    def _signal(self, warp: Warp, group: Group, out: int, pc: int) -> int:
        if out == YIELD:
            group.late = True
            return pc + 1
        if out == PARK:
            group.parked = True
            return pc
        if out == WAIT:
            group.wait, warp.wait = warp.wait, None
            return pc
        if out == EXIT:
            warp.exit(group, warp.active().copy())
            self.stalls = 0
            return pc + 1
        assert out == DIVERGE
        taken = warp.taken
        group.lanes = group.lanes & ~taken
        warp.groups.append(Group(warp.target, taken))
        return pc + 1

    def _site(self, warp: Warp, pc: int, lane: int | None) -> Site:
        line = self.listing[pc]
        if lane is None:
            lane = int(np.argmax(warp.active()))
        return Site(line.line, line.text, self.index, warp.index * 32 + lane)

    # Copies and mbarriers

    def mbarrier(self, address: int, warp: Warp, lane: int) -> Mbarrier:
        """The object at an address, which must be initialised, and visibly so for this warp."""
        found = self.mbarriers.get(address)
        if found is None:
            raise BarrierFault(f"there is no mbarrier at shared address {address}", lane=lane)
        if self.shared.races and warp.clock[found.creator] < found.created:
            raise Race(f"warp {found.creator} initialised the {found.text} with no barrier since", lane=lane)
        return found

    def init_mbarrier(self, address: int, count: int, warp: Warp, lane: int) -> None:
        """mbarrier.init."""
        if address in self.mbarriers:
            raise BarrierFault(f"there is a valid mbarrier at shared address {address} already", lane=lane)
        if not 1 <= count < 2**20:
            raise BarrierFault(f"an mbarrier of {count} arrivals", lane=lane)
        if self.agents == len(warp.clock):
            raise BarrierFault(f"more than {AGENTS} mbarriers", lane=lane)
        self.shared.barrier_object(address, lane)
        blank = np.zeros_like(warp.clock)
        self.mbarriers[address] = Mbarrier(
            address, count, self.agents, warp.index, int(warp.clock[warp.index]), blank, blank.copy()
        )
        self.agents += 1

    def launch(self, copy: Copy) -> None:
        """A copy begins."""
        self.copies.append(copy)
        if self.eager:
            self.land(copy)

    def land(self, copy: Copy) -> None:
        """A copy ends: its bytes are there and its mbarrier knows."""
        self.copies.remove(copy)
        barrier = copy.barrier
        self.shared.land_copy(copy.address, copy.source, barrier.agent, barrier.phase + 1)
        barrier.expect(-len(copy.source))
        barrier.settle()
        self.stalls = self.spins = 0

    def progressed(self) -> None:
        """Something happened that a polling wait could be waiting for."""
        self.stalls = self.spins = 0

    def spun(self, text: str) -> None:
        """A poll failed."""
        self.spins += 1
        if self.copies and self.spins > LATENCY:
            self.land(self.copies[0])
        if self.spins > SPINS:
            raise Deadlock(f"{SPINS} polls in a row failed: {text}")

    # Standstill

    def threads_alive(self) -> int:
        """Threads of the block that have not ended."""
        return sum(int(np.count_nonzero(warp.alive)) for warp in self.warps)

    def warps_alive(self) -> int:
        """Warps with a thread that has not ended."""
        return sum(bool(warp.groups) for warp in self.warps)

    def named(self, index: int) -> NamedBarrier:
        """Barrier `index`, 0 to 15."""
        if not 0 <= index < 16:
            raise BarrierFault(f"there is no barrier {index}")
        if index not in self.barriers:
            self.barriers[index] = NamedBarrier(np.zeros_like(self.warps[0].clock))
        return self.barriers[index]

    def _settle_after_exits(self) -> bool:
        """A barrier of the whole block does not wait for warps that have ended."""
        ended = sum(32 for warp in self.warps if not warp.groups)
        settled = [barrier.settle(ended) for barrier in self.barriers.values() if barrier.expected_all]
        return any(settled)

    def _give_up_or_fail(self) -> None:
        waits = [(warp, group) for warp in self.warps for group in warp.groups]
        impatient = [group for _, group in waits if group.wait is not None and not group.wait.patient]
        if impatient and self.stalls < PATIENCE:
            self.stalls += 1
            for warp, group in waits:
                if group in impatient:
                    warp.timed_out = True
                    group.wait = None
            return
        told = "; ".join(f"warp {warp.index}: {self._standing(group.wait, group)}" for warp, group in waits)
        parked = [(warp, group) for warp, group in waits if group.parked]
        if parked and not impatient:
            warp, group = parked[0]
            site = self._site(warp, group.pc, int(np.argmax(group.lanes)))
            raise Divergence(f"the other lanes that it needs never come; {told}", site=site)
        raise Deadlock(f"every warp waits: {told}")

    def _standing(self, wait: Waiting | None, group: Group) -> str:
        line = self.listing[group.pc]
        return f"{wait.what if wait else 'other lanes of the warp'} (line {line.line}: `{line.text}`)"
