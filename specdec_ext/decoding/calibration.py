"""What `RenewalRule` learns as it goes: what a draft token costs, and how often one is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["Calibration", "RoundTimes"]


class RoundTimes:
    """What a plain round and a further draft token cost, from the times of rounds.

    A line, seconds = plain + slope n for rounds of n draft tokens, by least squares with
    forgetting: whatever grows with the draft is in the slope, the target's longer call as well as
    the draft's. Until n has varied, c stays near its first guess, which weighs as much as
    observations of n with the sum of squares `GUESS`.

    Parameters
    ----------
    c : float
        First guess of slope / plain.
    memory : int
        Rounds after which an observation weighs 1/e.

    Examples
    --------
    >>> times = RoundTimes(c=0.5)
    >>> for n in range(200):
    ...     times.observe(n % 8, 0.01 + 0.001 * (n % 8))
    >>> round(times.c, 2)
    0.1
    """

    GUESS = 0.5
    OUTLIER = 3.0  # what takes longer than this many times the line says is something else

    def __init__(self, c: float = 0.1, memory: int = 64) -> None:
        self._guess, self._keep = c, 1 - 1 / memory
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    @property
    def spread(self) -> float:
        """Sum of squares of n about its mean."""
        return self._nn - self._n**2 / self._weight if self._weight else 0.0

    def _line(self) -> tuple[float, float]:
        """Return (plain, slope) in seconds."""
        n, seconds = self._n / self._weight, self._t / self._weight
        guess = self._guess * seconds / (1 + self._guess * n)
        crossed = self._nt - self._n * seconds
        slope = (crossed + self.GUESS * guess) / (self.spread + self.GUESS)
        slope = min(max(slope, 0.0), seconds / (n + 0.1))  # plain stays positive
        return seconds - slope * n, slope

    @property
    def c(self) -> float:
        """Cost of a further draft token in plain rounds."""
        if not self._weight:
            return self._guess
        plain, slope = self._line()
        return slope / plain

    def observe(self, n: int, seconds: float) -> None:
        """Count a round of ``n`` draft tokens."""
        seconds = max(seconds, 1e-9)  # of a coarse clock
        if self._weight > 5:
            plain, slope = self._line()
            seconds = min(seconds, self.OUTLIER * (plain + slope * n))
        old = (self._weight, self._n, self._nn, self._t, self._nt)
        new = (1.0, float(n), float(n * n), seconds, n * seconds)
        self._weight, self._n, self._nn, self._t, self._nt = (
            self._keep * a + b for a, b in zip(old, new, strict=True)
        )


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
