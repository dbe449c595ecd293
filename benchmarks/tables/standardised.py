"""A draft that is sampled otherwise than its target: "different transformations" of section 6.

Leviathan et al., arXiv 2211.17192, always adjust both laws alike and leave the rest for later.
"""

from __future__ import annotations

from typing import Any

from tables.decode import (
    PLAIN,
    accepted_of_tested,
    by_model,
    decode_at,
    speculative,
    speedup,
    tokens_a_call,
)
from tables.forced import Texts, forced_texts, rates, remembered
from tables.shared import Bench, Column, Result, estimate_over, with_estimate

TARGETS = (1.0, 0.5, 0.0)
# Of the draft: its temperature, by the target's, then top-p at the target's own temperature.
TEMPERATURES = {
    1.0: (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25),
    0.5: (0.0, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0),
    0.0: (0.0, 0.25, 0.5, 1.0),
}
TOP_PS = (0.98, 0.95, 0.9, 0.8)
GAMMA = 5

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("draft_temperature", "T of the draft", "g"),
    Column("draft_top_p", "top-p of the draft", "g"),
    Column("alpha", "alpha", ".3f"),
    Column("gain", "over the same law", "+.3f"),
    Column("accepted_of_tested", "decoding: accepted / tested", ".3f"),
    Column("tokens_a_call", "tokens a call"),
    Column("speedup", "speed-up"),
]

NOTES = [
    "alpha = E[sum min(p, q)] on text that the target generated at T, q adjusted by the draft's "
    "own temperature and top-p. `over the same law` is the difference from q adjusted as p; its "
    "standard error is of the difference.",
    f"Decoding with gamma {GAMMA} by rule `token`, by the smallest draft, with the law that has "
    "the largest alpha and with the target's (at T = 0 also with the hottest one); "
    "what is emitted is distributed as the target's own whatever the draft's law is.",
    "The paper has no figures for this; it names it as a direction (section 6).",
]


def make(bench: Bench) -> Result:
    """Measure alpha for every law of every draft; decode with the best law of the smallest one."""
    records, faults, bars = [], [], []
    smallest = next(iter(bench.drafts))
    for temperature in TARGETS:
        texts = forced_texts(
            bench, temperature, tokens=-(-bench.options.text_tokens // len(TARGETS))
        )
        for name, model in bench.drafts.items():
            records += measured(texts, name, model, temperature)
        own = [r for r in records if r["draft"] == smallest and r["temperature"] == temperature]
        best = max(own, key=lambda r: r["alpha"])
        hottest = max(own, key=lambda r: r["draft_temperature"])
        # At T = 0 the texts must be plain decoding's: the worse the draft, the more that says.
        wanted = [best, hottest] if temperature == 0 else [best]
        tried = [r for r in own if r in wanted or is_same(r)]
        wrong, lines = decoded(bench, smallest, temperature, tried)
        faults += wrong
        bars += lines
    return Result(
        f"Drafts sampled otherwise than the target: {bench.task}, target {bench.target_name}",
        COLUMNS, records, NOTES, bars, faults, lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def is_same(record: dict[str, Any]) -> bool:
    """Tell whether the draft's law is adjusted as the target's."""
    return record["draft_temperature"] == record["temperature"] and record["draft_top_p"] == 1


def measured(texts: Texts, name: str, model: Any, temperature: float) -> list[dict[str, Any]]:
    """Measure alpha under every law of a draft."""
    laws = [(t, 1.0) for t in TEMPERATURES[temperature]]
    if temperature > 0:
        laws += [(temperature, top_p) for top_p in TOP_PS]
    rows, records = remembered(model), []
    alike = list(rates(texts, rows, temperature=temperature))
    for draft_temperature, draft_top_p in laws:
        law = {"draft_temperature": draft_temperature, "draft_top_p": draft_top_p}
        found = list(rates(texts, rows, temperature=temperature, **law))
        gains = [new - old for new, old in zip(found, alike, strict=True)]
        records.append(
            {"temperature": temperature, "draft": name, **law}
            | with_estimate("alpha", estimate_over(found))
            | with_estimate("gain", estimate_over(gains))
        )
    return records


def decoded(
    bench: Bench, draft: str, temperature: float, tried: list[dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """Decode with some laws of a draft and put into their records what was measured.

    Returns
    -------
    tuple of list
        Faults and bars, at T = 0.
    """
    ways, drafting = {}, by_model(bench.drafts[draft])
    for record in tried:
        law = {name: record[name] for name in ("draft_temperature", "draft_top_p")}
        record["way"] = f"{draft}, {law}"
        ways[record["way"]] = speculative(bench, drafting, GAMMA, temperature, **law)
    runs, faults, bars = decode_at(bench, temperature, ways)
    number = len(bench.sentences)
    for record in tried:
        own = runs[record.pop("way")]
        record |= with_estimate("accepted_of_tested", accepted_of_tested(own, number))
        record |= with_estimate("tokens_a_call", tokens_a_call(own, number))
        record |= with_estimate("speedup", speedup(runs[PLAIN], own, number))
    return faults, bars


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw the gain over the draft's temperature, a panel for each of the target's."""
    figure, panels = pyplot.subplots(1, len(TARGETS), figsize=(12, 4))
    for axes, temperature in zip(panels, TARGETS, strict=True):
        of = [r for r in records if r["temperature"] == temperature and r["draft_top_p"] == 1]
        for draft in dict.fromkeys(r["draft"] for r in of):
            own = [r for r in of if r["draft"] == draft]
            axes.errorbar(
                [r["draft_temperature"] for r in own], [r["gain"] for r in own],
                [r["gain_se"] for r in own], marker="o", capsize=2, label=draft,
            )  # fmt: skip
        axes.axhline(0.0, color="grey", linewidth=0.8)
        axes.set(title=f"target at T = {temperature:g}", xlabel="T of the draft")
    panels[0].set_ylabel("alpha, less that of a draft adjusted alike")
    panels[0].legend(fontsize=8)
    return figure
