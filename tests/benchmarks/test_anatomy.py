"""The fit of fixed time and rate, and the forms it compares; times are made up, nothing is measured."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skinny_core import device
from skinny_core.plan import Environment
from skinny_core.problem import KernelConfig
from skinny_lab.bench import contestants, limit, machine, race, rows, tuning

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "anatomy.py"
ENTRANTS = ["bf16_simt:threads=128:rows=2:chunks=4", "bf16_mma:warps=8,16:parts=2:loads=2:unroll=2"]


@pytest.fixture
def anatomy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("anatomy", COMMAND)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["anatomy"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("entrant", [*ENTRANTS, ENTRANTS[0] + ":pdl=1"])
def test_forms_differ_in_pdl_and_in_what_may_be_read_early(
    anatomy: ModuleType, monkeypatch: pytest.MonkeyPatch, entrant: str
) -> None:
    problem = tuning.problem_of(4096, 4096)
    config = limit.Entrant.parse(entrant).configs(problem, 1)[0]
    monkeypatch.setattr(contestants, "ours", lambda config, *_, prewait: (config, prewait))
    found = anatomy.forms(config, problem, 1)
    params = dict(config.params)
    with_pdl, without = (KernelConfig.of(config.kernel, params | {"pdl": pdl}) for pdl in (1, 0))
    del params["pdl"]
    name = KernelConfig.of(config.kernel, params)
    assert found == {
        f"{name}|prewait": (with_pdl, True),
        f"{name}|wait first": (with_pdl, False),
        f"{name}|no pdl": (without, False),
    }


def test_a_line_through_made_up_times(
    anatomy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 us and 4 TB/s beyond a ramp, 3 us with a late wait: what goes in comes out of the fit, and into the file."""
    forms: list[bool] = []

    def ours(config: object, problem: object, m: int, *, prewait: bool) -> Any:
        forms.append(prewait)
        return None

    def timed(arena: Any, m: int, runs: Mapping[str, Any], *, rounds: int) -> dict[str, race.Times]:
        us = 2 * arena.n * arena.k / 4e6
        fixed = {name: 2.0 if name.endswith("prewait") else 3.0 for name in runs}
        return {name: race.Times(fixed[name] + us, fixed[name] + us, fixed[name] + us, rounds) for name in runs}

    class Arena:
        def __init__(self, n: int, k: int, *_: Any) -> None:
            self.n, self.k = n, k

    monkeypatch.setattr(device, "current_key", lambda: device.product("h200"))
    monkeypatch.setattr(contestants, "ours", ours)
    monkeypatch.setattr(race, "Arena", Arena)
    monkeypatch.setattr(race, "race", timed)
    monkeypatch.setattr(tuning, "check", lambda arena, problem, m, runs: dict.fromkeys(runs, 1.66e-3))
    monkeypatch.setattr(machine, "environment", lambda: Environment(gpu="none"))
    anatomy.main(["--out", str(tmp_path), "--kernels", *ENTRANTS, "--k", "4096", "--m", "2"])
    points = rows.read_table(tmp_path / "anatomy.csv", anatomy.Point)
    assert len(points) == len(anatomy.MEGABYTES) * (1 + 3 * len(anatomy.FORMS))
    assert {point.n % 132 for point in points} == {0}
    assert [round(point.mb) for point in points[::10]] == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert forms.count(True) * 2 == forms.count(False)
    early = anatomy.Fit.of([p for p in points if p.form == "prewait" and "warps=16" in p.provider])
    assert (early.fixed_us, early.rate_tbps) == pytest.approx((2.0, 4.0))
    assert "    3.00       4.00     3.27              cublas" in capsys.readouterr().out


def test_wrong_results_are_not_timed(anatomy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "current_key", lambda: device.product("h200"))
    monkeypatch.setattr(contestants, "ours", lambda *args, **options: None)
    monkeypatch.setattr(race, "Arena", lambda *args: None)
    monkeypatch.setattr(tuning, "check", lambda arena, problem, m, runs: dict.fromkeys(runs, 0.5))
    with pytest.raises(SystemExit, match="wrong results"):
        anatomy.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
