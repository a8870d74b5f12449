"""A decode step of which only the projections are known: those of a capture, or shapes from a file.

Each follows a norm that writes its activation, in the order in which they are given, layer after layer, so that a
cell meets what it meets in a model: other weights have just gone through the L2, and a small kernel ends in front of
it. Attention and the rest of a model are left out: they take the same time in every arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from skinny_lab.bench.graph_step import GraphStep, Linear, enough_layers

ALONE = 1000
"""Repetitions at most of links that are all called once: their weights have to leave the L2 between two uses, too."""


@dataclass(frozen=True, slots=True)
class Link:
    """One weight [N, K] of the model. calls: of it in one step of the model, all layers together."""

    name: str
    n: int
    k: int
    dtype: torch.dtype
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Of the weight."""
        return self.n * self.k * self.dtype.itemsize


class ChainStep(GraphStep):
    """Random weights of some layers and, where a link is called once in a model of several layers, a tail.

    The number of layers is what the links' calls have in common: the fewest calls that are more than one.
    """

    def __init__(self, links: Sequence[Link], m: int, l2_bytes: int, *, device: str = "cuda") -> None:
        self.m = m
        model_layers = min((link.calls for link in links if link.calls > 1), default=1)
        per_layer = {link.name: max(1, round(link.calls / model_layers)) for link in links}
        layer = [link for link in links if link.calls > 1 or model_layers == 1]
        layer_bytes = sum(link.bytes * per_layer[link.name] for link in layer)
        depth = enough_layers(layer_bytes, l2_bytes, model_layers if model_layers > 1 else ALONE)
        order = [link for _ in range(depth) for link in layer for _ in range(per_layer[link.name])]
        order += [link for link in links if link not in layer]
        generator = torch.Generator(device).manual_seed(1)

        def make(link: Link) -> torch.Tensor:
            weight = torch.empty(link.n, link.k, dtype=link.dtype, device=device)
            return weight.normal_(0, link.k**-0.5, generator=generator)

        self.calls = [(link, make(link)) for link in order]
        self._scale = {link.name: link.calls / order.count(link) for link in links}
        widths = {(link.k, link.dtype) for link in links}
        self._states = {
            (k, dtype): torch.randn(m, k, dtype=torch.float32, device=device, generator=generator).to(dtype)
            for k, dtype in sorted(widths, key=str)
        }
        self._norms = {(k, dtype): torch.ones(k, dtype=dtype, device=device) for k, dtype in widths}

    def _take_rows(self, m: int) -> None:
        self._states = {key: state[:m] for key, state in self._states.items()}

    def run(self, arm: Mapping[str, Linear]) -> torch.Tensor:
        """The last link's output [M, N]. arm: by name of a link, instead of `F.linear`."""
        y = torch.empty(0)
        for link, weight in self.calls:
            norm = self._norms[link.k, link.dtype]
            x = functional.rms_norm(self._states[link.k, link.dtype], norm.shape, norm)
            y = arm.get(link.name, functional.linear)(x, weight)
        return y

    def scale(self, name: str) -> float:
        """Calls in the model per call in this step."""
        return self._scale[name]
