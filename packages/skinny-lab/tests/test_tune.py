"""`skinny tune` without a GPU: the whole command with everything but the device and the clock. Times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import Result

from skinny_core import device, env, family, kernels, plan
from skinny_core.plan import Environment
from skinny_core.problem import DType, KernelConfig, Problem
from skinny_lab.bench import contestants, decode_step, machine, peers, prepare, race, tuning
from skinny_lab.bench.entrants import DEFAULT
from skinny_lab.bench.libraries import Peer
from skinny_lab.explain.target import RequestError
from skinny_lab.tune import order, request, result, run, steps
from skinny_lab.tune.store import Store, load

Skinny = Callable[..., Result]
H200 = device.product("h200")


class Fakes:
    """Stands for the device and the clock. speeds: microseconds by contestant or (N, contestant); others take 9, the
    baseline 10. steps: microseconds that a projection adds to the decode step, others take 1 off.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.cell_seconds, self.step_seconds = 1.0, 2.0
        self.first_seconds = 1.0
        self.rmse = 1.66e-3
        self.raced: list[set[str]] = []
        self.refused: dict[prepare.PeerJob, str] = {}
        self.speeds: dict[object, float] = {"cublas": 10.0, "peer": 9.5}
        self.steps: dict[str, float] = {}
        self.cells: list[tuple[int, int, int]] = []
        """(N, M, candidates) of each cell that was raced."""
        self.stepped: list[tuple[int, tuple[str, ...]]] = []
        self.large: set[int] = set()
        self.interrupt_at = 10**6
        self.others = 0
        self.mhz = [1980]
        self.complete = True
        self.spun = 0
        self.alive = True
        self.made = 0
        """Decode steps built."""
        self.no_room = 0
        """How many of the next ones do not fit."""

    def arena(self, n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> SimpleNamespace:
        if n in self.large:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(n=n, k=k, dtype=dtype)

    def check(
        self, arena: SimpleNamespace, problem: Problem, m: int, runs: Mapping[str, object], **options: object
    ) -> dict[str, float]:
        if len(self.cells) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.cells.append((problem.n, m, len(set(runs) - {"cublas", "peer"})))
        self.raced.append(set(runs))
        self.now += self.first_seconds if len(self.cells) == 1 else self.cell_seconds
        return dict.fromkeys(runs, self.rmse)

    def race(
        self, arena: SimpleNamespace, m: int, runs: Mapping[str, object], *, rounds: int, **options: object
    ) -> dict[str, race.Times]:
        times: dict[str, float] = {}
        for name in runs:
            for at in ((arena.n, m, name), (arena.n, m), (arena.n, name), name):
                if at in self.speeds and not (name in ("cublas", "peer") and at != name):
                    times[name] = self.speeds[at]
                    break
            else:
                times[name] = 9.0
        return {name: race.Times(t - 0.1, t, t + 0.1, rounds) for name, t in times.items()}

    def clock_rate(self, index: int = 0) -> int:
        return self.mhz.pop(0) if len(self.mhz) > 1 else self.mhz[0]

    def synchronize(self) -> None:
        if not self.alive:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def step(self) -> type:
        fakes = self

        class Step:
            """Of a model, with the config it is made of; or of links."""

            def __init__(self, made_of: Any, *rest: object, depth: int = 1, device: str = "") -> None:
                self.layers = decode_step.Dimensions.of(made_of).layers if isinstance(made_of, Mapping) else depth
                self.depth = depth
                fakes.made += 1
                if fakes.no_room:
                    fakes.no_room -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory")

            def at(self, m: int) -> Step:
                self.m = m
                return self

            def scale(self, name: str) -> float:
                return 1.0 if name == "lm_head" else self.layers / self.depth

            def compare(self, arms: Mapping[str, Mapping[str, object]], *, rounds: int) -> dict[str, float]:
                fakes.now += fakes.step_seconds
                names = {name: tuple(arm) for name, arm in arms.items()}
                fakes.stepped.append((self.m, tuple(n for group in names.values() for n in group)))
                return {
                    name: 100.0 + (fakes.steps.get(group[0], -1.0) if group else 0.0) for name, group in names.items()
                }

        return Step


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Patch the GPU, the compilers and the clock out."""
    found = Fakes()

    def spin(arena: object) -> None:
        found.spun += 1

    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    for name, value in {
        "empty_cache": lambda: None, "mem_get_info": lambda: (141 << 30, 141 << 30), "clock_rate": found.clock_rate,
        "synchronize": found.synchronize,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(machine, "gpu", lambda index=0: machine.Gpu(1980, 3201, "580.1", found.others))
    monkeypatch.setattr(machine, "checkout_commit", lambda: "abc")
    monkeypatch.setattr(race, "Arena", found.arena)
    monkeypatch.setattr(race, "race", found.race)
    monkeypatch.setattr(tuning, "check", found.check)
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(decode_step, "DecodeStep", found.step())
    monkeypatch.setattr(steps, "ChainStep", found.step())
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: [] if found.complete else list(jobs)[1:])
    made = lambda *args, **options: prepare.Prepared(complete=False, refused=found.refused)  # noqa: E731
    monkeypatch.setattr(prepare, "prepare", made)
    monkeypatch.setattr(run.memory, "spin", spin)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: found.now))
    peer = Peer("peer", lambda problem, m: None, lambda *_: lambda x, w, y: None, lambda *_: "", jit=True)
    monkeypatch.setattr(peers, "peer_maker", lambda folder=None: peers.Peers([peer]))
    return found


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    """Two shapes."""
    (tmp_path / "mine.csv").write_text("n,k,name\n4096,4096,a\n2048,4096,b\n")
    return str(tmp_path / "mine.csv")


def _plan(path: Path) -> dict[str, plan.Cell]:
    return {cell.id: cell for cell in plan.load(path).cells}


def _text(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_model_end_to_end(fakes: Fakes, skinny: Skinny) -> None:
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


def test_with_out_elsewhere_explain_needs_the_variable(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
    result = skinny("tune", "qwen3-8b", "-M", "1", "--out", str(tmp_path / "o.toml"), "--tp", "2")
    assert result.exit_code == 0, result.output
    assert set(_plan(tmp_path / "o.toml")) == {
        f"qwen3-8b-tp2/{name}/M1" for name in ("qkv", "o", "gate_up", "down", "lm_head")
    }
    assert f"SKINNY=plan={tmp_path}/o.toml skinny explain qwen3-8b --tp 2 -M 1" in _text(result)
    assert "M=1 5 of 5 projections" in _text(result)


def test_shapes_count_for_every_model_and_have_a_step_of_their_own(
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path
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


def test_a_capture_is_measured_at_the_m_that_it_saw(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
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


def test_only_what_passes_alone_takes_a_decode_step(fakes: Fakes, skinny: Skinny) -> None:
    fakes.speeds |= {(4096, 4): 9.9}
    assert skinny("tune", "qwen3-8b", "-M", "4").exit_code == 0
    assert [(m, sorted(names)) for m, names in fakes.stepped] == [(4, ["gate_up", "lm_head", "qkv"])]


def test_the_budget_ends_a_run_and_resume_goes_on(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
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


def test_a_decode_step_without_time_leaves_the_cells_open(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
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


def test_resuming_with_other_m_keeps_what_waits_for_its_step(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
    asked = ("tune", "qwen3-8b", "--out", str(tmp_path / "o.toml"))
    fakes.first_seconds = 6.0
    assert skinny(*asked, "-M", "4", "--time-budget", "14").exit_code == 3
    assert skinny(*asked, "-M", "1", "--resume").exit_code == 0
    assert (tmp_path / "o.toml.partial").exists()
    assert skinny(*asked, "-M", "1,4", "--resume").exit_code == 0
    assert len(fakes.cells) == 10
    assert {cell.status for cell in _plan(tmp_path / "o.toml").values()} == {"win"}
    assert not (tmp_path / "o.toml.partial").exists()


def test_ctrl_c_keeps_what_is_measured(fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
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
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_plan_is_not_overwritten(fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    out.write_text("mine")
    asked = ("tune", "--shapes", shapes, "-M", "1", "--out", str(out))
    for more in ((), ("--resume",)):
        assert "exists already" in _error(skinny(*asked, *more))
    assert "--resume and --force" in _error(skinny(*asked, "--resume", "--force"))
    assert (out.read_text(), fakes.cells) == ("mine", [])
    assert skinny(*asked, "--force").exit_code == 0
    assert len(_plan(out)) == 2


def test_out_of_memory_is_said_and_the_others_go_on(fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.large = {4096}
    result = skinny("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 1
    assert set(_plan(tmp_path / "o.toml")) == {"mine/b/M1", "mine/b/M2"}
    assert "not measured: mine/a/M1: out of memory: its rotating weights take" in _text(result)


def test_a_device_that_stops_answering_ends_the_run(
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_other_processes_and_clock_drift_are_told(fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
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


def test_what_no_kernel_accepts(fakes: Fakes, skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_what_is_not_compiled_in_time_does_not_race(fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path) -> None:
    fakes.complete = False
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert "compiling was cut short" in _text(result)
    assert {count for _, _, count in fakes.cells} == {1}


def test_a_smaller_m_that_is_slower_is_measured_again_with_the_larger_ones_config(
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path
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
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.speeds |= {(2048, 1): 0.05}
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert result.exit_code == 1
    assert set(_plan(tmp_path / "o.toml")) == {"mine/a/M1"}


def test_the_finalists_of_a_race_are_kept_fastest_first(fakes: Fakes) -> None:
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
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.refused = {("peer", 2048, 4096, 1): "its process died"}
    result = skinny("tune", "--shapes", shapes, "-M", "1", "--out", str(tmp_path / "o.toml"))
    assert ["peer" in names for names in fakes.raced] == [True, False]
    assert "1 peer cells do not race" in _text(result)


def test_a_long_first_cell_says_nothing_about_the_next(
    fakes: Fakes, skinny: Skinny, shapes: str, tmp_path: Path
) -> None:
    fakes.first_seconds = 60.0
    asked = ("tune", "--shapes", shapes, "-M", "1,2", "--out", str(tmp_path / "o.toml"), "--time-budget", "70")
    assert skinny(*asked).exit_code == 0
    assert len(fakes.cells) == 4


def test_several_models_are_measured_once_and_each_package_gets_its_cells(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_step_without_room_takes_that_of_the_others(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
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
