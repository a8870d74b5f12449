"""`skinny tune` without a GPU: decode steps, and several models in one measurement. Times are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.plan import Environment
from skinny_core.problem import DType
from skinny_lab.explain.target import RequestError
from skinny_lab.tune import order, request, result, run, steps
from skinny_lab.tune.store import Store, load

Skinny = Callable[..., Result]
H200 = device.product("h200")


def _plan(path: Path) -> dict[str, plan.Cell]:
    return {cell.id: cell for cell in plan.load(path).cells}


def _text(result: Result) -> str:
    return " ".join(result.output.split())


def test_several_models_are_measured_once_and_each_package_gets_its_cells(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(4096, 4096) is o of both 8B models: one race, one decode step each; the slower one counts where it is used."""
    packages = {p.name: p for p in family.discover().packages}
    models = [
        request.Model("qwen3-8b", packages["qwen3"], packages["qwen3"].configs["qwen3-8b"]),
        request.Model("qwen3-8b", packages["qwen3"], packages["qwen3"].configs["qwen3-8b"], 4),
        request.Model("llama-3.1-8b", packages["llama31"], packages["llama31"].configs["llama-3.1-8b"]),
    ]
    target = request.from_models(models, "all")
    assert len(target.sites) == 12, "15, of which (6144, 4096) is there three times and (4096, 4096) twice"
    store = Store(tmp_path / "m.jsonl", target, H200, Environment(gpu="then"))
    wanted = order.order(target.sites, [1, 4])
    session = run.Session(target, wanted, run.Settings(1000.0), store, H200, say=lambda text: None)
    assert session.run() == "done"
    assert len(fakes.cells) == 24
    assert {label for e in store for label in e.in_model} == {"qwen3-8b", "qwen3-8b-tp4", "llama-3.1-8b"}
    shared = store.entries[(6144, 4096, DType.BF16), 4]
    assert set(shared.in_model) == {"qwen3-8b", "qwen3-8b-tp4", "llama-3.1-8b"}
    store.add(replace(shared, in_model={**shared.in_model, "qwen3-8b-tp4": 2.0}))
    read = load(tmp_path / "m.jsonl", target)
    plans = {name: result.make(request.of_family(target, name), read).plan for name in packages}
    qwen3, llama31 = ({cell.id: cell for cell in plans[name].cells} for name in ("qwen3", "llama31"))
    assert (len(qwen3), len(llama31)) == (18, 10)
    assert qwen3["qwen3-8b/qkv/M4"].used_by == ("qwen3-8b/qkv", "qwen3-8b-tp4/gate_up")
    assert qwen3["qwen3-8b/qkv/M4"].status == "refused", "it is slower in one of the models that use it"
    assert "2.0 us slower" in qwen3["qwen3-8b/qkv/M4"].why
    assert llama31["llama-3.1-8b/qkv/M4"].status == "win"
    assert llama31["llama-3.1-8b/qkv/M4"].used_by == ("llama-3.1-8b/qkv",)
    assert plans["qwen3"].environment.gpu == "then"
    assert {plans[name].family for name in plans} >= {"qwen3", "llama31"}
    with pytest.raises(RequestError, match="other shapes"):
        load(tmp_path / "m.jsonl", request.from_models(models[:1], "all"))


def test_a_step_without_room_takes_that_of_the_others(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    fakes.no_room = 1
    out = tmp_path / "o.toml"
    assert skinny("tune", "qwen3-8b", "-M", "4", "--out", str(out)).exit_code == 0
    assert (fakes.made, {cell.status for cell in _plan(out).values()}) == (2, {"win"})
    fakes.no_room = 2
    result = skinny("tune", "qwen3-8b", "-M", "4", "--out", str(out), "--force")
    assert result.exit_code == 1
    assert "not measured: decode step of qwen3-8b at M = 4: " in _text(result)
    assert {cell.status for cell in _plan(out).values()} == {"refused"}
    assert all("its decode step failed" in cell.why for cell in _plan(out).values())
    assert skinny("tune", "qwen3-8b", "-M", "4", "--out", str(out), "--resume").exit_code == 0
    assert {cell.status for cell in _plan(out).values()} == {"win"}


def test_why_a_step_of_one_model_failed_stays_when_another_succeeds(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {p.name: p for p in family.discover().packages}
    models = [
        request.Model("qwen3-8b", packages["qwen3"], packages["qwen3"].configs["qwen3-8b"]),
        request.Model("llama-3.1-8b", packages["llama31"], packages["llama31"].configs["llama-3.1-8b"]),
    ]
    target = request.from_models(models, "all")
    store = Store(tmp_path / "m.jsonl", target, H200, Environment())
    session = run.Session(
        target, order.order(target.sites, [4]), run.Settings(1000.0), store, H200, say=lambda text: None
    )
    changes = steps.Steps.changes

    def failing(self: steps.Steps, label: str, m: int, measured: Any) -> dict[str, float]:
        if label == "qwen3-8b":
            raise RuntimeError("the step of Qwen3 is broken")
        return changes(self, label, m, measured)

    monkeypatch.setattr(steps.Steps, "changes", failing)
    session.run()
    cells = {cell.id: cell for cell in result.make(target, store).plan.cells}
    assert cells["qwen3-8b/o/M4"].why.endswith("its decode step failed: RuntimeError: the step of Qwen3 is broken")
    assert cells["llama-3.1-8b/down/M4"].status == "win"
