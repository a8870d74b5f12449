"""Run the PTX of a kernel on the CPU, and fault where a GPU would corrupt, hang or be lucky.

    memory = Memory()
    w = memory.add("w", weight, read_only=True)          # numpy; BF16 as uint16
    x = memory.add("x", activation, read_only=True, produced=True)
    y = memory.add("y", output)
    Machine(binary.ptx).run(grid, threads, [x, w, y, n], memory)

Checked: bounds, gaps between rows and alignment of every access; reads of unwritten shared memory; races between warps;
bulk copies that are touched before their mbarrier says so; barriers used against their rules; deadlock; and, for a
programmatic dependent launch, reads of a `produced` array and all global writes before griddepcontrol.wait, and `.nc`
reads of it at any time.

Not modelled: clusters, calls, local memory, atomics, time, blocks that run at once, caches, missing fences between
generic and async proxy other than after mbarrier.init, and races between lanes of one warp or between blocks.
"""

from __future__ import annotations

from skinny_core.testing.ptx.faults import (
    BarrierFault,
    Deadlock,
    Divergence,
    EarlyAccess,
    InFlightAccess,
    MemoryFault,
    PtxFault,
    PtxSyntaxError,
    Race,
    Trap,
    UninitialisedRead,
    UnknownInstruction,
)
from skinny_core.testing.ptx.machine import Machine
from skinny_core.testing.ptx.memory import Memory

__all__ = [
    "BarrierFault",
    "Deadlock",
    "Divergence",
    "EarlyAccess",
    "InFlightAccess",
    "Machine",
    "Memory",
    "MemoryFault",
    "PtxFault",
    "PtxSyntaxError",
    "Race",
    "Trap",
    "UninitialisedRead",
    "UnknownInstruction",
]
