"""Where the warps of the CUDA kernels wait on a GPU, by line of the sources.

Nsight Compute samples which instruction the warps stand at, and why. On the machine with the GPU,
with libraries whose first build had ``CUDAFLAGS=-lineinfo`` in its environment::

    ncu --profile-from-start off --clock-control none --section SourceCounters -f -o prof \\
        python benchmarks/gpu/hotspots.py calls
    ncu -i prof.ncu-rep --page source --csv --print-source sass | gzip > samples.csv.gz

Anywhere, with the library of that build, or some of its objects::

    python benchmarks/gpu/hotspots.py lines samples.csv.gz specdec_ext/_C_cuda.so

Each kernel then has a table of the lines at which most samples were taken, functions that were
inlined by their own lines, with the reasons in Nsight Compute's words (long_sb: memory; short_sb:
shared memory, shuffles, special functions; wait: a latency that the compiler knows; no_inst: the
instruction cache; imc: constants). The seven calls are 23 launches, for which Nsight Compute needs
a minute or two: choose with ``--only``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

from gpu import sass  # noqa: E402
from gpu.replays import short_name  # noqa: E402

SAMPLES = "Warp Stall Sampling (All Samples)"
EXECUTED = "Instructions Executed"

# ---- the calls ----------------------------------------------------------------------------------

#: Chains, by name: drafter, filters, requests, rule (gpu.tables).
CHAINS = {
    "deterministic": ("deterministic", "temperature", 32, "token"),
    "dense": ("dense", "temperature", 32, "token"),
    "block": ("dense", "temperature", 32, "block"),
    "filters": ("deterministic", "top_k+top_p", 32, "token"),
    "one": ("deterministic", "temperature", 1, "token"),
    "one-block": ("dense", "temperature", 1, "block"),
}
TREE = "tree"  # of 64 nodes, 8 requests, traversal


def calls(names: Iterable[str], vocab: int, device: torch.device) -> list[Callable[[], object]]:
    """Make the calls of these names, on inputs that no cache holds."""
    import tree_times

    from gpu import bench, trees
    from gpu.tables import Cell
    from specdec_ext.backend import resolve

    backend = bench.ours(device)[0]
    generator = torch.Generator(device).manual_seed(1)
    found: list[Callable[[], object]] = []
    for name in names:
        if name == TREE:
            setting = tree_times.Setting(8, 64, "bfloat16", vocab)
            inputs = tree_times.make_inputs(setting, 1)._asdict()
            moved = {key: value.to(device) for key, value in inputs.items()}
            verify_tree = resolve("verify_tree", backend, device).verify_tree
            found.append(trees.call_of(moved, "traversal", verify_tree))
            continue
        drafter, filters, batch, rule = CHAINS[name]
        cell = Cell(drafter, filters, batch, 5, vocab)
        case = bench.case_of(cell, bench.make_inputs(cell, generator, device), rule)
        verify = resolve("verify", backend, device).verify
        found.append(lambda case=case, verify=verify: case.run(verify))
    return found


@torch.inference_mode()
def run_calls(options: argparse.Namespace) -> None:
    """Make each call twice; the profiler sees the second time alone."""
    made = calls(options.only, options.vocab, options.device)
    on_gpu = options.device.type == "cuda"
    for call in made:
        call()
    if on_gpu:
        torch.cuda.synchronize(options.device)
        torch.cuda.profiler.start()
    for call in made:
        call()
    if on_gpu:
        torch.cuda.synchronize(options.device)
        torch.cuda.profiler.stop()
    print(f"made {len(made)} calls: {', '.join(options.only)}")


# ---- samples ------------------------------------------------------------------------------------


@dataclass
class Sampled:
    """A launch's instructions, in the order of addresses."""

    kernel: str  # as sass.kernels names it
    rows: list[dict[str, str]] = field(default_factory=list)


def number(row: dict[str, str], column: str) -> float:
    """Read a figure; what is not there is 0."""
    try:
        return float(row.get(column) or 0)
    except ValueError:
        return 0.0


def read_samples(lines: Iterable[str]) -> Iterator[Sampled]:
    """Read what Nsight Compute writes: for each launch its name, a header, the instructions."""
    launch, header = None, None
    for row in csv.reader(lines):
        if row[:1] == ["Kernel Name"]:
            if launch is not None:
                yield launch
            name = row[1].replace("<unnamed>", "(anonymous namespace)")
            launch, header = Sampled(short_name(name)), None
        elif row[:1] == ["Address"]:
            header = row
        elif launch is not None and header is not None and len(row) == len(header):
            launch.rows.append(dict(zip(header, row, strict=True)))
    if launch is not None:
        yield launch


def read_places(text: str) -> dict[str, list[str]]:
    """Read ``nvdisasm -g -c``: for each kernel the line, ``file:line``, of each instruction."""
    found: dict[str, list[str]] = {}
    places: list[str] | None = None
    place, chained = "?", False  # a line that was inlined is followed by those it was inlined at
    for line in text.splitlines():
        if line.startswith("\t.section"):
            match = re.match(r"\t\.section\s+\.text\.(\w+)", line)
            places = found.setdefault(sass.readable(match[1]), []) if match else None
            place, chained = "?", False
        elif match := re.match(r'\s*//## File "([^"]+)", line (\d+)( inlined at)?', line):
            if not chained:
                place = f"{Path(match[1]).name}:{match[2]}"
            chained = bool(match[3])
        elif places is not None and re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+\S", line):
            places.append(place)
    return found


def places_of(library: Path) -> dict[str, list[str]]:
    """Give the lines of the instructions of all kernels of an object file or library."""
    program = sass.program()
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), "-xelf", "all", str(library.resolve())]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        for cubin in Path(folder).glob("*.cubin"):
            command = [str(program.with_name("nvdisasm")), "-g", "-c", str(cubin)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found |= read_places(text)
    return found


def hottest(launch: Sampled, places: Sequence[str], count: int) -> list[list[str]]:
    """Give the rows of a table: share of the samples, instructions executed, reasons, line.

    Raises
    ------
    ValueError
        The samples are of another build.
    """
    if len(places) != len(launch.rows):
        said = f"{len(launch.rows)} instructions were sampled, the object has {len(places)}"
        raise ValueError(f"{launch.kernel}: {said}: it must be of the same build")
    samples: dict[str, float] = dict.fromkeys(places, 0.0)
    executed, reasons = samples.copy(), {place: Counter[str]() for place in samples}
    for place, row in zip(places, launch.rows, strict=True):
        samples[place] += number(row, SAMPLES)
        executed[place] += number(row, EXECUTED)
        for column in row:
            if column.startswith("stall_") and "Not Issued" not in column:
                reasons[place][column.removeprefix("stall_")] += round(number(row, column))
    total = max(sum(samples.values()), 1.0)

    def said_of(place: str) -> str:
        return ", ".join(f"{why} {times}" for why, times in reasons[place].most_common(3) if times)

    hot = sorted(samples, key=lambda place: -samples[place])[:count]
    return [
        [f"{100 * samples[x] / total:.1f} %", f"{executed[x]:,.0f}", said_of(x), x] for x in hot
    ]


def show_lines(options: argparse.Namespace) -> None:
    """Print the tables."""
    known: dict[str, list[str]] = {}
    for library in options.libraries:
        known |= places_of(library)
    unpack: Any = gzip.open if options.samples.suffix == ".gz" else open
    with unpack(options.samples, "rt") as lines:
        for launch in read_samples(lines):
            print(f"\n{launch.kernel}\n")
            if launch.kernel not in known:
                print("none of the objects has it")
                continue
            rows = hottest(launch, known[launch.kernel], options.count)
            print(common.markdown_table(["samples", "executed", "why", "line"], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("calls", help="make the calls that Nsight Compute shall see")
    every = [*CHAINS, TREE]
    make.add_argument("--only", nargs="+", choices=every, default=every)
    make.add_argument("--vocab", type=int, default=151_936)
    make.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    make.set_defaults(act=run_calls)
    show = commands.add_parser("lines", help="say at which lines samples were taken")
    show.add_argument("samples", type=Path, help="CSV of Nsight Compute, packed by gzip or not")
    show.add_argument("libraries", type=Path, nargs="+", help="objects with line information")
    show.add_argument("--count", type=int, default=20, help="lines of a kernel")
    show.set_defaults(act=show_lines)
    options = parser.parse_args(arguments)
    options.act(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
