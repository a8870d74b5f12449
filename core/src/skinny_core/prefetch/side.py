"""A stream beside the current one: start a prefetch there after what has been queued, join before the weight is used.

Made of events only, so that a graph capture turns it into a fork and a join.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skinny_core.errors import KernelRefusedError
from skinny_core.prefetch import host
from skinny_core.prefetch.config import DEFAULT, STEM, ReadConfig

if TYPE_CHECKING:
    import torch


class SideStream:
    """One side stream of a CUDA device. Not for use from two threads at once.

    Every `start` needs a `join` on the stream it was started from before a capture ends, or the capture fails with
    unjoined work; and before the weight is freed, or the read may see memory of somebody else (it still writes none).
    """

    def __init__(self, device: torch.device | int | None = None, *, config: ReadConfig = DEFAULT) -> None:
        """device: default the current one. Compiles or loads the kernel, so raises what `prefetch.warm` raises."""
        import torch

        index = device if isinstance(device, int) else None if device is None else device.index
        self.index = torch.cuda.current_device() if index is None else index
        self.config = config
        host.warm(self.index, config=config)
        self.stream = torch.cuda.Stream(self.index)
        self._pending = False

    def start(self, weight: torch.Tensor, bytes: int | None = None) -> int:
        """Prefetch as `into_l2` does, after everything that is on the current stream now and beside what comes next.

        Returns the bytes asked for; with none nothing is queued. Raises `KernelRefusedError` for a weight that
        `into_l2` does not take or that is on another device; nothing is queued then either.
        """
        import torch

        # Before the fork: an error must not leave a captured stream that nobody joins.
        extent = host.check(weight, bytes)
        if weight.get_device() != self.index:
            what = f"{STEM} on CUDA device {self.index} cannot take a weight on {weight.device}"
            raise KernelRefusedError(what, "use a SideStream of the weight's device")
        if extent.bytes == 0:
            return 0
        self.stream.wait_stream(torch.cuda.current_stream(self.index))
        self._pending = True
        with torch.cuda.stream(self.stream):
            return host.into_l2(weight, bytes, config=self.config)

    def join(self) -> bool:
        """The current stream waits for every prefetch since the last join; returns whether there was one.

        Without one nothing is queued: waiting for a stream that a capture has not forked would end the capture.
        """
        import torch

        if not self._pending:
            return False
        self._pending = False
        torch.cuda.current_stream(self.index).wait_stream(self.stream)
        return True
