"""`bf16_simt` compiled for four GPUs without one; its PTX and SASS read: loads, registers, order at the wait."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from skinny_core import env, family, plan
from skinny_core.kernels import Binary, bf16_simt, cute_objects
from skinny_core.kernels.bf16_simt.config import SimtConfig
from skinny_core.kernels.bf16_simt.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing.sass import SassReport, assert_streaming, inspect


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


FP16 = {"weight": WeightScheme.FP16, "activation": DType.FP16, "output": DType.FP16}
# name: config, problem, M, prewait
SPREAD: dict[str, tuple[SimtConfig, Problem, int, bool]] = {
    "resident M1": (SimtConfig(128, 2, 4, pdl=1), Problem(n=4096, k=4096), 1, True),
    "resident M1 late": (SimtConfig(128, 2, 4, pdl=1), Problem(n=4096, k=4096), 1, False),
    "resident M2, K tail inside a chunk": (SimtConfig(128, 2, 4, pdl=1), Problem(n=4097, k=4088), 2, True),
    "streaming M4 with tail, ordinary launch": (SimtConfig(256, 2, 2), Problem(n=4096, k=9736), 4, False),
    "streaming M3 late, no power of two": (SimtConfig(160, 2, 2, pdl=1), Problem(n=4096, k=12800), 3, False),
    "persistent M1": (SimtConfig(256, 2, 2, 4, 256, pdl=1), Problem(n=24576, k=4096), 1, True),
    "persistent M4 late": (SimtConfig(128, 1, 4, 8, pdl=1), Problem(n=151936, k=4096), 4, False),
    "M16, ordinary launch": (SimtConfig(512, 1, 1), Problem(n=4096, k=4096), 16, False),
    "fp16 to fp32, residual, M2": (
        SimtConfig(320, 4, 1, pdl=1),
        Problem(n=5120, k=2560, **FP16 | {"output": DType.FP32}, epilogue=Epilogue.RESIDUAL),
        2,
        True,
    ),
    "fp16 M1 tiny K": (SimtConfig(32, 1, 1, pdl=1), Problem(n=7, k=8, **FP16), 1, True),
    "largest blocks M4": (SimtConfig(1024, 2, 1, pdl=1), Problem(n=4096, k=8192), 4, True),
}  # fmt: skip
ELSEWHERE = ["persistent M1", "streaming M4 with tail, ordinary launch", "fp16 to fp32, residual, M2"]
WAIT = "griddepcontrol.wait"


def _weight_loads(ptx: str) -> list[int]:
    return [found.start() for found in re.finditer(r"ld\.global\.L1::no_allocate\S*\.v4\.b32", ptx)]


def _other_loads(ptx: str) -> list[int]:
    return [found.start() for found in re.finditer(r"ld\.global(?!\.L1::no_allocate)", ptx)]


def _check(binary: Binary, report: SassReport, config: SimtConfig, problem: Problem, m: int, *, prewait: bool) -> None:
    ptx = binary.ptx
    residual = problem.epilogue is Epilogue.RESIDUAL
    assert_streaming(report, narrow_loads=2 * residual)
    assert report.registers <= 255
    assert report.registers * config.threads <= 65536
    assert binary.shared_bytes <= 48 * 1024
    weights = _weight_loads(ptx)
    assert weights
    assert _other_loads(ptx)
    assert "st.global" in ptx
    assert ".nc" not in ptx, "the non-coherent path may return what was there before the predecessor wrote"
    assert not re.search(r"\b(atom|red|multimem)\.", ptx), "atomics would make the sum depend on the schedule"
    if report.decoded:
        opcodes = report.opcodes
        assert sum(op.startswith("LDG.E.NA") and op.endswith(".128") for op in opcodes) >= len(weights)
        assert not [op for op in opcodes if re.match(r"(ATOM|ATOMG|RED|REDG)(\.|$)", op) or "CONSTANT" in op]
    if config.pdl:
        _check_order(binary, report, prewait=prewait)
    else:
        assert "griddepcontrol" not in ptx, "an ordinary launch has nothing to wait for"
        assert not [op for op in report.opcodes if op.startswith("ACQBULK")]


def _check_order(binary: Binary, report: SassReport, *, prewait: bool) -> None:
    """What is read and written before and after the wait."""
    ptx = binary.ptx
    weights, others = _weight_loads(ptx), _other_loads(ptx)
    stores = [found.start() for found in re.finditer(r"st\.global", ptx)]
    assert ptx.count(WAIT) == 1
    wait = ptx.index(WAIT)
    assert wait < min(others), "the activation and the residual are the predecessor's output"
    assert wait < min(stores), "the predecessor may still be reading what is overwritten"
    assert (min(weights) < wait) is prewait
    if trigger := [found.start() for found in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]:
        assert min(trigger) > max(stores)
    # The wait is on every path: no branch jumps over it.
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$?\w+):", ptx, re.MULTILINE)}
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$?\w+);", ptx):
        assert not jump.start() < wait < labels[jump[1]], f"{jump[0]} skips the wait"
    if not report.decoded:
        return
    opcodes = report.opcodes
    places = [i for i, op in enumerate(opcodes) if op.startswith("ACQBULK")]
    assert len(places) == 1
    loads = [(i, op) for i, op in enumerate(opcodes) if op.startswith("LDG")]
    assert all(".NA" in op for i, op in loads if i < places[0])
    assert any(i < places[0] for i, _ in loads) is prewait
    assert all(i > places[0] for i, op in enumerate(opcodes) if op.startswith("STG"))


def _compile_and_check(config: SimtConfig, problem: Problem, m: int, arch: str, *, prewait: bool) -> SassReport:
    assert KERNEL.refuses(config, problem, m) is None
    binary = KERNEL.cross_compile(config, problem, m, arch, prewait=prewait)
    report = inspect(binary.cubin, ptx=binary.ptx)
    assert re.search(r"^\.target (\S+)$", binary.ptx, re.MULTILINE)[1] == arch
    assert report.arch == arch
    assert report.decoded or report.note
    _check(binary, report, config, problem, m, prewait=prewait)
    return report


@pytest.mark.parametrize("name", SPREAD)
def test_sm90(name: str) -> None:
    config, problem, m, prewait = SPREAD[name]
    assert _compile_and_check(config, problem, m, "sm_90a", prewait=prewait).decoded


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("name", ELSEWHERE[:2])
def test_newer_gpus(name: str, arch: str) -> None:
    config, problem, m, prewait = SPREAD[name]
    _compile_and_check(config, problem, m, arch, prewait=prewait)


def test_without_programmatic_launch_there_is_no_wait(skinny: Callable[[str], None]) -> None:
    skinny("pdl=off")
    assert not env.settings().pdl
    config, problem, m, _ = SPREAD["resident M1"]
    assert config.pdl
    assert "griddepcontrol" not in KERNEL.cross_compile(config, problem, m, "sm_90a", prewait=False).ptx


def test_a_config_without_pdl_is_one_form_without_a_wait() -> None:
    config, problem, m, _ = SPREAD["resident M1"]
    ordinary = replace(config, pdl=0)
    late, early = (KERNEL.cross_compile(ordinary, problem, m, "sm_90a", prewait=early).ptx for early in (False, True))
    assert late == early
    assert "griddepcontrol" not in late


def _shipped() -> list[tuple[str, plan.Cell, str]]:
    """One cell for each form of the machine code: N is read at run time, and K counts by how it fills a fragment."""
    found: dict[tuple[object, ...], tuple[str, plan.Cell, str]] = {}
    for package in family.discover().packages:
        for loaded in map(plan.load, package.plan_files()):
            for cell in loaded.cells:
                if cell.status == "win" and cell.kernel == KERNEL.stem:
                    arch, config = loaded.key.arch, KERNEL.config_from(cell.config)
                    spec = KERNEL.spec(config, cell.problem(None), cell.m, pdl=True)
                    part = spec.chunks, spec.full_chunks, spec.resident, spec.tail_chunks, spec.tail_full
                    name = f"{package.name}:{cell.id}"
                    found.setdefault((arch, replace(spec, k=0), *part), (name, cell, arch))
    return list(found.values())


def test_shipped_cells() -> None:
    """Every form of every `win` cell of this kernel; that there are any, the packages' tests say."""
    for name, cell, arch in _shipped():
        try:
            _compile_and_check(KERNEL.config_from(cell.config), cell.problem(None), cell.m, arch, prewait=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_dsl_without_something_we_use_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass.cute.nvgpu as nvgpu

    monkeypatch.delattr(nvgpu, "CopyG2ROp")
    monkeypatch.delitem(sys.modules, "skinny_core.kernels.bf16_simt.kernel", raising=False)
    monkeypatch.delattr(bf16_simt, "kernel", raising=False)
    cute_objects.availability.cache_clear()
    try:
        ok, error = KERNEL.availability()
        assert not ok
        assert "CopyG2ROp" in error
    finally:
        cute_objects.availability.cache_clear()
        sys.modules.pop("skinny_core.kernels.bf16_simt.kernel", None)
