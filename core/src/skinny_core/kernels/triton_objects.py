"""From a spec to a loaded kernel, for everything written in Triton: compile, keep in the project's disk cache, load.

Compiled ahead, from a stated signature rather than by a first launch: nothing runs on data, and the specialisation
cannot depend on the alignment of the first tensors seen. Triton is imported only inside these functions.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skinny_core import cache
from skinny_core.errors import KernelUnavailableError
from skinny_core.kernels import Binary

if TYPE_CHECKING:
    from skinny_core.device import DeviceKey

_KEPT = (".json", ".ptx", ".cubin")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the code of one kernel is.

    stem: start of its file names in the cache. files: paths in the package that the machine code depends on. describe:
    Triton's `ASTSource` and the compile options for a spec; called where Triton is imported.
    """

    stem: str
    files: tuple[str, ...]
    describe: Callable[[Any], tuple[Any, dict[str, Any]]]


def require(stem: str, available: tuple[bool, str]) -> None:
    """Raise `KernelUnavailableError` where Triton does not import (the error in `available`) or only interprets."""
    if not available[0]:
        raise KernelUnavailableError(f"{stem} needs Triton: {available[1]}", "install triton>=3.6 for this torch")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise KernelUnavailableError(
            "TRITON_INTERPRET=1 is set, so Triton cannot compile in this process", "unset it and start again"
        )


def compile_for(source: Source, spec: Hashable, capability: int) -> dict[str, bytes]:
    """The files Triton makes of a spec for a capability (90, 100, 103, 120), by suffix (".json", ".ptx", ".cubin").

    Needs no device and leaves nothing behind.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    code, options = source.describe(spec)
    # Triton's own cache would be a second copy, in a folder that a host may not be able to write.
    with tempfile.TemporaryDirectory(prefix="skinny-triton-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
        made = {Path(name).suffix: Path(path) for name, path in compiled.metadata_group.items()}
        return {suffix: made[suffix].read_bytes() for suffix in _KEPT}


def binary(source: Source, spec: Hashable, capability: int) -> Binary:
    """Machine code of a spec as tests look at it; shared_bytes is the dynamic part, all there is."""
    files = compile_for(source, spec, capability)
    return Binary(files[".ptx"].decode(), files[".cubin"], json.loads(files[".json"])["shared"])


def stored(source: Source, spec: Hashable, key: DeviceKey) -> Path:
    """Archive with the machine code of a spec for a device of that key: found in the disk cache, or compiled now."""

    def write(path: Path) -> None:
        major, minor = key.capability
        files = compile_for(source, spec, 10 * major + minor)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for suffix, data in files.items():
                archive.writestr(f"{source.stem}{suffix}", data)

    return cache.obtain(source.stem, _cache_key(source, spec, key), write)


def is_stored(source: Source, spec: Hashable, key: DeviceKey) -> bool:
    """Whether `stored` would compile nothing."""
    return cache.holds(source.stem, _cache_key(source, spec, key))


@functools.cache
def load(source: Source, spec: Hashable, key: DeviceKey, index: int) -> Any:
    """CompiledKernel of a spec, not yet on the device; one object per device, since each holds one loaded module."""
    path = stored(source, spec, key)
    try:
        return _restore(source, spec, path)
    except Exception as error:
        cache.set_aside(path, f"it does not load: {type(error).__name__}: {error}")
        return _restore(source, spec, stored(source, spec, key))


def _restore(source: Source, spec: Hashable, path: Path) -> Any:
    from triton.compiler import CompiledKernel

    with tempfile.TemporaryDirectory(prefix="skinny-triton-") as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        files = {name: str(Path(folder) / name) for name in archive.namelist()}
        return CompiledKernel(source.describe(spec)[0], files, path.stem)  # reads the files now


def _cache_key(source: Source, spec: Hashable, key: DeviceKey) -> str:
    sources = cache.source_digest(*source.files, "kernels/triton_objects.py")
    return f"{spec!r} device={key.slug} sources={sources} {cache.versions('triton')}"
