"""Control flow, barriers, fences and the programmatic launch."""

from __future__ import annotations

import numpy as np

from skinny_core.testing.ptx.access import address_of
from skinny_core.testing.ptx.decode import Builder, Decoder, refuse
from skinny_core.testing.ptx.faults import BarrierFault, Trap, UnknownInstruction
from skinny_core.testing.ptx.parse import Imm, Instruction, Operand, Symbol
from skinny_core.testing.ptx.warp import DIVERGE, EXIT, LANES, PRED, U32, U64, WAIT, YIELD, Step, Waiting, Warp

_SCOPES = {"cta", "cluster", "gpu", "sys", "sc", "acq_rel", "acquire", "release", "relaxed", "shared::cta", "shared"}


def _bra(ctx: Decoder, i: Instruction) -> Step:
    refuse(i, {"uni"})
    label = i.operands[0]
    if not isinstance(label, Symbol) or label.name not in ctx.program.labels:
        raise UnknownInstruction(f"no label {label}")
    target = ctx.program.labels[label.name]
    if i.guard is None:
        return lambda w: target
    row, negated = ctx.source(i.guard[0], PRED), i.guard[1]

    def _step(w: Warp) -> int | None:
        mask = w.rows[PRED][row]
        taken = (~mask if negated else mask) & w.lanes
        count = np.count_nonzero(taken)
        if count == 0:
            return None
        if count == np.count_nonzero(w.lanes):
            return target
        w.target, w.taken = target, taken
        return DIVERGE

    return _step


def _ret(ctx: Decoder, i: Instruction) -> Step:
    if i.guard is None:
        return lambda w: EXIT
    row, negated = ctx.source(i.guard[0], PRED), i.guard[1]

    def _step(w: Warp) -> int | None:
        mask = w.rows[PRED][row]
        ending = (~mask if negated else mask) & w.lanes
        if not np.count_nonzero(ending):
            return None
        w.where = ending
        return EXIT

    return _step


def _trap(ctx: Decoder, i: Instruction) -> Step:
    def _step(w: Warp) -> None:
        raise Trap("the program trapped")

    return _step


def _nothing(*allowed: str) -> Builder:
    def _build(ctx: Decoder, i: Instruction) -> Step:
        refuse(i, set(allowed) | _SCOPES)
        return lambda w: None

    return _build


def _fence(ctx: Decoder, i: Instruction) -> Step:
    """Only what the async proxy must see matters: this machine's memory is in order for everybody else."""
    allowed = {"proxy", "async", "async::generic", "async.shared::cta", "mbarrier_init", "alias", "sync_restrict"}
    refuse(i, _SCOPES | allowed | {"async.global", "global", "shared::cluster"})
    shows = "mbarrier_init" in i.parts or "async" in i.parts

    def _step(w: Warp) -> None:
        if shows:
            for barrier in w.block.mbarriers.values():
                if barrier.creator == w.index or w.clock[barrier.creator] >= barrier.created:
                    barrier.fenced = True

    return _step


def _griddepcontrol(ctx: Decoder, i: Instruction) -> Step:
    if i.parts[1:] not in (("wait",), ("launch_dependents",)):
        raise UnknownInstruction("griddepcontrol")
    wait = i.parts[1] == "wait"

    def _step(w: Warp) -> None:
        if wait:
            w.waited = w.waited | w.active()

    return _step


def _bar(ctx: Decoder, i: Instruction) -> Step:
    parts = [part for part in i.parts[1:] if part != "cta"]
    if parts[:2] == ["warp", "sync"]:
        return _bar_warp(ctx, i)
    aligned = i.parts[0] == "bar" or "aligned" in parts
    action = parts[0]
    if action not in ("sync", "arrive") or parts[1:] not in ([], ["aligned"]):
        raise UnknownInstruction("this form of barrier")
    number = ctx.source(i.operands[0], U32)
    count = ctx.source(i.operands[1], U32) if len(i.operands) > 1 else None
    if action == "arrive" and count is None:
        raise UnknownInstruction("an arrival without a thread count")

    def _step(w: Warp) -> int | None:
        if aligned and (missing := w.meet()) is not None:
            return missing
        block, lane = w.block, int(np.argmax(w.active()))
        index = int(w.rows[U32][number][lane])
        barrier = block.named(index)
        if count is None:
            expected = LANES * len(block.warps) if aligned else block.threads_alive()
        else:
            expected = int(w.rows[U32][count][lane])
            if expected % LANES or not expected:
                raise BarrierFault(f"a barrier of {expected} threads, which is not a multiple of {LANES}")
        barrier.expected_all = count is None and aligned
        arrivals = LANES if aligned else int(np.count_nonzero(w.active()))
        barrier.arrive(w, arrivals, expected, stays=action == "sync")
        generation = barrier.generation
        ended = LANES * (len(block.warps) - block.warps_alive()) if barrier.expected_all else 0
        block.progressed()
        if barrier.settle(ended) or action == "arrive":
            return None
        w.wait = Waiting(
            lambda: barrier.generation > generation,
            f"barrier {index}, {barrier.arrived} of {expected} threads at the time",
            advance=True,
        )
        return WAIT

    return _step


def _bar_warp(ctx: Decoder, i: Instruction) -> Step:
    mask = ctx.source(i.operands[0], U32)

    def _step(w: Warp) -> int | None:
        if (missing := w.meet(int(w.rows[U32][mask][np.argmax(w.active())]))) is not None:
            return missing
        if (w.waited & w.active()).any():
            w.waited = w.waited | w.active()
        return None

    return _step


def _state(ctx: Decoder, operands: tuple[Operand, ...], *, first: bool) -> tuple[int, tuple[Operand, ...]]:
    """Row of the returned state, and the other operands."""
    return (ctx.target(operands[0], U64), operands[1:]) if first else (0, operands)


def _mbarrier(ctx: Decoder, i: Instruction) -> Step:
    action = i.parts[1]
    refuse(i, _SCOPES | {"b64", "parity", "expect_tx", "complete_tx", "shared::cluster", "noComplete"}, 2)
    if "noComplete" in i.parts or action not in _ACTIONS:
        raise UnknownInstruction("this form of mbarrier")
    return _ACTIONS[action](ctx, i)


def _init(ctx: Decoder, i: Instruction) -> Step:
    at, count = address_of(ctx, i.operands[0]), ctx.source(i.operands[1], U32)

    def _step(w: Warp) -> None:
        for lane in w.selected()[0]:
            w.block.init_mbarrier(int(at(w)[lane]), int(w.rows[U32][count][lane]), w, lane)

    return _step


def _inval(ctx: Decoder, i: Instruction) -> Step:
    at = address_of(ctx, i.operands[0])

    def _step(w: Warp) -> None:
        for lane in w.selected()[0]:
            address = int(at(w)[lane])
            found = w.block.mbarrier(address, w, lane)
            if any(copy.barrier is found for copy in w.block.copies):
                raise BarrierFault(f"a bulk copy that reports to it is outstanding: {found.text}", lane=lane)
            del w.block.mbarriers[address]
            w.block.shared.release_object(address)

    return _step


def _arrive(ctx: Decoder, i: Instruction) -> Step:
    state, rest = _state(ctx, i.operands, first=True)
    expects, release = "expect_tx" in i.parts, "relaxed" not in i.parts
    at = address_of(ctx, rest[0])
    number = ctx.source(rest[1] if len(rest) > 1 else Imm(1), U32)
    if expects and len(rest) < 2:
        raise UnknownInstruction("expect_tx without a number of bytes")

    def _step(w: Warp) -> None:
        for lane in w.selected()[0]:
            found = w.block.mbarrier(int(at(w)[lane]), w, lane)
            value = int(w.rows[U32][number][lane])
            w.rows[U64][state][lane] = found.phase
            if expects:
                found.expect(value, lane)
            found.arrive(w, 1 if expects else value, release=release, lane=lane)
            found.settle()
        if release:
            w.tick()
        w.block.progressed()

    return _step


def _transactions(sign: int) -> Builder:
    def _build(ctx: Decoder, i: Instruction) -> Step:
        at, size = address_of(ctx, i.operands[0]), ctx.source(i.operands[1], U32)

        def _step(w: Warp) -> None:
            for lane in w.selected()[0]:
                found = w.block.mbarrier(int(at(w)[lane]), w, lane)
                found.expect(sign * int(w.rows[U32][size][lane]), lane)
                found.settle()
            w.block.progressed()

        return _step

    return _build


def _wait(ctx: Decoder, i: Instruction) -> Step:
    """try_wait stands still until the phase ends, or gives up when nothing else can run; test_wait never stands still.

    With a seed, try_wait fails at times though it could have waited: both are allowed.
    """
    parity, blocks, acquire = "parity" in i.parts, i.parts[1] == "try_wait", "relaxed" not in i.parts
    d, at = ctx.target(i.operands[0], PRED), address_of(ctx, i.operands[1])
    kind = U32 if parity else U64
    phase = ctx.source(i.operands[2], kind)

    def _step(w: Warp) -> int | None:
        block, results = w.block, np.zeros(LANES, bool)
        blocked = None
        lanes = w.selected()[0]
        for lane in lanes:
            found = block.mbarrier(int(at(w)[lane]), w, lane)
            value = int(w.rows[kind][phase][lane])
            if not parity and not found.phase - 1 <= value <= found.phase:
                raise BarrierFault(f"state {value:#x} is of neither this phase nor the one before: {found.text}")
            over = (found.phase & 1) != (value & 1)
            results[lane] = over
            if over and acquire:
                w.observe(found.done, waited=found.done_waited)
            if not over:
                blocked = (found, found.phase, value)
        if blocked is not None:
            barrier, current, wanted = blocked
            text = f"{barrier.text}, for the end of {'parity' if parity else 'phase'} {wanted}"
            fails = w.timed_out or not blocks or (block.random is not None and block.random.random() < 0.25)
            if not fails:
                w.wait = Waiting(lambda: barrier.phase > current, text, advance=False, patient=False)
                return WAIT
            w.timed_out = False
            block.spun(text)
        np.copyto(w.rows[PRED][d], results, where=w.where)
        return None if blocked is None else YIELD

    return _step


_ACTIONS: dict[str, Builder] = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "expect_tx": _transactions(1),
    "complete_tx": _transactions(-1),
    "try_wait": _wait,
    "test_wait": _wait,
}

BUILDERS: dict[str, Builder] = {
    "bra": _bra,
    "ret": _ret,
    "exit": _ret,
    "trap": _trap,
    "fence": _fence,
    "membar": _nothing("gl"),
    "setmaxnreg": _nothing("inc", "dec", "sync", "aligned", "u32"),
    "nanosleep": _nothing("u32"),
    "griddepcontrol": _griddepcontrol,
    "bar": _bar,
    "barrier": _bar,
    "mbarrier": _mbarrier,
}
