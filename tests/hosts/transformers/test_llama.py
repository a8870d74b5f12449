"""A real, tiny LlamaForCausalLM with random weights: found by its entry point, equal tokens, a bias stays stock.

No Llama shape has a plan, and this machine no GPU: every call falls back, and that is what is counted."""

from __future__ import annotations

import pytest
import torch

import skinny_transformers
from skinny_core.rules import Reason
from skinny_llama31 import parity
from skinny_llama31.package import PACKAGE

LAYERS = 2
NOT_CUDA = "fallback:not_cuda"
ALL = {"q", "k", "v", "o", "gate", "up", "down", "lm_head"}


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def build(transformers):
    """Factory of equal tiny models; another family on request."""

    def of(family="Llama", **changes):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(
            hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=320, max_position_embeddings=128, **changes,
        )  # fmt: skip
        return getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()

    return of


def is_listed(path, projections):
    return any(p.matches(path) for p in projections)


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_equal_and_every_call_was_seen(build, generate, calls, tied):
    model = build(tie_word_embeddings=tied)
    expected = generate(model)
    report = skinny_transformers.install(model)
    linears = 7 * LAYERS + 1
    assert (report.family, len(report.installed)) == ("llama31", linears)
    assert generate(model) == expected
    assert calls() == {(5, NOT_CUDA): linears - 1, (1, NOT_CUDA): 5 * linears + 1}
    skinny_transformers.uninstall(model)
    assert generate(model) == expected
    assert calls() == {}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [(), ("attention_bias",), ("mlp_bias",), ("attention_bias", "mlp_bias")])
def test_listed_shapes_are_those_of_the_layers_without_bias(build, tied, biases):
    model = build(tie_word_embeddings=tied, **dict.fromkeys(biases, True))
    listed = PACKAGE.projections(model.config.to_dict(), 1)
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    for path, layer in linears.items():
        shapes = [(p.n, p.k) for p in listed if p.matches(path)]
        assert shapes == ([] if layer.bias is not None else [tuple(layer.weight.shape)]), path
    for projection in listed:
        used = sum(projection.matches(path) for path in linears)
        assert used == (projection.calls if projection.name not in ("qkv", "gate_up") else 0), projection.name


def test_a_bias_is_the_reason_that_is_reported(build, generate, calls):
    model = build(attention_bias=True)
    expected = generate(model)
    report = skinny_transformers.install(model)
    listed = PACKAGE.projections(model.config.to_dict(), 1)
    assert {row.path for row in report.layers if row.reason is Reason.BIAS} == {
        row.path for row in report.layers if not is_listed(row.path, listed)
    }
    assert generate(model) == expected
    assert {outcome for _, outcome in calls()} == {"fallback:bias", NOT_CUDA}


@pytest.mark.parametrize(("changes", "left_out"), [({}, set()), ({"mlp_bias": True}, {"gate", "up", "down"})])
def test_parity_of_a_whole_model(build, changes, left_out):
    report = parity.check_model(build(**changes), ms=(1, 4), new_tokens=8)
    assert report.passed, report.text()
    assert {row.name for row in report.rows} == ALL - left_out
    assert {row.path for row in report.rows} == {NOT_CUDA}
    assert report.tokens is not None
    assert report.tokens.equal


def test_a_model_that_borrows_from_llama_is_another_model(build):
    report = skinny_transformers.install(build("Mistral"))
    assert report.family != PACKAGE.name


def test_both_packages_serve_their_models_in_one_process(build, make, generate, calls):
    models = [build(), make()]
    expected = [generate(model) for model in models]
    assert [skinny_transformers.install(model).family for model in models] == ["llama31", "qwen3"]
    assert [generate(model) for model in models] == expected
    skinny_transformers.uninstall(models[0])
    calls()
    assert [generate(model) for model in models] == expected
    assert set(calls()) == {(5, NOT_CUDA), (1, NOT_CUDA)}, "the other one stays installed"
