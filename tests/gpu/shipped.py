"""The cells that installed model packages ship, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from skinny_core import family, kernels, plan
from skinny_core.device import DeviceKey
from skinny_core.testing import sass


@dataclass(frozen=True, slots=True)
class Shipped:
    """A `win` cell, the device that its plan belongs to, and the family whose calls it serves."""

    cell: plan.Cell
    device: DeviceKey
    family: str = ""

    @property
    def name(self) -> str:
        """Unique over all plans of one device."""
        return f"{self.family}:{self.cell.id}"

    def codes(self) -> frozenset[Hashable]:
        """What is compiled for it; what cannot be told is its own."""
        try:
            kernel = kernels.get(self.cell.kernel)
            config = kernel.config_from(self.cell.config)
            return kernel.codes(config, self.cell.problem(self.device), self.cell.m, self.device, prewait=True)
        except Exception:
            return frozenset({self.name})


@dataclass(frozen=True, slots=True)
class Shape:
    """All cells of one weight shape in one family, by M: one weight serves them."""

    family: str
    device: DeviceKey
    n: int
    k: int
    cells: tuple[plan.Cell, ...]

    @property
    def name(self) -> str:
        """For a test's id."""
        return f"{self.family}:{self.cells[0].id.rpartition('/M')[0] or self.cells[0].id}-{self.n}x{self.k}"

    def each(self, check: Callable[[plan.Cell], None]) -> None:
        """Run a check on every cell, then fail with a line for each that failed; after a fault of the GPU, which no
        later call survives, at once."""
        failed = []
        for cell in self.cells:
            try:
                check(cell)
            except AssertionError as error:
                failed.append(_line(cell, error))
            except Exception as error:
                raise AssertionError("\n".join([*failed, _line(cell, error)])) from error
        assert not failed, f"{len(failed)} of {len(self.cells)} cells\n" + "\n".join(failed)


def _line(cell: plan.Cell, error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{cell.id} ({cell.n} x {cell.k}, M = {cell.m}, {cell.kernel_config}): {said}"


def shipped_cells(capability: tuple[int, int]) -> list[Shipped]:
    """Every `win` cell of a plan for a device of this capability."""
    files = [file for package in family.discover().packages for file in package.plan_files()]
    plans = [plan.load(file) for file in files]
    return [
        Shipped(cell, loaded.key, loaded.family)
        for loaded in plans
        if loaded.key.capability == capability
        for cell in loaded.cells
        if cell.status == "win"
    ]


def by_shape(cells: Iterable[Shipped]) -> list[Shape]:
    """In the plans' order, by M within a shape."""
    found: dict[tuple[str, DeviceKey, int, int], list[plan.Cell]] = {}
    for one in cells:
        found.setdefault((one.family, one.device, one.cell.n, one.cell.k), []).append(one.cell)
    return [Shape(*key, tuple(sorted(of, key=lambda cell: cell.m))) for key, of in found.items()]


def by_code(cells: Iterable[Shipped]) -> list[list[Shipped]]:
    """Cells that share their machine code, on devices of one architecture: a plan of 1300 cells has 350."""
    found: dict[object, list[Shipped]] = {}
    for one in cells:
        found.setdefault((one.device.arch, one.codes()), []).append(one)
    return list(found.values())


def cross_compile(shipped: Shipped) -> str | None:
    """Compile one cell for its device's architecture without a device; the error as one line, or None. More spilled
    registers than a measured cell may have are an error too."""
    cell = shipped.cell
    try:
        kernel = kernels.get(cell.kernel)
        config = kernel.config_from(cell.config)
        binary = kernel.cross_compile(config, cell.problem(shipped.device), cell.m, shipped.device.arch)
        if not binary.cubin:
            return f"{cell.id}: the compiler made no machine code"
        used = sass.resources(binary.cubin)
    except Exception as error:
        return " ".join(f"{cell.id}: {type(error).__name__}: {error}".split())
    if used.stack_bytes > sass.MEASURED_STACK or used.local_bytes:
        return f"{cell.id}: {used.stack_bytes} bytes of stack and {used.local_bytes} of local memory per thread"
    return None
