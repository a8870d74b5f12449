"""From a spec to a callable function, for every kernel written in CuTe DSL: compile, keep on disk, load on a device.

The DSL is imported only inside these functions.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skinny_core import cache, device
from skinny_core.kernels import Binary

if TYPE_CHECKING:
    from skinny_core.device import DeviceKey

_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the code of one kernel is.

    stem: folder under `kernels/`, and the name of the function to launch in its `kernel.py`. files: further modules of
    that folder, or paths under `kernels/`, that the machine code depends on. `kernel.py` also has `example()`:
    arguments of the function in front of the spec, of which only the types count.
    """

    stem: str
    files: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 over every file that the machine code depends on."""
        own = (f"{self.stem}/kernel.py", *self.files, "cute_objects.py")
        return cache.source_digest(*(f"kernels/{name}" for name in own))


@functools.cache
def availability(source: Source) -> tuple[bool, str]:
    """Whether CuTe DSL, TVM-FFI and everything that the kernel uses of them import; else the original error."""
    try:
        import tvm_ffi  # noqa: F401

        _module(source)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def binary(source: Source, spec: Hashable, arch: str, shared_bytes: int) -> Binary:
    """Machine code of a spec as tests look at it; needs no device."""
    compiled = _compile(source, spec, arch, keep=True)
    return Binary(compiled.__ptx__, compiled.__cubin__, shared_bytes)


def stored(source: Source, spec: Hashable, name: str, key: DeviceKey) -> Path:
    """The object file of a spec for a device key: found in the disk cache, or compiled now. Touches no device.

    name: readable start of the file name.
    """

    def write(path: Path) -> None:
        _compile(source, spec, key.arch).export_to_c(object_file_path=str(path), function_name=source.stem)

    return cache.obtain(name, _cache_key(source, spec, key), write)


def is_stored(source: Source, spec: Hashable, name: str, key: DeviceKey) -> bool:
    """Whether `stored` would compile nothing."""
    return cache.holds(name, _cache_key(source, spec, key))


_modules: list[Any] = []  # a loaded function does not keep its module's code mapped


@functools.cache
def load(source: Source, spec: Hashable, name: str, index: int) -> Any:
    """The compiled function for CUDA device `index`, from the disk cache where possible."""
    import cutlass.cute as cute

    key = device.current_key(index)
    assert key is not None  # the host's compile() has checked it
    for attempt in (1, 2):
        path = stored(source, spec, name, key)
        try:
            module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            _modules.append(module)
            return module[source.stem]
        except Exception as error:
            if attempt == 2:
                raise
            cache.set_aside(path, f"it does not load: {type(error).__name__}: {error}")
    raise AssertionError("unreachable")


def _compile(source: Source, spec: Hashable, arch: str, *, keep: bool = False) -> Any:
    """Run the DSL compiler for `arch`."""
    import cutlass.cute as cute

    module = _module(source)
    function, example = getattr(module, source.stem), module.example()
    with tempfile.TemporaryDirectory(prefix="skinny-") as dump:
        options = f"--enable-tvm-ffi --gpu-arch={arch}"
        if keep:
            options += f" --keep-ptx --keep-cubin --dump-dir={dump}"
        compiled = cute.compile(function, *example, spec, options=options)
        if keep:
            # Read while the dump folder exists; the attributes are lazy in some releases.
            _ = compiled.__ptx__, compiled.__cubin__
    return compiled


def _module(source: Source) -> Any:
    """The DSL code of a kernel."""
    return importlib.import_module(f"skinny_core.kernels.{source.stem}.kernel")


def _cache_key(source: Source, spec: Hashable, key: DeviceKey) -> str:
    return f"{spec!r} device={key.slug} sources={source.digest()} {cache.versions(*_DISTRIBUTIONS)}"
