"""The real model and the real generation loop: equal tokens, every call seen, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch

import skinny_transformers
from skinny_qwen3 import parity

NOT_CUDA = "fallback:not_cuda"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_are_equal_and_every_call_was_seen(make, generate, calls, linears, tied, cache):
    model = make(tied)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    expected = generate(model, **options)
    assert calls() == {}
    report = skinny_transformers.install(model)
    assert len(report.installed) == linears
    assert report.family == "qwen3"
    assert generate(model, **options) == expected
    # the prompt's 5 rows once (its head sees the last one only), then a row per further token
    assert calls() == {(5, NOT_CUDA): linears - 1, (1, NOT_CUDA): 5 * linears + 1}
    skinny_transformers.uninstall(model)
    assert generate(model, **options) == expected
    assert calls() == {}


def test_logits_are_byte_equal_in_training_and_evaluation(make, calls, linears):
    model = make()
    stock = copy.deepcopy(model)
    skinny_transformers.install(model)
    ids = torch.tensor([[1, 2, 3]])
    loss, expected = (m(input_ids=ids, labels=ids).loss for m in (model, stock))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for (name, got), want in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), name
    assert calls() == {(3, "fallback:gradient"): linears}
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    assert calls() == {(3, NOT_CUDA): linears}


def test_tied_head_and_saved_files_are_the_same(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "before")
    skinny_transformers.install(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "after")
    names = sorted(p.name for p in (tmp_path / "before").iterdir())
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == names
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name


def test_resized_and_retied_embeddings_are_used(make, generate, calls):
    model = make()
    skinny_transformers.install(model)
    model.resize_token_embeddings(352)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    calls()
    assert len(generate(model)) == 6
    seen = calls()
    assert {outcome for _, outcome in seen} == {NOT_CUDA}


def test_parity_of_a_whole_model(make, calls):
    model = make()
    report = parity.check_model(model, ms=(1, 4), new_tokens=8)
    assert report.passed, report.text()
    assert {r.name for r in report.rows} == {"q", "k", "v", "o", "gate", "up", "down", "lm_head"}
    assert {r.path for r in report.rows} == {NOT_CUDA}
    assert report.tokens is not None
    assert report.tokens.equal
    assert not skinny_transformers.status(model).installed


def test_parity_leaves_an_installed_model_installed(make):
    model = make()
    skinny_transformers.install(model, family="mine")
    parity.check_model(model, ms=(1,), new_tokens=0)
    assert skinny_transformers.status(model).family == "mine"
    assert skinny_transformers.status(model).installed


def test_parity_sees_a_model_that_differs(make, monkeypatch):
    model = make()
    original = torch.nn.functional.linear

    def lossy(x, weight, family):
        y = original(x, weight)
        return y + 0.05 * y.abs().amax()

    monkeypatch.setattr(skinny_transformers.seam.dispatch, "linear", lossy)
    report = parity.check_model(model, ms=(2,), new_tokens=8)
    assert not report.passed
    assert not any(row.passed for row in report.rows)
