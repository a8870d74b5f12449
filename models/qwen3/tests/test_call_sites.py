"""Shapes of every projection at every TP size, against a table written down independently of the code."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core.errors import ModelConfigError
from skinny_qwen3.call_sites import ARCHITECTURES, projections
from skinny_qwen3.package import PACKAGE

TABLE = list(csv.DictReader((Path(__file__).parent / "shapes" / "qwen3.csv").read_text().splitlines()))
LAYERS = {"qwen3-4b": 36, "qwen3-8b": 36, "qwen3-14b": 40, "qwen3-32b": 64, "qwen3-30b-a3b": 48}
ROLES = ("qkv", "o", "gate_up", "down", "lm_head")
PARTS = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def by_name(config, tp=1):
    return {p.name: p for p in projections(config, tp)}


@pytest.fixture
def config():
    return dict(PACKAGE.configs["qwen3-8b"])


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r['config']}-tp{r['tp']}")
def test_fused_shapes(row):
    found = by_name(PACKAGE.configs[row["config"]], int(row["tp"]))
    for role in ROLES:
        if row[role]:
            assert f"{found[role].n}x{found[role].k}" == row[role], role
        else:
            assert role not in found


def test_table_covers_every_named_config_and_tp():
    assert {(r["config"], int(r["tp"])) for r in TABLE} == {(c, tp) for c in PACKAGE.configs for tp in (1, 2, 4, 8)}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_calls_per_step(name):
    for p in projections(PACKAGE.configs[name], 1):
        assert p.calls == (1 if p.name == "lm_head" else LAYERS[name])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_unfused_parts_add_up_to_the_fused_projection(name, tp):
    found = by_name(PACKAGE.configs[name], tp)
    q, k, v = (found[part] for part in "qkv")
    assert q.n + k.n + v.n == found["qkv"].n
    assert (k.n, k.k) == (v.n, v.k)
    if "gate_up" in found:
        assert found["gate"].n + found["up"].n == found["gate_up"].n
        assert found["gate"].k == found["up"].k == found["gate_up"].k
    else:
        assert "gate" not in found
        assert "up" not in found


def test_unfused_shapes_of_8b():
    found = by_name(PACKAGE.configs["qwen3-8b"])
    shapes = {name: (found[name].n, found[name].k) for name in PARTS}
    assert shapes == {
        "q": (4096, 4096),
        "k": (1024, 4096),
        "v": (1024, 4096),
        "gate": (12288, 4096),
        "up": (12288, 4096),
    }


def test_fused_projections_come_first_and_parts_say_what_they_are_part_of(config):
    found = projections(config)
    assert [p.name for p in found] == [*ROLES, *PARTS]
    assert {p.name: p.part_of for p in found} == dict.fromkeys(ROLES, "") | PARTS


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("model.layers.35.self_attn.q_proj", "q"),
        ("model.layers.3.self_attn.o_proj", "o"),
        ("model.layers.3.mlp.gate_up_proj", "gate_up"),
        ("model.layers.3.mlp.gate_proj", "gate"),
        ("model.layers.3.mlp.down_proj", "down"),
        ("lm_head", "lm_head"),
        ("language_model.lm_head", "lm_head"),
        ("model.layers.3.mlp.experts.7.down_proj", None),
        ("model.layers.3.mlp.gate", None),
        ("model.embed_tokens", None),
    ],
)
def test_patterns_claim_exactly_their_modules(config, path, name):
    assert [p.name for p in projections(config) if p.matches(path)] == ([name] if name else [])


def test_kv_heads_are_replicated_beyond_their_number(config):
    config["num_key_value_heads"] = 4
    assert by_name(config, 8)["k"].n == 128
    assert by_name(config, 16)["qkv"].n == (2 + 2) * 128


def test_vocabulary_is_padded_to_64_before_it_is_split(config):
    config["vocab_size"] = 151669
    assert by_name(config)["lm_head"].n == 151680
    assert by_name(config, 8)["lm_head"].n == 18960


def test_head_dim_is_not_derived_from_hidden_size(config):
    config["head_dim"] = 64
    assert by_name(config)["o"].k == 32 * 64


def test_dense_layers_of_a_mixed_moe():
    moe = dict(PACKAGE.configs["qwen3-30b-a3b"], mlp_only_layers=[0, 1], decoder_sparse_step=2)
    found = by_name(moe)
    # even layer numbers are dense by the step (24 of them), layer 1 by the list as well
    assert found["down"].calls == found["gate_up"].calls == 25
    assert (found["down"].n, found["down"].k) == (2048, 6144)


def test_transformers_5_name_of_the_expert_count():
    moe = dict(PACKAGE.configs["qwen3-30b-a3b"])
    moe["num_local_experts"] = moe.pop("num_experts")
    assert "down" not in by_name(moe)


KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


@pytest.mark.parametrize("key", KEYS)
def test_missing_key_is_named(config, key):
    del config[key]
    with pytest.raises(ModelConfigError, match=key):
        projections(config)


@pytest.mark.parametrize("value", [0, -4096, 4096.0, "4096", None, True, [4096]])
@pytest.mark.parametrize("key", KEYS)
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


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_experts": -1}, "num_experts"),
        ({"num_experts": None}, "num_experts"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_moe_keys_are_checked(change, key):
    with pytest.raises(ModelConfigError, match=key):
        projections(PACKAGE.configs["qwen3-30b-a3b"] | change)


def test_moe_without_its_expert_count_is_refused():
    moe = dict(PACKAGE.configs["qwen3-30b-a3b"])
    del moe["num_experts"]
    with pytest.raises(ModelConfigError, match="num_experts"):
        projections(moe)


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "num_experts", "mlp_only_layers", "decoder_sparse_step"]),
        st.one_of(
            st.integers(-3, 10**6), st.none(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
        ),
    ),
    st.integers(-1, 9),
)
def test_any_config_gives_positive_shapes_or_a_named_error(change, tp):
    config = dict(PACKAGE.configs["qwen3-8b"]) | change
    try:
        found = projections(config, tp)
    except ModelConfigError:
        return
    assert all(p.n > 0 and p.k > 0 and p.calls > 0 for p in found)


def test_architectures_of_the_named_configs_are_declared():
    assert {a for c in PACKAGE.configs.values() for a in c["architectures"]} == set(ARCHITECTURES)
