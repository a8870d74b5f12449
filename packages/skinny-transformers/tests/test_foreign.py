"""Weights, activations, modes and layers that skinny has no business with: stock behaviour, stock errors, no device."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import skinny_transformers
from skinny_core import device, dispatch, warmup
from skinny_core.rules import Reason
from skinny_transformers import layers, seam

K, N = 64, 48
ALIEN = torch.device("lazy")  # any device type that has neither kernels here nor autocast


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def layer(family):
    model = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    skinny_transformers.install(model, family=family)
    return model


@pytest.fixture
def offered(monkeypatch):
    """Calls that reached the dispatcher or the op."""
    seen = []
    stock = nn.functional.linear

    def take(x, weight, family=""):
        seen.append(x)
        return stock(x, weight)

    monkeypatch.setattr(seam.dispatch, "linear", take)
    monkeypatch.setattr(seam.op, "linear", take)
    return seen


def compiled(model):
    return torch.compile(model, backend="eager")


def eager(model):
    return model


def refused(*args, **kwargs):
    raise AssertionError("asked for a CUDA device")


def test_a_model_on_the_cpu_asks_for_no_device(model, family, monkeypatch):
    monkeypatch.setattr(device, "current_key", refused)
    monkeypatch.setattr(torch.cuda, "current_device", refused)
    assert len(skinny_transformers.install(model, family=family).installed) == 7
    assert len(skinny_transformers.install(model, family=family).installed) == 7


@pytest.mark.parametrize("broken", ["activate", "warm"])
def test_an_unexpected_error_leaves_the_model_as_it_was(model, family, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise OSError("driver gone")

    monkeypatch.setattr({"activate": dispatch, "warm": warmup}[broken], broken, fail)
    monkeypatch.setattr(layers.Found, "cuda_index", lambda self: 0)
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    with pytest.raises(OSError, match="driver gone"):
        skinny_transformers.install(model, family=family)
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before


SPARSE = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("run", [eager, compiled])
@pytest.mark.parametrize("convert", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("side", ["x", "weight"])
def test_sparse_tensors_keep_the_original_call(family, offered, outcomes, run, convert, side):
    stock = nn.Sequential(nn.Linear(K, N, bias=False)).requires_grad_(False)
    model, x = copy.deepcopy(stock), torch.randn(3, K)
    skinny_transformers.install(model, family=family)
    if side == "x":
        x = convert(x)
    else:
        for m in (stock, model):
            m[0].weight = nn.Parameter(convert(m[0].weight.detach()), requires_grad=False)
    got, expected = run(model)(x), stock(x)
    assert torch.equal(got.to_dense(), expected.to_dense())
    assert not offered
    if run is eager:  # Dynamo may run such a call eagerly, too
        assert outcomes() == {"fallback:layout": 1}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("run", [eager, compiled])
def test_nested_activations_keep_the_original_call(layer, offered, layout, run):
    x = torch.nested.nested_tensor([torch.randn(m, K).bfloat16() for m in (2, 3)], layout=layout)
    for got, part in zip(run(layer)(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, nn.functional.linear(part, layer[0].weight))
    assert not offered


class Device:
    """A tensor as an unknown device shows itself."""

    is_cuda = is_cpu = is_meta = is_nested = requires_grad = False
    layout, device = torch.strided, ALIEN


@pytest.mark.parametrize("alien", ["x", "weight"])
def test_other_devices_are_not_asked_about_autocast(layer, monkeypatch, alien):
    with pytest.raises(RuntimeError, match="unknown device type"):
        torch.is_autocast_enabled(ALIEN.type)
    monkeypatch.setattr(seam, "_PLAIN", (*seam._PLAIN, Device))
    assert seam.placement(Device()) is Reason.NOT_CUDA
    if alien == "x":
        assert seam.passing(layer[0], Device()) is Reason.NOT_CUDA
    else:
        monkeypatch.setattr(Device, "dtype", torch.bfloat16, raising=False)
        layer[0]._parameters["weight"] = Device()
        assert seam.standing(layer[0], layer[0].__dict__[seam.SITE]) is Reason.NOT_CUDA


class Recorder(TorchFunctionMode):
    """Sees every torch function."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("run", [eager, compiled])
def test_a_function_mode_sees_the_original_call_and_nothing_else(layer, offered, outcomes, run):
    x, call = torch.randn(2, K).bfloat16(), run(layer)
    call(x)
    assert len(offered) == 1
    recorder = Recorder()
    with recorder:
        call(x)
    assert nn.functional.linear in recorder.seen
    if run is eager:
        assert recorder.seen == [nn.functional.linear]
        assert outcomes() == {"fallback:hooked": 1}
    call(x)
    assert len(offered) == 2


@pytest.mark.parametrize("run", [eager, compiled])
def test_a_default_device_is_no_such_mode(layer, offered, run):
    x = torch.randn(2, K).bfloat16()
    with torch.device("cpu"):
        run(layer)(x)
        with Recorder(), torch.device("cpu"):
            layer(x)
    assert len(offered) == 1


class Double(nn.Module):
    """A parametrisation."""

    def forward(self, w):
        return 2 * w


def test_a_parametrised_layer_pickles_as_badly_as_stock(layer):
    stock = nn.Sequential(nn.Linear(K, N, bias=False))
    errors = []
    for m in (stock, layer):
        parametrize.register_parametrization(m[0], "weight", Double())
        with pytest.raises(RuntimeError) as error:
            pickle.dumps(m)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


class Swapped(seam.Linear):
    """A class on top of ours, as sharding libraries make them."""

    def __getstate__(self):
        return {**self.__dict__, "saved": True}


def test_a_class_on_top_of_ours_pickles_itself_without_the_place(layer):
    layer[0].__class__ = Swapped
    loaded = pickle.loads(pickle.dumps(layer))
    assert type(loaded[0]) is Swapped
    assert loaded[0].saved
    x = torch.randn(2, K).bfloat16()
    assert torch.equal(loaded(x), layer(x))


class OddLinear(nn.Module):
    """Has the name and the sizes, which are no numbers, and a weight that cannot be had."""

    in_features, out_features = "many", None

    @property
    def weight(self):
        raise ValueError("not yet")


class OddSizesLinear(OddLinear):
    """As above, with sizes of other kinds."""

    in_features, out_features = (K, K), 3.5


def test_layers_without_usable_facts_are_reported(family):
    model = nn.Sequential(nn.Linear(K, N, bias=False), OddSizesLinear(), nn.Linear(K, N, bias=False), OddLinear())
    del model[0].weight
    model[2].weight = None
    for look in (skinny_transformers.status, skinny_transformers.uninstall):
        assert [row.reason for row in look(model).layers] == [Reason.HOOKED, Reason.QUANTISED, Reason.HOOKED]
    report = skinny_transformers.install(model, family=family)
    assert [(row.n, row.k, row.installed) for row in report.layers] == [(N, K, False), (0, 0, False), (N, K, False)]
    assert all(row.reason for row in report.layers)
    assert type(model[0]) is nn.Linear


def test_a_weight_deleted_after_installing_is_reported_and_fails_as_stock(layer, family):
    del layer[0].weight
    for look in (skinny_transformers.status, lambda m: skinny_transformers.install(m, family=family)):
        assert look(layer)["0"].reason is Reason.HOOKED
    with pytest.raises(AttributeError, match="weight"):
        layer(torch.randn(2, K).bfloat16())


def test_a_layer_whose_sizes_were_deleted_still_computes(layer):
    x = torch.randn(2, K).bfloat16()
    layer[0].bias = nn.Parameter(torch.randn(N).bfloat16(), requires_grad=False)
    expected = layer(x)
    del layer[0].in_features
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("run", [eager, compiled])
@pytest.mark.parametrize(("name", "shape"), [("weight", (N, K)), ("bias", (N,))])
def test_a_plain_attribute_hides_the_parameter(layer, offered, run, name, shape):
    x, call = torch.randn(2, K).bfloat16(), run(layer)
    call(x)
    assert len(offered) == 1
    hidden = torch.randn(*shape).bfloat16()
    layer[0].__dict__[name] = hidden
    weight, bias = (hidden, None) if name == "weight" else (layer[0]._parameters["weight"], hidden)
    assert torch.equal(call(x), nn.functional.linear(x, weight, bias))
    assert len(offered) == 1
    assert skinny_transformers.status(layer)["0"].reason is Reason.HOOKED


@pytest.mark.parametrize("x", [None, [1.0] * K, np.ones((2, K), np.float32)], ids=["none", "list", "array"])
def test_what_is_no_tensor_is_the_same_type_error(layer, x):
    with pytest.raises(TypeError) as expected:
        nn.Linear(K, N, bias=False)(x)
    with pytest.raises(TypeError) as got:
        layer(x)
    assert str(got.value) == str(expected.value)


def test_a_symbolic_trace_records_the_product_and_nothing_else(layer):
    graph = torch.fx.symbolic_trace(layer).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
