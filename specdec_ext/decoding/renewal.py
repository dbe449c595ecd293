"""A policy that drafts while the tokens it can expect are worth the time that they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from operator import mul

import torch
from torch import Tensor

from .calibration import BatchTimes, Calibration, TokenRate
from .checks import integer, number_in, shown
from .drafters import GoOn
from .estimates import odds, probability
from .kept_drafts import KeptDrafts
from .policies import MOST_DRAFTED, confidence
from .progress import Progress

__all__ = ["RenewalRule"]


class RenewalRule:
    """Drafts another token while the tokens it can be expected to add are worth the time it takes.

    The unit of time is a *begun round*: what a round takes that drafts, before its first draft
    token (the target's call, verification and the loop). Three quantities decide:

    - c, the time that one more draft token takes, in that unit;
    - rho, the tokens that the whole batch emits per unit of time, as measured lately;
    - P(b, j), the estimated probability that draft tokens 1 to j of request b are all accepted.

    Draft token j + 1 adds sum over b of P(b, j + 1) expected tokens, and takes a time c in which
    the batch could have emitted rho c. So the batch drafts it while that sum is at least rho c. The
    requests decide together, since a round lasts as long as its longest draft, whichever request
    needs it; but a request stops alone where its own P is below (rho / B) (c / B): the mean rate of
    one request in a batch of B, times its share of the time.

    Where acceptance is independent and equally likely from token to token, rho settles where no
    other length would be better: at the best gamma of theorem 8. Where it is not, drafts are long
    where the draft model is sure of itself, and short elsewhere.

    **Estimates.** P is a product over the draft's tokens. A token that is drafted counts with the
    acceptance rate of tokens of its confidence (its probability in the draft's row), which a
    `Calibration` learns over all requests; the odds of that rate are multiplied by the request's
    own odds of acceptance over those of all requests, as if confidence and request were independent
    evidence. The token that is not drafted yet counts with the request's mean acceptance rate. rho
    is a moving sum of tokens over a moving sum of times. c, how much shorter a round without a
    draft is, and what was measured of each length come from `RoundTimes`, one for each number of
    requests (`BatchTimes`).

    **Drafters that estimate.** One that runs no model and tells the chances of its tokens
    (``Draft.chances``: a `SuffixDrafter`, say) always proposes what it has, and `keep` leaves out
    what is not worth the longer call of the target: see `KeptDrafts`. The chances are corrected by
    what became of earlier ones (`Estimates`). In a `StackedDrafter` such a drafter may stand before
    a model. Each of the two has its own costs and its own rho then, and for the model, rounds of
    copies do not count: what it may draft where there is nothing to copy does not depend on how
    fast copies are.

    **Batches.** A generation ends with the slowest request of its batch. So tokens of a request
    that is ahead of the others count for less (``ahead``), in rho and in the sum over b: see
    `Progress`. The later tokens of a long copy count for less likewise, since the first ones put
    their request ahead: see `step_gains`.

    **What looking costs.** To read a token's confidence the host waits for the device. Where that
    takes more than it is expected to gain, drafts get the length that the mean rates make best, and
    `go_on` is None; every eighth round looks all the same, to keep knowing.

    **Plain decoding.** Where no length is expected to emit more per time than a round without a
    draft, nothing is drafted but in trials, and drafting begins again once that pays. Trials are
    paid for: what rounds that draft have lost against plain ones, by the tokens that they emitted
    and the time that they took, is at most `CREDIT` plain rounds at first, and a share 1 / (4
    ``probe``) of all rounds later. So the first drafts are short, and lengthen as they are
    accepted; the second round of a rule that knows nothing drafts nothing, to see what that takes.
    A text's first draft runs the prompt as well and may lose more, which is known only then;
    further trials wait until that is paid for. While drafts pay, a round without one is run now and
    then to see whether they still do, the more seldom the more they gain; and where all rounds had
    the same length, one of half of it shows what a draft token costs.

    Parameters
    ----------
    limit : int
        Largest draft length.
    c : float
        First guess of the time that a draft token takes, in begun rounds.
    probe : int
        While nothing is drafted: trials of drafting lose at most one round in 4 ``probe``; at
        least 3.
    memory : int
        Rounds after which a round's observations weigh 1/e, at least 2.
    ahead : float
        Tokens by which a request is ahead of the slowest one of its batch when its next one counts
        1/e as much. `math.inf` counts all alike: for whoever wants the most tokens per time from
        all requests together, and not the batch to end soon. At least 0.1.
    clock : callable
        Returns seconds from any origin; called at both ends of a round and around each look.

    Attributes
    ----------
    times : RoundTimes
        What rounds of as many requests as there are cost, by the length of their drafts; of
        drafters that estimate no chances.
    table : Calibration
        How often draft tokens of a confidence are accepted.
    kept_drafts : KeptDrafts
        What is known of drafters that estimate their tokens' chances. All three are kept from one
        generation to the next: keep the rule, too.

    Notes
    -----
    What a request drafts depends on the other requests of its batch. So their seeds must differ (as
    they do unless the caller gives equal ones): with equal seeds another request's acceptance would
    tell this one's draft length of coins that it has not flipped yet.

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
    [2]
    >>> policy.go_on(torch.tensor([0]), None)  # P(0, 2) = 0.5 * 0.5 at first; rho c = 0.3
    tensor([False])
    >>> policy.keep([[0.9, 0.9, 0.1]])  # of a drafter that estimates
    [2]
    """

    PRIOR = 4.0  # trials at the rate of all requests that a request's own rate begins with
    ENOUGH = 128  # evidence from which c counts as known
    EXPLORE = 8  # every so many rounds one is run differently, to learn from it
    KNOWN = 8  # tested draft tokens from which drafts may have any length
    FIRST = 0.5, 4.0  # acceptance rate that is believed in at first, and trials that count so
    LEAST = 0.01  # tokens that a further draft token must be expected to add, whatever it costs
    CREDIT = 1.0  # plain rounds' time that trials may lose at first
    DEBT = 16.0  # that is remembered at most, so that no hitch of a machine ends trials for long

    def __init__(
        self,
        limit: int = 16,
        c: float = 0.1,
        *,
        probe: int = 32,
        memory: int = 32,
        ahead: float = 3.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limit = integer("RenewalRule: limit", limit, 1, MOST_DRAFTED)
        self.probe = integer("RenewalRule: probe", probe, low=3)
        c = number_in("RenewalRule: c", c, 0)
        memory = integer("RenewalRule: memory", memory, low=2)
        ahead = number_in("RenewalRule: ahead", ahead, 0.1, math.inf)
        if not callable(clock):
            raise TypeError(f"RenewalRule: clock must be a callable, got {shown(clock)}")
        self._batches, self.table = BatchTimes(c), Calibration()
        self.kept_drafts = KeptDrafts(c, 8 * self.probe, memory, ahead)
        self._keep, self._clock = 1 - 1 / memory, clock
        self._progress = Progress(ahead)
        self._rate = TokenRate(memory)  # over rounds without estimated drafts
        self._everyone = _Trials(1 - 1 / (8 * memory))
        # Of looking at confidence, a round: tokens that it gains, and seconds that it takes.
        self._worth = self._price = 0.0
        self._was_asked = True  # whether the drafter called go_on when it last had the chance
        self._credit, self._tries = self.CREDIT, True  # plain rounds that trials may lose
        self._knows_plain = self._knows_cost = False  # whether a round without, with one was timed
        self._cap = min(2, self.limit)  # longest draft while nothing is known
        self.start(0)

    def start(self, batch: int) -> None:
        """Begin a generation, keeping what is known of the models."""
        self.times = self._batches.begin(batch)
        self.kept_drafts.start(batch)
        self._progress.start(batch)
        self._round = 0
        self._trials = [_Trials(self._keep) for _ in range(batch)]
        self._rate.start(batch)
        self._seconds = 0.0  # moving sum over the same rounds
        self._since = 0  # rounds since the last one that drafted without estimates
        self._untimed = False  # whether the last round did, and its time said nothing
        self._drafted = 0  # tokens of its longest draft

    def lengths(self) -> list[int]:
        """Return the most that each request may draft in this round; the clock starts."""
        self._begun, self._round = self._clock(), self._round + 1
        self._paths: list[float] = []  # weighed sums of P(b, j), for j = 1, 2, ...
        self._seen: list[list[int | None] | None] = []  # bin of confidence, by token and request
        self._asked = 0.0  # seconds that go_on took in this round
        self._weights = self._progress.weights
        self.kept_drafts.begin(self._weights)
        rho = self._look_ahead()
        self._best = self._best_length(rho)
        self._may_ask = self._is_worth_asking()
        length = self._length(rho)
        self._lengths = [length if alpha >= self._share else 0 for alpha in self._alphas]
        if not self._best and self._knows_plain and self._is_trial():
            trial = self._trial_length()
            self._lengths = [max(length, trial) for length in self._lengths]
        self._survival = [float(length > 0) for length in self._lengths]
        return list(self._lengths)

    def _look_ahead(self) -> float:
        """Work out what is expected of this round's tokens, and of time.

        Returns rho, in tokens per plain round.
        """
        prior = self._everyone.rate(*self.FIRST)
        self._alphas = [trials.rate(prior, self.PRIOR) for trials in self._trials]
        self._odds = list(map(odds, self.table.rates()))
        self._factors = [odds(alpha) / odds(prior) for alpha in self._alphas]
        batch = len(self._alphas)
        # At least the rate of plain decoding, which is always to be had.
        rho = self._rate.rho(self._weights)
        self._needed = rho * self.times.setup * self.times.c  # what the sum of P must reach
        self._share = self._needed / max(batch, 1) ** 2  # what a request's own P must reach
        return rho

    def _length(self, rho: float) -> int:
        """Return the most that a request may draft that is worth its share of the time."""
        open_end = self._best > 0 and self._may_ask and self._was_asked
        length = self._explored(self.limit if open_end else self._best, rho)
        return length if self._knows_acceptance else min(length, self._cap)

    def _is_worth_asking(self) -> bool:
        """Tell whether looking at confidence gains more tokens than its time is worth."""
        if self._round % self.EXPLORE == 0 or self.table.trials < self.ENOUGH:
            return True
        tokens = self._rate.tokens(self._weights)
        return self._worth * self._seconds >= self._price * tokens

    def _best_length(self, rho: float) -> int:
        """Return the draft length that is best by the mean acceptance rates; 0: plain decoding."""
        gain = best = 0.0
        survival, length = [*self._weights], 0
        for n in range(1, self.limit + 1):
            survival = [p * alpha for p, alpha in zip(survival, self._alphas, strict=True)]
            if sum(survival) < self.LEAST:
                break
            gain += sum(survival)
            worth = gain - rho * (self.times.relative(n) - 1)
            if worth > best:
                best, length = worth, n
        return length

    def _explored(self, length: int, rho: float) -> int:
        """Return ``length``, or another one where too little is known of what others cost."""
        turn = self._round % self.EXPLORE == 0
        gain = rho * self.times.setup / len(self._alphas)
        if self.times.plain_silent >= 2 * gain * self.probe:
            return 0
        if self._round > 1 and not self._knows_plain:
            return 0
        unsure = turn and self.times.evidence < self.ENOUGH
        # Behind a round without a draft any length is another one.
        if self._drafted and (unsure or self.times.silent >= self.probe):
            return min(length, self._drafted // 2)
        return length

    @property
    def go_on(self) -> GoOn | None:
        """Tells which requests draft another token; None: every draft has its full length."""
        return self._answer if self._may_ask else None

    def _answer(self, tokens: Tensor, logits: Tensor | None) -> Tensor:
        begun = self._clock()
        self._see(tokens, logits)
        self._survival = self._worthwhile(len(self._seen))
        self._asked += self._clock() - begun
        return torch.tensor([p > 0 for p in self._survival], device=tokens.device)

    def _worthwhile(self, step: int) -> list[float]:
        """Return P(b, step) of the requests that draft another token, 0 of the others."""
        total, found = 0.0, []
        rows = zip(self._survival, self._alphas, self._lengths, self._weights, strict=True)
        for p, alpha, length, weight in rows:
            chance = p * alpha
            goes = step < length and chance >= self._share
            found.append(p if goes else 0.0)
            total += weight * chance if goes else 0.0
        return found if total >= self._needed else [0.0] * len(found)

    def _see(self, tokens: Tensor, logits: Tensor | None) -> None:
        """Multiply each P by the rate at which a token of this confidence is accepted.

        Without rows there is no confidence, and the request's mean rate counts.
        """
        rates, bins = self._alphas, None
        if logits is not None:
            pairs = zip(tokens.tolist(), confidence(tokens, logits).tolist(), strict=True)
            bins = [None if token < 0 else self.table.bin(p) for token, p in pairs]
            rates = [
                0.0 if k is None else probability(self._odds[k] * factor)
                for k, factor in zip(bins, self._factors, strict=True)
            ]
        self._survival = [p * rate for p, rate in zip(self._survival, rates, strict=True)]
        self._paths.append(sum(map(mul, self._weights, self._survival)))
        self._seen.append(bins)

    def keep(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each request's draft are worth the time of the target's call.

        Parameters
        ----------
        chances : sequence of sequence of float
            What the drafter estimates that each token's chance is to be accepted, given that those
            before it are. They are corrected by what became of earlier estimates.
        """
        return self.kept_drafts.keep(chances)

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from how many tokens were drafted and accepted; the clock stops."""
        seconds = self._clock() - self._begun
        serves = self.kept_drafts.serves(drafted)
        # What drafters proposed that estimate no chances, and what was accepted of it.
        own = [0 if served else n for n, served in zip(drafted, serves, strict=True)]
        taken = [0 if served else n for n, served in zip(accepted, serves, strict=True)]
        steps, longest = max(own, default=0), max(drafted, default=0)
        self._untimed = False
        if not any(serves):
            self._time_own(steps, seconds)
        elif not steps and self._round > 1:
            self.kept_drafts.times.observe(longest, seconds)
        relative = (self.times if steps else self.kept_drafts.times).relative(longest)
        self.kept_drafts.commit(drafted, accepted, relative)
        if steps or not any(serves):
            self._drafted = steps
        if self._may_ask and steps > 1:
            self._was_asked = bool(self._seen)
        self._account(self._spent(steps, seconds), own, taken)
        self._calibrate(own, taken)
        self._appraise(steps)
        self._count(own, taken)
        self._progress.add(accepted)
        if any(serves):
            return
        self._rate.add(accepted, relative)
        if self._round > 1:  # the first round runs the prompts, too
            self._seconds = self._keep * self._seconds + seconds

    def _time_own(self, steps: int, seconds: float) -> None:
        """Learn from the time of a round without estimated drafts."""
        if self._round == 1:  # it runs the prompts, too
            return
        # The first draft behind rounds without one also runs the tokens that the draft has missed:
        # its time says nothing of the others, unless nothing better is known.
        self._untimed = steps > 0 and self._since > 1 and self._knows_cost
        if not self._untimed:
            self.times.observe(steps, seconds)
        if steps:
            self._knows_cost = True
        else:
            self.kept_drafts.times.observe(0, seconds)
            self._knows_plain = True

    def _count(self, own: Sequence[int], taken: Sequence[int]) -> None:
        """Count what was tested and accepted of drafts without estimates, and rounds without."""
        tested = [min(yes + 1, n) for n, yes in zip(own, taken, strict=True)]
        if any(own):
            self._everyone.add(sum(taken), sum(tested))
        for trials, yes, n in zip(self._trials, taken, tested, strict=True):
            if n:
                trials.add(yes, n)
        self._since = 0 if any(own) else self._since + 1

    def _is_trial(self) -> bool:
        """Tell whether a round drafts although that is not expected to pay.

        Trials go on until they have used up the credit, and until one has been timed. What the
        first one of a generation takes is not known before a plain round has been timed there.
        """
        if not self.times.compares:
            return False
        self._tries = self._untimed or self._credit > (0 if self._tries else self.CREDIT / 3)
        return self._tries

    def _trial_length(self) -> int:
        """Return the length of a trial: until acceptance is known, the longest on credit."""
        longest = 1
        while not self._knows_acceptance and longest < self._cap:
            if self.times.relative(longest + 1) - 1 > self._credit:
                break
            longest += 1
        return longest

    def _spent(self, steps: int, seconds: float) -> float:
        """Return how many plain rounds a round took, what its draft had missed included."""
        expected = self.times.relative(steps)
        knows_more = self._untimed and self.times.compares
        return max(expected, self.times.measured(seconds)) if knows_more else expected

    def _account(self, spent: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count what this round lost or gained against a plain one; lengthen the first drafts."""
        gain = 1 / (4 * self.probe)
        if any(drafted):
            gain += 1 + sum(map(mul, self._weights, accepted)) / len(accepted) - spent
        self._credit = min(max(self._credit + gain, -self.DEBT), self.CREDIT)
        pairs = zip(drafted, accepted, strict=True)
        if any(n == taken == self._cap for n, taken in pairs) or self._knows_acceptance:
            self._cap = min(2 * self._cap, self.limit)

    @property
    def _knows_acceptance(self) -> bool:
        return max(self._everyone.tested, self.table.trials) > self.KNOWN

    def _appraise(self, steps: int) -> None:
        """Note what confidence gained in this round, if it was what ended the draft."""
        if not self._seen or (any(self._survival) and steps < max(self._lengths)):
            return
        worth = self._gain(steps) - self._gain(self._best)
        self._worth += (1 - self._keep) * (worth - self._worth)
        self._price += (1 - self._keep) * (self._asked - self._price)

    def _gain(self, length: int) -> float:
        """Return the tokens expected of such drafts, less those that their time is worth."""
        gain, chance = 0.0, float(len(self._alphas))
        mean = sum(self._alphas) / len(self._alphas)
        for j in range(length):
            chance = self._paths[j] if j < len(self._paths) else chance * mean
            gain += chance - self._needed
        return gain

    def _calibrate(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Enter into the calibration what was looked at and then tested by verification."""
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
        self.times = self._batches.begin(len(indices))
        self.kept_drafts.select(indices)
        self._trials = [self._trials[b] for b in indices]
        self._rate.select(indices)
        self._progress.select(indices)


class _Trials:
    """Counts of accepted and tested draft tokens, in which older rounds count for less."""

    def __init__(self, keep: float) -> None:
        self._keep, self._accepted, self._tested = keep, 0.0, 0.0

    @property
    def tested(self) -> float:
        """How many are remembered."""
        return self._tested

    def add(self, accepted: int, tested: int) -> None:
        self._accepted = self._keep * self._accepted + accepted
        self._tested = self._keep * self._tested + tested

    def rate(self, prior: float, trials: float) -> float:
        """Return accepted / tested, as if there had been ``trials`` more at the rate ``prior``."""
        return (self._accepted + trials * prior) / (self._tested + trials)
