"""The report's Table 3: its beam search (Algorithm 2) with 3 and 5 beams, and exact beam search."""

from __future__ import annotations

from tables import hosts, sampled_beams
from tables.decode import PLAIN, Run, by_model, plain_way, speculative, way
from tables.report2 import DIFFERENCES, REPORT_COLUMNS, draw, printed
from tables.rows import COLUMNS, MEANING, measure, size
from tables.shared import Bench, Result

SMALL, WIDTHS, GAMMA = "small", (3, 5), 3
PRINTED = "Algorithm 2 as printed: one beam, sampled"

# (task, beams) to BLEU, alpha and speed, as printed.
REPORT = {("translation", 3): (0.73, 0.79, 0.79), ("translation", 5): (0.72, 0.75, 0.45)}


def names(width: int) -> tuple[str, str, str]:
    """Return what the three ways with so many beams are called."""
    return (
        f"{width} beams, Algorithm 2 repaired",
        f"{width} beams, exact, speculative",
        f"{width} beams, transformers",
    )


def compared(ours: list[Run], theirs: list[Run], width: int) -> str:
    """Say in how many texts the two exact searches agree."""
    alike = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    verdict = "PASS" if alike == len(ours) else "FAIL"
    return f"{width} beams: {alike} of {len(ours)} texts are those of transformers: {verdict}"


def make(bench: Bench) -> Result:
    """Make the table."""
    small, new = size(bench, SMALL), bench.options.tokens
    others = {PRINTED: speculative(bench, by_model(small), GAMMA, 1.0)}
    beams = {}
    for width in WIDTHS:
        repaired, exact, host = names(width)
        others[repaired] = sampled_beams.way(bench, small, width, GAMMA)
        others[exact] = way(
            bench, by_model(small), gamma=GAMMA, num_beams=width, draft_beams=2 * width
        )
        others[host] = hosts.way(bench.target, new, num_beams=width)
        beams[repaired] = width
    measured = measure(bench, {PLAIN: plain_way(bench, 0.0)}, 0.0, others=others)
    bars = list(measured.bars)
    for width in WIDTHS:
        _, exact, host = names(width)
        bars.append(compared(measured.runs[exact], measured.runs[host], width))
    for record in measured.records:
        record["beams"] = beams.get(record["way"], 0)
        record["temperature"] = 1.0 if "Algorithm 2" in record["way"] else 0.0
        record |= printed(bench, beams.get(record["way"]), REPORT)
    return Result(
        f"Beams (the report's Table 3), {bench.task}",
        [*COLUMNS, *REPORT_COLUMNS],
        measured.records,
        notes=[
            "*Algorithm 2* as printed never has more than one beam, so that it is speculative "
            "sampling. *Repaired*: k copies of the prefix begin, each beam makes k candidates a "
            "round, all tokens' log-probabilities are in the score, the k best that differ live "
            "on (`benchmarks/tables/sampled_beams.py`); it keeps no cache between rounds.",
            f"*Exact* is `generate(num_beams=k)`, with a draft of 2 k beams and gamma {GAMMA}: "
            "transformers' beam search, several levels with a target call; its tokens a call are "
            "levels. Speeds are against plain greedy decoding.",
            *MEANING,
            DIFFERENCES,
        ],
        bars=bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )
