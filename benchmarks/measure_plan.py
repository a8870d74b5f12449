"""Measure `models/qwen3/.../plans/h200.toml` anew on this machine: `python benchmarks/measure_plan.py --out DIR`.

Writes the plan, its rows as CSV and what was printed. Needs a CUDA device and `skinny-core[cute]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from skinny_core import family
from skinny_lab.bench import cells, model_plan, rows
from skinny_lab.bench.entrants import DEFAULT, Entrant
from skinny_lab.bench.peers import peer_maker


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="qwen3", help="model package")
    parser.add_argument("--models", nargs="+", default=["qwen3-4b", "qwen3-8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4], help="values of M")
    parser.add_argument("--kernels", nargs="+", type=Entrant.parse, default=DEFAULT, help="as limit_race.py takes them")
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder with vLLM's skinny_gemm.py")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    package = next((p for p in family.discover().packages if p.name == arguments.package), None)
    if package is None or not set(arguments.models) <= set(package.configs):
        known = sorted(package.configs) if package else "no such package"
        parser.error(f"cannot measure {arguments.models} of {arguments.package}: {known}")
    begun = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - begun:6.1f}s {line}", flush=True)

    peers = peer_maker(arguments.peer_folder)
    if peers.missing:
        progress(peers.said())
    plan = model_plan.tune_models(
        package,
        arguments.models,
        arguments.rows,
        peers=peers,
        progress=progress,
        commit=arguments.commit,
        entrants=arguments.kernels,
    )
    model_plan.save(plan, arguments.out / "plan.toml")
    found = cells.planned_rows(plan)
    rows.write_csv(arguments.out / "cells.csv", found)
    summary = rows.summarise(found)
    print({name: summary[name] for name in ("cells", "limit_fraction", "vs_cublas", "vs_best_peer")})


if __name__ == "__main__":
    main()
