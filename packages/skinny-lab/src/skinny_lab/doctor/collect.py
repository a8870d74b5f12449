"""Gather the facts of a report. Every look-up survives its own failure, so that one broken part hides no other."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import platformdirs

from skinny_core import cache, env, family, kernels, plan
from skinny_core.device import current_key, neighbours, product_name
from skinny_core.errors import PlanError, SettingsError
from skinny_lab import output
from skinny_lab.doctor.report import Cache, Device, Host, Kernel, PlanFile, Report

LIBRARIES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "vllm", "transformers")
PREFIX = "skinny-"
Problems = list[tuple[str, str]]
"""What is wrong, and what to do."""
CACHE_FIX = "set SKINNY=cache=FOLDER, or mend its permissions"
NO_PLAN_FIX = (
    "measure it: `skinny tune MODEL` (docs/tuning.md), or `python benchmarks/measure_plan.py --out DIR` in a checkout, "
    "or opt in to a neighbour with SKINNY=neighbour=on"
)


def collect() -> Report:
    """Look at everything. Initialises CUDA where there is a GPU; imports every DSL and every installed skinny wheel."""
    settings, settings_problem = _settings()
    found = family.discover()
    stored, cache_problem = _cache()
    report = Report(
        schema=1,
        python=platform.python_version(),
        platform=platform.platform(),
        driver=_driver_version(),
        settings=settings,
        versions=_versions(),
        devices=tuple(_devices()),
        kernels=tuple(_kernels()),
        models={p.name: p.version for p in found.packages},
        broken_models=dict(found.broken),
        plans=tuple(_plans(found)),
        cache=stored,
        hosts=tuple(_hosts()),
        problems=(*settings_problem, *cache_problem),
    )
    return _with_problems(report)


def version(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    ours = sorted({d.name for d in metadata.distributions() if d.name and d.name.startswith(PREFIX)})
    return {name: version(name) for name in (*ours, *LIBRARIES)}


def _settings() -> tuple[dict[str, Any], Problems]:
    try:
        return dataclasses.asdict(env.settings()), []
    except SettingsError as error:
        return {"error": error.what}, [(error.what, error.fix)]


def _driver_version() -> str | None:
    """The driver's version through NVML, which does not initialise CUDA; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    buffer = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() != 0:
        return None
    failed = nvml.nvmlSystemGetDriverVersion(buffer, len(buffer))
    nvml.nvmlShutdown()
    return None if failed else buffer.value.decode()


def _devices() -> list[Device]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        key = current_key(index)
        if key is not None:
            name = torch.cuda.get_device_name(index)
            found.append(Device(index, name, key.slug, product_name(key), neighbours(key)))
    return found


def _kernels() -> list[Kernel]:
    found = []
    for stem in kernels.stems():
        available, error = kernels.get(stem).availability()
        found.append(Kernel(stem, available, error or ""))
    return found


def _plans(found: family.Discovery) -> list[PlanFile]:
    files = [_plan(Path(file), f"skinny-{p.name}") for p in found.packages for file in p.plan_files()]
    files += [_plan(file, "user folder") for file in sorted(env.user_plan_folder().glob("*.toml"))]
    with suppress(SettingsError):  # already reported as a problem
        files += [_plan(env.expand(path), "SKINNY") for path in env.settings().plans]
    return files


def _plan(path: Path, origin: str) -> PlanFile:
    try:
        loaded = plan.load(path)
    except (PlanError, OSError) as error:
        return PlanFile(str(path), origin, error=output.fault(path, error))
    cells = Counter(cell.status for cell in loaded.cells)
    product = product_name(loaded.key) or loaded.key.slug
    return PlanFile(str(path), origin, loaded.family, product, loaded.digest, dict(cells))


def _cache() -> tuple[Cache, Problems]:
    try:
        folder, (count, size) = env.cache_folder(), cache.entries()
    except SettingsError:
        folder, count, size = Path(platformdirs.user_cache_dir("skinny", appauthor=False)), 0, 0
    exists, error = False, _write_error(folder / "kernels")
    with suppress(OSError):  # a name that is too long, a parent that cannot be searched: in `error` already
        exists = folder.is_dir()
    problems = [] if error is None else [(f"{folder} is not writable: {error}", CACHE_FIX)]
    return Cache(str(folder), exists, error is None, count, size), problems


def _write_error(folder: Path) -> str | None:
    """Why no file can be put into the folder, or None. Tried, as permissions say little: root passes every check and
    fails on a read-only or virtual file system.

    Folders that are missing are made inside a temporary one in the nearest that exists, so that a cache which
    another process makes at this moment is left alone. Nothing stays behind.
    """
    wanted = Path(os.path.normpath(folder.absolute()))
    existing = next(p for p in (wanted, *wanted.parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryDirectory(prefix=".skinny-", dir=existing) as scratch:
            tried = Path(scratch, wanted.relative_to(existing))
            tried.mkdir(parents=True, exist_ok=True)
            (tried / "entry").write_bytes(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _hosts() -> list[Host]:
    """Installed wheels of this project that have a `status`: the protocol of a host adapter."""
    found = []
    for name in sorted(n for n in _versions() if n.startswith(PREFIX)):
        try:
            status = getattr(import_module(name.replace("-", "_")), "status", None)
            if status is not None:
                found.append(_host(name, status))
        except Exception as error:
            found.append(Host(name, f"{type(error).__name__}: {error}", {}))
    return found


def _host(name: str, status: Callable[..., Any]) -> Host:
    if any(p.default is p.empty for p in inspect.signature(status).parameters.values()):
        return Host(name, "installed; works per model, ask its status(model)", {})
    state = status()
    return Host(name, state.text(), state.to_json())


def _with_problems(report: Report) -> Report:
    """Add what a reader should act on. A missing GPU is no problem: doctor must be useful on a laptop."""
    problems = list(report.problems)
    problems += [(f"model package {name} cannot be loaded", "reinstall it") for name in report.broken_models]
    for file in report.plans:
        if file.error:
            what = f"{output.place(file.error)}{file.error['what']}; the file is ignored"
            problems.append((what, file.error["fix"]))
    measured = {file.product for file in report.plans if not file.error and set(file.cells) != {"reported"}}
    for device in report.devices:
        name = device.product or device.key
        if name not in measured:
            near = ", ".join(n for n in device.neighbours if n in measured) or "none"
            reported = sum(file.cells.get("reported", 0) for file in report.plans if file.product == name)
            but = f" but {reported} cells reported by somebody else" if reported else ""
            what = f"no plan for {device.name} ({device.key}){but}; measured neighbours: {near}"
            problems.append((what, NO_PLAN_FIX))
    if report.devices:
        problems += [
            (f"kernel {k.stem} is unavailable: {k.error}", "install skinny-core[cute]")
            for k in report.kernels
            if not k.available
        ]
    return dataclasses.replace(report, problems=tuple(problems))
