"""How far the requests of a batch have come, and how much a token of each counts for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["Progress", "step_gains"]


class Progress:
    """Counts what the requests of a batch have emitted, and weighs their next tokens.

    A generation ends with the slowest request of its batch, and the target's call takes about as
    long for fewer requests. So what a request gains by which it is ahead of the others saves no
    time, while it makes each of them wait for longer rounds. A token of a request that is a tokens
    ahead of the slowest one therefore counts in proportion to exp(-a / ``ahead``).

    Parameters
    ----------
    ahead : float
        Tokens by which a request is ahead when its next one counts 1/e; infinite: all count alike.

    Examples
    --------
    >>> progress = Progress(3.0)
    >>> progress.start(2)
    >>> progress.weights
    [1.0, 1.0]
    >>> progress.add([3, 0])
    >>> [round(weight, 2) for weight in progress.weights]
    [0.54, 1.46]
    """

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation."""
        self._emitted = [0] * batch

    def add(self, accepted: Sequence[int]) -> None:
        """Count a round: what was accepted of each request, and a token of the target's own."""
        self._emitted = [n + taken + 1 for n, taken in zip(self._emitted, accepted, strict=True)]

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._emitted = [self._emitted[b] for b in indices]

    @property
    def weights(self) -> list[float]:
        """How much a token of each request counts, 1 in the mean."""
        least = min(self._emitted, default=0)
        shares = [math.exp((least - emitted) / self.ahead) for emitted in self._emitted]
        return [share * len(shares) / sum(shares) for share in shares]


def step_gains(
    paths: Sequence[Sequence[float]], weights: Sequence[float], ahead: float
) -> list[float]:
    """Return what each step of a batch's drafts can be expected to add.

    Where a request's first tokens are accepted, they put it ahead of the others, and its next ones
    count for less: in proportion to exp(-a / ``ahead``) again, where it is a tokens ahead of what
    the others are expected to add by then. A long copy for one request of a batch is worth
    little, then, and one for all of them as much as it is long.

    Parameters
    ----------
    paths : sequence of sequence of float
        ``paths[b][j]``: the chance that the first j + 1 draft tokens of request b are accepted.
    weights : sequence of float
        How much a token of each request counts in this round.
    ahead : float
        As in `Progress`.

    Returns
    -------
    list of float
        For each step j, the sum over the requests of their tokens' chances, each counted so.

    Examples
    --------
    >>> step_gains([[1.0] * 4], [1.0], 3.0)  # a request alone is ahead of nobody
    [1.0, 1.0, 1.0, 1.0]
    >>> [round(gain, 2) for gain in step_gains([[1.0] * 4, []], [1.0, 1.0], 3.0)]
    [1.0, 0.72, 0.51, 0.37]
    """
    expected, gains = [0.0] * len(paths), []  # of each request, the tokens that are accepted so far
    others = len(paths) - 1
    for step, chances in enumerate(zip_longest(*paths, fillvalue=0.0)):
        expected = [sofar + p for sofar, p in zip(expected, chances, strict=True)]
        total, gain = sum(expected), 0.0
        for weight, p, own in zip(weights, chances, expected, strict=True):
            if p:  # most drafts of a large batch are shorter than the longest
                lead = max(step - (total - own) / others, 0.0) if others else 0.0
                gain += weight * p * math.exp(-lead / ahead)
        gains.append(gain)
    return gains
