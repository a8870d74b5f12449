"""Dense projections of a Qwen3 decode step: those of `skinny_core.decoder`, at any TP size.

The experts and the router of an MoE layer are not dense projections of this kind and are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skinny_core import decoder
from skinny_core.errors import ModelConfigError
from skinny_core.family import Projection

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def projections(config: Mapping[str, Any], tp: int = 1) -> tuple[Projection, ...]:
    """Projections of one rank, fused names first, unfused ones last.

    config: keys of an HF `config.json` (Qwen3 or Qwen3-MoE). tp: tensor-parallel size.
    Raises `ModelConfigError` naming the key that is missing, not a positive whole number, or not divisible.
    """
    return decoder.projections(config, tp, dense_layers=_dense_layers(config))


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Layers with a dense MLP: all of Qwen3, those that Qwen3-MoE's `mlp_only_layers` and `decoder_sparse_step`
    leave."""
    layers = decoder.positive(config, "num_hidden_layers")
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"  # Transformers 5 writes the former
    if key not in config and config.get("model_type") != "qwen3_moe":
        return layers
    if config.get(key) != 0:
        decoder.positive(config, key)
        step = decoder.positive(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
        only = config.get("mlp_only_layers") or ()
        listed = isinstance(only, list | tuple)
        if not listed or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < layers for i in only):
            raise ModelConfigError(f"mlp_only_layers is {only!r}", f"list layer numbers from 0 to {layers - 1}")
        return sum(1 for i in range(layers) if i in only or (i + 1) % step)
    return layers
