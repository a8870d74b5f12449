"""When is a GPU session green? Only when GPU tests really ran on a device of that architecture, and all of them passed.

Pure decisions, so that they are tested on a machine without a GPU; `tests.gpu.run` gathers the facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

CAPABILITIES = {"sm90": (9, 0), "sm100": (10, 0)}
"""Architectures that have a session, and the exact capability each needs. 10.3 is not 10.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What happened. `device`: name of a matching GPU or None. Counts are of tests marked for the architecture.
    cells: shipped cells that they ran, each once. shipped: cells that there are, for that device where there is one.
    whole: the run was not narrowed by arguments."""

    arch: str
    device: str | None
    ran: int = 0
    cells: int = 0
    failed: int = 0
    exit_code: int = 0
    compiled: int = 0
    shipped: int = 0
    whole: bool = False
    compile_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Exit status and the one line that says why."""

    code: int
    line: str


def judge(facts: Facts, *, allow_skip: bool) -> Result:
    """The rule of a GPU session. `allow_skip` tolerates a missing device if every shipped cell cross-compiles."""
    arch = facts.arch
    if facts.device is None:
        if not allow_skip:
            return Result(
                1, f"{arch}: RED - no device of this architecture, nothing was tested (-- --allow-skip compiles only)"
            )
        if facts.compile_errors:
            return Result(
                1, f"{arch}: RED - {len(facts.compile_errors)} of {facts.shipped} shipped cells do not compile"
            )
        return Result(
            0, f"{arch}: {facts.compiled} shipped cells cross-compiled, {facts.shipped} cells NOT RUN (no device)"
        )
    if facts.failed or facts.exit_code not in (0, 5):  # 5: pytest collected nothing, judged by the count below
        return Result(1, f"{arch}: RED - {facts.failed} failed of {facts.ran} GPU tests on {facts.device}")
    if facts.ran == 0:
        if allow_skip:
            return Result(0, f"{arch}: no GPU test ran on {facts.device}, allowed by --allow-skip")
        return Result(1, f"{arch}: RED - a device is here ({facts.device}) and no GPU test ran on it")
    passed = f"{facts.ran} GPU tests passed on {facts.device}"
    if facts.whole and facts.cells == 0 and not allow_skip:
        return Result(1, f"{arch}: RED - {passed}, but no shipped cell is planned for it (see --allow-skip)")
    if facts.whole and facts.cells < facts.shipped:
        return Result(1, f"{arch}: RED - {passed}, but only {facts.cells} of {facts.shipped} shipped cells ran")
    return Result(0, f"{arch}: green - {passed}, {facts.cells} shipped cells among them")


@dataclass
class RunCounter:
    """Pytest plug-in: counts tests marked `arch` whose body was really executed. A skipped test did not run. cells:
    names that tests which ran recorded as the property "cell"."""

    arch: str
    ran: int = 0
    cells: set[object] = field(default_factory=set)
    failed: int = 0
    marked: set[str] = field(default_factory=set)

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remember which tests carry the marker."""
        if item.get_closest_marker(self.arch):
            self.marked.add(item.nodeid)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count bodies that ran, and failures of set-up and tear-down too."""
        if report.nodeid not in self.marked:
            return
        if report.when == "call" and not report.skipped:
            self.ran += 1
            self.cells |= {value for name, value in report.user_properties if name == "cell"}
        if report.failed:
            self.failed += 1
