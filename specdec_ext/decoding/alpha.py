"""How alike target and draft are where drafts were tested: samples of alpha, and who reads them.

Leviathan et al. (arXiv 2211.17192, definitions 3.1 and 3.4) call beta the probability that a token
drawn from the draft's law q is accepted by the rule ``"token"`` and alpha its mean over contexts:
beta = sum_x min(p(x), q(x)). Alpha belongs to the two models. What share of the tested tokens
another rule accepts is another number: ``"block"`` accepts more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import ops
from ..contract import Rule
from .drafters import Draft

__all__ = ["AlphaSamples", "draft_overlaps"]


def draft_overlaps(logits: Tensor, draft: Draft, filters: Mapping[str, Any]) -> Tensor | None:
    """Compute sum_x min(p(x), q(x)) at every draft token.

    Parameters
    ----------
    logits : Tensor
        ``[B, G + 1, V]``, the target's rows.
    draft : Draft
        The draft.
    filters : dict of str to Tensor
        Sampling parameters ``[B]``, as `specdec_ext.acceptance` takes them.

    Returns
    -------
    Tensor or None
        ``[B, G]`` float32, NaN at deterministic tokens; None where the draft has no rows.
    """
    if draft.logits is None:
        return None
    batch, gamma, size = draft.logits.shape
    overlaps = ops.acceptance(
        logits[:, :gamma].reshape(batch * gamma, logits.shape[2]),
        draft.logits.reshape(batch * gamma, size),
        draft_token_ids=draft.token_ids,
        **{name: value.repeat_interleave(gamma) for name, value in filters.items()},
    ).reshape(batch, gamma)
    if draft.kinds is None:
        return overlaps
    return overlaps.masked_fill(draft.kinds == 0, float("nan"))


class AlphaSamples:
    """Samples of alpha that a generation's rounds give, for its statistics and for its policy.

    A draft token that was tested gives one sample: sum_x min(p(x), q(x)) at its place if that is
    measured, or, under a rule whose test accepts with that probability, 1 if it was accepted and
    0 if not. Both have the mean alpha.

    A policy with ``reads_alpha`` is given, for each request, what the wall-time equation takes for
    alpha (theorem 3.8 there): under a rule that tests tokens one by one, whether each was accepted,
    since what counts is that rule's own probability; under a rule that does not, the samples above.

    Parameters
    ----------
    rule : Rule
        The verification rule.
    policy : GammaPolicy
        The policy.
    measured : bool
        Whether the statistics are to have samples under every rule.
    """

    def __init__(self, rule: Rule, policy: Any, *, measured: bool) -> None:
        self._rule = rule
        self._policy = policy if getattr(policy, "reads_alpha", False) else None
        #: Whether overlaps are computed, from the rows of both.
        self.measures = (measured or (self._policy is not None and not rule.stepwise)) and not (
            rule.ignores_sampling
        )
        #: Whether drafters are to pass on the rows that they draw from.
        self.needs_law = rule.reads_draft_law or self.measures
        self._round: list[list[float]] = []

    def overlaps(self, logits: Tensor, draft: Draft, filters: Mapping[str, Any]) -> Tensor | None:
        """Compute what `draft_overlaps` does, if it is to be measured."""
        return draft_overlaps(logits, draft, filters) if self.measures else None

    def add(
        self, accepted: int, rejected: bool, overlaps: list[float] | None = None
    ) -> list[float]:
        """Return the samples of the next request.

        Parameters
        ----------
        accepted : int
            Draft tokens accepted and kept.
        rejected : bool
            Whether one more was tested.
        overlaps : list of float or None
            One number a draft token, NaN where it is deterministic; None: no token has a row, or
            they are not measured.
        """
        trials = [1.0] * accepted + [0.0] * rejected
        drawn = [not math.isnan(value) for value in overlaps or ()]
        if any(drawn):
            tested = zip(overlaps or (), drawn[: len(trials)], strict=False)
            samples = [value for value, has_row in tested if has_row]
        else:
            samples = trials if self._trials_are_samples else []
        self._round.append(trials if self._rule.stepwise else samples)
        return samples

    @property
    def _trials_are_samples(self) -> bool:
        """Whether tests of tokens without a measured row accept with probability alpha.

        "token" does so by definition, and so does "greedy", whose laws are point masses. Where all
        tokens of a request are deterministic, q is a point mass at each of them, and every lossless
        rule accepts it with probability p(x).
        """
        rule = self._rule
        return rule.lossless and (self.measures or (rule.stepwise and not rule.races))

    def end_round(self) -> None:
        """Give the policy what it asks for, of all requests, and begin anew."""
        if self._policy is not None:
            self._policy.learn_alpha(self._round)
        self._round = []
