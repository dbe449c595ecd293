"""Inside a hierarchy: gamma policies and what they are told, stacks and what they take back."""

from __future__ import annotations

import pytest
import torch
from generate_models import TableModel, pair, prompts, tables
from test_generate_law import ALPHA, p_value
from test_policies import LeavesOut, Nosy

import specdec_ext
from specdec_ext.decoding import (
    AggressiveDrafter,
    ConfidenceStop,
    EntropyBound,
    FixedGamma,
    GradientAscent,
    HeuristicGamma,
    HierarchicalDrafter,
    LookupDrafter,
    MovingThreshold,
    NgramDrafter,
    RenewalRule,
    Requests,
    StackedDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.restarted import Restarted

# --- gamma policies ---------------------------------------------------------------------------


POLICIES = {
    "heuristic": lambda: HeuristicGamma(1, limit=3),
    "confidence": lambda: ConfidenceStop(3, threshold=0.5),
    "entropy": lambda: EntropyBound(3, threshold=0.5),
    "gradient": lambda: GradientAscent(c=0.1, gamma=1, limit=3),
    "moving": lambda: ConfidenceStop(3, MovingThreshold(0.5, epsilon=1.0)),
}
#: These are told of more than a request of its own.
OTHERS = {"nosy": Nosy, "renewal": lambda: RenewalRule(limit=3, c=0.3, probe=3)}


@pytest.fixture(scope="module")
def models():
    """Return a target, a medium, a small and a tiny model over three tokens."""
    target, medium = tables(3)
    return [target, medium, tables(3, seed=3)[1], tables(3, seed=4)[1]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, "block") for name in [*POLICIES, *OTHERS]] + [("moving", "token"), ("nosy", "token")],
)
def test_joint_law(models, name, rule):
    target, medium, small, _ = models
    drafter = HierarchicalDrafter(medium, small, {**POLICIES, **OTHERS}[name](), rule=rule)
    assert p_value(target, drafter, gamma=3, length=5, draws=4_000, rule=rule) > ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize("refill", [False, True])
def test_joint_law_of_policies_on_every_level(models, refill):
    target, medium, small, tiny = models
    inner = HierarchicalDrafter(small, tiny, ConfidenceStop(2, threshold=0.6), refill=refill)
    drafter = HierarchicalDrafter(medium, inner, Nosy(), refill=refill)
    policy = ConfidenceStop(3, threshold=0.5)
    assert p_value(target, drafter, gamma=policy, length=4, draws=5_000) > ALPHA


def test_control_inner_draft_that_ends_before_the_token_that_was_seen(models):
    """What the medium model makes of it is not of its law, and the target takes it to be."""
    target, medium, small, _ = models
    drafter = HierarchicalDrafter(medium, LeavesOut(small), ConfidenceStop(2, threshold=0.4))
    assert p_value(target, drafter, gamma=2, draws=10_000) < ALPHA


@pytest.mark.parametrize("below", ["model", "levels", "stack"])
@pytest.mark.parametrize("name", POLICIES)
def test_output_does_not_depend_on_batch_mates(name, below):
    """Rounds are keyed by their number, so a draft of another length makes other tokens."""
    target, medium = tables(6, noise=0.7)
    small, tiny = tables(6, seed=1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 6, (5, 5), generator=generator)
    seeds = torch.randint(2**62, (5,), generator=generator)
    limits = [3, 17, 30, 12, 20]

    def run(rows):
        draft = {
            "model": small,
            "levels": HierarchicalDrafter(small, tiny, ConfidenceStop(2, 0.5), refill=True),
            "stack": StackedDrafter(LookupDrafter(min_match=3), small),
        }[below]
        return specdec_ext.generate(
            target, HierarchicalDrafter(medium, draft, POLICIES[name]()), ids[rows], gamma=5,
            max_new_tokens=limits[rows], seeds=seeds[rows], temperature=1.0, pad_token_id=0,
            eos_token_id=(),
        ).sequences  # fmt: skip

    together = run(slice(None))
    for row in range(5):
        alone = run(slice(row, row + 1))
        assert torch.equal(together[row, : 5 + limits[row]], alone[0])


@pytest.mark.parametrize("name", [*POLICIES, *OTHERS])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_tokens_are_those_of_plain_decoding(name, rule):
    """Also those of drafts whose law nobody reads: stops see the rows all the same."""
    target, medium = tables(6, noise=0.7)
    _, small = tables(6, seed=1)
    ids, mask = prompts([4, 2, 4, 1], vocabulary=6)
    options = {
        "attention_mask": mask, "max_new_tokens": [31, 9, 25, 1], "rule": rule, "seeds": 3,
        "temperature": 0.9, "pad_token_id": 0, "eos_token_id": (),
    }  # fmt: skip
    drafter = HierarchicalDrafter(medium, small, {**POLICIES, **OTHERS}[name]())
    plain = specdec_ext.generate(target, None, ids, **options).sequences
    for _ in range(2):  # a drafter, and its policy, may be used again
        found, statistics = specdec_ext.generate(target, drafter, ids, gamma=4, **options)
        assert torch.equal(found, plain) and statistics.accepted > 0


class Recorded(HeuristicGamma):
    """Keeps what it is told; asked, it always goes on."""

    def start(self, batch):
        super().start(batch)
        self.noted, self.asked = [], []
        self.go_on = self._goes_on

    def _goes_on(self, tokens, logits):
        self.asked.append([token >= 0 for token in tokens.tolist()])
        return torch.ones_like(tokens, dtype=torch.bool)

    def commit(self, drafted, accepted):
        super().commit(drafted, accepted)
        self.noted.append((list(drafted), list(accepted)))


def test_what_a_policy_is_told_by_hand():
    """Equal models accept everything, so that every number follows from the lengths."""
    target, _ = tables(5)
    policy = Recorded(1, limit=4)
    specdec_ext.generate(
        target, HierarchicalDrafter(target, target, policy), torch.tensor([[1, 2], [3, 4]]),
        max_new_tokens=[20, 5], gamma=8, temperature=1.0, seeds=3, eos_token_id=(),
    )  # fmt: skip
    assert policy.noted == [
        ([1, 1], [1, 1]),  # bursts of 1 + 1
        ([3, 2], [3, 2]),  # 3 after 1; the second request has room for 4 tokens, and has 2
        ([4, 0], [4, 0]),  # 3 + 2 over the limit of 4; the second request has its tokens
        ([4], [4]),  # 9 and 5 tokens are emitted; the second request is at its end
        ([4], [4]),  # 5 of 8 tokens, 10 of 8
        ([1], [1]),  # 18 are emitted: one draft token of the target, one of the medium model
    ]
    first, second = [True, True], [True, False]
    assert policy.asked == [first] * 2 + [second] * 3 + [[True]] * 6


def test_refill_is_one_round_of_the_policy():
    target, _ = tables(5)
    policy = Recorded(1, limit=4)
    drafter = HierarchicalDrafter(target, target, policy, refill=True)
    specdec_ext.generate(
        target, drafter, torch.tensor([[1, 2]]), max_new_tokens=18, gamma=5, temperature=1.0,
        seeds=3, eos_token_id=(),
    )  # fmt: skip
    assert policy.noted == [([n], [n]) for n in (1, 3, 4)]
    assert drafter.calls_by_level == [4 + 2 + 1, 1 + 3 + 4]


def test_a_policy_that_drafts_nothing_leaves_the_medium_model_alone(models):
    target, medium, small, _ = models
    drafter = HierarchicalDrafter(medium, small, FixedGamma(0))
    ids = torch.tensor([[1, 2]])
    options = {"max_new_tokens": 12, "gamma": 3, "temperature": 1.0, "eos_token_id": ()}
    statistics = specdec_ext.generate(target, drafter, ids, seeds=1, **options).statistics
    medium_calls, small_calls = drafter.calls_by_level
    assert medium_calls == statistics.drafted and small_calls == 0


def test_drafts_that_end_early_and_drafters_that_are_not_asked():
    """Lookups propose nothing at times: told as 0 of 0; n-gram models do not ask."""
    target, medium = tables(5)
    for draft in (LookupDrafter(min_match=3), NgramDrafter(5)):
        policy = Recorded(2, limit=3)
        specdec_ext.generate(
            target, HierarchicalDrafter(medium, draft, policy), torch.tensor([[1, 2]]),
            max_new_tokens=40, gamma=4, temperature=1.0, seeds=3, eos_token_id=(),
        )  # fmt: skip
        drafted = [noted[0][0] for noted in policy.noted]
        accepted = [noted[1][0] for noted in policy.noted]
        assert (0 in drafted) == isinstance(draft, LookupDrafter) and max(drafted) > 1
        assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True)) and not policy.asked


def test_a_request_that_drafts_nothing_learns_nothing():
    """Else what a request does would depend on how long its batch mates go on."""
    threshold = MovingThreshold()
    policies = [HeuristicGamma(5), GradientAscent(c=0.05), EntropyBound(3, threshold)]
    for policy in policies:
        policy.start(1)
        policy.commit([3], [3])
        before = policy.lengths(), list(threshold.values)
        for _ in range(50):
            policy.commit([0], [0])
        assert (policy.lengths(), threshold.values) == before


# --- drafters that take tokens back -----------------------------------------------------------


#: Stacks over a small and a tiny model of so many tokens.
STACKS = {
    "lookup, model": lambda small, tiny, v: StackedDrafter(LookupDrafter(min_match=2), small),
    "lookup, then model": lambda small, tiny, v: StackedDrafter(
        LookupDrafter(min_match=1, max_match=1), small, continued=True
    ),
    "lookup, levels": lambda small, tiny, v: StackedDrafter(
        LookupDrafter(min_match=2), HierarchicalDrafter(small, tiny, 2)
    ),
    "stack in a stack": lambda small, tiny, v: StackedDrafter(
        StackedDrafter(LookupDrafter(min_match=3), NgramDrafter(v, 3), continued=True), small
    ),
    "uniform, model": lambda small, tiny, v: StackedDrafter(
        LookupDrafter(min_match=2), UniformDrafter(v), small
    ),
}


def run_stack(stack, target, medium, **options):
    """Generate under a hierarchy over this stack, of ragged prompts up to ragged limits."""
    ids, mask = prompts([1, 9, 4, 6], vocabulary=target.config.vocab_size)
    drafter = HierarchicalDrafter(medium, stack, 3)
    found = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=[40, 12, 40, 25], gamma=5,
        eos_token_id=(), pad_token_id=0, **options,
    )  # fmt: skip
    return found, drafter


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_that_takes_tokens_back_drafts_as_one_started_again(name):
    """To the bit, under the block rule, which lets other drafts make other tokens."""
    target, medium = tables(5)
    _, small = tables(5, seed=3)
    _, tiny = tables(5, seed=4)
    results = []
    for wrap in (Restarted, lambda stack: stack, Restarted):
        fed = len(small.fed)
        (sequences, statistics), drafter = run_stack(
            wrap(STACKS[name](small, tiny, 5)), target, medium, temperature=1.0, seeds=3
        )
        tokens = sum(length for _, length in small.fed[fed:])
        results.append((sequences, statistics.histogram, drafter.calls_by_level[0], tokens))
    # The first run also asks the models how their rows may lie: it is not counted.
    (*rolled_back, tokens), (*restarted, tokens_again) = results[1:]
    assert torch.equal(rolled_back[0], restarted[0]) and rolled_back[1:] == restarted[1:]
    assert 0.1 < statistics.accepted_of_tested < 0.9
    # Started again, a model that is not asked runs no prompt; else every text is run at most once.
    once = sum([1, 9, 4, 6]) + sum([40, 12, 40, 25])
    assert tokens <= once or tokens < 0.6 * tokens_again


@pytest.mark.parametrize("name", STACKS)
def test_greedy_equals_plain_decoding(name):
    """Of a model with a window, whose cache must stay without holes."""
    target, medium = pair("mistral_window", noise=0.02)
    _, small = pair("mistral_window", noise=0.05)
    _, tiny = pair("mistral_window", noise=0.1)
    (sequences, statistics), _ = run_stack(STACKS[name](small, tiny, 67), target, medium)
    ids, mask = prompts([1, 9, 4, 6])
    plain = specdec_ext.generate(
        target, None, ids, attention_mask=mask, max_new_tokens=[40, 12, 40, 25], pad_token_id=0,
        eos_token_id=(),
    ).sequences  # fmt: skip
    assert torch.equal(sequences, plain) and 0 < statistics.accepted_of_tested < 1


def test_a_model_in_a_stack_is_filled_once():
    """Of a long prompt; what it is fed later are tokens that it lacks, whatever is taken back."""
    target, medium = tables(5)
    _, small = tables(5, seed=3)
    stack = StackedDrafter(LookupDrafter(min_match=3), small)
    drafter = HierarchicalDrafter(medium, stack, 3)
    ids = torch.randint(0, 5, (1, 60), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first time the models are also asked how their rows may lie
        small.fed.clear()
        _, statistics = specdec_ext.generate(
            target, drafter, ids, max_new_tokens=100, gamma=5, temperature=1.0, seeds=1,
            eos_token_id=(),
        )  # fmt: skip
    lengths = [length for _, length in small.fed]
    assert statistics.rounds > 20 and stack.calls > 40
    # The prompt, behind it what the model lacks and drafts from: they ride on one call.
    assert 60 <= lengths[0] < 60 + 12 and max(lengths[1:]) < 12
    assert len(lengths) <= stack.calls + 1


class NeverTold:
    """Proposes what follows its text in a count, so that it must know the text; cannot revise."""

    calls = 0

    def __init__(self, vocabulary):
        self.vocabulary, self.starts = vocabulary, 0

    def start(self, requests):
        self.starts += 1
        self.last = requests.input_ids[:, -1]

    def propose(self, gamma, positions, go_on=None):
        steps = torch.arange(1, gamma + 1)
        return specdec_ext.decoding.Draft((self.last[:, None] + steps) % self.vocabulary)

    def commit(self, tokens, accepted):
        self.last = tokens.gather(1, accepted.device.long()[:, None])[:, 0]

    def observe(self, tokens, gained):
        told = (gained.device.long()[:, None] - 1).clamp(min=0)
        self.last = torch.where(gained.device > 0, tokens.gather(1, told)[:, 0], self.last)

    def select(self, rows, indices):
        self.last = self.last[rows]


def counting(vocabulary):
    """Return a table model that counts on, round and round."""
    table = torch.zeros(vocabulary, vocabulary, vocabulary)
    table[:, range(vocabulary), [*range(1, vocabulary), 0]] = 9.0
    return TableModel(table)


def test_a_stacked_drafter_that_cannot_take_tokens_back_is_started_again():
    model, own = counting(9), NeverTold(9)
    drafter = HierarchicalDrafter(model, StackedDrafter(LookupDrafter(min_match=9), own), 3)
    _, statistics = specdec_ext.generate(
        model, drafter, torch.tensor([[3], [7]]), max_new_tokens=9, gamma=4, eos_token_id=()
    )
    assert statistics.rounds == 2 and own.starts == 2  # the last round has no successor
    assert drafter.calls_by_level[0] == 2  # all that it proposed was right


# --- drafters that read text ------------------------------------------------------------------


READERS = {
    "lookup": lambda: LookupDrafter(),
    "n-gram": lambda: NgramDrafter(4, 3, sampled=False),
    "aggressive": lambda: AggressiveDrafter([[1, 2, 3, 0, 2, 1], [2, 2, 1, 3], [0, 1, 0, 2, 3]]),
    "aggressive prompt": lambda: AggressiveDrafter(),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_took_tokens_back_is_as_if_it_never_had_them(name, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    def started(rows):
        drafter = READERS[name]()
        ends = torch.full((3,), 99)
        drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
        drafter.select(torch.tensor(rows), rows)
        return drafter

    ids, rows = random(4, 3, 5), [0, 1, 2]
    drafter, texts = started(rows), [[], [], []]
    for step in range(12):
        if step == 6:
            rows = [2, 0]
            drafter.select(torch.tensor(rows), rows)
            texts = [texts[i] for i in rows]
        counts = random(4, len(rows)).tolist()
        tokens = random(4, len(rows), 3)
        drafter.observe(tokens, Counts(counts, torch.tensor(counts)))
        for text, row, n in zip(texts, tokens.tolist(), counts, strict=True):
            text += row[:n]
        drop = [int(random(min(len(text), 4) + 1, 1)) for text in texts]
        last = random(4, len(rows), 1)
        drafter.revise(last, Counts(drop, torch.tensor(drop)))
        for b, n in enumerate(drop):
            texts[b] = [*texts[b][: len(texts[b]) - n], int(last[b])]
        fresh = started(rows)
        for column in range(max(map(len, texts))):  # one by one, as plain decoding would
            there = [int(column < len(text)) for text in texts]
            token = [[text[column] if column < len(text) else 0] for text in texts]
            fresh.observe(torch.tensor(token), Counts(there, torch.tensor(there)))
        positions = torch.zeros(len(rows), dtype=torch.int64)
        found, expected = (d.propose(4, positions).tokens for d in (drafter, fresh))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "inputs", [None, [[*range(1, 21)], [*range(1, 21)]]], ids=["prompt", "own"]
)
def test_aggressive_decoding_in_a_hierarchy_keeps_its_place(inputs):
    """Its input stays what it was when requests end, and where it stands in it."""
    model = counting(30)
    ids = torch.tensor([[*range(1, 21), 0]] * 2)
    drafter = HierarchicalDrafter(model, AggressiveDrafter(inputs), 4)
    found, statistics = specdec_ext.generate(
        model, drafter, ids, max_new_tokens=[21, 9], gamma=8, eos_token_id=(), pad_token_id=0
    )
    assert found[0, 21:].tolist() == [*range(1, 22)]
    assert statistics.rounds == 3 and statistics.accepted_of_tested == 1.0
    # 8, 8 and 2 tokens in bursts of 4 + 1: of a drafter that lost its place, in bursts of 1.
    assert drafter.calls_by_level[0] == 2 + 2 + 1
