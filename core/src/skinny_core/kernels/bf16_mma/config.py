"""How `bf16_mma` can be launched, and what it refuses: each constraint is stated once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from skinny_core.kernels import contract
from skinny_core.problem import DType, Epilogue, Problem

STEM = "bf16_mma"
WARP = 32
LANE_ROWS = 8
"""Columns of the matrix instruction that the weight fills: lane / 4 is the column."""
SPAN = 32
"""Elements of K that one column covers: four lanes of 8, two matrix instructions of 16."""
MMA_K = 16
"""Elements of K of one matrix instruction."""
MAX_TOKENS = 32
"""Rows of the activation; a plan has no more than `problem.MAX_M`."""
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a block may declare without asking the driver."""
SM_REGISTERS = 65536
SCHEDULERS = 4
"""Parts of an SM that warps and registers are dealt out to."""
MAX_REGISTERS = 255
MAX_THREADS = 1024
MAX_CHAIN = 256
"""Additions that tensor cores, which truncate each, may do in a row for an FP32 output: on an H200, 5e-6 (DESIGN 6)
held at 267 of them and failed at 304 (K = 9728, two warps, one part). A rounded BF16 or FP16 output does not notice."""
SWEPT = (9, 0)
"""Capability whose register allocation the estimate of `registers` was read off."""
MAX_RING = 16
"""Loads in flight per lane on any other: 20 spill there (sm_100a, sm_103a: 16 to 240 bytes at 255 registers)."""
MAX_OUTPUTS = 8
"""Outputs that one thread may sum and store one after the other: above it the reduction is a serial tail."""
ALLOWED: dict[str, tuple[int, ...]] = {
    "warps": tuple(range(1, 33)),
    "parts": (1, 2, 4, 8),
    "loads": tuple(range(1, 9)),
    "unroll": (1, 2, 4, 8),
    "ahead": (1, 2, 4),
    "blocks": tuple(range(1, 9)),
    "pdl": (0, 1),
}


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """How a block is made.

    warps: warps of a block, all along K. parts: a load of a warp reads 64 * parts contiguous bytes of 8 / parts rows.
    loads: such loads side by side, so a block has `loads * 8 / parts` weight rows. unroll: steps of `32 * parts`
    elements of K that a warp keeps in flight (`unroll * loads` loads of 512 bytes). ahead: steps of the activation in
    flight. blocks: blocks per SM that the registers must allow on capability 9.0. pdl: 1 to launch with programmatic
    dependent launch.
    """

    warps: int
    parts: int
    loads: int
    unroll: int
    ahead: int = 1
    blocks: int = 1
    pdl: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, int]) -> MmaConfig:
        """Build from plan data; raises `ConfigError` naming the key and its allowed values."""
        return contract.parsed(cls, STEM, params, ALLOWED)

    def to_params(self) -> dict[str, int]:
        """The mapping `from_params` takes."""
        return asdict(self)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def load_rows(self) -> int:
        """Rows of either operand that one load of a warp covers."""
        return LANE_ROWS // self.parts

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return self.loads * self.load_rows

    @property
    def span(self) -> int:
        """Elements of K of one load of a warp."""
        return SPAN * self.parts

    @property
    def stride(self) -> int:
        """Elements of K of one step of all warps: from a warp's step to its next."""
        return self.warps * self.span


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the generated code depends on; M, N and the strides are read at every launch. Hashable; its `repr` is
    part of the cache key.

    groups: groups of `load_rows` activation rows that hold M. epilogue: "none", "add" (a residual, or a bias as one
    with row stride 0) or "silu_mul".
    """

    config: MmaConfig
    k: int
    groups: int
    dtype: str
    output: str
    epilogue: str
    pdl: bool
    prewait: bool

    @property
    def steps(self) -> int:
        """Steps that cover K."""
        return -(-self.k // self.config.stride)

    @property
    def tail(self) -> bool:
        """Whether part of the last step lies past K."""
        return self.k % self.config.stride != 0

    @property
    def rounds(self) -> int:
        """Rounds after which a whole round follows, so that they request what lies inside K without a look at it."""
        return max(0, (self.steps - self.tail) // self.config.unroll - 1)

    @property
    def tiles(self) -> int:
        """Operands of 16 activation rows, two groups each."""
        return -(-self.groups // 2)

    @property
    def columns(self) -> int:
        """Activation rows of all groups, M or more."""
        return self.groups * self.config.load_rows

    @property
    def output_rows(self) -> int:
        """Weight rows of one output: gate and up in a gated product."""
        return 2 if self.epilogue == "silu_mul" else 1

    @property
    def block_outputs(self) -> int:
        """Output features of a block."""
        return self.config.rows // self.output_rows

    @property
    def outputs(self) -> int:
        """Outputs of a thread at the largest M."""
        return -(-self.block_outputs * self.columns // self.config.threads)

    @property
    def pitch(self) -> int:
        """Distance in words between the activation rows of the partial sums, so that a warp's stores spread over the
        banks."""
        return self.config.rows + (4 if self.config.rows >= 8 else 1)

    @property
    def shared_bytes(self) -> int:
        """Partial sums in FP32, the only shared memory: [warps, columns, pitch]."""
        return 4 * self.pitch * self.columns * self.config.warps


def groups(config: MmaConfig, m: int) -> int:
    """Groups of activation rows that hold M."""
    return -(-m // config.load_rows)


def registers(config: MmaConfig, count: int, *, tail: bool = False) -> int:
    """Estimated registers of a thread for that many groups. tail: whether part of the last step lies past K.

    Fragments, sums and addresses are counted; the rest is read off sweeps for sm_90a. It keeps hopeless configs out and
    promises nothing: near the limit one config in five still spills some bytes. A test compiles all that ships.
    With two tiles and one step ahead, ptxas hoists the loads of two more steps.
    """
    tiles = -(-count // 2)
    wide = tiles > 1
    ahead = 3 if wide and config.ahead == 1 else config.ahead
    fragments = 4 * (config.unroll * config.loads + ahead * count)
    other = 16 + 24 * (config.unroll > 2) + 12 * tail if wide else 24
    return fragments + 4 * config.loads * tiles + 2 * (config.loads + count) + other


def register_limit(config: MmaConfig) -> int:
    """Registers that each thread may have where one SM is to hold `blocks` blocks: its four parts deal out 512 each by
    warps and eights."""
    warps = -(-config.warps * config.blocks // SCHEDULERS) * SCHEDULERS
    return min(MAX_REGISTERS, SM_REGISTERS // (WARP * warps) // 8 * 8)


def refuses(config: MmaConfig, problem: Problem, m: int) -> str | None:
    """Why this config cannot run `problem` at M = m, or None. The dispatcher, the tuner and the tests call this."""
    return contract.refuses(problem, m, most=MAX_TOKENS) or _refuses_config(config, problem, m)


def _refuses_config(config: MmaConfig, problem: Problem, m: int) -> str | None:
    if config.unroll % config.ahead:
        return f"ahead = {config.ahead}: must divide unroll = {config.unroll}"
    if problem.epilogue is Epilogue.SILU_MUL and problem.n % 2:
        return f"N = {problem.n}: a gated product has two rows for each output"
    if problem.epilogue is Epilogue.SILU_MUL and config.loads % 2:
        return f"loads = {config.loads}: a gated product needs as many for up as for gate"
    if config.threads * config.blocks > MAX_THREADS:
        return f"{config.blocks} blocks of {config.threads} threads: at most {MAX_THREADS} threads together"
    chain = problem.k // (MMA_K * config.warps * config.parts)
    if problem.output is DType.FP32 and chain > MAX_CHAIN:
        return f"{chain} additions in a row on tensor cores: an FP32 output allows {MAX_CHAIN}"
    spec = spec_of(config, problem, m, pdl=False)
    if spec.shared_bytes > STATIC_SHARED:
        return f"partial sums of {spec.shared_bytes} bytes: at most {STATIC_SHARED}"
    if spec.outputs > MAX_OUTPUTS:
        return f"{spec.outputs} outputs per thread: at most {MAX_OUTPUTS}"
    ring = config.unroll * config.loads
    if ring > MAX_RING and problem.device is not None and problem.device.capability != SWEPT:
        return f"{ring} loads in flight: at most {MAX_RING} on devices other than capability {SWEPT[0]}.{SWEPT[1]}"
    used = registers(config, spec.groups, tail=spec.tail)
    if used > (limit := register_limit(config)):
        return f"about {used} registers: {config.blocks} blocks of {config.warps} warps have {limit} each"
    return None


_EPILOGUES = {Epilogue.NONE: "none", Epilogue.RESIDUAL: "add", Epilogue.BIAS: "add", Epilogue.SILU_MUL: "silu_mul"}


def spec_of(config: MmaConfig, problem: Problem, m: int, *, pdl: bool) -> Spec:
    """What is compiled for a problem at M = m. pdl: whether the device and the settings allow it."""
    return Spec(
        config=config,
        k=problem.k,
        groups=groups(config, m),
        dtype=problem.activation.value,
        output=problem.output.value,
        epilogue=_EPILOGUES[problem.epilogue],
        pdl=pdl and bool(config.pdl),
        prewait=False,
    )
