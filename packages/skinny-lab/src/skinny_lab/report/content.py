"""What a report says, before it is drawn: plans, their cells by model, verdicts, predicted savings. No matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skinny_core import family, plan
from skinny_core.errors import ModelConfigError
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell, Plan
from skinny_core.problem import Epilogue
from skinny_lab.bench.rows import LIMIT_TBPS
from skinny_lab.explain.target import RequestError
from skinny_lab.plans import open_plan
from skinny_lab.replay.spread import Speedup

RULER = "h200"
"""The product on which `LIMIT_TBPS` was measured; a plan for another device gets no byte floor."""
TPS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Source:
    """One plan. label: file name. again: what `skinny replay` takes, a package for a shipped plan. slug: unique in a
    report. package: the installed one of its family, or None."""

    label: str
    again: str
    slug: str
    plan: Plan
    package: ModelPackage | None

    @property
    def sealed(self) -> bool:
        """Whether the digest is that of the content: nobody edited the cells after they were measured."""
        return self.plan.digest == self.plan.seal()


@dataclass(frozen=True, slots=True)
class Shape:
    """All cells of one projection shape of one model, by M. names: its projections ("o")."""

    names: tuple[str, ...]
    n: int
    k: int
    note: str
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """ "o 4096 x 4096"."""
        return f"{', '.join(self.names)} {self.n} x {self.k}{f' {self.note}' if self.note else ''}".strip()

    @property
    def slug(self) -> str:
        """For file names and anchors."""
        return slug(f"{'-'.join(self.names)}-{self.n}x{self.k}{f'-{self.note}' if self.note else ''}")


@dataclass(frozen=True, slots=True)
class Part:
    """One projection in a decode step. calls: per step. state: "runs", "refused", "reported" or "not measured".
    saved_us: calls x (baseline - ours), cold medians; 0 unless it runs."""

    name: str
    calls: int
    state: str
    saved_us: float


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step at M rows, predicted from cells."""

    m: int
    parts: tuple[Part, ...]

    @property
    def saved_us(self) -> float:
        """Sum over the projections, microseconds."""
        return sum(part.saved_us for part in self.parts)


@dataclass(frozen=True, slots=True)
class Only:
    """What a report is narrowed to. models: names of configs; tps: tensor-parallel sizes. Empty: all."""

    models: tuple[str, ...] = ()
    tps: tuple[int, ...] = ()

    def takes(self, label: str) -> bool:
        """Whether a section of that name is shown."""
        name, tp = split(label)
        return (not self.models or name in self.models) and (not self.tps or tp in self.tps)


_TP = re.compile(r"(.+)[-.]tp(\d+)")


def split(label: str) -> tuple[str, int]:
    """Model and tensor-parallel size: "qwen3-8b-tp2" is ("qwen3-8b", 2), "qwen3-8b" is ("qwen3-8b", 1)."""
    found = _TP.fullmatch(label)
    return (found[1], int(found[2])) if found else (label, 1)


def titled(label: str) -> str:
    """ "qwen3-8b, TP 2"."""
    name, tp = split(label)
    return name if tp == 1 else f"{name}, TP {tp}"


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "plan"


def open_sources(texts: Sequence[str]) -> list[Source]:
    """The plans of these files or packages; without any, all that installed packages ship.

    Raises `RequestError` where there is none, `PlanError` for an unsound file.
    """
    packages = {p.name: p for p in family.discover().packages}
    if texts:
        opened = [open_plan(text) for text in texts]
    else:
        opened = [(file, plan.load(file)) for package in packages.values() for file in package.plan_files()]
    if not opened:
        raise RequestError(
            "no installed model package ships a plan",
            "name a plan file, or install a package that ships one, e.g. skinny-qwen3",
        )
    sources: list[Source] = []
    for path, found in opened:
        name = base = slug(f"{found.family}-{found.product}")
        number = 1
        while name in {source.slug for source in sources}:
            number += 1
            name = f"{base}-{number}"
        package, label = packages.get(found.family), Path(path).name
        again = found.family if package and Path(path) in package.plan_files() else label
        sources.append(Source(label, again, name, found, package))
    return sources


def models(found: Plan) -> dict[str, list[Shape]]:
    """Model name -> its shapes, in the plan's order. A model is what stands before the slash of `used_by`, one for each
    tensor-parallel size ("qwen3-8b-tp2"), beside each other; a cell that names no user counts for what its id begins
    with."""
    grouped: dict[str, dict[tuple[int, int, str], tuple[dict[str, None], list[Cell]]]] = {}
    for cell in found.cells:
        uses = cell.used_by or (cell.id.rsplit("/M", 1)[0],)
        for model, names in _by_model(uses).items():
            shapes = grouped.setdefault(model, {})
            seen, cells = shapes.setdefault((cell.n, cell.k, arithmetic(cell)), ({}, []))
            seen.update(dict.fromkeys(names))
            cells.append(cell)
    first = list(dict.fromkeys(split(label)[0] for label in grouped))
    return {
        model: [
            Shape(tuple(names), n, k, note, tuple(sorted(cells, key=lambda cell: cell.m)))
            for (n, k, note), (names, cells) in grouped[model].items()
        ]
        for model in sorted(grouped, key=lambda label: (first.index(split(label)[0]), split(label)[1]))
    }


def _by_model(uses: Sequence[str]) -> dict[str, list[str]]:
    by_model: dict[str, list[str]] = {}
    for use in uses:
        model, _, name = use.partition("/")
        by_model.setdefault(model, []).append(name or model)
    return by_model


def arithmetic(cell: Cell) -> str:
    """What is not plain BF16 about a cell: "fp16", "-> fp32", "+ residual"; "" for nothing."""
    said = [] if cell.weight.value == "bf16" else [cell.weight.value]
    if cell.output is not cell.activation:
        said.append(f"-> {cell.output.value}")
    if cell.epilogue is not Epilogue.NONE:
        said.append(f"+ {cell.epilogue.value}")
    return " ".join(said)


def speedup(cell: Cell) -> Speedup:
    """Cold, with its spread."""
    return Speedup.of(cell.evidence.baseline, cell.evidence.candidate)


def floor_us(found: Plan, shape: Shape | Cell) -> float | None:
    """Weight bytes (2 per element) at the memory's limit, microseconds; None where nobody measured that limit."""
    return 2 * shape.n * shape.k / LIMIT_TBPS / 1e6 if found.product == RULER else None


def verdict(cell: Cell) -> tuple[str, str]:
    """(word, why): "runs", "refused" with its sentence, or "reported" with its source."""
    if cell.status == "win":
        return "runs", ""
    if cell.status == "refused":
        return "refused", cell.why
    return "reported, off", f"measured by somebody else: {cell.evidence.source}"


def predicted(source: Source, label: str) -> Iterator[tuple[int, list[Step]]]:
    """(tensor-parallel size, decode steps by M) where the package knows the model's calls and cells fit its shapes.

    "qwen3-8b-tp2" is of that size. "qwen3-8b" is of size 1, and of others that have no name of their own in the plan:
    those only where every projection has a cell, since single shapes coincide between sizes.
    """
    model, own = split(label)
    config = source.package.configs.get(model) if source.package else None
    if source.package is None or config is None:
        return
    at = {
        (cell.n, cell.k, cell.m): cell
        for cell in source.plan.cells
        if not arithmetic(cell)
    }  # fmt: skip
    elsewhere = {tp for name, tp in map(split, models(source.plan)) if name == model} - {own}
    for tp in (own,) if own > 1 else (tp for tp in TPS if tp not in elsewhere):
        try:
            projections = [p for p in source.package.projections(config, tp) if not p.part_of]
        except ModelConfigError:  # cannot be split over that many ranks
            continue
        steps = []
        for m in sorted({m for _, _, m in at}):
            parts = []
            for p in projections:
                cell = at.get((p.n, p.k, m))
                state = "not measured" if cell is None else {"win": "runs"}.get(cell.status, cell.status)
                saved = (cell.evidence.baseline.p50 - cell.evidence.candidate.p50) * p.calls if cell else 0.0
                parts.append(Part(p.name, p.calls, state, saved if state == "runs" else 0.0))
            known = [part.state != "not measured" for part in parts]
            if all(known) or (tp == own and any(known)):
                steps.append(Step(m, tuple(parts)))
        if steps:
            yield tp, steps
