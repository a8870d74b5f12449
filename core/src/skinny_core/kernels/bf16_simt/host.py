"""Host side of `bf16_simt`: compile once, launch with raw addresses (no DLPack, so a weight that requires grad is
fine).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skinny_core import device
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, cute_objects, operands
from skinny_core.kernels.bf16_simt import config as _config
from skinny_core.kernels.bf16_simt.config import SimtConfig, Spec
from skinny_core.problem import Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey

STEM = "bf16_simt"


def _arguments(_: Spec) -> tuple[Any, ...]:
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    addresses, strides = [Int64(0)] * 4, [Int64(0)] * 4
    return (*addresses, Int32(1), *strides, Int32(1), make_fake_stream())


SOURCE = cute_objects.Source(STEM, (f"{STEM}/config.py", f"{STEM}/host.py"), _arguments)


class _Launcher:
    """Calls the compiled function. Addresses, strides and the stream are read at every call; nothing is kept alive."""

    def __init__(self, spec: Spec, problem: Problem, index: int, sm_count: int, *, prewait: bool) -> None:
        import torch

        self._problem = problem
        self._n = problem.n
        self._k = problem.k
        self._m = spec.m
        self._index = index
        self._grid_cap = max(1, sm_count * spec.config.blocks_per_sm)
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
        x_at, w_at, w_stride = x.data_ptr(), w.data_ptr(), w.stride(0)
        # Only what would be undefined on the device; whoever names a kernel has the rest checked by `explicit.run`.
        if self._m == 1:
            x_stride = 0
        if x.numel() != self._m * self._k or not operands.is_aligned(x_at, w_at, x_stride, w_stride):
            raise operands.refused(
                STEM, f"x {tuple(x.shape)} or its alignment", f"M = {self._m} rows of K = {self._k}, 16-byte aligned"
            )
        function = self._wait_late if prewait else self._wait_first
        function(
            x_at,
            w_at,
            y.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            self._n,
            x_stride,
            w_stride,
            y_stride,
            residual_stride,
            self._grid_cap,
            self._stream(self._index),
        )


class Bf16Simt:
    """The kernel as the dispatcher, the tuner and the tests see it (`kernels.Kernel`)."""

    stem = STEM

    def config_from(self, params: Mapping[str, int]) -> SimtConfig:
        """Typed config; raises `ConfigError`."""
        return SimtConfig.from_params(params)

    def params_of(self, config: SimtConfig) -> dict[str, int]:
        """Plan data of a config."""
        return config.to_params()

    def refuses(self, config: SimtConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def availability(self) -> tuple[bool, str]:
        """Whether CuTe DSL and TVM-FFI import; else the original error."""
        return cute_objects.availability(SOURCE)

    def candidates(self, problem: Problem, m: int) -> tuple[SimtConfig, ...]:
        """Configs worth racing: at most a tenth of the threads' reach past K is wasted, 2 to 10 loads of 16 bytes in
        flight per thread, and persistent grids of about 1024 threads per SM where a row fits in registers.

        Their best is within 1.5 % of the best of 558 configs in each of 30 cells (benchmarks/results/h200/sweeps; a
        test compares).
        """
        found = []
        for threads in (64, 128, 160, 256, 320, 512):
            row_chunks = -(-problem.k // (threads * _config.VECTOR))
            waste = row_chunks * threads * _config.VECTOR / problem.k - 1
            if waste > 0.1 and threads != 64:
                continue
            for rows, chunks in itertools.product((1, 2, 4), sorted({1, 2, 4, row_chunks})):
                if chunks > min(row_chunks, 5) or rows * chunks not in (2, 3, 4, 8, 10):
                    continue
                resident = chunks == row_chunks
                for blocks in (
                    (0, 1024 // threads) if resident and 1024 // threads in _config.ALLOWED["blocks_per_sm"] else (0,)
                ):
                    config = SimtConfig(threads, rows, chunks, blocks)
                    if self.refuses(config, problem, m) is None:
                        found.append(config)
        return tuple(found)

    def compile(self, config: SimtConfig, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
        """Compile or load for CUDA device `index`; raises `KernelRefusedError`, `KernelUnavailableError`."""
        why = self.refuses(config, problem, m)
        if why:
            raise KernelRefusedError(f"bf16_simt cannot run {problem} at M = {m}: {why}", "choose another config")
        ok, error = self.availability()
        if not ok:
            raise KernelUnavailableError(f"bf16_simt needs CuTe DSL: {error}", "pip install 'skinny-core[cute]'")
        key = device.current_key(index)
        if key is None:
            raise KernelUnavailableError("bf16_simt needs a CUDA device", "run on a machine with one")
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        return _Launcher(spec, problem, index, key.sm_count, prewait=prewait)

    def prepare(self, config: SimtConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache. Touches no device, so worker processes can share the
        work. Raises `KernelRefusedError`.
        """
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        for each in _forms(spec, prewait=prewait):
            cute_objects.stored(SOURCE, each, _name(each), key)

    def prepared(self, config: SimtConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make. Raises `KernelRefusedError`."""
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        return all(cute_objects.is_stored(SOURCE, s, _name(s), key) for s in _forms(spec, prewait=prewait))

    def cross_compile(self, config: SimtConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Machine code for `arch`, no device needed."""
        spec = replace(_spec(config, problem, m, pdl=True), prewait=prewait)
        # The two buffers of partial sums are the only shared memory.
        return cute_objects.binary(SOURCE, spec, arch, 2 * (config.threads // 32) * m * config.rows * 4)


KERNEL = Bf16Simt()


def _spec(config: SimtConfig, problem: Problem, m: int, *, pdl: bool) -> Spec:
    from skinny_core import env

    return Spec(
        config=config,
        m=m,
        k=problem.k,
        dtype=problem.activation.value,
        output=problem.output.value,
        residual=problem.adds,
        pdl=pdl and env.settings().pdl,
        prewait=False,
    )


def _forms(spec: Spec, *, prewait: bool) -> tuple[Spec, ...]:
    """The spec, and with a promise about the weight also the form that reads it before the wait."""
    return (spec, replace(spec, prewait=True)) if prewait and spec.pdl else (spec,)


def _name(spec: Spec) -> str:
    return f"{STEM}-m{spec.m}-k{spec.k}"


def _load(spec: Spec, index: int) -> Any:
    return cute_objects.load(SOURCE, spec, _name(spec), index)
