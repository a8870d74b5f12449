"""Warm-up: what it compiles, what it finds, and that nothing that goes wrong in it reaches a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import dispatch, kernels, warmup
from skinny_core.device import DeviceKey, product
from skinny_core.errors import CompileForbiddenError
from skinny_core.kernels.bf16_simt.config import SimtConfig
from skinny_core.problem import DType, Epilogue, KernelConfig, Problem
from skinny_core.testing.stand_in import StandIn, cell

N, K = 32, 64
PROBLEMS = [(N, K, DType.BF16)]
SIMT = KernelConfig.of("bf16_simt", {"threads": 128, "rows": 2, "chunks": 4})


def _many(count: int) -> list[tuple[KernelConfig, Problem, int]]:
    """Jobs with machine code of their own: another K each."""
    return [(SIMT, Problem(n=4096, k=4096 + 8 * i), 1) for i in range(count)]


def _activate(key: DeviceKey, *ms: int) -> None:
    dispatch.activate_cells("test", key, tuple(cell(N, K, m) for m in ms))


def test_without_cuda_there_is_nothing_to_do(kernel: StandIn) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    _activate(product("h200"), 1)
    assert warmup.warm("test", PROBLEMS) == []
    assert warmup.warm("nobody", PROBLEMS) == []
    assert kernel.compiled == []


def test_names_of_what_was_missing(h200: DeviceKey, kernel: StandIn) -> None:
    _activate(h200, 1, 2)
    kernel.on_disk = False
    names = warmup.warm("test", [*PROBLEMS, *PROBLEMS, (N, K, DType.FP32), (N, 2 * K, DType.BF16)])
    assert names == [f"32x64/M{m}/bf16-bf16-none: stand_in(variant=0) M={m} K=64" for m in (1, 2)]
    assert kernel.compiled == [(K, 1), (K, 2)]
    assert warmup.warm("test", PROBLEMS) == []
    assert kernel.compiled == [(K, 1), (K, 2)]


def test_from_disk_is_not_compiled(h200: DeviceKey, kernel: StandIn) -> None:
    _activate(h200, 1)
    assert warmup.warm("test", PROBLEMS) == []
    assert kernel.compiled == [(K, 1)]


def test_only_the_rows_asked_for(h200: DeviceKey, kernel: StandIn) -> None:
    _activate(h200, 1, 2, 4)
    warmup.warm("test", PROBLEMS, ms=(2, 3, 99, 0))
    assert kernel.compiled == [(K, 2)]


def test_not_during_a_capture(h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    _activate(h200, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CompileForbiddenError, match="capture"):
        warmup.warm("test", PROBLEMS)
    assert kernel.compiled == []


def test_a_kernel_that_does_not_compile_is_noted_and_may_be_tried_again(
    h200: DeviceKey, kernel: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    _activate(h200, 1)
    kernel.on_disk, kernel.broken = False, RuntimeError("DSL is broken")
    assert warmup.warm("test", PROBLEMS) == []
    assert "DSL is broken" in caplog.text
    state = dispatch.family_state("test")
    assert state is not None
    verdict = state.choose(Problem(n=N, k=K), 1, 0)[1]
    assert (verdict.reason, verdict.detail) == (warmup.rules.Reason.KERNEL_UNAVAILABLE, "RuntimeError: DSL is broken")
    kernel.broken = None
    dispatch.activate_cells("test", h200, (cell(N, K, 1),))
    assert len(warmup.warm("test", PROBLEMS)) == 1


def test_workers_only_for_what_they_could_compile(
    h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(warmup, "prepare_in_parallel", lambda jobs, key, **_: asked.append(len(jobs)))
    kernel.on_disk = False
    for available, ms, workers in [
        (False, (1, 2, 3), None),
        (True, (1, 2), None),
        (True, (1, 2, 3), 0),
        (True, (1, 2, 3), None),
    ]:
        kernel.available = available
        dispatch.deactivate("test")
        _activate(h200, *ms)
        warmup.warm("test", PROBLEMS, workers=workers)
    assert asked == [3]


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/python"])
def test_workers_that_cannot_start_do_not_matter(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    warmup.prepare_in_parallel(_many(5000), product("h200"), prewait=False, workers=2)


def test_cells_of_an_epilogue_that_no_call_can_have_are_neither_compiled_nor_counted(
    h200: DeviceKey, kernel: StandIn
) -> None:
    cells = [cell(64, 64, 1), cell(64, 64, 1, epilogue=Epilogue.SILU_MUL), cell(64, 64, 1, epilogue=Epilogue.BIAS)]
    assert dispatch.activate_cells("test", h200, cells).wins == 1
    kernel.on_disk = False
    assert len(warmup.warm("test", [(64, 64, DType.BF16)])) == 1
    assert {problem.epilogue for _, problem, _ in dispatch.ready("test")} == {Epilogue.NONE}


def test_all_workers_run_at_once_however_long_their_shares_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other before it reads: a share sent through a pipe would block before the second starts."""
    script = tmp_path / "worker"
    script.write_text(
        "#!/bin/sh\n"
        f"touch {tmp_path}/started.$$\n"
        f"for _ in $(seq 100); do test $(ls {tmp_path}/started.* | wc -l) = 2 && break; sleep 0.1; done\n"
        f"test $(ls {tmp_path}/started.* | wc -l) = 2 && wc -l > {tmp_path}/read.$$\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    warmup.prepare_in_parallel(_many(5000), product("h200"), prewait=False, workers=2)
    assert [int(path.read_text()) for path in tmp_path.glob("read.*")] == [2500, 2500]


def test_machine_code_that_cells_share_is_one_job(
    h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring M of one config, and other N: workers that compile the same would only wait for each other."""
    mma = KernelConfig.of("bf16_mma", {"warps": 4, "parts": 2, "loads": 2, "unroll": 2})
    jobs = [(mma, Problem(n=n, k=4096), m) for n in (4096, 6144) for m in (2, 3, 7, 8)]
    unknown = (KernelConfig.of("no_such_kernel", {}), Problem(n=64, k=64), 1)
    refused = (KernelConfig.of("bf16_mma", {"warps": 77}), Problem(n=64, k=64), 1)
    kept = warmup.distinct([*jobs, *jobs, unknown, refused], h200, prewait=True)
    assert kept == [jobs[0], jobs[2], unknown, refused], "M of 1 to 4 rows and of 5 to 8 are two groups"

    shares: list[int] = []
    monkeypatch.setattr(warmup, "prepare_in_parallel", lambda jobs, key, **_: shares.append(len(jobs)))
    monkeypatch.setattr(StandIn, "codes", lambda *a, **k: frozenset({"one"}))
    _activate(h200, 1, 2, 3, 4)
    kernel.on_disk = False
    assert len(warmup.warm("test", PROBLEMS)) == 4
    assert shares == [], "one code is compiled here: no worker is started for it"


def test_a_warm_up_looks_at_the_shapes_it_is_given_however_large_the_plan(
    h200: DeviceKey, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(count: int) -> int:
        dispatch.deactivate("test")
        dispatch.activate_cells("test", h200, tuple(cell(N + i, K, m) for i in range(count) for m in range(1, 17)))
        state, calls = dispatch.family_state("test"), []
        assert state is not None
        real = type(state).choose
        with monkeypatch.context() as patch:
            patch.setattr(type(state), "choose", lambda *a: calls.append(a) or real(*a))
            warmup.warm("test", PROBLEMS)
        return len(calls)

    assert looked(60) == looked(1)
    assert set(kernel.compiled) == {(K, m) for m in range(1, 17)}


def test_worker_fills_the_disk_cache_without_a_gpu(tmp_path: Path, skinny: Callable[[str], None]) -> None:
    kernel = kernels.get("bf16_simt")
    ok, error = kernel.availability()
    if not ok:
        pytest.skip(error)
    skinny(f"cache={tmp_path}")
    key, problem = product("h200"), Problem(n=64, k=1024)
    config = SimtConfig(128, 1, 1, pdl=1)  # two forms: with a promise about the weight, and without
    params = kernel.params_of(config)
    assert not kernel.prepared(config, problem, 1, key, prewait=True)
    good = warmup.encode(KernelConfig.of("bf16_simt", params), problem, 1, key, True)
    lines: list[Any] = [
        good | {"kernel": "no_such_kernel"}, good | {"params": {"threads": 100, "rows": 1, "chunks": 1}}, good,
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "skinny_core.compile_worker"],
        input="{ this is no job\n\n" + "\n".join(map(json.dumps, lines)) + "\n",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    for says in ("JSONDecodeError", "unknown kernel 'no_such_kernel'", "threads is 100"):
        assert says in result.stderr
    assert kernel.prepared(config, problem, 1, key, prewait=True)
    assert kernel.prepared(config, problem, 1, key, prewait=False)
    assert not kernel.prepared(config, problem, 2, key, prewait=False)
    assert not kernel.prepared(config, problem, 1, product("h100-sxm"), prewait=False)
    assert len(list((tmp_path / "kernels").glob("*.o"))) == 2, "with and without the early read"
