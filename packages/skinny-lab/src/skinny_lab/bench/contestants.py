"""Who races: this project's kernels and the call they replace (cuBLAS through `F.linear`). Peers: `libraries`."""

from __future__ import annotations

import torch

from skinny_core import kernels
from skinny_core.problem import KernelConfig, Problem
from skinny_lab.bench.race import Run

BASELINE = "cublas"


def cublas() -> Run:
    """What a host runs, into a preallocated output: the cuBLAS call behind `F.linear`, or behind `torch.mm` with an
    FP32
    output."""

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        if y.dtype == x.dtype:
            torch.mm(x, w.t(), out=y)
        else:
            torch.mm(x, w.t(), out_dtype=y.dtype, out=y)

    return run


def ours(config: KernelConfig, problem: Problem, m: int, *, prewait: bool = True) -> Run:
    """One of our kernels with one config; compiles it. prewait as in a captured decode step, where no kernel writes
    weights.
    """
    kernel = kernels.get(config.kernel)
    index = torch.cuda.current_device()
    launch = kernel.compile(kernel.config_from(dict(config.params)), problem, m, index=index, prewait=prewait)

    def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        launch(x, w, y, None, x.stride(0), y.stride(0), 0, prewait)

    return run
