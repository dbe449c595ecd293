"""beam_verify: by hand, against the reference, and what data can have that is wrong.

That iterating it is beam search is python_tests/laws/test_beam_law.py.
"""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS
from beam_inputs import assert_like, make_inputs
from conftest import CPU, REFERENCE, log_probs
from torch.library import opcheck

import specdec_ext
from specdec_ext import (
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
)

INF = torch.inf


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


@pytest.fixture(params=[b for b in BACKENDS if b is not REFERENCE], ids=lambda b: b.name)
def operator(request):
    return request.param


# ---- by hand ------------------------------------------------------------------------------------

# Two beams, of scores log 0.5 and log 0.25; node 2 continues the first by token 0.
ROWS = log_probs([[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25], [0.25, 0.5, 0.125, 0.125]])
HAND = dict(
    target_logits=ROWS[None],
    scores=log_probs([[0.5, 0.25]]),
    tokens=torch.tensor([[0, 0, 0]]),
    parents=torch.tensor([[-1, -1, 0]]),
    gamma=1,
)


def test_a_level_by_hand(backend):
    # 0.25 by token 0 behind beam 0; then 0.125 twice: token 1 behind beam 0 goes before token 2
    # behind beam 1, which is in no tree anyway. Its beam is missing: the next level needs two
    # offers above 0.125, and has one of 0.125.
    found = backend.beam_verify(**HAND)
    assert found.num_levels.tolist() == [1] and found.status.tolist() == [0]
    assert found.tokens.tolist() == [[[0, 1], [-1, -1]]]
    assert found.parents.tolist() == [[[0, 0], [-1, -1]]]
    assert found.nodes.tolist() == [[[2, -1], [-1, -1]]]
    torch.testing.assert_close(found.scores[0, 0].exp(), torch.tensor([0.25, 0.125]))
    assert found.scores[0, 1].tolist() == [-INF, -INF]
    assert (found.finished_tokens == -1).all() and (found.finished_scores == -INF).all()


def test_an_eos_token_leaves_its_place_to_the_next(backend):
    # Token 0 ends behind both beams: 0.25 is the best of all, 0.03 is not among the first two.
    found = backend.beam_verify(**HAND, eos_token_ids=torch.tensor([0, 9, -1, 0]))
    assert found.finished_tokens.tolist() == [[[0, -1], [-1, -1]]]
    assert found.finished_parents.tolist() == [[[0, -1], [-1, -1]]]
    torch.testing.assert_close(found.finished_scores[0, 0].exp(), torch.tensor([0.25, 0.0]))
    assert found.tokens.tolist() == [[[1, 2], [-1, -1]]]
    assert found.parents.tolist() == [[[0, 1], [-1, -1]]]


@pytest.mark.parametrize("rule, levels", [("bound", 2), ("subset", 1)])
def test_a_level_that_the_bound_decides(backend, rule, levels):
    # Behind node 2 are offers of 0.45 * 0.5 = 0.225 and 0.45 * 0.4 = 0.18; 0.1 is missing.
    rows = log_probs([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3], [0.5, 0.4, 0.1]])
    inputs = {**HAND, "target_logits": rows[None]}
    found = backend.beam_verify(**inputs, rule=rule)
    assert found.nodes[0, 0].tolist() == [2, -1] and found.num_levels.tolist() == [levels]
    if levels == 2:
        assert found.tokens[0, 1].tolist() == [0, 1] and found.parents[0, 1].tolist() == [0, 0]


def test_a_bound_must_be_exceeded(backend):
    # Without a softmax: offers of -1 and -2 behind node 2, a missing beam of score -2, then -2.25.
    inputs = {**HAND, "scores": torch.zeros(1, 2), "log_probs": True}
    for second, levels in ((-2.0, 1), (-2.25, 2)):
        rows = torch.tensor([[-1.0, -9, -9], [-9, second, -9], [0.0, -1.0, -9]])
        found = backend.beam_verify(**{**inputs, "target_logits": rows[None]})
        assert found.scores[0, 0].tolist() == [-1.0, second]
        assert found.num_levels.tolist() == [levels]


@pytest.mark.parametrize("vocab", [300, 1500])
def test_equal_scores_go_by_place_then_by_token(backend, vocab):
    inputs = make_inputs(0, batch=1, width=5, gamma=0, vocab=vocab, eos=0)
    inputs["target_logits"].zero_()
    inputs["scores"].zero_()
    found = backend.beam_verify(**inputs)
    assert found.tokens.tolist() == [[[0, 1, 2, 3, 4]]] and found.parents.tolist() == [[[0] * 5]]
    ended = backend.beam_verify(**{**inputs, "eos_token_ids": torch.tensor([1, 3, 299])})
    assert ended.finished_tokens.tolist() == [[[1, 3, -1, -1, -1]]]
    assert ended.tokens.tolist() == [[[0, 2, 4, 5, 6]]]


def test_logits_that_round_to_one_score_are_equal(backend):
    """Far from 0 float32 scores are coarse: the lower token goes first, of a lower logit."""
    vocab = 9000
    rows = torch.full((1, 1, vocab), -20.0)
    rows[0, 0, [8000, 5000, 3000, 77]] = torch.tensor([1.0, 1.0 - 1e-6, 1.0 - 2e-6, 0.5])
    for shared in (True, False):
        found = backend.beam_verify(
            rows,
            torch.tensor([[-4096.0 if shared else 0.0, -INF]])[:, :1],
            torch.zeros(1, 1, dtype=torch.int64),
            torch.full((1, 1), -1),
            0,
        )
        assert found.tokens.tolist() == [[[3000 if shared else 8000]]]


def test_a_beam_of_several_that_round_to_one_score(backend):
    rows = torch.full((1, 3, 9000), -20.0)
    rows[0, :, [8000, 5000, 3000, 77]] = torch.tensor([1.0, 1.0 - 1e-6, 1.0 - 2e-6, 0.5])
    scores = torch.tensor([[-4096.0, -4096.0, -INF]])
    ids = torch.full((1, 3), -1)
    found = backend.beam_verify(rows, scores, ids, ids, 0)
    assert found.tokens.tolist() == [[[3000, 5000, 8000]]]
    assert found.parents.tolist() == [[[0, 0, 0]]]


# ---- against the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["bound", "subset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 127, 128, 129, 1000, 4096, 4097, 20000])
def test_like_the_reference(operator, vocab, dtype, rule):
    for seed, (width, gamma, eos) in enumerate([(1, 3, 1), (2, 2, 3), (5, 2, 2), (8, 1, 200)]):
        inputs = make_inputs(seed, 3, width, gamma, vocab, dtype, eos)
        expected = REFERENCE.beam_verify(**inputs, rule=rule)
        assert_like(operator.beam_verify(**inputs, rule=rule), expected)
        exact = {**inputs, "log_probs": True, "rule": rule}
        assert_like(operator.beam_verify(**exact), REFERENCE.beam_verify(**exact), exact=True)


def test_many_levels_are_decided_in_these_cases():
    """The comparison above is about more than first levels, and about ends."""
    levels, ends, ties = [], 0, 0
    for seed in range(20):
        found = REFERENCE.beam_verify(**make_inputs(seed, 3, 2, 3, 20, torch.bfloat16, 3))
        levels += found.num_levels.tolist()
        ends += int((found.finished_tokens >= 0).sum())
        ties += int((found.scores[:, 0, 0] == found.scores[:, 0, 1]).sum())
    assert max(levels) >= 3 and min(levels) == 1 and ends > 10 and ties >= 1


@pytest.mark.parametrize("width", [17, 64])
def test_many_beams(operator, width):
    inputs = make_inputs(1, 1, width, 1, 3000, eos=5)
    assert_like(operator.beam_verify(**inputs), REFERENCE.beam_verify(**inputs))


def test_crowded_rows(backend):
    """Few distinct logits: nearly everything ties, in every tile."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(2, 2, 4, 1, 10000, eos=4)
    inputs["target_logits"] = torch.randint(
        2, inputs["target_logits"].shape, generator=generator
    ).float()
    inputs["log_probs"] = True
    assert_like(backend.beam_verify(**inputs), REFERENCE.beam_verify(**inputs), exact=True)


def test_fewer_offers_than_beams(backend):
    inputs = make_inputs(3, 2, 6, 2, 40, eos=0)
    inputs["scores"][:, 1:] = -INF
    inputs["target_logits"][..., 3:] = -INF
    found = backend.beam_verify(**inputs)
    assert ((found.tokens >= 0).sum(2)[:, 0] == 3).all()
    assert_like(found, REFERENCE.beam_verify(**inputs))


# ---- layouts, batches, threads ------------------------------------------------------------------


def test_strides_and_types_of_ids(backend):
    inputs = make_inputs(4)
    expected = backend.beam_verify(**inputs)
    wide = torch.full((*inputs["target_logits"].shape[:2], 80), 99.0)
    wide[..., :50] = inputs["target_logits"]
    others = {
        "target_logits": wide[..., :50],
        "scores": inputs["scores"].t().contiguous().t(),
        "tokens": inputs["tokens"].int().t().contiguous().t(),
        "parents": inputs["parents"].int(),
        "eos_token_ids": inputs["eos_token_ids"].repeat_interleave(2).int()[::2],
    }
    assert_like(backend.beam_verify(**{**inputs, **others}), expected, exact=True)


def test_a_request_does_not_depend_on_the_others(backend):
    inputs = make_inputs(5, batch=4, vocab=5000)
    together = backend.beam_verify(**inputs)
    for b in range(4):
        alone = {
            name: value[b : b + 1]
            if name in ("target_logits", "scores", "tokens", "parents")
            else value
            for name, value in inputs.items()
        }
        found = backend.beam_verify(**alone)
        assert all(torch.equal(t[b : b + 1], one) for t, one in zip(together, found, strict=True))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(threads):
    inputs = [make_inputs(seed, batch=3, width=4, gamma=3, vocab=20000) for seed in range(20)]
    alone = [CPU.beam_verify(**given) for given in inputs]
    torch.set_num_threads(threads)
    try:
        for given, expected in zip(inputs, alone, strict=True):
            assert_like(CPU.beam_verify(**given), expected, exact=True)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(gamma=0), dict(vocab=1), dict(width=1)])
def test_small_sizes(backend, sizes):
    inputs = make_inputs(7, **sizes)
    found = backend.beam_verify(**inputs)
    batch, width = inputs["scores"].shape
    assert [tuple(t.shape) for t in found] == [(batch, inputs["gamma"] + 1, width)] * 7 + [
        (batch,)
    ] * 2
    assert_like(found, REFERENCE.beam_verify(**inputs))


def test_padding_is_not_read(backend):
    inputs = make_inputs(8)
    inputs["parents"][:, -3:] = -1
    expected = backend.beam_verify(**inputs)
    inputs["target_logits"][:, -3:] = torch.nan
    inputs["tokens"][:, -3:] = 10**6
    assert_like(backend.beam_verify(**inputs), expected, exact=True)
    assert expected.status.tolist() == [0, 0]


# ---- what data can have that is wrong -----------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, INF, "nothing"])
def test_a_row_without_a_law(backend, value):
    inputs = {**HAND, "target_logits": ROWS[None].clone(), "scores": log_probs([[0.5, 0.01]])}
    second = inputs["target_logits"][0, 2]
    second[:] = -INF
    if value != "nothing":
        second[1] = value
    # Only the second level needs it: node 2 is a live beam, and what it offers is looked at.
    found = backend.beam_verify(**inputs)
    assert found.num_levels.tolist() == [1] and found.status.tolist() == [STATUS_NO_TARGET_LAW]
    assert found.tokens[0, 0].tolist() == [0, 1]
    inputs["target_logits"] = inputs["target_logits"].flip(1)
    found = backend.beam_verify(**inputs)
    assert found.num_levels.tolist() == [0] and found.status.tolist() == [STATUS_NO_TARGET_LAW]
    assert (found.tokens == -1).all()


@pytest.mark.parametrize("score", [torch.nan, INF])
def test_a_score_out_of_range_is_no_beam(backend, score):
    inputs = make_inputs(9)
    none, wrong = inputs["scores"].clone(), inputs["scores"].clone()
    none[0, 1], wrong[0, 1] = -INF, score
    found = backend.beam_verify(**{**inputs, "scores": wrong})
    assert found.status.tolist() == [STATUS_PARAMETER_OUT_OF_RANGE, 0]
    expected = backend.beam_verify(**{**inputs, "scores": none})
    assert_like(found._replace(status=expected.status), expected, exact=True)


def test_no_beams(backend):
    inputs = make_inputs(10)
    inputs["scores"][0] = -INF
    found = backend.beam_verify(**inputs)
    assert found.num_levels[0] == 0 and found.num_levels[1] >= 1 and found.status.tolist() == [0, 0]


def test_draft_tokens_out_of_range(backend):
    inputs = make_inputs(11)
    inputs["tokens"][0, 4], inputs["tokens"][1, 4] = 50, -2
    found = backend.beam_verify(**inputs)
    assert found.status.tolist() == [STATUS_INVALID_DRAFT_TOKEN] * 2
    assert_like(found, REFERENCE.beam_verify(**inputs))
    inputs["tokens"][:, 4] = -1
    assert backend.beam_verify(**inputs).status.tolist() == [0, 0]


@pytest.mark.parametrize("node, parent", [(0, 0), (2, 1), (5, 5), (5, 6), (5, -2), (5, 2**40)])
def test_parents_that_are_no_tree_of_beams(backend, node, parent):
    inputs = make_inputs(12)
    alone = {**inputs, "parents": torch.full_like(inputs["parents"], -1)}
    inputs["parents"][0, node] = parent
    found, expected = backend.beam_verify(**inputs), backend.beam_verify(**alone)
    assert found.status.tolist() == [STATUS_INVALID_TREE, 0]
    assert all(
        torch.equal(got[0], wanted[0])
        for got, wanted in zip(found[:-1], expected[:-1], strict=True)
    )


VALUE_ERRORS = [
    (dict(target_logits=torch.zeros(2, 15)), r"target_logits must be \[B, N, V\] .*got \[2, 15\]"),
    (dict(target_logits=torch.zeros(2, 15, 50, dtype=torch.float64)), "float32, .*float64"),
    (dict(target_logits=torch.zeros(2, 15, 50, 2)[..., 0]), "unit stride"),
    (dict(scores=torch.zeros(3, 3)), r"scores must be \[B, W\] float32, got \[3, 3\]"),
    (dict(scores=torch.zeros(2, 3).double()), r"scores must be \[B, W\] float32, got .*float64"),
    (dict(scores=torch.zeros(2, 0)), r"W, the beams of scores, must be in \[1, 65\), got 0"),
    (dict(scores=torch.zeros(2, 65)), r"W, the beams of scores, must be in \[1, 65\), got 65"),
    (dict(scores=torch.zeros(2, 16)), r"N, the nodes of target_logits, must be in \[16, 1025\)"),
    (dict(tokens=torch.zeros(2, 14).long()), r"tokens must be \[B, N\] = \[2, 15\] int32 or int64"),
    (dict(parents=torch.zeros(2, 15)), r"parents must be .* int32 or int64, got .*float32"),
    (dict(gamma=-1), r"gamma must be in \[0, 1024\), got -1"),
    (dict(gamma=1024), r"gamma must be in \[0, 1024\), got 1024"),
    (dict(eos_token_ids=torch.zeros(1, 1).long()), r"eos_token_ids must be \[E\] int32 or int64"),
    (dict(rule="block"), 'rule must be one of "bound", "subset", got "block"'),
]


@pytest.mark.parametrize("changes, message", VALUE_ERRORS, ids=lambda v: str(v)[:40])
def test_value_errors(changes, message):
    with pytest.raises(ValueError, match=f"^beam_verify: .*{message}"):
        torch.ops.specdec.beam_verify(**{**make_inputs(13), **changes})


def test_type_errors():
    inputs = make_inputs(14)
    with pytest.raises(TypeError, match="beam_verify: gamma must be an int, got float"):
        specdec_ext.beam_verify(**{**inputs, "gamma": 2.0})
    with pytest.raises(TypeError, match="beam_verify: scores must be a Tensor, got list"):
        specdec_ext.beam_verify(**{**inputs, "scores": [0.0]})
    with pytest.raises(TypeError, match="eos_token_ids must be a Tensor or None, got int"):
        specdec_ext.beam_verify(**{**inputs, "eos_token_ids": 2})


# ---- graphs and backends ------------------------------------------------------------------------


def test_opcheck():
    inputs = make_inputs(15)
    args = tuple(inputs.pop(name) for name in ("target_logits", "scores", "tokens", "parents"))
    args = (args[0].requires_grad_(), *args[1:], inputs.pop("gamma"))
    for options in ({}, {"rule": "subset", "log_probs": True}):
        opcheck(torch.ops.specdec.beam_verify.default, args, {**inputs, **options})
    outputs = torch.ops.specdec.beam_verify(*args, **inputs)
    assert not any(output.requires_grad for output in outputs)


def test_fullgraph_equals_eager():
    def step(logits, scores, tokens, parents, eos):
        found = specdec_ext.beam_verify(logits * 1.0, scores, tokens, parents, 2, eos_token_ids=eos)
        last = (found.num_levels.long() - 1).view(-1, 1, 1).expand(-1, 1, scores.shape[1])
        return *found, found.scores.gather(1, last)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        inputs = make_inputs(16, batch=batch)
        args = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        for got, expected in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, expected)


def test_backends():
    inputs = make_inputs(17)
    expected = specdec_ext.beam_verify(**inputs)
    assert_like(specdec_ext.beam_verify(**inputs, backend="cpu"), expected, exact=True)
    assert_like(specdec_ext.beam_verify(**inputs, backend="reference"), expected)
    with pytest.raises(ValueError, match=r"^beam_verify: backend 'cuda' (is absent|needs CUDA)"):
        specdec_ext.beam_verify(**inputs, backend="cuda")
