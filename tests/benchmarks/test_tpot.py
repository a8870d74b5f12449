"""`benchmarks/tpot_vllm.py` without a GPU and without vLLM: groups, turns, budget, children that fail. The
children are small scripts that speak the protocol; all times are made up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skinny_core import device, env, family, plan
from skinny_lab.bench import engine_memory, rows
from skinny_lab.bench.engine_memory import Group, Load
from skinny_lab.bench.engine_process import EngineError, EngineProcess
from skinny_lab.bench.engine_turns import CUTE, STOCK, Record, Turns, must_be, order
from skinny_lab.bench.rows import OURS

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = plan.Environment(gpu="NVIDIA H200", driver="1", torch="2", commit="c", date="2026-01-01")
GB = 1_000_000_000

CHILD = """
import json, os, subprocess, sys, time
name, mode, trace = sys.argv[1:]
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
print("log of", name, flush=True)
def note(what):
    with open(trace, "a") as f:
        f.write(f"{name} {what}\\n")
note("start")
stem = {"skinny": "bf16_simt", "vllm_cute": "vllm_cute"}.get(name.split("/")[1])
state = {"active": [stem] if stem else [], "counters": {f"f/1/1/1/kernel:{stem}": 3} if stem else {}}
if mode == "dies at start":
    sys.exit(7)
if mode == "inactive":
    state = {"active": [], "counters": {}}
answers.write(json.dumps({"start_s": 1.0, **state}) + "\\n")
for line in sys.stdin:
    run = json.loads(line)["run"]
    note(f"run {run}")
    if mode == "dies later" and run:
        print("out of memory, it said", flush=True)
        os.kill(os.getpid(), 9)
    if mode == "garbage":
        answers.write("INFO 12-01 hello\\n")
    if mode == "error":
        answers.write(json.dumps({"error": "RuntimeError: too small"}) + "\\n")
    if mode == "silent":
        time.sleep(60)
    ms = {"stock": 5.0, "skinny": 4.0, "vllm_cute": 4.5}[name.split("/")[1]] + run / 100
    tpot = {c: {"p20": ms - 0.1, "p50": ms, "p80": ms + 0.1, "steps": 100} for c in ("1", "8")}
    answers.write(json.dumps({"tpot": tpot, **state}) + "\\n")
note("end")
"""

DRIVER = """
import os, signal, sys
from pathlib import Path
from skinny_core.plan import Environment
from skinny_lab.bench.engine_process import EngineProcess
from skinny_lab.bench.engine_turns import Group, Record, Turns
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
here = Path(sys.argv[1])
def start(model, arm):
    words = [sys.executable, "-S", str(here / "child.py"), f"{model}/{arm}", "silent", str(here / "trace")]
    return EngineProcess(model, words, os.environ, here / "log")
Turns(start, {"a": Record("a", here, Environment(), {})}, {"a": ["skinny"]}, {"a": 1.0}).run([Group(("a",), 1)])
"""


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tpot_vllm", ROOT / "benchmarks" / "tpot_vllm.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def child() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tpot_child", ROOT / "benchmarks" / "tpot_child.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stage:
    """Fake children and a driver for them. modes: (model, arm) -> how that child behaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modes, self.started = folder, dict[tuple[str, str], str](), list[EngineProcess]()
        self.script, self.trace, self.said = folder / "child.py", folder / "trace", list[str]()
        self.script.write_text(CHILD)

    def launch(self, model: str, arm: str) -> EngineProcess:
        name, mode = f"{model}/{arm}", self.modes.get((model, arm), "well")
        words = [sys.executable, "-S", str(self.script), name, mode, str(self.trace)]
        self.started.append(EngineProcess(name, words, os.environ, self.folder / "out" / f"log-{model}-{arm}.txt"))
        return self.started[-1]

    def turns(self, models: Mapping[str, list[str]], **more: Any) -> Turns:
        records = {m: Record(m, self.folder / "out", ENVIRONMENT, {"settings": "x"}) for m in models}
        return Turns(self.launch, records, models, dict.fromkeys(models, 1.0), say=self.said.append, **more)

    def seen(self, what: str = "run") -> list[str]:
        lines = [line.split(" ", 1) for line in self.trace.read_text().splitlines()]
        return [f"{name.split('/')[0]} {text[4:]} {name.split('/')[1]}" for name, text in lines if what in text]

    def rows(self, model: str) -> list[rows.Row]:
        return rows.read_csv(self.folder / "out" / f"tpot-{model}.csv")

    def record(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / f"tpot-{model}.json").read_text())
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for process in made.started:
        process.end(0.0)


# Memory


@pytest.mark.parametrize(
    ("model", "parameters"),  # of the published checkpoints
    [("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53),
     ("llama-3.1-8b", 8.03)],
)  # fmt: skip
def test_weights_follow_from_the_config(model: str, parameters: float) -> None:
    package = next(p for p in family.discover().packages if model in p.configs)
    assert engine_memory.weight_bytes(package, package.configs[model]) / 2e9 == pytest.approx(parameters, abs=0.006)


def test_two_engines_of_32_billion_fit_into_an_h200(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"]
    assert command.main(["--groups-only", "--models", *models, "--cute-models", "qwen3-8b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[1]) for line in lines if line[1] != "sum"] == [
        ("0", "qwen3-4b"), ("0", "qwen3-8b"), ("0", "llama-3.1-8b"), ("1", "qwen3-14b"), ("2", "qwen3-32b"),
        ("3", "qwen3-30b-a3b"),
    ]  # fmt: skip
    assert all(float(line[2]) < 150.1 * 0.97 for line in lines if line[1] == "sum")
    assert "turn" not in {word for line in lines for word in line}


def test_the_kv_cache_holds_every_request() -> None:
    package = next(p for p in family.discover().packages if "qwen3-8b" in p.configs)
    config = package.configs["qwen3-8b"]
    load = Load((1, 16), prompt=1000, output=100, slack=20)
    assert engine_memory.kv_bytes(config) == 36 * 2 * 8 * 128 * 2
    assert engine_memory.need(package, config, load).kv == 16 * 1120 * 147456


def test_groups_are_first_fit_in_the_order_given() -> None:
    needs = {"a": 20, "b": 40, "c": 30, "d": 15, "e": 60}
    arms = {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}
    assert engine_memory.groups(needs, arms, 130) == [
        Group(("a", "b"), 120), Group(("c", "d"), 90), Group(("e",), 120),
    ]  # fmt: skip
    assert [g.models for g in engine_memory.groups(needs, arms, 130, most=2)] == [
        ("a",),
        ("b",),
        ("c",),
        ("d",),
        ("e",),
    ]


def test_a_model_whose_arms_do_not_fit_together_is_alone_and_in_turn() -> None:
    found = engine_memory.groups({"a": 10, "big": 70, "c": 10}, {"a": 2, "big": 2, "c": 2}, 100)
    assert found == [Group(("a", "c"), 40), Group(("big",), 70, in_turn=True)]
    with pytest.raises(ValueError, match=r"big needs 0\.1 GB"):
        engine_memory.groups({"big": 101_000_000}, {"big": 2}, 100_000_000)


# Turns


def test_order_of_the_runs() -> None:
    two = [order([OURS, STOCK], run) for run in range(4)]
    assert two == [[OURS, STOCK], [STOCK, OURS], [STOCK, OURS], [OURS, STOCK]]
    assert ["".join(order("abc", run)) for run in range(6)] == ["abc", "cba", "bca", "acb", "cab", "bac"]
    for arms in ("ab", "abc"):
        firsts = [order(arms, run)[0] for run in range(2 * len(arms))]
        assert {firsts.count(arm) for arm in arms} == {2}


def test_all_start_at_once_and_one_decodes_at_a_time(stage: Stage) -> None:
    turns = stage.turns({"a": [OURS, STOCK, CUTE], "b": [OURS, STOCK]})
    turns.run([Group(("a", "b"), 1)])
    assert not turns.failures
    assert stage.seen() == [
        f"a 0 {OURS}", f"a 0 {STOCK}", f"a 0 {CUTE}", f"a 1 {CUTE}", f"a 1 {STOCK}", f"a 1 {OURS}",
        f"b 0 {OURS}", f"b 0 {STOCK}", f"b 1 {STOCK}", f"b 1 {OURS}",
    ]  # fmt: skip
    lines = stage.trace.read_text().splitlines()
    assert all("start" in line for line in lines[:5])
    assert all("end" in line for line in lines[-5:])
    assert stage.record("a")["order"][:2] == [f"0:{OURS}", f"0:{STOCK}"]
    assert stage.record("a")["settings"] == "x"


def test_rows_are_those_that_the_report_reads(stage: Stage) -> None:
    stage.turns({"a": [OURS, STOCK, CUTE]}).run([Group(("a",), 1)])
    found = rows.tpot(stage.rows("a"))
    at = {"stock_ms": 5.005, "skinny_ms": 4.005, "runs": 2}
    assert found == {"a": {"1": at, "8": at}}
    assert {r.provider for r in stage.rows("a")} == {OURS, STOCK, CUTE}
    assert len(stage.rows("a")) == 12
    assert any(f"{CUTE} 4.505 (-10.0 %)" in line for line in stage.said)


def test_in_turn_one_engine_is_loaded_and_kept_for_its_next_run(stage: Stage) -> None:
    stage.turns({"big": [OURS, STOCK]}).run([Group(("big",), 1, in_turn=True)])
    told = [" ".join(line.split()[0:2]).removeprefix("big/") for line in stage.trace.read_text().splitlines()]
    assert told == [
        "skinny start", "skinny run", "skinny end", "stock start", "stock run", "stock run", "stock end",
        "skinny start", "skinny run", "skinny end",
    ]  # fmt: skip


# Children that fail


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("dies at start", "a/stock ended with status 7"),
        ("garbage", "answered 'INFO 12-01 hello', which is no JSON object"),
        ("error", "failed: RuntimeError: too small"),
    ],
)
def test_a_child_that_fails_is_told_with_its_log_and_the_others_go_on(stage: Stage, mode: str, text: str) -> None:
    stage.modes["a", STOCK] = mode
    turns = stage.turns({"a": [OURS, STOCK], "b": [OURS, STOCK]})
    turns.run([Group(("a", "b"), 1)])
    assert len(turns.failures) == 1
    assert text in turns.failures[0]
    assert f"log of a/{STOCK}" in turns.failures[0]
    assert text in stage.record("a")["failure"]
    assert [line for line in stage.seen() if line.startswith("b")][-1] == f"b 1 {OURS}"
    assert all(process._process.returncode is not None for process in stage.started)


def test_what_was_measured_before_a_child_died_stays(stage: Stage) -> None:
    stage.modes["a", STOCK] = "dies later"
    turns = stage.turns({"a": [OURS, STOCK]})
    turns.run([Group(("a",), 1)])
    assert f"a/{STOCK} ended with status -9" in turns.failures[0]
    assert "out of memory, it said" in turns.failures[0]
    assert [(r.provider, r.m) for r in stage.rows("a")] == [(OURS, 1), (OURS, 8), (STOCK, 1), (STOCK, 8)]


def test_a_silent_child_is_ended_with_what_it_started(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "grandchild"
    text = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    process = EngineProcess("slow", [sys.executable, "-c", text], os.environ, tmp_path / "log")
    while not file.is_file() or not file.read_text():
        time.sleep(0.02)
    with pytest.raises(EngineError, match=r"slow gave no answer within 0 s"):
        process.answer(0.1)
    state = Path(f"/proc/{file.read_text()}/stat")
    ends = time.monotonic() + 5
    while state.exists() and ") Z " not in state.read_text() and time.monotonic() < ends:
        time.sleep(0.02)
    assert not state.exists() or ") Z " in state.read_text()


def test_a_death_is_seen_although_a_grandchild_holds_the_pipe(tmp_path: Path) -> None:
    text = "import subprocess, os; subprocess.Popen(['sleep', '60']); os._exit(3)"
    process = EngineProcess("gone", [sys.executable, "-c", text], os.environ, tmp_path / "log")
    with pytest.raises(EngineError, match="gone ended with status 3"):
        process.answer(20)


def test_a_driver_that_is_terminated_ends_its_children(stage: Stage) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(stage.folder)])
    try:
        ends = time.monotonic() + 30
        while not stage.trace.is_file() or not stage.seen():
            assert time.monotonic() < ends
            time.sleep(0.05)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=30) == 143
    finally:
        driver.kill()
    found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(stage.script).encode() in _read(p)]
    assert not found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("arm", "stems", "text"),
    [
        (STOCK, ["bf16_simt"], "active in the stock arm"),
        (OURS, [], "no kernel ran in the skinny arm"),
        (OURS, ["bf16_simt", CUTE], "vllm_cute ran in the skinny arm"),
        (CUTE, ["bf16_simt", CUTE], "bf16_simt ran in the vllm_cute arm"),
        (CUTE, [], "no kernel ran in the vllm_cute arm"),
    ],
)
def test_an_arm_in_which_something_else_runs_measures_nothing(arm: str, stems: list[str], text: str) -> None:
    counters = {f"qwen3/1/1/1/kernel:{stem}": 1 for stem in stems} | {"qwen3/1/1/1/fallback:refused": 9}
    with pytest.raises(EngineError, match=text):
        must_be(arm, {"active": stems, "counters": counters})


def test_an_arm_without_kernels_ends_its_model_before_it_is_measured(stage: Stage) -> None:
    stage.modes["a", OURS] = "inactive"
    turns = stage.turns({"a": [OURS, STOCK]})
    turns.run([Group(("a",), 1)])
    assert "no kernel ran" in turns.failures[0]
    assert not stage.seen()


def test_decode_has_to_run_as_a_users_does(command: ModuleType) -> None:
    found = {"active": [], "counters": {}, "cudagraph_mode": "FULL_DECODE_ONLY", "compilation_mode": "VLLM_COMPILE"}
    command.is_as_for_a_user(STOCK, found)
    for wrong in ({"cudagraph_mode": "NONE"}, {"compilation_mode": "NONE"}):
        with pytest.raises(EngineError, match="decode runs under"):
            command.is_as_for_a_user(STOCK, {**found, **wrong})


# Budget


class Clock:
    """Time that passes by a step at every look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_no_group_is_begun_that_would_not_end_in_time(stage: Stage) -> None:
    models = {m: [OURS, STOCK] for m in ("a", "long", "c")}
    turns = stage.turns(models, budget=100.0, clock=Clock(0.01), runs=1)
    turns.guess["long"] = 60.0
    turns.run([Group((m,), 1) for m in models])
    assert [line.split()[0] for line in stage.seen("start")] == ["a", "a", "c", "c"]
    assert turns.left_out == ["long"]
    assert any("long not begun" in line for line in stage.said)


def test_a_group_in_progress_is_cut_between_runs(stage: Stage) -> None:
    turns = stage.turns({"a": [OURS, STOCK], "b": [OURS, STOCK]}, budget=100.0, clock=Clock(5.0), runs=9)
    turns.run([Group(("a", "b"), 1)])
    per_run = [line.split()[1] for line in stage.seen() if line.startswith("a")]
    assert 1 <= len(set(per_run)) < 9
    assert {per_run.count(run) for run in per_run} == {2}, "a run is whole or not there"
    assert turns.left_out[-1] == "b from run 0 on"
    assert not turns.failures


# The child, as far as it needs no engine


def test_only_steps_in_which_every_request_decodes_count(child: ModuleType) -> None:
    at = [0.0]

    def tick(seconds: float, requests: int) -> tuple[float, int]:
        at[0] += seconds
        return at[0], requests

    ticks = [tick(9.0, n) for n in (1, 3, 4)] + [tick(0.005, 4) for _ in range(60)] + [tick(1.0, 2)]
    steps = child.full_steps(ticks, 4)
    assert len(steps) == 60 - child.SETTLE - child.TAIL
    assert steps == pytest.approx([0.005] * len(steps))
    found = child.percentiles([0.001 * i for i in range(100)])
    assert (found["p20"], found["p50"], found["p80"], found["steps"]) == pytest.approx((20.0, 49.5, 80.0, 100))


def test_the_environment_of_an_arm(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "cache=/tmp/c")
    env.reload()
    words = ["--out", str(tmp_path / "out"), "--cute-models", "qwen3-8b", "--concurrency", "8", "1", "2"]
    given = command.arguments(words)
    load = Load((1, 2, 8))
    package = given.packages["qwen3-8b"]
    needs = {"qwen3-8b": engine_memory.need(package, package.configs["qwen3-8b"], load)}
    key = device.product("h200")
    asked = {"key": {"capability": [9, 0], **{f: getattr(key, f) for f in ("sm_count", "l2_bytes", "memory_class")}}}
    jobs = command.Jobs(given, tmp_path, load, needs, asked, ENVIRONMENT)
    jobs.write_plan("qwen3-8b")
    cells = plan.load(jobs.plan_file("qwen3-8b")).cells
    ran = {(c.n, c.k, c.m) for c in cells if c.status == "reported"}
    assert (4096, 4096, 1) in ran
    assert {m for _, _, m in ran} <= {1, 2, 8}
    by_arm = {arm: jobs.variables("qwen3-8b", arm) for arm in (OURS, STOCK, CUTE)}
    assert by_arm[STOCK]["SKINNY"] == "off"
    assert by_arm[OURS]["SKINNY"] == "cache=/tmp/c"
    assert env.parse(by_arm[CUTE]["SKINNY"]) == env.Settings(
        plans=(str(jobs.plan_file("qwen3-8b")),), reported=True, cache="/tmp/c"
    )
    assert by_arm[OURS]["VLLM_CACHE_ROOT"] == by_arm[STOCK]["VLLM_CACHE_ROOT"] != by_arm[CUTE]["VLLM_CACHE_ROOT"]
    engine = command.engine_settings(tmp_path, load, needs["qwen3-8b"])
    assert engine["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 8]
    assert engine["kv_cache_memory_bytes"] == 8 * load.length * 147456
    env.settings.cache_clear()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--out is needed"),
        (["--out", "x", "--models", "nobody"], "unknown model nobody"),
        (["--out", "x", "--runs", "0"], "start at 1"),
        (["--out", "x", "--arms", "other"], "invalid choice"),
    ],
)
def test_wrong_use_says_what_is_wrong(
    command: ModuleType, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.arguments(words)
    assert text in capsys.readouterr().err


def test_a_model_too_large_for_the_device_is_told(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--groups-only", "--models", "qwen3-32b", "--memory-gb", "80"]) == 0
    assert "in turn" in capsys.readouterr().out
    assert command.main(["--groups-only", "--models", "qwen3-32b", "--memory-gb", "60"]) == 2
    assert "qwen3-32b needs" in capsys.readouterr().err
