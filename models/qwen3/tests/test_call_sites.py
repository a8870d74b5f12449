"""What a Qwen3 config says about its projections, the MoE above all. `tests/models` compares shapes/qwen3.csv and asks
what every package promises; `core/tests/test_decoder.py` has what every dense decoder shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core.errors import ModelConfigError
from skinny_qwen3.call_sites import projections
from skinny_qwen3.package import PACKAGE

LAYERS = {"qwen3-4b": 36, "qwen3-8b": 36, "qwen3-14b": 40, "qwen3-32b": 64, "qwen3-30b-a3b": 48}
ROLES = ("qkv", "o", "gate_up", "down", "lm_head")
PARTS = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def by_name(config, tp=1):
    return {p.name: p for p in projections(config, tp)}


@pytest.fixture
def config():
    return dict(PACKAGE.configs["qwen3-8b"])


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_calls_per_step(name):
    for p in projections(PACKAGE.configs[name], 1):
        assert p.calls == (1 if p.name == "lm_head" else LAYERS[name])


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


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_needed(config, key):
    del config[key]
    with pytest.raises(ModelConfigError, match=key):
        projections(config)


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
