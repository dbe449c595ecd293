"""Thresholds of draft-side stops that follow how much of each request's drafts is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import number_in

__all__ = ["MovingThreshold"]


class MovingThreshold:
    """A threshold that rises while too few draft tokens are accepted, and falls while enough are.

    Every request has one of its own. After a round in which the request drafted n tokens, of which
    k were accepted, its rate r and its threshold t become ::

        r = beta1 r + (1 - beta1) k / n
        t = beta2 t + (1 - beta2) (t + epsilon where r < alpha, else t - epsilon)

    with r = 0 at first. (k / n is the authors' measure; it counts tokens after a rejection, too.)
    As in the authors' code, t does not fall after a draft of the largest length, which no lower
    threshold could make longer. Here t is kept in [0, 1], the range of what it is compared with. A
    request that drafted nothing keeps r and t.

    The threshold depends on earlier rounds of its own request only. So the output keeps the
    target's law, and what a request emits does not depend on the other requests of its batch.

    Parameters
    ----------
    start_at : float
        First threshold; 0.8 in the authors' code.
    alpha : float
        The acceptance rate aimed at; 0.9 there.
    beta1, beta2 : float
        How much of the rate and of the threshold is kept; 0.5 and 0.9 there.
    epsilon : float
        Step; 0.01 there. A round moves the threshold by (1 - beta2) epsilon.

    References
    ----------
    Zhang et al., "Draft & Verify: lossless large language model acceleration via self-speculative
    decoding", arXiv 2309.08168, "adaptive draft-exiting mechanism", with the confidence that
    `ConfidenceStop` tests. All defaults are those of ``decoding.py`` in the authors' repository
    (dilab-zju/self-speculative-decoding). AdaEDL (arXiv 2410.18351), whose bound is `EntropyBound`,
    moves its threshold with the acceptance rate as well.

    Examples
    --------
    >>> threshold = MovingThreshold(0.8)
    >>> threshold.start(2)
    >>> threshold.commit([5, 5], [5, 0], limit=8)  # rates 0.5 and 0, both under 0.9
    >>> [round(t, 4) for t in threshold.values]
    [0.801, 0.801]
    """

    def __init__(
        self,
        start_at: float = 0.8,
        *,
        alpha: float = 0.9,
        beta1: float = 0.5,
        beta2: float = 0.9,
        epsilon: float = 0.01,
    ) -> None:
        self.start_at = number_in("MovingThreshold: start_at", start_at, 0, 1)
        self.alpha = number_in("MovingThreshold: alpha", alpha, 0, 1)
        self.beta1 = number_in("MovingThreshold: beta1", beta1, 0, 1)
        self.beta2 = number_in("MovingThreshold: beta2", beta2, 0, 1)
        self.epsilon = number_in("MovingThreshold: epsilon", epsilon, 0, 1)
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation of so many requests, each at the first threshold."""
        self.values = [self.start_at] * batch
        self._rates = [0.0] * batch
        self._tensor: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the requests' thresholds, ``[B]`` float32; copied there once a round."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.values, dtype=torch.float32, device=device)
        return self._tensor

    def commit(self, drafted: Sequence[int], accepted: Sequence[int], limit: int) -> None:
        """Take in how many of at most ``limit`` tokens each request drafted, and had accepted."""
        self._tensor = None
        for b, (offered, taken) in enumerate(zip(drafted, accepted, strict=True)):
            if not offered:
                continue
            rate = self._rates[b] = self.beta1 * self._rates[b] + (1 - self.beta1) * taken / offered
            step = self.epsilon if rate < self.alpha else 0.0 if offered == limit else -self.epsilon
            moved = self.values[b] + (1 - self.beta2) * step
            self.values[b] = min(max(moved, 0.0), 1.0)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self.values = [self.values[b] for b in indices]
        self._rates = [self._rates[b] for b in indices]
        self._tensor = None
