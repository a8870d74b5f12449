"""What a model package declares, and how installed ones are found (entry-point group `skinny.models`).

A package says which projections a model has and which plan files it ships; it runs no code in a host.
"""

from __future__ import annotations

import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.resources import files
from pathlib import Path
from typing import Any

GROUP = "skinny.models"
Projections = Callable[[Mapping[str, Any], int], "tuple[Projection, ...]"]
"""(config, tp) -> the projections of one rank."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One dense projection of a model at one tensor-parallel size.

    name: "qkv", "o", "gate_up", "down", "lm_head", or an unfused part ("q", "gate").
    patterns: fnmatch patterns over module paths ("*.self_attn.qkv_proj").
    n, k: local weight shape `[N, K]`. calls: calls per decode step. part_of: for a part that exists only where the host
    does not fuse ("q"), the fused projection it belongs to ("qkv"); a model runs either the parts or the whole.
    """

    name: str
    patterns: tuple[str, ...]
    n: int
    k: int
    calls: int
    part_of: str = ""

    def matches(self, path: str) -> bool:
        """Whether a module path belongs to this projection."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A model family as its package declares it.

    name: family name, also the `family` argument of the op. architectures: HF architecture names it answers for.
    configs: named HF-style configs ("qwen3-8b" -> mapping). projections(config, tp): local shapes, raises
    `ModelConfigError`. plan_files(): shipped TOML plans. parity: module that proves equal results.
    """

    name: str
    version: str
    architectures: tuple[str, ...]
    configs: Mapping[str, Mapping[str, Any]]
    projections: Projections
    plan_files: Callable[[], tuple[Path, ...]]
    parity: str = ""


def packaged(module: str, architectures: tuple[str, ...], projections: Projections) -> ModelPackage:
    """The declaration of a wheel laid out as this project's are: module "skinny_qwen3" of wheel "skinny-qwen3" is
    family "qwen3", with `configs.toml`, `plans/*.toml` (none, or no such folder, is no error) and `parity.py` in it.

    Reads `configs.toml`; plans are looked for at each call of `plan_files`, in the order of their devices' names."""
    folder = Path(str(files(module)))
    try:
        found = version(module.replace("_", "-"))
    except PackageNotFoundError:  # run from a source tree that nobody installed
        found = "0+unknown"
    return ModelPackage(
        name=module.removeprefix("skinny_"),
        version=found,
        architectures=architectures,
        configs=tomllib.loads((folder / "configs.toml").read_text(encoding="utf-8")),
        projections=projections,
        plan_files=lambda: tuple(sorted((folder / "plans").glob("*.toml"), key=lambda file: file.stem)),
        parity=f"{module}.parity",
    )


@dataclass(frozen=True, slots=True)
class Discovery:
    """Installed model packages, and entry points that could not be used with their original error."""

    packages: tuple[ModelPackage, ...] = ()
    broken: tuple[tuple[str, str], ...] = field(default=())


def discover() -> Discovery:
    """Load every entry point of `skinny.models`, in name order. One that fails is reported, never raised."""
    packages: dict[str, ModelPackage] = {}
    broken: list[tuple[str, str]] = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        try:
            package = point.load()
        except Exception:
            broken.append((point.name, traceback.format_exc(limit=-1).strip()))
            continue
        if not isinstance(package, ModelPackage):
            broken.append((point.name, f"{point.value} is a {type(package).__name__}, not a ModelPackage"))
        else:
            packages.setdefault(package.name, package)
    return Discovery(tuple(packages.values()), tuple(broken))


def for_architecture(architecture: str) -> ModelPackage | None:
    """The installed package that answers for an HF architecture name ("Qwen3ForCausalLM"), or None."""
    return next((p for p in discover().packages if architecture in p.architectures), None)
