"""What can be wrong with a PTX program or with a run of it; every fault names the line, the block and the thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """Where a fault happened. line: 1-based line of the PTX text; block: %ctaid; thread: linear number in the block."""

    line: int
    text: str
    block: tuple[int, int, int] | None = None
    thread: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: `{self.text}`"
        if self.block is not None:
            where += f", block {self.block}"
        return where if self.thread is None else f"{where}, thread {self.thread} (warp {self.thread // 32})"


class PtxFault(Exception):
    """Base of all. `lane` is the first guilty lane of the warp, `site` is filled in by the machine."""

    def __init__(self, message: str, *, lane: int | None = None, site: Site | None = None) -> None:
        super().__init__(message)
        self.message, self.lane, self.site = message, lane, site

    def __str__(self) -> str:
        return self.message if self.site is None else f"{self.message}; {self.site}"


class PtxSyntaxError(PtxFault):
    """The text is not PTX that this package reads."""


class UnknownInstruction(PtxFault):
    """An opcode, modifier or operand form that this package does not execute; raised when the program is decoded."""


class MemoryFault(PtxFault):
    """An access outside every region, in a gap between rows, misaligned, or a write to a read-only region."""


class UninitialisedRead(PtxFault):
    """Shared memory was read that nothing wrote."""


class InFlightAccess(PtxFault):
    """Shared memory was touched while a bulk copy into it is outstanding."""


class EarlyAccess(PtxFault):
    """Before griddepcontrol.wait: a read of what the kernel before this one writes, or any write to global memory."""


class Race(PtxFault):
    """Two warps touched the same shared byte, one of them writing, with no barrier between."""


class BarrierFault(PtxFault):
    """A barrier or mbarrier used against its rules."""


class Divergence(PtxFault):
    """An instruction that needs all lanes of its mask was executed by some of them only."""


class Deadlock(PtxFault):
    """Every warp waits and nothing is outstanding; or the step limit was reached."""


class Trap(PtxFault):
    """The program executed `trap`."""
