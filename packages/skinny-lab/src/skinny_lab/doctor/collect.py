"""Gather the facts of a report. Every look-up survives its own failure, so that one broken part hides no other."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import platform
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
from skinny_lab.doctor.report import Cache, Device, Host, Kernel, PlanFile, Report

LIBRARIES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "vllm", "transformers")
PREFIX = "skinny-"


def collect() -> Report:
    """Look at everything. Initialises CUDA where there is a GPU; imports every DSL and every installed skinny wheel."""
    settings, settings_problem = _settings()
    found = family.discover()
    plans = tuple(_plans(found))
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
        plans=plans,
        cache=_cache(),
        hosts=tuple(_hosts()),
        problems=tuple(settings_problem),
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


def _settings() -> tuple[dict[str, Any], list[tuple[str, str]]]:
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
        files += [_plan(Path(path).expanduser(), "SKINNY") for path in env.settings().plans]
    return files


def _plan(path: Path, origin: str) -> PlanFile:
    try:
        loaded = plan.load(path)
    except PlanError as error:
        said = {"what": error.what, "fix": error.fix, "file": error.file, "line": error.line}
        return PlanFile(str(path), origin, error=said)
    except OSError as error:
        said = {"what": str(error), "fix": "check the path", "file": str(path), "line": 0}
        return PlanFile(str(path), origin, error=said)
    cells = Counter(cell.status for cell in loaded.cells)
    product = product_name(loaded.key) or loaded.key.slug
    return PlanFile(str(path), origin, loaded.family, product, loaded.digest, dict(cells))


def _cache() -> Cache:
    try:
        folder, (count, size) = env.cache_folder(), cache.entries()
    except SettingsError:
        folder, count, size = Path(platformdirs.user_cache_dir("skinny", appauthor=False)), 0, 0
    return Cache(str(folder), folder.is_dir(), _is_writable(folder), count, size)


def _is_writable(folder: Path) -> bool:
    """Whether a file could be made in the folder, or the folder in its nearest existing parent."""
    existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


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
            line = f":{file.error['line']}" if file.error["line"] else ""
            problems.append((f"{file.path}{line}: {file.error['what']}; the file is ignored", file.error["fix"]))
    if not report.cache.writable:
        problems.append((f"{report.cache.path} is not writable", "set SKINNY=cache=FOLDER, or mend its permissions"))
    families = {file.product for file in report.plans if not file.error}
    for device in report.devices:
        if device.product not in families:
            near = ", ".join(device.neighbours) or "none"
            what = f"no plan for {device.name} ({device.key}); measured neighbours: {near}"
            problems.append((what, "measure it with `skinny bench`, or opt in to a neighbour with SKINNY=neighbour=on"))
    if report.devices:
        problems += [
            (f"kernel {k.stem} is unavailable: {k.error}", "install skinny-core[cute]")
            for k in report.kernels
            if not k.available
        ]
    return dataclasses.replace(report, problems=tuple(problems))
