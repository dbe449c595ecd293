"""How much of a draft is worth the target's call whose tokens' chances the drafter estimates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .calibration import BatchTimes, TokenRate
from .estimates import Estimates
from .progress import step_gains

__all__ = ["KeptDrafts"]


class KeptDrafts:
    """Keeps of drafts with estimated chances what is worth the longer call of the target.

    Such drafts cost nothing themselves. Of all lengths n, `keep` takes the one whose expected
    tokens exceed rho (t(n) - t(0)) the most, where t(n) is the measured time of a round of n draft
    tokens and rho the tokens that the batch emits per time.

    In a batch, what is expected and rho are sums over the requests, whose tokens count as much as
    `Progress` and `step_gains` say.

    Parameters
    ----------
    c : float
        First guess of the time that a draft token takes, in begun rounds (`BatchTimes`).
    patience : int
        Rounds without a draft after which nothing more is asked of one, so that drafts are tried
        again: the longer nothing was worth it, the less it has to be.
    memory : int
        Rounds after which a round weighs 1/e in rho.
    ahead : float
        As in `Progress`.

    Attributes
    ----------
    times : RoundTimes
        What rounds of such drafts cost, by their length, of as many requests as there are.
    estimates : Estimates
        How good drafters' own estimates are.
    """

    SETUP = 1.4  # plain rounds that a begun round counts as until that is measured

    def __init__(self, c: float, patience: int, memory: int, ahead: float) -> None:
        self._batches, self.estimates = BatchTimes(c), Estimates()
        self._patience, self._rate = patience, TokenRate(memory)
        self._ahead = ahead
        self._idle = 0  # rounds since one of such a draft
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation, keeping what is known."""
        self.times = self._batches.begin(batch)
        self.estimates.start(batch)
        self._rate.start(batch)
        self.begin([1.0] * batch)

    def begin(self, weights: Sequence[float]) -> None:
        """Begin a round, in which a token of each request counts so much."""
        self._kept: list[Sequence[float]] = [()] * len(weights)
        self._weights, self._rho = weights, self._rate.rho(weights)

    def keep(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each request to keep, given estimates of their chances."""
        paths = [list(accumulate(row, mul)) for row in self.estimates.corrected(chances)]
        length = self._best(step_gains(paths, self._weights, self._ahead))
        kept = [row[:length] for row in chances]
        self._kept = [new or old for new, old in zip(kept, self._kept, strict=True)]
        return list(map(len, kept))

    def _best(self, steps: Sequence[float]) -> int:
        """Return the best draft length, given what each step is expected to add."""
        price = self._rho * max(1 - self._idle / self._patience, 0.0)
        first = 1.0 if self.times.plain_seen else self.SETUP
        gains = [
            gain - price * (first * self.times.relative(n) - 1)
            for n, gain in enumerate(accumulate(steps), start=1)
        ]
        best = max(gains, default=0.0)
        return gains.index(best) + 1 if best > 0 else 0

    def serves(self, drafted: Sequence[int]) -> list[bool]:
        """Tell which requests of a round have such a draft, given what each drafted."""
        return [bool(row) and n > 0 for row, n in zip(self._kept, drafted, strict=True)]

    def commit(self, drafted: Sequence[int], accepted: Sequence[int], plain_rounds: float) -> None:
        """Learn from a round, which took as long as so many plain rounds."""
        serves = self.serves(drafted)
        self._idle = 0 if any(serves) else self._idle + 1
        for b, row in enumerate(self._kept):
            if serves[b]:
                tested = [j < accepted[b] for j in range(min(accepted[b] + 1, drafted[b]))]
                self.estimates.observe(b, row[: len(tested)], tested)
        self._rate.add(accepted, plain_rounds)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self.times = self._batches.begin(len(indices))
        self.estimates.select(indices)
        self._rate.select(indices)
