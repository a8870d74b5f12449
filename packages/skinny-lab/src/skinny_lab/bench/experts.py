"""The routed experts of one layer in a decode step, as far as time goes.

Which experts tokens choose is not known without trained weights: M tokens are taken to touch as many different ones as
independent, equally likely choices would, and all of those to have the same number of rows. Their weights are read in
one batched product each for gate/up and down; a host's fused kernel reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skinny_core.errors import ModelConfigError


@dataclass(frozen=True, slots=True)
class Experts:
    """gate_up [E, 2 I, H] and down [E, H, I] of E experts, of which each token takes `top`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    top: int

    @classmethod
    def of(cls, config: Mapping[str, Any], make: Callable[..., torch.Tensor]) -> Experts:
        """From an HF-style config of one rank. make: a tensor of a shape, filled. Raises `ModelConfigError`."""
        count = _positive(config, "num_experts", "num_local_experts")
        width = _positive(config, "moe_intermediate_size")
        hidden = _positive(config, "hidden_size")
        return cls(make(count, 2 * width, hidden), make(count, hidden, width), _positive(config, "num_experts_per_tok"))

    def __call__(self, a: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What the experts add for a [M, H], as far as shapes go. act: SiLU-and-multiply of [rows, 2 I]."""
        m, hidden = a.shape
        count = touched(len(self.gate_up), self.top, m)
        rows = -(-m * self.top // count)
        x = a[:rows].expand(count, rows, hidden)
        both = torch.bmm(x, self.gate_up[:count].to(a.dtype).transpose(1, 2))
        inner = act(both.view(count * rows, -1)).view(count, rows, -1)
        y = torch.bmm(inner, self.down[:count].to(a.dtype).transpose(1, 2))
        return y.sum(0).mean(0).expand(m, hidden)


def touched(experts: int, top: int, m: int) -> int:
    """Different experts that M tokens are expected to choose, each `top` of them."""
    return max(top, round(experts * (1 - (1 - top / experts) ** m)))


def _positive(config: Mapping[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if name in config), None)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelConfigError(f"{names[0]} is {value!r}", f"{names[0]} must be a positive whole number")
    return value
