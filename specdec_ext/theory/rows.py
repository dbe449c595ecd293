"""Acceptance of one draft token, row by row, from the logits of target and draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..contract import GREEDY_BELOW

__all__ = ["divergence", "lenient_acceptance", "rejection_sampling_acceptance"]

_FILTERS = ("temperature", "top_k", "top_p", "min_p")


def divergence(target_logits: Tensor, draft_logits: Tensor, **filters: Any) -> Tensor:
    """Compute D_LK of two laws row by row: the probability that a sampled token is rejected.

    D_LK(p, q) = sum |p - M| with M = (p + q) / 2 (definition 2) is the total variation distance,
    1 - sum min(p, q) (lemma 3): 0 for equal laws, 1 for disjoint ones (corollary 4).

    Parameters
    ----------
    target_logits, draft_logits : Tensor
        ``[R, V]`` and ``[R, Vd]``, as for `specdec_ext.acceptance`.
    **filters
        As for `specdec_ext.acceptance`.

    Returns
    -------
    Tensor
        ``[R]`` float32; NaN where a row has no law.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.2.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> p, q = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> theory.divergence(p, q)
    tensor([0.5000])
    """
    return 1.0 - ops.acceptance(target_logits, draft_logits, **filters)


def lenient_acceptance(
    target_logits: Tensor, draft_logits: Tensor, *, lenience: float, **filters: Any
) -> Tensor:
    """Compute sum min(p / l, q) row by row: how often the rule ``lenient`` accepts a draft token.

    What is emitted is not distributed as the target, but no token comes more than 1 / l times as
    often as under it. The factors of the paper follow from `walltime_factor` with this alpha.

    Parameters
    ----------
    target_logits, draft_logits : Tensor
        ``[R, V]`` and ``[R, Vd]``, as for `specdec_ext.acceptance`.
    lenience : float
        l in (0, 1]; at 1 it is `specdec_ext.acceptance`.
    **filters
        ``temperature``, ``top_k``, ``top_p``, ``min_p`` and their ``draft_`` twins, as for
        `specdec_ext.acceptance`.

    Returns
    -------
    Tensor
        ``[R]`` float64 in [0, 1]; NaN where a row has no law.

    Raises
    ------
    ValueError
        l is out of range, or the target's temperature is 0: the rule then compares unfiltered
        probabilities, and `accepted_length` with ``rule="lenient"`` is what measures it.

    Notes
    -----
    Holds two ``[R, V]`` float64 tensors at a time.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section A.5.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> p, q = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> theory.lenient_acceptance(p, q, lenience=0.5)  # min(.6, .8) + min(1.4, .2)
    tensor([0.8000], dtype=torch.float64)
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenient_acceptance: lenience must be in (0, 1], got {lenience}")
    temperature = filters.get("temperature")
    if temperature is not None and bool((torch.as_tensor(temperature) < GREEDY_BELOW).any()):
        raise ValueError(
            "lenient_acceptance: at temperature 0 the rule compares unfiltered probabilities: "
            'use accepted_length(..., rule="lenient")'
        )
    p, q = _laws("lenient_acceptance", target_logits, draft_logits, filters)
    return torch.minimum(p / lenience, q).sum(1)


def rejection_sampling_acceptance(
    target_logits: Tensor, draft_logits: Tensor, **filters: Any
) -> Tensor:
    """Compute 1 / M with M = max p / q row by row: what one step of rejection sampling accepts.

    The baseline of the paper: accept x drawn from q with probability p(x) / (M q(x)), else draw
    from p as it is. Lossless, too, and never better than sum min(p, q).

    Parameters
    ----------
    target_logits, draft_logits : Tensor
        ``[R, V]`` and ``[R, Vd]``, as for `specdec_ext.acceptance`.
    **filters
        As for `lenient_acceptance`.

    Returns
    -------
    Tensor
        ``[R]`` float64 in [0, 1]; 0 where the target has a token that the draft has not, NaN where
        a row has no law.

    Notes
    -----
    Holds two ``[R, V]`` float64 tensors at a time.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section A.2.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext import theory
    >>> p, q = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> theory.rejection_sampling_acceptance(p, q)  # M = .7 / .2
    tensor([0.2857], dtype=torch.float64)
    """
    p, q = _laws("rejection_sampling_acceptance", target_logits, draft_logits, filters)
    no_law = (p + q).sum(1).isnan()
    worst = torch.where(p > 0, q / p, 1.0).amin(1).clamp(max=1.0)
    return torch.where(no_law, torch.nan, worst)


def _laws(
    name: str, target_logits: Tensor, draft_logits: Tensor, filters: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return p and q over the target's vocabulary, ``[R, V]`` float64."""
    unknown = filters.keys() - {*_FILTERS, *(f"draft_{key}" for key in _FILTERS)}
    if unknown:
        raise TypeError(f"{name}: {', '.join(sorted(unknown))}: not taken here")
    of_draft = {key: filters.get(f"draft_{key}", filters.get(key)) for key in _FILTERS}
    p = _law(target_logits, **{key: filters.get(key) for key in _FILTERS})
    q = _law(draft_logits, **of_draft)
    vocab, draft_vocab = p.shape[1], q.shape[1]
    return p, torch.nn.functional.pad(q[:, :vocab], (0, max(vocab - draft_vocab, 0)))


def _law(logits: Tensor, **filters: Any) -> Tensor:
    """Return the probabilities of each row, ``[R, V]`` float64; NaN where a row has no law."""
    law = ops.row_law(logits, **filters)
    exponents = law.scale[:, None] * (logits.double() - law.max.double()[:, None])
    probs = torch.where(logits >= law.cutoff[:, None], (exponents - law.log_z[:, None]).exp(), 0.0)
    point = torch.zeros_like(probs).scatter_(1, law.argmax.clamp(min=0)[:, None], 1.0)
    probs = torch.where(law.scale.isinf()[:, None], point, probs)
    return torch.where(law.log_z.isnan()[:, None], torch.nan, probs)
