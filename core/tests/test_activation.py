"""Activation: once or twice, with broken plans, with SKINNY in every state, from many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from skinny_core import dispatch, env, plan, warmup
from skinny_core.device import DeviceKey, product
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell
from skinny_core.problem import DType
from skinny_core.testing.numerics import assert_bit_equal
from skinny_core.testing.stand_in import StandIn, cell, plan_of

N, K = 32, 64
PROBLEMS = [(N, K, DType.BF16)]


def _package(folder: Path, *cells: Cell, name: str = "h200") -> ModelPackage:
    file = folder / f"{name}.toml"
    plan.dump(plan_of(*cells, key=product(name), product=name), file)
    return ModelPackage("test", "1", (), {}, lambda config, tp: (), lambda: (file,))


def _call(m: int = 1) -> str:
    """Call once and name the outcome."""
    dispatch.reset_counters()
    x, w = torch.ones(m, K, dtype=torch.bfloat16), torch.ones(N, K, dtype=torch.bfloat16)
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))
    ((_, outcome),) = [(key[0], key[-1]) for key in dispatch.counters()]
    return outcome


def test_activate_describes_itself(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    package = _package(tmp_path, cell(N, K, 1), cell(N, K, 2), cell(N, K, 4, "refused"), cell(N, K, 3, "reported"))
    activation = dispatch.activate(package)
    assert (activation.family, activation.device, activation.wins, activation.notes) == ("test", h200, 2, ())
    assert [path for path, _ in activation.plans] == [str(tmp_path / "h200.toml")]
    assert activation.summary() == (
        "skinny: test on h200 (sm90-132sm-60mib-141gb): 2 active cells (switch off with SKINNY=off)"
    )
    assert dispatch.active() == {"test": activation}


def test_twice_is_once_and_keeps_what_is_warm(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    package = _package(tmp_path, cell(N, K, 1))
    first = dispatch.activate(package)
    warmup.warm("test", PROBLEMS)
    assert _call() == "kernel:stand_in"
    assert dispatch.activate(package) == first
    assert _call() == "kernel:stand_in"
    assert len(kernel.compiled) == 1


def test_a_changed_plan_is_read_again_and_its_cell_is_cold(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    first = dispatch.activate(_package(tmp_path, cell(N, K, 1), cell(N, K, 2)))
    warmup.warm("test", PROBLEMS)
    second = dispatch.activate(_package(tmp_path, cell(N, K, 1, variant=1), cell(N, K, 2)))
    assert first.digest != second.digest
    assert (_call(1), _call(2)) == ("fallback:not_warm", "kernel:stand_in")
    dispatch.activate(_package(tmp_path, cell(N, K, 1, "refused"), cell(N, K, 2)))
    assert _call(1) == "fallback:refused"


def test_a_changed_promise_needs_another_warm_up(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    package = _package(tmp_path, cell(N, K, 1))
    dispatch.activate(package)
    warmup.warm("test", PROBLEMS)
    dispatch.activate(package, static_weights=True)
    assert _call() == "fallback:not_warm"


def test_deactivate(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    dispatch.activate(_package(tmp_path, cell(N, K, 1)))
    warmup.warm("test", PROBLEMS)
    state = dispatch.family_state("test")
    assert state
    dispatch.deactivate("test")
    assert dispatch.active() == {}
    assert _call() == "fallback:disabled"
    dispatch.install_launchers(state, {})  # a warm-up that ends after the family has gone


def test_off(h200: DeviceKey, kernel: StandIn, tmp_path: Path, skinny: Callable[[str], None]) -> None:
    skinny("off")
    activation = dispatch.activate(_package(tmp_path, cell(N, K, 1)))
    assert activation.wins == 0
    assert warmup.warm("test", PROBLEMS) == []
    assert _call() == "fallback:disabled"


def test_a_malformed_variable_switches_off_and_says_so(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, skinny: Callable[[str], None]
) -> None:
    skinny("neighbor=on")
    activation = dispatch.activate(_package(tmp_path, cell(N, K, 1)))
    assert activation.wins == 0
    assert activation.notes[0].startswith("switched off: SKINNY: cannot read 'neighbor=on'")
    assert "fix:" in activation.notes[0]
    assert _call() == "fallback:disabled"


def test_the_variable_is_read_at_every_activation(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _package(tmp_path, cell(N, K, 1))
    assert dispatch.activate(package).wins == 1
    monkeypatch.setenv("SKINNY", "off")
    assert dispatch.activate(package).wins == 0
    monkeypatch.setenv("SKINNY", "batch_invariant=on")
    dispatch.activate(package)
    assert {_call(m) for m in (1, 3, 17)} == {"fallback:batch_invariant"}


def test_a_broken_user_plan_warns_once_and_the_host_goes_on(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, skinny: Callable[[str], None]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("schema = 1\nfamly = 'x'\n")
    skinny(f"plan={bad}")
    package = _package(tmp_path, cell(N, K, 1))
    with pytest.warns(RuntimeWarning, match="plan ignored"):
        activation = dispatch.activate(package)
    assert activation.notes[0].startswith(f"plan ignored: {bad}:2: unknown key 'famly'")
    assert activation.wins == 1
    assert dispatch.activate(package) == activation  # a second warning would be an error here
    warmup.warm("test", PROBLEMS)
    assert _call() == "kernel:stand_in"


def test_a_neighbours_plan_is_offered_and_runs_after_opting_in(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _package(tmp_path, cell(N, K, 1), name="h100-sxm")
    activation = dispatch.activate(package)
    assert activation.wins == 0
    assert "measured on h100-sxm: try it with SKINNY=neighbour=on" in activation.notes[0]
    assert _call() == "fallback:other_device"
    monkeypatch.setenv("SKINNY", "neighbour=on")
    activation = dispatch.activate(package)
    assert (activation.wins, activation.notes) == (1, ())
    assert len(warmup.warm("test", PROBLEMS)) == 0
    assert _call() == "kernel:stand_in"


def test_a_plan_of_another_capability_is_not_in_use(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, skinny: Callable[[str], None]
) -> None:
    skinny("neighbour=on")
    activation = dispatch.activate(_package(tmp_path, cell(N, K, 1), name="b200"))
    assert (activation.wins, activation.plans) == (0, ())


def test_reported_cells_run_after_opting_in(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _package(tmp_path, cell(N, K, 1, "reported"))
    dispatch.activate(package)
    assert _call() == "fallback:reported"
    monkeypatch.setenv("SKINNY", "reported=on")
    assert dispatch.activate(package).wins == 1
    warmup.warm("test", PROBLEMS)
    assert _call() == "kernel:stand_in"


def test_cells_from_memory_come_first_until_the_family_is_activated_again(
    h200: DeviceKey, kernel: StandIn, tmp_path: Path
) -> None:
    package = _package(tmp_path, cell(N, K, 1), cell(N, K, 2))
    dispatch.activate(package)
    activation = dispatch.activate_cells("test", h200, (cell(N, K, 1, "refused"),))
    assert activation.wins == 1
    assert _call(1) == "fallback:refused"
    assert dispatch.activate(package).wins == 2


def test_on_no_device_nothing_is_active(kernel: StandIn, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    activation = dispatch.activate(_package(tmp_path, cell(N, K, 1)))
    assert (activation.device, activation.wins, activation.plans, activation.notes) == (None, 0, (), ())
    assert "no CUDA device: 0 active cells" in activation.summary()
    assert _call() == "fallback:not_cuda"


def test_digests(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    """The plan digest follows the data and not its place; the eligibility digest follows neither."""
    (tmp_path / "other").mkdir()
    here = _package(tmp_path, cell(N, K, 1))
    there = _package(tmp_path / "other", cell(N, K, 1))
    assert dispatch.activate(here).digest == dispatch.activate(there).digest
    changed = _package(tmp_path, cell(N, K, 2))
    assert dispatch.activate(changed).digest != dispatch.activate(there).digest
    assert dispatch.eligibility_digest(here) == dispatch.eligibility_digest(changed)
    other = ModelPackage("test", "2", (), {}, here.projections, here.plan_files)
    assert dispatch.eligibility_digest(here) != dispatch.eligibility_digest(other)
    assert dispatch.eligibility_digest(None, "a") != dispatch.eligibility_digest(None, "b")


def test_threads(h200: DeviceKey, kernel: StandIn, tmp_path: Path) -> None:
    """Eight threads call while a ninth activates, warms and deactivates: every result right, every call counted."""
    package = _package(tmp_path, *(cell(N, K, m) for m in (1, 2, 3)))
    torch.manual_seed(0)
    w = torch.randint(-2, 3, (N, K)).to(torch.bfloat16)
    xs = [torch.randint(-2, 3, (m, K)).to(torch.bfloat16) for m in (1, 2, 3, 4)]
    expected = [torch_linear(x, w) for x in xs]  # small integers: exact in any order of summation
    failures: list[BaseException] = []
    done = threading.Event()
    calls = 200

    def work() -> None:
        try:
            for i in range(calls):
                assert_bit_equal(dispatch.linear(xs[i % 4], w, "test"), expected[i % 4])
                if i % 16 == 0:
                    dispatch.counters()
                    dispatch.active()
        except BaseException as error:
            failures.append(error)

    def churn() -> None:
        try:
            while not done.is_set():
                dispatch.activate(package)
                warmup.warm("test", PROBLEMS)
                dispatch.deactivate("test")
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=churn)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not failures, failures[0]
    assert sum(dispatch.counters().values()) == 8 * calls


def test_settings_default_is_on() -> None:
    assert env.settings() == env.Settings()
