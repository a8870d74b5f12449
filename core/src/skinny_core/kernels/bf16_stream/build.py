"""From a Spec to machine code: compile with Triton, keep it in the project's disk cache, load it on a device.

Compiled ahead, from a stated signature rather than by a first launch: nothing runs on data, and the specialisation
cannot depend on the alignment of the first tensors seen.
"""

from __future__ import annotations

import functools
import json
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skinny_core import cache
from skinny_core.kernels import Binary
from skinny_core.kernels.bf16_stream.config import STEM, VECTOR, Spec

if TYPE_CHECKING:
    from skinny_core.device import DeviceKey

_SOURCES = tuple(f"kernels/{STEM}/{name}.py" for name in ("kernel", "config", "build"))
_KEPT = (".json", ".ptx", ".cubin")


def compile_for(spec: Spec, capability: int) -> dict[str, bytes]:
    """The files Triton makes of a Spec for a capability (90, 100, 103, 120), by suffix (".json", ".ptx", ".cubin").

    Needs no device and leaves nothing behind.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    options = {
        "num_warps": spec.config.num_warps,
        "num_stages": spec.config.num_stages,
        "maxnreg": spec.config.max_registers,
        "launch_pdl": spec.pdl,
        "enable_fp_fusion": True,
    }
    # Triton's own cache would be a second copy, in a folder that a host may not be able to write.
    with tempfile.TemporaryDirectory(prefix="skinny-triton-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(_source(spec), target=GPUTarget("cuda", capability, 32), options=options)
        made = {Path(name).suffix: Path(path) for name, path in compiled.metadata_group.items()}
        return {suffix: made[suffix].read_bytes() for suffix in _KEPT}


def binary(spec: Spec, capability: int) -> Binary:
    """Machine code of a Spec as tests look at it; shared_bytes is the dynamic part, all there is."""
    files = compile_for(spec, capability)
    shared = json.loads(files[".json"])["shared"]
    return Binary(files[".ptx"].decode(), files[".cubin"], shared)


def stored(spec: Spec, key: DeviceKey) -> Path:
    """Archive with the machine code of a Spec for a device of that key: found in the disk cache, or compiled now."""

    def write(path: Path) -> None:
        files = compile_for(spec, _capability(key))
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for suffix, data in files.items():
                archive.writestr(f"{STEM}{suffix}", data)

    return cache.obtain(STEM, _cache_key(spec, key), write)


def is_stored(spec: Spec, key: DeviceKey) -> bool:
    """Whether `stored` would compile nothing."""
    return cache.holds(STEM, _cache_key(spec, key))


@functools.cache
def load(spec: Spec, key: DeviceKey, index: int) -> Any:
    """CompiledKernel of a Spec, not yet on the device; one object per device, since each holds one loaded module."""
    path = stored(spec, key)
    try:
        return _restore(spec, path)
    except Exception as error:
        cache.set_aside(path, f"it does not load: {type(error).__name__}: {error}")
        return _restore(spec, stored(spec, key))


def _restore(spec: Spec, path: Path) -> Any:
    from triton.compiler import CompiledKernel

    with tempfile.TemporaryDirectory(prefix="skinny-triton-") as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        files = {name: str(Path(folder) / name) for name in archive.namelist()}
        return CompiledKernel(_source(spec), files, path.stem)  # reads the files now


def _source(spec: Spec) -> Any:
    from triton.compiler import ASTSource

    from skinny_core.kernels.bf16_stream.kernel import stream_kernel

    element = {"x": spec.dtype, "w": spec.dtype, "y": spec.output, "residual": spec.dtype}
    signature = dict.fromkeys(stream_kernel.arg_names, "constexpr")
    signature |= {name: f"*{dtype.value}" for name, dtype in element.items()}
    signature |= dict.fromkeys(("M", "N", "K"), "i32")
    signature |= dict.fromkeys(("stride_x", "stride_w", "stride_y", "stride_r"), "i64")
    # What `host` checks at every call: 16-byte addresses; K and row strides of x and w in whole 16-byte vectors.
    divisible = {"x": 16, "w": 16, "K": VECTOR, "stride_x": VECTOR, "stride_w": VECTOR}
    place = stream_kernel.arg_names.index
    return ASTSource(
        fn=stream_kernel,
        signature=signature,
        constexprs={(place(name),): value for name, value in spec.constants.items()},
        attrs={(place(name),): [["tt.divisibility", by]] for name, by in divisible.items()},
    )


def _capability(key: DeviceKey) -> int:
    major, minor = key.capability
    return 10 * major + minor


def _cache_key(spec: Spec, key: DeviceKey) -> str:
    return f"{spec!r} device={key.slug} sources={cache.source_digest(*_SOURCES)} {cache.versions('triton')}"
