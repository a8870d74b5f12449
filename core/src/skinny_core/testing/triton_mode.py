"""Pytest hooks: run a test module in a process of the Triton mode it needs, and report it here test by test.

Triton decides at import whether kernels are compiled or interpreted, so one process cannot do both. A module says
`pytestmark = pytest.mark.triton("interpreter")` or `("compiler")`; a `conftest.py` imports `pytest_configure` and
`pytest_runtest_protocol` from here. All selected tests of the other mode run in one child process, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

_ENVIRONMENT = {"interpreter": "1", "compiler": "0"}
_Reports = dict[str, list[pytest.TestReport]]
_KEY = pytest.StashKey[dict[str, _Reports]]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "triton(mode): runs in a process of that Triton mode, interpreter or compiler")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Replay the child's reports of a test that needs the other mode; leave every other test to pytest."""
    mode = _mode(item)
    if mode is None or mode == _current_mode():
        return None
    by_mode = item.config.stash.setdefault(_KEY, {})
    if mode not in by_mode:
        by_mode[mode] = _run_child(item.session, mode)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = by_mode[mode].get(item.nodeid, [])
    if not reports or reports[-1].when != "teardown":
        reports = [*reports, _lost(item, by_mode[mode])]
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Folders that an earlier test has set up, and that this one shared with it but the next does not, end here: pytest
    # refuses to set up the next test while they stand.
    setup: Any = item.session
    setup._setupstate.teardown_exact(nextitem)
    return True


def _mode(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("triton")
    if marker is None:
        return None
    (mode,) = marker.args
    if mode not in _ENVIRONMENT:
        raise pytest.UsageError(f"{item.nodeid}: triton mode {mode!r}; use one of {', '.join(_ENVIRONMENT)}")
    return str(mode)


def _current_mode() -> str:
    value = os.environ.get("TRITON_INTERPRET", "0")
    return next((mode for mode, setting in _ENVIRONMENT.items() if setting == value), "compiler")


def _run_child(session: pytest.Session, mode: str) -> _Reports:
    config = session.config
    names = [item.nodeid for item in session.items if _mode(item) == mode]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = _ENVIRONMENT[mode]
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    with tempfile.TemporaryDirectory(prefix="skinny-triton-") as folder:
        wanted, found = Path(folder) / "wanted", Path(folder) / "found"
        wanted.write_text("\n".join(names), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(found), f"--rootdir={config.rootpath}", "-p", "no:cacheprovider"]
        if config.inipath:
            command += ["-c", str(config.inipath)]
        child = subprocess.run(
            [*command, f"@{wanted}"], cwd=config.rootpath, env=environment, capture_output=True, text=True, check=False
        )
        lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    reports: _Reports = {}
    for line in lines:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        if isinstance(report.longrepr, list):  # JSON has no tuples; pytest wants one for a skip
            report.longrepr = tuple(report.longrepr)
        reports.setdefault(report.nodeid, []).append(report)
    reports[""] = [_failure("", ("", None, ""), f"exit status {child.returncode}\n{child.stdout}\n{child.stderr}")]
    return reports


def _lost(item: pytest.Item, reports: _Reports) -> pytest.TestReport:
    text = f"the child process never finished this test: {reports[''][0].longrepr}"
    return _failure(item.nodeid, item.location, text)


def _failure(nodeid: str, location: tuple[str, int | None, str], text: str) -> pytest.TestReport:
    return pytest.TestReport(nodeid, location, {}, "failed", text, "call")


class _Recorder:
    """In the child: writes every report as one line of JSON, at once, so that a crash loses only what never ran."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._config: Any = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        self._path.touch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[_Recorder(sys.argv[1])]))
