"""A request's result does not depend on its company, its place, its padding or its strides.

All comparisons are bit for bit, every output, within one backend.
"""

from __future__ import annotations

import pytest
import torch

from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.testing import make_case


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def rows(outcome, index):
    return [output[index] for output in outcome]


def mixed_case(rule, **changes):
    options = dict(batch=10, gamma=3, vocab=5003, draft_filters=True, rule=rule, philox=True)
    return make_case(11, **{**options, **changes})


@pytest.mark.parametrize("rule", RULES)
def test_alone_or_in_a_batch(backend, rule):
    case = mixed_case(rule)
    together = backend.run(case)
    for b in range(case.batch):
        assert_same(backend.run(case.select([b])), rows(together, [b]))


@pytest.mark.parametrize("rule", RULES)
def test_at_any_row(backend, rule):
    case = mixed_case(rule)
    together = backend.run(case)
    for order in ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 3], [7, 0, 7, 2]):
        assert_same(backend.run(case.select(order)), rows(together, order))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_in_a_large_batch(operator, rule):
    # Larger than a slice of requests, so that neighbours change.
    case = mixed_case(rule)
    alone = operator.run(case)
    order = [k % 10 for k in range(237)]
    assert_same(operator.run(case.select(order)), rows(alone, order))


@pytest.mark.parametrize("rule", ["block", "token", "top_beta"])
def test_among_many_rows(operator, rule):
    # On CUDA a block of the first launch plans 32 tiles at once. It has more here, also on a GPU.
    case = mixed_case(rule, gamma=5, vocab=40, filters=False, draft_filters=False)
    alone = operator.run(case)
    order = [7 * k % 10 for k in range(3000)]
    assert_same(operator.run(case.select(order)), rows(alone, order))


@pytest.mark.parametrize("rule", RULES)
def test_extra_draft_columns(backend, rule):
    # Four more columns that the draft lengths leave out: ids, rows and coins there are garbage.
    case = make_case(12, batch=6, gamma=2, vocab=33, rule=rule)
    inputs = dict(case.inputs)
    noise = {}
    if rule != "coupled":
        u = inputs["uniforms"]
        spare = torch.full((6, 4), torch.nan, dtype=u.dtype)
        noise = dict(uniforms=torch.cat([u[:, :2], spare, u[:, 2:]], 1))
    wider = case.replace(
        draft_tokens=torch.cat([inputs["draft_tokens"], torch.full((6, 4), 10**12)], 1),
        target_logits=torch.cat([inputs["target_logits"], torch.full((6, 4, 33), torch.nan)], 1),
        draft_logits=torch.cat([inputs["draft_logits"], torch.full((6, 4, 33), torch.inf)], 1),
        **noise,
    )
    expected, got = backend.run(case), backend.run(wider)
    assert_same([got.tokens[:, :3], got.logprobs[:, :3]], [expected.tokens, expected.logprobs])
    assert_same([got.num_accepted, got.status], [expected.num_accepted, expected.status])
    assert_same([got.accept_probs[:, :2]], [expected.accept_probs])
    assert got.tokens[:, 3:].eq(-1).all()
    assert got.logprobs[:, 3:].isnan().all() and got.accept_probs[:, 2:].isnan().all()


@pytest.mark.parametrize("rule", RULES)
def test_what_follows_the_draft_is_not_read(backend, rule):
    case = make_case(13, batch=8, gamma=3, vocab=9, rule=rule)
    expected = backend.run(case)
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.inputs.items()}
    for b in range(case.batch):
        tokens = inputs["draft_tokens"][b]
        length = int(inputs["draft_lengths"][b])
        stops = (tokens[:length] == -1).nonzero().flatten().tolist()
        end = stops[0] if stops else length
        tokens[end + 1 :] = -12345  # the column at `end` says where the draft ends
        inputs["target_logits"][b, end + 1 :] = torch.nan
        inputs["draft_logits"][b, end:] = torch.nan
        if rule != "coupled":
            inputs["uniforms"][b, end:3] = torch.nan
    assert_same(backend.run(case.replace(**inputs)), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["transposed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(backend, rule, layout, dtype):
    options = dict(batch=5, gamma=3, vocab=4101, rule=rule, dtype=dtype)
    contiguous, strided = make_case(14, **options), make_case(14, layout=layout, **options)
    assert not strided.inputs["target_logits"].is_contiguous()
    assert torch.equal(strided.inputs["target_logits"], contiguous.inputs["target_logits"])
    assert_same(backend.run(strided), backend.run(contiguous))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_strides_of_the_small_arguments(backend, rule):
    case = make_case(15, batch=6, gamma=3, vocab=9, rule=rule, kinds="mixed", draft_filters=True)

    def strided(value):
        if not isinstance(value, torch.Tensor) or value.dim() == 3:
            return value
        storage = torch.full((*value.shape, 3), 99).to(value.dtype)
        storage[..., 1] = value
        return storage[..., 1]

    changed = case.replace(**{k: strided(v) for k, v in case.inputs.items()})
    assert changed.inputs["draft_tokens"].stride() == (9, 3)
    assert_same(backend.run(changed), backend.run(case))


def test_expanded_rows(backend):
    # Stride 0: one row for all requests and positions.
    row = torch.randn(40, generator=torch.Generator().manual_seed(3))
    case = make_case(16, batch=4, gamma=2, vocab=40, rule="token")
    expanded = case.replace(target_logits=row.expand(4, 3, 40), draft_logits=row.expand(4, 2, 40))
    copied = case.replace(target_logits=row.repeat(4, 3, 1), draft_logits=row.repeat(4, 2, 1))
    assert_same(backend.run(expanded), backend.run(copied))


@pytest.mark.parametrize("rule", RULES)
def test_packed_rows(backend, rule):
    options = dict(batch=6, gamma=3, vocab=101, rule=rule)
    dense = make_case(17, **options)
    generator = torch.Generator().manual_seed(0)

    def pack(values, rows):
        order = torch.randperm(values.shape[0] * values.shape[1], generator=generator)
        table = torch.empty(len(order), values.shape[2])
        table[order] = values.reshape(len(order), -1)
        return table, order.reshape(rows)

    target, target_rows = pack(dense.inputs["target_logits"], (6, 4))
    draft, draft_rows = pack(dense.inputs["draft_logits"], (6, 3))
    packed = dense.replace(
        target_logits=target, target_rows=target_rows, draft_logits=draft, draft_rows=draft_rows
    )
    assert_same(backend.run(packed), backend.run(dense))
    narrow = packed.replace(target_rows=target_rows.int(), draft_rows=draft_rows.int())
    assert_same(backend.run(narrow), backend.run(dense))


def test_ids_of_either_width(backend):
    wide = make_case(18, batch=6, gamma=3)
    narrow = make_case(18, batch=6, gamma=3, id_dtype=torch.int32)
    assert narrow.inputs["draft_tokens"].dtype == torch.int32
    narrow = narrow.replace(top_k=narrow.inputs["top_k"].int())
    assert_same(backend.run(narrow), backend.run(wide))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_masked_padding_of_the_vocabulary(backend, rule):
    case = make_case(19, batch=6, gamma=3, vocab=777, rule=rule)
    pad = torch.full((6, 4, 300), -torch.inf)
    padded = case.replace(
        target_logits=torch.cat([case.inputs["target_logits"], pad], 2),
        draft_logits=torch.cat([case.inputs["draft_logits"], pad[:, :3]], 2),
    )
    expected, got = backend.run(case), backend.run(padded)
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.logprobs, expected.logprobs, equal_nan=True)


@pytest.mark.parametrize("rule", ["block", "token", "lenient", "typical"])
@pytest.mark.parametrize("stream", [0, 255])
def test_seeds_equal_their_uniforms(backend, rule, stream):
    case = make_case(20, batch=12, gamma=4, rule=rule, philox=True, stream=stream)
    seeds, positions = case.inputs["seeds"], case.inputs["positions"]
    coins = backend.uniforms(seeds, positions, 5, stream=stream)
    given = case.replace(seeds=None, positions=None, uniforms=coins)
    assert_same(backend.run(given), backend.run(case))


@pytest.mark.parametrize("rule", RULES)
def test_twice_the_same(backend, rule):
    case = mixed_case(rule, vocab=501)
    assert_same(backend.run(case), backend.run(case))


def test_other_operators_in_a_batch(backend):
    case = make_case(21, batch=12, gamma=1, vocab=5003)
    logits, draft = case.inputs["target_logits"][:, 0], case.inputs["draft_logits"][:, 0]
    params = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    u = case.inputs["uniforms"][:, 0]
    law = backend.row_law(logits, **params)
    sample = backend.sample(logits, u, **params)
    accepted = backend.acceptance(logits, draft, **params)
    for b in range(12):
        one = {k: v[b : b + 1] for k, v in params.items()}
        assert_same(backend.row_law(logits[b : b + 1], **one), rows(law, [b]))
        assert_same(backend.sample(logits[b : b + 1], u[b : b + 1], **one), rows(sample, [b]))
        alone = backend.acceptance(logits[b : b + 1], draft[b : b + 1], **one)
        assert_same([alone], [accepted[b : b + 1]])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "variant", [{}, dict(packed=True), dict(draft="probs"), dict(philox=True)], ids=str
)
def test_inputs_are_not_changed(backend, rule, variant):
    case = make_case(22, rule=rule, kinds="mixed", **variant)
    tensors = {k: v for k, v in case.inputs.items() if isinstance(v, torch.Tensor)}
    before = {k: v.clone() for k, v in tensors.items()}
    versions = {k: v._version for k, v in tensors.items()}
    backend.run(case)
    for name, value in tensors.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
        assert value._version == versions[name]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_masks_and_maps_alone_or_in_a_batch(backend, rule):
    case = mixed_case(rule, draft_vocab=2001, draft_token_ids=True, allowed_mask=True)
    tensors = {k: v for k, v in case.inputs.items() if isinstance(v, torch.Tensor)}
    before = {k: v.clone() for k, v in tensors.items()}
    together = backend.run(case)
    assert_same(tensors.values(), before.values())
    for order in ([5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [7, 0, 7, 2]):
        assert_same(backend.run(case.select(order)), rows(together, order))


def test_outputs_do_not_require_grad(operator):
    case = make_case(23, vocab=9, rule="token")
    logits = case.inputs["target_logits"].clone().requires_grad_()
    draft = case.inputs["draft_logits"].clone().requires_grad_()
    outputs = [
        *operator.run(case.replace(target_logits=logits, draft_logits=draft)),
        *operator.row_law(logits[:, 0]),
        *operator.sample(logits[:, 0], case.inputs["uniforms"][:, 0]),
        operator.acceptance(logits[:, 0], draft[:, 0]),
    ]
    assert not any(output.requires_grad for output in outputs)
    assert all(output.grad_fn is None for output in outputs)
