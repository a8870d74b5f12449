"""Every config that a shipped plan runs, compiled for every GPU family: 128-bit loads, no spill, no local memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skinny_core import family, kernels, plan
from skinny_core.kernels.cute_kernel import CuteKernel
from skinny_core.testing.sass import assert_streaming, inspect

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


def _code(cell: plan.Cell) -> object:
    """What its machine code depends on. Every kernel reads N at run time: cells that differ in it alone share one."""
    kernel = kernels.get(cell.kernel)
    if isinstance(kernel, CuteKernel):
        return cell.kernel, kernel.spec(kernel.config_from(cell.config), cell.problem(None), cell.m, pdl=True)
    return cell.kernel_config, cell.k, cell.m, cell.weight, cell.activation, cell.output, cell.epilogue


def _codes() -> Iterator[tuple[str, plan.Cell]]:
    """One cell for each machine code."""
    seen = set()
    for package in family.discover().packages:
        for file in package.plan_files():
            for cell in plan.load(file).cells:
                if cell.status == "win" and (code := _code(cell)) not in seen:
                    seen.add(code)
                    yield f"{package.name}:{cell.id}", cell


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shipped_configs_stream(arch: str) -> None:
    """That there are any, the packages' own tests say."""
    failed = []
    for name, cell in _codes():
        kernel = kernels.get(cell.kernel)
        ok, error = kernel.availability()
        if not ok:
            pytest.skip(f"{cell.kernel}: {error}")
        binary = kernel.cross_compile(kernel.config_from(cell.config), cell.problem(None), cell.m, arch)
        report = inspect(binary.cubin, ptx=binary.ptx)
        assert report.decoded, f"{arch}: {report.note}"
        try:
            assert report.arch == arch
            assert_streaming(report)
        except AssertionError as wrong:
            failed.append(f"{name}, {cell.kernel_config}: {wrong}")
    assert not failed, "\n".join(failed)
