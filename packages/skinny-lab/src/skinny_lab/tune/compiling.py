"""Compile what is to be raced at one M into the disk cache, in worker processes, until a deadline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError
from skinny_core.problem import KernelConfig, Problem
from skinny_lab.bench import prepare
from skinny_lab.bench.peers import Peers


def try_peers(
    cells: Iterable[tuple[Problem, int]], peers: Peers, key: DeviceKey, seconds: float, folder: Path | None
) -> int:
    """Let the peers that compile at their first call do so in other processes; exclude from `peers` those that fail or
    are not done in time. Returns how many cells lost one."""
    trials = [
        (name, problem.n, problem.k, m)
        for problem, m in cells
        for name, peer in peers.by_name.items()
        if peer.jit and not peers.refusal(name, problem, m)
    ]
    if not trials:
        return 0
    refused = prepare.prepare([], trials, key, seconds=max(0.0, seconds), folder=folder).refused
    for (name, n, k, m), why in refused.items():
        peers.exclude(name, n, k, m, why)
    return len(refused)


def in_cache(configs: Iterable[KernelConfig], problem: Problem, m: int, key: DeviceKey) -> list[KernelConfig]:
    """Those whose machine code is in the disk cache."""
    configs = list(configs)
    try:
        absent = {config for config, _, _ in prepare.missing([(c, problem, m) for c in configs], key)}
    except (SkinnyError, OSError):
        return configs
    return [config for config in configs if config not in absent]
