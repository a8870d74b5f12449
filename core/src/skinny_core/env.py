"""The one environment variable: `SKINNY`.

    SKINNY=off                              nothing is replaced
    SKINNY=on                               the default
    SKINNY=plan=/path/mine.toml,neighbour=on   a comma-separated list of key=value

Read when first needed, never at import; `settings()` is cached until `reload()`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from skinny_core.errors import SettingsError

VARIABLE = "SKINNY"
_FLAGS = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}
KEYS = {
    "plan": "path of a plan file to use before the shipped ones (may be repeated)",
    "neighbour": "on: use a plan measured on another device of the same capability",
    "reported": "on: also run cells that somebody else measured with one of our kernels",
    "batch_invariant": "on: never let the kernel depend on M (no cell runs)",
    "pdl": "off: launch every kernel without programmatic dependent launch",
    "cache": "folder for compiled kernels (default: the user cache folder)",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What `SKINNY` asks for; the defaults are an empty variable."""

    enabled: bool = True
    plans: tuple[str, ...] = field(default=())
    neighbour: bool = False
    reported: bool = False
    batch_invariant: bool = False
    pdl: bool = True
    cache: str | None = None


def parse(text: str) -> Settings:
    """Parse the value of `SKINNY`; raises `SettingsError` naming the item and the known keys."""
    value = text.strip()
    if value.lower() in _FLAGS:
        return Settings(enabled=_FLAGS[value.lower()])
    plans: list[str] = []
    flags: dict[str, bool] = {}
    cache: str | None = None
    for item in filter(None, (part.strip() for part in value.split(","))):
        key, sign, rest = item.partition("=")
        key, rest = key.strip().lower(), rest.strip()
        if not sign or key not in KEYS or not rest:
            known = ", ".join(sorted(KEYS))
            raise SettingsError(
                f"{VARIABLE}: cannot read {item!r}", f"write off, on, or key=value with a key of: {known}"
            )
        if key == "plan":
            plans.append(rest)
        elif key == "cache":
            cache = rest
        elif rest.lower() in _FLAGS:
            flags[key] = _FLAGS[rest.lower()]
        else:
            raise SettingsError(f"{VARIABLE}: {key} is {rest!r}", f"write {key}=on or {key}=off")
    return Settings(plans=tuple(plans), cache=cache, **flags)


@functools.cache
def settings() -> Settings:
    """Settings of this process; raises `SettingsError` for a malformed value."""
    return parse(os.environ.get(VARIABLE, ""))


def reload() -> Settings:
    """Read the variable again (tests; a long-lived notebook)."""
    settings.cache_clear()
    return settings()


def expand(path: str) -> Path:
    """A path with `~` replaced; one that names an unknown user stays as it is and is then not found."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_plan_folder() -> Path:
    """Where a user keeps plan files (`*.toml`) that count for every process. Nothing is created here. Raises `OSError`
    for
    a user without a home."""
    import platformdirs

    return _of_user(platformdirs.user_config_dir) / "plans"


def cache_folder() -> Path:
    """Where compiled kernels live: `SKINNY=cache=...`, else the user cache folder. Nothing is created here. Raises
    `OSError` for a user without a home."""
    import platformdirs

    chosen = settings().cache
    return expand(chosen) if chosen else _of_user(platformdirs.user_cache_dir)


def _of_user(folder: Callable[..., str]) -> Path:
    try:
        return Path(folder("skinny", appauthor=False))
    except RuntimeError as error:  # a container's arbitrary user: no HOME, no passwd entry
        raise OSError(f"no home folder: {error}") from None
