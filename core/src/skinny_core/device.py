"""Which GPU this is, told by what it is rather than by its family: capability, SMs, L2 bytes, memory class.

An H100, an H200, an H200 NVL, an H20 and a MIG slice share capability 9.0 and have five different keys.
Nothing here touches a device until `current_key()` is called.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from skinny_core.errors import UnknownDeviceError, warn

# Nominal board memory sizes. What vendors call GB is close to GiB as the driver reports it, less what ECC and the
# driver keep, so the class is the smallest nominal size that is at least the reported GiB less 3.5 %.
_NOMINAL_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288)
_RESERVED = 0.035
# Words of the driver's name that tell boards apart which the other three fields do not: other power limits and memory
# clocks. "H200" and "B200" are in the names of the superchips, too, which are boards of their own.
_BOARDS = (
    ("NVL", "nvl"), ("PCIE", "pcie"), ("GH200", "gh200"), ("GB200", "gb200"), ("GB300", "gb300"), ("MIG", "mig"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Identity of a GPU as far as speed is concerned.

    capability: (major, minor). sm_count: multiprocessors visible. l2_bytes: L2 size. memory_class: nominal GB,
    with a suffix for boards whose power or memory clocks differ at the same size ("141gb", "141gb-nvl").
    """

    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    memory_class: str

    @property
    def slug(self) -> str:
        """Readable and file-safe: "sm90-132sm-60mib-141gb"."""
        major, minor = self.capability
        return f"sm{major}{minor}-{self.sm_count}sm-{self.l2_bytes >> 20}mib-{self.memory_class}"

    @property
    def arch(self) -> str:
        """Compiler target: "sm_90a" from capability 9.0 on, "sm_89" below."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def has_pdl(self) -> bool:
        """Whether programmatic dependent launch exists (capability 9.0 and later)."""
        return self.capability >= (9, 0)

    def __str__(self) -> str:
        name = product_name(self)
        return f"{name} ({self.slug})" if name else self.slug


def key_from_properties(props: Any) -> DeviceKey:
    """Key for an object like `torch.cuda.get_device_properties(i)`: `name`, `major`, `minor`, `multi_processor_count`,
    `L2_cache_size` (bytes) and `total_memory` (bytes). Pure, so it can be tested with mocked properties."""
    name = str(props.name).upper()
    board = "-".join(suffix for word, suffix in _BOARDS if word in name)  # a slice of an NVL board is both
    size = props.total_memory / 2**30
    nominal = next((gb for gb in _NOMINAL_GB if size * (1 - _RESERVED) <= gb), round(size))
    memory_class = f"{nominal}gb-{board}" if board else f"{nominal}gb"
    return DeviceKey(
        (int(props.major), int(props.minor)), int(props.multi_processor_count), int(props.L2_cache_size), memory_class
    )


@functools.lru_cache(maxsize=64)
def _key_of_index(index: int) -> DeviceKey:
    import torch

    return key_from_properties(torch.cuda.get_device_properties(index))


def current_key(index: int | None = None) -> DeviceKey | None:
    """Key of CUDA device `index` (default: the current one), or None where torch sees no CUDA device.

    A device that cannot be read is none, with a warning. Initialises CUDA in this process, so never call it at import
    or before a fork.
    """
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None  # ROCm reports capabilities in the same fields, and they mean other chips
    try:
        return _key_of_index(torch.cuda.current_device() if index is None else index)
    except Exception as error:  # a forked child, a driver that went away, properties that torch does not fill
        warn(f"the CUDA device cannot be read, so no kernel runs: {type(error).__name__}: {error}")
        return None


@functools.cache
def products() -> dict[str, DeviceKey]:
    """Known products by short name ("h200"), from `devices.toml`."""
    return {name: _key(row) for name, row in _table().items()}


def is_measured(name: str) -> bool:
    """Whether this project has measured cells on that product."""
    return bool(_table().get(name, {}).get("measured", False))


def product(name: str) -> DeviceKey:
    """Key of a product name or of a slug; raises `UnknownDeviceError` naming the known ones."""
    known = products()
    if name in known:
        return known[name]
    by_slug = {key.slug: key for key in known.values()}
    if name in by_slug:
        return by_slug[name]
    raise UnknownDeviceError(f"unknown device {name!r}", f"use one of: {', '.join(sorted(known))}")


def product_name(key: DeviceKey) -> str | None:
    """Short name of a key, or None for a device that `devices.toml` does not list."""
    return next((name for name, known in products().items() if known == key), None)


def neighbours(key: DeviceKey) -> tuple[str, ...]:
    """Products of the same capability that have another key: a plan measured there may be tried, never assumed."""
    return tuple(n for n, known in products().items() if known.capability == key.capability and known != key)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("skinny_core").joinpath("devices.toml").read_text(encoding="utf-8"))


def _key(row: dict[str, Any]) -> DeviceKey:
    major, minor = row["capability"]
    return DeviceKey((major, minor), row["sm_count"], row["l2_bytes"], row["memory_class"])
