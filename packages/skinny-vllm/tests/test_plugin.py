"""`register()` and `status()`: on, off, unsupported, absent, broken; never an exception, one line each."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skinny_vllm
from skinny_core import env
from skinny_core.rules import Reason
from skinny_vllm import plugin, seam
from skinny_vllm.report import HostStatus, ModelStatus, State

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
Make = Callable[..., Any]


class Owner:
    """Something that a status can be about."""


def attached() -> bool:
    return any(isinstance(finder, seam._Finder) for finder in sys.meta_path)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm.skinny"]


def test_absent_host_is_harmless(no_vllm: None, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    assert skinny_vllm.status().state is State.ABSENT
    assert skinny_vllm.status().version is None
    assert not attached()
    assert lines(caplog) == []


def test_a_supported_host_is_taken_and_registering_twice_is_once(vllm: Make) -> None:
    vllm("0.26.0")
    assert skinny_vllm.status().state is State.IDLE
    plugin.register()
    plugin.register()
    assert skinny_vllm.status().state is State.READY
    assert sum(isinstance(finder, seam._Finder) for finder in sys.meta_path) == 1
    assert "skinny_vllm.installer" not in sys.modules, "it imports the host's layers"


def test_an_unsupported_host_gets_one_line_and_nothing_else(vllm: Make, caplog: pytest.LogCaptureFixture) -> None:
    vllm("0.31.0")
    assert skinny_vllm.status().state is State.UNSUPPORTED
    plugin.register()
    plugin.register()
    status = skinny_vllm.status()
    assert (status.state, status.version) == (State.UNSUPPORTED, "0.31.0")
    assert status.supported == (">=0.26.0,<0.27", ">=0.33.0,<0.34")
    assert lines(caplog) == [
        "skinny is off: vLLM 0.31.0 is outside the tested ranges (>=0.26.0,<0.27 or >=0.33.0,<0.34)"
    ]
    assert not attached()


def test_off_attaches_nothing(vllm: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    vllm()
    monkeypatch.setenv("SKINNY", "off")
    env.settings.cache_clear()
    plugin.register()
    assert skinny_vllm.status().state is State.DISABLED
    assert not attached()
    assert lines(caplog) == []


def test_a_malformed_variable_is_one_line(
    vllm: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm()
    monkeypatch.setenv("SKINNY", "nonsense")
    env.settings.cache_clear()
    plugin.register()
    assert skinny_vllm.status().state is State.FAILED
    (line,) = lines(caplog)
    assert line.startswith("skinny is off: SettingsError: ")
    assert "\n" not in line


def test_an_allow_list_without_us_is_reported(vllm: Make) -> None:
    vllm(allowed=["other"])
    assert skinny_vllm.status().state is State.EXCLUDED
    vllm(allowed=["other", "skinny"])
    assert skinny_vllm.status().state is State.IDLE


def test_guarded_turns_any_exception_into_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    plugin.guarded(fail, "a\nb")
    assert lines(caplog) == ["skinny is off: ValueError: a; b"]


def test_status_is_plain_data(vllm: Make) -> None:
    vllm()
    plugin.register()
    owners = Owner(), Owner()
    plugin.note_model(owners[0], lambda _: ModelStatus("A", "qwen3", 9, {"bias": 1}))
    plugin.note_model(owners[1], lambda _: ModelStatus("B", "qwen3", reason=Reason.LORA, detail="with LoRA"))
    status = skinny_vllm.status()
    assert isinstance(status, HostStatus)
    data = json.loads(json.dumps(status.to_json()))
    assert data["state"] == "ready"
    assert [m["reason"] for m in data["models"]] == [None, "lora"]
    assert status.text().splitlines() == [
        "vLLM 0.33.0: ready (active in this process)",
        "  A: 9 layers (qwen3)",
        "  B: lora: with LoRA",
    ]


def test_status_keeps_no_model_alive_and_forgets_the_dead() -> None:
    first, second = Owner(), Owner()
    plugin.note_model(first, lambda _: ModelStatus("A"))
    plugin.note_model(second, lambda owner: ModelStatus(type(owner).__name__))
    gone = weakref.ref(first)
    del first
    assert gone() is None
    assert [m.architecture for m in skinny_vllm.status().models] == ["Owner"]
    plugin.note_model(second, lambda _: ModelStatus("C"))
    assert len(plugin._models) == 2


def test_states_have_a_sentence_each() -> None:
    assert all(state.meaning for state in State)


def test_the_entry_point_is_the_only_one_of_its_group_and_resolves() -> None:
    points = PYPROJECT["project"]["entry-points"]
    assert points == {"vllm.general_plugins": {"skinny": "skinny_vllm.plugin:register"}}
    assert plugin.ENTRY_POINT in points["vllm.general_plugins"]
    point = importlib.metadata.EntryPoint("skinny", "skinny_vllm.plugin:register", "vllm.general_plugins")
    assert point.load() is plugin.register


def test_versions_agree() -> None:
    assert PYPROJECT["project"]["version"] == skinny_vllm.__version__


@pytest.mark.parametrize("code", ["import skinny_vllm", "import skinny_vllm; skinny_vllm.__version__"])
def test_importing_the_package_imports_neither_host_nor_torch(code: str) -> None:
    check = f"{code}; import sys; print(sorted({{'torch', 'vllm', 'skinny_core'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registering_without_the_host_imports_no_torch() -> None:
    check = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a);"
        "from skinny_vllm import plugin; plugin.register();"
        "print(plugin.status().state.value, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["absent", "False"]
