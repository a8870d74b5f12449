"""How `bf16_mma` can be launched, and what it refuses: each constraint is stated once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from skinny_core.errors import ConfigError
from skinny_core.problem import MAX_M, DType, Epilogue, Problem, WeightScheme

STEM = "bf16_mma"
WARP = 32
VECTOR = 8
"""Elements of 2 bytes in one 16-byte load."""
LANE_ROWS = 8
"""Rows that one such load of a warp covers, of either operand: lane / 4 is the row."""
STEP = 32
"""Elements of K that it covers: four lanes of 8, two matrix instructions of 16."""
MAX_K = 2**24
MAX_ROWS = 2**30
"""Row numbers are 32-bit, and the last group may reach past N."""
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a block may declare without asking the driver."""
PARTS, PART_REGISTERS, SM_THREADS, SM_SHARED = 4, 512, 2048, 224 * 1024
MAX_REGISTERS = 255
MAX_THREADS = 1024
MAX_OUTPUTS = 8
"""Outputs that one thread may sum and store one after the other: above it the reduction is a serial tail."""
ALLOWED: dict[str, tuple[int, ...]] = {
    "warps": tuple(range(1, 17)),
    "tiles": tuple(range(1, 9)),
    "unroll": (1, 2, 4, 8),
    "run": (1, 2, 4, 8),
    "blocks_per_sm": (0, 1, 2, 3, 4, 5, 6, 8, 12, 16),
    "l2": (0, 128, 256),
}


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """How a block is made.

    warps: warps of a block, all along K. tiles: tiles of 8 weight rows of a block. unroll: steps of 32 elements of K
    that a warp keeps in flight (`unroll * tiles` loads of 512 bytes). run: consecutive steps that a warp takes before
    the next warp's begin: 1 interleaves the warps step by step. blocks_per_sm: 0 for one block per group of rows, else
    a persistent grid of that many blocks per SM. l2: L2 prefetch size of the weight loads in bytes (0, 128, 256).
    """

    warps: int
    tiles: int
    unroll: int
    run: int = 1
    blocks_per_sm: int = 0
    l2: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, int]) -> MmaConfig:
        """Build from plan data; raises `ConfigError` naming the key and its allowed values."""
        for key in params:
            if key not in ALLOWED:
                raise ConfigError(f"{STEM}: unknown config key {key!r}", f"use: {', '.join(sorted(ALLOWED))}")
        for key in ("warps", "tiles", "unroll"):
            if key not in params:
                raise ConfigError(f"{STEM}: config key {key!r} is missing", "give warps, tiles and unroll")
        config = cls(**params)
        for each in fields(cls):
            value, allowed = getattr(config, each.name), ALLOWED[each.name]
            if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                raise ConfigError(f"{STEM}: {each.name} is {value!r}", f"use one of {', '.join(map(str, allowed))}")
        return config

    def to_params(self) -> dict[str, int]:
        """The mapping `from_params` takes."""
        return asdict(self)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return self.tiles * LANE_ROWS

    @property
    def round(self) -> int:
        """Elements of K that a block holds in its registers at once."""
        return self.warps * self.unroll * STEP

    def distance(self, u: int) -> int:
        """Elements from a warp's first step of a round to its step u; from `unroll` on, u is one of the next round.

        The first warp's first step begins the round, that of the next warp lies `run` steps behind.
        """
        rounds, u = divmod(u, self.unroll)
        return rounds * self.round + (u // self.run * self.run * self.warps + u % self.run) * STEP

    @property
    def turns(self) -> int:
        """Buffers of partial sums: a persistent block writes one while slow warps still read the other."""
        return 2 if self.blocks_per_sm else 1

    @property
    def flight_bytes(self) -> int:
        """Bytes of weight that a block has in flight."""
        return self.rows * self.round * 2


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the generated code depends on; M, N, K and the strides are read at every launch. Hashable; its `repr`
    is part of the cache key.

    m_tiles: 1 for M 1 to 8, 2 for M 9 to 16.
    """

    config: MmaConfig
    m_tiles: int
    dtype: str
    output: str
    residual: bool
    pdl: bool
    prewait: bool

    @property
    def outputs(self) -> int:
        """Outputs of a thread at the largest M."""
        return outputs(self.config, self.m_tiles)

    @property
    def resident_threads(self) -> int:
        """Threads of the blocks that one SM is to hold at once, as far as a block could have as many."""
        fit = blocks_that_fit(self.config, self.m_tiles)
        return self.config.threads * max(1, min(fit, MAX_THREADS // self.config.threads))

    @property
    def pitch(self) -> int:
        """Distance in words between the activation rows of the partial sums: an odd multiple of 8, so that a warp's
        pairs fall into different banks."""
        return self.config.rows + (0 if self.config.tiles % 2 else LANE_ROWS)

    @property
    def shared_bytes(self) -> int:
        """Partial sums in FP32, the only shared memory: [turns, warps, 8 * m_tiles, pitch]."""
        return 4 * self.pitch * LANE_ROWS * self.m_tiles * self.config.warps * self.config.turns


def m_tiles(m: int) -> int:
    """Tiles of 8 activation rows for M = m."""
    return -(-m // LANE_ROWS)


def outputs(config: MmaConfig, tiles: int) -> int:
    """Outputs of a thread for that many tiles of activation rows."""
    return -(-config.rows * LANE_ROWS * tiles // config.threads)


OTHER_REGISTERS = 16
"""Counters, the operands under way, constants. This, the extra register per tile and the next one are read off what
ptxas needs for sm_90a before it spills (sweeps of 100 configs near the limit; tests compile a sample)."""
AGAIN_REGISTERS = 20
"""What a persistent block keeps besides: where the activation starts, the next group's rows."""


def registers(config: MmaConfig, tiles: int) -> int:
    """Estimated registers of a thread for that many tiles of activation rows: fragments, sums, addresses, the rest."""
    fragments = 4 * config.unroll * (config.tiles + tiles)
    addresses = 2 * (config.tiles + tiles)
    again = AGAIN_REGISTERS + config.tiles + 2 * tiles if config.blocks_per_sm else 0
    return fragments + 4 * config.tiles + addresses + OTHER_REGISTERS + config.tiles + again


def register_limit(warps: int) -> int:
    """Registers that each thread may have where one SM is to hold that many warps: they are spread over four parts of
    512 registers by 32 lanes, and given out by eights."""
    return min(MAX_REGISTERS, PART_REGISTERS // -(-warps // PARTS) // 8 * 8)


def blocks_that_fit(config: MmaConfig, tiles: int) -> int:
    """Blocks that one SM of capability 9.0 or 10.x holds at once, by the estimated registers; 0 where none fits."""
    spec = Spec(config, tiles, "bf16", "bf16", residual=False, pdl=True, prewait=False)
    warps = PART_REGISTERS // (-(-registers(config, tiles) // 8) * 8) * PARTS
    return min(warps // config.warps, SM_THREADS // config.threads, SM_SHARED // (spec.shared_bytes + 1024), 32)


def refuses(config: MmaConfig, problem: Problem, m: int) -> str | None:
    """Why this config cannot run `problem` at M = m, or None. The dispatcher, the tuner and the tests call this."""
    return _refuses_problem(problem, m) or _refuses_config(config, m_tiles(m)) or _refuses_length(config, problem)


def _refuses_problem(problem: Problem, m: int) -> str | None:
    half = (WeightScheme.BF16, DType.BF16), (WeightScheme.FP16, DType.FP16)
    if (problem.weight, problem.activation) not in half:
        return f"weight {problem.weight.value} with activation {problem.activation.value}: needs bf16 or fp16 for both"
    if problem.output not in (problem.activation, DType.FP32):
        return f"output {problem.output.value}: needs the activation's dtype or fp32"
    if problem.epilogue is Epilogue.SILU_MUL:
        return f"epilogue {problem.epilogue.value}: gate and up rows lie in different blocks; use bf16_bulk"
    if not 1 <= m <= MAX_M:
        return f"M = {m}: needs 1 to {MAX_M}"
    if problem.k % VECTOR or not 0 < problem.k <= MAX_K:
        return f"K = {problem.k}: needs a positive multiple of {VECTOR}, at most {MAX_K}"
    if not 0 < problem.n <= MAX_ROWS:
        return f"N = {problem.n}: needs 1 to {MAX_ROWS}"
    return None


def _refuses_config(config: MmaConfig, tiles: int) -> str | None:
    if config.unroll % config.run:
        return f"run = {config.run}: must divide unroll = {config.unroll}"
    shared = Spec(config, tiles, "bf16", "bf16", residual=False, pdl=True, prewait=False).shared_bytes
    if shared > STATIC_SHARED:
        return f"partial sums of {shared} bytes: at most {STATIC_SHARED}"
    if outputs(config, tiles) > MAX_OUTPUTS:
        return f"{outputs(config, tiles)} outputs per thread: at most {MAX_OUTPUTS}"
    used = registers(config, tiles)
    if used > (limit := register_limit(config.warps)):
        return f"about {used} registers: {config.warps} warps have {limit} each"
    if config.blocks_per_sm > (most := blocks_that_fit(config, tiles)):
        return f"{config.blocks_per_sm} blocks per SM: about {most} fit"
    return None


def _refuses_length(config: MmaConfig, problem: Problem) -> str | None:
    if config.blocks_per_sm and problem.k < config.round:
        return f"a persistent grid needs K of at least one round of {config.round} elements"
    return None
