"""Weights to race with, kept from one M to the next as far as the device has room."""

from __future__ import annotations

from collections import OrderedDict

import torch

from skinny_lab.bench import race
from skinny_lab.tune.request import Site

SHARE = 0.4
"""Of the device's memory; a decode step needs room, too."""
SPIN_PRODUCTS = 200


class Arenas:
    """Rotating weights by shape and dtype; the longest unused go where there would be more than `limit` bytes."""

    def __init__(self, l2_bytes: int, limit: int) -> None:
        self.l2_bytes, self.limit = l2_bytes, limit
        self._kept: OrderedDict[tuple[int, int, torch.dtype], race.Arena] = OrderedDict()

    def get(self, site: Site) -> race.Arena:
        """The arena of a site. Raises `torch.OutOfMemoryError` where it does not fit even alone."""
        at = (site.n, site.k, site.dtype.torch)
        if at not in self._kept:
            while self._kept and sum(map(self._bytes, [*self._kept, at])) > self.limit:
                self._kept.popitem(last=False)
                torch.cuda.empty_cache()
            try:
                self._kept[at] = race.Arena(*at, self.l2_bytes)
            except torch.OutOfMemoryError:
                if not self._kept:
                    raise
                self.clear()
                self._kept[at] = race.Arena(*at, self.l2_bytes)
        self._kept.move_to_end(at)
        return self._kept[at]

    def bytes_for(self, site: Site) -> int:
        """What the arena of a site takes."""
        return self._bytes((site.n, site.k, site.dtype.torch))

    def clear(self) -> None:
        """Give everything back."""
        self._kept.clear()
        torch.cuda.empty_cache()

    def _bytes(self, at: tuple[int, int, torch.dtype]) -> int:
        return 2 * at[0] * at[1] * race.copies_for(at[0], at[1], self.l2_bytes)


def device_bytes() -> int:
    """Memory of the current device."""
    return int(torch.cuda.mem_get_info()[1])


def spin(arena: race.Arena) -> None:
    """Some ten milliseconds of products: a GPU that waited for compilers has lowered its clock."""
    x, w = arena.activation(16), arena.weights[0]
    for _ in range(SPIN_PRODUCTS):
        torch.mm(x, w.t())
    torch.cuda.synchronize()
