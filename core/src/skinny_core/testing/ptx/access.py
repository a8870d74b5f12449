"""Loads and stores: parameters, global and shared memory, matrices, prefetches and bulk copies."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from skinny_core.testing.ptx.barriers import Copy
from skinny_core.testing.ptx.decode import Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import BarrierFault, MemoryFault, UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import SIZES, Address, Imm, Instruction, Operand, Symbol, Vector
from skinny_core.testing.ptx.shared import WINDOW
from skinny_core.testing.ptx.warp import ALL, S32, S64, U16, U32, U64, Step, Warp

_HINT = re.compile(
    r"weak|volatile|relaxed|acquire|release|cta|cluster|gpu|sys|nc|ca|cg|cs|lu|cv|wb|wt"
    r"|L1::(?:no_allocate|evict_\w+)|L2::(?:evict_\w+|cache_hint|(?:64|128|256)B)|level::eviction_priority"
)
_SHARED = ("shared", "shared::cta", "shared::cluster")
_UNSIGNED = {1: U16, 2: U16, 4: U32, 8: U64}
_SIGNED_WIDE = {4: S32, 8: S64}


def address_of(ctx: Decoder, operand: Operand) -> Callable[[Warp], Array]:
    """A function to the 32 addresses of `[base + offset]`."""
    if not isinstance(operand, Address):
        raise UnknownInstruction(f"{operand} is not an address")
    if isinstance(operand.base, Symbol):
        if operand.base.name not in ctx.symbols:
            raise UnknownInstruction(f"no variable {operand.base.name}")
        kind, row = U32, ctx.constant(32, ctx.symbols[operand.base.name] + operand.offset)
    elif isinstance(operand.base, Imm):
        kind, row = U64, ctx.constant(64, operand.base.value + operand.offset)
    else:
        kind = U64 if ctx.bits(operand.base) == 64 else U32
        row = ctx.source(operand.base, kind)
        if operand.offset:
            mask = 2**64 - 1 if kind == U64 else 2**32 - 1
            offset = ctx.constant(64 if kind == U64 else 32, operand.offset & mask)
            return lambda w: w.rows[kind][row] + w.rows[kind][offset]
    return lambda w: w.rows[kind][row]


def _form(i: Instruction) -> tuple[str, int, int, str]:
    """(space, item bytes, count, type) of a load or store; refuses other modifiers."""
    space, count = "generic", 1
    for part in i.parts[1:-1]:
        if part in ("param", "global") or part in _SHARED:
            space = "shared" if part in _SHARED else part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
        elif _HINT.fullmatch(part) is None:
            raise UnknownInstruction(f"modifier .{part}")
    size = SIZES[re.sub(r"^[a-z]+", "", i.parts[-1])]
    if size > 8 or size * count > 32:
        raise UnknownInstruction(f"an access of {size * count} bytes")
    return space, size, count, i.parts[-1]


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise UnknownInstruction(f"{len(items)} registers for {count} values")
    return items


def _is_shared(space: str, addresses: list[int]) -> bool:
    if space != "generic":
        return space == "shared"
    return WINDOW <= addresses[0] < WINDOW + (1 << 32)


def _ld(ctx: Decoder, i: Instruction) -> Step:
    space, size, count, kind = _form(i)
    if space == "param":
        return _ld_param(ctx, i, size, kind)
    at = address_of(ctx, i.operands[1])
    targets = []
    for operand in _items(i.operands[0], count):
        width = max(size, 2, (ctx.bits(operand) or size * 8) // 8)
        signed = kind[0] == "s" and width > size and width in _SIGNED_WIDE
        row = ctx.target(operand, _UNSIGNED[width])
        targets.append((_SIGNED_WIDE[width] if signed else _UNSIGNED[width], row))
    non_coherent = "nc" in i.parts
    sign = f"i{size}" if kind[0] == "s" else f"u{size}"

    def _step(w: Warp) -> None:
        lanes, index = w.selected()
        addresses = at(w)[index].tolist()
        if _is_shared(space, addresses):
            if space == "generic":
                addresses = [a - WINDOW for a in addresses]
            values = w.block.shared.load(addresses, lanes, size, count, w.index, w.clock)
        else:
            if non_coherent and w.block.dependent:
                w.block.memory.non_coherent(addresses, lanes)
            values = w.block.memory.load(addresses, lanes, size, count, w.waited)
        if sign[0] == "i":
            values = values.view(sign)
        if count == 1:
            file, row = targets[0]
            w.rows[file][row][index] = values
        else:
            for j, (file, row) in enumerate(targets):
                w.rows[file][row][index] = values[:, j]

    return _step


def _ld_param(ctx: Decoder, i: Instruction, size: int, kind: str) -> Step:
    address = i.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise UnknownInstruction("a parameter at a computed address")
    offset = ctx.params[address.base.name] + address.offset
    items = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    targets = [(max(2, ctx.bits(o) // 8), ctx.target(o, _UNSIGNED[max(2, ctx.bits(o) // 8)])) for o in items]
    signed = kind[0] == "s"

    def _step(w: Warp) -> None:
        for j, (width, row) in enumerate(targets):
            start = offset + j * size
            value = int.from_bytes(w.block.params[start : start + size], "little", signed=signed)
            np.copyto(w.rows[_UNSIGNED[width]][row], np.array(value % (1 << 8 * width), f"u{width}"), where=w.where)

    return _step


def _st(ctx: Decoder, i: Instruction) -> Step:
    space, size, count, _ = _form(i)
    at = address_of(ctx, i.operands[0])
    sources = []
    for operand in _items(i.operands[1], count):
        width = max(size, 2, ctx.bits(operand) // 8)
        sources.append((_UNSIGNED[width], ctx.source(operand, _UNSIGNED[width])))

    def _step(w: Warp) -> None:
        lanes, index = w.selected()
        addresses = at(w)[index].tolist()
        columns = [w.rows[file][row][index].astype(f"u{size}") for file, row in sources]
        values = columns[0] if count == 1 else np.stack(columns, axis=1)
        if _is_shared(space, addresses):
            if space == "generic":
                addresses = [a - WINDOW for a in addresses]
            w.block.shared.store(addresses, lanes, values, size, count, w.index, w.clock)
        else:
            w.block.memory.store(addresses, lanes, values, size, count, w.waited)

    return _step


def _ldmatrix(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *_SHARED})
    count = next(int(part[1]) for part in i.parts if part in ("x1", "x2", "x4"))
    trans = "trans" in i.parts
    at = address_of(ctx, i.operands[1])
    targets = [ctx.target(operand, U32) for operand in _items(i.operands[0], count)]

    def _step(w: Warp) -> int | None:
        if (missing := w.meet()) is not None:
            return missing
        addresses = at(w)[: 8 * count].tolist()
        words = w.block.shared.load(addresses, ALL[: 8 * count], 4, 4, w.index, w.clock)
        for j, row in enumerate(targets):
            matrix = words[8 * j : 8 * j + 8]
            if trans:
                matrix = np.ascontiguousarray(np.ascontiguousarray(matrix).view("u2").T).view("u4")
            w.rows[U32][row][:] = matrix.reshape(-1)
        return None

    return _step


def _prefetch(ctx: Decoder, i: Instruction) -> Step:
    """`prefetch.global.L2 [a]`: nothing, but the address must lie in a region."""
    refuse(i, {"global", "L1", "L2", "L2::evict_last", "L2::evict_normal"})
    at = address_of(ctx, i.operands[0])

    def _step(w: Warp) -> None:
        lanes, index = w.selected()
        for address, lane in zip(at(w)[index].tolist(), lanes, strict=True):
            w.block.memory.bulk(address, 1, lane, np.ones(32, bool))

    return _step


def _cp(ctx: Decoder, i: Instruction) -> Step:
    if i.parts[1:5] == ("async", "bulk", "prefetch", "L2"):
        refuse(i, {"global", "L2::cache_hint"}, 5)
        at, size = address_of(ctx, i.operands[0]), ctx.source(i.operands[1], U32)

        def _prefetch(w: Warp) -> None:
            lanes, _ = w.selected()
            for lane in lanes:
                address, count = int(at(w)[lane]), int(w.rows[U32][size][lane])
                _check_bulk(lane, source=address, size=count)
                w.block.memory.bulk(address, count, lane, np.ones(32, bool))  # into L2, the point of coherence

        return _prefetch
    if i.parts[1:3] != ("async", "bulk"):
        raise UnknownInstruction("an asynchronous copy other than a bulk one")
    refuse(i, {"shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "L2::cache_hint"}, 3)
    if i.parts[3] not in ("shared::cluster", "shared::cta") or i.parts[4] != "global":
        raise UnknownInstruction("a bulk copy that is not from global to shared memory")
    to, source, barrier = (address_of(ctx, i.operands[j]) for j in (0, 1, 3))
    size = ctx.source(i.operands[2], U32)

    def _step(w: Warp) -> None:
        lanes, _ = w.selected()
        block = w.block
        for lane in lanes:
            address, start, count = int(to(w)[lane]), int(source(w)[lane]), int(w.rows[U32][size][lane])
            _check_bulk(lane, destination=address, source=start, size=count)
            found = block.mbarrier(int(barrier(w)[lane]), w, lane)
            if not found.fenced:
                raise BarrierFault(f"no fence has shown the async proxy the {found.text}", lane=lane)
            piece = block.memory.bulk(start, count, lane, w.waited)
            block.shared.launch_copy(address, count, lane, w.index, w.clock)
            block.launch(Copy(address, piece, found, i.text))

    return _step


def _check_bulk(lane: int, **values: int) -> None:
    for name, value in values.items():
        if value % 16:
            raise MemoryFault(f"{name} of a bulk copy is {value}, not a multiple of 16", lane=lane)


def _createpolicy(ctx: Decoder, i: Instruction) -> Step:
    d = ctx.target(i.operands[0], U64)

    def _step(w: Warp) -> None:
        np.copyto(w.rows[U64][d], np.uint64(0), where=w.where)

    return _step


BUILDERS: dict[str, Builder] = {
    "ld": _ld,
    "ldu": _ld,
    "st": _st,
    "ldmatrix": _ldmatrix,
    "prefetch": _prefetch,
    "cp": _cp,
    "createpolicy": _createpolicy,
}
