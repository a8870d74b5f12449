"""mma.sync with 16-bit inputs and FP32 sums.

The products of one instruction are summed in FP64 and rounded once; tensor cores truncate in an order of their own, so
that results agree to about 2**-23 of the largest term, not bit for bit.
"""

from __future__ import annotations

import numpy as np

from skinny_core.testing.ptx.convert import from_bf16
from skinny_core.testing.ptx.decode import Builder, Decoder
from skinny_core.testing.ptx.faults import UnknownInstruction
from skinny_core.testing.ptx.memory import Array
from skinny_core.testing.ptx.parse import Instruction, Operand, Vector
from skinny_core.testing.ptx.warp import F32, U32, Step, Warp

_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4


def _halves(rows: list[Array], *, bf16: bool) -> Array:
    """Registers of two 16-bit floats as FP64 `[register, lane, half]`."""
    bits = np.stack(rows).view("u2").reshape(len(rows), 32, 2)
    return (from_bf16(bits) if bf16 else bits.view("f2")).astype("f8")


def a_matrix(rows: list[Array], *, bf16: bool) -> Array:
    """A `[16, k]` from the registers of a warp: register j holds rows `group + 8 * (j % 2)`, columns from
    `2 * member + 8 * (j // 2)`."""
    values = _halves(rows, bf16=bf16)
    matrix = np.empty((16, 4 * len(rows)))
    for j, pair in enumerate(values):
        for half in (0, 1):
            matrix[_GROUP + 8 * (j % 2), 2 * _MEMBER + half + 8 * (j // 2)] = pair[:, half]
    return matrix


def b_matrix(rows: list[Array], *, bf16: bool) -> Array:
    """B `[k, 8]`: register j holds column `group`, rows from `2 * member + 8 * j`."""
    values = _halves(rows, bf16=bf16)
    matrix = np.empty((8 * len(rows), 8))
    for j, pair in enumerate(values):
        for half in (0, 1):
            matrix[2 * _MEMBER + half + 8 * j, _GROUP] = pair[:, half]
    return matrix


def _place(j: int) -> tuple[Array, Array]:
    """Row and column of C that register j of each lane holds."""
    return _GROUP + 8 * (j // 2), 2 * _MEMBER + j % 2


def _registers(operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise UnknownInstruction(f"{count} registers expected")
    return operand.items


def _mma(ctx: Decoder, i: Instruction) -> Step:
    parts = i.parts[1:]
    if parts[:2] != ("sync", "aligned") or parts[3:6] != ("row", "col", "f32") or parts[-1] != "f32":
        raise UnknownInstruction("this form of mma")
    if parts[2] not in ("m16n8k16", "m16n8k8") or parts[6:8] not in (("bf16", "bf16"), ("f16", "f16")):
        raise UnknownInstruction("this shape or type of mma")
    k, bf16 = int(parts[2][6:]), parts[6] == "bf16"
    d = [ctx.target(o, F32) for o in _registers(i.operands[0], 4)]
    a = [ctx.source(o, U32) for o in _registers(i.operands[1], k // 4)]
    b = [ctx.source(o, U32) for o in _registers(_vector(i.operands[2]), k // 8)]
    c = [ctx.source(o, F32) for o in _registers(i.operands[3], 4)]

    def _step(w: Warp) -> int | None:
        if (missing := w.meet()) is not None:
            return missing
        words, sums = w.rows[U32], w.rows[F32]
        left = a_matrix([words[j] for j in a], bf16=bf16)
        product = left @ b_matrix([words[j] for j in b], bf16=bf16)
        results = [(sums[row] + product[_place(j)]).astype("f4") for j, row in enumerate(c)]
        for row, values in zip(d, results, strict=True):
            sums[row][:] = values
        return None

    return _step


def _vector(operand: Operand) -> Vector:
    return operand if isinstance(operand, Vector) else Vector((operand,))


BUILDERS: dict[str, Builder] = {"mma": _mma}
