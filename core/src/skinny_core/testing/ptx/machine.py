"""The machine: decodes a program once, then runs grids of it, block after block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skinny_core.testing.ptx import access, arithmetic, convert, floating, lanes, sync, tensor
from skinny_core.testing.ptx.block import AGENTS, Block
from skinny_core.testing.ptx.decode import Builder, Decoder
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array, Memory
from skinny_core.testing.ptx.parse import parse
from skinny_core.testing.ptx.shared import SharedMemory
from skinny_core.testing.ptx.warp import LANES, Warp

BUILDERS: dict[str, Builder] = {
    **arithmetic.BUILDERS,
    **convert.BUILDERS,
    **floating.BUILDERS,
    **access.BUILDERS,
    **tensor.BUILDERS,
    **lanes.BUILDERS,
    **sync.BUILDERS,
}
"""Every opcode by its first part."""
SHARED_LIMIT = 227 * 1024
"""Shared memory that a block may have on sm_90."""


class Machine:
    """One entry of a PTX text, ready to run. Raises `PtxSyntaxError` and `UnknownInstruction` with the line.

    order: when warps run and bulk copies arrive. "latest": a warp runs until it must wait, and a copy arrives when no
    warp can go on without it, oldest first. "eager": the same, but a copy arrives at once. A number seeds random
    slices, arrivals in any order, and waits that give up early.

    uninitialised, races: whether to fault on reads of shared bytes that nobody wrote, and on accesses of two warps that
    no barrier orders.
    """

    def __init__(
        self,
        ptx: str,
        *,
        entry: str | None = None,
        order: str | int = "latest",
        uninitialised: bool = True,
        races: bool = True,
    ) -> None:
        if isinstance(order, str) and order not in ("latest", "eager"):
            raise ValueError(f"order {order!r}: use 'latest', 'eager' or a seed")
        self.program = parse(ptx, entry)
        if self.program.clusters:
            raise UnknownInstruction("clusters of more than one block are not supported")
        self.order, self.uninitialised, self.races = order, uninitialised, races
        self._decoder = Decoder(self.program)
        self._code = self._decoder.steps(BUILDERS)
        self.instructions = 0
        """Warp instructions executed by the last run."""

    def run(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[int],
        memory: Memory,
        *,
        dynamic_shared: int = 0,
        dependent: bool = True,
        only: Sequence[int] | None = None,
        max_steps: int = 50_000_000,
    ) -> None:
        """Run every block, in order of %ctaid, x fastest. Raises a `PtxFault` at the first thing that is wrong.

        args: one integer per entry parameter, in order; an address is what `Memory.add` returned. dynamic_shared: bytes
        of dynamic shared memory. dependent: a kernel before this one may still run until griddepcontrol.wait (False:
        an ordinary launch). only: linear numbers of the blocks to run. max_steps: warp instructions of one block.
        """
        shape, threads = _three(grid), _three(block)
        if self.program.block is not None and self.program.block != threads:
            raise ValueError(f"the entry requires blocks of {self.program.block}, not {threads}")
        if len(args) != len(self.program.params):
            raise ValueError(f"{len(args)} arguments for {len(self.program.params)} parameters")
        params = bytearray(self._decoder.param_bytes)
        for param, value in zip(self.program.params, args, strict=True):
            at = self._decoder.params[param.name]
            params[at : at + param.size] = (int(value) % (1 << 8 * param.size)).to_bytes(param.size, "little")
        size = self._decoder.static_shared + dynamic_shared
        if size > SHARED_LIMIT:
            raise ValueError(f"{size} bytes of shared memory, a block can have {SHARED_LIMIT}")
        self.instructions = 0
        numbers = range(int(np.prod(shape))) if only is None else only
        with np.errstate(all="ignore"):  # overflow and NaN are values here, as on the device
            for number in numbers:
                index = (number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1]))
                one = self._block(index, shape, threads, bytes(params), memory, size, dynamic_shared, dependent)
                one.run(max_steps)
                self.instructions += one.steps

    def _block(
        self,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        params: bytes,
        memory: Memory,
        shared_bytes: int,
        dynamic: int,
        dependent: bool,
    ) -> Block:
        total = int(np.prod(threads))
        count = -(-total // LANES)
        warps: list[Warp] = []
        shared = SharedMemory(shared_bytes, count, uninitialised=self.uninitialised, races=self.races)
        made = Block(self._code, self.program.instructions, warps, shared, memory, self.order)
        made.params, made.index, made.agents = params, index, count
        made.dependent = dependent
        for number in range(count):
            warp = Warp(made, number, self._decoder.warp_counts())
            linear = number * LANES + np.arange(LANES)
            self._decoder.fill(warp, _special(linear, index, grid, threads, number, count, shared_bytes, dynamic))
            clock = np.zeros(count + AGENTS, np.int32)
            clock[number] = 1
            warp.start(min(LANES, total - number * LANES), clock)
            warp.waited[:] = not dependent
            warps.append(warp)
        return made


def _three(size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = [size] if isinstance(size, int) else list(size)
    x, y, z = sizes + [1] * (3 - len(sizes))
    return x, y, z


def _special(
    linear: Array,
    index: tuple[int, int, int],
    grid: tuple[int, int, int],
    threads: tuple[int, int, int],
    warp: int,
    warps: int,
    shared_bytes: int,
    dynamic: int,
) -> dict[str, int | Array]:
    lane = np.arange(LANES)
    bit = np.uint32(1) << lane.astype("u4")
    values: dict[str, int | Array] = {
        "%tid.x": linear % threads[0],
        "%tid.y": linear // threads[0] % threads[1],
        "%tid.z": linear // (threads[0] * threads[1]),
        "%laneid": lane,
        "%warpid": warp,
        "%nwarpid": warps,
        "%nsmid": 1,
        "%cluster_nctarank": 1,
        "%dynamic_smem_size": dynamic,
        "%total_smem_size": shared_bytes,
        "%lanemask_eq": bit,
        "%lanemask_lt": bit - 1,
        "%lanemask_le": (bit - 1) | bit,
        "%lanemask_gt": ~((bit - 1) | bit),
        "%lanemask_ge": ~(bit - 1),
    }
    for axis, name in enumerate("xyz"):
        values[f"%ntid.{name}"] = threads[axis]
        values[f"%ctaid.{name}"] = index[axis]
        values[f"%nctaid.{name}"] = grid[axis]
        values[f"%cluster_nctaid.{name}"] = 1
    return values
