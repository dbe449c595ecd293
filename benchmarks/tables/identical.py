"""Is greedy output plain decoding's, under every lossless rule, on all sentences?

The other tables compare the sentences that they time. This one times nothing and decodes batches.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from contestants import Run
from tqdm import tqdm

import specdec_ext
from specdec_ext.contract import rule_names
from specdec_ext.decoding import HierarchicalDrafter, RenewalRule, StaticTree, Statistics
from tables.copying import aggressive, lookup
from tables.decode import (
    PLAIN,
    Drafting,
    Reading,
    by_model,
    greedy_bar,
    greedy_faults,
    start_ids,
)
from tables.kinds import COPIED, INNER, early_exit
from tables.shared import Bench, Column, Result

BATCH, GAMMA, WIDTHS = 32, 5, (2, 2, 1)
DRAWN = "without_replacement"
CHILDREN = {"traversal": DRAWN, "recursive": DRAWN, "coupled": "coupled"}  # of the others: top_k


class Way(NamedTuple):
    """A way to decode greedily: a function that makes its drafter, and `generate`'s options."""

    drafter: Drafting | None
    options: dict[str, Any]


def ways(bench: Bench) -> dict[str, Way]:
    """Return every way that is compared, plain decoding first."""
    drafts = bench.drafts
    medium, small = list(drafts.values())[-1], next(iter(drafts.values()))
    first_layers = max(bench.target.config.num_decoder_layers // 4, 1)

    def chain(drafter: Drafting, gamma: Any = GAMMA, rule: str = "token") -> Way:
        return Way(drafter, {"gamma": gamma, "rule": rule})

    found = {PLAIN: Way(None, {})}
    found |= {f"model {name}, token": chain(by_model(model)) for name, model in drafts.items()}
    for rule in rule_names(chains=True, lossless=True):
        if rule != "token":
            found[f"largest draft, {rule}"] = chain(by_model(medium), rule=rule)
    for rule in rule_names(trees=True, lossless=True):
        tree = StaticTree.from_widths(WIDTHS, CHILDREN.get(rule, "top_k"))
        options = {"tree": tree, "rule": rule}
        found[f"tree of the largest draft, {rule}"] = Way(by_model(medium), options)
    return found | {
        "renewal rule, block": chain(by_model(small), RenewalRule(), "block"),
        "lookup in source and output": chain(lookup, COPIED),
        "aggressive": chain(aggressive, bench.options.tokens),
        "hierarchy": chain(
            lambda reading: HierarchicalDrafter(reading.by(medium), reading.by(small), INNER)
        ),
        "early exit": chain(early_exit(bench, first_layers)),
    }


def decode(bench: Bench, way: Way) -> tuple[list[Run], Statistics]:
    """Decode all sentences: a run for each, and the counts of all together."""
    runs: list[Run] = []
    counts: list[Statistics] = []
    sentences = bench.sentences
    for begin in range(0, len(sentences), BATCH):
        reading = Reading(sentences[begin : begin + BATCH], bench.device)
        found = specdec_ext.generate(
            reading.by(bench.target),
            None if way.drafter is None else way.drafter(reading),
            start_ids(bench.target, len(reading.sources)),
            max_new_tokens=bench.options.tokens, temperature=0.0, **way.options,
        )  # fmt: skip
        lengths = found.statistics.new_tokens
        for row, length in zip(found.sequences[:, 1:].tolist(), lengths, strict=True):
            runs.append(Run([row[:length]], 0.0, None))
        counts.append(found.statistics)
    return runs, sum(counts[1:], counts[0])


def make(bench: Bench) -> Result:
    """Make the table."""
    bar = tqdm(ways(bench).items(), desc="ways", file=sys.stderr)
    decoded = {name: decode(bench, way) for name, way in bar}
    runs = {name: own for name, (own, _) in decoded.items()}
    records, every_fault, every_tie = [], [], []
    for name, (own, statistics) in decoded.items():
        faults, ties = greedy_faults(bench, {PLAIN: runs[PLAIN], name: own})
        records.append({
            "way": name,
            "texts": len(own),
            "tokens": sum(run.num_tokens for run in own),
            "tokens_a_call": statistics.tokens_per_target_call,
            "accepted": statistics.accepted,
            "identical": len(own) - len(faults) - len(ties),
            "ties": len(ties),
            "wrong": len(faults),
        })  # fmt: skip
        every_fault += faults
        every_tie += ties
    return Result(
        f"Greedy texts of every lossless rule, {bench.task}",
        [
            Column("way", "decoding"),
            Column("texts", "texts", ",d"),
            Column("tokens", "tokens", ",d"),
            Column("tokens_a_call", "tokens a call"),
            Column("accepted", "draft tokens accepted", ",d"),
            Column("identical", "texts as plain", ",d"),
            Column("ties", "part at a tie", ",d"),
            Column("wrong", "wrong", ",d"),
        ],
        records,
        notes=[
            f"In batches of {BATCH}; gamma is {GAMMA}, {COPIED} where tokens are copied, and for "
            f"*aggressive* all of the source that is left; trees have the widths {WIDTHS}.",
            "A text that parts from plain decoding's is put to the target again, which says "
            "whether its two choices tie to its own precision.",
            *every_tie,
        ],
        bars=[greedy_bar(runs, every_fault, every_tie)],
        faults=every_fault,
        draw=lambda pyplot: draw(pyplot, records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw tokens a call of every way: what was compared did accept drafts."""
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(records)))
    axes.barh([record["way"] for record in records], [r["tokens_a_call"] for r in records])
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a call; all texts compared with plain decoding's")
    return figure
