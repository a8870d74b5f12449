"""Real layers of the host on its CPU platform: which are taken, what is preserved, what each refusal calls."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import vllm.envs as envs
from checks import report, run_checks, world
from vllm.config import VllmConfig
from vllm.model_executor.layers import linear as L
from vllm.model_executor.layers import vocab_parallel_embedding as V
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.plugins import load_general_plugins

import skinny_vllm
from skinny_core import dispatch
from skinny_core.rules import Reason
from skinny_vllm import compile_key, host_call, installer
from skinny_vllm.methods import SkinnyEmbeddingMethod


class Specialised(L.UnquantizedLinearMethod):
    """What another package's replacement looks like."""


class Qwen3ForCausalLM(torch.nn.Module):
    """Claimed by its name. `tied`: the head is the embedding itself, as in Qwen3 of vLLM 0.26."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.qkv_proj = L.QKVParallelLinear(256, 32, 8, 2, bias=False)
        self.o_proj = L.RowParallelLinear(256, 256, bias=False)
        self.gate_up_proj = L.MergedColumnParallelLinear(256, [512, 512], bias=False)
        self.biased = L.ReplicatedLinear(256, 256, bias=True)
        self.special = L.ReplicatedLinear(256, 256, bias=False)
        self.special.quant_method = Specialised()
        self.wide = L.ReplicatedLinear(256, 256, bias=False, params_dtype=torch.float32)
        self.embed_tokens = V.VocabParallelEmbedding(1000, 256)
        self.lm_head = self.embed_tokens if tied else V.ParallelLMHead(1000, 256)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)


TAKEN = ("qkv_proj", "o_proj", "gate_up_proj", "lm_head")
LEFT = ("biased", "special", "wide")


def loaded(tied: bool = False, additional: Any = None) -> tuple[Qwen3ForCausalLM, VllmConfig, Any]:
    """A model that went through installation and the host's processing of weights."""
    config = make_config(additional)
    model = Qwen3ForCausalLM(tied)
    installation = installer.install(model, config)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return model, config, installation


def make_config(additional: Any = None) -> VllmConfig:
    """The current configuration object with an own `additional_config`, and a model dtype."""
    config = VllmConfig(additional_config={} if additional is None else additional)
    config.model_config = type("ModelConfig", (), {"dtype": torch.bfloat16, "compute_hash": lambda self: "m"})()
    return config


REFUSALS = {f"fallback:{reason.value}" for reason in (Reason.BIAS, Reason.BATCH_INVARIANT, Reason.LORA, Reason.HOOKED)}


def outcomes() -> list[str]:
    """Outcome of every counted call since the last reset."""
    return [key[4] for key, times in dispatch.counters().items() for _ in range(times)]


def count(model: torch.nn.Module, name: str, m: int = 3, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(through the layer's method, F.linear, calls that reached the dispatcher) for M = m rows."""
    layer = model.get_submodule(name)
    x = torch.randn(m, layer.weight.shape[1])
    dispatch.reset_counters()
    y = layer.quant_method.apply(layer, x, **options)
    reached = sum(what not in REFUSALS for what in outcomes())
    return y, torch.nn.functional.linear(x, layer.weight, options.get("bias")), reached


def check_only_exact_classes_are_taken() -> None:
    model, _, installation = loaded()
    assert {
        name for name in (*TAKEN, *LEFT) if isinstance(model.get_submodule(name).quant_method, installer._OURS)
    } == set(TAKEN)
    assert type(model.embed_tokens.quant_method) is V.UnquantizedEmbeddingMethod
    assert installation.skipped == {Reason.BIAS.value: 1, Reason.HOST_BACKEND.value: 1, Reason.DTYPE.value: 1}
    assert skinny_vllm.status().models[-1].layers == 4


def check_attributes_of_the_original_are_kept() -> None:
    config = make_config()
    model = Qwen3ForCausalLM(False)
    before = {name: model.get_submodule(name).quant_method for name in TAKEN}
    loader = model.qkv_proj.weight.weight_loader
    installer.install(model, config)
    assert model.qkv_proj.weight.weight_loader == loader
    for name, original in before.items():
        method = model.get_submodule(name).quant_method
        assert method.original is original
        assert isinstance(method, type(original))
        assert getattr(method, "_gemm_impl", None) is getattr(original, "_gemm_impl", None)
        flag = "supports_pre_processed_weights"
        assert getattr(method, flag, None) == getattr(original, flag, None)
        assert method.uses_meta_device == original.uses_meta_device


def check_every_m_reaches_the_op_and_equals_the_host() -> None:
    model, _, _ = loaded()
    for name in TAKEN:
        for m in (1, 2, 3, 8, 16, 17, 0):
            y, expected, calls = count(model, name, m)
            assert calls == 1, (name, m, calls)
            assert torch.equal(y, expected), (name, m)
    for name in LEFT[:2]:
        y, expected, calls = count(model, name)
        assert calls == 0
        assert torch.equal(y, expected)


def check_refused_calls_are_the_originals() -> None:
    model, _, _ = loaded()
    method = model.o_proj.quant_method
    seen = []
    method.original.apply = lambda *a: seen.append(a) or L.UnquantizedLinearMethod.apply(method.original, *a)
    y, expected, calls = count(model, "o_proj", bias=torch.randn(256))
    assert calls == 0
    assert outcomes() == ["fallback:bias"]
    assert len(seen) == 1
    assert torch.equal(y, expected)
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        assert envs.VLLM_BATCH_INVARIANT
        y, expected, calls = count(model, "o_proj")
    finally:
        del os.environ["VLLM_BATCH_INVARIANT"]
    assert calls == 0
    assert outcomes() == ["fallback:batch_invariant"]
    assert len(seen) == 2
    assert torch.equal(y, expected)


def check_a_wrapped_layer_falls_back_and_unwrapping_restores() -> None:
    model, _, _ = loaded()
    layer = model.o_proj

    class Wrapper(torch.nn.Module):
        def __init__(self, base_layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    model.o_proj = Wrapper(layer)
    x = torch.randn(1, 256)
    dispatch.reset_counters()
    assert torch.equal(layer.quant_method.apply(layer, x), torch.nn.functional.linear(x, layer.weight))
    assert outcomes() == ["fallback:lora"]
    model.o_proj = torch.nn.Identity()
    layer.quant_method.apply(layer, x)
    assert outcomes() == ["fallback:lora", "fallback:hooked"]
    model.o_proj = layer
    assert count(model, "o_proj")[2] == 1


def check_a_tied_head_keeps_its_embedding() -> None:
    model, _, _ = loaded(tied=True)
    assert model.lm_head is model.embed_tokens
    assert isinstance(model.lm_head.quant_method, SkinnyEmbeddingMethod)
    ids = torch.tensor([1, 5, 999])
    assert torch.equal(model.embed_tokens(ids), model.embed_tokens.weight[ids])
    y, expected, calls = count(model, "lm_head")
    assert calls == 1
    assert torch.equal(y, expected)


def check_a_separate_head_can_be_tied_afterwards() -> None:
    model, _, _ = loaded()
    model.lm_head.tie_weights(model.embed_tokens)
    assert model.lm_head.weight is model.embed_tokens.weight
    y, expected, calls = count(model, "lm_head")
    assert calls == 1
    assert torch.equal(y, expected)


def check_the_logits_processor_goes_through_the_op() -> None:
    model, _, _ = loaded()
    x = torch.randn(5, 256)
    dispatch.reset_counters()
    logits = LogitsProcessor(1000)(model.lm_head, x)
    assert torch.equal(logits, torch.nn.functional.linear(x, model.lm_head.weight)[:, :1000])
    assert [key[3] for key in dispatch.counters()] == [5]


def check_new_weights_are_seen() -> None:
    model, _, _ = loaded()
    layer = model.o_proj
    layer.weight.data.copy_(torch.randn(256, 256))
    assert torch.equal(*count(model, "o_proj")[:2])
    layer.weight.data = torch.randn(256, 256)
    assert torch.equal(*count(model, "o_proj")[:2])
    layer.weight = torch.nn.Parameter(torch.randn(256, 256), requires_grad=False)
    y, expected, calls = count(model, "o_proj")
    assert calls == 1
    assert torch.equal(y, expected)


def check_installing_twice_is_once_and_uninstalling_restores() -> None:
    given = {"mine": 1}
    config = make_config(given)
    model = Qwen3ForCausalLM(False)
    before = {name: model.get_submodule(name).quant_method for name in (*TAKEN, *LEFT)}
    stock = config.compute_hash()
    first = installer.install(model, config)
    methods = {name: model.get_submodule(name).quant_method for name in TAKEN}
    assert installer.install(model, config) is first
    assert all(model.get_submodule(name).quant_method is method for name, method in methods.items())
    assert given == {"mine": 1}
    assert config.additional_config["mine"] == 1
    assert config.compute_hash() != stock
    assert skinny_vllm.uninstall(model) == 4
    assert all(model.get_submodule(name).quant_method is method for name, method in before.items())
    assert config.additional_config == given
    assert config.compute_hash() == stock
    assert skinny_vllm.uninstall(model) == 0


def check_the_key_follows_the_layers_that_call_the_op() -> None:
    model, config, installation = loaded()
    before = config.additional_config[compile_key.ENTRY]
    model.o_proj.cpu_linear = lambda x, weight, bias: x
    installation.decide(model.o_proj, model.o_proj.quant_method)
    installation.publish()
    assert not model.o_proj.quant_method.emits
    assert config.additional_config[compile_key.ENTRY] != before


def check_an_architecture_that_nobody_claims() -> None:
    class Other(Qwen3ForCausalLM):
        """Claimed through its base class, until the base class is nobody's either."""

    claimed = Other(False)
    assert installer.install(claimed, make_config()) is not None
    foreign = torch.nn.ModuleDict({"o_proj": L.RowParallelLinear(256, 256, bias=False)})
    assert installer.install(foreign, make_config()) is None
    assert type(foreign.o_proj.quant_method) is L.UnquantizedLinearMethod
    # By name: models of earlier checks are reference cycles, and leave the status whenever the collector runs.
    known = [status.architecture for status in skinny_vllm.status().models]
    assert (known.count("Other"), known.count("ModuleDict")) == (1, 0)


def check_bare_layers_are_the_hosts_business() -> None:
    config = make_config()
    model = Qwen3ForCausalLM(False)
    installer.install(model, config)
    with pytest.raises(AttributeError, match="cpu_linear"):
        count(model, "o_proj")


def check_packed_weights_are_left_alone() -> None:
    """As on a CPU build with its libraries: the host packs every weight and drops the original."""
    amx = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: True
    os.environ["VLLM_CPU_SGL_KERNEL"] = "1"
    try:
        model, _, installation = loaded()
    finally:
        torch.cpu._is_amx_tile_supported = amx
        del os.environ["VLLM_CPU_SGL_KERNEL"]
    assert installation.emitting == {}
    assert model.o_proj.weight.numel() == 0
    for name in TAKEN:
        layer = model.get_submodule(name)
        assert not host_call.is_plain_linear(layer.quant_method.original, layer)
        assert not layer.quant_method.emits
    status = skinny_vllm.status().models[-1]
    assert (status.layers, status.skipped[Reason.HOST_BACKEND.value]) == (0, 5)


if __name__ == "__main__":
    load_general_plugins()
    with world(VllmConfig()):
        report(checks=run_checks(dict(globals())))
