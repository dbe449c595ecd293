"""Gamma policies: alone, on simulated streams, and in `generate`, whose law stays as it is."""

from __future__ import annotations

import random

import pytest
import torch
from generate_models import tables
from test_generate_law import ALPHA, p_value

import specdec_ext
from specdec_ext import theory
from specdec_ext.decoding import (
    ConfidenceStop,
    Draft,
    EntropyBound,
    FixedGamma,
    GradientAscent,
    HeuristicGamma,
    LookupDrafter,
    MovingThreshold,
    NgramDrafter,
    RenewalRule,
    StackedDrafter,
    SuffixDrafter,
    drafting,
)
from specdec_ext.decoding.drafters import estimates_chances
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafting import weighed

POLICIES = {
    "fixed": lambda: FixedGamma(2),
    "heuristic": lambda: HeuristicGamma(1, limit=4),
    "confidence": lambda: ConfidenceStop(4, threshold=0.5),
    "entropy": lambda: EntropyBound(4, threshold=0.5),
    "moving confidence": lambda: ConfidenceStop(4, MovingThreshold(0.5, epsilon=1.0)),
    "moving entropy": lambda: EntropyBound(4, MovingThreshold(0.5, alpha=0.5, epsilon=1.0)),
    "gradient": lambda: GradientAscent(c=0.1, gamma=1, limit=4),
    "renewal": lambda: RenewalRule(limit=4, c=0.3, probe=3),
}


# --- simulated streams ------------------------------------------------------------------------


class Stream:
    """Rounds of drafting and verification where acceptance is drawn and time is counted.

    Draft token after draft token is accepted with a rate that ``rate(round)`` gives, or with one of
    ``confidences``, drawn for each token, which is also what the draft thinks of it. A draft call
    takes ``c``, a target call 1 and ``growth`` more for each draft token, and ``setup`` more if
    there are any, all with relative noise. Looking at the clock takes ``tick``.
    """

    def __init__(
        self, c, rate=None, confidences=(), batch=1, growth=0.0, setup=0.0, noise=0.0, tick=0.0,
        asks=True,
    ):  # fmt: skip
        self.c, self.rate, self.confidences, self.batch = c, rate, confidences, batch
        self.growth, self.setup, self.noise, self.tick = growth, setup, noise, tick
        self.asks = asks
        self.rng, self.now, self.round = random.Random(0), 0.0, 0

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def spend(self, time: float) -> None:
        self.now += time * (1 + self.noise * self.rng.uniform(-1, 1))

    def draft(self, policy) -> list[list[float]]:
        """Return the acceptance rate of each token that each request drafts."""
        lengths = policy.lengths()
        assert len(lengths) == self.batch and 0 <= min(lengths) <= max(lengths) <= policy.limit
        rates = [[] for _ in lengths]
        going = [True] * self.batch
        for i in range(max(lengths)):
            self.spend(self.c)
            for b in range(self.batch):
                rate = self.rng.choice(self.confidences or (self.rate and self.rate(self.round),))
                if going[b] and i < lengths[b]:
                    rates[b].append(rate)
            if self.asks and policy.go_on is not None and i < max(lengths) - 1:
                law = torch.tensor([row[-1] if row else 0.5 for row in rates])
                logits = torch.stack([law, 1 - law], 1).log() if self.confidences else None
                asked = policy.go_on(torch.zeros(self.batch, dtype=torch.int64), logits).tolist()
                going = [a and b for a, b in zip(going, asked, strict=True)]
                if not any(going):
                    break
        return rates

    def run(self, policy, rounds: int) -> tuple[float, float]:
        """Return (tokens of a request a target call's time, draft tokens of request 0 a round)."""
        tokens = drafted = 0
        begin = self.now
        for _ in range(rounds):
            rates = self.draft(policy)
            lengths = list(map(len, rates))
            accepted = [
                next((n for n, rate in enumerate(row) if self.rng.random() >= rate), len(row))
                for row in rates
            ]
            self.spend(1 + self.growth * max(lengths) + self.setup * any(lengths))
            if getattr(policy, "reads_alpha", False):
                tested = zip(lengths, accepted, strict=True)
                policy.learn_alpha([[1.0] * n + [0.0] * (n < length) for length, n in tested])
            policy.commit(lengths, accepted)
            self.round += 1
            tokens += sum(accepted) + self.batch
            drafted += lengths[0]
        return tokens / self.batch / (self.now - begin), drafted / rounds


PAIRS = [(0.8, 0.05), (0.9, 0.02), (0.6, 0.1), (0.5, 0.3), (0.95, 0.05)]


@pytest.mark.parametrize("alpha, c", PAIRS)
def test_gradient_ascent_finds_the_best_gamma(alpha, c):
    stream, policy = Stream(c, lambda _: alpha), GradientAscent(c, limit=24)
    policy.start(1)
    stream.run(policy, 500)
    assert stream.run(policy, 1000)[1] == pytest.approx(theory.optimal_gamma(alpha, c), abs=1.5)


def test_heuristic_by_hand():
    policy = HeuristicGamma(3, limit=6)
    policy.start(4)
    policy.commit([3, 3, 3, 0], [3, 2, 0, 0])
    assert policy.lengths() == [5, 2, 2, 3]
    policy.commit([5, 2, 2, 3], [5, 2, 1, 3])
    assert policy.lengths() == [6, 4, 1, 5]
    policy.select([3, 2])
    policy.commit([5, 1], [0, 0])
    assert policy.lengths() == [4, 1]


# --- what a stop goes by ----------------------------------------------------------------------


def test_confidence_and_entropy_by_hand():
    law = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.0, 0.0, 1.0]])
    logits = law.log() + 3.0
    stop = ConfidenceStop(5, threshold=0.35)
    assert stop.go_on(torch.tensor([0, 1, 0]), logits).tolist() == [True, True, False]
    entropy = torch.special.entr(law).sum(1)  # 0.80, 1.08, 0 nats
    bound = 1 - (0.2 * entropy).sqrt()
    for threshold in (0.5, 0.57, 0.99):
        found = EntropyBound(5, threshold).go_on(torch.tensor([0, 1, 2]), logits)
        assert found.tolist() == (bound >= threshold).tolist()


def test_moving_threshold_by_hand():
    threshold = MovingThreshold()
    threshold.start(4)
    rounds = [
        # drafted, accepted: whole drafts; none; longest drafts; a draft of none
        ([4, 4, 8, 0], [4, 0, 8, 0]),
        ([4, 2, 8, 0], [4, 0, 8, 0]),
        ([4, 4, 8, 5], [4, 1, 8, 5]),
        ([4, 4, 8, 5], [4, 4, 8, 2]),
    ]
    found = []
    for drafted, accepted in rounds:
        threshold.commit(drafted, accepted, limit=8)
        found.append([round(1000 * value, 6) for value in threshold.values])
    # The rates of whole drafts are 1/2, 3/4, 7/8, 15/16, the last one over 0.9; the second's stay
    # under it; 0.1 of a step of 0.01 each time. A draft of the largest length lowers nothing.
    assert found == [[801, 801, 801, 800], [802, 802, 802, 800], [803, 803, 803, 801],
                     [802, 804, 803, 802]]  # fmt: skip
    threshold.select([3, 0])
    threshold.commit([8, 7], [8, 7], limit=8)  # rates (0.45 + 1) / 2 and 31/32
    assert [round(1000 * value, 6) for value in threshold.values] == [803, 801]
    threshold.start(1)
    assert threshold.values == [0.8]


def test_moving_threshold_stays_in_range():
    for goal, bound in ((1.0, 1.0), (0.0, 0.0)):
        threshold = MovingThreshold(0.5, alpha=goal, beta2=0.0, epsilon=0.3)
        threshold.start(1)
        for _ in range(5):
            threshold.commit([3], [1], limit=4)
        assert threshold.values == [bound]


@pytest.mark.parametrize(
    ("policy", "row"),
    [
        (ConfidenceStop(6, MovingThreshold(0.62, epsilon=1.0)), [0.68, 0.32]),
        (EntropyBound(6, MovingThreshold(0.62, epsilon=1.0)), [0.68, 0.32]),  # bound 0.646
    ],
)
def test_a_threshold_moves_for_each_request(policy, row):
    """By 0.1 a round: up for the second request, by which it stops, and down for the first."""
    rows = torch.tensor([row] * 3).log()
    tokens = torch.zeros(3, dtype=torch.int64)
    policy.start(3)
    assert policy.go_on(tokens, rows).tolist() == [True] * 3
    policy.threshold._rates = [1.0] * 3  # as if all had been accepted so far
    policy.commit([2, 2, 0], [2, 0, 0])
    assert policy.go_on(tokens, rows).tolist() == [True, False, True]
    policy.select([1, 0])
    assert policy.go_on(tokens[:2], rows[:2]).tolist() == [False, True]
    policy.start(1)  # as it was
    assert policy.go_on(tokens[:1], rows[:1]).tolist() == [True]


def test_the_more_acceptance_is_aimed_at_the_shorter_are_the_drafts():
    """Half of the tokens are accepted half the time: those end a draft, or the longest is made."""
    found = []
    for alpha in (0.1, 0.95):
        threshold = MovingThreshold(0.7, alpha=alpha, beta1=0.9, epsilon=0.1)
        stream, policy = Stream(0.1, confidences=(0.5, 0.99)), ConfidenceStop(8, threshold)
        policy.start(1)
        stream.run(policy, 200)
        found.append(stream.run(policy, 300)[1])
    assert found[0] > 7 and found[1] < 3


@pytest.mark.parametrize("policy", [ConfidenceStop(3, 1.0), EntropyBound(3, 1.0)])
def test_tokens_without_a_row_go_on(policy):
    assert policy.go_on(torch.tensor([4, -1]), None).tolist() == [True, True]


def test_rows_that_ended_and_rows_without_a_law_raise_nothing():
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [0.0, 1.0]])
    for policy in (ConfidenceStop(3, 0.5), EntropyBound(3, 0.5), RenewalRule(3)):
        policy.start(3)
        policy.lengths()
        found = policy.go_on(torch.tensor([-1, 1, 99]), logits)  # ended, no law, not in the row
        assert found.shape == (3,) and not (found[1] and type(policy) is not RenewalRule)


# --- in the loop ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", POLICIES)
def test_joint_law(name):
    """Five tokens of a vocabulary of 3: up to five rounds, and what the first did decides."""
    target, draft = tables(3)
    assert p_value(target, draft, length=5, gamma=POLICIES[name]()) > ALPHA


class Nosy:
    """Its lengths go by all that it was told, its stops by tokens: odd ones end the draft."""

    limit = 3

    def start(self, batch):
        self.told = [0] * batch
        self.seen = torch.zeros(batch, dtype=torch.int64)

    def lengths(self):
        """Tokens that were rejected, or never tested, count in the next round's length."""
        told = zip(self.told, self.seen.tolist(), strict=True)
        return [1 + (a + s) % 3 for a, s in told]

    def go_on(self, tokens, logits):
        self.seen = self.seen + tokens.clamp(min=0)
        return tokens % 2 == 0

    def commit(self, drafted, accepted):
        self.told = [2 * a + d for a, d in zip(accepted, drafted, strict=True)]

    def select(self, indices):
        self.told = [self.told[b] for b in indices]
        self.seen = self.seen[torch.tensor(indices)]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["block", "token"])
def test_any_policy_that_keeps_what_it_has_seen_is_lossless(rule):
    target, draft = tables(3)
    assert p_value(target, draft, length=5, gamma=Nosy(), rule=rule) > ALPHA


class LeavesOut(ModelDrafter):
    """Leaves out the token behind which the policy ends the draft."""

    def propose(self, gamma, positions, go_on=None):
        tokens, logits, *_ = super().propose(gamma, positions, go_on)
        if gamma == 0:
            return Draft(tokens)
        asked = [go_on(token, row) for token, row in zip(tokens.T, logits.unbind(1), strict=True)]
        return Draft(torch.where(torch.stack(asked, 1).cumprod(1).bool(), tokens, -1), logits)


def test_control_draft_that_ends_before_the_token_that_was_seen():
    target, draft = tables(3)
    policy = ConfidenceStop(2, threshold=0.4)
    assert p_value(target, LeavesOut(draft), gamma=policy) < ALPHA


class Cuts:
    """Leaves tokens out again: those behind the first whose chance is low."""

    limit, go_on = 3, None

    def start(self, batch):
        self.batch, self.cut = batch, 0

    def lengths(self):
        return [3] * self.batch

    def keep(self, chances):
        kept = [next((n for n, p in enumerate(row) if p < 0.5), len(row)) for row in chances]
        self.cut += sum(map(len, chances)) - sum(kept)
        return kept

    def commit(self, drafted, accepted):
        pass

    def select(self, indices):
        self.batch = len(indices)


def free_drafter(name, vocabulary):
    """Return a drafter whose tokens come with chances."""
    texts = [[0, 1, 2, 0, 2, 2, 1, 0, 1, 1, 2]]
    likeliest = NgramDrafter(vocabulary, 2, texts=texts, sampled=False)
    if name == "stack":
        return StackedDrafter(LookupDrafter(min_match=1), likeliest, continued=True)
    return likeliest if name == "ngram" else SuffixDrafter(least=0.0)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    "name",
    ["suffix", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ngram", "stack"))],
)
def test_leaving_out_tokens_that_were_not_drawn_is_lossless(name, rule):
    target, _ = tables(3)
    for policy in (Cuts(), RenewalRule(limit=3, probe=3)):
        drafter = free_drafter(name, 3)
        found = p_value(target, drafter, length=3, draws=3000, gamma=policy, rule=rule)
        assert found > ALPHA
        assert type(policy) is RenewalRule or policy.cut > 1000


class Drawn(ModelDrafter):
    """Draws tokens, and says what their chances are all the same."""

    def propose(self, gamma, positions, go_on=None):
        tokens, logits, *_ = super().propose(gamma, positions, go_on)
        if gamma == 0:
            return Draft(tokens)
        laws = logits.softmax(-1).gather(2, tokens[..., None])[..., 0]
        return Draft(tokens, logits, chances=laws.tolist())


def test_control_tokens_that_were_drawn_are_left_out(monkeypatch):
    """By their chances, that is by their value: the law is another one. They are refused."""
    target, draft = tables(3)
    with pytest.raises(ValueError, match="chances are those of 1 requests' deterministic tokens"):
        specdec_ext.generate(
            target, Drawn(draft), torch.tensor([[1]]), max_new_tokens=4, temperature=1.0
        )
    monkeypatch.setattr(drafting, "check_draft", lambda *_: None)
    assert p_value(target, Drawn(draft), gamma=Cuts()) > ALPHA
    monkeypatch.setattr(drafting, "weighed", carelessly_weighed)
    assert p_value(target, Drawn(draft), gamma=Cuts()) < ALPHA


def carelessly_weighed(policy, draft, lengths):
    """Cut drawn tokens, too."""
    if draft.chances is None:
        return draft
    kept = torch.tensor(
        policy.keep([row[:n] for row, n in zip(draft.chances, lengths, strict=True)])
    )
    places = torch.arange(draft.tokens.shape[1])
    return draft._replace(tokens=draft.tokens.masked_fill(places >= kept[:, None], -1))


def test_weighed_by_hand():
    tokens = torch.tensor([[5, 6, 7], [8, 9, -1]])
    draft, policy = Draft(tokens, chances=[[0.9, 0.6, 0.2], [0.1, 0.9]]), Cuts()
    policy.start(2)
    assert weighed(policy, draft, [3, 3]).tokens.tolist() == [[5, 6], [-1, -1]]
    assert weighed(policy, draft, [1, 2]).tokens.tolist() == [[5], [-1]]
    assert weighed(FixedGamma(3), draft, [3, 3]) is draft
    assert weighed(policy, Draft(tokens), [3, 3]).tokens is tokens
    sure = Draft(tokens, chances=[[0.9, 0.6, 0.8], [0.9, 0.9]])
    assert weighed(policy, sure, [3, 3]) is sure


@pytest.mark.parametrize("name", ["suffix", "ngram", "stack"])
def test_chances_are_of_every_token_and_a_stack_passes_them_on(name):
    target, _ = tables(6)
    seen = []

    class Sees(Cuts):
        def keep(self, chances):
            seen.extend(chances)
            return [len(row) for row in chances]

    found = specdec_ext.generate(
        target, free_drafter(name, 6), torch.tensor([[1, 2, 0, 1, 2]] * 2), gamma=Sees(), seeds=4,
        max_new_tokens=30, temperature=0.7,
    )  # fmt: skip
    assert sum(map(len, seen)) >= found.statistics.drafted > 20
    assert all(0 <= p <= 1 for row in seen for p in row)
    stacked = StackedDrafter(free_drafter(name, 6), tables(6)[1])  # a model's are unknown
    assert not estimates_chances(stacked) and estimates_chances(free_drafter(name, 6))


@pytest.mark.parametrize("name", [*POLICIES, "nosy"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_tokens_are_those_of_plain_decoding(name, rule):
    target, draft = tables(6, noise=0.7)
    prompts = torch.randint(0, 6, (5, 4), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[3, :2] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": [31, 9, 25, 1, 14], "rule": rule, "seeds": 3,
        "temperature": 0.9, "pad_token_id": 0,
    }  # fmt: skip
    policy = Nosy() if name == "nosy" else POLICIES[name]()
    plain = specdec_ext.generate(target, None, prompts, **options).sequences
    found, statistics = specdec_ext.generate(target, draft, prompts, gamma=policy, **options)
    assert torch.equal(found, plain)
    assert statistics.accepted > 0 and statistics.gamma == policy.limit
    again = specdec_ext.generate(target, draft, prompts, gamma=policy, **options)  # used twice
    assert torch.equal(again.sequences, plain)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "renewal"])
def test_output_does_not_depend_on_batch_mates(name):
    target, draft = tables(6, noise=0.7)
    prompts = torch.randint(0, 6, (6, 3), generator=torch.Generator().manual_seed(2))
    limits = [4, 30, 11, 22, 7, 17]
    options = {"temperature": 1.0, "pad_token_id": 0}
    together = specdec_ext.generate(
        target, draft, prompts, max_new_tokens=limits, seeds=5, gamma=POLICIES[name](), **options
    )
    drafted = 0
    for b, limit in enumerate(limits):
        alone = specdec_ext.generate(
            target, draft, prompts[b : b + 1], max_new_tokens=limit, seeds=5 + b,
            gamma=POLICIES[name](), **options,
        )  # fmt: skip
        assert torch.equal(together.sequences[b, : 3 + limit], alone.sequences[0])
        drafted += alone.statistics.drafted
    assert together.statistics.drafted == drafted


def test_a_stop_saves_draft_calls():
    target, draft = tables(8, noise=1.0)
    runs = [
        specdec_ext.generate(
            target, draft, torch.tensor([[1, 2]]), max_new_tokens=200, temperature=1.0, seeds=1,
            gamma=policy,
        ).statistics
        for policy in (FixedGamma(6), ConfidenceStop(6, threshold=0.5))
    ]  # fmt: skip
    assert runs[1].draft_calls < 0.6 * runs[0].draft_calls
    assert runs[1].accepted / runs[1].drafted > 1.2 * runs[0].accepted / runs[0].drafted


def test_an_int_is_a_fixed_policy():
    target, draft = tables(6)
    runs = [
        specdec_ext.generate(
            target, draft, torch.tensor([[1, 2]] * 3), max_new_tokens=[20, 3, 9], seeds=2,
            temperature=1.0, gamma=gamma,
        )
        for gamma in (3, FixedGamma(3))
    ]  # fmt: skip
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].statistics.as_dict()["drafted"] == runs[1].statistics.as_dict()["drafted"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: FixedGamma(-1),
        lambda: HeuristicGamma(0),
        lambda: HeuristicGamma(9, limit=8),
        lambda: ConfidenceStop(3, threshold=1.5),
        lambda: EntropyBound(3, weight=-1.0),
        lambda: MovingThreshold(-0.1),
        lambda: MovingThreshold(beta2=1.5),
        lambda: GradientAscent(c=-0.1),
        lambda: GradientAscent(c=0.1, gamma=0),
        lambda: RenewalRule(0),
        lambda: RenewalRule(probe=1),
        lambda: RenewalRule(ahead=0.0),
        lambda: RenewalRule(ahead=float("nan")),
    ],
)
def test_arguments_out_of_range(call):
    with pytest.raises(ValueError, match=r"must be (in|finite and at least|at least)"):
        call()
