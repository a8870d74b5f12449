"""How the weight is read: threads and loads in flight, and the arithmetic of a launch. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skinny_core.errors import ConfigError

STEM = "l2_prefetch"
VECTOR_BYTES = 16
"""Bytes of one load."""


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A launch of at most `blocks` blocks of `threads` threads, each with `loads` vectors of 16 bytes in flight: it
    asks for so many at once, and for the next ones when they have come.

    blocks is a run-time number, threads and loads are compiled in. Raises `ConfigError`.
    """

    blocks: int = 64
    threads: int = 512
    loads: int = 8

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ConfigError(f"{STEM}: {self.blocks} blocks", "use at least 1")
        if self.threads not in (64, 128, 256, 512, 1024):
            raise ConfigError(f"{STEM}: {self.threads} threads", "use 64, 128, 256, 512 or 1024")
        if self.loads not in (1, 2, 4, 8):
            raise ConfigError(f"{STEM}: {self.loads} loads", "use 1, 2, 4 or 8: each in flight takes 4 registers")

    @property
    def batch(self) -> int:
        """Vectors that a block asks for at once."""
        return self.threads * self.loads

    def grid(self, vectors: int) -> int:
        """Blocks for that many vectors: none without a whole batch, except one where there is no whole batch at all."""
        return max(1, min(self.blocks, vectors // self.batch))

    def spec(self, *, padded: bool) -> Spec:
        """The machine code of this config."""
        return Spec(self.threads, self.loads, padded)


@dataclass(frozen=True, slots=True)
class Spec:
    """What is compiled in. padded: rows are further apart than they are long, which costs a division per load."""

    threads: int
    loads: int
    padded: bool

    @property
    def constants(self) -> dict[str, int | bool | str]:
        """The constexpr arguments of the kernel, in its order."""
        apart = self.threads * VECTOR_BYTES
        return {
            "LOADS": self.loads,
            "THREADS": self.threads,
            "PADDED": self.padded,
            "READ_NEXT": _read(["$0"], [f"[$1+{j * apart}]" for j in range(self.loads)]),
            "READ_EACH": _read(
                [f"${j}" for j in range(self.loads)], [f"[${self.loads + j}]" for j in range(self.loads)]
            ),
            "OPERANDS_EACH": ",".join(["=r"] * self.loads + ["l"] * self.loads),
        }


def _read(results: Sequence[str], addresses: Sequence[str]) -> str:
    """PTX that reads one vector at every address and writes one word of all of them to every result.

    No vector can be used up before a word of each has arrived: else the compiler waits for the first before it sends
    the last, to save registers (ptxas of Triton 3.7.1 kept 3 of 8 loads in flight, with a plain XOR). Not through L1:
    it is not coherent, and what the kernel beside this one keeps there is worth more.
    """
    count = len(addresses)
    words = [f"x{j}, y{j}, z{j}, v{j}" for j in range(count)]
    lines = [f"{{ .reg .b32 {', '.join(words)}, all;"]
    lines += [f"ld.global.L1::no_allocate.v4.b32 {{{words[j]}}}, {address};" for j, address in enumerate(addresses)]
    lines += ["mov.b32 all, x0;", *(f"xor.b32 all, all, x{j};" for j in range(1, count))]
    for j in range(count):
        lines += [f"and.b32 y{j}, y{j}, all;", f"or.b32 z{j}, z{j}, all;", f"add.u32 v{j}, v{j}, all;"]
    lines += [f"xor.b32 all, all, {word};" for j in range(count) for word in (f"y{j}", f"z{j}", f"v{j}")]
    return " ".join([*lines, *(f"mov.b32 {result}, all;" for result in results), "}"])


DEFAULT = ReadConfig()
"""64 x 512 threads: of the two shapes of `decode_anatomy.md` the one that leaves half of an H200's SMs alone."""


def clipped(size: int, wanted: int | None) -> int:
    """Bytes to read of a weight of `size` bytes: all without a wish, else whole vectors, at most all."""
    if wanted is None:
        return size
    return min(size, -(-wanted // VECTOR_BYTES) * VECTOR_BYTES)
