"""What every kernel written in CuTe DSL does alike on the host: compile both forms, keep them on disk, launch.

A kernel's own host.py gives the predicates, the candidates and what its function is called with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from skinny_core import device, env
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, cute_objects, operands
from skinny_core.problem import Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey


MEASURED = (9, 0)
"""The capability on which configs were chosen so far."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a launch passes besides the four addresses, the four row strides and the stream.

    sizes: after the addresses. last: before the stream.
    """

    sizes: tuple[int, ...]
    last: tuple[int, ...] = ()


SMALL_BYTES = 6_000_000
"""Weights below it gain from programmatic launch: 0.5 us at 1 MB, 0.1 at 4; from 8 MB on it costs
(benchmarks/results/h200/sweeps/2026-11-30-anatomy.csv)."""


def with_pdl(configs: Sequence[Any], problem: Problem) -> tuple[Any, ...]:
    """The configs, and for a small weight each with `pdl` as well."""
    small = problem.weight_bytes < SMALL_BYTES
    return (*configs, *(replace(config, pdl=1) for config in configs if small))


class CuteLauncher:
    """Calls the compiled function. Addresses, strides and the stream are read at every call; nothing is kept alive."""

    def __init__(self, stem: str, wait_first: Any, wait_late: Any, call: Call, problem: Problem, m: int, index: int):
        import torch

        self._stem, self._m, self._k, self._index = stem, m, problem.k, index
        self._sizes, self._last = call.sizes, call.last
        self._wait_first, self._wait_late = wait_first, wait_late
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

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
                self._stem,
                f"x {tuple(x.shape)} or its alignment",
                f"M = {self._m} rows of K = {self._k}, 16-byte aligned",
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
            *self._last,
            self._stream(self._index),
        )


class CuteKernel(ABC):
    """A kernel as the dispatcher, the tuner and the tests see it (`kernels.Kernel`).

    config_type: a frozen dataclass with `from_params` and `to_params`. A subclass gives the methods that are abstract
    here. A spec is a frozen dataclass with the fields `pdl` and `prewait`.
    """

    def __init__(self, source: cute_objects.Source, config_type: Any) -> None:
        self.stem, self.source, self._config_type = source.stem, source, config_type

    @abstractmethod
    def spec(self, config: Any, problem: Problem, m: int, *, pdl: bool, capability: tuple[int, int] = MEASURED) -> Any:
        """Everything the code depends on; `prewait` is False. pdl: whether the device and the settings allow it."""

    @abstractmethod
    def name(self, spec: Any) -> str:
        """Readable start of the file name of a compiled spec."""

    @abstractmethod
    def call(self, spec: Any, problem: Problem, m: int, sm_count: int) -> Call:
        """Arguments of a launch."""

    @abstractmethod
    def refuses(self, config: Any, problem: Problem, m: int) -> str | None:
        """Why not, or None."""

    @abstractmethod
    def shared_bytes(self, spec: Any, m: int) -> int:
        """Shared memory of a block."""

    @abstractmethod
    def candidates(self, problem: Problem, m: int) -> tuple[Any, ...]:
        """Configs worth racing, none of them refused."""

    def config_from(self, params: Mapping[str, int]) -> Any:
        """Typed config; raises `ConfigError`."""
        return self._config_type.from_params(params)

    def params_of(self, config: Any) -> dict[str, int]:
        """Plan data of a config."""
        params: dict[str, int] = config.to_params()
        return params

    def availability(self) -> tuple[bool, str]:
        """Whether CuTe DSL and TVM-FFI import; else the original error."""
        return cute_objects.availability(self.source)

    def compile(self, config: Any, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
        """Compile or load for CUDA device `index`; raises `KernelRefusedError`, `KernelUnavailableError`."""
        why = self.refuses(config, problem, m)
        if why:
            raise KernelRefusedError(f"{self.stem} cannot run {problem} at M = {m}: {why}", "choose another config")
        ok, error = self.availability()
        if not ok:
            raise KernelUnavailableError(f"{self.stem} needs CuTe DSL: {error}", "pip install 'skinny-core[cute]'")
        key = device.current_key(index)
        if key is None:
            raise KernelUnavailableError(f"{self.stem} needs a CUDA device", "run on a machine with one")
        problem = operands.on_device(self, config, problem, m, key)
        forms = self._forms(config, problem, m, key, prewait=prewait)
        functions = [cute_objects.load(self.source, spec, self.name(spec), index) for spec in forms]
        # Without a promise about the weight, both forms are the one that waits before it reads anything.
        call = self.call(forms[0], problem, m, key.sm_count)
        return CuteLauncher(self.stem, functions[0], functions[-1], call, problem, m, index)

    def prepare(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache. Touches no device, so worker processes can share the
        work. Raises `KernelRefusedError`.
        """
        problem = operands.on_device(self, config, problem, m, key)
        for spec in self._forms(config, problem, m, key, prewait=prewait):
            cute_objects.stored(self.source, spec, self.name(spec), key)

    def prepared(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make. Raises `KernelRefusedError`."""
        problem = operands.on_device(self, config, problem, m, key)
        forms = self._forms(config, problem, m, key, prewait=prewait)
        return all(cute_objects.is_stored(self.source, spec, self.name(spec), key) for spec in forms)

    def codes(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> frozenset[Hashable]:
        """The specs that `prepare` compiles."""
        return frozenset((self.stem, spec) for spec in self._forms(config, problem, m, key, prewait=prewait))

    def cross_compile(self, config: Any, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Machine code for `arch`, no device needed. prewait: the form that reads weights early, where there is one."""
        digits = arch.removeprefix("sm_").rstrip("af")
        capability = int(digits[:-1]), int(digits[-1])
        spec = self.spec(config, problem, m, pdl=env.settings().pdl, capability=capability)
        spec = replace(spec, prewait=prewait and spec.pdl)
        return cute_objects.binary(self.source, spec, arch, self.shared_bytes(spec, m))

    def _forms(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> tuple[Any, ...]:
        """The spec, and with a promise about the weight also the form that reads it before the wait."""
        allowed = key.has_pdl and env.settings().pdl
        spec = self.spec(config, problem, m, pdl=allowed, capability=key.capability)
        return (spec, replace(spec, prewait=True)) if prewait and spec.pdl else (spec,)
