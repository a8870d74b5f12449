"""What is recorded of small torch models, and what the command says before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import Result

from skinny_lab import capture
from skinny_lab.capture import Record, products, request, transformers_host
from skinny_lab.capture.tally import Tally
from skinny_lab.explain.target import RequestError

Skinny = Callable[..., Result]
BF16 = torch.bfloat16


def recorded(model: nn.Module, *calls: Tensor, context: Any = torch.no_grad) -> tuple[list[Record], tuple[str, ...]]:
    tally = Tally()
    with context(), products.recording(model, tally):
        for x in calls:
            tally.step(1, 1)
            model(x)
    return list(tally.records()), tally.notes()


def briefly(records: list[Record]) -> list[tuple[object, ...]]:
    return [(r.layer, r.n, r.k, r.m, r.bias) for r in records]


class Block(nn.Module):
    """A fused weight multiplied by hand, a product of two activations, a module whose weight its parent uses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.gate_up = nn.Parameter(torch.randn(64, 16))
        self.down = nn.Linear(32, 16)
        self.router = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + (q @ k.mT).softmax(-1) @ v
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, -1)
        y = self.down(gate * up)
        return y * nn.functional.linear(x, self.router.weight).sum(-1, keepdim=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_products_with_weights_are_recorded_and_others_are_not(context: Any) -> None:
    model = nn.Sequential(Block(), Block()).to(BF16)
    records, notes = recorded(model, torch.randn(1, 5, 16).to(BF16), context=context)
    assert briefly(records) == [
        ("*.qkv", 48, 16, 5, False),
        ("*.gate_up", 64, 16, 5, False),
        ("*.down", 16, 32, 5, True),
        ("*.router", 4, 16, 5, False),
    ]
    assert {(r.layers, r.calls, r.activation, r.weight, r.output) for r in records} == {(2, 2, "bf16", "bf16", "bf16")}
    assert notes == ()


@pytest.mark.parametrize(
    ("x", "m"),
    [
        (torch.randn(16), 1),
        (torch.randn(1, 16), 1),
        (torch.randn(2, 3, 16), 6),
        (torch.randn(4, 3, 16)[::2], 6),
        (torch.randn(2, 3, 16)[:, -1:], 2),
        (torch.randn(0, 16), 0),
    ],
    ids=["vector", "row", "batch", "strided", "last", "empty"],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_m_is_the_product_of_the_leading_dimensions(x: Tensor, m: int, bias: bool, trained: bool) -> None:
    """torch folds other activations for a weight that requires a gradient, even where none is computed."""
    records, _ = recorded(nn.Sequential(nn.Linear(16, 8, bias=bias)).requires_grad_(trained), x)
    assert briefly(records) == ([("*", 8, 16, m, bias)] if m else [])


def test_a_weight_times_columns_and_a_weight_times_a_vector() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight @ x

    model = nn.Sequential(Columns())
    records, _ = recorded(model, torch.randn(16, 3), torch.randn(16))
    assert briefly(records) == [("*", 8, 16, 1, False), ("*", 8, 16, 3, False)]


def test_a_weight_that_is_stored_the_other_way_is_noted() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    records, notes = recorded(nn.Sequential(Conv1D()), torch.randn(3, 16))
    assert briefly(records) == [("*", 8, 16, 3, True)]
    assert "[K, N]" in notes[0]


def test_a_tied_head_goes_by_its_own_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm_head(self.embed(ids))

    records, _ = recorded(Tied(), torch.tensor([[1, 2, 3]]))
    assert briefly(records) == [("lm_head", 32, 16, 3, False)]


def test_products_of_another_kind_are_noted() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(4, 16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x.expand(4, -1, -1), self.experts)

    records, notes = recorded(nn.Sequential(Experts()), torch.randn(1, 3, 16))
    assert records == []
    assert "bmm on * (experts)" in notes[0]


def test_a_new_activation_where_a_weight_was_is_no_weight() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    recorder = products._Recorder(model, Tally())
    old = model[0].weight.data
    assert recorder.owner(old) is not None
    model[0].weight = nn.Parameter(torch.randn(16, 16))
    assert recorder.owner(old) is None


def test_nothing_stays_behind_and_results_are_the_same() -> None:
    model = nn.Sequential(Block()).to(BF16)
    x = torch.randn(1, 3, 16).to(BF16)
    expected = model(x)
    tally = Tally()
    with products.recording(model, tally):
        assert torch.equal(model(x), expected)
    count = sum(r.calls * r.steps for r in tally.records())
    assert torch.equal(model(x), expected)
    assert sum(r.calls * r.steps for r in tally.records()) == count == 4
    assert [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] == []


class CalledBackwards(nn.Module):
    """Its layers are registered in another order than they are called in; shapes in no order at all."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head, self.down, self.up, self.o, self.q = (
            nn.Linear(k, n, bias=False) for n, k in ((64, 16), (16, 24), (24, 16), (16, 16), (16, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(self.up(self.o(self.q(x))))
        return self.lm_head(x[:, -1:])


def test_records_of_one_m_come_in_the_order_of_the_first_call(tmp_path: Path) -> None:
    """A tuner walks them as a decode step: the order must survive several M, phases and the file."""
    model, tally = CalledBackwards(), Tally()
    with torch.no_grad(), products.recording(model, tally):
        for sequences, tokens in ((5, 3), (5, 1), (2, 1), (5, 1)):
            tally.step(sequences * tokens, sequences)
            model(torch.randn(sequences, tokens, 16))
    asked = request.Request(model="m", batches=(5, 2))
    capture.write(asked.capture("transformers", tally, "cpu", 3), tmp_path / "c.json")
    found = capture.read(tmp_path / "c.json")
    body = ["q", "o", "up", "down"]
    decode = [(r.m, r.layer) for r in found.select(phase="decode")]
    assert decode == [(m, name) for m in (2, 5) for name in [*body, "lm_head"]]
    prefill = [(r.m, r.layer) for r in found.select(phase="prefill")]
    assert prefill == [(5, "lm_head"), *((15, name) for name in body)]


def test_a_forward_that_raises_does_not_mislead_later_ones() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    model = nn.ModuleDict({"works": nn.Linear(16, 8, bias=False), "fails": Fails(16, 8, bias=False)})
    model["fails"].weight = model["works"].weight
    tally = Tally()
    with products.recording(model, tally):
        with pytest.raises(ValueError, match="on purpose"):
            model["fails"](torch.ones(1, 16))
        nn.functional.linear(torch.ones(1, 16), model["works"].weight)
    assert [r.layer for r in tally.records()] == ["works"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("transformers", "x", "--batch", "0"), "1,3,8"),
        (("transformers", "x", "--batch", "1,"), "1,3,8"),
        (("transformers", "x", "--batch", "²"), "1,3,8"),
        (("vllm", "x", "--batch", "9" * 5000), "1,3,8"),
        (("transformers", "x", "--device", "mps"), "auto, cpu"),
        (("transformers", "x", "--device", "cuda:99"), "auto or cpu"),
        (("transformers", "x", "--out", "no/such/folder/c.json"), "no/such/folder"),
        (("vllm", "x", "--out", "no/such/folder/c.json"), "no/such/folder"),
        (("vllm", "x"), "pip install vllm"),
    ],
)
def test_an_error_is_two_lines_before_anything_is_loaded(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], names: str
) -> None:
    monkeypatch.setattr(request.importlib.util, "find_spec", lambda name: None)  # no host is installed
    result = skinny("capture", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    what, fix = result.stderr.splitlines()
    assert what.startswith("error: ")
    assert fix.startswith("  fix: ")
    assert names in what + fix


def test_an_existing_file_is_refused_before_the_model_is_loaded(
    skinny: Skinny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def load(asked: object) -> None:
        loaded.append(asked)
        raise RequestError("loaded", "")

    monkeypatch.setattr(transformers_host, "run", load)
    file = tmp_path / "c.json"
    file.write_text("mine")
    assert "exists already" in skinny("capture", "transformers", "x", "--out", str(file)).stderr
    assert loaded == []
    assert "loaded" in skinny("capture", "transformers", "x", "--out", str(file), "--force").stderr
    assert len(loaded) == 1
    assert file.read_text() == "mine"


def test_a_model_without_products_is_an_error() -> None:
    with pytest.raises(RequestError, match="no dense projection"):
        request.Request(model="m").capture("transformers", Tally(), "cpu", 1)


@pytest.mark.parametrize("command", [(), ("transformers",), ("vllm",)])
def test_help_fits_80_columns(skinny: Skinny, command: tuple[str, ...]) -> None:
    result = skinny("capture", *command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_importing_the_command_imports_no_torch_and_no_host() -> None:
    code = "import sys, skinny_lab.cli; print(sorted({'torch', 'transformers', 'vllm', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
