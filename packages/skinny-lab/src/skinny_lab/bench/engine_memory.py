"""How much GPU memory an engine process of a model takes, and which models are loaded at the same time.

Nothing here is measured: weights and KV cache follow from the config, the rest is an allowance. Bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skinny_core.decoder import VOCAB_PADDING
from skinny_core.family import ModelPackage

PROCESS_BYTES = 1_500_000_000
"""Of one process beside weights, KV cache and activations: CUDA context (about 0.55 GB on an H200), modules, library
workspaces, captured graphs. An allowance; the children report what they hold."""
ELEMENT = 2
"""Bytes of a BF16 weight, activation or KV element."""
READ_BYTES_PER_S = 3.8e12
PREFILL_FLOPS = 4.0e14
STEP_S = 1.0e-3
"""For the estimate of a run's time only: a low streaming and prefill rate of an H200, and what a step takes beside
reading weights (norms, attention, gaps, the scheduler)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to hold. concurrency: the levels that are measured. prompt, output, slack: tokens of a request
    (slack: a page begun and what the scheduler allocates ahead). batched: most tokens of one engine step."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    prompt: int = 1024
    output: int = 144
    slack: int = 64
    batched: int = 2048

    @property
    def length(self) -> int:
        """Largest number of tokens of a request."""
        return self.prompt + self.output + self.slack

    @property
    def sequences(self) -> int:
        """Requests at the same time."""
        return max(self.concurrency)


@dataclass(frozen=True, slots=True)
class Need:
    """One engine process. weights, kv, activations: bytes; total adds the allowance of a process."""

    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.activations + PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class Group:
    """Models whose engines are loaded together. total: bytes of all of them. in_turn: one model whose arms do not fit
    beside each other, so that each is started when its turn comes; total is then that of one."""

    models: tuple[str, ...]
    total: int
    in_turn: bool = False


def need(package: ModelPackage, config: Mapping[str, Any], load: Load) -> Need:
    """What one process of a model takes on one GPU. config: keys of its `config.json`."""
    return Need(
        weight_bytes(package, config), load.sequences * load.length * kv_bytes(config), activation_bytes(config, load)
    )


def weight_bytes(package: ModelPackage, config: Mapping[str, Any]) -> int:
    """BF16 weights: dense projections and head as the package declares them, the embedding where it is not tied, and
    the experts and router of an MoE layer. Norms are left out (under 0.01 %)."""
    whole = [p for p in package.projections(config, 1) if not p.part_of]
    found = sum(p.n * p.k * p.calls for p in whole)
    if not config.get("tie_word_embeddings"):
        found += _padded_vocabulary(config) * int(config["hidden_size"])
    experts = _experts(config)
    if experts:
        dense = next((p.calls for p in whole if p.name == "gate_up"), 0)
        each = 3 * int(config["hidden_size"]) * int(config["moe_intermediate_size"]) + int(config["hidden_size"])
        found += (int(config["num_hidden_layers"]) - dense) * experts * each
    return ELEMENT * found


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Keys and values of one token in all layers."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return 2 * ELEMENT * int(config["num_hidden_layers"]) * kv_heads * head_dim


def activation_bytes(config: Mapping[str, Any], load: Load) -> int:
    """The widest moment of a step of `load.batched` tokens (gate, up, their product, some residual streams; for an MoE
    its routed copies), and FP32 logits in a few copies of the sampler."""
    hidden = int(config["hidden_size"])
    wide = 3 * int(config["intermediate_size"])
    if _experts(config):
        chosen = int(config["num_experts_per_tok"])
        wide = max(wide, chosen * (3 * int(config["moe_intermediate_size"]) + hidden))
    return ELEMENT * load.batched * (wide + 4 * hidden) + 16 * load.sequences * _padded_vocabulary(config)


def run_seconds(weights: int, load: Load) -> float:
    """About how long one process decodes at all levels, in seconds. An MoE reads fewer bytes: an upper bound there."""
    steps = load.output * len(load.concurrency) * (weights / READ_BYTES_PER_S + STEP_S)
    return steps + sum(load.concurrency) * load.prompt * weights / PREFILL_FLOPS


def groups(needs: Mapping[str, int], arms: Mapping[str, int], limit: int, most: int = 8) -> list[Group]:
    """First fit, in the order given, so that what was named first is measured first.

    needs: bytes of one process by model. arms: processes of that model. limit: bytes of the device that may be planned
    for. most: processes of a group (each compiles on a core of its own and holds several GB of host memory).
    Raises ValueError for a model of which not even one process fits.
    """
    found: list[list[str]] = []
    alone: dict[int, Group] = {}
    for model, one in needs.items():
        if one > limit:
            raise ValueError(f"{model} needs {one / 1e9:.1f} GB, {limit / 1e9:.1f} GB may be used")
        if one * arms[model] > limit:
            alone[len(found)] = Group((model,), one, in_turn=True)
            found.append([model])
            continue
        for i, members in enumerate(found):
            together = [*members, model]
            fits = sum(needs[m] * arms[m] for m in together) <= limit
            if i not in alone and fits and sum(arms[m] for m in together) <= most:
                members.append(model)
                break
        else:
            found.append([model])
    return [
        alone.get(i) or Group(tuple(members), sum(needs[m] * arms[m] for m in members))
        for i, members in enumerate(found)
    ]


def _experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _padded_vocabulary(config: Mapping[str, Any]) -> int:
    return -(-int(config["vocab_size"]) // VOCAB_PADDING) * VOCAB_PADDING
