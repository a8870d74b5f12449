"""PTX text to a `Program`: one entry's parameters, registers, shared variables and instructions.

Reads what NVVM writes for a kernel without function calls, inline assembly with its own scopes included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from skinny_core.testing.ptx.faults import PtxSyntaxError, Site

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, by a name that is unique in the entry, or a special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant: an int, or the bits of a float of `bits` bits (0 for an int)."""

    value: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`."""

    base: Reg | Symbol | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|p`: a result and a predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that is not wanted."""


Operand = Reg | Imm | Symbol | Address | Vector | Pair | Not | Sink


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. guard: predicate register and whether it is negated; parts: the opcode split at its dots."""

    line: int
    text: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None = None

    @property
    def site(self) -> Site:
        """Its place in the text."""
        return Site(self.line, self.text)


@dataclass(frozen=True, slots=True)
class Param:
    """An entry parameter of `size` bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared variable; size None: `extern`, all of the dynamic shared memory."""

    name: str
    align: int
    size: int | None


@dataclass(slots=True)
class Program:
    """One entry. registers: name to type without the dot; labels: name to index of an instruction."""

    entry: str
    params: list[Param] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    block: tuple[int, ...] | None = None
    clusters: bool = False


_ENTRY = re.compile(r"\.entry\s+([$\w]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)(?:\s+\.ptr[^,\[]*?)?\s+([$\w]+)\s*(?:\[(\d+)\])?\s*$"
)
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([$\w]+)\s*(?:\[(\d*)\])?\s*;")
_REG = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"^(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_FLOAT = re.compile(r"^0([fFdD])([0-9a-fA-F]+)$")
_INT = re.compile(r"^([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[Uu]?$")


def parse(text: str, entry: str | None = None) -> Program:
    """The program of the only entry, or of the entry of that name. Raises `PtxSyntaxError`."""
    text = _without_comments(text)
    found = [match for match in _ENTRY.finditer(text) if entry in (None, match[1])]
    if len(found) != 1:
        raise PtxSyntaxError(f"{len(found)} entries{f' called {entry}' if entry else ''} in the text, expected one")
    head = found[0]
    program = Program(head[1])
    for piece in filter(str.strip, head[2].split(",")):
        match = _PARAM.search(piece.strip())
        if match is None:
            raise PtxSyntaxError(f"parameter {piece.strip()!r} of {program.entry}")
        program.params.append(Param(match[3], SIZES[match[2]] * int(match[4] or 1)))
    if required := re.search(r"\.reqntid\s+([\d,\s]+)", head[3]):
        sizes = [int(size) for size in required[1].split(",")]
        program.block = tuple(sizes + [1] * (3 - len(sizes)))
    size = re.search(r"\.reqnctapercluster\s+([\d,\s]+)", head[3])
    program.clusters = size is not None and any(int(n) > 1 for n in size[1].split(","))
    for match in _SHARED.finditer(text):
        known = None if match[5] == "" else SIZES[match[3]] * int(match[5] or 1)
        program.shared.append(Shared(match[4], int(match[2] or SIZES[match[3]]), known))
    _Body(program, text, head.end()).read()
    return program


def _without_comments(text: str) -> str:
    """Comments become blanks; line breaks stay, so that line numbers do."""
    pattern = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
    return pattern.sub(lambda m: "\n" * m[0].count("\n"), text)


@dataclass(slots=True)
class _Scope:
    parent: _Scope | None
    suffix: str
    registers: dict[str, str] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)

    def chain(self) -> Iterator[_Scope]:
        """This scope and those around it, innermost first."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class _Body:
    """The braces of an entry. Statements first, operands after, when all labels are known."""

    def __init__(self, program: Program, text: str, start: int) -> None:
        self.program, self.text, self.at = program, text, start
        self.statements: list[tuple[int, str, _Scope]] = []
        self.line = text.count("\n", 0, start) + 1

    def read(self) -> None:
        """Fill the program."""
        scope, scopes = _Scope(None, ""), 0
        while True:
            self._blank()
            if self.at >= len(self.text):
                raise PtxSyntaxError("the entry has no closing brace")
            char = self.text[self.at]
            if char == "{":
                scopes += 1
                scope = _Scope(scope, f"@{scopes}")
                self.at += 1
            elif char == "}":
                self.at += 1
                if scope.parent is None:
                    break
                scope = scope.parent
            elif label := _LABEL.match(self.text, self.at):
                scope.labels.add(label[1])
                self.program.labels[label[1] + scope.suffix] = len(self.statements)
                self._advance(label.end())
            else:
                self._statement(scope)
        for line, text, inside in self.statements:
            self.program.instructions.append(self._instruction(line, text, inside))

    def _advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _blank(self) -> None:
        end = self.at
        while end < len(self.text) and self.text[end] in " \t\r\n;":
            end += 1
        self._advance(end)

    def _statement(self, scope: _Scope) -> None:
        end = self.text.find(";", self.at)
        newline = self.text.find("\n", self.at)
        if self.text.startswith((".loc", ".file", ".pragma"), self.at) and (end < 0 or 0 <= newline < end):
            self._advance(newline)  # `.loc` ends with its line
            return
        if end < 0:
            raise PtxSyntaxError("a statement has no semicolon", site=Site(self.line, self.text[self.at :][:60]))
        text, line = " ".join(self.text[self.at : end].split()), self.line
        self._advance(end + 1)
        if match := _REG.match(text):
            self._declare(scope, match[1], match[2], line)
        elif not text.startswith("."):
            self.statements.append((line, text, scope))
        elif not text.startswith((".shared", ".extern", ".pragma", ".loc", ".file")):
            raise PtxSyntaxError("this declaration is not supported", site=Site(line, text))

    def _declare(self, scope: _Scope, kind: str, names: str, line: int) -> None:
        for name in (n.strip() for n in names.split(",")):
            match = re.fullmatch(r"([%$\w]+)(?:<(\d+)>)?", name)
            if match is None:
                raise PtxSyntaxError(f"register declaration {name!r}", site=Site(line, names))
            plain = [match[1]] if match[2] is None else [f"{match[1]}{i}" for i in range(int(match[2]))]
            for register in plain:
                scope.registers[register] = register + scope.suffix
                self.program.registers[register + scope.suffix] = kind

    def _instruction(self, line: int, text: str, scope: _Scope) -> Instruction:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise PtxSyntaxError("not an instruction", site=Site(line, text))
        try:
            guard = None if match[2] is None else (self._register(match[2], scope), match[1] == "!")
            operands = tuple(self._operand(piece, scope) for piece in _split(match[4]))
        except PtxSyntaxError as error:
            error.site = Site(line, text)
            raise
        return Instruction(line, text, tuple(re.split(r"\.", match[3])), operands, guard)

    def _register(self, name: str, scope: _Scope) -> Reg:
        for one in scope.chain():
            if name in one.registers:
                return Reg(one.registers[name])
        if name.startswith("%"):
            return Reg(name)  # a special register, or an unknown name that the decoder refuses
        raise PtxSyntaxError(f"{name!r} is not declared")

    def _operand(self, text: str, scope: _Scope) -> Operand:
        if text == "_":
            return Sink()
        if text[0] == "{":
            return Vector(tuple(self._operand(piece, scope) for piece in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1].strip(), scope)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), scope), self._operand(second.strip(), scope))
        if text[0] == "!":
            return Not(self._register(text[1:].strip(), scope))
        if constant := _constant(text):
            return constant
        if re.fullmatch(r"[%$\w]+(\.\w+)?", text) is None:
            raise PtxSyntaxError(f"operand {text!r}")
        if text[0] == "%" or any(text in one.registers for one in scope.chain()):
            return self._register(text, scope)
        label = next((text + one.suffix for one in scope.chain() if text in one.labels), text)
        return Symbol(label)

    def _address(self, text: str, scope: _Scope) -> Address:
        base, sign, offset = re.fullmatch(r"([^+\-\s]+)\s*(?:([+-])\s*(.+))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
        distance = 0
        if offset is not None:
            constant = _constant(offset.strip())
            if constant is None:
                raise PtxSyntaxError(f"address {text!r}")
            distance = -constant.value if sign == "-" else constant.value
        operand = self._operand(base, scope)
        if not isinstance(operand, (Reg, Symbol, Imm)):
            raise PtxSyntaxError(f"address {text!r}")
        return Address(operand, distance)


def _constant(text: str) -> Imm | None:
    if match := _FLOAT.match(text):
        return Imm(int(match[2], 16), 32 if match[1] in "fF" else 64)
    if match := _INT.match(text):
        digits = match[2]
        base = 16 if digits[:2] in ("0x", "0X") else 2 if digits[:2] in ("0b", "0B") else 8 if digits[0] == "0" else 10
        return Imm(int(digits, base) * (-1 if match[1] == "-" else 1))
    return Imm(32) if text == "WARP_SZ" else None


def _split(text: str) -> list[str]:
    """Pieces between commas that lie outside braces and brackets."""
    pieces, depth, piece = [], 0, ""
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            pieces.append(piece.strip())
            piece = ""
        else:
            piece += char
    if piece.strip():
        pieces.append(piece.strip())
    return pieces
