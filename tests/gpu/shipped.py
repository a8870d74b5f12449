"""The cells that installed model packages ship, for tests that go through all of them."""

from __future__ import annotations

from dataclasses import dataclass

from skinny_core import family, kernels, plan
from skinny_core.device import DeviceKey


@dataclass(frozen=True, slots=True)
class Shipped:
    """A `win` cell and the device that its plan belongs to."""

    cell: plan.Cell
    device: DeviceKey


def shipped_cells(capability: tuple[int, int]) -> list[Shipped]:
    """Every `win` cell of a plan for a device of this capability."""
    files = [file for package in family.discover().packages for file in package.plan_files()]
    plans = [plan.load(file) for file in files]
    return [
        Shipped(cell, loaded.key)
        for loaded in plans
        if loaded.key.capability == capability
        for cell in loaded.cells
        if cell.status == "win"
    ]


def cross_compile(shipped: Shipped) -> str | None:
    """Compile one cell for its device's architecture without a device; the error as one line, or None."""
    cell = shipped.cell
    kernel = kernels.get(cell.kernel)
    try:
        config = kernel.config_from(cell.config)
        binary = kernel.cross_compile(config, cell.problem(shipped.device), cell.m, shipped.device.arch)
    except Exception as error:
        return " ".join(f"{cell.id}: {type(error).__name__}: {error}".split())
    return None if binary.cubin else f"{cell.id}: the compiler made no machine code"
