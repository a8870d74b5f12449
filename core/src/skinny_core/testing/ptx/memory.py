"""Global memory as named regions over numpy arrays, at made-up addresses far from each other.

An access is checked before it happens: inside one region, aligned to its own size, allowed by the region's flags.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skinny_core.testing.ptx.faults import EarlyAccess, MemoryFault

Array = NDArray[Any]
FIRST = 0x7_0000_0000
GAP = 1 << 20
"""Bytes between regions: an access this far out of bounds is still told from one of the neighbour."""
ALIGNMENT = 256  # what cudaMalloc promises


@dataclass(slots=True)
class Region:
    """An array at an address. read_only: stores fault. produced: the kernel before this one in the stream writes it, so
    that a read before griddepcontrol.wait faults. `valid` marks the bytes inside rows; None where there are no gaps.
    """

    name: str
    base: int
    data: Array  # uint8, one-dimensional, the caller's memory
    valid: Array | None
    read_only: bool
    produced: bool
    views: dict[tuple[int, int], Array] = field(default_factory=dict)

    def view(self, size: int, count: int) -> Array:
        """The bytes as unsigned integers of `size` bytes, `[n, count]`, or `[n]` for a count of 1."""
        key = (size, count)
        if key not in self.views:
            whole = len(self.data) // (size * count) * size * count
            words = self.data[:whole].view(f"u{size}")
            self.views[key] = words if count == 1 else words.reshape(-1, count)
        return self.views[key]


class Memory:
    """The global memory of a launch. Arrays are not copied: stores of the kernel are seen in them."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._bases: list[int] = []
        self._next = FIRST

    def add(
        self, name: str, array: Array, *, read_only: bool = False, produced: bool = False, misalign: int = 0
    ) -> int:
        """Map an array and return its address, a multiple of 256 plus `misalign` bytes.

        The array may have gaps between rows (a strided view, last axis contiguous): the gaps are out of bounds.
        """
        item = array.itemsize
        span = item + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        if array.size == 0 or any(s < 0 for s in array.strides):
            raise ValueError(f"{name}: an empty array or one with negative strides has no address")
        data = _bytes_from(array, span)
        valid = None
        if span != array.nbytes:
            valid = np.zeros(span, dtype=bool)
            marks = np.lib.stride_tricks.as_strided(valid, (*array.shape, item), (*array.strides, 1))
            marks[...] = True
        base = self._next + misalign
        self._next = (base + span + GAP + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.regions.append(Region(name, base, data, valid, read_only, produced))
        self._bases.append(base)
        return base

    def _nearest(self, address: int, size: int) -> str:
        if not self.regions:
            return "there is no region"
        at = max(0, bisect_right(self._bases, address) - 1)
        near = min(self.regions[at : at + 2], key=lambda r: max(r.base - address, address - r.base - len(r.data)))
        return f"{size} bytes at offset {address - near.base} of `{near.name}`, which has {len(near.data)}"

    def check(self, addresses: list[int], lanes: list[int], size: int, *, write: bool, waited: Array) -> Region | None:
        """The region of all addresses, or None where they lie in several; raises the fault of the first bad lane."""
        low, high = min(addresses), max(addresses)
        region = self.region(low)
        if region is None or high + size > region.base + len(region.data):
            for address, lane in zip(addresses, lanes, strict=True):
                one = self.region(address)
                if one is None or address + size > one.base + len(one.data):
                    what = "store" if write else "load"
                    raise MemoryFault(f"{what} outside every region: {self._nearest(address, size)}", lane=lane)
            return None
        at = np.array(addresses)
        # One test for all lanes; the loops below only look for the guilty one.
        if np.count_nonzero(at & (size - 1)):
            lane, address = next((n, a) for n, a in zip(lanes, addresses, strict=True) if a % size)
            raise MemoryFault(f"misaligned: {self._nearest(address, size)}", lane=lane)
        if write and region.read_only:
            raise MemoryFault(f"store to read-only memory: {self._nearest(addresses[0], size)}", lane=lanes[0])
        if (write or region.produced) and np.count_nonzero(waited[lanes]) != len(lanes):
            lane, address = next((n, a) for n, a in zip(lanes, addresses, strict=True) if not waited[n])
            what = "a store to memory that the kernel before may still read" if write else "a read of its result"
            raise EarlyAccess(f"before griddepcontrol.wait: {what}, {self._nearest(address, size)}", lane=lane)
        if region.valid is not None:
            inside = region.valid[(at - region.base)[:, None] + np.arange(size)].all(axis=1)
            if np.count_nonzero(inside) != len(lanes):
                bad = int(np.argmin(inside))
                raise MemoryFault(f"between the rows: {self._nearest(addresses[bad], size)}", lane=lanes[bad])
        return region

    def region(self, address: int) -> Region | None:
        """The region that an address lies in."""
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        region = self.regions[at]
        return region if address < region.base + len(region.data) else None

    def load(self, addresses: list[int], lanes: list[int], item: int, count: int, waited: Array) -> Array:
        """Unsigned integers `[lanes]` or `[lanes, count]` of `item` bytes at one address per lane."""
        region = self.check(addresses, lanes, item * count, write=False, waited=waited)
        if region is None:
            pieces = [self.load([a], [lane], item, count, waited) for a, lane in zip(addresses, lanes, strict=True)]
            return np.concatenate(pieces)
        base, size = region.base, item * count
        if base % size:
            whole = np.stack([region.data[a - base : a - base + size] for a in addresses]).view(f"u{item}")
            return whole[:, 0] if count == 1 else whole
        return region.view(item, count)[[(a - base) // size for a in addresses]]

    def store(
        self, addresses: list[int], lanes: list[int], values: Array, item: int, count: int, waited: Array
    ) -> None:
        """The reverse of `load`. Of several lanes at one address the last wins."""
        region = self.check(addresses, lanes, item * count, write=True, waited=waited)
        if region is None:
            for j, (address, lane) in enumerate(zip(addresses, lanes, strict=True)):
                self.store([address], [lane], values[j : j + 1], item, count, waited)
            return
        base, size = region.base, item * count
        if base % size:
            raw = np.ascontiguousarray(values).view("u1").reshape(len(addresses), size)
            for j, address in enumerate(addresses):
                region.data[address - base : address - base + size] = raw[j]
            return
        region.view(item, count)[[(a - base) // size for a in addresses]] = values

    def non_coherent(self, addresses: list[int], lanes: list[int]) -> None:
        """Refuse a `.nc` load of a produced array, even after the wait: the path may return what was there before."""
        for address, lane in zip(addresses, lanes, strict=True):
            region = self.region(address)
            if region is not None and region.produced:
                raise EarlyAccess(f"a non-coherent read of a kernel's result, {self._nearest(address, 1)}", lane=lane)

    def bulk(self, address: int, size: int, lane: int, waited: Array) -> Array:
        """Check a bulk read of `size` bytes and return the bytes, as a view that later stores change."""
        region = self.region(address)
        if region is None or address + size > region.base + len(region.data):
            raise MemoryFault(f"bulk read outside every region: {self._nearest(address, size)}", lane=lane)
        start = address - region.base
        if region.valid is not None and not region.valid[start : start + size].all():
            raise MemoryFault(f"bulk read across a gap between rows: {self._nearest(address, size)}", lane=lane)
        if region.produced and not waited[lane]:
            raise EarlyAccess(f"before griddepcontrol.wait: a bulk read, {self._nearest(address, size)}", lane=lane)
        return region.data[start : start + size]


def _bytes_from(array: Array, span: int) -> Array:
    """The `span` bytes from the first element on, as a view of the caller's memory."""
    first = array[(slice(0, 1),) * array.ndim].reshape(-1).view("u1")
    if not np.shares_memory(first, array):
        raise ValueError("the first element could not be viewed")
    return np.lib.stride_tricks.as_strided(first, (span,), (1,))
