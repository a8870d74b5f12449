"""The seam: patched now or when vLLM imports the module, once, reversible, and never in the way of the host."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from skinny_vllm import plugin, seam
from skinny_vllm.report import State

SOURCE = "def record_metadata_for_reloading(model, extra=1):\n    'Theirs.'\n    return ('recorded', model, extra)\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package of vLLM's layout whose loader module is made from SOURCE."""
    folder = tmp_path
    for part in seam.MODULE.split(".")[:-1]:
        folder /= part
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    file = folder / f"{seam.MODULE.rpartition('.')[2]}.py"
    file.write_text(SOURCE)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(held)


def load() -> types.ModuleType:
    return __import__(seam.MODULE, fromlist=["x"])


def test_the_module_is_patched_when_the_host_imports_it(host: Path) -> None:
    seen: list[str] = []
    seam.attach(seen.append)
    assert seam.MODULE not in sys.modules
    module = load()
    assert not any(isinstance(finder, seam._Finder) for finder in sys.meta_path)
    assert module.record_metadata_for_reloading("m") == ("recorded", "m", 1)
    assert module.record_metadata_for_reloading("n", extra=2) == ("recorded", "n", 2)
    assert seen == ["m", "n"]
    assert module.__file__ == module.__spec__.origin == str(host)
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader


def test_an_imported_module_is_patched_at_once_and_only_once(host: Path) -> None:
    module, seen = load(), []
    original = module.record_metadata_for_reloading
    seam.attach(seen.append)
    seam.attach(seen.append)
    module.record_metadata_for_reloading("m")
    assert seen == ["m"]
    assert inspect.signature(module.record_metadata_for_reloading) == inspect.signature(original)
    assert module.record_metadata_for_reloading.__doc__ == "Theirs."
    seam.detach()
    assert module.record_metadata_for_reloading is original


def test_detaching_before_the_import_leaves_no_trace(host: Path) -> None:
    before = list(sys.meta_path)
    seam.attach(lambda model: None)
    seam.detach()
    assert sys.meta_path == before
    assert not hasattr(load().record_metadata_for_reloading, "skinny_original")


def test_a_host_without_the_function_runs_and_the_reason_is_known(host: Path, caplog: pytest.LogCaptureFixture) -> None:
    host.write_text("value = 1\n")
    seam.attach(lambda model: None)
    assert load().value == 1
    assert plugin._state is State.FAILED
    assert "SeamMissingError" in plugin._detail
    assert sum("skinny is off" in record.getMessage() for record in caplog.records) == 1


def test_an_import_error_of_the_host_is_its_own(host: Path) -> None:
    host.write_text("raise ImportError('theirs')\n")
    seam.attach(lambda model: None)
    with pytest.raises(ImportError, match="theirs"):
        load()


def test_other_imports_are_not_touched(host: Path) -> None:
    seam.attach(lambda model: None)
    finder = next(finder for finder in sys.meta_path if isinstance(finder, seam._Finder))
    assert finder.find_spec("json", None) is None
