"""Every config that a shipped plan runs, compiled for every GPU family that takes it: 128-bit loads, no local memory,
no spill except a few bytes where the cell was measured.

Reading machine code takes longer than making it, so that it is read once for each form of a config: K only counts by
whether a step lies partly past it. That the code of every cell compiles for its own device and spills nothing, whatever
its K, is what `tests/gpu/test_shipped.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import pytest

from skinny_core import family, kernels, plan
from skinny_core.device import DeviceKey, product
from skinny_core.kernels.bf16_simt.config import Spec as SimtSpec
from skinny_core.kernels.bf16_stream.config import Spec as StreamSpec
from skinny_core.kernels.cute_kernel import CuteKernel
from skinny_core.testing.sass import MEASURED_STACK, assert_streaming, inspect
from skinny_core.testing.stand_in import cell

replaced = msgspec.structs.replace

ARCHITECTURES = {"sm_90a": "h200", "sm_100a": "b200", "sm_103a": "b300"}
"""And a product of each."""


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


Win = tuple[str, plan.Cell, DeviceKey]
"""(name, cell, the device that it was measured on)."""


def forms(cells: Iterable[Win]) -> list[Win]:
    """The first cell of each form."""
    found: dict[object, Win] = {}
    for win in cells:
        found.setdefault(form(win[1]), win)
    return list(found.values())


def _wins() -> Iterator[Win]:
    for package in family.discover().packages:
        for file in package.plan_files():
            shipped = plan.load(file)
            yield from ((f"{package.name}:{c.id}", c, shipped.key) for c in shipped.cells if c.status == "win")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shipped_configs_stream(arch: str) -> None:
    """That there are any, the packages' own tests say."""
    failed = []
    device = product(ARCHITECTURES[arch])
    for name, of, measured_on in forms(_wins()):
        if kernels.refuses(of.kernel_config, of.problem(device), of.m):
            assert device != measured_on, f"{name} cannot run on its own device"
            continue
        kernel = kernels.get(of.kernel)
        ok, error = kernel.availability()
        if not ok:
            pytest.skip(f"{of.kernel}: {error}")
        binary = kernel.cross_compile(kernel.config_from(of.config), of.problem(None), of.m, arch)
        report = inspect(binary.cubin, ptx=binary.ptx)
        assert report.decoded, f"{arch}: {report.note}"
        try:
            assert report.arch == arch
            assert_streaming(report, stack=MEASURED_STACK if device == measured_on else 0)
        except AssertionError as wrong:
            failed.append(f"{name}, {of.kernel_config}: {wrong}")
    assert not failed, "\n".join(failed)


def test_a_plan_of_many_shapes_has_few_forms() -> None:
    """1300 cells of 80 shapes have 350 machine codes: read three times each, they would take ten minutes of CI."""
    config = {"warps": 4, "parts": 2, "loads": 2, "unroll": 2}
    shapes = [cell(64 * i, 2048 * i, m, kernel="bf16_mma") for i in range(1, 41) for m in (2, 3)]
    key = product("h200")
    assert len(forms(("", replaced(one, config=config), key) for one in shapes)) == 1
    odd = [*shapes, cell(64, 2056, 2, kernel="bf16_mma"), cell(64, 2048, 5, kernel="bf16_mma")]
    assert len(forms(("", replaced(one, config=config), key) for one in odd)) == 3
