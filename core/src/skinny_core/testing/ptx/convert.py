"""Moves, packing, conversions between types, and bit fields."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from skinny_core.testing.ptx.arithmetic import assign
from skinny_core.testing.ptx.decode import BITS, KINDS, UNSIGNED, Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Instruction, Operand, Reg, Vector
from skinny_core.testing.ptx.shared import WINDOW
from skinny_core.testing.ptx.warp import F32, U16, U32, U64, Step, Warp

_WORDS = {16: U16, 32: U32, 64: U64}


def to_bf16(values: Array) -> Array:
    """FP32 to the bits of BF16, nearest even; every NaN becomes 0x7FFF, as cvt.rn.bf16.f32 has it."""
    bits = np.ascontiguousarray(values, "f4").view("u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype("u2")


def from_bf16(bits: Array) -> Array:
    """The bits of BF16 to FP32."""
    return (np.asarray(bits, "u2").astype("u4") << 16).view("f4")


def _to_f16(values: Array) -> Array:
    return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype("f2").view("u2"))


_NARROW: dict[str, Any] = {"bf16": to_bf16, "f16": _to_f16}


def _mov(ctx: Decoder, i: Instruction) -> Step:
    kind = UNSIGNED[BITS[_kind(i)]]
    refuse(i, {i.parts[-1]})
    left, right = i.operands
    if isinstance(left, Vector):
        return _unpack(ctx, kind, left.items, right)
    if isinstance(right, Vector):
        return _pack(ctx, kind, left, right.items)
    d = ctx.target(left, kind)
    if isinstance(right, Reg) and right.name in ("%clock", "%clock64", "%globaltimer"):

        def _clock(w: Warp) -> None:
            np.copyto(w.rows[kind][d], w.block.steps & 0xFFFFFFFF, where=w.where, casting="unsafe")

        return _clock
    a = ctx.source(right, kind)

    def _step(w: Warp) -> None:
        r = w.rows[kind]
        np.copyto(r[d], r[a], where=w.where)

    return _step


def _kind(i: Instruction) -> int:
    return KINDS[i.parts[-1]]


def _pack(ctx: Decoder, kind: int, left: Operand, items: tuple[Operand, ...]) -> Step:
    part = BITS[kind] // len(items)
    d, sources = ctx.target(left, kind), [(_WORDS[part], ctx.source(o, _WORDS[part])) for o in items]
    name = f"u{BITS[kind] // 8}"

    def _value(*parts: Array) -> Array:
        whole = parts[0].astype(name)
        for j, piece in enumerate(parts[1:], 1):
            whole |= piece.astype(name) << np.array(j * part, name)
        return whole

    return assign(kind, d, _value, sources)


def _unpack(ctx: Decoder, kind: int, items: tuple[Operand, ...], right: Operand) -> Step:
    part = BITS[kind] // len(items)
    word, a = _WORDS[part], ctx.source(right, kind)
    targets = [ctx.target(o, word) for o in items]

    def _step(w: Warp) -> None:
        pieces = w.rows[kind][a].view(f"u{part // 8}").reshape(32, -1).copy()
        for j, d in enumerate(targets):
            np.copyto(w.rows[word][d], pieces[:, j], where=w.where)

    return _step


def _cvta(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"to", "global", "shared", "shared::cta", "u64", "u32"})
    kind = _kind(i)
    d, a = ctx.target(i.operands[0], kind), ctx.source(i.operands[1], kind)
    shift = WINDOW if any(p.startswith("shared") for p in i.parts) else 0
    if shift and kind != U64:
        raise UnknownInstruction("a 32-bit generic address")
    delta = np.uint64((-shift if "to" in i.parts else shift) & (2**64 - 1))
    return assign(kind, d, lambda x: x + delta if shift else x, [(kind, a)])


_CVT = re.compile(r"(?:(rn|rz|rm|rp|rni|rzi|rmi|rpi)\.)?(?:(relu)\.)?(?:(sat)\.)?(\w+)\.([usbf]f?\d+)$")
_TO_INTEGER: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cvt(ctx: Decoder, i: Instruction) -> Step:
    match = _CVT.match(".".join(i.parts[1:]))
    if match is None:
        raise UnknownInstruction("conversion")
    rounding, relu, saturate, to, source = match.groups()
    if to in ("bf16x2", "f16x2"):
        return _cvt_pair(ctx, i, to[:-2], rounding, source, relu=relu is not None)
    have = max(16, ctx.bits(i.operands[1]) or int(source.lstrip("usbf")))
    into = max(16, ctx.bits(i.operands[0]))
    a = ctx.source(i.operands[1], _WORDS[have])
    d = ctx.target(i.operands[0], _WORDS[into])
    read, write = _reader(source), _writer(to, source, rounding, saturate=saturate is not None)
    name = f"{'i' if to[0] == 's' else 'u'}{into // 8}"

    def _value(x: Array) -> Array:
        wide = read(x)
        if relu:
            wide = np.fmax(wide, 0)
        return np.asarray(write(wide)).astype(name).view(f"u{into // 8}")

    return assign(_WORDS[into], d, _value, [(_WORDS[have], a)])


def _reader(source: str) -> Any:
    """Register bits to numbers of the source type."""
    if source == "bf16":
        return lambda x: from_bf16(x)
    if source[0] == "f":
        return lambda x: x.view(f"f{int(source[1:]) // 8}")
    sign, size = "i" if source[0] == "s" else "u", int(source[1:]) // 8
    return lambda x: x.astype(f"{sign}{size}")


def _writer(to: str, source: str, rounding: str | None, *, saturate: bool) -> Any:
    """Numbers of the source type to numbers, or to the bits of a float, of the target type."""
    floating = "f" in source
    if "f" in to:
        return _float_writer(to, source, rounding, saturate=saturate)
    sign, size = "i" if to[0] == "s" else "u", int(to.lstrip("us")) // 8
    limits = np.iinfo(f"{sign}{size}")
    if floating:
        if rounding not in _TO_INTEGER:
            raise UnknownInstruction("a float to an integer needs .rni, .rzi, .rmi or .rpi")

        def _clamp(x: Array) -> Array:
            # Out of range clamps, NaN is 0. FP64 cannot hold the largest 64-bit integers: they come last.
            wide = np.where(np.isnan(x), 0, _TO_INTEGER[rounding](x)).astype("f8")
            inside = np.clip(wide, float(limits.min), float(limits.max))
            over = wide >= float(limits.max)
            return np.where(over, limits.max, np.where(over, 0, inside).astype(f"{sign}{size}"))

        return _clamp
    if saturate:
        return lambda x: np.clip(x, max(limits.min, np.iinfo(x.dtype).min), min(limits.max, np.iinfo(x.dtype).max))
    return lambda x: x.astype(f"{sign}{size}")


def _float_writer(to: str, source: str, rounding: str | None, *, saturate: bool) -> Any:
    if to == source and rounding in _TO_INTEGER and source != "bf16":
        bits = f"u{int(to[1:]) // 8}"
        return lambda x: _TO_INTEGER[rounding](x).view(bits)
    if rounding not in (None, "rn"):
        raise UnknownInstruction(f"rounding .{rounding} of floats")
    limit = (lambda x: np.clip(np.where(np.isnan(x), 0, x), 0, 1).astype(x.dtype)) if saturate else (lambda x: x)
    if to in _NARROW:
        if source == "f64" or source[0] in "us":
            raise UnknownInstruction(f".{source} to .{to} would round twice here")
        return lambda x: _NARROW[to](limit(x).astype("f4"))
    name = f"f{int(to[1:]) // 8}"
    return lambda x: limit(x).astype(name).view(f"u{name[1:]}")


def _cvt_pair(ctx: Decoder, i: Instruction, to: str, rounding: str | None, source: str, *, relu: bool) -> Step:
    if rounding != "rn" or source != "f32" or len(i.operands) != 3:
        raise UnknownInstruction("conversion to a pair")
    d, upper, lower = ctx.target(i.operands[0], U32), *(ctx.source(o, F32) for o in i.operands[1:])

    def _value(a: Array, b: Array) -> Array:
        if relu:
            a, b = np.fmax(a, 0), np.fmax(b, 0)
        return np.asarray(_NARROW[to](a).astype("u4") << 16 | _NARROW[to](b))

    return assign(U32, d, _value, [(F32, upper), (F32, lower)])


def _general(kind_of: Any, value: Any, *allowed: str) -> Builder:
    """An instruction whose operands have the kinds `kind_of(type kind)` and whose result is `value(*rows)`."""

    def _build(ctx: Decoder, i: Instruction) -> Step:
        refuse(i, {i.parts[-1], *allowed})
        kinds = kind_of(_kind(i))
        d = ctx.target(i.operands[0], kinds[0])
        sources = [(k, ctx.source(o, k)) for k, o in zip(kinds[1:], i.operands[1:], strict=True)]
        return assign(kinds[0], d, value, sources)

    return _build


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    pool = np.concatenate([a.view("u1").reshape(-1, 4), b.view("u1").reshape(-1, 4)], axis=1)
    picks = (selector[:, None] >> np.array([0, 4, 8, 12], "u4")) & 15
    chosen = np.take_along_axis(pool, (picks & 7).astype(np.intp), axis=1)
    sign = np.where(chosen & 0x80, 0xFF, 0).astype("u1")
    return np.ascontiguousarray(np.where(picks & 8, sign, chosen)).view("u4")[:, 0]


def _bfe(a: Array, start: Array, length: Array) -> Array:
    width = a.dtype.itemsize * 8
    out = []
    for x, p, n in zip(a.tolist(), (start & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True):
        field = (x % (1 << width)) >> p & ((1 << n) - 1)
        if a.dtype.kind == "i" and n:  # the sign is the field's last bit, or the value's where the field reaches past
            last = min(p + n - 1, width - 1)
            if x % (1 << width) >> last & 1:
                field |= ~((1 << min(n, max(width - p, 0))) - 1)
        field %= 1 << width
        out.append(field - (1 << width) if a.dtype.kind == "i" and field >> (width - 1) else field)
    return np.array(out, a.dtype)


def _bfi(a: Array, b: Array, start: Array, length: Array) -> Array:
    width = a.dtype.itemsize * 8
    out = []
    rows = zip(a.tolist(), b.tolist(), (start & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True)
    for x, y, p, n in rows:
        mask = (((1 << n) - 1) << p) % (1 << width)
        out.append(y & ~mask | (x << p) & mask)
    return np.array(out, a.dtype)


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    wanted = int(table[0])
    result = np.zeros_like(a)
    for j in range(8):
        if wanted >> j & 1:
            result |= (a if j & 4 else ~a) & (b if j & 2 else ~b) & (c if j & 1 else ~c)
    return result


def _shf(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"l", "r", "wrap", "clamp", "b32"})
    left, wrap = "l" in i.parts, "wrap" in i.parts

    def _value(low: Array, high: Array, by: Array) -> Array:
        whole = high.astype("u8") << np.uint64(32) | low
        n = (by & 31 if wrap else np.minimum(by, 32)).astype("u8")
        return np.asarray((whole << n) >> np.uint64(32) if left else whole >> n)

    d, sources = ctx.target(i.operands[0], U32), [(U32, ctx.source(o, U32)) for o in i.operands[1:]]
    return assign(U32, d, _value, sources)


def _bits(function: Any) -> Any:
    return lambda a: np.array([function(x, a.dtype.itemsize * 8) for x in a.tolist()])


BUILDERS: dict[str, Builder] = {
    "mov": _mov,
    "cvta": _cvta,
    "cvt": _cvt,
    "prmt": _general(lambda k: (U32, U32, U32, U32), _prmt),
    "bfe": _general(lambda k: (k, k, U32, U32), _bfe),
    "bfi": _general(lambda k: (k, k, k, U32, U32), _bfi),
    "lop3": _general(lambda k: (k, k, k, k, U32), _lop3),
    "shf": _shf,
    "popc": _general(lambda k: (U32, k), _bits(lambda x, n: x.bit_count())),
    "clz": _general(lambda k: (U32, k), _bits(lambda x, n: n - x.bit_length())),
    "brev": _general(lambda k: (k, k), _bits(lambda x, n: int(f"{x:0{n}b}"[::-1], 2))),
}
