"""What is to be computed, without any tensor: `y[M, N] = x[M, K] @ w[N, K].T`, FP32 accumulation.

M is not part of a Problem: it is read from the activation at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import dtype as TorchDtype

    from skinny_core.device import DeviceKey

MAX_M = 16
"""Largest number of activation rows any cell may plan for."""


class DType(str, Enum):
    """Element type of an activation or an output."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def torch(self) -> TorchDtype:
        """The torch dtype of the same name."""
        return _torch_dtypes()[self]

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return 4 if self is DType.FP32 else 2

    @classmethod
    def of(cls, dtype: TorchDtype) -> DType | None:
        """The member for a torch dtype, or None where the project has no name for it."""
        return next((d for d, t in _torch_dtypes().items() if t == dtype), None)


class WeightScheme(str, Enum):
    """How the weight is stored. One byte count per element, no scales, for the two members so far."""

    BF16 = "bf16"
    FP16 = "fp16"


class Epilogue(str, Enum):
    """What is done to the FP32 sums before their one rounding to the output dtype.

    RESIDUAL adds a tensor like the output, BIAS adds one of N elements to every row. SILU_MUL is the gated product of
    an MLP: the weight holds N / 2 gate rows, then N / 2 up rows; the output has N / 2 features, silu(gate) * up.
    """

    NONE = "none"
    RESIDUAL = "residual"
    BIAS = "bias"
    SILU_MUL = "silu_mul"


SERVED = (Epilogue.NONE, Epilogue.RESIDUAL)
"""Epilogues that a call through the dispatcher can have; the others are there for `explicit.run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One projection on one device.

    n, k: rows and reduction length of the weight `[N, K]`.
    weight, activation, output, epilogue: storage and arithmetic around the FP32 accumulation.
    device: the key of the GPU; None while only the arithmetic matters (cross compilation).
    """

    n: int
    k: int
    weight: WeightScheme = WeightScheme.BF16
    activation: DType = DType.BF16
    output: DType = DType.BF16
    epilogue: Epilogue = Epilogue.NONE
    device: DeviceKey | None = None

    @property
    def outputs(self) -> int:
        """Features of the output: N, or half of it for a gated product."""
        return self.n // 2 if self.epilogue is Epilogue.SILU_MUL else self.n

    @property
    def adds(self) -> bool:
        """Whether a second tensor is added: a residual, or a bias as one whose rows are all the same."""
        return self.epilogue in (Epilogue.RESIDUAL, Epilogue.BIAS)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight `[N, K]`: the floor of the memory traffic of one call."""
        return 2 * self.n * self.k

    def __str__(self) -> str:
        dtypes = f"{self.weight.value}x{self.activation.value}->{self.output.value}"
        epilogue = "" if self.epilogue is Epilogue.NONE else f"+{self.epilogue.value}"
        where = f" on {self.device.slug}" if self.device else ""
        return f"({self.n},{self.k}) {dtypes}{epilogue}{where}"


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which kernel and how to launch it. `params` is sorted by name, so equal configs are equal and hash alike."""

    kernel: str
    params: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: str, params: dict[str, int]) -> KernelConfig:
        """Build from a mapping of integers."""
        return cls(kernel, tuple(sorted(params.items())))

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{k}={v}' for k, v in self.params)})"


def _torch_dtypes() -> dict[DType, TorchDtype]:
    import torch

    return {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
