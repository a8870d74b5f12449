"""Host cost of one eager call in microseconds: `F.linear`, the op and the plain entry, planned and unplanned.

`python benchmarks/host_cost.py` on a CUDA machine. The GPU work is kept tiny and the queue short, so that the time is
that of the calling thread; loops alternate, the median of 15 is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch.nn.functional import linear as torch_linear

from skinny_core import device, dispatch, op, plan, warmup
from skinny_core.problem import DType
from skinny_lab.bench import machine

CALLS, ROUNDS = 400, 15
N, K = 256, 512


def main() -> None:
    """Measure and print one line per entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    arguments = parser.parse_args()
    if device.current_key() is None:
        parser.error("needs a CUDA device")
    w = torch.randn(N, K, dtype=torch.bfloat16, device="cuda") * K**-0.5
    x = torch.randn(1, K, dtype=torch.bfloat16, device="cuda")
    wide = torch.randn(17, K, dtype=torch.bfloat16, device="cuda")
    _activate_cell()
    call_op = op.linear.default
    entries: dict[str, Callable[[], object]] = {
        "F.linear M=1": lambda: torch_linear(x, w),
        "plain entry, planned M=1": lambda: dispatch.linear(x, w, "host-cost"),
        "op, planned M=1": lambda: call_op(x, w, "host-cost"),
        "F.linear M=17": lambda: torch_linear(wide, w),
        "plain entry, unplanned M=17": lambda: dispatch.linear(wide, w, "host-cost"),
        "op, unplanned M=17": lambda: call_op(wide, w, "host-cost"),
    }
    found: dict[str, list[float]] = {name: [] for name in entries}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, call in entries.items():
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(CALLS):
                    call()
                found[name].append((time.perf_counter() - begun) / CALLS * 1e6)
    assert dispatch.counters().get(("host-cost", N, K, 1, "kernel:bf16_simt"), 0) >= CALLS
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    for name, value in medians.items():
        base = medians["F.linear M=1" if "M=1" in name and "M=17" not in name else "F.linear M=17"]
        print(f"{name:30s} {value:7.2f} us  {value - base:+6.2f}")
    if arguments.out:
        where = msgspec.to_builtins(machine.environment(commit=arguments.commit))
        arguments.out.write_text(json.dumps({"environment": where, "us": medians}, indent=1) + "\n")


def _activate_cell() -> None:
    """A one-cell plan for this device, made up for its host cost only: its times are not a measurement and are not
    kept.
    """
    key = device.current_key()
    assert key is not None
    any_time = plan.Quantiles(1.0, 1.0, 1.0)
    cell = plan.Cell(
        id="host-cost", n=N, k=K, m=1, status="win", kernel="bf16_simt", config={"threads": 64, "rows": 2, "chunks": 1},
        evidence=plan.Evidence(
            candidate=any_time, baseline=any_time, candidate_hot=any_time, baseline_hot=any_time, baseline_name="none",
            rounds=1, rel_rmse=0.0,
        ),
    )  # fmt: skip
    dispatch.activate_cells("host-cost", key, (cell,))
    warmup.warm("host-cost", [(N, K, DType.BF16)])


if __name__ == "__main__":
    main()
