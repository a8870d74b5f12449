"""Installed model packages are found; a broken one is reported with its original error and disturbs nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skinny_core import family
from skinny_core.family import ModelPackage, Projection

MODULE = """
from skinny_core.family import ModelPackage
def _package(name, *architectures):
    return ModelPackage(name, "1.0", architectures, {}, lambda config, tp: (), lambda: ())
good = _package("invented", "InventedForCausalLM")
again = _package("invented", "Other")
wrong = {"name": "invented"}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with an importable module `skinny_invented` and a distribution that points at it."""
    (tmp_path / "skinny_invented.py").write_text(MODULE)
    (tmp_path / "skinny_explodes.py").write_text("import a_module_that_is_not_installed\n")
    info = tmp_path / "skinny_invented-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skinny-invented\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[skinny.models]\n"
        "zz1-good = skinny_invented:good\n"
        "zz2-again = skinny_invented:again\n"
        "zz3-wrong = skinny_invented:wrong\n"
        "zz4-absent = skinny_invented:absent\n"
        "zz5-explodes = skinny_explodes:package\n"
        "zz6-unreadable = !!\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("skinny_invented", "skinny_explodes"):
        sys.modules.pop(name, None)


def test_good_ones_are_found_and_broken_ones_reported(install: Path) -> None:
    found = family.discover()
    assert [p.name for p in found.packages].count("invented") == 1
    broken = {name: text for name, text in found.broken if name.startswith("zz")}
    assert list(broken) == ["zz3-wrong", "zz4-absent", "zz5-explodes", "zz6-unreadable"]
    assert broken["zz3-wrong"] == "skinny_invented:wrong is a dict, not a ModelPackage"
    assert "AttributeError" in broken["zz4-absent"]
    assert "No module named 'a_module_that_is_not_installed'" in broken["zz5-explodes"]


def test_architectures(install: Path) -> None:
    package = family.for_architecture("InventedForCausalLM")
    assert isinstance(package, ModelPackage)
    assert package.name == "invented"
    assert family.for_architecture("NobodyForCausalLM") is None
    assert family.for_architecture("Other") is None, "the first package of a name counts"


@pytest.mark.parametrize(
    ("path", "matches"),
    [
        ("model.layers.0.self_attn.qkv_proj", True),
        ("model.layers.31.self_attn.qkv_proj", True),
        ("model.layers.0.self_attn.qkv_proj.lora_A", False),
        ("model.layers.0.self_attn.QKV_proj", False),
        ("lm_head", True),
    ],
)
def test_patterns(path: str, matches: bool) -> None:
    assert Projection("qkv", ("*.self_attn.qkv_proj", "lm_head"), 6144, 4096, 36).matches(path) is matches


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of an importable module `skinny_laidout` that nobody installed, with one named config."""
    folder = tmp_path / "skinny_laidout"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "configs.toml").write_text('["small-1.5"]\nhidden_size = 64\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("skinny_laidout", None)


def test_a_packaged_declaration_follows_from_the_module(wheel: Path) -> None:
    package = family.packaged("skinny_laidout", ("LaidOutForCausalLM",), lambda config, tp: ())
    assert (package.name, package.parity, package.version) == ("laidout", "skinny_laidout.parity", "0+unknown")
    assert package.architectures == ("LaidOutForCausalLM",)
    assert package.configs == {"small-1.5": {"hidden_size": 64}}


def test_plan_files_are_the_packaged_toml_files(wheel: Path) -> None:
    package = family.packaged("skinny_laidout", (), lambda config, tp: ())
    assert package.plan_files() == (), "no plan folder is no error"
    (wheel / "plans").mkdir()
    for name in ("b.toml", "a.toml", "notes.md"):
        (wheel / "plans" / name).touch()
    assert [p.name for p in package.plan_files()] == ["a.toml", "b.toml"]


def test_the_version_is_that_of_the_wheel(wheel: Path) -> None:
    info = wheel.parent / "skinny_laidout-3.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skinny-laidout\nVersion: 3.2\n")
    assert family.packaged("skinny_laidout", (), lambda config, tp: ()).version == "3.2"
