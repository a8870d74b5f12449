"""Real PEFT adapters around installed layers: they count fully, and their removal gives the kernel path back."""

from __future__ import annotations

import copy

import pytest
import torch

import skinny_transformers
from skinny_core.rules import Reason

peft = pytest.importorskip("peft")
NOT_CUDA, LORA = "fallback:not_cuda", "fallback:lora"
IDS = torch.tensor([[1, 2, 3]])
ADAPTED = 4  # q_proj and down_proj in each of two layers


def adapted(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).to(torch.bfloat16).eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def test_adapter_attached_after_installing(make, calls, linears):
    stock, model = adapted(make()), make()
    skinny_transformers.install(model)
    wrapped = adapted(model)
    assert torch.equal(logits(wrapped), logits(stock))
    assert calls() == {(3, LORA): ADAPTED, (3, NOT_CUDA): linears - ADAPTED}
    report = skinny_transformers.status(wrapped)
    assert sum(r.reason is Reason.LORA and r.installed for r in report.layers) == ADAPTED
    assert sum(r.detail == "part of an adapter" for r in report.layers) == 2 * ADAPTED

    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), logits(make()))
    calls()
    bare = wrapped.unload()
    assert torch.equal(logits(bare), logits(make()))
    assert calls() == {(3, NOT_CUDA): linears}


def test_adapter_merged_into_the_weights(make, calls, linears):
    model = make()
    skinny_transformers.install(model)
    merged = adapted(model).merge_and_unload()
    expected = adapted(make()).merge_and_unload()
    assert torch.equal(logits(merged), logits(expected))
    assert calls() == {(3, NOT_CUDA): linears}


def test_installed_on_an_adapted_model(make, calls, linears):
    stock = adapted(make())
    model = copy.deepcopy(stock)
    report = skinny_transformers.install(model)
    assert report.family == "qwen3"
    assert torch.equal(logits(model), logits(stock))
    assert calls() == {(3, LORA): ADAPTED, (3, NOT_CUDA): linears - ADAPTED}
    bare = model.unload()
    logits(bare)
    assert calls() == {(3, NOT_CUDA): linears}


def test_adapter_training_gives_the_same_gradients(make):
    grads = []
    for install in (False, True):
        model = make()
        if install:
            skinny_transformers.install(model)
        wrapped = adapted(model).train()
        wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) == 2 * ADAPTED
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_uninstalled_below_an_adapter(make, calls):
    model = make()
    skinny_transformers.install(model)
    wrapped = adapted(model)
    skinny_transformers.uninstall(wrapped)
    assert torch.equal(logits(wrapped), logits(adapted(make())))
    assert calls() == {}
