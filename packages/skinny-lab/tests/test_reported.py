"""Plans of nothing but other people's numbers: shown as theirs, chosen where nothing measured is, never measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.testing.stand_in import cell, plan_of
from skinny_lab import plans
from skinny_lab.bench import cli
from skinny_lab.explain import target

Skinny = Callable[..., Result]
H200, NVL = device.product("h200"), device.product("h200-nvl")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(theirs for the NVL, ours for the H200), in the order in which a package may ship them."""
    theirs = msgspec.structs.replace(cell(4096, 4096, 1, "reported", kernel="vllm_cute"), config={})
    ours = msgspec.structs.replace(
        cell(4096, 4096, 1, "refused", kernel="bf16_simt"), config={"threads": 128, "rows": 1, "chunks": 1}
    )
    paths = tmp_path / "h200-nvl.toml", tmp_path / "h200.toml"
    plan.dump(plan_of(theirs, key=NVL, product="h200-nvl", family="qwen3"), paths[0])
    plan.dump(plan_of(ours, key=H200, product="h200", family="qwen3"), paths[1])
    return paths


@pytest.fixture
def package(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> family.ModelPackage:
    (real,) = (p for p in family.discover().packages if p.name == "qwen3")
    found = dataclasses.replace(real, plan_files=lambda: files)
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    for module in (family, target):
        monkeypatch.setattr(module, "discover", lambda: family.Discovery((found,)))
    return found


def test_without_a_gpu_the_device_of_a_measured_plan_is_shown(
    package: family.ModelPackage, files: tuple[Path, Path]
) -> None:
    assert target.find_device(None, package)[0] == H200
    alone = dataclasses.replace(package, plan_files=lambda: files[:1])
    assert target.find_device(None, alone)[0] == NVL, "the only one there is"


def test_a_package_name_means_the_measured_plan_unless_the_device_says_otherwise(
    package: family.ModelPackage, files: tuple[Path, Path]
) -> None:
    theirs, ours = files
    assert plans.open_plan("qwen3")[0] == ours
    assert plans.open_plan("qwen3", H200)[0] == ours
    assert plans.open_plan("qwen3", device.product("h100-sxm"))[0] == ours
    assert plans.open_plan("qwen3", NVL)[0] == theirs


def test_such_a_plan_is_sound_and_there_is_nothing_to_bench(
    package: family.ModelPackage, skinny: Skinny, files: tuple[Path, Path]
) -> None:
    result = skinny("plans", "check", str(files[0]))
    assert result.exit_code == 0, result.output
    assert "1 reported" in result.output
    assert cli.find_cells(files[0], [], NVL) == []
    assert cli.find_cells(None, [], NVL) == []
    assert len(cli.find_cells(None, [], H200)) == 1


@pytest.mark.parametrize("value", ["", "reported=on"])
def test_explain_shows_it_as_theirs_and_says_what_to_do(
    package: family.ModelPackage, skinny: Skinny, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SKINNY", value)
    asked = ("explain", "qwen3-8b", "--device", "h200-nvl", "-M", "1")
    text = skinny(*asked).output
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "o 4096 4096 1 host: reported 10.00 8.00 1.25xr" in rows
    assert max(len(line) for line in text.splitlines()) <= 80
    said = " ".join(rows)
    assert "r: both times as somebody else reported them, the second of their kernel: a report" in said
    assert "measured on h200: try it with SKINNY=neighbour=on, or measure: `skinny tune` on this device" in said
    assert "Nothing runs here" in said
    lines = json.loads(skinny(*asked, "--json").stdout)["lines"]
    (line,) = (line for line in lines if line["projection"] == "o")
    assert (line["status"], line["runs"], line["ours_us"], line["reported_us"]) == ("reported", False, None, 8.0)
    assert line["detail"] == "measured with vllm_cute, which is none of our kernels"
