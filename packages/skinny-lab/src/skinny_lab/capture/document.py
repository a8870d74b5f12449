"""A capture file: its schema (version 1), reading with validation, writing as a whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from skinny_core.errors import SkinnyError
from skinny_core.problem import MAX_M

SCHEMA = 1
Positive = Annotated[int, Meta(gt=0, lt=1 << 31)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Phase = Literal["prefill", "decode"]
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""torch's name -> the project's, for the element types that plans know; any other keeps torch's name."""


class CaptureError(SkinnyError, ValueError):
    """A capture file cannot be used or written. `file` says which."""

    def __init__(self, what: str, fix: str, *, file: Path | str) -> None:
        super().__init__(f"{file}: {what}", fix)
        self.file = str(file)


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One dense product `y[M, N] = x[M, K] @ w[N, K].T` of one kind of layer, in one phase.

    activation, weight, output: element types, "bf16", "fp16", "fp32", else torch's name ("float64").
    bias: the layer adds a vector of N elements, in the same call or right after it.
    layer: path with whole numbers replaced by "*" ("model.layers.*.mlp.down_proj").
    layers: how many layers that path stands for here. calls: in one forward pass, all of those layers together; the
    largest number seen. steps: forward passes in which it was seen. phase: "decode" where the forward pass had one row
    per sequence, else "prefill".
    """

    n: Positive
    k: Positive
    m: Positive
    activation: Text
    weight: Text
    output: Text
    bias: bool
    layer: Text
    layers: Positive
    calls: Positive
    steps: Positive
    phase: Phase

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two records of one capture cannot share."""
        return (self.n, self.k, self.m, self.activation, self.weight, self.output, self.bias, self.layer, self.phase)


class Capture(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A capture file.

    model: as it was asked for. host: "transformers" or "vllm". versions: distribution -> version. device: name of the
    device the model ran on. tp: tensor-parallel size; shapes are those of one rank. date: UTC, ISO 8601. command: what
    was typed. batches: sequences per run. prompt_tokens, new_tokens: per sequence. random: weights were random.
    notes: what was seen and is not among the records, in words.
    """

    schema: Literal[1] = SCHEMA
    model: Text
    host: Literal["transformers", "vllm"]
    versions: dict[str, str]
    device: Text
    tp: Positive = 1
    date: Text
    command: str
    batches: tuple[Positive, ...]
    prompt_tokens: Positive
    new_tokens: Positive
    random: bool
    records: Annotated[tuple[Record, ...], Meta(min_length=1)]
    notes: tuple[str, ...] = ()

    def select(self, *, max_m: int = MAX_M, phase: Phase | None = None) -> Iterator[Record]:
        """Records with at most `max_m` rows, of one phase or of both."""
        return (r for r in self.records if r.m <= max_m and phase in (None, r.phase))

    def shapes(self, *, max_m: int = MAX_M, phase: Phase | None = None) -> dict[tuple[int, int], set[int]]:
        """(N, K) -> the M it was issued with, of the records that `select` gives: what a tuner measures."""
        found: dict[tuple[int, int], set[int]] = {}
        for record in self.select(max_m=max_m, phase=phase):
            found.setdefault((record.n, record.k), set()).add(record.m)
        return found


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype in a record."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def read(path: Path | str) -> Capture:
    """Read and validate a capture file. Raises `CaptureError` with file, problem and fix."""
    path = Path(path)
    again = "make it again with `skinny capture`"
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CaptureError(f"cannot be read: {error.strerror or error}", "check the path", file=path) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CaptureError(f"not JSON: {error}", again, file=path) from None
    if not isinstance(data, dict) or "schema" not in data:
        raise CaptureError("not a capture: it has no `schema`", again, file=path)
    if data["schema"] != SCHEMA or isinstance(data["schema"], bool):
        fix = "use a skinny-lab that writes and reads the same schema, or " + again
        raise CaptureError(f"schema {data['schema']!r} is not {SCHEMA}", fix, file=path)
    try:
        capture = msgspec.convert(data, Capture)
    except msgspec.ValidationError as error:
        raise CaptureError(_readable(error), f"correct that value, or {again}", file=path) from None
    seen: dict[tuple[Any, ...], int] = {}
    for index, record in enumerate(capture.records):
        if record.identity in seen:
            what = f"records[{index}] and records[{seen[record.identity]}] are the same product"
            raise CaptureError(what, "remove one, or " + again, file=path)
        seen[record.identity] = index
    return capture


def _readable(error: msgspec.ValidationError) -> str:
    """ "Expected `int`, got `str` - at `$.records[0].n`" without the `$.`."""
    return re.sub(r" - at `\$\.?(.*?)`$", lambda m: f" at `{m[1]}`" if m[1] else "", str(error))


def encode(capture: Capture) -> bytes:
    """The JSON text of a capture: a line per record, so that two files can be compared by eye and by `diff`."""
    data = msgspec.to_builtins(capture)
    slots = [secrets.token_hex(8) for _ in data["records"]]
    lines = [msgspec.json.encode(record) for record in data["records"]]
    text = msgspec.json.format(msgspec.json.encode({**data, "records": slots}), indent=1)
    for slot, line in zip(slots, lines, strict=True):
        text = text.replace(f'"{slot}"'.encode(), line)
    return text + b"\n"


def check_target(path: Path, *, force: bool) -> None:
    """Raise `CaptureError` now if a capture could not be written to `path` later. Nothing is left behind.

    Asked before a model is loaded. A scratch file is really made: access bits say little to root or about a mount.
    """
    if path.is_dir():
        raise CaptureError("is a folder", "name a file in it with --out", file=path)
    if not force and os.path.lexists(path):
        raise CaptureError("exists already", "name another file, or overwrite it with --force", file=path)
    scratch = _scratch(path)
    try:
        scratch.touch(exist_ok=False)
        scratch.unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise CaptureError(what, f"make {path.parent} a folder that you may write to", file=path) from None


def write(capture: Capture, path: Path | str, *, force: bool = False) -> None:
    """Write a capture under another name and rename it: readers see the old file or the new one, never a part.

    Raises `CaptureError` for a file that exists (unless `force`) or cannot be written; then nothing has changed.
    """
    path = Path(path)
    check_target(path, force=force)
    scratch = _scratch(path)
    try:
        with scratch.open("wb") as file:
            file.write(encode(capture))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise CaptureError(f"cannot be written: {error.strerror or error}", "check the disk", file=path) from None
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name[:64]}.{secrets.token_hex(6)}.tmp")
