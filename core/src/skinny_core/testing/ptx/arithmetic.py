"""Integer, logic and plain floating-point instructions, comparisons and selections: numpy's do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from skinny_core.testing.ptx.decode import BITS, KINDS, SIGNED, UNSIGNED, Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Imm, Instruction, Not, Operand, Pair, Sink
from skinny_core.testing.ptx.warp import F32, F64, PRED, S16, S32, S64, U16, U32, U64, Step, Warp

_INTEGERS = {U16, S16, U32, S32, U64, S64}


def assign(kind: int, d: int, value: Callable[..., Any], sources: list[tuple[int, int]]) -> Step:
    """d = value(*rows), cast as C would. The general form, for what is not worth a closure of its own."""

    def _step(w: Warp) -> None:
        rows = w.rows
        np.copyto(rows[kind][d], value(*[rows[k][i] for k, i in sources]), where=w.where, casting="unsafe")

    return _step


def _ufunc(function: Any, kind: int, d: int, sources: list[int], dkind: int | None = None) -> Step:
    out = kind if dkind is None else dkind
    if len(sources) == 1:
        (a,) = sources

        def _one(w: Warp) -> None:
            function(w.rows[kind][a], out=w.rows[out][d], where=w.where)

        return _one
    a, b = sources

    def _two(w: Warp) -> None:
        r = w.rows[kind]
        function(r[a], r[b], out=w.rows[out][d], where=w.where)

    return _two


def _kind(instruction: Instruction) -> int:
    return KINDS[instruction.parts[-1]]


def _simple(function: Any, floats: Any = None, *, allowed: frozenset[str] = frozenset({"rn"})) -> Builder:
    """A ufunc per type class; `floats` None: integers and predicates only."""

    def _build(ctx: Decoder, i: Instruction) -> Step:
        kind = _kind(i)
        if i.parts[-1] in ("bf16", "bf16x2", "f16x2") and floats is not None:
            raise UnknownInstruction(f"arithmetic on .{i.parts[-1]}")
        refuse(i, set(allowed) | {i.parts[-1]})
        chosen = function if kind in _INTEGERS or kind == PRED else floats
        if chosen is None:
            raise UnknownInstruction(f"type .{i.parts[-1]}")
        return _ufunc(chosen, kind, ctx.target(i.operands[0], kind), [ctx.source(o, kind) for o in i.operands[1:]])

    return _build


def _mul(ctx: Decoder, i: Instruction) -> Step:
    kind = _kind(i)
    if kind not in _INTEGERS:
        return _simple(None, np.multiply)(ctx, i)
    refuse(i, {"lo", "wide", "hi", i.parts[-1]})
    a, b = (ctx.source(o, kind) for o in i.operands[1:3])
    bits = BITS[kind]
    if "lo" in i.parts:
        return _ufunc(np.multiply, kind, ctx.target(i.operands[0], kind), [a, b])
    if bits == 64:
        raise UnknownInstruction("the upper half of a 64-bit product")
    wide = (SIGNED if kind in SIGNED.values() else UNSIGNED)[2 * bits]
    name = f"{'i' if wide in SIGNED.values() else 'u'}{bits // 4}"
    if "hi" in i.parts:
        d = ctx.target(i.operands[0], kind)
        return assign(kind, d, lambda x, y: np.multiply(x, y, dtype=name) >> bits, [(kind, a), (kind, b)])
    d = ctx.target(i.operands[0], wide)

    def _step(w: Warp) -> None:
        r = w.rows[kind]
        np.multiply(r[a], r[b], w.rows[wide][d], where=w.where, dtype=name)

    return _step


def _mad(ctx: Decoder, i: Instruction) -> Step:
    kind = _kind(i)
    refuse(i, {"lo", "wide", i.parts[-1]})
    if kind not in _INTEGERS:
        raise UnknownInstruction("mad of floats")
    a, b = (ctx.source(o, kind) for o in i.operands[1:3])
    out, name = kind, ""
    if "wide" in i.parts:
        out = (SIGNED if kind in SIGNED.values() else UNSIGNED)[2 * BITS[kind]]
        name = f"{'i' if out in SIGNED.values() else 'u'}{BITS[out] // 8}"
    c, d = ctx.source(i.operands[3], out), ctx.target(i.operands[0], out)

    def _step(w: Warp) -> None:
        r = w.rows[kind]
        product = np.multiply(r[a], r[b], dtype=name or None)
        np.add(product, w.rows[out][c], w.rows[out][d], where=w.where)

    return _step


def _shift(function: Any) -> Builder:
    def _build(ctx: Decoder, i: Instruction) -> Step:
        kind = _kind(i)
        refuse(i, {i.parts[-1]})
        d, a = ctx.target(i.operands[0], kind), ctx.source(i.operands[1], kind)
        by = i.operands[2]
        if isinstance(by, Imm):
            return _ufunc(function, kind, d, [a, ctx.constant(BITS[kind], min(by.value, BITS[kind]))])
        amount = ctx.source(by, U32)
        # A width or more shifts everything out (or leaves the sign), as numpy's shifts do.
        name = UNSIGNED[BITS[kind]]
        if name == U32 and kind == U32:
            return _ufunc(function, kind, d, [a, amount])

        def _value(x: Array, n: Array) -> Array:
            return np.asarray(function(x, np.minimum(n, BITS[kind]).astype(x.dtype)))

        return assign(kind, d, _value, [(kind, a), (U32, amount)])

    return _build


def _divide(ctx: Decoder, i: Instruction) -> Step:
    kind = _kind(i)
    refuse(i, {"rn", "approx", "full", i.parts[-1]})
    d, a, b = ctx.target(i.operands[0], kind), *(ctx.source(o, kind) for o in i.operands[1:3])
    if kind in (F32, F64):
        return _ufunc(np.divide, kind, d, [a, b])
    return assign(kind, d, _truncated, [(kind, a), (kind, b)])


def _truncated(a: Array, b: Array) -> Array:
    """C's quotient; all ones for a division by zero, as on the device."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, ~np.zeros_like(a), quotient)


def _remainder(ctx: Decoder, i: Instruction) -> Step:
    kind = _kind(i)
    d, a, b = ctx.target(i.operands[0], kind), *(ctx.source(o, kind) for o in i.operands[1:3])
    safe = lambda x, y: np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y).astype(x.dtype)))  # noqa: E731
    return assign(kind, d, safe, [(kind, a), (kind, b)])


_ORDERED: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_FLOAT_COMPARE: dict[str, Any] = {
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(ctx: Decoder, i: Instruction) -> Step:
    kind, name = _kind(i), i.parts[1]
    refuse(i, {*_COMBINE, i.parts[-1]}, 2)
    if i.parts[-1] == "bf16":
        raise UnknownInstruction("comparison of .bf16")
    compare = _FLOAT_COMPARE.get(name) if kind not in _INTEGERS else None
    compare = compare or _ORDERED[name]
    combine = next((_COMBINE[part] for part in i.parts[2:-1]), None)
    first = i.operands[0]
    wanted: list[Operand] = [first.first, first.second] if isinstance(first, Pair) else [first, Sink()]
    a, b = ctx.source(i.operands[1], kind), ctx.source(i.operands[2], kind)
    if combine is None and isinstance(compare, np.ufunc) and isinstance(wanted[1], Sink):
        return _ufunc(compare, kind, ctx.target(wanted[0], PRED), [a, b], PRED)
    p, q = (ctx.target(o, PRED) for o in wanted)
    other, inverted = _predicate(ctx, i.operands[3]) if combine is not None else (0, False)

    def _step(w: Warp) -> None:
        r, preds = w.rows[kind], w.rows[PRED]
        true = compare(r[a], r[b])
        false = ~true
        if combine is not None:
            with_this = preds[other] ^ inverted
            true, false = combine(true, with_this), combine(false, with_this)
        np.copyto(preds[p], true, where=w.where)
        np.copyto(preds[q], false, where=w.where)

    return _step


def _predicate(ctx: Decoder, operand: Operand) -> tuple[int, bool]:
    if isinstance(operand, Not):
        return ctx.source(operand.reg, PRED), True
    return ctx.source(operand, PRED), False


def _selp(ctx: Decoder, i: Instruction) -> Step:
    kind = UNSIGNED[BITS[_kind(i)]]
    d, a, b = ctx.target(i.operands[0], kind), *(ctx.source(o, kind) for o in i.operands[1:3])
    p, inverted = _predicate(ctx, i.operands[3])

    def _step(w: Warp) -> None:
        r, chosen = w.rows[kind], w.rows[PRED][p]
        value = np.where(chosen, r[b], r[a]) if inverted else np.where(chosen, r[a], r[b])
        np.copyto(r[d], value, where=w.where)

    return _step


BUILDERS: dict[str, Builder] = {
    "add": _simple(np.add, np.add),
    "sub": _simple(np.subtract, np.subtract),
    "mul": _mul,
    "mad": _mad,
    "min": _simple(np.minimum, np.fmin),
    "max": _simple(np.maximum, np.fmax),
    "and": _simple(np.bitwise_and),
    "or": _simple(np.bitwise_or),
    "xor": _simple(np.bitwise_xor),
    "not": _simple(np.invert),
    "neg": _simple(np.negative, np.negative),
    "abs": _simple(np.absolute, np.absolute),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "div": _divide,
    "rem": _remainder,
    "setp": _setp,
    "selp": _selp,
}
