"""The keep rule, on made-up times: which config is chosen, what wins, what is refused and why."""

from __future__ import annotations

import sys

import pytest

from skinny_core.problem import KernelConfig
from skinny_lab.bench import machine, race, tuning

CONFIG = KernelConfig.of("bf16_simt", {"threads": 64, "rows": 2, "chunks": 2})


def _times(p50: float, spread: float = 0.01) -> race.Times:
    return race.Times(p50 - spread, p50, p50 + spread, 15)


def _measured(m: int, cold: float, hot: float, peer: float = 99.0) -> tuning.Measured:
    """Ours at `cold` and `hot` times the baseline's speed (10 us)."""
    name = str(CONFIG)
    return tuning.Measured(
        problem=tuning.problem_of(4096, 4096),
        m=m,
        config=CONFIG,
        rel_rmse=1.6e-3,
        cold={name: _times(10 / cold), "cublas": _times(10), "peer": _times(peer)},
        hot={name: _times(10 / hot), "cublas": _times(10)},
        clocks=(1980, 1980),
        tried=1,
    )


@pytest.mark.parametrize(
    ("m", "cold", "hot", "in_model", "status", "why"),
    [
        (1, 1.06, 1.04, None, "win", ""),
        (1, 1.04, 1.20, None, "refused", "1.040x cold"),
        (2, 1.20, 1.02, None, "refused", "1.020x hot, needs 1.03x"),
        (4, 1.20, 1.001, -3.0, "win", ""),
        (4, 1.20, 0.99, -3.0, "refused", "0.990x hot, needs 1.0x"),
        (4, 1.20, 1.10, 2.5, "refused", "the decode step is 2.5 us slower"),
    ],
)
def test_keep_rule(m: int, cold: float, hot: float, in_model: float | None, status: str, why: str) -> None:
    found = tuning.verdict(_measured(m, cold, hot), in_model)
    assert found[0] == status
    assert why in found[1]


def test_the_fastest_cold_config_is_passed_over_where_it_loses_hot() -> None:
    cold = {"a": _times(8), "b": _times(8.5), "c": _times(9)}
    hot = {"a": _times(10.5), "b": _times(9), "c": _times(7), "cublas": _times(10)}
    assert tuning.choose(list(cold), cold, hot, 1) == "b"
    assert tuning.choose(["a"], cold, hot, 1) == "a"
    hot = {**hot, "b": _times(9.8), "c": _times(9.8)}  # 1.02x: enough at M = 4 only
    assert tuning.choose(list(cold), cold, hot, 1) == "a"
    assert tuning.choose(list(cold), cold, hot, 4) == "b"


def test_a_peer_is_ahead_only_beyond_the_spread() -> None:
    ours = 10 / 1.25
    for peer, ahead in ((ours - 1.0, "peer"), (ours - 0.015, ""), (ours + 1.0, "")):
        cell = tuning.cell(_measured(1, 1.25, 1.25, peer), "x/y/M1", (), None)
        assert cell.evidence.peer_ahead == ahead
        assert cell.evidence.peers == {"peer": peer}
        assert cell.evidence.speedup == pytest.approx(1.25)


def test_percentiles() -> None:
    times = race.Times.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (times.p20, times.p50, times.p80, times.rounds) == (2.0, 3.0, 4.0, 5)


@pytest.mark.parametrize(
    ("ours", "others", "base", "enough"),
    [
        ((8.0, 0.1), [], (10.0, 0.1), True),  # clearly 1.05x
        ((9.9, 0.1), [], (10.0, 0.1), True),  # clearly not
        ((9.5, 0.1), [], (10.0, 0.1), False),  # 1.053x, within the spread of 1.05x
        ((8.0, 0.1), [(8.05, 0.1)], (10.0, 0.1), True),  # level: either will do
        ((8.0, 0.1), [(8.15, 0.1)], (10.0, 0.1), False),  # 2 % apart, the spreads touch
        ((8.0, 0.1), [(8.5, 0.1)], (10.0, 0.1), True),
    ],
)
def test_a_race_ends_when_its_spreads_leave_no_doubt(
    ours: tuple[float, float], others: list[tuple[float, float]], base: tuple[float, float], enough: bool
) -> None:
    named = {"ours": ours, **{f"other {i}": t for i, t in enumerate(others)}, "cublas": base}
    times = {name: _times(*t) for name, t in named.items()}
    assert tuning.decided(times, [name for name in named if name != "cublas"], tuning.COLD_GAIN) is enough


def test_a_recorded_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda index=0: "GPU")
    monkeypatch.setattr(machine, "gpu", lambda index=0: machine.Gpu(0, 0, "1", 0))
    monkeypatch.setattr(sys, "argv", ["/me/bin/skinny", "tune", "--out", "/me/plan.toml", "-M", "1-16", "a/b"])
    assert machine.environment(commit="c").command == "skinny tune --out plan.toml -M 1-16 a/b"
