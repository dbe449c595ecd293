"""Texts, blocks, stacks, bandits as drafters: the emitted law, greedy output, batches."""

from __future__ import annotations

import pytest
import torch
from generate_models import TableModel, pair, prompts, tables
from spec_drafters import spec_drafter
from test_generate_law import ALPHA, chi_square, p_value
from test_generate_tree import ConstantModel

import specdec_ext
from specdec_ext.decoding import (
    AggressiveDrafter,
    BanditDrafter,
    BlockDrafter,
    Draft,
    GrownTree,
    LookupDrafter,
    NgramDrafter,
    NoDrafter,
    Requests,
    StackedDrafter,
    StaticTree,
    SuffixDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.model import ModelDrafter

REPEATING = [1, 2, 3, 1, 2]  # a lookup proposes 3, 1, 2, 3, ...
TEXT = [0, 1, 2, 3, 1, 2, 0, 3, 3, 2, 1, 2]
DRAWS = 8_000
DRAWS_BY_ROW = 3_000  # of the drafters that take longer, row by row or by a model of their own

#: Each is given a model to draft with, the vocabulary, and the batch's size.
DRAFTERS = {
    "lookup": lambda draft, v, b: LookupDrafter(),
    "lookup, inputs": lambda draft, v, b: LookupDrafter([[3, 1, 2, 0, 1, 2]] * b),
    "suffix": lambda draft, v, b: SuffixDrafter(least=0.1),
    "suffix, store": lambda draft, v, b: remembering(
        SuffixDrafter([[3, 1]] * b, least=0.0), [1, 2, 0, 1, 2], [3, 1, 2, 0]
    ),
    "suffix, model": lambda draft, v, b: StackedDrafter(SuffixDrafter(), draft),
    "aggressive": lambda draft, v, b: AggressiveDrafter([[3, 1, 2, 0, 1, 2]] * b),
    "aggressive prompt": lambda draft, v, b: AggressiveDrafter(),
    "uniform": lambda draft, v, b: UniformDrafter(v),
    "unigram": lambda draft, v, b: NgramDrafter(v, 1, texts=[TEXT]),
    "bigram": lambda draft, v, b: NgramDrafter(v, 2),
    "trigram": lambda draft, v, b: NgramDrafter(v, 3, texts=[TEXT], smoothing=0.5),
    "likeliest": lambda draft, v, b: NgramDrafter(v, 2, sampled=False),
    "lookup, model": lambda draft, v, b: StackedDrafter(LookupDrafter(min_match=2), draft),
    "lookup, then model": lambda draft, v, b: StackedDrafter(
        LookupDrafter(min_match=1, max_match=1), draft, continued=True
    ),
    "aggressive, lookup, bigram": lambda draft, v, b: StackedDrafter(
        AggressiveDrafter(), LookupDrafter(min_match=2), NgramDrafter(v)
    ),
    "lookup, then bigram": lambda draft, v, b: StackedDrafter(
        LookupDrafter(), NgramDrafter(v), continued=True
    ),
    "stack in a stack": lambda draft, v, b: StackedDrafter(
        StackedDrafter(LookupDrafter(min_match=3), LookupDrafter(min_match=2)),
        StackedDrafter(AggressiveDrafter([[9, 9, 2]] * b), draft),
    ),
    "block": lambda draft, v, b: BlockDrafter(spec_drafter(v, 3), torch.full((b, 2), 1)),
    "bandit, model": lambda draft, v, b: BanditDrafter(
        LookupDrafter(), draft, UniformDrafter(v), costs=[0.0, 0.2, 0.0], memory=9
    ),
}


def remembering(drafter, *texts):
    for text in texts:
        drafter.remember(text)
    return drafter


def start(drafter, ids, *, greedy=True, needs_law=False, seeds=None, mask=None):
    """Start a drafter outside the loop."""
    ids = torch.tensor(ids)
    ends = torch.full((len(ids),), 99)
    drafter.start(Requests(ids, mask, ends, 0, seeds, {}, greedy, needs_law))
    return torch.full((len(ids),), ids.shape[1])


def commit(drafter, tokens, accepted):
    drafter.commit(
        torch.tensor(tokens), Counts(accepted, torch.tensor(accepted, dtype=torch.int32))
    )


# --- the law of what is emitted -------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_joint_law(name, rule):
    target, draft = tables(4)
    by_row = "gram" in name or name in ("likeliest", "block")
    draws = DRAWS_BY_ROW if by_row else DRAWS
    drafter = DRAFTERS[name](draft, 4, draws)
    temperature = 0.7 if rule == "token" else 1.0
    options = {"rule": rule, "gamma": 2, "prompt": REPEATING, "draws": draws}
    assert p_value(target, drafter, temperature, **options) > ALPHA


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_rows_are_those_that_were_sampled(rule, options):
    """The target is the same unigram model: with any filter, nothing is ever rejected."""
    drafter = NgramDrafter(6, 1, texts=[[0, 1, 1, 2, 2, 2, 2, 5, 5, 5]], learn=False)
    positions = start(drafter, [[3]], needs_law=True)
    row = drafter.propose(1, positions).logits[0, 0]
    expected = torch.tensor([1, 2, 4, 0, 0, 3]) + 1 / 6
    assert torch.allclose(row.exp(), expected / 11)
    target = TableModel(row.expand(6, 6, 6))
    _, statistics = specdec_ext.generate(
        target, drafter, torch.tensor([[1, 2]] * 20), max_new_tokens=20, gamma=3, seeds=3,
        temperature=0.7, rule=rule, **options,
    )  # fmt: skip
    assert statistics.accepted_of_tested == 1.0


def test_uniform_rows_survive_every_filter():
    """Constant logits tie at every threshold: a uniform target accepts all under any filter."""
    target = TableModel(torch.zeros(5, 5, 5))
    for options in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}):
        sequences, statistics = specdec_ext.generate(
            target, UniformDrafter(5), torch.tensor([[1]] * 50), max_new_tokens=12, gamma=3,
            seeds=1, temperature=0.5, **options,
        )  # fmt: skip
        assert statistics.accepted_of_tested == 1.0
        assert len(sequences[:, 1:].unique()) == 5


def test_uniform_tokens_are_drawn_at_temperature_zero_too():
    target, _ = tables(5)
    seen = set()

    class Seen(UniformDrafter):
        def propose(self, gamma, positions, go_on=None):
            draft = super().propose(gamma, positions)
            seen.update(draft.tokens[0].tolist())
            return draft

    specdec_ext.generate(
        target,
        Seen(5),
        torch.tensor([[1], [1]]),
        max_new_tokens=12,
        temperature=[0.0, 1.0],
        seeds=1,
    )
    assert seen == set(range(5))


class SoftLookup(LookupDrafter):
    """Passes on a law, as if it had drawn from it what it copied (field note A.3)."""

    def propose(self, gamma, positions, go_on=None):
        tokens = super().propose(gamma, positions).tokens
        likely = torch.nn.functional.one_hot(tokens.clamp(min=0), 4)
        return Draft(tokens, likely.float())


class HastyNgram(NgramDrafter):
    """Counts what it drew before that is verified, and passes on the rows of the new counts."""

    def propose(self, gamma, positions, go_on=None):
        tokens = super().propose(gamma, positions).tokens
        for reader, row in zip(self._readers, tokens.tolist(), strict=True):
            reader.append(row * 4)
        return Draft(tokens, super().propose(gamma, positions).logits)


class FussyDrafter(UniformDrafter):
    """Leaves to the next drafter what it does not like of what it drew (field note A.14)."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions)
        return draft._replace(tokens=torch.where(draft.tokens % 2 == 0, draft.tokens, -1))


class KindlessStack(StackedDrafter):
    """Says that deterministic tokens were drawn."""

    def propose(self, gamma, positions, go_on=None):
        return super().propose(gamma, positions)._replace(kinds=None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "drafter",
    [
        SoftLookup(),
        HastyNgram(4),
        StackedDrafter(FussyDrafter(4), LookupDrafter()),
        KindlessStack(LookupDrafter(min_match=1, max_match=1), NgramDrafter(4), continued=True),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_control_a_law_that_was_not_sampled(drafter):
    target, _ = tables(4)
    assert p_value(target, drafter, gamma=2, prompt=REPEATING, draws=DRAWS_BY_ROW) < ALPHA


# --- greedy and coupled output, batches -------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "mistral_window", "gpt2"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_equals_plain_decoding(name, architecture):
    """Ragged prompts and limits: rows leave the batch while others go on."""
    target, draft = pair(architecture)
    ids, mask = prompts([7, 4, 1, 7])
    options = {"attention_mask": mask, "max_new_tokens": [30, 9, 30, 21], "pad_token_id": 0}
    plain = specdec_ext.generate(target, None, ids, **options).sequences
    drafter = DRAFTERS[name](draft, 67, 4)
    found = specdec_ext.generate(target, drafter, ids, gamma=4, **options)
    assert torch.equal(found.sequences, plain)
    if "model" in name:
        assert found.statistics.accepted > 0 and found.statistics.rejected > 0


@pytest.mark.parametrize("rule", ["block", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_does_not_depend_on_batch_mates(name, rule):
    target, draft = tables(4, noise=0.7)
    ids = torch.tensor([[0, 0, 1, 2, 1], [3, 1, 2, 3, 1], [0, 0, 0, 0, 2], [2, 2, 2, 2, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1], [1] * 5])
    seeds, limits = torch.tensor([5, -3, 2**62, 8]), [11, 5, 14, 9]
    options = {"gamma": 3, "rule": rule, "temperature": 1.0, "pad_token_id": 0}
    together = specdec_ext.generate(
        target, DRAFTERS[name](draft, 4, 4), ids, attention_mask=mask, seeds=seeds,
        max_new_tokens=limits, **options,
    ).sequences  # fmt: skip
    for b in range(4):
        own = ids[b : b + 1, mask[b].bool()]
        given = {"seeds": seeds[b : b + 1], "max_new_tokens": limits[b], **options}
        alone = specdec_ext.generate(target, DRAFTERS[name](draft, 4, 1), own, **given).sequences
        assert torch.equal(together[b, 5 : 5 + limits[b]], alone[0, own.shape[1] :])
        if rule == "coupled":
            plain = specdec_ext.generate(target, None, own, **given).sequences
            assert torch.equal(alone, plain)


# --- what is proposed ---------------------------------------------------------------------------


def test_lookup_copies_the_longest_and_latest_match():
    drafter = LookupDrafter(min_match=2, max_match=3)
    positions = start(drafter, [[1, 2, 3, 1, 2, 4, 9, 1, 2], [5, 6, 7, 8, 5, 6, 6, 9, 8]])
    assert drafter.propose(4, positions).tokens.tolist() == [[4, 9, 1, 2], [-1] * 4]
    commit(drafter, [[3, 1, 0, 0, 0], [5, 0, 0, 0, 0]], [1, 0])
    # 1 2 3 1 occurred before: 3 1 2 ... would be older than what followed 2 3 1.
    assert drafter.propose(2, positions).tokens.tolist() == [[2, 4], [6, 6]]
    drafter.select(torch.tensor([1]), [1])
    commit(drafter, [[6, 6, 0]], [1])
    assert drafter.propose(3, positions[1:]).tokens.tolist() == [[9, 8, 5]]


def test_lookup_continues_a_period():
    drafter = LookupDrafter()
    positions = start(drafter, [[4, 1, 2, 3, 1, 2, 3]])
    assert drafter.propose(7, positions).tokens.tolist() == [[1, 2, 3, 1, 2, 3, 1]]


def test_lookup_goes_by_evidence_before_recency():
    drafter = LookupDrafter()
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    positions = start(drafter, [text])
    assert drafter.propose(1, positions).tokens.tolist() == [[3]]  # twice; 4 came last, but once
    positions = start(drafter, [[1, 2, 3, 0, 1, 2, 4, 0, 1, 2]])
    assert drafter.propose(1, positions).tokens.tolist() == [[4]]  # of equals the last
    # The longest match decides, whatever followed shorter ones more often.
    positions = start(drafter, [[5, 1, 2, 7, 0, 1, 2, 3, 0, 1, 2, 3, 0, 5, 1, 2]])
    assert drafter.propose(1, positions).tokens.tolist() == [[7]]


def test_lookup_does_not_go_by_a_single_token():
    positions = start(drafter := LookupDrafter(), [[1, 2, 3, 1]])
    assert drafter.propose(3, positions).tokens.shape == (1, 0)
    positions = start(drafter := LookupDrafter(min_match=1), [[1, 2, 3, 1]])
    assert drafter.propose(3, positions).tokens.tolist() == [[2, 3, 1]]


def test_padding_is_no_text():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    drafter = LookupDrafter(min_match=1)
    positions = start(drafter, [[8, 8, 7, 8], [8, 8, 7, 8]], mask=mask)
    assert drafter.propose(2, positions).tokens.tolist() == [[-1, -1], [7, 8]]


def test_lookup_reads_its_inputs_before_the_prompts():
    """What is proposed is what it would be if the input were part of the prompt."""
    inputs = [[5, 6, 7, 8, 5, 6], [9, 1, 9, 2]]
    prompts = [[0, 7], [0, 9]]
    given, whole = LookupDrafter(inputs, min_match=1), LookupDrafter(min_match=1)
    positions = start(given, prompts)
    start(whole, [[5, 6, 7, 8, 5, 6, 0, 7], [3, 3, 9, 1, 9, 2, 0, 9]])
    for tokens in ([[8, 5], [2, 0]], [[5, 6], [9, 1]]):
        found, expected = (drafter.propose(3, positions).tokens for drafter in (given, whole))
        assert torch.equal(found, expected) and found.shape[1] > 0
        for drafter in (given, whole):
            commit(drafter, tokens, [1, 1])
    # A request that ends takes its input along.
    given.select(torch.tensor([1]), [1])
    whole.select(torch.tensor([1]), [1])
    assert torch.equal(
        given.propose(3, positions[1:]).tokens, whole.propose(3, positions[1:]).tokens
    )


def test_suffix_drafts_are_as_long_as_they_survive():
    """Behind m tokens that occurred, the next one is right in m^2 / (m^2 + 2) of all cases."""
    for match, least, length in (
        (1, 0.5, 0), (1, 0.3, 1), (1, 0.2, 2), (1, 0.15, 4), (2, 0.5, 2), (3, 0.6, 5), (5, 0.9, 1),
    ):  # fmt: skip
        text = list(range(30))
        positions = start(drafter := SuffixDrafter(least=least), [[*text, 99, *text[:match]]])
        assert drafter.propose(20, positions).tokens.shape[1] == length
        assert drafter.propose(1, positions).tokens.shape[1] == min(length, 1)


def test_suffix_weighs_long_matches_against_frequent_ones():
    """In the store: "9 1" went on with 8 and with 5, "1" with 3 in twenty cases of twenty-two."""
    text = [9, 1, 8, 0, 9, 1, 5, 0, *([1, 3, 4] * 20)]
    store = remembering(SuffixDrafter(least=0.1), text)
    assert store.propose(1, start(store, [[9, 1]])).tokens.tolist() == [
        [5]
    ]  # 2/3 * 1/2 > 1/3 * 20/22
    store = remembering(SuffixDrafter(least=0.1), [9, 1, 7, 0, 9, 1, 6, 0, *text])
    assert store.propose(1, start(store, [[9, 1]])).tokens.tolist() == [
        [3]
    ]  # 2/3 * 1/4 < 1/3 * 20/24


def test_suffix_copies_in_reading_order():
    """Of places that agree, the next one in the input behind what was copied; else the last one."""
    prompt = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 30, 31, 50]
    drafter = SuffixDrafter()
    positions = start(drafter, [prompt])
    found = []
    for written in ([1, 2], [10, 11, 60, 1, 2], [20, 61, 1, 2], [30, 62, 1, 2]):
        commit(drafter, [written], [len(written) - 1])
        found.append(drafter.propose(2, positions).tokens.tolist()[0])
    # Behind the third place there is none ahead, and what the text itself wrote came last.
    assert found == [[10, 11], [20, 21], [30, 31], [30, 62]]
    positions = start(drafter, [[*prompt, 1, 2]])  # nothing was copied yet: the first place
    assert drafter.propose(2, positions).tokens.tolist() == [[10, 11]]


def test_suffix_store_forgets_what_was_used_longest_ago():
    drafter = remembering(SuffixDrafter(memory=9), [1, 2, 3], [4, 5, 6], [7, 8, 9])

    def proposed(*prompt):
        return drafter.propose(1, start(drafter, [list(prompt)])).tokens.flatten().tolist()

    assert [proposed(1, 2), proposed(4, 5), proposed(7, 8)] == [[3], [6], [9]]
    proposed(1, 2)  # so 4 5 6 is the one that was not used for the longest time
    drafter.remember([10, 11])
    assert [proposed(4, 5), proposed(10)] == [[], [11]]
    assert [proposed(7, 8), proposed(1, 2)] == [[9], [3]]
    drafter.remember(torch.arange(20, 40))  # the end of what is longer, and no other
    assert [proposed(10), proposed(7, 8), proposed(1, 2), proposed(20)] == [[], [], [], []]
    assert proposed(31) == [32]
    drafter = remembering(SuffixDrafter(memory=0), [1, 2, 3])
    assert drafter.propose(1, start(drafter, [[1, 2]])).tokens.shape == (1, 0)


def test_suffix_store_takes_in_what_was_emitted_when_the_next_generation_begins():
    drafter = SuffixDrafter()
    positions = start(drafter, [[0], [50]])
    commit(drafter, [[1, 2, 3], [51, 52, 53]], [2, 2])
    drafter.select(torch.tensor([1]), [1])  # the first request ends
    commit(drafter, [[1, 2]], [1])
    assert drafter.propose(1, positions[1:]).tokens.shape == (1, 0)  # "1 2" is another request's
    positions = start(drafter, [[1, 2], [51, 52]])
    assert drafter.propose(1, positions).tokens.tolist() == [[3], [53]]


def test_suffix_trees_hold_what_survives():
    text = [1, 2, 3, 4, 10, 1, 2, 3, 5, 11, 1, 2, 6, 7, 12, 1, 2]
    drafter = SuffixDrafter(least=0.1)
    ids, ends = torch.tensor([text, [9] * 15 + [1, 2]]), torch.full((2,), 99)
    tree = GrownTree(nodes=6, depth=3, beam=2)
    drafter.start(Requests(ids, None, ends, 0, None, {}, True, False, tree=tree))
    draft = drafter.propose_tree(torch.full((2,), len(text)))
    # 3 followed twice, 6 once; of 5 and 4 behind 3, which followed once each, 5 came last.
    assert draft.tokens.tolist() == [[-1, 3, 6, 5, 4, 7], [-1] * 6]
    assert draft.parents.tolist() == [[-1, 0, 0, 1, 1, 2], [-1] * 6]
    assert draft.logits is None and not draft.kinds.any()


@pytest.mark.parametrize("tree", [GrownTree(12, 4, beam=3), StaticTree.from_widths((2, 2, 1))])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_suffix_trees_leave_greedy_output_as_it_is(architecture, tree):
    target, _ = pair(architecture)
    ids, mask = prompts([7, 4, 1, 7])
    options = {"attention_mask": mask, "max_new_tokens": [30, 9, 30, 21], "pad_token_id": 0}
    plain = specdec_ext.generate(target, None, ids, **options).sequences
    drafter = SuffixDrafter(least=0.05)
    for _ in range(2):  # the second time, the store knows the outputs
        found = specdec_ext.generate(target, drafter, ids, tree=tree, **options)
        assert torch.equal(found.sequences, plain)
    assert found.statistics.accepted > 20
    assert specdec_ext.generate(target, drafter, ids, gamma=9, **options).statistics.accepted > 20


@pytest.mark.parametrize("rule", ["traversal", "recursive"])
def test_joint_law_of_suffix_trees(rule):
    p = torch.tensor([0.1, 0.2, 0.4, 0.3])
    drafter = remembering(SuffixDrafter(least=0.0), TEXT, [1, 2, 0, 1, 2, 2])
    found = specdec_ext.generate(
        ConstantModel(p.tolist()), drafter, torch.tensor([REPEATING] * DRAWS), max_new_tokens=3,
        tree=GrownTree(7, 3, beam=2), rule=rule, temperature=1.0, seeds=torch.arange(DRAWS) * 7919,
    )  # fmt: skip
    assert found.statistics.accepted > DRAWS / 2
    codes = (found.sequences[:, -3:] * torch.tensor([16, 4, 1])).sum(1)
    law = p.double()[:, None, None] * p[:, None] * p
    assert chi_square(torch.bincount(codes, minlength=64), law.flatten()) > ALPHA


def test_aggressive_realigns_where_a_suffix_is_unique():
    drafter = AggressiveDrafter([[1, 2, 3, 4, 2, 3, 5, 6], [7]])
    positions = start(drafter, [[0], [0]])
    first = drafter.propose(9, positions).tokens.tolist()
    assert first == [[1, 2, 3, 4, 2, 3, 5, 6], [7] + [-1] * 7]
    assert drafter.propose(2, positions).tokens.tolist() == [[1, 2], [7, -1]]
    # "2" occurs twice, "2 3" as well, "2 3 5" once; a token beyond the input matches nothing.
    for tokens, expected in (
        ([1, 9], []),
        ([2], []),
        ([3], []),
        ([5], [6]),
        ([6], []),
        ([4], [2, 3, 5, 6]),
        ([2, 3], [5, 6]),
    ):
        commit(drafter, [tokens, [7] * len(tokens)], [len(tokens) - 1] * 2)
        proposed = drafter.propose(9, positions).tokens[0].tolist()
        assert [token for token in proposed if token >= 0] == expected


@pytest.mark.parametrize("tree", [None, GrownTree(9, 4, beam=2)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_first_draft_rides_on_the_prompt(padded, tree):
    """No call is for the prompts alone: the target's calls are the rounds, and so are the draft's.

    The table model gives NaN where a query does not see its text, each token once.
    """
    target, draft = tables(6, noise=0.3)
    ids = torch.tensor([[0, 1, 2, 3, 1, 2], [4, 4, 5, 0, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]) if padded else None
    limits = [14, 12] if padded else [12, 12]  # both end at one position, as the table wants it
    target.last_position = draft.last_position = 17
    options = {"attention_mask": mask, "max_new_tokens": limits, "pad_token_id": 0}
    for drafter in (None, SuffixDrafter(least=0.0), draft):
        shape = None if drafter is None else tree
        specdec_ext.generate(target, drafter, ids, tree=shape, **options)  # models are asked once
    target.fed.clear()
    plain = specdec_ext.generate(target, None, ids, **options)
    assert target.fed[0] == [2, 6] and len(target.fed) == plain.statistics.rounds == limits[0]
    for drafter in (SuffixDrafter(least=0.0), draft):
        target.fed.clear()
        draft.fed.clear()
        found = specdec_ext.generate(target, drafter, ids, gamma=3, tree=tree, **options)
        assert torch.equal(found.sequences, plain.sequences)
        assert len(target.fed) == found.statistics.rounds < limits[0]
        assert target.fed[0][1] > 6
        assert len(draft.fed) == found.statistics.draft_calls
        if drafter is draft:
            assert draft.fed[0] == [2, 6]


def test_aggressive_decoding_of_an_unchanged_input_is_one_call():
    """The first round takes the whole input; a change costs one more, and a token or two."""
    table = torch.zeros(30, 30, 30)
    table[:, range(29), range(1, 30)] = 9.0  # counts on
    source = list(range(1, 21))

    def run(inputs):
        found = specdec_ext.generate(
            TableModel(table), AggressiveDrafter([inputs]), torch.tensor([[0]]), gamma=20,
            max_new_tokens=21,
        )  # fmt: skip
        assert found.sequences[0].tolist() == list(range(22))
        return found.statistics

    assert run(source).rounds == 1
    assert run(source[:9] + [25] + source[10:]).rounds == 3  # 10 for 25; 11 realigns; the rest
    assert run(source[:9] + source[10:]).rounds == 3  # 10 is missing
    assert run([29] * 20).rounds == 21


def test_ngram_learns_from_what_is_emitted_and_from_nothing_else():
    drafter = NgramDrafter(5, 2, smoothing=0.5)
    positions = start(
        drafter, [[1, 2], [4, 4]], greedy=False, needs_law=True, seeds=torch.arange(2)
    )

    def law(context):
        return drafter._readers[0].law([context]).tolist()

    def expected(after, alone):
        base = [(n + 0.1) / (sum(alone) + 0.5) for n in alone]
        return [(n + 0.5 * p) / (sum(after) + 0.5) for n, p in zip(after, base, strict=True)]

    assert law(1) == pytest.approx(expected([0, 0, 1, 0, 0], [0, 1, 1, 0, 0]))
    drafter.propose(3, positions)
    assert law(1) == pytest.approx(expected([0, 0, 1, 0, 0], [0, 1, 1, 0, 0]))
    commit(drafter, [[1, 1, 4, 0], [4, 0, 0, 0]], [1, 0])  # 1 1 is emitted, 4 is not
    assert law(1) == pytest.approx(expected([0, 1, 1, 0, 0], [0, 3, 1, 0, 0]))
    assert law(2) == pytest.approx(expected([0, 1, 0, 0, 0], [0, 3, 1, 0, 0]))
    commit(drafter, [[77], [-1]], [0, 0])  # ids of a larger vocabulary are context alone
    assert law(1) == pytest.approx(expected([0, 1, 1, 0, 0], [0, 3, 1, 0, 0]))
    drafter.select(torch.tensor([1]), [1])
    assert drafter._readers[0].law([4])[4] > 0.9


def test_ngram_backs_off_to_shorter_contexts():
    drafter = NgramDrafter(6, 3, texts=[[1, 2, 3, 9 - 6, 1, 2, 3], torch.tensor([4, 2, 5])])
    drafter.learn = False
    start(drafter, [[0]])
    law = drafter._readers[0].law
    assert law([1, 2]).argmax() == 3 and law([4, 2]).argmax() == 5
    assert torch.equal(law([0, 2]), law([2]))  # never seen
    assert torch.equal(law([0, 0]), law([]))
    assert law([3, 4])[2] > law([4])[1]  # 3 4 never occurred: the second text is another one
    for context in ([], [2], [1, 2], [4, 2]):
        assert law(context).sum() == pytest.approx(1.0) and law(context).min() > 0


# --- stacks -------------------------------------------------------------------------------------


class WatchedStack(StackedDrafter):
    """Sees to it that no drawn token is rejected."""

    drawn = 0

    def propose(self, gamma, positions, go_on=None):
        self.round = super().propose(gamma, positions, go_on)
        return self.round

    def select(self, rows, indices):
        super().select(rows, indices)
        if hasattr(self, "round"):
            tokens, kinds = self.round.tokens, self.round.kinds
            self.round = Draft(tokens[rows], None, None if kinds is None else kinds[rows])

    def commit(self, tokens, accepted):
        if self.round.kinds is not None:
            for row, kinds, n in zip(
                self.round.tokens, self.round.kinds, accepted.host, strict=True
            ):
                length = int((row >= 0).sum())
                assert n == length or kinds[n] == 0
                self.drawn += int(kinds[:n].sum())
        super().commit(tokens, accepted)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("batch", [1, 7])
def test_a_stacked_model_knows_all_that_was_emitted(batch, continued):
    """The target drafts for itself under a lookup: of its own tokens none is ever rejected.

    The table model gives NaN for any slip of the cache: a token that was not taken in, or one left.
    """
    target, _ = tables(8, scale=2.5)
    ids = torch.randint(0, 8, (batch, 6), generator=torch.Generator().manual_seed(batch))
    mask = (torch.arange(6) >= torch.arange(batch)[:, None] % 5).long()
    limits = [200 // batch + b for b in range(batch)]
    drafter = WatchedStack(LookupDrafter(min_match=2), target, continued=continued)
    _, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=limits, gamma=4, seeds=11,
        temperature=1.0,
    )  # fmt: skip
    assert drafter.drawn > 20 and statistics.rejected > 10


def test_a_model_is_not_run_while_the_lookup_serves_all():
    table = torch.zeros(6, 6, 6)
    table[:, range(6), [1, 2, 3, 4, 5, 0]] = 9.0  # counts round
    model = TableModel(table)
    drafter = StackedDrafter(LookupDrafter(min_match=1), model)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [3, 4, 5, 0, 1, 2, 3]])
    found = specdec_ext.generate(TableModel(table), drafter, ids, max_new_tokens=30, gamma=5)
    assert found.statistics.rounds == 5 and found.statistics.draft_calls == 0
    other = StackedDrafter(LookupDrafter(min_match=7, max_match=7), model)
    found = specdec_ext.generate(TableModel(table), other, ids, max_new_tokens=30, gamma=5)
    assert found.statistics.rounds == 5 and found.statistics.draft_calls == 5  # the first round's


def test_tokens_that_all_requests_have_are_run_in_one_call():
    target, draft = tables(4)
    first = AggressiveDrafter([[1, 2, 3], [1, 2, 3, 0]])
    drafter = StackedDrafter(first, draft, continued=True)
    positions = start(drafter, [[1, 2], [3, 0]], needs_law=True)
    asked = []

    def go_on(tokens, logits):
        asked.append((tokens.tolist(), logits is not None))
        return torch.tensor([True, True])

    proposed = drafter.propose(6, positions, go_on)
    assert asked[:3] == [([n, n], False) for n in (1, 2, 3)]
    assert [had for _, had in asked] == [False] * 3 + [True] * 2
    assert proposed.tokens[:, :3].tolist() == [[1, 2, 3]] * 2 and proposed.tokens[1, 3] == 0
    assert proposed.kinds.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert drafter.calls == 3
    for b, j in ((0, 3), (0, 4), (1, 4), (1, 5)):
        row = draft.table[proposed.tokens[b, j - 2], proposed.tokens[b, j - 1]]
        assert torch.equal(proposed.logits[b, j], row)


def test_who_samples_asks_go_on_for_its_own_requests():
    target, draft = tables(4)
    drafter = StackedDrafter(LookupDrafter(min_match=2), draft)
    positions = start(drafter, [[1, 2, 3, 1, 2], [1, 2, 3, 0, 0], [3, 3, 2, 1, 0]], needs_law=True)
    asked = []

    def go_on(tokens, logits):
        asked.append(tokens.tolist())
        return torch.tensor([True, True, len(asked) < 2])

    proposed = drafter.propose(4, positions, go_on)
    assert (proposed.tokens >= 0).sum(1).tolist() == [4, 4, 2]
    assert [row[0] for row in asked] == [-1] * 3


def test_go_on_behind_others_tokens():
    """A no behind another drafter's token is no end where one more of these follows, else it is."""
    _, draft = tables(4)
    for answers, lengths in (([False] * 3, [2, 1, 1]), ([False, True, True], [4, 1, 1])):
        drafter = StackedDrafter(AggressiveDrafter([[1, 2], [], []]), draft, continued=True)
        positions = start(drafter, [[1, 2], [3, 0], [0, 0]], needs_law=True)
        given = iter(answers)
        proposed = drafter.propose(
            4, positions, lambda *_, given=given: torch.full((3,), next(given))
        )
        assert (proposed.tokens >= 0).sum(1).tolist() == lengths


def test_vocabularies_of_a_stack_may_differ():
    target, _ = tables(4)
    _, draft = tables(6, seed=1)
    drafter = StackedDrafter(LookupDrafter(min_match=2), FirstRowOnly(3), draft)
    positions = start(
        drafter, [[1, 2], [3, 0]], greedy=False, needs_law=True, seeds=torch.arange(2)
    )
    proposed = drafter.propose(2, positions)
    assert proposed.logits.shape == (2, 2, 6)
    assert (proposed.logits[0, :, 3:] == -torch.inf).all()
    assert proposed.logits[1].isfinite().all()
    drafter = StackedDrafter(LookupDrafter(min_match=2), FirstRowOnly(3), draft)
    assert p_value(target, drafter, gamma=2, prompt=REPEATING, draws=DRAWS) > ALPHA


class FirstRowOnly(UniformDrafter):
    """Proposes for every other request, beginning with the first."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions)
        odd = torch.arange(len(positions))[:, None] % 2 == 1
        return draft._replace(tokens=draft.tokens.masked_fill(odd, -1))


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: LookupDrafter(min_match=0), ValueError, "1 <= min_match <= max_match.*got 0 and"),
        (lambda: LookupDrafter(min_match=5, max_match=4), ValueError, "got 5 and 4"),
        (lambda: UniformDrafter(0), ValueError, "vocab_size must be at least 1, got 0"),
        (lambda: NgramDrafter(0), ValueError, "vocab_size must be at least 1, got 0"),
        (lambda: NgramDrafter(5, 0), ValueError, "order must be at least 1, got 0"),
        (lambda: NgramDrafter(5, smoothing=0.0), ValueError, "smoothing must be positive, got 0"),
        (lambda: NgramDrafter(5, texts=[[1, 5]]), ValueError, r"ids of text 0 .* \[0, 4\], got 5"),
        (lambda: NgramDrafter(5, texts=[[1], [-1]]), ValueError, r"text 1 .* \[0, 4\], got -1"),
        (lambda: StackedDrafter(), ValueError, "at least one"),
        (lambda: StackedDrafter(NoDrafter()), TypeError, r"NoDrafter has no observe\(\)"),
        (
            lambda: StackedDrafter(NgramDrafter(4), LookupDrafter(), continued=True),
            TypeError,
            "LookupDrafter cannot go on behind others'",
        ),
        (
            lambda: start(AggressiveDrafter([[1]]), [[1], [2]]),
            ValueError,
            "AggressiveDrafter: inputs must be those of 2 requests, got 1",
        ),
        (
            lambda: start(LookupDrafter([[1]]), [[1], [2]]),
            ValueError,
            "LookupDrafter: inputs must be those of 2 requests, got 1",
        ),
        (
            lambda: SuffixDrafter(min_match=0),
            ValueError,
            "SuffixDrafter: 1 <= min_match.*got 0 and",
        ),
        (
            lambda: SuffixDrafter(least=1.5),
            ValueError,
            r"SuffixDrafter: least .* \[0, 1\], got 1.5",
        ),
        (lambda: SuffixDrafter(memory=-1), ValueError, "SuffixDrafter: memory .* 0, got -1"),
        (lambda: SuffixDrafter().remember([-1]), ValueError, "SuffixDrafter: ids to remember"),
        (lambda: LookupDrafter(3), TypeError, "LookupDrafter: inputs must be sequences"),
        (lambda: LookupDrafter([[-1]]), ValueError, "LookupDrafter: ids of input 0"),
    ],
)
def test_arguments_are_named_in_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_models_of_a_stack_are_driven_by_the_model_drafter():
    _, draft = tables(4)
    assert isinstance(StackedDrafter(draft).drafters[0], ModelDrafter)
