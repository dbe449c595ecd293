"""Predict what verification will take on a GPU, where there is none.

    python benchmarks/gpu/predict.py                           # all cases of the review, minutes
    python benchmarks/gpu/predict.py --only "B 32 det" --where # some; and where the cycles go
    python benchmarks/gpu/predict.py --only "B 32 det" --check # exit code 1 over a budget

The call runs in the host stand-in (csrc/testing), at its true shapes; some blocks of each launch
run in a model of an sm_90 multiprocessor (``gpu/model``) on the same memory, and must leave there
what the stand-in does. Cycles and blocks, machine instructions, and bytes read each give a time;
the longest one is the prediction of the launch. Every figure is predicted, with a cold L2, and none
is measured: ``gpu/model`` says how far they were off where somebody did. A block that begins before
the launch before has ended (programmatic dependent launch; `head_start` says when) and waits for
that end is predicted by the cycles from there on; the table has both figures. Needs nvcc and ptxas,
and the package built in place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

from gpu.model import cases, profile  # noqa: E402
from gpu.model.launches import Recorder, Sources, StandIn  # noqa: E402
from gpu.model.machine import GPUS, H200, Gpu, Latencies  # noqa: E402
from gpu.model.prediction import Prediction, over_budget, total  # noqa: E402


class Predicted(NamedTuple):
    """What came of a case."""

    case: cases.Case
    floor: float  # microseconds of reading what must be read
    launches: list[Prediction]


def predict(case: cases.Case, sources: Sources, gpu: Gpu, blocks: int) -> Predicted:
    """Predict the launches of a case."""
    stand_in = StandIn(gpu)
    call = case.make(cases.VOCAB)
    floor = call.floor_bytes / gpu.read_gigabytes / 1e3
    operator = getattr(stand_in.operators, call.operator)
    recorder = Recorder(stand_in, sources, gpu, blocks)
    launches = recorder.record(lambda: operator(**call.arguments), call.addresses())
    return Predicted(case, floor, [Prediction(launch, gpu) for launch in launches])


CASE_HEADER = (
    *("case", "memory floor, us", "launches, us", "gaps, us", "predicted, us", "of the floor"),
    "goal, us",
)
LAUNCH_HEADER = (
    *("case", "launch", "blocks", "a multiprocessor", "waves", "cycles", "of the slowest block"),
    *(
        "of them after the launch before",
        "machine instructions",
        "MB read",
        "from DRAM",
        "bound by",
        "same memory",
    ),
)


def case_row(found: Predicted) -> tuple[str, ...]:
    """Give a row of the table of cases."""
    microseconds = total(found.launches)
    return (
        found.case.name,
        f"{found.floor:.1f}",
        ", ".join(f"{p.launch.name} {p.microseconds:.1f}" for p in found.launches),
        f"{sum(p.gap for p in found.launches):.1f}",
        f"{microseconds:.0f}",
        f"{microseconds / found.floor:.1f}",
        f"{found.case.goal:g}",
    )


def launch_rows(found: Predicted) -> list[tuple[str, ...]]:
    """Give the rows of the table of launches."""
    return [
        (
            found.case.name,
            p.launch.name,
            str(p.launch.blocks),
            str(p.launch.resident),
            str(p.waves),
            f"{p.typical:,.0f}",
            f"{p.slowest:,.0f}",
            f"{p.remaining:,.0f}",
            f"{p.instructions:,.0f}",
            f"{p.launch.read_bytes / 1e6:.1f}",
            f"{p.launch.cold_bytes / 1e6:.1f}",
            p.bound,
            "yes" if p.agrees else "no",
        )
        for p in found.launches
    ]


def where(found: Predicted) -> str:
    """Say where the cycles of each launch's slowest block went."""
    parts = []
    for p in found.launches:
        block = max(p.launch.block_runs, key=lambda run: run.cycles)
        head = f"{p.launch.name}, block {block.block} of {p.launch.blocks}: cycles by function"
        parts.append(f"{head}\n{profile.describe(p.launch.program.kernel, block.path)}")
        lines = profile.lines_of(p.launch.program.kernel, block.path).most_common(12)
        parts.append("by line: " + ", ".join(f"{line} {cycles}" for line, cycles in lines))
    return "\n\n".join(parts)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--gpu", choices=sorted(GPUS), default=H200.name)
    parser.add_argument("--blocks", type=int, default=3, help="of each launch that are run")
    parser.add_argument("--where", action="store_true", help="where the cycles go")
    parser.add_argument("--check", action="store_true", help="fail over a budget of cycles")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; give 1 if there is no such case, or on --check a budget is exceeded."""
    options = parse(argv)
    gpu = GPUS[options.gpu]
    chosen = [case for case in cases.CASES if case.name.startswith(options.only)]
    if not chosen:
        print("no such case; there are: " + "; ".join(case.name for case in cases.CASES))
        return 1
    folder = common.ROOT / "csrc" / "cuda"
    paths = [folder / name for name in dict.fromkeys(case.source for case in chosen)]
    sources = Sources(paths, Latencies())
    rows, launches, excess = [], [], []
    for case in chosen:
        begin = time.perf_counter()
        found = predict(case, sources, gpu, options.blocks)
        print(f"{case.name}: modelled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        rows.append(case_row(found))
        launches += launch_rows(found)
        if options.where:
            print(f"\n{case.name}\n\n{where(found)}", flush=True)
        if case.budgeted:
            excess += [f"{case.name}: {line}" for line in over_budget(found.launches)]
    print(f"\nPREDICTED for one {gpu.name}, not measured; commit {common.commit()}\n")
    print(common.markdown_table(CASE_HEADER, rows))
    print()
    print(common.markdown_table(LAUNCH_HEADER, launches))
    print()
    print("\n".join(excess) or "no budget of cycles is exceeded")
    return 1 if options.check and excess else 0


if __name__ == "__main__":
    sys.exit(main())
