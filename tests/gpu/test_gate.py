"""The gate itself: which sessions are green, and that a skipped GPU test does not count as one that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import checkout
from tests.gpu import run
from tests.gpu.gate import Facts, RunCounter, judge

SUITE = """
import pytest
@pytest.mark.sm90
def test_runs(record_property):
    record_property("cell", "a/M1")
    record_property("cell", "a/M2")
@pytest.mark.sm90
def test_runs_the_same(record_property): record_property("cell", "a/M1")
@pytest.mark.sm90
def test_skipped_in_body(record_property):
    record_property("cell", "b/M1")
    pytest.skip("no device")
@pytest.mark.sm90
@pytest.mark.skipif(True, reason="no device")
def test_skipped_by_mark(): pass
@pytest.mark.sm90
def test_fails(): assert False
@pytest.fixture
def broken(): raise RuntimeError("set-up")
@pytest.mark.sm90
def test_fails_in_set_up(broken): pass
def test_of_no_architecture(): pass
"""


@pytest.mark.parametrize(
    ("facts", "allow_skip", "code", "says"),
    [
        pytest.param(Facts(arch="sm90", device=None), False, 1, "no device", id="no-device"),
        pytest.param(
            Facts(arch="sm90", device=None, compiled=7, shipped=7), True, 0, "7 cells NOT RUN", id="no-device-allowed"
        ),
        pytest.param(
            Facts(arch="sm90", device=None, compiled=6, shipped=7, compile_errors=("x",)),
            True,
            1,
            "1 of 7",
            id="compile-error",
        ),
        pytest.param(
            Facts(arch="sm90", device="H200", exit_code=5), False, 1, "no GPU test ran", id="nothing-collected"
        ),
        pytest.param(Facts(arch="sm90", device="H200", exit_code=0), False, 1, "no GPU test ran", id="all-skipped"),
        pytest.param(Facts(arch="sm90", device="H200", exit_code=0), True, 0, "allowed", id="all-skipped-allowed"),
        pytest.param(
            Facts(arch="sm90", device="H200", ran=3, failed=1, exit_code=1), False, 1, "1 failed", id="failed"
        ),
        pytest.param(
            Facts(arch="sm90", device="H200", ran=3, failed=1, exit_code=1), True, 1, "1 failed", id="failed-allowed"
        ),
        pytest.param(Facts(arch="sm90", device="H200", ran=3, exit_code=2), False, 1, "RED", id="interrupted"),
        pytest.param(Facts(arch="sm90", device="H200", ran=3), False, 0, "3 GPU tests passed on H200", id="green"),
        pytest.param(
            Facts(arch="sm90", device="H200", ran=3, cells=2, shipped=2, whole=True),
            False,
            0,
            "2 shipped cells",
            id="cells",
        ),
        pytest.param(
            Facts(arch="sm90", device="H200", ran=3, cells=2, shipped=3, whole=True),
            True,
            1,
            "only 2 of 3 shipped",
            id="not-every-cell",
        ),
        pytest.param(Facts(arch="sm90", device="H20", ran=3, whole=True), False, 1, "no shipped cell", id="no-cells"),
        pytest.param(Facts(arch="sm90", device="H20", ran=3, whole=True), True, 0, "3 GPU", id="no-cells-allowed"),
    ],
)
def test_judge(facts: Facts, allow_skip: bool, code: int, says: str) -> None:
    result = judge(facts, allow_skip=allow_skip)
    assert result.code == code
    assert says in result.line
    assert "\n" not in result.line


def test_only_executed_bodies_count(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sm90: x\n")
    counter = RunCounter("sm90")
    options = [
        "-q",
        "--no-header",
        "--no-summary",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-c",
        str(tmp_path / "pytest.ini"),
    ]
    pytest.main([*options, "--rootdir", str(tmp_path), str(tmp_path)], plugins=[counter])
    assert (counter.ran, counter.failed) == (3, 2)
    assert counter.cells == {"a/M1", "a/M2"}


def test_session_without_a_device_is_red(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "matching_device", lambda arch: None)
    assert run.main(["--arch", "sm90"]) == 1
    assert "nothing was tested" in capsys.readouterr().out


def test_session_with_a_device_and_no_test_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "matching_device", lambda arch: "some GPU")
    monkeypatch.setattr(run, "run_tests", lambda arch, device, arguments: Facts(arch=arch, device=device, exit_code=5))
    assert run.main(["--arch", "sm90"]) == 1
    assert "no GPU test ran" in capsys.readouterr().out


def test_every_marked_file_is_where_the_gate_looks() -> None:
    files = [p for p in checkout.ROOT.glob("**/test_*.py") if not any(part.startswith(".") for part in p.parts)]
    marked = [p for p in files if "pytest.mark.sm90" in p.read_text()]
    roots = [checkout.ROOT / place for place in run.EVERYWHERE]
    missed = [p for p in marked if p != Path(__file__) and not any(r == p or r in p.parents for r in roots)]
    assert len(marked) > 4
    assert not missed


def test_a_record_says_what_ran(tmp_path: Path) -> None:
    facts = Facts(arch="sm90", device="H200", ran=3, cells=2, whole=True)
    run.record(facts, judge(facts, allow_skip=False), tmp_path / "gate.json")
    found = json.loads((tmp_path / "gate.json").read_text())
    assert (found["ran"], found["cells"], found["code"], found["device"]) == (3, 2, 0, "H200")
    assert found["date"]
    assert found["torch"]
