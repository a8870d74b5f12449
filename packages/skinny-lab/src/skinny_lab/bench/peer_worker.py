"""`python -m skinny_lab.bench.peer_worker [FOLDER]`: try peers on this GPU, one JSON line in, one out.

In: {"peer", "n", "k", "m"}. Out: the same with "error": "" where the peer ran, was captured in a graph behind an
ordinary kernel and its replay gave right results. What a peer compiles on the way stays in its own disk cache. A peer
that hangs or kills its process does so here and not in the race.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from skinny_lab.bench import tuning
from skinny_lab.bench.peers import Peers, peer_maker

ROUGH = 1e-2
"""Relative error against an FP32 product beyond which the replay did not do the work; the race has the fine gate."""


def main() -> int:
    """Answer until standard input ends."""
    # Libraries and compilers print to standard output: keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    peers = peer_maker(folder, only_safe=False)
    for line in filter(None, map(str.strip, sys.stdin)):
        job = json.loads(line)
        answers.write(json.dumps({**job, "error": answer(peers, job)}) + "\n")
    return 0


def answer(peers: Peers, job: dict[str, Any]) -> str:
    """Why the peer cannot be raced in this cell, or ""."""
    problem = tuning.problem_of(job["n"], job["k"])
    if job["peer"] not in peers.by_name:
        return peers.said() or f"no peer {job['peer']}"
    refusal = peers.refusal(job["peer"], problem, job["m"])
    if refusal:
        return refusal
    try:
        return trial(peers.by_name[job["peer"]].make(problem, job["m"]), job["n"], job["k"], job["m"])
    except Exception as error:  # whatever a library raises is the answer
        return f"{type(error).__name__}: {error}"


def trial(run: Any, n: int, k: int, m: int) -> str:
    """Run once, capture behind an elementwise kernel, replay into NaN, compare; what is wrong, or ""."""
    generator = torch.Generator("cuda").manual_seed(1)
    w = torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(0, k**-0.5, generator=generator)
    x_in = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", generator=generator)
    x, y = torch.empty_like(x_in), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mul(x_in, 1.0, out=x)
        run(x, w, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(3):
            torch.mul(x_in, 1.0, out=x)
            run(x, w, y)
    y.fill_(float("nan"))
    x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    expected = x_in.float() @ w.float().T
    error = float(torch.linalg.vector_norm(y.float() - expected) / torch.linalg.vector_norm(expected))
    return "" if error <= ROUGH else f"a replayed graph gives a relative error of {error:.2e}"


if __name__ == "__main__":
    sys.exit(main())
