"""Thompson sampling on tokens per time: which of several drafters a round is to have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Arm", "ThompsonChoice"]


@dataclass
class Arm:
    """What is known of one drafter.

    Attributes
    ----------
    cost : float or None
        Time of a draft token in target calls (c of Leviathan et al.); None: rounds are timed.
    trials, won : float
        Rounds in which it drafted, and the sum over these of accepted / asked for.
    drafted : float
        The sum over these of drafted / asked for.
    rounds, seconds : float
        Rounds that were timed, and the time that they took.
    timed : int
        How many were timed at all.
    """

    cost: float | None
    trials: float = 0.0
    won: float = 0.0
    drafted: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0
    timed: int = 0

    def round_cost(self, gamma: int) -> float:
        """Return what a round takes that asks for ``gamma`` tokens: in target calls, or seconds."""
        if self.cost is None:
            return self.seconds / self.rounds
        share = self.drafted / self.trials if self.trials else 1.0
        return 1 + self.cost * gamma * share

    def forget(self, keep: float) -> None:
        """Let what is known weigh less."""
        self.trials, self.won, self.drafted = (
            keep * self.trials,
            keep * self.won,
            keep * self.drafted,
        )
        self.rounds, self.seconds = keep * self.rounds, keep * self.seconds


class ThompsonChoice:
    """Chooses a drafter for each round, by what the earlier rounds gave and cost.

    A round with drafter k that asks for gamma tokens emits 1 + gamma s tokens, where s in [0, 1] is
    accepted / gamma, and takes 1 + c_k gamma d target calls, d being drafted / gamma. The mean of s
    has the Beta posterior that rounds so far give it, from a uniform prior. In each round one value
    is drawn from the posterior of every drafter, and the one with the most tokens per time by these
    values is chosen: those that are likely to be best are tried, others ever more seldom.

    The choice depends on rounds that have ended, and on a generator of its own, which no draft and
    no verification sees. So the law of the output is the target's: see `policies`.

    Parameters
    ----------
    costs : sequence of float or None
        c of each drafter. None: `spent` says what the rounds take.
    seed : int
        Of the generator.

    References
    ----------
    Thompson sampling of a ratio of reward to cost: Xia, Li, Qin, Yu, Liu, "Thompson sampling for
    budgeted multi-armed bandits", IJCAI 2015, arXiv 1505.00146 (rewards in [0, 1] enter the
    posterior as they are, not by a Bernoulli trial). Forgetting: Raj, Kalyani, "Taming
    non-stationary bandits: a Bayesian approach", arXiv 1707.09727.

    Examples
    --------
    >>> rule = ThompsonChoice([0.0, 0.1], seed=1)
    >>> for _ in range(200):  # the first has nothing accepted, the second 4 of 5 tokens
    ...     arm = rule.choose(5)
    ...     rule.learn(arm, asked=5, drafted=5, accepted=4 * arm)
    >>> rule.arms[0].trials < 10, round(rule.arms[1].round_cost(5), 2)
    (True, 1.5)
    """

    def __init__(self, costs: Sequence[float | None], seed: int) -> None:
        self.arms = [Arm(cost) for cost in costs]
        self._random = random.Random(f"specdec_ext: which drafter, seed {seed}")

    def choose(self, gamma: int) -> int:
        """Return which drafter is to draft up to ``gamma`` >= 1 tokens."""
        unknown = [k for k, arm in enumerate(self.arms) if arm.cost is None and not arm.rounds]
        if unknown:
            return unknown[0]
        rates = []
        for arm in self.arms:
            share = self._random.betavariate(1 + arm.won, 1 + arm.trials - arm.won)
            rates.append((1 + gamma * share) / arm.round_cost(gamma))
        return rates.index(max(rates))

    def learn(self, k: int, asked: int, drafted: int, accepted: int) -> None:
        """Take in what became of a round of drafter ``k``: ``accepted`` <= ``drafted`` <= asked."""
        arm = self.arms[k]
        arm.trials += 1
        arm.won += accepted / asked
        arm.drafted += drafted / asked

    def spent(self, k: int, seconds: float) -> None:
        """Take in how long a round of drafter ``k`` took."""
        arm = self.arms[k]
        if arm.timed == 1:  # the first also warmed it up: a guess until there is a second
            arm.rounds = arm.seconds = 0.0
        arm.timed += 1
        arm.rounds += 1
        arm.seconds += seconds

    def forget(self, keep: float) -> None:
        """Let what is known weigh less by a factor in (0, 1]."""
        for arm in self.arms:
            arm.forget(keep)
