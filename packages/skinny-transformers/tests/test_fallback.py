"""Every refusal: the bytes, the errors and the gradients of the untouched layer, and the reason in the counters."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import skinny_transformers
from skinny_core import dispatch

K, N = 64, 48


@pytest.fixture
def pair(family):
    """(installed model with one layer, untouched twin). The layer is `.layer`, so that it has a place in a model."""

    def make(**kwargs):
        stock = nn.ModuleDict({"layer": nn.Linear(K, N, **({"bias": False, "dtype": torch.bfloat16} | kwargs))})
        stock.requires_grad_(False)
        ours = copy.deepcopy(stock)
        skinny_transformers.install(ours, family=family)
        return ours, stock

    return make


def act(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype)


def test_a_plain_call_reaches_dispatch(pair, outcomes):
    ours, stock = pair()
    x = act(3, K)
    assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert outcomes() == {"fallback:not_cuda": 1}


def test_bias_set_after_installing(pair, outcomes):
    ours, stock = pair()
    bias = nn.Parameter(torch.randn(N, dtype=torch.bfloat16), requires_grad=False)
    ours["layer"].bias = stock["layer"].bias = bias
    x = act(2, K)
    assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert not torch.equal(ours["layer"](x), nn.functional.linear(x, ours["layer"].weight))
    assert outcomes() == {"fallback:bias": 2}
    ours["layer"].bias = None
    ours["layer"](x)
    assert outcomes() == {"fallback:not_cuda": 1}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_packed_weight_gives_the_original_error(pair, outcomes, dtype):
    ours, stock = pair()
    for m in (ours, stock):
        m["layer"].weight = nn.Parameter(torch.ones(N, K, dtype=dtype), requires_grad=False)
    with pytest.raises(RuntimeError) as expected:
        stock["layer"](act(1, K))
    with pytest.raises(RuntimeError) as got:
        ours["layer"](act(1, K))
    assert str(got.value) == str(expected.value)
    assert outcomes() == {"fallback:quantised": 1}


class Scaled(torch.Tensor):
    """A weight whose elements are not its values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            args = [a.as_subclass(torch.Tensor) * 3 if isinstance(a, Scaled) else a for a in args]
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclassed_weight_keeps_its_behaviour(pair, outcomes):
    ours, stock = pair()
    for m in (ours, stock):
        m["layer"].weight = nn.Parameter(m["layer"].weight.detach().as_subclass(Scaled), requires_grad=False)
    x = act(2, K)
    assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert outcomes() == {"fallback:subclassed_weight": 1}


@pytest.mark.parametrize("needs", ["weight", "x", "both"])
def test_gradients_are_byte_equal(pair, outcomes, needs):
    ours, stock = pair()
    x = act(2, K)
    grads = []
    for m in (ours, stock):
        m["layer"].weight.requires_grad_(needs != "x")
        mine = x.clone().requires_grad_(needs != "weight")
        y = m["layer"](mine)
        assert y.grad_fn is not None
        y.float().pow(2).sum().backward()
        grads.append((mine.grad, m["layer"].weight.grad))
    for got, expected in zip(*grads, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
    assert outcomes() == {"fallback:gradient": 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trainable_weight_without_grad_mode_reaches_dispatch(pair, outcomes, mode):
    ours, stock = pair()
    ours["layer"].requires_grad_(True)
    x = act(2, K)
    with mode():
        assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert outcomes() == {"fallback:not_cuda": 1}


def test_autocast_converts_as_before(pair, outcomes):
    ours, stock = pair(dtype=torch.float32)
    x = act(2, K, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = ours["layer"](x), stock["layer"](x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    assert outcomes() == {"fallback:autocast": 1}


def test_meta_weight_and_meta_activation(pair, outcomes):
    ours, stock = pair()
    ours.to("meta")
    assert ours["layer"](torch.empty(2, K, dtype=torch.bfloat16, device="meta")).shape == (2, N)
    expected = stock.to("meta")["layer"](act(2, K))
    got = ours["layer"](act(2, K))
    assert (got.shape, got.device, got.dtype) == (expected.shape, expected.device, expected.dtype)
    assert outcomes() == {"fallback:offloaded": 2}


def test_adapter_attached_and_removed(pair, outcomes, adapter):
    ours, stock = pair()
    layer = ours["layer"]
    ours["layer"] = adapter(layer)
    twin = copy.deepcopy(ours["layer"])
    twin.base_layer = stock["layer"]
    x = act(2, K)
    assert torch.equal(ours["layer"](x), twin(x))
    assert outcomes() == {"fallback:lora": 1}
    ours["layer"] = layer
    assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert outcomes() == {"fallback:not_cuda": 1}


def test_layer_taken_over_by_any_other_wrapper(pair, outcomes):
    ours, stock = pair()
    ours["layer"] = nn.Sequential(ours["layer"], nn.ReLU())
    x = act(2, K)
    assert torch.equal(ours["layer"](x), stock["layer"](x).relu())
    assert outcomes() == {"fallback:hooked": 1}


def test_class_swapped_on_top_and_back(pair, outcomes):
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    ours, stock = pair()
    x = act(2, K)
    parametrize.register_parametrization(ours["layer"], "weight", Double())
    assert torch.equal(ours["layer"](x), nn.functional.linear(x, 2 * stock["layer"].weight))
    assert outcomes() == {"fallback:hooked": 1}
    parametrize.remove_parametrizations(ours["layer"], "weight", leave_parametrized=False)
    assert torch.equal(ours["layer"](x), stock["layer"](x))
    assert outcomes() == {"fallback:not_cuda": 1}


@pytest.mark.parametrize("shape", [(0, K), (1, 0, K), (0, 1, K), (K,), (1, K), (2, 3, K), (2, 1, 2, K)])
def test_leading_dimensions(pair, shape, rows):
    ours, stock = pair()
    x = act(*shape)
    got, expected = ours["layer"](x), stock["layer"](x)
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    assert rows() == {x.numel() // K: 1}


def test_activation_that_cannot_be_viewed_counts_all_its_rows(pair, rows):
    ours, stock = pair()
    x = act(2, 5, K)[:, :2, :]
    before = x.clone()
    got = ours["layer"](x)
    assert got.shape == (2, 2, N)
    assert got.is_contiguous()
    assert torch.equal(got, stock["layer"](x))
    assert torch.equal(x, before)
    assert rows() == {4: 1}


def test_unaligned_and_transposed_activations(pair):
    ours, stock = pair()
    unaligned = act(2 * K + 1)[1:].view(2, K)
    transposed = act(K, 3).T
    for x in (unaligned, transposed):
        assert torch.equal(ours["layer"](x), stock["layer"](x))


@pytest.mark.parametrize("x", [act(2, K + 1), act(2, K, dtype=torch.float32)], ids=["wrong-k", "wrong-dtype"])
def test_errors_are_those_of_the_layer(pair, x):
    ours, stock = pair()
    with pytest.raises(RuntimeError) as expected:
        stock["layer"](x)
    with pytest.raises(RuntimeError) as got:
        ours["layer"](x)
    assert str(got.value) == str(expected.value)


def test_keyword_argument_and_hooks(pair):
    ours, stock = pair()
    log = []
    for m in (ours, stock):
        m["layer"].register_forward_pre_hook(lambda module, args, kwargs: log.append("pre"), with_kwargs=True)
        m["layer"].register_forward_hook(lambda module, args, y: log.append("post") or y + 1)
    x = act(2, K)
    assert torch.equal(ours["layer"](input=x), stock["layer"](input=x))
    assert log == ["pre", "post"] * 2


def new_storage(layer, value):
    layer.weight.data = value


def new_parameter(layer, value):
    layer.weight = nn.Parameter(value, requires_grad=False)


def in_place(layer, value):
    layer.weight.copy_(value)


def in_place_data(layer, value):
    layer.weight.data.copy_(value)


@pytest.mark.parametrize("write", [in_place, in_place_data, new_storage, new_parameter])
def test_new_weights_are_seen_at_once(pair, write):
    ours, _ = pair()
    x, value = act(2, K), torch.randn(N, K).bfloat16()
    ours["layer"](x)
    write(ours["layer"], value)
    assert torch.equal(ours["layer"](x), nn.functional.linear(x, value))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    k=st.integers(1, 40),
    n=st.integers(1, 24),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    bias=st.booleans(),
    stride=st.integers(1, 3),
)
def test_any_call_gives_the_bytes_of_the_stock_layer(shape, k, n, dtype, bias, stride):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype)).requires_grad_(False)
    ours = copy.deepcopy(stock)
    skinny_transformers.install(ours, family="toy")
    x = torch.randn(*shape, k * stride, dtype=dtype)[..., ::stride]
    dispatch.reset_counters()
    assert torch.equal(ours(x), stock(x))
    assert sum(dispatch.counters().values()) == 1
