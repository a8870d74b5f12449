"""The shipped plans from one measurement: `python benchmarks/measure_plan.py --out DIR [--tp 1 2 4 8] [--models ...]`.

Every shape of every model at every TP size is measured once, as `skinny tune` does it (`skinny_lab.tune`): shapes that
several models share are one race, and each cell at M >= 3 is checked in the decode step of every model that has it.
What was measured is in DIR/measurements.jsonl after every cell; `--resume` goes on from there. At the end, and with
`--from FILE` on a machine without a GPU, each package gets the cells of its own models as DIR/PACKAGE/DEVICE.toml, or
with `--ship` in its own folder of the checkout (`nox -s plans-write`).

Peers race where users have a choice: in the shapes of one GPU, at the M of `--peer-rows`. Exit status 3: the time
budget ended first.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skinny_core import device, family
from skinny_core.errors import KernelUnavailableError, SkinnyError
from skinny_core.problem import MAX_M
from skinny_lab.bench import machine, model_plan
from skinny_lab.bench.entrants import DEFAULT, Entrant
from skinny_lab.bench.peers import Peers, peer_maker
from skinny_lab.explain.target import RequestError
from skinny_lab.tune import order, request, result
from skinny_lab.tune.run import Session, Settings, undone
from skinny_lab.tune.store import Store, load

MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.1-8b")
TP_SIZES = (1, 2, 4, 8)
ROOT = Path(__file__).resolve().parents[1]
NAME = "measurements"
FILE = "measurements.jsonl"


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of packaged configs; default what ships")
    parser.add_argument("--tp", nargs="+", type=int, default=TP_SIZES, help="tensor-parallel sizes; default what ships")
    parser.add_argument("--rows", nargs="+", type=int, default=list(range(1, MAX_M + 1)), help="values of M")
    parser.add_argument("--kernels", nargs="+", type=Entrant.parse, default=DEFAULT, help="as limit_race.py takes them")
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder with vLLM's skinny_gemm.py")
    parser.add_argument("--peers", nargs="*", default=None, help="which race; default all that can be loaded")
    parser.add_argument("--peer-rows", nargs="*", type=int, default=list(order.ANCHORS), help="M that peers race at")
    parser.add_argument("--time-budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--resume", action="store_true", help="go on with DIR/measurements.jsonl")
    parser.add_argument("--from", dest="source", type=Path, default=None, help="write the plans of these measurements")
    parser.add_argument("--out", type=Path, help="folder for measurements and plans")
    parser.add_argument("--ship", action="store_true", help="with --from: write the plans into the packages instead")
    given = parser.parse_args()
    if (given.out is None) is not given.ship or (given.ship and given.source is None):
        parser.error("give --out DIR, or --ship with --from FILE")
    try:
        target = request.from_models(models_of(given.models, given.tp), NAME)
        if given.source is not None:
            write_plans(target, read(given.source, target), packaged if given.ship else given.out.joinpath)
            return 0
        return measure(target, given)
    except SkinnyError as error:
        parser.error(str(error))


def models_of(names: Sequence[str], tps: Sequence[int]) -> list[request.Model]:
    """Every named config at every TP size, TP by TP. Raises `RequestError` for a name that no package has."""
    packages = family.discover().packages
    known = {name: package for package in packages for name in package.configs}
    if unknown := sorted(set(names) - set(known)):
        raise RequestError(f"no package has {', '.join(unknown)}", f"known: {', '.join(sorted(known))}")
    return [request.Model(name, known[name], known[name].configs[name], tp) for tp in tps for name in names]


def measure(target: request.Target, given: argparse.Namespace) -> int:
    """Everything that DIR/measurements.jsonl lacks, then the plans. Raises `KernelUnavailableError` without a CUDA
    device, `RequestError` where another run's measurements are in the way."""
    key = device.current_key()
    if key is None:
        raise KernelUnavailableError("measuring needs a CUDA device", "run on the machine the plans are for")
    store = Store(given.out / FILE, target, key, machine.environment(commit=given.commit))
    if given.resume:
        print(f"resumed: {store.read()} cells", flush=True)
    elif store.path.exists():
        raise RequestError(f"{store.path} exists", "go on with --resume, or give another --out")
    wanted = order.order(target.sites, given.rows)
    peers = peer_maker(given.peer_folder)
    leave_out(peers, target, given.rows, given.peer_rows, given.peers)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f}s {text}", flush=True)

    say(f"{len(target.sites)} shapes, {len(wanted)} cells, {peers.said() or 'all peers'}")
    settings = Settings(given.time_budget, tuple(given.kernels), peers=peers, folder=given.peer_folder)
    session = Session(target, wanted, settings, store, key, say=say, step=_Steps(say))
    ended = session.run()
    for name, why in session.failed.items():
        say(f"not measured: {name}: {why}")
    left = list(undone(wanted, store))
    say(f"{ended}: {len(store.entries)} cells, {len(left)} left")
    write_plans(target, store, given.out.joinpath)
    return 0 if ended == "done" else 3


class _Steps:
    """Says where a run is, once per M and once per decode step."""

    def __init__(self, say: object) -> None:
        self._say, self._before = say, ""

    def __call__(self, text: str) -> None:
        what = text if text.startswith("M=") else text.rpartition("/")[2]
        if what != self._before:
            self._before = what
            self._say(what)  # type: ignore[operator]


def leave_out(
    peers: Peers, target: request.Target, ms: Sequence[int], peer_ms: Sequence[int], names: Sequence[str] | None
) -> None:
    """Exclude peers that are not named, and all of them from shapes of several GPUs and from M not in `peer_ms`."""
    single = {model.label for model in target.models if model.tp == 1}
    for site in target.sites:
        one = any(user.partition("/")[0] in single for user in site.used_by)
        for m in ms:
            for name in peers.by_name:
                if not one or m not in peer_ms or (names is not None and name not in names):
                    peers.exclude(name, site.n, site.k, m, "not asked for")


def read(path: Path, target: request.Target) -> Store:
    """Measurements, packed (`.xz`) or not."""
    if path.suffix != ".xz":
        return load(path, target)
    plain = path.with_suffix("")
    scratch = plain.with_name(f".{plain.name}.unpacked")
    try:
        with lzma.open(path, "rb") as packed, scratch.open("wb") as f:
            shutil.copyfileobj(packed, f)
        return load(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def packaged(family: str) -> Path:
    """Where a package of this checkout keeps its plans."""
    return ROOT / "models" / family / "src" / f"skinny_{family}" / "plans"


def write_plans(target: request.Target, store: Store, folder: Callable[[str], Path]) -> None:
    """One plan per package, into the folder of its family; prints what they hold."""
    for name in dict.fromkeys(model.package.name for model in target.models):
        part = request.of_family(target, name)
        plan = result.make(part, store).plan
        model_plan.save(plan, folder(name) / f"{plan.product}.toml")
        status = [cell.status for cell in plan.cells]
        print(f"{name}: {len(status)} cells, {status.count('win')} win, {status.count('refused')} refused")


if __name__ == "__main__":
    sys.exit(main())
