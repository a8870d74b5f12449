"""Run Triton kernels on the CPU with the rounding of the GPU.

The stock interpreter truncates FP32 -> BF16 and multiplies the raw bits of BF16 operands in `tl.dot`. `install()`
replaces the three methods at fault by torch-backed ones. Start the process with TRITON_INTERPRET=1: Triton decides at
import.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from skinny_core.errors import SkinnyError

SUPPORTED = ((3, 6), (3, 10))
"""Triton versions whose interpreter internals were read and tested: from the first, below the second."""


class InterpreterModeError(SkinnyError, RuntimeError):
    """The interpreter cannot be used in this process, or this Triton's internals are not known."""


_originals: dict[str, Any] = {}


def requested() -> bool:
    """Whether this process was started for the interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def install() -> None:
    """Patch the interpreter, once. Raises `InterpreterModeError`, and then has changed nothing."""
    if _originals:
        return
    if not requested():
        raise InterpreterModeError(
            "Triton's interpreter was not asked for in this process",
            "start Python with TRITON_INTERPRET=1 in the environment",
        )
    imported_before = "triton" in sys.modules
    import numpy
    import triton

    _check_versions(triton.__version__, numpy.__version__)
    if not _is_interpreted(triton.language.sum):
        when = "before" if imported_before else "although"
        raise InterpreterModeError(
            f"triton was imported {when} TRITON_INTERPRET=1 was set, so its own library functions are not interpreted",
            "set TRITON_INTERPRET=1 before anything imports triton; setting it from inside the process is too late",
        )
    from skinny_core.testing import interpreter_casts as casts

    builder = casts.Builder
    for name, replacement in casts.REPLACEMENTS.items():
        _originals[name] = getattr(builder, name)
        setattr(builder, name, replacement)


def uninstall() -> None:
    """Put the stock methods back; does nothing where `install` did not run."""
    if not _originals:
        return
    from skinny_core.testing import interpreter_casts as casts

    for name, original in _originals.items():
        setattr(casts.Builder, name, original)
    _originals.clear()


def _is_interpreted(function: Any) -> bool:
    return type(function).__name__ == "InterpretedFunction"


def _check_versions(triton: str, numpy: str) -> None:
    first, last = SUPPORTED
    if not first <= _pair(triton) < last:
        raise InterpreterModeError(
            f"the interpreter of triton {triton} is not known",
            f"use triton >={first[0]}.{first[1]},<{last[0]}.{last[1]}, or read its interpreter and widen SUPPORTED",
        )
    if _pair(triton) < (3, 7) and _pair(numpy) >= (2, 4):
        raise InterpreterModeError(
            f"the interpreter of triton {triton} cannot loop up to a run-time value with numpy {numpy}",
            "use numpy<2.4, or triton>=3.7",
        )


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
