"""Arithmetic, conversions, lane exchanges, divergence and the tensor core's layout, each against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from skinny_core.testing.ptx import (
    Divergence,
    Machine,
    Memory,
    PtxSyntaxError,
    Trap,
    UnknownInstruction,
)
from skinny_core.testing.ptx.convert import from_bf16, to_bf16

Execute = Callable[..., Memory]
EACH = "mul.wide.u32 %rd9, %r0, 4; add.s64 %rd8, %rd0, %rd9; add.s64 %rd10, %rd1, %rd9; add.s64 %rd11, %rd2, %rd9;"
STORE = "st.global.b32 [%rd8], %r9;"
LANE = np.arange(32)


def lanes(execute: Execute, body: str, a: np.ndarray | None = None, b: np.ndarray | None = None) -> np.ndarray:
    """Run with a[lane] in %r1 and b[lane] in %r2 (as bits); returns %r9 of each lane."""
    out = np.zeros(32, "u4")
    inputs = [np.zeros(32, "u4") if v is None else np.ascontiguousarray(v).view("u4") for v in (a, b)]
    loads = EACH + "ld.global.b32 %r1, [%rd10]; ld.global.b32 %r2, [%rd11];"
    execute(loads + body + STORE, out, *inputs)
    return out


RNG = np.random.default_rng(0)
A, B = RNG.integers(0, 2**32, 32, "u4"), RNG.integers(0, 2**32, 32, "u4")
SA, SB = A.view("i4"), B.view("i4")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r9, %r1, %r2;", A + B),
        ("sub.s32 %r9, %r1, -7;", A + np.uint32(7)),
        ("mul.lo.s32 %r9, %r1, %r2;", A * B),
        ("mul.hi.u32 %r9, %r1, %r2;", (A.astype("u8") * B >> np.uint64(32)).astype("u4")),
        ("mad.lo.s32 %r9, %r1, %r2, %r0;", A * B + LANE.astype("u4")),
        ("mul.wide.s32 %rd1, %r1, %r2; shr.s64 %rd1, %rd1, 32; cvt.u32.u64 %r9, %rd1;", SA.astype("i8") * SB >> 32),
        ("min.s32 %r9, %r1, %r2;", np.minimum(SA, SB)),
        ("max.u32 %r9, %r1, %r2;", np.maximum(A, B)),
        ("shl.b32 %r9, %r1, 40;", A * 0),
        ("shr.s32 %r9, %r1, 40;", SA >> 31),
        ("shr.u32 %r9, %r1, %r0;", A >> LANE.astype("u4")),
        ("div.s32 %r9, %r1, 1000;", np.trunc(SA / 1000).astype("i4")),
        ("rem.s32 %r9, %r1, 1000;", np.fmod(SA, 1000)),
        ("rem.u32 %r9, %r1, 1000;", A % 1000),
        ("not.b32 %r9, %r1;", ~A),
        ("neg.s32 %r9, %r1;", -SA),
        ("lop3.b32 %r9, %r1, %r2, %r0, 0x96;", A ^ B ^ LANE.astype("u4")),
        ("prmt.b32 %r9, %r1, %r2, 0x5410;", A & 0xFFFF | B << 16),
        ("prmt.b32 %r9, %r1, %r2, 0x7632;", A >> 16 | B & np.uint32(0xFFFF0000)),
        ("bfe.u32 %r9, %r1, 5, 9;", A >> 5 & 511),
        ("bfe.s32 %r9, %r1, 4, 8;", (A >> 4).astype("i1").astype("i4")),
        ("bfi.b32 %r9, %r1, %r2, 8, 4;", B & ~np.uint32(0xF00) | (A & 15) << 8),
        ("shf.l.wrap.b32 %r9, %r1, %r2, 8;", B << 8 | A >> 24),
        ("shf.r.clamp.b32 %r9, %r1, %r2, 32;", B),
        ("popc.b32 %r9, %r1;", np.array([int(a).bit_count() for a in A])),
        ("clz.b32 %r9, %r1;", np.array([32 - int(a).bit_length() for a in A])),
        ("mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r3, %r9}, %rd1;", B),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};", A << 16 | A >> 16),
        ("cvt.u16.u32 %rs1, %r1; cvt.s32.s16 %r9, %rs1;", A.astype("i2").astype("i4")),
        ("cvt.s32.s8 %r9, %r1;", A.astype("i1").astype("i4")),
        ("cvt.sat.u8.s32 %r9, %r1;", np.clip(SA, 0, 255)),
        ("setp.lt.s32 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 0, %p2;", SA >= SB),
        ("setp.hi.u32 %p1, %r0, 9; setp.lt.and.s32 %p2, %r1, %r2, !%p1; selp.b32 %r9, 1, 0, %p2;",
         (SA < SB) & (LANE < 10)),
        ("{.reg .b32 t; add.s32 t, %r1, 1; {.reg .b32 t; mov.b32 t, 7;} mov.b32 %r9, t;}", A + np.uint32(1)),
    ],
)  # fmt: skip
def test_integers(execute: Execute, body: str, expected: np.ndarray) -> None:
    assert lanes(execute, body, A, B).tolist() == expected.astype("i8").astype("u4").tolist()


FLOATS = np.ldexp(RNG.standard_normal(32), RNG.integers(-9, 9, 32)).astype("f4")
SPECIALS = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5, -2.5, 1e38], "f4").repeat(4)


@pytest.mark.parametrize(
    ("name", "ordered"),
    [("lt", True), ("ge", True), ("ne", True), ("eq", True), ("ltu", False), ("neu", False), ("equ", False)],
)
def test_comparisons_of_floats_with_nan(execute: Execute, name: str, ordered: bool) -> None:
    other = np.roll(SPECIALS, 5)
    got = lanes(execute, f"setp.{name}.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;", SPECIALS, other)
    plain = {"l": np.less, "g": np.greater_equal, "n": np.not_equal, "e": np.equal}[name[0]](SPECIALS, other)
    nan = np.isnan(SPECIALS) | np.isnan(other)
    assert (got == np.where(nan, not ordered, plain)).all()


def test_bf16_rounds_to_nearest_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x00008000], "u4")
    assert to_bf16(ties.view("f4")).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0]
    values = RNG.integers(0, 2**32, 100_000, "u4").view("f4")
    values = values[~np.isnan(values)]
    torch_bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("u2")
    assert (to_bf16(values) == torch_bits).all()
    assert (from_bf16(torch_bits) == torch.from_numpy(values).bfloat16().float().numpy()).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_conversions_of_floats(execute: Execute, kind: str) -> None:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    want = torch.from_numpy(FLOATS).to(dtype)
    one = f"cvt.rn.{kind}.f32 %rs1, %r1; cvt.f32.{kind} %r9, %rs1;"
    assert (lanes(execute, one, FLOATS).view("f4") == want.float().numpy()).all()
    got = lanes(execute, f"cvt.rn.{kind}x2.f32 %r9, %r1, %r2;", FLOATS, -FLOATS)
    upper = want.view(torch.int16).numpy().view("u2").astype("u4") << 16
    assert (got == (upper | (-want).view(torch.int16).numpy().view("u2"))).all()


def test_integers_and_floats(execute: Execute) -> None:
    assert (lanes(execute, "cvt.rn.f32.s32 %r9, %r1;", SA).view("f4") == SA.astype("f4")).all()
    got = lanes(execute, "cvt.rzi.s32.f32 %r9, %r1;", SPECIALS).view("i4")
    assert got[::4].tolist() == [0, 2**31 - 1, -(2**31), 0, 0, 1, -2, 2**31 - 1]
    assert lanes(execute, "cvt.rni.f32.f32 %r9, %r1;", SPECIALS).view("f4")[20::4].tolist() == [
        2.0,
        -2.0,
        np.float32(1e38),
    ]


def test_fma_rounds_once(execute: Execute) -> None:
    # 1 + 2**-24 + 2**-60: FP64 drops the last term and leaves a tie, which would go down to 1.
    a, b = np.full(32, 2.0**-30, "f4"), np.full(32, 2.0**-30, "f4")
    body = "mov.b32 %r3, 0f3F800001; mov.b32 %r4, 0f33800000; fma.rn.f32 %r9, %r1, %r2, %r3;"
    assert (lanes(execute, body, a, b) == 0x3F800001).all()
    c = math.ldexp(1 + 2**-12, 0)
    x = np.full(32, c, "f4")  # x * x = 1 + 2**-11 + 2**-24: a true tie, to even
    y = np.full(32, 2.0**-70, "f4")
    body = "fma.rn.f32 %r9, %r1, %r1, 0f00000000;"
    assert (lanes(execute, body, x).view("f4") == np.float32(1 + 2**-11)).all()
    body = "fma.rn.f32 %r9, %r1, %r1, %r2;"
    assert (lanes(execute, body, x, y).view("f4") == np.float32(1 + 2**-11 + 2**-23)).all()
    assert (lanes(execute, body, x, -y).view("f4") == np.float32(1 + 2**-11)).all()


@pytest.mark.parametrize(("mode", "expected"), [("rm", 1.0), ("rp", 1 + 2.0**-23), ("rz", 1.0)])
def test_directed_rounding(execute: Execute, mode: str, expected: float) -> None:
    x = np.full(32, 2.0**-30, "f4")
    one = "mov.b32 %r3, 0f3F800000;"
    assert (lanes(execute, one + f"fma.{mode}.f32 %r9, %r1, %r1, %r3;", x).view("f4") == np.float32(expected)).all()
    got = lanes(execute, one + f"neg.f32 %r3, %r3; neg.f32 %r2, %r1; fma.{mode}.f32 %r9, %r1, %r2, %r3;", x).view("f4")
    assert (got == np.float32({"rm": -1 - 2.0**-23, "rp": -1.0, "rz": -1.0}[mode])).all()


def test_approximations_and_mixed_sums(execute: Execute) -> None:
    x = FLOATS / np.float32(16)
    got = lanes(execute, "ex2.approx.ftz.f32 %r9, %r1;", x).view("f4")
    assert np.allclose(got, np.exp2(x.astype("f8")), rtol=1e-6, atol=2.0**-126)
    assert (lanes(execute, "ex2.approx.ftz.f32 %r9, %r1;", np.full(32, -130, "f4")) == 0).all()
    body = "cvt.rn.bf16.f32 %rs1, %r1; add.rn.f32.bf16 %r9, %rs1, %r2;"
    assert (lanes(execute, body, FLOATS, FLOATS).view("f4") == from_bf16(to_bf16(FLOATS)) + FLOATS).all()


@pytest.mark.parametrize("mode", ["bfly", "idx", "up", "down"])
def test_shuffles(execute: Execute, mode: str) -> None:
    # Segments of 8 lanes (c = segment mask << 8 | clamp), offset 3.
    clamp = 0 if mode == "up" else 7
    body = f"shfl.sync.{mode}.b32 %r9|%p1, %r1, 3, {0x18 << 8 | clamp}, -1;"
    start = LANE & ~7
    j = {"bfly": LANE ^ 3, "idx": start + 3, "up": LANE - 3, "down": LANE + 3}[mode]
    good = (j >= start) & (j < start + 8)
    assert (lanes(execute, body, A) == np.where(good, A[np.clip(j, 0, 31)], A)).all()
    assert (lanes(execute, body + "selp.b32 %r9, 1, 0, %p1;", A) == good).all()


def test_votes_and_elections(execute: Execute) -> None:
    odd = "and.b32 %r3, %r0, 1; setp.eq.b32 %p1, %r3, 1;"
    assert (lanes(execute, odd + "vote.sync.ballot.b32 %r9, %p1, -1;") == 0xAAAAAAAA).all()
    assert (lanes(execute, odd + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;") == 1).all()
    assert (lanes(execute, odd + "vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r9, 1, 0, %p2;") == 0).all()
    assert (lanes(execute, "elect.sync %r3|%p1, -1; selp.b32 %r9, 1, 0, %p1;") == (LANE == 0)).all()


def test_divergence_and_loops(execute: Execute) -> None:
    """Collatz steps per lane: every lane leaves the loop at a time of its own, and all meet for the shuffle."""
    body = """
    mov.b32 %r9, 0; add.s32 %r1, %r0, 1;
LOOP:
    setp.eq.b32 %p1, %r1, 1;
    @%p1 bra DONE;
    add.s32 %r9, %r9, 1; and.b32 %r3, %r1, 1; setp.eq.b32 %p2, %r3, 0;
    @%p2 bra EVEN;
    mad.lo.s32 %r1, %r1, 3, 1; bra.uni LOOP;
EVEN:
    shr.u32 %r1, %r1, 1; bra LOOP;
DONE:
    @!%p1 trap;
    shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;
    """

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    assert lanes(execute, body).tolist() == [steps(n + 1) for n in LANE ^ 1]


def test_lanes_meet_even_where_the_code_is_out_of_order(execute: Execute) -> None:
    """The early lanes reach the shuffle first, by program counter, and must wait for the ones that come from below."""
    body = """
    mov.b32 %r9, %r0; setp.gt.u32 %p1, %r0, 15; @%p1 bra FAR;
MEET:
    shfl.sync.bfly.b32 %r9, %r9, 16, 31, -1; bra END;
FAR:
    add.s32 %r9, %r9, 100; bra MEET;
END:
    """
    assert lanes(execute, body).tolist() == [n + 116 if n < 16 else n - 16 for n in LANE]


def test_a_shuffle_that_some_lanes_skip(execute: Execute) -> None:
    with pytest.raises(Divergence, match="shfl"):
        lanes(execute, "setp.gt.u32 %p1, %r0, 15; @%p1 bra END; shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1; END:")


def test_early_exits(execute: Execute) -> None:
    assert (lanes(execute, "mov.b32 %r9, 5; setp.gt.u32 %p1, %r0, 9; @%p1 ret;") == np.where(LANE < 10, 5, 0)).all()


def test_trap(execute: Execute) -> None:
    with pytest.raises(Trap, match="thread 7"):
        lanes(execute, "setp.eq.b32 %p1, %r0, 7; @%p1 trap;")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("k", [8, 16])
def test_mma_layout(execute: Execute, kind: str, k: int) -> None:
    """Fragments are filled as the PTX ISA's figures say, element by element; small integers make every sum exact."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a, b = RNG.integers(-8, 8, (16, k)), RNG.integers(-8, 8, (k, 8))
    c = RNG.integers(-8, 8, (16, 8)).astype("f4")

    def bits(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view("u2")

    fa, fb, fc = np.zeros((32, k // 2), "u2"), np.zeros((32, k // 4), "u2"), np.zeros((32, 4), "f4")
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(k // 2):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            fa[lane, i] = bits(a)[row, member * 2 + (i & 1) + (8 if i >= 4 else 0)]
        for i in range(k // 4):
            fb[lane, i] = bits(b)[member * 2 + (i & 1) + (8 if i >= 2 else 0), group]
        for i in range(4):
            fc[lane, i] = c[group if i < 2 else group + 8, member * 2 + (i & 1)]
    na, nb = k // 4, k // 8
    ra, rb = ", ".join(f"%r{10 + j}" for j in range(na)), ", ".join(f"%r{20 + j}" for j in range(nb))
    body = "mul.wide.u32 %rd9, %r0, 4;"
    body += "".join(f"mad.lo.s64 %rd8, %rd9, {na}, %rd0; ld.global.b32 %r{10 + j}, [%rd8+{4 * j}];" for j in range(na))
    body += "".join(f"mad.lo.s64 %rd8, %rd9, {nb}, %rd1; ld.global.b32 %r{20 + j}, [%rd8+{4 * j}];" for j in range(nb))
    body += "mad.lo.s64 %rd8, %rd9, 4, %rd2; ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd8];"
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%f0, %f1, %f2, %f3}}, {{{ra}}}, {{{rb}}}, "
    body += "{%f0, %f1, %f2, %f3}; st.global.v4.f32 [%rd8], {%f0, %f1, %f2, %f3};"
    execute(body, fa, fb, fc)
    want = a @ b + c
    for lane in range(32):
        for i in range(4):
            assert fc[lane, i] == want[lane // 4 + 8 * (i >= 2), lane % 4 * 2 + (i & 1)]


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(execute: Execute, trans: bool) -> None:
    data, out = RNG.integers(0, 2**16, (32, 8)).astype("u2"), np.zeros((32, 4), "u4")
    body = "mov.b32 %r1, buffer; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd9, %r0, 16;"
    body += "add.s64 %rd8, %rd0, %rd9; ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd8]; add.s64 %rd10, %rd1, %rd9;"
    body += "st.shared.v4.b32 [%r1], {%r3, %r4, %r5, %r6}; bar.warp.sync -1;"
    body += f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if trans else ''}.shared.b16 {{%r3, %r4, %r5, %r6}}, [%r1];"
    execute(body + "st.global.v4.b32 [%rd10], {%r3, %r4, %r5, %r6};", data, out, shared=512)
    for j in range(4):
        matrix = data[8 * j : 8 * j + 8].T if trans else data[8 * j : 8 * j + 8]
        halves = np.ascontiguousarray(out[:, j]).view("u2").reshape(32, 2)
        for lane in range(32):
            assert (halves[lane] == matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]).all()


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.cc.s32 %r1, %r1, %r2;",
        "add.rz.f32 %f1, %f1, %f2;",
        "ld.global.nonsense.b32 %r1, [%rd0];",
        "add.s32 %r1, %rd1, %r2;",
        "atom.global.add.u32 %r1, [%rd0], 1;",
        "bra NOWHERE;",
        "cp.async.ca.shared.global [%r1], [%rd0], 16;",
    ],
)
def test_what_is_not_understood_is_named_when_the_program_is_decoded(text: Callable[..., str], body: str) -> None:
    with pytest.raises(UnknownInstruction) as caught:
        Machine(text("\n" + body, 1, 0))
    assert body.rstrip(";") in str(caught.value)


def test_text_that_is_not_ptx() -> None:
    with pytest.raises(PtxSyntaxError, match="0 entries"):
        Machine("int main() {}")
