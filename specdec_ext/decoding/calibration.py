"""What `RenewalRule` learns as it goes: what a draft token costs, and how often one is accepted."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import Tensor

__all__ = ["Calibration", "RoundTimes"]


class RoundTimes:
    """What a further draft token costs, in plain rounds, from the times of rounds.

    Two rounds of different lengths, soon after one another, give a line, seconds = plain (1 + c n),
    and so one estimate of c. It is the median of the last estimates, each weighted by its
    difference in tokens. So neither a machine that is slower for a while nor a round that took very
    long counts for much; whatever grows with the draft does, the target's longer call as well as
    the draft's.

    Parameters
    ----------
    c : float
        First guess; one estimate among the others, of weight `GUESS`.
    estimates : int
        How many are kept.

    Attributes
    ----------
    c : float
        Cost of a further draft token in plain rounds.
    evidence : int
        Sum of the squares of all differences in tokens: c's variance goes as one over this.
    silent : int
        Rounds since the last one that gave an estimate.

    References
    ----------
    Median of pairwise slopes: Theil (1950); Sen, "Estimates of the regression coefficient based on
    Kendall's tau", JASA 63, 1968.

    Examples
    --------
    >>> times = RoundTimes(c=0.5)
    >>> for n in range(200):
    ...     times.observe(n % 8, 0.01 + 0.001 * (n % 8))
    >>> round(times.c, 2)
    0.1
    """

    GUESS = 12
    NEIGHBOURS = 4  # rounds back that a round is compared with
    MOST = 10.0  # no draft pays from 1 on

    def __init__(self, c: float = 0.1, estimates: int = 256) -> None:
        self.c = c
        self.evidence = 0
        self.silent = 0
        self._guess = (c, self.GUESS)
        self._rounds: deque[tuple[int, float]] = deque(maxlen=self.NEIGHBOURS)
        self._estimates: deque[tuple[float, int]] = deque(maxlen=estimates)

    def observe(self, n: int, seconds: float) -> None:
        """Count a round of ``n`` draft tokens."""
        seconds = max(seconds, 1e-9)  # of a coarse clock
        neighbours = [(m, t) for m, t in self._rounds if m != n]
        self._estimates += [(_cost(n, seconds, m, t), abs(n - m)) for m, t in neighbours]
        self._rounds.append((n, seconds))
        self.silent = 0 if neighbours else self.silent + 1
        self.evidence = sum(weight**2 for _, weight in self._estimates)
        # Drafting never saves time.
        self.c = max(_weighted_median([self._guess, *self._estimates]), 0.0)


def _cost(n: int, seconds: float, m: int, other: float) -> float:
    """Return c of the line through two rounds, at most `RoundTimes.MOST`."""
    if n < m:
        n, seconds, m, other = m, other, n, seconds
    plain = n * other - m * seconds
    return min((seconds - other) / plain, RoundTimes.MOST) if plain > 0 else RoundTimes.MOST


def _weighted_median(pairs: Iterable[tuple[float, int]]) -> float:
    """Return the least value that, with those under it, has half of the weight."""
    ordered = sorted(pairs)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2)][0]


class Calibration:
    """How often a draft token of given confidence is accepted: counts in equal bins, forgetting.

    Parameters
    ----------
    bins : int
        Of the confidence, the token's probability in the draft's row at temperature 1.
    memory : int
        Rounds after which an observation weighs 1/e.

    Examples
    --------
    >>> import torch
    >>> table = Calibration(bins=2)
    >>> for accepted in (True, True, True, False):
    ...     table.observe(table.bin(torch.tensor([0.9])).tolist(), [accepted])
    >>> [round(rate, 2) for rate in table.rates()]
    [0.67, 0.71]
    """

    PRIOR = 4.0  # a bin counts as many trials at the rate of all bins

    def __init__(self, bins: int = 10, memory: int = 256) -> None:
        self.bins, self._keep = bins, 1 - 1 / memory
        self._accepted, self._trials = [0.0] * bins, [0.0] * bins

    def bin(self, confidence: Tensor) -> Tensor:
        """Return the bin of each confidence, same shape, int64."""
        return (confidence * self.bins).long().clamp(max=self.bins - 1)

    def rates(self) -> list[float]:
        """Return the acceptance rate of each bin."""
        mean = (sum(self._accepted) + 1) / (sum(self._trials) + 2)
        pairs = zip(self._accepted, self._trials, strict=True)
        return [(a + self.PRIOR * mean) / (n + self.PRIOR) for a, n in pairs]

    def observe(self, bins: Sequence[int], accepted: Sequence[bool]) -> None:
        """Count the trials of one round."""
        self._accepted = [self._keep * a for a in self._accepted]
        self._trials = [self._keep * n for n in self._trials]
        for k, taken in zip(bins, accepted, strict=True):
            self._accepted[k] += taken
            self._trials[k] += 1
