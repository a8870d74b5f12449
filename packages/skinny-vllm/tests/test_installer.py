"""Installation on a pretended vLLM: a layer that cannot be judged keeps its call, and nothing outlives its model."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import skinny_vllm
from skinny_core import dispatch, env
from skinny_core.family import Discovery, ModelPackage
from skinny_vllm import plugin
from skinny_vllm.report import State

OURS = ("host_call", "methods", "sites", "installer")
LAYERS = "vllm.model_executor.layers"


class LinearBase(torch.nn.Module):
    """The host's linear layer: it calls its method object."""

    def __init__(self, n: int = 16, k: int = 32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, k).bfloat16(), requires_grad=False)
        self.bias = None
        self.quant_method: Any = UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> Any:
        return self.quant_method.apply(self, x)


class UnquantizedLinearMethod:
    """The host's method; a test may put any processing in its place."""

    process: Any = staticmethod(lambda layer: None)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.process(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return "original"


class Toy(torch.nn.Module):
    """A model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LinearBase(), LinearBase(32, 16)


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`skinny_vllm.installer`, imported anew on a vLLM of the few names that it needs."""
    embedding = type("UnquantizedEmbeddingMethod", (), {})
    head = type("VocabParallelEmbedding", (torch.nn.Module,), {})
    plain = torch.nn.functional.linear
    platform = types.SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, device_type="cuda")
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {"get_current_vllm_config": lambda: None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor": {},
        LAYERS: {},
        f"{LAYERS}.utils": {"default_unquantized_gemm": plain, "dispatch_unquantized_gemm": lambda: plain},
        f"{LAYERS}.linear": {"LinearBase": LinearBase, "UnquantizedLinearMethod": UnquantizedLinearMethod},
        f"{LAYERS}.vocab_parallel_embedding": {
            "ParallelLMHead": type("ParallelLMHead", (head,), {}),
            "UnquantizedEmbeddingMethod": embedding,
            "VocabParallelEmbedding": head,
        },
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, leaf = name.rpartition(".")
        if above:
            setattr(sys.modules[above], leaf, module)
    forget()
    found = importlib.import_module("skinny_vllm.installer")
    package = ModelPackage("toy", "1", ("Toy",), {}, lambda config, tp: (), lambda: (), "")
    monkeypatch.setattr(found.family, "discover", lambda: Discovery((package,), ()))
    yield found
    dispatch.deactivate("toy")
    forget()


def forget() -> None:
    for name in OURS:
        sys.modules.pop(f"skinny_vllm.{name}", None)
        vars(skinny_vllm).pop(name, None)


class Config:
    """The parts of a VllmConfig that an installation reads."""

    def __init__(self) -> None:
        self.model_config = types.SimpleNamespace(dtype=torch.bfloat16)
        self.additional_config: dict[str, Any] = {}


def load(model: Toy) -> None:
    """What the host does after it has read the weights."""
    for layer in (model.up, model.down):
        layer.quant_method.process_weights_after_loading(layer)


def test_weights_are_promised_to_be_static(installer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(installer.dispatch, "activate", lambda package, **facts: seen.append(facts))
    assert installer.install(Toy(), Config()) is not None
    assert [facts["static_weights"] for facts in seen] == [True]


def test_a_dense_layer_is_offered(installer: Any) -> None:
    model = Toy()
    installer.install(model, Config())
    load(model)
    x = torch.randn(2, 32).bfloat16()
    assert torch.equal(model.up(x), torch.nn.functional.linear(x, model.up.weight))
    assert [m.layers for m in skinny_vllm.status().models] == [2]


@pytest.mark.parametrize(
    ("stated", "claimed"), [(["Mistral"], False), (["Toy"], True), (["Mistral", "Toy"], True), ([], True), (None, True)]
)
def test_a_class_speaks_only_for_a_model_that_states_no_architecture(
    installer: Any, stated: list[str] | None, claimed: bool
) -> None:
    """vLLM's Mistral derives from its Llama class, and says in its config what it is."""

    class Derived(Toy):
        config = types.SimpleNamespace(architectures=stated)

    found = installer.claimed_by(Derived())
    assert (found is not None and found.name == "toy") == claimed


def replaced(value: torch.Tensor) -> Any:
    return lambda layer: setattr(layer, "weight", torch.nn.Parameter(value, requires_grad=False))


CHANGES = {
    "dtype": replaced(torch.zeros(16, 32, dtype=torch.float64)),
    "packed": replaced(torch.zeros(4, 4, 32, dtype=torch.bfloat16)),
    "flat": replaced(torch.zeros(512, dtype=torch.bfloat16)),
    "sparse": replaced(torch.zeros(16, 32, dtype=torch.bfloat16).to_sparse()),
    "gone": lambda layer: delattr(layer, "weight"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_changed_while_loading_keeps_its_call(installer: Any, change: Any) -> None:
    model, config = Toy(), Config()
    plugin._state = State.READY
    installation = installer.install(model, config)
    before = config.additional_config[installer.compile_key.ENTRY]
    model.up.quant_method.original.process = change
    load(model)
    assert model.up(torch.randn(2, 32).bfloat16()) == "original"
    assert [item[0] for item in installation.emitting.values()] == ["down"]
    assert config.additional_config[installer.compile_key.ENTRY] != before
    assert installation.ready
    assert plugin._state is State.READY


def test_a_judgement_that_fails_declines_and_the_host_goes_on(
    installer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Toy()
    installation = installer.install(model, Config())

    def fail(method: Any, layer: Any) -> bool:
        raise ValueError("unknown host")

    monkeypatch.setattr(installer.host_call, "is_plain_linear", fail)
    load(model)
    assert model.up(torch.randn(2, 32).bfloat16()) == "original"
    assert installation.emitting == {}
    assert installation.ready
    assert "skinny is off: ValueError: unknown host" in caplog.text


@pytest.mark.parametrize("variable", ["", "off"])
def test_nothing_outlives_the_model(installer: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("SKINNY", variable)
    env.settings.cache_clear()
    model, config = Toy(), Config()
    installed = installer.install(model, config)
    assert (installed is None) == (variable == "off")
    load(model)
    assert len(skinny_vllm.status().models) == 1
    gone = weakref.ref(model), weakref.ref(config)
    del model, config, installed
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert skinny_vllm.status().models == ()
