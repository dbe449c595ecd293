"""Are the betas of a text independent, as equation 1 of Leviathan et al. (arXiv 2211.17192) takes?

beta is sum min(p, q) at a place of text that the target generated. Its autocorrelation within
sentences says whether a place that is hard for the draft is followed by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext import theory
from specdec_ext.theory import Estimate
from tables.costs import total
from tables.decode import accepted_of_tested, decode_at, model_way, tokens_a_call
from tables.forced import forced_texts, rates
from tables.shared import Bench, Column, Result, with_estimate

LAGS = 8
GAMMA = 7
# Standard errors from which an autocorrelation is called one.
CLEAR = 3.0

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("lag", "lag, or place i", "d"),
    Column("autocorrelation", "autocorrelation of beta", ".3f"),
    Column("conditional", "P(i accepted, given i - 1)", ".3f"),
    Column("tested", "tested", "d"),
]

NOTES = [
    "Left: correlation of beta with beta so many places further in the same sentence, on text that "
    "the target generated at T; standard errors by the jackknife over sentences. Independent betas "
    "have 0 at every lag.",
    f"Right: while decoding with gamma {GAMMA} by rule `token`, how often draft token i was "
    "accepted where i - 1 was. Under the assumption it is alpha for all i.",
    "The paper assumes independence (section 3.1) and names it as a reason for differences between "
    "expected and measured speed (section A.3); it has no figures for it.",
]


class LagSums(NamedTuple):
    """Sums of one sentence: of squares and their number, of products at a lag and theirs."""

    squares: float
    places: int
    products: float
    pairs: int


def autocorrelation(texts: Sequence[Tensor], lag: int) -> Estimate:
    """Estimate the correlation of values so many places apart within independent texts.

    Parameters
    ----------
    texts : sequence of Tensor
        ``[T_b]`` values.
    lag : int
        From 1 up.

    Returns
    -------
    Estimate
        Mean products of deviations from the mean of all values over their mean square; the
        standard error is the jackknife's, over texts. NaN where all values are equal or no text is
        longer than the lag.
    """
    everything = torch.cat(list(texts)).double()
    mean = everything.mean()
    sums = []
    for text in texts:
        off = text.double() - mean
        products = off[:-lag] * off[lag:] if len(off) > lag else off[:0]
        sums.append(LagSums(float((off**2).sum()), len(off), float(products.sum()), len(products)))
    whole = torch.tensor(sums, dtype=torch.float64)
    columns = whole.sum(0)

    def correlation(of: Tensor) -> Tensor:
        squares, places, products, pairs = of.unbind(-1)
        return (products / pairs) / (squares / places)

    without = correlation(columns - whole)  # one text left out
    number = len(texts)
    error = ((without - without.mean()) ** 2).sum().mul((number - 1) / number).sqrt()
    return Estimate(float(correlation(columns)), float(error), number)


def make(bench: Bench) -> Result:
    """Measure autocorrelations on text, and acceptance by place while decoding."""
    records, faults, bars = [], [], []
    for temperature in (0.0, 1.0):
        texts = forced_texts(bench, temperature, tokens=bench.options.text_tokens)
        ways = {
            name: model_way(bench, model, GAMMA, temperature)
            for name, model in bench.drafts.items()
        }
        runs, wrong, lines = decode_at(bench, temperature, ways)
        faults += wrong
        bars += lines
        for name, model in bench.drafts.items():
            betas = list(rates(texts, model, temperature=temperature))
            counts, first = total(runs[name]), len(records)
            for lag in range(1, LAGS + 1):
                record = {"temperature": temperature, "draft": name, "lag": lag}
                record |= with_estimate("autocorrelation", autocorrelation(betas, lag))
                if lag <= GAMMA:
                    record["conditional"] = counts.conditional_acceptance[lag - 1]
                    record["tested"] = counts.tested[lag - 1]
                records.append(record)
            bars.append(verdict(bench, records[first], runs[name]))
    return Result(
        f"Are betas independent? {bench.task}, target {bench.target_name}",
        COLUMNS, records, [*NOTES], bars, faults, lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def verdict(bench: Bench, neighbours: dict[str, Any], own: list[Any]) -> str:
    """Say in a line whether neighbours correlate, and what that does to the tokens a call."""
    rho, error = neighbours["autocorrelation"], neighbours["autocorrelation_se"]
    number = len(bench.sentences)
    clear = abs(rho) > CLEAR * error
    measured, alpha = tokens_a_call(own, number), accepted_of_tested(own, number).mean
    return (
        f"T {neighbours['temperature']:g}, {neighbours['draft']}: neighbours "
        f"{'are correlated' if clear else 'show no correlation'}, {rho:+.3f} ({error:.3f}); "
        f"{measured.mean:.2f} ({measured.standard_error:.2f}) tokens a call, if independent "
        f"{theory.expected_tokens(alpha, GAMMA):.2f} in long texts"
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw the autocorrelations, a panel for each temperature."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, temperature in zip(panels, (0.0, 1.0), strict=True):
        of = [r for r in records if r["temperature"] == temperature]
        for draft in dict.fromkeys(r["draft"] for r in of):
            own = [r for r in of if r["draft"] == draft]
            axes.errorbar(
                [r["lag"] for r in own], [r["autocorrelation"] for r in own],
                [r["autocorrelation_se"] for r in own], marker="o", capsize=2, label=draft,
            )  # fmt: skip
        axes.axhline(0.0, color="grey", linewidth=0.8)
        axes.set(title=f"T = {temperature:g}", xlabel="places apart")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("autocorrelation of beta")
    return figure
