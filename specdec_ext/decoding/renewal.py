"""The renewal rule: draft on while the next tokens' chance to be accepted is worth their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_ext.decoding.calibration import Calibration, RoundTimes
from specdec_ext.decoding.checks import integer, number_in, shown
from specdec_ext.decoding.drafters import GoOn
from specdec_ext.decoding.policies import MOST_DRAFTED, confidence

__all__ = ["RenewalRule"]


class RenewalRule:
    """Drafts on while the next tokens' chance to be accepted is worth their time.

    With rho the tokens that the batch makes now in the time that a round takes before its draft
    grows, and c the cost of a further draft token in such times, the batch drafts token j + 1 while
    the sum over its requests of P(tokens 1 to j + 1 accepted) >= rho c: a round takes as long as
    its longest draft, whoever needs it. Where acceptance is i.i.d., rho settles where no length is
    better (theorem 8's best gamma); where it is not, drafts are long where the draft is sure of
    itself. In a batch of B a request whose own P is under rho c / B^2, its share of the time at
    the mean rate, ends its draft alone.

    P is a product: of each drafted token's acceptance rate by its confidence, from a `Calibration`
    over all requests, and of the request's mean acceptance rate lately, for the token not yet seen.
    The odds of the former are multiplied by those of the request against those of all, as if
    confidence and request were independent evidence. rho is a moving sum of tokens over one of
    times; c, and what a plain round takes, are what `RoundTimes` makes of the rounds' times.

    For every look at a token's confidence the host waits for the device. Where that costs more
    tokens than confidence is expected to gain, drafts get the length that mean rates make best, and
    `go_on` is None, but in every eighth round.

    Where no length is expected to make more of its time than a plain round does, nothing is
    drafted: plain decoding. From time to time one token is drafted in each of two rounds then, and
    more again once that pays. While drafts pay, a plain round tells now and then whether they still
    do, the more seldom the more they gain, and where all rounds were alike one of half the length
    tells what a draft token costs.

    Parameters
    ----------
    limit : int
        Largest length.
    c : float
        First guess of c.
    probe : int
        Rounds from one such trial to the next.
    memory : int
        Rounds after which what was accepted weighs 1/e.
    clock : callable
        Seconds by now.

    Attributes
    ----------
    times : RoundTimes
        Kept from one generation to the next, as is ``table``.
    table : Calibration
        See there.

    Notes
    -----
    What a request drafts depends on its batch mates. Their seeds must differ, as they do unless
    given: else coins to come have had their say. Where nothing is drafted, trials cost 2 c rounds
    in every ``probe``.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.5, asks for such a rule. That the ratio of means
    is largest where rho no longer changes is Dinkelbach's theorem ("On nonlinear fractional
    programming", Management Science 13, 1967).

    Examples
    --------
    >>> policy = RenewalRule(limit=8, c=0.3)
    >>> policy.start(1)
    >>> policy.lengths()
    [8]
    >>> policy.go_on(torch.tensor([0]), None)  # a half squared, at first, against rho c = 0.3
    tensor([False])
    """

    PRIOR = 4.0  # a request counts as many trials at the rate of all requests
    ENOUGH = 128  # evidence from which c is known well enough
    EXPLORE = 8  # rounds from one that is to teach something to the next

    def __init__(
        self,
        limit: int = 16,
        c: float = 0.1,
        *,
        probe: int = 32,
        memory: int = 32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limit = integer("RenewalRule: limit", limit, 1, MOST_DRAFTED)
        self.probe = integer("RenewalRule: probe", probe, low=3)
        c = number_in("RenewalRule: c", c, 0)
        memory = integer("RenewalRule: memory", memory, low=2)
        if not callable(clock):
            raise TypeError(f"RenewalRule: clock must be a callable, got {shown(clock)}")
        self.times, self.table = RoundTimes(c), Calibration()
        self._keep, self._clock = 1 - 1 / memory, clock
        self._everyone = _Trials(1 - 1 / (8 * memory))
        self._worth = self._price = 0.0  # of asking: tokens a round, seconds a round
        self._was_asked = True  # when it could be
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation, keeping what is known of the models."""
        self.times.part()
        self._round = 0
        self._trials = [_Trials(self._keep) for _ in range(batch)]
        self._tokens, self._time, self._seconds = [1.0] * batch, 1.0, 0.0
        self._caught_up = False  # whether the draft has run all that the target has
        self._drafted = 0  # tokens of the longest draft of the last round

    def lengths(self) -> list[int]:
        """Return each request's limit in this round; the clock starts."""
        self._begun, self._round = self._clock(), self._round + 1
        self._paths: list[float] = []  # sums over the requests of P, token by token
        self._seen: list[list[int | None] | None] = []  # bins, by token and request
        self._asked = 0.0  # seconds
        prior = self._everyone.rate(0.5, 1.0)
        self._alphas = [trials.rate(prior, self.PRIOR) for trials in self._trials]
        self._odds = list(map(_odds, self.table.rates()))
        self._factors = [_odds(alpha) / _odds(prior) for alpha in self._alphas]
        batch = len(self._alphas)
        # No less than plain decoding makes.
        rho = max(sum(self._tokens) / self._time, self.times.setup * batch)
        self._needed = rho * self.times.c
        self._share = self._needed / max(batch, 1) ** 2
        self._best = self._best_length(rho)
        self._may_ask = self._is_worth_asking()
        open_end = self._best > 0 and self._may_ask and self._was_asked
        length = self._explored(self.limit if open_end else self._best, rho)
        self._lengths = [length if alpha >= self._share else 0 for alpha in self._alphas]
        if self._round % self.probe < 2 <= self._round:
            self._lengths = [max(length, 1) for length in self._lengths]
        self._survival = [float(length > 0) for length in self._lengths]
        return list(self._lengths)

    def _is_worth_asking(self) -> bool:
        """Tell whether confidence makes more tokens than the time to look at it would."""
        if self._round % self.EXPLORE == 0 or self.table.trials < self.ENOUGH:
            return True
        return self._worth * self._seconds >= self._price * sum(self._tokens)

    def _best_length(self, rho: float) -> int:
        """Return the length that the mean rates make best."""
        gain = best = 0.0
        survival, length = [1.0] * len(self._alphas), 0
        for n in range(1, self.limit + 1):
            survival = [p * alpha for p, alpha in zip(survival, self._alphas, strict=True)]
            gain += sum(survival) - self._needed
            if gain <= best:
                break
            best, length = gain, n
        # A round that drafts takes so much more time, whatever its length.
        return length if best > rho * (1 - 1 / self.times.setup) else 0

    def _explored(self, length: int, rho: float) -> int:
        """Return the length to try where it is not known well what others would cost."""
        turn = self._round % self.EXPLORE == 0
        gain = rho / len(self._alphas)
        if self.times.plain_silent >= 2 * gain * self.probe or (turn and not self.times.plain_seen):
            return 0
        unsure = turn and self.times.evidence < self.ENOUGH
        if unsure or self.times.silent >= self.probe:
            return min(length, self._drafted // 2)
        return length

    @property
    def go_on(self) -> GoOn | None:
        """Tells which requests draft another token; None: the lengths are all that ends drafts."""
        return self._answer if self._may_ask else None

    def _answer(self, tokens: Tensor, logits: Tensor | None) -> Tensor:
        begun = self._clock()
        self._see(tokens, logits)
        self._survival = self._worthwhile(len(self._seen))
        self._asked += self._clock() - begun
        return torch.tensor([p > 0 for p in self._survival], device=tokens.device)

    def _worthwhile(self, step: int) -> list[float]:
        """Return P of the requests that draft another token, 0 of the others."""
        total, found = 0.0, []
        for p, alpha, length in zip(self._survival, self._alphas, self._lengths, strict=True):
            chance = p * alpha
            goes = step < length and chance >= self._share
            found.append(p if goes else 0.0)
            total += chance if goes else 0.0
        return found if total >= self._needed else [0.0] * len(found)

    def _see(self, tokens: Tensor, logits: Tensor | None) -> None:
        """Count a token of each request, at the rate of its confidence if it has any."""
        rates, bins = self._alphas, None
        if logits is not None:
            pairs = zip(tokens.tolist(), confidence(tokens, logits).tolist(), strict=True)
            bins = [None if token < 0 else self.table.bin(p) for token, p in pairs]
            rates = [
                0.0 if k is None else _probability(self._odds[k] * factor)
                for k, factor in zip(bins, self._factors, strict=True)
            ]
        self._survival = [p * rate for p, rate in zip(self._survival, rates, strict=True)]
        self._paths.append(sum(self._survival))
        self._seen.append(bins)

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Hear what was accepted; the clock stops."""
        seconds = self._clock() - self._begun
        steps = self._drafted = max(drafted, default=0)
        # A draft that follows a plain round begins with the tokens that it has missed.
        if self._caught_up or (steps == 0 and self._round > 1):
            self.times.observe(steps, seconds)
        self._caught_up = steps > 0
        if self._may_ask and steps > 1:
            self._was_asked = bool(self._seen)
        self._calibrate(drafted, accepted)
        self._appraise(steps)
        tested = [min(taken + 1, n) for n, taken in zip(drafted, accepted, strict=True)]
        if steps:
            self._everyone.add(sum(accepted), sum(tested))
        spent = 1 + self.times.c * steps if steps else 1 / self.times.setup
        self._time = self._keep * self._time + spent
        self._seconds = self._keep * self._seconds + seconds
        for b, taken in enumerate(accepted):
            if tested[b]:
                self._trials[b].add(taken, tested[b])
            self._tokens[b] = self._keep * self._tokens[b] + taken + 1

    def _appraise(self, steps: int) -> None:
        """Note what confidence was worth in this round, if it was what ended the draft."""
        if not self._seen or (any(self._survival) and steps < max(self._lengths)):
            return
        worth = self._gain(steps) - self._gain(self._best)
        self._worth += (1 - self._keep) * (worth - self._worth)
        self._price += (1 - self._keep) * (self._asked - self._price)

    def _gain(self, length: int) -> float:
        """Return the tokens to expect of drafts of this length, less those their time is worth."""
        gain, chance = 0.0, float(len(self._alphas))
        mean = sum(self._alphas) / len(self._alphas)
        for j in range(length):
            chance = self._paths[j] if j < len(self._paths) else chance * mean
            gain += chance - self._needed
        return gain

    def _calibrate(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the tokens that were looked at and that verification tested."""
        found = [
            (bins[b], j < taken)
            for j, bins in enumerate(self._seen)
            if bins is not None
            for b, (offered, taken) in enumerate(zip(drafted, accepted, strict=True))
            if j < min(taken + 1, offered)
        ]
        known = [(k, taken) for k, taken in found if k is not None]
        if known:
            self.table.observe(*zip(*known, strict=True))

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self.times.part()  # rounds of fewer requests take another time
        self._trials = [self._trials[b] for b in indices]
        self._tokens = [self._tokens[b] for b in indices]


def _odds(probability: float) -> float:
    return probability / max(1 - probability, 1e-9)


def _probability(odds: float) -> float:
    return odds / (1 + odds)


class _Trials:
    """Accepted and tested draft tokens, forgetting by rounds."""

    def __init__(self, keep: float) -> None:
        self._keep, self._accepted, self._tested = keep, 0.0, 0.0

    def add(self, accepted: int, tested: int) -> None:
        self._accepted = self._keep * self._accepted + accepted
        self._tested = self._keep * self._tested + tested

    def rate(self, prior: float, trials: float) -> float:
        """Return accepted / tested, with so many trials more at the prior rate."""
        return (self._accepted + trials * prior) / (self._tested + trials)
