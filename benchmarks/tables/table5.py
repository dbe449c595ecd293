"""alpha under lenience, beside Leviathan et al., Table 5 and section A.5, and what it costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_ext import theory
from tables import paper
from tables.decode import (
    PLAIN,
    accepted_of_tested,
    by_model,
    decode,
    greedy_faults,
    speedup,
    tokens_a_call,
    way,
)
from tables.forced import Texts, alpha_of, forced_texts, rates, remembered
from tables.ngrams import ngrams_of
from tables.shared import Bench, Column, Result, estimate_over, with_estimate

# Of the paper, with which it derives speed-ups from alpha.
PAPER_C = 0.015
GAMMA = 7
LONGEST = 32  # gammas that are looked at for the best one
# The bound on what is emitted is a statement about reals; laws here are rounded to float32.
ROUNDING = 1e-4

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("lenience", "l", "g"),
    Column("alpha", "alpha", ".3f"),
    Column("factor", f"speed-up by Theorem 3.8, c = {PAPER_C}"),
    Column("distance", "distance from the target", ".3f"),
    Column("accepted_of_tested", "decoding: accepted / tested", ".3f"),
    Column("tokens_a_call", "tokens a call"),
    Column("speedup", "speed-up"),
    Column("paper_draft", "paper: draft"),
    Column("paper_alpha", "alpha"),
    Column("paper_factor", "speed-up", ".1f"),
]

NOTES = [
    "At T = 1 alpha is the mean of sum min(p / l, q) on text that the target generated, as in the "
    "paper; while decoding, the text is the lenient one. `distance` is the total variation "
    "distance between the law of the token that is emitted there and the target's, computed "
    "without sampling: 0 at l = 1, the price of lenience otherwise.",
    "At T = 0 a draft token x is accepted where p(x) >= l max p, p being the softmax at "
    "temperature 1. (The paper's text has the inequality the other way round, under which "
    "every token is accepted at l = 1; its figures fit the one used here.)",
    f"The speed-up by Theorem 3.8 is at c = {PAPER_C}, the paper's, and the best gamma up to "
    f"{LONGEST}. Measured ones are of whole calls at gamma {GAMMA}, against plain decoding.",
    "Not lossless: nothing here is compared with plain decoding's text, but at l = 1.",
]


def make(bench: Bench) -> Result:
    """Measure every draft at every lenience, then decode with the smallest one."""
    counts = ngrams_of(bench)
    drafts = {"unigram": counts.unigram, "bigram": counts.bigram, **bench.drafts}
    others = {"unigram": "unigram", "bigram": "bigram", **paper.beside(list(bench.drafts))}
    records, worst = [], 0.0
    texts = forced_texts(bench, 1.0, tokens=bench.options.text_tokens)
    for name, given in drafts.items():
        draft = remembered(given)
        known = paper.LENIENT.get(others.get(name, ""))
        for k, lenience in enumerate(paper.LENIENCES):
            rate = partial(theory.lenient_acceptance, lenience=lenience)
            record = {"temperature": 1.0, "draft": name, "lenience": lenience}
            record |= with_estimate("alpha", alpha_of(texts, draft, rate, temperature=1.0))
            record |= distance_of(texts, draft, lenience)
            worst = max(worst, record.pop("excess"))
            if known is not None and bench.task == "translation":
                record |= {"paper_draft": others[name], "paper_alpha": known[k]}
            records.append(record)
    records += greedy_records(bench, drafts)
    smallest = next(iter(bench.drafts))
    faults: list[str] = []
    for temperature in (1.0, 0.0):
        found, wrong = decoded(bench, smallest, temperature)
        faults += wrong
        for record in records:
            if (record["draft"], record["temperature"]) == (smallest, temperature):
                record |= found[record["lenience"]]
    for record in records:
        record["factor"] = best_factor(record["alpha"])
        record |= speed_of_paper(record)
    verdict = "PASS" if worst <= 1 + ROUNDING else "FAIL"
    bar = (
        f"no token comes more than 1 / l times as often as under the target: {worst:.6f} {verdict}"
    )
    return Result(
        f"alpha under lenience: {bench.task}, target {bench.target_name}", COLUMNS, records, NOTES,
        [bar], faults + ([bar] if verdict == "FAIL" else []),
        lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def emitted_law(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """Compute the law of the token that one lenient test emits, ``[R, V]`` float64.

    A draft token x is drawn from q and kept with probability min(1, p(x) / (l q(x))); otherwise the
    token comes from the residual [p - q]+ (Leviathan et al., section A.5, Algorithm 1).
    """
    kept = torch.minimum(p / lenience, q)
    residual = (p - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    residual = torch.where(mass > 0, residual / mass, p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * residual


def emission(
    target_logits: Tensor, draft_logits: Tensor, *, lenience: float, temperature: float
) -> Tensor:
    """Return two numbers a row, ``[R, 2]``: distance from the target, and l max e / p."""
    p = (target_logits.double() / temperature).softmax(-1)
    q = (draft_logits.double() / temperature).softmax(-1)
    e = emitted_law(p, q, lenience)
    return torch.stack(
        [(e - p).abs().sum(-1) / 2, lenience * torch.where(p > 0, e / p, 0.0).amax(-1)], -1
    )


def distance_of(texts: Texts, draft: Any, lenience: float) -> dict[str, float]:
    """Return the mean distance from the target's law, and how near the bound the worst token is."""
    # A tenth of the sentences: float64 over the vocabulary takes its time.
    some = Texts(texts.batches[:1], texts.tokens[: len(texts.batches[0].lengths)])
    found = list(rates(some, draft, emission, lenience=lenience, temperature=1.0))
    return with_estimate("distance", estimate_over([rows[:, 0] for rows in found])) | {
        "excess": max(float(rows[:, 1].max()) for rows in found)
    }


def greedy_acceptance(target_logits: Tensor, draft_logits: Tensor, *, lenience: float) -> Tensor:
    """Return 1.0 where p(x) >= l max p, x being the draft's likeliest token, ``[R]``."""
    p = target_logits.double().softmax(-1)
    x = draft_logits.argmax(-1, keepdim=True)
    return (p.gather(-1, x) >= lenience * p.amax(-1, keepdim=True)).double().squeeze(-1)


def greedy_records(bench: Bench, drafts: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure acceptance at T = 0."""
    texts = forced_texts(bench, 0.0, tokens=bench.options.text_tokens)
    translates = bench.task == "translation"
    records = []
    for name, given in drafts.items():
        draft = remembered(given)
        other = paper.beside(list(bench.drafts)).get(name)
        for k, lenience in enumerate(paper.LENIENCES):
            record = {"temperature": 0.0, "draft": name, "lenience": lenience}
            record |= with_estimate(
                "alpha", alpha_of(texts, draft, greedy_acceptance, lenience=lenience)
            )
            if translates and other == paper.DRAFTS[0]:
                record |= {"paper_draft": other, "paper_alpha": paper.LENIENT_GREEDY[k]}
            records.append(record)
    return records


def speed_of_paper(record: dict[str, Any]) -> dict[str, float]:
    """Return the speed-up that the paper derives from its alpha, which it does for T5-small."""
    if record.get("paper_draft") != paper.DRAFTS[0]:
        return {}
    speeds = paper.LENIENT_SPEEDS if record["temperature"] else paper.LENIENT_GREEDY_SPEEDS
    return {"paper_factor": speeds[paper.LENIENCES.index(record["lenience"])]}


def best_factor(alpha: float) -> float:
    """Compute Theorem 3.8 at the paper's c and the best gamma."""
    gamma = theory.optimal_gamma(alpha, PAPER_C, limit=LONGEST)
    return theory.walltime_factor(alpha, gamma, PAPER_C)


def decoded(
    bench: Bench, draft: str, temperature: float
) -> tuple[dict[float, dict[str, float]], list[str]]:
    """Decode with a draft at every lenience; say what was measured, and what was wrong at l = 1."""
    ways = {PLAIN: way(bench, None, temperature=temperature)}
    drafting = by_model(bench.drafts[draft])
    for lenience in paper.LENIENCES:
        ways[f"l = {lenience:g}"] = way(
            bench, drafting, gamma=GAMMA, rule="lenient", lenience=lenience,
            temperature=temperature,
        )  # fmt: skip
    runs = decode(bench, ways)
    number, found = len(bench.sentences), {}
    for lenience in paper.LENIENCES:
        own = runs[f"l = {lenience:g}"]
        found[lenience] = (
            with_estimate("accepted_of_tested", accepted_of_tested(own, number))
            | with_estimate("tokens_a_call", tokens_a_call(own, number))
            | with_estimate("speedup", speedup(runs[PLAIN], own, number))
        )
    if temperature:
        return found, []
    strict = {name: runs[name] for name in (PLAIN, "l = 1")}
    return found, greedy_faults(bench, strict)[0]


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw alpha over l at both temperatures, the paper's values as crosses."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, temperature in zip(panels, (0.0, 1.0), strict=True):
        of = [r for r in records if r["temperature"] == temperature]
        for draft in dict.fromkeys(r["draft"] for r in of):
            own = [r for r in of if r["draft"] == draft]
            line = axes.errorbar(
                [r["lenience"] for r in own], [r["alpha"] for r in own],
                [r["alpha_se"] for r in own], marker="o", capsize=2, label=draft,
            )  # fmt: skip
            known = [r for r in own if "paper_alpha" in r]
            axes.plot(
                [r["lenience"] for r in known], [r["paper_alpha"] for r in known], "x",
                color=line[0].get_color(),
            )  # fmt: skip
        axes.set_title(f"T = {temperature:g} (crosses: paper)")
        axes.set_xlabel("l")
        axes.legend(fontsize=7)
    panels[0].set_ylabel("alpha")
    return figure
