"""Check operands and launch `bf16_stream`. Importing this module imports neither Triton nor a device."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from skinny_core import device, env
from skinny_core.errors import KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, operands, triton_objects
from skinny_core.kernels.bf16_stream import build
from skinny_core.kernels.bf16_stream import config as _config
from skinny_core.kernels.bf16_stream.config import STEM, Spec, StreamConfig
from skinny_core.problem import MAX_M, Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey


class _GpuLauncher:
    """Two loaded binaries of one Problem: one waits for the preceding kernel before it does anything, one requests the
    first weight tiles before. Addresses, strides, M and the stream are read at every call."""

    __slots__ = ("_constants", "_current_device", "_index", "_late", "_problem", "_run", "_stream")

    def __init__(self, config: StreamConfig, problem: Problem, key: DeviceKey, index: int, *, prewait: bool) -> None:
        import torch

        pdl = key.has_pdl and env.settings().pdl
        plain = Spec.of(config, problem, pdl=pdl, prefetch=False)
        early = Spec.of(config, problem, pdl=pdl, prefetch=prewait)
        grid = (-(-problem.n // config.block_n), 1, 1)
        self._problem = problem
        self._index = index
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        # Triton's launcher drops the constants, but wants them in their places.
        self._constants = tuple(plain.constants.values())
        with torch.cuda.device(index):  # indexing by the grid loads the module on the current device
            self._run = triton_objects.load(build.SOURCE, plain, key, index)[grid]
            self._late = triton_objects.load(build.SOURCE, early, key, index)[grid]

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        residual: torch.Tensor | None,
        x_stride: int,
        y_stride: int,
        residual_stride: int,
        prewait: bool,
    ) -> None:
        """Launch; see `kernels.Launcher`. Only what would be undefined on the device is checked here."""
        problem = self._problem
        m = x.numel() // problem.k
        x_at, w_at, w_stride = x.data_ptr(), w.data_ptr(), w.stride(0)
        if m == 1:
            x_stride = problem.k
        if not (operands.is_aligned(x_at, w_at, x_stride, w_stride) and 1 <= m <= MAX_M):
            operands.check(STEM, problem, x, w, y, residual, x_stride, y_stride, residual_stride)
            w_stride = problem.k  # all that `check` lets through: a single row, whose stride is not used
        if self._current_device() != self._index:
            import torch

            with torch.cuda.device(self._index):
                self(x, w, y, residual, x_stride, y_stride, residual_stride, prewait)
            return
        y_at = y.data_ptr()
        run = self._late if prewait else self._run
        run(
            # Addresses instead of tensors: Triton would ask the driver about every tensor.
            x_at, w_at, y_at, y_at if residual is None else residual.data_ptr(), m, problem.n, problem.k,
            x_stride, w_stride, y_stride, residual_stride, *self._constants, stream=self._stream(self._index),
        )  # fmt: skip


class _InterpretedLauncher:
    """The same kernel source, run block by block in NumPy on CPU tensors."""

    __slots__ = ("_problem", "_spec")

    def __init__(self, config: StreamConfig, problem: Problem) -> None:
        self._problem = problem
        self._spec = Spec.of(config, problem, pdl=False, prefetch=False)

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        residual: torch.Tensor | None,
        x_stride: int,
        y_stride: int,
        residual_stride: int,
        prewait: bool,
    ) -> None:
        """Check and compute; see `kernels.Launcher`."""
        import numpy

        from skinny_core.kernels.bf16_stream.kernel import stream_kernel

        problem = self._problem
        operands.check(STEM, problem, x, w, y, residual, x_stride, y_stride, residual_stride)
        m = x.numel() // problem.k
        strides = x_stride if m > 1 else problem.k, w.stride(0), y_stride, residual_stride
        grid = (-(-problem.n // self._spec.config.block_n),)
        tensors = x, w, y, y if residual is None else residual
        with numpy.errstate(all="ignore"):  # Inf and NaN are values here, as on the GPU, not warnings
            stream_kernel[grid](*tensors, m, problem.n, problem.k, *strides, **self._spec.constants)


class Bf16Stream:
    """The kernel as the dispatcher, the tuner and the tests see it (`kernels.Kernel`)."""

    stem = STEM

    def config_from(self, params: Mapping[str, int]) -> StreamConfig:
        """Typed config; raises `ConfigError`."""
        return StreamConfig.from_params(params)

    def params_of(self, config: StreamConfig) -> dict[str, int]:
        """Plan data of a config."""
        return asdict(config)

    def refuses(self, config: StreamConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def availability(self) -> tuple[bool, str]:
        """Whether Triton imports; else the original error."""
        return _availability()

    def candidates(self, problem: Problem, m: int) -> tuple[StreamConfig, ...]:
        """Configs worth measuring; empty where no config can compute it."""
        return _config.candidates(problem, m)

    def compile(self, config: StreamConfig, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
        """Compile or load for CUDA device `index`; raises `KernelRefusedError`, `KernelUnavailableError`.

        The result serves every M; launches nothing.
        """
        self._require(config, problem, m)
        key = device.current_key(index)
        if key is None:
            raise KernelUnavailableError(f"{STEM} needs a CUDA device", "run on a machine with one")
        problem = operands.on_device(self, config, problem, m, key)
        return _GpuLauncher(config, problem, key, index, prewait=prewait)

    def interpret(self, config: StreamConfig, problem: Problem, m: int) -> Launcher:
        """Launcher for CPU tensors, in Triton's interpreter.

        Raises `skinny_core.testing.interpreter.InterpreterModeError` where this process was not started for it.
        """
        from skinny_core.testing import interpreter

        interpreter.install()
        if refusal := self.refuses(config, problem, m):
            raise operands.refused(STEM, refusal, "another config or problem")
        return _InterpretedLauncher(config, problem)

    def prepare(self, config: StreamConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache; touches no device."""
        problem = operands.on_device(self, config, problem, m, key)
        self._require(config, problem, m)
        for spec in _specs(config, problem, key, prewait=prewait):
            triton_objects.stored(build.SOURCE, spec, key)

    def prepared(self, config: StreamConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make. Raises `KernelRefusedError`."""
        problem = operands.on_device(self, config, problem, m, key)
        return all(
            triton_objects.is_stored(build.SOURCE, spec, key) for spec in _specs(config, problem, key, prewait=prewait)
        )

    def codes(
        self, config: StreamConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool
    ) -> frozenset[Hashable]:
        """The specs that `prepare` compiles; one serves every M and every shape with the same flags."""
        return frozenset((STEM, spec) for spec in _specs(config, problem, key, prewait=prewait))

    def cross_compile(
        self, config: StreamConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True
    ) -> Binary:
        """Machine code for `arch` ("sm_90a", ...), no device needed."""
        self._require(config, problem, m)
        spec = Spec.of(config, problem, pdl=True, prefetch=prewait)
        return triton_objects.binary(build.SOURCE, spec, int(arch.removeprefix("sm_").removesuffix("a")))

    def _require(self, config: StreamConfig, problem: Problem, m: int) -> None:
        if refusal := self.refuses(config, problem, m):
            raise operands.refused(STEM, refusal, "another config or problem")
        triton_objects.require(STEM, self.availability())


def _specs(config: StreamConfig, problem: Problem, key: DeviceKey, *, prewait: bool) -> set[Spec]:
    pdl = key.has_pdl and env.settings().pdl
    return {Spec.of(config, problem, pdl=pdl, prefetch=p) for p in (False, prewait)}


@functools.cache
def _availability() -> tuple[bool, str]:
    try:
        from skinny_core.kernels.bf16_stream import kernel  # noqa: F401
    except Exception as error:  # whatever a broken installation raises is the answer
        return False, f"{type(error).__name__}: {error}"
    return True, ""


KERNEL = Bf16Stream()
