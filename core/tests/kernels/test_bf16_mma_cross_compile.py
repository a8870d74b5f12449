"""`bf16_mma` compiled for three GPUs without one; its PTX and SASS read: loads, products, registers, the wait."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from skinny_core import env
from skinny_core.kernels import Binary, cute_objects
from skinny_core.kernels.bf16_mma import config as predicates
from skinny_core.kernels.bf16_mma.config import ALLOWED, SCHEDULERS, SM_REGISTERS, WARP, MmaConfig, Spec, register_limit
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing import sass
from skinny_core.testing.sass import SassReport, assert_streaming, inspect


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


PROBLEM = Problem(n=8192, k=4096)
GATED = replace(PROBLEM, epilogue=Epilogue.SILU_MUL)
ADDED = replace(PROBLEM, epilogue=Epilogue.RESIDUAL)
FP16 = {"weight": WeightScheme.FP16, "activation": DType.FP16, "output": DType.FP16}
# name: config, problem, M, prewait
SPREAD: dict[str, tuple[MmaConfig, Problem, int, bool]] = {
    "eight parts": (MmaConfig(8, 8, 2, 2, 1, 4), PROBLEM, 1, False),
    "eight parts M2, pdl": (MmaConfig(8, 8, 2, 2, 1, 3, 1), PROBLEM, 2, True),
    "four parts, tail": (MmaConfig(5, 4, 2, 4, 1, 4), PROBLEM, 2, False),
    "four parts, tail, pdl": (MmaConfig(5, 4, 2, 4, 1, 3, 1), PROBLEM, 2, True),
    "two parts M4, pdl late": (MmaConfig(8, 2, 2, 2, 1, 4, 1), PROBLEM, 4, False),
    "two parts M8": (MmaConfig(8, 2, 3, 2, 1, 2), PROBLEM, 8, False),
    "two parts M16": (MmaConfig(4, 2, 6, 2, 2, 3), PROBLEM, 16, False),
    "two parts M16, pdl": (MmaConfig(8, 2, 4, 2, 2, 1, 1), PROBLEM, 16, True),
    "deep M16": (MmaConfig(8, 2, 4, 4, 2, 1), PROBLEM, 16, False),
    "one part": (MmaConfig(4, 1, 2, 4, 1, 4), PROBLEM, 8, False),
    "M32": (MmaConfig(8, 2, 2, 2, 1, 1), PROBLEM, 32, False),
    "sixteen warps": (MmaConfig(16, 2, 2, 2, 2, 1), PROBLEM, 8, False),
    "most warps": (MmaConfig(32, 2, 2, 1, 1, 1), Problem(n=8192, k=12288), 4, False),
    "one step": (MmaConfig(4, 2, 4, 1, 1, 2), PROBLEM, 8, False),
    "K of one piece, pdl": (MmaConfig(4, 2, 2, 4, 1, 2, 1), Problem(n=64, k=8), 3, True),
    "fp16 to fp32, residual, pdl": (
        MmaConfig(10, 2, 2, 4, 1, 1, 1),
        Problem(n=8192, k=5120, **FP16 | {"output": DType.FP32}, epilogue=Epilogue.RESIDUAL),
        9,
        True,
    ),
    "bias, one warp": (MmaConfig(1, 2, 2, 2), Problem(n=64, k=512, epilogue=Epilogue.BIAS), 3, False),
    "gated": (MmaConfig(8, 2, 4, 2, 2, 1), GATED, 8, False),
    "gated, eight parts, pdl": (MmaConfig(8, 8, 2, 2, 1, 2, 1), GATED, 1, True),
}  # fmt: skip
ELSEWHERE = ["eight parts", "two parts M16, pdl"]
WAIT = "griddepcontrol.wait"


def _check_order(binary: Binary, report: SassReport, spec: Spec) -> None:
    """What is read and written before and after the wait, and through which caches."""
    ptx = binary.ptx
    weights = [found.start() for found in re.finditer(r"ld\.global\.L1::no_allocate\S*\.v4\.b32", ptx)]
    others = [found.start() for found in re.finditer(r"ld\.global(?!\.L1::no_allocate)", ptx)]
    stores = [found.start() for found in re.finditer(r"st\.global", ptx)]
    assert weights
    assert others
    assert stores
    kept = [load for load in re.findall(r"ld\.global\S*\.v4\.b32", ptx) if "no_allocate" not in load]
    assert kept
    assert all("L1::evict_last" in load for load in kept), "every block reads the activation again: it stays in L1"
    assert ".nc" not in ptx, "the non-coherent path may return what was there before the predecessor wrote"
    assert not re.search(r"\b(atom|red|multimem)\.", ptx), "atomics would make the sum depend on the schedule"
    assert "launch_dependents" not in ptx
    opcodes = report.opcodes
    assert not [op for op in opcodes if re.match(r"(ATOM|ATOMG|RED|REDG)(\.|$)", op) or "CONSTANT" in op]
    places = [i for i, op in enumerate(opcodes) if op.startswith("ACQBULK")]
    if not spec.pdl:
        assert "griddepcontrol" not in ptx, "an ordinary launch has nothing to wait for"
        assert not places
        return
    assert ptx.count(WAIT) == 1
    wait = ptx.index(WAIT)
    assert wait < min(others), "the activation and the residual are the predecessor's output"
    assert wait < min(stores), "the predecessor may still be reading what is overwritten"
    assert (min(weights) < wait) is spec.prewait
    # The wait is on every path: no branch jumps over it.
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$?\w+):", ptx, re.MULTILINE)}
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$?\w+);", ptx):
        assert not jump.start() < wait < labels[jump[1]], f"{jump[0]} skips the wait"
    if not report.decoded:
        return
    assert len(places) == 1
    loads = [(i, op) for i, op in enumerate(opcodes) if op.startswith("LDG")]
    early = [op for i, op in loads if i < places[0]]
    assert all(".NA" in op for op in early)
    assert len(early) == (_first_round(spec) if spec.prewait else 0)
    assert all(i > places[0] for i, op in enumerate(opcodes) if op.startswith("STG"))


def _first_round(spec: Spec) -> int:
    """Weight loads that a warp has in flight before it multiplies."""
    return spec.config.loads * min(spec.config.unroll, spec.steps)


def _weight_loads_before_the_first_product(report: SassReport) -> int:
    first = next(i for i, op in enumerate(report.opcodes) if op.startswith("HMMA"))
    return sum(op.startswith("LDG") and ".NA" in op for op in report.opcodes[:first])


def _check_loads(report: SassReport, spec: Spec) -> None:
    """Every load is there once, and a whole round of them is on its way before anything waits for one."""
    if not report.decoded:
        return
    config = spec.config
    loads = [op for op in report.opcodes if op.startswith("LDG")]
    wide = [op for op in loads if op.endswith(".128")]
    weights = [op for op in loads if ".NA" in op]
    assert set(weights) <= set(wide)
    early, wanted = _weight_loads_before_the_first_product(report), _first_round(spec)
    assert early >= wanted, f"loads sank to their use: {early} of {wanted} before the first product"
    # Before the loop, in it, and after it: steps are written out where they are not a round of the loop. The loop is
    # there where it runs no round.
    after = spec.steps - spec.rounds * config.unroll
    ring = {"weight": config.unroll, "activation": config.ahead}
    steps = {name: min(d, spec.steps) + config.unroll + max(0, after - d) for name, d in ring.items()}
    assert len(weights) == config.loads * steps["weight"]
    assert len(wide) - len(weights) == spec.groups * steps["activation"]
    products = sum(op.startswith("HMMA") for op in report.opcodes)
    assert products == 2 * spec.tiles * config.loads * (config.unroll + after)


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


def _check_loop(loop: list[str], spec: Spec) -> dict[str, int]:
    """The main loop holds one round: its loads, its products, the assembly of the activation's operands, and little
    else. Returns the number of instructions of each kind."""
    config = spec.config
    loads = [op for op in loop if op.startswith("LDG")]
    assert all(op.endswith(".128") for op in loads)
    weights = sum(".NA" in op for op in loads)
    assert weights == config.loads * config.unroll
    assert len(loads) == (config.loads + spec.groups) * config.unroll
    products = sum(op.startswith("HMMA") for op in loop)
    assert products == 2 * spec.tiles * config.loads * config.unroll
    # A tile of a step assembles two operands of four registers: eight operations, and one or two that ptxas adds. An
    # address takes two instructions a round, the counter and the branch five; a few more come and go.
    other = len(loop) - len(loads) - products
    limit = 10 * spec.tiles * config.unroll + 2 * (config.loads + spec.groups) + 16
    assert other <= limit, f"{other} other instructions of {len(loop)}, expected {limit}"
    return {"total": len(loop), "weight": weights, "activation": len(loads) - weights, "HMMA": products, "other": other}


def _check(binary: Binary, report: SassReport, spec: Spec) -> None:
    config = spec.config
    assert_streaming(report, narrow_loads=spec.outputs if spec.epilogue == "add" else 0, mma="HMMA.16816.F32")
    assert binary.shared_bytes == spec.shared_bytes <= 48 * 1024
    assert not report.decoded or spec.shared_bytes <= report.shared_bytes <= spec.shared_bytes + 1024
    assert report.registers <= register_limit(config)
    # What `blocks` promises: a part of the SM deals out its registers by warps, in eights a thread.
    warps = SM_REGISTERS // SCHEDULERS // WARP // (-(-report.registers // 8) * 8) * SCHEDULERS
    assert warps // config.warps >= config.blocks, f"{report.registers} registers, wanted {config.blocks} blocks per SM"


def _compile_and_check(
    config: MmaConfig, problem: Problem, m: int, arch: str, *, prewait: bool
) -> tuple[Binary, SassReport, Spec]:
    assert KERNEL.refuses(config, problem, m) is None
    binary = KERNEL.cross_compile(config, problem, m, arch, prewait=prewait)
    report = inspect(binary.cubin, ptx=binary.ptx)
    spec = KERNEL.spec(config, problem, m, pdl=True)
    spec = replace(spec, prewait=prewait and spec.pdl)
    assert re.search(r"^\.target (\S+)$", binary.ptx, re.MULTILINE)[1] == arch
    assert report.arch == arch
    assert report.decoded or report.note
    _check(binary, report, spec)
    _check_loads(report, spec)
    _check_order(binary, report, spec)
    return binary, report, spec


@pytest.mark.parametrize("name", SPREAD)
def test_sm90(name: str, tmp_path: Path) -> None:
    config, problem, m, prewait = SPREAD[name]
    binary, report, spec = _compile_and_check(config, problem, m, "sm_90a", prewait=prewait)
    assert report.decoded
    counts = _check_loop(_main_loop(binary.cubin, tmp_path), spec)
    estimate = predicates.registers(config, spec.groups, tail=spec.tail)
    print(f"{report.registers} registers, estimate {estimate}, limit {register_limit(config)}; a round: {counts}")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_newer_gpus(name: str, arch: str) -> None:
    config, problem, m, prewait = SPREAD[name]
    _compile_and_check(config, problem, m, arch, prewait=prewait)


def _spill(cases: list[tuple[MmaConfig, Problem, int]], most: int) -> None:
    """No config spills more than that many bytes."""
    failed = []
    for config, problem, m in cases:
        assert KERNEL.refuses(config, problem, m) is None
        binary = KERNEL.cross_compile(config, problem, m, "sm_90a")
        report = inspect(binary.cubin, ptx=binary.ptx)
        assert report.registers <= register_limit(config)
        if report.stack_bytes > most:
            failed.append(f"{config}, {problem}, M = {m}: {report.stack_bytes} bytes of stack")
    assert not failed, "\n".join(failed)


A_LITTLE, AT_MOST = 32, 128
"""Bytes of stack. `registers` is an estimate: what it lets through may spill a little, which a race shows, but never
its fragments. What ships spills nothing (test_shipped_configs)."""


@pytest.mark.parametrize(
    ("m", "k"), [(1, 4096), (4, 4096), (8, 4096), (16, 4096), (1, 2560), (4, 2560), (8, 2560), (16, 2560)]
)
def test_candidates_fit(m: int, k: int) -> None:
    """Every fourth, another one for each M and K."""
    problem = Problem(n=8192, k=k)
    some = KERNEL.candidates(problem, m)[(m + k // 512) % 4 :: 4]
    _spill([(config, problem, m) for config in some], A_LITTLE)


@pytest.mark.parametrize("epilogue", [Epilogue.RESIDUAL, Epilogue.SILU_MUL])
def test_candidates_fit_with_an_epilogue(epilogue: Epilogue) -> None:
    cases = []
    for m, k in ((2, 4096), (4, 9728), (8, 2560), (16, 9728)):
        problem = Problem(n=8192, k=k, epilogue=epilogue)
        cases += [(config, problem, m) for config in KERNEL.candidates(problem, m)[::5]]
    _spill(cases, A_LITTLE)


def test_what_is_accepted_near_the_limit_fits() -> None:
    """`registers` is an estimate; a sample of the configs that it only just lets through."""
    dice = random.Random(3)
    cases: list[tuple[MmaConfig, Problem, int]] = []
    while len(cases) < 24:
        config = MmaConfig(**{name: dice.choice(values) for name, values in ALLOWED.items() if name != "pdl"})
        problem = Problem(n=8192, k=dice.choice((4096, 2560, 9728, 5120, 4104)), epilogue=dice.choice(list(Epilogue)))
        m = dice.choice((1, 2, 4, 8, 12, 16))
        if KERNEL.refuses(config, problem, m) is None:
            spec = KERNEL.spec(config, problem, m, pdl=False)
            room = register_limit(config) - predicates.registers(config, spec.groups, tail=spec.tail)
            cases += [(config, problem, m)] * (room < 20)
    _spill(cases, AT_MOST)


def test_one_binary_for_every_n_and_the_m_of_as_many_groups() -> None:
    """N and M are read at run time: nothing of them is in the code."""
    config = MmaConfig(4, 2, 2, 2)
    first = KERNEL.cross_compile(config, Problem(n=64, k=1024), 5, "sm_90a").ptx
    assert KERNEL.cross_compile(config, Problem(n=4097, k=1024), 8, "sm_90a").ptx == first
    assert KERNEL.cross_compile(config, Problem(n=4097, k=1024), 4, "sm_90a").ptx != first
    assert KERNEL.cross_compile(config, Problem(n=64, k=1032), 5, "sm_90a").ptx != first


def test_without_programmatic_launch_there_is_no_wait(skinny: Callable[[str], None]) -> None:
    """A config that asks for it then is the same code as one that does not."""
    config, problem, m, _ = SPREAD["two parts M16, pdl"]
    asked = KERNEL.cross_compile(config, problem, m, "sm_90a", prewait=False).ptx
    ordinary = KERNEL.cross_compile(replace(config, pdl=0), problem, m, "sm_90a").ptx
    skinny("pdl=off")
    assert not env.settings().pdl
    refused = KERNEL.cross_compile(config, problem, m, "sm_90a").ptx
    assert WAIT in asked
    assert "griddepcontrol" not in ordinary
    assert "griddepcontrol" not in refused


def _changed(old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernel with one text replaced; a file of its own, since the DSL reads the source."""
    text = Path(str(cute_objects._module(KERNEL.source).__file__)).read_text()
    assert text.count(old) == 1
    path = folder / "changed_bf16_mma.py"
    path.write_text(text.replace(old, new))
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made
    assert made.loader
    module = importlib.util.module_from_spec(made)
    monkeypatch.setitem(sys.modules, path.stem, module)
    made.loader.exec_module(module)
    return module


SINKS = MmaConfig(8, 2, 4, 4, 2, 1), Problem(n=8192, k=2560), 8


def test_a_count_that_the_compiler_knows_would_sink_the_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check above has teeth: the same kernel without the loop that keeps the first round's loads together."""
    config, problem, m = SINKS
    _compile_and_check(config, problem, m, "sm_90a", prewait=False)
    module = _changed("spec.rounds + Int32(zero), unroll=1", "spec.rounds, unroll=1", tmp_path, monkeypatch)
    monkeypatch.setattr(cute_objects, "_module", lambda source: module)
    with pytest.raises(AssertionError, match="loads sank to their use"):
        _compile_and_check(config, problem, m, "sm_90a", prewait=False)
