"""Laws of logits rows, by sorting.

A second formulation on purpose, independent of the selection that the operators and
`specdec_ext.reference` use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-6
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Law:
    """A row's law in float64; `greedy` is T = 0, the point mass at `argmax`."""

    logits: Tensor
    probs: Tensor
    log_probs: Tensor
    argmax: int
    greedy: bool


class Params(NamedTuple):
    """Sampling parameters of one row; by default no filter, T = 1."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def updated(self, given: Mapping[str, Any]) -> Params:
        """Replace what is given and not None."""
        return self._replace(**{k: v for k, v in given.items() if v is not None})

    def cleaned(self) -> Params:
        """Out-of-range values replaced: T = 1, no filter."""
        temperature, top_k, top_p, min_p = self
        return Params(
            temperature if 0 <= temperature < math.inf else 1.0,
            top_k,
            top_p if top_p >= 0 else 1.0,
            min_p if min_p <= 1 else 0.0,
        )


def params_of(inputs: Mapping[str, Any], prefix: str, b: int, base: Params) -> Params:
    """Parameters of request b, those not given from `base`."""
    given = {name: inputs.get(prefix + name) for name in SAMPLING}
    return base.updated({k: None if t is None else t[b].item() for k, t in given.items()})


def _top_p_cutoffs(
    logits: Tensor, weights: Tensor, top_p: float, tol: float, tokens: Sequence[int]
) -> list[float]:
    """Cutoffs that top-p may choose: the exact one first, then others within `tol` of a tie.

    Near-ties may be many. What tells them apart is whether each of `tokens` is kept, and, barely,
    how much mass is: both ways for each token, and a few over the whole range.
    """
    values, inverse = torch.unique(logits, return_inverse=True)  # ascending
    mass = torch.zeros(len(values), dtype=torch.float64).index_add_(0, inverse, weights).flip(0)
    above = (mass.cumsum(0) - mass) / mass.sum()
    values = values.flip(0)
    groups = int((mass > 0).sum())  # -inf, or filtered by top-k: not there
    exact, lowest, highest = (
        max(int((above[:groups] < bound).sum()), 1) for bound in (top_p, top_p - tol, top_p + tol)
    )
    counts = {exact, exact - 1, exact + 1}
    counts.update(round(lowest + (highest - lowest) * k / 8) for k in range(9))
    for token in tokens:
        if token < len(logits):
            place = len(values) - 1 - int(inverse[token])
            counts.update((place, place + 1))  # the most that leave it out, the least that keep it
    kept = sorted((k for k in counts if lowest <= k <= highest), key=lambda k: abs(k - exact))
    return [float(values[k - 1]) for k in kept]


def candidate_laws(
    row: Tensor, params: Params, tol: float, tokens: Sequence[int] = ()
) -> list[Law]:
    """Give the law of a row, then the laws that differ by one filter decision within `tol`.

    `tokens` are the ones whose membership matters. Empty: the row has no law (NaN, +inf, all -inf).
    """
    logits = row.detach().cpu().double()
    top = float(logits.max())
    if not bool((logits < math.inf).all()) or top == -math.inf:
        return []
    argmax = int((logits == top).nonzero()[0])
    temperature, top_k, top_p, min_p = params
    if temperature < GREEDY_TEMPERATURE:
        probs = torch.zeros_like(logits)
        probs[argmax] = 1.0
        return [Law(logits, probs, probs.log(), argmax, True)]
    exponents = (logits - top) / temperature
    weights = exponents.exp()
    lowest = -math.inf
    if 0 < top_k < len(logits):
        lowest = float(logits.sort(descending=True).values[top_k - 1])
    nucleus = [-math.inf]
    if top_p < 1:
        nucleus = _top_p_cutoffs(logits, weights * (logits >= lowest), top_p, tol, tokens)
    floor = [-math.inf]
    if min_p > 0:
        exact = top + temperature * math.log(min_p)
        slack = max(abs(exact), abs(top)) * 2.0**-22
        # Only a logit inside the slack makes the choice visible.
        visible = bool(((logits - exact).abs() <= slack).any())
        floor = [exact, exact - slack, exact + slack] if visible else [exact]
    laws: list[Law] = []
    seen: set[int] = set()
    for a, b in itertools.product(nucleus, floor):
        cutoff = min(max(lowest, a, b), top)  # the top entry and its ties always stay
        keep = logits >= cutoff
        count = int(keep.sum())
        if count in seen:
            continue
        seen.add(count)
        kept = weights * keep
        log_probs = torch.where(keep, exponents - math.log(float(kept.sum())), -math.inf)
        laws.append(Law(logits, kept / kept.sum(), log_probs, argmax, False))
    return laws


def filtered_law(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Probabilities of logits under temperature, then top-k, top-p, min-p, in float64.

    Parameters
    ----------
    logits : Tensor
        ``[..., V]``, any float dtype.
    temperature, top_k, top_p, min_p
        Python scalars. Temperature and probabilities are rounded to float32 first, since that is
        what operators are given.

    Returns
    -------
    Tensor
        ``[..., V]`` float64.

    Raises
    ------
    ValueError
        A row has no law (NaN, +inf, all -inf).

    Examples
    --------
    >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    >>> filtered_law(logits, top_k=2)
    tensor([0.6667, 0.3333, 0.0000, 0.0000], dtype=torch.float64)
    >>> filtered_law(logits, top_p=0.8)  # 0.75 lies above the ties, so both are kept
    tensor([0.5000, 0.2500, 0.1250, 0.1250], dtype=torch.float64)
    """
    return law_table(logits, Params(temperature, top_k, top_p, min_p))


def law_table(logits: Tensor, params: Params) -> Tensor:
    """Probabilities ``[..., V]`` of a table of logits under the same parameters in every row."""
    singles = torch.tensor([params.temperature, params.top_p, params.min_p]).tolist()  # float32
    params = Params(singles[0], params.top_k, singles[1], singles[2])
    rows = logits.reshape(-1, logits.shape[-1])
    found = [candidate_laws(row, params, 0.0) for row in rows]
    if not all(found):
        raise ValueError("filtered_law: a row of NaN, +inf or all -inf has no law")
    return torch.stack([laws[0].probs for laws in found]).reshape(logits.shape)


def draw_interval(weights: Tensor, token: int) -> tuple[float, float]:
    """Range of u in which an inverse CDF over these weights gives the token.

    Parameters
    ----------
    weights : Tensor
        ``[V]``, not negative, any positive total.
    token : int
        Index.

    Returns
    -------
    low, high : float
        The token is drawn for ``low <= u < high``.

    Examples
    --------
    >>> draw_interval(torch.tensor([1.0, 2.0, 1.0]), 1)
    (0.25, 0.75)
    """
    prefix = weights.double().cumsum(0)
    high = float(prefix[token])
    total = float(prefix[-1])
    return (high - float(weights[token])) / total, high / total
