"""draft_token_ids: a draft over a part of the target's vocabulary, in an order of its own.

A mapped call is the call with the draft's logits scattered into the target's vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.contract import rule_names
from specdec_ext.testing import VerifyCase, assert_tokens_match, make_case, pack_mask

INF = math.inf
READ_DRAFT_LAW = rule_names(chains=True, reads_draft_law=True)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def scattered(rows, ids, vocab, fill):
    table = torch.full((*rows.shape[:-1], vocab), fill, dtype=rows.dtype)
    table[..., ids.long()] = rows
    return table


def without_map(case):
    """The same requests with a draft over the whole vocabulary."""
    vocab, ids = case.inputs["target_logits"].shape[-1], case.inputs["draft_token_ids"]
    changes = {
        name: scattered(case.inputs[name], ids, vocab, fill)
        for name, fill in (("draft_logits", -INF), ("draft_probs", 0.0))
        if name in case.inputs
    }
    return case.replace(draft_token_ids=None, **changes)


VARIANTS = {
    "plain": {},
    "bfloat16 int32": dict(dtype=torch.bfloat16, id_dtype=torch.int32),
    "probs": dict(draft="probs"),
    "packed": dict(packed=True),
    "padded": dict(layout="padded"),
    "draft filters": dict(draft_filters=True),
    "kinds": dict(kinds="mixed"),
    "one entry": dict(draft_vocab=1),
    "all entries": dict(draft_vocab=40),
    "masks": dict(allowed_mask=True),
    "all outputs": dict(full_accept_probs=True, raw_logprobs=True, philox=True),
    "several tiles": dict(vocab=9001, draft_vocab=5000, batch=3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_verify_is_that_of_scattered_logits(backend, variant, rule):
    sizes = dict(vocab=40, draft_vocab=29)
    options = {**sizes, **VARIANTS[variant]}
    seed = list(VARIANTS).index(variant)
    case = make_case(seed, rule=rule, draft_token_ids=True, **options)
    # Sums run in another order: equal, but for proven ties (p = q to rounding in some requests).
    excused = assert_tokens_match(
        backend.run(case), backend.run(without_map(case)), case, backend.tolerance
    )
    assert excused <= 2


@pytest.mark.parametrize("rule", RULES)
def test_the_identity_is_no_map(backend, rule):
    case = make_case(4, rule=rule, vocab=17, draft_filters=True)
    mapped = case.replace(draft_token_ids=torch.arange(17))
    assert_same(backend.run(mapped), backend.run(case))


@pytest.mark.parametrize("rule", READ_DRAFT_LAW)
def test_identity_over_a_shorter_vocabulary_is_no_map(backend, rule):
    case = make_case(5, rule=rule, vocab=17, draft_vocab=9)
    mapped = case.replace(draft_token_ids=torch.arange(9))
    assert_same(backend.run(mapped), backend.run(case))


def test_strides_and_types(backend):
    case = make_case(6, vocab=40, draft_vocab=29, draft_token_ids=True)
    ids, expected = case.inputs["draft_token_ids"], backend.run(case)
    spaced = torch.full((29, 3), -1)
    spaced[:, 1] = ids
    for view in (spaced[:, 1], ids.int(), ids.flip(0).clone()[list(range(28, -1, -1))]):
        assert_same(backend.run(case.replace(draft_token_ids=view)), expected)
    # One entry for all: stride 0.
    one = make_case(7, vocab=40, draft_vocab=1, draft_token_ids=True)
    lone = one.inputs["draft_token_ids"][0].expand(1)
    assert_same(backend.run(one.replace(draft_token_ids=lone)), backend.run(one))


# ---- by hand ------------------------------------------------------------------------------------

P = [0.1, 0.2, 0.3, 0.4]
IDS = [3, 1]  # q: token 3 has .75, token 1 has .25


def by_hand(**changes):
    base = dict(
        target_logits=log_probs([[P, P]]),
        draft_tokens=torch.tensor([[3]]),
        draft_logits=log_probs([[[0.75, 0.25]]]),
        draft_token_ids=torch.tensor(IDS),
        uniforms=f64([[0.6, 0.5]]),
    )
    return {**base, **changes}


@pytest.mark.parametrize("rule", ["block", "token"])
def test_residual_reaches_what_the_draft_lacks(backend, rule):
    # Token 3 is accepted with .4 / .75; residual (.1, 0, .3, 0): tokens that the draft lacks.
    result = backend.verify(**by_hand(rule=rule))
    assert result.accept_probs[0, 0] == pytest.approx(0.4 / 0.75, abs=1e-6)
    assert result.tokens.tolist() == [[2, -1]]
    low = backend.verify(**by_hand(rule=rule, uniforms=f64([[0.6, 0.24]])))
    assert low.tokens.tolist() == [[0, -1]]
    # Accepted: the bonus comes from the whole of p.
    for u, token in ((0.05, 0), (0.2, 1), (0.5, 2), (0.9, 3)):
        result = backend.verify(**by_hand(rule=rule, uniforms=f64([[0.5, u]])))
        assert result.tokens.tolist() == [[3, token]] and result.status.tolist() == [0]


@pytest.mark.parametrize("rule", READ_DRAFT_LAW)
def test_a_sampled_token_without_an_entry_ends_the_draft(backend, rule):
    result = backend.verify(**by_hand(rule=rule, draft_tokens=torch.tensor([[2]])))
    assert result.status.tolist() == [4] and result.num_accepted.tolist() == [0]
    assert result.tokens.tolist() == [[2, -1]]  # the bonus: u = .5 of p
    kinds = torch.zeros(1, 1, dtype=torch.int8)
    placed = by_hand(rule=rule, draft_tokens=torch.tensor([[2]]), draft_kinds=kinds)
    result = backend.verify(**{**placed, "uniforms": f64([[0.29, 0.5]])})
    assert result.status.tolist() == [0] and result.num_accepted.tolist() == [1]


@pytest.mark.parametrize("kind, status", [(0, 0), (1, 4)])
def test_a_packed_table_without_rows(backend, kind, status):
    # A step that draws nothing: there is no row that an entry of the map could be read from.
    shared = dict(draft_logits=torch.empty(0, 2), draft_rows=torch.tensor([[-1]]))
    kinds = torch.full((1, 1), kind, dtype=torch.int8)
    result = backend.verify(**by_hand(**shared, draft_kinds=kinds, uniforms=f64([[0.6, 0.4]])))
    assert result.status.tolist() == [status] and result.num_accepted.tolist() == [0]
    # The residual of a token that was chosen, (.1, .2, .3, 0) / .6; else p itself: u = .4.
    assert result.tokens.tolist() == [[2 if kind else 1, -1]]


@pytest.mark.parametrize("kind, status", [(0, 0), (1, 4)])
def test_a_tree_without_draft_rows(backend, kind, status):
    result = backend.verify_tree(
        log_probs([[P, P]]),
        torch.tensor([[0, 3]]),
        torch.tensor([[-1, 0]]),
        draft_logits=torch.empty(1, 0, 2),
        draft_token_ids=torch.tensor(IDS),
        kinds=torch.full((1, 2), kind, dtype=torch.int8),
        children_rows=torch.full((1, 2), -1),
        uniforms=f64([[0.6, 0.4]]),
    )
    assert result.status.tolist() == [status]
    assert result.tokens.tolist() == [[2 if kind else 1, -1]]


@pytest.mark.parametrize("token", [4, 7, -2])
def test_draft_tokens_are_target_ids(backend, token):
    result = backend.verify(**by_hand(draft_tokens=torch.tensor([[token]])))
    assert result.status.tolist() == [2] and result.num_accepted.tolist() == [0]


def test_temperature_zero_of_the_draft_is_its_lowest_entry(backend):
    # Entries 0 and 1 tie: entry 0, token 3, though token 1 is the lower id.
    options = dict(
        rule="token", draft_temperature=torch.zeros(1), draft_logits=torch.zeros(1, 1, 2)
    )
    result = backend.verify(**by_hand(**options, uniforms=f64([[0.39, 0.5]])))
    assert result.status.tolist() == [0] and result.accept_probs[0, 0] == pytest.approx(0.4)
    result = backend.verify(**by_hand(**options, draft_tokens=torch.tensor([[1]])))
    assert result.status.tolist() == [4]


def test_draft_filters_count_entries(backend):
    # top-k 1 of two entries leaves token 3 alone: accepted with .4.
    result = backend.verify(**by_hand(rule="token", draft_top_k=torch.tensor([1])))
    assert result.accept_probs[0, 0] == pytest.approx(0.4)


INVALID = {"negative": [3, -1], "too large": [4, 1], "repeated": [3, 3], "huge": [2**40, 1]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("invalid", INVALID)
def test_invalid_maps(backend, rule, invalid):
    ids = torch.tensor(INVALID[invalid])
    kwargs = dict(VerifyCase(by_hand(rule=rule, draft_token_ids=ids)).select([0, 0]).inputs)
    if rule == "coupled":
        del kwargs["uniforms"]
        kwargs.update(seeds=torch.tensor([1, 2]), positions=torch.tensor([1, 2]))
    result = backend.verify(**kwargs)
    if rule not in READ_DRAFT_LAW:  # nobody looks at the map
        assert result.status.tolist() == [0, 0]
        return
    assert result.status.tolist() == [12, 12] and result.num_accepted.tolist() == [0, 0]
    assert result.tokens.tolist() == [[2, -1]] * 2  # the bonus: u = .5 of p
    # A deterministic token asks for no law.
    placed = backend.verify(**kwargs, draft_kinds=torch.tensor([[0], [1]], dtype=torch.int8))
    assert placed.status.tolist() == [8, 12]


# ---- sample and acceptance ----------------------------------------------------------------------


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_sample_gives_target_ids(backend, id_dtype):
    # The inverse CDF runs in the order of entries.
    logits = log_probs([[0.5, 0.25, 0.25]]).expand(4, 3)
    ids = torch.tensor([70, 2**31 - 1, 5]).to(id_dtype)
    u = f64([0.1, 0.6, 0.9, 1 - 2**-53])
    drawn = backend.sample(logits, u, draft_token_ids=ids)
    assert drawn.tokens.tolist() == [70, 2**31 - 1, 5, 5]
    assert_same([drawn.logprobs], [backend.sample(logits, u).logprobs])
    greedy = backend.sample(logits, u, draft_token_ids=ids, temperature=torch.zeros(4))
    assert greedy.tokens.tolist() == [70] * 4


def test_sample_with_filters_is_sample_of_entries(backend):
    case = make_case(8, batch=30, gamma=1, vocab=4099)
    params = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    logits, u = case.inputs["target_logits"][:, 0], case.inputs["uniforms"][:, 0]
    ids = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[:4099]
    plain = backend.sample(logits, u, **params)
    mapped = backend.sample(logits, u, **params, draft_token_ids=ids)
    assert torch.equal(mapped.tokens, ids[plain.tokens])
    assert_same([mapped.logprobs], [plain.logprobs])


def test_races_are_run_on_the_noise_of_target_ids(backend):
    # The same winner as over the whole vocabulary, whatever the order of entries.
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 13, generator=generator)
    ids = torch.randperm(99, generator=generator)[:13]
    noise = dict(seeds=torch.arange(40), positions=torch.arange(40), domain=3, stream=2)
    expected = backend.sample(scattered(logits, ids, 99, -INF), **noise)
    for order in (torch.arange(13), torch.randperm(13, generator=generator)):
        drawn = backend.sample(logits[:, order], **noise, draft_token_ids=ids[order])
        assert torch.equal(drawn.tokens, expected.tokens)
    assert len(expected.tokens.unique()) > 3


def test_sample_under_a_mask_of_any_width(backend):
    logits, u = torch.zeros(3, 4), f64([0.1, 0.4, 0.99])
    ids = torch.tensor([64, 3, 31, 40])
    allowed = torch.zeros(3, 64, dtype=torch.bool)
    allowed[:, [3, 31]] = True
    for width in (32, 64):  # 64 and, in the first case, 40 lie beyond it
        words = pack_mask(allowed[:, :width])
        drawn = backend.sample(logits, u, draft_token_ids=ids, allowed_mask=words)
        assert drawn.tokens.tolist() == [3, 3, 31]
    allowed[:, 40] = True
    drawn = backend.sample(logits, u, draft_token_ids=ids, allowed_mask=pack_mask(allowed))
    assert drawn.tokens.tolist() == [3, 31, 40]


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_sample_with_an_invalid_map(backend, bad):
    ids = torch.tensor([0, 1, bad])
    drawn = backend.sample(torch.zeros(2, 3), f64([0.1, 0.4]), draft_token_ids=ids)
    assert drawn.tokens.tolist() == [-1, -1] and bool(drawn.logprobs.isnan().all())


def test_acceptance(backend):
    case = make_case(9, batch=20, gamma=1, vocab=40, draft_vocab=29, draft_token_ids=True)
    target, draft = case.inputs["target_logits"][:, 0], case.inputs["draft_logits"][:, 0]
    ids = case.inputs["draft_token_ids"]
    params = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    own = {f"draft_{k}": v.flip(0) for k, v in params.items()}
    found = backend.acceptance(target, draft, draft_token_ids=ids, **params, **own)
    expected = backend.acceptance(target, scattered(draft, ids, 40, -INF), **params, **own)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert bool(torch.isfinite(found).all()) and len(found.unique()) > 5
    for invalid in INVALID.values():
        found = backend.acceptance(
            log_probs([P]), log_probs([[0.75, 0.25]]), draft_token_ids=torch.tensor(invalid)
        )
        assert bool(found.isnan().all())
    found = backend.acceptance(
        log_probs([P]), log_probs([[0.75, 0.25]]), draft_token_ids=torch.tensor(IDS)
    )
    assert found.tolist() == pytest.approx([0.2 + 0.4], abs=1e-6)
