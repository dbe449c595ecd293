"""Thresholds bracketed to the last bits of a float64, where laws are exact in every arithmetic.

A law that is uniform over n unmasked tokens has p = 1/n exactly: logits 0, every exp 1, every sum
an integer. Thresholds and boundaries are then known as rationals, and `nextafter` brackets them.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64

from specdec_ext.testing import filtered_law

BELOW_ONE = 1 - 2**-53


def uniform_over(*tokens, vocab=16):
    """Logits of the law that is uniform over some tokens."""
    logits = torch.full((vocab,), -math.inf)
    logits[list(tokens)] = 0.0
    return logits


def below(x):
    return math.nextafter(x, 0)


def above(x):
    return math.nextafter(x, 1)


def verify(backend, target, tokens, draft, uniforms, rule, **kwargs):
    """One request per row of uniforms."""
    uniforms = f64(uniforms)
    count = len(uniforms)
    return backend.verify(
        torch.stack(target).expand(count, -1, -1),
        torch.tensor([tokens]).expand(count, -1),
        torch.stack(draft).expand(count, -1, -1),
        uniforms=uniforms,
        rule=rule,
        **kwargs,
    )


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("n, m", [(2, 1), (4, 1), (4, 2), (16, 2), (16, 8), (16, 1)])
def test_coin_at_a_dyadic_threshold(backend, rule, n, m):
    # p = 1/n, q = 1/m, h = m/n exactly: u < h accepts, u = h does not.
    target = [uniform_over(*range(n)), uniform_over(0)]
    draft = [uniform_over(*range(m))]
    h = m / n
    us = [0.0, below(below(h)), below(h), h, above(h), BELOW_ONE]
    result = verify(backend, target, [0], draft, [[u, 0.5] for u in us], rule)
    assert result.num_accepted.tolist() == [1, 1, 1, 0, 0, 0]
    assert result.accept_probs.flatten().tolist() == [h] * 6


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("n, m", [(3, 1), (3, 2), (7, 5), (13, 11), (12, 7)])
def test_coin_at_a_rational_threshold(backend, rule, n, m):
    # 1/n and 1/m are rounded: the threshold is m/n to a few ulps.
    target = [uniform_over(*range(n)), uniform_over(0)]
    draft = [uniform_over(*range(m))]
    h = m / n
    us = [h * (1 - 2**-50), h * (1 + 2**-50)]
    result = verify(backend, target, [0], draft, [[u, 0.5] for u in us], rule)
    assert result.num_accepted.tolist() == [1, 0]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_p_equal_to_q_accepts_every_coin(backend, rule):
    law = uniform_over(*range(5))
    coins = [[u, 0.5] for u in (0.0, 0.5, BELOW_ONE)]
    result = verify(backend, [law, law], [3], [law], coins, rule)
    assert result.num_accepted.tolist() == [1, 1, 1]
    assert result.accept_probs.flatten().tolist() == [1, 1, 1]


@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_p_of_zero_accepts_no_coin(backend, rule):
    target = [uniform_over(0, 1), uniform_over(0)]
    coins = [[u, 0.5] for u in (0.0, 5e-324, 0.5, BELOW_ONE)]
    result = verify(backend, target, [2], [uniform_over(0, 1, 2)], coins, rule)
    assert result.num_accepted.tolist() == [0, 0, 0, 0]
    assert result.accept_probs.flatten().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_deterministic_token(backend, rule, n):
    target = [uniform_over(*range(n)), uniform_over(0)]
    h = 1 / n
    coins = [[u, 0.5] for u in (below(h), h)]
    kinds = torch.zeros(2, 1, dtype=torch.int8)
    # The draft's row says something else and is not looked at.
    draft = [torch.full((16,), math.nan)]
    result = verify(backend, target, [1], draft, coins, rule, draft_kinds=kinds)
    assert result.num_accepted.tolist() == [1, 0] and result.status.tolist() == [0, 0]


def test_block_threshold_of_an_inner_node(backend):
    # w1 = (1/8) / (1/4) = 1/2. Row 1: p = 1/2 on two tokens, q = 1/8 on eight that include them:
    # R = 2 (1/4 - 1/8) = 1/4, h1 = (1/4) / (1/4 + 1/2) = 1/3. Token 7 is outside p: w2 = 0.
    target = [uniform_over(*range(8)), uniform_over(0, 1), uniform_over(0)]
    draft = [uniform_over(*range(4)), uniform_over(*range(8))]
    h = 1 / 3
    coins = [[u, 0.0, 0.5] for u in (0.0, h * (1 - 2**-50), h * (1 + 2**-50), BELOW_ONE)]
    result = verify(backend, target, [3, 7], draft, coins, "block")
    assert result.num_accepted.tolist() == [1, 1, 0, 0]
    assert result.accept_probs.tolist() == [[pytest.approx(h, abs=1e-7), 0.0]] * 4
    # Inside p: w2 = min(1, w1 * 4) = 1 wins at every coin.
    result = verify(backend, target, [3, 1], draft, coins, "block")
    assert result.num_accepted.tolist() == [2, 2, 2, 2]


def test_block_coins_after_the_winner_do_not_matter(backend):
    target = [uniform_over(*range(8)), uniform_over(*range(8)), uniform_over(*range(16))]
    draft = [uniform_over(*range(4)), uniform_over(*range(4))]
    # w1 = 1/2, w2 = 1/4: h2 = 1/4.
    coins = [[0.9, below(0.25), 0.5], [0.0, below(0.25), 0.5], [0.0, 0.25, 0.0], [0.9, 0.25, 0.0]]
    result = verify(backend, target, [1, 2], draft, coins, "block")
    # R1 = 4 * [w1/8 - 1/4]+ + 4 * w1/8 = 1/4, h1 = (1/4) / (1/4 + 1/2) = 1/3.
    assert result.num_accepted.tolist() == [2, 2, 1, 0]


@pytest.mark.parametrize("tokens", [(0, 1), (0, 1, 2, 3), tuple(range(16)), (2, 3, 9, 14)])
def test_boundaries_of_a_uniform_draw(backend, tokens):
    n = len(tokens)
    logits = uniform_over(*tokens)
    us, expected = [0.0, BELOW_ONE], [tokens[0], tokens[-1]]
    for k in range(1, n):
        us += [below(k / n), k / n]
        expected += [tokens[k - 1], tokens[k]]
    # below(k/n) has fewer than 53 fractional bits to spare only above 1/2: floor(u 2^53) decides.
    got = backend.sample(logits.expand(len(us), -1), f64(us)).tokens.tolist()
    assert got == expected


def test_boundaries_between_tiles(backend):
    # 2^14 equal tokens: u = k / V gives token k, the float below it k - 1, at tile edges as well.
    vocab = 2**14
    ks = [1, 127, 128, 4095, 4096, 4097, 8191, 8192, 8193, 12_288, vocab - 1]
    us = [k / vocab for k in ks] + [below(k / vocab) for k in ks]
    got = backend.sample(torch.zeros(1, vocab).expand(len(us), -1), f64(us)).tokens.tolist()
    assert got == ks + [k - 1 for k in ks]


@pytest.mark.parametrize("token", [0, 127, 4095, 4096, 8191, 8192, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rejected_deterministic_token_is_excluded(backend, token, dtype):
    # It has nine tenths of the mass, wherever in the vocabulary it is.
    logits = torch.zeros(1, 2, 9001)
    logits[0, 0, token] = math.log(9 * 9000)
    us = [0.0, 0.3, 0.5, 0.7, BELOW_ONE]
    for rule in ("block", "token"):
        result = backend.verify(
            logits.to(dtype).expand(5, 2, 9001),
            torch.tensor([[token]]).expand(5, 1),
            uniforms=f64([[0.95, u] for u in us]),
            rule=rule,
        )
        assert result.num_accepted.tolist() == [0] * 5
        others = [k for k in range(9001) if k != token]
        expected = [others[int(u * 9000)] for u in us]
        for got, wanted in zip(result.tokens[:, 0].tolist(), expected, strict=True):
            assert got != token and abs(got - wanted) <= 2


@pytest.mark.parametrize("rule", ["block", "token"])
def test_boundaries_of_a_residual_draw(backend, rule):
    # p = 1/4 on 0..3, q = 1/2 on 2, 3: the residual is 1/4 on 0 and 1.
    target = [uniform_over(0, 1, 2, 3), uniform_over(0)]
    draft = [uniform_over(2, 3)]
    us = [0.0, below(0.5), 0.5, BELOW_ONE]
    coins = [[0.5, u] for u in us]
    result = verify(backend, target, [2], draft, coins, rule)
    assert result.num_accepted.tolist() == [0, 0, 0, 0]
    assert result.tokens[:, 0].tolist() == [0, 0, 1, 1]


def test_block_residual_is_scaled_by_the_inflow(backend):
    # w1 = 1/2, row 1: p uniform on 0..3, q uniform on 4..11 and 0, 1, 2 as well (11 tokens):
    # [p/2 - q]+ = (1/8 - 1/11) on 0, 1, 2 and 1/8 on 3, where the token rule would take p - q.
    target = [uniform_over(*range(8)), uniform_over(0, 1, 2, 3), uniform_over(0)]
    draft = [uniform_over(0, 1, 2, 3), uniform_over(0, 1, 2, *range(4, 12))]
    part = 1 / 8 - 1 / 11
    first = 3 * part / (3 * part + 1 / 8)  # below it: 0, 1, 2
    wrong = 3 * (1 / 4 - 1 / 11) / (3 * (1 / 4 - 1 / 11) + 1 / 4)
    assert abs(first - wrong) > 0.1
    coins = [[0.0, 0.0, first * (1 - 1e-5)], [0.0, 0.0, first * (1 + 1e-5)]]
    result = verify(backend, target, [1, 5], draft, coins, "block")
    assert result.num_accepted.tolist() == [1, 1]
    assert result.tokens[:, 1].tolist() == [2, 3]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_extreme_uniforms_give_legal_tokens(backend, rule):
    target = [uniform_over(5, 6, 7), uniform_over(4, 9)]
    draft = [uniform_over(5, 6, 11)]
    coins = [[c, u] for c in (0.0, BELOW_ONE) for u in (0.0, 5e-324, BELOW_ONE)]
    for token in (5, 11):
        result = verify(backend, target, [token], draft, coins, rule)
        legal = {5, 6, 7} if token == 11 else {4, 9}
        extra = result.tokens.gather(1, result.num_accepted.long()[:, None]).flatten().tolist()
        assert set(extra) <= legal
        assert result.tokens[:, 0].ne(11).all()


def test_near_zero_residuals_give_legal_tokens(backend):
    # p and q differ in the last bits of some logits, in half the vocabulary both are masked.
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.randn(64, 2, 501, generator=generator)
        target[..., ::2] = -math.inf
        target = target.to(dtype)
        draft = target[:, :1].clone()
        nudged = (torch.rand(draft.shape, generator=generator) < 0.01) & (draft > -math.inf)
        nudged |= draft == draft.amax(2, keepdim=True)
        draft = torch.where(nudged, torch.nextafter(draft, torch.tensor(9.0, dtype=dtype)), draft)
        # The likeliest token is nudged: its q is above p by an ulp, and the last coin rejects it.
        tokens = draft.float()[:, 0].argmax(1)
        for u in (0.0, 0.5, BELOW_ONE):
            for rule in ("block", "token"):
                result = backend.verify(
                    target,
                    tokens[:, None],
                    draft,
                    uniforms=f64([[BELOW_ONE, u]]).expand(64, 2),
                    rule=rule,
                )
                assert bool((result.num_accepted == 0).any())
                extra = result.tokens.gather(1, result.num_accepted.long()[:, None])
                assert bool((extra % 2 == 1).all()) and bool((extra < 501).all())
                assert result.status.eq(0).all()
                emitted = result.tokens >= 0
                assert bool(torch.isfinite(result.logprobs[emitted]).all())


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e30])
@pytest.mark.parametrize("rule", ["block", "token", "greedy"])
def test_large_logits(backend, rule, scale):
    # max, exp and sums must not overflow: laws are those of differences.
    logits = torch.tensor([[[0.0, -1.0, -2.0, 1.0], [1.0, 0.0, 0.0, 1.0]]]) * scale + scale
    result = backend.verify(
        logits, torch.tensor([[3]]), logits[:, :1], uniforms=f64([[BELOW_ONE, 0.0]]), rule=rule
    )
    assert result.tokens.tolist() == [[3, 0]] and result.status.tolist() == [0]
    assert bool(torch.isfinite(result.logprobs).all())


@pytest.mark.parametrize("top, temperature", [(1e4, 9.607e-5), (100.0, 1.1e-6), (6e4, 7e-4)])
def test_large_logits_at_small_temperatures(backend, top, temperature):
    # Logits an ulp apart are several nats apart: where exp underflows lies between two of them, and
    # rounding that border down lets garbage in.
    ulp = float(torch.nextafter(torch.tensor(top), torch.tensor(1e9))) - float(torch.tensor(top))
    logits = (torch.tensor(top).double() - torch.arange(64) * ulp).float()
    temperatures = temperature * (1 + 0.002 * torch.arange(200))
    rows = logits.expand(200, 64)
    expected = torch.stack([filtered_law(logits, t) for t in temperatures.tolist()])
    law = backend.row_law(rows, temperature=temperatures)
    assert law.log_z.tolist() == pytest.approx((-expected[:, 0].log()).tolist(), abs=1e-5)
    for u in (0.0, 0.5, 0.99):
        drawn = backend.sample(rows, f64([u]).expand(200), temperature=temperatures)
        p = expected.gather(1, drawn.tokens[:, None])[:, 0]
        above = expected.cumsum(1).gather(1, drawn.tokens[:, None])[:, 0]
        assert bool((above > u - 1e-5).all()) and bool((above - p <= u + 1e-5).all())
        torch.testing.assert_close(drawn.logprobs, p.log().float(), rtol=1e-5, atol=1e-4)


def test_largest_float16_and_float32_logits(backend):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        logits = torch.tensor([[[top, -top, 0.0], [-top, top, 0.0]]], dtype=dtype)
        result = backend.verify(
            logits, torch.tensor([[0]]), logits[:, :1], uniforms=f64([[BELOW_ONE, BELOW_ONE]])
        )
        assert result.tokens.tolist() == [[0, 1]] and result.status.tolist() == [0]
        assert result.logprobs.tolist() == [[0, 0]]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_differences_of_logits_that_no_float32_holds(backend, filters):
    # -3e38 - 3e38 overflows, and the temperature is too high for that to be below all that counts.
    logits = torch.tensor([[-3e38, 0.0, 1e38, 3e38]]).expand(3, 4)
    given = {"temperature": 1e37, **filters}
    given = {name: torch.full((3,), value) for name, value in given.items()}
    law = backend.row_law(logits, **given)
    assert law.log_z.tolist() == pytest.approx([0.0] * 3, abs=1e-6)
    drawn = backend.sample(logits, f64([0.01, 0.5, 0.99]), **given)
    assert drawn.tokens.tolist() == [3, 3, 3]
    assert drawn.logprobs.tolist() == pytest.approx([0.0] * 3, abs=1e-6)


def equal_but_for_one(vocab, drafted, dtype=torch.float32):
    """Rows of target and draft that differ in one token alone, which the target does not have.

    Next to nothing is the draft's either: all other probabilities are equal to the last bit.
    """
    draft = torch.randn(vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    target = draft.clone()
    target[drafted], draft[drafted] = -math.inf, -60.0
    return target, draft


def middles_of(logits, tokens):
    """The uniforms in the middle of what some tokens have of the law of a row."""
    law = filtered_law(logits)
    return law.cumsum(0)[tokens] - law[tokens] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_an_empty_residual_leaves_the_targets_law(backend, rule, dtype):
    # The rejected token leaves nothing of p - q, not even what rounds off.
    vocab = 301
    target, draft = equal_but_for_one(vocab, 150, dtype)
    tokens = torch.linspace(0, vocab - 1, 8).long()
    coins = [[0.0, u] for u in middles_of(target, tokens).tolist()]
    result = verify(backend, [target, target], [150], [draft], coins, rule)
    assert result.num_accepted.tolist() == result.status.tolist() == [0] * 8
    assert torch.equal(result.tokens[:, 0], tokens)


@pytest.mark.parametrize("rule", ["traversal", "recursive"])
def test_an_empty_residual_in_a_tree(backend, rule):
    vocab = 301
    target, draft = equal_but_for_one(vocab, 150)
    tokens = torch.linspace(0, vocab - 1, 8).long()
    result = backend.verify_tree(
        target.expand(8, 2, vocab),
        torch.tensor([[-1, 150]]).expand(8, 2),
        torch.tensor([[-1, 0]]).expand(8, 2),
        draft_logits=draft.expand(8, 2, vocab),
        uniforms=f64([[0.0, u] for u in middles_of(target, tokens).tolist()]),
        rule=rule,
    )
    assert result.num_accepted.tolist() == result.status.tolist() == [0] * 8
    assert torch.equal(result.tokens[:, 0], tokens)


def test_equal_laws_leave_no_mass(backend):
    # w1 = 1 - 1e-10 and then p = q: [w1 p - q]+ is 0 everywhere, h1 with it. A mass of what rounds
    # off would be larger than 1 - w1, and h1 near 1.
    law = torch.randn(301, generator=torch.Generator().manual_seed(1))
    draft = law.clone()
    draft[150] = 1e-3
    target = draft.clone()
    target[150] = torch.nextafter(target[150], torch.tensor(0.0))
    coins = [[0.0, u, 0.5] for u in (0.0, 0.5, BELOW_ONE)]
    result = verify(backend, [target, law, law], [150, 3], [draft, law], coins, "block")
    assert result.accept_probs[:, 0].tolist() == [0.0, 0.0, 0.0]
    assert result.num_accepted.tolist() == [2, 2, 0]


@pytest.mark.parametrize("logit", [-85.0, -95.0, -300.0, -690.0])
def test_a_residual_behind_next_to_no_inflow(backend, logit):
    # w1 is below what a float32 holds. A coin of 0 accepts all the same, and then the token that
    # has all but nothing of p is rejected: the last one comes from what is left, not from p.
    vocab = 301
    rows = torch.randn(2, vocab, generator=torch.Generator().manual_seed(2))
    rows[0, 7], rows[1, 9] = logit, 8.0
    left = rows[1].clone()
    left[9] = -math.inf
    tokens = torch.tensor([0, 8, 10, 150, 300])
    coins = [[0.0, 0.5, u] for u in middles_of(left, tokens).tolist()]
    result = backend.verify(
        torch.stack([*rows, rows[1]]).expand(5, -1, -1),
        torch.tensor([[7, 9]]).expand(5, -1),
        uniforms=f64(coins),
        rule="block",
    )
    assert result.num_accepted.tolist() == [1] * 5
    assert torch.equal(result.tokens[:, 1], tokens)


@pytest.mark.parametrize("total", [1e-38, 1e-35, 1e-30, 1.0, 1e30, 1e38])
def test_what_draft_probs_sum_to_does_not_matter(backend, total):
    # Nor in residuals, where the draft's weights are as small as these and the target's are not.
    vocab = 301
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(vocab, generator=generator)
    draft = torch.randn(vocab, generator=generator).softmax(0)
    left = (filtered_law(target) - draft.double()).clamp(min=0)
    left /= left.sum()
    rejected = int((filtered_law(target) - draft.double()).argmin())
    tokens = left.topk(6).indices.sort().values
    coins = [[BELOW_ONE, u] for u in (left.cumsum(0) - left / 2)[tokens].tolist()]
    result = backend.verify(
        target.expand(6, 2, vocab),
        torch.full((6, 1), rejected),
        draft_probs=(draft.double() * total).float().expand(6, 1, vocab),
        uniforms=f64(coins),
        rule="token",
    )
    assert result.num_accepted.tolist() == result.status.tolist() == [0] * 6
    assert torch.equal(result.tokens[:, 0], tokens)
