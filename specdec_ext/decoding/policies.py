"""How many tokens to draft: one class a policy; `GammaPolicy` is what a loop needs of each.

A policy is asked at the beginning of each round how many tokens each request may draft at most. It
may then end a request's draft early, while tokens are being drafted, and at the end of the round it
is told what was accepted. Every policy but the renewal rule (in a file of its own) decides for each
request of a batch by itself.

**What a policy may depend on.** The output keeps the target's law, under every rule that keeps it
at a fixed gamma, as long as two conditions hold.

- Between rounds everything is allowed: acceptance so far, discarded tokens, time. Whatever the
  draft's length, what a round emits, continued by the target's own tokens, follows the target's
  law given all that happened before.
- Within a round a policy may look at the tokens drafted so far and their rows, *all of which stay
  in the draft*. Where the draft ends is then a function of the path of tokens that verification
  sees, which is the same as a draft that always ends there. It must not look at a token and then
  leave it out: a token that survives such a choice was not drawn from q any more.
- Tokens that were not drawn may be left out again: a draft without randomness, cut by what was
  known before the round, is another draft without randomness.

A policy that goes by the clock (`RenewalRule`) makes the tokens depend on time, though not their
law. One that goes by the other requests of a batch makes them depend on those, and needs seeds that
differ. Under the rule ``coupled`` the tokens depend on neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import theory
from .checks import integer, number_in, shown
from .drafters import GoOn
from .thresholds import MovingThreshold

__all__ = [
    "ConfidenceStop",
    "EntropyBound",
    "FixedGamma",
    "GammaPolicy",
    "GradientAscent",
    "HeuristicGamma",
    "MOST_DRAFTED",
    "as_policy",
    "confidence",
]

#: `specdec_ext.verify` takes no longer chains: so many coins are kept apart.
MOST_DRAFTED = 65_534


class GammaPolicy(Protocol):
    """Chooses the draft length of each request and round.

    In every round the loop calls `lengths` once, the drafter calls `go_on` as often as it likes,
    and the loop calls `commit` once. `select` is called between rounds, when requests have ended.

    A policy may have one method more, ``keep(chances) -> list of int``. It is called between the
    two where a drafter has estimated the chances of its tokens (``Draft.chances``), of up to
    ``limit`` tokens a request, and returns how many of them each request keeps. So `lengths` are
    for drafters that estimate none. Where several drafters of a `StackedDrafter` estimate, it is
    called for each, with no chances of requests that others serve.
    """

    @property
    def limit(self) -> int:
        """The largest number that `lengths` ever returns."""

    @property
    def go_on(self) -> GoOn | None:
        """Called after every draft token but the last, see `GoOn`; None: it ends no draft early.

        The attribute is read again in every round. Its answer makes the host wait for the device,
        once for each draft token.
        """

    def start(self, batch: int) -> None:
        """Begin a generation of ``batch`` requests; what was learnt of the models may be kept."""

    def lengths(self) -> list[int]:
        """Return how many tokens each request may draft in this round, 0 to ``limit``."""

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take in how many tokens each request drafted, and how many of them were accepted."""

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""


def as_policy(name: str, gamma: Any, low: int = 0) -> GammaPolicy:
    """Return ``gamma`` if it is a policy, or the policy that always allows this number of tokens.

    Parameters
    ----------
    name : str
        What error messages call the argument.
    gamma : int or GammaPolicy
        What the caller gave.
    low : int
        The least number allowed.

    Returns
    -------
    GammaPolicy

    Raises
    ------
    TypeError
        Neither a number nor a policy, or a policy that lacks a method.
    ValueError
        A number below ``low`` or above `MOST_DRAFTED`.
    """
    if not hasattr(gamma, "lengths") or isinstance(gamma, type):
        return FixedGamma(integer(name, gamma, low, MOST_DRAFTED, wanted="an int or a GammaPolicy"))
    methods = ("start", "lengths", "commit", "select")
    lacking = [method for method in methods if not callable(getattr(gamma, method, None))]
    if lacking:
        raise TypeError(f"{name} must have {lacking[0]}(), as policies do, got {shown(gamma)}")
    policy: GammaPolicy = gamma
    return policy


# --- fixed lengths, and draft-side stops ------------------------------------------------------


class FixedGamma:
    """Allows the same number of draft tokens in every round.

    Parameters
    ----------
    gamma : int
        Draft tokens a round.

    Examples
    --------
    >>> policy = FixedGamma(3)
    >>> policy.start(2)
    >>> policy.lengths()
    [3, 3]
    """

    go_on: GoOn | None = None

    def __init__(self, gamma: int) -> None:
        self.limit = integer(f"{type(self).__name__}: gamma", gamma, 0, MOST_DRAFTED)
        self._batch = 0

    def start(self, batch: int) -> None:
        """Begin a generation."""
        self._batch = batch

    def lengths(self) -> list[int]:
        """Return the same number for each request."""
        return [self.limit] * self._batch

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take in what was accepted: nothing changes."""

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._batch = len(indices)


def confidence(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return each token's probability at temperature 1, ``[B]``; NaN where a row has no law."""
    ids = tokens.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    return torch.softmax(logits, 1, torch.float32).gather(1, ids).squeeze(1)


class _ThresholdStop(FixedGamma, ABC):
    """Ends a draft after a token whose row scores below a threshold; `_bound` gives the score."""

    def __init__(self, gamma: int, threshold: float | MovingThreshold) -> None:
        super().__init__(gamma)
        if not isinstance(threshold, MovingThreshold):
            threshold = number_in(f"{type(self).__name__}: threshold", threshold, 0, 1)
        self.threshold = threshold
        self.go_on = self._is_enough

    @abstractmethod
    def _bound(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the score of each row and the token drawn from it, ``[B]``."""

    def _is_enough(self, tokens: Tensor, logits: Tensor | None) -> Tensor:
        if logits is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        bar = self.threshold
        if isinstance(bar, MovingThreshold):
            return self._bound(tokens, logits) >= bar.on(logits.device)
        return self._bound(tokens, logits) >= bar

    def start(self, batch: int) -> None:
        """Begin a generation."""
        super().start(batch)
        if isinstance(self.threshold, MovingThreshold):
            self.threshold.start(batch)

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take in what was accepted: a `MovingThreshold` moves by it."""
        if isinstance(self.threshold, MovingThreshold):
            self.threshold.commit(drafted, accepted, self.limit)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        super().select(indices)
        if isinstance(self.threshold, MovingThreshold):
            self.threshold.select(indices)


class ConfidenceStop(_ThresholdStop):
    """Ends a draft after a token that the draft model itself thought unlikely.

    It goes by the token's probability in the draft's row at temperature 1, without filters. Drafts
    that have no rows (a lookup's, say) are never ended.

    Parameters
    ----------
    gamma : int
        Largest length.
    threshold : float or MovingThreshold
        The draft goes on while the last token's probability is at least this, in [0, 1]. 0.4 is
        the default of transformers. A `MovingThreshold` follows each request's acceptance.

    References
    ----------
    ``assistant_confidence_threshold`` of Hugging Face transformers (``ConfidenceCriteria``); Mamou
    et al., "Dynamic speculation lookahead accelerates speculative decoding of large language
    models", arXiv 2405.04304.

    Examples
    --------
    >>> policy = ConfidenceStop(8, threshold=0.5)
    >>> policy.go_on(torch.tensor([0, 1]), torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log())
    tensor([ True, False])
    """

    def __init__(self, gamma: int = 10, threshold: float | MovingThreshold = 0.4) -> None:
        super().__init__(gamma, threshold)

    def _bound(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return confidence(tokens, logits)


class EntropyBound(_ThresholdStop):
    """Ends a draft after a token whose row has a high entropy: its acceptance is then uncertain.

    With H the entropy of the draft's row in nats (temperature 1, no filters), the draft goes on
    while 1 - sqrt(weight H) is at least the threshold. That expression stands for a lower bound of
    the acceptance rate: Pinsker's inequality bounds the distance of draft and target by the root of
    their divergence, and the divergence, which a draft cannot know, is taken to be a fixed share of
    H. Drafts that have no rows are never ended.

    Parameters
    ----------
    gamma : int
        Largest length.
    threshold : float or MovingThreshold
        The draft goes on while the bound is at least this, in [0, 1]. (The paper moves it.)
    weight : float
        The share of the entropy, at least 0; 0.2 in the paper.

    References
    ----------
    Agrawal, Jeon, Lee, "AdaEDL: early draft stopping for speculative decoding of large language
    models via an entropy-based lower bound on token acceptance probability", arXiv 2410.18351
    (which also moves the threshold as it goes).

    Examples
    --------
    >>> policy = EntropyBound(8, threshold=0.5)
    >>> rows = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]).log()
    >>> policy.go_on(torch.tensor([0, 0]), rows)  # 0.17 and 1.39 nats
    tensor([ True, False])
    """

    def __init__(
        self, gamma: int = 10, threshold: float | MovingThreshold = 0.4, weight: float = 0.2
    ) -> None:
        super().__init__(gamma, threshold)
        self.weight = number_in("EntropyBound: weight", weight, 0)

    def _bound(self, tokens: Tensor, logits: Tensor) -> Tensor:
        entropy = torch.special.entr(logits.float().softmax(-1)).sum(-1)
        bound: Tensor = 1 - (self.weight * entropy).sqrt()
        return bound


# --- lengths that follow what was accepted ----------------------------------------------------


class HeuristicGamma:
    """Drafts two tokens more after a draft that was accepted whole, else one less.

    The schedule of transformers' assisted generation, for each request by itself.

    Parameters
    ----------
    gamma : int
        First length.
    limit : int
        Largest length (transformers has none).

    References
    ----------
    ``num_assistant_tokens_schedule="heuristic"`` of Hugging Face transformers.

    Examples
    --------
    >>> policy = HeuristicGamma(5)
    >>> policy.start(2)
    >>> policy.commit([5, 5], [5, 2])
    >>> policy.lengths()
    [7, 4]
    """

    go_on: GoOn | None = None

    def __init__(self, gamma: int = 5, limit: int = 20) -> None:
        self.limit = integer("HeuristicGamma: limit", limit, 1, MOST_DRAFTED)
        self.gamma = integer("HeuristicGamma: gamma", gamma, 1, self.limit)
        self._lengths: list[int] = []

    def start(self, batch: int) -> None:
        """Begin a generation, each request at the first length."""
        self._lengths = [self.gamma] * batch

    def lengths(self) -> list[int]:
        """Return each request's length."""
        return list(self._lengths)

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Lengthen or shorten each request's draft; one that drafted nothing keeps its length."""
        for b, (offered, taken) in enumerate(zip(drafted, accepted, strict=True)):
            if offered:
                step = 2 if taken == offered else -1
                self._lengths[b] = min(max(self._lengths[b] + step, 1), self.limit)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._lengths = [self._lengths[b] for b in indices]


class GradientAscent:
    """Moves each request's draft length towards the best one for its acceptance rate so far.

    In every round it takes a few steps up the gradient of `theory.walltime_factor` in gamma.

    alpha is (s + 1) / (n + 2) after n samples of sum s, so that no first round settles it. Under a
    rule that tests tokens one by one, a sample is whether a tested token was accepted; under
    ``"block"``, which accepts more than alpha says, it is sum_x min(p(x), q(x)) at that token, and
    costs one more pass over the rows. The length is at least 1: nothing would be learnt any more
    without a draft.

    Parameters
    ----------
    c : float
        Time of a draft call in target calls.
    gamma : int
        First length.
    limit : int
        Largest length.
    rate : float
        Length of a step, in units of the gradient.
    steps : int
        Steps a round.

    References
    ----------
    Tulsian, Goyal, Aggarwal, a course report on Leviathan et al., section II.D.2, whose acceptance
    rate is almost certainly accepted / drafted; theorem 8 wants accepted / (accepted + rejected).

    Examples
    --------
    >>> policy = GradientAscent(c=0.05)
    >>> policy.start(1)
    >>> for _ in range(200):
    ...     policy.learn_alpha([[1, 1, 1, 1, 0]])  # one request, alpha 4/5
    >>> policy.lengths(), theory.optimal_gamma(0.8, 0.05)
    ([8], 8)
    """

    go_on: GoOn | None = None
    reads_alpha = True  # the loop calls learn_alpha() before commit()

    def __init__(
        self, c: float, gamma: int = 5, limit: int = 20, *, rate: float = 2.0, steps: int = 10
    ) -> None:
        self.limit = integer("GradientAscent: limit", limit, 1, MOST_DRAFTED)
        self.gamma = integer("GradientAscent: gamma", gamma, 1, self.limit)
        self.c = number_in("GradientAscent: c", c, 0)
        self.rate = number_in("GradientAscent: rate", rate, 0)
        self.steps = integer("GradientAscent: steps", steps, low=0)
        self._sums: list[float] = []
        self._samples: list[int] = []
        self._gammas: list[float] = []

    def start(self, batch: int) -> None:
        """Begin a generation, each request at the first length."""
        self._sums, self._samples = [0.0] * batch, [0] * batch
        self._gammas = [float(self.gamma)] * batch

    def lengths(self) -> list[int]:
        """Return the whole number next to where each request stands."""
        return [round(gamma) for gamma in self._gammas]

    def learn_alpha(self, samples: Sequence[Sequence[float]]) -> None:
        """Take one round's samples of each request, and climb; without any, a request stays.

        Parameters
        ----------
        samples : sequence of sequence of float
            Numbers in [0, 1] whose mean is alpha, of each request: see `AlphaSamples`.
        """
        for b, found in enumerate(samples):
            if not found:
                continue
            self._sums[b] += sum(found)
            self._samples[b] += len(found)
            alpha = (self._sums[b] + 1) / (self._samples[b] + 2)
            for _ in range(self.steps):
                slope = theory.walltime_gradient(alpha, self._gammas[b], self.c)
                self._gammas[b] = min(max(self._gammas[b] + self.rate * slope, 1.0), self.limit)

    def commit(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the round's counts, which say nothing that the samples do not."""

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._sums = [self._sums[b] for b in indices]
        self._samples = [self._samples[b] for b in indices]
        self._gammas = [self._gammas[b] for b in indices]
