"""The arm `vllm_cute`: vLLM's own CuTe skinny GEMM (of a newer vLLM) inside an engine, through skinny's hooks.

For benchmarks only: the kernel is registered by the process that measures, and its plan lives in a temporary folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from skinny_core import kernels
from skinny_core.device import DeviceKey, product_name
from skinny_core.errors import ConfigError
from skinny_core.plan import Cell, DeviceTable, Environment, Evidence, Plan, Quantiles
from skinny_core.problem import Problem
from skinny_lab.bench import libraries
from skinny_lab.bench.libraries import CUTE_MAX_M, VLLM_CUTE, CuteConfig, Peer
from skinny_lab.bench.rows import Row

PARAMETERS = ("block_size", "outputs_per_block", "k_unroll")
KEEP = 1.05
"""A cell runs where the kernel was this much faster than cuBLAS, cold."""
SOURCE = (
    "the race to the limit (limit.csv), cold L2 alone: hot L2 and the change of a decode step were not measured, so"
    " this is no win by the keep rule"
)

Loader = Callable[[Mapping[tuple[int, int, int], CuteConfig]], Peer]


class VllmCute:
    """A `skinny_core.kernels.Kernel` around vLLM's launcher, in its PDL form as vLLM launches it.

    folder: with `skinny_gemm.py`, or None for an installed vLLM that has it. load: for tests; gives the peer for a
    mapping (N, K, M) -> config that may grow later.
    """

    stem = VLLM_CUTE

    def __init__(self, folder: Path | None, load: Loader | None = None) -> None:
        self._load = load or (lambda configs: _peer(folder, configs))
        self._configs: dict[tuple[int, int, int], CuteConfig] = {}
        self._loaded: Peer | None = None

    def config_from(self, params: Mapping[str, int]) -> CuteConfig:
        """(block_size, outputs_per_block, k_unroll)."""
        if set(params) != set(PARAMETERS):
            raise ConfigError(f"{self.stem}: parameters {sorted(params)}", f"give {', '.join(PARAMETERS)}")
        return params["block_size"], params["outputs_per_block"], params["k_unroll"]

    def params_of(self, config: CuteConfig) -> dict[str, int]:
        """The inverse."""
        return dict(zip(PARAMETERS, config, strict=True))

    def refuses(self, config: CuteConfig, problem: Problem, m: int) -> str | None:
        """Why not, or None."""
        self._configs[problem.n, problem.k, m] = config
        return self._peer().refuses(problem, m)

    def availability(self) -> tuple[bool, str]:
        """Whether the library can be imported."""
        try:
            self._peer()
        except Exception as error:  # whatever its import raises
            return False, f"{type(error).__name__}: {error}"
        return True, ""

    def candidates(self, problem: Problem, m: int) -> tuple[CuteConfig, ...]:
        """None: its configs were swept elsewhere."""
        return ()

    def compile(self, config: CuteConfig, problem: Problem, m: int, *, index: int, prewait: bool) -> kernels.Launcher:
        """Compile now, by one run over a few rows of zeros (its code depends on neither N nor K), so that nothing
        compiles in a graph capture. prewait: not used, it reads weights after its dependency wait."""
        if why := self.refuses(config, problem, m):
            raise ConfigError(f"{self.stem}: {why}", "leave the cell out")
        run = self._peer().make(problem, m)
        n, k = problem.n, problem.k
        device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
        few = 8 * config[1]
        x, w, y = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (few, k), (m, few)))
        run(x, w, y)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

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
            # Two dimensions and a plain tensor are what its function takes; only while capturing, never in a replay.
            run(x.as_strided((m, k), (x_stride, 1)), w.detach(), y.as_strided((m, n), (y_stride, 1)))

        return launch

    def prepare(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> None:
        """Nothing: no disk cache."""

    def prepared(self, config: Any, problem: Problem, m: int, key: DeviceKey, *, prewait: bool) -> bool:
        """True, so that no worker process tries, which would not know this kernel."""
        return True

    def codes(
        self, config: CuteConfig, problem: Problem, m: int, key: DeviceKey, *, prewait: bool
    ) -> frozenset[Hashable]:
        """One per config and M."""
        return frozenset({(self.stem, config, m)})

    def cross_compile(self, config: Any, problem: Problem, m: int, arch: str) -> kernels.Binary:
        """Not offered."""
        raise NotImplementedError(f"{self.stem} compiles on the device it runs on")

    def _peer(self) -> Peer:
        if self._loaded is None:
            self._loaded = self._load(self._configs)
        return self._loaded


def _peer(folder: Path | None, configs: Mapping[tuple[int, int, int], CuteConfig]) -> Peer:
    return next(peer for peer in libraries.vllm_cute(folder, configs) if peer.name == VLLM_CUTE)


def plan_of(
    raced: Sequence[Row],
    shapes: Collection[tuple[int, int]],
    ms: Collection[int],
    family: str,
    key: DeviceKey,
    others: Iterable[Cell],
    environment: Environment,
) -> Plan:
    """The plan of this arm: `reported` cells (run with SKINNY=reported=on) where the race has this kernel at least
    `KEEP` ahead of cuBLAS, and every other planned cell of the family as `refused`, so that nothing else runs.

    raced: rows of kind "limit" of this device. shapes: (N, K) of the model. ms: rows that will be decoded. others:
    cells that the family's own plans hold for `key`. Raises ValueError where no cell is left.
    """
    points: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in raced:
        if (row.kind, row.state) == ("limit", "cold") and (row.n, row.k) in shapes and row.m in ms:
            points.setdefault((row.n, row.k, row.m), {})[row.provider] = row
    chosen: list[Cell] = []
    for (n, k, m), by in sorted(points.items()):
        ours, base = by.get(VLLM_CUTE), by.get("cublas")
        if m > CUTE_MAX_M or ours is None or base is None or base.p50 < KEEP * ours.p50:
            continue
        evidence = Evidence(
            candidate=_quantiles(ours), baseline=_quantiles(base), baseline_name="cublas", rounds=ours.rounds,
            source=f"{SOURCE}; measured {ours.date}",
        )  # fmt: skip
        cell = Cell(
            id=f"{VLLM_CUTE}/{n}x{k}/M{m}", n=n, k=k, m=m, status="reported", kernel=VLLM_CUTE,
            config=parameters(ours.config), evidence=evidence,
        )  # fmt: skip
        chosen.append(cell)
    if not chosen:
        raise ValueError(f"no row has {VLLM_CUTE} {KEEP - 1:.0%} ahead of cuBLAS for these shapes at M in {sorted(ms)}")
    taken = {(cell.problem(None), cell.m) for cell in chosen}
    held: list[Cell] = []
    for cell in others:
        if (cell.problem(None), cell.m) not in taken:
            taken.add((cell.problem(None), cell.m))
            why = f"the arm {VLLM_CUTE} runs vLLM's kernel or the original call"
            held.append(msgspec.structs.replace(cell, id=f"held/{len(held)}/{cell.id}", status="refused", why=why))
    return Plan(
        family=family,
        product=product_name(key) or key.slug,
        device=DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class),
        environment=environment,
        cell=(*chosen, *held),
    )


def parameters(text: str) -> dict[str, int]:
    """The `config` column of a row: "block_size=64, outputs_per_block=2, k_unroll=1"."""
    pairs = dict(part.strip().split("=") for part in text.split(","))
    return {name: int(pairs[name]) for name in PARAMETERS}


def _quantiles(row: Row) -> Quantiles:
    return Quantiles(row.p50 if row.p20 is None else row.p20, row.p50, row.p50 if row.p80 is None else row.p80)
