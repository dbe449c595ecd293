"""Time tree verification on a GPU: raw bf16 logits to the accepted path.

    python benchmarks/gpu/trees.py --out trees.json
    python benchmarks/gpu/trees.py --device cpu --nodes 16 --batch 2 --vocab 4096 --out trees.json

Checked before it is timed: on each set of inputs the outcome is that of the CPU's operator, but for
ties. As in bench.py, all calls over all sets, together several times the L2, go into one CUDA graph
whose replays are timed; ``kernels`` are the microseconds of each kernel in them. *Of read* is the
time of reading every target row, and the draft's row of every node with children, once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec_ext.backend import resolve
from specdec_ext.testing import TreeCase, assert_trees_match

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402
import tree_times  # noqa: E402

from gpu import bench, replays, tables  # noqa: E402

RULES = ("traversal", "recursive")


def sets_of(setting: tree_times.Setting, device: torch.device) -> list[dict[str, Any]]:
    """Make enough sets to outgrow the L2: the requests of the first in other orders."""
    inputs = tree_times.make_inputs(setting, 1)
    first = inputs._asdict()
    nbytes = inputs.target.nbytes + inputs.draft.nbytes
    number = min(max(-(-4 * replays.l2_bytes(device) // nbytes), 2), 64)
    return [
        {name: value.roll(k, 0).to(device) for name, value in first.items()} for k in range(number)
    ]


def call_of(inputs: dict[str, Any], rule: str, verify: Callable[..., Any]) -> replays.Work:
    """Give a call on one set."""
    arguments = tree_times.Inputs(**inputs).arguments(rule)
    return lambda: verify(**arguments)


def check(inputs: dict[str, Any], rule: str, verify: Callable[..., Any]) -> int:
    """Compare with the CPU's operator; gives how many requests differed by a tie."""
    arguments = tree_times.Inputs(**inputs).arguments(rule)
    there = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    expected = torch.ops.specdec.verify_tree(**there)
    excused = assert_trees_match(verify(**arguments), expected, TreeCase(there, f"tree, {rule}"))
    if excused > max(len(inputs["tokens"]) // 8, 1):
        raise AssertionError(f"{rule}: {excused} requests differ from the CPU's, by ties all")
    return excused


def measure(
    setting: tree_times.Setting, device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    """Time every backend and rule."""
    sets = sets_of(setting, device)
    parents = set(sets[0]["parents"][0].tolist()) - {-1}
    needed = setting.batch * (setting.nodes + len(parents)) * setting.vocab * 2
    ceiling = max(replays.read_ceiling(device, max(needed, 1 << 20)).values())
    found = []
    for backend in bench.ours(device):
        verify = resolve("verify_tree", backend, device).verify_tree
        for rule in RULES:
            excused = sum(check(inputs, rule, verify) for inputs in sets)
            calls = [call_of(inputs, rule, verify) for inputs in sets]

            def everything(calls: Sequence[replays.Work] = calls) -> None:
                for call in calls:
                    call()

            run = replays.record(everything, device)
            timing = replays.time_run(run, len(calls), device, seconds)
            found.append(
                {
                    "backend": backend,
                    "rule": rule,
                    "nodes": setting.nodes,
                    "batch": setting.batch,
                    "vocab": setting.vocab,
                    "excused": excused,
                    "sets": len(sets),
                    "us": round(timing.median * 1e6, 3),
                    "us_min": round(timing.min * 1e6, 3),
                    "floor_us": round(needed / ceiling * 1e6, 3),
                    "kernels": bench.profiled(
                        lambda run=run: replays.durations(run, len(sets), device)
                    ),
                    "sm_mhz": replays.sm_clock(run, device),
                }
            )
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing, each")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the records")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write after each batch size, print the table."""
    options = parse(argv)
    records: list[dict[str, Any]] = []
    for batch in options.batch:
        setting = tree_times.Setting(batch, options.nodes, "bfloat16", options.vocab)
        records += measure(setting, options.device, options.seconds)
        common.write_json(options.out, {"records": records})
    print(tables.trees_table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
