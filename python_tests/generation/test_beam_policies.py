"""Beam search whose draft depth a policy chooses, and drafts over a part of the target's tokens.

Whatever is drafted, the texts are those of the target's own beam search. That drafts are of use
behind rounds without one, and in a reduced vocabulary, shows in what is accepted: a table gives NaN
to a node that does not see its own text.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from generate_models import ARCHITECTURES, TableModel, prompts, tables
from test_beam_tables import MASK, PROMPTS, found_by, same, searched, settings_of

import specdec_ext
from specdec_ext.decoding import (
    ConfidenceStop,
    EntropyBound,
    FixedGamma,
    GradientAscent,
    HeuristicGamma,
    RenewalRule,
    beam_drafter,
    beam_generation,
    beam_trees,
)
from specdec_ext.models.draft_llama import DraftLlama

NEW = 30


class AtRandom(FixedGamma):
    """Any length of each request, none of all in half the rounds; ends drafts early, too."""

    def __init__(self, limit, seed=0, stops=0.3):
        super().__init__(limit)
        self._random, self._stops = random.Random(seed), stops
        self.go_on = self._answer
        self.seen = []

    def lengths(self):
        most = self._random.choice((0, self.limit))
        return [self._random.randint(0, most) for _ in range(self._batch)]

    def _answer(self, tokens, logits):
        assert tokens.shape == logits.shape[:1]
        self.seen.append(logits.argmax(1).eq(tokens).all().item())
        return torch.tensor([self._random.random() > self._stops for _ in tokens])


POLICIES = {
    "random": lambda: AtRandom(4),
    "others": lambda: AtRandom(3, seed=1),
    "renewal": lambda: RenewalRule(5),
    "never": lambda: FixedGamma(0),
    "heuristic": lambda: HeuristicGamma(2, limit=6),
    "ascent": lambda: GradientAscent(c=0.1, gamma=3, limit=6),
    "confidence": lambda: ConfidenceStop(5, 0.3),
    "entropy": lambda: EntropyBound(4, 0.3),
}


@pytest.mark.parametrize("noise", [0.3, 3.0])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("name", POLICIES)
def test_the_texts_are_those_of_plain_beam_search(name, width, noise):
    for case in range(2):
        target, draft = tables(14, noise, seed=case)
        settings = settings_of(3 * case + width, width)
        if width == 1:
            settings = replace(settings, early_stopping=True)  # as greedy decoding does
        found = found_by(
            target, draft, settings, gamma=POLICIES[name](), draft_beams=width * (1 + case)
        )
        assert same(found, searched(target, settings)), case


def drafted(target, draft, policy, **options):
    """Statistics of a search that no end token cuts short."""
    target.last_position = draft.last_position = None
    options = {"attention_mask": MASK, "num_beams": 3, "max_new_tokens": NEW, **options}
    found = specdec_ext.generate(target, draft, PROMPTS, gamma=policy, eos_token_id=(), **options)
    return found.statistics


@pytest.mark.parametrize("seed", range(6))
def test_a_perfect_draft_is_perfect_behind_rounds_without_one(seed):
    target, _ = tables(14, seed=seed)
    policy = AtRandom(4, seed)
    found = drafted(target, TableModel(target.table), policy)
    assert found.rejected == 0 and found.accepted == found.drafted > 6
    assert found.histogram[0] >= 3 and any(policy.seen)


def test_control_rounds_without_a_draft_forgotten(monkeypatch):
    monkeypatch.setattr(beam_drafter.BeamDrafter, "_wait_for", lambda self, past: None)
    target, _ = tables(14)
    found = drafted(target, TableModel(target.table), AtRandom(4, stops=0.0))
    assert found.rejected > 3


def test_requests_leave_while_tokens_wait():
    """Limits of their own: rows are dropped between rounds with and without a draft."""
    target, _ = tables(14)
    for seed in range(4):
        limits = [5, 13, 9]
        found = drafted(target, TableModel(target.table), AtRandom(3, seed), max_new_tokens=limits)
        assert found.new_tokens == limits and found.rejected == 0


@pytest.mark.parametrize("loose", [0, 7, 10**6])
def test_slots_that_nobody_needs_are_dropped_at_any_time(loose, monkeypatch):
    monkeypatch.setattr(beam_trees, "LOOSE", loose)
    target, _ = tables(14)
    for seed in range(3):
        found = drafted(target, TableModel(target.table), AtRandom(4, seed))
        assert found.rejected == 0 and found.accepted > 6


def renewed(noise, price):
    """Statistics of a search under the renewal rule; time is counted in calls of the models."""
    target, draft = tables(14, noise)
    policy = RenewalRule(4, clock=lambda: len(target.fed) + price * len(draft.fed))
    for _ in range(3):  # what is learnt of the models is kept
        found = drafted(target, draft, policy, max_new_tokens=60, num_beams=4)
    return found


def test_the_renewal_rule_drafts_where_that_pays():
    weak, strong = renewed(5.0, 0.3), renewed(0.0, 0.1)
    assert weak.draft_calls < weak.rounds / 4  # a trial now and then
    assert strong.tokens_per_target_call > 3


def test_the_depth_is_that_of_the_request_that_goes_furthest():
    class OneEach(FixedGamma):
        def lengths(self):
            return [0, 3, 1][: self._batch]

        def commit(self, drafted, accepted):
            depths.append((list(drafted), [n <= 3 for n in accepted]))

    depths = []
    target, _ = tables(14)
    drafted(target, TableModel(target.table), OneEach(3), max_new_tokens=8)
    assert depths == [([3] * 3, [True] * 3)] * 2


# ---- reduced vocabularies ------------------------------------------------------------------------


class ReducedTable(TableModel):
    """A table that gives the logits of some tokens only."""

    def __init__(self, table, tokens):
        super().__init__(table)
        self.draft_token_ids = tokens

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=True,
        logits_to_keep=0,
    ):
        output = super().forward(
            input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep
        )
        output.logits = output.logits[..., self.draft_token_ids]
        return output


def test_a_draft_that_orders_tokens_otherwise():
    """All of the target's tokens: each drafted level is decided, and the policy sees tokens."""
    target, _ = tables(14)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    policy = AtRandom(4, stops=0.0)
    found = drafted(target, ReducedTable(target.table, order), policy)
    assert found.rejected == 0 and found.accepted > 6 and any(policy.seen)


@pytest.mark.parametrize("known", [3, 9])
def test_a_draft_that_knows_some_tokens(known):
    target, _ = tables(14, seed=3)
    tokens = torch.randperm(14, generator=torch.Generator().manual_seed(1))[:known]
    settings = settings_of(3, 4)  # token 2 ends, which drafts may know or not
    draft = ReducedTable(target.table, tokens)
    assert same(found_by(target, draft, settings, gamma=3), searched(target, settings))
    found = drafted(target, draft, 3)
    assert (found.accepted > 10) == (known == 9)


def test_control_rows_taken_for_tokens(monkeypatch):
    monkeypatch.setattr(beam_generation, "reduced_vocabulary", lambda model: None)
    target, _ = tables(14)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    found = drafted(target, ReducedTable(target.table, order), 3)
    assert found.accepted < found.drafted / 4


def test_a_draft_llama():
    torch.manual_seed(0)
    target = ARCHITECTURES["llama"]().eval()
    draft = DraftLlama.from_target(
        target, torch.tensor([5, 9, 40, 61, 3, 12, 33, 28]), hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    ids, mask = prompts([6, 3])
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 3, "eos_token_id": [40]}
    expected = specdec_ext.generate(target, None, ids, **options)
    found = specdec_ext.generate(target, draft, ids, gamma=3, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.statistics.draft_calls > 3
