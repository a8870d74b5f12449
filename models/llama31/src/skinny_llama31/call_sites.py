"""Dense projections of a Llama decode step: those of `skinny_core.decoder`, at any TP size, without the biased ones.

`attention_bias` puts a bias on Q, K, V and o, `mlp_bias` on gate, up and down, in both hosts; `bias` is an older
spelling of the first that vLLM reads. Every call of such a layer stays with the host (reason `bias`), so it is no
projection here: a listed shape is one that a cell could run for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skinny_core import decoder
from skinny_core.errors import ModelConfigError
from skinny_core.family import Projection

ARCHITECTURES = ("LlamaForCausalLM",)
"""Not the many models whose vLLM class derives from Llama's (Mistral, Phi-3, Llama 4, EAGLE drafts)."""
_BIASES = {
    "attention_bias": ("qkv", "o", "q", "k", "v"),
    "bias": ("qkv", "o", "q", "k", "v"),
    "mlp_bias": ("gate_up", "down", "gate", "up"),
}


def projections(config: Mapping[str, Any], tp: int = 1) -> tuple[Projection, ...]:
    """Projections of one rank, fused names first, unfused ones last; those with a bias left out.

    config: keys of an HF `config.json`; `head_dim` and `num_key_value_heads` may be absent or null, as in older ones.
    tp: tensor-parallel size. Raises `ModelConfigError` naming the key that is missing, not a positive whole number,
    not divisible, or not a yes or no.
    """
    biased = {name for key, names in _BIASES.items() if _yes(config, key) for name in names}
    return tuple(p for p in decoder.projections(_complete(config), tp) if p.name not in biased)


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what both hosts take for a key that is absent or null: `head_dim` hidden / heads, and one KV
    head per head."""
    full = dict(config)
    heads = decoder.positive(config, "num_attention_heads")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None:
        hidden = decoder.positive(config, "hidden_size")
        if hidden % heads:
            raise ModelConfigError(
                f"hidden_size {hidden} does not divide by num_attention_heads {heads}", "add head_dim, or check both"
            )
        full["head_dim"] = hidden // heads
    return full


def _yes(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelConfigError(f"{key} is {value!r}", f"{key} must be true or false")
    return bool(value)
