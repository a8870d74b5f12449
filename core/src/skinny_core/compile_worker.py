"""`python -m skinny_core.compile_worker`: read compile jobs as JSON lines, fill the disk cache, touch no device.

A process of its own rather than multiprocessing, whose spawn method runs the host's main script again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme


def main() -> int:
    """Exit status: the number of jobs that failed (their text goes to stderr), at most 100."""
    failed = 0
    for line in filter(None, map(str.strip, sys.stdin)):
        try:
            _run(json.loads(line))
        except Exception as error:  # one job's failure must not lose the jobs behind it
            failed += 1
            print(f"{line}: {type(error).__name__}: {error}", file=sys.stderr)
    return min(failed, 100)


def _run(job: dict[str, Any]) -> None:
    p = job["problem"]
    problem = Problem(
        n=p["n"],
        k=p["k"],
        weight=WeightScheme(p["weight"]),
        activation=DType(p["activation"]),
        output=DType(p["output"]),
        epilogue=Epilogue(p["epilogue"]),
    )
    key = DeviceKey(tuple(job["key"]["capability"]), *(job["key"][f] for f in ("sm_count", "l2_bytes", "memory_class")))
    kernel = kernels.get(job["kernel"])
    kernel.prepare(kernel.config_from(job["params"]), problem, job["m"], key, prewait=job["prewait"])


if __name__ == "__main__":
    sys.exit(main())
