"""What was asked for on the command line, judged before a model is loaded."""

from __future__ import annotations

import datetime
import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from msgspec import Struct

from skinny_core import device as devices
from skinny_lab.capture import document
from skinny_lab.capture.document import Capture
from skinny_lab.capture.tally import Tally
from skinny_lab.explain.target import RequestError

PROMPT_TOKENS = 19
"""Without a text: more rows than a plan has cells for, so that a tuner spends nothing on a prompt that nobody wrote;
odd, and no multiple of a tile."""


class Request(Struct, frozen=True, kw_only=True):
    """One capture. prompt: a text, or "" for `PROMPT_TOKENS` ids. new_tokens: per sequence, at least 2.

    batches: sequences per run. random: weights are drawn, only the config is read. device: Transformers only; tp: vLLM
    only. command: what was typed.
    """

    model: str
    prompt: str = ""
    new_tokens: int = 8
    batches: tuple[int, ...] = (1,)
    random: bool = False
    device: str = "auto"
    tp: int = 1
    command: str = ""

    def capture(self, host: Literal["transformers", "vllm"], tally: Tally, where: str, prompt_tokens: int) -> Capture:
        """The document of what was recorded. where: device. Raises `RequestError` if nothing was."""
        records = tally.records()
        if not records:
            said = "; ".join(tally.notes()) or "it never multiplies by a weight of its own"
            raise RequestError(f"{self.model}: no dense projection was seen: {said}", "capture an unquantised model")
        return Capture(
            model=self.model, host=host, versions=versions(host), device=where, tp=self.tp, records=records,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command=self.command,
            batches=self.batches, prompt_tokens=prompt_tokens, new_tokens=self.new_tokens, random=self.random,
            notes=tally.notes(),
        )  # fmt: skip


def command_line() -> str:
    """What was typed, as a shell reads it; `python -m skinny_lab` is `skinny`."""
    name = Path(sys.argv[0]).name
    return shlex.join(["skinny" if name == "__main__.py" else name, *sys.argv[1:]])


def find_batches(text: str) -> tuple[int, ...]:
    """ "1,3" is (1, 3), each once, in that order. Raises `RequestError` for anything else."""
    items = [item.strip() for item in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", item) for item in items):
        raise RequestError(f"--batch: cannot read {text[:40]!r}", "write numbers of sequences like 1 or 1,3,8")
    return tuple(dict.fromkeys(map(int, items)))


def find_device(text: str) -> torch.device:
    """The device of `--device`: auto, cpu, cuda, cuda:INDEX. Raises `RequestError`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "cpu" or (text == "auto" and not count):
        return torch.device("cpu")
    found = re.fullmatch(r"auto|cuda(?::([0-9]{1,3}))?", text)
    if found is None:
        raise RequestError(f"--device {text!r}: no such device", "use auto, cpu, cuda or cuda:INDEX")
    if int(found[1] or 0) >= count:
        seen = f"torch sees {count or 'no'} CUDA device{'' if count == 1 else 's'}"
        raise RequestError(f"--device {text!r}: {seen}", "use auto or cpu; `skinny doctor` lists the devices")
    return torch.device("cuda", int(found[1] or 0))


def device_name(where: torch.device) -> str:
    """ "NVIDIA H200 (key)", or "cpu" and the machine's architecture."""
    if where.type != "cuda":
        return f"{where.type} ({platform.machine()})"
    key = devices.current_key(where.index or 0)
    return f"{torch.cuda.get_device_name(where)} ({key.slug if key else 'unknown key'})"


def need(module: str, fix: str) -> None:
    """Raise `RequestError` unless a host can be imported."""
    if importlib.util.find_spec(module) is None:
        raise RequestError(f"{module} is not installed", fix)


def check_out(out: Path | None, *, force: bool) -> None:
    """Before the work: could the result be written?"""
    if out is not None:
        document.check_target(out, force=force)


def versions(host: str) -> dict[str, str]:
    """Versions of what decides the shapes and of what recorded them; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in ("skinny-lab", "skinny-core", "torch", "transformers", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def prompt_ids(vocabulary: int, count: int = PROMPT_TOKENS) -> Sequence[int]:
    """Ids of a prompt without a tokenizer, spread over the vocabulary. Shapes depend on their number only."""
    return [(i * 7919 + 1) % vocabulary for i in range(count)]
