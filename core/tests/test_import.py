"""`import skinny_core` touches nothing: no DSL, no host, no device, no file; and it adds little to torch's import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import skinny_core

CODE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([sorted(new), torch.cuda.is_initialized(), seconds]))
"""
FOREIGN = {"cutlass", "cuda", "tvm_ffi", "triton", "vllm", "transformers", "numpy", "nvidia_cutlass_dsl"}
HOSTS = ", ".join(f"skinny_core.kernels.{stem}.host" for stem in ("bf16_simt", "bf16_stream", "bf16_mma"))
ALL = f"skinny_core, skinny_core.op, skinny_core.warmup, skinny_core.explain, skinny_core.prefetch, {HOSTS}"


@pytest.mark.parametrize("module", ["skinny_core", ALL])
def test_import(module: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    result = subprocess.run(
        [sys.executable, "-B", "-c", CODE.format(module=module)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(home),
             "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    new, initialised, _ = json.loads(result.stdout.splitlines()[-1])
    assert not FOREIGN & set(new), new
    assert initialised is False
    assert list(home.iterdir()) == []
    assert [f for f in tmp_path.iterdir() if f != home] == []


def test_fork_after_import_is_safe() -> None:
    code = (
        "import os, skinny_core, skinny_core.op, torch\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    x = torch.ones(1, 8)\n"
        "    os._exit(0 if torch.equal(torch.ops.skinny.linear(x, torch.ones(2, 8)), torch.full((1, 2), 8.0)) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0", result.stderr


def test_the_version_is_the_wheels() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    assert skinny_core.__version__ == project["version"]


def test_public_names_exist() -> None:
    assert all(hasattr(skinny_core, name) for name in skinny_core.__all__)
