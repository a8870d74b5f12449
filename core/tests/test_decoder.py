"""Shapes of a dense decoder from its config and the TP size; what cannot be split or read is named."""

from __future__ import annotations

import pytest

from skinny_core.decoder import projections
from skinny_core.errors import ModelConfigError

CONFIG = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip


def by_name(config, tp=1):
    return {p.name: p for p in projections(config, tp)}


@pytest.fixture
def config():
    return dict(CONFIG)


def test_shapes_and_calls_on_two_ranks(config):
    found = {p.name: (p.n, p.k, p.calls, p.part_of) for p in projections(config, 2)}
    assert found == {
        "qkv": (3072, 4096, 36, ""),
        "o": (4096, 2048, 36, ""),
        "gate_up": (12288, 4096, 36, ""),
        "down": (4096, 6144, 36, ""),
        "lm_head": (75968, 4096, 1, ""),
        "q": (2048, 4096, 36, "qkv"),
        "k": (512, 4096, 36, "qkv"),
        "v": (512, 4096, 36, "qkv"),
        "gate": (6144, 4096, 36, "gate_up"),
        "up": (6144, 4096, 36, "gate_up"),
    }
    assert list(found)[:5] == ["qkv", "o", "gate_up", "down", "lm_head"], "fused ones come first"


def test_a_family_says_how_many_layers_have_a_dense_mlp(config):
    some = {p.name: p.calls for p in projections(config, dense_layers=5)}
    assert (some["qkv"], some["gate_up"], some["down"], some["up"]) == (36, 5, 5, 5)
    del config["intermediate_size"]
    assert {p.name for p in projections(config, dense_layers=0)} == {"qkv", "o", "lm_head", "q", "k", "v"}


def test_kv_heads_are_replicated_beyond_their_number(config):
    config["num_key_value_heads"] = 4
    assert by_name(config, 8)["k"].n == 128
    assert by_name(config, 16)["qkv"].n == (2 + 2) * 128


def test_vocabulary_is_padded_to_64_before_it_is_split(config):
    config["vocab_size"] = 151669
    assert by_name(config)["lm_head"].n == 151680
    assert by_name(config, 8)["lm_head"].n == 18960


@pytest.mark.parametrize("key", sorted(CONFIG))
def test_missing_key_is_named(config, key):
    del config[key]
    with pytest.raises(ModelConfigError, match=key):
        projections(config)


@pytest.mark.parametrize("value", [0, -4096, 4096.0, "4096", None, True, [4096]])
@pytest.mark.parametrize("key", sorted(CONFIG))
def test_value_that_is_no_positive_whole_number_is_named(config, key, value):
    config[key] = value
    with pytest.raises(ModelConfigError, match=key) as error:
        projections(config)
    assert "fix:" in str(error.value)


@pytest.mark.parametrize(
    ("change", "tp", "key"),
    [
        ({"num_attention_heads": 30, "num_key_value_heads": 5}, 4, "num_attention_heads"),
        ({"intermediate_size": 12290}, 4, "intermediate_size"),
        ({"num_attention_heads": 36, "num_key_value_heads": 6}, 4, "num_key_value_heads"),
        ({"num_key_value_heads": 5}, 1, "num_key_value_heads"),
        ({"num_attention_heads": 48, "intermediate_size": 12288 * 3}, 3, "num_key_value_heads"),
        ({"num_attention_heads": 48, "num_key_value_heads": 3, "intermediate_size": 12288 * 3}, 3, "vocab_size"),
    ],
)
def test_what_does_not_divide_is_named(config, change, tp, key):
    with pytest.raises(ModelConfigError, match=key):
        projections(config | change, tp)


@pytest.mark.parametrize("tp", [0, -1, 2.0, "2", True, None])
def test_tp_is_a_positive_whole_number(config, tp):
    with pytest.raises(ModelConfigError, match="tp"):
        projections(config, tp)
