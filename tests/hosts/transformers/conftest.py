"""A real Qwen3ForCausalLM with random weights, small enough to generate in a fraction of a second."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from skinny_core import dispatch

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask a server

LAYERS = 2
LINEARS = 7 * LAYERS + 1


def pytest_collection_modifyitems(items):
    for item in items:
        if "hosts/transformers" in item.nodeid:
            item.add_marker(pytest.mark.host("transformers"))


@pytest.fixture
def make():
    """Factory of equal models; a tied head by default, as in Qwen3-4B."""
    transformers = pytest.importorskip("transformers")

    def build(tied=True, layers=LAYERS):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=320,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            use_cache=True,
        )
        return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()

    return build


@pytest.fixture
def generate():
    """Greedy tokens of a model for a fixed prompt of 5 ids."""
    prompt = torch.tensor([[5, 17, 42, 300, 7]])

    def run(model, new_tokens=6, **kwargs):
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **kwargs,
        )
        return out[0, prompt.shape[1] :].tolist()

    return run


@pytest.fixture
def calls():
    """Calls since the last look: {(M, outcome): count}."""
    dispatch.reset_counters()

    def look():
        seen = Counter()
        for (_, _, _, m, outcome), count in dispatch.counters().items():
            seen[m, outcome] += count
        dispatch.reset_counters()
        return dict(seen)

    yield look
    dispatch.reset_counters()


@pytest.fixture
def linears():
    """Number of linear layers of a model made by `make`."""
    return LINEARS
