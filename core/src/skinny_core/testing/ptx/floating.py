"""Floating-point instructions that numpy has no counterpart of: fused, mixed, approximate and directed ones.

`fma.f32` is computed in FP64 and corrected where that would round twice (results below 2**-126 excepted), so it has the
device's bits. The `.approx` ones are more accurate than there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from skinny_core.testing.ptx import arithmetic
from skinny_core.testing.ptx.arithmetic import assign
from skinny_core.testing.ptx.convert import from_bf16
from skinny_core.testing.ptx.decode import Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Instruction, Operand
from skinny_core.testing.ptx.warp import F32, U16, Step, Warp

_LOW = np.full(32, 0x1FFFFFFF, "u8")
_TIE = np.full(32, 0x10000000, "u8")


def _fma(ctx: Decoder, i: Instruction) -> Step:
    if i.parts[-1] != "f32":
        return _mixed_fma(ctx, i)
    refuse(i, {"rn", "rm", "rp", "rz", "f32"})
    a, b, c = (ctx.source(o, F32) for o in i.operands[1:4])
    d = ctx.target(i.operands[0], F32)
    if i.parts[1] != "rn":
        mode = i.parts[1]
        return assign(F32, d, lambda x, y, z: _directed(mode, x, y, z), [(F32, a), (F32, b), (F32, c)])

    def _step(w: Warp) -> None:
        r, (p, q) = w.rows[F32], w.wide
        p[:] = r[a]
        q[:] = r[b]
        np.multiply(p, q, p)  # exact: 48 bits
        q[:] = r[c]
        s = p + q
        if np.count_nonzero((s.view("u8") & _LOW) == _TIE):
            _settle_ties(s, p, q)
        np.copyto(r[d], s, where=w.where, casting="same_kind")

    return _step


def _lost(s: Array, p: Array, q: Array) -> Array:
    """What the FP64 sum s = p + q has rounded away, exactly."""
    back = s - p
    return np.asarray((p - (s - back)) + (q - back))


def _settle_ties(s: Array, p: Array, q: Array) -> None:
    """Where the FP64 sum lies half-way between two FP32 only because it was rounded, move it to the true side."""
    error = _lost(s, p, q)
    if not np.count_nonzero(error):
        return  # true ties, which nearest even settles
    tie = ((s.view("u8") & _LOW) == _TIE) & (error != 0) & np.isfinite(s)
    s[tie] = np.nextafter(s[tie], np.where(error[tie] > 0, np.inf, -np.inf))


def _directed(mode: str, a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded down (.rm), up (.rp) or towards zero (.rz)."""
    p, q = a.astype("f8") * b, c.astype("f8")
    s = p + q
    error, y = _lost(s, p, q), s.astype("f4")
    above, below = (y > s) | ((y == s) & (error < 0)), (y < s) | ((y == s) & (error > 0))
    down = above if mode == "rm" else above & (y > 0) if mode == "rz" else np.zeros(len(y), bool)
    up = below if mode == "rp" else below & (y < 0) if mode == "rz" else np.zeros(len(y), bool)
    y = np.where(down, np.nextafter(y, np.float32(-np.inf)), y)
    return np.asarray(np.where(up, np.nextafter(y, np.float32(np.inf)), y))


def _widened(ctx: Decoder, operand: Operand, kind: str) -> tuple[int, Any]:
    """Row of a 16-bit float, and how its bits become FP32."""
    read = from_bf16 if kind == "bf16" else lambda x: x.view("f2").astype("f4")
    return ctx.source(operand, U16), read


def _mixed_fma(ctx: Decoder, i: Instruction) -> Step:
    if i.parts[1:-1] != ("rn", "f32") or i.parts[-1] not in ("bf16", "f16"):
        raise UnknownInstruction("this form of fma")
    (a, read), (b, _) = (_widened(ctx, o, i.parts[-1]) for o in i.operands[1:3])
    d, c = ctx.target(i.operands[0], F32), ctx.source(i.operands[3], F32)
    # The product of two 16-bit floats is exact in FP32 unless it is tiny or huge: one rounding, then.
    return assign(F32, d, lambda x, y, z: read(x) * read(y) + z, [(U16, a), (U16, b), (F32, c)])


def _sum(name: str, function: Any) -> Builder:
    """add or sub: the mixed form `add.rn.f32.bf16`, or a plain one."""

    def _build(ctx: Decoder, i: Instruction) -> Step:
        if "f32" not in i.parts[1:-1]:
            return arithmetic.BUILDERS[name](ctx, i)
        refuse(i, {"rn", "f32", "bf16", "f16"})
        a, read = _widened(ctx, i.operands[1], i.parts[-1])
        d, b = ctx.target(i.operands[0], F32), ctx.source(i.operands[2], F32)
        return assign(F32, d, lambda x, y: function(read(x), y), [(U16, a), (F32, b)])

    return _build


def _flush(x: Array) -> Array:
    """Subnormal FP32 become zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(x.dtype.type(0), x), x)


def _approximate(function: Any) -> Builder:
    def _build(ctx: Decoder, i: Instruction) -> Step:
        refuse(i, {"approx", "rn", "ftz", "f32"})
        d, a = ctx.target(i.operands[0], F32), ctx.source(i.operands[1], F32)
        if "ftz" in i.parts:
            return assign(F32, d, lambda x: _flush(function(_flush(x).astype("f8")).astype("f4")), [(F32, a)])
        return assign(F32, d, lambda x: function(x.astype("f8")), [(F32, a)])

    return _build


BUILDERS: dict[str, Builder] = {
    "add": _sum("add", np.add),
    "sub": _sum("sub", np.subtract),
    "fma": _fma,
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
    "rcp": _approximate(np.reciprocal),
    "sqrt": _approximate(np.sqrt),
    "rsqrt": _approximate(lambda x: 1 / np.sqrt(x)),
    "tanh": _approximate(np.tanh),
}
