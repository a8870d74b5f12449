"""Time per output token of real vLLM engines, stock and with the plug-in, several models in one call.

`python benchmarks/tpot_vllm.py --out DIR --models qwen3-8b llama-3.1-8b [--cute-models qwen3-8b] [--runs 2]`

Every (model, arm) is a process of its own (`tpot_child.py`). Models are put into groups that fit into the device's
memory; the engines of a group start at the same time, stay loaded, and take turns: exactly one decodes, in the order
on, off, off, on, while the others wait for a line on a pipe. A model whose arms do not fit beside each other is started
arm by arm. `--groups-only` shows the groups. After every turn `tpot-<model>.csv` and `.json` are on disk.

TPOT is the time between two engine steps while every request decodes: dummy weights, random prompts of 1024 tokens,
greedy, about 110 steps per concurrency and turn.

Settings of an engine that differ from vLLM's defaults, the same in all arms:
- `kv_cache_memory_bytes`: exactly what the requests need, so that engines fit beside each other; vLLM then does not
  measure memory, which would count the neighbours. `gpu_memory_utilization` is tiny because it only makes vLLM refuse
  to start where less than that is free.
- `max_num_batched_tokens` 2048: bounds activations. It cuts prompts into chunks; a decode step does not see it.
- `cudagraph_mode` FULL_DECODE_ONLY, sizes as measured: under the default (FULL_AND_PIECEWISE) decode replays the same
  full graphs; what is left out are piecewise graphs for prompts, and sizes that no step here has. torch.compile is on.
- no FlashInfer autotune (its kernels are not used on a Hopper board unless installed), no DeepGEMM warm-up (FP8), no
  warm-up of the CuTe router GEMMs of DeepSeek shapes: 17 compilations by each start.
- prefix caching off: every turn decodes the same prompts.
- OMP_NUM_THREADS=1, as vLLM's own multi-process executor sets it; VLLM_PORT apart, so that starts do not race for one.
`stock` and `skinny` share a compile-cache folder, which stays on: the plug-in's digest has to keep them apart. The arm
`vllm_cute` (vLLM's CuTe skinny kernel by skinny's hooks, see `cute_arm.py`) has the digest of `skinny`, hence a folder
of its own while both compile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from skinny_core import env, family, plan, table
from skinny_core.device import DeviceKey
from skinny_lab.bench import cute_arm, engine_memory, engine_turns, machine, rows
from skinny_lab.bench.engine_memory import Load, Need
from skinny_lab.bench.engine_process import EngineError, EngineProcess
from skinny_lab.bench.engine_turns import ARMS, CUTE, STOCK, Record, Turns
from skinny_lab.bench.rows import OURS

ROOT = Path(__file__).resolve().parents[1]
CHILD = [sys.executable, str(Path(__file__).with_name("tpot_child.py"))]
LIMIT_ROWS = ROOT / "benchmarks" / "results" / "h200" / "limit.csv"
H200_BYTES = 150_100_000_000
"""What torch reports of an H200 SXM, for `--groups-only` on another machine."""
FRACTION = 0.97
PORT = 21000


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse; wrong use exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[OURS, STOCK], help="of every model")
    parser.add_argument("--cute-models", nargs="+", default=[], metavar="MODEL", help=f"also get the arm {CUTE}")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(Load().concurrency))
    parser.add_argument("--runs", type=int, default=2, help="turns of every (model, arm)")
    parser.add_argument("--seconds", type=float, default=0.0, help="no group is begun that would not end in time")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--peer-folder", type=Path, default=ROOT / ".carry" / CUTE, help="with vLLM's skinny_gemm.py")
    parser.add_argument("--limit-rows", type=Path, default=LIMIT_ROWS, help=f"where {CUTE} beat cuBLAS")
    parser.add_argument("--memory-fraction", type=float, default=FRACTION, help="of the device that may be planned for")
    parser.add_argument("--memory-gb", type=float, help="memory of the device, default what it reports")
    parser.add_argument("--groups-only", action="store_true", help="print the groups and end; needs no GPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.out is None and not given.groups_only:
        parser.error("--out is needed")
    if min(given.concurrency) < 1 or given.runs < 1:
        parser.error("--concurrency and --runs start at 1")
    known = {name: p for p in family.discover().packages for name in p.configs}
    if unknown := [m for m in (*given.models, *given.cute_models) if m not in known]:
        parser.error(f"unknown model {', '.join(unknown)}: use some of {', '.join(sorted(known))}")
    given.models = list(dict.fromkeys([*given.models, *given.cute_models]))
    given.packages = {m: known[m] for m in given.models}
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Group, measure, write; 0 when everything was measured, 1 where a model failed, 3 where time ran out."""
    given = arguments(words)
    load = Load(tuple(sorted(set(given.concurrency))))
    needs = {m: engine_memory.need(p, p.configs[m], load) for m, p in given.packages.items()}
    arms = {m: arms_of(given, m) for m in given.models}
    asked = {} if given.groups_only else machine_of()
    memory = given.memory_gb * 1e9 if given.memory_gb else asked.get("bytes", H200_BYTES)
    try:
        groups = engine_memory.groups(
            {m: n.total for m, n in needs.items()}, {m: len(a) for m, a in arms.items()},
            int(memory * given.memory_fraction),
        )  # fmt: skip
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text_of(groups, needs, arms, load), flush=True)
    if given.groups_only:
        return 0
    if not env.settings().enabled:
        raise SystemExit("SKINNY=off here would make all arms stock: unset it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` sends it: children must end with us
    environment = environment_of(asked["environment"], given.commit)
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(given, Path(folder), load, needs, asked, environment)
        for model in [m for m in given.models if CUTE in arms[m]]:
            jobs.write_plan(model)
        about = {"load": load, "runs": given.runs, "others": asked["others"]}
        records = {
            m: Record(m, given.out, environment, {**about, "need": n, "engine": engine_settings(Path(m), load, n)})
            for m, n in needs.items()
        }
        guess = {m: engine_memory.run_seconds(n.weights, load) for m, n in needs.items()}
        turns = Turns(jobs.launch, records, arms, guess, given.runs, given.seconds, check=is_as_for_a_user, say=say)
        turns.run(groups)
    return 1 if turns.failures else 3 if turns.left_out else 0


def say(line: str) -> None:
    """At once: what came before a kill is seen."""
    print(line, flush=True)


def arms_of(given: argparse.Namespace, model: str) -> list[str]:
    """The arms of a model, ours first."""
    return [arm for arm in ARMS if arm in given.arms or (arm == CUTE and model in given.cute_models)]


def text_of(groups: Sequence[Any], needs: Mapping[str, Need], arms: Mapping[str, Sequence[str]], load: Load) -> str:
    """A table of the groups, GB."""
    widths = {"arms": 5, "weights": 9, "KV": 7, "act.": 6, "process": 9, "together": 10, "s/turn": 8}
    lines = [f"{'group':6}{'model':16}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
    for i, group in enumerate(groups):
        for m in group.models:
            n, count = needs[m], 1 if group.in_turn else len(arms[m])
            seconds = engine_memory.run_seconds(n.weights, load)
            lines.append(
                f"{i:<6}{m:16}{len(arms[m]):>5}{n.weights / 1e9:9.2f}{n.kv / 1e9:7.2f}{n.activations / 1e9:6.2f}"
                f"{n.total / 1e9:9.2f}{n.total * count / 1e9:10.2f}{seconds:8.1f}{'  in turn' if group.in_turn else ''}"
            )
        lines.append(f"{i:<6}{'sum':16}{group.total / 1e9:52.2f}")
    return "\n".join(lines)


def machine_of() -> dict[str, Any]:
    """What the child says about the machine; exits where there is no device."""
    done = subprocess.run([*CHILD, "--probe"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    if "bytes" not in found:
        raise SystemExit(f"no device: {found.get('error', done.stderr[-2000:])}")
    return found


def environment_of(found: Mapping[str, Any], commit: str) -> plan.Environment:
    """The child's environment with this command and commit."""
    return msgspec.structs.replace(
        msgspec.convert(found, plan.Environment), commit=commit or machine.checkout_commit(), command=machine.command()
    )


def is_as_for_a_user(arm: str, found: Mapping[str, Any]) -> None:
    """`engine_turns.must_be`, and that decode runs as a user's does: compiled, in full CUDA graphs."""
    engine_turns.must_be(arm, found)
    if "cudagraph_mode" in found and (
        not found["cudagraph_mode"].startswith("FULL") or found["compilation_mode"] != "VLLM_COMPILE"
    ):
        raise EngineError(f"{arm}: decode runs under {found['cudagraph_mode']}, {found['compilation_mode']}")


def engine_settings(folder: Path, load: Load, need: Need) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; the module's docstring says why."""
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": load.length,
        "max_num_seqs": load.sequences,
        "max_num_batched_tokens": load.batched,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.001,
        "kv_cache_memory_bytes": need.kv,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(load.concurrency),
        },
        "kernel_config": {"enable_flashinfer_autotune": False},
        "seed": 0,
    }


class Jobs:
    """Writes what a child needs into a temporary folder, and starts it."""

    def __init__(
        self,
        given: argparse.Namespace,
        folder: Path,
        load: Load,
        needs: Mapping[str, Need],
        asked: Mapping[str, Any],
        environment: plan.Environment,
    ) -> None:
        self.given, self.folder, self.load, self.needs = given, folder, load, needs
        self.environment, self.started = environment, 0
        self.key = key_of(asked["key"])
        for model, package in given.packages.items():
            config = {**package.configs[model], "dtype": "bfloat16"}
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(config))

    def write_plan(self, model: str) -> None:
        """The plan of the arm `vllm_cute`; exits where it cannot be made."""
        package = self.given.packages[model]
        shapes = {(p.n, p.k) for p in package.projections(package.configs[model], 1)}
        raced = [r for r in rows.read_csv(self.given.limit_rows) if r.device == self.environment.gpu]
        sources = table.build(package.name, package, env.Settings()).sources
        others = [cell for source in sources if source.plan.key == self.key for cell in source.plan.cells]
        try:
            found = cute_arm.plan_of(
                raced, shapes, self.load.concurrency, package.name, self.key, others, self.environment
            )  # fmt: skip
        except ValueError as error:
            raise SystemExit(f"{self.given.limit_rows}: {error}") from None
        plan.dump(found, self.plan_file(model))
        ran = [cell for cell in found.cells if cell.status == "reported"]
        say(f"{model} {CUTE}: {len(ran)} cells run, {len(found.cells) - len(ran)} planned ones are held back")

    def plan_file(self, model: str) -> Path:
        """Where the plan of a model's third arm is."""
        return self.folder / f"{model}-{CUTE}.toml"

    def launch(self, model: str, arm: str) -> EngineProcess:
        """Start the engine of an arm."""
        need, config = self.needs[model], self.given.packages[model].configs[model]
        job = {
            "engine": engine_settings(self.folder / model, self.load, need),
            "concurrency": self.load.concurrency,
            "prompt": self.load.prompt,
            "output": self.load.output,
            "vocabulary": config["vocab_size"],
            "kernel_folder": str(self.given.peer_folder) if arm == CUTE else None,
        }
        file = self.folder / f"{model}-{arm}.json"
        file.write_text(json.dumps(job))
        self.started += 1
        log = self.given.out / f"log-{model}-{arm}.txt"
        return EngineProcess(f"{model} {arm}", [*CHILD, str(file)], self.variables(model, arm), log)

    def variables(self, model: str, arm: str) -> dict[str, str]:
        """The environment of an arm's process."""
        switch = "off" if arm == STOCK else os.environ.get(env.VARIABLE, "on")
        if arm == CUTE:
            cache = env.settings().cache
            switch = f"plan={self.plan_file(model)},reported=on" + (f",cache={cache}" if cache else "")
        return {
            **os.environ,
            env.VARIABLE: switch,
            "VLLM_CACHE_ROOT": str(self.folder / (f"cache-{CUTE}" if arm == CUTE else "cache")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PORT": str(PORT + 50 * self.started),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DEEP_GEMM_WARMUP": "skip",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }


def key_of(found: Mapping[str, Any] | None) -> DeviceKey:
    """The device's key from JSON."""
    if found is None:
        raise SystemExit("the device has no key: see `skinny doctor`")
    return DeviceKey(**{**found, "capability": tuple(found["capability"])})


if __name__ == "__main__":
    sys.exit(main())
