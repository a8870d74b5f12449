"""Made-up cells for tests of behaviour, where the shape does not matter and the speed is not measured."""

from __future__ import annotations

import torch

from skinny_core import dispatch, plan, warmup
from skinny_core.device import DeviceKey
from skinny_core.problem import DType, WeightScheme

FAMILY = "test"


def made_up(
    n: int,
    k: int,
    m: int,
    *,
    kernel: str = "bf16_simt",
    config: dict[str, int] | None = None,
    dtype: DType = DType.BF16,
) -> plan.Cell:
    """A `win` cell whose evidence is filler: it must never reach a plan file. config: required but for bf16_simt."""
    filler = plan.Quantiles(1.0, 1.0, 1.0)
    return plan.Cell(
        id=f"{n}x{k}/M{m}",
        n=n,
        k=k,
        m=m,
        weight=WeightScheme(dtype.value),
        activation=dtype,
        output=dtype,
        status="win",
        kernel=kernel,
        # 64 threads cover 512 elements of K; a config with more chunks than K has is refused.
        config=config or {"threads": 64, "rows": 2, "chunks": min(2, -(-k // 512))},
        evidence=plan.Evidence(candidate=filler, baseline=filler, baseline_name="filler"),
    )


def activate(key: DeviceKey, *cells: plan.Cell, static_weights: bool = False, warm: bool = True) -> None:
    """Make the cells run in family FAMILY."""
    dispatch.activate_cells(FAMILY, key, cells, static_weights=static_weights)
    if warm:
        warmup.warm(FAMILY, [(c.n, c.k, c.activation) for c in cells])
        state = dispatch.family_state(FAMILY)
        assert state is not None
        assert not state.errors


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The plain entry in family FAMILY."""
    return dispatch.linear(x, w, FAMILY)


def ran(outcome: str = "kernel:bf16_simt") -> int:
    """How many calls of FAMILY ended in `outcome` so far."""
    return sum(
        count for (family, *_, what), count in dispatch.counters().items() if (family, what) == (FAMILY, outcome)
    )
