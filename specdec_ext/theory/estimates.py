"""Means over contexts and drafts, with standard errors, from streams of saved logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..contract import rule_names

__all__ = ["Estimate", "acceptance_rate", "accepted_length", "expected_accepted", "ratio"]

_FATAL = ops.STATUS_NO_TARGET_LAW | ops.STATUS_PARAMETER_OUT_OF_RANGE


class Estimate(NamedTuple):
    """A mean over a stream.

    Attributes
    ----------
    mean : float
        NaN of an empty stream.
    standard_error : float
        Of the mean, over independent units (see the function); NaN of fewer than two.
    units : int
        How many.
    """

    mean: float
    standard_error: float
    units: int


class _Moments:
    """Sums over a stream that give a `ratio`."""

    def __init__(self) -> None:
        self.units = 0
        self.sums, self.sizes = 0.0, 0.0
        self.squares, self.crossed, self.squared_sizes = 0.0, 0.0, 0.0

    def add(self, sums: Tensor, sizes: Tensor) -> None:
        sums, sizes = sums.double(), sizes.double()
        self.units += len(sums)
        self.sums += float(sums.sum())
        self.sizes += float(sizes.sum())
        self.squares += float((sums * sums).sum())
        self.crossed += float((sums * sizes).sum())
        self.squared_sizes += float((sizes * sizes).sum())

    def estimate(self) -> Estimate:
        if self.sizes == 0:
            return Estimate(math.nan, math.nan, self.units)
        mean = self.sums / self.sizes
        if self.units < 2:
            return Estimate(mean, math.nan, self.units)
        spread = self.squares - 2 * mean * self.crossed + mean * mean * self.squared_sizes
        variance = max(spread, 0.0) * self.units / (self.units - 1)
        return Estimate(mean, math.sqrt(variance) / self.sizes, self.units)


def ratio(sums: Tensor, sizes: Tensor) -> Estimate:
    """Estimate a mean of observations that come in independent units of unequal size.

    The mean is sum s / sum n and its variance that of the residuals s - mean n (Cochran, "Sampling
    techniques", 3rd edition, section 6.4); where all n are 1, the usual variance of a mean.

    Parameters
    ----------
    sums : Tensor
        ``[B]``, the sum of each unit's observations: the tokens of a request, say.
    sizes : Tensor
        ``[B]``, how many observations: its target calls.

    Returns
    -------
    Estimate

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> theory.ratio(torch.tensor([6.0, 2.0]), torch.tensor([2.0, 2.0]))
    Estimate(mean=2.0, standard_error=1.0, units=2)
    """
    moments = _Moments()
    moments.add(sums, sizes)
    return moments.estimate()


def acceptance_rate(
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    rate: Callable[..., Tensor] = ops.acceptance,
    **filters: Any,
) -> Estimate:
    """Estimate alpha = E[sum min(p, q)], the mean acceptance rate of a draft (corollary 6).

    Convention: the mean over contexts, each counted once. What a loop counts, accepted / (accepted
    + rejected), weighs contexts by how often a draft reaches them.

    Parameters
    ----------
    batches : iterable of (Tensor, Tensor)
        Target and draft logits of the same contexts: ``[R, V]`` and ``[R, Vd]``, every row a unit;
        or ``[B, T, V]`` and ``[B, T, Vd]``, every sequence a unit: its T rows are no independent
        observations, and the standard error knows.
    rate : callable
        What is averaged: called as `specdec_ext.acceptance`, and returning ``[R]``. Under lenience:
        ``functools.partial(theory.lenient_acceptance, lenience=0.5)``.
    **filters
        Numbers, as for `specdec_ext.acceptance`.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        A row has no law, or the shapes of a batch do not match.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.2, theorem 5 and corollary 6.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> p = torch.tensor([[0.3, 0.7], [0.5, 0.5]]).log()
    >>> q = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    >>> theory.acceptance_rate([(p, q)])  # 0.5 and 1
    Estimate(mean=0.75, standard_error=0.25, units=2)
    """
    moments = _Moments()
    for number, (target, draft) in enumerate(batches):
        if target.dim() not in (2, 3) or target.shape[:-1] != draft.shape[:-1]:
            raise ValueError(
                "acceptance_rate: a batch must be [R, V] and [R, Vd], or [B, T, V] and "
                f"[B, T, Vd], got {list(target.shape)} and {list(draft.shape)} (batch {number})"
            )
        units, rows = len(target), target.shape[1] if target.dim() == 3 else 1
        beta = rate(
            target.reshape(-1, target.shape[-1]), draft.reshape(-1, draft.shape[-1]), **filters
        )
        if bool(beta.isnan().any()):
            raise ValueError(
                f"acceptance_rate: a row of batch {number} has no law, or a filter is out of range"
            )
        moments.add(beta.double().reshape(units, rows).sum(1), torch.full((units,), rows))
    return moments.estimate()


def expected_accepted(accept_probs: Tensor, rule: str = "block") -> Tensor:
    """Compute how many tokens of each chain are accepted on average over the coins.

    With h_i the ``accept_probs``, P(at least i accepted) is h_1 ... h_i under a rule that stops at
    its first failure, and 1 - (1 - h_i) ... (1 - h_G) under ``block``, where the last success wins;
    the expectation is the sum over i.

    Parameters
    ----------
    accept_probs : Tensor
        ``[B, G]`` as `specdec_ext.verify` returns them, under ``full_accept_probs=True`` or
        ``rule="block"``. NaN, after the end of a draft, counts as 0.
    rule : str
        The rule that they came from.

    Returns
    -------
    Tensor
        ``[B]`` float64.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, algorithm 1. Sun et al., arXiv 2403.10444, algorithm 2.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> h = torch.tensor([[0.5, 0.5], [1.0, 0.25]])
    >>> theory.expected_accepted(h, "token"), theory.expected_accepted(h, "block")
    (tensor([0.7500, 1.2500], dtype=torch.float64), tensor([1.2500, 1.2500], dtype=torch.float64))
    """
    h = accept_probs.double().nan_to_num(nan=0.0)
    if rule not in rule_names(chains=True, stepwise=False):
        return h.cumprod(1).sum(1)
    none_from = (1.0 - h).flip(1).cumprod(1)  # the last factor first; the sum has no order
    return (1.0 - none_from).sum(1)


def accepted_length(
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], rule: str = "block", **options: Any
) -> Estimate:
    """Estimate the expected number of accepted draft tokens a call: E[tokens a call] - 1.

    Convention: the token that every call adds at its end is not counted here, and it is in
    `expected_tokens`.

    Every chain's coins are integrated out (`expected_accepted`), so that only the drafts
    themselves are a sample. Nothing is assumed of the acceptance rates along a chain: where they
    are i.i.d. with mean alpha, token verification gives alpha (1 - alpha^G) / (1 - alpha),
    equation 1 minus 1.

    Parameters
    ----------
    batches : iterable of (Tensor, Tensor, Tensor or None)
        Target logits ``[B, G+1, V]``, draft tokens ``[B, G]`` and draft logits ``[B, G, Vd]`` as
        for `specdec_ext.verify`. Every chain is a unit. For an unbiased estimate the tokens must
        have been drawn from the draft's law under the same filters.
    rule : str
        As in `specdec_ext.verify`; "coupled" has no coins to integrate out, and is refused.
    **options
        Filters and the rules' own parameters, as for `specdec_ext.verify`.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        A target row has no law, a parameter is out of range, or what `specdec_ext.verify` raises.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.1. Sun et al., arXiv 2403.10444, section 3.

    Examples
    --------
    The example of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens, all four chains
    with their frequencies. Token verification accepts 10/9, block verification 11/9.

    >>> import torch
    >>> from specdec_ext import theory
    >>> p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    >>> drafts = torch.tensor([[0, 0]] * 4 + [[0, 1]] * 2 + [[1, 0]] * 2 + [[1, 1]])
    >>> batch = (p.expand(9, 3, 2), drafts, q.expand(9, 2, 2))
    >>> [round(theory.accepted_length([batch], rule).mean * 9, 3) for rule in ("token", "block")]
    [10.0, 11.0]
    """
    if rule in rule_names(races=True):
        raise ValueError(f"accepted_length: rule {rule!r} is decided by its noise, not by coins")
    moments = _Moments()
    for number, (target, tokens, draft) in enumerate(batches):
        # No accept_probs depends on the coins; at 0 every row that can be reached is reached.
        coins = torch.zeros(*tokens.shape[:1], tokens.shape[-1] + 1, dtype=torch.float64)
        found = ops.verify(
            target,
            tokens,
            draft,
            uniforms=coins.to(target.device),
            rule=rule,
            full_accept_probs=True,
            **options,
        )
        if bool((found.status & _FATAL).any()):
            raise ValueError(
                f"accepted_length: a target row of batch {number} has no law, or a parameter is "
                "out of range"
            )
        moments.add(expected_accepted(found.accept_probs, rule), torch.ones(len(tokens)))
    return moments.estimate()
