"""Plans of what was measured, and the quick plan of the demo."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from skinny_core import device, plan
from skinny_core.device import DeviceKey
from skinny_core.errors import KernelUnavailableError
from skinny_core.kernels import get
from skinny_core.plan import Cell, Environment, Plan
from skinny_core.problem import KernelConfig
from skinny_lab.bench import machine, race, tuning


def make_plan(family: str, cells: Iterable[Cell], key: DeviceKey, environment: Environment) -> Plan:
    """A plan of cells measured on a device of that key, with that machine and software."""
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    product = device.product_name(key) or key.slug
    return Plan(family=family, product=product, device=table, environment=environment, cell=tuple(cells))


def quick_plan(shapes: Iterable[tuple[int, int]], ms: Iterable[int], *, family: str = "demo") -> Plan:
    """Race a handful of configs per shape [N, K] on the current device and keep what passes the keep rule.

    For the demo: few configs, no peers, M <= 2 only (a larger M would need an in-model check).
    """
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("a quick plan needs a CUDA device", "run on a machine with one")
    kernel = get("bf16_simt")
    cells = []
    for n, k in dict.fromkeys(shapes):
        arena = race.Arena(n, k, torch.bfloat16, key.l2_bytes)
        for m in ms:
            if m > 2:
                raise ValueError(f"M = {m}: a quick plan has no in-model check, so M is 1 or 2")
            problem = tuning.problem_of(n, k)
            few = [c for c in kernel.candidates(problem, m) if not kernel.params_of(c)["blocks_per_sm"]][::4][:6]
            configs = [KernelConfig.of("bf16_simt", kernel.params_of(c)) for c in few]
            measured = tuning.measure(arena, problem, m, configs=configs)
            cells.append(tuning.cell(measured, f"{family}/{n}x{k}/M{m}", (), None))
        del arena
    return make_plan(family, cells, key, machine.environment())


def save(found: Plan, path: Path) -> None:
    """Write the plan, sealed, atomically."""
    plan.dump(found, path)
