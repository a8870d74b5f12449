"""The kernel runs exactly where the rules allow it, and everything else is the original call, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear as torch_linear

from skinny_core import device, dispatch, rules, warmup
from skinny_core.device import DeviceKey
from skinny_core.plan import Cell
from skinny_core.problem import DType, Epilogue, Problem
from skinny_core.rules import Context, Reason
from skinny_core.testing.numerics import assert_bit_equal, padded_rows
from skinny_core.testing.stand_in import StandIn, cell

N, K = 32, 64
BF16 = torch.bfloat16
MS = (1, 2, 4)


def _randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _exact(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None, dtype: torch.dtype = BF16
) -> torch.Tensor:
    y = x.detach().double() @ w.detach().double().T
    return (y if residual is None else y + residual.double()).to(dtype)


def _outcomes(family: str = "test") -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, *_, outcome), count in dispatch.counters().items():
        if name == family:
            found[outcome] = found.get(outcome, 0) + count
    return found


def _activate(key: DeviceKey, *cells: Cell, warm: bool = True, static_weights: bool = False) -> None:
    dispatch.activate_cells("test", key, cells or tuple(cell(N, K, m) for m in MS), static_weights=static_weights)
    if warm:
        warmup.warm("test", [(c.n, c.k, c.activation) for c in cells] or [(N, K, DType.BF16)])


@pytest.fixture
def planned(h200: DeviceKey, kernel: StandIn) -> StandIn:
    """Family "test" with warm cells for (32, 64) at M = 1, 2, 4."""
    _activate(h200)
    return kernel


@pytest.mark.parametrize("shape", [(1, K), (2, K), (4, K), (2, 2, K), (1, 1, 4, K), (K,)])
def test_the_kernel_runs_and_m_is_the_product_of_the_leading_dimensions(
    planned: StandIn, shape: tuple[int, ...]
) -> None:
    x, w = _randn(*shape), _randn(N, K)
    y = dispatch.linear(x, w, "test")
    assert_bit_equal(y, _exact(x, w))
    m = x.numel() // K
    assert [launch.m for launch in planned.launches] == [m]
    assert dispatch.counters() == {("test", N, K, m, "kernel:stand_in"): 1}
    assert y.is_contiguous()


def test_padded_rows_and_sliced_activations_are_read_by_their_strides(planned: StandIn) -> None:
    w = padded_rows(_randn(N, K), 128)
    x = padded_rows(_randn(4, K), 8)
    assert_bit_equal(dispatch.linear(x, w, "test"), _exact(x, w))
    assert planned.launches[-1].x_stride == K + 8
    assert planned.launches[-1].w_stride == K + 128
    expanded = _randn(1, K).expand(4, K)
    assert_bit_equal(dispatch.linear(expanded, w, "test"), _exact(expanded, w))
    assert planned.launches[-1].x_stride == 0
    uniform = _randn(4, 2, K)[:, 0]
    assert_bit_equal(dispatch.linear(uniform, w, "test"), _exact(uniform, w))
    assert planned.launches[-1].x_stride == 2 * K


FALLBACKS: dict[str, tuple[Reason, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "zero rows": (Reason.ZERO_ROWS, lambda: (_randn(0, K), _randn(N, K))),
    "zero rows, 3-D": (Reason.ZERO_ROWS, lambda: (_randn(1, 0, K), _randn(N, K))),
    "M of no cell": (Reason.OFF_TABLE, lambda: (_randn(3, K), _randn(N, K))),
    "17 rows": (Reason.M_RANGE, lambda: (_randn(17, K), _randn(N, K))),
    "another shape": (Reason.OFF_TABLE, lambda: (_randn(1, K), _randn(N + 1, K))),
    "fp32": (Reason.DTYPE, lambda: (_randn(1, K).float(), _randn(N, K).float())),
    "fp16 without a cell": (Reason.OFF_TABLE, lambda: (_randn(1, K).half(), _randn(N, K).half())),
    "not viewable": (Reason.LAYOUT, lambda: (_randn(2, 5, K)[:, :2], _randn(N, K))),
    "K strided": (Reason.LAYOUT, lambda: (_randn(2, 2 * K)[:, ::2], _randn(N, K))),
    "K strided, one row": (Reason.LAYOUT, lambda: (_randn(1, 2 * K)[:, ::2], _randn(N, K))),
    "every second column of a weight": (Reason.LAYOUT, lambda: (_randn(2, K), _randn(N, 2 * K)[:, ::2])),
    "transposed weight": (Reason.LAYOUT, lambda: (_randn(2, K), _randn(K, N).T)),
    "x off by 2 bytes": (Reason.ALIGNMENT, lambda: (_randn(2 * K + 1)[1:].view(2, K), _randn(N, K))),
    "w off by 8 bytes": (Reason.ALIGNMENT, lambda: (_randn(2, K), _randn(N * K + 4)[4:].view(N, K))),
    "x row stride of 4": (Reason.ALIGNMENT, lambda: (padded_rows(_randn(2, K), 4), _randn(N, K))),
    "w row stride of 4": (Reason.ALIGNMENT, lambda: (_randn(2, K), padded_rows(_randn(N, K), 4))),
    "gradient of w": (Reason.GRADIENT, lambda: (_randn(2, K), _randn(N, K).requires_grad_())),
    "gradient of x": (Reason.GRADIENT, lambda: (_randn(2, K).requires_grad_(), _randn(N, K))),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACKS)
def test_everything_else_is_the_original_call(planned: StandIn, name: str) -> None:
    reason, make = FALLBACKS[name]
    x, w = make()
    with torch.no_grad() if "gradient" not in name else torch.enable_grad():
        y, expected = dispatch.linear(x, w, "test"), torch_linear(x, w)
    assert_bit_equal(y, expected)
    assert y.requires_grad == expected.requires_grad
    assert y.stride() == expected.stride()
    assert _outcomes() == {f"fallback:{reason.value}": 1}
    assert not planned.launches


def test_a_parameter_that_requires_grad_runs_where_no_gradient_is_recorded(planned: StandIn) -> None:
    x, w = _randn(2, K), torch.nn.Parameter(_randn(N, K))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_bit_equal(dispatch.linear(x, w, "test"), _exact(x, w))
    assert _outcomes() == {"kernel:stand_in": 2}


def test_a_forward_mode_tangent_is_kept(planned: StandIn) -> None:
    from torch.autograd import forward_ad

    x, w = _randn(2, K), _randn(N, K)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(dispatch.linear(forward_ad.make_dual(x, x), w, "test")).tangent
    assert tangent is not None
    assert_bit_equal(tangent, torch_linear(x, w))
    assert _outcomes() == {"fallback:gradient": 1}


def test_autocast_converts_first(planned: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: True)
    dispatch.linear(_randn(2, K), _randn(N, K), "test")
    assert _outcomes() == {"fallback:autocast": 1}


class _Wrapper(torch.Tensor):
    """No storage of its own: what its elements mean is up to `__torch_dispatch__`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map(lambda a: 2 * a.inner if isinstance(a, _Wrapper) else a, args)
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize(("which", "reason"), [(0, "subclassed_weight"), (1, "subclassed_weight")])
def test_a_tensor_without_storage_is_never_launched(planned: StandIn, which: int, reason: str) -> None:
    operands = [_randn(2, K), _randn(N, K)]
    operands[which] = _Wrapper(operands[which])
    with torch.no_grad():
        y, expected = dispatch.linear(*operands, "test"), torch_linear(*operands)
    assert_bit_equal(y, expected)
    assert not planned.launches
    assert _outcomes() == {f"fallback:{reason}": 1}


ERRORS = [
    lambda: (_randn(1, K), _randn(N, K - 8)),
    lambda: (_randn(1, K - 8), _randn(N, K)),
    lambda: (_randn(2, K // 2), _randn(N, K)),
    lambda: (_randn(1, K), _randn(N, K).float()),
    lambda: (_randn(1, K).half(), _randn(N, K)),
    lambda: (torch.tensor(1.0, dtype=BF16), _randn(N, K)),
    lambda: (_randn(1, K), _randn(2, N, K)),
]


@pytest.mark.parametrize("make", ERRORS)
def test_errors_are_the_original_ones(planned: StandIn, make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    x, w = make()
    with pytest.raises(Exception) as expected:  # noqa: PT011
        torch_linear(x, w)
    with pytest.raises(type(expected.value)) as caught:
        dispatch.linear(x, w, "test")
    assert str(caught.value) == str(expected.value)
    assert not planned.launches


def test_a_weight_of_one_dimension_or_without_columns(planned: StandIn) -> None:
    for x, w in [(_randn(2, K), _randn(K)), (_randn(2, 0), _randn(N, 0)), (_randn(2, K), _randn(0, K))]:
        assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))


def test_nan_payloads_of_the_fallback(planned: StandIn) -> None:
    x, w = _randn(3, K), _randn(N, K)
    x.view(torch.int16)[1] = 0x7FA5  # a NaN with a payload
    w[3, 5] = float("inf")
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))


def test_gradients_are_the_original_ones(planned: StandIn) -> None:
    made = []
    for call in (torch_linear, lambda x, w: dispatch.linear(x, w, "test")):
        x, w = _randn(2, 2, K).requires_grad_(), torch.nn.Parameter(_randn(N, K))
        y = call(x, w)
        y.backward(_randn(2, 2, N))
        made.append((y.detach(), x.grad, w.grad))
    for ours, theirs in zip(*made, strict=True):
        assert_bit_equal(ours, theirs)


def test_new_weights_are_used_at_once(planned: StandIn) -> None:
    """In place, through .data, and in a new storage: no derived copy is kept."""
    x, w = _randn(1, K), torch.nn.Parameter(_randn(N, K), requires_grad=False)
    for change in (lambda v: w.copy_(v), lambda v: w.data.copy_(v), lambda v: setattr(w, "data", v)):
        new = w.detach() * -2
        with torch.no_grad():
            change(new.clone())
            assert_bit_equal(dispatch.linear(x, w, "test"), _exact(x, new))
    assert len(planned.launches) == 3


def test_residual(h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    _activate(h200, cell(N, K, 2, epilogue=Epilogue.RESIDUAL), warm=False)
    problem = Problem(n=N, k=K, epilogue=Epilogue.RESIDUAL)
    state = dispatch.family_state("test")
    assert state
    dispatch.install_launchers(state, {(0, problem, 2): kernel.compile({}, problem, 2, index=0, prewait=False)})
    x, w, residual = _randn(2, K), _randn(N, K), _randn(2, N)
    assert_bit_equal(dispatch.linear(x, w, "test", residual=residual), _exact(x, w, residual))
    assert len(kernel.launches) == 1
    other: list[torch.Tensor] = [residual.float(), residual.T.contiguous().T, _randn(N), _randn(2, 2 * N)[:, ::2]]
    for r in other:
        assert_bit_equal(dispatch.linear(x, w, "test", residual=r), torch_linear(x, w) + r)
    needs = residual.clone().requires_grad_()
    dispatch.linear(x, w, "test", residual=needs).sum().backward()
    assert needs.grad is not None
    assert _outcomes() == {"kernel:stand_in": 1, "fallback:layout": 4, "fallback:gradient": 1}
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))


def test_fp32_output(h200: DeviceKey, kernel: StandIn) -> None:
    _activate(h200, cell(N, K, 2, output=DType.FP32), warm=False)
    warmup.warm("test", [(N, K, DType.BF16)])
    x, w = _randn(2, K), _randn(N, K)
    assert_bit_equal(dispatch.linear(x, w, "test", out_dtype=torch.float32), _exact(x, w, dtype=torch.float32))
    assert _outcomes() == {"kernel:stand_in": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_an_output_dtype_without_a_name_never_meets_a_kernel(
    h200: DeviceKey, kernel: StandIn, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _activate(h200, cell(N, K, 2, output=DType.FP32), warm=False)
    warmup.warm("test", [(N, K, DType.BF16)])
    monkeypatch.setattr(dispatch, "original", lambda *_: "original")
    assert dispatch.linear(_randn(2, K), _randn(N, K), "test", out_dtype=dtype) == "original"
    assert _outcomes() == {"fallback:dtype": 1}


def test_early_reading_of_weights_only_by_promise_and_only_in_a_capture(
    h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for promise in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        _activate(h200, static_weights=promise)
        for capturing in (False, True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
            dispatch.linear(_randn(1, K), _randn(N, K), "test")
            seen.append(kernel.launches[-1].prewait)
    assert seen == [False, False, False, True]


def test_a_tensor_on_the_host_is_not_cuda(kernel: StandIn) -> None:
    dispatch.activate_cells("test", device.product("h200"), (cell(N, K, 1),))
    x, w = _randn(1, K), _randn(N, K)
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))
    assert_bit_equal(dispatch.linear(x, w, "nobody"), torch_linear(x, w))
    assert _outcomes() == {"fallback:not_cuda": 1}
    assert _outcomes("nobody") == {"fallback:disabled": 1}


def test_not_warm_and_broken_kernels_fall_back(h200: DeviceKey, kernel: StandIn) -> None:
    _activate(h200, warm=False)
    x, w = _randn(1, K), _randn(N, K)
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))
    kernel.broken = ImportError("no DSL")
    assert warmup.warm("test", [(N, K, DType.BF16)]) == []
    assert_bit_equal(dispatch.linear(x, w, "test"), torch_linear(x, w))
    assert _outcomes() == {"fallback:not_warm": 1, "fallback:kernel_unavailable": 1}


def test_counters_reset_and_the_last_bin(planned: StandIn) -> None:
    for m in (1, 1, 17, 500):
        dispatch.linear(_randn(m, K), _randn(N, K), "test")
    assert dispatch.counters() == {
        ("test", N, K, 1, "kernel:stand_in"): 2,
        ("test", N, K, dispatch.M_ABOVE, "fallback:m_range"): 2,
    }
    dispatch.reset_counters()
    assert dispatch.counters() == {}
    dispatch.linear(_randn(1, K), _randn(N, K), "test")
    assert _outcomes() == {"kernel:stand_in": 1}


def _allowed(x: torch.Tensor, w: torch.Tensor) -> bool:
    """What the rules say, from facts established here without looking at how the dispatcher does it."""
    rows = x.numel() // K if x.numel() else 0
    index = (
        torch.cartesian_prod(*(torch.arange(s) for s in x.shape[:-1])).view(rows, -1)
        if x.dim() > 1
        else torch.zeros(1, 0)
    )
    starts = [int(sum(int(i) * s for i, s in zip(place, x.stride(), strict=False))) for place in index]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    step = next(iter(steps), 0)
    status = "win" if rows in MS and w.shape == (N, K) and w.dtype is BF16 else rules.OFF_TABLE
    facts = Context(
        enabled=True, on_cuda=True, same_device=True, dtypes_ok=x.dtype == w.dtype and w.dtype in (BF16, torch.float16),
        m=rows, cell_status=status, layout_ok=len(steps) <= 1 and x.stride(-1) == 1 and w.stride(1) == 1,
        aligned=not any(v % 16 for v in (x.data_ptr(), w.data_ptr(), 2 * step, 2 * w.stride(0))), warm=True,
    )  # fmt: skip
    return rules.decide(Problem(n=N, k=K), facts).ok


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    lead=st.lists(st.integers(1, 4), max_size=2), pads=st.tuples(*[st.sampled_from([0, 0, 0, 1, 4, 8, 64])] * 3),
    step=st.sampled_from([1, 1, 1, 2]), offsets=st.tuples(*[st.sampled_from([0, 0, 0, 1, 4, 8])] * 2),
    dtypes=st.sampled_from([(BF16, BF16)] * 5 + [(torch.float16, torch.float16)]), n=st.sampled_from([N] * 5 + [N + 1]),
    cut=st.booleans(), permuted=st.booleans(),
)  # fmt: skip
def test_a_kernel_runs_exactly_when_the_rules_allow_it(
    planned: StandIn, lead: list[int], pads: tuple[int, int, int], step: int, offsets: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype], n: int, cut: bool, permuted: bool,
) -> None:  # fmt: skip
    width = (K + pads[0]) * step
    full = [*lead[:-1], lead[-1] + cut] if lead else []
    size = width * max(1, torch.Size(full).numel()) + 16
    x = _randn(size, dtype=dtypes[0])[offsets[0] :][: size - 16].view(*full, width)[..., : K * step : step]
    if lead and cut:
        x = x[..., : lead[-1], :]
    if permuted and len(lead) == 2:
        x = x.transpose(0, 1)
    w = _randn(n * (K + pads[1]) + 16, dtype=dtypes[1])[offsets[1] :][: n * (K + pads[1])].view(n, -1)[:, :K]
    planned.launches.clear()
    y = dispatch.linear(x, w, "test")
    assert bool(planned.launches) is _allowed(x, w)
    assert_bit_equal(y, _exact(x, w) if planned.launches else torch_linear(x, w))


def test_one_row_may_have_any_row_stride(planned: StandIn) -> None:
    x = torch.as_strided(_randn(K), (1, K), (3, 1))
    assert_bit_equal(dispatch.linear(x, _randn(N, K), "test"), _exact(x, _randn(N, K)))
    assert len(planned.launches) == 1


def test_naming_the_default_output_dtype_changes_nothing(planned: StandIn) -> None:
    dispatch.linear(_randn(1, K), _randn(N, K), "test", out_dtype=BF16)
    assert _outcomes() == {"kernel:stand_in": 1}
