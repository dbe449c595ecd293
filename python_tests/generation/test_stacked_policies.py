"""Policies that cut by chances, over stacks in which only some drafters estimate them."""

from __future__ import annotations

import random

import pytest
import torch
from generate_models import TableModel, tables
from test_generate_law import ALPHA, p_value
from test_policies import Cuts

import specdec_ext
from specdec_ext import theory
from specdec_ext.decoding import Draft, RenewalRule, Requests, StackedDrafter, SuffixDrafter
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafting import Allowed, allowed, draft_allowed

# --- who is asked, by hand ------------------------------------------------------------------------


class Scripted:
    """Proposes rows of tokens, with their chances if it has any; remembers what it was told."""

    calls = 0

    def __init__(self, rows: list[list[int]], chances: list[list[float]] | None = None) -> None:
        self.rows, self.chances, self.estimates_chances = rows, chances, chances is not None
        self.asked: list[int] = []
        self.told: list[list[int]] = []

    def start(self, requests):
        pass

    def propose(self, gamma, positions, go_on=None):
        self.asked.append(gamma)
        rows = [row[:gamma] for row in self.rows]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        chances = None if self.chances is None else [row[:gamma] for row in self.chances]
        return Draft(tokens.long().reshape(len(rows), width), chances=chances)

    def commit(self, tokens, accepted):
        self.told.append(list(accepted.host))

    def observe(self, tokens, gained):
        self.told.append(list(gained.host))

    def revise(self, text, drop):
        pass

    def select(self, rows, indices):
        pass


class Halves(Cuts):
    """Allows drafters without estimates what it is given; remembers the chances that it weighs."""

    def __init__(self, *lengths: int) -> None:
        self._lengths, self.seen = list(lengths), []
        self.start(len(lengths))

    def start(self, batch):
        super().start(batch)
        if len(self._lengths) == 1:  # the same for all
            self._lengths *= batch

    def lengths(self):
        return list(self._lengths)

    def keep(self, chances):
        self.seen.append([list(row) for row in chances])
        return super().keep(chances)

    def select(self, indices):
        super().select(indices)
        self._lengths = [self._lengths[i] for i in indices]


def started(*drafters) -> StackedDrafter:
    stack = StackedDrafter(*drafters)
    ids, ends = torch.ones(3, 2, dtype=torch.int64), torch.full((3,), 20)
    stack.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    return stack


def test_copies_are_weighed_and_what_is_left_out_is_the_models():
    copies = Scripted([[5, 6, 7], [8, 9], []], [[0.9, 0.6, 0.2], [0.1, 0.9], []])
    other = Scripted([[3], [3, 3, 3], [4]], [[0.9], [0.9, 0.1, 0.9], [0.2]])
    model = Scripted([[1, 2], [1, 2], [1, 2]])
    stack, policy = started(copies, other, model), Halves(2, 2, 1)
    most = allowed(policy, stack, [9, 9, 9])
    assert most == Allowed([3, 3, 3], [2, 2, 1])
    draft = draft_allowed(policy, stack, most, torch.tensor([2, 2, 2]), None)
    # Two tokens of the first copy, the other copy's one, as much of the model's as is allowed.
    assert draft.tokens.tolist() == [[5, 6], [3, -1], [1, -1]]
    assert draft.chances is None and draft.logits is None
    # Who has a draft counts no more where the second drafter's are weighed.
    assert policy.seen == [
        [[0.9, 0.6, 0.2], [0.1, 0.9], []],
        [[], [0.9, 0.1, 0.9], [0.2]],
    ]
    assert copies.asked == other.asked == [3] and model.asked == [2]
    stack.commit(
        torch.tensor([[5, 6, 0], [3, 0, 0], [1, 0, 0]]), Counts.on(draft.tokens.device, [2, 1, 1])
    )
    # Of its own tokens, and then of what others proposed; the final token goes with the first.
    assert copies.told == [[2, 0, 0], [0, 1, 1]]
    assert model.told == [[0, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 2, 0)])
def test_a_model_that_may_draft_nothing_is_not_asked(lengths):
    model = Scripted([[1, 2], [1, 2], [1, 2]])
    stack = started(Scripted([[5], [], []], [[0.9], [], []]), model)
    policy = Halves(*lengths)
    draft = draft_allowed(
        policy, stack, allowed(policy, stack, [9, 9, 9]), torch.tensor([2, 2, 2]), None
    )
    assert model.asked == ([2] if any(lengths) else [])
    width = max(1, *lengths)
    expected = torch.full((3, width), -1)
    expected[0, 0] = 5
    expected[1, : lengths[1]] = torch.tensor([1, 2])[: lengths[1]]
    assert torch.equal(draft.tokens, expected)


def test_a_request_that_ends_drafts_no_more_than_it_has_room_for():
    copies = Scripted([[5, 6, 7]] * 3, [[0.9] * 3] * 3)
    stack, policy = started(copies, Scripted([[1, 2]] * 3)), Halves(2, 2, 2)
    most = allowed(policy, stack, [0, 1, 9])
    assert most == Allowed([0, 1, 3], [0, 1, 2])
    draft = draft_allowed(policy, stack, most, torch.tensor([2, 2, 2]), None)
    assert draft.tokens.tolist() == [[-1, -1, -1], [5, -1, -1], [5, 6, 7]]


def test_who_takes_part():
    copies, model = Scripted([[]], [[]]), Scripted([[]])
    policy = Halves(1)
    assert allowed(policy, model, [9]) == Allowed([1], [1])
    assert allowed(policy, copies, [9]) == Allowed([3], [1])
    assert StackedDrafter(copies, model).estimates_some_chances
    assert not StackedDrafter(copies, Scripted([[]], [[]])).estimates_some_chances
    assert not StackedDrafter(model, Scripted([[]])).estimates_some_chances
    continued = StackedDrafter(SuffixDrafter(), tables(3)[1], continued=True)
    assert not continued.estimates_some_chances  # a model's tokens are in every draft


# --- the law --------------------------------------------------------------------------------------


def suffix_and(draft, vocabulary=3):
    drafter = SuffixDrafter(least=0.0)
    drafter.remember([0, 1, 2, 0, 2, 2, 1, 0, 1, 1, 2][: 4 * vocabulary])
    return StackedDrafter(drafter, draft)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("policy", [lambda: Halves(1), lambda: Halves(2), RenewalRule])
def test_joint_law(policy, rule):
    target, draft = tables(3)
    policy = policy(limit=3, probe=3) if policy is RenewalRule else policy()
    assert p_value(target, suffix_and(draft), length=3, draws=3000, gamma=policy, rule=rule) > ALPHA


class Fickle(StackedDrafter):
    """Weighs the model's tokens as well, which were drawn, by what the model thinks of them."""

    def propose(self, gamma, positions, go_on=None, by_chance=None):
        draft = super().propose(gamma, positions, go_on, by_chance)
        if draft.logits is None:
            return draft
        first = draft.logits.softmax(-1).gather(2, draft.tokens.clamp(min=0)[..., None])[:, 0, 0]
        return draft._replace(tokens=draft.tokens.masked_fill((first < 0.4)[:, None], -1))


def test_control_drawn_tokens_are_left_out():
    target, draft = tables(3)
    stack = Fickle(SuffixDrafter(), draft)
    assert p_value(target, stack, length=3, draws=3000, gamma=Halves(2)) < ALPHA


def test_tokens_of_plain_decoding_and_copies_where_no_model_drafts():
    """In a batch: texts that repeat themselves are copied although the model's draft is no good."""
    target, _ = tables(6)
    cycle = TableModel(torch.full((6, 6, 6), -9.0))
    for a in range(6):
        cycle.table[:, a, (a + 1) % 6] = 9.0
    prompts = torch.tensor([[1, 2], [3, 4], [5, 0]])
    for model, most in ((cycle, 25), (target, 60)):
        worst = TableModel(-model.table)
        plain, counts = specdec_ext.generate(model, None, prompts, max_new_tokens=60)
        now = [0.0]

        def clock(now=now):
            now[0] += 1.0
            return now[0]

        found, statistics = specdec_ext.generate(
            model, StackedDrafter(SuffixDrafter(), ModelDrafter(worst)), prompts,
            max_new_tokens=60, gamma=RenewalRule(8, clock=clock),
        )  # fmt: skip
        assert torch.equal(found, plain)
        assert statistics.rounds <= most <= counts.rounds
        assert statistics.draft_calls < 0.3 * statistics.rounds


# --- on simulated streams -------------------------------------------------------------------------


def factor(alpha: float, c: float, copies: bool, model: bool, rounds: int = 2000) -> float:
    """Return tokens per time of a text in which a third of the places begin something copied.

    Time is in target calls, which take 0.03 longer for each draft token. Copies have ten tokens
    with chances of 0.95; what the model drafts is accepted with ``alpha`` and takes ``c`` each.
    """
    rng, now, tokens = random.Random(5), [0.0], 0
    policy = RenewalRule(16, clock=lambda: now[0])
    policy.start(1)
    for _ in range(rounds):
        (length,) = policy.lengths()
        kept = policy.keep([[0.95] * 10 if rng.random() < 1 / 3 else []])[0] if copies else 0
        drafted, rate = kept, 0.95
        if not kept and model:
            rate = alpha
            while drafted < length:
                now[0], drafted = now[0] + c, drafted + 1
                if policy.go_on is not None and drafted < length:
                    if not policy.go_on(torch.tensor([0]), None).item():
                        break
        now[0] += 1 + 0.03 * drafted
        taken = next((n for n in range(drafted) if rng.random() >= rate), drafted)
        policy.commit([drafted], [taken])
        tokens += taken + 1
    return tokens / now[0]


@pytest.mark.parametrize("alpha, c", [(0.2, 0.3), (0.0, 0.5), (0.4, 1.0)])
def test_a_model_that_does_not_pay_does_not_keep_copies_away(alpha, c):
    assert factor(alpha, c, copies=False, model=True) > 0.98
    alone = factor(alpha, c, copies=True, model=False)
    assert alone > 2
    assert factor(alpha, c, copies=True, model=True) > 0.98 * alone


@pytest.mark.parametrize("alpha, c", [(0.8, 0.1), (0.6, 0.05)])
def test_a_model_drafts_where_there_is_nothing_to_copy(alpha, c):
    """As much as it would alone: two thirds of the rounds are its own, however fast copies are."""
    copied, drafted = (factor(alpha, c, copies=x, model=not x) for x in (True, False))
    gamma = theory.optimal_gamma(alpha, c + 0.03)
    assert drafted > 0.9 * theory.walltime_factor(alpha, gamma, c + 0.03)
    both = factor(alpha, c, copies=True, model=True)
    # Of a round of copies 8 tokens in 1.3 calls, of others the model's rate in its own time.
    n, time = theory.expected_tokens(alpha, gamma), 1 + (c + 0.03) * gamma
    copy = theory.expected_tokens(0.95, 10)
    best = (copy / 3 + 2 / 3 * n) / (1.3 / 3 + 2 / 3 * time)
    assert both > 0.93 * best > copied
