"""The measuring pipeline without a GPU: everything but the clock. Races return made-up times, the rest is real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.errors import KernelUnavailableError
from skinny_core.problem import DType, KernelConfig
from skinny_lab.bench import cells, contestants, decode_step, entrants, machine, model_plan, race, rows, tuning

Skinny = Callable[..., Result]
H200 = device.product("h200")
PACKAGE = next(p for p in family.discover().packages if p.name == "qwen3")


class Arena:
    """Stands for weights that nobody multiplies."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> None:
        assert l2_bytes == H200.l2_bytes
        self.n, self.k, self.dtype = n, k, dtype


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Patch the GPU out. The dict gives microseconds by contestant; others take 9 us cold and 5 hot."""
    speeds: dict[str, float] = {"cublas": 10.0, "peer": 8.0}

    def timed(
        arena: Arena, m: int, runs: Mapping[str, object], *, rounds: int, hot: bool = False, **options: object
    ) -> dict[str, race.Times]:
        default = 5.0 if hot else 9.0
        times = {name: speeds.get(name, default) for name in runs}
        return {name: race.Times(t - 0.1, t, t + 0.1, rounds) for name, t in times.items()}

    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(machine, "gpu", lambda index=0: machine.Gpu(1980, 3201, "580.1", 0))
    monkeypatch.setattr(race, "Arena", Arena)
    monkeypatch.setattr(race, "race", timed)
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(tuning, "check", lambda arena, problem, m, runs, **options: dict.fromkeys(runs, 1.66e-3))
    return speeds


def _peers(problem: object, m: int) -> dict[str, race.Run]:
    return {"peer": contestants.cublas()}


def test_every_kernel_of_ours_races(no_clock: dict[str, float]) -> None:
    """At M = 2 all, at M = 4 those that do not depend on FMA units; the fastest in the made-up race is kept."""
    arena = race.Arena(4096, 4096, torch.bfloat16, H200.l2_bytes)
    for m, stems in (
        (2, {"bf16_simt", "bf16_mma", "bf16_stream"}),
        (4, {"bf16_mma", "bf16_stream"}),
    ):
        raced = entrants.candidates(entrants.DEFAULT, tuning.problem_of(4096, 4096), m)
        assert {config.kernel for config in raced} == stems
        fast = next(config for config in raced if config.kernel == "bf16_mma")
        no_clock[str(fast)] = 3.0
        found = tuning.measure(arena, tuning.problem_of(4096, 4096), m)
        assert (found.config, found.tried) == (fast, len(raced))


def test_an_fp32_output_is_raced_into_an_fp32_tensor(
    no_clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    timed = race.race
    monkeypatch.setattr(tuning, "check", lambda arena, problem, m, runs, **options: dict.fromkeys(runs, 1e-6))
    monkeypatch.setattr(race, "race", lambda *a, out, **options: written.append(out) or timed(*a, out=out, **options))
    arena = race.Arena(4096, 4096, torch.bfloat16, H200.l2_bytes)
    tuning.measure(arena, replace(tuning.problem_of(4096, 4096), output=DType.FP32), 1)
    assert set(written) == {torch.float32}
    assert len(written) == 3


def test_a_kernel_that_is_not_available_leaves_the_race_to_the_others(
    no_clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(config: KernelConfig, *args: object, **options: object) -> None:
        if config.kernel != "bf16_stream":
            raise KernelUnavailableError(f"{config.kernel} needs CuTe DSL: absent", "install it")

    monkeypatch.setattr(contestants, "ours", ours)
    arena = race.Arena(4096, 4096, torch.bfloat16, H200.l2_bytes)
    assert tuning.measure(arena, tuning.problem_of(4096, 4096), 2).config.kernel == "bf16_stream"
    with pytest.raises(tuning.NumericsError, match="needs CuTe DSL: absent"):
        tuning.measure(arena, tuning.problem_of(4096, 4096), 2, [entrants.Entrant("bf16_mma")])


def test_wrong_results_never_get_a_time(no_clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "check", lambda arena, problem, m, runs, **options: dict.fromkeys(runs, 1.0e-2))
    with pytest.raises(tuning.NumericsError, match="numerics gate"):
        tuning.measure(race.Arena(64, 64, torch.bfloat16, H200.l2_bytes), tuning.problem_of(64, 512), 1)
    shipped = [(p, c) for p, c in _shipped() if c.id == "qwen3-8b/o/M1"]
    with pytest.raises(tuning.NumericsError, match=r"qwen3-8b/o/M1.*speed means nothing"):
        cells.run(shipped)


def _shipped() -> list[tuple[plan.Plan, plan.Cell]]:
    plans = [plan.load(path) for path in PACKAGE.plan_files()]
    return [(p, c) for p in plans for c in p.cells]


def test_the_command(no_clock: dict[str, float], skinny: Skinny, tmp_path: Path) -> None:
    result = skinny("bench", "qwen3-8b", "-M", "1,2", "--out", str(tmp_path / "rows.csv"))
    assert result.exit_code == 0, result.output
    found = rows.read_csv(tmp_path / "rows.csv")
    assert {(r.provider, r.state) for r in found} >= {("skinny", "cold"), ("skinny", "hot"), ("cublas", "cold")}
    assert {r.m for r in found} == {1, 2}
    assert all(r.what.startswith("qwen3-8b/") for r in found)
    assert rows.summarise(found)["vs_cublas"] == {
        "1": pytest.approx(10 / 9, abs=1e-4),
        "2": pytest.approx(10 / 9, abs=1e-4),
    }
    assert "1.111" in result.output
    assert "2.000" in result.output  # hot


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("qwen9",), "unknown model 'qwen9'"),
        (("-M", "0"), "rows go from 1"),
        (("llama-3.1-70b", "-M", "1"), "no planned cell"),
        (("--plan", "gone.toml"), "gone.toml"),
    ],
)
def test_bad_requests_are_two_lines(
    no_clock: dict[str, float], skinny: Skinny, arguments: tuple[str, ...], says: str
) -> None:
    result = skinny("bench", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_gpu_the_command_says_so(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    for arguments in ((), ("--plan", str(PACKAGE.plan_files()[0]))):
        result = skinny("bench", *arguments)
        assert result.exit_code == 2
        assert "CUDA device" in result.stderr


def test_rows_survive_a_round_trip_and_bad_ones_are_named(tmp_path: Path) -> None:
    first = cells.planned_rows(plan.load(PACKAGE.plan_files()[0]))
    rows.write_csv(tmp_path / "a.csv", first)
    assert rows.read_csv(tmp_path / "a.csv") == first
    text = (tmp_path / "a.csv").read_text().splitlines()
    text[3] = text[3].replace(",7,NVIDIA", ",many,NVIDIA")
    (tmp_path / "b.csv").write_text("\n".join(text))
    with pytest.raises(ValueError, match=r"b\.csv:4: column rounds: 'many'"):
        rows.read_csv(tmp_path / "b.csv")
    assert not list(tmp_path.glob(".*"))


def test_decode_step_reads_the_config() -> None:
    size = decode_step.Dimensions.of(PACKAGE.configs["qwen3-4b"])
    assert (size.hidden, size.heads, size.kv_heads, size.head_dim, size.layers) == (2560, 32, 8, 128, 36)


def test_a_quick_plan_has_no_cell_that_would_need_a_model(no_clock: dict[str, float]) -> None:
    found = model_plan.quick_plan([(576, 576), (1536, 576)], (1, 2))
    assert [(c.n, c.k, c.m) for c in found.cells] == [(576, 576, 1), (576, 576, 2), (1536, 576, 1), (1536, 576, 2)]
    assert all(isinstance(c.kernel_config, KernelConfig) for c in found.cells)
    with pytest.raises(ValueError, match="M = 4"):
        model_plan.quick_plan([(576, 576)], (4,))
