"""The decode step of one rank, which models have one; measurements on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import device, family
from skinny_core.plan import Environment
from skinny_core.problem import MAX_M, DType, KernelConfig
from skinny_lab.bench import experts, in_model, race, tuning
from skinny_lab.bench.chain_step import ChainStep, Link
from skinny_lab.bench.decode_step import DecodeStep
from skinny_lab.tune import store
from skinny_lab.tune.request import Site, Target

PACKAGE = next(p for p in family.discover().packages if p.name == "qwen3")
TINY: dict[str, Any] = dict(PACKAGE.configs["qwen3-8b"]) | {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 8,
}  # fmt: skip


MIXTURE: dict[str, Any] = dict(PACKAGE.configs["qwen3-30b-a3b"]) | {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "num_hidden_layers": 8, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
L2 = device.product("h200").l2_bytes


def _step(config: dict[str, Any], tp: int = 1, l2_bytes: int = 10_000) -> Any:
    return in_model.model_step(config, PACKAGE.projections(config, tp), tp, l2_bytes, device="cpu")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_has_its_share_of_heads(tp: int) -> None:
    step = _step(TINY, tp).at(3)
    assert (step.size.heads, step.size.kv_heads) == (8 // tp, max(1, 2 // tp))
    assert step.run({}).shape == (3, 512 // tp)


def test_a_step_reads_more_than_the_l2_holds() -> None:
    assert len(_step(TINY, l2_bytes=10_000).layers) == 2, "never less than two"
    layer = sum(2 * p.n * p.k for p in PACKAGE.projections(TINY, 1) if not p.part_of and p.name != "lm_head")
    assert len(_step(TINY, l2_bytes=layer).layers) == race.L2_FACTOR
    assert len(_step(TINY, l2_bytes=100 * layer).layers) == 8, "never more than the model has"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_of_experts_runs_as_many_as_tokens_touch(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _step(MIXTURE, tp)
    read: list[tuple[int, ...]] = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: read.append(tuple(b.shape)) or product(a, b))
    for m, count in ((1, 2), (3, 5), (16, 14)):
        read.clear()
        assert step.at(m).run({}).isfinite().all()
        assert read == [(count, 64, 2 * 32 // tp), (count, 32 // tp, 64)] * len(step.layers)
        assert experts.touched(16, 2, m) == count
    assert [sorted(layer) for layer in step.layers] == [["o", "qkv"]] * len(step.layers)
    assert step.scale("qkv") == 8 / len(step.layers)


def test_what_is_no_decoder_that_we_know_has_no_step() -> None:
    whole = PACKAGE.projections(TINY, 1)
    assert in_model.model_step(TINY, [p for p in whole if p.name != "qkv"], 1, L2, device="cpu") is None
    assert in_model.model_step(TINY, [p for p in whole if p.name != "down"], 1, L2, device="cpu") is None
    other = {**MIXTURE, "num_experts_per_tok": None}
    assert in_model.model_step(other, PACKAGE.projections(MIXTURE, 1), 1, L2, device="cpu") is None


def test_the_same_step_for_fewer_sequences() -> None:
    step = _step(TINY)
    few = step.at(2)
    assert (step.m, few.m, few.run({}).shape) == (MAX_M, 2, (2, 512))
    assert few.layers[0]["o"] is step.layers[0]["o"], "weights are shared"
    assert torch.equal(few.run({}), step.run({})[:2])
    with pytest.raises(ValueError, match="made for 2"):
        few.at(3)


def _names(chain: ChainStep) -> list[str]:
    return [link.name for link, _ in chain.calls]


def test_a_chain_walks_the_layers_of_a_capture() -> None:
    links = [
        Link("q", 64, 64, torch.bfloat16, 30), Link("kv", 32, 64, torch.bfloat16, 60),
        Link("down", 64, 96, torch.bfloat16, 30), Link("head", 512, 64, torch.float16, 1),
    ]  # fmt: skip
    chain = ChainStep(links, 4, 10_000, device="cpu")
    assert _names(chain) == ["q", "kv", "kv", "down"] * 2 + ["head"]
    assert [chain.scale(name) for name in ("q", "kv", "down", "head")] == [15.0, 15.0, 15.0, 1.0]
    weights = [weight.data_ptr() for _, weight in chain.calls]
    assert len(set(weights)) == len(weights), "none is in the L2 because it was just used"
    seen: list[tuple[torch.Size, torch.dtype]] = []
    swapped = lambda x, w: seen.append((x.shape, x.dtype)) or torch.nn.functional.linear(x, w)  # noqa: E731
    y = chain.at(3).run({"head": swapped, "kv": swapped})
    assert seen == [((3, 64), torch.bfloat16)] * 4 + [((3, 64), torch.float16)]
    assert (y.shape, y.dtype) == ((3, 512), torch.float16)
    assert _names(ChainStep(links, 4, 10**9, device="cpu")).count("q") == 30, "no more layers than there are"


def test_shapes_that_are_called_once_come_again_and_again() -> None:
    links = [Link("a", 64, 64, torch.bfloat16), Link("b", 32, 64, torch.bfloat16)]
    chain = ChainStep(links, 4, 3 * 12_288, device="cpu")
    assert _names(chain) == ["a", "b"] * 9
    assert chain.scale("a") == 1 / 9


def test_every_projection_of_a_swap_is_swapped_and_the_whole_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    arms: dict[str, list[str]] = {}

    def compare(step: DecodeStep, given: Any, *, rounds: int) -> dict[str, float]:
        arms.update({name: sorted(arm) for name, arm in given.items()})
        return {name: 100.0 - 2 * len(arm) for name, arm in given.items()}

    monkeypatch.setattr(DecodeStep, "compare", compare)
    monkeypatch.setattr(in_model, "as_linear", lambda measured: None)
    measured: Any = None
    found = in_model.changes(_step(TINY), 4, {"a": (("o", "qkv"), measured), "b": (("lm_head",), measured)})
    assert arms == {in_model.STOCK: [], "a": ["o", "qkv"], "b": ["lm_head"]}
    assert found == {"a": -16.0, "b": -2.0}, "8 layers, 2 in the step; one head"


@pytest.mark.parametrize(("later", "counts"), [((-3.0, 4.0), 1.0), ((-3.0, -5.0), -3.0), ((2.0, 3.0), 2.0)])
def test_what_seems_slower_is_measured_twice_more(
    later: tuple[float, float], counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([1.0, *later])
    raced: list[list[str]] = []

    def compare(step: DecodeStep, given: Any, *, rounds: int) -> dict[str, float]:
        raced.append(list(given))
        return {name: 100.0 + {"a": next(readings) if name == "a" else 0.0, "b": -2.0}.get(name, 0.0) for name in given}

    monkeypatch.setattr(DecodeStep, "compare", compare)
    monkeypatch.setattr(in_model, "as_linear", lambda measured: None)
    measured: Any = None
    found = in_model.changes(_step(TINY), 4, {"a": (("lm_head",), measured), "b": (("lm_head",), measured)})
    assert found == {"a": counts, "b": -2.0}
    assert raced == [["", "a", "b"], ["", "a"], ["", "a"]]


def test_what_was_measured_is_read_back_as_it_was(tmp_path: Path) -> None:
    config = KernelConfig.of("bf16_simt", {"threads": 64, "rows": 2, "chunks": 2})
    times = {str(config): race.Times(7.9, 8.0, 8.1, 15), "cublas": race.Times(9.9, 10.0, 10.1, 15)}
    measured = tuning.Measured(
        problem=tuning.problem_of(64, 512, DType.FP16), m=3, config=config, rel_rmse=2.1e-4, cold=times, hot=times,
        clocks=(1900, 1980), tried=7, finalists=(config,),
    )  # fmt: skip
    entry = store.Entry("mine/a", measured, 1.25, in_model={"all": -3.0}, settled=True)
    target = Target("mine", "*", (Site("mine/a", 64, 512, DType.FP16),))
    first, second = (store.Store(tmp_path / "p", target, device.product("h200"), Environment()) for _ in range(2))
    first.add(entry)
    assert second.read() == 1
    assert list(second) == [entry]
    assert second.finalists(target.sites[0]) == {3: (config,)}
    second.add(replace(entry, settled=False))
    assert len((tmp_path / "p").read_bytes().splitlines()) == 3, "a line is added"
    with (tmp_path / "p").open("ab") as f:
        f.write(b'{"site":"mine/a","m":')  # the process was killed here
    first.entries.clear()
    assert first.read() == 1
    assert list(first) == [replace(entry, settled=False)], "the later line counts"
    first.add(entry)
    assert [e.settled for e in store.load(tmp_path / "p", target)] == [True], "behind a whole line"
    assert len((tmp_path / "p").read_bytes().splitlines()) == 3
