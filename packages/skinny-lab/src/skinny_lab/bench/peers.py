"""Peers that are raced beside cuBLAS: which of them can be loaded here, what each refuses, and the configs of vLLM's
kernel that were best on an H200 (`peer_configs.csv`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from skinny_core.problem import Problem
from skinny_lab.bench import libraries
from skinny_lab.bench.libraries import Peer
from skinny_lab.bench.race import Run


class Peers:
    """The peers of one process; a `tuning.PeerMaker`.

    missing: library -> the error of its import, for libraries that are not raced at all.
    """

    def __init__(self, peers: Iterable[Peer], missing: Mapping[str, str] | None = None) -> None:
        self.by_name = {peer.name: peer for peer in peers}
        self.missing = dict(missing or {})
        self._excluded: dict[tuple[str, int, int, int], str] = {}

    def __call__(self, problem: Problem, m: int) -> dict[str, Run]:
        """The contestants for a problem at M = m, by name."""
        return {
            name: peer.make(problem, m) for name, peer in self.by_name.items() if not self.refusal(name, problem, m)
        }

    def exclude(self, name: str, n: int, k: int, m: int, why: str) -> None:
        """Leave a peer out of one cell from now on."""
        self._excluded[name, n, k, m] = why

    def refusal(self, name: str, problem: Problem, m: int) -> str | None:
        """Why a peer is not raced in this cell, or None."""
        return self.by_name[name].refuses(problem, m) or self._excluded.get((name, problem.n, problem.k, m))

    def refusals(self, problem: Problem, m: int) -> dict[str, str]:
        """Every peer that is left out of this cell, and why."""
        found = {name: self.refusal(name, problem, m) for name in self.by_name}
        return {name: why for name, why in found.items() if why}

    def said(self) -> str:
        """One line about the libraries that are missing, "" where none is."""
        return "; ".join(f"{library} is not raced: {error}" for library, error in self.missing.items())


def peer_maker(folder: Path | None = None, *, only_safe: bool = True) -> Peers:
    """The peers that can be loaded here. folder: with vLLM's `skinny_gemm.py`, where vLLM lacks it.

    only_safe: without those that their vendor says may hang; who sets it to False tries them in another process first
    (`skinny_lab.bench.prepare`).
    """
    loaders: dict[str, Callable[[], list[Peer]]] = {
        libraries.VLLM_CUTE: lambda: libraries.vllm_cute(folder, vllm_cute_configs()),
        libraries.TINYGEMM: libraries.tinygemm,
        libraries.DEEPGEMM: libraries.deepgemm,
    }
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for name, load in loaders.items():
        try:
            found += load()
        except Exception as error:  # a library can fail to import in any way (ABI, no nvcc); it is just not raced
            missing[name] = f"{type(error).__name__}: {error}"
    return Peers([peer for peer in found if not (only_safe and peer.vendor_warns)], missing)


def vllm_cute_configs() -> dict[tuple[int, int, int], libraries.CuteConfig]:
    """(N, K, M) -> (block_size, outputs_per_block, k_unroll): best of 27 configs per cell, measured on an H200 SXM."""
    text = files("skinny_lab.bench").joinpath("peer_configs.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        (int(r["n"]), int(r["k"]), int(r["m"])): (int(r["block_size"]), int(r["outputs_per_block"]), int(r["k_unroll"]))
        for r in rows
    }
