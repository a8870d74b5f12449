"""Installing, installing again, taking back; what stays as it was; what the report says."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import skinny_transformers
from skinny_core import env
from skinny_core.rules import Reason
from skinny_transformers.install import UnknownPackageError

K = 64


def signature(model):
    return [(path, type(m), sorted(m.__dict__)) for path, m in model.named_modules()]


def test_install_and_uninstall_leave_no_trace(model, family, outcomes):
    x = torch.randn(2, K).bfloat16()
    before, expected = signature(model), model(x)
    skinny_transformers.install(model, family=family)
    assert torch.equal(model(x), expected)
    assert outcomes() == {"fallback:not_cuda": 7}
    report = skinny_transformers.uninstall(model)
    assert not report.installed
    assert torch.equal(model(x), expected)
    assert outcomes() == {}
    assert signature(model) == before


def test_installing_twice_is_installing_once(model, family, outcomes):
    first = skinny_transformers.install(model, family=family)
    second = skinny_transformers.install(model, family=family)
    assert first.layers == second.layers
    model(torch.randn(1, K).bfloat16())
    assert outcomes() == {"fallback:not_cuda": 7}
    skinny_transformers.uninstall(model)
    assert all(type(m) is not skinny_transformers.seam.Linear for m in model.modules())
    skinny_transformers.uninstall(model)


def test_weights_names_and_text_stay(model, family):
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    keys, text = list(model.state_dict()), repr(model)
    skinny_transformers.install(model, family=family)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert model.head.weight is model.embed.weight
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert all(isinstance(m, nn.Linear) for m in (model.head, model.blocks[0].up))


def test_report_has_a_row_for_every_linear_layer(model, family):
    report = skinny_transformers.install(model, family=family)
    assert [layer.path for layer in report.layers] == [
        "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down", "head",
    ]  # fmt: skip
    assert all(layer.installed and layer.reason is None for layer in report.layers)
    assert (report["head"].n, report["head"].k) == (40, K)
    assert "7 of 7" in str(report)
    assert report.family == family
    with pytest.raises(KeyError):
        report["nowhere"]


def test_what_stands_against_a_layer_is_reported_now(model, family, adapter):
    skinny_transformers.install(model, family=family)
    model.blocks[0].up.bias = nn.Parameter(torch.zeros(48).bfloat16())
    model.blocks[0].down.float()
    model.blocks[1].up = adapter(model.blocks[1].up)
    model.blocks[1].down.to("meta")
    report = skinny_transformers.status(model)
    reasons = {layer.path: layer.reason for layer in report.layers}
    assert reasons == {
        "blocks.0.up": Reason.BIAS,
        "blocks.0.down": Reason.DTYPE,
        "blocks.1.up.base_layer": Reason.LORA,
        "blocks.1.up.lora_A": Reason.LORA,
        "blocks.1.up.lora_B": Reason.LORA,
        "blocks.1.down": Reason.OFFLOADED,
        "blocks.2.up": None,
        "blocks.2.down": None,
        "head": None,
    }
    assert report["blocks.1.up.base_layer"].installed
    assert not report["blocks.1.up.lora_A"].installed
    assert "lora" in report.text()


class Shifted(nn.Linear):
    """A subclass may compute anything."""

    def forward(self, x):
        return super().forward(x) + 1


class PackedLinear(nn.Module):
    """A quantised layer as hosts have them: the name, the two sizes, packed bytes."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = K, K
        self.register_buffer("weight", torch.zeros(K, K // 2, dtype=torch.uint8))

    def forward(self, x):
        return x * 2


def test_other_classes_are_left_alone(family, outcomes):
    model = nn.Sequential(Shifted(K, K), PackedLinear(), nn.Linear(K, K)).bfloat16().requires_grad_(False)
    model[2].forward = lambda x: x
    x = torch.randn(2, K).bfloat16()
    before, expected = signature(model), model(x)
    report = skinny_transformers.install(model, family=family)
    assert [layer.reason for layer in report.layers] == [Reason.HOOKED, Reason.QUANTISED, Reason.HOOKED]
    assert not report.installed
    assert signature(model) == before
    assert torch.equal(model(x), expected)
    assert outcomes() == {}


def test_a_layer_that_is_the_whole_model(family, outcomes):
    layer = nn.Linear(K, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    report = skinny_transformers.install(layer, family=family)
    assert [r.path for r in report.installed] == [""]
    layer(torch.randn(1, K).bfloat16())
    assert outcomes() == {"fallback:not_cuda": 1}
    skinny_transformers.uninstall(layer)
    assert type(layer) is nn.Linear


def test_adapter_that_was_there_before(model, family, adapter, outcomes):
    layer = model.blocks[0].up
    model.blocks[0].up = adapter(layer).requires_grad_(False)
    report = skinny_transformers.install(model, family=family)
    assert report["blocks.0.up.base_layer"].reason is Reason.LORA
    x = torch.randn(1, K).bfloat16()
    model(x)
    assert outcomes() == {"fallback:lora": 1, "fallback:not_cuda": 6}
    model.blocks[0].up = layer
    model(x)
    assert outcomes() == {"fallback:not_cuda": 7}


def test_layer_used_in_two_places_is_one_layer(family):
    layer = nn.Linear(K, K, bias=False)
    report = skinny_transformers.install(nn.Sequential(layer, layer), family=family)
    assert [r.path for r in report.layers] == ["0"]


def test_two_models_are_independent(model, family, outcomes):
    other = copy.deepcopy(model)
    skinny_transformers.install(model, family=family)
    skinny_transformers.install(other, family="another")
    skinny_transformers.uninstall(model)
    other(torch.randn(1, K).bfloat16())
    assert outcomes() == {"fallback:not_cuda": 7}
    assert skinny_transformers.status(other).family == "another"


@pytest.mark.parametrize(("value", "note"), [("off", "SKINNY=off"), ("fast=please", "fast=please")])
def test_switched_off_by_the_environment(model, family, monkeypatch, outcomes, value, note):
    monkeypatch.setenv("SKINNY", value)
    env.settings.cache_clear()
    try:
        before = signature(model)
        report = skinny_transformers.install(model, family=family)
    finally:
        monkeypatch.undo()
        env.settings.cache_clear()
    assert {layer.reason for layer in report.layers} == {Reason.DISABLED}
    assert note in report.notes[0]
    assert signature(model) == before
    model(torch.randn(1, K).bfloat16())
    assert outcomes() == {}


def test_unknown_package_is_an_error_and_nothing_is_installed(model):
    before = signature(model)
    with pytest.raises(UnknownPackageError, match="no model package 'gpt9'"):
        skinny_transformers.install(model, package="gpt9")
    assert signature(model) == before


def test_import_needs_no_host_and_touches_no_device():
    code = (
        "import skinny_transformers, sys, torch;"
        "unwanted = {'transformers', 'peft', 'accelerate', 'triton', 'cutlass'} & set(sys.modules);"
        "print(sorted(unwanted), torch.cuda.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "False"]
