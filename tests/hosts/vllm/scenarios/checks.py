"""Shared by the scenario scripts: run named checks, print one JSON line, and a single-process distributed world."""

from __future__ import annotations

import contextlib
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch


def report(**facts: Any) -> None:
    """The line that the test reads."""
    print("RESULT " + json.dumps(facts), flush=True)


def run_checks(namespace: dict[str, Any], *arguments: Any) -> dict[str, str]:
    """Call every `check_*` function; "ok" or the traceback by name."""
    found: dict[str, Callable[..., None]] = {k: v for k, v in namespace.items() if k.startswith("check_")}
    results = {}
    for name, check in found.items():
        try:
            check(*arguments)
            results[name.removeprefix("check_")] = "ok"
        except Exception:
            results[name.removeprefix("check_")] = traceback.format_exc()
    return results


@contextlib.contextmanager
def world(config: Any) -> Iterator[None]:
    """One rank on gloo, BF16 as default dtype, `config` as the current vLLM configuration."""
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        state.ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        yield
