"""What `bf16_stream` computes, run in Triton's interpreter: padded and poisoned operands, guards around the output."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from skinny_core.errors import KernelRefusedError
from skinny_core.kernels.bf16_stream.config import StreamConfig
from skinny_core.kernels.bf16_stream.host import KERNEL
from skinny_core.kernels.bf16_stream.reference import product_f32
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing.numerics import (
    assert_bit_equal,
    assert_t1,
    guarded_output,
    one_hot_columns_exact,
    padded_rows,
    rows_isolated,
)

pytestmark = pytest.mark.triton("interpreter")

WIDE = StreamConfig(block_n=64, block_k=128, num_warps=4, num_stages=6)
NARROW = StreamConfig(block_n=16, block_k=64, num_warps=2, num_stages=4)
TWO_BYTES = [pytest.param(DType.BF16, id="bf16"), pytest.param(DType.FP16, id="fp16")]


def _problem(n: int, k: int, dtype: DType, output: DType | None = None, *, residual: bool = False) -> Problem:
    return Problem(
        n=n,
        k=k,
        weight=WeightScheme(dtype.value),
        activation=dtype,
        output=output or dtype,
        epilogue=Epilogue.RESIDUAL if residual else Epilogue.NONE,
    )


def _draw(rows: int, cols: int, dtype: DType, seed: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype.torch)


def _run(
    problem: Problem, config: StreamConfig, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """y of one launch; every element outside it has been checked."""
    out = guarded_output(x.shape[0], problem.n, problem.output.torch, row_gap=5)
    residual_stride = 0 if residual is None else residual.stride(0)
    launch = KERNEL.interpret(config, problem, x.shape[0])
    launch(x, w, out.y, residual, x.stride(0), out.y.stride(0), residual_stride, False)
    out.check()
    return out.y


@pytest.mark.parametrize("dtype", TWO_BYTES)
@pytest.mark.parametrize("k", [8, 72, 128, 576, 1000, 1536])
@pytest.mark.parametrize("n", [1, 7, 60, 64, 129])
def test_odd_shapes_with_padded_rows(n: int, k: int, dtype: DType) -> None:
    problem = _problem(n, k, dtype)
    w = padded_rows(_draw(n, k, dtype, seed=n), 64)
    for m in (1, 2, 3, 8, 16):
        x = padded_rows(_draw(m, k, dtype, seed=m), 8)
        assert_t1(_run(problem, WIDE, x, w), x, w)


@pytest.mark.parametrize("dtype", TWO_BYTES)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("fp32", [False, True], ids=["same", "fp32"])
@pytest.mark.parametrize("config", [WIDE, NARROW], ids=str)
def test_outputs_and_residual(config: StreamConfig, fp32: bool, residual: bool, dtype: DType) -> None:
    problem = _problem(100, 584, dtype, DType.FP32 if fp32 else None, residual=residual)
    x, w = padded_rows(_draw(5, 584, dtype, seed=1), 8), padded_rows(_draw(100, 584, dtype, seed=2), 16)
    # As large as the product, so that a second rounding of either would show; 3 is no multiple of anything.
    r = padded_rows(24 * _draw(5, 100, dtype, seed=3), 3) if residual else None
    y = _run(problem, config, x, w, r)
    assert y.dtype == problem.output.torch
    assert_t1(y, x, w, r)
    torch.testing.assert_close(y, product_f32(x, w, r, y.dtype), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=str)
def test_one_hot_returns_columns(config: StreamConfig) -> None:
    problem = _problem(60, 136, DType.BF16)
    one_hot_columns_exact(lambda x, w: _run(problem, config, x, w), _draw(60, 136, DType.BF16, seed=4), rows=16)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3.0e38])
def test_bad_row_stays_in_its_row(fill: float) -> None:
    problem = _problem(70, 200, DType.BF16)
    x, w = _draw(4, 200, DType.BF16, seed=5), _draw(70, 200, DType.BF16, seed=6)
    rows_isolated(lambda x, w: _run(problem, WIDE, x, w), x, w, row=1, fill=fill)


def test_same_bits_twice() -> None:
    problem = _problem(129, 1000, DType.BF16)
    x, w = _draw(3, 1000, DType.BF16, seed=7), _draw(129, 1000, DType.BF16, seed=8)
    assert_bit_equal(_run(problem, WIDE, x, w), _run(problem, WIDE, x, w))


def test_stride_of_a_single_row_is_not_read() -> None:
    problem = _problem(1, 72, DType.BF16)
    x, w = _draw(1, 72, DType.BF16, seed=9), _draw(1, 72, DType.BF16, seed=10)
    y = _run(problem, WIDE, x.as_strided((1, 72), (73, 1)), w.as_strided((1, 72), (1, 1)))
    assert_t1(y, x, w)


GUARD_PAGE = """
import ctypes, mmap, torch
from skinny_core.kernels.bf16_stream.config import StreamConfig
from skinny_core.kernels.bf16_stream.host import KERNEL
from skinny_core.problem import Problem

def before_a_forbidden_page(rows, cols):
    memory, size = mmap.mmap(-1, 3 * mmap.PAGESIZE), 2 * rows * cols
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 2 * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = 2 * mmap.PAGESIZE - size
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16, offset=offset, count=rows * cols).view(rows, cols)
    return tensor.copy_(torch.randn(rows, cols))

x, w, y = (before_a_forbidden_page(*shape) for shape in ((3, 72), (7, 72), (3, 7)))
KERNEL.interpret(StreamConfig(64, 128, 4, 6), Problem(n=7, k=72), 3)(x, w, y, None, 72, 7, 0, False)
print(torch.equal(y, (x.double() @ w.double().T).bfloat16()))
"""


def test_touches_nothing_behind_its_operands() -> None:
    """Every operand ends at a page that may not be touched: one element too far ends the process."""
    done = subprocess.run([sys.executable, "-c", GUARD_PAGE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_leading_dimensions_are_flattened() -> None:
    problem = _problem(60, 136, DType.BF16)
    x, w = padded_rows(_draw(6, 136, DType.BF16, seed=13), 8), _draw(60, 136, DType.BF16, seed=14)
    y = torch.full((2, 3, 60), float("nan"), dtype=torch.bfloat16)
    KERNEL.interpret(NARROW, problem, 6)(x.view(2, 3, 136), w, y, None, 144, 60, 0, True)
    assert_t1(y.view(6, 60), x, w)


def _call(problem: Problem, changes: dict[str, torch.Tensor], **strides: int) -> torch.Tensor:
    """Launch on legal operands with `changes`; returns y, which a refusal leaves as it was."""
    tensors = {
        "x": _draw(2, 64, DType.BF16, seed=11),
        "w": _draw(16, 64, DType.BF16, seed=12),
        "y": torch.full((2, 16), float("nan"), dtype=torch.bfloat16),
        "residual": None,
    } | changes
    x, w, y, residual = tensors.values()
    before = y.clone()
    taken = {"x_stride": x.stride(0), "y_stride": y.stride(0), "residual_stride": 0, "prewait": False} | strides
    if residual is not None:
        taken["residual_stride"] = residual.stride(0)
    try:
        KERNEL.interpret(NARROW, problem, 2)(x, w, y, residual, **taken)
    except KernelRefusedError:
        assert_bit_equal(y, before)
        raise
    return y


def _shifted(rows: int, cols: int, *, by: int, pad: int = 0) -> torch.Tensor:
    buffer = torch.zeros(by + rows * (cols + pad), dtype=torch.bfloat16)
    return buffer.as_strided((rows, cols), (cols + pad, 1), by)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"x": torch.zeros(0, 64, dtype=torch.bfloat16)}, "shapes", id="no-rows"),
        pytest.param({"x": torch.zeros(17, 64, dtype=torch.bfloat16)}, "shapes", id="17-rows"),
        pytest.param({"x": torch.zeros(2, 1, 64, dtype=torch.bfloat16)}, "shapes", id="3d-x-2d-y"),
        pytest.param({"w": torch.zeros(16, 72, dtype=torch.bfloat16)}, "shapes", id="other-k"),
        pytest.param({"y": torch.zeros(16, 2, dtype=torch.bfloat16)}, "shapes", id="transposed-y"),
        pytest.param({"x": torch.zeros(2, 64, dtype=torch.float16)}, "dtypes", id="mixed-dtypes"),
        pytest.param({"y": torch.zeros(2, 16)}, "dtypes", id="other-output"),
        pytest.param({"w": torch.zeros(16, 64, dtype=torch.bfloat16, device="meta")}, "devices", id="devices"),
        pytest.param({"w": torch.zeros(64, 16, dtype=torch.bfloat16).T}, "strides", id="transposed-w"),
        pytest.param({"y": torch.zeros(16, 2, dtype=torch.bfloat16).T}, "strides", id="strided-y"),
        pytest.param({"x": _shifted(2, 64, by=1)}, "16 bytes", id="x-by-2-bytes"),
        pytest.param({"w": _shifted(16, 64, by=4)}, "16 bytes", id="w-by-8-bytes"),
        pytest.param({"w": _shifted(16, 64, by=0, pad=4)}, "16 bytes", id="w-rows-by-8-bytes"),
        pytest.param({"residual": torch.zeros(2, 16, dtype=torch.bfloat16)}, "a residual", id="unasked-residual"),
    ],
)
def test_refuses_before_it_writes(change: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(KernelRefusedError, match=says):
        _call(_problem(16, 64, DType.BF16), change)


@pytest.mark.parametrize("stride", ["x_stride", "y_stride"])
def test_refuses_a_stride_that_the_tensor_has_not(stride: str) -> None:
    with pytest.raises(KernelRefusedError, match="a row stride of 24"):
        _call(_problem(16, 64, DType.BF16), {}, **{stride: 24})


@pytest.mark.parametrize(
    "residual",
    [
        pytest.param(None, id="none"),
        pytest.param(torch.zeros(2, 15, dtype=torch.bfloat16), id="shape"),
        pytest.param(torch.zeros(2, 16), id="dtype"),
        pytest.param(torch.zeros(16, 2, dtype=torch.bfloat16).T, id="transposed"),
    ],
)
def test_refuses_a_residual_unlike_the_output(residual: torch.Tensor | None) -> None:
    with pytest.raises(KernelRefusedError, match="residual"):
        _call(_problem(16, 64, DType.BF16, residual=True), {"residual": residual})


def test_legal_operands_pass_the_same_helper() -> None:
    assert not _call(_problem(16, 64, DType.BF16), {}).isnan().any()
