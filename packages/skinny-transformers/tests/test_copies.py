"""Deep copies, shallow copies, pickles, replicas, and memory after `del model`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import skinny_transformers

K = 64


@pytest.fixture
def installed(model, family):
    skinny_transformers.install(model, family=family)
    return model


@pytest.fixture
def x():
    return torch.randn(2, K).bfloat16()


def test_deep_copy_is_installed_and_independent(installed, x, outcomes, adapter):
    twin = copy.deepcopy(installed)
    assert torch.equal(twin(x), installed(x))
    assert outcomes() == {"fallback:not_cuda": 14}
    assert twin.head.weight is twin.embed.weight
    assert twin.head.weight is not installed.head.weight
    twin.blocks[0].up = adapter(twin.blocks[0].up).requires_grad_(False)
    twin(x)
    installed(x)
    assert outcomes() == {"fallback:lora": 1, "fallback:not_cuda": 13}
    skinny_transformers.uninstall(installed)
    twin(x)
    assert outcomes() == {"fallback:lora": 1, "fallback:not_cuda": 6}
    skinny_transformers.uninstall(twin)
    twin(x)
    assert outcomes() == {}


def test_layer_copied_out_of_its_model_is_stock_until_installed(installed, x, outcomes, family):
    layer = copy.deepcopy(installed.blocks[0].up)
    assert torch.equal(layer(x), installed.blocks[0].up(x))
    assert outcomes() == {"fallback:not_cuda": 1}
    assert not skinny_transformers.status(layer).installed
    assert skinny_transformers.install(layer, family=family).installed
    layer(x)
    assert outcomes() == {"fallback:not_cuda": 1}


def test_shallow_copy_uses_its_own_weight(installed, x):
    layer = copy.copy(installed.blocks[0].up)
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))


def test_data_parallel_replica_uses_its_own_weight(installed, x):
    # What DataParallel does with every module; the replica's parameters are set one by one afterwards.
    replica = installed.blocks[0].up._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.randn(48, K).bfloat16(), None
    assert torch.equal(replica(x), nn.functional.linear(x, replica.weight))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_is_a_stock_model(installed, x, outcomes, protocol):
    expected = installed(x)
    outcomes()
    state = torch.random.get_rng_state()
    loaded = pickle.loads(pickle.dumps(installed, protocol))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(loaded.head) is nn.Linear
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(x), expected)
    assert outcomes() == {}
    assert type(installed.head) is not nn.Linear


def test_pickle_loads_where_skinny_is_absent(installed, x, tmp_path):
    torch.save(nn.Sequential(installed.blocks[0].up), tmp_path / "m.pt")
    skinny_transformers.install(installed)
    code = (
        "import sys; sys.modules['skinny_transformers'] = sys.modules['skinny_core'] = None; import torch;"
        f"m = torch.load({str(tmp_path / 'm.pt')!r}, weights_only=False);"
        "print(type(m[0]).__module__, m(torch.ones(1, 64).bfloat16()).shape)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["torch.nn.modules.linear", "torch.Size([1,", "48])"]


def test_state_dict_round_trip(installed, model):
    buffer = io.BytesIO()
    torch.save(installed.state_dict(), buffer)
    buffer.seek(0)
    skinny_transformers.uninstall(model)
    model.load_state_dict(torch.load(buffer, weights_only=True), strict=True)


def test_no_reference_cycle_keeps_the_weights_alive(family):
    model = nn.Sequential(nn.Linear(K, K, bias=False))
    skinny_transformers.install(model, family=family)
    layer = weakref.ref(model[0])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()
