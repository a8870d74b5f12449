"""Host side of `bf16_simt`: compile once, launch with raw addresses (no DLPack, so a weight that requires grad is
fine).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skinny_core import cache, device
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, operands
from skinny_core.kernels.bf16_simt import config as _config
from skinny_core.kernels.bf16_simt.config import SimtConfig, Spec
from skinny_core.problem import Epilogue, Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey

_ENTRY = "bf16_simt"
_SOURCES = tuple(f"kernels/bf16_simt/{name}.py" for name in ("kernel", "config", "host"))
_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)


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
                _ENTRY, f"x {tuple(x.shape)} or its alignment", f"M = {self._m} rows of K = {self._k}, 16-byte aligned"
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

    stem = "bf16_simt"

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
        return _availability()

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
        ok, error = _availability()
        if not ok:
            raise KernelUnavailableError(f"bf16_simt needs CuTe DSL: {error}", "pip install 'skinny-core[cute]'")
        key = device.current_key(index)
        if key is None:
            raise KernelUnavailableError("bf16_simt needs a CUDA device", "run on a machine with one")
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        return _Launcher(spec, problem, index, key.sm_count, prewait=prewait)

    def prepare(self, config: SimtConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache. Touches no device, so worker processes can share the
        work.
        """
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        object_path(spec, key)
        if prewait and spec.pdl:
            object_path(replace(spec, prewait=True), key)

    def prepared(self, config: SimtConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make."""
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        specs = [spec, replace(spec, prewait=True)] if prewait and spec.pdl else [spec]
        return all(cache.holds(_cache_name(s), _cache_key(s, key)) for s in specs)

    def cross_compile(self, config: SimtConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Machine code for `arch`, no device needed."""
        spec = replace(_spec(config, problem, m, pdl=True), prewait=prewait)
        compiled = _compile(spec, arch, keep=True)
        # The two buffers of partial sums are the only shared memory.
        shared = 2 * (config.threads // 32) * m * config.rows * 4
        return Binary(compiled.__ptx__, compiled.__cubin__, shared)


KERNEL = Bf16Simt()


def _spec(config: SimtConfig, problem: Problem, m: int, *, pdl: bool) -> Spec:
    from skinny_core import env

    return Spec(
        config=config,
        m=m,
        k=problem.k,
        dtype=problem.activation.value,
        output=problem.output.value,
        residual=problem.epilogue is Epilogue.RESIDUAL,
        pdl=pdl and env.settings().pdl,
        prewait=False,
    )


@functools.cache
def _availability() -> tuple[bool, str]:
    try:
        import tvm_ffi  # noqa: F401

        from skinny_core.kernels.bf16_simt import kernel  # noqa: F401
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _compile(spec: Spec, arch: str, *, keep: bool = False) -> Any:
    """Run the DSL compiler for `arch`."""
    import tempfile

    import cutlass.cute as cute
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from skinny_core.kernels.bf16_simt import kernel

    addresses, strides = [Int64(0)] * 4, [Int64(0)] * 4
    with tempfile.TemporaryDirectory(prefix="skinny-") as dump:
        options = f"--enable-tvm-ffi --gpu-arch={arch}"
        if keep:
            options += f" --keep-ptx --keep-cubin --dump-dir={dump}"
        compiled = cute.compile(
            kernel.bf16_simt, *addresses, Int32(1), *strides, Int32(1), make_fake_stream(), spec, options=options
        )
        if keep:
            # Read while the dump folder exists; the attributes are lazy in some releases.
            _ = compiled.__ptx__, compiled.__cubin__
    return compiled


def object_path(spec: Spec, key: DeviceKey) -> Path:
    """The object file of a spec for a device key: found in the disk cache or compiled now. Touches no device."""

    def write(path: Path) -> None:
        _compile(spec, key.arch).export_to_c(object_file_path=str(path), function_name=_ENTRY)

    return cache.obtain(_cache_name(spec), _cache_key(spec, key), write)


def _cache_name(spec: Spec) -> str:
    return f"bf16_simt-m{spec.m}-k{spec.k}"


def _cache_key(spec: Spec, key: DeviceKey) -> str:
    return f"{spec!r} device={key.slug} sources={cache.source_digest(*_SOURCES)} {cache.versions(*_DISTRIBUTIONS)}"


_modules: list[Any] = []  # a loaded function does not keep its module's code mapped


@functools.cache
def _load(spec: Spec, index: int) -> Any:
    """The compiled function for one device, from the disk cache where possible."""
    import cutlass.cute as cute

    key = device.current_key(index)
    assert key is not None  # compile() has checked it
    for attempt in (1, 2):
        path = object_path(spec, key)
        try:
            module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            _modules.append(module)
            return module[_ENTRY]
        except Exception as error:
            if attempt == 2:
                raise
            cache.set_aside(path, f"it does not load: {type(error).__name__}: {error}")
    raise AssertionError("unreachable")
