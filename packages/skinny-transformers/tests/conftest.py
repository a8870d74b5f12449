"""Plain torch models small enough to compare byte by byte, and a view of the dispatch counters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from skinny_core import dispatch

FAMILY = "toy"
N, K = 48, 64


class Mlp(nn.Module):
    """Two projections with a residual, as in a decoder layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """An embedding tied to its head around a few blocks; any model made of nn.Linear will do."""

    def __init__(self, blocks=3, vocabulary=40):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, K)
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))
        self.head = nn.Linear(K, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapter(nn.Module):
    """What an adapter library puts in a layer's place: the layer inside, under `base_layer`, plus a low-rank term."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.fixture(autouse=True)
def _fresh_counters():
    torch.manual_seed(0)
    dispatch.reset_counters()
    yield
    dispatch.reset_counters()


@pytest.fixture
def outcomes():
    """Calls since the last look: {outcome: count}, the outcome being "kernel:<stem>" or "fallback:<reason>"."""

    def look():
        seen = Counter()
        for key, count in dispatch.counters().items():
            seen[key[-1]] += count
        dispatch.reset_counters()
        return dict(seen)

    return look


@pytest.fixture
def rows():
    """Rows of the calls since the last look: {M: count}."""

    def look():
        seen = Counter()
        for key, count in dispatch.counters().items():
            seen[key[3]] += count
        dispatch.reset_counters()
        return dict(seen)

    return look


@pytest.fixture
def model():
    return Decoder().bfloat16().eval().requires_grad_(False)


@pytest.fixture
def adapter():
    return Adapter


@pytest.fixture
def family():
    return FAMILY
