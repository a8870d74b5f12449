"""Torch-backed casts and `tl.dot` for Triton's interpreter; `interpreter.install()` puts them in place.

Imports Triton, so it is imported only after `interpreter` has checked the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock

Builder: Any = stock.InterpreterBuilder

_TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# NumPy has no such types, so the interpreter keeps their bits in unsigned integers: (NumPy view, torch view).
_BITS = {
    tl.bfloat16: (np.int16, torch.int16),
    tl.float8e4nv: (np.uint8, torch.uint8),
    tl.float8e5: (np.uint8, torch.uint8),
}
# The GPU's conversions to FP8 saturate (cvt.rn.satfinite), torch's do not.
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}

_stock_cast = Builder.cast_impl
_stock_fp_to_fp = Builder.create_fp_to_fp
_stock_dot = Builder.create_dot


def _to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    data = np.array(data, order="C", copy=True)
    if dtype in _BITS:
        return torch.from_numpy(data.view(_BITS[dtype][0])).view(_TORCH[dtype])
    return torch.from_numpy(data)


def _convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """`data` of Triton type `source`, rounded to nearest even in `target`, in the interpreter's NumPy form."""
    values = _to_torch(data, source)
    if source in _BITS:
        values = values.float()
    if target in _LARGEST:
        values = values.clamp(-_LARGEST[target], _LARGEST[target])
    values = values.to(_TORCH[target])
    if target in _BITS:
        values = values.view(_BITS[target][1])
    result: np.ndarray = values.numpy().view(stock._get_np_dtype(target)).reshape(np.shape(data))
    return result


def _handle(data: np.ndarray, dtype: Any) -> Any:
    return stock.TensorHandle(data, dtype)


def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    """Every cast between element types; the stock method truncates to BF16."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source in _TORCH and target in _TORCH:
        return _handle(_convert(src.data, source, target), target)
    if source in _BITS:
        return _stock_cast(self, _handle(_convert(src.data, source, tl.float32), tl.float32), dst_type)
    if target in _BITS:
        return _handle(_convert(src.data.astype(np.float32), tl.float32, target), target)
    return _stock_cast(self, src, dst_type)


def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """Conversions to and from the types without NumPy form; the stock method drops subnormals and does not saturate."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source in _TORCH and target in _TORCH and rounding_mode in (None, ir.ROUNDING_MODE.RTNE):
        return _handle(_convert(src.data, source, target), target)
    return _stock_fp_to_fp(self, src, dst_type, rounding_mode)


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`tl.dot`; the stock method multiplies the raw bits of BF16 operands."""
    return _stock_dot(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)


def _widen(operand: Any) -> Any:
    dtype = operand.dtype.scalar
    return _handle(_convert(operand.data, dtype, tl.float32), tl.float32) if dtype in _BITS else operand


REPLACEMENTS = {"cast_impl": cast_impl, "create_fp_to_fp": create_fp_to_fp, "create_dot": create_dot}
