"""alpha over temperature and top-p: "the sharper the adjusted distribution, the higher" it is.

Leviathan et al., arXiv 2211.17192, section 4.2, says so of T = 0 and 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import specdec_ext
from tables.forced import alpha_of, forced_texts, remembered
from tables.shared import Bench, Column, Result, with_estimate

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
TOP_PS = (1.0, 0.95, 0.9, 0.8, 0.6, 0.4)
# Of the tokens that one setting gets of those that are asked for.
SHARE = 5

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("top_p", "top-p", "g"),
    Column("draft", "draft"),
    Column("alpha", "alpha", ".3f"),
    Column("alpha_same", "alpha, places of T = 1", ".3f"),
    Column("largest", "mean largest p", ".3f"),
    Column("tokens", "tokens", "d"),
]

NOTES = [
    "alpha = E[sum min(p, q)], both laws adjusted alike: on text that the target generated with "
    "the same setting, and, so that only the laws differ, at the places of one text generated at T "
    "= 1. `mean largest p` says how sharp the target's adjusted law is on the former.",
    "The paper has T = 0 and T = 1 only, and no top-p.",
]


def settings() -> list[dict[str, float]]:
    """List temperatures without top-p, then top-p at T = 1."""
    return [{"temperature": t, "top_p": 1.0} for t in TEMPERATURES] + [
        {"temperature": 1.0, "top_p": top_p} for top_p in TOP_PS if top_p < 1
    ]


def largest(target_logits: Tensor, draft_logits: Tensor, **filters: float) -> Tensor:
    """Return the largest probability of the target's law, ``[R]`` float64."""
    best = torch.full_like(target_logits, -torch.inf)
    best.scatter_(1, target_logits.argmax(1, keepdim=True), 0.0)
    # A draft that always proposes the likeliest token is accepted with that token's probability.
    return specdec_ext.acceptance(target_logits, best, **filters, draft_temperature=0.0)


def make(bench: Bench) -> Result:
    """Measure every draft under every setting."""
    tokens = -(-bench.options.text_tokens // SHARE)
    same = forced_texts(bench, 1.0, tokens=tokens)
    at_1 = {name: remembered(model) for name, model in bench.drafts.items()}
    records = []
    for filters in settings():
        texts = forced_texts(bench, tokens=tokens, **filters)
        sharp = alpha_of(texts, bench.target, largest, **filters)
        for name, model in bench.drafts.items():
            records.append(
                {**filters, "draft": name, "tokens": texts.total, "largest": sharp.mean}
                | with_estimate("alpha", alpha_of(texts, model, **filters))
                | with_estimate("alpha_same", alpha_of(same, at_1[name], **filters))
            )
    bars = [remark(records, name) for name in bench.drafts]
    return Result(
        f"alpha over temperature and top-p: {bench.task}, target {bench.target_name}",
        COLUMNS,
        records,
        NOTES,
        bars,
        draw=lambda pyplot: draw(pyplot, records),
    )


def remark(records: list[dict[str, Any]], draft: str) -> str:
    """Say in a line whether alpha is higher at T = 0 than at T = 1, as in the paper."""
    cold, warm = (
        next(r for r in records if (r["draft"], r["temperature"], r["top_p"]) == (draft, t, 1.0))
        for t in (0.0, 1.0)
    )
    difference = cold["alpha"] - warm["alpha"]
    error = math.hypot(cold["alpha_se"], warm["alpha_se"])
    found = "the same within two standard errors"
    if abs(difference) > 2 * error:
        found = "higher, as in the paper" if difference > 0 else "lower, unlike in the paper"
    return f"{draft}: alpha at T = 0 less that at T = 1 is {difference:+.3f} ({error:.3f}): {found}"


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw alpha over temperature and over top-p."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, key, other in zip(
        panels, ("temperature", "top_p"), ("top_p", "temperature"), strict=True
    ):
        of = [r for r in records if r[other] == 1.0]
        for draft in dict.fromkeys(r["draft"] for r in of):
            own = sorted((r for r in of if r["draft"] == draft), key=lambda r: r[key])
            x = [r[key] for r in own]
            line = axes.errorbar(
                x, [r["alpha"] for r in own], [r["alpha_se"] for r in own], marker="o", capsize=2,
                label=draft,
            )  # fmt: skip
            axes.plot(x, [r["alpha_same"] for r in own], ":", color=line[0].get_color())
        axes.set_xlabel("T" if key == "temperature" else "top-p at T = 1")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("alpha (dotted: places of T = 1)")
    return figure
