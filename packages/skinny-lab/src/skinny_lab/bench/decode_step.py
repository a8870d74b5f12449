"""A captured decode step made of torch calls: the in-model check for cells that win alone.

A few layers with random weights of a model's real shapes (fused QKV and gate/up), attention over a filled KV cache,
norms, SiLU and LM head. The projections under test are swapped; everything else stays. Weights add up to far more than
the L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from skinny_core.family import Projection

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CONTEXT = 1024
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the step needs of a model config besides its projections."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """From an HF-style config."""
        heads = int(config["num_attention_heads"])
        return cls(
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            layers=int(config["num_hidden_layers"]),
        )


class DecodeStep:
    """Random weights and one decode step for M sequences. `run(linears)` uses `linears[name]` where given, else
    `F.linear`.
    """

    def __init__(self, config: Mapping[str, Any], projections: tuple[Projection, ...], m: int) -> None:
        self.size = Dimensions.of(config)
        self.m = m
        whole = {p.name: p for p in projections if not p.part_of}
        generator = torch.Generator("cuda").manual_seed(1)

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(
                0, shape[-1] ** -0.5, generator=generator
            )

        self.layers = [{name: make(p.n, p.k) for name, p in whole.items() if name != "lm_head"} for _ in range(LAYERS)]
        self.lm_head = make(whole["lm_head"].n, whole["lm_head"].k)
        s = self.size
        self.keys = make(LAYERS, m, s.kv_heads, CONTEXT, s.head_dim)
        self.values = make(LAYERS, m, s.kv_heads, CONTEXT, s.head_dim)
        self.norm = torch.ones(s.hidden, dtype=torch.bfloat16, device="cuda")
        self.x = make(m, s.hidden)

    def run(self, linears: Mapping[str, Linear]) -> torch.Tensor:
        """Logits [M, vocabulary]."""
        s, h = self.size, self.x
        use = {name: linears.get(name, functional.linear) for name in (*self.layers[0], "lm_head")}
        for i, w in enumerate(self.layers):
            a = functional.rms_norm(h, (s.hidden,), self.norm)
            qkv = use["qkv"](a, w["qkv"])
            q = qkv[:, : s.heads * s.head_dim].view(self.m, s.heads, 1, s.head_dim)
            o = functional.scaled_dot_product_attention(q, self.keys[i], self.values[i], enable_gqa=True)
            h = h + use["o"](o.reshape(self.m, -1), w["o"])
            a = functional.rms_norm(h, (s.hidden,), self.norm)
            gate_up = use["gate_up"](a, w["gate_up"])
            half = gate_up.shape[1] // 2
            h = h + use["down"](functional.silu(gate_up[:, :half]) * gate_up[:, half:], w["down"])
        return use["lm_head"](functional.rms_norm(h, (s.hidden,), self.norm), self.lm_head)

    def compare(self, arms: Mapping[str, Mapping[str, Linear]], *, rounds: int) -> dict[str, float]:
        """Median microseconds of one step (LAYERS layers and the head) per arm; order rotated, all arms in every
        round.
        """
        graphs = {name: self._capture(linears) for name, linears in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        names = list(arms)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graphs[name].replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    def scale(self, projection: str) -> float:
        """Calls in the model per call in this step."""
        return 1.0 if projection == "lm_head" else self.size.layers / LAYERS

    def _capture(self, linears: Mapping[str, Linear]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(side):
            self.run(linears)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                self.run(linears)
        graph.replay()
        torch.cuda.synchronize()
        return graph
