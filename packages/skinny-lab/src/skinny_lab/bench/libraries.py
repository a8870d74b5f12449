"""Kernels of other libraries that compute `y = x @ w.T`, as contestants: vLLM's CuTe skinny GEMM, FlashInfer's
tinygemm, DeepGEMM's `bf16_gemm_nt`.

Each loader imports its library (optional, never a dependency) and raises what the import raises. All of them write
into a given y, allocate nothing and take the current stream, so that they can be captured.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from skinny_core.problem import DType, Epilogue, Problem
from skinny_lab.bench.race import Run

VLLM_CUTE = "vllm_cute"
TINYGEMM = "flashinfer_tinygemm"
DEEPGEMM = "deepgemm"
PDL = "_pdl"
"""Suffix of the form that is launched before the kernel ahead of it has ended (programmatic dependent launch)."""
NO_PDL = "_no_pdl"
"""Suffix of the other form, of a library whose own way is PDL."""

CuteConfig = tuple[int, int, int]
"""(block_size, outputs_per_block, k_unroll) of vLLM's kernel."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One kernel of a library, launched one way.

    refuses: why it cannot run a problem at M rows, or None. make: a contestant for a problem and M that it does not
    refuse. config: how that contestant is launched. jit: its machine code is made by a compiler at the first call and
    kept on disk, so that another process can make it beforehand. vendor_warns: the vendor says that it may hang here;
    race it only where another process has tried it.
    """

    name: str
    refuses: Callable[[Problem, int], str | None]
    make: Callable[[Problem, int], Run]
    config: Callable[[Problem, int], str]
    jit: bool = False
    vendor_warns: bool = False


def tinygemm() -> list[Peer]:
    """FlashInfer's `tinygemm_bf16`, without and with PDL. Its reference kernel or one of its generated SM90 programs
    runs, as FlashInfer decides by shape."""
    gemm: Any = importlib.import_module("flashinfer.gemm").tinygemm_bf16

    def form(pdl: bool) -> Peer:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
            gemm(x, w, y, bias=None, use_pdl=pdl)

        # FlashInfer's docstring: hangs unless all preceding kernels use PDL. Nothing in its source does, and the race's
        # preceding kernel does not use PDL: hence the trial in another process.
        name, config = TINYGEMM + PDL * pdl, f"use_pdl={pdl}"
        return Peer(name, refuses_tinygemm, lambda *_: run, lambda *_: config, jit=True, vendor_warns=pdl)

    return [form(False), form(True)]


def refuses_tinygemm(problem: Problem, m: int) -> str | None:
    """The documented limits of `tinygemm_bf16`; its tiles take any number of rows."""
    if problem.n % 16:
        return f"N = {problem.n} is not a multiple of 16"
    if problem.k % 64:
        return f"K = {problem.k} is not a multiple of 64"
    return _refuses_all_but_bf16(problem)


def deepgemm() -> list[Peer]:
    """DeepGEMM's `bf16_gemm_nt`, without and with PDL (a switch of the library, set before every call)."""
    library = importlib.import_module("deep_gemm")
    use_torch_stream: Any = importlib.import_module("tvm_ffi").use_torch_stream
    gemm: Any = library.bf16_gemm_nt
    set_pdl: Any = getattr(library, "set_pdl", None)

    def form(pdl: bool) -> Peer:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
            if set_pdl is not None:
                set_pdl(pdl)
            with use_torch_stream():
                gemm(x, w, y)

        name, config = DEEPGEMM + PDL * pdl, f"pdl={pdl}"
        return Peer(name, refuses_deepgemm, lambda *_: run, lambda *_: config, jit=True)

    return [form(False)] if set_pdl is None else [form(False), form(True)]


def refuses_deepgemm(problem: Problem, m: int) -> str | None:
    """What its SM90 kernel takes: whole blocks along K, rows of the output that start at multiples of 16 bytes."""
    if problem.k % 64:
        return f"K = {problem.k} is not a multiple of 64"
    if problem.n % 8:
        return f"N = {problem.n} is not a multiple of 8"
    return _refuses_all_but_bf16(problem)


def vllm_cute(folder: Path | None, configs: Mapping[tuple[int, int, int], CuteConfig]) -> list[Peer]:
    """vLLM's CuTe skinny GEMM from an installed vLLM, or from a folder with its `skinny_gemm.py` and `_skinny_gemm.py`:
    as vLLM launches it, with PDL, and without, which in a graph may be faster.

    configs: (N, K, M) -> the best of a sweep. A shape that was swept at other M takes the config of the next larger
    one, a shape that was not swept what vLLM's own heuristic says. Raises what the import raises.
    """
    module = _cute_module(folder)
    from cuda.bindings.driver import CUstream

    def made(pdl: bool) -> Any:
        """Their launcher. Replaced are the two host-specific look-ups; the kernel itself is unchanged."""
        gemm = module.ShapeDynamicSkinnyGemm()
        gemm._stream = lambda: CUstream(torch.cuda.current_stream().cuda_stream)
        gemm._use_pdl = lambda: pdl
        return gemm

    launchers = {VLLM_CUTE: made(True), VLLM_CUTE + NO_PDL: made(False)}

    def choose(problem: Problem, m: int) -> Any:
        """Swept where it was, else what vLLM would take."""
        found = swept_config(configs, problem.n, problem.k, m)
        if found is None:
            return launchers[VLLM_CUTE]._config(m, problem.n, problem.k)
        return module.SkinnyGemmConfig(m, *found)

    def refuses(problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        if m > CUTE_MAX_M:
            return f"M = {m}: vLLM's kernel is far behind cuBLAS from M = 8 on (0.62x there) and is not raced beyond"
        config = choose(problem, m)
        if problem.n % config.outputs_per_block or problem.k % (config.block_size * config.vector_width):
            return f"N = {problem.n}, K = {problem.k} are not whole blocks of {config}"
        return _refuses_fused(problem)

    def make(gemm: Any, problem: Problem, m: int) -> Run:
        """Compiles at the first run, in this process."""
        config = choose(problem, m)

        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
            key = (x.dtype, config, False)
            if key not in gemm._compiled:
                gemm._compile(x.dtype, config, False)
            gemm._compiled[key](x, w, y, y, gemm._stream())

        return run

    def says(problem: Problem, m: int) -> str:
        """The parameters of `peer_configs.csv`."""
        c = choose(problem, m)
        return f"block_size={c.block_size}, outputs_per_block={c.outputs_per_block}, k_unroll={c.k_unroll}"

    return [Peer(name, refuses, functools.partial(make, gemm), says) for name, gemm in launchers.items()]


CUTE_MAX_M = 8
"""Largest M that the sweep of its configs covers."""


def swept_config(configs: Mapping[tuple[int, int, int], CuteConfig], n: int, k: int, m: int) -> CuteConfig | None:
    """The config of the smallest swept M that is at least m, or None."""
    return next((configs[n, k, at] for at in range(m, CUTE_MAX_M + 1) if (n, k, at) in configs), None)


def _refuses_fused(problem: Problem) -> str | None:
    if problem.output is not problem.activation or problem.epilogue is not Epilogue.NONE:
        return "only a plain product with the output in the input dtype"
    return None


def _refuses_all_but_bf16(problem: Problem) -> str | None:
    if problem.activation is not DType.BF16 or problem.weight.value != DType.BF16.value:
        return f"{problem.weight.value} weight, {problem.activation.value} activation: only bf16"
    return _refuses_fused(problem)


def _cute_module(folder: Path | None) -> Any:
    name = "vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm"
    if folder is None:
        return importlib.import_module(name)
    if not (folder / "skinny_gemm.py").is_file():
        raise FileNotFoundError(f"{folder} holds no skinny_gemm.py")
    package = ModuleType("skinny_peer_vllm_cute")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.skinny_gemm")
