"""draft_probs_ids: draft laws that name a few tokens each.

A list means, to the bit, the float32 row over the whole vocabulary that it is scattered into.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext import ops, reference
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.contract import TREE_RULES, rule_names
from specdec_ext.testing import (
    assert_tokens_match,
    assert_trees_match,
    chain_as_tree,
    make_case,
    make_tree_case,
)

READ_DRAFT_LAW = rule_names(chains=True, reads_draft_law=True)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


VARIANTS = {
    "plain": {},
    "bfloat16 int32": dict(dtype=torch.bfloat16, id_dtype=torch.int32),
    "float16 laws": dict(draft_dtype=torch.float16),
    "packed": dict(packed=True),
    "padded": dict(layout="padded"),
    "transposed": dict(layout="transposed"),
    "kinds": dict(kinds="mixed"),
    "one entry": dict(listed=1),
    "all entries": dict(listed=40),
    "fewer ids than the target": dict(draft_vocab=17),
    "masks": dict(allowed_mask=True),
    "all outputs": dict(full_accept_probs=True, raw_logprobs=True, philox=True),
    "several tiles": dict(vocab=9001, listed=130, batch=3),
    "several bfloat16 tiles": dict(vocab=13000, listed=7, batch=3, dtype=torch.bfloat16),
    "several masked tiles": dict(vocab=9001, listed=70, batch=3, allowed_mask=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_list_is_the_row_it_is_scattered_into(backend, variant, rule):
    seed = list(VARIANTS).index(variant)
    case = make_case(seed, rule=rule, draft="lists", **{"vocab": 40, **VARIANTS[variant]})
    assert_same(backend.run(case), backend.run(case.with_whole_rows()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_parity(backend, seed, rule):
    options = [{}, dict(allowed_mask=True, packed=True), dict(vocab=5000, listed=64, batch=3)]
    case = make_case(70 + seed, rule=rule, draft="lists", **{"vocab": 33, **options[seed]})
    expected = case.run(reference.verify)
    assert_tokens_match(backend.run(case), expected, case, backend.tolerance)


def with_lists(case, number):
    """A tree's case with the likeliest tokens of its draft_probs as lists, by their ids."""
    top = case.inputs["draft_probs"].float().topk(number, -1)
    ids, order = top.indices.sort(-1, descending=True)
    return case.replace(draft_probs=top.values.gather(-1, order), draft_probs_ids=ids)


TREES = {
    "plain": {},
    "bfloat16 int32": dict(dtype=torch.bfloat16, id_dtype=torch.int32),
    "rows": dict(shared_rows=True, packed=True),
    "several tiles": dict(vocab=9001, batch=2, nodes=5),
}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("variant", TREES)
@pytest.mark.parametrize("number", [1, 9])
def test_trees(backend, number, variant, rule):
    seed = list(TREES).index(variant)
    case = make_tree_case(seed, draft="probs", rule=rule, philox=True, **TREES[variant])
    case = with_lists(case, number)
    outcome = backend.run_tree(case)
    assert_same(outcome, backend.run_tree(case.with_whole_rows()))
    assert_trees_match(outcome, case.run(reference.verify_tree), case, backend.tolerance)


@pytest.mark.parametrize("options", [{}, dict(allowed_mask=True), dict(vocab=9001, batch=3)])
def test_a_chain_is_block_verification_to_the_bit(backend, options):
    case = make_case(5, draft="lists", **options)
    tree = backend.run_tree(chain_as_tree(case))
    chain = backend.run(case)
    assert_same((tree.tokens, tree.num_accepted), (chain.tokens, chain.num_accepted))
    assert_same((tree.accept_probs[:, 1:], tree.logprobs), (chain.accept_probs, chain.logprobs))


# ---- by hand ------------------------------------------------------------------------------------

P = [0.1, 0.2, 0.3, 0.4]


def by_hand(**changes):
    """q: token 3 has .75, token 1 has .25."""
    base = dict(
        target_logits=log_probs([[P, P]]),
        draft_tokens=torch.tensor([[3]]),
        draft_probs=torch.tensor([[[1.5, 0.5, 7.0]]]),
        draft_probs_ids=torch.tensor([[[3, 1, -1]]]),
        uniforms=f64([[0.6, 0.5]]),
    )
    return {**base, **changes}


@pytest.mark.parametrize("rule", ["block", "token"])
def test_residual_reaches_what_the_list_lacks(backend, rule):
    # Token 3 is accepted with .4 / .75; residual (.1, 0, .3, 0): tokens that are not listed.
    result = backend.verify(**by_hand(rule=rule))
    assert result.accept_probs[0, 0] == pytest.approx(0.4 / 0.75, abs=1e-6)
    assert result.tokens.tolist() == [[2, -1]]
    low = backend.verify(**by_hand(rule=rule, uniforms=f64([[0.6, 0.24]])))
    assert low.tokens.tolist() == [[0, -1]] and low.status.tolist() == [0]


@pytest.mark.parametrize("rule", READ_DRAFT_LAW)
def test_a_sampled_token_that_is_not_listed_ends_the_draft(backend, rule):
    result = backend.verify(**by_hand(rule=rule, draft_tokens=torch.tensor([[2]])))
    assert result.status.tolist() == [4] and result.num_accepted.tolist() == [0]
    assert result.tokens.tolist() == [[2, -1]]  # the bonus: u = .5 of p


NAN, INF = math.nan, math.inf
BROKEN: dict[str, dict[str, torch.Tensor]] = {
    "an id above the vocabulary": dict(draft_probs_ids=torch.tensor([[[3, 1, 4]]])),
    "an id below -1": dict(draft_probs_ids=torch.tensor([[[3, 1, -2]]])),
    "a large id": dict(draft_probs_ids=torch.tensor([[[3, 2**32 + 1, -1]]])),
    "a repeated id": dict(draft_probs_ids=torch.tensor([[[3, 1, 3]]])),
    "nothing listed": dict(draft_probs_ids=torch.tensor([[[-1, -1, -1]]])),
    "NaN": dict(draft_probs=torch.tensor([[[1.5, NAN, 7.0]]])),
    "infinity": dict(draft_probs=torch.tensor([[[INF, 0.5, 7.0]]])),
    "a negative number": dict(draft_probs=torch.tensor([[[1.5, -0.5, 7.0]]])),
    "all zero": dict(draft_probs=torch.tensor([[[0.0, 0.0, 7.0]]])),
}


@pytest.mark.parametrize("rule", READ_DRAFT_LAW)
@pytest.mark.parametrize("kind", BROKEN)
def test_lists_without_a_law(backend, kind, rule):
    broken = by_hand(rule=rule, **BROKEN[kind])
    result = backend.verify(**broken)
    assert result.status.tolist() == [4] and result.tokens.tolist() == [[2, -1]]
    deterministic = torch.zeros(1, 1, dtype=torch.int8)
    result = backend.verify(**{**broken, "draft_kinds": deterministic})
    assert result.status.tolist() == [0]  # the list is not read


@pytest.mark.parametrize("beside", [NAN, INF, -1.0, 1e38])
def test_what_stands_beside_a_placeholder_does_not_matter(backend, beside):
    probs = torch.tensor([[[1.5, 0.5, beside]]])
    assert_same(backend.verify(**by_hand(draft_probs=probs)), backend.verify(**by_hand()))


def test_a_row_outside_a_packed_table_has_no_list(backend):
    packed = by_hand(
        draft_probs=torch.tensor([[1.5, 0.5, 7.0]]),
        draft_probs_ids=torch.tensor([[3, 1, -1]]),
    )
    expected = backend.verify(**by_hand())
    assert_same(backend.verify(**packed, draft_rows=torch.tensor([[0]])), expected)
    for row in (-1, 1, 2**40):
        assert backend.verify(**packed, draft_rows=torch.tensor([[row]])).status.tolist() == [4]


@pytest.mark.parametrize("kind, status", [(0, 0), (1, 4)])
def test_a_packed_table_without_lists(backend, kind, status):
    packed = by_hand(
        draft_probs=torch.empty(0, 3),
        draft_probs_ids=torch.empty(0, 3, dtype=torch.int64),
        draft_kinds=torch.full((1, 1), kind, dtype=torch.int8),
        uniforms=f64([[0.6, 0.4]]),
    )
    result = backend.verify(**packed, draft_rows=torch.tensor([[-1]]))
    assert result.status.tolist() == [status] and result.num_accepted.tolist() == [0]
    # The residual of a token that was chosen, (.1, .2, .3, 0) / .6; else p itself: u = .4.
    assert result.tokens.tolist() == [[2 if kind else 1, -1]]


def test_the_order_of_a_list_and_its_types_do_not_matter(backend):
    case = make_case(8, draft="lists", vocab=300, listed=33)
    probs, ids = case.inputs["draft_probs"], case.inputs["draft_probs_ids"]
    expected = backend.run(case)
    order = torch.randperm(probs.shape[-1], generator=torch.Generator().manual_seed(1))
    shuffled = case.replace(draft_probs=probs[..., order], draft_probs_ids=ids[..., order])
    assert_same(backend.run(shuffled), expected)
    wide = torch.full((*ids.shape[:2], 50), 7, dtype=torch.int32)
    wide[..., 3:36] = ids
    assert_same(backend.run(case.replace(draft_probs_ids=wide[..., 3:36])), expected)


@pytest.mark.parametrize("rule", READ_DRAFT_LAW)
def test_the_longest_lists(backend, rule):
    case = make_case(9, rule=rule, draft="lists", vocab=2500, listed=1024, batch=2, gamma=2)
    assert case.inputs["draft_probs"].shape[-1] == 1024
    assert_same(backend.run(case), backend.run(case.with_whole_rows()))


# ---- what is refused ----------------------------------------------------------------------------

IDS = torch.tensor([[[3, 1, -1]]])
REFUSED = {
    "K = 0": (
        dict(draft_probs=torch.ones(1, 1, 0), draft_probs_ids=IDS[..., :0]),
        "draft_probs must have at least one vocabulary entry",
    ),
    "K = 1025": (
        dict(draft_probs=torch.ones(1, 1, 1025), draft_probs_ids=torch.zeros(1, 1, 1025).long()),
        "draft_probs must name at most 1024 tokens a row where draft_probs_ids is given, got "
        r"\[1, 1, 1025\]",
    ),
    "another K": (
        dict(draft_probs_ids=IDS[..., :2]),
        r"draft_probs_ids must be \[B, G, K\] = \[1, 1, 3\] int32 or int64, got \[1, 1, 2\]",
    ),
    "no ids": (dict(draft_probs_ids=IDS.float()), "draft_probs_ids must be .* int32 or int64"),
    "strides": (
        dict(draft_probs_ids=torch.full((1, 1, 6), 1)[..., ::2]),
        "draft_probs_ids must be .* unit stride",
    ),
    "logits": (
        dict(draft_probs=None, draft_logits=torch.zeros(1, 1, 3)),
        "draft_probs_ids needs draft_probs, got draft_logits",
    ),
    "no law": (dict(draft_probs=None), "draft_probs_ids needs draft_probs, got neither"),
    "a reduced vocabulary": (
        dict(draft_token_ids=torch.tensor([0, 1, 2])),
        "draft_probs_ids are ids of the target's tokens: expected no draft_token_ids",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_value_errors(operator, wrong):
    changes, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        operator.verify(**by_hand(**changes))


def test_type_error():
    with pytest.raises(TypeError, match="draft_probs_ids must be a Tensor or None, got list"):
        ops.verify(**by_hand(draft_probs_ids=[3, 1]))
