"""Operators against the reference: equal, or excused by a float64 margin and rarely.

And the reference against the checker of `specdec_ext.testing`, which recomputes every decision from
laws found by sorting: two texts of the same mathematics that must agree to 1e-9.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from conftest import REFERENCE, TRITON, f64

from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.testing import (
    VerifyCase,
    assert_tokens_match,
    assert_trees_match,
    chain_as_tree,
    draw_interval,
    explain_outcome,
    filtered_law,
    make_case,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# What varies, one at a time; everything else is make_case's mixture of styles, filters, lengths.
VARIANTS = {
    "plain": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "float16": dict(dtype=torch.float16),
    "mixed dtypes": dict(dtype=torch.bfloat16, draft_dtype=torch.float32),
    "transposed": dict(layout="transposed"),
    "padded": dict(layout="padded", dtype=torch.bfloat16),
    "packed": dict(packed=True),
    "packed padded int32": dict(packed=True, layout="padded", id_dtype=torch.int32),
    "int32": dict(id_dtype=torch.int32),
    "no filters": dict(filters=False, greedy_rows=False),
    "draft filters": dict(draft_filters=True),
    "draft probs": dict(draft="probs"),
    "draft probs bfloat16": dict(draft="probs", dtype=torch.bfloat16, packed=True),
    "no draft law": dict(draft="none"),
    "mixed kinds": dict(kinds="mixed"),
    "deterministic kinds": dict(kinds="deterministic"),
    "smaller draft vocabulary": dict(draft_vocab=11),
    "larger draft vocabulary": dict(draft_vocab=23, draft_filters=True),
    "philox": dict(philox=True),
    "philox stream": dict(philox=True, stream=7),
    "masks": dict(vocab=37, allowed_mask=True),
    "reduced vocabulary": dict(vocab=37, draft_vocab=29, draft_token_ids=True, draft_filters=True),
    "masks, reduced vocabulary": dict(
        vocab=37,
        draft_vocab=29,
        draft_token_ids=True,
        allowed_mask=True,
        draft="probs",
        packed=True,
        kinds="mixed",
    ),
    "full accept_probs": dict(full_accept_probs=True),
    "raw logprobs": dict(raw_logprobs=True),
    "one column": dict(gamma=1),
    "eight columns": dict(gamma=8, batch=4),
    "vocabulary 1": dict(vocab=1),
    "vocabulary 2": dict(vocab=2),
    "vocabulary 1000": dict(vocab=1000),
    "odd vocabulary, several tiles": dict(vocab=9001, batch=3, layout="padded"),
    "several tiles, no filters": dict(vocab=9001, filters=False, greedy_rows=False),
    "several tiles, no filters, bfloat16": dict(
        vocab=9001, filters=False, greedy_rows=False, dtype=torch.bfloat16
    ),
    "several tiles, draft probs": dict(vocab=9001, batch=3, draft="probs", dtype=torch.bfloat16),
    "several tiles, bfloat16": dict(vocab=8193, batch=3, dtype=torch.bfloat16, draft_vocab=5000),
}


def compare(operator, case, expected=None):
    if expected is None:
        expected = REFERENCE.run(case)
    excused = assert_tokens_match(operator.run(case), expected, case, tolerance=operator.tolerance)
    assert excused <= 1  # a tie within 1e-5 is rare


@cache
def expected_of(variant, rule, seed):
    """What every operator has to return."""
    return REFERENCE.run(make_case(seed, rule=rule, **VARIANTS[variant]))


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_verify(operator, variant, rule):
    for seed in range(2 if "tiles" in variant else 4):
        case = make_case(seed, rule=rule, **VARIANTS[variant])
        compare(operator, case, expected_of(variant, rule, seed))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "tiles" not in name])
def test_reference_is_admissible_in_every_decision(variant, rule):
    case = make_case(100, rule=rule, **VARIANTS[variant])
    result = REFERENCE.run(case)
    for b in range(case.batch):
        assert explain_outcome(result, case, b, tolerance=1e-9) == ""


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_what_little_a_rejected_token_leaves(operator, rule, filters):
    # Target laws that are all but 2^-8 .. 2^-19 the draft token, rejected by the largest uniform.
    # The last token comes from what is left, in integers that sum to 2^62 (1 - p).
    batch, vocab, token = 12, 2300, 700
    generator = torch.Generator().manual_seed(3)
    rest = torch.randn(batch, 2, vocab, generator=generator)
    left = 2.0 ** -(8.0 + torch.arange(batch))
    rest[:, 0, token] = -math.inf
    rest[:, 0] += (left.log() - rest[:, 0].logsumexp(1))[:, None]
    rest[:, 0, token] = 0.0
    uniforms = torch.rand(batch, 2, dtype=torch.float64, generator=generator)
    uniforms[:, 0] = 1 - 2.0**-53
    inputs = dict(target_logits=rest, draft_tokens=torch.full((batch, 1), token), rule=rule)
    if filters:  # of every other request
        inputs["top_k"] = torch.tensor([0, vocab - 50]).repeat(batch // 2)
    case = VerifyCase(inputs | dict(uniforms=uniforms, lenience=1.0))
    expected, found = REFERENCE.run(case), operator.run(case)
    assert not expected.num_accepted.any() and len(expected.tokens[:, 0].unique()) > 6
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.status, expected.status)


@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_what_little_two_laws_differ_by(operator, rule):
    # Drafts are the target's law but for 2^-4 .. 2^-15 that eight tokens lack and the draft token
    # has, which the largest uniform rejects. The last token is one of the eight, in equal parts.
    batch, vocab, token = 12, 2300, 700
    eight = torch.arange(100, 2000, 250)[:8]
    law = torch.full((batch, 1, vocab), 0.4 / (vocab - 9), dtype=torch.float64)
    law[..., token], law[..., eight] = 0.2, 0.05
    draft, excess = law.clone(), 2.0 ** -(4.0 + torch.arange(batch, dtype=torch.float64))
    draft[..., token] += excess[:, None]
    draft[..., eight] -= excess[:, None, None] / 8
    which = torch.arange(batch) % 8
    uniforms = torch.stack([torch.full((batch,), 1 - 2.0**-53).double(), (which + 0.5) / 8], 1)
    case = VerifyCase(
        dict(
            target_logits=law.log().float().expand(-1, 2, -1),
            draft_tokens=torch.full((batch, 1), token),
            draft_logits=draft.log().float(),
            uniforms=uniforms,
            rule=rule,
            lenience=1.0,
        )
    )
    expected, found = REFERENCE.run(case), operator.run(case)
    assert torch.equal(expected.tokens[:, 0], eight[which])
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.status, expected.status)


@pytest.mark.parametrize("options", [dict(lenience=0.3), dict(lenience=1.0)], ids=str)
def test_lenient(operator, options):
    for seed in range(8):
        compare(operator, make_case(seed, rule="lenient", **options))


@pytest.mark.parametrize(
    "options",
    [dict(beta=1), dict(beta=2, tau=0.1), dict(beta=17, tau=50.0), dict(tau=0.0)],
    ids=str,
)
def test_top_beta(operator, options):
    for seed in range(8):
        compare(operator, make_case(seed, rule="top_beta", **options))


@pytest.mark.parametrize(
    "options",
    [dict(epsilon=0.3, delta=0.9), dict(epsilon=5.0, delta=0.2), dict(delta=9.0)],
    ids=str,
)
def test_typical(operator, options):
    for seed in range(8):
        compare(operator, make_case(seed, rule="typical", **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_large_vocabulary(operator, rule, dtype):
    case = make_case(5, rule=rule, batch=3, gamma=3, vocab=151_936, dtype=dtype, draft_filters=True)
    compare(operator, case)


def test_batch_of_many(operator):
    # Several slices of requests in one call.
    compare_many = make_case(6, batch=300, gamma=2, vocab=2000, rule="block")
    excused = assert_tokens_match(
        operator.run(compare_many), REFERENCE.run(compare_many), compare_many
    )
    assert excused <= 3


def test_mismatches_are_not_excused_for_nothing(operator):
    # The comparison itself: each field, disturbed, is refused.
    case = make_case(7, batch=4, gamma=3, filters=False, greedy_rows=False, ragged=False)
    good = REFERENCE.run(case)
    assert assert_tokens_match(operator.run(case), good, case) == 0
    bad_token = good.tokens.clone()
    row = int((good.num_accepted < 3).nonzero()[0])
    last = int(good.num_accepted[row])
    bad_token[row, last] = (bad_token[row, last] + 1) % 17
    disturbed = [
        good._replace(tokens=bad_token),
        good._replace(num_accepted=good.num_accepted + 1),
        good._replace(logprobs=good.logprobs + 1e-3),
        good._replace(accept_probs=good.accept_probs * 0.999),
        good._replace(status=good.status + 4),
        good._replace(tokens=good.tokens.int()),
        good._replace(tokens=good.tokens[:, :-1]),
    ]
    for outcome in disturbed:
        with pytest.raises(AssertionError):
            assert_tokens_match(outcome, good, case)


def test_a_tie_is_excused():
    # p = q = 1/2 at x, u a hair below and above the threshold 0.6: each outcome excuses the other.
    case = VerifyCase(
        dict(
            target_logits=torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]).log(),
            draft_tokens=torch.tensor([[0]]),
            draft_logits=torch.tensor([[[0.5, 0.5]]]).log(),
            uniforms=f64([[0.6 - 1e-6, 0.2]]),
            rule="token",
        )
    )
    below = REFERENCE.run(case)
    above = REFERENCE.run(case.replace(uniforms=f64([[0.6 + 1e-6, 0.2]])))
    assert below.num_accepted.tolist() == [1] and above.num_accepted.tolist() == [0]
    assert assert_tokens_match(above, below, case) == 1
    with pytest.raises(AssertionError, match="rejected at u"):
        assert_tokens_match(above, below, case, tolerance=1e-7)


def expected_draft(first, others=0.999):
    """Give a request for the block rule: three deterministic tokens of these probabilities."""
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5]).repeat(4, 1)
    for row, share in zip(logits[:3], (first, others, others), strict=True):
        row[3] = row[:3].logsumexp(0) + math.log(share / (1 - share))
    return VerifyCase(
        dict(
            target_logits=logits[None],
            draft_tokens=torch.tensor([[3, 3, 3]]),
            uniforms=f64([[0.9, 0.9, 0.5, 0.2]]),
            rule="block",
        )
    )


def test_a_threshold_of_small_differences_is_no_tie():
    # One p off by 5e-7: what it leaves of 1 is off by 5e-4 of itself, and the thresholds by 1e-4.
    case, nearly = expected_draft(0.999), expected_draft(0.999 - 5e-7)
    good, off = REFERENCE.run(case), REFERENCE.run(nearly)
    gap = (off.accept_probs - good.accept_probs).abs().max()
    assert 5e-5 < float(gap) < 5e-4 and torch.equal(off.tokens, good.tokens)
    assert assert_tokens_match(off, good, case) == 0
    trees = [chain_as_tree(each) for each in (nearly, case)]
    assert assert_trees_match(*map(REFERENCE.run_tree, trees), trees[1]) == 0
    # More than rounding does is refused, and so is the same gap where nothing is small.
    with pytest.raises(AssertionError, match="accept_probs"):
        assert_tokens_match(REFERENCE.run(expected_draft(0.999 - 5e-5)), good, case)
    usual = expected_draft(0.7, 0.7)
    good = REFERENCE.run(usual)
    with pytest.raises(AssertionError, match="accept_probs"):
        assert_tokens_match(good._replace(accept_probs=good.accept_probs + 1e-4), good, usual)


def test_a_coin_at_such_a_threshold_is_a_tie():
    case = expected_draft(0.999)
    h = REFERENCE.run(case).accept_probs.double()
    for shift, accepted in ((-1e-5, 1), (1e-5, 0)):
        uniforms = torch.cat([h[:, :1] + shift, f64([[0.999, 0.999, 0.2]])], 1)
        tied = case.replace(uniforms=uniforms)
        good = REFERENCE.run(tied)
        other = REFERENCE.run(case.replace(uniforms=uniforms - f64([[2 * shift, 0, 0, 0]])))
        assert good.num_accepted.tolist() == [accepted]
        assert other.num_accepted.tolist() == [1 - accepted]
        assert assert_tokens_match(other, good, tied) == 1


def test_a_filter_at_a_tie_is_counted_though_the_tokens_are_the_same():
    # 0.5 of the mass, or a hair less, lies above the second token.
    case = VerifyCase(
        dict(
            target_logits=torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]]).log(),
            draft_tokens=torch.tensor([[0]]),
            uniforms=f64([[0.1, 0.2]]),
            rule="block",
            top_p=torch.tensor([0.5 - 2e-6]),
        )
    )
    alone = REFERENCE.run(case)
    both = REFERENCE.run(case.replace(top_p=torch.tensor([0.5 + 2e-6])))
    assert torch.equal(alone.tokens, both.tokens)
    assert alone.accept_probs.tolist() == [[1.0]] and both.accept_probs.tolist() != [[1.0]]
    assert assert_tokens_match(both, alone, case) == 1


# ---- the other operators ------------------------------------------------------------------------


def parameters(seed, rows, vocab, greedy=True):
    case = make_case(seed, batch=rows, gamma=1, vocab=vocab, greedy_rows=greedy)
    names = ("temperature", "top_k", "top_p", "min_p")
    return case.inputs["target_logits"][:, 0], {name: case.inputs[name] for name in names}


def seeds_of(operator, number):
    """Batches of 24 rows, each with its own parameters; Triton's interpreter gets one."""
    return range(number if operator is not TRITON or torch.cuda.is_available() else 1)


def scalars(params, row):
    return {name: value[row].item() for name, value in params.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 17, 4097])
def test_row_law(operator, dtype, vocab):
    for seed in seeds_of(operator, 4):
        logits, params = parameters(seed, 24, vocab)
        logits = logits.to(dtype)
        got, expected = (b.row_law(logits, **params) for b in (operator, REFERENCE))
        assert torch.equal(got.max, expected.max)
        assert torch.equal(got.scale, expected.scale)
        assert torch.equal(got.argmax, expected.argmax)
        # min-p's cutoff may be rounded either way; nothing may lie in between.
        torch.testing.assert_close(got.cutoff, expected.cutoff, rtol=3e-7, atol=1e-6)
        kept, kept_expected = ((logits.float() >= law.cutoff[:, None]) for law in (got, expected))
        assert torch.equal(kept, kept_expected)
        torch.testing.assert_close(got.log_z, expected.log_z, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 17, 4097])
def test_sample(operator, dtype, vocab):
    for seed in seeds_of(operator, 4):
        logits, params = parameters(seed, 24, vocab)
        logits = logits.to(dtype)
        u = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        got, expected = (b.sample(logits, u, **params) for b in (operator, REFERENCE))
        for r in (got.tokens != expected.tokens).nonzero().flatten().tolist():
            law = filtered_law(logits[r], **scalars(params, r))
            low, high = draw_interval(law, int(got.tokens[r]))
            assert low - operator.tolerance <= u[r] < high + operator.tolerance
        same = got.tokens == expected.tokens
        assert int((~same).sum()) <= 1
        torch.testing.assert_close(
            got.logprobs[same], expected.logprobs[same], rtol=1e-6, atol=2e-5
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab, width", [(1, 1), (17, 17), (17, 9), (9, 17), (4097, 4099)])
def test_acceptance(operator, dtype, vocab, width):
    for seed in seeds_of(operator, 3):
        target, params = parameters(seed, 24, vocab)
        draft, own = parameters(seed + 50, 24, width)
        own = {f"draft_{name}": value for name, value in own.items()}
        inputs = (target.to(dtype), draft.to(dtype))
        for extra in ({}, own):
            got, expected = (
                b.acceptance(*inputs, **params, **extra) for b in (operator, REFERENCE)
            )
            torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


def test_acceptance_of_the_reference_by_sorting():
    target, params = parameters(3, 24, 17)
    draft, _ = parameters(53, 24, 17)
    got = REFERENCE.acceptance(target, draft, **params)
    for r in range(24):
        p, q = (filtered_law(row, **scalars(params, r)) for row in (target[r], draft[r]))
        assert float(got[r]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_outputs_have_the_documented_types(backend, rule):
    case = make_case(8, batch=3, gamma=2, rule=rule)
    result = backend.run(case)
    assert [(list(t.shape), t.dtype) for t in result] == [
        ([3, 3], torch.int64),
        ([3], torch.int32),
        ([3, 3], torch.float32),
        ([3, 2], torch.float32),
        ([3], torch.int32),
    ]
    law = backend.row_law(case.inputs["target_logits"][:, 0])
    expected = [torch.float32, torch.float64, torch.float32, torch.float64, torch.int64]
    assert [t.dtype for t in law] == expected and all(list(t.shape) == [3] for t in law)
