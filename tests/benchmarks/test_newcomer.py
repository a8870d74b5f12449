"""A model nobody tuned: how texts are compared, what a failure leaves behind, and the whole run on a tiny random model
on the CPU, where every call must fall back."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from skinny_core import env, kernels, plan
from skinny_lab import capture, smollm2
from skinny_lab.bench import generation
from skinny_lab.capture import request, transformers_host

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "newcomer.py"
SHAPES = {(128, 128), (64, 128), (256, 128), (128, 256), (320, 128)}
END = 2


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("newcomer", COMMAND)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "newcomer", module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("SKINNY", "on")
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    monkeypatch.undo()
    env.reload()


@pytest.fixture
def chat() -> Any:
    """What `smollm2.load` gives, with a random model; prompts of 20 to 23 ids."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=320, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)

    def encode(question: str) -> torch.Tensor:
        length = 20 + len(question) % 4
        return torch.tensor([[(i * 37 + sum(question.encode())) % 317 + 3 for i in range(length)]])

    return SimpleNamespace(
        model=model, encode=encode, source="random", tokenizer=SimpleNamespace(eos_token_id=END)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "first", "equal", "before"),
    [
        ([1, 2, 3], [1, 2, 3], None, 1.0, 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1, 0.75, 0.25),
        ([1, 2], [1, 2, 3, 4], 2, 0.5, 0.5),
        ([5], [6], 0, 0.0, 0.0),
    ],
)
def test_equal_tokens_are_a_share_of_the_longer_text(
    one: list[int], other: list[int], first: int | None, equal: float, before: float
) -> None:
    assert generation.first_difference(one, other) == first
    assert generation.shares(one, other) == generation.shares(other, one) == (equal, before)


def test_a_text_ends_with_the_end_of_the_turn() -> None:
    assert generation.ended([5, END, 7, END], END) == [5, END]
    assert generation.ended([5, 7], END) == [5, 7]
    assert generation.ended([5, END], None) == [5, END]


@pytest.mark.parametrize("value", [1.0, -15.9, 0.3, 1e-3, 200.0])
def test_a_bf16_step_is_the_distance_of_neighbours(value: float) -> None:
    x = torch.tensor(abs(value)).bfloat16()
    bits = x.view(torch.int16)
    assert generation.bf16_step(float(x)) == generation.bf16_step(-float(x))
    assert float((bits + 1).view(torch.bfloat16)) - float(x) == generation.bf16_step(float(x))


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = generation.padded([torch.tensor([[7, 8, 9]]), torch.tensor([[5]])])
    assert ids.tolist() == [[7, 8, 9], [generation.PAD, generation.PAD, 5]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def greedy(logits: torch.Tensor) -> generation.Greedy:
    return logits.argmax(-1).tolist(), logits


def made(gap: float = 0.0) -> tuple[generation.Greedy, generation.Greedy, torch.Tensor]:
    """Two rows of four steps over 300 tokens, each arm with its own noise of deviation 0.01 around `exact`; in row 1
    at step 2 stock is ahead by `gap` with token 10, ours with token 11."""
    draw = torch.Generator().manual_seed(3)
    exact = torch.randn(2, 4, 300, generator=draw)
    exact[..., 20] = 12.0  # the token everywhere else
    stock, ours = (exact + 0.01 * torch.randn(exact.shape, generator=draw) for _ in range(2))
    if gap:
        stock[1, 2, 10], stock[1, 2, 11] = 14.0 + gap, 14.0
        ours[1, 2, 10], ours[1, 2, 11] = 14.0, 14.0 + gap
        exact[1, 2, 10] = exact[1, 2, 11] = 14.0 + gap / 2
        ours[1, 3] = 100.0  # another context: says nothing about the arms
    return greedy(stock), greedy(ours), exact


def test_equal_texts_have_no_difference() -> None:
    found = generation.compare(*made(), end=None)
    assert (found["rows_equal"], found["tokens_equal"], found["differences"]) == (2, 1.0, [])
    assert found["near_ties_only"]
    assert 0 < found["apart"] < found["allowed"]
    assert found["noise_stock"] == pytest.approx(found["noise_skinny"], rel=0.1)


@pytest.mark.parametrize(("gap", "near"), [(0.03, True), (0.5, False)])
def test_a_difference_is_weighed_by_its_gap(gap: float, near: bool) -> None:
    found = generation.compare(*made(gap), end=None)
    assert [d["row"] for d in found["differences"]] == [1]
    difference = found["differences"][0]
    assert (difference["position"], difference["stock"], difference["skinny"]) == (2, 10, 11)
    assert difference["gap"] == pytest.approx(gap, abs=1e-5)
    assert difference["gap_bf16_steps"] == pytest.approx(gap / 0.0625, abs=1e-3)
    assert found["near_ties_only"] is near
    assert found["tokens_equal"] == pytest.approx((4 + 2) / 8)
    assert found["tokens_before_a_difference"] == pytest.approx((4 + 2) / 8)
    assert found["apart"] < 0.1  # the step after the difference is not looked at


def test_what_follows_the_end_of_a_turn_is_not_compared() -> None:
    stock, ours, exact = made(0.5)
    stock[0][1][1] = ours[0][1][1] = END
    found = generation.compare(stock, ours, exact, end=END)
    assert found["rows_equal"] == 2
    assert [row["tokens"] for row in found["rows"]] == [4, 2]


def test_findings_survive_a_later_failure(newcomer: ModuleType, tmp_path: Path) -> None:
    found = newcomer.Findings(tmp_path / "out" / "newcomer.json", dry_run=True)
    with found.step("first"):
        found.add("text", {"batch": 1})
    assert found.ok
    with found.step("second"):
        raise RuntimeError("device lost")
    with found.step("third"):
        found.add("step", {"m": 1})
    read = json.loads(found.file.read_text())
    assert (read["text"], read["step"]) == ([{"batch": 1}], [{"m": 1}])
    assert read["failed"] == {"second": "RuntimeError: device lost"}
    assert not found.ok
    assert [file.name for file in found.file.parent.iterdir()] == ["newcomer.json"]


def test_a_failed_write_leaves_the_old_file(
    newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = newcomer.Findings(tmp_path / "newcomer.json", dry_run=True)
    found.put("model", "one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            found.put("model", "two")
    assert json.loads(found.file.read_text())["model"] == "one"
    assert [file.name for file in tmp_path.iterdir()] == ["newcomer.json"]


def fake_python(folder: Path, body: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_a_command_that_takes_too_long_is_interrupted_and_may_save(
    newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "trap 'echo saved; exit 3' INT; echo \"$@\"; while :; do sleep 0.05; done"
    monkeypatch.setattr(newcomer.sys, "executable", fake_python(tmp_path, body))
    ran = newcomer.command(["tune", "--out", "p"], tmp_path, 0.5)
    assert (ran["command"], ran["status"]) == ("skinny tune --out p", 3)
    assert ran["said"] == ["-m skinny_lab tune --out p", "saved"]


def test_a_tune_without_a_plan_ends_the_run(
    newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer.sys, "executable", fake_python(tmp_path, "echo no device; exit 2"))
    monkeypatch.setattr(newcomer.torch.cuda, "is_available", lambda: True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "capture.json").write_text("of an earlier run")
    assert newcomer.main(["--out", str(tmp_path / "out")]) == 1
    read = json.loads((tmp_path / "out" / "newcomer.json").read_text())
    assert read["capture"]["said"] == ["no device"]
    assert read["checks"] == {"skinny capture ended with 0": False}


def test_a_made_up_plan_is_a_plan(newcomer: ModuleType, tmp_path: Path) -> None:
    plan.dump(newcomer.stub_plan({(576, 576): {1, 2, 16}, (49152, 576): {1}}), tmp_path / "p.toml")
    cells = plan.load(tmp_path / "p.toml").cells
    assert [(c.n, c.k, c.m, c.status) for c in cells] == [
        (576, 576, 1, "win"), (576, 576, 2, "win"), (49152, 576, 1, "win"),
    ]  # fmt: skip


def test_the_environment_keeps_its_cache(newcomer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "cache=/tmp/somewhere,plan=old.toml")
    newcomer.use(Path("/new.toml"))
    assert (env.settings().cache, env.settings().plans) == ("/tmp/somewhere", ("/new.toml",))


def recorded(newcomer: ModuleType, chat: Any) -> Any:
    """`newcomer.record`, of the tiny model and in this process."""

    def record(out: Path, found: Any, scale: Any) -> Path:
        asked = request.Request(model="tiny", new_tokens=3, batches=scale.ms)
        seen = transformers_host.record(asked, chat.model, chat.encode("x"))  # 21 tokens
        capture.write(seen, out / "capture.json", force=True)
        shapes = [[n, k, sorted(ms)] for (n, k), ms in seen.shapes(phase="decode").items()]
        found.put("capture", {"status": 0, "seconds": 1.0, "records": len(seen.records), "decode_shapes": shapes})
        return out / "capture.json"

    return record


def test_the_whole_dry_run(
    newcomer: ModuleType, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newcomer, "record", recorded(newcomer, chat))
    monkeypatch.setattr(smollm2, "load", lambda device: chat)
    status = newcomer.main(["--out", str(tmp_path / "out"), "--dry-run", "--commit", "abc"])
    said = capsys.readouterr().out
    assert status == 0, said
    read = json.loads((tmp_path / "out" / "newcomer.json").read_text())
    assert (read["environment"]["commit"], read["failed"]) == ("abc", {})
    assert [t["batch"] for t in read["text"]] == [e["batch"] for e in read["eager"]] == [1, 2]
    assert [s["m"] for s in read["step"]] == [1, 2]
    assert {(t["rows_equal"], t["apart"], t["kernels"]) for t in read["text"]} == {(1, 0.0, 0), (2, 0.0, 0)}
    assert all(call.endswith("fallback:not_cuda") for t in read["text"] for call in t["calls"])
    assert {tuple(s[:2]) for s in read["capture"]["decode_shapes"]} == SHAPES
    assert len(plan.load(tmp_path / "out" / "plan.toml").cells) == 2 * len(SHAPES)
    lines = said.splitlines()
    assert "its times mean nothing" in said
    assert json.loads(lines[-1]) == {"checks": len(read["checks"]), "held": len(read["checks"])}
    assert type(chat.model.lm_head) is torch.nn.Linear  # uninstalled


def run(newcomer: ModuleType, chat: Any, folder: Path, wins: dict[Any, Any]) -> Any:
    found = newcomer.Findings(folder / "newcomer.json", dry_run=False)
    generation.never_end(chat.model)
    newcomer.texts(chat, found, newcomer.DRY, wins)
    newcomer.steps(chat, found, newcomer.DRY, wins)
    return found


def test_kernels_that_do_not_run_are_noticed(newcomer: ModuleType, chat: Any, tmp_path: Path) -> None:
    cell = newcomer.stub_plan({(256, 128): {1}}).cells[0]
    found = run(newcomer, chat, tmp_path, {(256, 128, 1): cell})
    broken = sorted(name for name, held in found.data["checks"].items() if not held)
    assert broken == [
        "step at M = 1: 4 kernel calls in the captured step",
        "text at batch 1: at least 16 kernel calls",  # gate and up of two layers, four decode steps
    ]
    assert found.data["step"][0]["predicted_saving_us"] == 4.0


def test_a_wrong_result_is_noticed(
    newcomer: ModuleType, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generation.installed

    @contextmanager
    def wrong(model: Any, arm: str) -> Iterator[Any]:
        weight = model.model.layers[1].mlp.down_proj.weight
        before = weight.clone()
        with real(model, arm) as report:
            if arm == "skinny":
                weight[:, ::4] = 0.0
            yield report
            weight.copy_(before)

    monkeypatch.setattr(generation, "installed", wrong)
    monkeypatch.setattr(chat.model.lm_head, "weight", torch.nn.Parameter(chat.model.lm_head.weight * 8, False))
    found = run(newcomer, chat, tmp_path, {})
    broken = [name for name, held in found.data["checks"].items() if not held]
    assert sum("logits are" in name for name in broken) == 4  # batches 1 and 2, steps of 1 and 2
    assert not found.ok


def test_the_table_shows_what_is_there(newcomer: ModuleType) -> None:
    text = {"batch": 4, "rows_equal": 3, "tokens_equal": 0.915, "differences": [{"gap_bf16_steps": 0.5}], "kernels": 9}
    us = {"p20": 700.0, "p50": 710.0, "p80": 720.0}
    step = {
        "m": 4, "graph": True, "us": {"stock": us, "skinny": us}, "gain": 1.0, "saving_us": 0.0, "kernels": 91,
        "predicted_saving_us": 12.5, "tokens_equal": 1.0,
    }  # fmt: skip
    data = {"environment": {"gpu": "NVIDIA H200"}, "dry_run": False, "text": [text], "eager": [], "step": [step]}
    data["tune"] = {"status": 3, "seconds": 151.2, "cells": {"win": 20, "refused": 9}}
    shown = newcomer.table(data)
    assert "smollm2-135m on NVIDIA H200" in shown
    assert "tune: status 3 after 151.2 s, 20 win, 9 refused" in shown
    assert "3 of 4" in shown
    assert "0.50 bf16" in shown
    assert "one CUDA graph" in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("arguments", [[], ["--dry-run", "--out", "a,b"], ["--out", "a,b"]])
def test_what_cannot_be_run_is_said_at_once(newcomer: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        newcomer.main(arguments)
    assert ended.value.code == 2


def test_a_run_without_the_main_kernels_does_not_begin(
    newcomer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.get("bf16_mma"), "availability", lambda: (False, "no module tvm_ffi"), raising=False)
    with pytest.raises(SystemExit) as ended:
        newcomer.main(["--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "would leave kernels out: bf16_mma: no module tvm_ffi" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
