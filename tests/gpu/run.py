"""Run the GPU tests of one architecture behind the gate. Needs only torch and pytest.

Usage: `python3 -m tests.gpu.run --arch sm90 [--allow-skip] [pytest arguments]`
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import checkout
from tests.gpu.gate import CAPABILITIES, Facts, Result, RunCounter, judge

EVERYWHERE = ["tests/gpu", "tests/hosts/transformers/test_on_gpu.py"]
"""Where GPU tests live; a test checks that no marked file is left out."""


def matching_device(arch: str) -> str | None:
    """Name of the first visible GPU with exactly the capability of `arch`."""
    import torch

    if not torch.cuda.is_available():
        return None
    wanted = CAPABILITIES[arch]
    indices = range(torch.cuda.device_count())
    return next((torch.cuda.get_device_name(i) for i in indices if torch.cuda.get_device_capability(i) == wanted), None)


def run_tests(arch: str, device: str, arguments: list[str]) -> Facts:
    """Run every test marked for `arch` in this process and count."""
    from skinny_core.device import current_key
    from tests.gpu.shipped import shipped_cells

    counter = RunCounter(arch)
    # Warnings of whatever torch and hosts are on a GPU machine are not this gate's business.
    options = ["-m", arch, "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *(arguments or EVERYWHERE)], plugins=[counter])
    return Facts(
        arch=arch, device=device, ran=counter.ran, cells=len(counter.cells), failed=counter.failed,
        exit_code=int(code), shipped=sum(one.device == current_key() for one in shipped_cells(CAPABILITIES[arch])),
        whole=not arguments,
    )  # fmt: skip


def record(facts: Facts, result: Result, path: Path) -> None:
    """Write what happened as JSON, with the machine: device, driver of torch, versions, date."""
    import datetime

    import torch

    found = {**asdict(facts), "line": result.line, "code": result.code, "torch": str(torch.__version__)}
    found["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    path.write_text(json.dumps(found, indent=1) + "\n")


def compile_all(arch: str) -> Facts:
    """Cross-compile every shipped `win` cell that was planned for `arch`, without a device: each machine code once."""
    from tests.gpu.shipped import by_code, cross_compile, shipped_cells

    cells = shipped_cells(CAPABILITIES[arch])
    errors = []
    for group in by_code(cells):
        if error := cross_compile(group[0]):
            errors += [error, *(f"{one.name}: the same machine code as {group[0].name}" for one in group[1:])]
    for error in errors:
        print(error)
    done = len(cells) - len(errors)
    return Facts(arch=arch, device=None, compiled=done, shipped=len(cells), compile_errors=tuple(errors))


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status of the gate."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu.run", description=__doc__)
    parser.add_argument("--arch", required=True, choices=sorted(CAPABILITIES))
    parser.add_argument(
        "--allow-skip", action="store_true", help="no device is fine: cross-compile the shipped cells instead"
    )
    parser.add_argument("--record", type=Path, help="write the outcome as JSON")
    options, arguments = parser.parse_known_args(argv)
    checkout.activate()
    device = matching_device(options.arch)
    if device is not None:
        facts = run_tests(options.arch, device, arguments)
    elif options.allow_skip:
        facts = compile_all(options.arch)
    else:
        facts = Facts(arch=options.arch, device=None)
    result = judge(facts, allow_skip=options.allow_skip)
    if options.record:
        record(facts, result, options.record)
    print(result.line)
    return result.code


if __name__ == "__main__":
    sys.exit(main())
