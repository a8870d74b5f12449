"""Peers that are raced beside cuBLAS, and the configs of theirs that were best on an H200 (`peer_configs.csv`)."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path

from skinny_core.problem import Problem
from skinny_lab.bench import contestants, race, tuning


def peer_maker(folder: Path | None = None) -> tuning.PeerMaker:
    """(problem, m) -> the peers that can be loaded here and have a config for it, by name."""
    cute = contestants.vllm_cute(folder)
    configs = _vllm_cute_configs()

    def make(problem: Problem, m: int) -> dict[str, race.Run]:
        config = configs.get((problem.n, problem.k, m))
        if cute is None or config is None:
            return {}
        return {contestants.VLLM_CUTE: cute(*config, m)}

    return make


def _vllm_cute_configs() -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """(N, K, M) -> (block_size, outputs_per_block, k_unroll): best of 27 configs per cell, measured on an H200 SXM."""
    text = files("skinny_lab.bench").joinpath("peer_configs.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        (int(r["n"]), int(r["k"]), int(r["m"])): (int(r["block_size"]), int(r["outputs_per_block"]), int(r["k_unroll"]))
        for r in rows
    }
