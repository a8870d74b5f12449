"""`bf16_mma` compiled for three GPUs without one; its PTX and SASS read: loads, products, registers, the wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from skinny_core import env
from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_mma.config import (
    PART_REGISTERS,
    PARTS,
    MmaConfig,
    Spec,
    blocks_that_fit,
    m_tiles,
    register_limit,
    registers,
)
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import sass
from skinny_core.testing.sass import SassReport, assert_streaming, inspect


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


PROBLEM = Problem(n=8192, k=16384)
FP16 = {"weight": WeightScheme.FP16, "activation": DType.FP16, "output": DType.FP16}
# name: config, problem, M, prewait
SPREAD: dict[str, tuple[MmaConfig, Problem, int, bool]] = {
    "one wave M8": (MmaConfig(8, 4, 4), PROBLEM, 8, True),
    "one wave M16": (MmaConfig(8, 4, 4), PROBLEM, 16, True),
    "late": (MmaConfig(4, 2, 8), PROBLEM, 1, False),
    "runs, prefetch": (MmaConfig(8, 2, 4, 4, 0, 256), PROBLEM, 2, True),
    "sixteen warps": (MmaConfig(16, 2, 4), PROBLEM, 16, True),
    "sixteen warps, six tiles": (MmaConfig(16, 6, 2), PROBLEM, 4, True),
    "one step": (MmaConfig(4, 4, 1), PROBLEM, 16, True),
    "eight tiles M16": (MmaConfig(4, 8, 4), PROBLEM, 16, True),
    "most registers": (MmaConfig(4, 5, 8), PROBLEM, 8, True),
    "persistent M1": (MmaConfig(16, 1, 8, 1, 1), PROBLEM, 1, True),
    "persistent M16 late": (MmaConfig(8, 4, 4, 1, 1), PROBLEM, 16, False),
    "persistent, many blocks": (MmaConfig(4, 3, 2, 1, 4), PROBLEM, 8, True),
    "fp16 to fp32, residual": (
        MmaConfig(10, 2, 8),
        Problem(n=8192, k=5120, **FP16 | {"output": DType.FP32}, epilogue=Epilogue.RESIDUAL),
        9,
        True,
    ),
    "bias, one warp": (MmaConfig(1, 2, 2), Problem(n=64, k=512, epilogue=Epilogue.BIAS), 3, True),
}  # fmt: skip
ELSEWHERE = ["one wave M16", "persistent M1"]
WAIT = "griddepcontrol.wait"


def _check_order(binary: Binary, report: SassReport, *, prewait: bool) -> None:
    """What is read and written before and after the wait, and through which caches."""
    ptx = binary.ptx
    weights = [found.start() for found in re.finditer(r"ld\.global\.L1::no_allocate\S*\.v4\.b32", ptx)]
    others = [found.start() for found in re.finditer(r"ld\.global(?!\.L1::no_allocate)", ptx)]
    stores = [found.start() for found in re.finditer(r"st\.global", ptx)]
    assert weights
    assert others
    assert stores
    assert ".nc" not in ptx, "the non-coherent path may return what was there before the predecessor wrote"
    assert not re.search(r"\b(atom|red|multimem)\.", ptx), "atomics would make the sum depend on the schedule"
    assert ptx.count(WAIT) == 1
    wait = ptx.index(WAIT)
    assert wait < min(others), "the activation and the residual are the predecessor's output"
    assert wait < min(stores), "the predecessor may still be reading what is overwritten"
    assert (min(weights) < wait) is prewait
    assert "launch_dependents" not in ptx
    # The wait is on every path: no branch jumps over it.
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$?\w+):", ptx, re.MULTILINE)}
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$?\w+);", ptx):
        assert not jump.start() < wait < labels[jump[1]], f"{jump[0]} skips the wait"
    if not report.decoded:
        return
    opcodes = report.opcodes
    assert not [op for op in opcodes if re.match(r"(ATOM|ATOMG|RED|REDG)(\.|$)", op) or "CONSTANT" in op]
    places = [i for i, op in enumerate(opcodes) if op.startswith("ACQBULK")]
    assert len(places) == 1
    loads = [(i, op) for i, op in enumerate(opcodes) if op.startswith("LDG")]
    assert all(".NA" in op for i, op in loads if i < places[0])
    assert any(i < places[0] for i, _ in loads) is prewait
    assert all(i > places[0] for i, op in enumerate(opcodes) if op.startswith("STG"))


def _main_loop(cubin: bytes, folder: Path) -> list[str]:
    """Opcodes between the first label that a later branch jumps back to, and that branch."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    lines = sass._run("nvdisasm", "-c", path).stdout.splitlines()
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.startswith(".L_x_")}
    for at, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if target and labels[target[1]] < at - 1:
            return sass._OPCODE.findall("\n".join(lines[labels[target[1]] : at + 1]))
    raise AssertionError("no loop")


def _check_loop(loop: list[str], config: MmaConfig, m: int) -> int:
    """The main loop holds one round: its loads, its products, the assembly of the activation's operand, and little
    else. Returns the number of instructions."""
    tiles, unroll = config.tiles, config.unroll
    loads = [op for op in loop if op.startswith("LDG")]
    assert all(op.endswith(".128") for op in loads)
    assert sum(".NA" in op for op in loads) == tiles * unroll
    assert len(loads) == (tiles + m_tiles(m)) * unroll
    products = sum(op.startswith("HMMA") for op in loop)
    assert products == 2 * tiles * unroll
    # A step assembles two operands of four registers: eight operations, and one or two that ptxas adds. An address
    # takes two instructions a round, the counter and the branch five.
    other = len(loop) - len(loads) - products
    assert other <= 10 * unroll + 2 * (tiles + m_tiles(m)) + 8, f"{other} other instructions of {len(loop)}"
    return len(loop)


def _check(binary: Binary, report: SassReport, config: MmaConfig, problem: Problem, m: int) -> None:
    added = _outputs(config, m) if problem.adds else 0
    assert_streaming(report, narrow_loads=added, mma="HMMA.16816.F32")
    assert report.registers <= register_limit(config.warps)
    spec = Spec(config, m_tiles(m), "bf16", "bf16", residual=False, pdl=True, prewait=False)
    assert binary.shared_bytes == spec.shared_bytes <= 48 * 1024
    assert not report.decoded or spec.shared_bytes <= report.shared_bytes <= spec.shared_bytes + 1024
    # What the candidates and a persistent grid count on.
    warps = PART_REGISTERS // (-(-report.registers // 8) * 8) * PARTS
    resident = spec.resident_threads // config.threads
    assert warps // config.warps >= resident, f"{report.registers} registers, wanted {resident} blocks per SM"
    assert config.blocks_per_sm <= blocks_that_fit(config, m_tiles(m))


def _outputs(config: MmaConfig, m: int) -> int:
    return Spec(config, m_tiles(m), "bf16", "bf16", residual=True, pdl=True, prewait=False).outputs


def _compile_and_check(
    config: MmaConfig, problem: Problem, m: int, arch: str, *, prewait: bool
) -> tuple[Binary, SassReport]:
    assert KERNEL.refuses(config, problem, m) is None
    binary = KERNEL.cross_compile(config, problem, m, arch, prewait=prewait)
    report = inspect(binary.cubin, ptx=binary.ptx)
    assert re.search(r"^\.target (\S+)$", binary.ptx, re.MULTILINE)[1] == arch
    assert report.arch == arch
    assert report.decoded or report.note
    _check(binary, report, config, problem, m)
    _check_order(binary, report, prewait=prewait)
    return binary, report


@pytest.mark.parametrize("name", SPREAD)
def test_sm90(name: str, tmp_path: Path) -> None:
    config, problem, m, prewait = SPREAD[name]
    binary, report = _compile_and_check(config, problem, m, "sm_90a", prewait=prewait)
    assert report.decoded
    length = _check_loop(_main_loop(binary.cubin, tmp_path), config, m)
    print(f"{report.registers} registers, estimate {registers(config, m_tiles(m))}; {length} instructions a round")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_newer_gpus(name: str, arch: str) -> None:
    config, problem, m, prewait = SPREAD[name]
    _compile_and_check(config, problem, m, arch, prewait=prewait)


@pytest.mark.parametrize(("n", "k", "m"), [(4096, 4096, 16), (2560, 9728, 8)])
def test_candidates_fit(n: int, k: int, m: int) -> None:
    problem = Problem(n=n, k=k, epilogue=Epilogue.RESIDUAL)
    for config in KERNEL.candidates(problem, m)[::9]:
        try:
            _compile_and_check(config, problem, m, "sm_90a", prewait=True)
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from error


def test_one_binary_for_every_shape() -> None:
    """M up to 8, N and K are read at run time: nothing of them is in the code."""
    config = MmaConfig(4, 2, 2)
    first = KERNEL.cross_compile(config, Problem(n=64, k=256), 1, "sm_90a").ptx
    assert KERNEL.cross_compile(config, Problem(n=4097, k=12288), 8, "sm_90a").ptx == first
    assert KERNEL.cross_compile(config, Problem(n=4097, k=12288), 9, "sm_90a").ptx != first


def test_without_programmatic_launch_there_is_no_wait(skinny: Callable[[str], None]) -> None:
    skinny("pdl=off")
    assert not env.settings().pdl
    config, problem, m, _ = SPREAD["one wave M8"]
    assert "griddepcontrol" not in KERNEL.cross_compile(config, problem, m, "sm_90a", prewait=False).ptx
