"""`torch.ops.skinny.linear`: opaque, M read when it runs, and in every other respect the original call."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear as torch_linear

from skinny_core import dispatch, op
from skinny_core.testing.numerics import assert_bit_equal

N, K = 24, 64
BF16 = torch.bfloat16
run = torch.ops.skinny.linear


def _randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


SHAPES = [(1, K), (0, K), (4, K), (17, K), (K,), (2, 3, K), (1, 0, K), (0, 1, K)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_byte_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = _randn(*shape, dtype=dtype), _randn(N, K, dtype=dtype)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            y = run(x, w, "nobody")
            assert_bit_equal(y, torch_linear(x, w))
            assert (y.device, y.is_inference()) == (x.device, torch.is_inference_mode_enabled())


def test_byte_equal_for_awkward_operands() -> None:
    h = _randn(2, 5, K)[:, :2]
    assert_bit_equal(run(h, _randn(N, K)), torch_linear(h, _randn(N, K)))
    x = _randn(2 * K + 1)[1:].view(2, K)
    assert_bit_equal(run(x, _randn(K, N).T), torch_linear(x, _randn(K, N).T))
    bits = _randn(3, K)
    bits.view(torch.int16)[1] = 0x7FA5
    assert_bit_equal(run(bits, _randn(N, K)), torch_linear(bits, _randn(N, K)))
    negative = torch._neg_view(_randn(2, K))
    assert_bit_equal(run(negative, _randn(N, K)), torch_linear(negative, _randn(N, K)))


@pytest.mark.parametrize("shape", [(1, K), (2, 3, K), (K,)])
def test_gradients_are_byte_equal(shape: tuple[int, ...]) -> None:
    made = []
    for call in (torch_linear, run):
        x, w = _randn(*shape).requires_grad_(), torch.nn.Parameter(_randn(N, K))
        y = call(x, w)
        assert y.grad_fn is not None
        y.backward(_randn(*shape[:-1], N))
        made.append((y.detach(), x.grad, w.grad))
    for ours, theirs in zip(*made, strict=True):
        assert_bit_equal(ours, theirs)
    residual = _randn(*shape[:-1], N).requires_grad_()
    run(_randn(*shape), _randn(N, K), residual=residual).sum().backward()
    assert_bit_equal(residual.grad, torch.ones_like(residual))


def test_no_gradient_is_invented() -> None:
    with torch.no_grad():
        assert not run(_randn(1, K), torch.nn.Parameter(_randn(N, K))).requires_grad
    assert not run(_randn(1, K), _randn(N, K)).requires_grad


def test_a_forward_mode_tangent_is_kept() -> None:
    x, w = _randn(2, K), _randn(N, K)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, x), w)).tangent
    assert tangent is not None
    assert_bit_equal(tangent, torch_linear(x, w))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_autocast(dtype: torch.dtype) -> None:
    x, w = _randn(2, K, dtype=dtype), _randn(N, K, dtype=dtype)
    compiled = torch.compile(lambda: run(x, w), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", BF16), torch.no_grad():
        expected = torch_linear(x, w)
        assert expected.dtype is BF16
        assert_bit_equal(run(x, w), expected)
        assert_bit_equal(compiled(), expected)


ERRORS: list[Callable[[], tuple[torch.Tensor, torch.Tensor]]] = [
    lambda: (_randn(1, K), _randn(N, K - 8)),
    lambda: (_randn(1, K), _randn(N, K).float()),
    lambda: (torch.tensor(1.0, dtype=BF16), _randn(N, K)),
    lambda: (_randn(1, K), _randn(2, N, K)),
]


@pytest.mark.parametrize("make", ERRORS)
def test_errors_are_the_original_ones(make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    x, w = make()
    with pytest.raises(Exception) as expected:  # noqa: PT011
        torch_linear(x, w)
    with pytest.raises(type(expected.value)) as caught:
        run(x, w)
    assert str(caught.value) == str(expected.value)


def test_residual_and_output_dtype() -> None:
    x, w, residual = _randn(2, K), _randn(N, K), _randn(2, N)
    assert_bit_equal(run(x, w, residual=residual), torch_linear(x, w) + residual)
    y = run(x, w, out_dtype=torch.float32)
    assert_bit_equal(y, torch_linear(x.float(), w.float()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (((1, K), (N, K)), {}),
        (((0, K), (N, K)), {}),
        (((2, 3, K), (N, K)), {}),
        (((K,), (N, K)), {}),
        (((4, K), (N, K)), {"residual": (4, N)}),
        (((4, K), (N, K)), {"out_dtype": torch.float32}),
        (((4, K), (N, K)), {"grad": True}),
        (((4, K), (N, K)), {"residual": (4, N), "grad": True}),
    ],
)
def test_opcheck(args: tuple[tuple[int, ...], tuple[int, ...]], kwargs: dict[str, object]) -> None:
    grad = bool(kwargs.pop("grad", False))
    # opcheck compares gradients with a tolerance for FP32
    x, w = (_randn(*shape, dtype=torch.float32).requires_grad_(grad) for shape in args)
    if isinstance(shape := kwargs.get("residual"), tuple):
        kwargs["residual"] = _randn(*shape, dtype=torch.float32).requires_grad_(grad)
    torch.library.opcheck(run.default, (x, w, "nobody"), kwargs)


def test_opcheck_of_strided_operands() -> None:
    torch.library.opcheck(run.default, (_randn(2, 5, K)[:, :2], _randn(K, N).T))


def test_one_graph_serves_every_m() -> None:
    """The family is activated between calls, and the calls see it: nothing of the plan is in the graph."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    w = _randn(N, K)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def f(x: torch.Tensor) -> torch.Tensor:
        return run(x, w, "compiled") + 1

    with torch.no_grad():
        for m in (512, 1, 2, 4, 5, 64, 1, 2, 16, 17, 3):
            x = _randn(m, K)
            assert_bit_equal(f(x), torch_linear(x, w) + 1)
    assert len(graphs) <= 2
    assert any(node.target is run.default or node.target is run for node in graphs[0].graph.nodes)
    counted = {m: count for (family, _, _, m, _), count in dispatch.counters().items() if family == "compiled"}
    assert counted == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 16: 1, dispatch.M_ABOVE: 3}


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_through_autograd(grad: bool) -> None:
    compiled = torch.compile(lambda x, w: run(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (8, 1, 2, 4):
        x, w = _randn(m, K), _randn(N, K).requires_grad_(grad)
        y = compiled(x, w)
        assert_bit_equal(y.detach(), torch_linear(x, w).detach())
        assert y.requires_grad is grad
        if grad:
            y.backward(_randn(m, N))
            ours = w.grad
            w.grad = None
            torch_linear(x, w).backward(_randn(m, N))
            assert_bit_equal(ours, w.grad)


def test_meta_tensors_have_the_right_shape() -> None:
    y = run(torch.empty(2, 3, K, device="meta", dtype=BF16), torch.empty(N, K, device="meta", dtype=BF16))
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, N), BF16, "meta")


def test_a_reload_registers_nothing_twice() -> None:
    library = op._library
    assert importlib.reload(op)._library is library
    assert_bit_equal(run(_randn(1, K), _randn(N, K)), torch_linear(_randn(1, K), _randn(N, K)))
