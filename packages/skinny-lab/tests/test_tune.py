"""`skinny tune` without a GPU: the whole command with everything but the device and the clock. Times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from skinny_core import device, env, kernels, plan
from skinny_core.problem import KernelConfig
from skinny_lab.bench import machine, tuning
from skinny_lab.bench.entrants import DEFAULT
from skinny_lab.tune import order

Skinny = Callable[..., Result]
H200 = device.product("h200")


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    """Two shapes."""
    (tmp_path / "mine.csv").write_text("n,k,name\n4096,4096,a\n2048,4096,b\n")
    return str(tmp_path / "mine.csv")


def _plan(path: Path) -> dict[str, plan.Cell]:
    return {cell.id: cell for cell in plan.load(path).cells}


def _text(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_model_end_to_end(fakes: Any, skinny: Skinny) -> None:
    fakes.steps["down"] = 0.5
    result = skinny("tune", "qwen3-8b", "-M", "1-4")
    assert result.exit_code == 0, result.output
    file = env.user_plan_folder() / "qwen3-8b-h200.toml"
    found = plan.load(file)
    assert (found.family, found.product, found.environment.gpu) == ("qwen3", "h200", "NVIDIA H200")
    cells = _plan(file)
    assert len(cells) == 5 * 4
    refused = {name for name, cell in cells.items() if cell.status == "refused"}
    assert refused == {"qwen3-8b/down/M3", "qwen3-8b/down/M4"}
    assert "decode step is 9.0 us slower" in cells["qwen3-8b/down/M4"].why
    assert cells["qwen3-8b/o/M4"].evidence.in_model_us == -18.0, "36 layers, 2 in the step"
    assert fakes.made == 1, "a step is kept from one M to the next"
    assert cells["qwen3-8b/o/M1"].evidence.peers == {"peer": 9.5}
    assert cells["qwen3-8b/o/M1"].used_by == ("qwen3-8b/o",)
    assert cells["qwen3-8b/o/M1"].evidence.clock_mhz == (1980, 1980)
    assert [m for _, m, _ in fakes.cells[::5]] == [1, 2, 4, 3], "anchors first"
    assert fakes.cells[0][0] == 24576, "most bytes per step first"
    assert [count for _, m, count in fakes.cells if m == 3] == [order.NEAR] * 5, "what was fastest at 2 and 4"
    assert min(count for _, m, count in fakes.cells if m != 3) > 20
    assert not list(file.parent.glob("*.partial")), "nothing is left to do"
    assert skinny("plans", "check", str(file)).exit_code == 0
    told = _text(result)
    assert "qwen3-8b/o (4096, 4096)" in told
    assert "1.111x" in told
    assert "skinny explain qwen3-8b -M 1,2,3,4 will say" in told
    assert "M=4 4 of 5 projections run a kernel (qkv, o, gate_up, lm_head)" in told
    said = json.loads(skinny("explain", "qwen3-8b", "--device", "h200", "-M", "4", "--json").output)
    assert {line["cell"] for line in said["lines"] if line["runs"] and not line["part_of"]} == {
        f"qwen3-8b/{name}/M4" for name in ("qkv", "o", "gate_up", "lm_head")
    }


def test_with_out_elsewhere_explain_needs_the_variable(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    result = skinny("tune", "qwen3-8b", "-M", "1", "--out", str(tmp_path / "o.toml"), "--tp", "2")
    assert result.exit_code == 0, result.output
    assert set(_plan(tmp_path / "o.toml")) == {
        f"qwen3-8b-tp2/{name}/M1" for name in ("qkv", "o", "gate_up", "down", "lm_head")
    }
    assert f"SKINNY=plan={tmp_path}/o.toml skinny explain qwen3-8b --tp 2 -M 1" in _text(result)
    assert "M=1 5 of 5 projections" in _text(result)


def test_shapes_count_for_every_model_and_have_a_step_of_their_own(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.steps["mine/a"] = 0.5
    result = skinny("tune", "--shapes", shapes, "-M", "1,2,4", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 0, result.output
    cells = _plan(tmp_path / "o.toml")
    assert plan.load(tmp_path / "o.toml").family == "*"
    assert {name for name, cell in cells.items() if cell.status == "win"} == {
        "mine/a/M1", "mine/a/M2", "mine/b/M1", "mine/b/M2", "mine/b/M4",
    }  # fmt: skip
    assert cells["mine/a/M4"].why == "1.111x alone, but the decode step is 0.5 us slower"
    assert fakes.stepped == [(4, ("mine/a", "mine/b"))] + 2 * [(4, ("mine/a",))], "once more what seems slower"
    assert "count for these shapes in every model" in _text(result)


def test_a_capture_is_measured_at_the_m_that_it_saw(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    record = {
        "n": 2048, "k": 4096, "m": 2, "activation": "fp16", "weight": "fp16", "output": "fp16", "bias": False,
        "layer": "layers.*.up", "layers": 2, "calls": 2, "steps": 3, "phase": "decode",
    }  # fmt: skip
    document = {
        "schema": 1, "model": "m", "host": "vllm", "versions": {}, "device": "cpu", "tp": 1, "date": "2026-01-01",
        "command": "", "batches": [2], "prompt_tokens": 4, "new_tokens": 4, "random": True,
        "records": [record, {**record, "layer": "head", "bias": True}],
    }  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(document))
    fakes.rmse = 2.1e-4
    result = skinny("tune", "--capture", str(tmp_path / "mine.json"), "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 0, result.output
    (cell,) = _plan(tmp_path / "o.toml").values()
    assert (cell.id, cell.status, cell.weight.value, cell.used_by) == ("mine/up/M2", "win", "fp16", ("layers.*.up",))
    assert "head: it has a bias" in _text(result)


def test_only_what_passes_alone_takes_a_decode_step(fakes: Any, skinny: Skinny) -> None:
    fakes.speeds |= {(4096, 4): 9.9}
    assert skinny("tune", "qwen3-8b", "-M", "4").exit_code == 0
    assert [(m, sorted(names)) for m, names in fakes.stepped] == [(4, ["gate_up", "lm_head", "qkv"])]


def test_the_budget_ends_a_run_and_resume_goes_on(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    asked = ("tune", "qwen3-8b", "-M", "1,4", "--out", str(out), "--time-budget")
    result = skinny(*asked, "18")
    assert result.exit_code == 3, result.output
    assert "time budget ended: 2 cells not measured: qwen3-8b/lm_head/M4, qwen3-8b/o/M4" in _text(result)
    assert fakes.now <= 18
    assert len(fakes.stepped) == 1, "room for the decode step is kept"
    cells = _plan(out)
    assert cells["qwen3-8b/down/M4"].status == "win"
    assert len(cells) == 8
    begun = len(fakes.cells)
    assert "is of a run that did not end" in skinny(*asked, "17").stderr
    result = skinny(*asked, "17", "--resume")
    assert result.exit_code == 0, result.output
    assert len(fakes.cells) == begun + 2, "nothing is measured twice"
    assert "resumed: 8 cells" in _text(result)
    resumed = _plan(out)
    assert len(resumed) == 10
    assert {name: resumed[name] for name in cells} == cells
    assert fakes.stepped[-1][1] in (("o", "lm_head"), ("lm_head", "o"))
    assert not list(tmp_path.glob("*.partial"))


def test_a_decode_step_without_time_leaves_the_cells_open(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    fakes.first_seconds = fakes.cell_seconds = 6.0  # longer than a first cell is thought to take
    result = skinny("tune", "qwen3-8b", "-M", "4", "--out", str(out), "--time-budget", "14")
    assert result.exit_code == 3, result.output
    assert fakes.stepped == []
    assert fakes.cells, "something was measured"
    assert all("go on with `skinny tune --resume`" in cell.why for cell in _plan(out).values())
    result = skinny("tune", "qwen3-8b", "-M", "4", "--out", str(out), "--resume")
    assert result.exit_code == 0, result.output
    assert {cell.status for cell in _plan(out).values()} == {"win"}


def test_resuming_with_other_m_keeps_what_waits_for_its_step(fakes: Any, skinny: Skinny, tmp_path: Path) -> None:
    asked = ("tune", "qwen3-8b", "--out", str(tmp_path / "o.toml"))
    fakes.first_seconds = 6.0
    assert skinny(*asked, "-M", "4", "--time-budget", "14").exit_code == 3
    assert skinny(*asked, "-M", "1", "--resume").exit_code == 0
    assert (tmp_path / "o.toml.partial").exists()
    assert skinny(*asked, "-M", "1,4", "--resume").exit_code == 0
    assert len(fakes.cells) == 10
    assert {cell.status for cell in _plan(tmp_path / "o.toml").values()} == {"win"}
    assert not (tmp_path / "o.toml.partial").exists()


def test_ctrl_c_keeps_what_is_measured(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    fakes.interrupt_at = 3
    result = skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(out))
    assert result.exit_code == 1
    assert "interrupted: 1 cells not measured: mine/b/M2" in _text(result)
    assert len(_plan(out)) == 3
    fakes.interrupt_at = 10**6
    assert skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(out), "--resume").exit_code == 0
    assert len(fakes.cells) == 4


def test_a_killed_run_has_every_cell_on_disk(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.toml"

    def killed(*args: object, **options: object) -> None:
        raise SystemExit(9)

    timed = fakes.check
    monkeypatch.setattr(tuning, "check", lambda *a, **o: timed(*a, **o) if len(fakes.cells) < 2 else killed())
    skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(out))
    assert not out.exists()
    head, *left = map(json.loads, (tmp_path / "o.toml.partial").read_text().splitlines())
    assert head["schema"] == 2
    assert [(r["site"], r["m"]) for r in left] == [("mine/a", 1), ("mine/b", 1)]


def test_a_partial_of_something_else_is_not_resumed(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "o.toml", tmp_path / "o.toml.partial"
    asked = ("tune", "--shapes", shapes, "-M", "1,2", "--out", str(out))
    assert "nothing to resume" in skinny(*asked, "--resume").stderr
    fakes.interrupt_at = 1
    skinny(*asked)
    kept = partial.read_bytes()
    assert "other shapes" in skinny("tune", "qwen3-8b", "--out", str(out), "--resume").stderr
    with monkeypatch.context() as patched:
        patched.setattr(device, "current_key", lambda index=None: device.product("h100-sxm"))
        assert "was measured on sm90-132sm-60mib-141gb" in _error(skinny(*asked, "--resume"))
    with monkeypatch.context() as patched:
        patched.setattr(machine, "checkout_commit", lambda: "def")
        assert "measured with commit abc, this is def" in _error(skinny(*asked, "--resume"))
    assert partial.read_bytes() == kept
    partial.write_text("{}")
    assert "not of `skinny tune`" in _error(skinny(*asked, "--resume"))
    fakes.interrupt_at = 10**6
    assert skinny(*asked, "--force").exit_code == 0


def _error(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_a_plan_is_not_overwritten(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    out.write_text("mine")
    asked = ("tune", "--shapes", shapes, "-M", "1", "--out", str(out))
    for more in ((), ("--resume",)):
        assert "exists already" in _error(skinny(*asked, *more))
    assert "--resume and --force" in _error(skinny(*asked, "--resume", "--force"))
    assert (out.read_text(), fakes.cells) == ("mine", [])
    assert skinny(*asked, "--force").exit_code == 0
    assert len(_plan(out)) == 2


def test_out_of_memory_is_said_and_the_others_go_on(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.large = {4096}
    result = skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 1
    assert set(_plan(tmp_path / "o.toml")) == {"mine/b/M1", "mine/b/M2"}
    assert "not measured: mine/a/M1: out of memory: its rotating weights take" in _text(result)


def test_a_device_that_stops_answering_ends_the_run(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = fakes.check

    def check(*args: object, **options: object) -> dict[str, float]:
        if fakes.cells:
            fakes.alive = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return timed(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "check", check)
    result = skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 1
    assert "the device stopped answering: 2 cells not measured: mine/a/M2, mine/b/M2" in _text(result)
    assert set(_plan(tmp_path / "o.toml")) == {"mine/a/M1"}
    assert "--resume" in result.output


def test_other_processes_and_clock_drift_are_told(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.others, fakes.mhz = 2, [1980, 1980, 1980, 1900]
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 0
    told = _text(result)
    assert "2 other processes on this GPU" in told
    assert "mine/b/M1: the SM clock went from 1980 to 1900 MHz" in told
    assert "the SM clock drifted by 4% (1900 to 1980 MHz)" in told
    assert fakes.spun == 1, "a clock that idled while compilers ran says nothing"
    fakes.others, fakes.mhz = 0, [1980, 1980, 1980, 1930]
    calm = _text(skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "p.toml")))
    assert "warning" not in calm


def test_what_no_kernel_accepts(fakes: Any, skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.json").write_text("[[4096, 4097], [2048, 4096]]")
    out = str(tmp_path / "o.toml")
    result = skinny("tune", "--shapes", str(tmp_path / "odd.json"), "-M", "1", "--out", out)
    assert result.exit_code == 0, "the original call runs: that is decided"
    assert "odd/4096x4097/M1: no kernel accepts it" in _text(result)
    (tmp_path / "odd.json").write_text("[[4096, 4097]]")
    result = skinny("tune", "--shapes", str(tmp_path / "odd.json"), "-M", "1", "--out", str(tmp_path / "p.toml"))
    assert "no kernel accepts any of these shapes" in _error(result)
    old = device.DeviceKey((7, 0), 80, 6 << 20, "32gb")
    monkeypatch.setattr(device, "current_key", lambda index=None: old)
    result = skinny("tune", "qwen3-8b", "--kernels", "bf16_stream", "--out", str(tmp_path / "q.toml"))
    assert "on sm70-80sm-6mib-32gb" in _error(result)
    assert len(fakes.cells) == 1


def test_a_kernel_without_its_dsl_is_told(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    for entrant in DEFAULT[:-1]:
        monkeypatch.setattr(kernels.get(entrant.stem), "availability", lambda: (False, "no DSL"), raising=False)
    result = skinny(*asked)
    assert result.exit_code == 0, result.output
    assert f"{DEFAULT[0].stem} does not race: no DSL" in _text(result)
    assert {cell.kernel for cell in _plan(tmp_path / "o.toml").values()} == {DEFAULT[-1].stem}
    monkeypatch.setattr(kernels.get(DEFAULT[-1].stem), "availability", lambda: (False, "no DSL"), raising=False)
    assert "no kernel can be compiled here: no DSL" in _error(skinny(*asked, "--force"))


def test_what_is_not_compiled_in_time_does_not_race(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.complete = False
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert "compiling was cut short" in _text(result)
    assert {count for _, _, count in fakes.cells} == {1}


def test_a_smaller_m_that_is_slower_is_measured_again_with_the_larger_ones_config(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fast = str(order.accepted(DEFAULT, tuning.problem_of(4096, 4096), 2, H200)[0][-1])
    fakes.speeds |= {(n, m): 8.0 for n in (4096, 2048) for m in (1, 2)}
    fakes.speeds |= {(4096, 2, fast): 7.0, (4096, 1, fast): 8.6}
    result = skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"))
    assert [(n, m) for n, m, _ in fakes.cells].count((4096, 1)) == 2
    assert fakes.cells[-1] == (4096, 1, order.NEAR + 1)
    assert fast in fakes.raced[-1]
    cells = _plan(tmp_path / "o.toml")
    assert cells["mine/a/M1"].status == "refused", "still slower: it does not run"
    assert "slower than M = 2 (7.00 us)" in cells["mine/a/M1"].why
    assert cells["mine/b/M1"].status == "win"
    assert result.exit_code == 0
    assert skinny("plans", "check", str(tmp_path / "o.toml")).exit_code == 0


def test_a_time_that_is_not_positive_does_not_spoil_the_plan(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.speeds |= {(2048, 1): 0.05}
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 1
    assert set(_plan(tmp_path / "o.toml")) == {"mine/a/M1"}


def test_the_finalists_of_a_race_are_kept_fastest_first(fakes: Any) -> None:
    problem = tuning.problem_of(4096, 4096)
    raced = order.accepted(DEFAULT, problem, 4, H200)[0]
    fakes.speeds |= {str(raced[7]): 8.0, str(raced[3]): 8.5}
    arena = fakes.arena(4096, 4096, torch.bfloat16, 0)
    found = tuning.measure(arena, problem, 4, clock=lambda: 1234)  # type: ignore[arg-type]
    assert found.finalists[:2] == (raced[7], raced[3])
    assert len(found.finalists) == tuning.FINALISTS
    assert all(isinstance(config, KernelConfig) for config in found.finalists)
    assert found.clocks == (1234, 1234)
    few = [raced[0], raced[7], raced[3]]  # no more than the finalists: no short race sorts them
    found = tuning.measure(arena, problem, 4, configs=few, clock=lambda: 1234)  # type: ignore[arg-type]
    assert found.finalists == (raced[7], raced[3], raced[0])


def test_a_peer_that_fails_elsewhere_does_not_race_here(
    fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.refused = {("peer", 2048, 4096, 1): "its process died"}
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert ["peer" in names for names in fakes.raced] == [True, False]
    assert "1 peer cells do not race" in _text(result)


def test_a_long_first_cell_says_nothing_about_the_next(fakes: Any, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.first_seconds = 60.0
    asked = ("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"), "--time-budget", "70")
    assert skinny(*asked).exit_code == 0
    assert len(fakes.cells) == 4
