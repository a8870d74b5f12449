"""Compile (or load from the disk cache) before serving what the plan will run, so that nothing is compiled afterwards.

Missing machine code is made by worker processes in parallel; they see no GPU and only fill the disk cache.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from skinny_core import device, dispatch, kernels, rules
from skinny_core.device import DeviceKey
from skinny_core.errors import CompileForbiddenError, SkinnyError
from skinny_core.problem import MAX_M, SERVED, DType, KernelConfig, Problem, WeightScheme

WORKER_SECONDS = 300
PARALLEL_FROM = 3
"""Fewer missing kernels than this are compiled in this process: a worker needs seconds to import the DSL."""


@dataclass(frozen=True, slots=True)
class _Job:
    problem: Problem
    m: int
    config: KernelConfig
    name: str


def warm(
    family: str,
    problems: Iterable[tuple[int, int, DType]],
    ms: Iterable[int] = range(1, MAX_M + 1),
    *,
    index: int | None = None,
    workers: int | None = None,
) -> list[str]:
    """Make every cell of `problems` that would run on CUDA device `index` (default: the current one) ready to launch.

    problems: (N, K, dtype) of weights; cells of every output dtype, and of every epilogue that a call can have, count.
    workers: processes for missing machine code (default: one per core, at most 8; 0 for none).

    Returns the names of what had to be compiled, [] when everything came from memory or disk. A kernel that cannot be
    compiled is noted (reason `kernel_unavailable`), not raised. Raises `CompileForbiddenError` during graph capture.
    """
    state = dispatch.family_state(family)
    if state is None or not torch.cuda.is_available():
        return []
    if torch.cuda.is_current_stream_capturing():
        raise CompileForbiddenError("warm-up during graph capture", "call warm() before the capture")
    index = torch.cuda.current_device() if index is None else index
    jobs = _jobs(state, problems, tuple(ms), index)
    key = device.current_key(index)
    if not jobs or key is None:
        return []
    prewait = state.static_weights
    missing = [job for job in jobs if not _prepared(job, key, prewait)]
    able = [(job.config, job.problem, job.m) for job in missing if _available(job)]
    jobs_of = distinct(able, key, prewait=prewait)
    if len(jobs_of) >= PARALLEL_FROM and workers != 0:
        prepare_in_parallel(jobs_of, key, prewait=prewait, workers=workers or min(8, os.cpu_count() or 1))
    found: dict[tuple[int, Problem, int], kernels.Launcher | str] = {}
    for job in jobs:
        try:
            kernel = kernels.get(job.config.kernel)
            config = kernel.config_from(dict(job.config.params))
            found[index, job.problem, job.m] = kernel.compile(config, job.problem, job.m, index=index, prewait=prewait)
        except Exception as error:  # a DSL can fail in any way; the call falls back and doctor shows the text
            found[index, job.problem, job.m] = f"{type(error).__name__}: {error}"
            dispatch.log.warning("skinny: %s is not used: %s", job.name, error)
    dispatch.install_launchers(state, found)
    return [job.name for job in missing if not isinstance(found[index, job.problem, job.m], str)]


def _jobs(
    state: Any,
    problems: Iterable[tuple[int, int, DType]],
    ms: tuple[int, ...],
    index: int,
) -> list[_Job]:
    jobs = []
    for n, k, dtype in dict.fromkeys(problems):
        if dtype not in (DType.BF16, DType.FP16):
            continue
        for output, epilogue in itertools.product(dict.fromkeys((dtype, DType.FP32)), SERVED):
            scheme = WeightScheme(dtype.value)
            problem = Problem(n=n, k=k, weight=scheme, activation=dtype, output=output, epilogue=epilogue)
            for m in ms:
                found, verdict = state.choose(problem, m, index)
                if found is not None and verdict.reason in (rules.Reason.NOT_WARM, rules.Reason.KERNEL_UNAVAILABLE):
                    config = found.cell.kernel_config
                    jobs.append(_Job(problem, m, config, f"{found.cell.id}: {config} M={m} K={k}"))
    return jobs


def _available(job: _Job) -> bool:
    """Whether a worker could compile it at all; where the DSL is absent each would find that out in seconds."""
    try:
        return kernels.get(job.config.kernel).availability()[0]
    except SkinnyError:
        return False


def _prepared(job: _Job, key: DeviceKey, prewait: bool) -> bool:
    try:
        kernel = kernels.get(job.config.kernel)
        return kernel.prepared(kernel.config_from(dict(job.config.params)), job.problem, job.m, key, prewait=prewait)
    except (SkinnyError, OSError):
        return False


def prepare_in_parallel(
    jobs: Sequence[tuple[KernelConfig, Problem, int]], key: DeviceKey, *, prewait: bool, workers: int | None = None
) -> None:
    """Fill the disk cache with (config, problem, M) for a device of that key, in `workers` processes (default: one per
    core). Best effort: what a worker does not finish is compiled by whoever needs it.
    """
    workers = workers or os.cpu_count() or 1
    jobs = distinct(jobs, key, prewait=prewait)
    shares = [jobs[i::workers] for i in range(min(workers, len(jobs)))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    running = []
    for share in shares:
        text = "\n".join(json.dumps(encode(config, problem, m, key, prewait)) for config, problem, m in share)
        try:
            # A file, not a pipe: a long share fills a pipe, and the next worker would start when this one is done.
            with tempfile.TemporaryFile("w+", encoding="utf-8") as lines:
                lines.write(text + "\n")
                lines.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-m", "skinny_core.compile_worker"],
                    stdin=lines, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                )  # fmt: skip
        except OSError as error:
            dispatch.log.info("skinny: no compile worker: %s", error)
            break
        running.append(process)
    for process in running:
        try:
            process.wait(timeout=WORKER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def distinct(
    jobs: Sequence[tuple[KernelConfig, Problem, int]], key: DeviceKey, *, prewait: bool
) -> list[tuple[KernelConfig, Problem, int]]:
    """The jobs without those whose machine code earlier ones make: neighbouring M share a config, and workers that
    compile the same one only wait for each other. What cannot be told apart stays; its compiler says why.
    """
    seen: set[Hashable] = set()
    kept = []
    for config, problem, m in jobs:
        try:
            kernel = kernels.get(config.kernel)
            codes = kernel.codes(kernel.config_from(dict(config.params)), problem, m, key, prewait=prewait)
        except SkinnyError:
            kept.append((config, problem, m))
            continue
        if not codes <= seen:
            seen |= codes
            kept.append((config, problem, m))
    return kept


def encode(config: KernelConfig, problem: Problem, m: int, key: DeviceKey, prewait: bool) -> dict[str, Any]:
    """One compile job as JSON data for `compile_worker`."""
    return {
        "kernel": config.kernel,
        "params": dict(config.params),
        "problem": {f: getattr(problem, f) for f in ("n", "k", "weight", "activation", "output", "epilogue")},
        "m": m,
        "key": asdict(key),
        "prewait": prewait,
    }
