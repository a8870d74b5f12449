"""The patched interpreter rounds and multiplies as torch does; the stock one does not, or the patch is obsolete."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skinny_core.testing import interpreter
from skinny_core.testing.numerics import assert_bit_equal, assert_t1, rel_rmse

pytestmark = pytest.mark.triton("interpreter")

SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 1.00390625, 1.001953125, 1.005859375,  # exact, half way to even below, half way above
    3.3895314e38, 3.4028235e38, 1.1754944e-38, 1e-40, 9.1835e-41, 1e-45, 65504.0, 65520.0, 448.0, 464.0, 465.0,
    2**-6, 2**-9, 2**-10, 3 * 2**-11, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def cast(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))

@triton.jit
def dot(a, b, y, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]))
    tl.store(y + m[:, None] * N + n[None, :], product.to(y.dtype.element_ty))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The two kernels, in a file of their own: Triton reads their source, and this module must import without it."""
    path: Path = tmp_path_factory.mktemp("kernels") / "interpreted_kernels.py"
    path.write_text(KERNELS, encoding="utf-8")
    interpreter.install()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def _values() -> torch.Tensor:
    """2**17 floats: every exponent of FP32, the neighbourhood of the FP8 ranges, and the special values."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (2**16,), generator=generator).to(torch.int32)
    near = torch.randn(2**16 - len(SPECIAL), generator=generator) * torch.logspace(-12, 4, 2**16 - len(SPECIAL), base=2)
    return torch.cat([bits.view(torch.float32), near, torch.tensor(SPECIAL)])


def _cast(kernels: ModuleType, values: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=target)
    kernels.cast[(values.numel() // 4096,)](values, out, BLOCK=4096)
    return out


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_rounds_to_nearest_even(kernels: ModuleType, target: torch.dtype) -> None:
    values = _values()
    assert_bit_equal(_cast(kernels, values, target), values.to(target))


def test_fp32_to_fp8_rounds_and_saturates(kernels: ModuleType) -> None:
    values = _values()
    for target, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        assert_bit_equal(_cast(kernels, values, target), values.clamp(-largest, largest).to(target))


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_fp8_code_widens_exactly(kernels: ModuleType, source: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(16).view(source)
    got, expected = _cast(kernels, codes, torch.float32), codes.float()
    assert bool((got.isnan() == expected.isnan()).all())
    assert_bit_equal(got[~got.isnan()], expected[~got.isnan()])


def test_bf16_widens_exactly_and_back(kernels: ModuleType) -> None:
    every = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()].repeat(2)[: 2**16]
    assert_bit_equal(_cast(kernels, numbers, torch.float32), numbers.float())
    assert_bit_equal(_cast(kernels, _cast(kernels, numbers, torch.float32), torch.bfloat16), numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("output", ["same", "fp32"])
def test_dot_matches_float64(kernels: ModuleType, output: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(64, 512, generator=generator).to(dtype), torch.randn(16, 512, generator=generator).to(dtype)
    y = torch.empty(64, 16, dtype=torch.float32 if output == "fp32" else dtype)
    kernels.dot[(1,)](w, x.T.contiguous(), y, M=64, N=16, K=512)
    assert_t1(y.T, x, w)
    rounded = (x.double() @ w.double().T).to(y.dtype)
    assert output == "fp32" or (rounded == y.T).float().mean() > 0.995


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_stock_interpreter_is_what_needs_the_patch(kernels: ModuleType) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(4096, generator=generator)
    w, x = torch.randn(64, 64, generator=generator).bfloat16(), torch.randn(16, 64, generator=generator).bfloat16()
    y = torch.empty(64, 16)
    interpreter.uninstall()
    try:
        same = (_cast(kernels, values, torch.bfloat16) == values.bfloat16()).float().mean()
        kernels.dot[(1,)](w, x.T.contiguous(), y, M=64, N=16, K=64)
    finally:
        interpreter.install()
    assert same < 0.6, "Triton now rounds to BF16 by itself"
    assert rel_rmse(y.T, x, w) > 1, "Triton now multiplies BF16 by itself"


def test_install_twice_is_once(kernels: ModuleType) -> None:
    interpreter.install()
    interpreter.uninstall()
    interpreter.uninstall()
    interpreter.install()
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    assert_bit_equal(_cast(kernels, values, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("3.5.1", "triton 3.5.1 is not known"),
        ("3.10.0", "triton 3.10.0 is not known"),
        ("4.0.0", "triton 4.0.0 is not known"),
        ("3.6.0", "cannot loop up to a run-time value with numpy 2.4.1"),
    ],
)
def test_unknown_versions_are_a_clear_error(version: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.uninstall()
    monkeypatch.setattr("numpy.__version__", "2.4.1")
    monkeypatch.setattr("triton.__version__", version)
    with pytest.raises(interpreter.InterpreterModeError, match=says):
        interpreter.install()
    monkeypatch.undo()
    interpreter.install()
