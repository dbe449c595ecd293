"""Drafts that were taught by their target: "distillation ... or optimizing M_q for alpha directly".

Leviathan et al., arXiv 2211.17192, section 6, name both as directions, and have no figures.
"""

from __future__ import annotations

from typing import Any

from specdec_ext import theory
from tables.costs import clocked
from tables.decode import (
    PLAIN,
    accepted_of_tested,
    decode_at,
    model_way,
    speedup,
    tokens_a_call,
)
from tables.forced import Rows, Texts, alpha_of, forced_texts, rates, remembered
from tables.shared import Bench, Column, Result, estimate_over, with_estimate

GAMMA = 5

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("loss", "loss"),
    Column("minutes", "further training, minutes", ".1f"),
    Column("alpha", "alpha", ".3f"),
    Column("gain", "over its beginning", "+.3f"),
    Column("accepted_of_tested", "decoding: accepted / tested", ".3f"),
    Column("tokens_a_call", "tokens a call"),
    Column("speedup", "speed-up"),
    Column("expected", "by Theorem 3.8"),
]

NOTES = [
    "Drafts that go on from a trained one: `labels` learns from the text for as long, the control; "
    "`kl` learns the target's law of the next token, `tv` lessens 1 - sum min(p, q), which is 1 - "
    "alpha (Corollary 3.6), on the places of the text. A name with `written` learned on the "
    "target's own greedy texts (sequence-level distillation).",
    "alpha = E[sum min(p, q)] on text that the target generated at T. `over its beginning` is the "
    "difference from the draft it went on from, on the same text.",
    f"Decoding with gamma {GAMMA}, rule `token` at T = 1. The paper has no figures for this.",
]


def make(bench: Bench) -> Result:
    """Measure every draft that was taught beside the one that it began with."""
    taught = bench.family.distilled
    if not taught:
        raise ValueError(
            f"no draft of {bench.options.task} was taught by its target: run "
            "`python benchmarks/pair/seq2seq distill` first"
        )
    begun = {name: bench.family.facts[name]["options"]["start"] for name in taught}
    drafts = {name: bench.drafts[name] for name in bench.drafts if name in begun.values()} | taught
    records, faults, bars = [], [], []
    for temperature in (0.0, 1.0):
        tokens = -(-bench.options.text_tokens // 2)
        texts = forced_texts(bench, temperature, tokens=tokens)
        ways = {name: model_way(bench, model, GAMMA, temperature) for name, model in drafts.items()}
        runs, wrong, lines = decode_at(bench, temperature, ways)
        faults += wrong
        bars += lines
        number, own_records = len(bench.sentences), {}
        rows = {name: remembered(model) for name, model in drafts.items()}
        for name in drafts:
            own = runs[name]
            tested = accepted_of_tested(own, number)
            c = clocked(runs[PLAIN], own).c
            own_records[name] = (
                {"temperature": temperature, "draft": name}
                | with_estimate("alpha", alpha_of(texts, rows[name], temperature=temperature))
                | with_estimate("accepted_of_tested", tested)
                | with_estimate("tokens_a_call", tokens_a_call(own, number))
                | with_estimate("speedup", speedup(runs[PLAIN], own, number))
                | {"expected": theory.walltime_factor(tested.mean, GAMMA, c)}
            )
        for name, start in begun.items():
            facts = bench.family.facts[name]
            own_records[name] |= {
                "loss": facts["options"]["loss"],
                "minutes": facts["seconds"] / 60,
                "start": start,
            } | gain(texts, rows[name], rows[start], temperature)
        records += own_records.values()
    return Result(
        f"Drafts taught by their target: {bench.task}, target {bench.target_name}",
        COLUMNS, records, NOTES, bars, faults, lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def gain(texts: Texts, draft: Rows, start: Rows, temperature: float) -> dict[str, float]:
    """Estimate how much alpha grew, with the standard error of the difference."""
    after = rates(texts, draft, temperature=temperature)
    before = rates(texts, start, temperature=temperature)
    differences = [new - old for new, old in zip(after, before, strict=True)]
    return with_estimate("gain", estimate_over(differences))


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw alpha of each draft, at both temperatures."""
    figure, axes = pyplot.subplots(figsize=(9, 4))
    drafts = list(dict.fromkeys(r["draft"] for r in records))
    for k, temperature in enumerate((0.0, 1.0)):
        own = [r for r in records if r["temperature"] == temperature]
        places = [drafts.index(r["draft"]) + 0.4 * (k - 0.5) for r in own]
        errors = [r["alpha_se"] for r in own]
        label = f"T = {temperature:g}"
        axes.bar(places, [r["alpha"] for r in own], 0.38, yerr=errors, capsize=2, label=label)
    axes.set_xticks(range(len(drafts)), drafts, rotation=20, ha="right")
    axes.set_ylabel("alpha")
    axes.legend(fontsize=8)
    return figure
