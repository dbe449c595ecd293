"""The reference against known answers and tables that can be checked by hand.

Everything else is compared with the reference, so nothing here uses an operator: only arithmetic on
paper, published vectors, and the definition of losslessness.
"""

import itertools
import math

import pytest
import torch

from specdec_ext import reference as ref
from specdec_ext.contract import VerifyResult
from specdec_ext.reference import laws

NAN, INF = math.nan, math.inf


def logits(*probs):
    """Logits of probabilities; 0 is -inf."""
    return torch.tensor(probs, dtype=torch.float64).log().float()


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


# --------------------------------------------------------------------------------------------------
# Philox and uniforms
# --------------------------------------------------------------------------------------------------

# Random123, tests/kat_vectors: philox4x32 with 10 rounds.
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
]
PHILOX_OUTPUT = [
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "d16cfe09 94fdcceb 5001e420 24126ea1",
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("inputs", "output"), list(zip(PHILOX, PHILOX_OUTPUT, strict=True)), ids=["zeros", "ones", "pi"]
)
def test_philox_known_answers(inputs, output):
    counter, key = (ints(*words(text)) for text in inputs)
    assert ref.philox4x32(counter, key).tolist() == words(output)


def test_philox_is_vectorised():
    counters = ints(*(words(counter) for counter, _ in PHILOX))
    keys = ints(*(words(key) for _, key in PHILOX))
    assert ref.philox4x32(counters, keys).tolist() == [words(text) for text in PHILOX_OUTPUT]


def test_uniform_is_the_high_53_bits_of_words_1_and_0():
    # Seed, position, index, domain and stream 0: the first vector above.
    u = ref.philox_uniforms(ints(0), ints(0), 0, ref.ACCEPT)
    assert u.tolist() == [(0xE169C58D6627E8D5 >> 11) / 2**53]


def test_counter_layout():
    seed, position, index, domain, stream = -(2**63) + 5, -(2**40) + 3, 0xABCD, 2, 0xEF
    key = ints(seed & 0xFFFFFFFF, (seed % 2**64) >> 32)
    counter = ints(0, position & 0xFFFFFFFF, (position % 2**64) >> 32, 0xEF02ABCD)
    first, second, _, _ = ref.philox4x32(counter, key).tolist()
    u = ref.philox_uniforms(ints(seed), ints(position), index, domain, stream)
    assert u.item() == ((second << 32 | first) >> 11) * 2.0**-53


def test_uniforms_are_accept_coins_then_the_final_draw():
    seeds, positions = ints(7, -8), ints(2**35, 0)
    found = ref.uniforms(seeds, positions, 4, stream=6)
    assert found.shape == (2, 4) and found.dtype == torch.float64
    for b in range(2):
        one = seeds[b : b + 1], positions[b : b + 1]
        expected = [ref.philox_uniforms(*one, i, ref.ACCEPT, 6).item() for i in (1, 2, 3)]
        expected.append(ref.philox_uniforms(*one, 0, ref.RESIDUAL, 6).item())
        assert found[b].tolist() == expected
    # A coin does not depend on how many there are; the final draw is the same whatever n is.
    one_slot = ref.uniforms(seeds, positions, 1, stream=6)
    assert torch.equal(one_slot[:, 0], found[:, 3])
    assert (
        len({*found.flatten().tolist(), *ref.uniforms(seeds, positions, 4).flatten().tolist()})
        == 16
    )


# --------------------------------------------------------------------------------------------------
# Draws in integers
# --------------------------------------------------------------------------------------------------

BEFORE_HALF, LAST = 0.5 - 2.0**-53, 1 - 2.0**-53

DRAWS = [
    # weights, u, token
    ([1, 1], 0.0, 0),
    ([1, 1], BEFORE_HALF, 0),
    ([1, 1], 0.5, 1),  # t = 1: the prefix 1 does not exceed it
    ([1, 1], LAST, 1),
    ([0, 0, 5, 0], 0.0, 2),  # never on weight 0, at either end
    ([0, 0, 5, 0], LAST, 2),
    ([1, 0, 1], 0.5, 2),
    ([1, 2, 1], 0.25, 1),
    ([1, 2, 1], 0.25 - 2.0**-53, 0),
    ([1, 2, 1], 0.75, 2),
    ([3], 0.99, 0),
    # Beyond 53 bits: t = umulhi(2^63, 2^62 + 1) = 2^61 exactly.
    ([2**61, 1, 2**61], 0.5, 1),
    ([2**61, 1, 2**61], BEFORE_HALF, 0),
    ([2**61 + 1, 2**61], 0.5, 0),
    # Clamped.
    ([1, 1], 1.0, 1),
    ([1, 1], 17.0, 1),
    ([1, 1], -0.5, 0),
]


@pytest.mark.parametrize(("weights", "u", "token"), DRAWS)
def test_inverse_cdf(weights, u, token):
    assert ref.inverse_cdf(ints(*weights), u) == token


def test_fixed_point_weights():
    assert ref.law_weights(doubles(1.0, 0.5, 0.0, 2.0**-40, 2.0**-41)).tolist() == [
        2**40,
        2**39,
        0,
        1,
        0,
    ]
    assert ref.law_weights(doubles(1 / 3)).tolist() == [366503875925]  # floor(2^40 / 3)
    assert ref.residual_weights(doubles(0.0, 1e-300, 3e-300)).tolist() == [0, 2**60, 3 * 2**60]
    assert ref.residual_weights(doubles(0.0, 0.0)).tolist() == [0, 0]


# --------------------------------------------------------------------------------------------------
# Laws
# --------------------------------------------------------------------------------------------------

TENTHS = (0.4, 0.2, 0.2, 0.1, 0.05, 0.05)

FILTERS = [
    # probabilities, parameters, what is kept
    (TENTHS, {}, {0, 1, 2, 3, 4, 5}),
    # top-k: all ties of the k-th; off at <= 0 and >= V.
    (TENTHS, {"top_k": 1}, {0}),
    (TENTHS, {"top_k": 2}, {0, 1, 2}),
    (TENTHS, {"top_k": 3}, {0, 1, 2}),
    (TENTHS, {"top_k": 4}, {0, 1, 2, 3}),
    (TENTHS, {"top_k": 5}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"top_k": 0}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"top_k": -1}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"top_k": 6}, {0, 1, 2, 3, 4, 5}),
    ((0.3, 0.1, 0.3, 0.3), {"top_k": 1}, {0, 2, 3}),
    ((0.5, 0.5, 0.0, 0.0), {"top_k": 3}, {0, 1}),  # -inf has no mass even where kept
    # top-p: the mass strictly more likely is < top_p.
    (TENTHS, {"top_p": 0.0}, {0}),
    (TENTHS, {"top_p": 0.39}, {0}),
    (TENTHS, {"top_p": 0.41}, {0, 1, 2}),
    (TENTHS, {"top_p": 0.79}, {0, 1, 2}),
    (TENTHS, {"top_p": 0.81}, {0, 1, 2, 3}),
    (TENTHS, {"top_p": 0.91}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"top_p": 1.0}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"top_p": INF}, {0, 1, 2, 3, 4, 5}),
    ((0.1, 0.3, 0.3, 0.3), {"top_p": 0.0}, {1, 2, 3}),  # ties of the top always stay
    # min-p: p >= min_p * max p.
    (TENTHS, {"min_p": 0.0}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"min_p": -1.0}, {0, 1, 2, 3, 4, 5}),
    (TENTHS, {"min_p": 0.13}, {0, 1, 2, 3}),
    (TENTHS, {"min_p": 0.24}, {0, 1, 2, 3}),
    (TENTHS, {"min_p": 0.26}, {0, 1, 2}),
    (TENTHS, {"min_p": 1.0}, {0}),
    # The order: top-p works on the renormalised top-k set, .4 / .7 = .57 of it above token 1.
    ((0.4, 0.3, 0.2, 0.1), {"top_p": 0.5}, {0, 1}),
    ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, {0}),
    ((0.4, 0.3, 0.2, 0.1), {"top_k": 3, "top_p": 0.5, "min_p": 0.7}, {0, 1}),
    ((0.4, 0.3, 0.2, 0.1), {"top_k": 3, "top_p": 0.5, "min_p": 0.8}, {0}),
    # The temperature comes first: at T = 1/2 the law is .16 .09 .04 .01, of .3.
    ((0.4, 0.3, 0.2, 0.1), {"temperature": 0.5, "top_p": 0.52}, {0}),
    ((0.4, 0.3, 0.2, 0.1), {"temperature": 0.5, "top_p": 0.54}, {0, 1}),
    ((0.4, 0.3, 0.2, 0.1), {"temperature": 0.5, "min_p": 0.55}, {0, 1}),
    ((0.4, 0.3, 0.2, 0.1), {"temperature": 0.5, "min_p": 0.57}, {0}),
]


@pytest.mark.parametrize(("probs", "parameters", "kept"), FILTERS, ids=str)
def test_filters(probs, parameters, kept):
    power = 1 / parameters.get("temperature", 1.0)
    expected = doubles(*(p**power if i in kept else 0.0 for i, p in enumerate(probs)))
    found = ref.law(logits(*probs), **parameters)
    torch.testing.assert_close(found, expected / expected.sum(), rtol=1e-6, atol=1e-7)
    assert set(found.nonzero().flatten().tolist()) == {i for i in kept if probs[i] > 0}


def test_top_p_bound_is_exact():
    # Masses 2^40, 2^39, 2^39 of 2^41: top_p = 1/2 bounds by 2^40, which token 0 alone reaches.
    row, weights = doubles(3.0, 2.0, 1.0), doubles(1.0, 0.5, 0.5)
    assert laws._top_p_cutoff(row, weights, 0.5) == 3.0
    assert laws._top_p_cutoff(row, weights, 0.5 + 2.0**-40) == 2.0
    assert laws._top_p_cutoff(row, weights, 0.75) == 2.0
    assert laws._top_p_cutoff(row, weights, 0.75 + 2.0**-40) == 1.0


def test_min_p_threshold_is_exact():
    # log(1/2) = -0.693147180559945 lies between two float32 logits.
    below, above = -0.6931471824645996, -0.6931471228599548
    assert ref.law(torch.tensor([0.0, below]), min_p=0.5).tolist() == [1.0, 0.0]
    assert ref.law(torch.tensor([0.0, above]), min_p=0.5)[1] > 0.33
    found = ref.row_law(torch.tensor([[0.0, below]]), min_p=torch.tensor([0.5]))
    assert found.cutoff.item() == above


@pytest.mark.parametrize("temperature", [0.0, -0.0, 9e-7, 1e-6])
def test_temperature_zero_is_the_first_arg_max(temperature):
    row = torch.tensor([1.0, 3.0, -INF, 3.0])
    assert ref.law(row, temperature, top_k=3, top_p=0.5, min_p=0.1).tolist() == [0, 1, 0, 0]


def test_small_temperature_does_not_overflow():
    row = torch.tensor([3e38, -3e38, 2.9e38])
    assert ref.law(row, temperature=1.1e-6).tolist() == [1.0, 0.0, 0.0]


ROW_LAWS = [
    # row, parameters, (max, scale, cutoff, log_z, argmax)
    ([0.0, 0.0, 0.0, 0.0], {}, (0.0, 1.0, -INF, math.log(4), 0)),
    ([1.0, 2.0, 2.0], {"temperature": 0.5}, (2.0, 2.0, -INF, math.log(2 + math.exp(-2)), 1)),
    ([1.0, 2.0, 2.0], {"temperature": 0.0}, (2.0, INF, 2.0, 0.0, 1)),
    ([1.0, 2.0, 2.0], {"top_k": 1}, (2.0, 1.0, 2.0, math.log(2), 1)),
    ([1.0, 2.0, 0.0], {"top_k": 2}, (2.0, 1.0, 1.0, math.log(1 + math.exp(-1)), 1)),
    ([0.0, -1.0, -2.0], {"top_p": 0.7}, (0.0, 1.0, -1.0, math.log(1 + math.exp(-1)), 0)),
    ([0.0, -1.0, -INF], {"top_k": 5}, (0.0, 1.0, -INF, math.log(1 + math.exp(-1)), 0)),
    ([5.0], {"top_k": 1, "top_p": 0.1, "min_p": 0.1}, (5.0, 1.0, 5.0, 0.0, 0)),
    ([-INF, 5.0], {}, (5.0, 1.0, -INF, 0.0, 1)),
]


@pytest.mark.parametrize(("row", "parameters", "expected"), ROW_LAWS, ids=str)
def test_row_law(row, parameters, expected):
    dtypes = {"top_k": torch.int64}
    tensors = {
        name: torch.tensor([value], dtype=dtypes.get(name, torch.float32))
        for name, value in parameters.items()
    }
    found = [scalar.item() for scalar in ref.row_law(torch.tensor([row]), **tensors)]
    assert found == pytest.approx(expected, abs=1e-15)


NO_LAW = [[0.0, NAN], [0.0, INF], [-INF, -INF], [INF, -INF], [NAN, NAN]]
OUT_OF_RANGE = [
    {"temperature": -1e-7},
    {"temperature": -1.0},
    {"temperature": NAN},
    {"temperature": INF},
    {"top_p": -0.1},
    {"top_p": NAN},
    {"min_p": 1.1},
    {"min_p": INF},
    {"min_p": NAN},
    {"temperature": 0.0, "top_p": NAN},
]


@pytest.mark.parametrize(
    ("row", "parameters"),
    [(row, {}) for row in NO_LAW] + [([1.0, 0.0], p) for p in OUT_OF_RANGE],
    ids=str,
)
def test_nothing_is_drawn_without_a_law(row, parameters):
    table = torch.tensor([row])
    tensors = {name: torch.tensor([value]) for name, value in parameters.items()}
    assert ref.law(table[0], **parameters).isnan().all()
    law = ref.row_law(table, **tensors)
    assert all(scalar.isnan().all() for scalar in law[:4]) and law.argmax.tolist() == [-1]
    drawn = ref.sample(table, doubles(0.5), **tensors)
    assert drawn.tokens.tolist() == [-1] and drawn.logprobs.isnan().all()
    assert ref.acceptance(table, table, **tensors).isnan().all()
    assert ref.acceptance(table, torch.zeros(1, 2), **tensors).isnan().all()


# --------------------------------------------------------------------------------------------------
# sample and acceptance
# --------------------------------------------------------------------------------------------------


def test_sample():
    row = logits(0.125, 0.25, 0.625)
    u = doubles(0.0, 0.1249, 0.1251, 0.3749, 0.3751, LAST)
    found = ref.sample(row.repeat(6, 1), u)
    assert found.tokens.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(found.logprobs, row[found.tokens])
    # Filtered to {1, 2}: .25 / .875 = 2/7.
    found = ref.sample(row.repeat(2, 1), doubles(0.285, 0.286), top_k=ints(2, 2))
    assert found.tokens.tolist() == [1, 2]
    torch.testing.assert_close(found.logprobs.exp(), torch.tensor([2 / 7, 5 / 7]))


@pytest.mark.parametrize("u", [1.0, -(2.0**-60), NAN, INF])
def test_sample_refuses_a_bad_uniform_unless_it_is_not_read(u):
    rows = logits(0.5, 0.5).repeat(2, 1)
    found = ref.sample(rows, doubles(u, u), temperature=torch.tensor([1.0, 0.0]))
    assert found.tokens.tolist() == [-1, 0]
    assert found.logprobs[0].isnan() and found.logprobs[1] == 0


@pytest.mark.parametrize("domain", [ref.RESIDUAL, ref.DRAFT])
def test_sample_from_seeds(domain):
    seeds, positions = ints(3, 4), ints(5, 6)
    u = ref.philox_uniforms(seeds, positions, 9, domain, 2)
    rows = torch.zeros(2, 1000)
    found = ref.sample(
        rows, seeds=seeds, positions=positions, draft_index=9, domain=domain, stream=2
    )
    assert found.tokens.tolist() == (u * 1000).floor().long().tolist()


ACCEPTANCE = [
    # p, q, parameters, sum min(p, q)
    ((0.3, 0.7), (0.8, 0.2), {}, 0.5),
    ((0.3, 0.7), (0.3, 0.7), {}, 1.0),
    ((0.3, 0.7), (0.8, 0.2, 0.0), {}, 0.5),
    ((0.3, 0.7), (0.4, 0.1, 0.5), {}, 0.4),  # an id that only the draft has
    ((0.3, 0.3, 0.4), (0.8, 0.2), {}, 0.5),
    ((0.3, 0.7), (0.8, 0.2), {"temperature": 0.0}, 0.0),
    ((0.3, 0.7), (0.2, 0.8), {"temperature": 0.0}, 1.0),
    ((0.3, 0.7), (0.8, 0.2), {"temperature": 0.0, "draft_temperature": 1.0}, 0.2),
    ((0.3, 0.7), (0.8, 0.2), {"draft_temperature": 0.0}, 0.3),
    ((0.3, 0.7), (0.8, 0.2), {"draft_min_p": 0.5}, 0.3),
    ((0.3, 0.7), (0.8, 0.2), {"min_p": 0.5}, 0.0),  # the draft is filtered alike
]


@pytest.mark.parametrize(("p", "q", "parameters", "expected"), ACCEPTANCE, ids=str)
def test_acceptance(p, q, parameters, expected):
    tensors = {name: torch.tensor([value]) for name, value in parameters.items()}
    found = ref.acceptance(logits(*p)[None], logits(*q)[None], **tensors)
    assert found.tolist() == pytest.approx([expected], abs=1e-7)


# --------------------------------------------------------------------------------------------------
# The mathematics of a chain
# --------------------------------------------------------------------------------------------------

RESIDUALS = [
    # p, q, w, excluded, [w p - q]+
    ((0.5, 0.3, 0.2), (0.2, 0.6, 0.2), 1.0, [], (0.3, 0.0, 0.0)),
    ((0.5, 0.3, 0.2), (0.2, 0.6, 0.2), 0.5, [], (0.05, 0.0, 0.0)),
    ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), 1.0, [], (0.4, 0.2, 0.0)),
    ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), 1.0, [0], (0.0, 0.2, 0.0)),
    ((0.5, 0.3, 0.2), None, 1.0, [1], (0.5, 0.0, 0.2)),
    ((0.5, 0.3, 0.2), (1.0,), 1.0, [], (0.0, 0.3, 0.2)),  # Vd < V
    ((0.5, 0.5), (0.0, 0.2, 0.8), 1.0, [2], (0.5, 0.3)),  # Vd > V
]


@pytest.mark.parametrize(("p", "q", "w", "excluded", "expected"), RESIDUALS)
def test_residual(p, q, w, excluded, expected):
    found = ref.residual(doubles(*p), None if q is None else doubles(*q), w, excluded)
    torch.testing.assert_close(found, doubles(*expected))


# Sun et al., section 2: p = (1/3, 2/3) and q = (2/3, 1/3) whatever came before, two draft tokens.
THIRDS = doubles(1 / 3, 2 / 3), doubles(2 / 3, 1 / 3)
BLOCKS = [
    # tokens, w_1 w_2, h_1 h_2
    ((0, 0), (0.5, 0.25), (0.0, 0.25)),  # [p/2 - q]+ = 0 after the first
    ((0, 1), (0.5, 1.0), (0.0, 1.0)),
    ((1, 0), (1.0, 0.5), (1.0, 0.5)),
    ((1, 1), (1.0, 1.0), (1.0, 1.0)),
]


@pytest.mark.parametrize(("tokens", "inflows", "thresholds"), BLOCKS)
def test_block_thresholds(tokens, inflows, thresholds):
    p, q = THIRDS
    assert ref.chain_inflow([p, p], [q, q], tokens) == pytest.approx([1.0, *inflows])
    assert ref.chain_acceptance([p, p], [q, q], tokens) == pytest.approx(list(thresholds))


def test_block_thresholds_with_mass_left():
    # w_1 = .5, R = .5 * .6 - .1 = .2 for token 1 alone, h_1 = .2 / (.2 + .5).
    first, second = doubles(0.4, 0.6), doubles(0.4, 0.6)
    q1, q2 = doubles(0.8, 0.2), doubles(0.9, 0.1)
    found = ref.chain_acceptance([first, second], [q1, q2], [0, 0])
    assert found == pytest.approx([2 / 7, 0.5 * 0.4 / 0.9])
    # A deterministic second token: R = .5 (1 - .4) = .3, w_2 = .5 * .4.
    assert ref.chain_acceptance([first, second], [q1, None], [0, 0]) == pytest.approx([3 / 8, 0.2])


def test_empty_chain():
    assert ref.chain_inflow([], [], []) == [1.0]
    assert ref.chain_acceptance([], [], []) == []


def expected_accepted(rule):
    p, q = THIRDS
    total = 0.0
    for tokens in itertools.product(range(2), repeat=2):
        weight = float(q[tokens[0]] * q[tokens[1]])
        if rule == "block":
            h1, h2 = ref.chain_acceptance([p, p], [q, q], tokens)
            total += weight * (2 * h2 + (1 - h2) * h1)
        else:
            b1, b2 = (min(1.0, float(p[x] / q[x])) for x in tokens)
            total += weight * (b1 + b1 * b2)
    return total


def test_expected_number_of_accepted_tokens():
    # The published example: 10/9 token by token, 11/9 in blocks.
    assert expected_accepted("token") == pytest.approx(10 / 9)
    assert expected_accepted("block") == pytest.approx(11 / 9)


@pytest.mark.parametrize("deterministic", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("vocab", [2, 3])
def test_block_is_lossless(vocab, deterministic):
    """The law of the first gamma + 1 tokens is the target's, to rounding, for laws that depend on
    everything that came before."""
    gamma = 3
    generator = torch.Generator().manual_seed(vocab)
    prefixes = [c for n in range(gamma + 1) for c in itertools.product(range(vocab), repeat=n)]

    def random_law():
        return torch.randn(vocab, generator=generator, dtype=torch.float64).mul(2).softmax(0)

    p = {prefix: random_law() for prefix in prefixes}
    q = {prefix: random_law() for prefix in prefixes}

    def target(sequence, start=0):
        """Probability of the sequence's tokens from `start` on, given those before."""
        return math.prod(float(p[sequence[:i]][sequence[i]]) for i in range(start, len(sequence)))

    emitted = dict.fromkeys(itertools.product(range(vocab), repeat=gamma + 1), 0.0)
    for draft in itertools.product(range(vocab), repeat=gamma):
        rows = [p[draft[:i]] for i in range(gamma + 1)]
        drafts = [None if i in deterministic else q[draft[:i]] for i in range(gamma)]
        weight = 1.0
        for i, law in enumerate(drafts):
            # A deterministic drafter proposes token 0.
            weight *= float(draft[i] == 0) if law is None else float(law[draft[i]])
        h = [1.0, *ref.chain_acceptance(rows, drafts, draft)]
        w = ref.chain_inflow(rows, drafts, draft)
        for accepted in range(gamma + 1):
            wins = weight * h[accepted] * math.prod(1 - x for x in h[accepted + 1 :])
            extra = rows[accepted]
            if accepted < gamma:
                positive = ref.residual(extra, drafts[accepted], w[accepted], [draft[accepted]])
                extra = positive if float(positive.sum()) > 0 else extra
            extra = extra / extra.sum()
            for token in range(vocab):
                start = (*draft[:accepted], token)
                for rest in itertools.product(range(vocab), repeat=gamma - accepted):
                    sequence = start + rest
                    emitted[sequence] += wins * float(extra[token]) * target(sequence, len(start))
    for sequence, probability in emitted.items():
        assert probability == pytest.approx(target(sequence), abs=1e-14)


# --------------------------------------------------------------------------------------------------
# verify: one request at a time
# --------------------------------------------------------------------------------------------------


def verify(target, tokens, draft=None, u=None, **kwargs):
    """Verify one request of plain numbers: rows of probabilities, tokens, rows, uniforms."""
    kinds = {"draft_kinds": torch.int8, "top_k": torch.int64}
    noise = {} if u is None else {"uniforms": doubles(*u)[None]}
    if kwargs.get("rule") == "coupled":  # token 1 wins the races of this seed
        noise = {"seeds": ints(4), "positions": ints(0)}
    tensors = {
        name: torch.tensor([value], dtype=kinds.get(name))
        if name.removeprefix("draft_") in ("kinds", "temperature", "top_k", "top_p", "min_p")
        or name == "draft_lengths"
        else value
        for name, value in kwargs.items()
    }
    found = ref.verify(
        torch.stack([logits(*row) for row in target])[None],
        ints(*tokens)[None],
        None if draft is None else torch.stack([logits(*row) for row in draft])[None],
        **noise,
        **tensors,
    )
    return VerifyResult(*(output[0] for output in found))


def rounded(tensor, digits=6):
    return [None if math.isnan(x) else round(x, digits) for x in tensor.tolist()]


P, Q, BONUS = (0.3, 0.7), (0.8, 0.2), (0.5, 0.5)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_leviathan_example(rule):
    """A token with p .3 and q .8 is accepted with .375, else replaced from [p - q]+ (token 1)."""
    accepted = verify([P, BONUS], [0], [Q], [0.3749, 0.6], rule=rule)
    assert accepted.tokens.tolist() == [0, 1] and accepted.num_accepted == 1
    assert rounded(accepted.logprobs) == rounded(doubles(0.3, 0.5).log())
    rejected = verify([P, BONUS], [0], [Q], [0.3751, 0.0], rule=rule)
    assert rejected.tokens.tolist() == [1, -1] and rejected.num_accepted == 0
    assert rounded(rejected.logprobs) == [round(math.log(0.7), 6), None]
    certain = verify([P, BONUS], [1], [Q], [LAST, 0.0], rule=rule)
    assert certain.tokens.tolist() == [1, 0] and rounded(certain.accept_probs) == [1.0]
    for found in (accepted, rejected):
        assert rounded(found.accept_probs) == [0.375] and found.status == 0


STEPS = [
    # rule, options, tokens, uniforms, emitted, accept_probs
    # block on the published example: an accepted prefix may contain a failed coin.
    ("block", {}, (0, 0), (0.0, 0.24, 0.0), [0, 0, 0], [0.0, 0.25]),
    ("block", {}, (0, 0), (0.0, 0.26, 0.0), [1, -1, -1], [0.0, 0.25]),
    ("block", {}, (0, 1), (0.9, 0.9, 0.0), [0, 1, 0], [0.0, 1.0]),
    ("block", {}, (1, 0), (0.9, 0.4, 0.9), [1, 0, 1], [1.0, 0.5]),
    ("block", {}, (1, 0), (0.9, 0.6, 0.0), [1, 1, -1], [1.0, 0.5]),
    # token: stops at the first failure.
    ("token", {}, (0, 0), (0.49, 0.49, 0.9), [0, 0, 1], [0.5, 0.5]),
    ("token", {}, (0, 0), (0.49, 0.51, 0.0), [0, 1, -1], [0.5, 0.5]),
    ("token", {}, (0, 0), (0.51, 0.0, 0.0), [1, -1, -1], [0.5, None]),
    ("token", {"full_accept_probs": True}, (0, 0), (0.51, 0.0, 0.0), [1, -1, -1], [0.5, 0.5]),
    # Deterministic tokens: accepted with p, replaced from p without them.
    ("token", {"draft_kinds": [0, 0]}, (0, 0), (0.33, 0.34, 0.9), [0, 1, -1], [1 / 3, 1 / 3]),
    ("token", {"draft_kinds": [0, 1]}, (1, 0), (0.67, 0.0, 0.0), [0, -1, -1], [2 / 3, None]),
    ("block", {"draft_kinds": [0, 0]}, (0, 0), (0.9, 0.1, 0.0), [0, 0, 0], [0.25, 1 / 9]),
    ("block", {"draft_kinds": [0, 0]}, (0, 0), (0.24, 0.2, 0.0), [0, 1, -1], [0.25, 1 / 9]),
    # lenient: u l q < p.
    ("lenient", {"lenience": 0.6}, (0, 0), (0.83, 0.84, 0.0), [0, 1, -1], [5 / 6, 5 / 6]),
    ("lenient", {"lenience": 0.49}, (0, 0), (LAST, LAST, 0.4), [0, 0, 1], [1.0, 1.0]),
    # top_beta, tau = 1: p(0) is .69 nats below the best.
    ("top_beta", {"beta": 1}, (1, 0), None, [1, 1, -1], [1.0, 0.0]),
    ("top_beta", {"beta": 2}, (1, 0), None, [1, 0, 1], [1.0, 1.0]),
    ("top_beta", {"beta": 2, "tau": 0.69}, (0, 1), None, [1, -1, -1], [0.0, None]),
    ("top_beta", {"beta": 2, "tau": 0.70}, (0, 1), None, [0, 1, 1], [1.0, 1.0]),
    # typical: exp(-entropy) = .5291; delta .63 puts the threshold at .3333397.
    ("typical", {"epsilon": 1.0, "delta": 0.62}, (0, 1), (0, 0, 0.9), [0, 1, 1], [1.0, 1.0]),
    ("typical", {"epsilon": 1.0, "delta": 0.64}, (0, 1), (0, 0, 0.2), [0, -1, -1], [0.0, None]),
    ("typical", {"epsilon": 0.33, "delta": 9.0}, (0, 1), (0, 0, 0.2), [0, 1, 0], [1.0, 1.0]),
    # greedy and T = 0.
    ("greedy", {}, (1, 0), None, [1, 1, -1], [1.0, 0.0]),
    ("greedy", {}, (0, 1), None, [1, -1, -1], [0.0, None]),
    ("greedy", {"full_accept_probs": True}, (0, 1), None, [1, -1, -1], [0.0, 1.0]),
    ("greedy", {"temperature": 7.0}, (1, 1), None, [1, 1, 1], [1.0, 1.0]),
    ("token", {"temperature": 0.0}, (0, 1), (NAN, 5, -1), [1, -1, -1], [0.0, None]),
    ("block", {"temperature": 0.0}, (0, 1), (NAN, 5, -1), [1, -1, -1], [0.0, 0.0]),
    ("block", {"temperature": 0.0}, (1, 0), (NAN, 5, -1), [1, 1, -1], [1.0, 0.0]),
    ("typical", {"temperature": 0.0, "epsilon": 2.0, "delta": 9.0}, (1, 0), (0, 0, 0),
     [1, 1, -1], [1.0, 0.0]),
    # lenient at T = 0: p(0) is half of the best.
    ("lenient", {"temperature": 0.0, "lenience": 0.49}, (0, 0), (0, 0, 0), [0, 0, 1], [1.0, 1.0]),
    ("lenient", {"temperature": 0.0, "lenience": 0.51}, (1, 0), (0, 0, 0), [1, 1, -1], [1.0, 0.0]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "options", "tokens", "u", "emitted", "accept_probs"), STEPS)
def test_two_steps_by_hand(rule, options, tokens, u, emitted, accept_probs):
    """Target (1/3, 2/3) in every row, draft (2/3, 1/3)."""
    p, q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    found = verify([p, p, p], tokens, [q, q], u, rule=rule, **options)
    assert found.tokens.tolist() == emitted
    assert found.num_accepted.item() == sum(t >= 0 for t in emitted) - 1
    assert rounded(found.accept_probs) == [None if a is None else round(a, 6) for a in accept_probs]
    assert found.status == 0
    greedy = rule == "greedy" or options.get("temperature") == 0
    expected = [0.0 if greedy else math.log(p[t]) for t in emitted if t >= 0]
    assert rounded(found.logprobs, 5) == [
        *(round(x, 5) for x in expected),
        *[None] * (3 - len(expected)),
    ]


def test_raw_logprobs():
    for rule, options in (("block", {"temperature": 0.0}), ("greedy", {}), ("token", {"top_k": 1})):
        found = verify([P, P], [1], None, (0, 0), rule=rule, raw_logprobs=True, **options)
        assert found.tokens.tolist() == [1, 1]
        assert rounded(found.logprobs) == [round(math.log(0.7), 6)] * 2
    # top_beta knows no other: temperature and filters are ignored.
    found = verify([P, P], [0], rule="top_beta", temperature=0.0, top_k=1)
    assert rounded(found.logprobs) == [round(math.log(0.3), 6), round(math.log(0.7), 6)]


@pytest.mark.parametrize("rule", ["block", "token", "lenient", "typical"])
def test_probability_zero_is_never_accepted(rule):
    found = verify([(0.0, 1.0), BONUS], [0], [Q], (0.0, 0.0), rule=rule)
    assert found.tokens.tolist() == [1, -1] and found.accept_probs.tolist() == [0.0]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_empty_residual_draws_from_the_target(rule):
    # Token 2 was drafted, which the target does not have; on 0 and 1 the laws are equal to the last
    # bit, so that the rejection leaves nothing of p - q.
    target, draft = torch.zeros(1, 2, 2), torch.tensor([[[0.0, 0.0, -60.0]]])
    for u, token in ((0.4, 0), (0.6, 1)):
        coins = doubles([0.0, u])
        found = ref.verify(target, ints([2]), draft, uniforms=coins, rule=rule)
        assert found.tokens.tolist() == [[token, -1]] and found.status.tolist() == [0]


def test_typical_draws_failures_from_the_target():
    # From p itself, the failed token included.
    found = verify([P, BONUS], [0], [Q], (0.0, 0.2), rule="typical", epsilon=0.5, delta=9.0)
    assert found.tokens.tolist() == [0, -1] and found.num_accepted == 0


# --------------------------------------------------------------------------------------------------
# verify: what ends a draft, and status
# --------------------------------------------------------------------------------------------------

NOTHING = (0.0, 0.0)  # all -inf: no law

ENDS = [
    # target rows, tokens, draft rows, options, emitted (u = .1, .1, .9), status
    ((P, P, BONUS), (1, -1), (Q, Q), {}, [1, 1, -1], 0),
    ((P, P, BONUS), (-1, 5), (Q, Q), {}, [1, -1, -1], 0),
    ((P, P, BONUS), (1, -2), (Q, Q), {}, [1, 1, -1], 2),
    ((P, P, BONUS), (1, 2), (Q, Q), {}, [1, 1, -1], 2),
    ((P, P, BONUS), (1, 2), (Q, Q), {"draft_lengths": 1}, [1, 1, -1], 0),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_lengths": 0}, [1, -1, -1], 0),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_lengths": -1}, [1, -1, -1], 8),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_lengths": 3}, [1, 1, 1], 8),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_kinds": [1, 2]}, [1, 1, -1], 2),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_kinds": [-1, 1]}, [1, -1, -1], 2),
    # kind 1 and nothing it was sampled from.
    ((P, P, BONUS), (1, 1), None, {"draft_kinds": [0, 1]}, [1, 1, -1], 4),
    # No draft law, or q(x) = 0: the row is the bonus row.
    ((P, P, BONUS), (1, 0), (Q, NOTHING), {}, [1, 1, -1], 4),
    ((P, P, BONUS), (1, 0), (Q, (0.0, 1.0)), {}, [1, 1, -1], 4),
    ((P, P, BONUS), (1, 1), ((0.2, 0.8), Q), {"draft_top_k": 1}, [1, 1, -1], 4),
    ((P, P, BONUS), (0, -1), (Q, Q), {"draft_temperature": 0.0}, [0, 1, -1], 0),
    ((P, P, BONUS), (1, 0), (Q, Q), {"draft_temperature": 0.0}, [1, -1, -1], 4),
    ((P, P, BONUS), (1, 0), (Q, NOTHING), {"draft_kinds": [1, 0]}, [1, 0, 1], 0),
    # T = 0 reads no draft law.
    ((P, P, BONUS), (1, 0), (NOTHING, NOTHING), {"temperature": 0.0}, [1, 1, -1], 0),
    # No target law: the chain ends there; status only if that row decides.
    ((NOTHING, P, BONUS), (1, 1), (Q, Q), {}, [0, -1, -1], 1),
    ((P, NOTHING, BONUS), (1, 1), (Q, Q), {}, [1, 0, -1], 1),
    ((P, P, NOTHING), (1, 1), (Q, Q), {}, [1, 1, 0], 1),
    ((NOTHING, P, BONUS), (1, 1), (Q, Q), {"temperature": 0.0}, [0, -1, -1], 1),
    ((NOTHING, P, BONUS), (1, 1), (NOTHING, Q), {}, [0, -1, -1], 1),
    (((1.0, 0.0), NOTHING, BONUS), (1, 1), (Q, Q), {}, [0, -1, -1], 0),
    # Parameters out of range: T = 1, no filter.
    ((P, P, BONUS), (1, 1), (Q, Q), {"temperature": -1.0}, [1, 1, 1], 8),
    ((P, P, BONUS), (1, 1), (Q, Q), {"temperature": INF}, [1, 1, 1], 8),
    ((P, P, BONUS), (1, 1), (Q, Q), {"top_p": NAN, "draft_top_p": 1.0}, [1, 1, 1], 8),
    ((P, P, BONUS), (1, 1), (Q, Q), {"draft_min_p": 1.5}, [1, 1, 1], 8),
    ((P, P, BONUS), (1, 0), (Q, Q), {"temperature": 0.0, "min_p": 1.5}, [1, 1, -1], 8),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(("target", "tokens", "draft", "options", "emitted", "status"), ENDS)
def test_ends_of_a_draft(rule, target, tokens, draft, options, emitted, status):
    found = verify(target, tokens, draft, (0.1, 0.1, 0.9), rule=rule, **options)
    assert found.tokens.tolist() == emitted
    assert found.status.item() == status
    # Nothing is reported after the end of the draft, and no law has no log-probability.
    assert found.logprobs[found.num_accepted + 1 :].isnan().all()
    assert found.logprobs[found.num_accepted].isnan().item() == bool(status & 1)


def test_accept_probs_end_with_the_draft():
    found = verify([P, P, BONUS], [1, 0], [Q, NOTHING], (0.1, 0.1, 0.9))
    assert rounded(found.accept_probs) == [1.0, None]
    found = verify([P, NOTHING, BONUS], [0, 0], [Q, Q], (0.9, 0.1, 0.9))
    assert rounded(found.accept_probs) == [0.375, None] and found.status == 0
    # Without inflow nothing is looked at: neither the missing draft law nor the missing target law.
    found = verify([(1.0, 0.0), NOTHING, NOTHING], [1, 0], [Q, NOTHING], (0.1, 0.1, 0.9))
    assert found.accept_probs.tolist() == [0.0, 0.0] and found.status == 0


def test_what_was_not_reached_is_not_reported():
    row = ([P, P, BONUS], [0, 0], [Q, NOTHING], (0.9, 0.1, 0.9))
    assert verify(*row, rule="token").status == 0
    found = verify(*row, rule="token", full_accept_probs=True)
    assert found.status == 4 and rounded(found.accept_probs) == [0.375, None]
    assert found.tokens.tolist() == [1, -1, -1]
    assert verify(*row, rule="block").status == 4


@pytest.mark.parametrize("bad", [NAN, -1.0, 1.0, INF])
def test_uniforms_out_of_range_are_clamped(bad):
    kept = LAST if bad >= 1 else 0.0
    for rule in ("block", "token", "lenient"):
        for slot in (0, 2):
            u = [0.2, 0.3, 0.4]
            u[slot] = bad
            found = verify([P, P, BONUS], [0, -1], [Q, Q], u, rule=rule)
            u[slot] = kept
            expected = verify([P, P, BONUS], [0, -1], [Q, Q], u, rule=rule)
            assert found.status == 8 and found.tokens.tolist() == expected.tokens.tolist()
        # Slot 1 belongs to a column that is never read.
        assert verify([P, P, BONUS], [0, -1], [Q, Q], (0.2, bad, 0.4), rule=rule).status == 0
    for rule in ("greedy", "top_beta"):
        assert verify([P, BONUS], [0], [Q], (bad, bad), rule=rule, temperature=NAN).status == 0


# --------------------------------------------------------------------------------------------------
# verify: vocabularies, layouts, batches
# --------------------------------------------------------------------------------------------------


def test_smaller_draft_vocabulary():
    p, bonus = (0.3, 0.3, 0.4), (0.0, 0.0, 1.0)
    # Token 2 cannot have been sampled from q; the residual and the bonus reach it.
    for rule in ("block", "token"):
        found = verify([p, bonus], [2], [Q], (0.0, 0.9), rule=rule)
        assert found.tokens.tolist() == [2, -1] and found.status == 4 and found.num_accepted == 0
        found = verify([p, bonus], [0], [Q], (0.9, 0.9), rule=rule)  # [p - q]+ = 0, .1, .4
        assert found.tokens.tolist() == [2, -1] and found.status == 0
        found = verify([p, bonus], [0], [Q], (0.9, 0.19), rule=rule)
        assert found.tokens.tolist() == [1, -1]
        found = verify([p, bonus], [0], [Q], (0.1, 0.5), rule=rule)
        assert found.tokens.tolist() == [0, 2]


@pytest.mark.parametrize("rule", list(ref.RULES))
def test_larger_draft_vocabulary(rule):
    # Token 2 is a legal draft id to which the target gives nothing.
    found = verify([P, BONUS], [2], [(0.2, 0.2, 0.6)], (0.0, 0.9), rule=rule)
    assert found.tokens.tolist() == [1, -1] and found.status == 0
    assert found.accept_probs.tolist() == [0.0]
    found = verify([P, BONUS], [3], [(0.2, 0.2, 0.6)], (0.0, 0.9), rule=rule)
    assert found.status == 2


def random_inputs(batch=3, gamma=2, vocab=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, gamma + 1, vocab, generator=generator)
    draft = torch.randn(batch, gamma, vocab, generator=generator)
    tokens = torch.randint(vocab, (batch, gamma), generator=generator)
    u = torch.rand(batch, gamma + 1, generator=generator, dtype=torch.float64)
    return target, tokens, draft, u


def same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def noise_for(rule, u):
    if rule != "coupled":
        return {"uniforms": u}
    seeds = (u[:, 0] * 2**53).long()
    return {"seeds": seeds, "positions": seeds * 3}


@pytest.mark.parametrize("rule", list(ref.RULES))
def test_packed_rows(rule):
    target, tokens, draft, u = random_inputs()
    noise = noise_for(rule, u)
    expected = ref.verify(target, tokens, draft, **noise, rule=rule)
    shuffle = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    packed = torch.empty(9, 7)
    packed[shuffle] = target.flatten(0, 1)
    rows = {
        "target_rows": shuffle.view(3, 3).int(),
        "draft_rows": torch.arange(6).view(3, 2),
    }
    found = ref.verify(packed, tokens, draft.flatten(0, 1), **noise, rule=rule, **rows)
    same(found, expected)


def test_packed_row_that_does_not_exist():
    target, tokens, draft, u = random_inputs(batch=1)
    for row in (-1, 3):
        rows = torch.tensor([[row, 1, 2]])
        found = ref.verify(target[0], tokens, draft, uniforms=u, target_rows=rows)
        assert found.tokens.tolist() == [[0, -1, -1]] and found.status.tolist() == [1]
        rows = torch.tensor([[row, 1]])
        found = ref.verify(target, tokens, draft[0], uniforms=u, draft_rows=rows)
        assert found.num_accepted.tolist() == [0] and found.status.tolist() == [4]


def test_draft_probs_are_normalised_and_not_filtered():
    target, tokens, draft, u = random_inputs(batch=40)
    probs = draft.double().softmax(-1) * 5
    found = ref.verify(target, tokens, draft_probs=probs, uniforms=u, top_p=torch.full((40,), 0.8))
    off = {"draft_top_p": torch.ones(40)}
    expected = ref.verify(target, tokens, draft, uniforms=u, top_p=torch.full((40,), 0.8), **off)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.accept_probs, expected.accept_probs)


@pytest.mark.parametrize("row", [(0.5, NAN), (0.5, -0.1), (0.5, INF), (0.0, 0.0)], ids=str)
def test_draft_probs_without_a_law(row):
    found = ref.verify(
        torch.stack([logits(*P), logits(*BONUS)])[None],
        torch.tensor([[0]]),
        draft_probs=torch.tensor([[row]]),
        uniforms=doubles([0.0, 0.0]),
    )
    assert found.status.tolist() == [4] and found.num_accepted.tolist() == [0]


@pytest.mark.parametrize("rule", list(ref.RULES))
def test_requests_do_not_see_each_other(rule):
    target, tokens, draft, u = random_inputs(batch=5)
    temperature = torch.tensor([0.0, 1.0, 0.5, NAN, 2.0])
    lengths = ints(2, 1, 0, 2, 9)

    def run(b):
        return ref.verify(
            target[b],
            tokens[b],
            draft[b],
            **noise_for(rule, u[b]),
            temperature=temperature[b],
            draft_lengths=lengths[b],
            rule=rule,
        )

    together = run(slice(None))
    backwards = run(torch.arange(5).flip(0))
    same((t.flip(0) for t in backwards), together)
    for b in range(5):
        same((t[0] for t in run(slice(b, b + 1))), (t[b] for t in together))


def test_seeds_stand_for_uniforms():
    target, tokens, draft, _ = random_inputs()
    seeds, positions = ints(1, -2, 3), ints(4, 5, -6)
    coins = ref.uniforms(seeds, positions, 3, stream=7)
    found = ref.verify(target, tokens, draft, seeds=seeds, positions=positions, stream=7)
    same(found, ref.verify(target, tokens, draft, uniforms=coins))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(dtype):
    target, tokens, draft, u = random_inputs()
    target, draft = target.to(dtype), draft.to(dtype)
    found = ref.verify(target, tokens, draft, uniforms=u, top_p=torch.full((3,), 0.7))
    wide = ref.verify(
        target.float(), tokens, draft.float(), uniforms=u, top_p=torch.full((3,), 0.7)
    )
    same(found, wide)


def test_unknown_rule():
    target, tokens, draft, u = random_inputs()
    with pytest.raises(ValueError, match="rule must be one of block, token, greedy"):
        ref.verify(target, tokens, draft, uniforms=u, rule="best")
