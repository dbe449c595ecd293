"""What the CUDA kernels cost by their machine code, and what they may cost: no GPU is needed.

For each kernel of a library and one architecture: registers, the blocks that a multiprocessor holds
by them and by shared memory, loads and stores of spilled registers (those that a call saves are
among them, and most of them in kernels with calls, such as finish_laws), size of the code and, for
kernels that stream rows, instructions and float64 instructions an entry along the cheapest way
round their loop (`gpu.sass`). A kernel that costs more than its budget is named, and the command
fails. A budget is what the kernel cost when it was last improved, with the compiler of CUDA 13.0
(another one's registers and spills differ a little): it may be lowered; whoever
raises one says why in the record of predictions or of measurements.

``make cuda-gate`` builds the library and runs this::

    python benchmarks/gpu/budgets.py build/cuda-gate/_C_cuda.so
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

from gpu.sass import OF_LISTS, Kernel, kernels  # noqa: E402

ARCH = 90  # whose machine code has the budgets: sm_90
CUDA = "13.0"  # whose compiler the budgets are of
THREADS = 256  # of every block: csrc/cuda/launch.cuh


class Stream(NamedTuple):
    """The loop of a kernel over the entries of rows: how a round of it is recognised."""

    loads: int  # of 16 bytes by a thread, in the shortest round
    exponentials: int
    entries: int  # that a load brings, in each of the rows that are read together

    @property
    def work(self) -> dict[str, int]:
        """What `Kernel.streaming_loop` looks for."""
        return {"LDG.E.128": self.loads, "MUFU.EX2": self.exponentials}


@dataclass(frozen=True)
class Budget:
    """What a kernel may cost."""

    kilobytes: int  # of code
    spills: int = 0
    registers: int = 128
    stream: Stream | None = None
    per_entry: float = 0.0  # instructions
    fp64: float = 0.0  # of them, float64


@dataclass(frozen=True)
class Cost:
    """What a kernel costs; of several with one name, the most."""

    name: str
    kilobytes: float
    spills: int
    registers: int
    blocks: int  # that a multiprocessor holds at once
    per_entry: float | None = None
    fp64: float | None = None

    def excess(self, budget: Budget) -> list[str]:
        """Say what is above the budget."""
        pairs = {
            "KB of code": (self.kilobytes, budget.kilobytes),
            "spills": (self.spills, budget.spills),
            "registers": (self.registers, budget.registers),
            "instructions an entry": (self.per_entry, budget.per_entry),
            "float64 instructions an entry": (self.fp64, budget.fp64),
        }
        if budget.stream is not None and self.per_entry is None:
            return [f"{self.name}: no loop with {budget.stream.work}, so its cost is not known"]
        return [
            f"{self.name}: {cost:.4g} {what}, the budget is {most:.4g}"
            for what, (cost, most) in pairs.items()
            if cost is not None and cost > most
        ]


PLAIN_16 = Stream(loads=4, exponentials=32, entries=8)  # two tiles a round
PLAIN_32 = Stream(loads=8, exponentials=32, entries=4)
ROW_16 = Stream(loads=2, exponentials=16, entries=8)  # a tile a round
ROW_32 = Stream(loads=4, exponentials=16, entries=4)

BUDGETS = {
    "scan_laws<0, 1>": Budget(54, registers=64, stream=PLAIN_16, per_entry=7),  # bfloat16
    "scan_laws<0, 2>": Budget(54, registers=64, stream=PLAIN_16, per_entry=7),  # float16
    "scan_laws<0, 0>": Budget(56, registers=64, stream=PLAIN_32, per_entry=7.6),
    "scan_laws<0, 3>": Budget(103, spills=7, registers=64),  # rows of two types
    "scan_laws<1, 3>": Budget(105, registers=80),  # masked
    "scan_rows<0>": Budget(101, registers=64),
    "finish_laws<0>": Budget(144, spills=221, registers=80),
    "finish_laws<1>": Budget(185, spills=221, registers=80),
    "finish_rows<1>": Budget(173, spills=213, registers=80),
    "finish_rows<0>": Budget(132, spills=213, registers=80),
    "race_rows": Budget(111, registers=80),
    "race_nodes": Budget(86, registers=80),
    "decide_alone<0>": Budget(137, spills=38, registers=64),  # Reads of chain_nodes.cuh; it draws
    "decide_alone<1>": Budget(73, registers=64),
    "decide_alone<2>": Budget(127, spills=58, registers=64),  # likewise
    "decide_block<1>": Budget(147, spills=42, stream=ROW_16, per_entry=7),
    "decide_block<2>": Budget(147, spills=42, stream=ROW_16, per_entry=7),
    "decide_block<0>": Budget(143, spills=84, stream=ROW_32, per_entry=6.5),
    "decide_block<3>": Budget(211, spills=161, stream=ROW_16, per_entry=8.5),
    "draw_extra<1>": Budget(51, stream=ROW_16, per_entry=15.5),
    "draw_extra<2>": Budget(51, stream=ROW_16, per_entry=14),
    "draw_extra<0>": Budget(44, stream=ROW_32, per_entry=14.5),
    "draw_extra<3>": Budget(128, spills=7, stream=ROW_16, per_entry=14),
    "draw_tokens<1>": Budget(56, spills=4, registers=64, stream=ROW_16, per_entry=14),
    "draw_tokens<2>": Budget(56, spills=4, registers=64, stream=ROW_16, per_entry=14),
    "draw_tokens<0>": Budget(56, spills=4, registers=64, stream=ROW_32, per_entry=13),
    "draw_tokens<3>": Budget(83, spills=15, registers=64, stream=ROW_16, per_entry=13.5),
    "draw_token<1>": Budget(62, stream=ROW_16, per_entry=16),
    "draw_token<2>": Budget(62, stream=ROW_16, per_entry=15),
    "draw_token<0>": Budget(55, stream=ROW_32, per_entry=15),
    "draw_token<3>": Budget(160, spills=7, stream=ROW_16, per_entry=14),
    "sum_overlaps": Budget(87, registers=80),
    "open_trees": Budget(25, registers=64),
    "write_laws<0>": Budget(135, spills=213, registers=80),
    "write_laws<1>": Budget(177, spills=213, registers=80),
    "visit_trees<1>": Budget(171, spills=25, stream=ROW_16, per_entry=7.5),
    "visit_trees<2>": Budget(171, spills=35, stream=ROW_16, per_entry=7),
    "visit_trees<0>": Budget(169, spills=37, stream=ROW_32, per_entry=6),
    "visit_trees<3>": Budget(251, spills=170, stream=ROW_16, per_entry=9),
}

#: Of any other kernel.
OTHERWISE = Budget(109)
#: Of any kernel that knows lists of draft tokens: the most that one of them takes.
LISTED = Budget(309, spills=221)


def budget_of(name: str) -> Budget:
    """Find the budget of a kernel."""
    return BUDGETS.get(name, LISTED if name.endswith(OF_LISTS) else OTHERWISE)


def cost_of(kernel: Kernel, stream: Stream | None) -> Cost:
    """Measure a kernel's code."""
    per_warp = -(-kernel.registers // 8) * 8 * 32  # registers are given to warps by 256
    by_registers = 65_536 // (per_warp * THREADS // 32)
    by_shared = 233_472 // (-(-(kernel.shared + 1024) // 128) * 128)
    most = 2048 // THREADS
    cost = Cost(
        kernel.name,
        round(kernel.bytes / 1024, 1),
        kernel.spills,
        kernel.registers,
        min(by_registers, by_shared, most),
    )
    loop = kernel.streaming_loop(stream.work) if stream is not None else None
    if stream is None or loop is None:
        return cost
    entries = loop.count("LDG.E.128") * stream.entries
    return replace(
        cost,
        per_entry=round(len(loop.instructions) / entries, 2),
        fp64=round(loop.fp64 / entries, 3),
    )


def worst(costs: Iterable[Cost]) -> list[Cost]:
    """Give one cost for each name, in the order of names: the most of each thing."""
    found: dict[str, Cost] = {}
    for cost in costs:
        other = found.get(cost.name, cost)
        found[cost.name] = replace(
            cost,
            kilobytes=max(cost.kilobytes, other.kilobytes),
            spills=max(cost.spills, other.spills),
            registers=max(cost.registers, other.registers),
            blocks=min(cost.blocks, other.blocks),
            per_entry=max(cost.per_entry, other.per_entry) if cost.per_entry else None,
            fp64=max(cost.fp64, other.fp64) if cost.per_entry else None,
        )
    return [found[name] for name in sorted(found)]


def table(costs: Sequence[Cost]) -> str:
    """Format the costs, each with its budget where it has one of its own."""

    def entry(cost: Cost, what: str, decimals: int) -> str:
        value, budget = getattr(cost, what), BUDGETS.get(cost.name)
        if value is None:
            return ""
        return f"{value:.{decimals}f}" + (f" of {getattr(budget, what):g}" if budget else "")

    rows = [
        (
            cost.name,
            entry(cost, "per_entry", 2),
            entry(cost, "fp64", 2),
            entry(cost, "spills", 0),
            entry(cost, "registers", 0),
            str(cost.blocks),
            entry(cost, "kilobytes", 0),
        )
        for cost in costs
    ]
    header = ("kernel", "instructions an entry", "float64 an entry", "spills", "registers")
    return common.markdown_table((*header, "blocks", "KB"), rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path, help="a library or object file with the kernels")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; give 1 if a budget is exceeded."""
    options = parse(argv)
    found = kernels(options.library, ARCH)
    costs = worst(cost_of(k, budget_of(k.name).stream) for k in found)
    print(table(costs))
    excess = [line for c in costs for line in c.excess(budget_of(c.name))]
    missing = sorted(set(BUDGETS) - {cost.name for cost in costs})
    excess += [f"{name}: there is no such kernel" for name in missing]
    print("\n".join(excess) or "all within their budgets")
    if excess:
        print(f"the budgets are of the compiler of CUDA {CUDA}")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
