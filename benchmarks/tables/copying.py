"""Drafts copied from the source, against greedy decoding and transformers' prompt lookup: bars.

Made for the correction task, where most of the output stands in the input (``--task`` of a family
trained on it); on other tasks the bar of aggressive decoding says that it is not of that task.
"""

from __future__ import annotations

from typing import Any

from specdec_ext.decoding import AggressiveDrafter, LookupDrafter
from tables import hosts
from tables.decode import PLAIN, Reading, Way, plain_way, speculative, speedup
from tables.kinds import draw as draw_kinds
from tables.rows import COLUMNS, MEANING, Measured, measure
from tables.shared import Bench, Result

GAMMAS = (3, 5, 10, 20)
HOST, BEAMS = "transformers, greedy", "transformers, 5 beams"
AGGRESSIVE, WANTED = "aggressive", 2.0


def aggressive(reading: Reading) -> AggressiveDrafter:
    """Draft the rest of the source."""
    return AggressiveDrafter(reading.sources)


def lookup(reading: Reading) -> LookupDrafter:
    """Draft a copy out of source and output; behind one token that matches, too, as theirs does."""
    return LookupDrafter(reading.sources, min_match=1)


def ours(gamma: int) -> str:
    """Name the row of our lookup."""
    return f"lookup with the source, gamma {gamma}"


def theirs(gamma: int) -> str:
    """Name the row of transformers' lookup."""
    return f"transformers' prompt lookup with the source, {gamma} tokens"


def make(bench: Bench) -> Result:
    """Make the table."""
    new = bench.options.tokens
    ways: dict[str, Way] = {
        PLAIN: plain_way(bench, 0.0),
        HOST: hosts.way(bench.target, new),
        AGGRESSIVE: speculative(bench, aggressive, new, 0.0),
    }
    for gamma in GAMMAS:
        ways[ours(gamma)] = speculative(bench, lookup, gamma, 0.0)
        ways[theirs(gamma)] = hosts.prompt_lookup_way(bench.target, new, gamma)
    beams = {BEAMS: hosts.way(bench.target, new, num_beams=5)}
    measured = measure(bench, ways, 0.0, others=beams)
    return Result(
        f"Drafts copied from the source, {bench.task}",
        [column for column in COLUMNS if column.key != "temperature"],
        measured.records,
        notes=[
            "Greedy. *Aggressive* drafts all of the source that is left; every lookup has the "
            "source, its end token included, in front of what it searches. By itself "
            "transformers' prompt lookup searches the decoder's tokens alone: here it is shown the "
            "source, too, with its own defaults otherwise (the first match of at most two tokens).",
            *MEANING,
        ],
        bars=[*measured.bars, aggressive_bar(bench, measured), *lookup_bars(measured)],
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )


def aggressive_bar(bench: Bench, measured: Measured) -> str:
    """Say whether aggressive decoding is twice as fast as greedy decoding, whoever's is faster."""
    if bench.task != "correction":
        return (
            f"aggressive decoding at least {WANTED:g} times greedy: of the correction task, not of "
            f"{bench.task}"
        )
    count = len(bench.sentences)
    found = {
        name: speedup(measured.runs[name], measured.runs[AGGRESSIVE], count)
        for name in (PLAIN, HOST)
    }
    slower = min(found.values(), key=lambda estimate: estimate.mean)
    verdict = "PASS" if slower.mean >= WANTED else "FAIL"
    said = ", ".join(f"{e.mean:.2f} ({e.standard_error:.2f}) times {n}" for n, e in found.items())
    return f"aggressive decoding is {said}, at least {WANTED:g} wanted of both: {verdict}"


def lookup_bars(measured: Measured) -> list[str]:
    """Say for each number of tokens whether our lookup emits at least as many a call."""
    own = {record["way"]: record for record in measured.records}
    lines = []
    for gamma in GAMMAS:
        mine, other = (own[name(gamma)]["tokens_a_call"] for name in (ours, theirs))
        verdict = "PASS" if mine >= other else "FAIL"
        lines.append(
            f"lookup with the source, {gamma} tokens: {mine:.3f} tokens a call, transformers' "
            f"prompt lookup {other:.3f}: {verdict}"
        )
    return lines


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw tokens a call and speed."""
    return draw_kinds(pyplot, [record for record in records if record["way"] != BEAMS])
