"""Accelerate's hooks replace `forward` on the instance and move weights around it; in either order of attachment."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import skinny_transformers
from skinny_core.rules import Reason

accelerate = pytest.importorskip("accelerate")
NOT_CUDA = "fallback:not_cuda"
CPU = torch.device("cpu")
# An offloaded model says that it is on `meta`, and generate() warns that the ids are not.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate\\(\\):UserWarning")


def offload(model, tmp_path, kind):
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=CPU)
    accelerate.disk_offload(model, str(tmp_path), execution_device=CPU)
    return model


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("first", ["install", "offload"])
def test_offloaded_weights(make, generate, calls, linears, tmp_path, kind, first):
    tied = kind == "cpu"  # disk offload keeps one file per name, so a tied head would come back untied
    model, expected = make(tied), generate(make(tied))
    if first == "install":
        skinny_transformers.install(model)
    offload(model, tmp_path, kind)
    if first == "offload":
        skinny_transformers.install(model)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.weight.is_meta
    status = skinny_transformers.status(model)
    assert len(status.installed) == linears
    assert status["model.layers.0.mlp.down_proj"].reason is Reason.OFFLOADED
    assert generate(model) == expected
    # inside the hook the weight is there, and the call is an ordinary one
    assert calls() == {(5, NOT_CUDA): linears - 1, (1, NOT_CUDA): 5 * linears + 1}
    assert layer.weight.is_meta


@pytest.mark.parametrize("first", ["install", "offload"])
def test_hooks_removed_then_uninstalled(make, generate, calls, first):
    from accelerate.hooks import remove_hook_from_module

    model, expected = make(), generate(make())
    if first == "install":
        skinny_transformers.install(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    if first == "offload":
        skinny_transformers.install(model)
    remove_hook_from_module(model, recurse=True)
    calls()
    assert generate(model) == expected
    assert {outcome for _, outcome in calls()} == {NOT_CUDA}
    skinny_transformers.uninstall(model)
    assert generate(model) == expected
    assert calls() == {}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(type(m) is nn.Linear for m in layers)
    assert not any("skinny" in getattr(value, "__module__", "") for m in layers for value in m.__dict__.values())


def test_uninstalled_under_the_hooks(make, generate, calls):
    model, expected = make(), generate(make())
    skinny_transformers.install(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    skinny_transformers.uninstall(model)
    assert generate(model) == expected
    assert calls() == {}


def test_device_map_with_several_devices(make, generate, calls, linears, tmp_path):
    model, expected = make(tied=False), generate(make(tied=False))
    skinny_transformers.install(model)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert generate(model) == expected
    assert calls() == {(5, NOT_CUDA): linears - 1, (1, NOT_CUDA): 5 * linears + 1}
