"""Host side of `bf16_bulk`: compile once for every 8 rows of the activation, launch with raw addresses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skinny_core import device, env
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, cute_objects, operands
from skinny_core.kernels.bf16_bulk import config as _config
from skinny_core.kernels.bf16_bulk.config import STEM, BulkConfig, Shape, Spec
from skinny_core.problem import Epilogue, Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey


_EPILOGUES = {Epilogue.NONE: "none", Epilogue.RESIDUAL: "add", Epilogue.BIAS: "add", Epilogue.SILU_MUL: "silu_mul"}


def _arguments(_: Spec) -> tuple[Any, ...]:
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    return (*[Int64(0)] * 4, *[Int32(1)] * 3, *[Int64(0)] * 4, *[Int32(1)] * 6, make_fake_stream())


SOURCE = cute_objects.Source(STEM, (f"{STEM}/multiply.py", f"{STEM}/config.py", f"{STEM}/host.py"), _arguments)


class _Launcher:
    """Calls the compiled function. Addresses, strides and the stream are read at every call; nothing is kept alive."""

    def __init__(self, spec: Spec, problem: Problem, m: int, index: int, sm_count: int, *, prewait: bool) -> None:
        import torch

        shape = Shape.of(spec.config, problem, m, spec.shared_bytes, sm_count)
        self._layout = shape.arguments
        self._sizes = (m, shape.outputs, problem.k)
        self._index = index
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        self._wait_first = _load(spec, index)
        # Without a promise about the weight, both forms are the one that waits before it reads anything.
        self._wait_late = _load(replace(spec, prewait=True), index) if prewait and spec.pdl else self._wait_first

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
        """Launch; see `kernels.Launcher`."""
        if self._current_device() != self._index:
            import torch

            with torch.cuda.device(self._index):
                self(x, w, y, residual, x_stride, y_stride, residual_stride, prewait)
            return
        m, _, k = self._sizes
        x_at, w_at, w_stride = x.data_ptr(), w.data_ptr(), w.stride(0)
        # Only what would be undefined on the device; whoever names a kernel has the rest checked by `explicit.run`.
        if m == 1:
            x_stride = 0
        if x.numel() != m * k or not operands.is_aligned(x_at, w_at, x_stride, w_stride):
            raise operands.refused(
                STEM, f"x {tuple(x.shape)} or its alignment", f"M = {m} rows of K = {k}, 16-byte aligned"
            )
        function = self._wait_late if prewait else self._wait_first
        function(
            x_at,
            w_at,
            y.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            *self._sizes,
            x_stride,
            w_stride,
            y_stride,
            residual_stride,
            *self._layout,
            self._stream(self._index),
        )


class Bf16Bulk:
    """The kernel as the dispatcher, the tuner and the tests see it (`kernels.Kernel`)."""

    stem = STEM

    def config_from(self, params: Mapping[str, int]) -> BulkConfig:
        """Typed config; raises `ConfigError`."""
        return BulkConfig.from_params(params)

    def params_of(self, config: BulkConfig) -> dict[str, int]:
        """Plan data of a config."""
        return config.to_params()

    def refuses(self, config: BulkConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def availability(self) -> tuple[bool, str]:
        """Whether CuTe DSL and TVM-FFI import; else the original error."""
        return cute_objects.availability(SOURCE)

    def candidates(self, problem: Problem, m: int) -> tuple[BulkConfig, ...]:
        """Configs worth racing: segments of 0.5 to 4 KB, stages of 16 to 64 KB, one or two blocks an SM, the
        activation resident where it fits and read again otherwise.
        """
        found = []
        for rows, cols, warps, blocks, resident in itertools.product(
            (16, 32, 64), (256, 512, 1024, 2048), (4, 8), (1, 2), (0, 1)
        ):
            config = BulkConfig(rows, cols, warps, blocks, resident)
            if not 8192 <= rows * cols <= 32768 or self.refuses(config, problem, m):
                continue
            found.append(config)
        return tuple(found)

    def compile(self, config: BulkConfig, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
        """Compile or load for CUDA device `index`; raises `KernelRefusedError`, `KernelUnavailableError`."""
        why = self.refuses(config, problem, m)
        if why:
            raise KernelRefusedError(f"{STEM} cannot run {problem} at M = {m}: {why}", "choose another config")
        ok, error = self.availability()
        if not ok:
            raise KernelUnavailableError(f"{STEM} needs CuTe DSL: {error}", "pip install 'skinny-core[cute]'")
        key = device.current_key(index)
        if key is None:
            raise KernelUnavailableError(f"{STEM} needs a CUDA device", "run on a machine with one")
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, key.capability, pdl=key.has_pdl)
        return _Launcher(spec, problem, m, index, key.sm_count, prewait=prewait)

    def prepare(self, config: BulkConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache. Touches no device, so worker processes can share the
        work. Raises `KernelRefusedError`.
        """
        problem = operands.on_device(self, config, problem, m, key)
        for spec in _forms(_spec(config, problem, m, key.capability, pdl=key.has_pdl), prewait=prewait):
            cute_objects.stored(SOURCE, spec, _name(spec), key)

    def prepared(self, config: BulkConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make. Raises `KernelRefusedError`."""
        problem = operands.on_device(self, config, problem, m, key)
        specs = _forms(_spec(config, problem, m, key.capability, pdl=key.has_pdl), prewait=prewait)
        return all(cute_objects.is_stored(SOURCE, spec, _name(spec), key) for spec in specs)

    def cross_compile(self, config: BulkConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Machine code for `arch`, no device needed."""
        digits = arch.removeprefix("sm_").removesuffix("a")
        spec = replace(_spec(config, problem, m, (int(digits[:-1]), int(digits[-1])), pdl=True), prewait=prewait)
        return cute_objects.binary(SOURCE, spec, arch, spec.shared_bytes)


KERNEL = Bf16Bulk()


def _spec(config: BulkConfig, problem: Problem, m: int, capability: tuple[int, int], *, pdl: bool) -> Spec:
    return Spec(
        config=config,
        m_tiles=_config.m_tiles(m),
        dtype=problem.activation.value,
        output=problem.output.value,
        epilogue=_EPILOGUES[problem.epilogue],
        shared_bytes=config.shared_bytes(capability),
        pdl=pdl and env.settings().pdl,
        prewait=False,
    )


def _forms(spec: Spec, *, prewait: bool) -> tuple[Spec, ...]:
    """The spec, and with a promise about the weight also the form that reads it before the wait."""
    return (spec, replace(spec, prewait=True)) if prewait and spec.pdl else (spec,)


def _name(spec: Spec) -> str:
    return f"{STEM}-m{8 * spec.m_tiles}"


def _load(spec: Spec, index: int) -> Any:
    return cute_objects.load(SOURCE, spec, _name(spec), index)
