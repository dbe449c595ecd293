"""The report's Table 1: the models by themselves, seconds a text and quality; beams beside them."""

from __future__ import annotations

from typing import Any

from tables import hosts
from tables.decode import PLAIN, plain_way
from tables.rows import ENGLISH, ROUGE_COLUMNS, measure
from tables.shared import Bench, Column, Result

BEAMS = 5

# (task, size) to seconds and "Avg. Bleu Score", as printed.
REPORT = {
    ("translation", "large"): (6.39, 0.717),
    ("translation", "small"): (0.75, 0.554),
    ("summarisation", "large"): (216.62, 0.38),
    ("summarisation", "small"): (12.02, 0.35),
}

COLUMNS = [
    Column("model", "model"),
    Column("decoding", "decoding"),
    Column("milliseconds", "ms a text", ".0f"),
    Column("bleu", "BLEU", ".1f"),
    Column("sentence_bleu", "mean of sentences' BLEU", ".1f"),
    Column("chrf", "chrF", ".1f"),
    Column("report_seconds", "the report's seconds"),
    Column("report_bleu", "the report's BLEU", ".3f"),
]


def _row(bench: Bench, own: dict[str, Any], model: str, decoding: str) -> dict[str, Any]:
    printed = REPORT.get((bench.task, model)) if decoding == "greedy" else None
    found = {"model": model, "decoding": decoding, **own}
    found["milliseconds"] = 1000 * own["seconds"]
    found["milliseconds_se"] = 1000 * own["seconds_se"]
    if printed:
        found["report_seconds"], found["report_bleu"] = printed
    return found


def make(bench: Bench) -> Result:
    """Make the table."""
    new, target = bench.options.tokens, bench.target_name
    sizes = bench.family.models
    named = {f"{name}, greedy": (name, "greedy") for name in sizes}
    alike = {PLAIN: plain_way(bench, 0.0)}
    others = {}
    for name, model in sizes.items():
        place = alike if name == target else others
        place[f"{name}, greedy"] = hosts.way(model, new)
    beams = f"{target}, {BEAMS} beams"
    others[beams] = hosts.way(bench.target, new, num_beams=BEAMS)
    named |= {beams: (target, f"{BEAMS} beams"), PLAIN: (target, "greedy, in this loop")}
    measured = measure(bench, alike, 0.0, others=others)
    own = {record["way"]: record for record in measured.records}
    records = [_row(bench, own[way], *named[way]) for way in named]
    columns = list(COLUMNS)
    if bench.task in ENGLISH:
        columns[6:6] = ROUGE_COLUMNS
    return Result(
        f"Models by themselves (the report's Table 1), {bench.task}",
        columns,
        records,
        notes=[
            "Standard errors over sentences in parentheses. Greedy decoding and beams are "
            "transformers' own; one sentence a call, encoder included.",
            "The report: T5-Large and T5-Small (about 770 and 60 million parameters), WMT English "
            "to German or CNN/DailyMail, hardware not named. Its scores, between 0 and 1, are "
            "averages of sentences by a formula that it does not name either. Here: models of "
            "`benchmarks/pair/seq2seq`, texts about software, percent.",
        ],
        bars=measured.bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw quality over time."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for record in records:
        axes.errorbar(record["milliseconds"], record["bleu"], yerr=record["bleu_se"], fmt="o",
                      label=f"{record['model']}, {record['decoding']}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a text")
    axes.set_ylabel("BLEU")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
