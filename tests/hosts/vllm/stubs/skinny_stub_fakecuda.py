"""Test only: vLLM's CUDA platform with a pretended capability; tensors stay on the CPU.

For construction, install logic and single calls, not for an engine.
"""

from __future__ import annotations

import os
import sys
import types

import torch
import torch.nn.functional as F

CAPABILITY = tuple(int(part) for part in os.environ["SKINNY_STUB_PLATFORM"].split("."))

for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._C"):
    sys.modules.setdefault(name, types.ModuleType(name))
for name in ("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"):
    sys.modules.setdefault(name, types.ModuleType(name))

LIBRARY = torch.library.Library("_C", "FRAGMENT")
for name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):
    LIBRARY.define(f"{name}(int cap) -> bool")
    LIBRARY.impl(name, lambda cap: False, "CompositeExplicitAutograd")


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    out.copy_(F.silu(x[..., :half]) * x[..., half:])


LIBRARY.define("silu_and_mul(Tensor! out, Tensor x) -> ()")
LIBRARY.impl("silu_and_mul", _silu_and_mul, "CPU")

# After the stubs above: importing it loads the libraries they stand for.
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class FakeCuda(NonNvmlCudaPlatform):
    """`is_cuda()` is true; nothing asks the driver."""

    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """The pretended capability."""
        return DeviceCapability(*CAPABILITY)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """A name that no real board has."""
        return "pretended {}.{}".format(*CAPABILITY)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return 140 << 30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Multiprocessors."""
        return 132

    @classmethod
    def device_count(cls) -> int:
        """One."""
        return 1

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to set."""

    @classmethod
    def log_warnings(cls) -> None:
        """Nothing to warn about."""
