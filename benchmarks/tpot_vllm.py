"""Time per output token of a real vLLM engine, stock and with the plug-in, in alternating processes.

`python benchmarks/tpot_vllm.py --out DIR [--model qwen3-8b] [--concurrency 1 2 4 8] [--runs 2]`

Every arm is a process of its own, in the order on, off, off, on, ..., all with one compile-cache folder, which stays
on: the plug-in's digest has to keep the arms apart. Dummy weights, random prompts of 1024 tokens, greedy, CUDA graphs.
TPOT is the time between two engine steps while every request decodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, SETTLE = 1024, 160, 16
VOCABULARY = 150_000


def arm(model: Path, concurrencies: list[int]) -> dict[str, Any]:
    """One process: build the engine, decode at each concurrency, return percentiles in ms and what the plug-in
    counted.
    """
    import random

    from vllm import LLM, SamplingParams

    begun = time.monotonic()
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=PROMPT + OUTPUT + 64,
        max_num_seqs=max(concurrencies),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *concurrencies})},
        seed=0,
    )
    start_s = time.monotonic() - begun
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True, detokenize=False)
    generator = random.Random(0)
    found: dict[str, Any] = {"start_s": round(start_s, 1), "tpot": {}, "digest": {}}
    for concurrency in concurrencies:
        prompts = [[generator.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(concurrency)]
        tokens = None
        steps: list[float] = []
        for _ in range(2):
            for i, prompt in enumerate(prompts):
                llm.llm_engine.add_request(f"{concurrency}-{i}-{len(steps)}", {"prompt_token_ids": prompt}, sampling)
            ticks, outputs = [], {}
            while llm.llm_engine.has_unfinished_requests():
                for done in llm.llm_engine.step():
                    if done.finished:
                        outputs[done.request_id] = tuple(done.outputs[0].token_ids)
                ticks.append(time.perf_counter())
            # The first steps prefill; the last ones may run with fewer requests.
            decode = [b - a for a, b in itertools.pairwise(ticks)][concurrency + SETTLE : -SETTLE]
            steps += decode
            tokens = [outputs[key] for key in sorted(outputs)]
        ordered = sorted(steps)
        found["tpot"][str(concurrency)] = {
            "p20": ordered[len(ordered) // 5] * 1e3,
            "p50": statistics.median(ordered) * 1e3,
            "p80": ordered[len(ordered) * 4 // 5] * 1e3,
            "steps": len(ordered),
        }
        found["digest"][str(concurrency)] = hash(tuple(tokens or ()))
    return {**found, **_plugin_state()}


def _plugin_state() -> dict[str, Any]:
    try:
        from skinny_core import cache, dispatch
    except ImportError:
        return {}
    counts = {"/".join(map(str, key)): count for key, count in dispatch.counters().items()}
    return {
        "active": [a.summary() for a in dispatch.active().values()],
        "counters": counts,
        "compiled": cache.COUNTS.compiled,
        "loaded": cache.COUNTS.loaded,
    }


def main() -> None:
    """Run the arms in turn and write rows and raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="start no further process once an average one would not end in time"
    )
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        arguments.out.write_text(json.dumps(arm(arguments.arm, arguments.concurrency), indent=1))
        return
    if arguments.out is None:
        parser.error("--out is needed")
    with tempfile.TemporaryDirectory() as folder:
        drive(arguments, Path(folder))


def drive(arguments: argparse.Namespace, folder: Path) -> None:
    """Alternate SKINNY=off and SKINNY=on processes over one compile cache."""
    from skinny_core import env, family
    from skinny_lab.bench import machine, rows

    packages = family.discover().packages
    package = next((p for p in packages if arguments.model in p.configs), None)
    if package is None:
        known = ", ".join(sorted(name for p in packages for name in p.configs))
        raise SystemExit(f"unknown model {arguments.model!r}: use one of {known}")
    if not env.settings().enabled:
        raise SystemExit("SKINNY=off here would make both arms stock: unset it")
    config = {**package.configs[arguments.model], "architectures": [package.architectures[0]], "dtype": "bfloat16"}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    environment = machine.environment(commit=arguments.commit)
    found: list[rows.Row] = []
    raw: list[dict[str, Any]] = []
    begun = time.monotonic()
    # on, off, off, on: a drift of the machine does not favour an arm.
    arms = [
        arm for run in range(arguments.runs) for arm in ((rows.OURS, "stock") if run % 2 == 0 else ("stock", rows.OURS))
    ]
    for number, name in enumerate(arms):
        spent = time.monotonic() - begun
        if arguments.seconds and number >= 2 and spent + 0.7 * spent / number > arguments.seconds:
            print(f"stopped after {number} of {len(arms)} processes: {spent:.0f} of {arguments.seconds:.0f} s used")
            break
        result = _process(arguments, folder, name, number)
        _must_be_what_it_says(name, result)
        raw.append({"process": number, "arm": name, **result})
        medians = {c: round(t["p50"], 4) for c, t in result["tpot"].items()}
        print(f"{time.monotonic() - begun:5.0f}s", name, medians, result["active"], flush=True)
        for concurrency, t in result["tpot"].items():
            found.append(_row(arguments.model, int(concurrency), name, t, environment))
        # After every process: nothing measured is lost.
        rows.write_text(arguments.out / f"tpot-{arguments.model}.json", json.dumps(raw, indent=1) + "\n")
        rows.write_csv(arguments.out / f"tpot-{arguments.model}.csv", found)
    _print(arguments.model, found)


def _process(arguments: argparse.Namespace, folder: Path, name: str, number: int) -> dict[str, Any]:
    out = folder / "arm.json"
    environment = {
        **os.environ,
        "SKINNY": "off" if name == "stock" else os.environ.get("SKINNY", "on"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--arm", str(folder / "model"), "--out", str(out), "--concurrency"]
    command += [str(c) for c in arguments.concurrency]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    rows_log = arguments.out / f"log-{number}-{name}.txt"
    rows_log.parent.mkdir(parents=True, exist_ok=True)
    rows_log.write_text(log)
    if done.returncode:
        raise SystemExit(f"the {name} arm failed ({rows_log}):\n{log[-6000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    result.setdefault("active", [])
    return result


def _must_be_what_it_says(name: str, result: dict[str, Any]) -> None:
    """A stock arm in which the plug-in is active, or ours without one kernel call, would measure nothing."""
    from skinny_lab.bench.rows import OURS

    ran = sum(count for key, count in result.get("counters", {}).items() if "/kernel:" in key)
    if name == OURS and not ran:
        raise SystemExit("no kernel ran in the arm with skinny: see `skinny doctor` for plans of this device")
    if name != OURS and result["active"]:
        raise SystemExit("the plug-in is active in the stock arm")


def _row(model: str, concurrency: int, name: str, t: dict[str, float], environment: Any) -> Any:
    from skinny_lab.bench.rows import Row

    return Row(
        kind="tpot", what=model, n=0, k=0, m=concurrency, provider=name, config="", state="engine", status="",
        unit="ms",
        p20=round(t["p20"], 4), p50=round(t["p50"], 4), p80=round(t["p80"], 4), rounds=int(t["steps"]),
        device=environment.gpu, driver=environment.driver, torch=environment.torch, commit=environment.commit,
        date=environment.date,
    )  # fmt: skip


def _print(model: str, found: list[Any]) -> None:
    from skinny_lab.bench import rows

    for concurrency, arms in rows.tpot(found)[model].items():
        change = arms["skinny_ms"] / arms["stock_ms"] - 1
        print(
            f"{model} concurrency {concurrency}: {arms['stock_ms']:.3f} -> {arms['skinny_ms']:.3f} ms ({change:+.1%})"
        )


if __name__ == "__main__":
    main()
