"""Host side of `bf16_mma`: compile once, launch with raw addresses (no DLPack, so a weight that requires grad is
fine).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skinny_core import device
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import Binary, Launcher, cute_objects, operands
from skinny_core.kernels.bf16_mma import config as _config
from skinny_core.kernels.bf16_mma.config import STEM, MmaConfig, Spec
from skinny_core.problem import Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey


def _arguments(_: Spec) -> tuple[Any, ...]:
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    addresses, sizes, strides = [Int64(0)] * 4, [Int32(1), Int32(1), Int32(8)], [Int64(0)] * 4
    return (*addresses, *sizes, *strides, Int32(1), make_fake_stream())


SOURCE = cute_objects.Source(STEM, (f"{STEM}/config.py", f"{STEM}/host.py"), _arguments)


class _Launcher:
    """Calls the compiled function. Addresses, strides and the stream are read at every call; nothing is kept alive."""

    def __init__(self, spec: Spec, problem: Problem, m: int, index: int, sm_count: int, *, prewait: bool) -> None:
        import torch

        self._n = problem.n
        self._k = problem.k
        self._m = m
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
            self._m,
            self._n,
            self._k,
            x_stride,
            w_stride,
            y_stride,
            residual_stride,
            self._grid_cap,
            self._stream(self._index),
        )


class Bf16Mma:
    """The kernel as the dispatcher, the tuner and the tests see it (`kernels.Kernel`)."""

    stem = STEM

    def config_from(self, params: Mapping[str, int]) -> MmaConfig:
        """Typed config; raises `ConfigError`."""
        return MmaConfig.from_params(params)

    def params_of(self, config: MmaConfig) -> dict[str, int]:
        """Plan data of a config."""
        return config.to_params()

    def refuses(self, config: MmaConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        return _config.refuses(config, problem, m)

    def availability(self) -> tuple[bool, str]:
        """Whether CuTe DSL and TVM-FFI import; else the original error."""
        return cute_objects.availability(SOURCE)

    def candidates(self, problem: Problem, m: int) -> tuple[MmaConfig, ...]:
        """Configs worth racing, at most 15: the first shapes of a block in the order of `_cost`, spread over rows and
        warps, then the other keys tried on the first of them. Not measured yet: the spread is wide on purpose.
        """
        sms = problem.device.sm_count if problem.device else SM_COUNT
        shapes = [
            config
            for shape in itertools.product((4, 5, 8, 10, 16), range(1, 9), (2, 4, 8))
            if self.refuses(config := MmaConfig(*shape), problem, m) is None
        ]
        shapes.sort(key=lambda config: (_cost(config, problem, m, sms), config.tiles, config.warps))
        found: list[MmaConfig] = []
        for config in shapes:
            tiles, warps = ([getattr(c, key) for c in found] for key in ("tiles", "warps"))
            if len(found) < 9 and tiles.count(config.tiles) < 2 and warps.count(config.warps) < 4:
                found.append(config)
        found += [replace(config, run=config.unroll) for config in found[:2]]
        found += [replace(config, l2=256) for config in found[:2]]
        found += _persistent(shapes, problem, m, sms)[:2]
        return tuple(c for c in found if self.refuses(c, problem, m) is None)

    def compile(self, config: MmaConfig, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
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
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        return _Launcher(spec, problem, m, index, key.sm_count, prewait=prewait)

    def prepare(self, config: MmaConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Put the machine code for `key` into the disk cache. Touches no device, so worker processes can share the
        work. Raises `KernelRefusedError`.
        """
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        for each in _forms(spec, prewait=prewait):
            cute_objects.stored(SOURCE, each, _name(each), key)

    def prepared(self, config: MmaConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether the disk cache holds the machine code that `prepare` would make. Raises `KernelRefusedError`."""
        problem = operands.on_device(self, config, problem, m, key)
        spec = _spec(config, problem, m, pdl=key.has_pdl)
        return all(cute_objects.is_stored(SOURCE, s, _name(s), key) for s in _forms(spec, prewait=prewait))

    def cross_compile(self, config: MmaConfig, problem: Problem, m: int, arch: str, *, prewait: bool = True) -> Binary:
        """Machine code for `arch`, no device needed."""
        spec = replace(_spec(config, problem, m, pdl=True), prewait=prewait)
        return cute_objects.binary(SOURCE, spec, arch, spec.shared_bytes)


KERNEL = Bf16Mma()


SM_COUNT = 132
"""Assumed where a Problem names no device."""
FLIGHT_BYTES = 56 * 1024
"""Wanted in flight per SM: 4.6 TB/s over 132 SMs for 1.6 us, about twice the latency of an idle memory."""
NEAR_BYTES = 128 * 1024
"""An activation up to this size is expected to stay in the L1 of an SM."""


def _cost(config: MmaConfig, problem: Problem, m: int, sms: int) -> float:
    """A guess at time over the time of the bytes; only the order of configs is made of it."""
    groups, fit = -(-problem.n // config.rows), _config.blocks_that_fit(config, _config.m_tiles(m))
    most = -(-groups // sms)
    # Up to two waves the busiest SM decides; later blocks start as others end, and only the last wave is uneven.
    uneven = most * sms * config.rows / problem.n if most <= 2 * fit else 1 + fit / most / 2
    flight = min(fit, most) * config.flight_bytes
    depth = max(1.0, FLIGHT_BYTES / flight) if flight < 2 * FLIGHT_BYTES else 1.05
    rounds = problem.k / config.round
    tail = 1 + (math.ceil(rounds) / rounds - 1) / 4
    # Every block reads the activation again: from L1, or from an L2 that gives about 1.3 times what memory does.
    again = m / config.rows
    activation = 1 + again / 20 if 2 * m * problem.k <= NEAR_BYTES else max(1.0, (1 + again) / 1.3)
    return uneven * depth * tail * activation


def _persistent(shapes: list[MmaConfig], problem: Problem, m: int, sms: int) -> list[MmaConfig]:
    """The best shapes as persistent grids, where every block gets at least two groups of rows."""
    found = []
    bound = 1.25 * _cost(shapes[0], problem, m, sms) if shapes else 0.0
    for config in shapes:
        blocks = _config.blocks_that_fit(replace(config, blocks_per_sm=1), _config.m_tiles(m))
        if blocks in _config.ALLOWED["blocks_per_sm"][1:] and 2 * sms * blocks * config.rows <= problem.n:
            found.append(replace(config, blocks_per_sm=blocks))
    return [config for config in found if _cost(config, problem, m, sms) <= bound]


def _spec(config: MmaConfig, problem: Problem, m: int, *, pdl: bool) -> Spec:
    from skinny_core import env

    return Spec(
        config=config,
        m_tiles=_config.m_tiles(m),
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
    return f"{STEM}-m{8 * spec.m_tiles}"


def _load(spec: Spec, index: int) -> Any:
    return cute_objects.load(SOURCE, spec, _name(spec), index)
