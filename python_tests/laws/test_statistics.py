"""Monte Carlo on top of the exact laws: seeds, positions and rounds, end to end.

test_law.py proves what one call does with given uniforms. Here the uniforms come from Philox, the
draft tokens from `sample`, and calls follow each other as in a decoding loop.

The bound holds with probability 1 - 1e-9 whatever the law (`tv_bound`). Power: a law off by twice
the bound in total variation (1 to 3 %) is caught but for a probability of 1e-9. The negative
control shows one.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64

from specdec_ext.testing import filtered_law, tv_bound

pytestmark = pytest.mark.thorough

V, GAMMA, LENGTH = 3, 2, 4
N = 200_000


def markov(seed, noise):
    """Logits of a target and a draft that look at the last token only, ``[V, V]`` each."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(V, V, generator=generator) * 1.5
    return target, target + noise * torch.randn(V, V, generator=generator)


def decode(operator, target, draft, rule, advance=True, temperature=1.0):
    """N sequences of at least LENGTH tokens after token 0, by rounds of draft and verify."""
    seeds = torch.arange(N) * 7919 + 13
    position = torch.zeros(N, dtype=torch.int64)
    written = torch.zeros(N, dtype=torch.int64)
    tokens = torch.full((N, LENGTH + GAMMA + 1), -1)
    last = torch.zeros(N, dtype=torch.int64)
    temperatures = torch.full((N,), temperature)
    while bool((written < LENGTH).any()):
        rows = [last]
        for i in range(GAMMA):
            drawn = operator.sample(
                draft[rows[-1]],
                seeds=seeds,
                positions=position,
                draft_index=i,
                domain=3 if rule == "coupled" else 2,
                temperature=temperatures,
            )
            rows.append(drawn.tokens)
        prefix = torch.stack(rows, 1)
        result = operator.verify(
            target[prefix],
            prefix[:, 1:],
            draft[prefix[:, :-1]],
            seeds=seeds,
            positions=position,
            temperature=temperatures,
            rule=rule,
        )
        assert int(result.status.max()) == 0
        emitted = result.num_accepted.long() + 1
        unfinished = written < LENGTH
        for k in range(GAMMA + 1):
            put = unfinished & (k < emitted)
            tokens[put, (written + k)[put]] = result.tokens[put, k]
        last = result.tokens.gather(1, emitted[:, None] - 1)[:, 0]
        written += emitted * unfinished
        position += emitted if advance else 0
    return tokens[:, :LENGTH]


def distance(tokens, target):
    """TV between the empirical law of the sequences and the target's."""
    law = filtered_law(target)
    expected = law[0]
    for _ in range(LENGTH - 1):
        expected = expected[..., None] * law
    code = (tokens * torch.tensor([V**k for k in range(LENGTH - 1, -1, -1)])).sum(1)
    found = torch.bincount(code, minlength=V**LENGTH).double() / len(tokens)
    return 0.5 * float((found - expected.flatten()).abs().sum())


BOUND = tv_bound(N, V**LENGTH)


@pytest.mark.parametrize(
    "rule, seed", [("block", 0), ("block", 1), ("token", 0), ("token", 1), ("coupled", 0)]
)
def test_sequences_of_rounds(operator, rule, seed):
    target, draft = markov(seed, noise=1.5)
    assert distance(decode(operator, target, draft, rule), target) < BOUND


@pytest.mark.parametrize("rule", ["block", "token"])
def test_positions_that_stand_still(operator, rule):
    # The control: every round uses the coins and the draft noise of the one before.
    target, draft = markov(0, noise=1.5)
    tokens = decode(operator, target, draft, rule, advance=False)
    assert distance(tokens, target) > 2 * BOUND


def test_the_bound_is_small():
    assert BOUND < 0.014


def test_sample_draws_the_law(operator):
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, 2.0]])
    draws = 1_000_000
    tokens = operator.sample(
        logits.expand(draws, -1),
        seeds=torch.arange(draws),
        positions=torch.zeros(draws, dtype=torch.int64),
    ).tokens
    found = torch.bincount(tokens, minlength=5).double() / draws
    tv = 0.5 * float((found - filtered_law(logits[0])).abs().sum())
    assert tv < tv_bound(draws, 5)


# ---- races: the rule "coupled" (Daliri, Musco, Suresh, arXiv 2408.07978) ------------------------

P = f64([0.35, 0.05, 0.2, 0.25, 0.1, 0.05])
Q = f64([0.1, 0.3, 0.25, 0.05, 0.2, 0.1])


def race(operator, probs, domain=3, stream=0):
    return operator.sample(
        probs.log().float().expand(N, -1), seeds=torch.arange(N) * 7919, domain=domain,
        positions=torch.arange(N) % 97, stream=stream,
    ).tokens  # fmt: skip


def match_probability(p, q):
    """Sum over j of 1 / sum_i max(p_i / p_j, q_i / q_j)."""
    ratio = torch.maximum(p[:, None] / p, q[:, None] / q)  # [i, j]
    return float((1 / ratio.sum(0)).sum())


def deviation(draws, alpha=1e-9):
    """Hoeffding's bound on a frequency's error, but for a probability of 1e-9."""
    return math.sqrt(math.log(2 / alpha) / (2 * draws))


def test_marginal_law_of_a_race(operator):
    # Power: 200,000 draws find a law that is off by 1.7 % in total variation but for 1e-9.
    bound = tv_bound(N, len(P))
    assert bound < 0.0085
    for probs in (P, Q):
        found = torch.bincount(race(operator, probs), minlength=6).double() / N
        assert 0.5 * float((found - probs).abs().sum()) < bound


def test_how_often_two_races_agree(operator):
    # Power: the error of the frequency is below .0074, and independent draws agree .2 less often.
    expected, tv = match_probability(P, Q), 0.5 * float((P - Q).abs().sum())
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv
    x = race(operator, P)
    same = float((x == race(operator, Q)).double().mean())
    assert abs(same - expected) < deviation(N)
    # The controls: noise of another stream, and the same law drawn in another domain.
    for other in (race(operator, Q, stream=1), race(operator, Q, domain=2)):
        unshared = float((x == other).double().mean())
        assert abs(unshared - float((P * Q).sum())) < deviation(N)
        assert expected - unshared > 0.2


def test_noise_of_neighbours_is_independent(operator):
    # Tokens 2k and 2k + 1 share a counter: words 0 and 1, or 2 and 3. Joint law of two positions.
    logits = torch.zeros(N, 2)
    noise = dict(seeds=torch.arange(N), domain=3)
    zero = torch.zeros(N, dtype=torch.int64)
    first = operator.sample(logits, **noise, positions=zero).tokens
    second = operator.sample(logits, **noise, positions=zero, draft_index=1).tokens
    found = torch.bincount(2 * first + second, minlength=4).double() / N
    assert 0.5 * float((found - 0.25).abs().sum()) < tv_bound(N, 4)
