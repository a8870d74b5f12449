"""Run a script against the real Python code of a vLLM release, without a GPU and without installing vLLM.

The release's wheel is downloaded once with pip, and its Python files are unpacked into the user cache folder; compiled
libraries are left out and the test-only stubs beside this file stand in for the few ops that the CPU backend calls.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from tests import checkout

HERE = Path(__file__).parent
CACHE = Path(platformdirs.user_cache_dir("skinny-tests", appauthor=False))
_SKIPPED = (".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".js", ".css", ".map", "vllm-rs")
# One decoder small enough to compile in seconds; every dimension is a multiple of what vLLM's CPU attention asks for.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": QWEN3,
    "single": {**QWEN3, "num_hidden_layers": 1, "tie_word_embeddings": False},
    "llama": {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
}


def thin_tree(version: str) -> Path:
    """Folder with the Python files and the metadata of vLLM `version`; the wheel (300 MB) is fetched once."""
    target = CACHE / f"vllm-{version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(CACHE / f"vllm-{version}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                _unpack(_download(version, Path(folder)), Path(folder) / "tree")
                (Path(folder) / "tree").rename(target)
    return target


def _download(version: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        f"vllm=={version}",
    ]
    subprocess.run([*command, "--disable-pip-version-check", "-d", str(folder)], check=True, timeout=600)
    return next(folder.glob("vllm-*.whl"))


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(("/", *_SKIPPED)) and "/include/" not in name:
                archive.extract(name, target)


def write_models(folder: Path) -> None:
    """A `config.json` per tiny model under `folder`; weights are vLLM's dummy ones."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def register(folder: Path) -> list[str]:
    """Metadata of the stubs and of this workspace under `folder`, so that entry points exist; returns path entries."""
    info = folder / "skinny_stubs-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skinny-stubs\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nskinny_stub_ops = skinny_stub_cpu_ops:register\n"
        "[vllm.platform_plugins]\nskinny_stub_platform = skinny_stub_platform:activate\n"
    )
    return [*checkout.register(folder), str(HERE / "stubs")]


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    version: str,
    folder: Path,
    platform: str = "cpu",
    timeout: int = 280,
    **variables: str,
) -> dict[str, Any]:
    """Run `scenarios/<script>` in `folder` (made by `prepare`) and return the JSON object it prints after "RESULT ".

    platform: "cpu", or a capability to pretend such as "9.0". Fails with the end of the output if there is no result.
    """
    entries = [str(thin_tree(version)), *json.loads((folder / "path.json").read_text())]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "SKINNY", "PYTEST"))},
        "PYTHONPATH": os.pathsep.join(entries),
        "SKINNY_STUB_PLATFORM": platform,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
        # Scalar C++: Inductor would compile a probe per vector instruction set, again for every compile cache.
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        **variables,
    }
    command = [sys.executable, str(HERE / "scenarios" / script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        text = f"{script} on vLLM {version}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        raise AssertionError(text)
    result: dict[str, Any] = json.loads(results[-1][len("RESULT ") :])
    result["log"] = done.stdout + done.stderr
    return result


def prepare(folder: Path) -> Path:
    """Models, metadata and path entries for `run` under `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    write_models(folder)
    (folder / "path.json").write_text(json.dumps(register(folder / "meta")))
    return folder
