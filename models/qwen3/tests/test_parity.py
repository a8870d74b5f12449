"""The parity check passes what is right, and fails on each fault that it is there to find."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import skinny_transformers
from skinny_core.testing.numerics import TOLERANCE
from skinny_qwen3 import parity
from skinny_qwen3.parity_report import Report, Tokens

N, K = 96, 256


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
    layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    skinny_transformers.install(layer, family="qwen3")
    row = parity.check_pair("o", layer, lambda x: nn.functional.linear(x, layer.weight), layer.weight, m=3)
    assert row.path == "fallback:not_cuda"
    assert run(lambda x: nn.functional.linear(x, weight), weight).path == ""


def test_a_named_config_is_checked_projection_by_projection():
    report = parity.check_config("qwen3-4b", tp=8, ms=(1, 2), only=("k", "o"))
    assert report.passed, report.text()
    assert [(r.name, r.n, r.k, r.m) for r in report.rows] == [
        ("o", 2560, 512, 1), ("o", 2560, 512, 2), ("k", 128, 2560, 1), ("k", 128, 2560, 2),
    ]  # fmt: skip


def test_command_says_by_its_exit_code_whether_all_passed(capsys, monkeypatch):
    asked = ["qwen3-4b", "--tp", "8", "--only", "k", "--device", "cpu"]
    assert parity.main(asked) == 0
    assert "passed" in capsys.readouterr().out
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 1e-4)
    assert parity.main(asked) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_model_without_such_projections_is_refused():
    with pytest.raises(ValueError, match="Qwen3"):
        parity.check_model(nn.Sequential(nn.Linear(8, 8)))


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
