"""alpha of every draft on text that the target generated, beside Leviathan et al., Table 3."""

from __future__ import annotations

from typing import Any

from tables import paper
from tables.forced import alpha_of, forced_texts, remembered
from tables.ngrams import ngrams_of
from tables.shared import Bench, Column, Result, with_estimate

# How the text is sampled, and what the paper has at it (its index in `paper.ALPHAS`).
SAMPLING: dict[str, tuple[dict[str, Any], int | None]] = {
    "T = 0": ({"temperature": 0.0}, 0),
    "T = 1": ({"temperature": 1.0}, 1),
    "T = 1, top 40": ({"temperature": 1.0, "top_k": 40}, None),
}

COLUMNS = [
    Column("sampling", "sampling"),
    Column("draft", "draft"),
    Column("alpha", "alpha: sum min(p, q)", ".3f"),
    Column("argmax", "same arg max", ".3f"),
    Column("tokens", "tokens", "d"),
    Column("paper_draft", "paper: draft"),
    Column("paper_alpha", "alpha"),
]

NOTES = [
    "alpha is E[sum min(p, q)] (Corollary 3.6) over the tokens of text that the target generated "
    "with the same sampling; both laws are sampled alike. Standard errors over sentences. At T = 0 "
    "it is the share of places where both models' likeliest token is the same, which `same arg "
    "max` says of the other texts. The other convention, accepted / tested while decoding, is in "
    "`table2`.",
    "n-gram models are counted on the training split's targets, smoothed as "
    "`specdec_ext.decoding.NgramDrafter`; the paper does not say how its own were.",
    "The paper's rows for a GPT-like model on lm1b and for LaMDA on dialogues have no counterpart: "
    "there is no such data here. LaMDA samples behind a top-40 filter; the rows with top 40 show "
    "what that filter does on this task.",
]


def make(bench: Bench) -> Result:
    """Generate text in three ways, and measure every draft on it."""
    counts = ngrams_of(bench)
    drafts = {"unigram": counts.unigram, "bigram": counts.bigram, **bench.drafts}
    others = {"unigram": "unigram", "bigram": "bigram", **paper.beside(list(bench.drafts))}
    records = []
    for sampling, (filters, place) in SAMPLING.items():
        texts = forced_texts(bench, tokens=bench.options.text_tokens, **filters)
        for name, given in drafts.items():
            draft = remembered(given)
            known = paper.ALPHAS.get((bench.task, others.get(name, "")))
            records.append(
                {"sampling": sampling, "draft": name, "tokens": texts.total}
                | with_estimate("alpha", alpha_of(texts, draft, **filters))
                | with_estimate("argmax", alpha_of(texts, draft, temperature=0.0))
                | (
                    {}
                    if known is None or place is None
                    else {"paper_draft": others[name], "paper_alpha": known[place]}
                )
            )
    return Result(
        f"alpha on text of the target: {bench.task}, target {bench.target_name}",
        COLUMNS,
        records,
        NOTES,
        draw=lambda pyplot: draw(pyplot, records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw a group of bars for each draft, and the paper's values as crosses."""
    figure, axes = pyplot.subplots(figsize=(9, 4))
    drafts = list(dict.fromkeys(r["draft"] for r in records))
    for k, sampling in enumerate(SAMPLING):
        own = [r for r in records if r["sampling"] == sampling]
        places = [drafts.index(r["draft"]) + 0.27 * (k - 1) for r in own]
        errors = [r["alpha_se"] for r in own]
        axes.bar(places, [r["alpha"] for r in own], 0.25, yerr=errors, capsize=2, label=sampling)
        known = [
            (x, r["paper_alpha"]) for x, r in zip(places, own, strict=True) if "paper_alpha" in r
        ]
        label = "paper (T5-XXL), by order of size" if k == 0 else None
        axes.plot(*zip(*known, strict=True) if known else ([], []), "kx", label=label)
    axes.set_xticks(range(len(drafts)), drafts)
    axes.set_ylabel("alpha")
    axes.legend(fontsize=8)
    return figure
