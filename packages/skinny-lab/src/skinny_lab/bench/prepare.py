"""Before a clock starts: compile candidates and try peers, in worker processes, until a deadline.

`warmup.prepare_in_parallel` has no deadline and no word about what failed; a race with a time budget needs both.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from skinny_core import kernels, warmup
from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError
from skinny_core.problem import KernelConfig, Problem

CompileJob = tuple[KernelConfig, Problem, int]
"""(config, problem, M)."""
PeerJob = tuple[str, int, int, int]
"""(peer, N, K, M)."""

COMPILE_WORKER = [sys.executable, "-m", "skinny_core.compile_worker"]
PEER_WORKER = [sys.executable, "-m", "skinny_lab.bench.peer_worker"]
PEER_WORKERS = 8
"""Each holds a CUDA context, a weight and its product in FP32."""
ANSWER_SECONDS = 120.0
"""A first answer includes imports and a compilation by nvcc while all cores compile."""
CRASHES = 3
"""A peer that has killed this many processes is not tried again."""


@dataclass
class Prepared:
    """What came of it. compiled: jobs given to compilers. complete: all compilers ended in time. complaints: the first
    lines of what compilers said. refused: peers that are not to be raced in a cell, and why. tried: peer jobs
    answered."""

    compiled: int = 0
    complete: bool = True
    complaints: tuple[str, ...] = ()
    tried: int = 0
    refused: dict[PeerJob, str] = field(default_factory=dict)


def prepare(
    candidates: Sequence[CompileJob],
    peers: Sequence[PeerJob],
    key: DeviceKey,
    *,
    seconds: float,
    folder: Path | None = None,
    workers: int | None = None,
) -> Prepared:
    """Compile `candidates` into the disk cache for a device of that key, and try `peers`, in at most `seconds`.

    folder: with vLLM's kernel, for the peer workers. All processes have ended on return: nothing disturbs a race.
    """
    deadline = time.monotonic() + seconds
    found = Prepared()
    thread = threading.Thread(target=_try_peers, args=(peers, deadline, folder, found))
    thread.start()
    try:
        _compile(candidates, key, deadline, workers or os.cpu_count() or 1, found)
    finally:
        thread.join()
    return found


def missing(jobs: Iterable[CompileJob], key: DeviceKey, *, prewait: bool = True) -> list[CompileJob]:
    """The jobs whose machine code is not in the disk cache."""
    found = []
    for config, problem, m in jobs:
        kernel = kernels.get(config.kernel)
        if not kernel.prepared(kernel.config_from(dict(config.params)), problem, m, key, prewait=prewait):
            found.append((config, problem, m))
    return found


def _compile(jobs: Sequence[CompileJob], key: DeviceKey, deadline: float, workers: int, found: Prepared) -> None:
    if not jobs:
        return
    found.compiled = len(jobs)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    running: list[tuple[subprocess.Popen[str], IO[str]]] = []
    for i in range(min(workers, len(jobs))):
        # Files instead of pipes: a worker that is slow to read must not hold up the start of the next.
        work: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        for config, problem, m in jobs[i::workers]:
            work.write(json.dumps(warmup.encode(config, problem, m, key, True)) + "\n")
        work.seek(0)
        process = subprocess.Popen(COMPILE_WORKER, stdin=work, stdout=said, stderr=said, env=environment, text=True)
        work.close()
        running.append((process, said))
    complaints: list[str] = []
    for process, said in running:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            found.complete = False
            process.kill()
            process.wait()
        said.seek(0)
        complaints += said.read().splitlines()[:2]
        said.close()
    found.complaints = tuple(line[:600] for line in complaints[:8])


def _try_peers(jobs: Sequence[PeerJob], deadline: float, folder: Path | None, found: Prepared) -> None:
    waiting: queue.SimpleQueue[PeerJob] = queue.SimpleQueue()
    found.refused = dict.fromkeys(jobs, "not tried")  # only an answer takes it back
    for job in jobs:
        waiting.put(job)
    trials = _Trials(waiting, deadline, folder, found)
    threads = [threading.Thread(target=trials.work) for _ in range(min(PEER_WORKERS, os.cpu_count() or 1, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Trials:
    """Threads that each keep one peer worker busy, and start another where it hangs or dies."""

    def __init__(
        self, waiting: queue.SimpleQueue[PeerJob], deadline: float, folder: Path | None, found: Prepared
    ) -> None:
        self.waiting, self.deadline, self.folder, self.found = waiting, deadline, folder, found
        self.given_up: dict[str, str] = {}
        self.crashes: dict[str, int] = {}

    def work(self) -> None:
        """Until no job is left or the deadline has passed."""
        process: subprocess.Popen[bytes] | None = None
        try:
            while True:
                try:
                    job = self.waiting.get_nowait()
                except queue.Empty:
                    return
                left = self.deadline - time.monotonic()
                if job[0] in self.given_up or left <= 0:
                    self.found.refused[job] = self.given_up.get(job[0], "not tried before the deadline")
                    continue
                process = process or self._start()
                error = _ask(process, job, min(left, ANSWER_SECONDS))
                if error is None:
                    error = self._lost(process, job, hung=process.poll() is None, late=left < ANSWER_SECONDS)
                    process = None
                else:
                    self.found.tried += 1
                if error:
                    self.found.refused[job] = error
                else:
                    del self.found.refused[job]
        finally:
            if process is not None:
                _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*PEER_WORKER, *([str(self.folder)] if self.folder else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def _lost(self, process: subprocess.Popen[bytes], job: PeerJob, *, hung: bool, late: bool) -> str:
        """What to note about a worker that gave no answer; ends it."""
        name, n, k, m = job
        _end(process)
        if hung and late:
            return "not answered before the deadline"
        if hung:
            self.given_up[name] = f"its process gave no answer within {ANSWER_SECONDS:.0f} s at N={n} K={k} M={m}"
            return self.given_up[name]
        self.crashes[name] = self.crashes.get(name, 0) + 1
        error = f"its process died with status {process.returncode} at N={n} K={k} M={m}"
        if self.crashes[name] >= CRASHES:
            self.given_up[name] = error
        return error


def _ask(process: subprocess.Popen[bytes], job: PeerJob, seconds: float) -> str | None:
    """The worker's answer: an error, or "" where the peer works; None where the worker died or is silent."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(dict(zip(("peer", "n", "k", "m"), job, strict=True))).encode() + b"\n")
        process.stdin.flush()
        # One line per question and nothing else is ever written there, so none is left in the buffer.
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        if not ready:
            return None
        line = process.stdout.readline()
    except OSError:  # it died before it was asked
        line = b""
    if not line:
        process.wait()
        return None
    return str(json.loads(line)["error"])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was never read is flushed at close
                continue


def compile_all(jobs: Sequence[CompileJob], key: DeviceKey, seconds: float) -> bool:
    """Returns whether everything was tried in time. What is missing although it was will say why when it is raced."""
    ends = time.monotonic() + seconds
    # Shapes of one K mostly share their machine code; a kernel whose code depends on N is left for a second wave.
    for any_n in (True, False):
        try:
            jobs = missing(jobs, key)
        except (SkinnyError, OSError):
            return True  # a DSL is absent: its contestants say so, the others race
        few = {
            (config, replace(problem, n=1) if any_n else problem, m): (config, problem, m)
            for config, problem, m in jobs
        }
        left = max(0.0, ends - time.monotonic())
        if few and not prepare(list(few.values()), [], key, seconds=left).complete:
            return False
    return True
