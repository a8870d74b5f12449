"""Compiled, exported and traced models: M stays a symbol, few graphs, and changes of the model are noticed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import skinny_transformers
from skinny_core.dispatch import M_ABOVE

K = 64
MS = (512, 1, 2, 4, 5, 64, 1, 2)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    dynamo_counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return dynamo_counters["stats"]["unique_graphs"]


def whole(model):
    return torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")


def regional(model):
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    return model


def x_of(m):
    return torch.randn(m, K).bfloat16()


@pytest.mark.parametrize("compiler", [whole, regional])
def test_m_is_read_when_the_graph_runs(model, family, rows, compiler):
    stock = copy.deepcopy(model)
    skinny_transformers.install(model, family=family)
    run = compiler(model)
    with torch.no_grad():
        for m in MS:
            x = x_of(m)
            assert torch.equal(run(x), stock(x))
    assert rows() == {1: 14, 2: 14, 4: 7, 5: 7, M_ABOVE: 14}
    assert graphs() <= 2


def test_inductor_calls_the_op_too(model, family, rows):
    skinny_transformers.install(model, family=family)
    run = torch.compile(model.blocks[0].up, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (8, 1, 2):
            x = x_of(m)
            assert torch.equal(run(x), nn.functional.linear(x, model.blocks[0].up.weight))
    assert rows() == {8: 1, 1: 1, 2: 1}


def test_three_dimensional_decode(model, family, rows):
    skinny_transformers.install(model, family=family)
    run = whole(model.blocks[0])
    with torch.no_grad():
        for shape in ((2, 7), (2, 1), (4, 1)):
            x = torch.randn(*shape, K).bfloat16()
            assert torch.equal(run(x), model.blocks[0](x))
    assert rows() == {14: 4, 2: 4, 4: 4}  # compiled and eager, two layers each


def test_installing_and_uninstalling_after_compiling_is_noticed(model, family, rows):
    run = whole(model)
    with torch.no_grad():
        run(x_of(3))
        assert rows() == {}
        skinny_transformers.install(model, family=family)
        run(x_of(3))
        assert rows() == {3: 7}
        skinny_transformers.uninstall(model)
        run(x_of(3))
        assert rows() == {}


def test_changes_of_a_layer_after_compiling_are_noticed(model, family, rows, adapter):
    skinny_transformers.install(model, family=family)
    run = whole(model)
    x, block = x_of(3), model.blocks[0]
    layer = block.up

    def same_as_eager(calls):
        got = run(x)
        assert rows() == {3: calls}
        assert torch.equal(got, model(x))
        rows()

    with torch.no_grad():
        same_as_eager(7)
        block.up = adapter(layer)
        same_as_eager(6)
        block.up = layer
        same_as_eager(7)
        layer.bias = nn.Parameter(torch.randn(48).bfloat16())
        same_as_eager(6)
        layer.bias = None
        layer.weight = nn.Parameter(torch.randn(48, K).bfloat16())
        same_as_eager(7)


def test_gradients_through_a_compiled_model(model, family, rows):
    stock = copy.deepcopy(model).requires_grad_(True)
    skinny_transformers.install(model.requires_grad_(True), family=family)
    run, expected = whole(model), torch.compile(stock, fullgraph=True, dynamic=True, backend="aot_eager")
    x = x_of(3)
    run(x).float().sum().backward()
    expected(x).float().sum().backward()
    assert rows() == {}
    for got, want in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def test_autocast_around_a_compiled_model(family, rows):
    model = nn.Sequential(nn.Linear(K, K, bias=False)).requires_grad_(False)
    skinny_transformers.install(model, family=family)
    run, x = whole(model), torch.randn(2, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(x).dtype == torch.bfloat16
    assert rows() == {}
    assert run(x).dtype == torch.float32


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_does_not_need_skinny(model, family, strict):
    skinny_transformers.install(model, family=family)
    with torch.no_grad():
        program = torch.export.export(model, (x_of(3),), strict=strict)
    assert not any("skinny" in str(node.target) for node in program.graph.nodes)
    x = x_of(3)
    assert torch.equal(program.module()(x), model(x))


def test_recorders_see_the_original_call(model, family, outcomes):
    skinny_transformers.install(model, family=family)
    block, x = model.blocks[0], x_of(3)
    graph = make_fx(block)(x)
    assert sum("mm" in str(node.target) for node in graph.graph.nodes) == 2
    assert outcomes() == {"fallback:hooked": 2}
    with FlopCounterMode(display=False) as flops:
        block(x)
    assert flops.get_total_flops() == 2 * 2 * 3 * K * 48
    assert outcomes() == {"fallback:hooked": 2}
    batched = torch.vmap(block)(torch.stack([x, x]))
    assert outcomes() == {"fallback:hooked": 2}
    assert torch.equal(batched[0], block(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_jit_trace_records_the_original_call(model, family, outcomes):
    skinny_transformers.install(model, family=family)
    block, x = model.blocks[0], x_of(3)
    traced = torch.jit.trace(block, (x,), check_trace=False)
    assert outcomes() == {}
    x = x_of(5)
    assert torch.equal(traced(x), block(x))
