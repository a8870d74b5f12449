"""The decode step of one rank, which models have one; measurements on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skinny_core import device, family
from skinny_core.plan import Environment
from skinny_core.problem import DType, KernelConfig
from skinny_lab.bench import model_plan, race, tuning
from skinny_lab.bench.decode_step import DecodeStep
from skinny_lab.tune import store
from skinny_lab.tune.request import Site, Target

PACKAGE = next(p for p in family.discover().packages if p.name == "qwen3")
TINY: dict[str, Any] = dict(PACKAGE.configs["qwen3-8b"]) | {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 8,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_has_its_share_of_heads(tp: int) -> None:
    step = DecodeStep(model_plan.rank_config(TINY, tp), PACKAGE.projections(TINY, tp), 3, device="cpu")
    assert (step.size.heads, step.size.kv_heads) == (8 // tp, max(1, 2 // tp))
    assert step.run({}).shape == (3, 512 // tp)


def test_only_a_dense_model_has_a_decode_step() -> None:
    assert model_plan.has_step(PACKAGE.projections(TINY, 1))
    mixture = PACKAGE.projections(PACKAGE.configs["qwen3-30b-a3b"], 1)
    assert not model_plan.has_step(mixture)


def test_every_projection_of_a_swap_is_swapped_and_the_whole_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    arms: dict[str, list[str]] = {}

    class Step:
        scale = DecodeStep.scale

        def __init__(self, config: Any, projections: Any, m: int) -> None:
            self.size = model_plan.decode_step.Dimensions.of(config)

        def compare(self, given: Any, *, rounds: int) -> dict[str, float]:
            arms.update({name: sorted(arm) for name, arm in given.items()})
            return {name: 100.0 - 2 * len(arm) for name, arm in given.items()}

    monkeypatch.setattr(model_plan.decode_step, "DecodeStep", Step)
    monkeypatch.setattr(model_plan.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(model_plan, "_as_linear", lambda measured: None)
    measured: Any = None
    found = model_plan.in_step(
        TINY, PACKAGE.projections(TINY, 1), 4, {"a": (("o", "qkv"), measured), "b": (("lm_head",), measured)}
    )
    assert arms == {"original": [], "a": ["o", "qkv"], "b": ["lm_head"]}
    assert found == {"a": -8.0, "b": -2.0}, "8 layers, 4 in the step; one head"


def test_what_was_measured_is_read_back_as_it_was(tmp_path: Path) -> None:
    config = KernelConfig.of("bf16_simt", {"threads": 64, "rows": 2, "chunks": 2})
    times = {str(config): race.Times(7.9, 8.0, 8.1, 15), "cublas": race.Times(9.9, 10.0, 10.1, 15)}
    measured = tuning.Measured(
        problem=tuning.problem_of(64, 512, DType.FP16), m=3, config=config, rel_rmse=2.1e-4, cold=times, hot=times,
        clocks=(1900, 1980), tried=7, finalists=(config,),
    )  # fmt: skip
    entry = store.Entry("mine/a", measured, 1.25, in_model_us=-3.0, settled=True)
    target = Target("mine", "*", (Site("mine/a", 64, 512, DType.FP16),))
    first, second = (store.Store(tmp_path / "p", target, device.product("h200"), Environment()) for _ in range(2))
    first.add(entry)
    assert second.read() == 1
    assert list(second) == [entry]
    assert second.finalists(target.sites[0]) == {3: (config,)}
