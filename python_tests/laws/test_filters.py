"""Temperature, top-k, top-p, min-p: literal sets, ties, order, and a law found by sorting."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

from specdec_ext.testing import filtered_law, make_case

LAW = [0.05, 0.4, 0.1, 0.3, 0.1, 0.05]  # by rank: 1, 3, then 2 = 4, then 0 = 5


def kept(backend, probs, **params):
    """Tokens that stay, from the cutoff of row_law."""
    logits = log_probs([probs])
    tensors = {
        name: torch.tensor([value], dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in params.items()
    }
    law = backend.row_law(logits, **tensors)
    return (logits[0] >= law.cutoff[0]).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "params, expected",
    [
        (dict(), [0, 1, 2, 3, 4, 5]),
        # top_k: all ties at the threshold stay.
        (dict(top_k=1), [1]),
        (dict(top_k=2), [1, 3]),
        (dict(top_k=3), [1, 2, 3, 4]),
        (dict(top_k=4), [1, 2, 3, 4]),
        (dict(top_k=5), [0, 1, 2, 3, 4, 5]),
        (dict(top_k=0), [0, 1, 2, 3, 4, 5]),
        (dict(top_k=-3), [0, 1, 2, 3, 4, 5]),
        (dict(top_k=6), [0, 1, 2, 3, 4, 5]),
        (dict(top_k=2**40), [0, 1, 2, 3, 4, 5]),
        # top_p: x stays iff the mass strictly more likely is < top_p; masses above: 0, .4, .7, .9.
        (dict(top_p=0.0), [1]),
        (dict(top_p=0.39), [1]),
        (dict(top_p=0.41), [1, 3]),
        (dict(top_p=0.69), [1, 3]),
        (dict(top_p=0.71), [1, 2, 3, 4]),
        (dict(top_p=0.89), [1, 2, 3, 4]),
        (dict(top_p=0.91), [0, 1, 2, 3, 4, 5]),
        (dict(top_p=1.0), [0, 1, 2, 3, 4, 5]),
        (dict(top_p=7.0), [0, 1, 2, 3, 4, 5]),
        # min_p: p(x) >= min_p * .4.
        (dict(min_p=0.0), [0, 1, 2, 3, 4, 5]),
        (dict(min_p=-2.0), [0, 1, 2, 3, 4, 5]),
        (dict(min_p=0.12), [0, 1, 2, 3, 4, 5]),
        (dict(min_p=0.13), [1, 2, 3, 4]),
        (dict(min_p=0.26), [1, 3]),
        (dict(min_p=0.76), [1]),
        (dict(min_p=1.0), [1]),
        # top_p works on the top-k set: above 2 and 4 there is .7 / .9 = .778, not .7.
        (dict(top_k=3, top_p=0.75), [1, 3]),
        (dict(top_k=3, top_p=0.79), [1, 2, 3, 4]),
        (dict(top_k=2, top_p=0.56), [1]),  # .4 / .7 = .571 lies above token 3
        (dict(top_k=2, top_p=0.58), [1, 3]),
        # The strictest wins.
        (dict(top_k=4, top_p=0.95, min_p=0.5), [1, 3]),
        (dict(top_k=1, top_p=0.95, min_p=0.01), [1]),
        # Temperature acts before top_p and min_p: at T = 1/2 the law is (.16, .09, .01, ...) / .275
        # with masses above of 0, .582, .909 ...
        (dict(temperature=0.5, top_p=0.57), [1]),
        (dict(temperature=0.5, top_p=0.6), [1, 3]),
        (dict(temperature=0.5, min_p=0.5), [1, 3]),
        (dict(temperature=0.5, min_p=0.6), [1]),
        # ... and not before top_k.
        (dict(temperature=5.0, top_k=2), [1, 3]),
        (dict(temperature=0.0, top_k=3, top_p=0.9), [1]),
    ],
    ids=str,
)
def test_kept_tokens(backend, params, expected):
    assert kept(backend, LAW, **params) == expected


@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.24, 0.5, 0.99])
def test_ties_at_the_top_stay(backend, top_p):
    assert kept(backend, [0.25, 0.25, 0.25, 0.25], top_p=top_p) == [0, 1, 2, 3]
    assert kept(backend, [0.25, 0.25, 0.25, 0.25], top_k=1, min_p=1.0) == [0, 1, 2, 3]


def test_masked_tokens_are_never_kept(backend):
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    u = f64([1 - 2**-53])
    for params in (dict(top_k=3), dict(top_p=0.9999), dict(min_p=1e-30)):
        tensors = {
            k: torch.tensor([v], dtype=torch.int64 if k == "top_k" else torch.float32)
            for k, v in params.items()
        }
        assert backend.sample(logits, u, **tensors).tokens.tolist() == [2]


def neighbours(row, params, slack=1e-5):
    """Kept sets that rounding may give: top_p itself, and a hair to either side."""
    sets = []
    for shift in (0.0, -slack, slack):
        top_p = params["top_p"] + (shift if 0 < params["top_p"] < 1 else 0)
        sets.append(filtered_law(row, **{**params, "top_p": top_p}) > 0)
    return sets


@pytest.mark.parametrize("vocab", [2, 17, 300, 4097, 12_289])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cutoffs_against_sorting(backend, vocab, dtype):
    # bfloat16 rows are full of ties.
    for seed in range(3):
        inputs = make_case(seed, batch=16, gamma=0, vocab=vocab, greedy_rows=False).inputs
        logits = inputs["target_logits"][:, 0].to(dtype)
        params = {name: inputs[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        law = backend.row_law(logits, **params)
        stays = (logits.float() >= law.cutoff[:, None]) & (logits > -math.inf)
        for r in range(16):
            scalars = {name: value[r].item() for name, value in params.items()}
            assert any(torch.equal(stays[r], option) for option in neighbours(logits[r], scalars))


def test_top_k_against_sorting_is_exact(backend):
    logits = (torch.randn(32, 1000, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    for dtype in (torch.int32, torch.int64):
        top_k = torch.arange(1, 33, dtype=dtype) * 31
        law = backend.row_law(logits, top_k=top_k)
        ordered = logits.float().sort(dim=1, descending=True).values
        assert torch.equal(law.cutoff, ordered[torch.arange(32), top_k.long() - 1])


def crowded_rows():
    """Rows where thousands of logits tie, or fall within a hair of each other."""
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(9001, generator=generator) * 1e-4
    peak = near.clone()
    peak[7] = 2.0
    ties = torch.zeros(9001)
    ties[4090:4100] = 3.0
    coarse = (torch.randn(9001, generator=generator) * 2).bfloat16().float()
    return {"flat": torch.zeros(9001), "ties": ties, "near": near, "peak": peak, "coarse": coarse}


@pytest.mark.parametrize("row", crowded_rows())
@pytest.mark.parametrize(
    "params",
    [
        *(dict(top_k=k) for k in (1, 5, 11, 512, 513, 2048, 2049, 9000)),
        *(dict(top_p=p) for p in (0.0, 0.1, 0.5, 0.93, 0.9999)),
        dict(top_k=100, top_p=0.5),
        dict(top_k=3000, top_p=0.5, min_p=0.2),
        dict(top_k=11, top_p=0.99, min_p=0.9999),
        dict(top_p=0.5, temperature=1e30),
        dict(top_p=0.5, temperature=1e-5),
    ],
    ids=str,
)
def test_crowded_rows_against_sorting(backend, row, params):
    # Selection among a few candidates must notice when there are too many of them.
    logits = crowded_rows()[row]
    tensors = {
        name: torch.tensor([value], dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in params.items()
    }
    law = backend.row_law(logits[None], **tensors)
    stays = logits >= law.cutoff[0]
    options = neighbours(logits, {"top_p": 1.0, **params})
    assert any(torch.equal(stays, option) for option in options)
    assert float(law.log_z) == pytest.approx(
        float(
            logits[stays].double().sub(logits.max()).div(params.get("temperature", 1)).logsumexp(0)
        ),
        abs=2e-6,
    )


def test_negative_zero_ties_with_zero(backend):
    logits = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]])
    law = backend.row_law(logits, top_k=torch.tensor([1, 1]))
    assert law.argmax.tolist() == [0, 0]
    assert law.log_z.exp().tolist() == pytest.approx([2, 2])


@pytest.mark.parametrize("rule", ["block", "token"])
def test_parameters_are_per_request(backend, rule):
    # Every request alone with its scalar, and all in one call.
    case = make_case(3, batch=12, gamma=2, vocab=9, rule=rule, draft_filters=True)
    together = backend.run(case)
    for b in range(12):
        alone = backend.run(case.select([b]))
        assert torch.equal(alone.tokens[0], together.tokens[b])


def test_draft_filters_default_to_the_targets(backend):
    case = make_case(4, batch=12, gamma=2, vocab=9)
    names = ("temperature", "top_k", "top_p", "min_p")
    explicit = case.replace(**{f"draft_{name}": case.inputs[name] for name in names})
    for got, expected in zip(backend.run(explicit), backend.run(case), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def accept_prob(backend, **params):
    tensors = {
        name: torch.tensor([value], dtype=torch.int64 if "top_k" in name else torch.float32)
        for name, value in params.items()
    }
    result = backend.verify(
        log_probs([[LAW, LAW]]),
        torch.tensor([[3]]),
        log_probs([[[0.1, 0.2, 0.1, 0.5, 0.05, 0.05]]]),
        uniforms=f64([[0.0, 0.5]]),
        rule="token",
        **tensors,
    )
    return float(result.accept_probs[0, 0]), int(result.status[0])


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, 0.3 / 0.5),
        (dict(top_k=2), (0.3 / 0.7) / (0.5 / 0.7)),
        (dict(draft_top_k=1), 0.3 / 1),
        (dict(draft_top_p=0.6), 0.3 / (0.5 / 0.7)),
        (dict(draft_min_p=0.3), 0.3 / (0.5 / 0.7)),
        (dict(top_k=2, draft_top_k=0), (0.3 / 0.7) / 0.5),
        (dict(temperature=0.5, draft_temperature=1.0), (0.09 / 0.275) / 0.5),
        (dict(draft_temperature=0.5), 0.3 / (0.25 / 0.315)),
        (dict(draft_temperature=0.0), 0.3),  # the point mass at 3
    ],
    ids=str,
)
def test_target_and_draft_have_laws_of_their_own(backend, params, expected):
    assert accept_prob(backend, **params) == (pytest.approx(expected, abs=1e-6), 0)


def test_draft_token_outside_the_draft_filters(backend):
    # Token 3 cannot have been drawn after draft_top_p = .1 of a law whose top is elsewhere.
    params = dict(draft_top_k=torch.tensor([1]))
    result = backend.verify(
        log_probs([[LAW, LAW]]),
        torch.tensor([[1]]),
        log_probs([[[0.1, 0.2, 0.1, 0.5, 0.05, 0.05]]]),
        uniforms=f64([[0.0, 0.5]]),
        **params,
    )
    assert result.status.tolist() == [4] and result.num_accepted.tolist() == [0]
    assert result.tokens[0, 0] == 2  # u = .5 draws from p: .05, .45, .55 are the prefix sums
