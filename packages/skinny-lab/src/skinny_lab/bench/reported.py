"""Cells that somebody else measured, as one CSV with one TOML beside it, and the `reported` plans made of them.

`NAME.csv` has a row per cell that the report speaks about, also of those without numbers; `NAME.toml` says what is
known of the measurement. benchmarks/reported/README.md explains the columns.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skinny_core import device
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell, DeviceTable, Environment, Evidence, Plan, Quantiles
from skinny_lab.bench.rows import read_table


@dataclass(frozen=True, slots=True)
class ReportedCell:
    """One row. models: config names, separated by spaces. cublas_us, plan_us: microseconds per call, cold; None where
    not published. speedup: as printed. rounds: 0 unknown. kept: "yes" where the report lists the cell. in_model_*:
    microseconds of the projection's calls per decode step.
    """

    projection: str
    models: str
    n: int
    k: int
    m: int
    cublas_us: float | None
    plan_us: float | None
    speedup: float | None
    rounds: int
    kept: str
    in_model_cublas_us: float | None
    in_model_plan_us: float | None
    note: str

    @property
    def names(self) -> list[str]:
        """Config names of the models that have this projection."""
        return self.models.split()

    @property
    def is_kept(self) -> bool:
        """Whether the report lists the cell, with numbers."""
        return self.kept == "yes"


@dataclass(frozen=True, slots=True)
class Report:
    """A report. product: of the device. kernel: whose was measured; none of ours. baseline: the call that it replaces.
    source: where the numbers are from. in_model: what the in-model times are of.
    """

    product: str
    kernel: str
    baseline: str
    source: str
    in_model: str
    environment: Environment
    cells: tuple[ReportedCell, ...]

    @property
    def kept(self) -> list[ReportedCell]:
        """Cells that the report lists."""
        return [cell for cell in self.cells if cell.is_kept]


def read(path: Path) -> Report:
    """A report by its CSV. Raises ValueError naming file, line and column of a value that does not fit."""
    known = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))
    environment = Environment(**known.pop("environment"))
    cells = tuple(read_table(path, ReportedCell))
    for number, cell in enumerate(cells, 2):
        if cell.kept not in ("yes", "no") or cell.is_kept != (cell.cublas_us is not None and cell.plan_us is not None):
            raise ValueError(f"{path}:{number}: column kept: {cell.kept!r}: a kept cell has both times, another none")
    return Report(**known, environment=environment, cells=cells)


def plans(report: Report, packages: Iterable[ModelPackage]) -> dict[str, Plan]:
    """A plan per package that answers for a model of the report, by package name; shared shapes are in each.

    Raises ValueError for a model of nobody, and for a shape that its package does not give to the projection.
    """
    packages = tuple(packages)
    nobody = {name for cell in report.cells for name in cell.names} - {c for p in packages for c in p.configs}
    if nobody:
        raise ValueError(f"no installed model package has a config named {', '.join(sorted(nobody))}")
    key = device.product(report.product)
    table = DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    found = {}
    for package in packages:
        cells = []
        for reported in report.kept:
            names = [name for name in reported.names if name in package.configs]
            if names:
                cells.append(_cell(report, reported, _used_by(package, reported, names)))
        if cells:
            found[package.name] = Plan(
                family=package.name, product=report.product, device=table, environment=report.environment,
                cell=tuple(cells),
            )  # fmt: skip
    return found


def _used_by(package: ModelPackage, cell: ReportedCell, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        shapes = {p.name: (p.n, p.k) for p in package.projections(package.configs[name], 1)}
        if shapes.get(cell.projection) != (cell.n, cell.k):
            raise ValueError(f"{name}/{cell.projection} is {shapes.get(cell.projection)}, not {(cell.n, cell.k)}")
    return tuple(f"{name}/{cell.projection}" for name in names)


def _cell(report: Report, cell: ReportedCell, used_by: tuple[str, ...]) -> Cell:
    assert cell.plan_us is not None  # `read` refuses a kept cell without
    assert cell.cublas_us is not None
    said = []
    if cell.in_model_cublas_us is not None and cell.in_model_plan_us is not None:
        said.append(f"{report.in_model}: {cell.in_model_cublas_us:g} -> {cell.in_model_plan_us:g} us")
    if cell.note:
        said.append(cell.note)
    return Cell(
        id=f"{used_by[0]}/M{cell.m}", n=cell.n, k=cell.k, m=cell.m, status="reported", kernel=report.kernel, config={},
        used_by=used_by, why="; ".join(said),
        evidence=Evidence(
            candidate=_flat(cell.plan_us), baseline=_flat(cell.cublas_us), baseline_name=report.baseline,
            rounds=cell.rounds, source=report.source,
        ),
    )  # fmt: skip


def _flat(median: float) -> Quantiles:
    """A median whose spread nobody published."""
    return Quantiles(median, median, median)
