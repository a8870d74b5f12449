"""A captured decode step made of torch calls: the in-model check for cells that win alone.

A few layers with random weights of a model's real shapes (fused QKV and gate/up), attention over a filled KV cache,
norms, SiLU and LM head. An `Arm` says what is swapped; everything else stays. Weights add up to far more than the L2.

The calls between the projections are torch's own, one kernel each unless `compiled`: more kernels and gaps than in a
host that fuses them, so what an arm saves by removing one, or by prefetching beside them, is an upper bound for such a
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional

from skinny_core import prefetch
from skinny_core.family import Projection
from skinny_lab.bench.experts import Experts
from skinny_lab.bench.graph_step import GraphStep, Linear

Added = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, w, residual) -> residual + x @ w.T."""
CONTEXT = 1024
LAYERS = 4
PROJECTIONS = ("qkv", "o", "gate_up", "down", "lm_head")
"""In the order of a step; the first four in every layer. A layer of experts has neither gate_up nor down."""
RESIDUALS = ("o", "down")


class Side(Protocol):
    """What an arm that prefetches needs; `skinny_core.prefetch.SideStream`."""

    def start(self, weight: torch.Tensor, bytes: int | None = None) -> int:
        """Load the first bytes beside what comes next on the current stream."""

    def join(self) -> bool:
        """The current stream waits for it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What a step does otherwise than stock. Raises ValueError for a name that a step does not have.

    linears: by projection, instead of `F.linear`. gated: instead of gate_up and SiLU-and-multiply, returns [M, I].
    added: by projection, "o" or "down", instead of the product and the residual add. prefetch: bytes of a projection's
    weight to load on a side stream: started behind the projection before it, joined in front of its own; the first
    projection of a step has none before it, so its is not loaded. head: False stops in front of the LM head.
    """

    linears: Mapping[str, Linear] = field(default_factory=dict)
    gated: Linear | None = None
    added: Mapping[str, Added] = field(default_factory=dict)
    prefetch: Mapping[str, int] = field(default_factory=dict)
    head: bool = True

    def __post_init__(self) -> None:
        for names, known in ((self.linears, PROJECTIONS), (self.added, RESIDUALS), (self.prefetch, PROJECTIONS)):
            if unknown := set(names) - set(known):
                raise ValueError(f"{', '.join(sorted(unknown))}: a step has {', '.join(known)}")


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


class DecodeStep(GraphStep):
    """Random weights and one decode step for M sequences, of a model with a dense MLP or with experts.

    config: of one rank. depth: layers, each with weights of its own. device: of the weights; CPU for tests of what is
    called. compiled: norms, adds and SiLU through `torch.compile`, as a host fuses them. side: where arms prefetch;
    default a `SideStream` of the current device, made when needed.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        projections: tuple[Projection, ...],
        m: int,
        *,
        depth: int = LAYERS,
        device: str = "cuda",
        compiled: bool = False,
        side: Side | None = None,
    ) -> None:
        self.size = Dimensions.of(config)
        self.m = m
        self._side = side
        self._norm, self._add_norm, self._silu_mul = (
            torch.compile(f, dynamic=False) if compiled else f for f in (_norm, _add_norm, _silu_mul)
        )
        whole = {p.name: p for p in projections if not p.part_of}
        generator = torch.Generator(device).manual_seed(1)

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(
                0, shape[-1] ** -0.5, generator=generator
            )

        names = [name for name in PROJECTIONS[:-1] if name in whole]
        self.layers = [{name: make(whole[name].n, whole[name].k) for name in names} for _ in range(depth)]
        self.experts = [] if "gate_up" in whole else [Experts.of(config, make) for _ in range(depth)]
        self.lm_head = make(whole["lm_head"].n, whole["lm_head"].k)
        s = self.size
        self.keys = make(depth, m, s.kv_heads, CONTEXT, s.head_dim)
        self.values = make(depth, m, s.kv_heads, CONTEXT, s.head_dim)
        self.norm = torch.ones(s.hidden, dtype=torch.bfloat16, device=device)
        self.x = make(m, s.hidden)

    def _take_rows(self, m: int) -> None:
        self.keys, self.values, self.x = self.keys[:, :m], self.values[:, :m], self.x[:m]

    def run(self, arm: Arm | Mapping[str, Linear], *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Logits [M, vocabulary], or the hidden state [M, hidden] of an arm without a head; a mapping is an arm's
        `linears`. dtype: of every tensor; another one than BF16 copies each weight.
        """
        arm = _arm(arm)
        s, h, norm = self.size, self.x.to(dtype), self.norm.to(dtype)
        call = _Walk(self, arm, dtype)

        def plus(name: str, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The residual stream behind a projection, and its norm."""
            if name in arm.added:
                h = call(name, arm.added[name], x, h)
                return h, self._norm(h, norm)
            y = call(name, arm.linears.get(name, functional.linear), x)
            return self._add_norm(h, y, norm)

        a = self._norm(h, norm)
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            qkv = call("qkv", arm.linears.get("qkv", functional.linear), a)
            q = qkv[:, : s.heads * s.head_dim].view(self.m, s.heads, 1, s.head_dim)
            o = functional.scaled_dot_product_attention(q, keys.to(dtype), values.to(dtype), enable_gqa=True)
            h, a = plus("o", o.reshape(self.m, -1), h)
            if self.experts:
                h, a = self._add_norm(h, self.experts[i](a, self._silu_mul), norm)
                continue
            if arm.gated is not None:
                a = call("gate_up", arm.gated, a)
            else:
                a = self._silu_mul(call("gate_up", arm.linears.get("gate_up", functional.linear), a))
            h, a = plus("down", a, h)
        return call("lm_head", arm.linears.get("lm_head", functional.linear), a) if arm.head else h

    def exact(self) -> torch.Tensor:
        """Logits of the same step computed in FP32: what the roundings of a BF16 step are measured against."""
        return self.run(Arm(), dtype=torch.float32)

    @property
    def side(self) -> Side:
        """Where arms prefetch."""
        if self._side is None:
            self._side = prefetch.SideStream(self.x.device)
        return self._side

    def scale(self, name: str) -> float:
        """Calls in the model per call in this step."""
        return 1.0 if name == "lm_head" else self.size.layers / len(self.layers)


class _Walk:
    """The projections of one step in their order, with the prefetches around them."""

    def __init__(self, step: DecodeStep, arm: Arm, dtype: torch.dtype) -> None:
        self._step, self._arm, self._dtype = step, arm, dtype
        weights = [(name, layer[name]) for layer in step.layers for name in layer]
        self._weights = [*weights, ("lm_head", step.lm_head)] if arm.head else weights
        self._at = 0
        self._started = False

    def __call__(self, name: str, function: Callable[..., torch.Tensor], x: torch.Tensor, *more: Any) -> torch.Tensor:
        """`function(x, weight, *more)` with the weight whose turn it is."""
        expected, weight = self._weights[self._at]
        assert name == expected, f"{name} is called where {expected} comes"
        if self._started:
            self._step.side.join()
            self._started = False
        y = function(x, weight.to(self._dtype), *more)
        self._at += 1
        if self._at < len(self._weights):
            following, weight = self._weights[self._at]
            if size := self._arm.prefetch.get(following, 0):
                self._step.side.start(weight, size)
                self._started = True
        return y


def _arm(arm: Arm | Mapping[str, Linear]) -> Arm:
    return arm if isinstance(arm, Arm) else Arm(linears=arm)


def _norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(h, weight.shape, weight)


def _add_norm(h: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = h + y
    return h, functional.rms_norm(h, weight.shape, weight)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate) * up
