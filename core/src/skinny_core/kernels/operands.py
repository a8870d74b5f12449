"""The operands of a dense kernel, checked before a launch: shapes, dtypes, device, strides, alignment.

The dispatcher has its own, faster view of the same facts and falls back; this one is for calls that name a kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skinny_core.errors import KernelRefusedError
from skinny_core.problem import MAX_M, Epilogue, Problem

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey
    from skinny_core.kernels import Kernel

VECTOR = 8
"""Elements of 2 bytes in one 16-byte load."""


def check(
    stem: str,
    problem: Problem,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    residual: torch.Tensor | None,
    x_stride: int,
    y_stride: int,
    residual_stride: int,
) -> None:
    """Raise `KernelRefusedError` where a call is outside the contract of `kernels.Launcher` for this Problem.

    x [..., K] and w [N, K] are read 16 bytes at a time, so their addresses and row strides are multiples of 16 bytes
    (contiguous does not imply aligned); y and residual [..., N] may lie anywhere. Strides of a dimension of size 1 do
    not matter. `residual` is the bias `[N]` where the epilogue says so, with a row stride of 0.
    """
    import torch

    n, k = problem.n, problem.k
    m = x.numel() // k
    if not (1 <= m <= MAX_M and x.shape[-1] == k and w.shape == (n, k) and y.shape == (*x.shape[:-1], problem.outputs)):
        shapes = f"shapes x {tuple(x.shape)}, w {tuple(w.shape)}, y {tuple(y.shape)}"
        raise refused(stem, shapes, f"M 1-{MAX_M} of {problem}")
    half = problem.activation.torch
    if x.dtype != half or w.dtype != half or y.dtype != problem.output.torch:
        raise refused(stem, f"dtypes x {x.dtype}, w {w.dtype}, y {y.dtype}", f"the dtypes of {problem}")
    if not x.device == w.device == y.device:
        raise refused(stem, f"devices x {x.device}, w {w.device}, y {y.device}", "tensors of one device")
    if problem.adds != (residual is not None):
        missing = f"no {problem.epilogue.value}"
        raise refused(stem, missing if residual is None else "a residual", f"what {problem} says")
    shape = (n,) if problem.epilogue is Epilogue.BIAS else y.shape
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (shape, half, x.device):
        what = f"{problem.epilogue.value} {residual.dtype} {tuple(residual.shape)} on {residual.device}"
        raise refused(stem, what, f"{half} {tuple(shape)} on {x.device}")
    rows = [("x", x, x_stride), ("w", w, w.stride(0)), ("y", y, y_stride)]
    if residual is not None:
        rows.append(("residual", residual, residual_stride))
    for name, tensor, stride in rows:
        if tensor.data_ptr() == 0 or tensor.layout is not torch.strided:
            raise refused(stem, f"{name} without memory of its own ({type(tensor).__name__})", "plain strided tensors")
        if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
            raise refused(stem, f"strides {name} {tensor.stride()}", "unit stride in the last dimension")
        if tensor.dim() == 2 and tensor.shape[0] != 1 and tensor.stride(0) != stride:
            raise refused(stem, f"a row stride of {stride} for {name}", f"{tensor.stride(0)}, as the tensor has")
    if not is_aligned(x.data_ptr(), w.data_ptr(), x_stride if m > 1 else 0, w.stride(0) if n > 1 else 0):
        raise refused(stem, "an address or row stride of x or w that is not a multiple of 16 bytes", "aligned operands")


def on_device(kernel: Kernel, config: Any, problem: Problem, m: int, key: DeviceKey) -> Problem:
    """The Problem on a device of that key, whatever device it named.

    Raises `KernelRefusedError` where the config cannot run there: another device's SM count and shared memory may allow
    what this one's do not.
    """
    here = replace(problem, device=key)
    if why := kernel.refuses(config, here, m):
        raise KernelRefusedError(f"{kernel.stem} cannot run {here} at M = {m}: {why}", "choose another config")
    return here


def is_aligned(x: int, w: int, x_stride: int, w_stride: int) -> bool:
    """Whether two addresses and two row strides (in elements) are multiples of 16 bytes."""
    return not ((x | w) & 15 or (x_stride | w_stride) & (VECTOR - 1))


def refused(stem: str, what: str, wanted: str) -> KernelRefusedError:
    """The error for operands or a config outside a kernel's contract."""
    return KernelRefusedError(f"{stem} cannot take {what}", f"pass {wanted}, or call torch.nn.functional.linear")
