"""`bf16_bulk` compiled for four GPUs without one, and its SASS read: bulk copies, tensor cores, nothing spilled."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from skinny_core.kernels.bf16_bulk.config import BulkConfig
from skinny_core.kernels.bf16_bulk.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme
from skinny_core.testing.sass import SassReport, assert_streaming, inspect


@pytest.fixture(autouse=True)
def _dsl() -> None:
    ok, error = KERNEL.availability()  # imports the DSL: not while tests are collected
    if not ok:
        pytest.skip(f"no CuTe DSL: {error}")


PROBLEM = Problem(n=4096, k=4096)
FP16 = {"weight": WeightScheme.FP16, "activation": DType.FP16, "output": DType.FP16}
# name: config, problem, M
SPREAD: dict[str, tuple[BulkConfig, Problem, int]] = {
    "M8": (BulkConfig(32, 512, 8), PROBLEM, 8),
    "M16, four tiles": (BulkConfig(64, 512, 8), PROBLEM, 16),
    "M16, one block fewer registers": (BulkConfig(16, 1024, 4), PROBLEM, 16),
    "resident M1, two blocks": (BulkConfig(16, 512, 8, 2, 1), PROBLEM, 1),
    "resident M16, gated": (BulkConfig(32, 256, 8, 1, 1), replace(PROBLEM, epilogue=Epilogue.SILU_MUL), 16),
    "fp16 to fp32, residual": (
        BulkConfig(64, 256, 4, 2),
        Problem(n=5120, k=2560, **FP16 | {"output": DType.FP32}, epilogue=Epilogue.RESIDUAL),
        2,
    ),
    "16 warps": (BulkConfig(32, 512, 16), PROBLEM, 4),
    "everything on": (BulkConfig(32, 512, 8, 1, 1, 1, 1, 1), PROBLEM, 4),
}  # fmt: skip


def _check(name: str, arch: str, *, prewait: bool) -> SassReport:
    config, problem, m = SPREAD[name]
    assert KERNEL.refuses(config, problem, m) is None
    binary = KERNEL.cross_compile(config, problem, m, arch, prewait=prewait)
    report = inspect(binary.cubin, ptx=binary.ptx)
    assert report.arch == arch
    assert report.decoded or report.note
    assert_streaming(report, narrow_loads=2 * (problem.epilogue is Epilogue.RESIDUAL), mma="HMMA")
    assert report.loads["UBLKCP"]
    assert report.registers * 32 * (config.warps + 1) * config.blocks_per_sm <= 65536
    ptx = binary.ptx
    assert ".nc" not in ptx, "the non-coherent path may return what was there before the predecessor wrote"
    assert not re.search(r"\b(atom|red|multimem)\.", ptx), "atomics would make the sum depend on the schedule"
    # The copying warp waits where nobody has promised anything, and before it lets others start.
    assert ptx.count("griddepcontrol.wait") == 1 + (config.trigger or not prewait)
    assert ptx.count("griddepcontrol.launch_dependents") == config.trigger
    return report


@pytest.mark.parametrize("name", SPREAD)
def test_sm90(name: str) -> None:
    assert _check(name, "sm_90a", prewait=len(name) % 2 == 0).decoded


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("name", ["M8", "resident M16, gated"])
def test_newer_gpus(name: str, arch: str) -> None:
    _check(name, arch, prewait=True)


def test_a_device_with_less_shared_memory_has_fewer_stages() -> None:
    small = BulkConfig(32, 256, 4)
    assert small.shared_bytes((12, 0)) < small.shared_bytes((9, 0)) == 227 << 10
    assert KERNEL.cross_compile(small, PROBLEM, 4, "sm_120a").shared_bytes == small.shared_bytes((12, 0)) == 99 << 10


def test_one_binary_serves_every_shape_and_eight_values_of_m() -> None:
    config, _, _ = SPREAD["M8"]
    texts = {
        KERNEL.cross_compile(config, Problem(n=n, k=k), m, "sm_90a").ptx
        for n, k, m in ((4096, 4096, 1), (2560, 9728, 8), (151936, 2568, 3))
    }
    assert len({re.sub(r"//.*", "", text) for text in texts}) == 1


def test_the_copying_loop_runs_on_the_uniform_datapath() -> None:
    """A copy whose operands are not uniform costs a loop over the lanes: seen as R2UR and a vote before each."""
    config, problem, m = SPREAD["M8"]
    binary = KERNEL.cross_compile(config, problem, m, "sm_90a")
    report = inspect(binary.cubin, ptx=binary.ptx)
    places = [i for i, op in enumerate(report.opcodes) if op.startswith("UBLKCP")]
    loop = report.opcodes[places[0] : places[-1]]
    assert not [op for op in loop if op.startswith(("VOTE", "R2UR", "BRA.U"))], loop
