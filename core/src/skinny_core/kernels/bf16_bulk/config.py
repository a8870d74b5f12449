"""How `bf16_bulk` can be launched, how a problem is laid out over the blocks, and what is refused: each stated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from skinny_core.errors import ConfigError
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme

STEM = "bf16_bulk"
VECTOR = 8
"""Elements of 2 bytes in 16 bytes, the unit of every copy."""
STEP = 32
"""Elements of K that a warp multiplies at a time: two tensor-core instructions per 16 rows."""
PAD = 32
"""Elements between the rows of a stage: 64 bytes, so that two rows' pieces lie in different banks."""
MAX_STAGES = 48
"""Stages that have barriers; small tiles use fewer than the shared memory would hold."""
MIN_STAGES = 3
BARRIER_BYTES = 2 * MAX_STAGES * 8
"""A multiple of 128, so that what follows keeps the alignment of bulk copies."""
MAX_TOKENS = 32
"""Rows of the activation that the code takes. Plans end at `problem.MAX_M`; beyond, it is there to be raced."""
MAX_K = 2**24
MAX_ROWS = 2**30
"""Row numbers are 32-bit."""

SM_BYTES = {(9, 0): 228 << 10, (10, 0): 228 << 10, (10, 3): 228 << 10, (12, 0): 100 << 10}
"""Shared memory of one SM by compute capability. One that is not listed has not been compiled for: refused."""
RESERVED = 1 << 10
"""Shared memory that the system keeps of every block."""


SM_REGISTERS = 65536
BASE_REGISTERS = 56
"""Addresses, counters and what is in flight between them; read off the SASS of 118 configs for sm_90a."""


@dataclass(frozen=True, slots=True)
class BulkConfig:
    """rows: weight rows of a stage at most, in tiles of 16. cols: elements of a row's segment in a stage. warps: warps
    that multiply (one more copies). blocks_per_sm: blocks that share an SM and its shared memory. resident: 1 to keep
    the whole activation in shared memory, 0 to read each block of columns of it from L2 again for every group of rows.
    interleaved: 0 for one contiguous run of rows per block, 1 to deal groups of rows round the grid, so that all blocks
    read from one moving window of the weight. evict_first: 1 to mark the weight as the first to leave L2. trigger: 1 to
    let the next kernel start once the last copy is on its way; worth it where that one is ours and reads weights early.
    """

    rows: int
    cols: int
    warps: int
    blocks_per_sm: int = 1
    resident: int = 0
    interleaved: int = 0
    evict_first: int = 0
    trigger: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, int]) -> BulkConfig:
        """Build from plan data; raises `ConfigError` naming the key and its allowed values."""
        names = {f.name for f in fields(cls)}
        for key in params:
            if key not in names:
                raise ConfigError(f"{STEM}: unknown config key {key!r}", f"use: {', '.join(sorted(names))}")
        for key in ("rows", "cols", "warps"):
            if key not in params:
                raise ConfigError(f"{STEM}: config key {key!r} is missing", "give rows, cols and warps")
        config = cls(**params)
        for key, allowed in ALLOWED.items():
            value = getattr(config, key)
            if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                raise ConfigError(f"{STEM}: {key} is {value!r}", f"use one of {', '.join(map(str, allowed))}")
        return config

    def to_params(self) -> dict[str, int]:
        """The mapping `from_params` takes."""
        return asdict(self)

    def shared_bytes(self, capability: tuple[int, int]) -> int:
        """Dynamic shared memory of one block, in bytes: its share of the SM."""
        return (SM_BYTES[capability] // self.blocks_per_sm - RESERVED) // 128 * 128


ALLOWED: dict[str, tuple[int, ...]] = {
    "rows": (16, 32, 48, 64),
    "cols": (128, 256, 512, 1024, 2048),
    "warps": (2, 4, 8, 16),
    "blocks_per_sm": (1, 2),
    "resident": (0, 1),
    "interleaved": (0, 1),
    "evict_first": (0, 1),
    "trigger": (0, 1),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the generated code depends on; M (beyond its tiles), N, K and strides are read at run time. Hashable;
    its `repr` is part of the cache key.

    m_tiles: tiles of 8 activation rows. epilogue: "none", "add" (a residual, or a bias as one with row stride 0) or
    "silu_mul". shared_bytes: dynamic shared memory of a block.
    """

    config: BulkConfig
    m_tiles: int
    dtype: str
    output: str
    epilogue: str
    shared_bytes: int
    pdl: bool
    prewait: bool

    @property
    def steps(self) -> int:
        """Steps of `STEP` elements that one warp takes in a full stage."""
        return self.config.cols // (STEP * self.config.warps)

    @property
    def parts(self) -> int:
        """Weight rows of one output: gate and up in a gated product."""
        return 2 if self.epilogue == "silu_mul" else 1

    @property
    def fixed_bytes(self) -> int:
        """Shared memory before the activation and the ring: barriers and the warps' sums."""
        return fixed_bytes(self.config, self.m_tiles)

    @staticmethod
    def x_row(k: int) -> int:
        """Elements between activation rows in shared memory; works on numbers and on the DSL's values."""
        return x_row(k)


def m_tiles(m: int) -> int:
    """Tiles of 8 activation rows that hold M."""
    return -(-m // 8)


def fixed_bytes(config: BulkConfig, tiles: int) -> int:
    """Bytes of the barriers and of the warps' sums `[warps, 8 tiles, rows + 4]` in FP32."""
    return BARRIER_BYTES + config.warps * 8 * tiles * (config.rows + 4) * 4


def x_row(k: int) -> int:
    """Elements between activation rows in shared memory: half a bank cycle past a multiple of it, as `PAD` does it."""
    return (k + 63) // 64 * 64 + PAD


def registers(config: BulkConfig, tiles: int) -> tuple[int, int]:
    """(wanted, had): 32-bit registers of one thread that the code wants at least, and what a thread has when all blocks
    of an SM are resident. Above it the compiler spills.

    tiles: of 8 activation rows. Wanted are two blocks of activation pieces, the sums, and 8 for the weight of a tile.
    """
    steps = config.cols // (STEP * config.warps)
    pieces = 4 if config.resident else 8 * steps
    wanted = BASE_REGISTERS + tiles * pieces + (4 * tiles + 8) * (config.rows // 16)
    # The register file is dealt out to the SM's four schedulers evenly.
    warps = -(-config.blocks_per_sm * (config.warps + 1) // 4) * 4
    return wanted, min(255, SM_REGISTERS // (32 * warps) // 8 * 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a problem is laid out over one device.

    outputs: features that are stored, grid: blocks. group: outputs of a stage. stages: of the ring. x_elements: of the
    activation in shared memory, a multiple of 64 so that the ring keeps its alignment.
    """

    outputs: int
    grid: int
    group: int
    stages: int
    x_elements: int

    @property
    def arguments(self) -> tuple[int, int, int, int, int, int]:
        """Arguments of the kernel, in its order: outputs of a block, how many blocks have one more, and the fields."""
        own, longer = divmod(self.outputs, self.grid)
        return own, longer, self.group, self.stages, self.x_elements, self.grid

    @classmethod
    def of(cls, config: BulkConfig, problem: Problem, m: int, shared_bytes: int, sm_count: int) -> Shape:
        """Outputs are dealt out evenly, and a block's into groups of equal size, so that a stage holds no more than is
        used (interleaved, the last round of groups may be short by less than one group in all). `stages` below
        `MIN_STAGES` means that it does not fit.
        """
        outputs = problem.outputs
        parts = problem.n // outputs
        grid = min(sm_count * config.blocks_per_sm, outputs)
        own = -(-outputs // grid)
        groups = -(-own * parts // config.rows)
        group = -(-own // groups)
        x_elements = -(-m * x_row(problem.k) // 64) * 64 if config.resident else 0
        left = shared_bytes - fixed_bytes(config, m_tiles(m)) - 2 * x_elements
        stages = left // (2 * parts * group * (config.cols + PAD))
        return cls(outputs, grid, group, min(stages, MAX_STAGES), x_elements)


def refuses(config: BulkConfig, problem: Problem, m: int) -> str | None:
    """Why this config cannot run `problem` at M = m, or None. The dispatcher, the tuner and the tests call this."""
    half = (WeightScheme.BF16, DType.BF16), (WeightScheme.FP16, DType.FP16)
    if (problem.weight, problem.activation) not in half:
        return f"weight {problem.weight.value} with activation {problem.activation.value}: needs bf16 or fp16 for both"
    if problem.output not in (problem.activation, DType.FP32):
        return f"output {problem.output.value}: needs the activation's dtype or fp32"
    if problem.epilogue is Epilogue.SILU_MUL and problem.n % 2:
        return f"N = {problem.n}: a gated product has two rows for each output"
    if not 1 <= m <= MAX_TOKENS:
        return f"M = {m}: needs 1 to {MAX_TOKENS}"
    if problem.k % VECTOR or not 0 < problem.k <= MAX_K:
        return f"K = {problem.k}: needs a positive multiple of {VECTOR}, at most {MAX_K}"
    if not 0 < problem.n <= MAX_ROWS:
        return f"N = {problem.n}: needs 1 to {MAX_ROWS}"
    if config.cols % (STEP * config.warps):
        return f"cols = {config.cols}: needs a multiple of {STEP} for each of {config.warps} warps"
    if config.cols > max(STEP * config.warps, -(-problem.k // VECTOR) * VECTOR):
        return f"cols = {config.cols}: K = {problem.k} has fewer"
    wanted, had = registers(config, m_tiles(m))
    if wanted >= had:
        return f"{wanted} registers wanted: {config.blocks_per_sm} x {config.warps + 1} warps have {had} a thread"
    capability = problem.device.capability if problem.device else (9, 0)
    if capability not in SM_BYTES:
        return f"compute capability {capability[0]}.{capability[1]}: not compiled for"
    sm_count = problem.device.sm_count if problem.device else 132
    shape = Shape.of(config, problem, m, config.shared_bytes(capability), sm_count)
    if shape.stages < MIN_STAGES:
        return f"{max(shape.stages, 0)} stages fit in shared memory: needs {MIN_STAGES}"
    return None
