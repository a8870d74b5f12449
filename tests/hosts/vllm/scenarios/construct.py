"""A whole model through the host's own `initialize_model`, on a pretended CUDA device: seam, key, every refusal.

Argument: folder of the tiny models.
"""

from __future__ import annotations

import copy
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from checks import report, run_checks, world
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform

import skinny_vllm
from skinny_core import dispatch, env
from skinny_core.rules import Reason
from skinny_llama31.package import PACKAGE
from skinny_vllm import compile_key, installer
from skinny_vllm.report import State

EXPECTED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}


def make_config(name: str, **options: Any) -> Any:
    """Engine configuration of a tiny model with dummy weights."""
    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    return EngineArgs(model=str(Path(sys.argv[1]) / name), **{**arguments, **options}).create_engine_config()


def build(config: Any) -> torch.nn.Module:
    """What a loader does first. Layers of earlier models are forgotten: their names are unique per configuration."""
    config.compilation_config.static_forward_context.clear()
    with torch.device("cpu"):
        return initialize_model(vllm_config=config)


def replaced(model: torch.nn.Module) -> dict[str, Any]:
    """Our method objects by module path."""
    methods = ((name, getattr(module, "quant_method", None)) for name, module in model.named_modules())
    return {name: method for name, method in methods if isinstance(method, installer._OURS)}


def check_the_seam_installs_before_weights(config: Any) -> None:
    assert current_platform.is_cuda()
    assert not torch.cuda.is_initialized()
    model = build(config)
    methods = replaced(model)
    tail = {"lm_head" if "embed_tokens" in name else name.rpartition(".")[2] for name in methods}
    assert tail == EXPECTED
    assert len(methods) == 9
    assert all(method.emits for method in methods.values())
    keyed = config.compute_hash()
    assert compile_key.ENTRY in config.additional_config
    status = skinny_vllm.status()
    assert status.state is State.READY
    assert (status.models[-1].architecture, status.models[-1].package, status.models[-1].layers) == (
        "Qwen3ForCausalLM",
        "qwen3",
        9,
    )
    layer = model.model.layers[0].mlp.down_proj
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(2, 512)
    dispatch.reset_counters()
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))
    assert sum(dispatch.counters().values()) == 1
    assert skinny_vllm.uninstall(model) == 9
    assert not replaced(model)
    assert config.additional_config == {}
    assert config.compute_hash() != keyed


def check_a_llama_is_claimed_and_has_the_shapes_that_its_package_lists(_: Any) -> None:
    config = make_config("llama")
    content = config.model_config.hf_config
    for biases in ((), ("attention_bias",), ("mlp_bias",), ("attention_bias", "mlp_bias")):
        for key in ("attention_bias", "mlp_bias"):
            setattr(content, key, key in biases)
        model = build(config)
        status = skinny_vllm.status().models[-1]
        skipped = {Reason.BIAS.value: 4 * len(biases)} if biases else {}
        assert (status.package, status.layers, status.skipped) == ("llama31", 9 - 4 * len(biases), skipped), status
        listed = [p for p in PACKAGE.projections(content.to_dict(), 1) if not p.part_of]
        paths = replaced(model)
        assert sum(p.calls for p in listed) == len(paths)
        for path in paths:
            (shape,) = [(p.n, p.k) for p in listed if p.matches(path)]
            assert shape == tuple(model.get_submodule(path).weight.shape), path
        assert skinny_vllm.uninstall(model) == len(paths)


def check_hashes_are_equal_between_processes_and_runs(config: Any) -> None:
    first = build(config)
    value = config.additional_config[compile_key.ENTRY]
    skinny_vllm.uninstall(first)
    second = build(config)
    assert config.additional_config[compile_key.ENTRY] == value
    skinny_vllm.uninstall(second)


def check_an_inner_model_passes_its_key_to_the_outer_configuration(config: Any) -> None:
    outer_config = copy.copy(config)
    outer_config.additional_config = {}
    inner = build(config)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = inner

    outer = Outer()
    installer.install(outer, outer_config)
    assert outer_config.additional_config == {compile_key.ENTRY: config.additional_config[compile_key.ENTRY]}
    skinny_vllm.uninstall(outer)
    assert outer_config.additional_config == {}


def refused(config: Any, reason: Reason) -> None:
    """Construct with a changed configuration; nothing may be replaced or added to the key."""
    extra = config.additional_config
    model = build(config)
    assert not replaced(model)
    last = skinny_vllm.status().models[-1]
    assert last.reason is reason, last
    assert config.additional_config is extra


def check_each_configuration_that_refuses(config: Any) -> None:
    changes: list[tuple[Reason, Any, str, Any]] = [
        (Reason.LORA, config, "lora_config", types.SimpleNamespace(compute_hash=lambda: "l")),
        (Reason.HOST_BACKEND, config.kernel_config, "linear_backend", "cutlass"),
        (Reason.OFFLOADED, config.offload_config.uva, "cpu_offload_gb", 1.0),
        (Reason.OFFLOADED, config.offload_config.prefetch, "offload_group_size", 4),
        (Reason.HOST_BACKEND, config, "additional_config", types.SimpleNamespace(compute_hash=lambda: "a")),
        (Reason.DTYPE, config.model_config, "dtype", torch.float32),
    ]
    for reason, holder, name, value in changes:
        before = getattr(holder, name)
        setattr(holder, name, value)
        try:
            refused(config, reason)
        finally:
            setattr(holder, name, before)


def check_environment_that_refuses(config: Any) -> None:
    for variable, value, reason in (
        ("VLLM_BATCH_INVARIANT", "1", Reason.BATCH_INVARIANT),
        ("SKINNY", "batch_invariant=on", Reason.BATCH_INVARIANT),
        ("SKINNY", "off", Reason.DISABLED),
    ):
        before = os.environ.pop(variable, None)
        os.environ[variable] = value
        env.reload()
        try:
            refused(config, reason)
        finally:
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before
            env.reload()


def check_a_failure_leaves_the_model_as_it_was(config: Any) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("two\nlines")

    original = installer.compile_key.write
    installer.compile_key.write = explode
    try:
        model = build(config)
    finally:
        installer.compile_key.write = original
    assert not replaced(model)
    status = skinny_vllm.status()
    assert status.state is State.FAILED
    assert "RuntimeError: two; lines" in status.detail


if __name__ == "__main__":
    configuration = make_config("tied")
    with world(configuration):
        report(
            checks=run_checks(dict(globals()), configuration), capability=list(current_platform.get_device_capability())
        )
