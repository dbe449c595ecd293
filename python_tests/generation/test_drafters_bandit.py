"""A drafter chosen for each round: its exact law, what it learns, batches, levels above it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from generate_models import tables
from test_drafters_text import commit, start
from test_generate_law import ALPHA, p_value

import specdec_ext
from specdec_ext import ops, theory
from specdec_ext.decoding import (
    BanditDrafter,
    HierarchicalDrafter,
    LookupDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.drafters.arms import ThompsonChoice

# --- the exact law of a loop that chooses -----------------------------------------------------


def round_law(target, draft, text, gamma, rule):
    """Return what a round of Leviathan's or Sun's rule emits: {(tokens, accepted): probability}.

    From the papers' formulae in float64; laws are tables by the last two tokens.
    """
    found = {}
    for drafted in itertools.product(range(len(target)), repeat=gamma):
        contexts = [(*text, *drafted[:i])[-2:] for i in range(gamma + 1)]
        p = [target[context] for context in contexts]
        q = [draft[context] for context in contexts[:gamma]]
        weight = 1.0
        for row, x in zip(q, drafted, strict=True):
            weight *= float(row[x])
        for n, (chance, residual) in enumerate(outcomes(p, q, drafted, rule)):
            total = residual.sum()
            law = residual / total if total > 0 else p[n]
            for y, mass in enumerate(law.tolist()):
                key = (*drafted[:n], y), n
                found[key] = found.get(key, 0.0) + weight * chance * mass
    return found


def outcomes(p, q, drafted, rule):
    """Yield for n = 0, 1, .. the chance that n tokens are accepted, and the law of the next."""
    gamma = len(drafted)
    w, holds, residuals = 1.0, [], []
    for i in range(gamma + 1):
        if i:
            ratio = float(p[i - 1][drafted[i - 1]] / q[i - 1][drafted[i - 1]])
            w = min(1.0, (w if rule == "block" else 1.0) * ratio)
        residuals.append(((w if rule == "block" else 1.0) * p[i] - q[i]).clamp(min=0)
                         if i < gamma else p[i])  # fmt: skip
        left = float(residuals[-1].sum())
        inner = 1.0 if w == 1 else left / (left + 1 - w)
        holds.append(w if rule == "token" or i == gamma else inner)
    if rule == "token":  # all of the first n, and not the next
        reached = list(itertools.accumulate(holds, lambda a, b: a * b))
        chances = [reached[n] - (reached[n + 1] if n < gamma else 0) for n in range(gamma + 1)]
    else:  # the last that holds
        missed = [1.0, *itertools.accumulate((1 - h for h in holds[:0:-1]), lambda a, b: a * b)]
        chances = [h * m for h, m in zip(holds, missed[::-1], strict=True)]
    return zip(chances, residuals, strict=True)


def choosing(seed):
    """Choose as `BanditDrafter` does, from the rounds before."""

    def choose(history, gamma):
        rule = ThompsonChoice([0.0, 0.1], seed)
        for k, asked, accepted in history:
            assert rule.choose(asked) == k
            rule.learn(k, asked, asked, accepted)
        return rule.choose(gamma)

    return choose


def loop_law(target, drafts, length, rule, choose=None, peek=False):
    """Return the exact law of ``length`` tokens, ``[V ** length]``, of rounds of up to 2 drafted.

    ``choose`` is told of the rounds before; with ``peek`` the drafter is the one of which more is
    accepted in the very round.
    """
    vocabulary = len(target)
    open_ = {((), ()): 1.0}
    law = torch.zeros(vocabulary**length, dtype=torch.float64)
    while open_:
        (tokens, history), mass = open_.popitem()
        if len(tokens) == length:
            law[sum(t * vocabulary**i for i, t in enumerate(reversed(tokens)))] += mass
            continue
        gamma = min(2, length - len(tokens) - 1)
        arms = [round_law(target, draft, (1, 2, *tokens), gamma, rule) for draft in drafts]
        if peek:
            emitted = {}
            for (one, a), (two, b) in itertools.product(arms[0].items(), arms[1].items()):
                best = one if one[1] >= two[1] else two
                emitted[best] = emitted.get(best, 0.0) + a * b
            k = -1
        else:
            k = choose(history, gamma) if gamma else 0
            emitted = arms[k]
        for (more, accepted), part in emitted.items():
            later = (*history, (k, gamma, accepted)) if gamma and not peek else history
            key = (*tokens, *more), later
            open_[key] = open_.get(key, 0.0) + mass * part
    return law


def laws(length=4):
    """Give a target, two drafts, and the target's law of so many tokens."""
    models = [tables(3)[0], tables(3)[1], tables(3, noise=0.5, seed=0)[1]]
    target, *drafts = (model.table.double().softmax(-1) for model in models)
    plain = torch.ones(1, dtype=torch.float64)
    for n in range(length):
        rows = [target[(1, 2, *t)[-2:]] for t in itertools.product(range(3), repeat=n)]
        plain = (plain[:, None] * torch.stack(rows)).reshape(-1)
    return target, drafts, plain


@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_law(rule):
    """For every seed of the choice: nothing is averaged out but drafts and coins."""
    target, drafts, plain = laws()
    for seed in range(5):
        found = loop_law(target, drafts, 4, rule, choosing(seed))
        assert float((found - plain).abs().sum()) < 1e-12


@pytest.mark.parametrize("rule", ["block", "token"])
def test_control_exact_law_of_a_choice_that_peeks(rule):
    target, drafts, plain = laws()
    found = loop_law(target, drafts, 4, rule, peek=True)
    assert abs(float(found.sum()) - 1) < 1e-12
    assert 0.5 * float((found - plain).abs().sum()) > 0.01


class Peeking(BanditDrafter):
    """Chooses by what of its drafters' tokens verification is about to accept."""

    def __init__(self, target, *drafters):
        super().__init__(*drafters, costs=[0.0] * len(drafters))
        self.target = target

    def start(self, requests):
        super().start(requests)
        self.requests, self.last = requests, requests.input_ids[:, -2:]

    def propose(self, gamma, positions, go_on=None):
        self.positions = positions
        return super().propose(gamma, positions, go_on)

    def _choices(self, gamma):
        if gamma == 0:
            return [-1] * len(self.last)
        found = []
        for drafter in self.drafters:
            draft = drafter.propose(gamma, self.positions)  # the same again when it is asked
            text = torch.cat([self.last, draft.tokens], 1)
            rows = self.target.table[text[:, :-1], text[:, 1:]]
            verified = ops.verify(
                rows, draft.tokens, draft.logits, seeds=self.requests.seeds,
                positions=self.positions,
            )  # fmt: skip
            found.append(verified.num_accepted)
        return torch.stack(found).argmax(0).tolist()

    def commit(self, tokens, accepted):
        super().commit(tokens, accepted)
        text = torch.cat([self.last, tokens], 1)
        self.last = text.gather(1, accepted.device.long()[:, None] + torch.tensor([[1, 2]]))

    def select(self, rows, indices):
        super().select(rows, indices)
        self.requests, self.last = self.requests.select(rows), self.last[rows]
        self.positions = self.positions[rows]


def test_control_a_choice_that_peeks_in_the_loop():
    target, _ = tables(4)

    def drafters():
        return UniformDrafter(4), UniformDrafter(3)

    rightly = BanditDrafter(*drafters(), costs=[0.0, 0.0])
    assert p_value(target, rightly, gamma=2, draws=10_000) > ALPHA
    assert p_value(target, Peeking(target, *drafters()), gamma=2, draws=10_000) < ALPHA


@pytest.mark.parametrize("costs", [[0.1, 0.0], None], ids=["together", "timed"])
@pytest.mark.parametrize("rule", ["block", "token"])
def test_joint_law_where_a_batch_chooses_as_one(rule, costs):
    target, draft = tables(4)
    drafter = BanditDrafter(UniformDrafter(4), draft, costs=costs, together=True)
    assert p_value(target, drafter, gamma=2, rule=rule, length=4, draws=10_000) > ALPHA
    assert costs or min(drafter.chosen) > 0  # each is timed once


def test_joint_law_below_a_medium_model():
    target, medium = tables(3)
    small = tables(3, seed=3)[1]
    below = BanditDrafter(UniformDrafter(3), small, costs=[0.0, 0.1])
    drafter = HierarchicalDrafter(medium, below, 2)
    assert p_value(target, drafter, gamma=3, length=5, draws=4_000) > ALPHA
    assert min(below.chosen) > 0


# --- what is learnt ---------------------------------------------------------------------------


def rounds(rule, alphas, gamma, count, rng):
    """Run rounds in which drafter k's tokens are accepted with rate ``alphas[k]``; give choices."""
    found = []
    for _ in range(count):
        k = rule.choose(gamma)
        accepted = next((n for n in range(gamma) if rng.random() >= alphas[k]), gamma)
        rule.learn(k, gamma, gamma, accepted)
        found.append(k)
    return found


@pytest.mark.parametrize(
    ("alphas", "costs"),
    [
        ([0.3, 0.6, 0.8], [0.0, 0.05, 0.4]),  # the second: neither cheapest nor most accepted
        ([0.9, 0.5], [0.1, 0.0]),
        ([0.4, 0.6], [0.0, 0.5]),
    ],
)
def test_the_choice_finds_the_best_by_theorem_8(alphas, costs):
    gamma = 5
    worth = [theory.walltime_factor(a, gamma, c) for a, c in zip(alphas, costs, strict=True)]
    best = worth.index(max(worth))
    for seed in range(5):
        found = rounds(ThompsonChoice(costs, seed), alphas, gamma, 600, random.Random(seed))
        assert found[-300:].count(best) > 270


def test_the_choice_goes_by_what_was_drafted():
    """A drafter that seldom proposes costs little then, and gives little."""
    rule = ThompsonChoice([0.5, 0.5], seed=2)
    for _ in range(200):
        k = rule.choose(4)
        rule.learn(k, 4, 0 if k else 4, 0 if k else 1)
    idle = rule.arms[1]
    assert idle.round_cost(4) == 1.0 and rule.arms[0].round_cost(4) == 3.0
    assert idle.trials > 170  # 1 token a call against 2 in three


def test_memory_follows_a_text_that_changes():
    found = {}
    for keep in (1.0, 1 - 1 / 20):
        rule, rng = ThompsonChoice([0.1, 0.1], seed=4), random.Random(5)
        found[keep] = []
        for alphas in ([0.8, 0.3], [0.2, 0.7]):
            for _ in range(150):
                rule.forget(keep)
                found[keep] += rounds(rule, alphas, 4, 1, rng)
    assert found[1 - 1 / 20][190:].count(1) > 90 > found[1.0][190:].count(1)


class Clocked(UniformDrafter):
    """Takes its time."""

    def __init__(self, vocab_size, seconds, now):
        super().__init__(vocab_size)
        self.seconds, self.now = seconds, now

    def propose(self, gamma, positions, go_on=None):
        self.now[0] += self.seconds
        return super().propose(gamma, positions, go_on)


def test_rounds_are_timed_where_no_costs_are_given():
    """Two drafters of equal tokens; the first round, which runs the prompts, is slow."""
    target, _ = tables(4)
    now, calls = [0.0], itertools.count()
    drafters = Clocked(4, 2.0, now), Clocked(4, 1.0, now)

    def clock():
        now[0] += 100.0 if next(calls) == 1 else 1.0  # the target's call
        return now[0]

    drafter = BanditDrafter(*drafters, costs=None, clock=clock)
    specdec_ext.generate(
        target, drafter, torch.tensor([[1, 2]] * 3), max_new_tokens=200, gamma=3, seeds=1,
        temperature=1.0, eos_token_id=(),
    )  # fmt: skip
    first, second = drafter.chosen
    assert second > 5 * first and drafter.together
    arms = drafter._rules[0].arms
    assert arms[0].round_cost(3) == 3.0 and arms[1].round_cost(3) == 2.0


# --- in the loop ------------------------------------------------------------------------------


class Turns(BanditDrafter):
    """Has its drafters by turns, and sees to it that nothing is rejected of the last one's."""

    turn = tested = 0

    def _choices(self, gamma):
        self.turn += 1
        first = 0 if self.together else 1
        return [(self.turn + first * b) % len(self.drafters) for b in range(len(self._asked))]

    def commit(self, tokens, accepted):
        for b, k in enumerate(self._picks):
            if k == len(self.drafters) - 1:
                used = min(self._shares[k].used.host[b], self._asked[b])
                assert accepted.host[b] >= used
                self.tested += used
        super().commit(tokens, accepted)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("batch", [1, 6])
def test_a_model_knows_what_came_out_of_others_rounds(batch, together):
    """The target drafts for itself by turns with others: of its own tokens none is rejected.

    The table model gives NaN for any slip of the cache: a token that was not taken in, or one left.
    """
    target, _ = tables(6, scale=2.5)
    ids = torch.randint(0, 6, (batch, 5), generator=torch.Generator().manual_seed(batch))
    mask = (torch.arange(5) >= torch.arange(batch)[:, None] % 4).long()
    drafter = Turns(
        LookupDrafter(), UniformDrafter(6), target, costs=[0.0, 0.0, 0.1], together=together
    )
    _, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, seeds=11, temperature=1.0, gamma=4,
        max_new_tokens=[200 // batch + 3 * b for b in range(batch)],
    )  # fmt: skip
    assert drafter.tested > 50 and statistics.rejected > 10


def test_choices_are_a_function_of_the_seed():
    target, draft = tables(4)

    def run(seed):
        drafter = BanditDrafter(UniformDrafter(4), draft, LookupDrafter(), costs=[0.0, 0.3, 0.0])
        found = specdec_ext.generate(
            target, drafter, torch.tensor([[1, 2]]), max_new_tokens=60, seeds=seed,
            temperature=1.0, eos_token_id=(),
        )  # fmt: skip
        return found.sequences.tolist(), tuple(drafter.chosen), found.statistics.rounds

    assert run(3) == run(3)
    assert len({run(seed)[1] for seed in range(6)}) > 3


def test_a_batch_that_chooses_as_one_asks_one_drafter_a_round():
    asked = []

    class Noted(UniformDrafter):
        def propose(self, gamma, positions, go_on=None):
            asked.append(self)
            return super().propose(gamma, positions, go_on)

    target, _ = tables(5)
    for together in (True, False):
        asked.clear()
        drafter = BanditDrafter(Noted(5), Noted(4), costs=[0.1, 0.1], together=together)
        statistics = specdec_ext.generate(
            target, drafter, torch.tensor([[1, 2]] * 8), max_new_tokens=20, gamma=3,
            temperature=1.0, seeds=5,
        ).statistics  # fmt: skip
        assert (len(asked) <= statistics.rounds) == together


def test_a_request_without_room_is_no_trial():
    """Its final token ends it: nothing can be accepted, and nothing is learnt."""
    drafter = BanditDrafter(LookupDrafter(), costs=[0.0])
    positions = start(drafter, [[1, 2, 1, 2], [1, 2, 1, 2]])
    drafter._room = [1, 9]
    draft = drafter.propose(3, positions)
    assert draft.tokens.tolist() == [[-1] * 3, [1, 2, 1]]
    commit(drafter, [[7, 0, 0, 0], [1, 2, 1, 2]], [0, 3])
    assert [rule.arms[0].trials for rule in drafter._rules] == [0, 1]
    assert drafter._rules[1].arms[0].won == 1.0 and drafter._room == [0, 5]
