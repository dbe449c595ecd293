"""Properties over inputs that hypothesis chooses: the corners that nobody thought of.

Whatever comes in, an outcome must be admissible in every decision (`explain_outcome` recomputes all
of them in float64): structure, coins, draws, filters, log-probabilities and status.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import BACKENDS, OPERATORS, REFERENCE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec_ext.contract import rule_names
from specdec_ext.testing import (
    VerifyCase,
    draw_interval,
    explain_outcome,
    filtered_law,
    make_case,
    philox4x32,
)

RULES = rule_names(chains=True, races=False)
EXAMPLES = settings().max_examples  # of the profile: see conftest.py
by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda b: b.name)

EXTREME_UNIFORMS = [0.0, 5e-324, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2**-53]
uniforms = st.one_of(st.sampled_from(EXTREME_UNIFORMS), st.floats(0, 1, exclude_max=True))
bad_uniforms = st.one_of(uniforms, st.sampled_from([-1.0, 1.0, 2.0, math.nan, math.inf]))
usual_logits = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, -math.inf, 30.0, -30.0, -0.0]), st.floats(-8, 8, width=32)
)
any_logits = st.one_of(
    usual_logits,
    st.sampled_from([math.nan, math.inf, -math.inf, 1e4, -1e4, 6e4, 1e-30, -200.0, 88.8, -88.8]),
)
temperatures = st.one_of(st.sampled_from([0.0, 1e-7, 1.0]), st.floats(0.0625, 5.0, width=32))
any_temperatures = st.one_of(temperatures, st.sampled_from([-1.0, math.nan, math.inf, 1e-3, 1e3]))
# Away from ties that a tolerance would have to excuse: eighths and odd fractions.
fractions = st.sampled_from([0.0, 0.11, 0.23, 0.37, 0.52, 0.68, 0.83, 0.94, 0.999, 1.0])
any_fractions = st.one_of(fractions, st.sampled_from([-0.5, 1.5, math.nan]))
top_ks = st.sampled_from([-1, 0, 1, 2, 3, 4, 7, 1000])


@st.composite
def verify_cases(draw, logits=usual_logits, temps=temperatures, probs=fractions, us=uniforms):
    """Small cases, entry by entry."""
    batch, gamma = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    vocab = draw(st.integers(1, 6))
    width = draw(st.one_of(st.just(vocab), st.integers(1, 7)))

    def table(strategy, *shape, dtype=torch.float32):
        count = math.prod(shape)
        values = draw(st.lists(strategy, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)

    float_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
    target = table(logits, batch, gamma + 1, vocab, dtype=draw(float_dtypes))
    inputs = dict(
        target_logits=target,
        draft_tokens=table(st.integers(-2, max(vocab, width)), batch, gamma, dtype=torch.int64),
        uniforms=table(us, batch, gamma + 1, dtype=torch.float64),
        rule=draw(st.sampled_from(RULES)),
        full_accept_probs=draw(st.booleans()),
        raw_logprobs=draw(st.booleans()),
    )
    how = draw(st.sampled_from(["logits", "same", "probs", "none"]))
    if how == "logits":
        inputs["draft_logits"] = table(logits, batch, gamma, width, dtype=draw(float_dtypes))
    elif how == "same":
        inputs["draft_logits"] = target[:, :gamma].clone()
    elif how == "probs":
        values = st.one_of(st.just(0.0), st.floats(0.0078125, 4.0, width=32))
        inputs["draft_probs"] = table(values, batch, gamma, width, dtype=draw(float_dtypes))
    if draw(st.booleans()):
        inputs["temperature"] = table(temps, batch)
    if draw(st.booleans()):
        inputs["top_k"] = table(top_ks, batch, dtype=torch.int64)
        inputs["top_p"] = table(probs, batch)
        inputs["min_p"] = table(probs, batch)
    if how in ("logits", "same") and draw(st.booleans()):
        inputs["draft_temperature"] = table(temps, batch)
        inputs["draft_top_p"] = table(probs, batch)
    if draw(st.booleans()):
        inputs["draft_kinds"] = table(st.integers(0, 1), batch, gamma, dtype=torch.int8)
    if draw(st.booleans()):
        inputs["draft_lengths"] = table(st.integers(0, gamma), batch, dtype=torch.int32)
    return VerifyCase(inputs)


def check(backend, case):
    result = backend.run(case)
    for b in range(case.batch):
        reason = explain_outcome(result, case, b, tolerance=backend.tolerance)
        assert reason == "", (b, reason)


@by_backend
@given(case=verify_cases())
@settings(max_examples=4 * EXAMPLES)
def test_every_decision_is_admissible(backend, case):
    check(backend, case)


@by_backend
@given(
    case=verify_cases(
        logits=any_logits, temps=any_temperatures, probs=any_fractions, us=bad_uniforms
    )
)
@settings(max_examples=4 * EXAMPLES)
def test_every_decision_is_admissible_whatever_comes_in(backend, case):
    check(backend, case)


@st.composite
def crowded_cases(draw):
    """Cases with masks, maps (valid or not) and races."""
    case = draw(verify_cases(logits=any_logits))
    batch, gamma = case.batch, case.gamma
    vocab = case.inputs["target_logits"].shape[-1]
    changes = {}
    if draw(st.booleans()):
        word = st.one_of(st.sampled_from([0, -1, -(2**31), 2**31 - 1]), st.integers(0, 2**vocab))
        count = batch * (gamma + 1)
        words = draw(st.lists(word, min_size=count, max_size=count))
        changes["allowed_mask"] = torch.tensor(words).to(torch.int32).reshape(batch, gamma + 1, 1)
    draft = case.inputs.get("draft_logits", case.inputs.get("draft_probs"))
    if draft is not None and draft.shape[-1] <= vocab and draw(st.booleans()):
        width = draft.shape[-1]
        ids = draw(st.permutations(range(vocab)))[:width]
        ids = draw(st.one_of(st.just(ids), st.lists(st.integers(-1, vocab), min_size=width,
                                                    max_size=width)))  # fmt: skip
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        changes["draft_token_ids"] = torch.tensor(ids, dtype=dtype)
    if draw(st.booleans()):
        counters = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=batch, max_size=batch)
        changes |= {name: torch.tensor(draw(counters)) for name in ("seeds", "positions")}
        changes |= dict(rule="coupled", stream=draw(st.integers(0, 255)))
        case = case.replace(uniforms=None)
    return case.replace(**changes)


@by_backend
@given(case=crowded_cases())
@settings(max_examples=5 * EXAMPLES // 2)
def test_masks_maps_and_races_are_admissible(backend, case):
    check(backend, case)


@by_operator
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 9),
    gamma=st.integers(0, 5),
    vocab=st.sampled_from([1, 2, 3, 16, 65, 1023, 4096, 4097]),
    width=st.sampled_from([None, 1, 17, 4099]),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["contiguous", "transposed", "padded"]),
    packed=st.booleans(),
    draft=st.sampled_from(["logits", "probs", "none"]),
    kinds=st.sampled_from([None, "mixed", "deterministic"]),
    flags=st.tuples(*[st.booleans()] * 4),
)
@settings(max_examples=4 * EXAMPLES // 3)
def test_generated_cases(
    operator, seed, batch, gamma, vocab, width, rule, dtype, layout, packed, draft, kinds, flags
):
    if draft == "none":
        kinds = None
    case = make_case(
        seed,
        batch=batch,
        gamma=gamma,
        vocab=vocab,
        draft_vocab=width,
        rule=rule,
        dtype=dtype,
        layout=layout,
        packed=packed,
        draft=draft,
        kinds=kinds,
        philox=flags[0],
        draft_filters=flags[1],
        full_accept_probs=flags[2],
        raw_logprobs=flags[3],
    )
    check(operator, case)


@by_backend
@given(
    row=st.lists(usual_logits, min_size=1, max_size=9).filter(lambda r: max(r) > -math.inf),
    u=uniforms,
    temperature=temperatures,
    top_k=top_ks,
    top_p=fractions,
    min_p=fractions,
)
@example(row=[0.0, -0.0], u=0.5, temperature=1.0, top_k=1, top_p=0.0, min_p=1.0)
def test_sample_draws_within_the_law(backend, row, u, temperature, top_k, top_p, min_p):
    logits = torch.tensor([row])
    one = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tensors = {
        k: torch.tensor([v], dtype=torch.int64 if k == "top_k" else torch.float32)
        for k, v in one.items()
    }
    result = backend.sample(logits, torch.tensor([u], dtype=torch.float64), **tensors)
    token = int(result.tokens[0])
    law = filtered_law(logits[0], **one)
    low, high = draw_interval(law, token)
    assert float(law[token]) > 0
    if temperature >= 1e-6:
        assert low - backend.tolerance <= u < high + backend.tolerance
        assert float(result.logprobs[0]) == pytest.approx(math.log(law[token]), abs=2e-5)
    else:
        assert (token, float(result.logprobs[0])) == (row.index(max(row)), 0.0)


@by_backend
@given(
    p=st.lists(usual_logits, min_size=1, max_size=7).filter(lambda r: max(r) > -math.inf),
    q=st.lists(usual_logits, min_size=1, max_size=7).filter(lambda r: max(r) > -math.inf),
)
def test_acceptance_is_symmetric_and_one_only_for_equal_laws(backend, p, q):
    one, other = torch.tensor([p]), torch.tensor([q])
    forward, backward = backend.acceptance(one, other), backend.acceptance(other, one)
    assert float(forward) == pytest.approx(float(backward), abs=2e-6)
    both = min(len(p), len(q))
    expected = torch.minimum(filtered_law(one[0])[:both], filtered_law(other[0])[:both]).sum()
    assert float(forward) == pytest.approx(float(expected), abs=2e-6)
    assert 0 <= float(forward) <= 1
    assert float(backend.acceptance(one, one)) == pytest.approx(1, abs=2e-6)


@by_operator
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(-(2**63), 2**63 - 1),
    n=st.integers(1, 9),
    stream=st.integers(0, 255),
)
def test_uniforms_equal_the_reference(operator, seed, position, n, stream):
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    got = operator.uniforms(seeds, positions, n, stream=stream)
    assert torch.equal(got, REFERENCE.uniforms(seeds, positions, n, stream=stream))


@given(words=st.tuples(*[st.integers(0, 2**32 - 1)] * 6))
def test_philox_is_a_bijection_of_the_counter(words):
    # Flipping one bit of the counter changes the result; running the rounds backwards restores it.
    counter, key = words[:4], words[4:]
    out = philox4x32(counter, key)
    mask = 0xFFFFFFFF
    keys = [((key[0] + r * 0x9E3779B9) & mask, (key[1] + r * 0xBB67AE85) & mask) for r in range(10)]
    inverse = [pow(m, -1, 2**32) for m in (0xD2511F53, 0xCD9E8D57)]
    a, b, c, d = out
    for k0, k1 in reversed(keys):
        old_a, old_c = d * inverse[0] & mask, b * inverse[1] & mask
        left, right = 0xD2511F53 * old_a, 0xCD9E8D57 * old_c
        a, b, c, d = old_a, a ^ (right >> 32) ^ k0, old_c, c ^ (left >> 32) ^ k1
    assert (a, b, c, d) == tuple(counter)
