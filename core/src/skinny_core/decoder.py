"""Dense projections of a decoder whose layers are attention and a gated MLP: local weight shapes `[N, K]` as a function
of an HF config and the TP size. For model packages; a package states what its family does otherwise.

    qkv      ((heads + 2 * kv_heads) * head_dim / tp, hidden)      fused in vLLM, three layers in Transformers
    o        (hidden, heads * head_dim / tp)
    gate_up  (2 * intermediate / tp, hidden)                       fused in vLLM, two layers in Transformers
    down     (hidden, intermediate / tp)
    lm_head  (vocab padded to 64, / tp; hidden)

The fused and the unfused names are projections of their own: no model has both, and a cell measured for one shape
says nothing about the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skinny_core.errors import ModelConfigError
from skinny_core.family import Projection

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to this multiple before it splits it."""


def projections(config: Mapping[str, Any], tp: int = 1, *, dense_layers: int | None = None) -> tuple[Projection, ...]:
    """Projections of one rank, fused names first, unfused ones last.

    config: keys of an HF `config.json`. tp: tensor-parallel size; with more ranks than KV heads each head is held by
    several ranks. dense_layers: layers that have a dense MLP, all of them by default.
    Raises `ModelConfigError` naming the key that is missing, not a positive whole number, or not divisible.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ModelConfigError(f"tp is {tp!r}", "give a tensor-parallel size of at least 1")
    hidden, layers = positive(config, "hidden_size"), positive(config, "num_hidden_layers")
    head_dim, vocab = positive(config, "head_dim"), positive(config, "vocab_size")
    q = _split(config, "num_attention_heads", tp) * head_dim
    kv = _kv_heads(config, tp) * head_dim
    padded = -(-vocab // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        raise ModelConfigError(f"vocab_size {vocab} (padded to {padded}) does not divide by tp {tp}", "use another tp")

    found = [
        Projection("qkv", ("*.self_attn.qkv_proj",), q + 2 * kv, hidden, layers),
        Projection("o", ("*.self_attn.o_proj",), hidden, q, layers),
    ]
    parts = [
        Projection("q", ("*.self_attn.q_proj",), q, hidden, layers, part_of="qkv"),
        Projection("k", ("*.self_attn.k_proj",), kv, hidden, layers, part_of="qkv"),
        Projection("v", ("*.self_attn.v_proj",), kv, hidden, layers, part_of="qkv"),
    ]
    dense = layers if dense_layers is None else dense_layers
    if dense:
        inter = _split(config, "intermediate_size", tp)
        found += [
            Projection("gate_up", ("*.mlp.gate_up_proj",), 2 * inter, hidden, dense),
            Projection("down", ("*.mlp.down_proj",), hidden, inter, dense),
        ]
        parts += [
            Projection("gate", ("*.mlp.gate_proj",), inter, hidden, dense, part_of="gate_up"),
            Projection("up", ("*.mlp.up_proj",), inter, hidden, dense, part_of="gate_up"),
        ]
    found.append(Projection("lm_head", ("lm_head", "*.lm_head"), padded // tp, hidden, 1))
    return (*found, *parts)


def positive(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number of a config. Raises `ModelConfigError` naming the key."""
    if key not in config:
        raise ModelConfigError(f"the config has no {key}", f"add {key}, or check that this config.json is the model's")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key} is {value!r}", f"{key} must be a positive whole number")
    return value


def _split(config: Mapping[str, Any], key: str, tp: int) -> int:
    value = positive(config, key)
    if value % tp:
        raise ModelConfigError(f"{key} {value} does not divide by tp {tp}", f"use a tp that divides {value}")
    return value // tp


def _kv_heads(config: Mapping[str, Any], tp: int) -> int:
    """Local KV heads; with more ranks than KV heads each head is held by several ranks."""
    kv, heads = positive(config, "num_key_value_heads"), positive(config, "num_attention_heads")
    if heads % kv:
        raise ModelConfigError(
            f"num_attention_heads {heads} does not divide by num_key_value_heads {kv}", "check both keys of the config"
        )
    if max(kv, tp) % min(kv, tp):
        raise ModelConfigError(
            f"num_key_value_heads {kv} and tp {tp}: neither divides the other", "use a tp that divides it or a multiple"
        )
    return max(1, kv // tp)
