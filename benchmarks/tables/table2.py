"""Speed and acceptance by drafter, temperature and gamma, beside Leviathan et al., Table 2."""

from __future__ import annotations

from typing import Any

from specdec_ext import theory
from tables import paper
from tables.decode import (
    PLAIN,
    accepted_of_drafted,
    accepted_of_tested,
    by_model,
    decode_at,
    loop_only,
    speedup,
    tokens_a_call,
    way,
)
from tables.forced import alpha_of, forced_texts
from tables.ngrams import by_bigram, ngrams_of
from tables.shared import Bench, Column, Result, with_estimate

GAMMAS = (3, 5, 7)

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("gamma", "gamma", "d"),
    Column("alpha", "alpha: sum min(p, q)", ".3f"),
    Column("accepted_of_tested", "accepted / tested", ".3f"),
    Column("accepted_of_drafted", "accepted / drafted", ".3f"),
    Column("tokens_a_call", "tokens a call"),
    Column("speedup", "speed-up"),
    Column("decode_speedup", "without encoders"),
    Column("paper_draft", "paper: draft"),
    Column("paper_gamma", "gamma", "d"),
    Column("paper_alpha", "alpha"),
    Column("paper_speedup", "speed-up", ".3g"),
]

NOTES = [
    "alpha is the mean of sum min(p, q) over the contexts of text that the target generated "
    "(Corollary 3.6), as in the paper; accepted / tested is accepted / (accepted + rejected) while "
    "decoding; accepted / drafted also counts draft tokens after a rejection.",
    "Rule `token` is the paper's Algorithm 1, `block` accepts more of the same drafts and is as "
    "lossless. Standard errors over sentences in parentheses; one sentence at a time.",
    "The speed-up is of whole calls, both encoders included, against plain decoding by the same "
    "loop.",
    "The paper's bigram row is computed from alpha at c = 0, not timed (section 3.6).",
    "What differs from the paper: models trained here, of a thousandth of the size, on a CPU and "
    "not on a TPU; the paper's gamma is the best one of each row, here all of them are shown.",
]


BIGRAM = "bigram"


def make(bench: Bench) -> Result:
    """Decode with every draft, temperature, gamma and, sampled, both rules."""
    records, faults, bars = [], [], []
    gammas = GAMMAS[-1:] if bench.options.quick else GAMMAS
    bigram, bigram_rows = by_bigram(bench), ngrams_of(bench).bigram
    for temperature in (0.0, 1.0):
        rules = ("token", "block") if temperature else ("greedy",)
        ways, settings = {}, {}
        for name, model in bench.drafts.items():
            for gamma in gammas:
                for rule in rules[: 2 if gamma == gammas[-1] else 1]:
                    key = f"{name}, gamma {gamma}, {rule}"
                    settings[key] = name, gamma, rule
                    ways[key] = way(
                        bench, by_model(model), gamma=gamma, rule=rule, temperature=temperature
                    )
        gamma, rule = paper.BIGRAM[0], rules[0]
        settings[BIGRAM] = BIGRAM, gamma, rule
        ways[BIGRAM] = way(bench, bigram, gamma=gamma, rule=rule, temperature=temperature)
        runs, wrong, lines = decode_at(bench, temperature, ways)
        faults += wrong
        bars += lines
        texts = forced_texts(bench, temperature)
        alphas = {
            name: alpha_of(texts, model, temperature=temperature)
            for name, model in {**bench.drafts, BIGRAM: bigram_rows}.items()
        }
        for key, (name, gamma, rule) in settings.items():
            records.append(
                {"temperature": temperature, "draft": f"{name}, {rule}", "gamma": gamma}
                | with_estimate("alpha", alphas[name])
                | measured(bench, runs[PLAIN], runs[key])
                | of_paper(bench, name, temperature)
            )
    return Result(
        f"Speed by drafter, temperature and gamma: {bench.task}, target {bench.target_name}",
        COLUMNS, records, NOTES, bars, faults,
        lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def measured(bench: Bench, plain: list[Any], own: list[Any]) -> dict[str, float]:
    """Return what was measured of a way to decode."""
    number = len(bench.sentences)
    return (
        with_estimate("accepted_of_tested", accepted_of_tested(own, number))
        | with_estimate("accepted_of_drafted", accepted_of_drafted(own, number))
        | with_estimate("tokens_a_call", tokens_a_call(own, number))
        | with_estimate("speedup", speedup(plain, own, number))
        | with_estimate("decode_speedup", speedup(plain, own, number, loop_only))
    )


def of_paper(bench: Bench, draft: str, temperature: float) -> dict[str, Any]:
    """Return the row of the paper that a row stands beside, at any gamma."""
    if draft == BIGRAM and bench.task == "translation":
        columns = ("paper_gamma", "paper_alpha", "paper_speedup")
        return {"paper_draft": BIGRAM, **dict(zip(columns, paper.BIGRAM, strict=True))}
    other, row = paper.speed(bench.task, list(bench.drafts), draft, temperature)
    if row is None:
        return {}
    return {
        "paper_draft": other,
        "paper_gamma": row.gamma,
        "paper_alpha": row.alpha,
        "paper_speedup": row.measured,
    }


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw speed-up over gamma, a line a draft, beside Theorem 3.8 at c = 0."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, temperature in zip(panels, (0.0, 1.0), strict=True):
        of = [r for r in records if r["temperature"] == temperature]
        for draft in dict.fromkeys(r["draft"] for r in of):
            own = [r for r in of if r["draft"] == draft]
            gammas = [r["gamma"] for r in own]
            line = axes.errorbar(
                gammas, [r["speedup"] for r in own], [r["speedup_se"] for r in own],
                marker="o", capsize=2, label=draft,
            )  # fmt: skip
            free = [theory.walltime_factor(r["alpha"], r["gamma"], 0.0) for r in own]
            axes.plot(gammas, free, ":", color=line[0].get_color())
        axes.set_title(f"T = {temperature:g}")
        axes.set_xlabel("gamma")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("speed-up (dotted: of a free draft)")
    return figure
