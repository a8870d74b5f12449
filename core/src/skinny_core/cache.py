"""Compiled kernels on disk: a second process starts with no compile at all.

An entry is an object file plus a manifest with its key and SHA-256, written last. Both are written beside their final
name and renamed. An entry that fails its check is set aside, never loaded. A folder that cannot be written costs a
warning, not an error.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from skinny_core import env
from skinny_core.errors import warn

LOCK_SECONDS = 300.0
"""Longest wait for another process that compiles the same kernel; after it this process compiles for itself."""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@dataclass(slots=True)
class Counts:
    """What this process did: kernels compiled, loaded from disk, entries set aside, entries not stored."""

    compiled: int = 0
    loaded: int = 0
    set_aside: int = 0
    not_stored: int = 0


COUNTS = Counts()


@functools.cache
def versions(*distributions: str) -> str:
    """ "name=version" of each distribution, for a cache key; "absent" where it is not installed.

    Read once per process: a warm-up asks for it three times per cell, at 0.6 ms each (2026-12-01)."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name}={version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}=absent")
    return " ".join(found)


@functools.cache
def source_digest(*names: str) -> str:
    """SHA-256 over the text of package files, such as "kernels/bf16_simt/kernel.py"."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + files("skinny_core").joinpath(name).read_bytes() + b"\0")
    return digest.hexdigest()


def obtain(name: str, key: str, compile_to: Callable[[Path], None]) -> Path:
    """Path of a valid object file for `key`, compiled by `compile_to(path)` if there is none.

    name: readable start of the file name. key: everything the machine code depends on. Where the cache folder cannot be
    written the object goes to a private temporary folder and is not kept.
    """
    stem, full_key = _names(name, key)
    try:
        folder = env.cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _private(stem, compile_to, error)
    target = folder / f"{stem}.o"
    if _fault(target, full_key) == "":
        COUNTS.loaded += 1
        return target
    with _lock(folder / f"{stem}.lock"):
        # Judged again: another process may just have replaced what was broken, and its entry must stay.
        fault = _fault(target, full_key)
        if fault == "":
            COUNTS.loaded += 1
            return target
        if fault is not None:
            set_aside(target, fault)
        try:
            # Not named by the process: two containers on one volume may share a number.
            handle, made = tempfile.mkstemp(prefix=f"{stem}.", suffix=".tmp.o", dir=folder)
            os.close(handle)
            scratch = Path(made)
        except OSError as error:
            return _private(stem, compile_to, error)
        try:
            try:
                compile_to(scratch)
            except OSError as error:
                if error.errno not in _DISK and folder.is_dir():
                    raise
                return _private(stem, compile_to, error)
            COUNTS.compiled += 1
            try:
                _publish(scratch, target, full_key)
            except OSError as error:
                # A full disk can truncate the object: never load what could not be stored whole.
                return _private(stem, compile_to, error, count=False)
            return target
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def holds(name: str, key: str) -> bool:
    """Whether `obtain` would find an entry; checks that the files are there, not what is in them."""
    stem, _ = _names(name, key)
    try:
        target = env.cache_folder() / "kernels" / f"{stem}.o"
        return target.exists() and _manifest(target).exists()
    except OSError:
        return False


def _names(name: str, key: str) -> tuple[str, str]:
    full_key = f"{key} machine={platform.machine()}"
    return f"{name}-{hashlib.sha256(full_key.encode()).hexdigest()[:24]}", full_key


def entries() -> tuple[int, int]:
    """Number of stored kernels and their bytes; (0, 0) where there is no cache folder."""
    try:
        sizes = [f.stat().st_size for f in (env.cache_folder() / "kernels").glob("*.o")]
    except OSError:
        return 0, 0
    return len(sizes), sum(sizes)


def set_aside(target: Path, why: str) -> None:
    """Rename an entry that cannot be used, so that it is neither loaded nor lost; warns."""
    COUNTS.set_aside += 1
    warn(f"kernel cache entry {target.name} set aside: {why}")
    for path in (target, _manifest(target)):
        try:
            if path.exists():
                path.replace(path.with_name(path.name + ".broken"))
        except OSError:
            continue


def _manifest(target: Path) -> Path:
    return target.with_suffix(".json")


def _fault(target: Path, key: str) -> str | None:
    """ "" for a valid entry, None where there is none, else what is wrong with it."""
    try:
        if not target.exists() or not _manifest(target).exists():
            return None
        manifest = json.loads(_manifest(target).read_text(encoding="utf-8"))
        found = hashlib.sha256(target.read_bytes()).hexdigest()
    except (OSError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(manifest, dict) and manifest.get("key") == key and manifest.get("sha256") == found:
        return ""
    return "its contents do not match its manifest"


def _publish(scratch: Path, target: Path, key: str) -> None:
    data = scratch.read_bytes()
    if not data:
        raise OSError("the compiler wrote nothing")
    scratch.chmod(0o644)  # a temporary file is its owner's alone, a cache may be shared
    manifest = {"key": key, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    note = scratch.with_suffix(".json")
    try:
        with note.open("w", encoding="utf-8") as f:
            json.dump(manifest, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        scratch.replace(target)
        note.replace(_manifest(target))
    finally:
        note.unlink(missing_ok=True)


def _private(stem: str, compile_to: Callable[[Path], None], error: OSError, *, count: bool = True) -> Path:
    COUNTS.not_stored += 1
    warn(f"compiled kernels are not kept: {error} (set SKINNY=cache=FOLDER to a writable folder)")
    path = Path(tempfile.mkdtemp(prefix="skinny-")) / f"{stem}.o"
    compile_to(path)
    if not path.is_file() or not path.stat().st_size:
        raise OSError("the compiler wrote nothing")
    COUNTS.compiled += count
    return path


def _lock(path: Path) -> AbstractContextManager[object]:
    """An exclusive lock, or nothing where a lock cannot be had: then the work is done twice, which is safe."""
    import filelock

    lock = filelock.FileLock(path, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except (OSError, filelock.Timeout):
        return nullcontext()
    return _Release(lock)


class _Release(AbstractContextManager[object]):
    def __init__(self, lock: object) -> None:
        self._lock = lock

    def __exit__(self, *_: object) -> None:
        self._lock.release()  # type: ignore[attr-defined]
