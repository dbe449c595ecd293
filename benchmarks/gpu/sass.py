"""Machine code of CUDA kernels: what their loops cost, read without a GPU.

`kernels` reads a library or object file with ``cuobjdump`` (of a CUDA toolkit, or of the wheel of
Triton, which brings it). A kernel's streaming loop is measured along the cheapest way round it that
still loads and works on what one round is for (`streaming_loop`): branches to misaligned rows and
other exceptions are not counted, the work on an ordinary tile is.
"""

from __future__ import annotations

import heapq
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from operator import add
from pathlib import Path
from typing import NamedTuple

BYTES = 16  # of an instruction, from sm_70 on
OF_LISTS = " of lists"  # kernels that know lists of draft tokens: csrc/cuda/verify*_lists.cu

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"0x[0-9a-f]+$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Instruction(NamedTuple):
    """One instruction of SASS."""

    address: int
    predicate: str | None
    name: str  # with its suffixes: LDG.E.128.CONSTANT
    operands: str


class Block(NamedTuple):
    """Instructions that are executed from the first to the last, and the blocks after them."""

    code: tuple[Instruction, ...]
    after: list[int]

    def counts(self, work: Iterable[str]) -> tuple[int, ...]:
        """Count the instructions whose names begin so, for each beginning."""
        return tuple(sum(i.name.startswith(prefix) for i in self.code) for prefix in work)


Place = tuple[int, tuple[int, ...]]  # a block, and the work done before it


class Loop(NamedTuple):
    """The cheapest way round a loop."""

    instructions: tuple[Instruction, ...]

    def count(self, prefix: str) -> int:
        """Count the instructions whose name begins so."""
        return sum(i.name.startswith(prefix) for i in self.instructions)

    @property
    def fp64(self) -> int:
        """Count the float64 instructions, conversions from and to float64 included."""
        return sum(i.name.startswith("D") or ".F64" in i.name for i in self.instructions)


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code for one architecture."""

    name: str  # with its template arguments: scan_laws<0, 1>
    registers: int
    stack: int  # bytes a thread
    shared: int  # bytes a block
    code: tuple[Instruction, ...]

    @property
    def bytes(self) -> int:
        """The code's size."""
        return BYTES * len(self.code)

    @property
    def spills(self) -> int:
        """Count the loads and stores of local memory."""
        return sum(i.name.startswith(("LDL", "STL")) for i in self.code)

    @cached_property
    def blocks(self) -> list[Block]:
        """Cut the code into basic blocks, in the order of addresses."""
        following = _successors(self.code)
        begins = {0} | {j for i, after in enumerate(following) for j in after if after != [i + 1]}
        begins |= {i + 1 for i, after in enumerate(following) if after != [i + 1]}
        edges = sorted(begin for begin in begins if begin < len(self.code))
        number = {begin: n for n, begin in enumerate(edges)}
        return [
            Block(self.code[begin:end], [number[j] for j in following[end - 1]])
            for begin, end in zip(edges, [*edges[1:], len(self.code)], strict=True)
        ]

    def streaming_loop(self, work: Mapping[str, int]) -> Loop | None:
        """Find the cheapest way round any loop that does some work.

        Parameters
        ----------
        work : mapping of str to int
            How many instructions whose names begin so a round must have, at least.

        Returns
        -------
        Loop or None
            None if no loop does it.
        """
        counts = [block.counts(work) for block in self.blocks]
        before: list[list[int]] = [[] for _ in self.blocks]
        for n, block in enumerate(self.blocks):
            for after in block.after:
                before[after].append(n)
        back_edges = (
            (start, end)
            for end, block in enumerate(self.blocks)
            for start in block.after
            if start <= end
        )
        best: Loop | None = None
        for start, end in back_edges:
            body = _natural_loop(before, start, end)
            total = [sum(counts[n][w] for n in body) for w in range(len(work))]
            if any(some < least for some, least in zip(total, work.values(), strict=True)):
                continue
            most = len(best.instructions) if best is not None else None
            way = self._way_round(start, end, body, counts, tuple(work.values()), most)
            best = way if way is not None else best
        return best

    def _way_round(
        self,
        start: int,
        end: int,
        body: set[int],
        counts: Sequence[tuple[int, ...]],
        work: tuple[int, ...],
        most: int | None,
    ) -> Loop | None:
        """Dijkstra's algorithm over blocks and the work done on the way; None from `most` on."""
        nothing = (0,) * len(work)
        heap = [(0, start, nothing)]
        came_from: dict[Place, Place | None] = {(start, nothing): None}
        length = {(start, nothing): 0}
        while heap:
            steps, n, done = heapq.heappop(heap)
            if steps > length[n, done]:
                continue
            steps += len(self.blocks[n].code)
            if most is not None and steps >= most:
                return None
            after = tuple(map(min, work, map(add, done, counts[n])))
            if n == end and after == work:
                return self._loop(came_from, (n, done))
            for following in self.blocks[n].after:
                place = (following, after)
                if following in body and steps < length.get(place, steps + 1):
                    came_from[place], length[place] = (n, done), steps
                    heapq.heappush(heap, (steps, following, after))
        return None

    def _loop(self, came_from: Mapping[Place, Place | None], place: Place | None) -> Loop:
        way = []
        while place is not None:
            way.append(place[0])
            place = came_from[place]
        return Loop(tuple(i for n in reversed(way) for i in self.blocks[n].code))


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Give the places where execution may go on after each instruction."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    meetings: dict[str, int | None] = {}  # where threads that parted meet, by barrier
    found = []
    for i, (_, predicate, name, operands) in enumerate(code):
        after = [i + 1] if i + 1 < len(code) else []
        match = _TARGET.search(operands)
        target = place.get(int(match[0], 16)) if match else None
        if name.startswith("BSSY"):
            meetings[operands.split(",")[0]] = target
        elif name.startswith("BSYNC"):
            meeting = meetings.get(operands)
            after = after if meeting is None else [meeting]
        elif name.startswith("BRA"):
            there = [] if target is None else [target]
            always = predicate is None and not re.match(r"!?U?P", operands)
            after = there if always else after + there
        elif name.startswith(("EXIT", "RET")) and predicate is None:
            after = []
        found.append(after)
    return found


def _natural_loop(before: Sequence[Sequence[int]], start: int, end: int) -> set[int]:
    """Give the blocks that lead to a back edge without passing its target."""
    body, stack = {start, end}, [end] if end != start else []
    while stack:
        for n in before[stack.pop()]:
            if n not in body:
                body.add(n)
                stack.append(n)
    return body


def cuobjdump() -> Path | None:
    """Find the program: on the PATH, in a CUDA toolkit, or in Triton's wheel."""
    folders = [Path(os.environ[x]) / "bin" for x in ("CUDA_HOME", "CUDA_PATH") if x in os.environ]
    folders.append(Path("/usr/local/cuda/bin"))
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    found = shutil.which("cuobjdump") or shutil.which(
        "cuobjdump", path=os.pathsep.join(map(str, folders))
    )
    return Path(found) if found else None


def program() -> Path:
    """Give cuobjdump.

    Raises
    ------
    FileNotFoundError
        There is none here.
    """
    found = cuobjdump()
    if found is None:
        raise FileNotFoundError("cuobjdump: neither a CUDA toolkit nor Triton has it here")
    return found


def kernels(library: Path, arch: int) -> list[Kernel]:
    """Read the kernels that a library or object file has for an architecture (90: sm_90)."""
    reader = program()

    def dump(what: str) -> str:
        command = [str(reader), what, "-arch", f"sm_{arch}", str(library)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    usage = dict(_usages(dump("-res-usage")))
    return [
        Kernel(readable(symbol), *usage[symbol], code) for symbol, code in _codes(dump("-sass"))
    ]


def _usages(text: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    symbol = ""
    for line in text.splitlines():
        if line.strip().startswith("Function "):
            symbol = line.strip().removeprefix("Function ").rstrip(":")
        elif match := _USAGE.search(line):
            registers, stack, shared, _ = map(int, match.groups())
            yield symbol, (registers, stack, shared)


def _codes(text: str) -> Iterator[tuple[str, tuple[Instruction, ...]]]:
    symbol, code = "", []
    for line in text.splitlines():
        if "Function :" in line:
            if symbol:
                yield symbol, tuple(code)
            symbol, code = line.split(":")[1].strip(), []
        elif match := _LINE.match(line):
            code.append(Instruction(int(match[1], 16), match[2], match[3], match[4]))
    if symbol:
        yield symbol, tuple(code)


def readable(symbol: str) -> str:
    """Give a kernel's own name and its template arguments that are numbers.

    Those that are compiled once more, for lists of draft tokens, say so behind it.
    """
    # An anonymous namespace ends with eight hexadecimal digits; then comes the length of the name.
    match = re.search(r"_cu_[0-9a-f]{8}_?(\d+)", symbol)
    if match is None:
        return symbol
    start, length = match.end(), int(match[1])
    name, rest = symbol[start : start + length], symbol[start + length :]
    numbers = re.findall(r"L(?:[a-z]|N\w*?E)(\d+)E", rest) if rest.startswith("I") else []
    types = re.findall(r"_\d+_(\w+?)_cu_", rest.split("EEv")[0]) if rest.startswith("I") else []
    arguments = [*types, *numbers]
    readable = f"{name}<{', '.join(arguments)}>" if arguments else name
    return readable + OF_LISTS if "_lists_cu_" in symbol[: match.end()] else readable
