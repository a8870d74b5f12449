"""Check a weight, compile or load, launch. Importing this module imports neither Triton nor a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skinny_core import device
from skinny_core.errors import CompileForbiddenError, KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import triton_objects
from skinny_core.prefetch import build
from skinny_core.prefetch.config import DEFAULT, STEM, VECTOR_BYTES, ReadConfig, Spec, clipped

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey

_MAX_VECTORS = 2**30
"""Indices are 32-bit and go up to one turn of the whole grid beyond the end."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What to read of one weight. bytes: how many, without pads. row_bytes, stride: of a row, and from row to row."""

    bytes: int
    row_bytes: int
    stride: int

    @property
    def padded(self) -> bool:
        """Whether there is anything between the rows that are read."""
        return self.stride != self.row_bytes and self.bytes > self.row_bytes


def into_l2(weight: torch.Tensor, bytes: int | None = None, *, config: ReadConfig = DEFAULT) -> int:
    """Read the first `bytes` of a weight `[N, K]` on the current stream of its device; returns how many are read.

    weight: any dtype, on a CUDA device; unit stride along K; address, row length and row stride in whole 16 bytes; rows
    may be padded, and pads are neither read nor counted. bytes: row after row from the first; rounded up to 16, clipped
    to the weight, None for all of it. It must not be freed before the stream has passed the read.

    Raises `KernelRefusedError` for another layout, `KernelUnavailableError` without Triton or for a CPU tensor,
    `CompileForbiddenError` where it would have to compile or load during a graph capture (call `warm` before).
    """
    extent = check(weight, bytes)
    if not weight.is_cuda:
        raise KernelUnavailableError(f"{STEM} needs a CUDA tensor, got one on {weight.device}", "move it to the GPU")
    if extent.bytes == 0:
        return 0
    _launch(weight.data_ptr(), extent, weight.get_device(), config)
    return extent.bytes


def check(weight: torch.Tensor, bytes: int | None = None) -> Extent:
    """What `into_l2` would read, wherever the tensor is. Raises `KernelRefusedError`."""
    import torch

    if weight.layout is not torch.strided or weight.dim() != 2:
        raise _refused(f"a weight {tuple(weight.shape)} of layout {weight.layout}", "a plain strided tensor [N, K]")
    if bytes is not None and bytes < 0:
        raise _refused(f"{bytes} bytes", "a number of bytes, or None for all")
    (n, k), item = weight.shape, weight.element_size()
    if n == 0 or k == 0:
        return Extent(0, 0, 0)
    if weight.data_ptr() == 0:
        raise _refused(f"a weight without memory of its own ({type(weight).__name__})", "a plain strided tensor [N, K]")
    row, stride = k * item, weight.stride(0) * item if n > 1 else k * item
    if k > 1 and weight.stride(1) != 1:
        raise _refused(f"strides {weight.stride()}", "unit stride in the last dimension")
    if (weight.data_ptr() | row | stride) % VECTOR_BYTES:
        raise _refused("an address, a row or a row stride that is not a multiple of 16 bytes", "aligned rows")
    extent = Extent(clipped(n * row, bytes), row, stride)
    if extent.bytes // VECTOR_BYTES > _MAX_VECTORS:
        raise _refused(f"{extent.bytes} bytes", f"at most {_MAX_VECTORS * VECTOR_BYTES}")
    return extent


def warm(index: int | None = None, *, config: ReadConfig = DEFAULT) -> None:
    """Compile or load everything for CUDA device `index` (default: the current one), so that `into_l2` may be captured.

    Raises `KernelUnavailableError` without a device or Triton, `CompileForbiddenError` during a graph capture.
    """
    import torch

    for padded in (False, True):
        spec = config.spec(padded=padded)
        _loaded(spec, torch.cuda.current_device() if index is None else index)


def prepare(key: DeviceKey, *, config: ReadConfig = DEFAULT) -> None:
    """Put the machine code for `key` into the disk cache; touches no device. Raises `KernelUnavailableError`."""
    triton_objects.require(STEM, _availability())
    for padded in (False, True):
        triton_objects.stored(build.SOURCE, config.spec(padded=padded), key)


def prepared(key: DeviceKey, *, config: ReadConfig = DEFAULT) -> bool:
    """Whether the disk cache holds what `prepare` would make."""
    return all(triton_objects.is_stored(build.SOURCE, config.spec(padded=padded), key) for padded in (False, True))


_ready: dict[tuple[Spec, int], Any] = {}


def _loaded(spec: Spec, index: int) -> Any:
    """The kernel on its device, or the error that says why there is none."""
    import torch

    found = _ready.get((spec, index))
    if found is not None:
        return found
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CompileForbiddenError(f"{STEM} is not loaded, during graph capture", "call prefetch.warm() before")
    triton_objects.require(STEM, _availability())
    key = device.current_key(index)
    if key is None:
        raise KernelUnavailableError(f"{STEM} needs a CUDA device", "run on a machine with one")
    compiled = triton_objects.load(build.SOURCE, spec, key, index)
    with torch.cuda.device(index):
        compiled[1, 1, 1]  # indexing by a grid loads the module on the current device
    _ready[spec, index] = compiled
    return compiled


def _launch(address: int, extent: Extent, index: int, config: ReadConfig) -> None:
    import torch

    spec = config.spec(padded=extent.padded)
    compiled = _loaded(spec, index)
    vectors = extent.bytes // VECTOR_BYTES
    grid = config.grid(vectors), 1, 1
    with torch.cuda.device(index):
        compiled[grid](
            # An address instead of a tensor: Triton would ask the driver about it. The sink is null: `never` is 0.
            address, 0, vectors, extent.row_bytes // VECTOR_BYTES, extent.stride, 0,
            *spec.constants.values(), stream=torch.cuda.current_stream(index).cuda_stream,
        )  # fmt: skip


@functools.cache
def _availability() -> tuple[bool, str]:
    try:
        from skinny_core.prefetch import kernel  # noqa: F401
    except Exception as error:  # whatever a broken installation raises is the answer
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _refused(what: str, wanted: str) -> KernelRefusedError:
    return KernelRefusedError(f"{STEM} cannot take {what}", f"pass {wanted}, or do without the prefetch")
