"""Configuration rules, each alone: an ordinary engine passes, one changed fact refuses with its reason."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skinny_core import env
from skinny_core.rules import Reason
from skinny_vllm import eligibility


def engine() -> Any:
    """The parts of a VllmConfig that the rules read, with vLLM's defaults."""
    space = types.SimpleNamespace
    return space(
        lora_config=None,
        kernel_config=space(linear_backend="auto"),
        compilation_config=space(pass_config=space(fuse_gemm_comms=False)),
        parallel_config=space(tensor_parallel_size=2),
        offload_config=space(uva=space(cpu_offload_gb=0), prefetch=space(offload_group_size=0)),
        model_config=space(dtype=torch.bfloat16),
        additional_config={},
    )


class Platform:
    """A platform of one kind."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind

    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def is_cpu(self) -> bool:
        return self.kind == "cpu"


CHANGES: list[tuple[Reason, Callable[[Any], None]]] = [
    (Reason.LORA, lambda c: setattr(c, "lora_config", object())),
    (Reason.HOST_BACKEND, lambda c: setattr(c.kernel_config, "linear_backend", "flashinfer_cutedsl")),
    (Reason.HOST_BACKEND, lambda c: setattr(c.compilation_config.pass_config, "fuse_gemm_comms", True)),
    (Reason.OFFLOADED, lambda c: setattr(c.offload_config.uva, "cpu_offload_gb", 0.5)),
    (Reason.OFFLOADED, lambda c: setattr(c.offload_config.prefetch, "offload_group_size", 2)),
    (Reason.DTYPE, lambda c: setattr(c.model_config, "dtype", torch.float32)),
    (Reason.HOST_BACKEND, lambda c: setattr(c, "additional_config", object())),
]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_ordinary_engine_passes(kind: str, dtype: torch.dtype) -> None:
    config = engine()
    config.model_config.dtype = dtype
    assert eligibility.judge(config, Platform(kind), False).ok


@pytest.mark.parametrize(("reason", "change"), CHANGES)
def test_one_changed_fact_refuses(reason: Reason, change: Callable[[Any], None]) -> None:
    config = engine()
    change(config)
    verdict = eligibility.judge(config, Platform(), False)
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert verdict.detail


def test_fused_communication_needs_more_than_one_rank() -> None:
    config = engine()
    config.compilation_config.pass_config.fuse_gemm_comms = True
    config.parallel_config.tensor_parallel_size = 1
    assert eligibility.judge(config, Platform(), False).ok


def test_another_platform_and_batch_invariance_refuse() -> None:
    assert eligibility.judge(engine(), Platform("rocm"), False).reason is Reason.NOT_CUDA
    assert eligibility.judge(engine(), Platform(), True).reason is Reason.BATCH_INVARIANT


@pytest.mark.parametrize(
    ("value", "reason"), [("off", Reason.DISABLED), ("batch_invariant=on", Reason.BATCH_INVARIANT)]
)
def test_the_variable_refuses(value: str, reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", value)
    env.settings.cache_clear()
    assert eligibility.judge(engine(), Platform(), False).reason is reason


def test_a_configuration_without_optional_parts_passes() -> None:
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=torch.bfloat16))
    assert eligibility.judge(config, Platform(), False).ok
