"""Losslessness as an equality: the exact law of what verify and sample emit is the target's.

`specdec_ext.testing.exact_law` integrates out drafts, coins and final draws; nothing here is
sampled. The bound is the backend's: 1e-9 for float64, 1e-6 where exp and sums are float32.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import REFERENCE

from specdec_ext.contract import rule_names
from specdec_ext.testing import exact_law, filtered_law, step_law, toy_models

#: The others have no coins to integrate over.
LOSSLESS = rule_names(chains=True, lossless=True, takes_coins=True)


def law_of(backend, rule, seed=0, vocab=3, gamma=2, models=None, **kwargs):
    target, draft = models or toy_models(seed, vocab, gamma)
    # 2^-34 = 6e-11, of each of a few steps.
    return exact_law(backend.verify, target, draft, rule=rule, bits=34, **kwargs)


def check(backend, law):
    assert law.tv < backend.tv
    assert law.threshold_gap < 1e-6  # accept_probs is float32 and says where the coin turns
    assert abs(float(law.num_accepted.sum()) - 1) < 1e-9


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("vocab, gamma", [(1, 2), (2, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
def test_emitted_law_is_the_targets(backend, rule, vocab, gamma):
    law = law_of(backend, rule, seed=vocab + 10 * gamma, vocab=vocab, gamma=gamma)
    check(backend, law)
    assert law.status == 0


@pytest.mark.thorough
@pytest.mark.parametrize("rule", LOSSLESS)
def test_three_tokens_over_three(backend, rule):
    check(backend, law_of(backend, rule, seed=4, vocab=3, gamma=3))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("seed", range(12))
def test_many_pairs_of_models(operator, rule, seed):
    check(operator, law_of(operator, rule, seed=seed, vocab=4, gamma=3))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits(backend, rule, dtype):
    # The law of bfloat16 logits is that of their exact values.
    check(backend, law_of(backend, rule, models=toy_models(3, 3, 2, dtype=dtype)))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.6),
        dict(temperature=1.7),
        dict(temperature=0.8, draft_temperature=1.4),
        dict(draft_temperature=0.0),
        dict(temperature=0.9, top_k=2),
        dict(top_k=2, draft_top_k=0),
        dict(top_p=0.7),
        dict(min_p=0.3),
        dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05),
        dict(temperature=0.7, top_p=0.8, draft_temperature=0.4, draft_top_k=2, draft_top_p=1.0),
    ],
    ids=str,
)
def test_filters_and_temperatures(backend, rule, options):
    check(backend, law_of(backend, rule, seed=5, vocab=3, gamma=2, **options))


@pytest.mark.parametrize("rule", ["block", "token", "greedy", "lenient", "typical"])
def test_temperature_zero_is_greedy_decoding(backend, rule):
    def verify(*args, temperature, **kwargs):
        # The rule of that name is greedy at any temperature.
        temperature = temperature if rule != "greedy" else torch.ones_like(temperature)
        return backend.verify(*args, temperature=temperature, **kwargs)

    target, draft = toy_models(6, 3, 2)
    law = exact_law(verify, target, draft, rule=rule, temperature=0.0)
    first = int(target[0].argmax())
    second = int(target[1][first].argmax())
    greedy = torch.zeros_like(law.joint)
    greedy[first, second, int(target[2][first, second].argmax())] = 1.0
    assert torch.equal(law.joint, greedy)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kinds", [(0, 0), (0, 1), (1, 0)])
def test_deterministic_columns(backend, rule, kinds):
    check(backend, law_of(backend, rule, seed=7, kinds=kinds))


@pytest.mark.parametrize("share", [0.7, 0.999, 0.99999])
def test_block_keeps_the_law_where_nearly_everything_is_accepted(backend, share):
    # The thresholds are ratios of what p near 1 leaves: an error of p in the seventh place is one
    # in the fourth of theirs. What they say together is p, to the seventh place again.
    batch, gamma, vocab = 8, 5, 3000
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(batch, gamma + 1, vocab, generator=generator) * 3
    tokens = torch.randint(vocab, (batch, gamma), generator=generator)
    index = tokens[..., None]
    others = logits[:, :-1].scatter(-1, index, -torch.inf).logsumexp(-1, keepdim=True)
    logits[:, :-1].scatter_(-1, index, others + math.log(share / (1 - share)))
    uniforms = torch.full((batch, gamma + 1), 0.5, dtype=torch.float64)
    found = backend.verify(logits, tokens, uniforms=uniforms, rule="block")
    p = filtered_law(logits[:, :-1]).gather(-1, index)[..., 0]
    # At least i are accepted unless the coins from i on all fail.
    reach = 1 - (1 - found.accept_probs.double()).flip(-1).cumprod(-1).flip(-1)
    assert float((reach - p.cumprod(-1)).abs().max()) < 2e-6  # accept_probs is float32


@pytest.mark.parametrize("rule", LOSSLESS)
def test_drafter_without_a_law(backend, rule):
    target, draft = toy_models(8, 3, 2)
    drawn = [filtered_law(table) for table in draft]
    law = exact_law(backend.verify, target, drawn=drawn, kinds=(0, 0), rule=rule)
    check(backend, law)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_draft_probs(backend, rule):
    check(backend, law_of(backend, rule, seed=9, as_probs=True))


def by_lists(verify, number):
    """Pass the draft's laws as lists of their `number` likeliest tokens, the ids shuffled."""

    def call(draft_probs, **inputs):
        top = draft_probs.topk(number, -1)
        ids, values = top.indices.flip(-1), top.values.flip(-1)
        return verify(**inputs, draft_probs=values, draft_probs_ids=ids)

    return call


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.7, top_p=0.9), dict(kinds=(0, 1))], ids=str
)
def test_lists_of_draft_tokens(backend, rule, options):
    # The draft knows two of four tokens at every step.
    target, draft = toy_models(27, 4, 2)
    drawn = [filtered_law(table, top_k=2) for table in draft]
    law = exact_law(
        by_lists(backend.verify, 2), target, drawn=drawn, as_probs=True, rule=rule, **options
    )
    check(backend, law)
    assert law.mean_accepted > 0.3


@pytest.mark.thorough
@pytest.mark.parametrize("rule", LOSSLESS)
def test_draft_probs_under_target_filters(backend, rule):
    # Probabilities are what was sampled from: the target's filters do not apply to them.
    target, draft = toy_models(9, 4, 2)
    drawn = [filtered_law(table) for table in draft]
    law = exact_law(
        backend.verify, target, drawn=drawn, as_probs=True, rule=rule, temperature=0.5, top_k=2
    )
    check(backend, law)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("vocab, draft_vocab", [(4, 2), (2, 4), (3, 1)])
def test_draft_vocabulary_of_another_size(backend, rule, vocab, draft_vocab):
    models = toy_models(10, vocab, 2, draft_vocab)
    check(backend, law_of(backend, rule, models=models))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("ending", ["lengths", "placeholder", "invalid"])
def test_drafts_that_stop(backend, rule, ending):
    # A drafter may stop on what it has seen (here after token 1), never on what it would draw next.
    law = law_of(backend, rule, seed=11, stop=lambda prefix: 1 in prefix, ending=ending)
    check(backend, law)
    assert law.status == (2 if ending == "invalid" else 0)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("ending", ["lengths", "placeholder"])
def test_a_draft_of_length_zero_is_plain_sampling(backend, rule, ending):
    law = law_of(backend, rule, seed=12, stop=lambda prefix: True, ending=ending)
    check(backend, law)
    assert law.mean_accepted == 0


@pytest.mark.parametrize("rule", LOSSLESS)
def test_no_columns_at_all(backend, rule):
    check(backend, law_of(backend, rule, seed=13, vocab=4, gamma=0))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_masked_logits(backend, rule):
    target, draft = toy_models(14, 4, 2)
    for table in target:
        table[..., 1] = -torch.inf  # the draft may propose it, the target never emits it
    for table in draft:
        table[..., 2] = -torch.inf
    law = law_of(backend, rule, models=(target, draft))
    check(backend, law)
    assert float(law.joint.sum((1, 2))[1]) == 0


def random_masks(seed, vocab, gamma, entries=None):
    """Tables of what is allowed after each prefix; always one, also of the draft's entries."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(vocab) if entries is None else entries
    tables = []
    for depth in range(gamma + 1):
        allowed = torch.rand([vocab] * (depth + 1), generator=generator) < 0.6
        one = ids[torch.randint(len(ids), [vocab] * depth, generator=generator)]
        tables.append(allowed.scatter(-1, one[..., None], True))
    return tables


FILTERED = dict(temperature=0.8, top_p=0.9, draft_temperature=1.3, draft_top_k=2)
IDS = torch.tensor([3, 1])  # a draft of two of four tokens


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("options", [FILTERED, dict(as_probs=True), dict(kinds=(0, 1))], ids=str)
def test_grammar_masks(backend, rule, options):
    models = toy_models(23, 3, 2)
    law = law_of(backend, rule, models=models, allowed=random_masks(23, 3, 2), **options)
    check(backend, law)
    assert int((law.joint == 0).sum()) > 10  # of 27: many sequences are not allowed
    assert law.mean_accepted > 0.1


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("options", [FILTERED, dict(as_probs=True), dict(kinds=(1, 0))], ids=str)
def test_reduced_draft_vocabulary(backend, rule, options):
    models = toy_models(24, 4, 2, draft_vocab=2)
    law = law_of(backend, rule, models=models, draft_token_ids=IDS, **options)
    check(backend, law)
    assert law.mean_accepted > 0.3


def among_others(verify):
    """Every request beside another one: greedy, without filters, with its neighbours' inputs."""

    def mixed(**inputs):
        shared = ("draft_token_ids",)
        tensors = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and name not in shared
        }
        beside = {name: value.roll(1, 0) for name, value in tensors.items()}
        beside["temperature"] = torch.zeros_like(tensors["temperature"])
        beside["top_p"] = torch.ones_like(tensors["top_p"])
        both = {
            name: torch.stack([value, beside[name]], 1).flatten(0, 1)
            for name, value in tensors.items()
        }
        outcome = verify(**{**inputs, **both})
        return tuple(output[::2] for output in outcome)

    return mixed


@pytest.mark.parametrize("rule", LOSSLESS)
def test_masks_filters_and_a_reduced_vocabulary_in_a_mixed_batch(backend, rule):
    models = toy_models(25, 4, 2, draft_vocab=2)
    law = exact_law(
        among_others(backend.verify),
        *models,
        rule=rule,
        bits=34,
        allowed=random_masks(25, 4, 2, IDS),
        draft_token_ids=IDS,
        **FILTERED,
    )
    check(backend, law)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_equal_laws_accept_everything(backend, rule):
    target, _ = toy_models(15, 3, 2)
    law = law_of(backend, rule, models=(target, target[:2]))
    check(backend, law)
    assert law.num_accepted.tolist() == pytest.approx([0, 0, 1], abs=1e-12)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_disjoint_laws_accept_nothing(backend, rule):
    target, draft = toy_models(16, 4, 2)
    for table in target:
        table[..., :2] = -torch.inf
    for table in draft:
        table[..., 2:] = -torch.inf
    law = law_of(backend, rule, models=(target, draft))
    check(backend, law)
    assert law.mean_accepted == 0


@pytest.mark.thorough
def test_lenience_of_one_is_the_token_rule(backend):
    law = law_of(backend, "lenient", seed=17, lenience=1.0)
    check(backend, law)
    assert law.mean_accepted == pytest.approx(law_of(backend, "token", seed=17).mean_accepted)


def test_lenience_is_bounded(backend):
    # Not lossless, and says so: no token above p / l.
    law = law_of(backend, "lenient", seed=18, gamma=1, lenience=0.5)
    assert law.tv > 1e-3
    assert float((law.joint.sum(1) / law.target.sum(1)).max()) <= 1 / 0.5 + 1e-6


@pytest.mark.parametrize("rule", ["top_beta", "typical"])
def test_rules_that_are_not_lossless_are_not(backend, rule):
    assert law_of(backend, rule, seed=19).tv > 0.05


def test_example_of_sun_et_al(backend):
    # arXiv 2403.10444, sections 1 and 3: V = {A, B}, context-independent, gamma = 2.
    p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    models = ([p, p.expand(2, 2), p.expand(2, 2, 2)], [q, q.expand(2, 2)])
    token = law_of(backend, "token", models=models)
    block = law_of(backend, "block", models=models)
    for law in (token, block):
        check(backend, law)
    # The probabilities are float32 logarithms, hence 1e-6.
    assert token.mean_accepted == pytest.approx(10 / 9, abs=1e-6)
    assert block.mean_accepted == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_as_much_as_token(operator, seed):
    block = law_of(operator, "block", seed=seed + 30, gamma=3, vocab=3)
    token = law_of(operator, "token", seed=seed + 30, gamma=3, vocab=3)
    assert block.mean_accepted >= token.mean_accepted - 1e-6
    # Both accept the first token, the last chance of a draft of 1, with sum min(p, q).
    one = [law_of(operator, rule, seed=seed, gamma=1).mean_accepted for rule in LOSSLESS]
    assert one[0] == pytest.approx(one[1], abs=1e-6)


def test_mean_accepted_is_the_acceptance_operator(backend):
    target, draft = toy_models(20, 5, 1)
    beta = backend.acceptance(target[0][None], draft[0][None])
    law = law_of(backend, "token", models=(target, draft))
    assert law.mean_accepted == pytest.approx(float(beta), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, dict(temperature=0.5), dict(top_k=3), dict(top_p=0.6), dict(min_p=0.2)],
    ids=str,
)
def test_sample_law(backend, options):
    logits = toy_models(21, 6, 0)[0][0].repeat(4, 1) * torch.tensor([[0.1], [1.0], [2.0], [4.0]])
    as_tensors = {
        key: torch.full((1,), value, dtype=torch.int64 if key == "top_k" else torch.float32)
        for key, value in options.items()
    }

    def outcome(row, u):
        params = {key: value.expand(len(row)) for key, value in as_tensors.items()}
        return backend.sample(logits[row], u, **params).tokens

    law = step_law(outcome, rows=4)
    expected = filtered_law(logits, **options)
    found = torch.zeros_like(expected)
    for (row, token), mass in law.items():
        found[row, token] = mass
    assert 0.5 * float((found - expected).abs().sum(1).max()) < backend.tv


def test_two_levels_of_a_hierarchy(backend):
    # Level 1 turns draft tokens into tokens of a middle model, level 2 verifies those with the
    # middle model as the draft. Independent coins (two streams): the target's law comes out. The
    # same composition with shared coins is a negative control.
    from test_negative_controls import hierarchy_tv

    assert hierarchy_tv(backend.verify, shared=False) < 10 * backend.tv


def test_reference_bound_is_far_below_what_a_bias_costs():
    # The bound is not vacuous: a coin off by 1e-7 would be seen.
    target, draft = toy_models(22, 3, 1)

    def shifted(*args, uniforms, **kwargs):
        uniforms = (uniforms + 1e-7).clamp(max=1 - 2**-53)
        return REFERENCE.verify(*args, uniforms=uniforms, **kwargs)

    assert exact_law(shifted, target, draft, rule="token").tv > 10 * REFERENCE.tv
