"""The measuring protocol on a made-up clock: rotated order, idle time subtracted, enough weights to leave the L2."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from skinny_lab.bench import race

L2 = 62_914_560


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (576, 576), (151936, 4096), (6144, 2560)])
def test_weights_between_two_uses_exceed_three_times_the_l2(n: int, k: int) -> None:
    copies = race.copies_for(n, k, L2)
    assert copies >= 2
    assert (copies - 1) * 2 * n * k >= 3 * L2


def test_order_rotates_and_idle_time_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arena:
        n, k, dtype, places = 64, 64, torch.bfloat16, 2
        weights = torch.zeros(3, 64, 64, dtype=torch.bfloat16)

        def activation(self, m: int) -> torch.Tensor:
            return torch.zeros(m, 64, dtype=torch.bfloat16)

    replayed: list[str] = []
    repeats: set[int] = set()
    costs = {"": 2.0, "ours": 7.0, "cublas": 9.0}

    def capture(run: object, x_in: object, x: object, weights: torch.Tensor, y: object, count: int) -> str:
        repeats.add(count)
        return run(None, None, None) if callable(run) else ""  # type: ignore[no-any-return]

    def replay(graph: str) -> float:
        replayed.append(graph)
        return costs[graph] * next(iter(repeats))

    monkeypatch.setattr(race, "_capture", capture)
    monkeypatch.setattr(race, "_replay", replay)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **{**options, "device": "cpu"}))
    contestants = {"ours": lambda *_: "ours", "cublas": lambda *_: "cublas"}
    found = race.race(Arena(), 1, contestants, rounds=6)  # type: ignore[arg-type]
    assert {name: times.p50 for name, times in found.items()} == {"ours": 5.0, "cublas": 7.0}
    rounds = [tuple(replayed[i : i + 3]) for i in range(0, len(replayed), 3)]
    assert len(rounds) == 6
    assert {first for first, *_ in rounds} == {"", "ours", "cublas"}, "every contestant starts a round"
    assert all(sorted(order) == ["", "cublas", "ours"] for order in rounds), "the baseline is in every round"
    used: list[tuple[int, int]] = []
    whole = Arena.weights
    monkeypatch.setattr(race, "_capture", lambda run, x_in, x, weights, y, count: (weights.data_ptr(), len(weights)))
    monkeypatch.setattr(race, "_replay", lambda graph: used.append(graph) or 1.0)
    race.race(Arena(), 1, contestants, rounds=4, hot=True)  # type: ignore[arg-type]
    places = [(whole[i].data_ptr(), 1) for i in (0, 1, 0, 1)]
    assert used == [place for place in places for _ in range(3)], "one weight at a time, each round the next place"


def test_rounds_go_on_until_there_is_enough() -> None:
    asked: list[int] = []

    def enough(times: Mapping[str, race.Times]) -> bool:
        asked.append(times["a"].rounds)
        return times["a"].rounds >= 12

    found = race.repeated(["a", "b"], lambda name, turn: 1.0, rounds=7, enough=enough, most=31)
    assert asked == [7, 11, 15]
    assert {times.rounds for times in found.values()} == {15}
    found = race.repeated(["a"], lambda name, turn: 1.0, rounds=7, enough=lambda times: False, most=12)
    assert found["a"].rounds == 12, "never more than the most"
    assert race.repeated(["a"], lambda name, turn: 1.0, rounds=3)["a"].rounds == 3
