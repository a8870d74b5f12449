"""What this wheel declares to skinny: entry point `skinny.models: qwen3`. It runs no code in a host."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from skinny_core.family import ModelPackage
from skinny_qwen3.call_sites import ARCHITECTURES, projections

_FOLDER = Path(str(files("skinny_qwen3")))


def plan_files() -> tuple[Path, ...]:
    """Every plan in `plans/`, by name; an empty tuple where none was packaged."""
    return tuple(sorted((_FOLDER / "plans").glob("*.toml")))


def _version() -> str:
    try:
        return version("skinny-qwen3")
    except PackageNotFoundError:  # run from a source tree that nobody installed
        return "0+unknown"


def _configs() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((_FOLDER / "configs.toml").read_text(encoding="utf-8"))


PACKAGE = ModelPackage(
    name="qwen3",
    version=_version(),
    architectures=ARCHITECTURES,
    configs=_configs(),
    projections=projections,
    plan_files=plan_files,
    parity="skinny_qwen3.parity",
)
