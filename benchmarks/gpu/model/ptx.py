"""Reads PTX as nvcc writes it: kernels with their code flat, calls replaced by what they call.

Only what the compiler of CUDA 13.0 makes of this project's kernels; anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Frame(NamedTuple):
    """A place in the sources: a line of a function."""

    function: str
    file: str
    line: int


Frames = tuple[Frame, ...]  # from the kernel's own line to the innermost inlined function's


class Instruction(NamedTuple):
    """One instruction. A label's name stands in a branch as it is in `Kernel.labels`."""

    opcode: tuple[str, ...]  # ("add", "rn", "f64")
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool  # the predicate
    frames: Frames

    @property
    def type(self) -> str:
        """The last part of the opcode, which is the type operated on."""
        return self.opcode[-1]

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.predicate} " if self.predicate else ""
        return f"{guard}{'.'.join(self.opcode)} {', '.join(self.operands)}".strip()


class Variable(NamedTuple):
    """A variable in shared or local memory, or a parameter."""

    name: str
    alignment: int
    bytes: int


@dataclass
class Function:
    """A kernel or a function as it is written."""

    name: str
    parameters: list[Variable]
    results: list[Variable]
    blocks: int  # a multiprocessor shall hold, 0 where nothing is said
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # type by name, or by prefix
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)


@dataclass(frozen=True)
class Kernel:
    """A kernel with all that it calls in its code."""

    name: str
    parameters: tuple[Variable, ...]
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]
    registers: Mapping[str, str]  # type by name; names that the code uses
    shared: tuple[Variable, ...]
    local: tuple[Variable, ...]
    blocks: int


TYPES = {
    **{f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)},
    **{"pred": 1, "f16x2": 4, "bf16x2": 4, "f16": 2, "bf16": 2},
}

_HEAD = re.compile(r"^(?:\.visible |\.weak )*\.(entry|func)\b", re.MULTILINE)
_PARAMETER = re.compile(r"\.param\s+(?:\.align (\d+) )?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_VARIABLE = re.compile(r"\.(?:shared|local)\s+\.align (\d+) \.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_STATEMENT = re.compile(r"(?:@(!?)([%\w.]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):")
_LOC = re.compile(
    r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name (\S+), inlined_at (\d+) (\d+) (\d+))?"
)
_ADDRESS = re.compile(r"\[([^\]+]+?)(?:\+(-?\d+))?\]$")


def address(operand: str) -> tuple[str, int]:
    """Give base and offset of ``[base+offset]``."""
    match = _ADDRESS.match(operand)
    if match is None:
        raise ValueError(f"an address like [%rd1+8] was expected, got {operand}")
    return match[1].strip(), int(match[2] or 0)


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas that are in no bracket."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return tuple(p for p in (*parts, part.strip()) if p)


class Module:
    """A file of PTX. Functions are read when they are asked for."""

    def __init__(self, text: str) -> None:
        self._texts: dict[str, str] = {}
        self._heads: dict[str, str] = {}
        self._functions: dict[str, Function] = {}
        self.kernels: list[str] = []  # names of the entries
        self._files = {n: Path(path).name for n, path in re.findall(r'\.file\s+(\d+) "(.*)"', text)}
        self._names = dict(_debug_strings(text))
        self._shared: dict[str, Variable] = {}
        self._cut(text)

    @classmethod
    def read(cls, path: Path) -> Module:
        """Read a file."""
        return cls(path.read_text())

    def _cut(self, text: str) -> None:
        ends = re.compile(r"^(?:\{|;)", re.MULTILINE)
        for line in re.findall(r"^\.shared .*;", text, re.MULTILINE):
            variable = _variable(line.rstrip(";"))
            self._shared[variable.name] = variable
        for match in _HEAD.finditer(text):
            start = ends.search(text, match.end())
            if start is None or start[0] == ";":  # declared, not defined
                continue
            head = text[match.start() : start.start()]
            name = re.search(r"([\w$]+)\s*\((?!.*func_retval)", head.split(") ", 1)[-1])
            if name is None:
                raise ValueError(f"a kernel's or function's name was expected in {head[:200]}")
            self._heads[name[1]] = head
            self._texts[name[1]] = text[start.end() : text.index("\n}", start.end())]
            if match[1] == "entry":
                self.kernels.append(name[1])

    def function(self, name: str) -> Function:
        """Read a kernel or function as it is written."""
        if name not in self._functions:
            head = self._heads[name]
            blocks = re.search(r"\.minnctapersm (\d+)", head)
            before, _, after = head.partition(name + "(")
            if not after:  # "name\n("
                before, _, after = head.partition(name)
            function = Function(
                name,
                [_parameter(m) for m in _PARAMETER.finditer(after)],
                [_parameter(m) for m in _PARAMETER.finditer(before)],
                int(blocks[1]) if blocks else 0,
            )
            _Reader(function, self._files, self._names).read(self._texts[name])
            self._functions[name] = function
        return self._functions[name]

    def kernel(self, name: str) -> Kernel:
        """Read a kernel, with what it calls."""
        return _Flattener(self).flatten(self.function(name), self._shared)


def _debug_strings(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"^(\$L__info_string\d+):\n((?:\.b8 .*\n)+)", text, re.MULTILINE):
        values = re.findall(r"\d+", match[2].replace(".b8", ""))
        yield match[1], _plain_name(bytes(int(v) for v in values if v != "0").decode())


def _plain_name(symbol: str) -> str:
    """Give the last name of a mangled symbol, without its namespaces and arguments."""
    head = re.match(r"_Z(Z*)N?[KVR]*", symbol)
    if head is None:
        return symbol
    place, name = head.end(), symbol
    while match := re.compile(r"(\d+)").match(symbol, place):
        place = match.end() + int(match[1])
        name = symbol[match.end() : place]
    return f"{name}, a lambda" if head[1] else name


def _parameter(match: re.Match[str]) -> Variable:
    size = TYPES[match[2]]
    return Variable(match[3], int(match[1] or size), int(match[4]) if match[4] else size)


def _variable(text: str) -> Variable:
    match = _VARIABLE.match(text)
    if match is None:
        raise ValueError(f"a variable in shared or local memory was expected, got {text}")
    return Variable(match[3], int(match[1]), int(match[4] or 1) * TYPES[match[2]])


class _Reader:
    """Fills a function from the text between its braces."""

    def __init__(
        self, function: Function, files: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        self.function = function
        self.files = files
        self.names = names
        self.kernel = _plain_name(function.name)
        self.frames: Frames = ()
        self.seen: dict[tuple[str, str, str], Frames] = {}  # where something was inlined

    def read(self, text: str) -> None:
        buffer = ""
        for line in text.splitlines():
            line = line.split("//")[0].strip()
            if line.startswith((".loc ", ".loc\t")):
                self._locate(line)
                continue
            while line:
                label = _LABEL.match(line) if not buffer else None
                if not buffer and line[0] in "{}":
                    line = line[1:].lstrip()
                elif label is not None:
                    self.function.labels[label[1]] = len(self.function.code)
                    line = line[label.end() :].lstrip()
                else:
                    statement, semicolon, line = line.partition(";")
                    buffer += statement + " "
                    line = line.lstrip()
                    if semicolon:
                        self._take(buffer.strip())
                        buffer = ""

    def _locate(self, line: str) -> None:
        match = _LOC.match(line)
        if match is None:
            raise ValueError(f"a .loc was expected, got {line}")
        file, row, column, name, *caller = match.groups()
        outer = self.seen.get((caller[0], caller[1], caller[2]), ()) if name else ()
        function = self.names.get(name, name) if name else self.kernel
        self.frames = (*outer, Frame(function, self.files.get(file, file), int(row)))
        self.seen[file, row, column] = self.frames

    def _take(self, statement: str) -> None:
        if statement.startswith((".pragma", ".param")):
            return
        if statement.startswith(".reg"):
            self._declare(statement)
        elif statement.startswith(".shared"):
            self.function.shared.append(_variable(statement))
        elif statement.startswith(".local"):
            self.function.local.append(_variable(statement))
        elif match := _STATEMENT.match(statement):
            operands = split_operands(" ".join(match[4].split()))
            opcode = tuple(part for part in match[3].split(".") if part)
            self.function.code.append(
                Instruction(opcode, operands, match[2], match[1] == "!", self.frames)
            )
        else:
            raise ValueError(f"an instruction was expected, got {statement}")

    def _declare(self, statement: str) -> None:
        match = _REGISTERS.match(statement)
        if match is None:
            raise ValueError(f"registers were expected, got {statement}")
        for name in match[2].split(","):
            name = name.split("<")[0].strip()
            if self.function.registers.setdefault(name, match[1]) != match[1]:
                raise ValueError(f"{name} is of two types in {self.function.name}")


class _Flattener:
    """Puts the code of called functions in the place of the calls."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, str] = {}
        self.shared: dict[str, Variable] = {}
        self.local: list[Variable] = []
        self.calls = 0

    def flatten(self, function: Function, shared: Mapping[str, Variable]) -> Kernel:
        self._add(function, "", {}, ())
        used = set(re.findall(r"_Z[\w$]+", " ".join(o for i in self.code for o in i.operands)))
        self.shared.update({name: v for name, v in shared.items() if name in used})
        return Kernel(
            function.name,
            tuple(function.parameters),
            tuple(self.code),
            self.labels,
            self.registers,
            tuple(self.shared.values()),
            tuple(self.local),
            function.blocks,
        )

    def _add(
        self, function: Function, prefix: str, passed: Mapping[str, str], frames: Frames
    ) -> None:
        end = f"{prefix}end"
        begins: dict[int, list[str]] = {}
        for label, place in function.labels.items():
            begins.setdefault(place, []).append(label)
        self.shared.update({v.name: v for v in function.shared})
        self.local += [v._replace(name=prefix + v.name) for v in function.local]
        local = {v.name for v in function.local}
        for place in range(len(function.code) + 1):
            for label in begins.get(place, ()):
                self.labels[prefix + label] = len(self.code)
            if place == len(function.code):
                break
            instruction = function.code[place]
            instruction = instruction._replace(frames=(*frames, *instruction.frames))
            if instruction.opcode[0] == "call":
                self._call(instruction, prefix)
                continue
            if prefix and instruction.opcode[0] == "ret":
                instruction = instruction._replace(opcode=("bra",), operands=(end,))
            elif instruction.opcode[0] == "bra":
                instruction = instruction._replace(operands=(prefix + instruction.operands[0],))
            else:
                instruction = self._renamed(instruction, function, prefix, passed, local)
            predicate = instruction.predicate
            if predicate is not None:
                predicate = self._register(predicate, function, prefix)
            self.code.append(instruction._replace(predicate=predicate))
        self.labels[end] = len(self.code)

    def _call(self, call: Instruction, prefix: str) -> None:
        groups = [o for o in call.operands if o.startswith("(")]
        (name,) = (o for o in call.operands if not o.startswith("("))
        callee = self.module.function(name)
        results = split_operands(groups[0][1:-1]) if call.operands[0].startswith("(") else ()
        arguments = split_operands(groups[-1][1:-1]) if len(groups) > bool(results) else ()
        self.calls += 1
        passed = {
            **{p.name: prefix + a for p, a in zip(callee.parameters, arguments, strict=True)},
            **{r.name: prefix + x for r, x in zip(callee.results, results, strict=True)},
        }
        self.code.append(call._replace(opcode=("call",), operands=(), predicate=None))
        self._add(callee, f"call{self.calls}.", passed, call.frames)

    def _renamed(
        self,
        instruction: Instruction,
        function: Function,
        prefix: str,
        passed: Mapping[str, str],
        local: set[str],
    ) -> Instruction:
        opcode, operands = instruction.opcode, instruction.operands
        if "param" in opcode and opcode[0] in ("ld", "st"):
            place = next(i for i, operand in enumerate(operands) if operand.startswith("["))
            base, offset = address(operands[place])
            is_kernels = not prefix and base in {p.name for p in function.parameters}
            if not is_kernels and not base.startswith("%"):
                # Memory between caller and callee: a register for each offset.
                register = f"{passed.get(base, prefix + base)}+{offset}"
                self.registers[register] = "b64"
                value = self._operand(operands[1 - place], function, prefix, local)
                moved = (value, register) if opcode[0] == "ld" else (register, value)
                return instruction._replace(opcode=("mov", opcode[-1]), operands=moved)
        renamed = tuple(self._operand(o, function, prefix, local) for o in operands)
        return instruction._replace(operands=renamed)

    def _operand(self, text: str, function: Function, prefix: str, local: set[str]) -> str:
        def rename(match: re.Match[str]) -> str:
            name = match[0]
            return prefix + name if name in local else self._register(name, function, prefix)

        return re.sub(r"[%\w$.]+", rename, text)

    def _register(self, name: str, function: Function, prefix: str) -> str:
        kind = function.registers.get(name) or function.registers.get(name.rstrip("0123456789"))
        if kind is None or name[:1].isdigit():
            return name  # a number, a symbol, a special register
        self.registers[prefix + name] = kind
        return prefix + name
