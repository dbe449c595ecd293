"""The papers' formulae against enumeration, and their standard errors against the real spread."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import specdec_ext
from specdec_ext import theory
from specdec_ext.testing import exact_law, filtered_law, make_case, toy_models

FILTERS = [
    {},
    dict(temperature=0.6, top_k=3),
    dict(top_p=0.8, draft_temperature=1.5, draft_top_p=1.0),
]


def of_draft(filters):
    """The draft's own parameters, by default the target's."""
    names = ("temperature", "top_k", "top_p", "min_p")
    found = {k: filters.get(f"draft_{k}", filters.get(k)) for k in names}
    return {k: v for k, v in found.items() if v is not None}


def of_target(filters):
    return {k: v for k, v in filters.items() if not k.startswith("draft_")}


def rows(seed, count, vocab=6):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, vocab, generator=generator) * 2
    return target, target + torch.randn(count, vocab, generator=generator)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_divergence_by_its_definition(filters):
    target, draft = rows(0, 40)
    p = filtered_law(target, **of_target(filters))
    q = filtered_law(draft, **of_draft(filters))
    middle = (p + q) / 2
    found = theory.divergence(target, draft, **filters).double()
    torch.testing.assert_close(found, (p - middle).abs().sum(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(found, 0.5 * (p - q).abs().sum(1), atol=1e-6, rtol=0)  # lemma 3


def test_divergence_of_equal_and_of_disjoint_laws():
    # Corollary 4.
    p = torch.tensor([[0.0, 0.0, -math.inf], [-math.inf, -math.inf, 0.0]])
    assert theory.divergence(p, p).tolist() == [0.0, 0.0]
    assert theory.divergence(p, p.flip(0)).tolist() == [1.0, 1.0]
    # The smaller vocabulary has nothing of the third token.
    assert theory.divergence(p, torch.zeros(2, 2)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_acceptance_rate_by_enumeration(filters):
    # Theorem 5: what token verification of one drafted token accepts, all drafts and coins.
    target, draft = toy_models(3, 5, 1)
    law = exact_law(specdec_ext.verify, target, draft, rule="token", bits=30, **filters)
    found = theory.acceptance_rate([(target[0][None], draft[0][None])], **filters)
    assert found.mean == pytest.approx(law.mean_accepted, abs=1e-6)
    assert math.isnan(found.standard_error) and found.units == 1


def test_acceptance_rate_of_rows():
    target, draft = rows(1, 30)
    p, q = filtered_law(target), filtered_law(draft)
    beta = torch.minimum(p, q).sum(1)
    found = theory.acceptance_rate([(target, draft)])
    assert found.mean == pytest.approx(float(beta.mean()), abs=1e-6)
    assert found.standard_error == pytest.approx(float(beta.std() / math.sqrt(30)), rel=1e-4)
    # A generator, in parts of any size, and empty ones.
    parts = (slice(0, 7), slice(7, 7), slice(7, 29), slice(29, 30))
    streamed = theory.acceptance_rate((target[s], draft[s]) for s in parts)
    assert streamed == pytest.approx(found, rel=1e-9)


def test_sequences_are_units():
    # Every row twice: the standard error of rows would fall by the square root of 2.
    target, draft = rows(2, 30)
    once = theory.acceptance_rate([(target, draft)])
    twice = theory.acceptance_rate([(t[:, None].expand(-1, 2, -1) for t in (target, draft))])
    naive = theory.acceptance_rate([(target.repeat(2, 1), draft.repeat(2, 1))])
    assert twice == pytest.approx(once, rel=1e-9)
    assert naive.standard_error < 0.75 * once.standard_error
    # Sequences of different lengths: every row counts alike.
    ragged = theory.acceptance_rate(
        [(target[None, :20], draft[None, :20]), (target[None, 20:], draft[None, 20:])]
    )
    assert ragged.mean == pytest.approx(once.mean) and ragged.units == 2


def chains(seed, count, gamma=3, vocab=4):
    """Draft chains drawn from a toy draft, as a batch of a stream."""
    target, draft = toy_models(11, vocab, gamma)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, gamma, dtype=torch.int64)
    out, laws = torch.zeros(count, gamma + 1, vocab), torch.zeros(count, gamma, vocab)
    for depth in range(gamma + 1):
        context = tuple(tokens[:, :depth].T)
        out[:, depth] = target[depth][context]
        if depth < gamma:
            laws[:, depth] = draft[depth][context]
            q = laws[:, depth].softmax(-1)
            tokens[:, depth] = torch.multinomial(q, 1, generator=generator)[:, 0]
    return out, tokens, laws


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("rule", ["token", "block", "lenient"])
def test_expected_accepted_by_enumeration(rule, filters):
    # All drafts with their probabilities: exact_law finds the same mean by bisecting every coin.
    target, draft = toy_models(4, 3, 2)
    options = dict(lenience=0.6) if rule == "lenient" else {}
    law = exact_law(specdec_ext.verify, target, draft, rule=rule, bits=30, **options, **filters)
    q = [filtered_law(table, **of_draft(filters)) for table in draft]
    mean = 0.0
    for x, y in itertools.product(range(3), repeat=2):
        weight = float(q[0][x] * q[1][x, y])
        if weight > 0:
            batch = (
                torch.stack([target[0], target[1][x], target[2][x, y]])[None],
                torch.tensor([[x, y]]),
                torch.stack([draft[0], draft[1][x]])[None],
            )
            mean += weight * theory.accepted_length([batch], rule, **options, **filters).mean
    assert mean == pytest.approx(law.mean_accepted, abs=1e-6)


def test_expected_accepted_by_hand():
    h = torch.tensor([[0.5, 0.25, math.nan], [1.0, 0.0, 0.5]])
    # token: .5 + .125; 1 + 0. block: P(n >= 1) = 1 - .5 x .75, P(n >= 2) = .25; 1, .5, .5.
    assert theory.expected_accepted(h, "token").tolist() == [0.625, 1.0]
    assert theory.expected_accepted(h, "block").tolist() == [0.875, 2.0]
    assert theory.expected_accepted(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_accepted_length_is_what_verification_accepts():
    # The mean over coins of the same drafts, by seeds; five standard errors of the coins.
    target, tokens, draft = chains(0, 4000)
    for rule in ("token", "block"):
        found = theory.accepted_length([(target, tokens, draft)], rule)
        seeds = torch.arange(4000)
        n = specdec_ext.verify(
            target, tokens, draft, seeds=seeds, positions=seeds, rule=rule
        ).num_accepted.double()
        assert float(n.mean()) == pytest.approx(found.mean, abs=5 * float(n.std()) / 4000**0.5)
        # Integrating the coins out is what makes the estimate better than counting.
        assert found.standard_error < 0.9 * float(n.std()) / 4000**0.5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_standard_error_is_the_spread_of_estimates(rule):
    # 300 streams of 64 chains: deviations in units of their standard error have variance 1.
    truth = exact_law(specdec_ext.verify, *toy_models(11, 4, 3), rule=rule, bits=24).mean_accepted
    batch = chains(1, 300 * 64)
    scores = []
    for k in range(300):
        part = slice(64 * k, 64 * (k + 1))
        found = theory.accepted_length([tuple(t[part] for t in batch)], rule)
        scores.append((found.mean - truth) / found.standard_error)
    scores = torch.tensor(scores)
    # 300 draws: five standard deviations of their mean, and of their variance.
    assert abs(float(scores.mean())) < 5 / 300**0.5
    assert 1 - 5 * (2 / 300) ** 0.5 < float(scores.var()) < 1 + 5 * (2 / 300) ** 0.5


def test_block_never_expects_less_than_token():
    batch = chains(2, 500)
    token, block = (theory.accepted_length([batch], rule) for rule in ("token", "block"))
    assert block.mean > token.mean + 0.01  # on the same drafts


def test_drafts_that_end_and_drafters_without_a_law():
    case = make_case(5, batch=16, vocab=9, greedy_rows=False, filters=False)
    inputs = case.inputs
    found = theory.accepted_length(
        [(inputs["target_logits"], inputs["draft_tokens"], inputs["draft_logits"])],
        draft_lengths=torch.zeros(16, dtype=torch.int64),
    )
    assert found == (0.0, 0.0, 16)
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]).log()
    deterministic = theory.accepted_length([(p, torch.tensor([[1]]), None)])
    assert deterministic.mean == pytest.approx(0.75)


def test_nothing_and_what_has_no_law():
    nothing = theory.acceptance_rate([])
    assert math.isnan(nothing.mean) and nothing.units == 0
    assert math.isnan(theory.accepted_length(iter([])).mean)
    bad = torch.tensor([[0.0, math.nan]])
    with pytest.raises(ValueError, match="a row of batch 1 has no law"):
        theory.acceptance_rate([(bad[:, :1], bad[:, :1]), (bad, bad)])
    with pytest.raises(ValueError, match=r"\[B, T, Vd\], got \[1, 2\] and \[2, 2\] \(batch 0\)"):
        theory.acceptance_rate([(bad, bad.repeat(2, 1))])
    tokens = torch.tensor([[0]])
    with pytest.raises(ValueError, match="a target row of batch 0 has no law"):
        theory.accepted_length([(bad[None].expand(1, 2, 2), tokens, None)])
    with pytest.raises(ValueError, match="out of range"):
        theory.accepted_length([(bad[None].expand(1, 2, 2) * 0, tokens, None)], temperature=-1.0)
    with pytest.raises(ValueError, match="'coupled' is decided by its noise"):
        theory.accepted_length([], "coupled")
