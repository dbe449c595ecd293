"""What verification over a sharded vocabulary exchanges, against an all-gather of the logits.

    python benchmarks/bench_sharded.py --ranks 4 --out benchmarks/results/sharded-cpu-DATE

Counted is what a rank hands to the collectives of torch.distributed, whoever calls them: that is
what it sends in an all-gather; in an all-reduce it sends up to twice as much. The all-gather of the
logits would be handed the rank's part of all rows. The tokens are compared with those of one rank
before anything is counted. Times are of processes that share the cores of one machine and talk
through its loopback: they say what the exchanges cost beside the work, not what a cluster does.

With ``--way triton`` the kernels are those of GPUs, in Triton's interpreter: what they exchange
does not depend on where they run, and times would say nothing, so that none are taken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python_tests" / "distributed"))

import common  # noqa: E402
import ranks  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext.distributed import even_bounds, verify_sharded  # noqa: E402

V, GAMMA = 128_256, 5
#: Name to rule and filters.
SETTINGS: dict[str, dict[str, Any]] = {
    "block": {"rule": "block"},
    "block, top-p 0.9": {"rule": "block", "top_p": 0.9},
    "block, top-k 50, top-p 0.9": {"rule": "block", "top_k": 50, "top_p": 0.9},
    "block, top-k 5000, top-p 0.9": {"rule": "block", "top_k": 5000, "top_p": 0.9},
    "token": {"rule": "token"},
    "coupled": {"rule": "coupled"},
    "greedy": {"rule": "greedy"},
}
#: Name to where parts begin.
SPLITS = {
    "whole tiles": even_bounds,
    "equal parts": lambda vocab, n: [min(vocab, -(-vocab // n) * r) for r in range(n + 1)],
}


def make_inputs(batch: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Rows of a peaked law and a draft near it, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(batch, GAMMA + 1, V, generator=generator).mul(3)
    draft = (target[:, :GAMMA] + torch.randn(batch, GAMMA, V, generator=generator)).bfloat16()
    seeds, positions = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    columns = [
        specdec_ext.sample(draft[:, i], seeds=seeds, positions=positions, draft_index=i).tokens
        for i in range(GAMMA)
    ]
    inputs = {
        **dict(target_logits=target.bfloat16(), draft_tokens=torch.stack(columns, 1)),
        **dict(seeds=seeds, positions=positions, **setting),
    }
    if setting["rule"] in ("block", "token"):
        inputs["draft_logits"] = draft
    return inputs


def measure(batch: int, split: str, name: str, rounds: int, way: str = "cpu") -> dict[str, Any]:
    """Compare, count and time one setting, as one of the ranks."""
    inputs = make_inputs(batch, SETTINGS[name])
    bounds = SPLITS[split](V, dist.get_world_size())
    local = ranks.local_inputs(inputs, bounds, dist.get_rank(), contiguous=True)
    expected = ranks.WAYS[way].whole(**inputs)
    with ranks.Handed() as handed:
        got = ranks.WAYS[way].sharded(**local)
    wrong = ranks.differences(got, expected)
    logits = sum(local[rows].nbytes for rows in ranks.ROWS if rows in local)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        verify_sharded(**local)
        seconds.append(time.perf_counter() - begin)
    times = {"milliseconds": 1000 * statistics.median(seconds)} if seconds else {}
    return {
        "wrong": wrong,
        "handed": sum(handed.bytes.values()),
        "borders": handed.bytes["all_to_all_single"],
        "calls": sum(handed.calls.values()),
        "gather": logits,
        **times,
    }


def measure_all(batches: list[int], rounds: int, way: str = "cpu") -> list[dict[str, Any]]:
    """Measure every setting, as one of the ranks."""
    return [
        {
            **dict(batch=batch, split=split, setting=name),
            **measure(batch, split, name, rounds, way),
        }
        for batch in batches
        for split in SPLITS
        for name in SETTINGS
    ]


def table(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the ranks' numbers together: of bytes, those of the rank that hands in most."""
    rows = []
    for of_ranks in zip(*results, strict=True):
        assert not any(one["wrong"] for one in of_ranks), of_ranks
        most = {k: max(one[k] for one in of_ranks) for k in ("handed", "borders", "calls")}
        gather = max(one["gather"] for one in of_ranks)
        times = [one["milliseconds"] for one in of_ranks if "milliseconds" in one]
        rows.append(
            {
                **{k: of_ranks[0][k] for k in ("setting", "split", "batch")},
                "bytes handed to collectives": most["handed"],
                "of these at borders": most["borders"],
                "bytes of the logits": gather,
                "share": f"{100 * most['handed'] / gather:.2f} %",
                "collectives": most["calls"],
                **({"ms": round(max(times), 2)} if times else {}),
            }
        )
    return rows


def formatted(rows: list[dict[str, Any]]) -> str:
    """Format the table."""
    return common.markdown_table(list(rows[0]), [[str(v) for v in row.values()] for row in rows])


def main() -> None:
    """Start the processes, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5, help="calls that are timed")
    parser.add_argument("--way", choices=("cpu", "triton"), default="cpu")
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        ranks.obey(options.order, globals())
        return
    rounds = options.rounds if options.way == "cpu" else 0
    arguments = {"batches": options.batches, "rounds": rounds, "way": options.way}
    jobs = {"all": ("measure_all", arguments)}
    results = ranks.start(jobs, options.ranks, 3600.0, script=__file__)
    rows = table([result["all"] for result in results])
    print(formatted(rows))
    if options.out:
        facts = {**common.machine_facts(), "ranks": options.ranks, "command": sys.argv}
        common.write_record(options.out, facts, rows, formatted(rows))


if __name__ == "__main__":
    main()
