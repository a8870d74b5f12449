"""`skinny replay` without a GPU: the rule on made-up spreads, then the whole command with everything but the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import Result

from skinny_core import device, family, plan
from skinny_core.plan import Cell, Evidence, Quantiles
from skinny_core.problem import Epilogue
from skinny_lab import plans
from skinny_lab.bench import contestants, machine, prepare, race, rows, tuning
from skinny_lab.explain.target import RequestError
from skinny_lab.replay import measure
from skinny_lab.replay.rule import Outcome, judge, share
from skinny_lab.replay.spread import Speedup

Skinny = Callable[..., Result]
H200, H100 = device.product("h200"), device.product("h100-sxm")
CONFIG = {"threads": 128, "rows": 2, "chunks": 4}


def _quantiles(p50: float) -> Quantiles:
    return Quantiles(p50 - 0.01, p50, p50 + 0.01)


def _cell(
    status: str,
    m: int = 1,
    *,
    name: str = "o",
    n: int = 4096,
    ours: float = 8.0,
    in_model_us: float | None = None,
    **changes: object,
) -> Cell:
    """A cell of [n, 4096] that takes `ours` microseconds where cuBLAS takes 10, cold and hot."""
    candidate, base = _quantiles(ours), _quantiles(10.0)
    evidence = Evidence(
        candidate=candidate, baseline=base, baseline_name="cublas", candidate_hot=candidate, baseline_hot=base,
        rounds=15, rel_rmse=1.66e-3, in_model_us=in_model_us, clock_mhz=(1980, 1995),
    )  # fmt: skip
    found = Cell(
        id=f"{name}/M{m}", n=n, k=4096, m=m, status=status, kernel="bf16_simt", config=CONFIG,  # type: ignore[arg-type]
        why="" if status == "win" else "told", evidence=evidence,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


MADE = plan.Plan(
    family="qwen3",
    product="h200",
    device=plan.DeviceTable((9, 0), 132, 62914560, "141gb"),
    environment=plan.Environment(gpu="NVIDIA H200", driver="570.1", torch="2.11", date="2026-01-01", commit="abc"),
    cell=(
        _cell("win", 1), _cell("win", 1, name="down", n=6144), _cell("win", 2), _cell("win", 4, in_model_us=-3.0),
        _cell("refused", 2, name="down", n=6144, ours=9.9),
        _cell("refused", 4, name="down", n=6144, ours=8.0, in_model_us=4.0),
    ),
)  # fmt: skip
PLAN = msgspec.structs.replace(MADE, digest=MADE.seal())
WINS = [c.id for c in PLAN.cells if c.status == "win"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The plan, in a folder of its own."""
    plan.dump(PLAN, tmp_path / "plans" / "mine.toml")
    return str(tmp_path / "plans" / "mine.toml")


@pytest.mark.parametrize(
    ("status", "m", "cold", "hot", "outcome"),
    [
        ("win", 1, (1.10, 1.11, 1.12), (1.10, 1.11, 1.12), Outcome.CONFIRMED),
        ("win", 1, (1.04, 1.06, 1.08), (1.01, 1.04, 1.05), Outcome.CONFIRMED),
        ("win", 1, (1.02, 1.04, 1.05), (1.10, 1.11, 1.12), Outcome.MARGINAL),
        ("win", 1, (1.10, 1.11, 1.12), (1.00, 1.02, 1.03), Outcome.MARGINAL),
        ("win", 1, (1.02, 1.04, 1.049), (1.10, 1.11, 1.12), Outcome.LOST),
        ("win", 1, (1.10, 1.11, 1.12), (1.00, 1.02, 1.029), Outcome.LOST),
        ("win", 4, (1.10, 1.11, 1.12), (1.00, 1.01, 1.02), Outcome.CONFIRMED),
        ("win", 4, (1.10, 1.11, 1.12), (0.97, 0.98, 0.99), Outcome.LOST),
        ("refused", 1, (0.99, 1.00, 1.01), (1.10, 1.11, 1.12), Outcome.CONFIRMED),
        ("refused", 1, (1.10, 1.11, 1.12), (0.99, 1.00, 1.01), Outcome.CONFIRMED),
        ("refused", 1, (1.02, 1.04, 1.06), (1.10, 1.11, 1.12), Outcome.CONFIRMED),
        ("refused", 1, (1.04, 1.06, 1.07), (1.10, 1.11, 1.12), Outcome.MARGINAL),
        ("refused", 1, (1.10, 1.11, 1.12), (1.02, 1.04, 1.05), Outcome.MARGINAL),
        ("refused", 1, (1.05, 1.06, 1.07), (1.03, 1.04, 1.05), Outcome.WOULD_WIN),
    ],
)
def test_the_rule(
    status: str, m: int, cold: tuple[float, float, float], hot: tuple[float, float, float], outcome: Outcome
) -> None:
    found = judge(_cell(status, m, ours=8.0 if status == "win" else 9.9), Speedup(*cold), Speedup(*hot))
    assert found.outcome is outcome
    assert bool(found.note) == (outcome in (Outcome.LOST, Outcome.MARGINAL))


def test_a_cell_refused_for_its_decode_step_is_open_where_it_passes_alone() -> None:
    passes, fails = Speedup(1.1, 1.11, 1.12), Speedup(0.98, 0.99, 1.0)
    slow = _cell("refused", 4, in_model_us=2.5)
    assert judge(slow, passes, passes).outcome is Outcome.DECODE_STEP
    assert "2.5 us slower" in judge(slow, passes, passes).note
    assert judge(slow, fails, passes).outcome is Outcome.CONFIRMED
    fast = _cell("refused", 4, ours=9.9, in_model_us=-2.5)
    assert judge(fast, passes, passes).outcome is Outcome.WOULD_WIN
    assert "decode step" in judge(fast, passes, passes).note


def test_a_cell_held_back_for_a_larger_m_is_open_where_it_passes_alone() -> None:
    hots = passes, _ = Speedup(1.1, 1.11, 1.12), Speedup(0.98, 0.99, 1.0)
    for held in (_cell("refused", 2), _cell("refused", 4, in_model_us=-2.5)):
        assert [judge(held, passes, hot).outcome for hot in hots] == [Outcome.HELD_BACK, Outcome.CONFIRMED]
    assert judge(_cell("refused", 4), passes, passes).outcome is Outcome.WOULD_WIN, "it had no decode step"


def test_the_spread_is_of_the_ends_that_are_furthest_apart() -> None:
    found = Speedup.of(race.Times(9.0, 10.0, 11.0, 15), Quantiles(7.0, 8.0, 9.0))
    assert (found.low, found.mid, found.high) == (1.0, 1.25, pytest.approx(11 / 7))
    assert found.overlaps(Speedup(0.5, 0.7, 1.0))
    assert not found.overlaps(Speedup(0.5, 0.7, 0.99))
    assert not Speedup(0.5, 0.7, 0.99).overlaps(found)


def test_the_share_counts_failures_and_leaves_decode_steps_out() -> None:
    assert share([Outcome.CONFIRMED, Outcome.MARGINAL, Outcome.FAILED, Outcome.DECODE_STEP]) == (
        2, 3, pytest.approx(200 / 3),
    )  # fmt: skip
    assert share([Outcome.DECODE_STEP, Outcome.HELD_BACK]) == (0, 0, 0.0)
    assert share([Outcome.LOST, Outcome.WOULD_WIN]) == (0, 2, 0.0)


class Fakes:
    """Stands for the device. Cells of the shipped plan repeat their planned times; `times` overrides by (N, K, M):
    ours cold, ours hot, microseconds. wrong, broken: (N, K, M) with wrong results, with a race that raises."""

    def __init__(self) -> None:
        self.planned = {(c.n, c.k, c.m): c.evidence for c in PLAN.cells}
        self.times: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.wrong: set[tuple[int, int, int]] = set()
        self.broken: dict[tuple[int, int, int], BaseException] = {}
        self.arenas: list[tuple[int, int]] = []
        self.raced: list[tuple[int, int, int]] = []
        self.compiled = 0
        self.dead = False

    def race(
        self, arena: Arena, m: int, runs: Mapping[str, object], *, rounds: int, hot: bool = False, **options: object
    ) -> dict[str, race.Times]:
        place = (arena.n, arena.k, m)
        if place in self.broken:
            raise self.broken[place]
        assert place not in self.wrong, "a wrong kernel was timed"
        if not hot:
            self.raced.append(place)
        e = self.planned[place]
        base, ours = (e.baseline_hot, e.candidate_hot) if hot else (e.baseline, e.candidate)
        assert base is not None
        assert ours is not None
        if place in self.times:
            ours = _quantiles(self.times[place][hot])
        named = dict.fromkeys(runs, ours) | {"cublas": base}
        return {name: race.Times(q.p20, q.p50, q.p80, rounds) for name, q in named.items()}

    def check(
        self, arena: Arena, problem: object, m: int, runs: Mapping[str, object], **options: object
    ) -> dict[str, float]:
        wrong = (arena.n, arena.k, m) in self.wrong
        return dict.fromkeys(runs, 1e-2 if wrong else 1.66e-3)

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered")

    def prepare(self, jobs: list[prepare.CompileJob], *args: object, **options: object) -> prepare.Prepared:
        self.compiled += len(jobs)
        return prepare.Prepared(compiled=len(jobs))


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

    gpu = machine.Gpu(1965, 3201, "580.1", 0)
    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(machine, "gpu", lambda index=0: gpu)
    monkeypatch.setattr(tuning, "gpu", lambda index=0: gpu)
    monkeypatch.setattr(race, "Arena", arena)
    monkeypatch.setattr(race, "race", found.race)
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(tuning, "check", found.check)
    monkeypatch.setattr(prepare, "missing", lambda jobs, key: list(jobs))
    monkeypatch.setattr(prepare, "prepare", found.prepare)
    return found


def _place(cell_id: str) -> tuple[int, int, int]:
    cell = next(c for c in PLAN.cells if c.id == cell_id)
    return cell.n, cell.k, cell.m


def _read(path: Path) -> dict[str, measure.Replayed]:
    return {row.cell: row for row in rows.read_table(path, measure.Replayed)}


def test_a_plan_that_repeats_its_numbers_is_confirmed(fakes: Fakes, skinny: Skinny, file: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "replay.csv"
    result = skinny("replay", file, "--out", str(out))
    assert result.exit_code == 0, result.output
    found = _read(out)
    assert [(row.cell, row.outcome) for row in found.values()] == [
        ("o/M1", "confirmed"), ("down/M1", "confirmed"), ("o/M2", "confirmed"), ("o/M4", "confirmed"),
        ("down/M2", "confirmed"), ("down/M4", "decode step"),
    ], "in the order of the plan"  # fmt: skip
    assert "5 of 5 confirmed (100.0 %, required 95 %)" in result.output
    assert "1 rest on a decode step or on another M and are not counted" in result.output
    assert "the decode steps of M >= 3 were not repeated" in result.output
    assert fakes.arenas == [(4096, 4096), (6144, 4096)], "one set of weights per shape"
    assert fakes.compiled
    row = found["o/M1"]
    assert row.cold_now == row.cold_then == row.hot_now == 1.25
    assert (row.sm_mhz_then, row.sm_mhz_low, row.sm_mhz_high) == (1980, 1965, 1965)
    assert "SM clock now 1965 MHz, then 1980" in result.output
    assert row.key == row.plan_key == H200.slug
    assert row.digest == PLAN.digest


def test_a_line_per_cell_fits_80_columns(
    fakes: Fakes, skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = msgspec.structs.replace(PLAN, cell=(_cell("refused", 4, name="llama31-70b/gate_up", ours=9.9),))
    plan.dump(long, tmp_path / "long.toml")
    fakes.planned = {(4096, 4096, 4): long.cells[0].evidence}
    fakes.times = {(4096, 4096, 4): (5.0, 5.0)}
    result = skinny("replay", str(tmp_path / "long.toml"))
    (line,) = [line for line in result.output.splitlines() if line.startswith("llama31-70b/gate_up/M4")]
    assert line.rstrip().split(maxsplit=8) == [
        "llama31-70b/gate_up/M4", "refused", "1.010", "2.000", "0.006", "1.010", "2.000", "0.006", "would win now"
    ]  # fmt: skip
    assert len(line) <= 80


def test_changed_verdicts_are_told_and_decide_the_exit_status(
    fakes: Fakes, skinny: Skinny, file: str, tmp_path: Path
) -> None:
    fakes.times = {_place("o/M1"): (9.9, 9.9), _place("down/M2"): (8.0, 8.0)}
    cells = [argument for name in ("o/M1", "o/M2", "down/M2") for argument in ("--cell", name)]
    out = tmp_path / "replay.csv"
    result = skinny("replay", file, *cells, "--out", str(out))
    assert result.exit_code == 1
    assert {name: row.outcome for name, row in _read(out).items()} == {
        "o/M1": "lost", "o/M2": "confirmed", "down/M2": "would win now",
    }  # fmt: skip
    text = " ".join(result.output.split())
    assert "lost: o/M1: 1.012x cold at best, needs 1.05x" in text
    assert "1 of 3 confirmed (33.3 %, required 95 %)" in text
    assert sorted(fakes.raced) == sorted(_place(name) for name in ("o/M1", "o/M2", "down/M2")), "only what was asked"
    assert skinny("replay", file, *cells, "--require", "33").exit_code == 0
    assert skinny("replay", file, *cells, "--require", "34").exit_code == 1


def test_nothing_that_counts_is_not_a_confirmation(fakes: Fakes, skinny: Skinny, file: str) -> None:
    result = skinny("replay", file, "--cell", "down/M4", "--require", "0")
    assert "0 of 0 confirmed" in result.output
    assert result.exit_code == 1


def test_a_failing_cell_does_not_stop_the_others(fakes: Fakes, skinny: Skinny, file: str, tmp_path: Path) -> None:
    wrong, raising, good = WINS[:3]
    fakes.wrong, fakes.broken = {_place(wrong)}, {_place(raising): RuntimeError("ptxas\nfell over")}
    out = tmp_path / "replay.csv"
    result = skinny("replay", file, *(a for n in WINS[:3] for a in ("--cell", n)), "--out", str(out))
    assert result.exit_code == 1
    found = _read(out)
    assert [found[name].outcome for name in (wrong, raising, good)] == ["not measured", "not measured", "confirmed"]
    assert found[wrong].cold_now is None
    assert "numerics gate" in found[wrong].note
    assert found[raising].note == "RuntimeError: ptxas fell over"
    assert "1 of 3 confirmed" in result.output


def test_a_dead_device_is_not_asked_again(fakes: Fakes, skinny: Skinny, file: str, tmp_path: Path) -> None:
    fakes.broken, fakes.dead = {_place(PLAN.cells[0].id): RuntimeError("illegal memory access")}, True
    result = skinny("replay", file, "--out", str(tmp_path / "a.csv"))
    assert result.exit_code == 1
    found = list(_read(tmp_path / "a.csv").values())
    assert fakes.raced == []
    assert len(found) == len(PLAN.cells)
    assert sum("stopped answering" in row.note for row in found) == len(PLAN.cells) - 1


def test_weights_that_do_not_fit_fail_their_cells_only(
    fakes: Fakes, skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, other = PLAN.cells[0], next(c for c in PLAN.cells if (c.n, c.k) != (PLAN.cells[0].n, PLAN.cells[0].k))

    def arena(n: int, k: int, dtype: torch.dtype, l2_bytes: int) -> Arena:
        if (n, k) == (first.n, first.k):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Arena(n, k, dtype, l2_bytes)

    monkeypatch.setattr(race, "Arena", arena)
    skinny("replay", file, "--cell", first.id, "--cell", other.id, "--out", str(tmp_path / "a.csv"))
    found = _read(tmp_path / "a.csv")
    assert found[first.id].note == "OutOfMemoryError: CUDA out of memory"
    assert found[other.id].outcome != "not measured"


def test_ctrl_c_keeps_what_was_measured(fakes: Fakes, skinny: Skinny, file: str, tmp_path: Path) -> None:
    shape = [c for c in PLAN.cells if (c.n, c.k) == (PLAN.cells[0].n, PLAN.cells[0].k)]
    fakes.broken = {_place(shape[-1].id): KeyboardInterrupt()}
    out = tmp_path / "replay.csv"
    result = skinny("replay", file, "--out", str(out))
    assert result.exit_code == 1, "an interrupted run certifies nothing, however well it began"
    assert list(_read(out)) == [c.id for c in shape[:-1]]
    assert f"interrupted: {len(shape) - 1} of {len(PLAN.cells)} cells measured" in result.output
    assert "confirmed" in result.output
    assert list(tmp_path.glob(".*")) == []


def test_the_file_is_there_after_every_cell(
    fakes: Fakes, skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []
    write = rows.write_table

    def counted(path: Path, kind: type, records: list[object]) -> None:
        sizes.append(len(records))
        write(path, kind, records)

    monkeypatch.setattr(rows, "write_table", counted)
    skinny("replay", file, "--cell", WINS[0], "--cell", WINS[1], "--out", str(tmp_path / "a.csv"))
    assert sizes[:2] == [1, 2]


def test_another_device_is_refused_and_told_when_allowed(
    fakes: Fakes, skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: H100)
    result = skinny("replay", file, "--cell", WINS[0])
    assert result.exit_code == 2
    assert H200.slug in result.stderr
    assert H100.slug in result.stderr
    assert "--any-device" in result.stderr
    assert fakes.raced == []
    result = skinny("replay", file, "--cell", WINS[0], "--any-device", "--out", str(tmp_path / "a.csv"))
    assert result.exit_code == 0
    assert "ANOTHER DEVICE" in result.output
    assert "on another device than the plan's" in result.output
    row = _read(tmp_path / "a.csv")[WINS[0]]
    assert (row.plan_key, row.key) == (H200.slug, H100.slug)


def test_a_config_that_this_device_refuses_is_not_raced(
    fakes: Fakes, skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from skinny_core import kernels

    monkeypatch.setattr(device, "current_key", lambda index=None: H100)
    seen: list[object] = []

    def refuses(config: object, problem: object, m: int) -> str | None:
        seen.append(getattr(problem, "device", None))
        return "too much shared memory" if seen[-1] == H100 else None

    monkeypatch.setattr(kernels, "refuses", refuses)
    result = skinny("replay", file, "--cell", WINS[0], "--any-device", "--out", str(tmp_path / "a.csv"))
    assert result.exit_code == 1
    assert "too much shared memory" in _read(tmp_path / "a.csv")[WINS[0]].note
    assert fakes.raced == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("qwen9",), "qwen9"),
        (("gone.toml",), "gone.toml"),
        (("PLAN", "--cell", "o/M99"), "o/M1"),
        (("PLAN", "--peer-folder", "gone"), "skinny_gemm.py"),
        (("PLAN", "--require", "101"), "--require"),
        (("PLAN", "--out", "."), "folder"),
    ],
)
def test_wrong_use_exits_with_2(fakes: Fakes, skinny: Skinny, file: str, arguments: tuple[str, ...], says: str) -> None:
    result = skinny("replay", *(file if a == "PLAN" else a for a in arguments))
    assert result.exit_code == 2
    assert says in result.stderr
    assert fakes.raced == []


def test_a_package_names_the_plan_it_ships_for_this_device(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = tmp_path / "here.toml", tmp_path / "there.toml"
    table = plan.DeviceTable(H100.capability, H100.sm_count, H100.l2_bytes, H100.memory_class)
    plan.dump(PLAN, here)
    plan.dump(msgspec.structs.replace(PLAN, product="h100-sxm", device=table), there)
    package = next(iter(family.discover().packages))
    two = dataclasses.replace(package, name="two", plan_files=lambda: (there, here))
    none = dataclasses.replace(package, name="none", plan_files=lambda: ())
    monkeypatch.setattr(family, "discover", lambda: family.Discovery((two, none)))
    assert plans.open_plan("two", H200)[0] == here
    assert plans.open_plan("two", H100)[0] == there
    with pytest.raises(RequestError, match="two ships 2 plans") as raised:
        plans.open_plan("two")
    assert str(here) in raised.value.fix
    with pytest.raises(RequestError, match="none ships 0 plans"):
        plans.open_plan("none", H200)
    two = dataclasses.replace(two, plan_files=lambda: (here,))
    monkeypatch.setattr(family, "discover", lambda: family.Discovery((two,)))
    assert plans.open_plan("two")[0] == here, "its only one, without a GPU too"


def test_patterns_choose_cells(fakes: Fakes, skinny: Skinny, file: str) -> None:
    skinny("replay", file, "--cell", "down/*")
    assert sorted(fakes.raced) == sorted((c.n, c.k, c.m) for c in PLAN.cells if c.id.startswith("down/"))
    assert fakes.raced


def test_without_a_gpu_it_says_so(skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    result = skinny("replay", file)
    assert result.exit_code == 2
    assert "CUDA device" in result.stderr


def test_cells_that_the_race_cannot_hold_are_left_out_and_named(fakes: Fakes, skinny: Skinny, tmp_path: Path) -> None:
    kept = next(c for c in PLAN.cells if c.id == WINS[0])
    reported = msgspec.structs.replace(
        kept, id="r/M2", m=2, status="reported", evidence=msgspec.structs.replace(kept.evidence, source="elsewhere")
    )
    mine = msgspec.structs.replace(PLAN, cell=(kept, reported))
    plan.dump(mine, tmp_path / "mine.toml")
    result = skinny("replay", str(tmp_path / "mine.toml"))
    assert result.exit_code == 0, result.output
    assert fakes.raced == [_place(kept.id)]
    assert "left out: r/M2: reported" in " ".join(result.output.split())
    plan.dump(msgspec.structs.replace(PLAN, cell=(reported,)), tmp_path / "none.toml")
    assert skinny("replay", str(tmp_path / "none.toml")).exit_code == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"epilogue": Epilogue.RESIDUAL}, "epilogue"),
    ],
)
def test_why_a_cell_is_left_out(changes: dict[str, object], says: str) -> None:
    why = measure.why_left_out(_cell("win", **changes))
    assert (says in why) if says else not why
    assert "others" in measure.why_left_out(_cell("reported"))


def test_another_baseline_is_left_out() -> None:
    cell = _cell("win")
    other = msgspec.structs.replace(cell.evidence, baseline_name="host_fp8")
    assert "host_fp8" in measure.why_left_out(msgspec.structs.replace(cell, evidence=other))


def test_what_may_disturb_the_numbers_is_told(
    fakes: Fakes, skinny: Skinny, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    busy = machine.Gpu(1700, 3201, "580.1", 2)
    monkeypatch.setattr(machine, "gpu", lambda index=0: busy)
    monkeypatch.setattr(tuning, "gpu", lambda index=0: busy)
    text = Path(file).read_text().replace(f'digest = "{PLAN.digest}"', 'digest = "0123456789abcdef"')
    (tmp_path / "edited.toml").write_text(text)
    result = skinny("replay", str(tmp_path / "edited.toml"), "--cell", WINS[0])
    told = " ".join(result.output.split())
    assert "2 other processes on this GPU" in told
    assert "edited after it was measured" in told
    assert f"apart by more than 3% in {WINS[0]}" in told


def test_help_fits_80_columns(skinny: Skinny) -> None:
    result = skinny("replay", "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
