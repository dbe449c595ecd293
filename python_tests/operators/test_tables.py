"""Literal inputs and outputs that a human can check with a pencil."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext.contract import rule_names

# Laws used below. Token rule at row 0: x = 1 is accepted with .1 / .6 = 1/6, all others always; the
# residual is (.3, 0, .1, .1) / .5, so the final draw gives 0 below .6, 2 below .8, then 3.
P0, Q0 = [0.4, 0.1, 0.3, 0.2], [0.1, 0.6, 0.2, 0.1]
# Row 1: x = 0 and x = 1 are accepted with .1 / .4 = 1/4; the residual is all on 2.
P1, Q1 = [0.1, 0.1, 0.7, 0.1], [0.4, 0.4, 0.1, 0.1]
# The bonus row: 0 below .1, 1 below .3, 2 below .6, then 3.
P2 = [0.1, 0.2, 0.3, 0.4]

NAN = math.nan


def verify(backend, draft, uniforms, rule, **kwargs):
    if "draft_kinds" not in kwargs and rule not in ("greedy", "top_beta", "typical"):
        kwargs.setdefault("draft_logits", log_probs([[Q0, Q1]]))
    return backend.verify(
        log_probs([[P0, P1, P2]]),
        torch.tensor([draft]),
        uniforms=f64([uniforms]),
        rule=rule,
        **kwargs,
    )


def check(result, tokens, accept_probs, status=0):
    accepted = len(tokens) - 1
    assert result.tokens.tolist() == [tokens + [-1] * (3 - len(tokens))]
    assert result.num_accepted.tolist() == [accepted]
    assert result.accept_probs[0].tolist() == pytest.approx(accept_probs, abs=1e-6, nan_ok=True)
    assert result.status.tolist() == [status]


@pytest.mark.parametrize(
    "draft, uniforms, tokens, accept_probs",
    [
        # The first token at 1/6 = .1667; nothing after a rejection is looked at.
        ([1, 2], [0.16, 0.99, 0.05], [1, 2, 0], [1 / 6, 1]),
        ([1, 2], [0.17, 0.00, 0.59], [0], [1 / 6, NAN]),
        ([1, 2], [0.17, 0.00, 0.61], [2], [1 / 6, NAN]),
        ([1, 2], [0.99, 0.00, 0.81], [3], [1 / 6, NAN]),
        # The second token at 1/4.
        ([0, 1], [0.99, 0.24, 0.11], [0, 1, 1], [1, 1 / 4]),
        ([0, 1], [0.99, 0.26, 0.11], [0, 2], [1, 1 / 4]),
        ([0, 0], [0.99, 0.26, 0.99], [0, 2], [1, 1 / 4]),
        # p = q at the second token: always accepted. Then the bonus row.
        ([2, 3], [0.99, 0.99, 0.09], [2, 3, 0], [1, 1]),
        ([2, 3], [0.99, 0.99, 0.31], [2, 3, 2], [1, 1]),
        ([2, 3], [0.99, 0.99, 0.61], [2, 3, 3], [1, 1]),
    ],
)
def test_token_rule(backend, draft, uniforms, tokens, accept_probs):
    check(verify(backend, draft, uniforms, "token"), tokens, accept_probs)


@pytest.mark.parametrize(
    "draft, uniforms, tokens, accept_probs",
    [
        # w1 = 1/6; [w1 p1 - q1]+ = .7/6 - .1 = 1/60 on token 2; h1 = (1/60) / (1/60 + 5/6) = 1/51.
        # w2 = min(1, w1 * .7 / .1) = 1: the second token saves the first, whatever the coins.
        ([1, 2], [0.99, 0.99, 0.05], [1, 2, 0], [1 / 51, 1]),
        # w2 = w1 / 4 = 1/24.
        ([1, 0], [0.99, 0.041, 0.05], [1, 0, 0], [1 / 51, 1 / 24]),
        ([1, 0], [0.019, 0.042, 0.05], [1, 2], [1 / 51, 1 / 24]),
        # Nothing accepted: the residual of the root, as in the token rule.
        ([1, 0], [0.020, 0.042, 0.59], [0], [1 / 51, 1 / 24]),
        ([1, 0], [0.020, 0.042, 0.61], [2], [1 / 51, 1 / 24]),
        # w2 = w1: the last success wins although the first coin failed.
        ([1, 3], [0.99, 0.16, 0.61], [1, 3, 3], [1 / 51, 1 / 6]),
        ([1, 3], [0.99, 0.17, 0.81], [3], [1 / 51, 1 / 6]),
        # w1 = 1: h1 = 1, the first token is never lost.
        ([0, 1], [0.99, 0.24, 0.11], [0, 1, 1], [1, 1 / 4]),
        ([0, 1], [0.99, 0.26, 0.11], [0, 2], [1, 1 / 4]),
    ],
)
def test_block_rule(backend, draft, uniforms, tokens, accept_probs):
    check(verify(backend, draft, uniforms, "block"), tokens, accept_probs)


@pytest.mark.parametrize(
    "rule, uniforms, tokens, accept_probs",
    [
        # Deterministic 0 and 2: accepted with p = .4, then .7. Rejected at the root, the token
        # comes from (.1, .3, .2) / .6 on 1, 2, 3.
        ("token", [0.39, 0.69, 0.2], [0, 2, 1], [0.4, 0.7]),
        ("token", [0.41, 0.00, 0.16], [1], [0.4, NAN]),
        ("token", [0.41, 0.00, 0.17], [2], [0.4, NAN]),
        ("token", [0.41, 0.00, 0.67], [3], [0.4, NAN]),
        ("token", [0.39, 0.71, 0.34], [0, 1], [0.4, 0.7]),  # (.1, .1, .1) / .3 on 0, 1, 3
        # w1 = .4, R1 = .4 * .3 = .12, h1 = .12 / (.12 + .6) = 1/6, h2 = w2 = .4 * .7 = .28.
        ("block", [0.99, 0.27, 0.2], [0, 2, 1], [1 / 6, 0.28]),
        ("block", [0.16, 0.29, 0.34], [0, 1], [1 / 6, 0.28]),
        ("block", [0.17, 0.29, 0.17], [2], [1 / 6, 0.28]),
        # Lenience 1/2: u / 2 < p.
        ("lenient", [0.79, 0.99, 0.2], [0, 2, 1], [0.8, 1]),
        ("lenient", [0.81, 0.00, 0.16], [1], [0.8, NAN]),
    ],
)
def test_deterministic_draft(backend, rule, uniforms, tokens, accept_probs):
    kinds = torch.zeros(1, 2, dtype=torch.int8)
    options = dict(lenience=0.5) if rule == "lenient" else {}
    result = verify(backend, [0, 2], uniforms, rule, draft_kinds=kinds, **options)
    check(result, tokens, accept_probs)


@pytest.mark.parametrize(
    "draft, uniforms, tokens, accept_probs",
    [
        # Lenience 1/2 doubles 1/6 to 1/3 and 1/4 to 1/2.
        ([1, 0], [0.33, 0.49, 0.05], [1, 0, 0], [1 / 3, 1 / 2]),
        ([1, 0], [0.34, 0.00, 0.59], [0], [1 / 3, NAN]),
        ([1, 0], [0.33, 0.51, 0.00], [1, 2], [1 / 3, 1 / 2]),
    ],
)
def test_lenient(backend, draft, uniforms, tokens, accept_probs):
    check(verify(backend, draft, uniforms, "lenient", lenience=0.5), tokens, accept_probs)


@pytest.mark.parametrize(
    "rule, draft, options, tokens, accept_probs",
    [
        # Arg max: 0, 2, 3.
        ("greedy", [0, 2], {}, [0, 2, 3], [1, 1]),
        ("greedy", [0, 1], {}, [0, 2], [1, 0]),
        ("greedy", [1, 2], {}, [0], [0, NAN]),
        ("greedy", [1, 2], dict(full_accept_probs=True), [0], [0, 1]),
        # Row 0 ranks 0, 2, 3, 1; log .4/.2 = .693, log .4/.3 = .288.
        ("top_beta", [3, 2], dict(beta=3, tau=0.7), [3, 2, 3], [1, 1]),
        ("top_beta", [3, 2], dict(beta=2, tau=0.7), [0], [0, NAN]),
        ("top_beta", [3, 2], dict(beta=3, tau=0.69), [0], [0, NAN]),
        # Row 1: three tokens tie for rank 2, log .7/.1 = 1.946.
        ("top_beta", [2, 3], dict(beta=2, tau=2.0), [2, 3, 3], [1, 1]),
        ("top_beta", [2, 3], dict(beta=2, tau=1.9), [2, 2], [1, 0]),
        # Entropies 1.2799 and .9404: delta exp(-H) = .0834 and .1171 at the default .3, the
        # threshold is the smaller of that and epsilon = .09.
        ("typical", [1, 0], {}, [1, 0, 1], [1, 1]),
        ("typical", [1, 0], dict(epsilon=0.5), [1, 2], [1, 0]),
        ("typical", [1, 0], dict(epsilon=0.5, delta=0.4), [0], [0, NAN]),
    ],
)
def test_rules_without_a_draft_law(backend, rule, draft, options, tokens, accept_probs):
    # The final uniform .21 draws 1 from the bonus row, 2 from row 1 and 0 from row 0.
    result = verify(backend, draft, [0.99, 0.99, 0.21], rule, **options)
    check(result, tokens, accept_probs)


def test_deterministic_tests_at_equality(backend):
    # top_beta: a gap of exactly tau accepts. lenient at T = 0: a tie with the top passes at l = 1.
    logits = torch.tensor([[[1.0, 0.0, 1.0, 0.0]] * 2])
    options = dict(uniforms=f64([[0.5, 0.0]]))

    def accepted(token, **kwargs):
        result = backend.verify(logits, torch.tensor([[token]]), **options, **kwargs)
        return int(result.num_accepted[0])

    assert accepted(1, rule="top_beta", tau=1.0) == 1
    assert accepted(1, rule="top_beta", tau=math.nextafter(1.0, 0.0)) == 0
    assert accepted(1, rule="top_beta", beta=2) == 0  # its rank is 3, whatever the order of ties
    assert accepted(2, rule="top_beta", beta=1, tau=0.0) == 1
    assert accepted(2, rule="lenient", temperature=torch.zeros(1)) == 1
    assert accepted(2, rule="token", temperature=torch.zeros(1)) == 0
    # typical: p = 1/4 exactly is not above epsilon = 1/4.
    flat = dict(rule="typical", delta=4.0)
    logits = torch.zeros(1, 2, 4)
    assert accepted(3, epsilon=0.25, **flat) == 0
    assert accepted(3, epsilon=math.nextafter(0.25, 0.0), **flat) == 1


def test_logprobs(backend):
    result = verify(backend, [1, 2], [0.1, 0.1, 0.05], "token")
    expected = [math.log(0.1), math.log(0.7), math.log(0.1)]
    assert result.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)
    # At T = 1/2 the laws are squared: row 0 (.16, .01, .09, .04) / .3.
    half = dict(temperature=torch.tensor([0.5]))
    result = verify(backend, [0, 2], [0.9, 0.9, 0.99], "token", **half)
    expected = [math.log(0.16 / 0.3), math.log(0.49 / 0.52), math.log(0.16 / 0.3)]
    assert result.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)
    result = verify(backend, [0, 2], [0.9, 0.9, 0.99], "token", **half, raw_logprobs=True)
    expected = [math.log(0.4), math.log(0.7), math.log(0.4)]
    assert result.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", ["block", "token", "greedy", "lenient", "typical"])
def test_temperature_zero(backend, rule):
    options = dict(temperature=torch.tensor([0.0]))
    result = verify(backend, [0, 2], [2.0, NAN, -1.0], rule, **options)
    check(result, [0, 2, 3], [1, 1])
    assert result.logprobs.tolist() == [[0, 0, 0]]
    rejected = verify(backend, [2, 2], [2.0, NAN, -1.0], rule, **options)
    check(rejected, [0], [0, 0] if rule == "block" else [0, NAN])
    raw = verify(backend, [0, 2], [2.0, NAN, -1.0], rule, raw_logprobs=True, **options)
    expected = [math.log(0.4), math.log(0.7), math.log(0.4)]
    assert raw.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_lenient_at_temperature_zero(backend):
    # p(x) >= l max p on the raw row: .3 / .4 = .75 passes l = .7, fails l = .8. Corrected by the
    # arg max. (The paper prints the inequality reversed.)
    for lenience, tokens, probs in ((0.7, [2, 2, 3], [1, 1]), (0.8, [0], [0, NAN])):
        options = dict(temperature=torch.tensor([0.0]), lenience=lenience)
        check(verify(backend, [2, 2], [0.5, 0.5, 0.5], "lenient", **options), tokens, probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", ["block", "token", "greedy"])
def test_ties_at_temperature_zero_go_to_the_lowest_index(backend, rule, dtype):
    logits = torch.tensor([[[1, 5, 5, 5], [7, 0, 7, 0]]], dtype=dtype)
    options = dict(rule=rule, temperature=torch.zeros(1), uniforms=f64([[0.99, 0.99]]))
    accepted = backend.verify(logits, torch.tensor([[1]]), **options)
    assert accepted.tokens.tolist() == [[1, 0]]
    tie_is_no_match = backend.verify(logits, torch.tensor([[2]]), **options)
    assert tie_is_no_match.tokens.tolist() == [[1, -1]]


def test_full_accept_probs(backend):
    result = verify(backend, [1, 1], [0.99, 0.99, 0.0], "token", full_accept_probs=True)
    check(result, [0], [1 / 6, 1 / 4])


def test_draft_vocabulary_sizes(backend):
    # Vd < V: q = 0 beyond, so the residual reaches token 3. Vd > V: id 4 has p = 0.
    small = dict(draft_logits=log_probs([[[0.5, 0.25, 0.25]] * 2]))
    check(verify(backend, [0, 2], [0.81, 0.0, 0.99], "token", **small), [3], [0.8, NAN])
    large = dict(draft_logits=log_probs([[[0.2] * 5] * 2]))
    check(verify(backend, [4, 2], [0.0, 0.0, 0.1], "token", **large), [0], [0, NAN])
    check(verify(backend, [4, 2], [0.0, 0.0, 0.9], "block", **large), [2], [0, 0])


def test_draft_probs_are_normalised_inside(backend):
    probs = dict(draft_logits=None, draft_probs=torch.tensor([[Q0, Q1]]) * 7)
    check(verify(backend, [1, 2], [0.16, 0.99, 0.05], "token", **probs), [1, 2, 0], [1 / 6, 1])


def test_packed_target_rows(backend):
    # Engines keep all rows of a batch in one [R, V] table. Request 0 drafts 2, request 1 drafts 0.
    table = log_probs([P2, P1, [0.25] * 4, P0])
    rows = torch.tensor([[3, 1, 0], [2, -7, 99]])  # what lies after the end is not looked at
    drafts = log_probs([Q1, Q0])
    result = backend.verify(
        table,
        torch.tensor([[1, 2], [0, 0]]),
        drafts,
        target_rows=rows,
        draft_rows=torch.tensor([[1, 0], [5, -1]]),
        draft_lengths=torch.tensor([2, 0]),
        uniforms=f64([[0.16, 0.99, 0.05], [0.0, 0.0, 0.6]]),
        rule="token",
    )
    assert result.tokens.tolist() == [[1, 2, 0], [2, -1, -1]]
    assert result.num_accepted.tolist() == [2, 0] and result.status.tolist() == [0, 0]


def test_draft_lengths_of_zero_in_a_batch(backend):
    # Plain sampling within a batch of drafting requests.
    lengths = torch.tensor([0, 2])
    result = backend.verify(
        log_probs([[P0, P1, P2]] * 2),
        torch.tensor([[1, 2], [1, 2]]),
        log_probs([[Q0, Q1]] * 2),
        draft_lengths=lengths,
        uniforms=f64([[0.0, 0.0, 0.41], [0.16, 0.99, 0.05]]),
        rule="token",
    )
    assert result.tokens.tolist() == [[1, -1, -1], [1, 2, 0]]
    assert bool(result.accept_probs[0].isnan().all())


def test_sample(backend):
    law = log_probs([P2]).repeat(6, 1)
    u = f64([0.0, 0.09, 0.11, 0.31, 0.61, 1 - 2**-53])
    result = backend.sample(law, u)
    assert result.tokens.tolist() == [0, 0, 1, 2, 3, 3]
    expected = [math.log(P2[token]) for token in (0, 0, 1, 2, 3, 3)]
    assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    # top_k = 2 leaves 2 and 3 with 3/7 and 4/7.
    top2 = backend.sample(law, u, top_k=torch.full((6,), 2))
    assert top2.tokens.tolist() == [2, 2, 2, 2, 3, 3]
    # No law, no parameter, no uniform: -1, never a silently wrong token.
    law[0, 0] = NAN
    law[1] = -math.inf
    law[2, 3] = math.inf
    result = backend.sample(
        law, f64([0.5, 0.5, 0.5, 0.5, 1.0, NAN]), temperature=torch.tensor([1.0, 1, 1, -1, 1, 1])
    )
    assert result.tokens.tolist() == [-1] * 6 and bool(result.logprobs.isnan().all())


def test_row_law(backend):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]]).repeat(6, 1)
    law = backend.row_law(
        logits,
        temperature=torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 0, 3, 1, 0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.5]),
    )
    e = math.e
    assert law.max.tolist() == [2.0] * 6 and law.argmax.tolist() == [1] * 6
    assert law.scale.tolist() == [1, 2, math.inf, 1, 1, 1]
    cutoffs = [-math.inf, -math.inf, 2, 1, 2, 2 + math.log(0.5)]
    assert law.cutoff.tolist() == pytest.approx(cutoffs, abs=1e-6)
    z = [2 + 1 / e + e**-2, 2 + e**-2 + e**-4, 1, 2 + 1 / e, 2, 2]
    assert law.log_z.exp().tolist() == pytest.approx(z, abs=1e-6)


def test_row_law_of_what_has_none(backend):
    logits = torch.zeros(6, 3)
    logits[0, 1], logits[1, 2], logits[2] = NAN, math.inf, -math.inf
    law = backend.row_law(
        logits,
        temperature=torch.tensor([1.0, 1, 1, -1, 1, 1]),
        top_p=torch.tensor([1.0, 1, 1, 1, -0.1, 1]),
        min_p=torch.tensor([0.0, 0, 0, 0, 0, 1.5]),
    )
    assert law.argmax.tolist() == [-1] * 6
    for values in law[:4]:
        assert bool(values.isnan().all())


def test_acceptance(backend):
    # min(.4, .1) + min(.1, .6) + min(.3, .2) + min(.2, .1) = .5
    assert backend.acceptance(log_probs([P0]), log_probs([Q0])).tolist() == pytest.approx([0.5])
    zero = torch.zeros(2)
    greedy = backend.acceptance(log_probs([P0, P0]), log_probs([Q0, P1]), temperature=zero)
    assert greedy.tolist() == [0.0, 0.0]
    assert backend.acceptance(log_probs([P1]), log_probs([P1]), temperature=zero[:1]).tolist() == [
        1
    ]
    soft = backend.acceptance(
        log_probs([P0]), log_probs([Q0]), temperature=zero[:1], draft_temperature=torch.ones(1)
    )
    assert soft.tolist() == pytest.approx([0.1])  # q at the target's arg max
    nothing = log_probs([P0]).fill_(NAN)
    assert bool(backend.acceptance(nothing, log_probs([Q0])).isnan().all())


def test_empty_batches(backend):
    for gamma in (0, 2):
        result = backend.verify(
            torch.zeros(0, gamma + 1, 5),
            torch.zeros(0, gamma, dtype=torch.int64),
            torch.zeros(0, gamma, 5),
            uniforms=torch.zeros(0, gamma + 1, dtype=torch.float64),
        )
        assert [list(t.shape) for t in result] == [
            [0, gamma + 1],
            [0],
            [0, gamma + 1],
            [0, gamma],
            [0],
        ]
    assert [len(t) for t in backend.row_law(torch.zeros(0, 5))] == [0] * 5
    assert [len(t) for t in backend.sample(torch.zeros(0, 5), f64([]))] == [0, 0]
    assert list(backend.acceptance(torch.zeros(0, 5), torch.zeros(0, 3)).shape) == [0]
    seeds = torch.zeros(0, dtype=torch.int64)
    assert list(backend.uniforms(seeds, seeds, 3).shape) == [0, 3]


@pytest.mark.parametrize("rule", rule_names(chains=True, races=False))
def test_vocabulary_of_one(backend, rule):
    result = backend.verify(
        torch.tensor([[[3.0], [-9.0]]]),
        torch.tensor([[0]]),
        torch.tensor([[[-100.0]]]),
        uniforms=f64([[1 - 2**-53, 1 - 2**-53]]),
        rule=rule,
    )
    assert result.tokens.tolist() == [[0, 0]] and result.logprobs.tolist() == [[0, 0]]
    assert result.accept_probs.tolist() == [[1]] and result.status.tolist() == [0]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_no_draft_columns(backend, rule):
    result = backend.verify(
        log_probs([[P2]]),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(1, 0, 4),
        uniforms=f64([[0.31]]),
        rule=rule,
    )
    assert result.tokens.tolist() == [[2]] and result.accept_probs.shape == (1, 0)
