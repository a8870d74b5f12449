"""What a decode step calls, in which order, and what comes out: on the CPU, at a size where nothing takes long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from skinny_core import family
from skinny_lab.bench import decode_step, graph_step
from skinny_lab.bench.decode_step import LAYERS, PROJECTIONS, Arm, DecodeStep

PACKAGE = next(p for p in family.discover().packages if p.name == "qwen3")
TINY: dict[str, Any] = dict(PACKAGE.configs["qwen3-8b"]) | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 8,
}  # fmt: skip


class Side:
    """A side stream that writes down what it is asked for, with the places of the weights in the step."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.names: dict[int, str] = {}

    def start(self, weight: torch.Tensor, bytes: int | None = None) -> int:
        self.log.append(f"start {self.names[weight.data_ptr()]} {bytes}")
        return bytes or 0

    def join(self) -> bool:
        self.log.append("join")
        return True


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def step(log: list[str], monkeypatch: pytest.MonkeyPatch) -> DecodeStep:
    """A tiny step on the CPU; every linear, ours or torch's, appends the name of its weight to the log."""
    side = Side(log)
    made = DecodeStep(TINY, PACKAGE.projections(TINY, 1), 3, device="cpu", side=side)
    names = {w.data_ptr(): f"{name}.{i}" for i, layer in enumerate(made.layers) for name, w in layer.items()}
    side.names = {**names, made.lm_head.data_ptr(): "lm_head"}
    linear = functional.linear

    def noted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        log.append(side.names.get(w.data_ptr(), "copy"))
        return linear(x, w)

    monkeypatch.setattr(functional, "linear", noted)
    return made


def _ours(log: list[str], step: DecodeStep) -> dict[str, decode_step.Linear]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, w)
        log[-1] = f"ours {log[-1]}"
        return y

    return dict.fromkeys(PROJECTIONS, call)


def _gated(log: list[str]) -> decode_step.Linear:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x.float(), w.float()).chunk(2, dim=1)
        log[-1] = "gated"
        return (functional.silu(gate) * up).to(x.dtype)

    return call


def _added(log: list[str]) -> decode_step.Added:
    def call(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x.float(), w.float()) + residual.float()
        log[-1] = "added"
        return y.to(x.dtype)

    return call


def _layer(i: int) -> list[str]:
    return [f"{name}.{i}" for name in PROJECTIONS[:-1]]


def test_stock_calls_every_projection_once_in_order(step: DecodeStep, log: list[str]) -> None:
    logits = step.run(Arm())
    assert log == [*_layer(0), *_layer(1), *_layer(2), *_layer(3), "lm_head"]
    assert (logits.shape, logits.dtype) == ((3, 128), torch.bfloat16)
    assert torch.equal(step.run({}), logits), "a mapping of linears is an arm"


def test_the_step_is_what_it_was(step: DecodeStep) -> None:
    """Against the plain formula: the arms' seams change no bit of stock."""
    s, h = step.size, step.x
    for i, w in enumerate(step.layers):
        a = functional.rms_norm(h, (s.hidden,), step.norm)
        q = functional.linear(a, w["qkv"])[:, : s.heads * s.head_dim].view(3, s.heads, 1, s.head_dim)
        o = functional.scaled_dot_product_attention(q, step.keys[i], step.values[i], enable_gqa=True)
        h = h + functional.linear(o.reshape(3, -1), w["o"])
        gate_up = functional.linear(functional.rms_norm(h, (s.hidden,), step.norm), w["gate_up"])
        h = h + functional.linear(functional.silu(gate_up[:, :96]) * gate_up[:, 96:], w["down"])
    logits = functional.linear(functional.rms_norm(h, (s.hidden,), step.norm), step.lm_head)
    assert torch.equal(step.run(Arm()), logits)
    assert torch.equal(step.run(Arm(head=False)), h)


def test_an_arm_replaces_what_it_names(step: DecodeStep, log: list[str]) -> None:
    linears = _ours(log, step)
    step.run({"o": linears["o"], "lm_head": linears["lm_head"]})
    assert log == [n if "o." not in n else f"ours {n}" for i in range(LAYERS) for n in _layer(i)] + ["ours lm_head"]
    log.clear()
    step.run(Arm(linears, gated=_gated(log), added={"o": _added(log)}))
    layers = [n for i in range(LAYERS) for n in (f"ours qkv.{i}", "added", "gated", f"ours down.{i}")]
    assert log == [*layers, "ours lm_head"]


def test_every_kind_of_arm_computes_the_same(step: DecodeStep, log: list[str]) -> None:
    exact = step.exact().double()
    stock = step.run(Arm()).double()
    noise = (stock - exact).norm() / exact.norm()
    assert 1e-3 < noise < 3e-2
    added = dict.fromkeys(("o", "down"), _added(log))
    for arm in (Arm(gated=_gated(log)), Arm(added=added), Arm(gated=_gated(log), added=added)):
        assert 0 < (step.run(arm).double() - stock).norm() / stock.norm() < 2 * noise


def test_prefetch_starts_behind_one_gemm_and_is_joined_before_the_next(step: DecodeStep, log: list[str]) -> None:
    step.run(Arm(prefetch={"o": 100, "qkv": 50, "lm_head": 7, "down": 0}))
    expected = []
    for i in range(LAYERS):
        expected += [f"qkv.{i}", f"start o.{i} 100", "join", f"o.{i}", f"gate_up.{i}", f"down.{i}"]
        expected += [f"start qkv.{i + 1} 50", "join"] if i + 1 < LAYERS else ["start lm_head 7", "join"]
    assert log == [*expected, "lm_head"]


def test_nothing_is_left_unjoined_without_a_head(step: DecodeStep, log: list[str]) -> None:
    step.run(Arm(prefetch=dict.fromkeys(PROJECTIONS, 16), head=False))
    assert log[-4:] == ["gate_up.3", "start down.3 16", "join", "down.3"]
    assert sum(entry.startswith("start") for entry in log) == log.count("join") == 4 * LAYERS - 1


@pytest.mark.parametrize("wrong", [{"linears": {"v": None}}, {"added": {"qkv": None}}, {"prefetch": {"gate": 1}}])
def test_names_that_a_step_does_not_have(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="a step has"):
        Arm(**wrong)


def test_all_arms_run_in_every_round_and_each_starts_one(step: DecodeStep, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []
    costs = {"stock": 900.0, "ours": 800.0, "layers": 600.0}

    def replay(arm: Arm) -> float:
        name = "layers" if not arm.head else "ours" if arm.linears else "stock"
        replayed.append(name)
        return costs[name] + len(replayed) % 2

    monkeypatch.setattr(step, "_capture", decode_step._arm)
    monkeypatch.setattr(graph_step, "replay", replay)
    arms = {"stock": {}, "ours": {"o": functional.linear}, "layers": Arm(head=False)}
    found = step.times(arms, rounds=6)
    assert {name: round(t.p50) for name, t in found.items()} == {"stock": 900, "ours": 800, "layers": 600}
    turns = [replayed[i : i + 3] for i in range(0, 18, 3)]
    assert [turn[0] for turn in turns] == ["stock", "ours", "layers"] * 2
    assert all(sorted(turn) == sorted(arms) for turn in turns)
    assert step.compare(arms, rounds=6).keys() == arms.keys()


def test_fused_calls_between_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda f, *, dynamic: fused.append(f.__name__) or f)
    made = DecodeStep(TINY, PACKAGE.projections(TINY, 1), 1, device="cpu", compiled=True)
    assert fused == ["_norm", "_add_norm", "_silu_mul"]
    assert made.run(Arm()).isfinite().all()
