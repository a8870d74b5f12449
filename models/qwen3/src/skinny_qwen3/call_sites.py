"""Dense projections of a Qwen3 decode step: local weight shapes `[N, K]` as a function of an HF config and the TP size.

    qkv      ((heads + 2 * kv_heads) * head_dim / tp, hidden)      fused in vLLM, three layers in Transformers
    o        (hidden, heads * head_dim / tp)
    gate_up  (2 * intermediate / tp, hidden)                       fused in vLLM, two layers in Transformers
    down     (hidden, intermediate / tp)
    lm_head  (vocab padded to 64, / tp; hidden)

The fused and the unfused names are projections of their own: no model has both, and a cell measured for one shape
says nothing about the other. The experts and the router of an MoE layer are not dense projections of this kind and
are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skinny_core.errors import ModelConfigError
from skinny_core.family import Projection

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
VOCAB_PADDING = 64  # vLLM pads the vocabulary to this multiple before it splits it


def projections(config: Mapping[str, Any], tp: int = 1) -> tuple[Projection, ...]:
    """Projections of one rank, fused names first, unfused ones last.

    config: keys of an HF `config.json` (Qwen3 or Qwen3-MoE). tp: tensor-parallel size.
    Raises `ModelConfigError` naming the key that is missing, not a positive whole number, or not divisible.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ModelConfigError(f"tp is {tp!r}", "give a tensor-parallel size of at least 1")
    hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
    head_dim, vocab = _positive(config, "head_dim"), _positive(config, "vocab_size")
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
    dense = _dense_layers(config, layers)
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


def _positive(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise ModelConfigError(f"the config has no {key}", f"add {key}, or check that this is a Qwen3 config.json")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key} is {value!r}", f"{key} must be a positive whole number")
    return value


def _split(config: Mapping[str, Any], key: str, tp: int) -> int:
    value = _positive(config, key)
    if value % tp:
        raise ModelConfigError(f"{key} {value} does not divide by tp {tp}", f"use a tp that divides {value}")
    return value // tp


def _kv_heads(config: Mapping[str, Any], tp: int) -> int:
    """Local KV heads; with more ranks than KV heads each head is held by several ranks."""
    kv, heads = _positive(config, "num_key_value_heads"), _positive(config, "num_attention_heads")
    if heads % kv:
        raise ModelConfigError(
            f"num_attention_heads {heads} does not divide by num_key_value_heads {kv}", "check both keys of the config"
        )
    if max(kv, tp) % min(kv, tp):
        raise ModelConfigError(
            f"num_key_value_heads {kv} and tp {tp}: neither divides the other", "use a tp that divides it or a multiple"
        )
    return max(1, kv // tp)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with a dense MLP: all of Qwen3, those that Qwen3-MoE's `mlp_only_layers` and `decoder_sparse_step`
    leave."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"  # Transformers 5 writes the former
    if key not in config and config.get("model_type") != "qwen3_moe":
        return layers
    if config.get(key) != 0:
        _positive(config, key)
        step = _positive(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
        only = config.get("mlp_only_layers") or ()
        listed = isinstance(only, list | tuple)
        if not listed or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < layers for i in only):
            raise ModelConfigError(f"mlp_only_layers is {only!r}", f"list layer numbers from 0 to {layers - 1}")
        return sum(1 for i in range(layers) if i in only or (i + 1) % step)
    return layers
