"""Who races: this project's kernels, the call they replace (cuBLAS through `F.linear`), and peers where they can be
loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from skinny_core import kernels
from skinny_core.problem import KernelConfig, Problem
from skinny_lab.bench.race import Run

BASELINE = "cublas"
VLLM_CUTE = "vllm_cute"


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


def vllm_cute(folder: Path | None) -> Callable[[int, int, int, int], Run] | None:
    """vLLM's CuTe skinny GEMM from an installed vLLM, or from a folder with its `skinny_gemm.py` and `_skinny_gemm.py`.

    Returns a maker (block_size, outputs_per_block, k_unroll, m) -> Run, or None where it cannot be loaded.
    """
    module = _peer_module(folder)
    if module is None:
        return None
    gemm = module.ShapeDynamicSkinnyGemm()
    from cuda.bindings.driver import CUstream

    # The two host-specific look-ups, without the rest of vLLM; the kernel itself is theirs, unchanged.
    gemm._stream = lambda: CUstream(torch.cuda.current_stream().cuda_stream)
    gemm._use_pdl = lambda: True

    def make(block_size: int, outputs: int, unroll: int, m: int) -> Run:
        config = module.SkinnyGemmConfig(m, block_size, outputs, unroll)

        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
            key = (x.dtype, config, False)
            if key not in gemm._compiled:
                gemm._compile(x.dtype, config, False)
            gemm._compiled[key](x, w, y, y, gemm._stream())

        return run

    return make


def _peer_module(folder: Path | None) -> Any:
    name = "vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm"
    if folder is None:
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
    if not (folder / "skinny_gemm.py").is_file():
        return None
    package = ModuleType("skinny_peer_vllm_cute")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.skinny_gemm")
