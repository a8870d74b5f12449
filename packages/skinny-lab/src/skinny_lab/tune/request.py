"""What to measure: the shapes of a packaged model, of a file, or of a capture."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skinny_core.family import ModelPackage, Projection
from skinny_core.problem import DType, Problem, WeightScheme
from skinny_core.table import ANY_FAMILY
from skinny_lab import capture
from skinny_lab.explain.target import RequestError, find_model

LARGEST = 1 << 31
_SHAPES_FIX = "write a CSV with the columns n,k and perhaps name, or a JSON list of such objects or of [n, k]"


@dataclass(frozen=True, slots=True)
class Site:
    """One weight `[N, K]` and who uses it. name: first part of its cells' ids. calls: per decode step, all layers.

    used_by: "model/projection" of each `Model` of its target, or the layers of a capture. ms: the M it is to be
    measured at unless somebody says otherwise, () for all.
    """

    name: str
    n: int
    k: int
    dtype: DType = DType.BF16
    calls: int = 1
    used_by: tuple[str, ...] = ()
    ms: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """What is measured once, whoever uses it."""
        return self.n, self.k, self.dtype

    def projections(self, model: Model) -> tuple[str, ...]:
        """Those of a model that have this shape, by name."""
        users = (user.partition("/") for user in self.used_by)
        return tuple(projection for label, _, projection in users if label == model.label)

    @property
    def problem(self) -> Problem:
        """The plain product: output in the input dtype, no epilogue."""
        return Problem(
            n=self.n, k=self.k, weight=WeightScheme(self.dtype.value), activation=self.dtype, output=self.dtype
        )

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one decode step reads here."""
        return self.problem.weight_bytes * self.calls


Shape = tuple[int, int, DType]
"""(N, K, dtype of weight, activation and output)."""


@dataclass(frozen=True, slots=True)
class Model:
    """One rank of a packaged config, whose decode step checks M >= 3. projections: of that rank."""

    name: str
    package: ModelPackage
    config: Mapping[str, Any]
    tp: int = 1

    @property
    def label(self) -> str:
        """First part of the ids of its cells: "qwen3-8b", "qwen3-8b-tp2"."""
        return self.name if self.tp == 1 else f"{self.name}-tp{self.tp}"

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Of one rank. Raises `ModelConfigError` for a tp that does not divide the model."""
        return self.package.projections(self.config, self.tp)


@dataclass(frozen=True, slots=True)
class Target:
    """Shapes and what their plan is called. family: of the plan, "*" where it counts for every model.

    models: whose shapes they are, none for shapes and captures. notes: what is left out.
    """

    name: str
    family: str
    sites: tuple[Site, ...]
    tp: int = 1
    models: tuple[Model, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """File-safe name: "qwen3-8b-tp2"."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.")[:64] or "shapes"
        return safe if self.tp == 1 else f"{safe}-tp{self.tp}"


def find(model: str | None, shapes: Path | None, captured: Path | None, tp: int | None) -> Target:
    """The target that the command line names. Raises `RequestError` unless it is exactly one, `CaptureError` for a file
    that is no capture, `ModelConfigError` for a tp that does not divide the model."""
    if sum(x is not None for x in (model, shapes, captured)) != 1:
        raise RequestError(
            "tune needs one of MODEL, --shapes and --capture", "name a model such as qwen3-8b, or a file"
        )
    if model is not None:
        return from_model(model, tp or 1)
    if shapes is not None:
        if tp not in (None, 1):
            raise RequestError(f"--tp {tp} with --shapes", "write the shapes of one rank into the file, without --tp")
        return from_shapes(shapes)
    assert captured is not None
    found = from_capture(captured)
    if tp not in (None, found.tp):
        raise RequestError(
            f"--tp {tp}, but {captured} was recorded at TP {found.tp}", "leave --tp out, or capture anew"
        )
    return found


def from_model(text: str, tp: int = 1) -> Target:
    """The fused projections of a packaged config (or of a `config.json`) at one TP size, one site per shape."""
    target = find_model(text)
    path = Path(target.name)
    name = (path.parent.name or path.stem) if path.suffix == ".json" else target.name
    model = Model(name, target.package, target.config, tp)
    return Target(name, target.package.name, sites_of([model]), tp, (model,))


def from_models(models: Sequence[Model], name: str) -> Target:
    """Several models at once, every shape measured once; `of_family` has the part of each package."""
    return Target(name, ANY_FAMILY, sites_of(models), models=tuple(models))


def of_family(target: Target, family: str) -> Target:
    """The models of one package and their sites, named after them."""
    models = tuple(model for model in target.models if model.package.name == family)
    return Target(family, family, sites_of(models), models=models)


def sites_of(models: Iterable[Model]) -> tuple[Site, ...]:
    """The fused projections of models, one site per shape, named after the first that has it. Raises
    `ModelConfigError` for a tp that does not divide a model."""
    shared: dict[tuple[int, int], list[tuple[Model, Projection]]] = {}
    for model in models:
        for projection in model.projections:
            if not projection.part_of:
                shared.setdefault((projection.n, projection.k), []).append((model, projection))
    sites = []
    for (n, k), users in shared.items():
        names = tuple(f"{model.label}/{projection.name}" for model, projection in users)
        first = users[0][0].label
        calls = sum(projection.calls for model, projection in users if model.label == first)
        sites.append(Site(names[0], n, k, calls=calls, used_by=names))
    return tuple(sites)


def from_shapes(path: Path) -> Target:
    """The BF16 shapes of a CSV or JSON file, each once; a plan of them counts for every model."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: cannot be read: {why}", _SHAPES_FIX) from None
    sites: dict[tuple[int, int], Site] = {}
    names: set[str] = set()
    for where, row in _rows(path, text):
        n, k = (_size(where, key, row.get(key)) for key in ("n", "k"))
        if (n, k) in sites:
            continue
        name = str(row.get("name") or f"{n}x{k}").strip()
        if name in names:
            raise RequestError(f"{where}: a second shape is called {name!r}", "give every shape a name of its own")
        names.add(name)
        sites[n, k] = Site(f"{path.stem}/{name}", n, k)
    if not sites:
        raise RequestError(f"{path}: no shapes", _SHAPES_FIX)
    return Target(path.stem, ANY_FAMILY, tuple(sites.values()))


def from_capture(path: Path) -> Target:
    """What a captured model issued with at most 16 rows, in 16-bit types and without a bias; else it is noted."""
    found = capture.read(path)
    groups: dict[tuple[int, int, DType], list[Any]] = {}
    notes: dict[str, None] = {}
    for record in found.select():
        types = {record.activation, record.weight, record.output}
        if types not in ({"bf16"}, {"fp16"}):
            notes[f"{record.layer}: {' x '.join(sorted(types))}: only bf16 or fp16 throughout is measured"] = None
        elif record.bias:
            notes[f"{record.layer}: it has a bias, and keeps its original call"] = None
        else:
            groups.setdefault((record.n, record.k, DType(record.weight)), []).append(record)
    sites, names = [], set()
    for (n, k, dtype), records in groups.items():
        layers = tuple(dict.fromkeys(r.layer for r in records))
        name = ".".join(part for part in layers[0].split(".")[-2:] if part != "*")
        if name in names:  # one kind of layer with two shapes
            name = f"{name}-{n}x{k}-{dtype.value}"
        names.add(name)
        calls = sum(max(r.calls for r in records if r.layer == layer) for layer in layers)
        ms = tuple(sorted({r.m for r in records}))
        sites.append(Site(f"{path.stem}/{name}", n, k, dtype, calls, layers, ms))
    if not sites:
        raise RequestError(
            f"{path}: no product that could be measured{''.join(f'; {note}' for note in list(notes)[:1])}",
            "capture a model in bf16 or fp16 with --batch of at most 16",
        )
    return Target(path.stem, ANY_FAMILY, tuple(sites), found.tp, notes=tuple(notes))


def _rows(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(place, n, k and perhaps name) of each shape."""
    if text.lstrip()[:1] not in ("[", "{"):
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        if not {"n", "k"} <= set(reader.fieldnames or ()):
            raise RequestError(f"{path}:1: the columns n and k are not there", _SHAPES_FIX)
        yield from ((f"{path}:{reader.line_num}", row) for row in reader)
        return
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}", _SHAPES_FIX) from None
    for index, item in enumerate(data if isinstance(data, list) else [data]):
        where = f"{path}: item {index}"
        if isinstance(item, list) and len(item) in (2, 3):
            item = dict(zip(("n", "k", "name"), item, strict=False))
        if not isinstance(item, dict):
            raise RequestError(f"{where}: {str(item)[:40]!r} is no shape", _SHAPES_FIX)
        yield where, item


def _size(where: str, key: str, value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,10}", text) or not 0 < int(text) < LARGEST:
        raise RequestError(f"{where}: {key} is {str(value)[:40]!r}", "give a positive whole number")
    return int(text)
