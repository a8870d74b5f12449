"""A kernel made of torch calls, and cells for it: the kernel path of a dispatcher or an adapter without a GPU.

`register()` makes it known; whoever uses it takes it back with `kernels.unregister(STEM)`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skinny_core import kernels, plan
from skinny_core.errors import ConfigError, KernelRefusedError
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme

if TYPE_CHECKING:
    import torch

    from skinny_core.device import DeviceKey

STEM = "stand_in"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: M, the strides it was given in elements, whether the weight may be read early."""

    m: int
    x_stride: int
    w_stride: int
    prewait: bool


@dataclass
class StandIn:
    """A `kernels.Kernel` that reads operands only through addresses' worth of facts: shape of w, strides, offsets.

    launches: every launch. compiled: (K, M) of every `compile`. broken: raised by `compile` where set. available: what
    `availability` answers. on_disk: what `prepared` answers.
    """

    stem: str = STEM
    launches: list[Launch] = field(default_factory=list)
    compiled: list[tuple[int, int]] = field(default_factory=list)
    broken: Exception | None = None
    available: bool = True
    on_disk: bool = True

    def config_from(self, params: Mapping[str, int]) -> Mapping[str, int]:
        """Any mapping whose one key is `variant`."""
        for key in params:
            if key != "variant":
                raise ConfigError(f"{STEM}: unknown config key {key!r}", "use: variant")
        return dict(params)

    def params_of(self, config: Mapping[str, int]) -> dict[str, int]:
        """The inverse."""
        return dict(config)

    def refuses(self, config: Mapping[str, int], problem: Problem, m: int) -> str | None:
        """Refuses K that is no multiple of 8, as real kernels do."""
        return f"K = {problem.k}: needs a multiple of 8" if problem.k % 8 else None

    def availability(self) -> tuple[bool, str]:
        """As told."""
        return self.available, "" if self.available else "ImportError: stand-in"

    def candidates(self, problem: Problem, m: int) -> tuple[Mapping[str, int], ...]:
        """One."""
        return ({"variant": 0},)

    def compile(self, config: Mapping[str, int], problem: Problem, m: int, *, index: int, prewait: bool) -> Any:
        """A launcher that computes in float64 and rounds once."""
        if self.broken is not None:
            raise self.broken
        if why := self.refuses(config, problem, m):
            raise KernelRefusedError(why, "choose another config")
        self.compiled.append((problem.k, m))

        def launch(
            x: torch.Tensor,
            w: torch.Tensor,
            y: torch.Tensor,
            residual: torch.Tensor | None,
            x_stride: int,
            y_stride: int,
            residual_stride: int,
            prewait: bool,
        ) -> None:
            rows = x.detach().as_strided((m, problem.k), (x_stride, 1))
            columns = w.detach().as_strided((problem.n, problem.k), (w.stride(0), 1))
            total = rows.double() @ columns.double().T
            if residual is not None:
                total = total + residual.as_strided((m, problem.n), (residual_stride, 1)).double()
            y.as_strided((m, problem.n), (y_stride, 1)).copy_(total.to(problem.output.torch))
            self.launches.append(Launch(m, x_stride, w.stride(0), prewait))

        return launch

    def prepare(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Nothing: there is no disk cache."""

    def prepared(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """As told."""
        return self.on_disk

    def codes(
        self, config: Mapping[str, int], problem: Problem, m: int, key: DeviceKey, *, prewait: bool
    ) -> frozenset[Hashable]:
        """One for each variant, K and M."""
        return frozenset({(STEM, *sorted(config.items()), problem.k, m)})

    def cross_compile(self, config: Any, problem: Problem, m: int, arch: str) -> kernels.Binary:
        """There is no machine code."""
        raise NotImplementedError(STEM)


def register() -> StandIn:
    """A new stand-in under its stem, replacing an earlier one."""
    kernel = StandIn()
    kernels.register(kernel)
    return kernel


def cell(
    n: int,
    k: int,
    m: int,
    status: plan.Status = "win",
    *,
    dtype: DType = DType.BF16,
    output: DType | None = None,
    epilogue: Epilogue = Epilogue.NONE,
    us: tuple[float, float] = (10.0, 8.0),
    variant: int = 0,
    kernel: str = STEM,
) -> plan.Cell:
    """A cell with complete filler evidence. us: cold medians of the baseline and of ours."""

    def around(median: float) -> plan.Quantiles:
        return plan.Quantiles(median * 0.9, median, median * 1.1)

    baseline, ours = us
    output = output or dtype
    return plan.Cell(
        id=f"{n}x{k}/M{m}/{dtype.value}-{output.value}-{epilogue.value}",
        n=n,
        k=k,
        m=m,
        weight=WeightScheme(dtype.value),
        activation=dtype,
        output=output,
        epilogue=epilogue,
        status=status,
        kernel=kernel,
        config={"variant": variant},
        why="lost" if status == "refused" else "",
        evidence=plan.Evidence(
            candidate=around(ours),
            baseline=around(baseline),
            baseline_name="torch.linear",
            candidate_hot=around(ours),
            baseline_hot=around(baseline),
            rounds=7,
            rel_rmse=1.66e-3,
            in_model_us=-1.0,
            source="a report" if status == "reported" else "",
        ),
    )


def plan_of(*cells: plan.Cell, key: DeviceKey, product: str, family: str = "test") -> plan.Plan:
    """A plan file's content for those cells."""
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    return plan.Plan(family=family, product=product, device=table, cell=cells)
