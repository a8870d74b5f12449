"""Check operands, compile and launch `bf16_stream`. Importing this module imports neither Triton nor a device.

`KERNEL` is the object that the plan loader, the dispatcher and the tests use; every kernel folder has one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels.bf16_stream import config as rules
from skinny_core.kernels.bf16_stream.config import BLOCK_M, STEM, VECTOR, StreamConfig
from skinny_core.problem import MAX_M, Epilogue, Problem


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compiler made for one architecture: PTX text, cubin bytes, dynamic shared memory in bytes."""

    ptx: str
    cubin: bytes
    shared_bytes: int


Launcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], None]
"""`(x [M, K], w [N, K], y [M, N], residual [M, N] or None, prewait)` on the current stream; writes y, allocates nothing.

prewait: request the first weight tiles before waiting for the preceding kernel. Raises `KernelRefusedError` for operands
outside the contract, before anything is launched.
"""


def arguments(
    problem: Problem, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None
) -> tuple[int, ...]:
    """`(M, N, K, stride_x, stride_w, stride_y, stride_r)` read from the tensors at call time.

    Raises `KernelRefusedError` where they are outside the contract: 16-byte loads need 16-byte addresses and row strides of
    x and w (contiguous does not imply aligned); y and residual may lie anywhere, with unit stride along N.
    """
    n, k = problem.n, problem.k
    m = x.shape[0] if x.dim() == 2 else 0
    if not 1 <= m <= MAX_M or x.shape[1] != k or w.shape != (n, k) or y.shape != (m, n):
        raise _refused(f"shapes x {tuple(x.shape)}, w {tuple(w.shape)}, y {tuple(y.shape)}", f"M 1-{MAX_M} of {problem}")
    dtype = problem.activation.torch
    if x.dtype != dtype or w.dtype != dtype or y.dtype != problem.output.torch:
        raise _refused(f"dtypes x {x.dtype}, w {w.dtype}, y {y.dtype}", f"the dtypes of {problem}")
    if not x.device == w.device == y.device:
        raise _refused(f"devices x {x.device}, w {w.device}, y {y.device}", "one device")
    # The stride of a dimension of size 1 is never used, and torch lets it be anything.
    stride_x, unit_x = x.stride()
    stride_w, unit_w = w.stride()
    stride_y, unit_y = y.stride()
    stride_x = k if m == 1 else stride_x
    stride_y = n if m == 1 else stride_y
    stride_w = k if n == 1 else stride_w
    if unit_x != 1 or unit_w != 1 or (unit_y != 1 and n != 1):
        raise _refused(f"strides x {x.stride()}, w {w.stride()}, y {y.stride()}", "unit stride in the last dimension")
    if (stride_x | stride_w) % VECTOR or (x.data_ptr() | w.data_ptr()) % 16:
        raise _refused("an address or row stride of x or w that is not a multiple of 16 bytes", "aligned operands")
    stride_r = 0
    if problem.epilogue is Epilogue.RESIDUAL:
        stride_r = _residual_stride(residual, x, y)
    elif residual is not None:
        raise _refused("a residual", f"none, as in {problem}")
    return m, n, k, stride_x, stride_w, stride_y, stride_r


def _residual_stride(residual: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor) -> int:
    if residual is None or residual.shape != y.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise _refused("no residual, or one unlike the output", f"{x.dtype} {tuple(y.shape)} on {x.device}")
    stride, unit = residual.stride()
    if unit != 1 and y.shape[1] != 1:
        raise _refused(f"strides residual {residual.stride()}", "unit stride in the last dimension")
    return stride


def _refused(what: str, wanted: str) -> KernelRefusedError:
    return KernelRefusedError(f"{STEM} cannot take {what}", f"pass {wanted}, or call torch.nn.functional.linear")


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _constants(config: StreamConfig, problem: Problem, *, pdl: bool, prefetch: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "EVEN_K": problem.k % config.block_k == 0,
        "HAS_RESIDUAL": problem.epilogue is Epilogue.RESIDUAL,
        "PDL": pdl,
        "PREFETCH": prefetch,
    }


def _compile(config: StreamConfig, problem: Problem, capability: int, *, prefetch: bool) -> Any:
    """A Triton CompiledKernel for one capability (90, 100, ...), from Triton's disk cache where it is there already.

    Compiled ahead from a stated signature rather than by a first launch: nothing runs on data, and the specialisation can
    not depend on the alignment of the first tensors seen. M, N, K and strides stay run-time values, so one binary serves
    every M and every shape that shares the flags of `_constants`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skinny_core.kernels.bf16_stream.kernel import stream_kernel

    pdl = capability >= 90
    constants = _constants(config, problem, pdl=pdl, prefetch=pdl and prefetch)
    element = {"x": problem.activation, "w": problem.activation, "y": problem.output, "residual": problem.activation}
    signature = {name: "constexpr" for name in stream_kernel.arg_names}
    signature |= {name: f"*{dtype.value}" for name, dtype in element.items()}
    signature |= dict.fromkeys(("M", "N", "K"), "i32")
    signature |= dict.fromkeys(("stride_x", "stride_w", "stride_y", "stride_r"), "i64")
    # What `arguments` enforces: 16-byte addresses; K and row strides of x and w in whole 16-byte vectors.
    divisible = {"x": 16, "w": 16, "K": VECTOR, "stride_x": VECTOR, "stride_w": VECTOR}
    place = stream_kernel.arg_names.index
    source = ASTSource(
        fn=stream_kernel,
        signature=signature,
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", by]] for name, by in divisible.items()},
    )
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.max_registers,
        "launch_pdl": pdl,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class _GpuLauncher:
    """Two loaded binaries of one Problem, with and without the early request of weight tiles."""

    __slots__ = ("_constants", "_index", "_problem", "_run", "_stream")

    def __init__(self, config: StreamConfig, problem: Problem, index: int) -> None:
        from triton.runtime import driver

        major, minor = torch.cuda.get_device_capability(index)
        grid = (-(-problem.n // config.block_n), 1, 1)
        self._problem = problem
        self._index = index
        self._stream = driver.active.get_current_stream
        # Constants are dropped by Triton's launcher, which still wants them in their places.
        self._constants = tuple(_constants(config, problem, pdl=True, prefetch=False).values())
        with torch.cuda.device(index):
            compiled = [_compile(config, problem, 10 * major + minor, prefetch=p) for p in (False, True)]
            self._run = [binary[grid] for binary in compiled]  # loads the module on this device

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, prewait: bool
    ) -> None:
        numbers = arguments(self._problem, x, w, y, residual)
        index = self._index
        if x.device.index != index:
            raise _refused(f"tensors on {x.device}", f"tensors on cuda:{index}, where it was compiled")
        # Addresses instead of tensors: Triton would ask the driver about every tensor.
        addresses = (x.data_ptr(), w.data_ptr(), y.data_ptr(), y.data_ptr() if residual is None else residual.data_ptr())
        run, stream = self._run[bool(prewait)], self._stream(index)
        if torch.cuda.current_device() == index:
            run(*addresses, *numbers, *self._constants, stream=stream)
        else:
            with torch.cuda.device(index):
                run(*addresses, *numbers, *self._constants, stream=stream)


class _InterpretedLauncher:
    """The same kernel source, run block by block in NumPy on CPU tensors."""

    __slots__ = ("_config", "_problem")

    def __init__(self, config: StreamConfig, problem: Problem) -> None:
        self._config = config
        self._problem = problem

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, prewait: bool
    ) -> None:
        import numpy

        from skinny_core.kernels.bf16_stream.kernel import stream_kernel

        numbers = arguments(self._problem, x, w, y, residual)
        constants = _constants(self._config, self._problem, pdl=False, prefetch=False)
        grid = (-(-self._problem.n // self._config.block_n),)
        with numpy.errstate(all="ignore"):  # Inf and NaN are values here, as on the GPU, not warnings
            stream_kernel[grid](x, w, y, y if residual is None else residual, *numbers, **constants)


class StreamKernel:
    """The kernel as the rest of the project sees it."""

    stem = STEM

    def config_from(self, params: Mapping[str, int]) -> StreamConfig:
        """Config from a plan cell's `config` table; raises `ConfigError`."""
        return StreamConfig.from_params(params)

    def params_of(self, config: StreamConfig) -> dict[str, int]:
        """The `config` table of a plan cell; inverse of `config_from`."""
        return asdict(config)

    def refuses(self, config: StreamConfig, problem: Problem, m: int) -> str | None:
        """Why this config cannot compute this Problem at M rows, or None."""
        return rules.refuses(config, problem, m)

    def candidates(self, problem: Problem, m: int) -> tuple[StreamConfig, ...]:
        """Configs worth measuring; empty where no config can compute it."""
        return rules.candidates(problem, m)

    def availability(self) -> tuple[bool, str]:
        """(True, Triton's version), or (False, the original import error). Never raises; asks no device."""
        return _availability()

    def compile(self, config: StreamConfig, problem: Problem, m: int, *, index: int) -> Launcher:
        """Compile (or take from Triton's disk cache) and load on CUDA device `index`; launches nothing.

        The result serves every M. Raises `KernelRefusedError` and `KernelUnavailableError`.
        """
        self._require(config, problem, m)
        return _GpuLauncher(config, problem, index)

    def interpret(self, config: StreamConfig, problem: Problem, m: int) -> Launcher:
        """Launcher for CPU tensors in Triton's interpreter; the process must have been started for it.

        Raises `skinny_core.testing.interpreter.InterpreterModeError` where it was not.
        """
        from skinny_core.testing import interpreter

        interpreter.install()
        if refusal := self.refuses(config, problem, m):
            raise _refused(refusal, "another config or problem")
        return _InterpretedLauncher(config, problem)

    def cross_compile(self, config: StreamConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Binary for `arch` ("sm_90a", "sm_100a", ...), on a machine with or without a GPU."""
        self._require(config, problem, m)
        capability = int(arch.removeprefix("sm_").removesuffix("a"))
        compiled = _compile(config, problem, capability, prefetch=prewait)
        return Binary(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared)

    def _require(self, config: StreamConfig, problem: Problem, m: int) -> None:
        if refusal := self.refuses(config, problem, m):
            raise _refused(refusal, "another config or problem")
        available, text = self.availability()
        if not available:
            raise KernelUnavailableError(f"{STEM} needs Triton: {text}", "install triton>=3.6 for this torch")
        if _interpreting():
            raise KernelUnavailableError(
                "TRITON_INTERPRET=1 is set, so Triton cannot compile in this process", "unset it and start again"
            )


@functools.cache
def _availability() -> tuple[bool, str]:
    try:
        import triton

        from skinny_core.kernels.bf16_stream import kernel  # noqa: F401
    except Exception as error:  # whatever a broken installation raises is the answer
        return False, f"{type(error).__name__}: {error}"
    return True, f"triton {triton.__version__}"


KERNEL = StreamKernel()
