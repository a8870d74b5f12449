"""Instructions to closures: registers, constants and special registers all become rows that a step finds by index."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skinny_core.testing.ptx.faults import PtxFault, PtxSyntaxError, UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Imm, Instruction, Operand, Program, Reg, Sink, Symbol
from skinny_core.testing.ptx.shared import BASE
from skinny_core.testing.ptx.warp import F16, F32, F64, LANES, PRED, S16, S32, S64, U16, U32, U64, Step, Warp

KINDS: dict[str, int] = {
    "pred": PRED,
    **dict.fromkeys(("b16", "u16", "bf16"), U16),
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2"), U32),
    **dict.fromkeys(("b64", "u64"), U64),
    "s16": S16,
    "s32": S32,
    "s64": S64,
    "f16": F16,
    "f32": F32,
    "f64": F64,
}
"""The row type of a PTX type."""
BITS = (1, 16, 16, 16, 32, 32, 32, 64, 64, 64)
"""Width of a row type."""
UNSIGNED = {1: PRED, 16: U16, 32: U32, 64: U64}
SIGNED = {16: S16, 32: S32, 64: S64}
_REGISTER_BITS = {"pred": 1, "b8": 16, "u8": 16, "s8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (32, 64)
}
SPECIAL = {
    **{f"%{name}.{axis}": 32 for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    **{f"%cluster_{name}.{axis}": 32 for name in ("ctaid", "nctaid") for axis in "xyz"},
    **{f"%{name}": 32 for name in ("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "dynamic_smem_size")},
    **{f"%{name}": 32 for name in ("cluster_ctarank", "cluster_nctarank", "total_smem_size", "clock", "clock_hi")},
    **{f"%lanemask_{name}": 32 for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"%{name}": 64 for name in ("clock64", "globaltimer")},
}
"""Special registers and their widths. The clocks stand still at 0 unless read by `mov`."""

Builder = Callable[["Decoder", Instruction], Step]


class Decoder:
    """Gives every name and constant of a program a row, and turns its instructions into steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.names: dict[str, tuple[int, int]] = {}
        self.constants: dict[tuple[int, int], int] = {}
        self.special: dict[str, int] = {}
        self.params: dict[str, int] = {}
        self.param_bytes = 0
        for name, kind in program.registers.items():
            if kind not in _REGISTER_BITS:
                raise PtxSyntaxError(f"register {name} of type .{kind}")
            self.names[name] = (_REGISTER_BITS[kind], self._row(_REGISTER_BITS[kind]))
        for param in program.params:
            align = min(8, param.size)
            self.params[param.name] = -(-self.param_bytes // align) * align
            self.param_bytes = self.params[param.name] + param.size
        self.symbols, self.static_shared = _layout(program)

    def _row(self, bits: int) -> int:
        self.counts[bits] += 1
        return self.counts[bits] - 1

    def steps(self, builders: dict[str, Builder]) -> list[Step]:
        """One step per instruction. Raises `UnknownInstruction` with the line."""
        made = []
        for instruction in self.program.instructions:
            builder = builders.get(instruction.parts[0])
            if builder is None:
                raise UnknownInstruction("no such opcode here", site=instruction.site)
            try:
                step = builder(self, instruction)
            except UnknownInstruction as fault:
                fault.site = instruction.site
                raise
            except (KeyError, ValueError, IndexError) as error:
                raise UnknownInstruction(f"not understood ({error!r})", site=instruction.site) from error
            if instruction.guard is not None and instruction.parts[0] not in ("bra", "ret", "exit"):
                step = _guarded(step, self.source(instruction.guard[0], PRED), negated=instruction.guard[1])
            made.append(step)
        return made

    # Operands

    def bits(self, operand: Operand) -> int:
        """Width of a register, or 0 for what is none."""
        if isinstance(operand, Reg):
            if operand.name in self.names:
                return self.names[operand.name][0]
            return SPECIAL.get(operand.name, 0)
        return 0

    def source(self, operand: Operand, kind: int) -> int:
        """Row of an operand that is read as `kind`."""
        bits = BITS[kind]
        if isinstance(operand, Reg):
            if operand.name in self.names:
                have, row = self.names[operand.name]
            elif operand.name in SPECIAL:
                have = SPECIAL[operand.name]
                if operand.name not in self.special:
                    self.special[operand.name] = self._row(have)
                row = self.special[operand.name]
            else:
                raise UnknownInstruction(f"no register {operand.name}")
            if have != bits:
                raise UnknownInstruction(f"{operand.name} has {have} bits, the instruction reads {bits}")
            return row
        if isinstance(operand, Imm):
            if operand.bits == 0 and kind in (F16, F32, F64):
                raise UnknownInstruction("an integer where a float is expected")
            if operand.bits == 64 and kind == F32:
                value = np.array(operand.value, "u8").view("f8").astype("f4").view("u4")
                return self.constant(bits, int(value))
            return self.constant(bits, operand.value)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return self.constant(bits, self.symbols[operand.name])
        raise UnknownInstruction(f"operand {operand}")

    def constant(self, bits: int, value: int) -> int:
        """Row that holds a constant in every lane."""
        key = (bits, value & ((1 << bits) - 1))
        if key not in self.constants:
            self.constants[key] = self._row(bits)
        return self.constants[key]

    def target(self, operand: Operand, kind: int) -> int:
        """Row of an operand that is written as `kind`; `_` gets a row of its own."""
        if isinstance(operand, Sink):
            return self._row(BITS[kind])
        if not isinstance(operand, Reg) or operand.name not in self.names:
            raise UnknownInstruction(f"{operand} cannot be written")
        return self.source(operand, kind)

    # Warps

    def warp_counts(self) -> tuple[int, int, int, int]:
        """Rows of 1, 16, 32 and 64 bits that a warp needs."""
        return self.counts[1], self.counts[16], self.counts[32], self.counts[64]

    def fill(self, warp: Warp, special: dict[str, int | Array]) -> None:
        """Write constants and the values of special registers into a new warp's rows."""
        for (bits, value), row in self.constants.items():
            warp.rows[UNSIGNED[bits]][row][:] = value
        for name, row in self.special.items():
            warp.rows[UNSIGNED[SPECIAL[name]]][row][:] = special.get(name, 0)


def _layout(program: Program) -> tuple[dict[str, int], int]:
    """Addresses of the shared variables, and the bytes of the static ones; dynamic memory follows those."""
    symbols, at = {}, 0
    for variable in program.shared:
        if variable.size is not None:
            at = -(-at // variable.align) * variable.align
            symbols[variable.name] = BASE + at
            at += variable.size
    for variable in program.shared:
        if variable.size is None:
            at = -(-at // variable.align) * variable.align
    symbols |= {variable.name: BASE + at for variable in program.shared if variable.size is None}
    return symbols, at


def refuse(instruction: Instruction, allowed: set[str], start: int = 1) -> None:
    """Raise `UnknownInstruction` for a part of the opcode that is not in `allowed`."""
    for part in instruction.parts[start:]:
        if part not in allowed:
            raise UnknownInstruction(f"modifier .{part}")


def _guarded(step: Step, predicate: int, *, negated: bool) -> Step:
    def _run(w: Warp) -> int | None:
        before = w.where
        mask = w.rows[PRED][predicate]
        mask = ~mask if negated else mask.copy()
        if before is not True:
            mask &= before
        count = np.count_nonzero(mask)
        if count == 0:
            return None
        w.where = True if count == LANES else mask
        try:
            return step(w)
        except PtxFault as fault:
            if fault.lane is None:
                fault.lane = int(np.argmax(mask))
            raise
        finally:
            w.where = before

    return _run
