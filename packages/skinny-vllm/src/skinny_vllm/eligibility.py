"""May this model's layers be touched at all? Facts of the engine's configuration, judged once per constructed model.

Facts of a call (bias, batch-invariant mode, a wrapper around the layer, dtypes, strides) are judged elsewhere, at each
call.
"""

from __future__ import annotations

from typing import Any

import torch

from skinny_core.env import settings
from skinny_core.rules import OK, Reason, Verdict

DTYPES = (torch.bfloat16, torch.float16)


def judge(config: Any, platform: Any, batch_invariant: bool) -> Verdict:
    """First reason not to install. `config`: a VllmConfig; `platform`: vLLM's current platform."""
    for rule in RULES:
        verdict = rule(config, platform, batch_invariant)
        if not verdict.ok:
            return verdict
    return OK


def _refuse(fact: Any, reason: Reason, detail: str = "") -> Verdict:
    return Verdict(False, reason, detail) if fact else OK


def enabled(config: Any, platform: Any, invariant: bool) -> Verdict:
    """SKINNY=off."""
    return _refuse(not settings().enabled, Reason.DISABLED)


def lora(config: Any, platform: Any, invariant: bool) -> Verdict:
    """Adapters are attached after loading and call the method object of the layer they wrap."""
    return _refuse(getattr(config, "lora_config", None) is not None, Reason.LORA, "the engine was started with LoRA")


def linear_backend(config: Any, platform: Any, invariant: bool) -> Verdict:
    """Somebody chose a backend: theirs is the call to keep."""
    chosen = getattr(getattr(config, "kernel_config", None), "linear_backend", "auto")
    return _refuse(chosen != "auto", Reason.HOST_BACKEND, f"--linear-backend {chosen}")


def batch_invariance(config: Any, platform: Any, invariant: bool) -> Verdict:
    """A choice by M is not batch-invariant."""
    asked = "SKINNY" if settings().batch_invariant else "VLLM_BATCH_INVARIANT"
    return _refuse(invariant or settings().batch_invariant, Reason.BATCH_INVARIANT, f"asked for by {asked}")


def fused_communication(config: Any, platform: Any, invariant: bool) -> Verdict:
    """That pass looks for matrix products in the graph and would find none."""
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    fuses = getattr(passes, "fuse_gemm_comms", False) and config.parallel_config.tensor_parallel_size > 1
    return _refuse(fuses, Reason.HOST_BACKEND, "the compiler pass fuse_gemm_comms is on")


def offloading(config: Any, platform: Any, invariant: bool) -> Verdict:
    """Weights in host memory stream over another bus than was measured; prefetching writes weights inside the graph."""
    offload = getattr(config, "offload_config", None)
    if offload is None:
        return OK
    used = offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    return _refuse(used, Reason.OFFLOADED, "weight offloading is on")


def dtype(config: Any, platform: Any, invariant: bool) -> Verdict:
    """Model dtype BF16 or FP16."""
    found = config.model_config.dtype
    return _refuse(found not in DTYPES, Reason.DTYPE, f"the model's dtype is {found}")


def platform_known(config: Any, platform: Any, invariant: bool) -> Verdict:
    """CUDA; and the CPU, where a layer is taken only if the host would run `F.linear` on it."""
    known = platform.is_cuda() or platform.is_cpu()
    return _refuse(not known, Reason.NOT_CUDA, f"vLLM runs on {type(platform).__name__}")


def compile_key(config: Any, platform: Any, invariant: bool) -> Verdict:
    """A compiled graph must carry the digest; an opaque `additional_config` cannot."""
    extra = getattr(config, "additional_config", None)
    opaque = extra is not None and not isinstance(extra, dict)
    return _refuse(opaque, Reason.HOST_BACKEND, f"additional_config is a {type(extra).__name__}, not a dict")


RULES = (
    enabled,
    lora,
    linear_backend,
    batch_invariance,
    fused_communication,
    offloading,
    dtype,
    platform_known,
    compile_key,
)
