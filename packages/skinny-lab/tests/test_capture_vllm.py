"""The recorder of vLLM's layers on stand-ins with vLLM's class names; tests/hosts/vllm runs it in the real engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skinny_lab.capture import request, vllm_host, vllm_layers
from skinny_lab.capture.tally import Tally
from skinny_lab.explain.target import RequestError


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class Subclassed(UnquantizedLinearMethod):
    pass


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, layer.weight)


class Fp8LinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight)


class Linear(nn.Module):
    def __init__(self, n: int, k: int, method: Any, bias: bool = False) -> None:
        super().__init__()
        self.input_size, self.output_size, self.quant_method = k, n, method
        self.weight = nn.Parameter(torch.randn(n, k))
        self.bias = nn.Parameter(torch.randn(n)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings, self.input_size, self.output_size = 32, 16, 32
        self.quant_method = UnquantizedEmbeddingMethod()
        self.weight = nn.Parameter(torch.randn(32, 16))


class Layer(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.qkv_proj = Linear(48, 16, Subclassed(), bias=True)
        self.o_proj = Linear(16, 48, shared)
        self.gate = Linear(4, 16, Fp8LinearMethod())
        self.unused = Linear(4, 16, UnquantizedLinearMethod())

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.qkv_proj(x)) + self.gate(x).sum()


class Model(nn.Module):
    """A tied head that *is* the embedding, as in vLLM 0.26."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding()
        shared = UnquantizedLinearMethod()
        self.layers = nn.ModuleList(Layer(shared) for _ in range(2))
        self.lm_head = self.embed_tokens

    def forward(self, input_ids: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.embed_tokens.quant_method.embedding(self.embed_tokens, input_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head.quant_method.apply(self.lm_head, x, bias=None)


@pytest.fixture
def worker() -> Any:
    model = Model()
    return SimpleNamespace(get_model=lambda: model, model=model, device="cpu")


def step(model: Any, tokens: int, sequences: int) -> Tensor:
    return model.logits(model(input_ids=torch.arange(tokens), inputs_embeds=None)[:sequences])


def test_calls_are_recorded_and_every_method_is_put_back(worker: Any) -> None:
    before = {path: layer.quant_method for path, layer in vllm_layers.layers(worker.model)}
    expected = step(worker.model, 5, 1)
    vllm_layers.attach(worker)
    vllm_layers.begin(worker, 2)
    assert torch.equal(step(worker.model, 5, 1), expected)
    step(worker.model, 2, 2)
    device, steps, notes = vllm_layers.detach(worker)
    step(worker.model, 2, 2)
    assert device.startswith("cpu")
    assert [(rows, sequences) for rows, sequences, _ in steps] == [(5, 2), (2, 2)]
    fp32 = ("fp32", "fp32", "fp32")
    assert steps[1][2] == [
        ("layers.0.qkv_proj", 48, 16, 2, fp32, True),
        ("layers.0.o_proj", 16, 48, 2, fp32, False),
        ("layers.1.qkv_proj", 48, 16, 2, fp32, True),
        ("layers.1.o_proj", 16, 48, 2, fp32, False),
        ("lm_head", 32, 16, 2, fp32, False),
    ]
    assert steps[0][2][-1][:4] == ("lm_head", 32, 16, 1)
    assert notes == [
        "Fp8LinearMethod is not recorded: 2 x layers.*.gate",
        "never called through their method: 2 x layers.*.unused",
    ]
    assert {path: layer.quant_method for path, layer in vllm_layers.layers(worker.model)} == before
    assert not worker.model._forward_pre_hooks
    assert not hasattr(worker, "skinny_capture")


def test_an_odd_m_is_recorded_as_it_was_issued_in_the_order_of_the_calls(worker: Any) -> None:
    """Fused widths, the head and its own M, a bias; the padded sizes of CUDA graphs are no part of it."""
    vllm_layers.attach(worker)
    for sequences in (3, 5):
        vllm_layers.begin(worker, sequences)
        step(worker.model, 5 * sequences, sequences)
        step(worker.model, sequences, sequences)
    tally = Tally()
    for rows, sequences, made in vllm_layers.detach(worker)[1]:
        tally.step(rows, sequences)
        for path, n, k, m, dtypes, bias in made:
            tally.add(path, n, k, m, dtypes, bias)
    layers = [("layers.*.qkv_proj", 48, 16, True), ("layers.*.o_proj", 16, 48, False), ("lm_head", 32, 16, False)]
    found = [(r.phase, r.m, (r.layer, r.n, r.k, r.bias)) for r in tally.records()]
    assert found[:6] == [("decode", m, layer) for m in (3, 5) for layer in layers]
    heads = [("prefill", m, layers[-1]) for m in (3, 5)]
    assert found[6:] == [*heads, *(("prefill", m, layer) for m in (15, 25) for layer in layers[:2])]


def test_the_method_keeps_its_class_while_recording(worker: Any) -> None:
    """vLLM asks `isinstance` for layers that need another treatment."""
    vllm_layers.attach(worker)
    assert type(worker.model.layers[0].qkv_proj.quant_method) is Subclassed
    assert type(worker.model.lm_head.quant_method) is UnquantizedEmbeddingMethod


def test_what_runs_before_the_first_forward_is_not_recorded(worker: Any) -> None:
    vllm_layers.attach(worker)
    worker.model.logits(torch.randn(1, 16))
    assert vllm_layers.detach(worker)[1] == []


def test_a_child_that_fails_is_an_error_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "need", lambda *_: None)
    with pytest.raises(RequestError, match="m: ModuleNotFoundError: No module named 'vllm'"):
        vllm_host.run(request.Request(model="m"))
