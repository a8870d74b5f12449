"""Every candidate of `bf16_stream`, compiled for four architectures without a GPU, and its SASS read."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from skinny_core.device import DeviceKey
from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_stream.config import SHARED_BYTES, StreamConfig
from skinny_core.kernels.bf16_stream.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing.sass import SassReport, assert_before, assert_streaming, inspect

pytestmark = pytest.mark.triton("compiler")

DEVICES = {key.arch: key for key in (DeviceKey(capability, 132, 60 << 20, "141gb") for capability in SHARED_BYTES)}
# Matrix instruction by whether a tile has at least the 64 weight rows that the asynchronous tensor cores want.
MATRIX = {"sm_90a": ("HMMA", "HGMMA"), "sm_100a": ("HMMA", "UTCHMMA"), "sm_103a": ("HMMA", "UTCHMMA")}
PROBLEMS = {
    "8b-o": Problem(n=4096, k=4096),
    "fp16-tail-residual-fp32": Problem(
        n=151937, k=1000, weight=WeightScheme.FP16, activation=DType.FP16, output=DType.FP32, epilogue=Epilogue.RESIDUAL
    ),
}


def _problem(name: str, arch: str) -> Problem:
    base = PROBLEMS[name]
    return Problem(**{field: getattr(base, field) for field in base.__slots__} | {"device": DEVICES[arch]})


def _check(problem: Problem, arch: str, config: StreamConfig, binary: Binary, report: SassReport) -> None:
    assert re.search(r"^\.target (\S+)$", binary.ptx, re.MULTILINE)[1] == arch
    assert report.arch == arch
    assert report.decoded or (arch == "sm_103a" and report.note)
    # Per program a residual is read in pieces of one element: it is M x N, not worth a layout of its own.
    elements = 0 if problem.epilogue is Epilogue.NONE else config.block_n * 16 // (32 * config.num_warps)
    mma = MATRIX.get(arch, ("HMMA", "HMMA"))[config.block_n >= 64]
    assert_streaming(report, narrow_loads=elements, mma=mma)
    assert binary.shared_bytes <= config.tile_bytes + 16
    assert binary.shared_bytes + report.shared_bytes <= SHARED_BYTES[problem.device.capability] + 1024
    assert not re.search(r"\b(atom|red)\.", binary.ptx), "atomics would make the sum depend on the schedule"


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_stream(name: str, arch: str) -> None:
    problem = _problem(name, arch)
    configs = KERNEL.candidates(problem, 4)
    assert len(configs) >= (4 if arch == "sm_120a" else 10)
    compiled = []
    with ThreadPoolExecutor(1) as pool:  # the tools run beside the next compile
        for config in configs:
            binary = KERNEL.cross_compile(config, problem, 4, arch)
            compiled.append((config, binary, pool.submit(inspect, binary.cubin, ptx=binary.ptx)))
    for config, binary, report in compiled:
        try:
            _check(problem, arch, config, binary, report.result())
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from error


@pytest.mark.parametrize("arch", DEVICES)
def test_order_around_the_dependency_wait(arch: str) -> None:
    """The L2 request may come before the wait, the loads of both operands and of the residual never."""
    problem = _problem("fp16-tail-residual-fp32", arch)
    config = KERNEL.candidates(problem, 4)[-1]
    early = KERNEL.cross_compile(config, problem, 4, arch)
    report = inspect(early.cubin, ptx=early.ptx)
    if report.decoded:
        assert_before(report, "UBLKPF", "ACQBULK")
        assert_before(report, "ACQBULK", "LDGSTS")
        assert_before(report, "ACQBULK", "LDG.")
        assert_before(report, "ACQBULK", "STG")
    for text in (r"cp\.async\.c", r"\bld\.global", r"\bst\.global"):
        assert early.ptx.index("griddepcontrol.wait") < re.search(text, early.ptx).start(), text
    late = KERNEL.cross_compile(config, problem, 4, arch, prewait=False)
    assert "prefetch" in early.ptx
    assert "prefetch" not in late.ptx
    assert "griddepcontrol.wait" in late.ptx
    assert "launch_dependents" not in early.ptx


def test_offsets_of_large_weights_are_64_bit() -> None:
    """Row times stride passes 2**31 elements for the largest LM heads: the product must be 64 bits wide."""
    problem = _problem("8b-o", "sm_90a")
    ptx = KERNEL.cross_compile(KERNEL.candidates(problem, 1)[-1], problem, 1, "sm_90a").ptx
    for position in (7, 8):  # stride_x, stride_w
        register = re.search(rf"ld\.param\.\w*64\s+(%rd\d+), \[stream_kernel_param_{position}\]", ptx)[1]
        assert re.search(rf"(mul|mad)\.lo\.s64[^;]*{register}\b", ptx), position
