"""Look into a cubin with the two tools that Triton's wheel carries, on a machine without a GPU.

`inspect(cubin)` counts what matters for a kernel that streams a weight: registers, spills, the widths of its global
loads and its matrix instructions. `assert_streaming(report)` is the gate. Importing this module imports no Triton.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from skinny_core.errors import SkinnyError

_TOOLS = ("backends", "nvidia", "bin")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# "        /*0730*/              @P0 R2UR P3, UR6, R26 ;" -> R2UR
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_TARGET = re.compile(r"\.target\s+(sm_\d+\w?)")
_FLAGS = re.compile(r'\.headerflags\s+@"([^"]*)"')
_UNDECODED = re.compile(r"Cannot decode architecture '(\w+)'", re.IGNORECASE)
_MATRIX = re.compile(r"(HGMMA|QGMMA|IGMMA|BGMMA|HMMA|QMMA|OMMA|IMMA|UTC\w*MMA)\b.*")
_BULK = ("UTMALDG", "UBLKCP")
_PTX_LOAD = re.compile(r"\b(?:ld\.global(?:\.[\w:]+)*|cp\.async\.(?:c[ag]\.shared\.global|bulk\.\w)[^;]*;)")


class SassError(SkinnyError, RuntimeError):
    """A tool is missing, or cannot read this cubin."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers, and bytes per thread (stack, local) or per block (shared, the static part only): the largest of all
    functions of a cubin."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class SassReport:
    """What a cubin holds. Byte counts are per thread (stack, local) or per block (shared, the static part only).

    decoded: False where this nvdisasm does not know the architecture; `opcodes` and `mma` are then empty, and `loads`
    come from the PTX text (what the compiler was asked for, not what it made). note: why, in one sentence.
    loads: "LDG.128", "LDGSTS.128", "UTMALDG", ... -> number of instructions, width in bits. opcodes: in program order.
    """

    arch: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    decoded: bool
    note: str
    loads: Counter[str] = field(default_factory=Counter)
    mma: Counter[str] = field(default_factory=Counter)
    opcodes: tuple[str, ...] = ()

    @property
    def spills(self) -> Counter[str]:
        """Loads and stores of local memory, by opcode."""
        return Counter(op for op in self.opcodes if op.split(".")[0] in ("LDL", "STL"))


def resources(cubin: bytes) -> Resources:
    """What ptxas noted in a cubin: 2 ms, where `inspect` takes 250. Spilled registers are stack or local bytes.

    Raises `SassError` where the tool is missing or cannot read it.
    """
    with tempfile.TemporaryDirectory(prefix="skinny-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _resources(path)


def _resources(path: Path) -> Resources:
    usage = _run("cuobjdump", "--dump-resource-usage", path)
    numbers = [tuple(map(int, row)) for row in _RESOURCES.findall(usage.stdout)]
    if not numbers:
        raise _failed("cuobjdump", usage)
    registers, stack, shared, local = (max(column) for column in zip(*numbers, strict=True))
    return Resources(registers, stack, local, shared)


def inspect(cubin: bytes, *, ptx: str = "") -> SassReport:
    """Disassemble a cubin. ptx: its source text, used for load widths where the SASS cannot be decoded.

    Raises `SassError` where a tool is missing or fails for another reason than an unknown architecture.
    """
    with tempfile.TemporaryDirectory(prefix="skinny-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        used = _resources(path)
        # No data-flow analysis: it only annotates branches, and takes a quarter of the time (2026-12-01).
        listing = _run("nvdisasm", "-c", "-ndf", path)
    unknown = _UNDECODED.search(listing.stdout + listing.stderr)
    opcodes = tuple(_OPCODE.findall(listing.stdout))
    if not opcodes and not unknown:
        raise _failed("nvdisasm", listing)
    note = f"this nvdisasm cannot decode {unknown[1]}: loads are read from the PTX" if unknown else ""
    return SassReport(
        arch=f"sm_{unknown[1][2:]}" if unknown else _arch(listing.stdout),
        registers=used.registers,
        stack_bytes=used.stack_bytes,
        local_bytes=used.local_bytes,
        shared_bytes=used.shared_bytes,
        decoded=unknown is None,
        note=note,
        loads=_ptx_loads(ptx) if unknown else Counter(filter(None, map(_load_width, opcodes))),
        mma=Counter(op for op in opcodes if _MATRIX.fullmatch(op)),
        opcodes=opcodes,
    )


MEASURED_STACK = 32
"""Bytes of stack per thread that a cell may have on the device where it was measured to win: eight registers. 19 of
1485 such cells have 16 or 24 (sm_90a); they beat cuBLAS by 1.10x to 1.57x, and the configs of ours that they raced.
Where nothing was measured, none is allowed."""


def assert_streaming(report: SassReport, *, narrow_loads: int = 0, mma: str | None = None, stack: int = 0) -> None:
    """The binary streams: 16-byte global loads (or bulk copies), at most `narrow_loads` others, at most `stack` bytes
    of spilled registers per thread.

    narrow_loads: global load instructions below 128 bits that the epilogue or scalar reads may need.
    mma: required prefix of the matrix instructions ("HGMMA", "UTCHMMA", "HMMA"); not checked where SASS is not decoded.
    """
    where = f"{report.arch}, {report.registers} registers"
    assert report.stack_bytes <= stack, f"{where}: STACK {report.stack_bytes} bytes per thread"
    assert report.local_bytes == 0, f"{where}: LOCAL {report.local_bytes} bytes per thread"
    assert not report.spills or stack, f"{where}: local memory is used: {dict(report.spills)}"
    wide = {name: n for name, n in report.loads.items() if name.endswith((".128", ".256")) or name in _BULK}
    narrow = {name: n for name, n in report.loads.items() if name not in wide}
    assert wide, f"{where}: no 128-bit global load; {dict(report.loads)}"
    assert sum(narrow.values()) <= narrow_loads, f"{where}: {sum(narrow.values())} narrow loads; {dict(report.loads)}"
    if mma and report.decoded:
        assert report.mma, f"{where}: no matrix instruction"
        assert all(op.startswith(mma) for op in report.mma), f"{where}: {dict(report.mma)}, wanted {mma}"


def assert_before(report: SassReport, first: str, second: str) -> None:
    """The first instruction starting with `second` comes after one starting with `first`, in program order."""
    assert report.decoded, f"{report.arch}: {report.note}"
    early, late = (_place(report, name) for name in (first, second))
    assert early < late, f"{second} at {late} comes before {first} at {early}"


def _place(report: SassReport, name: str) -> int:
    place = next((i for i, op in enumerate(report.opcodes) if op.startswith(name)), -1)
    assert place >= 0, f"{report.arch}: {name} is missing"
    return place


def _load_width(opcode: str) -> str | None:
    name, *modifiers = opcode.split(".")
    if name in _BULK:
        return name
    if name not in ("LDG", "LDGSTS"):
        return None
    bits = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    wide = next((256 for m in modifiers if m.startswith("ENL2")), None)
    return f"{name}.{wide or next((bits[m] for m in modifiers if m in bits), 32)}"


def _ptx_loads(ptx: str) -> Counter[str]:
    loads: Counter[str] = Counter()
    for text in _PTX_LOAD.findall(ptx):
        if text.startswith("ld.global"):
            vector = re.search(r"\.v(\d)", text)
            scalar = re.search(r"\.[busf](8|16|32|64)$", text)
            if scalar:
                loads[f"LDG.{int(scalar[1]) * int(vector[1] if vector else 1)}"] += 1
        elif text.startswith("cp.async.bulk"):
            if text.startswith("cp.async.bulk.shared"):
                loads["UBLKCP"] += 1
            if text.startswith("cp.async.bulk.tensor"):
                loads["UTMALDG"] += 1
        else:
            size = re.search(r"\]\s*,\s*(0x[0-9a-f]+|\d+)", text)
            loads[f"LDGSTS.{8 * int(size[1], 0) if size else 0}"] += 1
    return loads


def _arch(listing: str) -> str:
    if target := _TARGET.search(listing):
        return target[1]
    flags = _FLAGS.search(listing)
    number = re.search(r"EF_CUDA_SM(\d+)", flags[1]) if flags else None
    if not flags or not number:
        return "unknown"
    return f"sm_{number[1]}{'a' if 'EF_CUDA_ACCELERATORS' in flags[1] else ''}"


def _run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise SassError(f"{tool} comes with Triton, which is not installed", "install triton>=3.6")
    path = Path(spec.origin).parent.joinpath(*_TOOLS, tool)
    if not path.is_file():
        raise SassError(f"this Triton has no {tool} at {path}", "install a Triton wheel with the NVIDIA tools")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False)


def _failed(tool: str, result: subprocess.CompletedProcess[str]) -> SassError:
    text = (result.stderr or result.stdout).strip()[:300]
    what = f"{tool} could not read the cubin (exit {result.returncode}): {text}"
    return SassError(what, "pass the bytes of a cubin, and check the target it was compiled for")
