"""The race to the limit without a GPU: order, files, resuming, the time budget, what is left out. Times are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skinny_core import device, kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import ConfigError
from skinny_core.plan import Environment
from skinny_core.problem import Problem
from skinny_lab.bench import contestants, limit, limit_files, prepare, race, rows, tuning
from skinny_lab.bench.libraries import Peer
from skinny_lab.bench.limit import Entrant, Settings, Shape
from skinny_lab.bench.limit_files import Files, Tried
from skinny_lab.bench.peers import Peers

H200 = device.product("h200")
ENVIRONMENT = Environment(gpu="NVIDIA H200", driver="580.1", torch="2.11", commit="abc", date="2026-01-01")
SHAPES = [Shape("big", 1, 4096, 5120), Shape("small", 1, 2560, 4096)]
SETTINGS = Settings((Entrant("bf16_simt"), Entrant("bf16_stream", 2, 16)), keep=2)


class Fakes:
    """Stands for the device. speeds: microseconds by contestant; others take 9. errors: rel-RMSE; others are right."""

    def __init__(self) -> None:
        self.speeds: dict[str, float] = {"cublas": 10.0, "peer": 8.0}
        self.errors: dict[str, float] = {}
        self.broken: set[str] = set()
        self.arenas: list[tuple[int, int]] = []
        self.races: list[tuple[int, tuple[str, ...], int]] = []
        self.now = 0.0
        self.cell_seconds = 1.0

    def clock(self) -> float:
        return self.now

    def race(
        self, arena: Arena, m: int, runs: Mapping[str, object], *, rounds: int, target_us: float = 1000.0
    ) -> dict[str, race.Times]:
        assert set(runs) - self.broken == set(runs), "the device fell over"
        self.races.append((m, tuple(runs), rounds))
        self.now += self.cell_seconds / 2
        times = {name: self.speeds.get(name, 9.0) for name in runs}
        return {name: race.Times(t - 0.1, t, t + 0.1, rounds) for name, t in times.items()}

    def check(
        self, arena: Arena, problem: Problem, m: int, runs: Mapping[str, object], *, failed: dict[str, str]
    ) -> dict[str, float]:
        return {name: self.errors.get(name, 1.66e-3) for name in runs}


class Arena:
    """Stands for weights that nobody multiplies."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> None:
        self.n, self.k = n, k


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Patch the GPU, the compilers and the clock out."""
    found = Fakes()

    def arena(n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> Arena:
        found.arenas.append((n, k))
        return Arena(n, k, dtype, l2_bytes)

    def prepared(
        jobs: list[prepare.CompileJob], trials: list[prepare.PeerJob], key: object, **options: object
    ) -> prepare.Prepared:
        return prepare.Prepared(compiled=len(jobs), tried=len(trials))

    monkeypatch.setattr(race, "Arena", arena)
    monkeypatch.setattr(race, "race", found.race)
    monkeypatch.setattr(tuning, "check", found.check)
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(prepare, "prepare", prepared)
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: list(jobs))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def _peers(refuses: str | None = None) -> Peers:
    return Peers([Peer("peer", lambda problem, m: refuses, lambda *_: lambda x, w, y: None, lambda *_: "pdl=True")])


def _race(fakes: Fakes, out: Path, ms: tuple[int, ...] = (1, 4), resume: Path | None = None, **changes: object) -> str:
    settings = Settings(**{**{f: getattr(SETTINGS, f) for f in Settings.__slots__}, **changes})  # type: ignore[arg-type]
    files = Files(out, ENVIRONMENT, {"keep": 2}, resume=resume)
    cells = limit.order(SHAPES, ms)
    ended = limit.run(cells, settings, _peers(), H200, files, say=lambda _: None, clock=fakes.clock)
    files.end(ended)
    return ended


def test_order_gives_whole_columns_small_weights_first() -> None:
    cells = limit.order(SHAPES, (2, 3, 16, 1, 8, 4))
    assert [m for _, m in cells[::2]] == [1, 4, 16, 8, 2, 3]
    assert [shape.name for shape, _ in cells[:2]] == ["small", "big"]


def test_the_shapes_are_the_25_and_the_tensor_parallel_ones() -> None:
    shapes = limit.read_shapes(Path(__file__).resolve().parents[3] / "benchmarks" / "shapes.csv")
    assert len([s for s in shapes if s.tp == 1]) == 25
    assert {s.tp for s in shapes} == {1, 2, 4, 8}
    assert len({s.name for s in shapes}) == len({(s.n, s.k) for s in shapes}) == len(shapes)


def test_near_keeps_what_was_fastest_of_each_kernel_at_any_m() -> None:
    def tried(config: str, m: int, screen: float | None, p50: float | None = None, stem: str = "bf16_mma") -> Tried:
        return Tried("big", 4096, 5120, m, stem, config, 1e-3, screen, p50, p50, p50, 0, "")

    found = limit.near(
        [
            tried("a", 1, 9.0), tried("b", 1, 8.0), tried("c", 1, 7.0, 8.5), tried("d", 1, None),
            tried("a", 8, 5.0), tried("b", 8, 6.0), tried("s", 1, 9.9, stem="bf16_simt"),
            tried("", 1, 1.0, stem="cublas"),
        ],
        1,
    )  # fmt: skip
    assert found == {(4096, 5120): frozenset("bas")}, "c was quick alone, and slower than b in the full race"


def test_near_limits_the_shapes_that_it_knows() -> None:
    known, other = tuning.problem_of(4096, 5120), tuning.problem_of(2560, 4096)
    entrants = SETTINGS.entrants
    everything = limit.candidates(entrants, known, 2)
    near = {(4096, 5120): frozenset({str(everything[3]), "of another M"})}
    assert limit.candidates(entrants, known, 2, near) == [everything[3]]
    assert limit.candidates(entrants, other, 2, near) == limit.candidates(entrants, other, 2)


def test_a_run_near_another_races_only_that(fakes: Fakes, tmp_path: Path) -> None:
    problem = tuning.problem_of(SHAPES[1].n, SHAPES[1].k)
    name = str(limit.candidates(SETTINGS.entrants, problem, 1)[2])
    settings = replace(SETTINGS, near={(SHAPES[1].n, SHAPES[1].k): frozenset({name})})
    files = Files(tmp_path, ENVIRONMENT, {})
    limit.run([(SHAPES[1], 1)], settings, Peers([]), H200, files, say=lambda text: None, clock=fakes.clock)
    assert {t.config for t in files.tried if t.provider == "bf16_simt"} == {name}


def test_entrants_are_kernels_with_a_range() -> None:
    assert Entrant.parse("bf16_simt:1-4") == Entrant("bf16_simt", 1, 4)
    assert Entrant.parse("bf16_stream") == Entrant("bf16_stream", 1, 16)
    grid = Entrant.parse("bf16_mma:2-9:warps=8,32:parts=2:loads=2:unroll=2,8")
    assert grid == Entrant(
        "bf16_mma", 2, 9, (("warps", (8, 32)), ("parts", (2,)), ("loads", (2,)), ("unroll", (2, 8)))
    )  # fmt: skip
    wide = tuning.problem_of(151936, 2560)
    assert grid.configs(wide, 1) == []
    assert [str(c) for c in grid.configs(wide, 2)] == [
        f"bf16_mma(ahead=1, blocks=1, loads=2, parts=2, pdl=0, unroll={unroll}, warps={warps})"
        for warps, unroll in ((8, 2), (8, 8), (32, 2))
    ], "32 warps have no registers for 16 loads each"
    with pytest.raises(ConfigError, match="parts is 3"):
        Entrant.parse("bf16_mma:warps=8:parts=3:loads=2:unroll=2")
    for wrong in ("bf16_simt:4", "bf16_simt:4-1", "bf16_nothing"):
        with pytest.raises((ValueError, RuntimeError, LookupError)):
            Entrant.parse(wrong)


def test_a_cell_races_the_best_few_of_each_kernel_with_everybody(fakes: Fakes, tmp_path: Path) -> None:
    problem = tuning.problem_of(2560, 4096)
    chosen = {stem: limit.candidates([Entrant(stem)], problem, 4) for stem in ("bf16_simt", "bf16_stream")}
    for found in chosen.values():
        fakes.speeds |= {str(found[-1]): 8.5, str(found[-2]): 8.6}
    fakes.errors[str(chosen["bf16_stream"][-1])] = 1e-2  # the fastest is wrong
    raced = limit.race_cell(
        Arena(2560, 4096, torch.bfloat16, 0), SHAPES[1], 4, SETTINGS, _peers(), H200, ENVIRONMENT  # type: ignore[arg-type]
    )  # fmt: skip
    (_, screened, rounds), (_, full, full_rounds) = fakes.races
    assert (rounds, full_rounds) == (3, 9)
    assert len(screened) == sum(map(len, chosen.values())) - 1, "what is wrong gets no time"
    assert set(full) >= {"cublas", "peer", str(chosen["bf16_simt"][-1]), str(chosen["bf16_stream"][-2])}
    assert len(full) == 2 + 2 + 2
    ours = raced.rows[0]
    assert (ours.kind, ours.provider, ours.p50) == ("limit", "skinny", 8.5)
    assert ours.config == str(chosen["bf16_simt"][-1])
    assert ours.status == "peer_ahead", "8.1 us at its slow end is faster than 8.4"
    assert {(r.provider, r.p50, r.config) for r in raced.rows[1:]} == {("cublas", 10.0, ""), ("peer", 8.0, "pdl=True")}
    assert rows.limit_fraction(ours) == pytest.approx(2 * 2560 * 4096 / 4.6e12 / 8.5e-6)
    tried = {t.config or t.provider: t for t in raced.tried}
    assert tried[str(chosen["bf16_stream"][-1])].note == "wrong results"
    assert tried[str(chosen["bf16_stream"][-1])].screen_us is None
    runner_up = tried[str(chosen["bf16_simt"][-2])]
    assert (runner_up.screen_us, runner_up.p50, runner_up.rounds) == (8.6, 8.6, 9)
    assert "PEER AHEAD" in limit.line(raced.rows)


def test_a_peer_that_refuses_or_is_wrong_is_left_out_with_a_reason(fakes: Fakes) -> None:
    arena = Arena(2560, 4096, torch.bfloat16, 0)
    for peers, says in ((_peers("N is odd"), "N is odd"), (_peers(), "wrong results")):
        fakes.errors["peer"] = 1e-2
        raced = limit.race_cell(arena, SHAPES[1], 1, SETTINGS, peers, H200, ENVIRONMENT)  # type: ignore[arg-type]
        assert {r.provider for r in raced.rows} == {"skinny", "cublas"}
        assert [t.note for t in raced.tried if t.provider == "peer"] == [says]
        assert raced.rows[0].status == ""


def test_what_was_not_compiled_in_time_is_not_raced(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: list(jobs)[1:])
    arena = Arena(2560, 4096, torch.bfloat16, 0)
    raced = limit.race_cell(arena, SHAPES[1], 1, SETTINGS, _peers(), H200, ENVIRONMENT, False)  # type: ignore[arg-type]
    assert len([t for t in raced.tried if t.note == "not compiled in time"]) > 3
    assert fakes.races == [(1, (raced.rows[0].config, "cublas", "peer"), 9)]


def test_arenas_are_made_once_per_shape(fakes: Fakes, tmp_path: Path) -> None:
    assert _race(fakes, tmp_path, (1, 4, 16)) == "done"
    assert fakes.arenas == [(2560, 4096), (4096, 5120)]
    few = limit.Arenas(H200.l2_bytes, limit=1)
    for shape in (*SHAPES, SHAPES[0]):
        few.get(shape)
    assert len(fakes.arenas) == 2 + 3, "one that is out of room is made again"


def test_a_run_stops_before_its_budget_and_is_resumed(fakes: Fakes, tmp_path: Path) -> None:
    fakes.cell_seconds = 2.0
    assert _race(fakes, tmp_path / "a", budget=4.9) == "budget"
    assert fakes.now == 2.0, "a second cell would have ended at 4.0, too close to the end"
    first = rows.read_csv(tmp_path / "a" / "limit.csv")
    assert {(r.what, r.m) for r in first} == {("small", 1)}
    races = len(fakes.races)
    assert _race(fakes, tmp_path / "b", resume=tmp_path / "a" / "limit.csv") == "done"
    assert len(fakes.races) == races + 2 * 3, "the cell that is there is not raced again"
    second = rows.read_csv(tmp_path / "b" / "limit.csv")
    assert second[: len(first)] == first
    assert {(r.what, r.m) for r in second} == {("small", 1), ("big", 1), ("small", 4), ("big", 4)}
    runs = json.loads((tmp_path / "b" / "limit.json").read_text())["runs"]
    assert [run["ended"] for run in runs] == ["budget", "done"]
    assert list(runs[0]["cells"]) == ["small/M1"]
    assert runs[1]["environment"]["gpu"] == "NVIDIA H200"
    tried = rows.read_table(tmp_path / "b" / "tried.csv", Tried)
    assert {(t.what, t.m) for t in tried} == {(r.what, r.m) for r in second}
    assert _race(fakes, tmp_path / "b", resume=tmp_path / "b" / "limit.csv") == "done", "into its own folder"
    assert rows.read_csv(tmp_path / "b" / "limit.csv") == second


def test_a_resumed_file_must_be_one_of_this_race(tmp_path: Path) -> None:
    row = rows.Row("cell", "a", 1, 1, 1, "skinny", "", "cold", "", "us", 1, 1, 1, 9, "g", "d", "t", "c", "2026")
    rows.write_csv(tmp_path / "cells.csv", [row])
    with pytest.raises(ValueError, match="rows of kind cell"):
        Files(tmp_path / "out", ENVIRONMENT, {}, resume=tmp_path / "cells.csv")


def test_a_killed_process_leaves_whole_files(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _race(fakes, tmp_path, (1,))
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(before) == {"limit.csv", "tried.csv", "limit.json"}

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    files = Files(tmp_path, ENVIRONMENT, {}, resume=tmp_path / "limit.csv")
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.add("new", 1, files.rows[:1], [], seconds=1.0, sm_mhz=1980)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
    assert kept["limit.csv"] == before["limit.csv"]


def test_a_cell_that_fails_is_told_and_the_next_goes_on(fakes: Fakes, tmp_path: Path) -> None:
    fakes.broken = {"peer"}
    assert _race(fakes, tmp_path, (1,)) == "done"
    run = json.loads((tmp_path / "limit.json").read_text())["runs"][0]
    assert set(run["failed"]) == {"small/M1", "big/M1"}
    assert rows.read_csv(tmp_path / "limit.csv") == []


def test_a_broken_device_ends_the_run(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dead() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    fakes.broken = {"peer"}
    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    assert _race(fakes, tmp_path, (1,)) == "device"
    assert len(json.loads((tmp_path / "limit.json").read_text())["runs"][0]["failed"]) == 1


def test_a_resumed_run_leaves_out_the_cell_that_broke_the_device(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else every new process would be lost at the same cell."""
    first = Files(tmp_path, ENVIRONMENT, {})
    first.fail("big", 1, "ValueError: a cell that failed alone")
    first.fail("small", 1, "RuntimeError: an illegal memory access was encountered")
    first.end("device")
    said: list[str] = []
    files = Files(tmp_path, ENVIRONMENT, {}, resume=tmp_path / "limit.csv")
    assert files.broke == {("small", 1)}
    limit.run(limit.order(SHAPES, (1, 4)), SETTINGS, Peers([]), H200, files, say=said.append, clock=fakes.clock)
    assert files.raced == {("big", 1), ("big", 4), ("small", 4)}
    assert "small M=1: left out, it broke the device in an earlier run" in said


def test_candidates_are_judged_for_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tuning.problem_of(4096, 4096)
    here = limit.candidates([Entrant("bf16_stream")], problem, 4)
    monkeypatch.setattr(device, "current_key", lambda index=None: DeviceKey((12, 0), 170, 100663296, "32gb"))
    small = limit.candidates([Entrant("bf16_stream")], problem, 4)
    assert 0 < len(small) < len(here)


def test_preparing_only_races_nothing_and_tells_peers_what_failed(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _race(fakes, tmp_path, prepare_only=True) == "done"
    assert not fakes.races
    peer = Peer("jit", lambda problem, m: None, lambda *_: lambda x, w, y: None, lambda *_: "", jit=True)
    seen: list[object] = []

    def refused(jobs: object, trials: list[prepare.PeerJob], key: object, **options: object) -> prepare.Prepared:
        seen.extend(trials)
        return prepare.Prepared(refused={("jit", 2560, 4096, 1): "nvcc is missing"})

    monkeypatch.setattr(prepare, "prepare", refused)
    peers = Peers([peer])
    files = Files(tmp_path / "b", ENVIRONMENT, {})
    limit.run(limit.order(SHAPES, (1,)), SETTINGS, peers, H200, files, say=lambda _: None, clock=fakes.clock)
    assert seen[:2] == [("jit", 2560, 4096, 1), ("jit", 4096, 5120, 1)]
    tried = {(t.what, t.provider): t for t in files.tried}
    assert tried["small", "jit"].note == "nvcc is missing"
    assert tried["big", "jit"].p50 == 9.0
    refusals = json.loads((tmp_path / "b" / limit_files.RUNS).read_text())["runs"][0]["prepared"]["1"]["peers_refused"]
    assert refusals == {"jit: nvcc is missing": ["2560x4096"]}


def test_candidates_keep_to_the_range_of_their_kernel() -> None:
    problem = tuning.problem_of(2560, 4096)
    assert {c.kernel for c in limit.candidates(SETTINGS.entrants, problem, 1)} == {"bf16_simt"}
    assert {c.kernel for c in limit.candidates(SETTINGS.entrants, problem, 2)} == {"bf16_simt", "bf16_stream"}
    assert kernels.get("bf16_stream").stem == "bf16_stream"
