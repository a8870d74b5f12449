"""Race cuBLAS, vLLM's CuTe kernel, FlashInfer's tinygemm, DeepGEMM and our candidates over the shapes of `shapes.csv`.

`python benchmarks/limit_race.py --out DIR`: cold L2, CUDA-graph replay, rotating order. Writes `limit.csv` (one row per
cell and provider), `tried.csv` (every contestant, with the quick race's times) and `limit.json` (machine, versions,
what was left out) after every cell; `--resume DIR/limit.csv` goes on where a run ended. Report: `limit_report.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()
SHAPES = Path(__file__).with_name("shapes.csv")


def main() -> int:
    """Parse, race, write; 0 when every cell is there, 3 where the budget ended the run, 1 where the device did."""
    from skinny_core import device
    from skinny_lab.bench import limit, machine, rows
    from skinny_lab.bench.limit_files import Files
    from skinny_lab.bench.peers import peer_maker

    parser = arguments()
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    shapes = [s for s in limit.read_shapes(SHAPES) if (s.name in given.shapes if given.shapes else s.tp in given.tp)]
    if unknown := set(given.shapes or ()) - {s.name for s in shapes}:
        parser.error(f"not in {SHAPES.name}: {', '.join(sorted(unknown))}")
    try:
        entrants = tuple(limit.Entrant.parse(text) for text in given.kernels)
    except (ValueError, RuntimeError, LookupError) as error:
        parser.error(str(error))
    try:
        near = limit.near(rows.read_table(given.near, limit.Tried), given.top) if given.near else {}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    key = device.current_key()
    if key is None:
        parser.error("measuring needs a CUDA device")

    def say(text: str) -> None:
        print(text, flush=True)

    peers = peer_maker(given.peer_folder, only_safe=False)
    if peers.missing:
        say(peers.said())
    try:
        files = Files(
            given.out,
            machine.environment(commit=given.commit),
            {name: str(value) for name, value in vars(given).items()},
            missing=peers.missing,
            resume=given.resume,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    settings = limit.Settings(
        entrants,
        keep=given.keep,
        rounds=given.rounds,
        # Loading torch and the peers is part of what the caller waits for.
        budget=given.time_budget - (time.monotonic() - BEGUN),
        prepare_share=given.prepare_share,
        prepare_only=given.prepare_only,
        peer_folder=given.peer_folder,
        near=near,
    )
    cells = limit.order(shapes, given.rows)
    ended = limit.run(cells, settings, peers, key, files, say=say)
    files.end(ended)
    raced = sum((shape.name, m) in files.raced for shape, m in cells)
    say(f"{ended}: {raced} of {len(cells)} cells in {given.out}, {time.monotonic() - BEGUN:.0f} s")
    return {"done": 0, "budget": 3, "device": 1}[ended]


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["bf16_simt:1-2", "bf16_mma", "bf16_stream"],
        help="kernels of ours, with their M or a grid: bf16_simt:1-2 bf16_mma:1-16:warps=4,8:parts=2:loads=2:unroll=2",
    )
    parser.add_argument("--shapes", nargs="+", help="names in shapes.csv (default: all of --tp)")
    parser.add_argument("--tp", nargs="+", type=int, default=[1], help="tensor-parallel sizes whose shapes to race")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="values of M")
    parser.add_argument("--time-budget", type=float, default=400.0, help="seconds, start-up and compiling included")
    parser.add_argument("--prepare-share", type=float, default=0.5, help="part of the time left for compiling, per M")
    parser.add_argument("--prepare-only", action="store_true", help="compile and try the peers, race nothing")
    parser.add_argument("--keep", type=int, default=4, help="finalists per kernel")
    parser.add_argument("--near", type=Path, help="tried.csv of an earlier run: race only what was fastest there")
    parser.add_argument("--top", type=int, default=3, help="with --near: configs per kernel and M")
    parser.add_argument("--rounds", type=_rounds, default=9, help="rounds of the full race, at least 7")
    parser.add_argument("--resume", type=Path, help="limit.csv of an earlier run, whose cells are kept")
    parser.add_argument("--peer-folder", type=Path, help="folder with vLLM's skinny_gemm.py")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    return parser


def _rounds(text: str) -> int:
    if int(text) < 7:
        raise argparse.ArgumentTypeError("medians of fewer than 7 rounds are not kept")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
