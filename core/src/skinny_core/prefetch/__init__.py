"""Load the next projection's weight into L2 while the memory is idle. Opt-in; no adapter uses it.

    side = prefetch.SideStream(device)      # compiles or loads what it needs: before a graph capture
    ...                                     # the GEMM before
    side.start(weight, 16 << 20)            # from here on, beside whatever the current stream does next
    ...                                     # attention, norms
    side.join()                             # the current stream waits for it
    ...                                     # the GEMM that reads `weight`

What it is for: an L2 of 60 MB (H200), weights of 20 to 200 MB, and the microseconds between two GEMMs of a decode step
in which nothing reads memory. A launch of its own and one more dependency are the price: measure in the model.

Always correct, also where the weight is updated in between: it only reads, what it reads goes nowhere, and no byte of
it is kept where a later kernel could find an old one. L2 is the point of coherence of a GPU: every store, copy or write
of a peer to this memory goes through the same L2 line and replaces what was prefetched; L1, which is not coherent, is
passed by. An update that races with it makes it useless, not wrong.
"""

from __future__ import annotations

from skinny_core.prefetch.config import DEFAULT, ReadConfig
from skinny_core.prefetch.host import into_l2, prepare, prepared, warm
from skinny_core.prefetch.side import SideStream

__all__ = ["DEFAULT", "ReadConfig", "SideStream", "into_l2", "prepare", "prepared", "warm"]
