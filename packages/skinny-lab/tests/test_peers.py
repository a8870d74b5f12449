"""Peers: what they refuse, what is left out and why, and trials in processes of their own."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skinny_core import device
from skinny_core.problem import DType, KernelConfig, Problem, WeightScheme
from skinny_lab.bench import libraries, peer_worker, prepare, race, tuning
from skinny_lab.bench.libraries import Peer
from skinny_lab.bench.peers import Peers, peer_maker, vllm_cute_configs

H200 = device.product("h200")
PLAIN = tuning.problem_of(4096, 4096)


def _stub(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module


def test_a_missing_library_is_told_with_its_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    peers = peer_maker(tmp_path)
    assert peers(PLAIN, 1) == {}
    assert set(peers.missing) == {"vllm_cute", "flashinfer_tinygemm", "deepgemm"}
    assert "holds no skinny_gemm.py" in peers.missing["vllm_cute"]
    assert "deep_gemm" in peers.said()


def test_libraries_are_called_with_and_without_pdl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    def tinygemm_bf16(x: object, w: object, out: object, bias: object = None, use_pdl: bool = False) -> None:
        calls.append(("tinygemm", x, w, out, bias, use_pdl))

    gemm = _stub("flashinfer.gemm", tinygemm_bf16=tinygemm_bf16)
    monkeypatch.setitem(sys.modules, "flashinfer", _stub("flashinfer", gemm=gemm))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    deep_gemm = _stub(
        "deep_gemm",
        set_pdl=lambda on: calls.append(("set_pdl", on)),
        bf16_gemm_nt=lambda a, b, d: calls.append(("deepgemm", a, b, d)),
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    monkeypatch.setitem(sys.modules, "tvm_ffi", _stub("tvm_ffi", use_torch_stream=contextlib.nullcontext))
    runs = peer_maker(tmp_path, only_safe=False)(PLAIN, 4)
    for run in runs.values():
        run("x", "w", "y")  # type: ignore[arg-type]
    assert list(runs) == ["flashinfer_tinygemm", "flashinfer_tinygemm_pdl", "deepgemm", "deepgemm_pdl"]
    assert calls == [
        ("tinygemm", "x", "w", "y", None, False),
        ("tinygemm", "x", "w", "y", None, True),
        ("set_pdl", False),
        ("deepgemm", "x", "w", "y"),
        ("set_pdl", True),
        ("deepgemm", "x", "w", "y"),
    ]
    assert "flashinfer_tinygemm_pdl" not in peer_maker(tmp_path)(PLAIN, 4), "its vendor says that it may hang"


def test_a_worker_answers_with_the_refusal_or_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("nvcc: not found")

    refuses = libraries.refuses_tinygemm
    peers = Peers([Peer("p", refuses, lambda *_: lambda x, w, y: None, lambda *_: "")], {"q": "OSError: no _C.so"})
    job = {"peer": "p", "n": 4096, "k": 4096, "m": 1}
    assert "K = 100" in peer_worker.answer(peers, {**job, "k": 100})
    assert peer_worker.answer(peers, {**job, "peer": "q"}) == "q is not raced: OSError: no _C.so"
    monkeypatch.setattr(peer_worker, "trial", broken)
    assert peer_worker.answer(peers, job) == "RuntimeError: nvcc: not found"


def test_refusals_by_shape_type_and_output() -> None:
    fp32 = Problem(n=4096, k=4096, weight=WeightScheme.BF16, activation=DType.BF16, output=DType.FP32)
    fp16 = tuning.problem_of(4096, 4096, DType.FP16)
    for refuses in (libraries.refuses_tinygemm, libraries.refuses_deepgemm):
        assert refuses(PLAIN, 16) is None
        assert "K = 1200" in str(refuses(tuning.problem_of(4096, 1200), 1))
        assert "only bf16" in str(refuses(fp16, 1))
        assert "output" in str(refuses(fp32, 1))
    assert "multiple of 16" in str(libraries.refuses_tinygemm(tuning.problem_of(4104, 4096), 1))
    assert libraries.refuses_deepgemm(tuning.problem_of(4104, 4096), 1) is None


def test_configs_of_vllms_kernel_reach_up_to_the_next_swept_m() -> None:
    configs = vllm_cute_configs()
    assert libraries.swept_config(configs, 4096, 4096, 3) == configs[4096, 4096, 4]
    assert libraries.swept_config(configs, 4096, 4096, 8) == configs[4096, 4096, 8]
    assert libraries.swept_config(configs, 4096, 4096, 9) is None
    assert libraries.swept_config(configs, 768, 2560, 1) is None


def test_vllms_kernel_races_as_vllm_launches_it_and_without_pdl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    (tmp_path / "skinny_gemm.py").write_text(
        "from dataclasses import dataclass\n"
        "ran = []\n"
        "@dataclass(frozen=True)\n"
        "class SkinnyGemmConfig:\n"
        "    m: int\n    block_size: int\n    outputs_per_block: int\n    k_unroll: int\n    vector_width: int = 8\n"
        "class ShapeDynamicSkinnyGemm:\n"
        "    def __init__(self): self._compiled = {}\n"
        "    def _compile(self, dtype, config, flag):\n"
        "        pdl = self._use_pdl()\n"
        "        self._compiled[dtype, config, flag] = lambda *args: ran.append(pdl)\n"
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    found = {peer.name: peer for peer in libraries.vllm_cute(tmp_path, vllm_cute_configs())}
    assert list(found) == ["vllm_cute", "vllm_cute_no_pdl"]
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    for peer in found.values():
        peer.make(PLAIN, 4)(x, x, x)
    assert sys.modules["skinny_peer_vllm_cute.skinny_gemm"].ran == [True, False]


def test_an_excluded_peer_is_left_out_of_that_cell_only() -> None:
    peers = Peers([Peer("p", lambda problem, m: None, lambda problem, m: lambda x, w, y: None, lambda problem, m: "")])
    peers.exclude("p", 4096, 4096, 2, "it hung")
    assert peers.refusals(PLAIN, 2) == {"p": "it hung"}
    assert peers(PLAIN, 2) == {}
    assert list(peers(PLAIN, 1)) == ["p"]
    assert list(peers(tuning.problem_of(4096, 2560), 2)) == ["p"]


def test_wrong_peers_do_not_race_but_the_baseline_always_does() -> None:
    rivals: dict[str, race.Run] = dict.fromkeys(("cublas", "right", "rounds_twice", "wrong"), lambda x, w, y: None)
    errors = {"cublas": 6e-3, "right": 1.66e-3, "rounds_twice": 2.4e-3, "wrong": 5.2e-3}
    assert set(tuning.right_rivals(rivals, errors, PLAIN)) == {"cublas", "right", "rounds_twice"}


def test_check_measures_what_a_contestant_really_wrote() -> None:
    class Arena:
        torch.manual_seed(0)
        weights = torch.randn(1, 96, 64).bfloat16()

        def activation(self, m: int) -> torch.Tensor:
            return torch.randn(m, 64).bfloat16()

    def right(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x.float() @ w.float().T)

    def half(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        y[:, :48].copy_(x.float() @ w[:48].float().T)

    def broken(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        raise RuntimeError("no kernel image")

    failed: dict[str, str] = {}
    runs = {"right": right, "half": half, "broken": broken}
    problem = tuning.problem_of(96, 64)
    errors = tuning.check(Arena(), problem, 4, runs, failed=failed)  # type: ignore[arg-type]
    assert errors["right"] < 2e-3
    assert errors["half"] == errors["broken"] == float("inf")
    assert failed == {"broken": "RuntimeError: no kernel image"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        tuning.check(Arena(), problem, 4, runs)  # type: ignore[arg-type]


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["peer"] == "dies" and job["n"] == 1: os._exit(7)
    if job["peer"] == "hangs": time.sleep(600)
    error = "N is odd" if job["peer"] == "picky" else ""
    print(json.dumps({**job, "error": error}), flush=True)
"""


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Peer workers of a dozen lines; one that hangs is given up after half a second."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(prepare, "PEER_WORKER", [sys.executable, "-S", str(script)])
    monkeypatch.setattr(prepare, "PEER_WORKERS", 1)
    return script


def test_a_peer_that_hangs_or_dies_takes_only_a_worker_with_it(
    fake_worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [("good", 1, 1, 1), ("dies", 1, 1, 1), ("dies", 2, 1, 1), ("picky", 3, 1, 1), ("good", 4, 1, 1)]
    found = prepare.prepare([], jobs, H200, seconds=60)
    assert found.tried == 4
    assert set(found.refused) == {("dies", 1, 1, 1), ("picky", 3, 1, 1)}
    assert "died with status 7" in found.refused["dies", 1, 1, 1]
    assert found.refused["picky", 3, 1, 1] == "N is odd"
    monkeypatch.setattr(prepare, "ANSWER_SECONDS", 0.5)
    found = prepare.prepare([], [("hangs", 1, 1, 1), ("hangs", 2, 1, 1)], H200, seconds=60)
    assert found.tried == 0
    assert "no answer within" in found.refused["hangs", 2, 1, 1]
    assert "N=1 " in found.refused["hangs", 2, 1, 1], "the second job does not cost another worker"


def test_nothing_untried_is_raced_after_the_deadline(fake_worker: Path) -> None:
    found = prepare.prepare([], [("good", 1, 1, 1)], H200, seconds=0)
    assert found.refused == {("good", 1, 1, 1): "not tried before the deadline"}


def test_compile_workers_get_every_job_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(
        "import os, sys\n"
        f"open({str(tmp_path)!r} + f'/seen.{{os.getpid()}}', 'w').write(sys.stdin.read())\n"
        "print('one complaint', file=sys.stderr)\n"
        "import time; time.sleep(600 if len(sys.argv) > 1 else 0)\n"
    )
    monkeypatch.setattr(prepare, "COMPILE_WORKER", [sys.executable, "-S", str(script)])
    jobs = [(KernelConfig.of("bf16_simt", {"threads": t, "rows": 1, "chunks": 1}), PLAIN, 1) for t in (64, 128, 160)]
    found = prepare.prepare(jobs, [], H200, seconds=60, workers=2)
    assert (found.compiled, found.complete, found.complaints) == (3, True, ("one complaint",) * 2)
    seen = [json.loads(line) for path in tmp_path.glob("seen.*") for line in path.read_text().splitlines()]
    assert sorted(job["params"]["threads"] for job in seen) == [64, 128, 160]
    assert {job["key"]["sm_count"] for job in seen} == {132}
    monkeypatch.setattr(prepare, "COMPILE_WORKER", [sys.executable, "-S", str(script), "slow"])
    assert not prepare.prepare(jobs, [], H200, seconds=0.5, workers=2).complete
