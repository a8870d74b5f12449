"""The third arm of `benchmarks/tpot_vllm.py`: vLLM's kernel behind skinny's hooks, and the plan that lets it run where
it won and holds everything else back. Without a GPU; the rows are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import device, env, family, kernels, plan, table
from skinny_core.errors import ConfigError
from skinny_core.problem import Problem
from skinny_lab.bench import cute_arm, rows
from skinny_lab.bench.engine_turns import CUTE
from skinny_lab.bench.libraries import CuteConfig, Peer
from skinny_lab.bench.rows import OURS

ENVIRONMENT = plan.Environment(gpu="NVIDIA H200", driver="1", torch="2", commit="c", date="2026-01-01")
CUTE_CONFIG = "block_size=64, outputs_per_block=4, k_unroll=2"


def _raced(n: int, k: int, m: int, cute: float, cublas: float = 10.0, device: str = "NVIDIA H200") -> list[rows.Row]:
    return [
        rows.Row(
            "limit", "x", n, k, m, name, config, "cold", "", "us", us - 0.1, us, us + 0.1, 9, device, "1", "2", "c",
            "2026-01-01",
        )
        for name, us, config in ((CUTE, cute, CUTE_CONFIG), ("cublas", cublas, ""), (OURS, 5.0, "bf16_simt(x=1)"))
    ]  # fmt: skip


RACED = [
    *_raced(4096, 4096, 1, 8.0), *_raced(4096, 4096, 2, 9.5), *_raced(4096, 4096, 4, 9.6), *_raced(4096, 4096, 16, 5.0),
    *_raced(6144, 4096, 8, 9.0), *_raced(6144, 4096, 3, 5.0), *_raced(512, 512, 1, 5.0),
]  # fmt: skip


def _qwen3() -> family.ModelPackage:
    return next(p for p in family.discover().packages if p.name == "qwen3")


def _plan(tmp_path: Path, raced: list[rows.Row]) -> plan.Plan:
    csv = tmp_path / "limit.csv"
    rows.write_csv(csv, raced)
    key = device.product("h200")
    sources = table.build("qwen3", _qwen3(), env.Settings()).sources
    others = [cell for s in sources if s.plan.key == key for cell in s.plan.cells]
    shapes = {(4096, 4096), (6144, 4096)}
    return cute_arm.plan_of(rows.read_csv(csv), shapes, (1, 2, 4, 8, 16), "qwen3", key, others, ENVIRONMENT)


@pytest.mark.usefixtures("kernel")
def test_the_plan_runs_what_beat_cublas_and_nothing_else(tmp_path: Path) -> None:
    found = _plan(tmp_path, RACED)
    file = tmp_path / "plan.toml"
    plan.dump(found, file)
    key = device.product("h200")
    settings = env.parse(f"plan={file},reported=on")
    built = table.build("qwen3", _qwen3(), settings)
    assert not built.notes
    ran = set()
    shapes = {(n, k) for p in _qwen3().plan_files() for n, k in {(c.n, c.k) for c in plan.load(p).cells}}
    for n, k in shapes | {(512, 512)}:
        for m in range(1, 17):
            cell = built.lookup(Problem(n=n, k=k), m, key, settings)
            if table.judge(cell, Problem(n=n, k=k), m, key, settings).ok:
                assert cell
                assert cell.cell.kernel == CUTE
                ran.add((n, k, m))
    assert ran == {(4096, 4096, 1), (4096, 4096, 2), (6144, 4096, 8)}
    cell = next(c for c in found.cells if (c.n, c.m) == (4096, 1))
    assert cell.status == "reported"
    assert "not measured" in cell.evidence.source
    assert cell.config == {"block_size": 64, "outputs_per_block": 4, "k_unroll": 2}
    assert (cell.evidence.candidate.p50, cell.evidence.baseline.p50) == (8.0, 10.0)


@pytest.mark.usefixtures("kernel")
def test_without_the_opt_in_its_plan_does_not_run(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    plan.dump(_plan(tmp_path, RACED), file)
    settings, key, problem = env.parse(f"plan={file}"), device.product("h200"), Problem(n=4096, k=4096)
    found = table.build("qwen3", _qwen3(), settings).lookup(problem, 1, key, settings)
    assert not found or found.cell.kernel != CUTE or not table.judge(found, problem, 1, key, settings).ok


def test_a_race_in_which_it_never_won_makes_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has vllm_cute 5% ahead"):
        _plan(tmp_path, _raced(4096, 4096, 1, 9.8))


@pytest.fixture
def kernel() -> Iterator[tuple[cute_arm.VllmCute, list[tuple[Any, ...]]]]:
    calls: list[tuple[Any, ...]] = []

    def load(configs: Mapping[tuple[int, int, int], CuteConfig]) -> Peer:
        def make(problem: Problem, m: int) -> Callable[..., None]:
            config = configs[problem.n, problem.k, m]

            def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
                calls.append((config, tuple(x.shape), x.stride(), type(w)))
                y.copy_(x @ w.T)

            return run

        def refuses(_: Problem, m: int) -> str | None:
            return "too many rows" if m > 8 else None

        return Peer(CUTE, refuses, make, lambda *_: "")

    made = cute_arm.VllmCute(None, load)
    kernels.register(made)
    yield made, calls
    kernels.unregister(CUTE)


def test_its_kernel_compiles_before_it_is_launched_and_reads_strided_rows(
    kernel: tuple[cute_arm.VllmCute, list[tuple[Any, ...]]],
) -> None:
    made, calls = kernel
    assert kernels.get(CUTE) is made
    config = made.config_from({"block_size": 64, "outputs_per_block": 2, "k_unroll": 1})
    assert made.params_of(config) == {"block_size": 64, "outputs_per_block": 2, "k_unroll": 1}
    problem = Problem(n=32, k=16)
    launch = made.compile(config, problem, 2, index=0, prewait=True)
    assert calls == [((64, 2, 1), (2, 16), (16, 1), torch.Tensor)], "one run, of few rows, at compile time"
    made.compile((128, 1, 1), problem, 4, index=0, prewait=True)
    wide = torch.randn(1, 2, 24, dtype=torch.bfloat16)
    w = torch.nn.Parameter(torch.randn(32, 16, dtype=torch.bfloat16), requires_grad=False)
    y = torch.empty(1, 2, 32, dtype=torch.bfloat16)
    launch(wide[..., :16], w, y, None, 24, 32, 32, False)
    assert calls[-1] == ((64, 2, 1), (2, 16), (24, 1), torch.Tensor)
    assert torch.equal(y[0], wide[0, :, :16] @ w.T)


def test_its_kernel_says_what_it_cannot_do(kernel: tuple[cute_arm.VllmCute, list[tuple[Any, ...]]]) -> None:
    made, _ = kernel
    assert made.refuses((64, 2, 1), Problem(n=32, k=16), 9) == "too many rows"
    with pytest.raises(ConfigError):
        made.config_from({"threads": 1})
    with pytest.raises(ConfigError, match="too many rows"):
        made.compile((64, 2, 1), Problem(n=32, k=16), 9, index=0, prewait=False)
    key = device.product("h200")
    assert made.prepared((64, 2, 1), Problem(n=32, k=16), 1, key, prewait=True)
    absent = cute_arm.VllmCute(Path("/nowhere"))
    assert absent.availability()[0] is False
