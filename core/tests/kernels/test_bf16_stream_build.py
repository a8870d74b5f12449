"""How `bf16_stream` is compiled, kept on disk and launched, without a GPU: the launch itself is recorded, not made."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import cache, env, kernels
from skinny_core.device import product
from skinny_core.errors import KernelRefusedError
from skinny_core.kernels import triton_objects
from skinny_core.kernels.bf16_stream import build, host
from skinny_core.kernels.bf16_stream.config import Spec, StreamConfig
from skinny_core.problem import Epilogue, Problem

pytestmark = pytest.mark.triton("compiler")

KERNEL = host.KERNEL
CONFIG = StreamConfig(block_n=16, block_k=64, num_warps=2, num_stages=2)
PROBLEM = Problem(n=32, k=64)
H200 = product("h200")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache of this test's own."""
    monkeypatch.setenv("SKINNY", f"cache={tmp_path}")
    env.reload()
    triton_objects.load.cache_clear()
    yield tmp_path / "kernels"
    monkeypatch.undo()
    env.reload()
    triton_objects.load.cache_clear()


def test_the_registry_finds_it_and_triton_works_here() -> None:
    assert kernels.get("bf16_stream") is KERNEL
    assert KERNEL.availability() == (True, "")


def test_availability_is_the_original_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "skinny_core.kernels.bf16_stream.kernel", None)
    monkeypatch.delattr(__import__("skinny_core.kernels.bf16_stream", fromlist=["kernel"]), "kernel", raising=False)
    available, text = host._availability.__wrapped__()
    assert not available
    assert "skinny_core.kernels.bf16_stream.kernel" in text


def test_prepare_once_serves_every_m_and_the_next_process(cache_folder: Path) -> None:
    before = cache.COUNTS.compiled
    assert not KERNEL.prepared(CONFIG, PROBLEM, 1, H200, prewait=True)
    KERNEL.prepare(CONFIG, PROBLEM, 1, H200, prewait=True)
    assert cache.COUNTS.compiled == before + 2
    assert len(list(cache_folder.glob("*.o"))) == 2
    wider = Problem(n=4096, k=128)
    for m, problem in ((1, PROBLEM), (16, PROBLEM), (3, wider)):
        assert KERNEL.prepared(CONFIG, problem, m, H200, prewait=True)
        KERNEL.prepare(CONFIG, problem, m, H200, prewait=True)
    assert not KERNEL.prepared(CONFIG, Problem(n=32, k=72), 1, H200, prewait=True), "a K tail is other code"
    assert cache.COUNTS.compiled == before + 2


def test_loads_what_was_stored_and_sets_aside_what_it_cannot_read(cache_folder: Path) -> None:
    spec = Spec.of(CONFIG, PROBLEM, pdl=True, prefetch=False)
    path = triton_objects.stored(build.SOURCE, spec, H200)
    restored = triton_objects.load(build.SOURCE, spec, H200, 0)
    assert restored.asm["cubin"] == triton_objects.compile_for(build.SOURCE, spec, 90)[".cubin"]
    assert restored.metadata.launch_pdl
    assert restored.metadata.num_warps == CONFIG.num_warps
    triton_objects.load.cache_clear()
    path.write_bytes(b"not an archive")
    path.with_suffix(".json").write_text(
        path.with_suffix(".json").read_text().replace('"sha256"', '"sha256": "", "was"'), encoding="utf-8"
    )
    with pytest.warns(RuntimeWarning, match="set aside"):
        again = triton_objects.load(build.SOURCE, spec, H200, 0)
    assert again.asm["cubin"] == restored.asm["cubin"]


def test_pdl_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {s.pdl for s in host._specs(CONFIG, PROBLEM, H200, prewait=True)} == {True}
    monkeypatch.setenv("SKINNY", f"cache={tmp_path},pdl=off")
    env.reload()
    (spec,) = host._specs(CONFIG, PROBLEM, H200, prewait=True)
    assert not spec.pdl
    assert "griddepcontrol" not in triton_objects.binary(build.SOURCE, spec, 90).ptx


class _Recorded:
    """Stands for a CompiledKernel: remembers grid and arguments instead of launching."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        from skinny_core.kernels.bf16_stream.kernel import stream_kernel

        def run(*arguments: int, stream: int) -> None:
            named = dict(zip(stream_kernel.arg_names, arguments, strict=True))
            self.calls.append(named | {"grid": grid, "stream": stream})

        return run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[bool, _Recorded]:
    """The two binaries that launchers of this test get, by whether they prefetch."""
    made: dict[bool, _Recorded] = {}

    def load(source, spec: Spec, key: Any, index: int) -> _Recorded:
        return made.setdefault(spec.prefetch, _Recorded(spec))

    monkeypatch.setattr(triton_objects, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


def _tensors(m: int, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (m, problem.k), (problem.n, problem.k), (m, problem.n)
    x, w, y = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    return x, w, y


def test_arguments_are_in_the_order_of_the_kernel(recorded: dict[bool, _Recorded]) -> None:
    problem = Problem(n=40, k=64, epilogue=Epilogue.RESIDUAL)
    launch = host._GpuLauncher(CONFIG, problem, H200, 0, prewait=True)
    x, w, y = _tensors(3, problem)
    residual = torch.zeros(3, 40)
    for prewait in (False, True):
        launch(x, w, y, residual, 72, 48, 56, prewait)
        (call,) = recorded[prewait].calls
        assert call == recorded[prewait].spec.constants | {
            "x": x.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr(), "residual": residual.data_ptr(),
            "M": 3, "N": 40, "K": 64, "stride_x": 72, "stride_w": 64, "stride_y": 48, "stride_r": 56,
            "PREFETCH": False, "grid": (3, 1, 1), "stream": 77,
        }  # fmt: skip


def test_kernel_signature_matches_the_constants() -> None:
    from skinny_core.kernels.bf16_stream.kernel import stream_kernel

    constants = Spec.of(CONFIG, PROBLEM, pdl=True, prefetch=True).constants
    names = [name for name in inspect.signature(stream_kernel.fn).parameters if name.isupper() and len(name) > 1]
    assert names == list(constants)


def test_without_the_promise_both_forms_wait_first(recorded: dict[bool, _Recorded]) -> None:
    launch = host._GpuLauncher(CONFIG, PROBLEM, H200, 0, prewait=False)
    launch(*_tensors(2, PROBLEM), None, 64, 32, 0, True)
    assert list(recorded) == [False]
    assert len(recorded[False].calls) == 1


def test_unaligned_operands_never_reach_the_device(recorded: dict[bool, _Recorded]) -> None:
    launch = host._GpuLauncher(CONFIG, PROBLEM, H200, 0, prewait=True)
    x, w, y = _tensors(2, PROBLEM)
    shifted = torch.zeros(2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 64)
    with pytest.raises(KernelRefusedError):
        launch(shifted, w, y, None, 64, 32, 0, False)
    with pytest.raises(KernelRefusedError):
        launch(x, w, y, None, 68, 32, 0, False)
    with pytest.raises(KernelRefusedError):
        launch(x[:0], w, y[:0].bfloat16(), None, 64, 32, 0, False)
    assert not any(binary.calls for binary in recorded.values())
