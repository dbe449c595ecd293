"""The launches of an operator at its true shapes, and some of their blocks run by the model.

The host stand-in runs the call (csrc/testing: 256 threads a block, tiles of 4,096 entries, the
multiprocessors of the GPU that is modelled), once to learn which launches there are, and once more
to run some blocks of each here, on the very memory that they are about to see, before the stand-in
runs them; then both memories are compared. Of a launch whose blocks wait for each other, all blocks
run here, at the same time, when it begins.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import common

from gpu import sass
from gpu.budgets import THREADS, Cost, cost_of

from .machine import Gpu, Latencies
from .memory import Comparison, GlobalMemory, ProcessMemory
from .ptx import Module
from .semantics import Program
from .simulation import LaunchRun, Simulation

sys.path.insert(0, str(common.ROOT / "python_tests" / "helpers"))

import fibres  # noqa: E402

ARCH = 90
BUILD = common.ROOT / "build" / "gpu-model"

#: What CMake gives nvcc for the release build (CMakeLists.txt), and line numbers.
NVCC_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-lineinfo", f"-arch=compute_{ARCH}")

_ANONYMOUS = re.compile(r"(\d+)_GLOBAL__N_")


# ---- what the compiler makes of the sources ------------------------------------------------------


def symbol_key(symbol: str) -> str:
    """Give a mangled name without what compilers call an anonymous namespace of theirs."""
    found = ""
    place = 0
    while match := _ANONYMOUS.search(symbol, place):
        start = match.end(1)
        found += symbol[place : match.start()] + "12_GLOBAL__N_1"
        place = start + int(match[1])
    return found + symbol[place:]


def compiled(source: Path) -> Path:
    """Compile CUDA sources to PTX, unless it was done before."""
    folder = common.ROOT / "csrc"
    content = hashlib.sha256(" ".join(NVCC_FLAGS).encode())
    for path in sorted([*folder.glob("cuda/*"), *folder.glob("core/*"), source]):
        content.update(path.read_bytes())
    ptx = BUILD / f"{source.stem}-{content.hexdigest()[:12]}.ptx"
    return made_once(ptx, "nvcc", *NVCC_FLAGS, "-ptx", source)


def assembled(ptx: Path, symbol: str) -> Path:
    """Make machine code of one kernel of a PTX file, unless it was done before."""
    kernel = hashlib.sha256(symbol.encode()).hexdigest()[:12]
    cubin = ptx.with_name(f"{ptx.stem}-{kernel}.cubin")
    return made_once(cubin, "ptxas", f"-arch=sm_{ARCH}", "--entry", symbol, ptx)


def made_once(path: Path, program: str, *arguments: str | Path) -> Path:
    """Have a program make a file that is not there yet; of several processes one does."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with fibres.one_at_a_time("gpu-model"):
        if not path.exists():
            run_compiler(program, *arguments, to=path)
    return path


def run_compiler(program: str, *arguments: str | Path, to: Path) -> None:
    """Run nvcc or ptxas; what it says is in the error."""
    made = to.with_suffix(".new")
    command = [program, *map(str, arguments), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    made.rename(to)


class Sources:
    """The kernels of some CUDA sources, found by the symbols that the stand-in has for them."""

    def __init__(self, sources: Sequence[Path], latencies: Latencies) -> None:
        self._latencies = latencies
        self._places: dict[str, tuple[Module, Path, str]] = {}  # of each kernel, and its own name
        self._costs: dict[str, Cost] = {}
        self._programs: dict[str, Program] = {}
        for source in sources:
            ptx = compiled(source)
            module = Module.read(ptx)
            self._places.update({symbol_key(k): (module, ptx, k) for k in module.kernels})

    def _place(self, symbol: str) -> tuple[Module, Path, str]:
        key = symbol_key(symbol)
        if key not in self._places:
            raise KeyError(f"{symbol}: the compiled sources have no such kernel")
        return self._places[key]

    def program(self, symbol: str) -> Program:
        """Give a kernel, ready to run."""
        if symbol not in self._programs:
            module, _, name = self._place(symbol)
            self._programs[symbol] = Program(module.kernel(name), self._latencies)
        return self._programs[symbol]

    def cost(self, symbol: str) -> Cost:
        """Give what the kernel's machine code takes of a multiprocessor."""
        if symbol not in self._costs:
            _, ptx, name = self._place(symbol)
            (kernel,) = sass.kernels(assembled(ptx, name), ARCH)
            self._costs[symbol] = cost_of(kernel, None)
        return self._costs[symbol]


# ---- watching the stand-in -----------------------------------------------------------------------


class _Parameter(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("num_parameters", ctypes.c_int64),
        ("chained", ctypes.c_bool),
    ]


_Observer = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_Launch), ctypes.c_int32, ctypes.c_int64, ctypes.c_int64
)

LAUNCH_BEGINS, BLOCK_BEGINS, BLOCK_ENDED, LAUNCH_ENDED = range(4)  # Moment of fibres.h


@cache
def _symbols(library: Path) -> tuple[Mapping[int, str], int]:
    """Give the functions of the stand-in's library by their addresses in it."""
    listing = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^([0-9a-f]+) [tTwW] (\S+)$", listing, re.MULTILINE)
    by_address = {int(address, 16): name for address, name in rows}
    return by_address, next(a for a, name in by_address.items() if name == "fibres_launches")


class StandIn:
    """The CUDA kernels on the host, with somebody who watches their launches.

    They are told to be on that GPU; on None, on what the stand-in's tests have. What they were told
    first, they remember.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self.operators = fibres.operators(THREADS)
        self._library = fibres.operators_library(THREADS)
        if gpu is not None:
            self._library.fibres_multiprocessors(ctypes.c_int64(gpu.multiprocessors))
        self._library.fibres_scratch.restype = ctypes.c_void_p
        self._symbols, known = _symbols(fibres.BUILD / f"{fibres.OPERATORS}_{THREADS}.so")
        here = ctypes.cast(self._library.fibres_launches, ctypes.c_void_p).value
        assert here is not None
        self._base = here - known

    def symbol(self, launch: _Launch) -> str:
        """Give the mangled name of a launched kernel."""
        return self._symbols[launch.function - self._base]

    def scratch(self) -> range:
        """Give the addresses of the operator's scratch memory."""
        size = ctypes.c_int64()
        start = self._library.fibres_scratch(ctypes.byref(size)) or 0
        return range(start, start + size.value)

    def watch(self, observer: Callable[..., None], call: Callable[[], Any]) -> Any:
        """Call something; what the observer raises is raised afterwards."""
        errors: list[BaseException] = []

        def guarded(launch: Any, moment: int, block: int, meetings: int) -> None:
            if errors:
                return
            try:
                observer(launch.contents, moment, block, meetings)
            except BaseException as error:  # ctypes would only print it
                errors.append(error)

        callback = _Observer(guarded)
        self._library.fibres_observe(callback)
        try:
            result = call()
        finally:
            self._library.fibres_observe(_Observer())
        if errors:
            raise errors[0]
        return result


# ---- launches ------------------------------------------------------------------------------------


@dataclass
class Launched:
    """A launch, with the blocks that the model has run."""

    name: str
    symbol: str
    blocks: int
    meetings: list[int]  # barriers of each block
    program: Program
    resident: int  # blocks that a multiprocessor holds
    runs: list[LaunchRun] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    together: bool = False  # its blocks wait for each other
    chained: bool = False  # it may begin before the launch before has ended
    early: float = 0.0  # cycles between its begin and that end
    cold_bytes: float = 0.0  # from DRAM, of all blocks
    read_bytes: float = 0.0  # from DRAM and L2, of all blocks

    @property
    def scale(self) -> float:
        """What all blocks do, relative to what the sample does.

        Blocks that have nothing to do meet at few barriers, less than half of those of the middle
        block. The others count alike: what they read does not go with the number of their barriers.
        """
        middle = statistics.median(self.meetings)
        is_busy = [number > 0 and 2 * number >= middle for number in self.meetings]
        of_sample = sum(is_busy[run.block] for run in self.block_runs)
        if of_sample == 0:
            return self.blocks / len(self.block_runs)
        return sum(is_busy) / of_sample

    @property
    def block_runs(self) -> list[Any]:
        """Every block that was run."""
        return [block for run in self.runs for block in run.blocks]


def head_start(launch: Launched, before: Launched | None, gpu: Gpu) -> float:
    """Predict how many cycles before the end of the launch before a chained launch begins.

    Its blocks begin at once if all find room beside the blocks of that launch, each of which takes
    its share of a multiprocessor; otherwise when those end, the middle one of them at the latest.
    """
    if before is None or not launch.chained:
        return 0.0
    cycles = [run.cycles - run.hidden for run in before.block_runs]
    each, more = divmod(before.blocks, gpu.multiprocessors)

    def room(beside: int) -> int:
        return launch.resident * max(before.resident - beside, 0) // before.resident

    places = more * room(each + 1) + (gpu.multiprocessors - more) * room(each)
    return max(cycles) - (0.0 if places >= launch.blocks else statistics.median(cycles))


def sample_of(meetings: Sequence[int], number: int) -> list[int]:
    """Choose blocks: evenly spread ones, and the last of those with the most barriers."""
    blocks = len(meetings)
    spread = {(2 * k + 1) * blocks // (2 * number) for k in range(number)}
    longest = max(range(blocks), key=lambda block: (meetings[block], block))
    return sorted(spread | {longest})


class Recorder:
    """Runs blocks of all launches of a call.

    Parameters
    ----------
    stand_in : StandIn
        Runs the call.
    sources : Sources
        The kernels.
    gpu : Gpu
        What the launches are for.
    number : int
        How many blocks of each launch are run, beside the longest one.
    """

    def __init__(self, stand_in: StandIn, sources: Sources, gpu: Gpu, number: int = 3) -> None:
        self._stand_in = stand_in
        self._sources = sources
        self._gpu = gpu
        self._number = number
        self._read = ProcessMemory()

    def record(self, call: Callable[[], Any], rows: Sequence[range]) -> list[Launched]:
        """Run a call twice; `rows` are the addresses of logits, which the L2 has not at first."""
        launches = self._first_pass(call)
        cold = list(rows)
        place = -1
        chosen: set[int] = set()
        pending: dict[int, tuple[GlobalMemory, LaunchRun]] = {}

        def observe(launch: _Launch, moment: int, block: int, _: int) -> None:
            nonlocal place, chosen
            if moment == LAUNCH_BEGINS:
                place += 1
                found = launches[place]
                before = launches[place - 1] if place > 0 else None
                found.early = head_start(found, before, self._gpu)
                found.together = found.program.waits
                chosen = set() if found.together else set(sample_of(found.meetings, self._number))
                if found.together:
                    pending[-1] = self._simulate(found, launch, range(found.blocks), cold)
            elif moment == BLOCK_BEGINS and block in chosen:
                pending[block] = self._simulate(launches[place], launch, [block], cold)
            elif moment in (BLOCK_ENDED, LAUNCH_ENDED) and block in pending:
                memory, run = pending.pop(block)
                launches[place].comparisons.append(memory.compare([self._stand_in.scratch()]))
                self._count(launches[place], memory, run)
            if moment == LAUNCH_ENDED:
                self._warm(launches[place], cold, rows)

        self._stand_in.watch(observe, call)
        return launches

    def _first_pass(self, call: Callable[[], Any]) -> list[Launched]:
        launches: list[Launched] = []

        def observe(launch: _Launch, moment: int, block: int, meetings: int) -> None:
            if moment == LAUNCH_BEGINS:
                symbol = self._stand_in.symbol(launch)
                launches.append(
                    Launched(
                        launch.name.decode(),
                        symbol,
                        launch.blocks,
                        [0] * launch.blocks,
                        self._sources.program(symbol),
                        self._sources.cost(symbol).blocks,
                        chained=launch.chained,
                    )
                )
            elif moment == BLOCK_ENDED:
                launches[-1].meetings[block] = meetings

        self._stand_in.watch(observe, call)
        return launches

    def _simulate(
        self, found: Launched, launch: _Launch, blocks: Sequence[int], cold: Sequence[range]
    ) -> tuple[GlobalMemory, LaunchRun]:
        memory = GlobalMemory(self._read, cold)
        parameters = [
            ctypes.string_at(p.data, p.bytes)
            for p in launch.parameters[: launch.num_parameters]  # type: ignore[misc]
        ]
        simulation = Simulation(
            found.program,
            blocks,
            found.blocks,
            THREADS,
            found.program.pack(parameters),
            memory,
            found.together,
            self._gpu,
            found.early,
        )
        return memory, simulation.run()

    def _count(self, found: Launched, memory: GlobalMemory, run: LaunchRun) -> None:
        found.runs.append(run)
        found.cold_bytes += memory.cold_bytes
        found.read_bytes += memory.read_bytes

    def _warm(self, found: Launched, cold: list[range], rows: Sequence[range]) -> None:
        """After a launch: scale what the sample read; the L2 keeps rows if it can hold them all."""
        if not found.together:
            found.cold_bytes *= found.scale
            found.read_bytes *= found.scale
        total = sum(len(r) for r in rows)
        if found.cold_bytes >= total / 4 and total <= self._gpu.l2_megabytes * 2**20:
            cold.clear()
