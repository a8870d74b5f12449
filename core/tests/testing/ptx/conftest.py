"""Tiny PTX programs: a body, 64-bit parameters `p0`, `p1`, ... in %rd0, %rd1, ..., %tid.x in %r0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skinny_core.testing.ptx import Machine, Memory

REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %rd<20>;"


def program(body: str, params: int, shared: int) -> str:
    """The text of an entry."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [p{i}];" for i in range(params))
    memory = f".shared .align 128 .b8 buffer[{shared}];" if shared else ""
    return f"""
.version 9.0
.target sm_90a
.address_size 64
.visible .entry tiny({declared})
{{
{REGISTERS}
{memory}
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}"""


@pytest.fixture
def text() -> Callable[..., str]:
    """`program` as a fixture: text(body, params, shared)."""
    return program


@pytest.fixture
def execute() -> Callable[..., Memory]:
    """execute(body, *arrays, threads=32, shared=0, dependent=False, flags={index: {...}}, machine options)."""

    def run(
        body: str,
        *arrays: np.ndarray[Any, Any],
        threads: int = 32,
        shared: int = 0,
        dependent: bool = False,
        flags: dict[int, dict[str, Any]] | None = None,
        **options: Any,
    ) -> Memory:
        memory = Memory()
        args = [memory.add(f"p{i}", array, **(flags or {}).get(i, {})) for i, array in enumerate(arrays)]
        machine = Machine(program(body, len(args), shared), **options)
        machine.run(1, threads, args, memory, dependent=dependent)
        return memory

    return run
