"""Gamma policies inside a hierarchy: what they hear, and what they leave as it is."""

from __future__ import annotations

import pytest
import torch
from generate_models import tables
from test_generate_law import ALPHA, p_value
from test_policies import LeavesOut, Nosy

import specdec_ext
from specdec_ext.decoding import (
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
    StackedDrafter,
)

POLICIES = {
    "heuristic": lambda: HeuristicGamma(1, limit=3),
    "confidence": lambda: ConfidenceStop(3, threshold=0.5),
    "entropy": lambda: EntropyBound(3, threshold=0.5),
    "gradient": lambda: GradientAscent(c=0.1, gamma=1, limit=3),
    "moving": lambda: ConfidenceStop(3, MovingThreshold(0.5, epsilon=1.0)),
}
#: These hear more than a request of its own.
OTHERS = {"nosy": Nosy, "renewal": lambda: RenewalRule(limit=3, c=0.3, probe=3)}


@pytest.fixture(scope="module")
def models():
    """Return a target, a medium, a small and a tiny model over three tokens."""
    target, medium = tables(3)
    return [target, medium, tables(3, seed=3)[1], tables(3, seed=4)[1]]


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", [*POLICIES, *OTHERS])
def test_joint_law(models, name, rule):
    target, medium, small, _ = models
    drafter = HierarchicalDrafter(medium, small, {**POLICIES, **OTHERS}[name](), rule=rule)
    assert p_value(target, drafter, gamma=3, length=5, draws=4_000, rule=rule) > ALPHA


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


class Recorded(HeuristicGamma):
    """Keeps what it hears; asked, it always goes on."""

    def start(self, batch):
        super().start(batch)
        self.heard, self.asked = [], []
        self.go_on = self._goes_on

    def _goes_on(self, tokens, logits):
        self.asked.append([token >= 0 for token in tokens.tolist()])
        return torch.ones_like(tokens, dtype=torch.bool)

    def commit(self, drafted, accepted):
        super().commit(drafted, accepted)
        self.heard.append((list(drafted), list(accepted)))


def test_what_a_policy_hears_by_hand():
    """Equal models accept everything, so that every number follows from the lengths."""
    target, _ = tables(5)
    policy = Recorded(1, limit=4)
    specdec_ext.generate(
        target, HierarchicalDrafter(target, target, policy), torch.tensor([[1, 2], [3, 4]]),
        max_new_tokens=[20, 5], gamma=8, temperature=1.0, seeds=3, eos_token_id=(),
    )  # fmt: skip
    assert policy.heard == [
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
    assert policy.heard == [([n], [n]) for n in (1, 3, 4)]
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
    """Lookups propose nothing at times: heard as 0 of 0; n-gram models do not ask."""
    target, medium = tables(5)
    for draft in (LookupDrafter(min_match=3), NgramDrafter(5)):
        policy = Recorded(2, limit=3)
        specdec_ext.generate(
            target, HierarchicalDrafter(medium, draft, policy), torch.tensor([[1, 2]]),
            max_new_tokens=40, gamma=4, temperature=1.0, seeds=3, eos_token_id=(),
        )  # fmt: skip
        drafted = [heard[0][0] for heard in policy.heard]
        accepted = [heard[1][0] for heard in policy.heard]
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
