"""What only values can tell is reported in ``status``, bit by bit, and never read out of bounds."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext import (
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
)
from specdec_ext.contract import rule_names

NAN, INF = math.nan, math.inf
P = [0.4, 0.1, 0.3, 0.2]
FLAT = [0.25] * 4
RULES = rule_names(chains=True, races=False)
SAMPLED = rule_names(chains=True, reads_draft_law=True)


def inputs(gamma=2, **changes):
    """Target (.4, .1, .3, .2) in every row, a flat draft, tokens 0 that every coin of 0 accepts."""
    base = dict(
        target_logits=log_probs([[P] * (gamma + 1)]),
        draft_tokens=torch.zeros(1, gamma, dtype=torch.int64),
        draft_logits=log_probs([[FLAT] * gamma]),
        uniforms=torch.zeros(1, gamma + 1, dtype=torch.float64),
    )
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


def emitted(result):
    return [token for token in result.tokens[0].tolist() if token >= 0]


def test_bits():
    bits = (
        STATUS_NO_TARGET_LAW,
        STATUS_INVALID_DRAFT_TOKEN,
        STATUS_NO_DRAFT_LAW,
        STATUS_PARAMETER_OUT_OF_RANGE,
        STATUS_INVALID_TREE,
    )
    assert bits == (1, 2, 4, 8, 16)


# ---- 1: no target law ---------------------------------------------------------------------------

BROKEN = {"nan": [0.0, NAN, 0.0, 0.0], "inf": [0.0, 0.0, INF, 0.0], "masked": [-INF] * 4}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_target_row_without_a_law_that_wins(backend, rule, broken, row):
    case = inputs()
    case["target_logits"][0, row] = torch.tensor(BROKEN[broken])
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [1]
    assert result.tokens.tolist() == [[0] * (row + 1) + [-1] * (2 - row)]
    assert result.num_accepted.tolist() == [row]
    assert bool(result.logprobs[0, row:].isnan().all())
    assert bool(torch.isfinite(result.logprobs[0, :row]).all())
    # The chain ends there: no acceptance probability after it.
    assert bool(result.accept_probs[0, row:].isnan().all())


@pytest.mark.parametrize("rule", ["token", "lenient"])
def test_target_row_without_a_law_that_is_not_reached(backend, rule):
    case = inputs(draft_tokens=torch.tensor([[1, 0]]), uniforms=f64([[0.9, 0.0, 0.0]]))
    case["target_logits"][0, 1] = NAN
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [0] and emitted(result) == [0]


def test_target_row_without_a_law_ends_a_block(backend):
    # Row 1 has no law: node 1 is a leaf with h = w1 = .1 / .25 = .4, the second column is not used.
    case = inputs(draft_tokens=torch.tensor([[1, 0]]))
    case["target_logits"][0, 1] = NAN
    case["uniforms"] = f64([[0.41, 0.0, 0.0]])
    lost = backend.verify(**case)
    assert lost.status.tolist() == [0] and emitted(lost) == [0]
    assert lost.accept_probs[0, 0] == pytest.approx(0.4) and bool(lost.accept_probs[0, 1].isnan())
    case["uniforms"] = f64([[0.39, 0.0, 0.0]])
    won = backend.verify(**case)
    assert won.status.tolist() == [1] and won.tokens.tolist() == [[1, 0, -1]]


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_target_rows_out_of_range(backend, index):
    case = inputs(target_logits=log_probs([P] * 3), target_rows=torch.tensor([[0, index, 2]]))
    result = backend.verify(**case)
    assert result.status.tolist() == [1] and result.tokens.tolist() == [[0, 0, -1]]


# ---- 2: invalid draft tokens --------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("token", [-2, 4, 2**40, -(2**62)])
@pytest.mark.parametrize("column", [0, 1])
def test_invalid_draft_token(backend, rule, token, column):
    case = inputs()
    case["draft_tokens"][0, column] = token
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [2]
    # The draft ends there and the bonus comes from that row's own law.
    assert result.num_accepted.tolist() == [column]
    assert emitted(result) == [0] * (column + 1)
    assert bool(result.accept_probs[0, column:].isnan().all())


@pytest.mark.parametrize("rule", RULES)
def test_placeholder_is_no_error(backend, rule):
    # What follows a -1 is not looked at, however invalid.
    case = inputs(draft_tokens=torch.tensor([[-1, 999]]))
    case["draft_logits"][:] = NAN
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [0] and emitted(result) == [0]


def test_invalid_token_after_the_draft_length_is_no_error(backend):
    case = inputs(draft_tokens=torch.tensor([[0, 999]]), draft_lengths=torch.tensor([1]))
    assert backend.verify(**case).status.tolist() == [0]


@pytest.mark.parametrize("vocab, width, valid", [(4, 6, 5), (6, 4, 5), (4, 2, 3)])
def test_ids_are_valid_up_to_the_larger_vocabulary(backend, vocab, width, valid):
    case = inputs(
        gamma=1,
        target_logits=torch.zeros(1, 2, vocab),
        draft_logits=torch.zeros(1, 1, width),
    )
    case["draft_tokens"][0, 0] = valid
    # Beyond Vd nothing was drawn (4); beyond V the token has p = 0 and is rejected (0).
    assert backend.verify(**case).status.tolist() == [4 if valid >= width else 0]
    case["draft_tokens"][0, 0] = max(vocab, width)
    assert backend.verify(**case).status.tolist() == [2]


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("kind", [-1, 2, 127])
def test_unknown_kind(backend, rule, kind):
    case = inputs(draft_kinds=torch.tensor([[1, kind]], dtype=torch.int8))
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [2] and result.num_accepted.tolist() == [1]


# ---- 4: no draft law ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("broken", BROKEN)
def test_draft_row_without_a_law(backend, rule, broken):
    case = inputs()
    case["draft_logits"][0, 1] = torch.tensor(BROKEN[broken])
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]
    assert bool(result.accept_probs[0, 1].isnan())


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(
    "values", [[0.5, -0.1, 0.5, 0.1], [0.0] * 4, [NAN, 1, 0, 0], [INF, 0, 0, 0]]
)
def test_draft_probs_without_a_law(backend, rule, values):
    probs = torch.tensor([[FLAT, values]])
    result = backend.verify(**inputs(draft_logits=None, draft_probs=probs), rule=rule)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]


@pytest.mark.parametrize("rule", SAMPLED)
def test_drafted_token_of_draft_probability_zero(backend, rule):
    case = inputs()
    case["draft_logits"][0, 1, 0] = -INF
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]
    probs = torch.tensor([[FLAT, [0.0, 1.0, 0.0, 0.0]]])
    result = backend.verify(**inputs(draft_logits=None, draft_probs=probs), rule=rule)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]


@pytest.mark.parametrize("rule", SAMPLED)
def test_draft_temperature_zero_is_a_point_mass(backend, rule):
    # A draft of [1, 2, 0, 0] at T = 0 can only have given token 1.
    draft = torch.tensor([[[1.0, 2.0, 0.0, 0.0]] * 2])
    options = dict(draft_logits=draft, draft_temperature=torch.zeros(1), rule=rule)
    wrong = backend.verify(**inputs(**options))
    assert wrong.status.tolist() == [4] and emitted(wrong) == [0]
    right = backend.verify(**inputs(draft_tokens=torch.tensor([[1, 1]]), **options))
    assert right.status.tolist() == [0] and emitted(right) == [1, 1, 0]
    assert right.accept_probs[0, 1] == pytest.approx(0.1 if rule != "block" else 0.01, abs=1e-6)


@pytest.mark.parametrize("rule", SAMPLED)
def test_sampled_kind_without_any_draft_law(backend, rule):
    kinds = torch.tensor([[0, 1]], dtype=torch.int8)
    result = backend.verify(**inputs(draft_logits=None, draft_kinds=kinds), rule=rule)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]


@pytest.mark.parametrize("index", [-1, 2, 2**40])
def test_draft_rows_out_of_range(backend, index):
    case = inputs(draft_logits=log_probs([FLAT] * 2), draft_rows=torch.tensor([[1, index]]))
    result = backend.verify(**case)
    assert result.status.tolist() == [4] and emitted(result) == [0, 0]


@pytest.mark.parametrize("rule", ["greedy", "top_beta", "typical"])
def test_rules_that_never_read_the_draft_law(backend, rule):
    case = inputs(draft_logits=torch.full((1, 2, 4), NAN))
    assert backend.verify(**case, rule=rule).status.tolist() == [0]


@pytest.mark.parametrize("rule", RULES)
def test_temperature_zero_never_reads_the_draft_law(backend, rule):
    case = inputs(draft_logits=torch.full((1, 2, 4), NAN), temperature=torch.zeros(1))
    result = backend.verify(**case, rule=rule)
    assert result.status.tolist() == [0] and emitted(result) == [0, 0, 0]


def test_draft_law_after_the_first_failure(backend):
    # Not looked at, unless the caller asks for all acceptance probabilities.
    case = inputs(
        draft_tokens=torch.tensor([[1, 0]]), uniforms=f64([[0.9, 0.0, 0.0]]), rule="token"
    )
    case["draft_logits"][0, 1] = NAN
    assert backend.verify(**case).status.tolist() == [0]
    full = backend.verify(**case, full_accept_probs=True)
    assert full.status.tolist() == [4]
    assert emitted(full) == [0] and bool(full.accept_probs[0, 1].isnan())


def test_block_looks_no_further_than_an_inflow_of_zero(backend):
    case = inputs(draft_tokens=torch.tensor([[1, 0]]))
    case["target_logits"][0, 0, 1] = -INF
    case["draft_logits"][0, 1] = NAN
    result = backend.verify(**case)
    assert result.status.tolist() == [0] and result.accept_probs.tolist() == [[0, 0]]


# ---- 8: parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "token", "lenient", "typical"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.5),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_p", -0.1),
        ("top_p", NAN),
        ("min_p", 1.1),
        ("min_p", NAN),
        ("draft_temperature", -1.0),
        ("draft_top_p", NAN),
        ("draft_min_p", 2.0),
    ],
)
def test_parameter_out_of_range_is_replaced(backend, rule, name, value):
    case = inputs(uniforms=f64([[0.5, 0.5, 0.45]]), draft_tokens=torch.tensor([[1, 2]]), rule=rule)
    result = backend.verify(**case, **{name: torch.tensor([value])})
    plain = backend.verify(**case)
    assert result.status.tolist() == [8] and plain.status.tolist() == [0]
    for got, expected in zip(result[:4], plain[:4], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", ["greedy", "top_beta"])
def test_rules_that_look_at_no_parameter(backend, rule):
    bad = dict(
        temperature=torch.tensor([NAN]), top_p=torch.tensor([-1.0]), min_p=torch.tensor([9.0])
    )
    case = inputs(uniforms=torch.full((1, 3), NAN, dtype=torch.float64))
    assert backend.verify(**case, **bad, rule=rule).status.tolist() == [0]


@pytest.mark.parametrize("top_k", [-(2**31), 0, 4, 2**31 - 1])
def test_nothing_is_out_of_range_for_top_k(backend, top_k):
    case = inputs(top_k=torch.tensor([top_k], dtype=torch.int32))
    assert backend.verify(**case).status.tolist() == [0]


@pytest.mark.parametrize("length, expected", [(-1, 0), (3, 2), (2**40, 2), (-(2**40), 0)])
def test_draft_length_out_of_range_is_clamped(backend, length, expected):
    result = backend.verify(**inputs(draft_lengths=torch.tensor([length])))
    assert result.status.tolist() == [8] and result.num_accepted.tolist() == [expected]


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize(
    "u, replaced", [(1.0, 1 - 2**-53), (7.5, 1 - 2**-53), (-0.1, 0.0), (NAN, 0.0)]
)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_uniform_out_of_range_is_clamped(backend, rule, slot, u, replaced):
    bad, good = f64([[0.3, 0.3, 0.3]]), f64([[0.3, 0.3, 0.3]])
    bad[0, slot], good[0, slot] = u, replaced
    result = backend.verify(**inputs(uniforms=bad), rule=rule)
    assert result.status.tolist() == [8]
    assert torch.equal(result.tokens, backend.verify(**inputs(uniforms=good), rule=rule).tokens)


def test_uniforms_of_unused_slots_are_not_looked_at(backend):
    case = inputs(uniforms=f64([[0.0, NAN, 0.3]]), draft_lengths=torch.tensor([1]))
    assert backend.verify(**case).status.tolist() == [0]


# ---- together -----------------------------------------------------------------------------------


def test_several_bits(backend):
    case = inputs(
        draft_tokens=torch.tensor([[0, 99]]),
        uniforms=f64([[0.0, 0.0, 2.0]]),
        temperature=torch.tensor([-1.0]),
    )
    case["target_logits"][0, 1] = NAN
    result = backend.verify(**case)
    assert result.status.tolist() == [1 | 2 | 8] and result.tokens.tolist() == [[0, 0, -1]]
    case = inputs(draft_lengths=torch.tensor([9]))
    case["draft_logits"][0, 1] = NAN
    assert backend.verify(**case).status.tolist() == [4 | 8]


def test_status_is_per_request(backend):
    count = 5
    case = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in inputs().items()}
    case["target_logits"][1, 0] = NAN
    case["draft_tokens"][2, 0] = 77
    case["draft_logits"][3, 0] = NAN
    case["uniforms"][4, 2] = NAN
    result = backend.verify(**case)
    assert result.status.tolist() == [0, 1, 2, 4, 8]
    assert result.tokens[0].tolist() == [0, 0, 0] == result.tokens[4].tolist()
