"""`skinny capture vllm`: the command, with vLLM's own engine and classes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from skinny_lab import capture
from tests.hosts.vllm import runner

pytestmark = pytest.mark.slow
FUSED = {"qkv_proj": (384, 256), "o_proj": (256, 256), "gate_up_proj": (1024, 256), "down_proj": (256, 512)}
HEAD = (1024, 256)


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_a_tied_model(version: str, tmp_path: Path) -> None:
    folder = runner.prepare(tmp_path / version)
    said = runner.run("capture.py", ["tied", "--batch", "1,3"], version=version, folder=folder)
    found = capture.read(folder / "c.json")
    assert (found.host, found.versions["vllm"], found.random) == ("vllm", version, True)
    layers = {r.layer.rpartition(".")[2]: (r.n, r.k, r.layers, r.calls) for r in found.select(phase="decode")}
    assert layers == {**{name: (*shape, 2, 2) for name, shape in FUSED.items()}, "lm_head": (*HEAD, 1, 1)}
    assert list(layers) == [*FUSED, "lm_head"]  # in the order of the model's calls
    assert {(r.m, r.steps) for r in found.select(phase="decode")} == {(1, 7), (3, 7)}
    prefill = {(r.layer == "lm_head", r.m) for r in found.records if r.phase == "prefill"}
    assert prefill == {(True, 1), (True, 3), (False, 19), (False, 57)}
    assert found.notes == ()
    assert said["status"] == 0
    assert "embed_tokens" not in said["output"]
