"""Formulae in alpha, gamma and c: tables of the papers, searches over gamma, simulated streams."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

import specdec_ext
from specdec_ext import theory
from specdec_ext.testing import exact_law, filtered_law, toy_models

# Leviathan et al., table 1: alpha, gamma, operations, speed.
TABLE_1 = [
    (0.6, 2, "1.53", "1.96"),
    (0.7, 3, "1.58", "2.53"),
    (0.8, 2, "1.23", "2.44"),
    (0.8, 5, "1.63", "3.69"),
    (0.9, 2, "1.11", "2.71"),
    (0.9, 10, "1.60", "6.86"),
]
# Table 4: gamma, alpha, c, EXP.
TABLE_4 = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]
# A.5 at temperature 0, c = 0.015 and gamma = 8: alpha and factor of l = 1, 0.5, 0.3, 0.1.
LENIENT_AT_0 = [(0.75, "3.3"), (0.75, "3.3"), (0.8, "3.9"), (0.87, "4.9")]
ALPHAS = [0.0, 0.02, 0.3, 0.5, 0.77, 0.9, 0.99]
COSTS = [0.001, 0.01, 0.05, 0.2, 0.6, 1.0, 1.5]


# --- the papers' tables -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha, gamma, operations, speed", TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert f"{theory.operations_factor(alpha, gamma):.2f}" == operations
    assert f"{theory.walltime_factor(alpha, gamma, 0.0):.2f}" == speed


def test_table_4_within_the_rounding_of_what_is_printed():
    """alpha and c are printed to 0.01; taken as exact, 3 of the 12 rows round to another factor."""
    off = 0
    for gamma, alpha, c, printed in TABLE_4:
        low = theory.walltime_factor(alpha - 0.005, gamma, c + 0.005)
        high = theory.walltime_factor(alpha + 0.005, gamma, c - 0.005)
        assert low <= printed + 0.05 and high >= printed - 0.05, (gamma, alpha, c)
        off += f"{theory.walltime_factor(alpha, gamma, c):.1f}" != f"{printed:.1f}"
    assert off == 3


@pytest.mark.parametrize("alpha, factor", LENIENT_AT_0)
def test_lenience_factors_at_temperature_0(alpha, factor):
    assert f"{theory.walltime_factor(alpha, 8, 0.015):.1f}" == factor


def test_a_bigram_model():
    # Section 3.6: alpha 0.2 at no cost is 1.25 times faster with gamma = 3.
    assert f"{theory.walltime_factor(0.2, 3, 0.0):.2f}" == "1.25"


def test_the_reports_alpha_is_accepted_over_drafted():
    """Its table 2: the alpha of one pair changes with gamma, unless it is read as a share."""
    for shares in ({3: 0.79, 7: 0.55}, {3: 0.48, 7: 0.33}):
        short, long = (theory.alpha_of_share(share, gamma) for gamma, share in shares.items())
        assert abs(short - long) < 0.06 < 0.14 < shares[3] - shares[7]


# --- against simulation and definitions -------------------------------------------------------


def accepted(rng: random.Random, alpha: float, gamma: int) -> int:
    """Draw how many of ``gamma`` draft tokens a round accepts."""
    return next((n for n in range(gamma) if rng.random() >= alpha), gamma)


@pytest.mark.parametrize("alpha, gamma, c", [(0.7, 4, 0.1), (0.3, 2, 0.5), (0.9, 8, 0.02)])
def test_rounds_of_a_stream(alpha, gamma, c):
    """20,000 rounds: five standard errors of the tokens of each."""
    rng = random.Random(0)
    found = torch.tensor([accepted(rng, alpha, gamma) for _ in range(20_000)]).double()
    error = 5 * float(found.std()) / len(found) ** 0.5
    tokens = theory.expected_tokens(alpha, gamma)
    assert float(found.mean()) + 1 == pytest.approx(tokens, abs=error)
    assert float(found.mean()) / gamma == pytest.approx(
        theory.accepted_share(alpha, gamma), abs=error
    )
    assert theory.walltime_factor(alpha, gamma, c) == pytest.approx(tokens / (gamma * c + 1))
    assert theory.operations_factor(alpha, gamma, c) == pytest.approx(
        (gamma * c + gamma + 1) / tokens
    )
    assert theory.memory_access_factor(alpha, gamma) == pytest.approx(1 / tokens)


@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_outputs_of_a_given_length(tokens):
    alpha, gamma, c = 0.8, 4, 0.1
    rng, times = random.Random(1), []
    for _ in range(4000):
        left, time = tokens, 0.0
        while left > 0:
            drafted = min(gamma, left - 1)
            left -= accepted(rng, alpha, drafted) + 1
            time += 1 + c * drafted
        times.append(time)
    mean, spread = float(torch.tensor(times).mean()), float(torch.tensor(times).std())
    found = theory.walltime_factor(alpha, gamma, c, tokens)
    assert tokens / found == pytest.approx(mean, abs=5 * spread / 4000**0.5 + 1e-6)
    assert found <= tokens


def test_long_outputs_reach_theorem_8_and_short_ones_their_cap():
    long = theory.walltime_factor(0.8, 4, 0.1, 4000)
    assert long == pytest.approx(theory.walltime_factor(0.8, 4, 0.1), rel=1e-3)
    assert [theory.walltime_factor(1.0, 50, 0.0, n) for n in (1, 2, 7)] == [1.0, 2.0, 7.0]
    assert theory.walltime_factor(0.3, 5, 0.9, 1) == 1.0  # nothing is drafted for a last token


@pytest.mark.parametrize("alpha", [*ALPHAS, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_is_a_sum_of_powers(alpha, gamma):
    powers = math.fsum(alpha**i for i in range(gamma + 1))
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(powers, rel=1e-14)
    nearly_one = 1 - 1e-12  # 1 - alpha ** 6 has four digits left here
    assert theory.expected_tokens(nearly_one, 5) == pytest.approx(6, rel=1e-11)


def test_share_and_alpha_are_inverse():
    for alpha in [*ALPHAS, 1.0]:
        for gamma in (1, 3, 8):
            share = theory.accepted_share(alpha, gamma)
            assert theory.alpha_of_share(share, gamma) == pytest.approx(alpha, abs=1e-12)


# --- the best gamma ---------------------------------------------------------------------------


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_optimal_gamma(alpha, c):
    factors = [theory.walltime_factor(alpha, gamma, c) for gamma in range(400)]
    best = theory.optimal_gamma(alpha, c)
    assert best == factors.index(max(factors))
    assert (best > 0) == theory.improves(alpha, c) == (max(factors) > 1 + 1e-12)
    if best:
        assert max(factors) >= theory.walltime_bound(alpha, c) == pytest.approx(factors[1])
    assert theory.optimal_gamma(alpha, c, limit=3) == factors.index(max(factors[:4]))


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_closed_form_is_where_the_derivative_is_0(alpha, c):
    real = theory.optimal_gamma_real(alpha, c)
    gradient = theory.walltime_gradient(alpha, real, c)
    if real > 0:
        assert gradient == pytest.approx(0, abs=1e-9)
        around = [theory.walltime_gradient(alpha, real + step, c) for step in (-1e-3, 1e-3)]
        assert around[0] > 0 > around[1]
    else:
        assert gradient <= 0


@pytest.mark.parametrize("alpha", [*ALPHAS, 1.0])
def test_walltime_gradient_by_differences(alpha):
    for gamma, c in ((0.5, 0.1), (3.0, 0.02), (6.0, 0.0)):
        step = 1e-5
        ends = [theory.walltime_factor(alpha, gamma + s, c) for s in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert theory.walltime_gradient(alpha, gamma, c) == pytest.approx(slope, abs=1e-7)


def test_where_no_gamma_is_best():
    for alpha, c in ((0.5, 0.0), (1.0, 0.5)):
        assert theory.optimal_gamma_real(alpha, c) == math.inf
        with pytest.raises(ValueError, match="grows without end"):
            theory.optimal_gamma(alpha, c)
        assert theory.optimal_gamma(alpha, c, limit=12) == 12
    assert theory.optimal_gamma(0.0, 0.0) == theory.optimal_gamma(1.0, 1.0) == 0


def test_extreme_rates_lose_no_digits():
    # v = log u solves exp(v) - 1 - v = s; a tiny alpha or c is far below what exp(-k) can hold.
    for alpha, c in ((0.5, 1e-300), (1e-200, 1e-250), (1 - 1e-12, 0.5)):
        u = alpha ** -(theory.optimal_gamma_real(alpha, c) + 1)
        k = 1 - math.log(alpha) * (1 / c - 1)
        assert u - math.log(u) == pytest.approx(k, rel=1e-10)


def test_the_oracle_is_the_bound_of_every_gamma():
    rng, alpha, c = random.Random(2), 0.8, 0.1
    found = torch.tensor([accepted(rng, alpha, 10**9) for _ in range(20_000)]).double()
    error = 5 * float(found.std()) / len(found) ** 0.5
    assert float(found.mean()) + 1 == pytest.approx(theory.oracle_tokens(alpha), abs=error)
    rounds = theory.oracle_tokens(alpha) / (1 + c * (theory.oracle_tokens(alpha) - 1))
    assert theory.oracle_factor(alpha, c) == pytest.approx(rounds)
    assert theory.oracle_tokens(1.0) == theory.oracle_factor(1.0, 0.0) == math.inf
    gains = []
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9):
        for c in (0.01, 0.02, 0.05, 0.1):
            fixed = theory.walltime_factor(alpha, theory.optimal_gamma(alpha, c), c)
            gains.append(theory.oracle_factor(alpha, c) / fixed)
    # Section 3.5: for typical values up to about 60 % above the best fixed gamma.
    assert min(gains) > 1 and 1.5 < max(gains) < 1.65


# --- rows -------------------------------------------------------------------------------------

FILTERS = [{}, dict(temperature=0.6, top_k=3), dict(top_p=0.8, draft_temperature=1.5)]


def laws(filters, vocab=6, draft_vocab=6, count=40):
    """Return logits of both, and their laws in float64 by the slow reference."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(count, vocab, generator=generator) * 2
    draft = torch.randn(count, draft_vocab, generator=generator) * 2
    of_target = {k: v for k, v in filters.items() if not k.startswith("draft_")}
    of_draft = of_target | {k[6:]: v for k, v in filters.items() if k.startswith("draft_")}
    return target, draft, filtered_law(target, **of_target), filtered_law(draft, **of_draft)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rejection_sampling_by_its_definition(filters):
    target, draft, p, q = laws(filters)
    found = theory.rejection_sampling_acceptance(target, draft, **filters)
    m = torch.where(p > 0, p / q, 0.0).amax(1)
    torch.testing.assert_close(found, 1 / m, atol=1e-6, rtol=0)
    # The sum of q(x) p(x) / (M q(x)) over x is 1 / M, never above sum min(p, q).
    assert (found <= specdec_ext.acceptance(target, draft, **filters) + 1e-6).all()


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_lenient_acceptance_is_what_the_rule_accepts(filters, lenience):
    target, draft = toy_models(3, 5, 1)
    law = exact_law(
        specdec_ext.verify, target, draft, rule="lenient", lenience=lenience, bits=30, **filters
    )
    found = theory.lenient_acceptance(target[0][None], draft[0][None], lenience=lenience, **filters)
    assert float(found) == pytest.approx(law.mean_accepted, abs=1e-6)


def test_lenience_1_is_acceptance_and_streams_take_it():
    target, draft, _, _ = laws({})
    strict = theory.lenient_acceptance(target, draft, lenience=1.0)
    torch.testing.assert_close(strict.float(), specdec_ext.acceptance(target, draft))
    rate = functools.partial(theory.lenient_acceptance, lenience=0.3)
    found = theory.acceptance_rate([(target, draft)], rate=rate, top_k=4)
    expected = theory.lenient_acceptance(target, draft, lenience=0.3, top_k=4)
    assert found.mean == pytest.approx(float(expected.mean())) and found.mean > float(strict.mean())


@pytest.mark.parametrize("draft_vocab", [4, 9])
def test_vocabularies_of_different_size(draft_vocab):
    target, draft, p, q = laws({}, draft_vocab=draft_vocab)
    both = min(draft_vocab, 6)
    found = theory.lenient_acceptance(target, draft, lenience=0.5)
    expected = torch.minimum(2 * p[:, :both], q[:, :both]).sum(1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    worst = theory.rejection_sampling_acceptance(target, draft)
    expected = (q[:, :6] / p).amin(1) if draft_vocab > 6 else torch.zeros(40).double()
    torch.testing.assert_close(worst, expected.clamp(max=1), atol=1e-6, rtol=0)


def test_rows_at_temperature_0_and_rows_without_a_law():
    target = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, math.nan, 0.0]])
    draft = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = theory.rejection_sampling_acceptance(target, draft, temperature=0.0)
    assert found[:2].tolist() == [1.0, 0.0] and found[2].isnan()
    assert theory.lenient_acceptance(target, draft, lenience=0.5)[2].isnan()


# --- latency, and what is refused -------------------------------------------------------------


def test_latency():
    plain = theory.latency(120, 1, 0.0, 10.0)
    assert plain == 1200
    # Principle I: inversely proportional to the tokens a round. The factor is theorem 8's.
    alpha, gamma, c = 0.8, 5, 0.1
    fast = theory.latency(120, theory.expected_tokens(alpha, gamma), gamma * c * 10.0, 10.0)
    assert plain / fast == pytest.approx(theory.walltime_factor(alpha, gamma, c))


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens(1.1, 2),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.walltime_factor(0.5, 1, -0.1),
        lambda: theory.walltime_factor(0.5, 1, 0.1, 0),
        lambda: theory.walltime_factor(0.5, 1.5, 0.1, 3),
        lambda: theory.operations_factor(0.5, 1, -0.1),
        lambda: theory.memory_access_factor(-0.5, 1),
        lambda: theory.walltime_bound(2.0, 0.1),
        lambda: theory.improves(0.5, -1.0),
        lambda: theory.walltime_gradient(0.5, -1.0, 0.1),
        lambda: theory.optimal_gamma_real(-0.1, 0.1),
        lambda: theory.oracle_tokens(1.5),
        lambda: theory.oracle_factor(0.5, -1.0),
        lambda: theory.accepted_share(0.5, 0),
        lambda: theory.alpha_of_share(1.5, 2),
        lambda: theory.latency(10, 0.5, 1.0, 1.0),
        lambda: theory.lenient_acceptance(torch.zeros(1, 2), torch.zeros(1, 2), lenience=0.0),
        lambda: theory.lenient_acceptance(
            torch.zeros(2, 2), torch.zeros(2, 2), lenience=0.5, temperature=[1.0, 0.0]
        ),
    ],
)
def test_arguments_out_of_range(call):
    with pytest.raises(ValueError, match=": .*(must be|unfiltered)"):
        call()


def test_what_is_not_a_filter_is_refused():
    row = torch.zeros(1, 2)
    with pytest.raises(TypeError, match="draft_token_ids: not taken here"):
        theory.lenient_acceptance(row, row, lenience=0.5, draft_token_ids=torch.tensor([1, 0]))


def test_nothing_tested_gives_nothing_predicted():
    assert math.isnan(theory.walltime_factor(math.nan, 3, 0.1))
