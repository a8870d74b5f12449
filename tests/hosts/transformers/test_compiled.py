"""The decode step of the real model under torch.compile: one graph serves every M, with the op inside."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters as dynamo_counters

import skinny_transformers
from skinny_core.dispatch import M_ABOVE

NOT_CUDA = "fallback:not_cuda"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    dynamo_counters.clear()
    yield
    torch._dynamo.reset()


def decode(model, run, steps=4):
    """Greedy tokens of a static-cache decode loop whose step is `run`."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = torch.tensor([[5, 17, 42]])
    with torch.no_grad():
        token = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        tokens = [int(token)]
        for i in range(steps):
            position = torch.tensor([[ids.shape[1] + i]])
            step = run(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True)
            token = step.logits[:, -1:].argmax(-1).clone()
            tokens.append(int(token))
    return tokens


def test_static_cache_decode_step_is_one_graph_that_calls_the_op(make, calls, linears):
    model = make()
    expected = decode(model, model.forward)
    skinny_transformers.install(model)
    calls()
    got = decode(model, torch.compile(model.forward, fullgraph=True, dynamic=False, backend="aot_eager"))
    assert got == expected
    assert calls() == {(3, NOT_CUDA): linears, (1, NOT_CUDA): 4 * linears}
    assert dynamo_counters["stats"]["unique_graphs"] == 1


def test_every_m_runs_in_at_most_two_graphs(make, calls):
    model, stock = make(layers=1), make(layers=1)
    skinny_transformers.install(model)
    run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for m in (64, 1, 2, 5, 1):
            ids = torch.arange(m)[:, None] + 3
            got = run(input_ids=ids, use_cache=False).logits
            assert torch.equal(got, stock(input_ids=ids, use_cache=False).logits), m
            (row,) = calls()
            assert row == (min(m, M_ABOVE), NOT_CUDA)
    assert dynamo_counters["stats"]["unique_graphs"] <= 2
