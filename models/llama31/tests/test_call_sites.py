"""What a Llama config says about its projections: optional keys, biases, errors. `tests/models` compares
shapes/llama31.csv and asks what every package promises."""

from __future__ import annotations

import pytest

from skinny_core.errors import ModelConfigError
from skinny_llama31.call_sites import projections
from skinny_llama31.package import PACKAGE

ATTENTION, MLP = {"qkv", "o", "q", "k", "v"}, {"gate_up", "down", "gate", "up"}
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000,
}  # fmt: skip


def shapes(config, tp=1):
    return {p.name: (p.n, p.k) for p in projections(config, tp)}


@pytest.fixture
def config():
    return dict(PACKAGE.configs["llama-3.1-8b"])


@pytest.mark.parametrize(("name", "layers"), [("llama-3.1-8b", 32), ("llama-3.1-70b", 80)])
def test_calls_per_step(name, layers):
    found = projections(PACKAGE.configs[name])
    assert {p.calls for p in found if p.name != "lm_head"} == {layers}
    assert [p.calls for p in found if p.name == "lm_head"] == [1]


def test_unfused_shapes_of_8b_on_two_ranks(config):
    found = shapes(config, 2)
    assert [found[name] for name in "qkv"] == [(2048, 4096), (512, 4096), (512, 4096)]
    assert found["gate"] == found["up"] == (7168, 4096)


@pytest.mark.parametrize("change", [{"head_dim": None}, {"head_dim": 128}])
def test_head_dim_may_be_absent_or_null(config, change):
    assert shapes(config | change, 4) == shapes(config, 4)


def test_head_dim_counts_where_it_is_stated(config):
    assert shapes(config | {"head_dim": 64})["o"] == (4096, 32 * 64)


@pytest.mark.parametrize("change", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 32}])
def test_without_kv_heads_every_head_has_its_own(change):
    assert shapes(LLAMA_1 | change)["qkv"] == (3 * 4096, 4096)


def test_a_tied_head_is_a_projection_too():
    assert shapes(SMOLLM2)["lm_head"] == shapes(SMOLLM2 | {"tie_word_embeddings": False})["lm_head"] == (49152, 576)
    assert shapes(SMOLLM2)["qkv"] == (960, 576)


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        (("attention_bias",), ATTENTION),
        (("bias",), ATTENTION),
        (("mlp_bias",), MLP),
        (("attention_bias", "mlp_bias"), ATTENTION | MLP),
    ],
)
def test_a_projection_with_a_bias_is_left_out(config, keys, left_out):
    assert set(shapes(config)) - set(shapes(config | dict.fromkeys(keys, True))) == left_out


@pytest.mark.parametrize("value", [None, False])
def test_no_bias_is_said_in_several_ways(config, value):
    keys = dict.fromkeys(("attention_bias", "mlp_bias", "bias"), value)
    assert projections(config | keys) == projections(config)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"hidden_size": 4100}, "hidden_size 4100 does not divide by num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ],
)
def test_an_unusable_value_is_named(config, change, key):
    with pytest.raises(ModelConfigError, match=key):
        projections(config | change)
