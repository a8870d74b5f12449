"""compute-sanitizer over every kernel: `python3 -m tests.gpu.sanitize [--record FILE]` on a machine with a GPU and the
CUDA toolkit. Red where a tool finds something, is missing, or where the program under it did not run to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_RAN = re.compile(r"^ran (\d+) configs$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One tool's run. errors: -1 where it printed no summary. configs: that ran under it. tail: end of a bad log."""

    tool: str
    errors: int
    configs: int
    exit_code: int
    tail: str = ""

    @property
    def clean(self) -> bool:
        """Nothing found, and everything ran."""
        return self.errors == 0 and self.configs > 0 and self.exit_code == 0


def run(tool: str, program: Sequence[str], *, timeout: float) -> Outcome:
    """Run the program under one tool."""
    # Each tensor an allocation of its own: inside one cached block no access is out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # Failing calls of the driver's API are not memory errors: the DSL asks for a context that does not exist yet.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9", *program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, code = f"longer than {timeout:.0f} s", 124
    summary, ran = _SUMMARY.findall(text), _RAN.findall(text)
    found = Outcome(tool, int(summary[-1]) if summary else -1, int(ran[-1]) if ran else 0, code)
    return found if found.clean else Outcome(tool, found.errors, found.configs, code, text[-3000:])


def main(argv: list[str] | None = None) -> int:
    """Run the tools one after another; 0 only if all are clean."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per tool")
    parser.add_argument("--record", type=Path, help="write the outcome as JSON")
    given = parser.parse_args(argv)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: install the CUDA toolkit; nothing was checked")
        return 1
    outcomes = [run(tool, [sys.executable, "-m", "tests.gpu.sanitized"], timeout=given.timeout) for tool in given.tools]
    for outcome in outcomes:
        state = "clean" if outcome.clean else "RED"
        print(f"{outcome.tool}: {state}, {outcome.errors} errors, {outcome.configs} configs, exit {outcome.exit_code}")
        print(outcome.tail, end="\n" if outcome.tail else "")
    if given.record:
        given.record.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if all(outcome.clean for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
