"""What happens around a planned layer on a real GPU: layouts, gradients, captured graphs, weight updates, streams, PDL.

Each test proves which path ran. Kinds of field bugs: layout, alignment, rank, zero rows, capture, PDL, gradients,
weights.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from skinny_core import dispatch, op, warmup
from skinny_core.device import DeviceKey
from skinny_core.errors import CompileForbiddenError
from skinny_core.problem import DType
from skinny_core.testing import numerics
from tests.gpu import cells

pytestmark = pytest.mark.sm90
N, K = 1024, 1024
SIMT = {"threads": 64, "rows": 2, "chunks": 1, "pdl": 1}
MMA = {"warps": 4, "parts": 2, "loads": 2, "unroll": 2, "pdl": 1}
DEPENDENT = pytest.mark.parametrize(
    ("kernel", "config"),
    [("bf16_simt", SIMT), ("bf16_mma", MMA), ("bf16_mma", MMA | {"parts": 8})],
    ids=["bf16_simt", "bf16_mma", "bf16_mma parts=8"],
)
"""Launched with programmatic dependent launch, which is no default and without which a missing wait shows nothing."""


def _data(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m)
    x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
    return x, torch.randn(N, K, dtype=torch.bfloat16, device="cuda") * K**-0.5


@pytest.fixture
def planned(gpu: DeviceKey) -> DeviceKey:
    """Cells for M = 1, 2, 4 of (N, K), warm."""
    cells.activate(gpu, *(cells.made_up(N, K, m) for m in (1, 2, 4)))
    return gpu


def _offset(shape: tuple[int, ...], elements: int) -> torch.Tensor:
    """A contiguous tensor whose first element is `elements` past a 16-byte boundary."""
    size = torch.Size(shape).numel()
    return torch.randn(size + elements, dtype=torch.bfloat16, device="cuda")[elements:].view(shape)


FALLBACKS: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], str]] = {
    "M off the table": (lambda: _data(3), "off_table"),
    "M above 16": (lambda: _data(40), "m_range"),
    "no rows": (lambda: (_data(1)[0][:0], _data(1)[1]), "zero_rows"),
    "no rows, 3-D": (lambda: (_data(1)[0][:0].view(1, 0, K), _data(1)[1]), "zero_rows"),
    "x not aligned": (lambda: (_offset((2, K), 1), _data(2)[1]), "alignment"),
    "w not aligned": (lambda: (_data(2)[0], _offset((N, K), 4)), "alignment"),
    "x row stride odd": (lambda: (_offset((2, K + 1), 0)[:, :K], _data(2)[1]), "alignment"),
    "x transposed": (lambda: (_data(2)[0].t().contiguous().t(), _data(2)[1]), "layout"),
    "w transposed": (lambda: (_data(2)[0], _data(2)[1].t().contiguous().t()), "layout"),
    "x not viewable": (lambda: (_offset((2, 5, K), 0)[:, :2, :], _data(2)[1]), "layout"),
    "x fp16": (lambda: (_data(2)[0].half(), _data(2)[1]), "dtype"),
    "both fp32": (lambda: (_data(2)[0].float(), _data(2)[1].float()), "dtype"),
}


@pytest.mark.parametrize("case", FALLBACKS)
@torch.inference_mode()
def test_fallback_is_byte_equal(planned: DeviceKey, case: str) -> None:
    make, reason = FALLBACKS[case]
    x, w = make()
    cells.linear(*_data(2))  # an aligned call first: a kernel for it exists
    dispatch.reset_counters()
    for call in (cells.linear, lambda a, b: op.linear(a, b, cells.FAMILY)):
        try:
            expected = torch_linear(x, w)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                call(x, w)
            continue
        numerics.assert_bit_equal(call(x, w), expected)
    assert cells.ran(f"fallback:{reason}") == 2
    assert cells.ran() == 0


@pytest.mark.parametrize(
    "shape", [(K,), (1, K), (1, 1, K), (2, K), (2, 1, K), (1, 2, K), (4, K), (2, 2, K), (1, 4, 1, K)], ids=str
)
@torch.inference_mode()
def test_leading_dimensions_are_flattened(planned: DeviceKey, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    w = _data(1)[1]
    y = cells.linear(x, w)
    assert y.shape == (*shape[:-1], N)
    assert y.is_contiguous()
    numerics.assert_t1(y.reshape(-1, N), x.reshape(-1, K), w)
    assert cells.ran() == 1


@torch.inference_mode()
def test_padded_rows_run_without_a_copy(planned: DeviceKey) -> None:
    x, w = _data(2)
    padded_x, padded_w = numerics.padded_rows(x, 64), numerics.padded_rows(w, 128)
    numerics.assert_bit_equal(cells.linear(padded_x, padded_w), cells.linear(x, w))
    assert cells.ran() == 2


def test_gradients_take_the_original_call(planned: DeviceKey) -> None:
    x, w = _data(2)
    results = []
    for call in (torch_linear, cells.linear, lambda a, b: op.linear(a, b, cells.FAMILY)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = call(a, b)
        assert y.grad_fn is not None
        y.float().square().sum().backward()
        results.append((y.detach(), a.grad, b.grad))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            numerics.assert_bit_equal(got, expected)
    assert cells.ran() == 0
    w.requires_grad_()
    with torch.no_grad():  # a parameter keeps requires_grad here, and the kernel may run
        numerics.assert_t1(cells.linear(x, w), x, w.detach())
    assert cells.ran() == 1


@torch.inference_mode()
def test_autocast_takes_the_original_call(planned: DeviceKey) -> None:
    x, w = _data(2)
    with torch.autocast("cuda", dtype=torch.float16):
        numerics.assert_bit_equal(cells.linear(x, w), torch_linear(x, w))
    assert cells.ran("fallback:autocast") == 1


@torch.inference_mode()
def test_first_call_inside_capture_falls_back(gpu: DeviceKey) -> None:
    cells.activate(gpu, cells.made_up(N, K, 2), warm=False)
    x, w = _data(2)
    torch_linear(x, w)  # cuBLAS makes its workspace
    for expected in ("fallback:not_warm", "kernel:bf16_simt"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cells.linear(x, w)
        assert cells.ran(expected) == 1
        for _ in range(3):
            x.normal_()
            graph.replay()
            numerics.assert_t1(y, x, w)
        warmup.warm(cells.FAMILY, [(N, K, DType.BF16)])


def test_warm_up_during_capture_is_refused(gpu: DeviceKey) -> None:
    cells.activate(gpu, cells.made_up(N, K, 2), warm=False)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(CompileForbiddenError, match="before the capture"):
            warmup.warm(cells.FAMILY, [(N, K, DType.BF16)])


UPDATES: dict[str, Callable[[torch.nn.Linear, torch.Tensor], object]] = {
    "copy_": lambda layer, new: layer.weight.copy_(new),
    "data.copy_": lambda layer, new: layer.weight.data.copy_(new),
    "data = new storage": lambda layer, new: setattr(layer.weight, "data", new.clone()),
    "new parameter": lambda layer, new: setattr(layer, "weight", torch.nn.Parameter(new.clone())),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("static_weights", [False, True])
@torch.no_grad()
def test_weight_updates_are_followed(gpu: DeviceKey, update: str, static_weights: bool) -> None:
    cells.activate(gpu, cells.made_up(N, K, 2), static_weights=static_weights)
    x, w = _data(2)
    layer = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device="cuda")
    layer.weight.copy_(w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cells.linear(x, layer.weight)
    graph.replay()
    numerics.assert_t1(y, x, layer.weight)
    new = torch.randn_like(w) * K**-0.5
    UPDATES[update](layer, new)
    numerics.assert_t1(cells.linear(x, layer.weight), x, new)
    if "copy_" in update:  # the storage that the graph knows
        graph.replay()
        numerics.assert_t1(y, x, new)
    assert cells.ran() == 2


@DEPENDENT
@torch.no_grad()
def test_a_weight_written_by_the_kernel_before(gpu: DeviceKey, kernel: str, config: dict[str, int]) -> None:
    """Without the promise of static weights, the weight may come from the directly preceding kernel of one graph."""
    cells.activate(gpu, cells.made_up(N, K, 1, kernel=kernel, config=config))
    x, w = _data(1)
    sources = [torch.randn_like(w) * K**-0.5 for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = []
        for i in range(40):
            w.copy_(sources[i % 2])
            outputs.append(cells.linear(x, w))
    expected = [cells.linear(x, source) for source in sources]
    for _ in range(20):
        graph.replay()
    for i, y in enumerate(outputs):
        numerics.assert_bit_equal(y, expected[i % 2])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@DEPENDENT
@torch.inference_mode()
def test_slow_producer(gpu: DeviceKey, kernel: str, config: dict[str, int], captured: bool) -> None:
    """A producer that triggers at once, waits 100 us and only then writes x; x is poisoned before every launch."""
    from skinny_core.testing.slow_producer import SlowProducer

    cells.activate(gpu, cells.made_up(N, K, 2, kernel=kernel, config=config), static_weights=True)
    producer = SlowProducer(gpu.arch)
    x, w = _data(2)
    runs = 2000
    inputs = torch.randn(16, 2, K, dtype=torch.bfloat16, device="cuda")
    expected = torch.stack([cells.linear(source, w) for source in inputs])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def once(i: int) -> None:
        x.fill_(float("nan"))
        producer(inputs[i % 16], x)
        nonlocal wrong
        wrong += (cells.linear(x, w).view(torch.int16) != expected[i % 16].view(torch.int16)).sum()

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(16):
                once(i)
        for _ in range(runs // 16):
            graph.replay()
    else:
        for i in range(runs):
            once(i)
    assert wrong.item() == 0
    assert cells.ran(f"kernel:{kernel}") == 16 + (16 if captured else runs)


@DEPENDENT
@torch.inference_mode()
def test_a_chain_behind_a_producer_that_triggers_early(gpu: DeviceKey, kernel: str, config: dict[str, int]) -> None:
    """Slow producer that triggers at once, a product that waits for it, and one that reads its weight early.

    No product of ours triggers: the last one may start as soon as the first one's blocks have left, and its activation
    has to be there. 64 outputs are 16 blocks: the other SMs are free.
    """
    from skinny_core.testing.slow_producer import SlowProducer

    first = cells.made_up(64, K, 2, kernel="bf16_mma", config=MMA | {"loads": 1})
    last = cells.made_up(64, 64, 2, kernel=kernel, config=config)
    cells.activate(gpu, first, last, static_weights=True)
    producer = SlowProducer(gpu.arch, microseconds=20)
    x = torch.empty(2, K, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(64, K, dtype=torch.bfloat16, device="cuda") * K**-0.5
    w2 = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda") / 8
    inputs = torch.randn(16, 2, K, dtype=torch.bfloat16, device="cuda")
    expected = torch.stack([cells.linear(cells.linear(source, w), w2) for source in inputs])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(16):
            x.fill_(float("nan"))
            producer(inputs[i], x)
            y = cells.linear(cells.linear(x, w), w2)
            wrong += (y.view(torch.int16) != expected[i].view(torch.int16)).sum()
    for _ in range(125):
        graph.replay()
    assert wrong.item() == 0
    assert cells.ran("kernel:bf16_mma") == (64 if kernel == "bf16_mma" else 32)
    assert cells.ran(f"kernel:{kernel}") == (64 if kernel == "bf16_mma" else 32)


@torch.inference_mode()
def test_two_streams(planned: DeviceKey) -> None:
    data = [_data(2), _data(2)]
    streams = [torch.cuda.Stream() for _ in data]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, (x, w), found in zip(streams, data, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(cells.linear(x, w))
    torch.cuda.synchronize()
    for (x, w), found in zip(data, outputs, strict=True):
        numerics.assert_t1(found[0], x, w)
        for y in found[1:]:
            numerics.assert_bit_equal(y, found[0])


@torch.inference_mode()
def test_mixed_devices_raise_the_original_error(planned: DeviceKey) -> None:
    x, w = _data(2)
    for a, b in ((x.cpu(), w), (x, w.cpu())):
        with pytest.raises(RuntimeError) as original:
            torch_linear(a, b)
        with pytest.raises(RuntimeError) as ours:
            cells.linear(a, b)
        assert str(ours.value) == str(original.value)


@torch.inference_mode()
def test_compiled_code_reads_m_at_run_time(planned: DeviceKey) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    w = _data(1)[1]
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: op.linear(x, w, cells.FAMILY) + 1, fullgraph=True, dynamic=True, backend=counter)
    for m in (512, 1, 2, 4, 5, 64, 1, 2):
        x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
        numerics.assert_bit_equal(compiled(x), cells.linear(x, w) + 1)
    assert counter.frame_count <= 2
    assert cells.ran() == 2 * 5  # M = 1, 2, 4, 1, 2, each compiled and plain
    assert cells.ran("fallback:off_table") == 2
    assert cells.ran("fallback:m_range") == 4


def test_opcheck(planned: DeviceKey) -> None:
    for m in (1, 2, 3, 40):
        torch.library.opcheck(op.linear.default, (*_data(m), cells.FAMILY))
