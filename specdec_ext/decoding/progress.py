"""How far the requests of a batch have come, and how much a token of each counts for that."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Progress"]


class Progress:
    """Counts what the requests of a batch have emitted, and weighs their next tokens.

    A generation ends with the slowest request of its batch, and the target's call takes about as
    long for fewer requests. So what a request gains by which it is ahead of the others saves no
    time, while it makes each of them wait for longer rounds. A token of a request that is a tokens
    ahead of the slowest one therefore counts in proportion to exp(-a / `AHEAD`).

    Examples
    --------
    >>> progress = Progress()
    >>> progress.start(2)
    >>> progress.weights
    [1.0, 1.0]
    >>> progress.add([3, 0])
    >>> [round(weight, 2) for weight in progress.weights]
    [0.54, 1.46]
    """

    AHEAD = 3.0  # tokens

    def __init__(self) -> None:
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
        shares = [math.exp((least - emitted) / self.AHEAD) for emitted in self._emitted]
        return [share * len(shares) / sum(shares) for share in shares]
