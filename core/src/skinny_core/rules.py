"""When may a kernel run instead of the host's own call? An ordered list of rules; the first refusal wins.

Each rule is `rule(problem, context) -> Verdict`. A fact that nobody stated (None) is not judged: the layer adapters
state what they know about a layer, the op states what it sees in the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from skinny_core.device import DeviceKey
from skinny_core.problem import MAX_M, Problem


class Reason(str, Enum):
    """Why a call went to the host's original implementation. Every such call has exactly one."""

    DISABLED = "disabled"
    HOST_VERSION = "host_version"
    HOST_BACKEND = "host_backend"
    QUANTISED = "quantised"
    SUBCLASSED_WEIGHT = "subclassed_weight"
    HOOKED = "hooked"
    LORA = "lora"
    BIAS = "bias"
    BATCH_INVARIANT = "batch_invariant"
    GRADIENT = "gradient"
    AUTOCAST = "autocast"
    OFFLOADED = "offloaded"
    NOT_CUDA = "not_cuda"
    MIXED_DEVICES = "mixed_devices"
    OTHER_DEVICE = "other_device"
    DTYPE = "dtype"
    ZERO_ROWS = "zero_rows"
    M_RANGE = "m_range"
    OFF_TABLE = "off_table"
    REFUSED = "refused"
    REPORTED = "reported"
    LAYOUT = "layout"
    ALIGNMENT = "alignment"
    KERNEL_UNAVAILABLE = "kernel_unavailable"
    NOT_WARM = "not_warm"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANING[self]


_MEANING = {
    Reason.DISABLED: "switched off by SKINNY or never activated for this family",
    Reason.HOST_VERSION: "the host's version is outside the tested range",
    Reason.HOST_BACKEND: "the host was told to use another linear backend, or has specialised this layer itself",
    Reason.QUANTISED: "the weight is quantised or packed",
    Reason.SUBCLASSED_WEIGHT: "the weight is a tensor subclass with its own behaviour",
    Reason.HOOKED: "the layer is of another class, or its forward has been replaced by somebody else",
    Reason.LORA: "a LoRA adapter is configured or attached",
    Reason.BIAS: "the layer has a bias",
    Reason.BATCH_INVARIANT: "batch-invariant mode is on, and a choice by M is not batch-invariant",
    Reason.GRADIENT: "a gradient is needed",
    Reason.AUTOCAST: "autocast is active and would change the dtype",
    Reason.OFFLOADED: "the weight is offloaded",
    Reason.NOT_CUDA: "the tensors are not on a CUDA device",
    Reason.MIXED_DEVICES: "activation and weight are on different devices",
    Reason.OTHER_DEVICE: "no plan was measured on this exact device",
    Reason.DTYPE: "a dtype outside BF16 and FP16, or activation and weight differ",
    Reason.ZERO_ROWS: "the activation has no rows",
    Reason.M_RANGE: f"more than {MAX_M} rows",
    Reason.OFF_TABLE: "no cell for this shape and M",
    Reason.REFUSED: "measured here, and the kernel lost",
    Reason.REPORTED: "somebody else's measurement, not confirmed here; `skinny tune` on this device would",
    Reason.LAYOUT: "strides that the kernel does not read",
    Reason.ALIGNMENT: "a pointer or row stride is not a multiple of 16 bytes",
    Reason.KERNEL_UNAVAILABLE: "the kernel's DSL is absent or broken",
    Reason.NOT_WARM: "the kernel has not been compiled before serving",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ok`, or the reason and, where there is more to say, a detail."""

    ok: bool
    reason: Reason | None = None
    detail: str = ""


OK = Verdict(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about one layer or one call. None means not known here, and is not judged.

    reported_allowed: `reported` cells may run. foreign_kernel: the cell's kernel, where it is not one of ours.
    """

    enabled: bool | None = None
    host_version_ok: bool | None = None
    host_backend_default: bool | None = None
    quantised: bool | None = None
    weight_subclass: str | None = None
    hooked: bool | None = None
    lora: bool | None = None
    bias: bool | None = None
    batch_invariant: bool | None = None
    gradient: bool | None = None
    autocast: bool | None = None
    offloaded: bool | None = None
    on_cuda: bool | None = None
    same_device: bool | None = None
    device: DeviceKey | None = None
    dtypes_ok: bool | None = None
    m: int | None = None
    cell_status: str | None = None
    reported_allowed: bool = False
    foreign_kernel: str | None = None
    layout_ok: bool | None = None
    aligned: bool | None = None
    kernel_error: str | None = None
    warm: bool | None = None


Rule = Callable[[Problem, Context], Verdict]
OFF_TABLE = "off_table"
"""`Context.cell_status` of a (Problem, M) without any cell."""


def _refuse_if(fact: bool | None, reason: Reason, detail: str = "") -> Verdict:
    return Verdict(False, reason, detail) if fact else OK


def _require(fact: bool | None, reason: Reason) -> Verdict:
    return Verdict(False, reason) if fact is False else OK


def enabled(_: Problem, c: Context) -> Verdict:
    """SKINNY=off, or nobody activated this family."""
    return _require(c.enabled, Reason.DISABLED)


def host_version(_: Problem, c: Context) -> Verdict:
    """The host's version is one that was tested."""
    return _require(c.host_version_ok, Reason.HOST_VERSION)


def host_backend(_: Problem, c: Context) -> Verdict:
    """The host would run its default call here."""
    return _require(c.host_backend_default, Reason.HOST_BACKEND)


def quantised(_: Problem, c: Context) -> Verdict:
    """Packed bytes are never multiplied as numbers."""
    return _refuse_if(c.quantised, Reason.QUANTISED)


def subclassed_weight(_: Problem, c: Context) -> Verdict:
    """A subclass may mean anything by its elements."""
    return _refuse_if(c.weight_subclass is not None, Reason.SUBCLASSED_WEIGHT, c.weight_subclass or "")


def hooked(_: Problem, c: Context) -> Verdict:
    """The layer is exactly the class whose call is replaced."""
    return _refuse_if(c.hooked, Reason.HOOKED)


def lora(_: Problem, c: Context) -> Verdict:
    """An adapter's contribution must not be lost."""
    return _refuse_if(c.lora, Reason.LORA)


def bias(_: Problem, c: Context) -> Verdict:
    """No kernel adds a bias yet."""
    return _refuse_if(c.bias, Reason.BIAS)


def batch_invariant(_: Problem, c: Context) -> Verdict:
    """Choosing by M changes the summation order with the batch."""
    return _refuse_if(c.batch_invariant, Reason.BATCH_INVARIANT)


def gradient(_: Problem, c: Context) -> Verdict:
    """Kernels have no backward pass."""
    return _refuse_if(c.gradient, Reason.GRADIENT)


def autocast(_: Problem, c: Context) -> Verdict:
    """Under autocast the host's call would convert dtypes first."""
    return _refuse_if(c.autocast, Reason.AUTOCAST)


def offloaded(_: Problem, c: Context) -> Verdict:
    """A meta or CPU-resident weight belongs to the host's own machinery."""
    return _refuse_if(c.offloaded, Reason.OFFLOADED)


def on_cuda(_: Problem, c: Context) -> Verdict:
    """Kernels exist for CUDA devices."""
    return _require(c.on_cuda, Reason.NOT_CUDA)


def same_device(_: Problem, c: Context) -> Verdict:
    """The original call raises the original error."""
    return _require(c.same_device, Reason.MIXED_DEVICES)


def exact_device(p: Problem, c: Context) -> Verdict:
    """A cell counts only on the device it was measured on."""
    if c.device is None or p.device is None or c.device == p.device:
        return OK
    return Verdict(False, Reason.OTHER_DEVICE, f"plan for {p.device}, running on {c.device}")


def dtype(_: Problem, c: Context) -> Verdict:
    """BF16 or FP16 on both sides, equal."""
    return _require(c.dtypes_ok, Reason.DTYPE)


def rows(_: Problem, c: Context) -> Verdict:
    """M from 1 to MAX_M."""
    if c.m is None or 1 <= c.m <= MAX_M:
        return OK
    return Verdict(False, Reason.ZERO_ROWS if c.m == 0 else Reason.M_RANGE, f"M = {c.m}")


def on_table(_: Problem, c: Context) -> Verdict:
    """There is a cell for this shape and M."""
    return _refuse_if(c.cell_status == OFF_TABLE, Reason.OFF_TABLE)


def wins(_: Problem, c: Context) -> Verdict:
    """Only measured wins run; reported ones after opting in, and never with another kernel than the reported one."""
    if c.cell_status == "reported" and (c.foreign_kernel is not None or not c.reported_allowed):
        name = c.foreign_kernel
        return Verdict(False, Reason.REPORTED, f"measured with {name}, which is none of our kernels" if name else "")
    return _refuse_if(c.cell_status == "refused", Reason.REFUSED)


def layout(_: Problem, c: Context) -> Verdict:
    """Unit stride along K, one row stride for all leading dimensions; read at call time."""
    return _require(c.layout_ok, Reason.LAYOUT)


def alignment(_: Problem, c: Context) -> Verdict:
    """16-byte loads need 16-byte addresses; contiguous does not imply aligned."""
    return _require(c.aligned, Reason.ALIGNMENT)


def kernel_available(_: Problem, c: Context) -> Verdict:
    """The DSL could be imported and the kernel compiled."""
    return _refuse_if(c.kernel_error is not None, Reason.KERNEL_UNAVAILABLE, c.kernel_error or "")


def warm(_: Problem, c: Context) -> Verdict:
    """Nothing is compiled while serving or capturing."""
    return _require(c.warm, Reason.NOT_WARM)


RULES: tuple[Rule, ...] = (
    enabled, host_version, host_backend, quantised, subclassed_weight, hooked, lora, bias, batch_invariant, gradient,
    autocast, offloaded, on_cuda, same_device, dtype, rows, exact_device, on_table, wins, layout, alignment,
    kernel_available, warm,
)  # fmt: skip
"""In order: who asks (settings, host, layer), what the call is (gradient, device, dtype, M), what the plan says, what
the
tensors look like, whether the kernel is ready. Cheap and general first, so the reason names the outermost cause."""


def decide(problem: Problem, context: Context) -> Verdict:
    """The first refusal of `RULES`, or OK."""
    for rule in RULES:
        verdict = rule(problem, context)
        if not verdict.ok:
            return verdict
    return OK
