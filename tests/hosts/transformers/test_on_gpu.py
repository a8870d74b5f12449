"""The adapter with kernels that really run: which calls reach them, which do not, and that both are right."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn

import skinny_transformers
from skinny_core import device, dispatch
from skinny_core.testing import numerics
from tests.gpu import cells

pytestmark = pytest.mark.sm90
N, K, PLANNED = 1024, 512, (1, 2, 4)
KERNEL = "kernel:bf16_simt"


class Mlp(nn.Module):
    """Two planned projections around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def mlp():
    """An installed model whose two shapes have cells at M = 1, 2, 4; its weights require gradients, as by default."""
    key = device.current_key()
    if key is None:
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    model = Mlp().to("cuda", torch.bfloat16).eval()
    skinny_transformers.install(model, family=cells.FAMILY)
    cells.activate(key, *(cells.made_up(n, k, m) for n, k in ((N, K), (K, N)) for m in PLANNED))
    dispatch.reset_counters()
    yield model
    torch.cuda.synchronize()
    dispatch.deactivate(cells.FAMILY)


def x_of(*shape):
    return torch.randn(*shape, K, device="cuda").bfloat16()


def stock(model, x):
    return x + nn.functional.linear(torch.relu(nn.functional.linear(x, model.up.weight)), model.down.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_planned_calls_run_kernels_although_weights_require_gradients(mlp, mode):
    with mode():
        for shape in ((1,), (2,), (4,), (2, 1), (1, 4)):
            x = x_of(*shape)
            numerics.assert_t1(mlp.up(x).reshape(-1, N), x.reshape(-1, K), mlp.up.weight)
        assert cells.ran(KERNEL) == 5
        x = x_of(3)
        assert torch.equal(mlp(x), stock(mlp, x))
    assert cells.ran(KERNEL) == 5
    assert cells.ran("fallback:off_table") == 2


def test_gradients_take_the_original_call(mlp):
    x = x_of(2)
    mlp(x).float().sum().backward()
    got = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    stock(mlp, x).float().sum().backward()
    for mine, expected in zip(got, mlp.parameters(), strict=True):
        assert torch.equal(mine, expected.grad)
    assert cells.ran(KERNEL) == 0
    assert cells.ran("fallback:gradient") == 2


@torch.no_grad()
def test_adapter_bias_and_packed_weights_are_seen_at_call_time(mlp):
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer
            self.delta = nn.Linear(K, N, bias=False).to("cuda", torch.bfloat16)

        def forward(self, x):
            return self.base_layer(x) + self.delta(x)

    x, layer = x_of(1), mlp.up
    mlp.up = Adapter(layer)
    assert torch.equal(mlp.up(x), nn.functional.linear(x, layer.weight) + mlp.up.delta(x))
    assert cells.ran(KERNEL) == 0
    assert cells.ran("fallback:lora") == 1
    mlp.up = layer
    layer.bias = nn.Parameter(torch.randn(N, device="cuda").bfloat16())
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert cells.ran("fallback:bias") == 1
    layer.bias = None
    layer(x)
    assert cells.ran(KERNEL) == 1


@torch.no_grad()
def test_new_weights_are_used_by_the_next_kernel(mlp):
    x = x_of(2)
    for write in (
        lambda w: mlp.up.weight.copy_(w),
        lambda w: mlp.up.weight.data.copy_(w),
        lambda w: setattr(mlp.up.weight, "data", w),
        lambda w: setattr(mlp.up, "weight", nn.Parameter(w)),
    ):
        new = torch.randn(N, K, device="cuda").bfloat16()
        write(new)
        numerics.assert_t1(mlp.up(x), x, new)
    assert cells.ran(KERNEL) == 4


@torch.no_grad()
def test_compiled_model_runs_kernels_for_planned_m_only(mlp):
    torch._dynamo.reset()
    run = torch.compile(mlp, fullgraph=True, dynamic=True)
    for m, planned in ((512, 0), (1, 2), (2, 2), (4, 2), (5, 0), (64, 0), (1, 2), (2, 2)):
        dispatch.reset_counters()
        x = x_of(m)
        torch.testing.assert_close(run(x).float(), stock(mlp, x).float(), rtol=0.02, atol=0.02)
        assert cells.ran(KERNEL) == planned, m
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


@torch.no_grad()
def test_original_error_for_mixed_devices(mlp):
    x = torch.randn(1, K).bfloat16()
    with pytest.raises(RuntimeError) as expected:
        nn.functional.linear(x, mlp.up.weight)
    with pytest.raises(RuntimeError) as got:
        mlp.up(x)
    assert str(got.value) == str(expected.value)
    assert cells.ran(KERNEL) == 0


@torch.no_grad()
def test_recorders_get_the_original_operation(mlp):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = x_of(2)
    graph = make_fx(mlp)(x)
    assert cells.ran(KERNEL) == 0
    other = x_of(2)
    assert torch.equal(graph(other), stock(mlp, other))
    assert torch.equal(torch.vmap(mlp)(other[None])[0], stock(mlp, other))
    assert cells.ran(KERNEL) == 0


@torch.no_grad()
def test_offloaded_weights_brought_by_accelerate(mlp):
    accelerate = pytest.importorskip("accelerate")
    x = x_of(1)
    expected = mlp(x)
    dispatch.reset_counters()
    accelerate.cpu_offload(mlp, execution_device=torch.device("cuda", 0))
    assert mlp.up.weight.is_meta
    assert torch.equal(mlp(x), expected)
    assert cells.ran(KERNEL) == 2
