"""The arithmetic of the papers' tables: against closed forms and enumeration, wrong ones found."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from conftest import ROOT

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench_generate import Run  # noqa: E402
from tables import costs, decode, expected, paper, standardised, table5  # noqa: E402
from tables.forced import Batch, Texts  # noqa: E402
from tables.independence import autocorrelation  # noqa: E402
from tables.ngrams import Ngrams  # noqa: E402
from tables.sharpness import largest  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext import theory  # noqa: E402
from specdec_ext.decoding import NgramDrafter, Requests, Statistics  # noqa: E402

# ---- equation 1 and Theorem 3.8 ------------------------------------------------------------------


def rounds_by_enumeration(alpha, gamma, length):
    """Expected rounds, over all outcomes of the coins of the first rounds."""
    if length <= 0:
        return 0.0
    total = 1.0
    for coins in itertools.product((True, False), repeat=gamma):
        weight = math.prod(alpha if coin else 1 - alpha for coin in coins)
        accepted = (*coins, False).index(False)
        total += weight * rounds_by_enumeration(alpha, gamma, length - accepted - 1)
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("gamma", [1, 3])
def test_rounds_of_a_text(alpha, gamma):
    for length in (1, 2, 5):
        wanted = rounds_by_enumeration(alpha, gamma, length)
        assert expected.expected_rounds(alpha, gamma, length) == pytest.approx(wanted)
    assert expected.expected_rounds(0.0, gamma, 9) == 9
    assert expected.expected_rounds(1.0, gamma, 9) == math.ceil(9 / (gamma + 1))
    # Long texts: equation 1 a round.
    longer = expected.expected_rounds(alpha, gamma, 2000) - expected.expected_rounds(
        alpha, gamma, 1000
    )
    assert 1000 / longer == pytest.approx(theory.expected_tokens(alpha, gamma), rel=1e-3)


def test_corrections_of_theorem_8():
    assert expected.corrected_factor(0.5, 2, 0.25, 1.0) == theory.walltime_factor(0.5, 2, 0.25)
    assert expected.corrected_factor(0.5, 2, 0.25, 1.5) == pytest.approx(1.75 / 2.0)
    # One token each: a draft is of no use, and costs what it costs.
    assert expected.factor_of_lengths(0.9, 4, 0.1, 1.2, [1, 1, 1]) == pytest.approx(1 / 1.6)
    long = expected.factor_of_lengths(0.6, 4, 0.1, 1.2, [4000])
    assert long == pytest.approx(expected.corrected_factor(0.6, 4, 0.1, 1.2), rel=1e-3)


def drawn_rounds(alpha, gamma, sentences, seed):
    """Runs with independent coins, as `way` returns them."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(sentences):
        counts = Statistics(gamma, new_tokens=[0])
        for _ in range(40):
            coins = (torch.rand(gamma, generator=generator) < alpha).tolist()
            accepted = [*coins, False].index(False)
            counts.record(
                0, drafted=gamma, accepted=accepted, emitted=accepted + 1,
                rejected=accepted < gamma,
            )  # fmt: skip
        runs.append(Run([[0] * counts.emitted], 1.0, counts))
    return runs


@pytest.mark.parametrize(("alpha", "gamma"), [(0.62, 3), (0.8, 4)])
def test_measured_tokens_a_call_are_equation_1_and_a_wrong_formula_is_found(alpha, gamma):
    runs = drawn_rounds(alpha, gamma, 400, seed=3)
    tested = decode.accepted_of_tested(runs, 400)
    assert abs(tested.mean - alpha) < 4 * tested.standard_error
    found = decode.tokens_a_call(runs, 400)
    assert abs(found.mean - theory.expected_tokens(alpha, gamma)) < 4 * found.standard_error
    one_less = (1 - alpha**gamma) / (1 - alpha)
    assert abs(found.mean - one_less) > 4 * found.standard_error
    share = decode.accepted_of_drafted(runs, 400)
    assert abs(share.mean - theory.accepted_share(alpha, gamma)) < 4 * share.standard_error
    # The two conventions of alpha are two numbers.
    assert abs(share.mean - alpha) > 10 * share.standard_error


def test_bound_of_corollary_9():
    for alpha, c in ((0.62, 0.02), (0.5, 0.25), (0.9, 0.11)):
        best = theory.optimal_gamma(alpha, c)
        assert expected.corrected_factor(alpha, best, c, 1.0) >= (1 + alpha) / (1 + c)
        assert expected.corrected_factor(alpha, 1, c, 1.0) == pytest.approx((1 + alpha) / (1 + c))


def test_the_papers_own_tables_agree_with_its_formulas():
    for alpha, gamma, operations, speed in paper.OPERATIONS:
        assert theory.operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.0051)
        assert theory.expected_tokens(alpha, gamma) == pytest.approx(speed, abs=0.0051)
    for row in paper.SPEEDS.values():  # of figures rounded to two digits
        found = theory.walltime_factor(row.alpha, row.gamma, row.c)
        assert found == pytest.approx(row.expected, abs=0.15)


def test_costs_are_phases_by_calls():
    def run(rounds, draft_calls, **seconds):
        counts = Statistics(4, rounds=rounds, draft_calls=draft_calls)
        counts.seconds |= seconds
        return Run([[]], 1.0, counts)

    plain = [run(10, 0, target=1.0, verify=0.1, rest=0.3), run(10, 0, target=3.0)]
    own = [run(5, 20, draft=1.0, target=2.0, verify=0.5), run(5, 20, draft=1.0, target=1.0)]
    found = costs.clocked(plain, own)  # the unit is .2 s
    assert found == pytest.approx((0.05 / 0.2, 0.3 / 0.2, 0.05 / 0.2))
    assert costs.plain_rest(plain) == pytest.approx(0.1)


# ---- laws ----------------------------------------------------------------------------------------


def random_laws(rows, size, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(2, rows, size, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_emitted_law_is_that_of_the_operator(lenience):
    p, q = random_laws(3, 5, seed=1)
    found = table5.emitted_law(p, q, lenience)
    assert found.sum(-1) == pytest.approx(torch.ones(3))
    # By enumeration: the operator's acceptance of each token, then the residual.
    for row in range(3):
        wanted = torch.zeros(5, dtype=torch.float64)
        residual = (p[row] - q[row]).clamp(min=0)
        residual /= residual.sum()
        for x in range(5):
            h = specdec_ext.verify(
                p[row].log().float().expand(1, 2, 5), torch.tensor([[x]]),
                q[row].log().float().expand(1, 1, 5), rule="lenient", lenience=lenience,
                uniforms=torch.zeros(1, 2, dtype=torch.float64), full_accept_probs=True,
            ).accept_probs.item()  # fmt: skip
            wanted[x] += q[row, x] * h
            wanted += q[row, x] * (1 - h) * residual
        assert found[row] == pytest.approx(wanted, abs=1e-5)
    assert (found <= p / lenience + 1e-12).all()
    if lenience == 1.0:
        assert found == pytest.approx(p)
    else:
        assert (found - p).abs().max() > 1e-3
    pair = table5.emission(p.log(), q.log(), lenience=lenience, temperature=1.0)
    assert pair[:, 0] == pytest.approx((found - p).abs().sum(-1) / 2)
    assert pair[:, 1].max() <= 1 + 1e-9


def test_lenient_greedy_acceptance():
    p = torch.tensor([[0.5, 0.3, 0.2]] * 3).log()
    q = torch.eye(3)  # proposes each token once
    for lenience, wanted in ((1.0, [1, 0, 0]), (0.5, [1, 1, 0]), (0.3, [1, 1, 1])):
        found = table5.greedy_acceptance(p, q, lenience=lenience)
        assert found.tolist() == wanted


def test_laws_of_drafts_adjusted_otherwise():
    p, q = random_laws(4, 6, seed=2).float().log()
    batch = Batch(torch.empty(0), torch.empty(0), torch.zeros(2, 2), [2, 1], p.reshape(2, 2, 6))
    texts = Texts([batch], [[0, 0], [0]])
    records = standardised.measured(texts, "d", lambda batch: q.reshape(2, 2, 6), 1.0)
    alike, kept = torch.minimum(p.exp(), q.exp()).sum(-1), [0, 1, 2]  # the last place is padding
    for record in records:
        if record["draft_top_p"] == 1:
            law = (q / record["draft_temperature"]).softmax(-1)
            wanted = torch.minimum(p.exp(), law).sum(-1)
            assert record["alpha"] == pytest.approx(float(wanted[kept].mean()), abs=1e-6)
            gain = float((wanted - alike)[kept].mean())
            assert record["gain"] == pytest.approx(gain, abs=1e-6)
    (same,) = [record for record in records if standardised.is_same(record)]
    assert (same["gain"], same["gain_se"]) == (0.0, 0.0)
    assert largest(p, q, temperature=1.0) == pytest.approx(p.exp().amax(-1), abs=1e-6)
    cold = (p / 0.5).softmax(-1).amax(-1)
    assert largest(p, q, temperature=0.5) == pytest.approx(cold, abs=1e-6)


def test_ngram_rows_are_those_of_the_drafter():
    texts = [[3, 4, 3, 5, 1], [3, 3, 4, 1], [5, 1]]
    counts = Ngrams(texts, start=0, vocabulary=7)
    contexts = torch.tensor([[3, 4, 5, 6]])
    batch = Batch(torch.empty(0), torch.empty(0), contexts, [4], torch.empty(0))
    for order, rows in ((1, counts.unigram(batch)), (2, counts.bigram(batch))):
        assert rows.exp().sum(-1) == pytest.approx(torch.ones(1, 4))
        drafter = NgramDrafter(7, order, texts=texts, learn=False)
        for place, context in enumerate(contexts[0].tolist()):
            ids, ends = torch.tensor([[context]]), torch.tensor([9])
            seeds = torch.tensor([0])
            drafter.start(Requests(ids, None, ends, 0, seeds, {}, greedy=False, needs_law=True))
            (row,) = drafter.propose(1, positions=torch.tensor([1])).logits[0]
            assert rows[0, place] == pytest.approx(row, abs=1e-5)
    # Two of three texts begin with token 3.
    begin = Batch(torch.empty(0), torch.empty(0), torch.tensor([[0]]), [1], torch.empty(0))
    assert counts.bigram(begin)[0, 0, 3].exp() == pytest.approx((2 + counts.alone[3]) / 4)


# ---- independence --------------------------------------------------------------------------------


def markov(texts, length, stay, seed):
    """Values 0 and 1 that stay with a probability: the correlation at lag k is (2 stay - 1)^k."""
    generator = torch.Generator().manual_seed(seed)
    flips = torch.rand(texts, length, generator=generator) >= stay
    first = torch.rand(texts, 1, generator=generator) < 0.5
    return list(((flips.cumsum(1) + first) % 2).double())


def test_autocorrelation():
    for lag in (1, 2, 3):
        found = autocorrelation(markov(300, 40, 0.8, seed=1), lag)
        assert abs(found.mean - 0.6**lag) < 4 * found.standard_error
        assert abs(found.mean) > 4 * found.standard_error  # dependence is found
        assert found.standard_error < 0.05
        free = autocorrelation(markov(300, 40, 0.5, seed=2), lag)
        assert abs(free.mean) < 4 * free.standard_error
    # By hand: deviations -1, 1, 1, -1 and 1, -1.
    by_hand = autocorrelation([torch.tensor([0.0, 2, 2, 0]), torch.tensor([2.0, 0])], 1)
    assert by_hand.mean == pytest.approx((-1 + 1 - 1 - 1) / 4)
    # Pairs never span two texts.
    assert math.isnan(autocorrelation([torch.tensor([0.0, 1.0])] * 3, 2).mean)
