"""What the CuTe DSL kernels for 2-byte operands agree on: how a config is read, and which problems they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from skinny_core.errors import ConfigError
from skinny_core.problem import DType, Problem, WeightScheme

VECTOR = 8
"""Elements of 2 bytes in one 16-byte load."""
MAX_K = 2**24
MAX_ROWS = 2**30
"""Row numbers are 32-bit, and the last block may reach past N."""
C = TypeVar("C")


def parsed(cls: type[C], stem: str, params: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]]) -> C:
    """A config from plan data: a dataclass whose fields are the keys of `allowed`. Raises `ConfigError` naming the key
    and its allowed values.
    """
    keys: list[Any] = list(fields(cls))  # type: ignore[arg-type]
    if unknown := next((key for key in params if key not in allowed), None):
        raise ConfigError(f"{stem}: unknown config key {unknown!r}", f"use: {', '.join(sorted(allowed))}")
    needed = [key.name for key in keys if key.default is MISSING]
    if missing := next((name for name in needed if name not in params), None):
        give = f"give {', '.join(needed[:-1])} and {needed[-1]}"
        raise ConfigError(f"{stem}: config key {missing!r} is missing", give)
    for name, value in params.items():
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed[name]:
            raise ConfigError(f"{stem}: {name} is {value!r}", f"use one of {', '.join(map(str, allowed[name]))}")
    return cls(**params)


def refuses(problem: Problem, m: int, *, most: int) -> str | None:
    """Why such a kernel cannot take the problem at M = m with any config, or None. most: largest M."""
    half = (WeightScheme.BF16, DType.BF16), (WeightScheme.FP16, DType.FP16)
    if (problem.weight, problem.activation) not in half:
        return f"weight {problem.weight.value} with activation {problem.activation.value}: needs bf16 or fp16 for both"
    if problem.output not in (problem.activation, DType.FP32):
        return f"output {problem.output.value}: needs the activation's dtype or fp32"
    if not 1 <= m <= most:
        return f"M = {m}: needs 1 to {most}"
    if problem.k % VECTOR or not 0 < problem.k <= MAX_K:
        return f"K = {problem.k}: needs a positive multiple of {VECTOR}, at most {MAX_K}"
    if not 0 < problem.n <= MAX_ROWS:
        return f"N = {problem.n}: needs 1 to {MAX_ROWS}"
    return None
