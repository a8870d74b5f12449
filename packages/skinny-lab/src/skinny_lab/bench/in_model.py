"""The in-model check: what a cell changes in a captured decode step of the model that it is for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from skinny_core.errors import ModelConfigError
from skinny_core.family import Projection
from skinny_core.problem import MAX_M
from skinny_lab.bench import contestants, decode_step, tuning
from skinny_lab.bench.graph_step import GraphStep, Linear, enough_layers

NEEDED = ("qkv", "o", "lm_head")
"""Projections without which no `DecodeStep` can be made; gate_up and down come both or not at all."""
ROUNDS = 15
AGAIN = 2
STOCK = ""
"""Name of the arm without a cell of ours."""


def model_step(
    config: Mapping[str, Any], projections: Sequence[Projection], tp: int, l2_bytes: int, *, device: str = "cuda"
) -> GraphStep | None:
    """The decode step of one rank, for at most `MAX_M` sequences, of as many layers as it takes to read more than the
    L2 holds; no all-reduce. None where the model has other parts than a decoder with a dense MLP or with experts."""
    whole = {p.name: p for p in projections if not p.part_of}
    if not set(NEEDED) <= set(whole) or ("gate_up" in whole) != ("down" in whole):
        return None
    layer = sum(2 * p.n * p.k for p in whole.values() if p.name != "lm_head")
    depth = enough_layers(layer, l2_bytes, int(config["num_hidden_layers"]))
    try:
        return decode_step.DecodeStep(rank_config(config, tp), tuple(projections), MAX_M, depth=depth, device=device)
    except (KeyError, ModelConfigError):  # neither a dense MLP nor experts that are known
        return None


def rank_config(config: Mapping[str, Any], tp: int) -> Mapping[str, Any]:
    """The config with the attention heads, and the width of each expert, of one of `tp` ranks."""
    size = decode_step.Dimensions.of(config)
    if tp == 1:
        return config
    experts = "moe_intermediate_size"
    return {
        **config, "head_dim": size.head_dim, "num_attention_heads": size.heads // tp,
        "num_key_value_heads": max(1, size.kv_heads // tp),
        **({experts: config[experts] // tp} if experts in config else {}),
    }  # fmt: skip


def changes(step: GraphStep, m: int, swaps: Mapping[str, tuple[Sequence[str], tuning.Measured]]) -> dict[str, float]:
    """Change of a step at M = m, in microseconds of the whole model, per swap.

    swaps: name -> (what of the step runs the measured config instead, all of one shape; the measurement). What seems
    slower is captured and measured twice more, and the median counts: of 1426 changes of 24 models, 18 were an
    increase, most of them beside neighbours in M of the same weight that were as much faster as alone (H200,
    2026-12-01).
    """
    rows = step.at(m)

    def once(names: Iterable[str]) -> dict[str, float]:
        arms: dict[str, dict[str, Linear]] = {STOCK: {}}
        for name in names:
            swapped, measured = swaps[name]
            arms[name] = dict.fromkeys(swapped, as_linear(measured))
        times = rows.compare(arms, rounds=ROUNDS)
        return {name: (times[name] - times[STOCK]) * step.scale(swaps[name][0][0]) for name in names}

    found = once(swaps)
    if slower := [name for name, us in found.items() if us > 0]:
        again = [once(slower) for _ in range(AGAIN)]
        found |= {name: statistics.median([found[name], *(times[name] for times in again)]) for name in slower}
    return found


def as_linear(measured: tuning.Measured) -> Linear:
    """`call(x, w)` of the measured config."""
    run = contestants.ours(measured.config, measured.problem, measured.m)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0], w.shape[0])
        run(x, w, y)
        return y

    return linear
