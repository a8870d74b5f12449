"""`explain`: what would run and why, with the arithmetic checked by hand, on a machine with no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skinny_core import plan
from skinny_core.device import product
from skinny_core.errors import ModelConfigError
from skinny_core.explain import Explanation, explain
from skinny_core.family import ModelPackage, Projection
from skinny_core.testing.stand_in import StandIn, cell, plan_of

QKV, HEAD = (96, 64), (1000, 64)


def _projections(config: Mapping[str, Any], tp: int) -> tuple[Projection, ...]:
    if "layers" not in config:
        raise ModelConfigError("no 'layers' in the config", "give one")
    layers = config["layers"]
    return (
        Projection("qkv", ("*.qkv",), QKV[0] // tp, QKV[1], layers),
        Projection("q", ("*.q",), 64 // tp, 64, layers, part_of="qkv"),
        Projection("k", ("*.k",), 16 // tp, 64, layers, part_of="qkv"),
        Projection("lm_head", ("lm_head",), HEAD[0] // tp, HEAD[1], 1),
    )


CELLS = (
    cell(*QKV, 1, us=(10.0, 8.0)),
    cell(64, 64, 1, us=(7.0, 6.5)),
    cell(16, 64, 1, us=(4.0, 3.5)),
    cell(*HEAD, 1, us=(100.0, 80.25)),
    cell(*QKV, 2, us=(10.0, 9.0)),
    cell(*HEAD, 2, "refused", us=(100.0, 101.0)),
    cell(*HEAD, 4, "reported", us=(100.0, 50.0)),
)


@pytest.fixture
def package(tmp_path: Path, kernel: StandIn) -> ModelPackage:
    file = tmp_path / "h200.toml"
    plan.dump(plan_of(*CELLS, key=product("h200"), product="h200"), file)
    return ModelPackage("test", "1", (), {"small": {"layers": 4}}, _projections, lambda: (file,))


def _explain(package: ModelPackage, device: str | None = "h200", **options: Any) -> Explanation:
    key = product(device) if device else None
    return explain("small", package, package.configs["small"], key=key, **options)


def test_savings_are_calls_times_difference_and_parts_are_not_counted_twice(package: ModelPackage) -> None:
    found = _explain(package)
    by_name = {line.projection: line for line in found.lines if line.m == 1}
    assert {name: line.saving_us for name, line in by_name.items()} == {
        "qkv": 8.0,
        "q": 2.0,
        "k": 2.0,
        "lm_head": 19.75,
    }
    assert found.saving_us(1) == 8.0 + 19.75
    assert found.saving_us(2) == 4.0, "a refused cell saves nothing, and costs nothing"
    assert found.saving_us(4) == found.saving_us(16) == 0.0
    assert by_name["q"].part_of == "qkv"


def test_reasons(package: ModelPackage) -> None:
    reasons = {(line.projection, line.m): line.reason for line in _explain(package).lines}
    assert len(reasons) == 4 * 16
    assert reasons["qkv", 1] == ""
    assert reasons["qkv", 3] == "off_table"
    assert reasons["lm_head", 2] == "refused"
    assert reasons["lm_head", 4] == "reported"
    reported = next(line for line in _explain(package).lines if (line.projection, line.m) == ("lm_head", 4))
    assert (reported.status, reported.ours_us, reported.reported_us) == ("reported", None, 50.0), "never as ours"
    assert (reported.baseline_us, reported.source) == (100.0, "a report")
    near = {(line.projection, line.m): line.reason for line in _explain(package, "h100-sxm").lines}
    assert near["qkv", 1] == "other_device"
    assert near["qkv", 3] == "off_table"
    assert {line.reason for line in _explain(package, None).lines} == {"not_cuda"}
    assert {line.reason for line in _explain(package, "b200").lines} == {"other_device", "off_table"}
    assert {line.reason for line in _explain(package, tp=2).lines if line.projection == "lm_head"} == {"off_table"}


def test_a_neighbour_is_offered_by_name(package: ModelPackage) -> None:
    (note,) = _explain(package, "h100-sxm").notes
    assert "measured on h200" in note
    assert _explain(package).notes == ()
    (note,) = _explain(package, "b200").notes
    assert note.startswith("no plan of test for b200")


def test_text(package: ModelPackage) -> None:
    lines = _explain(package, ms=(1, 2)).text().splitlines()
    assert lines[0] == "small (test) on h200 (sm90-132sm-60mib-141gb), TP 1"
    assert lines[1] == "  qkv      (96,64) M=1  stand_in(variant=0)  10.00 -> 8.00 us (1.25x)"
    assert lines[-1] == "  lm_head  (1000,64) M=2  original call: refused"
    assert len(lines) == 1 + 4 * 2
    assert "note: no plan for h100-sxm" in _explain(package, "h100-sxm").text()
    assert "on no CUDA device" in _explain(package, None).text()


def test_json_holds_everything(package: ModelPackage) -> None:
    found = _explain(package)
    data = json.loads(found.to_json())
    assert data["model"] == "small"
    assert len(data["lines"]) == 64
    refused = next(line for line in data["lines"] if line["projection"] == "lm_head" and line["m"] == 2)
    assert refused["runs"] is False
    assert (refused["baseline_us"], refused["ours_us"], refused["detail"]) == (100.0, 101.0, "lost")
    assert data["plans"][0][1] == plan.load(data["plans"][0][0]).digest


def test_a_config_without_such_projections(package: ModelPackage) -> None:
    with pytest.raises(ModelConfigError, match="no 'layers'"):
        explain("x", package, {}, key=None)
