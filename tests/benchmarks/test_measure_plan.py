"""`measure_plan.py` without a GPU: what is asked of the tuner, and the plans of what it left."""

from __future__ import annotations

import importlib.util
import lzma
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skinny_core import device, plan
from skinny_core.plan import Environment
from skinny_core.problem import KernelConfig
from skinny_lab.bench import machine, peers, race, tuning
from skinny_lab.bench.libraries import Peer
from skinny_lab.tune import request
from skinny_lab.tune.run import Session
from skinny_lab.tune.store import Entry, Store

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "measure_plan.py"
H200 = device.product("h200")
CONFIG = KernelConfig.of("bf16_mma", {"warps": 8, "parts": 2, "loads": 2, "unroll": 2})
ASKED = ["--models", "qwen3-8b", "llama-3.1-8b", "--tp", "1", "2", "--rows", "1", "4"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command as a module, on a made-up H200."""
    spec = importlib.util.spec_from_file_location("measure_plan", COMMAND)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure_plan", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(machine, "environment", lambda index=0, commit="": Environment(gpu="H200", commit=commit))
    monkeypatch.setattr(module, "peer_maker", lambda folder: _peers())
    return module


def _peers() -> peers.Peers:
    make = lambda *_: lambda x, w, y: None  # noqa: E731
    return peers.Peers([Peer(name, lambda problem, m: None, make, lambda *_: "") for name in ("one", "two")])


def _measured(session: Session) -> str:
    """In place of the run: every cell 1.25x, faster in every step."""
    for site, m in session.cells:
        times = {str(CONFIG): race.Times(7.9, 8.0, 8.1, 7), "cublas": race.Times(9.9, 10.0, 10.1, 7)}
        found = tuning.Measured(site.problem, m, CONFIG, 1.6e-3, times, times, (1980, 1980), 9, finalists=(CONFIG,))
        labels = {user.partition("/")[0] for user in site.used_by} if m >= 3 else set()
        session.store.add(Entry(site.name, found, 0.1, dict.fromkeys(labels, -2.0)))
    return "done"


def _main(command: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measure_plan.py", *arguments])
    return int(command.main())


def test_one_measurement_becomes_a_plan_of_each_package(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Session, "__post_init__", lambda self: None)
    monkeypatch.setattr(Session, "run", _measured)
    assert _main(command, monkeypatch, *ASKED, "--commit", "abc", "--out", str(tmp_path / "a")) == 0
    qwen3, llama31 = (plan.load(tmp_path / "a" / name / "h200.toml") for name in ("qwen3", "llama31"))
    assert (len(qwen3.cells), len(llama31.cells)) == (2 * 5 * 2, 2 * 5 * 2)
    assert {cell.status for cell in (*qwen3.cells, *llama31.cells)} == {"win"}
    assert (qwen3.family, qwen3.environment.commit, qwen3.digest) == ("qwen3", "abc", qwen3.seal())
    assert "qwen3: 20 cells, 20 win, 0 refused" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        _main(command, monkeypatch, *ASKED, "--out", str(tmp_path / "a"))
    assert "go on with --resume" in capsys.readouterr().err
    packed = tmp_path / "kept.jsonl.xz"
    packed.write_bytes(lzma.compress((tmp_path / "a" / "measurements.jsonl").read_bytes()))
    assert _main(command, monkeypatch, *ASKED, "--from", str(packed), "--out", str(tmp_path / "b")) == 0
    for name in ("qwen3", "llama31"):
        again, once = (tmp_path / folder / name / "h200.toml" for folder in ("b", "a"))
        assert again.read_bytes() == once.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_peers_race_in_the_shapes_of_one_gpu_at_some_m(command: ModuleType) -> None:
    target = request.from_models(command.models_of(["qwen3-8b"], [1, 4]), "m")
    found = _peers()
    command.leave_out(found, target, [1, 3], [1], ["two"])
    racing = {
        (site.name, m): sorted(found(site.problem, m))
        for site in target.sites
        for m in (1, 3)
        if found(site.problem, m)
    }
    single = ("qkv", "o", "gate_up", "down", "lm_head")
    assert racing == {(f"qwen3-8b/{name}", 1): ["two"] for name in single}


def test_a_name_that_no_package_has(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _main(command, monkeypatch, "--models", "gpt-9", "--out", str(tmp_path))
    assert "no package has gpt-9" in capsys.readouterr().err
    other = tmp_path / "m.jsonl"
    key, environment = H200, Environment(gpu="H200")
    Store(other, request.from_model("qwen3-8b"), key, environment).write(other)
    with pytest.raises(SystemExit):
        _main(command, monkeypatch, *ASKED, "--from", str(other), "--out", str(tmp_path))
    assert "is of other shapes" in capsys.readouterr().err
