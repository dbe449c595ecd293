"""Several drafters, of which each round has the one that has paid best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import flag, integer, items, number_in, shown
from ..counts import Counts
from . import Draft, GoOn, Requests, asked_for_some
from .arms import ThompsonChoice
from .several import SeveralDrafters, Share

__all__ = ["BanditDrafter"]


class BanditDrafter(SeveralDrafters):
    """Has one of several drafters draft, chosen in each round by what each has paid so far.

    Leviathan et al. (arXiv 2211.17192, section 6) suggest to vary the approximation model during
    inference. Which one is best depends on the text: a lookup where the output repeats its input, a
    small model elsewhere, a larger one where the small one fails. The choice is by Thompson
    sampling on accepted tokens and costs, see `arms.ThompsonChoice`.

    **Why the output has the target's law.** A choice depends on what earlier rounds accepted, on
    costs, and on a random generator of its own; never on the coins of its round, nor on what is
    drafted in it. What a round emits, continued by the target's own tokens, follows the target's
    law given all that happened before it, whichever drafter it has. (A drafter chosen because its
    tokens are going to be accepted would bias the output.)

    **Batches.** By default every request chooses by itself: its tokens are a function of its seed,
    prompt and logits, as long as ``gamma`` is a number. A drafter is run for the whole batch if one
    request chose it, so while requests differ, a round takes as long as all drafters chosen in it.
    With ``together`` the batch has one drafter a round, learns from all its requests, and takes no
    longer than that drafter needs; what a request emits then depends on the other requests, though
    its law does not as long as their seeds differ. The host waits for the device once for each
    drafter that is asked.

    All drafters are told of every token that is emitted; a model that was not asked for some rounds
    takes in what it has missed in its next call. How much each is trusted begins anew with every
    generation.

    Parameters
    ----------
    *drafters : torch.nn.Module or Drafter
        A model stands for the `ModelDrafter` that drives it.
    costs : sequence of float or None
        The time of one draft token of each drafter, in target calls (c in Leviathan et al.); 0 for
        those that run no model. None: rounds are timed, from the first draft token asked for to the
        end of verification. The batch then chooses ``together``, and its tokens, though not their
        law, depend on time.
    together : bool
        Whether the requests of a batch choose as one.
    memory : int, optional
        Rounds after which what a round showed weighs 1/e, at least 2: for texts that change. None:
        all rounds weigh alike.
    clock : callable
        Returns seconds from any origin; used where ``costs`` is None.

    Attributes
    ----------
    chosen : list of int
        How often each drafter was chosen by a request, in the last generation.

    Raises
    ------
    TypeError
        A drafter that has no ``observe``, or is none; costs that are no numbers.
    ValueError
        No drafter, or one twice; not one cost for each; a cost under 0 or a memory under 2.

    Notes
    -----
    ``gamma`` of `generate` says how many tokens are asked for, whoever drafts: a number, or any
    policy. Where a policy gives requests different lengths (a level of a hierarchy does, too), a
    request that was given less than the longest counts as if it had been asked for the longest,
    with fewer accepted.

    References
    ----------
    Bandits that choose how to speculate: Hou et al., "BanditSpec", arXiv 2505.15141.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import BanditDrafter, Counts, LookupDrafter, Requests
    >>> from specdec_ext.decoding import UniformDrafter
    >>> drafter = BanditDrafter(LookupDrafter(), UniformDrafter(9), costs=[0.0, 0.0])
    >>> ids, ends, seeds = torch.tensor([[1, 2, 1, 2]]), torch.tensor([90]), torch.tensor([0])
    >>> drafter.start(Requests(ids, None, ends, 0, seeds, {}, greedy=False, needs_law=True))
    >>> for i in range(20):  # what the lookup copies is right, what is drawn at random is not
    ...     draft = drafter.propose(2, positions=torch.tensor([4 + 3 * i]))
    ...     copied = draft.logits is None
    ...     accepted = Counts.on(ids.device, [2 if copied else 0])
    ...     drafter.commit(torch.tensor([[1, 2, 1]]), accepted)
    >>> drafter.chosen
    [19, 1]
    """

    def __init__(
        self,
        *drafters: Any,
        costs: Sequence[float] | None,
        together: bool = False,
        memory: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(drafters)
        self.costs = _costs(costs, len(drafters))
        self.timed = costs is None
        self.together = flag("BanditDrafter: together", together) or self.timed
        self.memory = None if memory is None else integer("BanditDrafter: memory", memory, low=2)
        if not callable(clock):
            raise TypeError(f"BanditDrafter: clock must be a callable, got {shown(clock)}")
        self.chosen = [0] * len(drafters)
        self._clock = clock
        self._begun = 0.0
        self._first = True  # the round whose calls run the prompts, too: its time says nothing
        self._rules: list[ThompsonChoice] = []  # of each request; one object if it is for all
        self._room: list[int] = []  # tokens that each request may still gain
        self._asked: list[int] = []  # in this round, of each request
        self._picks: list[int] = []  # which drafter each has in this round, -1: none

    def start(self, requests: Requests) -> None:
        """Take the prompts; nothing is known of the drafters."""
        super().start(requests)
        mask, batch = requests.attention_mask, len(requests.ends)
        width = requests.input_ids.shape[1]
        lengths = [width] * batch if mask is None else mask.sum(1).tolist()
        ends = requests.ends.tolist()
        self._room = [end - length for end, length in zip(ends, lengths, strict=True)]
        seeds = [0] * batch if requests.seeds is None else requests.seeds.tolist()
        if self.together and batch:
            self._rules = [ThompsonChoice(self.costs, seeds[0])] * batch
        else:
            self._rules = [ThompsonChoice(self.costs, seed) for seed in seeds]
        self.chosen = [0] * len(self.drafters)
        self._first = True
        self._asked, self._picks = [0] * batch, [-1] * batch

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Have the drafter that each request chooses propose up to ``gamma`` tokens for it."""
        self._begun = self._clock()
        # The final token of a round needs a place, too.
        self._asked = [max(min(gamma, room - 1), 0) for room in self._room]
        self._picks = self._choices(gamma)
        picks = torch.tensor(self._picks, device=positions.device)
        self._shares = {}
        for k in sorted(set(self._picks) - {-1}):
            rows = picks == k
            self.chosen[k] += self._picks.count(k)
            asked = None if go_on is None else asked_for_some(go_on, rows)
            draft = self.drafters[k].propose(gamma, positions, asked)
            self._shares[k] = Share.of(draft, rows)
        return self._merged(positions)

    def _choices(self, gamma: int) -> list[int]:
        """Return which drafter each request has in this round; -1 where there is no room."""
        if self.together and any(self._asked):
            return [self._rules[0].choose(gamma)] * len(self._rules)
        return [
            rule.choose(asked) if asked else -1
            for rule, asked in zip(self._rules, self._asked, strict=True)
        ]

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Tell the drafters what was emitted, and learn what those that drafted were worth."""
        if self.memory is not None:
            for rule in {id(rule): rule for rule in self._rules}.values():
                rule.forget(1 - 1 / self.memory)
        rounds = zip(self._rules, self._picks, self._asked, accepted.host, strict=True)
        for b, (rule, k, asked, taken) in enumerate(rounds):
            if k >= 0 and asked:
                drafted = min(self._shares[k].used.host[b], asked)
                rule.learn(k, asked, drafted, min(taken, drafted))
        if self.timed and not self._first and max(self._picks, default=-1) >= 0:
            self._rules[0].spent(self._picks[0], self._clock() - self._begun)
        self._first = False
        self._room = [
            room - taken - 1 for room, taken in zip(self._room, accepted.host, strict=True)
        ]
        super().commit(tokens, accepted)

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Pass on tokens of rounds of other drafters, from which nothing is learnt."""
        super().observe(tokens, gained)
        self._room = [room - n for room, n in zip(self._room, gained.host, strict=True)]

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Have each drafter take tokens back, and take one in their place."""
        super().revise(text, drop)
        self._room = [room + n - 1 for room, n in zip(self._room, drop.host, strict=True)]

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        super().select(rows, indices)
        self._rules = [self._rules[i] for i in indices]
        self._room = [self._room[i] for i in indices]
        self._asked = [self._asked[i] for i in indices]
        self._picks = [self._picks[i] for i in indices]


def _costs(costs: Any, count: int) -> list[float | None]:
    """Return the cost of each drafter, None of all where it is to be measured."""
    if costs is None:
        return [None] * count
    several = items(costs)
    if several is None:
        raise TypeError(
            f"BanditDrafter: costs must be a sequence of numbers or None, got {shown(costs)}"
        )
    if len(several) != count:
        raise ValueError(
            f"BanditDrafter: costs must be those of {count} drafters, got {len(several)}"
        )
    return [number_in(f"BanditDrafter: costs of drafter {k}", c, 0) for k, c in enumerate(several)]
