"""Shared memory of one block: bytes, what is known about each of them, and who touched it last.

Races are found with vector clocks: every warp has a clock per agent (the warps, then one per mbarrier for the bulk
copies it reports). An access is ordered after another if the warp's clock has reached the tick of that access.
"""

from __future__ import annotations

import numpy as np

from skinny_core.testing.ptx.faults import InFlightAccess, MemoryFault, Race, UninitialisedRead
from skinny_core.testing.ptx.memory import Array

BASE = 1024
"""Address of the first byte: sm_90 keeps the first KB for itself, and a null address should fault."""
WINDOW = 0x7F00_0000_0000
"""Where shared memory lies among generic addresses."""

WRITTEN, IN_FLIGHT, BARRIER = 1, 2, 4


class SharedMemory:
    """`size` bytes at `BASE`. state per byte: 0 never written, WRITTEN, IN_FLIGHT, or part of a BARRIER object."""

    def __init__(self, size: int, warps: int, *, uninitialised: bool, races: bool) -> None:
        self.size, self.warps = size, warps
        padded = max(16, -(-size // 16) * 16)
        self.data = np.full(padded, 0xFF, np.uint8)  # NaN, should the check for uninitialised reads be off
        self.state = np.zeros(padded, np.uint8)
        self.uninitialised, self.races = uninitialised, races
        self.writer = np.zeros(padded if races else 0, np.int16)
        self.written = np.zeros(padded if races else 0, np.int32)
        self.read = np.zeros((warps, padded if races else 0), np.int32)
        self._views: dict[tuple[int, int], Array] = {}

    def _offsets(self, addresses: list[int], lanes: list[int], size: int) -> list[int]:
        if min(addresses) < BASE or max(addresses) + size > BASE + self.size:
            for a, lane in zip(addresses, lanes, strict=True):
                if not BASE <= a <= BASE + self.size - size:
                    raise MemoryFault(
                        f"{size} bytes at offset {a - BASE} of shared memory, which has {self.size}", lane=lane
                    )
        if any(a % size for a in addresses):
            a, lane = next((a, n) for a, n in zip(addresses, lanes, strict=True) if a % size)
            raise MemoryFault(f"misaligned: {size} bytes at offset {a - BASE} of shared memory", lane=lane)
        return [a - BASE for a in addresses]

    def _view(self, item: int, count: int) -> Array:
        key = (item, count)
        if key not in self._views:
            words = self.data.view(f"u{item}")
            self._views[key] = words if count == 1 else words.reshape(-1, count)
        return self._views[key]

    def load(self, addresses: list[int], lanes: list[int], item: int, count: int, warp: int, clock: Array) -> Array:
        """Unsigned integers `[lanes]` or `[lanes, count]` of `item` bytes, read by `warp` whose clocks are `clock`."""
        size = item * count
        offsets = self._offsets(addresses, lanes, size)
        touched = (np.array(offsets)[:, None] + np.arange(size)).reshape(-1)
        state = self.state[touched]
        if np.count_nonzero(state != WRITTEN):
            self._complain(state, touched, size, lanes, reading=True)
        if self.races:
            late: Array = self.written[touched] > clock[self.writer[touched]]
            if np.count_nonzero(late):
                self._race(late, touched, size, lanes, "reads", "wrote", warp)
            self.read[warp, touched] = clock[warp]
        return self._view(item, count)[[o // size for o in offsets]]

    def store(
        self, addresses: list[int], lanes: list[int], values: Array, item: int, count: int, warp: int, clock: Array
    ) -> None:
        """The reverse of `load`. Of several lanes at one address the last wins."""
        size = item * count
        offsets = self._offsets(addresses, lanes, size)
        touched = (np.array(offsets)[:, None] + np.arange(size)).reshape(-1)
        self._claim(touched, size, lanes, warp, clock)
        self.state[touched] = WRITTEN
        if self.races:
            self.writer[touched], self.written[touched] = warp, clock[warp]
        self._view(item, count)[[o // size for o in offsets]] = values

    def _claim(self, touched: Array, size: int, lanes: list[int], warp: int, clock: Array) -> None:
        """Check that `warp` may overwrite these bytes."""
        state = self.state[touched]
        if np.count_nonzero(state > WRITTEN):
            self._complain(state, touched, size, lanes, reading=False)
        if self.races:
            late: Array = self.written[touched] > clock[self.writer[touched]]
            if np.count_nonzero(late):
                self._race(late, touched, size, lanes, "writes", "wrote", warp)
            unread: Array = np.any(self.read[:, touched] > clock[: self.warps, None], axis=0)
            if np.count_nonzero(unread):
                self._race(unread, touched, size, lanes, "writes", "read", warp)

    def launch_copy(self, address: int, size: int, lane: int, warp: int, clock: Array) -> None:
        """A bulk copy of `size` bytes to `address` begins: the issuing warp must be allowed to overwrite them."""
        if address < BASE or address + size > BASE + self.size:
            raise MemoryFault(
                f"a bulk copy of {size} bytes to offset {address - BASE} of shared memory, which has {self.size}",
                lane=lane,
            )
        touched = np.arange(address - BASE, address - BASE + size)
        self._claim(touched, size, [lane], warp, clock)
        self.state[touched] = IN_FLIGHT

    def land_copy(self, address: int, source: Array, agent: int, tick: int) -> None:
        """The bytes of a bulk copy arrive; a warp may read them once its clock for `agent` has reached `tick`."""
        place = slice(address - BASE, address - BASE + len(source))
        self.data[place] = source
        self.state[place] = WRITTEN
        if self.races:
            self.writer[place], self.written[place] = agent, tick

    def barrier_object(self, address: int, lane: int) -> None:
        """Mark the 8 bytes of an mbarrier: ordinary accesses to them fault from now on."""
        offset = self._offsets([address], [lane], 8)[0]
        state = self.state[offset : offset + 8]
        if (state == IN_FLIGHT).any():
            self._complain(state, np.arange(offset, offset + 8), 8, [lane], reading=False)
        state[:] = BARRIER

    def release_object(self, address: int) -> None:
        """The reverse of `barrier_object`: the bytes count as never written."""
        self.state[address - BASE : address - BASE + 8] = 0

    def _complain(self, state: Array, touched: Array, size: int, lanes: list[int], *, reading: bool) -> None:
        verb = "read of" if reading else "write to"
        for bit, kind, what in (
            (IN_FLIGHT, InFlightAccess, "while a bulk copy into it is outstanding"),
            (BARRIER, MemoryFault, "which is part of an mbarrier object"),
        ):
            if (state == bit).any():
                at = int(np.argmax(state == bit))
                where = f"{verb} shared byte at offset {touched[at]} {what}"
                raise kind(where, lane=lanes[min(at // size, len(lanes) - 1)])
        if reading and self.uninitialised:
            at = int(np.argmax(state == 0))
            raise UninitialisedRead(f"shared byte at offset {touched[at]} was never written", lane=lanes[at // size])

    def _race(self, late: Array, touched: Array, size: int, lanes: list[int], verb: str, other: str, warp: int) -> None:
        at = int(np.argmax(late))
        byte = int(touched[at])
        if other == "wrote" and self.writer[byte] >= self.warps:
            who = "a bulk copy that this warp has not waited for wrote"
        elif other == "wrote":
            who = f"warp {self.writer[byte]} wrote"
        else:
            who = f"warp {int(np.argmax(self.read[:, byte] * (np.arange(self.warps) != warp)))} read"
        raise Race(
            f"warp {warp} {verb} shared byte at offset {byte}, which {who} with no barrier between",
            lane=lanes[min(at // size, len(lanes) - 1)],
        )
