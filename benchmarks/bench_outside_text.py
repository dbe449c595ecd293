"""Time speculation outside text: the two examples of it, a spark that grows and pictures of digits.

    python benchmarks/bench_outside_text.py --out benchmarks/results/outside-text-cpu

What is timed stands in `examples/speculative_execution.py` and `examples/pixels.py`, with and
without guesses by turns, on one thread and in CPU time. The spark's law is tested first, the
planted mistake with it; nothing is timed if that fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "examples")]

import common  # noqa: E402
import pixels  # noqa: E402
import speculative_execution as sparks  # noqa: E402

PREDICTED = (
    "What the theorem predicts from alpha and c, first as it stands, where f takes as long for all "
    "guesses as for\none, then with the time that it takes:"
)


def time_sparks(gammas: Sequence[int], quick: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Test the spark's law, then time it; give records and lines for the reader."""
    p_values = sparks.check_law(runs=20_000 if quick else 50_000)
    if not sparks.judge(p_values):
        raise AssertionError(f"the law of what grows is not f's, or the test is blind: {p_values}")
    size, steps, repeats = (15, 20, 2) if quick else (41, 120, 15)
    records, theorems = [], []
    for gamma in gammas:
        ways, theorem = sparks.measure(size, steps, gamma, repeats)
        records += [{"example": "spark", "gamma": gamma, **way} for way in ways]
        theorems.append({"example": "spark", "gamma": gamma, "way": "predicted", **theorem})
    about = f"A spark of {steps} sites on {size} x {size}, medians of {repeats} sparks."
    law = "p-values of the law: " + ", ".join(f"{name} {p:.2g}" for name, p in p_values.items())
    return records + theorems, [
        about,
        "",
        law,
        "",
        table(records),
        "",
        PREDICTED,
        "",
        table(theorems),
    ]


def time_pictures(
    gammas: Sequence[int], quick: bool, cache: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time pictures of the ten digits; give records and lines for the reader."""
    settings = pixels.QUICK if quick else pixels.FULL
    target, drafter = pixels.models(settings, cache)
    records = []
    for temperature in (1.0, 0.8, 0.0):
        for gamma in gammas:
            record, _ = pixels.compare(target, drafter, settings, temperature, gamma)
            records.append({"example": "pixels", "gamma": gamma, **record})
    about = f"Ten digits of {settings.size} x {settings.size} pixels, one by one ({settings})."
    return records, [about, "", table(records)]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format records of one kind; the columns are those of all of them."""
    names = list(dict.fromkeys(name for record in records for name in record if name != "example"))
    rows = [[cell(record.get(name, "")) for name in names] for record in records]
    return common.markdown_table(names, rows)


def cell(value: object) -> str:
    """Format an entry."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Test, time, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gamma", nargs="+", type=int, default=[4, 8, 12], help="guesses a round")
    parser.add_argument("--quick", action="store_true", help="small sparks and pictures, seconds")
    parser.add_argument("--cache", type=Path, default=pixels.CACHE, help="where models are kept")
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = common.Load()
    first, text = time_sparks(options.gamma, options.quick)
    second, more = time_pictures(options.gamma, options.quick, options.cache)
    facts = {**common.machine_facts(), "command": sys.argv, "others": load.share()}
    lines = [*text, "", *more]
    print("\n".join(lines))
    if options.out is not None:
        head = ["# Speculation outside text", "", machine(facts), ""]
        common.write_record(options.out, facts, first + second, "\n".join(head + lines))
    return 0


def machine(facts: dict[str, Any]) -> str:
    """Say where and how the record was made."""
    busy = "" if facts["others"] is None else f", others used {facts['others']:.0%} of it meanwhile"
    where = f"{facts['cores']} cores of an {facts['cpu']}{busy}; one thread, CPU time"
    what = f"Python {facts['python']}, torch {facts['torch']}, commit {facts['commit']}"
    arguments = " ".join(facts["command"][1:])
    return (
        f"{facts['time']}: {where}; {what}.\n"
        f"Command: `python benchmarks/bench_outside_text.py {arguments}`."
    )


if __name__ == "__main__":
    raise SystemExit(main())
