"""One engine of `tpot_vllm.py`: `tpot_child.py JOB.json`, or `tpot_child.py --probe` for the machine it runs on.

Builds a vLLM engine as the job says, decodes a little at every concurrency, answers that it is ready, and then decodes
once per line on standard input, one JSON object per line on standard output. It ends with its input. Everything that
libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTLE, TAIL = 16, 4
"""Full steps that are dropped at the begin and at the end of a decode."""
FEWEST = 40
"""Full steps below which a median is not worth keeping."""
WARM_TOKENS = 8


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    try:
        if sys.argv[1] == "--probe":
            answers.write(json.dumps(probe()) + "\n")
            return
        serve(json.loads(Path(sys.argv[1]).read_text()), answers)
    except BaseException as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {str(error)[:600]}"}) + "\n")
    answers.flush()
    sys.stderr.flush()
    # Not the interpreter's way: vLLM's and CUDA's destructors take seconds and nothing is to be kept.
    os._exit(0)


def serve(job: dict[str, Any], answers: Any) -> None:
    """Be ready, then one decode at all levels per line."""
    begun = time.monotonic()
    if job["kernel_folder"] is not None:
        from skinny_core import kernels
        from skinny_lab.bench.cute_arm import VllmCute

        kernels.register(VllmCute(Path(job["kernel_folder"])))
    skipped = skip_router_warmup()
    from vllm import LLM

    llm = LLM(**job["engine"])
    built = time.monotonic() - begun
    for concurrency in job["concurrency"]:
        decode(llm.llm_engine, job, concurrency, WARM_TOKENS)
    ready = {"start_s": round(time.monotonic() - begun, 1), "built_s": round(built, 1), "router_warmup": skipped}
    answers.write(json.dumps({**ready, **resolved(llm.llm_engine), **memory(), **plugin_state()}) + "\n")
    for line in filter(None, map(str.strip, sys.stdin)):
        answers.write(json.dumps({**measure(llm.llm_engine, job), "asked": json.loads(line)}) + "\n")


def measure(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Percentiles in ms by concurrency, and a digest of the tokens."""
    begun = time.monotonic()
    tpot: dict[str, dict[str, float]] = {}
    digest: dict[str, str] = {}
    for concurrency in job["concurrency"]:
        ticks, outputs = decode(engine, job, concurrency, job["output"])
        steps = full_steps(ticks, concurrency)
        if len(steps) < FEWEST:
            raise RuntimeError(f"only {len(steps)} steps with all {concurrency} requests: too small a KV cache?")
        tpot[str(concurrency)] = percentiles(steps)
        digest[str(concurrency)] = hashlib.sha256(repr(outputs).encode()).hexdigest()[:16]
    return {"tpot": tpot, "digest": digest, "seconds": round(time.monotonic() - begun, 2), **plugin_state()}


def percentiles(steps: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80 in ms of times in seconds, and how many they are."""
    ordered = sorted(steps)
    return {
        "p20": ordered[len(ordered) // 5] * 1e3,
        "p50": statistics.median(ordered) * 1e3,
        "p80": ordered[len(ordered) * 4 // 5] * 1e3,
        "steps": len(ordered),
    }


def full_steps(ticks: Sequence[tuple[float, int]], concurrency: int) -> list[float]:
    """Seconds of the steps in which every request got a token, and in the one before, too; without those at the ends.

    ticks: (time, requests that got a token) of every step that gave any. A prompt is computed in steps in which not all
    requests decode; a request that is done or preempted leaves fewer.
    """
    full = [b - a for (a, m), (b, n) in itertools.pairwise(ticks) if m == n == concurrency]
    return full[SETTLE:-TAIL]


_numbers = itertools.count()


def decode(
    engine: Any, job: dict[str, Any], concurrency: int, tokens: int
) -> tuple[list[tuple[float, int]], list[tuple[int, ...]]]:
    """Run `concurrency` requests of random prompts to their end: ticks as in `full_steps`, and the tokens by request.

    The prompts of a level are the same in every process and turn.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    generator = random.Random(concurrency)
    names = [f"{next(_numbers)}" for _ in range(concurrency)]
    for name in names:
        prompt = [generator.randrange(job["vocabulary"]) for _ in range(job["prompt"])]
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    gc.collect()
    ticks: list[tuple[float, int]] = []
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_unfinished_requests():
        found = engine.step()
        if found:  # a step of the asynchronous scheduler may only have sent work
            ticks.append((time.perf_counter(), len(found)))
        for one in found:
            if one.finished:
                outputs[one.request_id] = tuple(one.outputs[0].token_ids)
    return ticks, [outputs[name] for name in names]


def skip_router_warmup() -> str:
    """vLLM 0.26 compiles 17 CuTe router GEMMs of DeepSeek shapes on every Hopper start where the DSL can be imported
    (`kernel_warmup.py`); no model here calls one. There is no setting for it. Says what was done."""
    try:
        from vllm.model_executor.warmup import kernel_warmup
    except ImportError as error:
        return f"not skipped: {error}"
    if not hasattr(kernel_warmup, "_warmup_ll_bf16_router_gemm"):
        return "not skipped: this vLLM has no such function"
    kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None
    return "skipped"


def resolved(engine: Any) -> dict[str, Any]:
    """What the engine made of its settings: what decode runs under."""
    config = engine.vllm_config
    compilation = config.compilation_config
    return {
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "cudagraph_sizes": list(compilation.cudagraph_capture_sizes or ()),
        "compilation_mode": getattr(compilation.mode, "name", str(compilation.mode)),
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }


def memory() -> dict[str, float]:
    """GB of this process's allocator, and of all processes on the device."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 2),
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "device_used_gb": round((total - free) / 1e9, 2),
    }


def plugin_state() -> dict[str, Any]:
    """What skinny says about itself here: active families, calls by outcome, kernels compiled and loaded."""
    try:
        from skinny_core import cache, dispatch
    except ImportError:
        return {"active": [], "counters": {}}
    return {
        "active": [a.summary() for a in dispatch.active().values()],
        "counters": {"/".join(map(str, key)): count for key, count in dispatch.counters().items()},
        "compiled": cache.COUNTS.compiled,
        "loaded": cache.COUNTS.loaded,
    }


def probe() -> dict[str, Any]:
    """The machine, asked in a process of its own: the driver must not hold memory of the device."""
    from dataclasses import asdict

    import msgspec
    import torch

    from skinny_core import device
    from skinny_lab.bench import machine

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    key = device.current_key()
    return {
        "environment": msgspec.to_builtins(machine.environment()),
        "key": asdict(key) if key else None,
        "bytes": torch.cuda.get_device_properties(0).total_memory,
        "others": machine.gpu().others,
    }


if __name__ == "__main__":
    main()
