"""What `RenewalRule` learns: what rounds take and emit, and how often a draft token is accepted."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from statistics import median

__all__ = ["BatchTimes", "Calibration", "RoundTimes", "TokenRate"]


class RoundTimes:
    """Learns how long rounds take: seconds = s (1 + c n) for a round of n draft tokens.

    s is the time of a *begun round*: one that drafts, before its first draft token. Two rounds of
    different n, run soon after one another, determine such a line, and so one estimate of c. The
    estimate in use is the median of the last ones, each weighted by its difference in n. So neither
    a machine that is slower for a while nor a single very long round counts for much. Everything
    that grows with the draft counts as the cost of a draft token: the draft's calls, and the longer
    call of the target.

    A *plain* round, which drafts nothing, may take less than the line says for n = 0, since models
    may run one token in another way than several. ``setup`` says how much less. So a plain round
    and another one give no more than an upper bound of c, which counts until others are there.

    Parameters
    ----------
    c : float
        First guess of c. It stays among the estimates, with the weight `GUESS`.
    setup : float
        First guess of ``setup``, which counts like a single measurement.

    Attributes
    ----------
    c : float
        Time of one more draft token, in begun rounds.
    setup : float
        Time of a begun round, in plain rounds; at least 1. A weighted median, as c is.
    evidence : int
        Sum of the squared differences in n of the estimates kept. The variance of c is inversely
        proportional to it.
    silent : int
        Rounds since the last one that gave an estimate of c.
    plain_seen : bool
        Whether ``setup`` has been measured; until then it is a guess.
    plain_silent : int
        Rounds since the last plain one.

    Notes
    -----
    `relative` is nearer to what was measured than the line is: a model may well run 5 tokens in
    less time than 3. It is the median of the last rounds of that length, each in terms of the
    rounds before it, and of what the line says.

    References
    ----------
    Median of pairwise slopes: Theil (1950); Sen, "Estimates of the regression coefficient based on
    Kendall's tau", JASA 63, 1968.

    Examples
    --------
    >>> times = RoundTimes(c=0.5)
    >>> for n in range(200):
    ...     times.observe(n % 8, 0.01 + 0.001 * (n % 8) + (0.002 if n % 8 else 0))
    >>> round(times.c, 2), round(times.setup, 1)
    (0.08, 1.2)
    """

    GUESS = 12
    NEIGHBOURS = 4  # rounds back that a round is compared with
    MOST = 10.0  # no draft pays from 1 on
    ESTIMATES = 256  # of c that are kept
    KEPT = 24  # rounds that `relative` goes by, of each length
    HANDED = 4  # and of those, what `successor` begins with

    def __init__(self, c: float = 0.1, setup: float = 1.0) -> None:
        self.c, self.setup = c, setup
        self.evidence = self.silent = self.plain_silent = 0
        self.plain_seen = False
        self._costs = _LastMedian((c, self.GUESS), self.ESTIMATES)
        self._bounds = _LastMedian((self.MOST, 1), self.ESTIMATES)
        self._setups = _LastMedian((setup, 1), self.ESTIMATES // 4)
        self._rounds: deque[tuple[int, float]] = deque(maxlen=self.NEIGHBOURS)
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=self.KEPT))
        self._relative: dict[int, float] = {0: 1.0}  # as far as asked for, see `relative`

    def relative(self, n: int) -> float:
        """Return the time of a round of ``n`` draft tokens, in plain rounds."""
        if n not in self._relative:
            line = self.setup * (1 + self.c * n)
            self._relative[n] = median([line, *self._seen.get(n, ())])
        return self._relative[n]

    def observe(self, n: int, seconds: float) -> None:
        """Count a round of ``n`` draft tokens."""
        seconds = max(seconds, 1e-9)  # of a coarse clock
        line = self.c, self.setup
        if self._rounds:
            self._seen[n].append(self.measured(seconds))
        neighbours = [(m, t) for m, t in self._rounds if m != n]
        for m, other in neighbours:
            kept = self._costs if n * m else self._bounds
            gone = kept.add(_cost(n, seconds, m, other), abs(n - m))
            self.evidence += (n - m) ** 2 - gone**2
        if neighbours:
            known = self._costs.weight > 2 * self.GUESS
            bound = math.inf if known else self._bounds.value
            # Drafting never saves time.
            self.c = max(min(self._costs.value, bound), 0.0)
        begun = seconds / (1 + self.c * n)
        for m, other in neighbours:
            if n == 0:
                self._setups.add(other / (1 + self.c * m) / seconds, 1)
            elif m == 0:
                self._setups.add(begun / other, 1)
            self.plain_seen |= n * m == 0
        self.setup = max(self._setups.value, 1.0)
        if (self.c, self.setup) != line:
            self._relative = {0: 1.0}
        elif n:
            self._relative.pop(n, None)
        self.silent = 0 if neighbours else self.silent + 1
        self.plain_silent = self.plain_silent + 1 if n else 0
        self._rounds.append((n, seconds))

    @property
    def compares(self) -> bool:
        """Whether a round of the same requests has been counted, see `part`."""
        return bool(self._rounds)

    def measured(self, seconds: float) -> float:
        """Return what so many seconds are in plain rounds, where it `compares`."""
        return seconds / self._plain_seconds()

    def _plain_seconds(self) -> float:
        """Return what a plain round took lately: as it was, or by the last rounds of others."""
        plain = [seconds for m, seconds in self._rounds if not m]
        return median(plain or [seconds / self.relative(m) for m, seconds in self._rounds])

    def part(self) -> None:
        """Compare no later round with those so far: the requests are others now."""
        self._rounds.clear()

    def successor(self) -> RoundTimes:
        """Return times that begin as these are now, and learn others faster than these would."""
        made = RoundTimes(self.c, self.setup)
        made.plain_seen, made.evidence = self.plain_seen, self.evidence
        for n, seen in self._seen.items():
            made._seen[n].extend(list(seen)[-self.HANDED :])
        return made


class BatchTimes:
    """`RoundTimes` of each number of requests: more rows make a call's further tokens dearer.

    A call on four requests of one token may take as long as one on a single request, while two
    draft tokens make it a quarter longer, and cost the single request nothing. So what was learned
    of few requests misleads about many. Numbers whose three leading binary digits agree (8 and 9,
    say, or 28 to 31) share their times; one that is new begins with what is known of the nearest.

    Parameters
    ----------
    c : float
        First guess of the time that a draft token takes, in begun rounds.

    Examples
    --------
    >>> batches = BatchTimes(c=0.5)
    >>> for n in range(200):
    ...     batches.of(8).observe(n % 4, 0.01 + 0.002 * (n % 4))
    >>> round(batches.of(9).c, 2), round(batches.of(4).c, 2)
    (0.2, 0.2)
    >>> for n in range(200):
    ...     batches.of(4).observe(n % 4, 0.01)
    >>> round(batches.of(9).c, 2), round(batches.of(4).c, 2)
    (0.2, 0.0)
    """

    def __init__(self, c: float) -> None:
        self._c = c
        self._times: dict[int, RoundTimes] = {}

    def begin(self, batch: int) -> RoundTimes:
        """Return what `of` does, for rounds that are not compared with those before them."""
        times = self.of(batch)
        times.part()
        return times

    def of(self, batch: int) -> RoundTimes:
        """Return the times of rounds of so many requests; of none, a first guess."""
        if not batch:
            return RoundTimes(self._c)
        shift = max(batch.bit_length() - 3, 0)
        size = batch >> shift << shift
        if size not in self._times:
            self._times[size] = self._first(size)
        return self._times[size]

    def _first(self, size: int) -> RoundTimes:
        """Return what is believed of a size that has not come up."""
        if not self._times:
            return RoundTimes(self._c)
        nearest = min(self._times, key=lambda known: max(known, size) / min(known, size))
        return self._times[nearest].successor()


def _cost(n: int, seconds: float, m: int, other: float) -> float:
    """Return c of the line through two rounds, at most `RoundTimes.MOST`."""
    if n < m:
        n, seconds, m, other = m, other, n, seconds
    begun = n * other - m * seconds
    return min((seconds - other) / begun, RoundTimes.MOST) if begun > 0 else RoundTimes.MOST


class _LastMedian:
    """Weighted median of a first guess, which stays, and of the last values."""

    def __init__(self, guess: tuple[float, int], kept: int) -> None:
        self._ordered = [guess]
        self._last: deque[tuple[float, int]] = deque()
        self._kept = kept
        self._value: float | None = None  # as long as nothing is added

    def add(self, value: float, weight: int) -> int:
        """Add a value; return the weight of the one that is dropped for it, or 0."""
        self._value = None
        self._last.append((value, weight))
        insort(self._ordered, (value, weight))
        if len(self._last) <= self._kept:
            return 0
        oldest = self._last.popleft()
        del self._ordered[bisect_left(self._ordered, oldest)]
        return oldest[1]

    @property
    def weight(self) -> int:
        """The weight of all values and of the guess."""
        return sum(weight for _, weight in self._ordered)

    @property
    def value(self) -> float:
        """The least value that, with those under it, has half of the weight."""
        if self._value is None:
            sums = list(accumulate([weight for _, weight in self._ordered]))
            self._value = self._ordered[bisect_left(sums, sums[-1] / 2)][0]
        return self._value


class TokenRate:
    """Learns rho, the tokens that a batch emits per time: a moving sum over a moving sum.

    Time is in plain rounds.

    Parameters
    ----------
    memory : int
        Rounds after which a round weighs 1/e.

    Examples
    --------
    >>> rate = TokenRate(memory=10**9)
    >>> rate.start(1)
    >>> for _ in range(99):
    ...     rate.add([2], 1.5)
    >>> round(rate.rho([1.0]), 1)
    2.0
    """

    def __init__(self, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation, as if it had had one plain round."""
        self._tokens, self._time = [1.0] * batch, 1.0

    def tokens(self, weights: Sequence[float]) -> float:
        """Return the moving sum of the batch's tokens, which count so much, 1 in the mean."""
        total: float = sum(map(mul, weights, self._tokens))
        return total

    def rho(self, weights: Sequence[float]) -> float:
        """Return the rate; at least that of plain decoding, which is always to be had."""
        return max(self.tokens(weights) / self._time, float(len(self._tokens)))

    def add(self, accepted: Sequence[int], time: float) -> None:
        """Count a round."""
        self._time = self._keep * self._time + time
        self._tokens = [
            self._keep * tokens + taken + 1
            for tokens, taken in zip(self._tokens, accepted, strict=True)
        ]

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._tokens = [self._tokens[b] for b in indices]


class Calibration:
    """Learns how often draft tokens of a given confidence are accepted.

    *Confidence* is a token's probability in the draft's row at temperature 1. It is cut into bins
    of equal width, and each bin counts trials and acceptances, older ones with less weight.

    Parameters
    ----------
    bins : int
        Number of bins.
    memory : int
        Rounds after which an observation weighs 1/e.

    Examples
    --------
    >>> table = Calibration(bins=2)
    >>> for accepted in (True, True, True, False):
    ...     table.observe([table.bin(0.9)], [accepted])
    >>> [round(rate, 2) for rate in table.rates()]
    [0.67, 0.71]
    """

    PRIOR = 4.0  # trials at the rate of all bins that each bin begins with

    def __init__(self, bins: int = 10, memory: int = 256) -> None:
        self.bins, self._keep = bins, 1 - 1 / memory
        self._accepted, self._trials = [0.0] * bins, [0.0] * bins

    @property
    def trials(self) -> float:
        """How many trials are remembered."""
        return sum(self._trials)

    def bin(self, confidence: float) -> int:
        """Return the bin of a confidence, 0 to 1; the lowest one of NaN."""
        return min(int(confidence * self.bins), self.bins - 1) if confidence > 0 else 0

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
