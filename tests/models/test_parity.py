"""The parity module of every package, with the host package that it names; here every call falls back."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import nn

from tests.models.packages import NAMES, found

LARGEST_TP = 8


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def parity(name: str) -> Any:
    return importlib.import_module(found(name).parity)


def test_a_named_config_is_checked_projection_by_projection(name: str, parity: Any) -> None:
    package = found(name)
    config = next(iter(package.configs))
    smallest = min(package.projections(package.configs[config], LARGEST_TP), key=lambda p: p.n * p.k)
    report = parity.check_config(config, tp=LARGEST_TP, ms=(1, 2), only=(smallest.name,))
    assert report.passed, report.text()
    assert [(r.n, r.k, r.m, r.path) for r in report.rows] == [
        (smallest.n, smallest.k, m, "fallback:not_cuda") for m in (1, 2)
    ]


def test_the_command_knows_the_named_configs(name: str, parity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parity.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"python -m skinny_{name}.parity" in shown
    assert [config for config in found(name).configs if config not in shown] == []


def test_a_model_of_nobody_is_refused(name: str, parity: Any) -> None:
    with pytest.raises(ValueError, match=found(name).architectures[0]):
        parity.check_model(nn.Sequential(nn.Linear(8, 8)))
