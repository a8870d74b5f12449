"""The gates of DESIGN section 6, as functions that a CPU interpreter test and a GPU test call alike.

T1: `rel_rmse = ||y - ref|| / ||ref||` with `ref` the float64 product of the exact inputs. `fn(x, w)` below is any
callable that returns `[M, N]` for x `[M, K]` and w `[N, K]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TOLERANCE: dict[torch.dtype, float] = {
    # One final rounding gives 1.66e-3 for Gaussian data at any K. Above it lie the faults: a second rounding (a
    # residual or a partial sum kept in BF16) 2.35e-3, one lost element of K = 25600 5.2e-3, of K = 4096 1.6e-2.
    torch.bfloat16: 2.0e-3,
    # The same with three more bits of mantissa: one rounding 2.08e-4, two 2.95e-4.
    torch.float16: 2.5e-4,
    # Nothing is rounded but the FP32 accumulation: 1.2e-7 at K = 4096, 7e-7 at K = 25600 on a CPU. The rest is room for
    # the truncating adders of tensor cores; BF16 anywhere in the chain gives 1.66e-3.
    torch.float32: 5.0e-6,
}
"""Largest `rel_rmse` by output dtype."""

GUARD_ELEMENTS = 64
GUARD_VALUE = 12345.0
"""Not a value any test computes; BF16 stores it as 12352, so compare in the dtype of the buffer."""


def reference(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """Float64 product `[M, N]` of the exact inputs, plus a residual `[M, N]` or bias `[N]`; gated: silu of the first
    half of it times the second, `[M, N / 2]`."""
    ref = x.double() @ w.double().T
    if gated:
        gate, up = ref.chunk(2, dim=1)
        ref = torch.nn.functional.silu(gate) * up
    return ref if residual is None else ref + residual.double()


def rel_rmse(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None, *, gated: bool = False
) -> float:
    """Relative root-mean-square error of y against `reference`; NaN where y holds NaN, 0.0 where both are all zero."""
    ref = reference(x, w, residual, gated=gated)
    error, scale = torch.linalg.vector_norm(y.double() - ref), torch.linalg.vector_norm(ref)
    return 0.0 if error == 0 else float(error / scale)


def assert_t1(
    y: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
    tolerance: float = 0.0,
) -> None:
    """Shape, no NaN that the reference does not have, and `rel_rmse` within `TOLERANCE` of the dtype of y.

    Outputs of few elements scatter around the RMS of the rounding: below 1000 elements the bound grows by
    1 + 2 / sqrt(elements), which is 3 standard deviations of the mean square. `tolerance` replaces the bound.
    """
    ref = reference(x, w, residual, gated=gated)
    assert y.shape == ref.shape, f"shape {tuple(y.shape)}"
    bound = tolerance or TOLERANCE[y.dtype] * (1 + 2 / y.numel() ** 0.5 if y.numel() < 1000 else 1)
    got = rel_rmse(y, x, w, residual, gated=gated)
    assert got <= bound, f"rel-RMSE {got:.3e} > {bound:.3e}; {_worst(y, ref)}"


def assert_bit_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Same shape, dtype and bits (NaN equals the same NaN, -0.0 differs from 0.0); names the first difference."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"dtypes {a.dtype} and {b.dtype}"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = (a.contiguous().view(bits) != b.contiguous().view(bits)).nonzero()
    if len(differs):
        where = tuple(differs[0].tolist())
        raise AssertionError(f"{len(differs)} of {a.numel()} differ, first at {where}: {a[where]} and {b[where]}")


def one_hot_columns_exact(fn: Linear, w: torch.Tensor, *, columns: list[int] | None = None, rows: int = 1) -> None:
    """A one-hot activation must return a column of w bit-exactly: finds a lost or doubled K slice that tolerances hide.

    columns: which k to probe (default: all). rows: M of each call, every row with a hot element of its own.
    """
    k = w.shape[1]
    wanted = list(range(k)) if columns is None else columns
    for start in range(0, len(wanted), rows):
        hot = [wanted[min(start + i, len(wanted) - 1)] for i in range(rows)]
        x = torch.zeros(rows, k, dtype=w.dtype, device=w.device)
        x[range(rows), hot] = 1
        y = fn(x, w)
        # A sum with zeros turns -0.0 into 0.0, so that one pair of bit patterns counts as equal.
        expected = w[:, hot].T.to(y.dtype) + 0.0
        assert_bit_equal(y + 0.0, expected.contiguous())


def rows_isolated(fn: Linear, x: torch.Tensor, w: torch.Tensor, *, row: int, fill: float) -> None:
    """`fill` (NaN, Inf, huge) in every element of one activation row leaves the bits of all other rows as they are with
    zeros there, and a NaN row comes out all NaN."""
    others = [m for m in range(x.shape[0]) if m != row]
    clean, dirty = x.clone(), x.clone()
    clean[row], dirty[row] = 0.0, fill
    got = fn(dirty, w)
    assert_bit_equal(got[others], fn(clean, w)[others])
    if fill != fill:
        assert bool(got[row].isnan().all()), f"row {row} of NaN came out with {int((~got[row].isnan()).sum())} numbers"


@dataclass(frozen=True, slots=True)
class Guarded:
    """An output full of NaN inside a larger buffer: `y` `[M, N]`, guards on both sides, and a gap behind each row.

    An element that the kernel never wrote stays NaN and fails every gate; a store outside y changes a guard.
    """

    y: torch.Tensor
    buffer: torch.Tensor

    def check(self) -> None:
        """Assert that every element outside y still holds the guard value, naming the first that does not."""
        outside = self.buffer.clone()
        outside.as_strided(self.y.shape, self.y.stride(), self.y.storage_offset()).fill_(GUARD_VALUE)
        touched = (outside != torch.tensor(GUARD_VALUE, dtype=outside.dtype, device=outside.device)).nonzero()
        first = int(touched[0]) - self.y.storage_offset() if len(touched) else 0
        assert not len(touched), f"{len(touched)} elements outside y were written, first at y offset {first}"


def guarded_output(
    m: int, n: int, dtype: torch.dtype, *, device: torch.device | str = "cpu", row_gap: int = 0
) -> Guarded:
    """A poisoned output `[m, n]` with `GUARD_ELEMENTS` guards on each side and `row_gap` guards behind every row."""
    stride = n + row_gap
    buffer = torch.full((2 * GUARD_ELEMENTS + m * stride,), GUARD_VALUE, dtype=dtype, device=device)
    y = buffer.as_strided((m, n), (stride, 1), GUARD_ELEMENTS)
    y.fill_(float("nan"))
    return Guarded(y, buffer)


def padded_rows(values: torch.Tensor, pad: int) -> torch.Tensor:
    """`values` as a view of a buffer whose rows are `pad` elements longer, the rest of each row being NaN."""
    rows, cols = values.shape
    buffer = torch.full((rows, cols + pad), float("nan"), dtype=values.dtype, device=values.device)
    buffer[:, :cols] = values
    return buffer[:, :cols]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` and its relatives return NaN, so that an output element nobody wrote cannot pass by luck."""
    deterministic: Any = torch.utils.deterministic  # its settings are properties that the stubs do not know
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before[2]


def _worst(y: torch.Tensor, ref: torch.Tensor) -> str:
    error = (y.double() - ref).abs().nan_to_num(nan=float("inf"))
    m, n = divmod(int(error.argmax()), y.shape[1])
    return f"worst at ({m}, {n}): {float(y[m, n])!r}, expected {float(ref[m, n])!r}"
