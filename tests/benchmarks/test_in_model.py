"""The race of whole arms in a decode step: what each arm calls, what the gate stops, what is written. A tiny step on
the CPU; kernels are torch calls that say their name, times are made up.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from skinny_core import device, family
from skinny_core.errors import KernelUnavailableError
from skinny_core.plan import Environment
from skinny_core.problem import Epilogue, KernelConfig, Problem
from skinny_lab.bench import contestants, decode_step, graph_step, limit, machine, prepare, race, rows

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "in_model.py"
MMA = "bf16_mma:warps=8:parts=2:loads=2:unroll=2"
OWNER = next(p for p in family.discover().packages if p.name == "qwen3")
TINY: dict[str, Any] = dict(OWNER.configs["qwen3-8b"]) | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 8,
}  # fmt: skip


class World:
    """The machine that the command believes in. log: kernels and side stream, as they are called. broken: epilogues
    whose kernel loses an eighth of K. missing: configs whose kernel does not compile."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: set[Epilogue] = set()
        self.missing: set[str] = set()
        self.races: list[tuple[str, ...]] = []
        self.replayed: list[str] = []

    def start(self, weight: torch.Tensor, bytes: int | None = None) -> int:
        self.log.append(f"start {bytes}")
        return bytes or 0

    def join(self) -> bool:
        self.log.append("join")
        return True

    def call_of(self, config: KernelConfig, problem: Problem, m: int) -> Callable[..., torch.Tensor]:
        if str(config) in self.missing:
            raise KernelUnavailableError("no DSL here", "install it")

        def call(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            self.log.append(f"{problem.epilogue.value} {problem.n}")
            x, w = x.double(), w.double()
            if problem.epilogue in self.broken:
                w = w.clone()
                w[:, : w.shape[1] // 8] = 0
            y = x @ w.T
            if problem.epilogue is Epilogue.SILU_MUL:
                gate, up = y.chunk(2, dim=1)
                y = functional.silu(gate) * up
            return (y if residual is None else y + residual.double()).to(torch.bfloat16)

        return call


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    def replay(arm: decode_step.Arm) -> float:
        gain = 10.0 * bool(arm.linears) + 5 * (arm.gated is not None) + 3 * bool(arm.added) + 2 * bool(arm.prefetch)
        made.replayed.append("step" if arm.head else "layers")
        return (900.0 if arm.head else 600.0) - gain

    def timed(arena: Any, m: int, runs: dict[str, Any], **options: Any) -> dict[str, race.Times]:
        made.races.append(tuple(runs))
        return {name: race.Times(1, 1.0 + ("warps=8" not in name), 2, 5) for name in runs}

    step = functools.partial(decode_step.DecodeStep, device="cpu", side=made)
    monkeypatch.setattr(decode_step, "DecodeStep", step)
    monkeypatch.setattr(decode_step.DecodeStep.func, "_capture", lambda self, arm: arm)
    monkeypatch.setattr(graph_step, "replay", replay)
    monkeypatch.setattr(device, "current_key", lambda: device.product("h200"))
    monkeypatch.setattr(machine, "environment", lambda *, commit: Environment(gpu="none", commit=commit))
    monkeypatch.setattr(prepare, "prepare", lambda jobs, peers, key, seconds: prepare.Prepared(compiled=len(jobs)))
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: list(jobs))
    monkeypatch.setattr(race, "Arena", lambda *a: None)
    monkeypatch.setattr(race, "race", timed)
    monkeypatch.setattr(contestants, "ours", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tiny = replace(OWNER, configs={"tiny": TINY})
    monkeypatch.setattr(family, "discover", lambda: family.Discovery((tiny,), ()))
    return made


@pytest.fixture
def in_model(world: World, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("in_model", COMMAND)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["in_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "call_of", world.call_of)
    return module


def _main(in_model: ModuleType, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = in_model.main(["--out", str(tmp_path), "--model", "tiny", "--rows", "2", "--config", MMA, *more])
    return code, {p.arm: p for p in rows.read_table(tmp_path / "in_model.csv", in_model.Point)}


QKV, OUT, GATE_UP, DOWN, HEAD = 128, 64, 192, 64, 128


def test_every_arm_calls_what_it_says(in_model: ModuleType, world: World) -> None:
    step = decode_step.DecodeStep(TINY, OWNER.projections(TINY, 1), 2)
    projections = {p.name: p for p in OWNER.projections(TINY, 1) if not p.part_of}
    entrants = [limit.Entrant.parse(MMA)]
    chosen = in_model.choose(step, projections, entrants, 2, device.product("h200"), print)
    arms = in_model.arms_of(chosen, projections, 2, ["0.001", "o=0.002"])
    called = {}
    for name, arm in arms.items():
        world.log.clear()
        step.run(arm)
        called[name] = list(world.log)
    plain = [f"none {n}" for n in (QKV, OUT, GATE_UP, DOWN)]
    fused = [f"none {QKV}", f"residual {OUT}", f"silu_mul {GATE_UP}", f"residual {DOWN}"]
    head = [f"none {HEAD}"]
    assert called["stock"] == []
    assert called["ours"] == called["ours again"] == plain * 4 + head
    assert called["gated"] == [plain[0], plain[1], fused[2], plain[3]] * 4 + head
    assert called["residual"] == [fused[0], fused[1], plain[2], fused[3]] * 4 + head
    for name, layer in (("prefetch", plain), ("all", fused)):
        every = [entry for call in layer * 4 for entry in (call, "start 1000", "join")]
        assert called[f"{name} 0.001"] == every + head
        one = [layer[0], "start 2000", "join", *layer[1:]]
        assert called[f"{name} o=0.002"] == one * 4 + head


def test_a_run_from_the_command_line(
    in_model: ModuleType, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, points = _main(in_model, tmp_path, "--prefetch", "8", "o=33", "--commit", "abc")
    assert code == 0
    assert list(points) == [
        "stock", "ours", "ours again", "gated", "residual", "prefetch 8", "prefetch o=33", "all 8", "all o=33",
    ]  # fmt: skip
    assert {name: p.step_us for name, p in points.items() if p.step_us < 890} == {
        "gated": 885, "residual": 887, "prefetch 8": 888, "prefetch o=33": 888, "all 8": 880, "all o=33": 880,
    }  # fmt: skip
    assert points["stock"].layer_us == 150
    assert points["ours"].layer_us == 147.5
    assert points["stock"].rel_rmse == 0
    assert 0 < points["gated"].rel_rmse < points["gated"].allowed < 0.05
    assert points["ours"].rounds == 15
    assert (points["ours"].device, points["ours"].commit, points["ours"].m) == ("none", "abc", 2)
    assert "qkv=bf16_mma(" in points["ours"].configs
    assert points["stock"].configs == ""
    assert len(world.replayed) == 15 * 2 * len(points), "both forms of every arm in every round"
    assert world.races == [], "nothing to choose from"
    out = capsys.readouterr().out
    assert "    -2.50    +0.00" in out
    assert "all o=33" in out


def test_the_fastest_of_several_configs_and_no_epilogue_where_none_can(
    in_model: ModuleType, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = "bf16_mma:warps=4,8:parts=2:loads=2:unroll=2", "bf16_simt:threads=64:rows=2:chunks=1"
    code, points = _main(in_model, tmp_path, "--config", *several, "--prefetch")
    assert code == 0
    assert len(world.races) == 5
    assert all(len(names) > 1 for names in world.races)
    assert "qkv=bf16_mma(ahead=1, blocks=1, loads=2" in points["ours"].configs
    assert "warps=4" not in points["ours"].configs
    world.races.clear()
    _, points = _main(in_model, tmp_path, "--config", several[1], "--prefetch")
    assert list(points) == ["stock", "ours", "ours again", "residual"], "bf16_simt has no gated product"
    assert "gate_up: no config with silu_mul" in capsys.readouterr().out


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.RESIDUAL])
def test_a_kernel_that_is_wrong_alone_is_in_no_arm(
    in_model: ModuleType, world: World, tmp_path: Path, epilogue: Epilogue, capsys: pytest.CaptureFixture[str]
) -> None:
    world.broken.add(epilogue)
    code, points = _main(in_model, tmp_path, "--prefetch")
    assert code == 0
    gone = {Epilogue.SILU_MUL: "gated", Epilogue.RESIDUAL: "residual"}[epilogue]
    assert gone not in points
    assert "is wrong, rel-RMSE" in capsys.readouterr().out


def test_the_gate_stops_an_arm_that_is_wrong_in_the_step(
    in_model: ModuleType,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(in_model, "_right", lambda *a: True)
    world.broken.add(Epilogue.SILU_MUL)
    code, points = _main(in_model, tmp_path, "--prefetch", "8")
    assert code == 1
    assert [name for name, p in points.items() if p.status == "wrong"] == ["gated", "all 8"]
    wrong = points["gated"]
    assert (wrong.step_us, wrong.layer_us, wrong.rounds) == (None, None, 0)
    assert wrong.rel_rmse > wrong.allowed
    assert points["prefetch 8"].step_us == 888
    assert capsys.readouterr().out.count("WRONG") == 2


def test_nan_is_wrong_and_a_stock_step_of_nan_ends_the_run(in_model: ModuleType, tmp_path: Path) -> None:
    step = decode_step.DecodeStep(TINY, OWNER.projections(TINY, 1), 1)
    nothing = decode_step.Arm({"o": lambda x, w: torch.full((1, OUT), float("nan"), dtype=x.dtype)})
    errors, _ = in_model.gate(step, {"stock": decode_step.Arm(), "nan": nothing})
    assert errors["nan"] == float("inf")
    step.x.fill_(float("nan"))
    with pytest.raises(SystemExit, match="no usable logits"):
        in_model.gate(step, {"stock": decode_step.Arm()})


def test_a_config_that_does_not_run_leaves_stock(
    in_model: ModuleType, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.missing = {str(limit.Entrant.parse(MMA).configs(Problem(n=64, k=64), 2)[0])}
    code, points = _main(in_model, tmp_path, "--prefetch")
    assert (code, list(points)) == (0, ["stock", "ours", "ours again"])
    assert "does not run: no DSL here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--config", "bf16_mma:warps"), "write a kernel"),
        (("--prefetch", "v=8"), "a step has"),
        (("--prefetch", "much"), "much"),
        (("--model", "none"), "unknown model"),
        (("--rounds", "3"), "fewer than 15"),
    ],
)
def test_bad_arguments(
    in_model: ModuleType, tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _main(in_model, tmp_path, *arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_what_is_compiled_before_the_first_step(in_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(prepare, "prepare", lambda found, *a, **k: jobs.extend(found) or prepare.Prepared())
    big = {p.name: p for p in OWNER.projections(OWNER.configs["qwen3-8b"], 1) if not p.part_of}
    in_model.prepare_all(big, [limit.Entrant.parse(MMA)], [1, 4], device.product("h200"))
    kinds = {(problem.epilogue, m) for _, problem, m in jobs}
    assert kinds == {(e, m) for e in (Epilogue.NONE, Epilogue.SILU_MUL, Epilogue.RESIDUAL) for m in (1, 4)}
