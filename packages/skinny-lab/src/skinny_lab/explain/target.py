"""What the words on the command line mean: a model, a device, a set of M."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skinny_core import device, env, plan
from skinny_core.device import DeviceKey
from skinny_core.errors import SkinnyError
from skinny_core.family import ModelPackage, discover, for_architecture
from skinny_core.problem import MAX_M

_ROWS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
"""Digits that `int` reads, which are fewer than those of `str.isdigit`, and no more than it reads."""
_CONFIG_FIX = "give a Hugging Face config.json with an `architectures` list"


class RequestError(SkinnyError, LookupError):
    """The command line names something that is not there, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model config and the package that answers for it."""

    name: str
    package: ModelPackage
    config: Mapping[str, Any]


def find_model(text: str) -> Target:
    """A packaged config name ("qwen3-8b", "Qwen/Qwen3-8B"), a `config.json`, or a folder that holds one.

    Raises `RequestError` naming the known configs, or what is wrong with the file.
    """
    path = env.expand(text)
    if _is_file(path / "config.json"):
        path /= "config.json"
    if _is_file(path):
        return _from_file(path)
    packages = discover().packages
    wanted = text.rpartition("/")[2].lower()
    for package in packages:
        if wanted in package.configs:
            return Target(wanted, package, package.configs[wanted])
    known = ", ".join(name for package in packages for name in package.configs)
    fix = (
        f"use one of: {known}; or the path of a config.json" if known else "install a model package, e.g. skinny-qwen3"
    )
    raise RequestError(f"no file and no packaged config named {text!r}", fix)


def _is_file(path: Path) -> bool:
    """`Path.is_file`, and False for what cannot be a path at all, such as a text that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _from_file(path: Path) -> Target:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path}: not a model config ({type(error).__name__}: {error})"
        raise RequestError(what, _CONFIG_FIX) from None
    architectures = [names] if isinstance(names, str) else names
    if not isinstance(architectures, list) or not all(isinstance(name, str) and name for name in architectures):
        raise RequestError(f"{path}: `architectures` is {reprlib.repr(names)}, not a list of names", _CONFIG_FIX)
    if not architectures:
        raise RequestError(f"{path}: `architectures` is empty", _CONFIG_FIX)
    for architecture in architectures:
        package = for_architecture(architecture)
        if package is not None:
            return Target(str(path), package, config)
    answered = ", ".join(a for p in discover().packages for a in p.architectures) or "none"
    raise RequestError(
        f"{path}: no installed model package answers for {', '.join(architectures)}",
        f"install one; installed packages answer for: {answered}",
    )


def find_device(name: str | None, package: ModelPackage) -> tuple[DeviceKey, str]:
    """The key of a product; without a name this machine's GPU; without a GPU the device of the package's first plan,
    of one with more than reported cells where there is one.

    Returns the key and a note to show ("" where there is nothing to say). Raises `UnknownDeviceError`, or
    `RequestError` where nothing is left to choose from.
    """
    if name is not None:
        return device.product(name.lower()), ""
    here = device.current_key()
    if here is not None:
        return here, ""
    loaded = [(file, plan.load(file)) for file in package.plan_files()]
    for file, planned in sorted(loaded, key=lambda pair: pair[1].only_reported):
        return planned.key, f"no GPU here: showing {planned.product}, the device of {file.name} (choose with --device)"
    known = ", ".join(sorted(device.products()))
    raise RequestError("no GPU here, and the model package ships no plan", f"name a device with --device: {known}")


def find_rows(text: str) -> tuple[int, ...]:
    """ "1-4,8" is (1, 2, 3, 4, 8). Raises `RequestError` for anything else or outside 1 to MAX_M."""
    rows: set[int] = set()
    for item in text.split(","):
        found = _ROWS.fullmatch(item.strip())
        if found is None:
            raise RequestError(f"-M: cannot read {reprlib.repr(item.strip())}", "write rows like 1, 1-16 or 1,2,4")
        first, last = found[1], found[2] or found[1]
        chosen = range(int(first), int(last) + 1)
        if not chosen or chosen[0] < 1 or chosen[-1] > MAX_M:
            raise RequestError(f"-M {found[0]}: rows go from 1 to {MAX_M}", "write rows like 1, 1-16 or 1,2,4")
        rows |= set(chosen)
    return tuple(sorted(rows))
