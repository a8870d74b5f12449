"""The parity check passes what is right, and fails on each fault that it is there to find."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from skinny_core import dispatch
from skinny_core.family import ModelPackage, Projection
from skinny_core.testing import parity
from skinny_core.testing.numerics import TOLERANCE
from skinny_core.testing.parity_report import Report, Tokens

N, K = 96, 256
PACKAGE = ModelPackage(
    "invented", "1.0", ("InventedForCausalLM",), {"small": {}},
    lambda config, tp: (Projection("o", ("*.o_proj",), N // tp, K, 1), Projection("lm_head", ("lm_head",), N, K, 1)),
    lambda: (), parity="skinny_invented.parity",
)  # fmt: skip


class Host:
    """Installs by noting the family on the model; `log` says what was asked for."""

    def __init__(self):
        self.log = []

    def install(self, model, *, package=None, family=None):
        self.log.append(("install", family))
        model.family = family

    def uninstall(self, model):
        self.log.append(("uninstall", None))
        model.family = ""

    def status(self, model):
        return SimpleNamespace(installed=bool(getattr(model, "family", "")), family=getattr(model, "family", ""))


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def checks(host):
    return parity.Parity(PACKAGE, host)


@pytest.fixture
def model():
    layers = [nn.Module() for _ in range(2)]
    for layer in layers:
        layer.o_proj = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    top = nn.Module()
    top.layers = nn.ModuleList(layers)
    top.lm_head = nn.Linear(K, N, dtype=torch.bfloat16)
    return top


@pytest.fixture
def weight():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def run(candidate, weight, m=2):
    return parity.check_pair("o", candidate, lambda x: nn.functional.linear(x, weight), weight, m=m)


@pytest.mark.parametrize("m", parity.MS)
def test_the_stock_call_passes(weight, m):
    row = run(lambda x: nn.functional.linear(x, weight), weight, m)
    assert row.passed
    assert row.rel_rmse == row.stock_rel_rmse > 1e-3
    assert row.gate == TOLERANCE[torch.bfloat16] == 2.0e-3


def lose_one_element(x, w):
    x = x.clone()
    x[:, 100] = 0
    return nn.functional.linear(x, w)


def reduce_through_bf16(x, w):
    parts = [nn.functional.linear(x[:, i : i + 32], w[:, i : i + 32]) for i in range(0, K, 32)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def swap_two_rows(x, w):
    return nn.functional.linear(x.flip(0), w)


def give_nan(x, w):
    y = nn.functional.linear(x, w)
    y[0, 0] = float("nan")
    return y


@pytest.mark.parametrize("fault", [lose_one_element, reduce_through_bf16, swap_two_rows, give_nan])
def test_a_fault_is_found(weight, fault):
    row = run(lambda x: fault(x, weight), weight)
    assert not row.passed
    assert "FAILED" in str(row)


def test_a_lost_slice_with_tiny_weights_is_found_by_the_one_hot_rows(weight):
    weight[:, 128:160] *= 1e-6  # no tolerance would see that these are missing

    def candidate(x):
        x = x.clone()
        x[:, 128:160] = 0
        return nn.functional.linear(x, weight)

    row = run(candidate, weight)
    assert row.rel_rmse <= row.gate
    assert not row.one_hot_exact
    assert not row.passed


def test_the_path_that_ran_is_in_the_row(weight):
    dispatch.activate(PACKAGE)
    row = run(lambda x: dispatch.linear(x, weight, "invented"), weight, m=3)
    assert row.path == "fallback:not_cuda"
    assert run(lambda x: nn.functional.linear(x, weight), weight).path == ""


def test_one_layer_of_each_projection_is_checked_and_a_biased_one_is_left_out(checks, model):
    report = checks.check_model(model, ms=(1, 2))
    assert report.passed, report.text()
    assert [(row.name, row.m) for row in report.rows] == [("o", 1), ("o", 2)]
    assert report.tokens is None, "there is nothing that could generate"


@pytest.mark.parametrize("family", ["", "mine"])
def test_a_model_is_left_as_it_was(checks, host, model, family):
    model.family = family
    checks.check_model(model, ms=(1,))
    assert model.family == family
    assert ("install", "invented") in host.log


def test_a_model_is_left_as_it_was_after_an_error(checks, host, model):
    model.layers[0].o_proj.to("meta")
    with pytest.raises(ValueError, match="offloaded"):
        checks.check_model(model, ms=(1,))
    assert host.log == [("install", "invented"), ("uninstall", None)]


def test_a_model_without_such_projections_is_refused(checks):
    with pytest.raises(ValueError, match="InventedForCausalLM"):
        checks.check_model(nn.Sequential(nn.Linear(8, 8)))


def test_a_config_is_checked_projection_by_projection(checks):
    report = checks.check_config("small", tp=2, ms=(1, 2), only=("o",))
    assert report.passed, report.text()
    assert [(r.name, r.n, r.k, r.m) for r in report.rows] == [("o", N // 2, K, 1), ("o", N // 2, K, 2)]
    with pytest.raises(KeyError):
        checks.check_config("large")


def test_command_says_by_its_exit_code_whether_all_passed(checks, capsys, monkeypatch):
    asked = ["small", "--only", "o", "--device", "cpu"]
    assert checks.main(asked) == 0
    assert "passed" in capsys.readouterr().out
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 1e-4)
    assert checks.main(asked) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_report_is_json_and_an_empty_one_has_not_passed(weight):
    report = Report((run(lambda x: nn.functional.linear(x, weight), weight),), Tokens((1, 2), (1, 2)))
    assert report.passed
    assert json.loads(json.dumps(report.to_dict()))["tokens"]["equal"] is True
    assert not Report(()).passed


def test_unequal_tokens_fail_and_show_where():
    tokens = parity._compare(([5, 6, 7], [1.0, 0.01, 1.0]), ([5, 9, 7], [1.0, 0.01, 1.0]))
    assert tokens == Tokens((5, 6, 7), (5, 9, 7), 1, 0.01)
    assert not tokens.equal
    assert "position 1" in Report((), tokens).text()
