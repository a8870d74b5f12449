"""`skinny capture`: check the request, record, write, show."""

from __future__ import annotations

from pathlib import Path

import msgspec

from skinny_lab import output
from skinny_lab.capture import document, request, view
from skinny_lab.capture.document import Capture
from skinny_lab.capture.request import Request


def transformers(asked: Request, out: Path | None, *, force: bool, as_json: bool) -> None:
    """Record in Transformers, in this process. Raises a `SkinnyError` for a request that cannot be met."""
    request.check_out(out, force=force)
    from skinny_lab.capture import transformers_host

    _finish(transformers_host.run(asked), out, force=force, as_json=as_json)


def vllm(asked: Request, out: Path | None, *, force: bool, as_json: bool) -> None:
    """Record in vLLM, in a process of its own. Raises a `SkinnyError` for a request that cannot be met."""
    request.check_out(out, force=force)
    from skinny_lab.capture import vllm_host

    _finish(vllm_host.run(asked), out, force=force, as_json=as_json)


def _finish(capture: Capture, out: Path | None, *, force: bool, as_json: bool) -> None:
    if out is not None:
        document.write(capture, out, force=force)
    if as_json:
        output.print_json(msgspec.to_builtins(capture))
        return
    console = output.console()
    for block in view.blocks(capture):
        console.print(block)
    said = f"{len(capture.records)} records written to {out}" if out else "nothing was written: name a file with --out"
    console.print(f"\n{said}", soft_wrap=True)
