"""allowed_mask: bit for bit the same as logits with -inf in place of what is not allowed."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext.ops import RULES
from specdec_ext.testing import VerifyCase, make_case, pack_mask

NAN, INF = math.nan, math.inf


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def allowed_of(words, vocab):
    """Booleans [..., V] of packed words."""
    bits = words[..., None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten(-2)[..., :vocab].bool()


def of_slots(table, rows):
    return table if rows is None else table[rows.long()]


def unmasked(case):
    """The same request without a mask: dense logits with -inf (probabilities with 0) instead."""
    inputs = case.inputs
    target = of_slots(inputs["target_logits"], inputs.get("target_rows"))
    allowed = allowed_of(inputs["allowed_mask"], target.shape[-1])
    changes = dict(target_logits=target.masked_fill(~allowed, -INF))
    for name, fill in (("draft_logits", -INF), ("draft_probs", 0.0)):
        if name in inputs:
            draft = of_slots(inputs[name], inputs.get("draft_rows"))
            both = min(draft.shape[-1], allowed.shape[-1])
            legal = torch.zeros(draft.shape, dtype=torch.bool)
            ids = inputs.get("draft_token_ids")
            if ids is None:
                legal[..., :both] = allowed[:, :-1, :both]
            else:
                legal = allowed[:, :-1][..., ids.long()]
            changes[name] = draft.masked_fill(~legal, fill)
    dropped = dict(allowed_mask=None, target_rows=None, draft_rows=None)
    return case.replace(**changes, **dropped)


VARIANTS = {
    "plain": dict(vocab=37),
    "one word": dict(vocab=32),
    "one token": dict(vocab=1),
    "bfloat16 padded": dict(vocab=65, dtype=torch.bfloat16, layout="padded"),
    "probs": dict(draft="probs"),
    "packed": dict(packed=True, draft_filters=True),
    "kinds": dict(kinds="mixed"),
    "no draft law": dict(draft="none"),
    "wider draft": dict(draft_vocab=40, draft_filters=True),
    "narrower draft": dict(vocab=40, draft_vocab=7),
    "wider probs": dict(draft="probs", draft_vocab=40),
    "reduced vocabulary": dict(vocab=40, draft_vocab=29, draft_token_ids=True, draft_filters=True),
    "all outputs": dict(full_accept_probs=True, raw_logprobs=True, philox=True),
    "several tiles": dict(vocab=9001, batch=3, dtype=torch.float16),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_verify_is_that_of_masked_logits(backend, variant, rule):
    # make_case puts NaN where nothing is allowed in half of the requests.
    seed = list(VARIANTS).index(variant)
    case = make_case(seed, rule=rule, allowed_mask=True, **VARIANTS[variant])
    assert_same(backend.run(case), backend.run(unmasked(case)))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4097])
def test_other_operators(backend, vocab):
    case = make_case(vocab, batch=12, gamma=1, vocab=vocab, allowed_mask=True)
    plain = unmasked(case).inputs
    logits, mask = case.inputs["target_logits"][:, 0], case.inputs["allowed_mask"][:, 0]
    params = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    masked = plain["target_logits"][:, 0]
    with_mask = dict(allowed_mask=mask, **params)
    assert_same(backend.row_law(logits, **with_mask), backend.row_law(masked, **params))
    u = case.inputs["uniforms"][:, 0]
    assert_same(backend.sample(logits, u, **with_mask), backend.sample(masked, u, **params))
    draft, masked_draft = case.inputs["draft_logits"][:, 0], plain["draft_logits"][:, 0]
    assert_same(
        [backend.acceptance(logits, draft, **with_mask)],
        [backend.acceptance(masked, masked_draft, **params)],
    )


def test_race(backend):
    case = make_case(5, batch=12, gamma=1, vocab=45, allowed_mask=True)
    mask = case.inputs["allowed_mask"][:, 0]
    noise = dict(seeds=torch.arange(12), positions=torch.arange(12), domain=3)
    got = backend.sample(case.inputs["target_logits"][:, 0], **noise, allowed_mask=mask)
    masked = unmasked(case).inputs["target_logits"][:, 0]
    assert_same(got, backend.sample(masked, **noise))
    drawn = got.tokens >= 0
    assert bool(allowed_of(mask, 45)[drawn].gather(1, got.tokens[drawn, None]).all())


@pytest.mark.parametrize("rule", RULES)
def test_everything_allowed_is_no_mask(backend, rule):
    case = make_case(6, rule=rule, vocab=45, draft_vocab=45)
    words = torch.full((8, 4, 2), -1, dtype=torch.int32)
    expected = backend.run(case)
    assert_same(backend.run(case.replace(allowed_mask=words)), expected)
    words[..., -1] = 2**13 - 1  # bits that no token has
    assert_same(backend.run(case.replace(allowed_mask=words)), expected)


@pytest.mark.parametrize("rule", RULES)
def test_the_draft_vocabulary_ends_where_the_targets_does(backend, rule):
    # Ids V .. Vd-1 are not allowed, whatever the bits of the last word say.
    case = make_case(7, rule=rule, vocab=17, draft_vocab=30, filters=False)
    words = torch.full((8, 4, 1), -1, dtype=torch.int32)
    logits = case.inputs["draft_logits"].clone()
    logits[..., 17:] = -INF
    got = backend.run(case.replace(allowed_mask=words))
    assert_same(got, backend.run(case.replace(draft_logits=logits)))


def test_strides(backend):
    case = make_case(8, batch=5, vocab=70, allowed_mask=True, rule="token")
    words = case.inputs["allowed_mask"]
    assert words.shape == (5, 4, 3)
    expected = backend.run(case)
    transposed = words.transpose(0, 1).contiguous().transpose(0, 1)
    padded = torch.full((5, 4, 7), 123, dtype=torch.int32)
    padded[..., 2:5] = words
    for view in (transposed, padded[..., 2:5]):
        assert not view.is_contiguous()
        assert_same(backend.run(case.replace(allowed_mask=view)), expected)
    once = words[:1, :1]
    expanded = case.replace(allowed_mask=once.expand(5, 4, 3))
    assert_same(backend.run(expanded), backend.run(case.replace(allowed_mask=once.repeat(5, 4, 1))))


def test_one_word_of_any_stride(backend):
    # One word a row: its own stride says nothing.
    case = make_case(8, batch=5, vocab=20, allowed_mask=True, rule="token")
    view = torch.full((5, 4, 1, 3), 5, dtype=torch.int32)[..., 1]
    view.copy_(case.inputs["allowed_mask"])
    assert view.stride(-1) == 3
    assert_same(backend.run(case.replace(allowed_mask=view)), backend.run(case))


@pytest.mark.parametrize("rule", RULES)
def test_requests_that_share_packed_rows_have_masks_of_their_own(backend, rule):
    generator = torch.Generator().manual_seed(0)
    case = make_case(9, batch=6, gamma=2, vocab=33, rule=rule, allowed_mask=True, masks=False)
    table = torch.randn(2, 33, generator=generator)
    rows = torch.randint(2, (6, 3), generator=generator)
    inputs = dict(
        target_logits=table, target_rows=rows, draft_logits=table.flip(-1), draft_rows=rows[:, :2]
    )
    case = case.replace(**inputs)
    assert_same(backend.run(case), backend.run(unmasked(case)))


@pytest.mark.parametrize("rule", RULES)
def test_slots_after_the_draft_are_not_read(backend, rule):
    case = make_case(10, batch=12, gamma=3, vocab=33, rule=rule, allowed_mask=True)
    words = case.inputs["allowed_mask"].clone()
    for b in range(12):
        tokens, length = case.inputs["draft_tokens"][b], int(case.inputs["draft_lengths"][b])
        end = next((i for i in range(length) if tokens[i] == -1), length)
        words[b, end + 1 :] = 0  # a row without a law, if it were read
    assert_same(backend.run(case.replace(allowed_mask=words)), backend.run(case))


# ---- by hand ------------------------------------------------------------------------------------

P, FLAT = [0.4, 0.1, 0.3, 0.2], [0.25] * 4


def by_hand(rows, draft_tokens=(0, 0), **changes):
    """Target (.4, .1, .3, .2) in every row, a flat draft; `rows` say which tokens are allowed."""
    allowed = torch.tensor([[[x in row for x in range(4)] for row in rows]])
    noise = dict(uniforms=f64([[0.0, 0.0, 0.0]]))
    if changes.get("rule") == "coupled":
        noise = dict(seeds=torch.tensor([1]), positions=torch.tensor([1]))
    inputs = dict(
        target_logits=log_probs([[P] * 3]),
        draft_tokens=torch.tensor([draft_tokens]),
        draft_logits=log_probs([[FLAT] * 2]),
        allowed_mask=pack_mask(allowed, beyond=True),
    )
    return {**inputs, **noise, **changes}


EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_allowed(backend, rule):
    result = backend.verify(**by_hand([(), EVERY, EVERY], rule=rule))
    assert result.status.tolist() == [1] and result.tokens.tolist() == [[0, -1, -1]]
    assert bool(result.logprobs.isnan().all()) and bool(result.accept_probs.isnan().all())
    words = torch.zeros(1, 1, dtype=torch.int32)
    row = torch.zeros(1, 4)
    law = backend.row_law(row, allowed_mask=words)
    assert bool(law.max.isnan().all()) and law.argmax.tolist() == [-1]
    drawn = backend.sample(row, f64([0.5]), allowed_mask=words)
    assert drawn.tokens.tolist() == [-1] and bool(drawn.logprobs.isnan().all())
    assert bool(backend.acceptance(row, row, allowed_mask=words).isnan().all())


@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_a_sampled_token_that_is_not_allowed_ends_the_draft(backend, rule):
    # q is 0 there: it cannot have been sampled. The rest of the row decides: bonus from (.1, .3).
    result = backend.verify(**by_hand([EVERY, (1, 2), EVERY], rule=rule))
    assert result.status.tolist() == [4] and result.num_accepted.tolist() == [1]
    assert result.tokens.tolist() == [[0, 1, -1]]
    assert result.logprobs[0, 1] == pytest.approx(math.log(0.25), abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_deterministic_token_that_is_not_allowed_is_rejected(backend, rule):
    kinds = torch.zeros(1, 2, dtype=torch.int8)
    result = backend.verify(**by_hand([(3,), EVERY, EVERY], rule=rule, draft_kinds=kinds))
    assert result.status.tolist() == [0] and result.num_accepted.tolist() == [0]
    assert result.tokens.tolist() == [[3, -1, -1]] and result.accept_probs[0, 0] == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_only_one_token_allowed(backend, rule, u):
    # Whatever the coins, what is emitted is that token: even the last draw cannot miss.
    noise = {} if rule == "coupled" else dict(uniforms=f64([[u] * 3]))
    for only in range(4):
        result = backend.verify(**by_hand([(only,)] * 3, (only, only), rule=rule, **noise))
        assert result.tokens.tolist() == [[only] * 3] and result.status.tolist() == [0]
        assert result.logprobs.tolist() == [[0.0] * 3]


def test_masks_come_before_filters(backend):
    # Allowed: .1, .3, .2 of .6. top-k 2 keeps 2 and 3; without renormalising it would keep 2 only.
    words = pack_mask(torch.tensor([[False, True, True, True]]))
    logits = log_probs([P])
    law = backend.row_law(logits, allowed_mask=words, top_k=torch.tensor([2]))
    assert law.max[0] == logits[0, 2] and law.cutoff[0] == logits[0, 3]
    law = backend.row_law(logits, allowed_mask=words, top_p=torch.tensor([0.51]))
    assert law.cutoff[0] == logits[0, 3]  # .3 / .6 = .5 lies above it
    law = backend.row_law(logits, allowed_mask=words, min_p=torch.tensor([0.6]))
    assert law.cutoff[0] <= logits[0, 3] and law.cutoff[0] > logits[0, 1]


def test_raw_logprobs_are_of_the_masked_row(backend):
    result = backend.verify(
        **by_hand([(1, 2), EVERY, EVERY], (2, 0), rule="greedy", raw_logprobs=True)
    )
    assert result.logprobs[0, 0] == pytest.approx(math.log(0.75), abs=1e-6)


def test_ranks_are_among_what_is_allowed(backend):
    # Token 3 is third best, second best where 0 is not allowed: beta 2, tau log 1.5 + a little.
    options = dict(rule="top_beta", beta=2, tau=0.41)
    result = backend.verify(**by_hand([EVERY] * 3, (3, 3), **options))
    assert result.num_accepted.tolist() == [0] and result.tokens[0, 0] == 0
    result = backend.verify(**by_hand([(1, 2, 3)] * 3, (3, 3), **options))
    assert result.num_accepted.tolist() == [2] and result.tokens.tolist() == [[3, 3, 2]]


def test_bits_are_little_endian(backend):
    # Each token of 70 in turn, alone: tokens 31, 63 are sign bits, 32 and 64 begin words.
    logits = torch.zeros(70, 70)
    words = pack_mask(torch.eye(70, dtype=torch.bool))
    assert words[31].tolist() == [-(2**31), 0, 0] and words[64].tolist() == [0, 0, 1]
    drawn = backend.sample(logits, torch.full((70,), 0.5, dtype=torch.float64), allowed_mask=words)
    assert drawn.tokens.tolist() == list(range(70))


def test_status_of_one_request_is_its_own(backend):
    case = VerifyCase(by_hand([EVERY] * 3)).select([0, 0, 0])
    words = case.inputs["allowed_mask"].clone()
    words[1, 0] = 0
    words[2, 1] = 0b1110
    result = backend.run(case.replace(allowed_mask=words))
    assert result.status.tolist() == [0, 1, 4]
