"""The disk cache never hands out a broken kernel, whatever happened to its folder, and says what it did."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from skinny_core import cache
from skinny_core.cache import COUNTS, Counts

GOOD = b"\x7fELF machine code" * 1000


@pytest.fixture
def folder(tmp_path: Path, skinny: Callable[[str], None]) -> Path:
    """The kernels folder of an empty cache; counters at zero."""
    skinny(f"cache={tmp_path / 'cache'}")
    for name in Counts.__slots__:
        setattr(COUNTS, name, 0)
    return tmp_path / "cache" / "kernels"


def _write(path: Path) -> None:
    path.write_bytes(GOOD)


def _never(path: Path) -> None:
    raise AssertionError("compiled again")


def _names(folder: Path) -> list[str]:
    return sorted(f.name.partition(".")[2] for f in folder.iterdir() if f.suffix != ".lock")


def _entry(folder: Path) -> tuple[Path, Path]:
    path = cache.obtain("k", "key", _write)
    assert path.parent == folder
    return path, path.with_suffix(".json")


def test_compiled_once_then_loaded(folder: Path) -> None:
    assert not cache.holds("k", "key")
    path, manifest = _entry(folder)
    assert path.read_bytes() == GOOD
    assert cache.obtain("k", "key", _never) == path
    assert cache.holds("k", "key")
    assert Counts(compiled=1, loaded=1) == COUNTS
    assert cache.entries() == (1, len(GOOD))
    assert _names(folder) == ["json", "o"]
    assert json.loads(manifest.read_text())["key"].startswith("key machine=")


def test_nothing_is_created_by_asking(folder: Path) -> None:
    assert not cache.holds("k", "key")
    assert cache.entries() == (0, 0)
    assert not folder.exists()


def test_another_key_is_another_entry(folder: Path) -> None:
    assert cache.obtain("k", "key", _write) != cache.obtain("k", "other", _write)
    assert COUNTS.compiled == 2


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda o, _: o.write_bytes(GOOD[:-1]),
    "empty": lambda o, _: o.write_bytes(b""),
    "one bit": lambda o, _: o.write_bytes(b"\x7e" + GOOD[1:]),
    "manifest is no JSON": lambda _, j: j.write_text("{"),
    "manifest is empty": lambda _, j: j.write_text(""),
    "manifest is no UTF-8": lambda _, j: j.write_bytes(b"\xff"),
    "manifest is a list": lambda _, j: j.write_text("[]"),
    "manifest of another key": lambda _, j: j.write_text(json.dumps(json.loads(j.read_text()) | {"key": "other"})),
    "manifest without a sum": lambda _, j: j.write_text(json.dumps({"key": json.loads(j.read_text())["key"]})),
    "object is a folder": lambda o, _: (o.unlink(), o.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_entry_is_set_aside_and_made_anew(folder: Path, damage: str) -> None:
    path, manifest = _entry(folder)
    DAMAGE[damage](path, manifest)
    with pytest.warns(RuntimeWarning, match=r"kernel cache entry k-.* set aside"):
        assert cache.obtain("k", "key", _write) == path
    assert path.read_bytes() == GOOD
    assert Counts(compiled=2, set_aside=1) == COUNTS
    assert _names(folder) == ["json", "json.broken", "o", "o.broken"]
    assert cache.obtain("k", "key", _never) == path


@pytest.mark.parametrize("left", ["o", "json"])
def test_half_an_entry_is_no_entry(folder: Path, left: str) -> None:
    path, manifest = _entry(folder)
    (manifest if left == "o" else path).unlink()
    assert not cache.holds("k", "key")
    assert cache.obtain("k", "key", _write).read_bytes() == GOOD
    assert cache.obtain("k", "key", _never) == path
    assert COUNTS.set_aside == 0


def test_an_entry_repaired_by_another_process_is_not_set_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen broken, then replaced while this process waits for the lock: the new entry must stay where it is."""
    path, _ = _entry(folder)
    path.write_bytes(b"broken")
    lock = cache._lock

    def repaired(at: Path) -> object:
        path.write_bytes(GOOD)
        return lock(at)

    monkeypatch.setattr(cache, "_lock", repaired)
    assert cache.obtain("k", "key", _never) == path
    assert Counts(compiled=1, loaded=1) == COUNTS


def test_a_failing_compiler_leaves_nothing_behind(folder: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("ptxas said no")

    with pytest.raises(RuntimeError, match="ptxas"):
        cache.obtain("k", "key", fails)
    assert _names(folder) == []
    assert cache.obtain("k", "key", _write).read_bytes() == GOOD


def test_a_compiler_that_cannot_be_started_is_not_mistaken_for_a_full_disk(folder: Path) -> None:
    def absent(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "no ptxas")

    with pytest.raises(FileNotFoundError, match="no ptxas"):
        cache.obtain("k", "key", absent)
    assert COUNTS.not_stored == 0


def _refuses(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["the lock's and the object's file", "the manifest", "the rename"])
def test_a_full_disk_costs_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with monkeypatch.context() as patch:
        if what == "the manifest":
            patch.setattr(cache.os, "fsync", _refuses)
        elif what == "the rename":
            patch.setattr(cache.Path, "replace", _refuses)
        else:
            patch.setattr(cache.tempfile, "mkstemp", _refuses)
        with pytest.warns(RuntimeWarning, match=r"not kept: .*No space left"):
            path = cache.obtain("k", "key", _write)
    assert path.read_bytes() == GOOD
    assert path.parent != folder
    assert not cache.holds("k", "key")
    assert Counts(compiled=1, not_stored=1) == COUNTS
    assert _names(folder) == []
    assert cache.obtain("k", "key", _write).parent == folder


def test_a_disk_that_fills_while_the_compiler_writes(folder: Path) -> None:
    def write(path: Path) -> None:
        if path.parent == folder:
            path.write_bytes(GOOD[:10])
            _refuses()
        _write(path)

    with pytest.warns(RuntimeWarning, match="No space left"):
        path = cache.obtain("k", "key", write)
    assert path.read_bytes() == GOOD
    assert _names(folder) == []


def test_a_compiler_that_writes_nothing_is_an_error(folder: Path) -> None:
    with pytest.warns(RuntimeWarning, match="wrote nothing"), pytest.raises(OSError, match="wrote nothing"):
        cache.obtain("k", "key", lambda path: None)
    assert _names(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, skinny: Callable[[str], None]) -> None:
    (tmp_path / "file").write_text("")
    skinny(f"cache={tmp_path / 'file'}")
    with pytest.warns(RuntimeWarning, match="SKINNY=cache=FOLDER"):
        assert cache.obtain("k", "key", _write).read_bytes() == GOOD
    assert not cache.holds("k", "key")
    assert cache.entries() == (0, 0)


@pytest.mark.parametrize("readable", [True, False])
def test_a_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    """Root may write anywhere, so the refusals come from patches: what is there is used, the rest is not kept."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path, _ = _entry(folder)
    if not readable:
        path.write_bytes(b"broken")
    monkeypatch.setattr(cache.Path, "touch", denied)
    monkeypatch.setattr(cache.Path, "replace", denied)
    monkeypatch.setattr(filelock.FileLock, "acquire", denied)
    if readable:
        assert cache.obtain("k", "key", _never) == path
        return
    with pytest.warns(RuntimeWarning):
        other = cache.obtain("k", "key", _write)
    assert other != path
    assert other.read_bytes() == GOOD


def test_a_lock_file_left_behind_stops_nobody(folder: Path) -> None:
    path, manifest = _entry(folder)
    path.unlink()
    manifest.unlink()
    path.with_suffix(".lock").write_text("4242")
    assert cache.obtain("k", "key", _write) == path


def test_a_lock_that_is_never_released(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, manifest = _entry(folder)
    path.unlink()
    manifest.unlink()
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.0)
    with filelock.FileLock(path.with_suffix(".lock")):
        assert cache.obtain("k", "key", _write) == path
    assert cache.obtain("k", "key", _never) == path


WORKER = """
import sys, warnings, pathlib
warnings.simplefilter("ignore")
from skinny_core import cache
calls = pathlib.Path(sys.argv[1])
def compile_to(path):
    with calls.open("a") as f: f.write("x")
    with path.open("wb") as f:
        for _ in range(64):  # in pieces, so that a reader could see half of it
            f.write(b"machine code" * 256); f.flush()
sys.stdin.readline()
for _ in range(20):
    data = cache.obtain("k", "key", compile_to).read_bytes()
    assert data == b"machine code" * 256 * 64, len(data)
print(cache.COUNTS.compiled, cache.COUNTS.loaded, cache.COUNTS.set_aside, cache.COUNTS.not_stored)
"""


@pytest.mark.parametrize("state", ["empty", "truncated"])
def test_eight_processes_and_one_key(folder: Path, tmp_path: Path, state: str) -> None:
    if state == "truncated":
        _entry(folder)[0].write_bytes(GOOD[:100])
    calls = tmp_path / "calls"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WORKER, str(calls)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(8)]  # type: ignore[call-overload]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 8, results
    compiled, loaded, set_aside, not_stored = (
        sum(column) for column in zip(*(map(int, out.split()) for out, _ in results), strict=True)
    )
    assert calls.read_text() == "x", "compiled once for all"
    assert (compiled, loaded, set_aside, not_stored) == (1, 8 * 20 - 1, int(state == "truncated"), 0)
    aside = ["json.broken", "o.broken"] if state == "truncated" else []
    assert _names(folder) == sorted(["json", "o", *aside])


def test_digests_and_versions() -> None:
    assert cache.source_digest("cache.py") != cache.source_digest("env.py")
    assert cache.source_digest("cache.py", "env.py") != cache.source_digest("env.py", "cache.py")
    assert cache.versions("no-such-distribution") == "no-such-distribution=absent"
    assert cache.versions("torch").startswith("torch=")


def test_a_warning_names_the_entry_and_the_cause(folder: Path) -> None:
    path, _ = _entry(folder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        cache.set_aside(path, "it does not load: RuntimeError: x")
    assert path.name in str(seen[0].message)
    assert "it does not load" in str(seen[0].message)
    assert not cache.holds("k", "key")
