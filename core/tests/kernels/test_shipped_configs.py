"""Every config that a shipped plan runs, compiled for every GPU family: 128-bit loads, no spill, no local memory.

Reading machine code takes longer than making it, so that it is read once for each form of a config: K only counts by
whether a step lies partly past it. That the code of every cell compiles for its own device and spills nothing, whatever
its K, is what `tests/gpu/test_shipped.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from skinny_core import family, kernels, plan
from skinny_core.kernels.bf16_simt.config import Spec as SimtSpec
from skinny_core.kernels.bf16_stream.config import Spec as StreamSpec
from skinny_core.kernels.cute_kernel import CuteKernel
from skinny_core.testing.sass import assert_streaming, inspect
from skinny_core.testing.stand_in import cell

replaced = msgspec.structs.replace

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


def form(of: plan.Cell) -> object:
    """What the loads and registers of its machine code depend on. Every kernel reads N at run time."""
    kernel = kernels.get(of.kernel)
    config, problem = kernel.config_from(of.config), of.problem(None)
    if not isinstance(kernel, CuteKernel):
        return of.kernel, StreamSpec.of(config, problem, pdl=True, prefetch=True)
    spec = kernel.spec(config, problem, of.m, pdl=True)
    # The fragment of `bf16_simt` is unrolled: how K fills it decides about its registers.
    part = (
        (spec.chunks, spec.full_chunks, spec.resident, spec.tail_chunks, spec.tail_full)
        if isinstance(spec, SimtSpec)
        else spec.tail
    )
    return of.kernel, replace(spec, k=0), part


def forms(cells: Iterator[tuple[str, plan.Cell]]) -> list[tuple[str, plan.Cell]]:
    """The first cell of each form."""
    found: dict[object, tuple[str, plan.Cell]] = {}
    for name, of in cells:
        found.setdefault(form(of), (name, of))
    return list(found.values())


def _wins() -> Iterator[tuple[str, plan.Cell]]:
    for package in family.discover().packages:
        for file in package.plan_files():
            yield from ((f"{package.name}:{c.id}", c) for c in plan.load(file).cells if c.status == "win")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shipped_configs_stream(arch: str) -> None:
    """That there are any, the packages' own tests say."""
    failed = []
    for name, of in forms(_wins()):
        kernel = kernels.get(of.kernel)
        ok, error = kernel.availability()
        if not ok:
            pytest.skip(f"{of.kernel}: {error}")
        binary = kernel.cross_compile(kernel.config_from(of.config), of.problem(None), of.m, arch)
        report = inspect(binary.cubin, ptx=binary.ptx)
        assert report.decoded, f"{arch}: {report.note}"
        try:
            assert report.arch == arch
            assert_streaming(report)
        except AssertionError as wrong:
            failed.append(f"{name}, {of.kernel_config}: {wrong}")
    assert not failed, "\n".join(failed)


def test_a_plan_of_many_shapes_has_few_forms() -> None:
    """1300 cells of 80 shapes have 350 machine codes: read three times each, they would take ten minutes of CI."""
    config = {"warps": 4, "parts": 2, "loads": 2, "unroll": 2}
    shapes = [cell(64 * i, 2048 * i, m, kernel="bf16_mma") for i in range(1, 41) for m in (2, 3)]
    assert len(forms(("", replaced(one, config=config)) for one in shapes)) == 1
    odd = [*shapes, cell(64, 2056, 2, kernel="bf16_mma"), cell(64, 2048, 5, kernel="bf16_mma")]
    assert len(forms(("", replaced(one, config=config)) for one in odd)) == 3
