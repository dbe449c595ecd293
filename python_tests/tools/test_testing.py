"""specdec_ext.testing itself: its examples, its case generator, its exact-law tools."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch
from conftest import REFERENCE

from specdec_ext import testing, testing_trees
from specdec_ext.testing import (
    VerifyCase,
    VerifyOutcome,
    exact_law,
    explain,
    explain_outcome,
    make_case,
    pack_mask,
    step_law,
    toy_models,
    tv_bound,
)
from specdec_ext.testing.masks import unpack_mask


def test_examples_in_docstrings():
    modules = pkgutil.iter_modules(testing.__path__, "specdec_ext.testing.")
    results = [doctest.testmod(importlib.import_module(module.name)) for module in modules]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 40


def test_the_tools_for_trees_have_their_first_name_too():
    for name in testing_trees.__all__:
        assert getattr(testing_trees, name) is getattr(testing, name)
        assert name in testing.__all__


def test_step_law_finds_every_step():
    edges = torch.tensor([0.0, 0.1, 0.1 + 2.0**-30, 0.5, 0.999999, 1.0], dtype=torch.float64)

    def outcome(row, u):
        return torch.searchsorted(edges, u, right=True) + 10 * row

    law = step_law(outcome, rows=2, bits=50, grid=4096)
    for row in (0, 1):
        found = [law[row, k + 10 * row] for k in range(1, 6)]
        assert found == pytest.approx(edges.diff().tolist(), abs=1e-14)
    assert sum(law.values()) == pytest.approx(2, abs=1e-14)


def test_step_law_of_functions_that_go_up_and_down():
    law = step_law(lambda row, u: (u * 4).long() % 2, rows=1, grid=16)
    assert law == {(0, 0): pytest.approx(0.5), (0, 1): pytest.approx(0.5)}


def test_exact_law_refuses_outcomes_with_hidden_steps():
    target, draft = toy_models(0, 3, 1)

    def hidden(*args, uniforms, **kwargs):
        # The coin is also looked at far from its threshold.
        outcome = REFERENCE.verify(*args, uniforms=uniforms, **kwargs)
        odd = uniforms[:, 0] < 1e-3
        return outcome._replace(tokens=torch.where(odd[:, None], 0, outcome.tokens))

    with pytest.raises(AssertionError, match="within one side of a coin"):
        exact_law(hidden, target, draft, rule="token")


def test_exact_law_refuses_tokens_out_of_range():
    target, draft = toy_models(0, 3, 1)

    def wild(*args, **kwargs):
        outcome = REFERENCE.verify(*args, **kwargs)
        return outcome._replace(tokens=outcome.tokens.where(outcome.tokens != 2, 3))

    with pytest.raises(AssertionError, match="vocabulary 3"):
        exact_law(wild, target, draft, rule="token")


def test_exact_law_sees_a_wrong_accept_probs():
    target, draft = toy_models(0, 3, 1)

    def overstated(*args, **kwargs):
        outcome = REFERENCE.verify(*args, **kwargs)
        return outcome._replace(accept_probs=outcome.accept_probs.sqrt())

    law = exact_law(overstated, target, draft, rule="token")
    assert law.tv < 1e-9 and law.threshold_gap > 0.01


def test_a_bound_on_samples_grows_with_outcomes_and_falls_with_draws():
    assert tv_bound(1000, 4) < tv_bound(1000, 8) < tv_bound(500, 8)
    assert tv_bound(1000, 4, alpha=1e-3) < tv_bound(1000, 4)


def test_cases_are_reproducible():
    for options in ({}, dict(packed=True, philox=True), dict(draft="probs", kinds="mixed")):
        one, two, other = (make_case(seed, **options).inputs for seed in (3, 3, 4))
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, two[name], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(one["draft_tokens"], other["draft_tokens"])


def test_cases_reach_every_outcome():
    # Rejections at every column, full acceptance, ends by length and placeholder, T = 0, masks.
    accepted, lengths, statuses = set(), set(), set()
    for seed in range(12):
        case = make_case(seed, rule="token")
        result = case.run(REFERENCE.verify)
        accepted |= set(result.num_accepted.tolist())
        lengths |= set(case.inputs["draft_lengths"].tolist())
        statuses |= set(result.status.tolist())
        assert bool((case.inputs["temperature"] == 0).any()) or seed > 0
    assert accepted == {0, 1, 2, 3} == lengths
    assert {0, 4} <= statuses


def test_replace_and_select():
    case = make_case(5, batch=4)
    assert "top_p" not in case.replace(top_p=None).inputs
    chosen = case.select([2, 0, 2])
    assert chosen.batch == 3
    tokens = case.inputs["draft_tokens"]
    assert torch.equal(chosen.inputs["draft_tokens"], tokens[[2, 0, 2]])
    packed = make_case(5, batch=4, packed=True)
    assert packed.select([1]).inputs["target_logits"] is packed.inputs["target_logits"]


def test_cases_with_masks_and_reduced_vocabularies():
    options = dict(vocab=40, draft_vocab=30, allowed_mask=True, draft_token_ids=True)
    poisoned = set()
    accepted, statuses = set(), set()
    for seed in range(12):
        case = make_case(seed, rule=("token", "coupled")[seed % 2], **options)
        ids = case.inputs["draft_token_ids"]
        assert len(set(ids.tolist())) == 30 and max(ids.tolist()) < 40
        chosen = case.select([2, 0]).inputs
        assert torch.equal(chosen["allowed_mask"], case.inputs["allowed_mask"][[2, 0]])
        assert chosen["draft_token_ids"] is ids
        poisoned |= set(case.inputs["target_logits"].isnan().flatten(1).any(1).tolist())
        result = case.run(REFERENCE.verify)
        accepted |= set(result.num_accepted.tolist())
        statuses |= set(result.status.tolist())
    assert poisoned == {False, True} and accepted == {0, 1, 2, 3} and {0, 1, 4} <= statuses


def test_masks_of_any_width():
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 31, 32, 33, 64, 100):
        allowed = torch.rand(3, vocab, generator=generator) < 0.5
        for beyond in (False, True):
            words = pack_mask(allowed, beyond)
            assert words.dtype == torch.int32 and words.shape == (3, (vocab + 31) // 32)
            for row, expected in zip(words, allowed, strict=True):
                assert torch.equal(unpack_mask(row, vocab), expected)


WITHOUT = {
    "masks": dict(allowed_mask=True, draft="none"),
    "map": dict(draft_vocab=40, draft_token_ids=True, kinds=None),
}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("missed", WITHOUT)
def test_outcomes_that_overlook_an_argument_are_not_admissible(rule, missed):
    # What comes out where the mask or the map is left out, explained with it.
    refused = 0
    for seed in range(6):
        plain = dict(vocab=40, filters=False, greedy_rows=False)
        case = make_case(seed, rule=rule, **plain, **WITHOUT[missed])
        inputs = case.replace(allowed_mask=None, draft_token_ids=None)
        logits = case.inputs["target_logits"].nan_to_num()
        case, inputs = case.replace(target_logits=logits), inputs.replace(target_logits=logits)
        outcome = inputs.run(REFERENCE.verify)
        refused += sum(bool(explain_outcome(outcome, case, b)) for b in range(case.batch))
    assert refused > 24  # of 48; what both allow is no mistake


def test_make_case_refuses_unknown_layouts():
    with pytest.raises(ValueError, match="layout must be"):
        make_case(0, layout="diagonal")


# ---- close or explained -------------------------------------------------------------------------

TIED = 2e-3  # tolerance: about six entries of the rows below to either side of a cutoff


def tied(seed, rule, shifts, gamma=3, vocab=3000, top_p=0.5):
    """Flat rows under top-p, and what a verifier gives whose cutoffs lie some entries off.

    Draft tokens are the entries around the cutoffs, where membership differs.
    """
    generator = torch.Generator().manual_seed(seed)
    edge = torch.linspace(0, 0.2, vocab)

    def rows(count):
        table = [edge[torch.randperm(vocab, generator=generator)] for _ in range(count)]
        off = torch.tensor(shifts)[torch.randint(len(shifts), (count,), generator=generator)]
        cut, near = torch.stack(table), []
        for row, shift in zip(cut, off.tolist(), strict=True):
            order = row.argsort(descending=True)
            probs = row[order].double().softmax(0)
            kept = int((probs.cumsum(0) - probs < top_p).sum()) + shift
            row[order[kept:]] = -torch.inf
            near.append(order[kept - 8 : kept + 8].tolist())
        return torch.stack(table)[None], cut[None], near

    target, target_cut, near_target = rows(gamma + 1)
    draft, draft_cut, near_draft = rows(gamma)
    tokens = []
    for i in range(gamma):
        pool = [t for t in near_target[i] + near_draft[i] if draft_cut[0, i, t] > -torch.inf]
        tokens.append(pool[int(torch.randint(len(pool), (1,), generator=generator))])
    u = torch.rand(1, gamma + 1, dtype=torch.float64, generator=generator)
    given = dict(draft_tokens=torch.tensor([tokens]), uniforms=u, rule=rule)
    outcome = REFERENCE.verify(target_cut, draft_logits=draft_cut, **given)
    inputs = dict(given, target_logits=target, draft_logits=draft, top_p=torch.tensor([top_p]))
    return VerifyCase(inputs, f"ties {seed}, {rule}"), VerifyOutcome(*outcome)


@pytest.mark.parametrize("rule", ["block", "token", "lenient", "typical"])
def test_near_ties_of_filters_on_every_row_are_excused(rule):
    accepted = set()
    for seed in range(30):
        case, outcome = tied(seed, rule, range(-5, 6))
        assert explain_outcome(outcome, case, 0, TIED) == ""
        accepted.add(int(outcome.num_accepted))
    assert len(accepted) > 2


@pytest.mark.parametrize("rule", ["block", "token", "lenient", "typical"])
def test_cutoffs_beyond_the_tolerance_are_not_excused(rule):
    # Sixty entries less or more: 2 % of the mass, ten times the tolerance.
    reasons = [
        explain_outcome(outcome, case, 0, TIED)
        for case, outcome in (tied(seed, rule, [-60, 60]) for seed in range(30))
    ]
    assert all(reasons)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_search_among_near_ties_is_bounded(rule, monkeypatch):
    # Wrong on the last row only: every combination of the others leads there.
    visits = []
    visit = explain._Checker.visit
    monkeypatch.setattr(
        explain._Checker, "visit", lambda *args: (visits.append(0), visit(*args))[1]
    )
    case, outcome = tied(0, rule, [0], gamma=5, vocab=500)
    u = torch.full((1, 6), 0.01, dtype=torch.float64)
    case = case.replace(uniforms=u, full_accept_probs=True)
    right = case.run(REFERENCE.verify)
    assert explain_outcome(right, case, 0, TIED) == "" and len(visits) <= 6
    wrong = right._replace(logprobs=right.logprobs + 1.0 * (right.tokens.roll(-1, 1) == -1))
    visits.clear()
    reason = explain_outcome(wrong, case, 0, TIED)
    assert "logprobs" in reason and 6 < len(visits) <= explain._MAX_TRIALS
