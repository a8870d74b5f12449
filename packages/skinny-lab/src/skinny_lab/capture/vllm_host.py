"""`skinny capture vllm`, this side: start a process with vLLM in it, read what it recorded.

vLLM decides at import, by environment variables, whether its engine is a process of its own; shipped code here writes
no variable (AGENTS.md, invariant 3). So the engine gets a child process that is born with the right ones, and what vLLM
leaves behind (a CUDA context, worker processes, log handlers) ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from skinny_lab.capture import document, request
from skinny_lab.capture.document import Capture
from skinny_lab.capture.request import Request
from skinny_lab.explain.target import RequestError

INSTALL = "pip install vllm (it brings its own torch: use a fresh environment), then skinny-lab in the same one"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model lives in the child itself
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # with --tp our own two functions are sent to the ranks
    "SKINNY": "off",  # the stock model is recorded, not what skinny made of it
}


def run(asked: Request) -> Capture:
    """Record in a child. Its text goes to stderr. Raises `RequestError` if vLLM is absent or the child fails."""
    request.need("vllm", INSTALL)
    with tempfile.TemporaryDirectory(prefix="skinny-capture-") as folder:
        result = Path(folder) / "capture.json"
        done = subprocess.run(
            [sys.executable, "-m", "skinny_lab.capture.vllm_worker", str(result)],
            input=msgspec.json.encode(asked),
            env={**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=2,  # vLLM logs to stdout; ours is for the result
            check=False,
        )
        said = Path(folder) / "error.txt"
        if said.is_file():
            raise RequestError(said.read_text(encoding="utf-8"), "vLLM's own words are above; correct the request")
        if done.returncode or not result.is_file():
            what = f"{asked.model}: the process with vLLM ended with status {done.returncode} and no result"
            raise RequestError(what, "see what vLLM said above; `skinny doctor` shows the versions")
        return document.read(result)
