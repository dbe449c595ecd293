"""What `RenewalRule` makes of a drafter's own estimates of its tokens' chances."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Estimates", "odds", "probability"]


def odds(chance: float) -> float:
    """Return p / (1 - p), at most 10^9."""
    return chance / max(1 - chance, 1e-9)


def probability(found: float) -> float:
    """Return the probability that has these odds."""
    return found / (1 + found)


class _Bias:
    """The factor by which the odds of acceptance differ from those that were estimated.

    Older trials count for less; ``prior`` more trials are thought of, in which ``first`` was the
    factor.
    """

    def __init__(self, keep: float, prior: float, first: float = 1.0) -> None:
        self._keep, self._prior, self._first = keep, prior, first
        self._accepted = self._expected = self._trials = 0.0

    def add(self, chance: float, accepted: bool) -> None:
        """Count a trial whose chance was estimated."""
        self._accepted = self._keep * self._accepted + accepted
        self._expected = self._keep * self._expected + chance
        self._trials = self._keep * self._trials + 1

    @property
    def factor(self) -> float:
        """What to multiply estimated odds by."""
        if not self._trials:
            return self._first
        mean = self._expected / self._trials
        thought = probability(odds(mean) * self._first)
        found = (self._accepted + self._prior * thought) / (self._trials + self._prior)
        return min(odds(found), 1e6) / max(odds(mean), 1e-6)


class Estimates:
    """Corrects estimated chances by what became of earlier ones, over all requests and of each.

    Estimates of about the same odds share a correction, and each request has one more: its odds of
    acceptance over those that were estimated, and corrected, for it.

    Parameters
    ----------
    memory : int
        Trials after which a trial weighs 1/e, in a bin; of a request, a quarter as many.

    Examples
    --------
    >>> estimates = Estimates()
    >>> estimates.start(1)
    >>> for n in range(200):
    ...     estimates.observe(0, [0.5], [n % 10 > 0])
    >>> [[round(chance, 2) for chance in row] for row in estimates.corrected([[0.5, 0.02]])]
    [[0.92, 0.02]]
    """

    WIDTH = 0.8  # of a bin, in nats of odds
    FURTHEST = 5  # bins from even odds to the last one
    FIRST = 0.5  # drafters mostly think too well of their tokens
    PRIOR, OWN_PRIOR = 20.0, 5.0  # trials that came out as estimated, in a bin and of a request

    def __init__(self, memory: int = 256) -> None:
        self._keep, self._keep_own = 1 - 1 / memory, 1 - 4 / memory
        self._bins = [
            _Bias(self._keep, self.PRIOR, self.FIRST) for _ in range(2 * self.FURTHEST + 1)
        ]
        self._own: list[_Bias] = []

    def start(self, batch: int) -> None:
        """Begin a generation, keeping what is known of the drafter."""
        self._own = [_Bias(self._keep_own, self.OWN_PRIOR) for _ in range(batch)]

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._own = [self._own[b] for b in indices]

    def corrected(self, chances: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return what each request's estimated chances are worth."""
        shared = [bias.factor for bias in self._bins]
        own = [bias.factor for bias in self._own]
        return [
            [probability(odds(p) * shared[self._bin(p)] * factor) for p in row]
            for row, factor in zip(chances, own, strict=True)
        ]

    def observe(self, request: int, chances: Sequence[float], accepted: Sequence[bool]) -> None:
        """Count what verification made of a request's tokens of these estimated chances."""
        own = self._own[request]
        for p, taken in zip(chances, accepted, strict=True):
            bias = self._bins[self._bin(p)]
            own.add(probability(odds(p) * bias.factor), taken)
            bias.add(p, taken)

    def _bin(self, chance: float) -> int:
        nats = math.log(max(odds(chance), 1e-9)) / self.WIDTH
        return round(min(max(nats, -self.FURTHEST), self.FURTHEST)) + self.FURTHEST
