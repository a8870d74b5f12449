"""How `bf16_stream` may be launched: one frozen config, and every constraint stated once, as a predicate.

Host, tuner, plan loader and tests all ask `refuses`; nothing else decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from skinny_core.errors import ConfigError
from skinny_core.problem import MAX_M, DType, Epilogue, Problem

STEM = "bf16_stream"
BLOCK_M = 16
"""Columns of the tensor-core tile that hold activation rows: M is padded to it by a mask."""
VECTOR = 8
"""Elements in one 16-byte load of a 2-byte type."""

_RANGES = {"block_n": (16, 256), "block_k": (32, 256), "num_warps": (1, 8), "num_stages": (2, 12)}
_POWERS_OF_TWO = ("block_n", "block_k", "num_warps")

# Largest dynamic shared memory of one block, in bytes, by compute capability. A capability that is not listed has not
# been compiled for, so it is refused rather than guessed.
SHARED_BYTES = {(9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10, (12, 0): 99 << 10}
# Barriers of the asynchronous tensor core on capability 10.x; the tiles themselves are counted by `tile_bytes`.
_BARRIER_BYTES = 16


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """One launch shape.

    block_n, block_k: weight rows and reduction elements of one tile. num_warps: warps of one program.
    num_stages: tiles in flight, the one being multiplied included.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def from_params(cls, params: Mapping[str, int]) -> StreamConfig:
        """Build from the `config` table of a plan cell; raises `ConfigError` for what is not defined here."""
        names = [f.name for f in fields(cls)]
        if unknown := sorted(set(params) - set(names)):
            raise ConfigError(f"{STEM}: unknown key {unknown[0]!r}", f"use {', '.join(names)}")
        if missing := [n for n in names if n not in params]:
            raise ConfigError(f"{STEM}: missing key {missing[0]!r}", f"state all of {', '.join(names)}")
        for name in names:
            _check(name, params[name])
        return cls(**params)

    @property
    def tile_bytes(self) -> int:
        """Upper bound of the bytes of shared memory that the tiles of both operands take (2-byte elements)."""
        return (self.block_n + BLOCK_M) * self.block_k * 2 * self.num_stages

    @property
    def max_registers(self) -> int:
        """Register limit per thread that still lets two programs live on one SM.

        Stated because ptxas, left alone, may spill a register for occupancy that the shared memory does not allow
        anyway (seen for sm_120a with ptxas 13.1 and 13.4).
        """
        return min(255, (64 << 10) // (2 * 32 * self.num_warps))

    def __str__(self) -> str:
        return f"{STEM}({self.block_n}x{self.block_k}, warps={self.num_warps}, stages={self.num_stages})"


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the machine code depends on, apart from the architecture. Hashable; its `repr` is part of a cache key.

    M, N, K and the strides are no part of it: one binary serves every M and every shape with the same flags.
    """

    config: StreamConfig
    dtype: DType
    output: DType
    even_k: bool
    residual: bool
    pdl: bool
    prefetch: bool

    @classmethod
    def of(cls, config: StreamConfig, problem: Problem, *, pdl: bool, prefetch: bool) -> Spec:
        """The Spec that computes `problem`; prefetch counts only with pdl."""
        return cls(
            config=config,
            dtype=problem.activation,
            output=problem.output,
            even_k=problem.k % config.block_k == 0,
            residual=problem.adds,
            pdl=pdl,
            prefetch=pdl and prefetch,
        )

    @property
    def constants(self) -> dict[str, int | bool]:
        """The compile-time arguments of the kernel, in its order."""
        return {
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": self.config.block_n,
            "BLOCK_K": self.config.block_k,
            "STAGES": self.config.num_stages,
            "EVEN_K": self.even_k,
            "HAS_RESIDUAL": self.residual,
            "PDL": self.pdl,
            "PREFETCH": self.prefetch,
        }


def _check(name: str, value: object) -> None:
    low, high = _RANGES[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{STEM}: {name} = {value!r} is not an integer", f"use an integer from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{STEM}: {name} = {value} is out of range", f"use a value from {low} to {high}")
    if name in _POWERS_OF_TWO and value & (value - 1):
        raise ConfigError(f"{STEM}: {name} = {value} is not a power of two", f"use {1 << value.bit_length() - 1}")


def refuses(config: StreamConfig, problem: Problem, m: int) -> str | None:
    """Why this config cannot compute this Problem at M rows, or None where it can."""
    return _refuses_problem(problem, m) or _refuses_shape(config, problem)


def _refuses_problem(problem: Problem, m: int) -> str | None:
    if not 1 <= m <= MAX_M:
        return f"M = {m} is not in 1 to {MAX_M}"
    if not 1 <= problem.n < 1 << 31:
        return f"N = {problem.n} is not in 1 to 2**31 - 1"
    if not VECTOR <= problem.k < 1 << 31 or problem.k % VECTOR:
        return f"K = {problem.k} is not a positive multiple of {VECTOR} below 2**31"
    if problem.activation is DType.FP32 or problem.weight.value != problem.activation.value:
        return f"{problem.weight.value} weight with {problem.activation.value} activation: both must be bf16 or fp16"
    if problem.output not in (problem.activation, DType.FP32):
        return f"{problem.output.value} output: must be {problem.activation.value} or fp32"
    if problem.epilogue is Epilogue.SILU_MUL:
        return f"epilogue {problem.epilogue.value}: gate and up rows lie in different programs; use bf16_mma"
    return None


def _refuses_shape(config: StreamConfig, problem: Problem) -> str | None:
    threads = 32 * config.num_warps
    # Both operands: a thread with less than 16 bytes of a tile would load it with narrower instructions.
    rows = min(config.block_n, BLOCK_M)
    if rows * config.block_k < threads * VECTOR:
        return f"a tile of {rows} x {config.block_k} gives {threads} threads less than 16 bytes each"
    capability = problem.device.capability if problem.device else (9, 0)
    if capability not in SHARED_BYTES:
        return f"capability {capability[0]}.{capability[1]} has not been compiled for"
    needed, limit = config.tile_bytes + _BARRIER_BYTES, SHARED_BYTES[capability]
    if needed > limit:
        return f"{needed} bytes of shared memory, {limit} available"
    return None


# (block_n, block_k, num_warps, num_stages). Few weight rows per program where N is small (every SM needs work), many
# where it is large (long row streams); 24 to 112 KiB of weight in flight per program.
_CANDIDATES = (
    (16, 128, 2, 8), (16, 256, 2, 6), (16, 256, 4, 8), (32, 128, 4, 8), (32, 256, 4, 4), (32, 256, 4, 6),
    (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4),
)  # fmt: skip


def candidates(problem: Problem, m: int) -> tuple[StreamConfig, ...]:
    """Configs worth measuring for this Problem at M rows; empty where no config can compute it."""
    legal = [c for c in (StreamConfig(*row) for row in _CANDIDATES) if refuses(c, problem, m) is None]
    # A tile wider than the problem only multiplies zeros; keep one such config so that tiny shapes have a candidate.
    fitting = [c for c in legal if c.block_n <= problem.n and c.block_k <= problem.k]
    return tuple(fitting or legal[:1])
