"""Exchanges between the lanes of a warp: shuffles, votes, elections."""

from __future__ import annotations

from typing import Any

import numpy as np

from skinny_core.testing.ptx.decode import Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Instruction, Not, Pair, Sink
from skinny_core.testing.ptx.warp import LANES, PRED, U32, Step, Warp

_LANE = np.arange(LANES)


def shuffle_sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """(lane to read from, whether it is in range) per lane, as the PTX ISA's pseudo-code has it."""
    b, clamp, segment = b.astype(int) & 31, c.astype(int) & 31, c.astype(int) >> 8 & 31
    highest = (_LANE & segment) | (clamp & ~segment)
    if mode == "up":
        j = _LANE - b
        good = j >= highest
    elif mode == "idx":
        j = (_LANE & segment) | (b & ~segment)
        good = j <= highest
    else:
        j = _LANE + b if mode == "down" else _LANE ^ b
        good = j <= highest
    return np.where(good, j, _LANE), good


def _mask(w: Warp, row: int) -> int:
    return int(w.rows[U32][row][np.argmax(w.active())])


def _shfl(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"sync", "bfly", "idx", "up", "down", "b32"})
    mode = i.parts[2]
    first, second = (
        (i.operands[0].first, i.operands[0].second) if isinstance(i.operands[0], Pair) else (i.operands[0], Sink())
    )
    d, p = ctx.target(first, U32), ctx.target(second, PRED)
    a, b, c, mask = (ctx.source(o, U32) for o in i.operands[1:5])

    known: dict[tuple[bytes, bytes], tuple[Array, Array]] = {}

    def _step(w: Warp) -> int | None:
        r = w.rows[U32]
        if (missing := w.meet(_mask(w, mask))) is not None:
            return missing
        key = (r[b].tobytes(), r[c].tobytes())
        if key not in known:
            known[key] = shuffle_sources(mode, r[b], r[c])
        j, good = known[key]
        values = r[a][j]
        if w.where is not True:
            # What an absent lane holds is undefined: NaN makes a use of it visible.
            values = np.where(w.active()[j], values, np.uint32(0xFFFFFFFF))
        np.copyto(r[d], values, where=w.where)
        np.copyto(w.rows[PRED][p], good, where=w.where)
        return None

    return _step


def _ballot(votes: Array) -> int:
    return int(np.packbits(votes, bitorder="little").view("u4")[0])


_VOTES: dict[str, Any] = {
    "all": lambda votes, active: votes[active].all(),
    "any": lambda votes, active: votes[active].any(),
    "uni": lambda votes, active: votes[active].all() or not votes[active].any(),
    "ballot": lambda votes, active: _ballot(votes & active),
}


def _vote(ctx: Decoder, i: Instruction) -> Step:
    if i.parts[1] != "sync" or i.parts[2] not in _VOTES:
        raise UnknownInstruction("vote")
    kind = U32 if i.parts[2] == "ballot" else PRED
    d, mask, vote = ctx.target(i.operands[0], kind), ctx.source(i.operands[2], U32), i.operands[1]
    negated = isinstance(vote, Not)
    a = ctx.source(vote.reg if isinstance(vote, Not) else vote, PRED)
    value = _VOTES[i.parts[2]]

    def _step(w: Warp) -> int | None:
        if (missing := w.meet(_mask(w, mask))) is not None:
            return missing
        votes = w.rows[PRED][a] ^ negated
        np.copyto(w.rows[kind][d], value(votes, w.active()), where=w.where, casting="unsafe")
        return None

    return _step


def _elect(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"sync"})
    if not isinstance(i.operands[0], Pair):
        raise UnknownInstruction("elect without a predicate")
    d, p = ctx.target(i.operands[0].first, U32), ctx.target(i.operands[0].second, PRED)
    mask = ctx.source(i.operands[1], U32)

    def _step(w: Warp) -> int | None:
        if (missing := w.meet(_mask(w, mask))) is not None:
            return missing
        leader = int(np.argmax(w.active()))
        np.copyto(w.rows[U32][d], np.uint32(leader), where=w.where)
        np.copyto(w.rows[PRED][p], leader == _LANE, where=w.where)
        return None

    return _step


def _activemask(ctx: Decoder, i: Instruction) -> Step:
    d = ctx.target(i.operands[0], U32)

    def _step(w: Warp) -> None:
        np.copyto(w.rows[U32][d], np.uint32(_ballot(w.active())), where=w.where)

    return _step


BUILDERS: dict[str, Builder] = {"shfl": _shfl, "vote": _vote, "elect": _elect, "activemask": _activemask}
