"""Wrong verifiers must fail: FIELD_NOTES A.1-A.6, A.8-A.11, A.17, one mistake each.

Each control goes through the very function that the operators are tested with, and must come out
biased by more than a stated bound, fifty thousand times what the operators are allowed. `Naive`
itself is correct, which is tested too: what fails is the mistake, not the harness.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import CPU, REFERENCE, f64, log_probs

from specdec_ext.testing import (
    ExactLaw,
    VerifyOutcome,
    assert_tokens_match,
    exact_law,
    filtered_law,
    make_case,
    step_law,
    toy_models,
)

pytestmark = pytest.mark.thorough

BIAS = 0.05  # total variation that every control exceeds


def draw(weights, u):
    """Inverse CDF, [B, V] and [B]."""
    prefix = weights.cumsum(-1)
    token = torch.searchsorted(prefix, (u * prefix[:, -1])[:, None], right=True)[:, 0]
    return token.clamp(max=weights.shape[-1] - 1)


class Naive:
    """The token rule in float64, batched. Subclasses override one method each."""

    def law(self, logits, temperature):
        return (logits.double() / temperature).softmax(-1)

    def coins(self, uniforms):
        return uniforms

    def length(self, tokens, lengths, ids):
        bad = (tokens < 0) | (tokens >= ids)
        first_bad = torch.where(bad.any(1), bad.int().argmax(1), tokens.shape[1])
        return torch.minimum(first_bad, lengths)

    def accepts(self, u, p, q):
        return u * q < p

    def residual(self, p, q):
        return (p - q).clamp(min=0)

    def residual_row(self, accepted):
        return accepted

    def bonus_row(self, accepted):
        return accepted

    def raw_temperature(self, temperature):
        return temperature

    def __call__(
        self,
        target_logits,
        draft_tokens,
        draft_logits,
        *,
        uniforms,
        draft_lengths=None,
        temperature=None,
        **_,
    ):
        batch, gamma = draft_tokens.shape
        t = torch.ones(batch) if temperature is None else temperature
        p = self.law(target_logits, t[:, None, None].double())
        q = self.law(draft_logits, t[:, None, None].double())
        u = self.coins(uniforms)
        lengths = torch.full((batch,), gamma) if draft_lengths is None else draft_lengths
        usable = self.length(draft_tokens, lengths, p.shape[-1])
        b = torch.arange(batch)
        accepted = torch.zeros(batch, dtype=torch.int64)
        alive = torch.ones(batch, dtype=torch.bool)
        h = torch.full((batch, gamma), math.nan)
        for i in range(gamma):
            x = draft_tokens[:, i].clamp(0, p.shape[-1] - 1)
            px, qx = p[b, i, x], q[b, i, x]
            h[:, i] = (px / qx).clamp(max=1)
            alive = alive & (i < usable) & self.accepts(u[:, i], px, qx)
            accepted += alive
        rejected = accepted < usable
        raw = self.raw_temperature(t)[:, None, None].double()
        p_again, q_again = self.law(target_logits, raw), self.law(draft_logits, raw)
        row = self.residual_row(accepted).clamp(0, gamma)
        residual = self.residual(p_again[b, row], q_again[b, row.clamp(max=gamma - 1)])
        bonus = p[b, self.bonus_row(accepted).clamp(0, gamma)]
        weights = torch.where(rejected[:, None], residual, bonus)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, p[b, accepted])
        tokens = torch.full((batch, gamma + 1), -1)
        columns = torch.arange(gamma)
        tokens[:, :gamma] = torch.where(columns < accepted[:, None], draft_tokens, -1)
        tokens[b, accepted] = draw(weights, u[:, gamma])
        self.also_emit(tokens, accepted, usable, p, u)
        nan = torch.full((batch, gamma + 1), math.nan)
        return VerifyOutcome(tokens, accepted.int(), nan, h, torch.zeros(batch, dtype=torch.int32))

    def also_emit(self, tokens, accepted, usable, p, u):
        pass


class Wrong(Naive):
    """Names the note that a mistake comes from."""

    note = ""


class AcceptsWithP(Wrong):
    note = "A.1: p = .3, q = .8 accepted with .3, not .375"

    def accepts(self, u, p, q):
        return u < p


class ResidualOfEqualLaws(Wrong):
    note = "A.1: relu(target_probs - softmax(target_logits)), NaN after normalising"

    def residual(self, p, q):
        return torch.zeros_like(p).index_fill_(1, torch.tensor([p.shape[1] - 1]), 1e-300)


class ExtraTokenAfterLastRejection(Wrong):
    note = "A.1: 'all accepted' tested as len(accepted) == k, true after rejecting the last slot"

    def also_emit(self, tokens, accepted, usable, p, u):
        gamma = tokens.shape[1] - 1
        last = (accepted == gamma - 1) & (usable == gamma)
        tokens[last, gamma] = draw(p[last, gamma], u[last, gamma])


class ResampleFromP(Wrong):
    note = "A.2, and A.1: the residual computed, then p sampled"

    def residual(self, p, q):
        return p


class AbsoluteResidual(Wrong):
    note = "A.2: |p - q|"

    def residual(self, p, q):
        return (p - q).abs()


class SwappedResidual(Wrong):
    note = "A.2: [q - p]+"

    def residual(self, p, q):
        return (q - p).clamp(min=0)


class SoftmaxOfResidual(Wrong):
    note = "A.2: softmax of the residual"

    def residual(self, p, q):
        return (p - q).clamp(min=0).softmax(-1)


class ResampleAtOne(Wrong):
    note = "A.4: the ratio with temperature, the residual at T = 1"

    def raw_temperature(self, temperature):
        return torch.ones_like(temperature)


class ResidualFromPreviousRow(Wrong):
    note = "A.4: a neighbouring row"

    def residual_row(self, accepted):
        return accepted - 1


class ResidualFromNextRow(Wrong):
    note = "A.4: a neighbouring row"

    def residual_row(self, accepted):
        return accepted + 1


class BonusFromPreviousRow(Wrong):
    note = "A.4: the bonus from a neighbouring row"

    def bonus_row(self, accepted):
        return accepted - 1


class InvalidIdsAreRejected(Wrong):
    note = "A.6: a placeholder 'rejected' with [p - q]+"

    def length(self, tokens, lengths, ids):
        return torch.full_like(lengths, tokens.shape[1])

    def accepts(self, u, p, q):
        return torch.zeros_like(u, dtype=torch.bool)  # only used where nothing was drafted


class OneCoinForAllSlots(Wrong):
    note = "A.8: one r for all slots"

    def coins(self, uniforms):
        return torch.cat([uniforms[:, :1].expand(-1, uniforms.shape[1] - 1), uniforms[:, -1:]], 1)


def law_of(verify, seed=1, vocab=4, gamma=2, **kwargs) -> ExactLaw:
    target, draft = toy_models(seed, vocab, gamma, spread=1.5, noise=1.5)
    return exact_law(verify, target, draft, rule="token", **kwargs)


SIMPLE = [
    AcceptsWithP,
    ResidualOfEqualLaws,
    ExtraTokenAfterLastRejection,
    ResampleFromP,
    AbsoluteResidual,
    SwappedResidual,
    SoftmaxOfResidual,
    ResampleAtOne,
    ResidualFromPreviousRow,
    ResidualFromNextRow,
    BonusFromPreviousRow,
]


class NaiveBlock(Naive):
    """The block rule in float64, batched, for drafts of full length."""

    def inflows(self, ratios):
        """w_0 .. w_G, [B, G+1]: each is capped before it is carried on."""
        w = [torch.ones_like(ratios[:, 0])]
        for ratio in ratios.unbind(1):
            w.append((w[-1] * ratio).clamp(max=1))
        return torch.stack(w, 1)

    def residual(self, w, p, q):
        return (w * p - q).clamp(min=0)

    def __call__(self, target_logits, draft_tokens, draft_logits, *, uniforms, **_):
        batch, gamma = draft_tokens.shape
        p, q = self.law(target_logits, 1.0), self.law(draft_logits, 1.0)
        x = draft_tokens[..., None]
        w = self.inflows((p[:, :-1].gather(2, x) / q.gather(2, x))[..., 0])
        mass = (w[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(2)
        inner = torch.where(w[:, 1:-1] == 1, 1.0, mass / (mass + 1 - w[:, 1:-1]))
        h = torch.cat([inner, w[:, -1:]], 1)
        heads = (uniforms[:, :-1] < h) * torch.arange(1, gamma + 1)
        accepted, b = heads.amax(1), torch.arange(batch)
        row = accepted.clamp(max=gamma - 1)
        weights = self.residual(w[b, accepted][:, None], p[b, row], q[b, row])
        weights = torch.where((accepted == gamma)[:, None], p[:, -1], weights)
        tokens = torch.where(torch.arange(gamma) < accepted[:, None], draft_tokens, -1)
        tokens = torch.cat([tokens, torch.full((batch, 1), -1)], 1)
        tokens[b, accepted] = draw(weights, uniforms[:, gamma])
        nan = torch.full((batch, gamma + 1), math.nan)
        return VerifyOutcome(tokens, accepted.int(), nan, h, torch.zeros(batch, dtype=torch.int32))


class BlockResidualWithoutInflow(NaiveBlock):
    note = "A.18: block verification with [p - q]+"

    def residual(self, w, p, q):
        return (p - q).clamp(min=0)


class UncappedPrefixProducts(NaiveBlock):
    note = "w_i = min(1, prod p / q): a good prefix makes up for a bad token after it"

    def inflows(self, ratios):
        products = ratios.cumprod(1).clamp(max=1)
        return torch.cat([torch.ones_like(products[:, :1]), products], 1)


def block_law(verify):
    return exact_law(verify, *toy_models(1, 4, 2, spread=2.0, noise=2.0), rule="block")


def test_naive_block_itself_is_right():
    law = block_law(NaiveBlock())
    assert law.tv < 1e-9
    assert law.mean_accepted == pytest.approx(block_law(CPU.verify).mean_accepted, abs=1e-6)


@pytest.mark.parametrize("wrong", [BlockResidualWithoutInflow, UncappedPrefixProducts])
def test_mistakes_of_the_block_rule(wrong):
    assert block_law(wrong()).tv > 0.01, wrong.note


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_naive_itself_is_right(temperature):
    assert law_of(Naive(), temperature=temperature).tv < 1e-9


@pytest.mark.parametrize("wrong", SIMPLE, ids=lambda w: w.__name__)
def test_simple_mistakes(wrong):
    assert law_of(wrong(), temperature=0.6).tv > BIAS, wrong.note


def test_extra_token_is_right_but_for_the_extra_token():
    # The first tokens are all right, only the joint law sees it: tests of marginals would pass.
    law = law_of(ExtraTokenAfterLastRejection(), gamma=1)
    assert law.first_token_tv < 1e-9 and law.tv > BIAS


# ---- A.3: q is not the law that was sampled -----------------------------------------------------


def test_greedy_draft_with_a_soft_q(backend):
    target, draft = toy_models(1, 4, 1)
    point = torch.zeros(4).index_fill_(0, draft[0].argmax(), 1.0)
    law = exact_law(backend.verify, target, draft, drawn=[point], rule="token")
    assert law.tv > BIAS
    right = exact_law(backend.verify, target, draft, drawn=[point], kinds=[0], rule="token")
    assert right.tv < backend.tv


def test_draft_drawn_after_top_k_but_raw_q_passed(backend):
    target, draft = toy_models(2, 5, 1)
    drawn = [filtered_law(draft[0], top_k=2)]
    law = exact_law(backend.verify, target, draft, drawn=drawn, rule="token")
    assert law.tv > BIAS
    right = exact_law(backend.verify, target, draft, rule="token", top_k=0, draft_top_k=2)
    assert right.tv < backend.tv


def test_a_sample_declared_deterministic(backend):
    target, draft = toy_models(3, 4, 1)
    drawn = [filtered_law(draft[0])]

    def declared(*args, draft_logits, **kwargs):
        return backend.verify(*args, **kwargs)

    law = exact_law(declared, target, draft, drawn=drawn, rule="token")
    assert law.tv < backend.tv  # lossless given the token: only slower
    sampled = exact_law(backend.verify, target, draft, rule="token")
    assert law.mean_accepted < sampled.mean_accepted - BIAS


# ---- A.5: greedy --------------------------------------------------------------------------------


def test_greedy_through_a_ratio_test(backend):
    class AtOne(Wrong):
        note = "A.5: T = 0 verified at T = 1, a non-argmax token is emitted"

        def law(self, logits, temperature):
            return logits.double().softmax(-1)

    target, draft = toy_models(4, 4, 1)
    drawn = [torch.zeros(4).index_fill_(0, draft[0].argmax(), 1.0)]
    options = dict(drawn=drawn, rule="token", temperature=0.0)
    assert exact_law(AtOne(), target, draft, **options).tv > 0.2, AtOne.note
    assert exact_law(backend.verify, target, draft, **options).tv == 0


def test_temperature_zero_as_a_small_temperature(backend):
    # bfloat16 rows tie at the top (5 % of real ones do): the lowest index, at every u.
    logits = torch.tensor([3.0, 1.0, 7.0, 7.0], dtype=torch.bfloat16)
    u = f64([0.0, 0.3, 0.6, 1 - 2**-53])
    rows = logits.repeat(4, 1)
    zero = backend.sample(rows, u, temperature=torch.zeros(4))
    small = backend.sample(rows, u, temperature=torch.full((4,), 1e-5))
    assert zero.tokens.tolist() == [2, 2, 2, 2]
    assert small.tokens.tolist() == [2, 2, 3, 3]  # the control: random


# ---- A.6 ----------------------------------------------------------------------------------------


def test_placeholder_rejected_with_the_residual(backend):
    kwargs = dict(stop=lambda prefix: True, ending="placeholder", poison=False, gamma=1, seed=5)
    assert law_of(InvalidIdsAreRejected(), **kwargs).tv > 0.05, InvalidIdsAreRejected.note
    assert law_of(Naive(), **kwargs).tv < 1e-9
    assert law_of(backend.verify, **kwargs).tv < backend.tv


def hierarchy_tv(verify, shared):
    """TV of the first token after draft -> middle -> target, each level verified with gamma = 1."""
    (target, middle, draft) = (toy_models(s, 3, 1, spread=2.0)[0] for s in (6, 7, 8))
    goal = filtered_law(target[0])
    if not shared:
        first = exact_law(verify, middle, draft[:1], rule="token").joint.sum(1)
        return exact_law(verify, target, middle[:1], drawn=[first], rule="token").first_token_tv

    q = filtered_law(draft[0])

    def level(above, below, tokens, u, full=False):
        size = len(tokens)
        return verify(
            target_logits=torch.stack([above[0], above[0]]).expand(size, 2, 3),
            draft_tokens=tokens[:, None],
            draft_logits=below[0].expand(size, 1, 3),
            uniforms=u,
            rule="token",
        )

    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    everyone = torch.arange(3)
    cuts = torch.cat(
        [
            level(*pair, everyone, half).accept_probs[:, 0]
            for pair in ((middle, draft), (target, middle))
        ]
    ).double()
    edges = torch.cat([f64([0.0]), cuts.sort().values, f64([1.0])])
    middles, widths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    keep = widths > 0
    middles, widths = middles[keep], widths[keep]
    drafted = everyone.repeat_interleave(len(middles))
    coin = middles.repeat(3)
    mass = q.repeat_interleave(len(middles)) * widths.repeat(3)

    def outcome(row, u):
        noise = torch.stack([coin[row], u], 1)
        once = level(middle, draft, drafted[row], noise).tokens[:, 0]
        return level(target, middle, once, noise).tokens[:, 0]

    found = torch.zeros(3, dtype=torch.float64)
    for (row, token), probability in step_law(outcome, len(drafted)).items():
        found[token] += mass[row] * probability
    return 0.5 * float((found - goal).abs().sum())


def test_two_levels_sharing_coins(backend):
    assert hierarchy_tv(backend.verify, shared=True) > 0.03


# ---- A.8: randomness ----------------------------------------------------------------------------


def test_one_coin_for_all_slots():
    # One draft token after the other with the same coin: biased, and not the coins' own steps.
    law = law_of(OneCoinForAllSlots(), shared_coins=True)
    assert law.tv > BIAS
    assert law_of(Naive(), shared_coins=True).tv < 1e-9
    with pytest.raises(AssertionError, match="one side of a coin"):
        law_of(OneCoinForAllSlots())


P, Q = [0.6, 0.25, 0.15], [0.1, 0.1, 0.8]  # h = 1, 1, 0.1875; residual (.5, .15, 0)


def first_token(backend, coin_of):
    """Law of the first token where the final draw reuses the uniform that drew the draft token.

    ``coin_of(row, u)`` is the coin; row 0 and 1 weigh 0.1875 and 0.8125.
    """
    target, draft = log_probs(P), log_probs(Q)

    def outcome(row, u):
        count = len(row)
        return backend.verify(
            target.expand(count, 2, 3),
            backend.sample(draft.expand(count, 3), u).tokens[:, None],
            draft.expand(count, 1, 3),
            uniforms=torch.stack([coin_of(row, u), u], 1),
            rule="token",
        ).tokens[:, 0]

    found = torch.zeros(3, dtype=torch.float64)
    for (row, token), mass in step_law(outcome, 2, grid=64).items():
        found[token] += mass * (0.1875, 0.8125)[row]
    return found.tolist()


def test_noise_shared_by_the_draft_and_the_residual(backend):
    # Coins below and above the only threshold; u > .2 is known where token 2 was drafted.
    law = first_token(backend, lambda row, u: f64([0.1, 0.5])[row])
    assert law == pytest.approx([0.5625, 0.2875, 0.15], abs=1e-6)  # not .6, .25, .15


def test_reseeding_before_each_draw(backend):
    law = first_token(backend, lambda row, u: u)
    assert law[2] == 0  # not .15


def rounds_are_fresh(uniforms):
    """No coin of one call reappears in another call, row or slot."""
    seeds = torch.arange(8).repeat_interleave(8)
    positions = torch.arange(8).repeat(8)
    coins = uniforms(seeds, positions, 6)
    return len(coins.unique()) == coins.numel()


def test_one_r_for_all_rows_or_rounds(backend):
    assert rounds_are_fresh(backend.uniforms)
    assert not rounds_are_fresh(lambda s, p, n: backend.uniforms(s, 0 * p, n))
    assert not rounds_are_fresh(lambda s, p, n: backend.uniforms(0 * s, p, n))
    assert not rounds_are_fresh(lambda s, p, n: backend.uniforms(s, p, n)[:, :1].expand(-1, n))


def test_batch_mates_sharing_a_coin():
    case = make_case(3, batch=6, rule="token", filters=False, greedy_rows=False, ragged=False)
    case = case.replace(temperature=None)

    def shared(*args, uniforms, **kwargs):
        return REFERENCE.verify(*args, uniforms=uniforms[:1].expand_as(uniforms), **kwargs)

    with pytest.raises(AssertionError):
        assert_tokens_match(case.run(shared), case.run(REFERENCE.verify), case)


# ---- A.9: residuals that round to zero ----------------------------------------------------------


def zero_residual_inputs():
    """q = p to rounding, except that q(x) is an ulp up, for an x so rare that nothing else moves.

    The first and last tokens are masked.
    """
    logits = torch.full((1, 2, 1000), 1.0)
    logits[..., 0] = logits[..., -1] = -math.inf
    logits[..., 500] = -20.0
    draft = logits[:, :1].clone()
    draft[..., 500] = torch.nextafter(draft[..., 500], torch.tensor(9.0))
    return dict(
        target_logits=logits,
        draft_tokens=torch.tensor([[500]]),
        draft_logits=draft,
        uniforms=f64([[1 - 2**-53, 0.0]]),
    )


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_residual_that_rounds_to_zero(backend, rule, u):
    inputs = zero_residual_inputs()
    inputs["uniforms"][0, 1] = u
    result = backend.verify(**inputs, rule=rule)
    assert result.num_accepted.tolist() == [0] and result.status.tolist() == [0]
    assert 1 <= int(result.tokens[0, 0]) <= 998
    assert bool(torch.isfinite(result.logprobs[0, 0]))


def test_residual_that_rounds_to_zero_without_a_fallback():
    inputs = zero_residual_inputs()
    p = inputs["target_logits"].bfloat16().softmax(-1)[:, 0]
    q = inputs["draft_logits"].bfloat16().softmax(-1)[:, 0]
    residual = (p - q).clamp(min=0)
    assert float(residual.sum()) == 0
    assert bool((residual / residual.sum()).isnan().all())
    assert draw(residual.double(), f64([0.5])).tolist() == [999]  # masked


# ---- A.10: the accept test ----------------------------------------------------------------------


class AcceptsAtEquality(Wrong):
    note = "A.10: r <= p / q accepts a token of probability 0 at r = 0"

    def accepts(self, u, p, q):
        return u <= p / q


def zero_probability_inputs():
    target = torch.tensor([[[0.0, -math.inf, 1.0], [0.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.0, 5.0, 0.0]]])
    return dict(
        target_logits=target,
        draft_tokens=torch.tensor([[1]]),
        draft_logits=draft,
        uniforms=f64([[0.0, 0.0]]),
    )


@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_probability_zero_is_never_emitted(backend, rule, u):
    inputs = zero_probability_inputs()
    inputs["uniforms"][0, 1] = u
    result = backend.verify(**inputs, rule=rule)
    assert result.num_accepted.tolist() == [0]
    assert int(result.tokens[0, 0]) in (0, 2)


def test_probability_zero_accepted_at_equality():
    assert AcceptsAtEquality()(**zero_probability_inputs()).tokens[0, 0] == 1


@pytest.mark.parametrize("rule", ["block", "token"])
def test_q_of_zero_at_the_drafted_token(backend, rule):
    inputs = zero_probability_inputs()
    inputs["draft_tokens"] = torch.tensor([[0]])
    inputs["draft_logits"] = torch.tensor([[[-math.inf, 5.0, 0.0]]])
    result = backend.verify(**inputs, rule=rule)
    # Nothing was sampled from q there: the draft ends, the token comes from p.
    assert result.status.tolist() == [4] and result.num_accepted.tolist() == [0]
    assert bool(result.accept_probs.isnan().all())
    # The control: u q < p alone accepts what q cannot have drawn, with a ratio of inf.
    assert Naive()(**inputs).num_accepted.tolist() == [1]


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_q_that_would_round_above_one(backend, rule, dtype):
    # Equal peaked laws: p >= q whatever the rounding, the last coin below 1 accepts.
    logits = torch.full((1, 2, 4099), -12.0)
    logits[..., 7] = 4.0
    result = backend.verify(
        logits.to(dtype),
        torch.tensor([[7]]),
        logits[:, :1].to(dtype),
        uniforms=f64([[1 - 2**-53, 0.5]]),
        rule=rule,
    )
    assert result.num_accepted.tolist() == [1]
    # The control: one ulp too much in q, and a legal draft token is rejected.
    p = filtered_law(logits[0, 0])[7]
    assert not Naive().accepts(f64(1 - 2**-53), p, p * (1 + 2**-24))


# ---- A.11: sums and lattices --------------------------------------------------------------------


def flat_with_a_rare_token():
    """Flat over 151,936 entries; entry 1 has probability 1e-8."""
    logits = torch.zeros(1, 151_936)
    logits[0, 1] = math.log(1e-8 * 151_935)
    return logits


def width_of_rare_token(sample):
    logits = flat_with_a_rare_token()
    low = 1 / 151_936 * 0.9
    span = 0.3 / 151_936

    def outcome(row, u):
        return sample(logits.expand(len(u), -1), low + u * span)

    law = step_law(outcome, 1, bits=36, grid=4)
    return law.get((0, 1), 0.0) * span


def test_rare_token_keeps_its_rate(backend):
    def sample(logits, u):
        return backend.sample(logits, u).tokens

    assert width_of_rare_token(sample) == pytest.approx(1e-8, rel=1e-3)


def test_rare_token_on_a_coarse_lattice():
    def coarse(logits, u):
        u = (u * 2**24).floor() * 2.0**-24
        return REFERENCE.sample(logits, u).tokens

    width = width_of_rare_token(coarse)
    assert not 0.9e-8 < width < 1.1e-8  # all or nothing: a multiple of 2^-24


def test_last_tokens_of_a_large_vocabulary(backend):
    # u next to 1 gives the last token, u = k / V the k-th: the sum ends at 1, not at 0.9999.
    vocab = 151_936
    ks = torch.tensor([0, 1, vocab // 3, vocab - 10, vocab - 1])
    u = torch.cat([(ks.double() + 0.5) / vocab, f64([1 - 2**-53])])
    tokens = backend.sample(torch.zeros(1, vocab).expand(6, -1), u).tokens
    assert tokens.tolist() == [*ks.tolist(), vocab - 1]


def test_a_float32_running_sum_ends_short():
    probs = torch.full((151_936,), 1 / 151_936)
    running = torch.zeros(())
    for chunk in probs.split(1):
        running = running + chunk[0]
    assert abs(float(running) - 1) > 1e-5


# ---- A.17: vocabularies, masks ------------------------------------------------------------------


class TruncatedTarget(Wrong):
    note = "A.17: a smaller draft vocabulary truncates the target's support, bonus row included"

    def __call__(self, target_logits, draft_tokens, draft_logits, **kwargs):
        width = draft_logits.shape[-1]
        return super().__call__(target_logits[..., :width], draft_tokens, draft_logits, **kwargs)


def test_target_truncated_to_the_draft_vocabulary(backend):
    target, draft = toy_models(10, 4, 1, draft_vocab=3)
    assert exact_law(TruncatedTarget(), target, draft, rule="token").tv > BIAS
    assert exact_law(backend.verify, target, draft, rule="token").tv < backend.tv


IDS = torch.tensor([3, 1])


@pytest.mark.parametrize("rule", ["block", "token"])
def test_target_truncated_to_a_reduced_vocabulary(backend, rule):
    # The same mistake with a map: what the draft has no entry for is never emitted.
    target, draft = toy_models(10, 4, 1, draft_vocab=2)

    def truncated(**inputs):
        logits = torch.full_like(inputs["target_logits"], -math.inf)
        logits[..., IDS] = inputs["target_logits"][..., IDS]
        return backend.verify(**{**inputs, "target_logits": logits})

    def law(verify):
        return exact_law(verify, target, draft, draft_token_ids=IDS, rule=rule)

    assert law(truncated).tv > BIAS
    assert law(backend.verify).tv < backend.tv


def test_entries_taken_for_target_ids(backend):
    # The map forgotten: q of entry d is held against p of token d.
    target, draft = toy_models(11, 4, 1)
    ids = torch.tensor([2, 3, 1, 0])

    def forgotten(draft_token_ids, **inputs):
        return backend.verify(**inputs)

    assert exact_law(forgotten, target, draft, draft_token_ids=ids, rule="token").tv > BIAS
    right = exact_law(backend.verify, target, draft, draft_token_ids=ids, rule="token")
    assert right.tv < backend.tv


@pytest.mark.parametrize("rule", ["block", "token"])
def test_probabilities_beside_other_ids_of_a_list(backend, rule):
    # As a drafter does that sorts one of the two. In the first order the law is right.
    target, draft = toy_models(12, 4, 1)
    drawn = [filtered_law(table, top_k=3) for table in draft]

    def law(order):
        def verify(draft_probs, **inputs):
            top = draft_probs.topk(3, -1)
            given = dict(draft_probs=top.values, draft_probs_ids=top.indices[..., order])
            return backend.verify(**inputs, **given)

        return exact_law(verify, target, drawn=drawn, as_probs=True, rule=rule)

    assert law([2, 1, 0]).tv > BIAS
    assert law([0, 1, 2]).tv < backend.tv


ALLOWED = [torch.tensor([True, False, True, True]), torch.ones(4, 4, dtype=torch.bool)]


def masked_law(verify, **options):
    target, draft = toy_models(14, 4, 1, spread=1.0)
    draft[0][1] += 2.0  # what is not allowed is likely
    target[0][1] += 2.0
    return exact_law(verify, target, draft, allowed=ALLOWED, rule="token", **options)


def words_of(inputs):
    bits = inputs.pop("allowed_mask")[..., None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten(-2)[..., : inputs["target_logits"].shape[-1]].bool()


def test_masks_applied_to_the_target_only(backend):
    # The draft was sampled under the mask, the q that is passed was not: A.3 again.
    def target_only(**inputs):
        allowed = words_of(inputs)
        masked = inputs["target_logits"].masked_fill(~allowed, -math.inf)
        return backend.verify(**{**inputs, "target_logits": masked})

    assert masked_law(target_only).tv > BIAS
    assert masked_law(backend.verify).tv < backend.tv


def test_masks_applied_after_the_filters(backend):
    # top-k among all tokens, then the mask: one token is left of two.
    def after(top_k, **inputs):
        allowed = words_of(inputs)
        for name, mask in (("target_logits", allowed), ("draft_logits", allowed[:, :-1])):
            logits = inputs[name]
            kept = filtered_law(logits.nan_to_num(), top_k=int(top_k[0])) > 0
            # Rows after the draft's end, NaN on purpose, stay as they are.
            inputs[name] = logits.masked_fill(~(kept & mask), -math.inf)
        return backend.verify(**inputs)

    assert masked_law(after, top_k=2).tv > BIAS
    assert masked_law(backend.verify, top_k=2).tv < backend.tv


def test_all_masked_row(backend):
    logits = torch.full((1, 2, 5), -math.inf)
    result = backend.verify(
        logits, torch.tensor([[1]]), torch.zeros(1, 1, 5), uniforms=f64([[0.5, 0.5]])
    )
    assert result.status.tolist() == [1]
    assert result.tokens.tolist() == [[0, -1]] and result.num_accepted.tolist() == [0]
    assert bool(result.logprobs.isnan().all())
    assert bool(logits.softmax(-1).isnan().all())  # exp(-inf - (-inf)), the control
