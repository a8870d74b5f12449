"""How `bf16_simt` can be launched, and what it refuses: each constraint is stated once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from skinny_core.kernels import contract
from skinny_core.kernels.contract import VECTOR
from skinny_core.problem import MAX_M, Epilogue, Problem

STEM = "bf16_simt"
MAX_ACCUMULATORS = 32
MAX_FRAGMENT = 96
"""Registers per thread that weight and activation fragments may take together: above it the kernel spills on sm_90a."""

SM_REGISTERS = 65536
"""A block's threads share them, so that a block of 1024 has 64 each, and the compiler spills what it has no room
for.
"""


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """threads: threads of a block, all along K. rows: outputs of a block. chunks: 16-byte loads in flight per thread
    and row. blocks_per_sm: 0 for one block per group of rows, else a persistent grid of that many blocks per SM (only
    where a whole row fits in the registers of a block). l2: L2 prefetch of the weight loads in bytes (0, 128, 256).
    pdl: 1 to launch with programmatic dependent launch."""

    threads: int
    rows: int
    chunks: int
    blocks_per_sm: int = 0
    l2: int = 0
    pdl: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, int]) -> SimtConfig:
        """Build from plan data; raises `ConfigError` naming the key and its allowed values."""
        return contract.parsed(cls, STEM, params, ALLOWED)

    def to_params(self) -> dict[str, int]:
        """The mapping `from_params` takes."""
        return asdict(self)


ALLOWED: dict[str, tuple[int, ...]] = {
    "threads": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    "rows": (1, 2, 4, 8),
    "chunks": (1, 2, 3, 4, 5, 6, 8),
    "blocks_per_sm": (0, 1, 2, 3, 4, 5, 6, 8, 12, 16),
    "l2": (0, 128, 256),
    "pdl": (0, 1),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the generated code depends on. Hashable; its `repr` is part of the cache key."""

    config: SimtConfig
    m: int
    k: int
    dtype: str
    output: str
    residual: bool
    pdl: bool
    prewait: bool

    @property
    def row_chunks(self) -> int:
        """Chunks of `threads * 8` elements that cover K."""
        return -(-self.k // (self.config.threads * VECTOR))

    @property
    def resident(self) -> bool:
        """Whether one fragment holds a whole row, so that the activation is loaded once per block."""
        return self.row_chunks <= self.config.chunks

    @property
    def chunks(self) -> int:
        """Chunks of one fragment."""
        return min(self.row_chunks, self.config.chunks)

    @property
    def full_chunks(self) -> int:
        """Chunks of the first fragment that lie inside K for every thread."""
        return min(self.chunks, self.k // (self.config.threads * VECTOR))

    @property
    def full_stages(self) -> int:
        """Fragments that lie inside K entirely (streaming form)."""
        return self.k // (self.config.threads * VECTOR * self.chunks)

    @property
    def tail_chunks(self) -> int:
        """Chunks left after the full stages."""
        return self.row_chunks - self.full_stages * self.chunks

    @property
    def tail_full(self) -> int:
        """Of those, the ones inside K for every thread."""
        return self.k // (self.config.threads * VECTOR) - self.full_stages * self.chunks


LOOP_REGISTERS = 24
"""Addresses and counters of the persistent loop, read off its SASS for sm_90a."""


def fragment_registers(config: SimtConfig, k: int, m: int) -> int:
    """32-bit registers of the weight and activation fragments of one thread."""
    chunks = min(-(-k // (config.threads * VECTOR)), config.chunks)
    return 4 * chunks * (config.rows + m)


def refuses(config: SimtConfig, problem: Problem, m: int) -> str | None:
    """Why this config cannot run `problem` at M = m, or None. The dispatcher, the tuner and the tests call this."""
    if why := contract.refuses(problem, m, most=MAX_M):
        return why
    if problem.epilogue is Epilogue.SILU_MUL:
        return f"epilogue {problem.epilogue.value}: gate and up rows lie in different blocks; use bf16_mma"
    if m * config.rows > MAX_ACCUMULATORS:
        return f"M * rows = {m * config.rows}: at most {MAX_ACCUMULATORS} accumulators"
    if m * config.rows > config.threads:
        return f"M * rows = {m * config.rows}: more outputs than threads"
    used = fragment_registers(config, problem.k, m)
    if used > MAX_FRAGMENT:
        return f"{used} fragment registers: at most {MAX_FRAGMENT}"
    row_chunks = -(-problem.k // (config.threads * VECTOR))
    if config.blocks_per_sm:
        # The activation stays widened to FP32 across groups: 8 registers a piece instead of 4, and the loop's own.
        used += 4 * min(row_chunks, config.chunks) * m + LOOP_REGISTERS
    if used + m * config.rows >= (limit := SM_REGISTERS // config.threads // 8 * 8):
        return f"{used} fragment and {m * config.rows} sum registers: {config.threads} threads have {limit} each"
    if config.blocks_per_sm and row_chunks > config.chunks:
        return f"a persistent grid needs a whole row in registers: {row_chunks} chunks, config has {config.chunks}"
    if config.blocks_per_sm * config.threads > 2048:
        return f"{config.blocks_per_sm} blocks of {config.threads} threads do not fit on one SM"
    if config.chunks > row_chunks:
        return f"chunks = {config.chunks}: K = {problem.k} has only {row_chunks} with {config.threads} threads"
    return None
