"""Kernels by name. Each is a folder `kernels/<stem>/` whose `host.py` holds a module-level `KERNEL`.

Nothing is imported until a kernel is asked for, and a kernel's DSL only when it compiles.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from skinny_core.errors import UnknownKernelError
from skinny_core.problem import KernelConfig, Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey


class Launcher(Protocol):
    """A compiled kernel, ready to run on the current stream of the tensors' device. It allocates nothing.

    x: activation, M rows of K elements, `x_stride` elements apart. w: weight `[N, K]`, unit stride along K.
    y: output, M rows of `Problem.outputs` elements, `y_stride` apart. residual: like y with its own stride; a bias of N
    elements with stride 0; or None, as the Problem's epilogue says.
    prewait: the caller promises that no kernel before this one in the stream can still be writing `w`.
    """

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
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code of one config, made without a device. shared_bytes: static and dynamic shared memory of a block."""

    ptx: str
    cubin: bytes
    shared_bytes: int


class Kernel(Protocol):
    """What a kernel folder offers to the dispatcher, the tuner and the tests."""

    stem: str

    def config_from(self, params: Mapping[str, int]) -> Any:
        """Typed config from plan data; raises `ConfigError`."""

    def refuses(self, config: Any, problem: Problem, m: int) -> str | None:
        """Why the config cannot run the problem at M = m, or None."""

    def availability(self) -> tuple[bool, str]:
        """Whether the DSL can be imported; else the original error text. Never raises."""

    def candidates(self, problem: Problem, m: int) -> tuple[Any, ...]:
        """Configs worth measuring, none of them refused."""

    def params_of(self, config: Any) -> dict[str, int]:
        """The inverse of `config_from`."""

    def compile(self, config: Any, problem: Problem, m: int, *, index: int, prewait: bool) -> Launcher:
        """Compile or load from the disk cache for CUDA device `index`; with `prewait` also the form that reads
        weights early.
        """

    def prepare(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Fill the disk cache for a device of that key without touching one; a kernel without a disk cache does
        nothing.
        """

    def prepared(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """Whether `prepare` would find everything already there."""

    def codes(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> frozenset[Hashable]:
        """What `prepare` compiles, one item per machine code. Cells that share them (another N, another M of the same
        rows group) are compiled once; a plan of 1300 cells has 350."""

    def cross_compile(self, config: Any, problem: Problem, m: int, arch: str) -> Binary:
        """Compile for `arch` ("sm_90a") on a machine that may have no GPU."""


@functools.cache
def stems() -> tuple[str, ...]:
    """Names of the kernels that ship with the core, read from the folders."""
    root = files("skinny_core").joinpath("kernels")
    return tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and f.joinpath("host.py").is_file()))


_extra: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Add a kernel that lives outside this package (a test double, an experiment). Replaces one of the same stem."""
    _extra[kernel.stem] = kernel


def unregister(stem: str) -> None:
    """Take back what `register` added."""
    _extra.pop(stem, None)


def known(stem: str) -> bool:
    """Whether `get` would find a kernel of that name. A `reported` cell may name one of somebody else."""
    return stem in _extra or stem in stems()


def get(stem: str) -> Kernel:
    """The kernel of that name; raises `UnknownKernelError` naming the known ones."""
    if stem in _extra:
        return _extra[stem]
    if not known(stem):
        raise UnknownKernelError(f"unknown kernel {stem!r}", f"use one of: {', '.join((*stems(), *_extra))}")
    kernel: Kernel = importlib.import_module(f"skinny_core.kernels.{stem}.host").KERNEL
    return kernel


def refuses(config: KernelConfig, problem: Problem, m: int) -> str | None:
    """The kernel's own predicate for a plan's config; raises `ConfigError` or `UnknownKernelError`."""
    kernel = get(config.kernel)
    return kernel.refuses(kernel.config_from(dict(config.params)), problem, m)
