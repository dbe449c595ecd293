"""The rules that are not lossless: each against the law that its definition promises.

`promised` enumerates a definition in float64, over all drafts; `exact_law` finds what a verifier
emits. The two must be equal, not close. Each mistake that is easily made in a rule is a verifier of
its own (`Stepwise`) and must come out biased by more than `BIAS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from backends import HAS_GPU
from conftest import TRITON, f64, log_probs
from test_negative_controls import BIAS, draw

from specdec_ext.testing import (
    ExactLaw,
    VerifyOutcome,
    exact_law,
    filtered_law,
    joint_law,
    make_case,
    toy_models,
)

# ---- definitions --------------------------------------------------------------------------------


class Node(NamedTuple):
    """What a rule that stops at its first failure does at one node; laws are ``[V]``."""

    accepts: torch.Tensor  # probability of accepting each draft token
    failure: torch.Tensor  # law of what replaces the first one that fails
    bonus: torch.Tensor


#: From the target's row and the draft's law to a node.
Definition = Callable[[torch.Tensor, torch.Tensor], Node]


def normalised(weights):
    return weights / weights.sum() if weights.sum() > 0 else torch.ones_like(weights)


def point(token, size):
    return torch.zeros(size, dtype=torch.float64).index_fill_(0, torch.as_tensor(token), 1.0)


def ratio(p, q):
    """Min(1, p / q), 1 where nothing is ever drawn."""
    return torch.where(p >= q, 1.0, p / q)


def lenient(lenience, residual=lambda p, q, lenience: p - q, **filters) -> Definition:
    """Leviathan et al., appendix A.5: accept while u l q(x) < p(x), the residual of Algorithm 1."""

    def node(row, q):
        p = filtered_law(row, **filters)
        left = normalised(residual(p, q, lenience).clamp(min=0))
        return Node(ratio(p, lenience * q), left, p)

    return node


def lenient_greedy(lenience, accepts=lambda p, bound: p >= bound) -> Definition:
    """A.5 at T = 0: accept while p(x) >= l max p on the unfiltered softmax, else the arg max."""

    def node(row, q):
        p = filtered_law(row)
        top = point(p.argmax(), len(p))
        return Node(accepts(p, lenience * p.max()).double(), top, top)

    return node


def top_beta(beta, tau, rank=None, gap=torch.le, place=0) -> Definition:
    """Xia et al., equations 8 to 10; the first failure and the bonus are the top-1."""

    def node(row, q):
        row = row.double()  # log P but for the normaliser, which drops out: exact
        ranked = row.sort(descending=True, stable=True)
        near = gap(ranked.values[0] - row, torch.tensor(tau, dtype=torch.float64))
        good = rank(row) <= beta if rank else row >= ranked.values[beta - 1]
        failure = point(ranked.indices[place], len(row))
        return Node((good & near).double(), failure, point(ranked.indices[0], len(row)))

    return node


def typical(
    epsilon,
    delta,
    entropy=lambda p, row: -torch.special.xlogy(p, p).sum(),
    failure=lambda p, q: p,
    accepts=torch.gt,
    **filters,
) -> Definition:
    """Medusa (Cai et al., arXiv 2401.10774), section 3.3: failure and bonus are drawn from p."""

    def node(row, q):
        p = filtered_law(row, **filters)
        bound = torch.clamp(delta * (-entropy(p, row)).exp(), max=epsilon)
        return Node(accepts(p, bound).double(), failure(p, q), p)

    return node


# ---- the law that a definition gives, and a verifier made from it -------------------------------


class Models(NamedTuple):
    """Target and draft tables (`toy_models`), and the law that draft tokens are drawn from."""

    target: list[torch.Tensor]
    draft: list[torch.Tensor] | None
    drawn: list[torch.Tensor]


def models_of(seed, vocab=4, gamma=2, deterministic=False, noise=1.0, **draft_filters) -> Models:
    target, draft = toy_models(seed, vocab, gamma, noise=noise)
    drawn = [filtered_law(table, **draft_filters) for table in draft]
    if deterministic:
        return Models(target, None, [torch.eye(vocab).double()[q.argmax(-1)] for q in drawn])
    return Models(target, draft, drawn)


def promised(definition: Definition, models: Models, **filters) -> torch.Tensor:
    """Joint law ``[V] * (G+1)`` of what a definition emits, continued by the target's law."""
    continuation = [filtered_law(table, **filters) for table in models.target]
    gamma, vocab = len(models.drawn), len(models.target[0])
    joint = torch.zeros([vocab] * (gamma + 1), dtype=torch.float64)

    def walk(prefix, mass):
        depth = len(prefix)
        row = models.target[depth][prefix]
        if depth == gamma:
            joint[prefix] += mass * definition(row, torch.ones(vocab)).bonus
            return
        q = models.drawn[depth][prefix]
        accepts, failure, _ = definition(row, q)
        following = [table[prefix] for table in continuation[depth + 1 :]]
        failed = mass * float((q * (1 - accepts)).sum())
        joint[prefix] += failed * joint_law([failure, *following])
        for x, chance in enumerate((q * accepts).tolist()):
            walk((*prefix, x), mass * chance)

    walk((), 1.0)
    return joint


class Stepwise:
    """A verifier made from a definition, in float64, one request after the other."""

    def __init__(self, definition: Definition, models: Models) -> None:
        self.definition = definition
        self.drawn = models.drawn

    def __call__(self, target_logits, draft_tokens, draft_logits=None, *, uniforms, **_):
        batch, gamma = draft_tokens.shape
        tokens = torch.full((batch, gamma + 1), -1)
        accepted = torch.zeros(batch, dtype=torch.int32)
        h = torch.full((batch, gamma), math.nan)
        for b in range(batch):
            prefix = tuple(draft_tokens[b].tolist())
            nodes = [
                self.definition(target_logits[b, i], self.drawn[i][prefix[:i]])
                for i in range(gamma)
            ]
            h[b] = torch.tensor([float(n.accepts[x]) for n, x in zip(nodes, prefix, strict=True)])
            passes = [*(uniforms[b, :gamma] < h[b]).tolist(), False]
            n = passes.index(False)
            last = nodes[n].failure if n < gamma else self.definition(
                target_logits[b, gamma], torch.ones(target_logits.shape[-1])
            ).bonus  # fmt: skip
            tokens[b, :n] = draft_tokens[b, :n]
            tokens[b, n] = draw(last[None], uniforms[b, gamma:])[0]
            accepted[b] = n
        nan = torch.full((batch, gamma + 1), math.nan)
        return VerifyOutcome(tokens, accepted, nan, h, torch.zeros(batch, dtype=torch.int32))


def tv(law: ExactLaw, expected: torch.Tensor) -> float:
    return 0.5 * float((law.joint - expected).abs().sum())


# Triton's interpreter finds steps on multiples of 2^-10 only; a few of them are the bound.
SLOW = {TRITON.name: (10, 4e-3)} if not HAS_GPU else {}


def check(backend, models, expected, **options) -> ExactLaw:
    """Find the law that a backend emits, and compare all of it."""
    bits, bound = SLOW.get(backend.name, (34, backend.tv))
    kinds = None if models.draft is not None else [0] * len(models.drawn)
    drawn = None if models.draft is not None else models.drawn
    law = exact_law(
        backend.verify, models.target, models.draft, drawn=drawn, kinds=kinds, bits=bits, **options
    )
    assert abs(float(expected.sum()) - 1) < 1e-12
    assert tv(law, expected) < bound
    assert law.status == 0
    return law


# ---- the whole law, rule by rule ----------------------------------------------------------------

FILTERED = dict(temperature=0.7, top_k=3, min_p=0.02)


@pytest.mark.parametrize(
    "lenience, deterministic, filters",
    [
        (0.7, False, {}),
        (0.3, False, FILTERED),
        (0.5, True, {}),
        (1.0, False, dict(top_p=0.8)),
        (0.01, False, {}),
    ],
    ids=str,
)
def test_law_of_lenient(backend, lenience, deterministic, filters):
    models = models_of(50, deterministic=deterministic, **filters)
    expected = promised(lenient(lenience, **filters), models, **filters)
    law = check(backend, models, expected, rule="lenient", lenience=lenience, **filters)
    # What the paper promises: no token above p / l.
    first, p = law.joint.sum((1, 2)), law.target.sum((1, 2))
    assert bool((first <= p / lenience + 1e-5).all())
    assert (tv(law, law.target) > BIAS) == (lenience < 1)


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_law_of_lenient_at_temperature_zero(backend, lenience):
    models = models_of(51)
    expected = promised(lenient_greedy(lenience), models, temperature=0.0)
    law = exact_law(
        backend.verify,
        models.target,
        drawn=models.drawn,  # drawn at T = 1, whatever the target's temperature
        kinds=[1, 1],
        rule="lenient",
        lenience=lenience,
        temperature=0.0,
        top_k=1,  # the row is read unfiltered
    )
    assert tv(law, expected) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("beta, tau", [(1, 1.0), (2, 1.0), (3, 0.8), (4, 9.0)])
def test_law_of_top_beta(backend, beta, tau):
    models = models_of(52)
    expected = promised(top_beta(beta, tau), models)
    check(backend, models, expected, rule="top_beta", beta=beta, tau=tau)


@pytest.mark.parametrize(
    "epsilon, delta, filters",
    [(0.09, 0.3, {}), (0.5, 0.6, FILTERED), (0.2, 0.9, dict(top_p=0.9)), (1.0, 1.0, {})],
    ids=str,
)
def test_law_of_typical(backend, epsilon, delta, filters):
    models = models_of(53, **filters)
    expected = promised(typical(epsilon, delta, **filters), models, **filters)
    check(backend, models, expected, rule="typical", epsilon=epsilon, delta=delta, **filters)


@pytest.mark.parametrize(
    "definition, options",
    [
        (lenient(0.6), dict(rule="lenient", lenience=0.6)),
        (top_beta(2, 1.0), dict(rule="top_beta", beta=2, tau=1.0)),
        (typical(0.3, 0.9), dict(rule="typical", epsilon=0.3, delta=0.9)),
    ],
    ids=["lenient", "top_beta", "typical"],
)
def test_laws_of_one_token(backend, definition, options):
    # Small enough for Triton's interpreter.
    models = models_of(50, vocab=3, gamma=1, noise=2.5)
    law = check(backend, models, promised(definition, models), **options)
    assert tv(law, law.target) > BIAS


# ---- what must come out wrong -------------------------------------------------------------------


def entropy_in_bits(p, row):
    return -torch.special.xlogy(p, p).sum() / math.log(2)


def entropy_unfiltered(p, row):
    q = filtered_law(row)
    return -torch.special.xlogy(q, q).sum()


def rank_that_counts_ties(row):
    return (row[None] >= row[:, None]).sum(1)  # x itself included


#: Name: the definition, the mistake, a seed of models that show it, filters.
MISTAKES = {
    "lenient, residual [p - l q]+": (
        lenient(0.5),
        lenient(0.5, residual=lambda p, q, lenience: p - lenience * q),
        83,
        {},
    ),
    "lenient, residual p": (
        lenient(0.7),
        lenient(0.7, residual=lambda p, q, lenience: p),
        74,
        {},
    ),
    "lenient, l p for l q": (lenient(0.7), lenient(1 / 0.7), 85, {}),
    "lenient at T = 0, as printed": (
        lenient_greedy(0.6),
        lenient_greedy(0.6, accepts=torch.le),
        71,
        dict(temperature=0.0),
    ),
    "top_beta, a rank too many": (top_beta(2, 1.0), top_beta(3, 1.0), 74, {}),
    "top_beta, second-best emitted": (top_beta(2, 1.0), top_beta(2, 1.0, place=1), 71, {}),
    "top_beta, gap of the probabilities": (
        top_beta(3, 0.8),
        top_beta(3, 0.8, gap=lambda gap, tau: 1 - (-gap).exp() <= tau),
        88,
        {},
    ),
    "typical, entropy in bits": (
        typical(0.5, 0.9),
        typical(0.5, 0.9, entropy=entropy_in_bits),
        72,
        {},
    ),
    "typical, entropy of the unfiltered law": (
        typical(0.9, 0.9, temperature=2.0),
        typical(0.9, 0.9, entropy=entropy_unfiltered, temperature=2.0),
        72,
        dict(temperature=2.0),
    ),
    "typical, max for min": (typical(0.09, 0.9), typical(9.0, 0.9), 66, {}),
    "typical, failure drawn from [p - q]+": (
        typical(0.5, 0.6),
        typical(0.5, 0.6, failure=lambda p, q: normalised((p - q).clamp(min=0))),
        57,
        {},
    ),
    "typical, failure replaced by the best": (
        typical(0.5, 0.6),
        typical(0.5, 0.6, failure=lambda p, q: point(p.argmax(), len(p))),
        88,
        {},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen(name):
    right, wrong, seed, filters = MISTAKES[name]
    draft_filters = {} if filters.get("temperature") == 0 else filters
    models = models_of(seed, vocab=3, noise=2.5, **draft_filters)
    expected = promised(right, models, **filters)

    def law_of(definition):
        verify = Stepwise(definition, models)
        return exact_law(verify, models.target, drawn=models.drawn, bits=24, **filters)

    assert tv(law_of(right), expected) < 1e-6
    assert tv(law_of(wrong), expected) > BIAS


def test_the_bound_alone_does_not_see_a_wrong_residual():
    # Both residuals keep every token below p / l; only one of them is the rule's law.
    right, wrong, seed, _ = MISTAKES["lenient, residual [p - l q]+"]
    models = models_of(seed, vocab=3, noise=2.5)
    laws = [promised(definition, models) for definition in (right, wrong)]
    p = filtered_law(models.target[0])
    for law in laws:
        assert bool((law.sum((1, 2)) <= p / 0.5).all())
    assert 0.5 * float((laws[0] - laws[1]).abs().sum()) > BIAS


# ---- lenient ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
def test_acceptance_of_lenient(backend, lenience):
    # A.5: alpha = sum min(p / l, q).
    models = models_of(54, vocab=5, gamma=1)
    expected = promised(lenient(lenience), models)
    law = check(backend, models, expected, rule="lenient", lenience=lenience)
    p, q = filtered_law(models.target[0]), models.drawn[0]
    assert law.mean_accepted == pytest.approx(
        float(torch.minimum(p / lenience, q).sum()), abs=SLOW.get(backend.name, (0, 1e-6))[1]
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(philox=True, layout="padded"),
        dict(dtype=torch.bfloat16, kinds="mixed", full_accept_probs=True),
        dict(draft="probs", vocab=33, draft_vocab=29),
        dict(draft="none", raw_logprobs=True),
        dict(draft_filters=True, packed=True, vocab=4099, batch=3),
    ],
    ids=str,
)
def test_lenience_of_one_is_token_bit_for_bit(backend, options):
    differs = False
    for seed in range(4):
        # At T = 0 the two differ in words, for tied tops: a test of its own below.
        case = make_case(seed, greedy_rows=False, **options)
        token = backend.run(case.replace(rule="token"))
        one = backend.run(case.replace(rule="lenient", lenience=1.0))
        for a, b in zip(one, token, strict=True):
            assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))
        less = backend.run(case.replace(rule="lenient", lenience=0.5)).accept_probs.nan_to_num()
        differs |= not torch.equal(less, token.accept_probs.nan_to_num())
    assert differs  # the control: another lenience is another rule


def one_token_each(backend, row, rule, **options):
    """Offer every token of a row in turn; which are accepted, and what comes out."""
    vocab = len(row)
    result = backend.verify(
        row.expand(vocab, 2, vocab),
        torch.arange(vocab)[:, None],
        uniforms=torch.full((vocab, 2), 0.5, dtype=torch.float64),
        rule=rule,
        **options,
    )
    assert result.status.tolist() == [0] * vocab
    return result.num_accepted.bool().tolist(), result.tokens.tolist()


def test_lenience_at_temperature_zero(backend):
    # p relative to the best: 1, 1, .5, .25. Equality accepts; an extra token is the first arg max.
    row = log_probs([0.25, 0.5, 0.125, 0.5]) + 3.0
    zero = dict(temperature=torch.zeros(4), top_k=torch.ones(4, dtype=torch.int64))
    for lenience, expected in [
        (1.0, [False, True, False, True]),
        (0.51, [False, True, False, True]),
        (0.49, [True, True, False, True]),
        (0.2, [True, True, True, True]),
    ]:
        accepted, tokens = one_token_each(backend, row, "lenient", lenience=lenience, **zero)
        assert accepted == expected
        assert tokens == [[x, 1] if yes else [1, -1] for x, yes in enumerate(accepted)]
    # As printed (p <= l max p), the same row would take the others; token 3 ties and is no arg max.
    greedy, _ = one_token_each(backend, row, "greedy")
    assert greedy == [False, True, False, False]


# ---- top_beta -----------------------------------------------------------------------------------

ROWS = {
    "distinct": [0.5, -1.0, 2.0, 1.25],
    "tied top": [2.0, 1.0, 2.0, 2.0, -3.0],
    "tied below": [1.0, 3.0, 1.0, 0.0, 1.0],
    "all equal": [0.25] * 4,
    "masked": [-math.inf, 0.0, 1.0, -math.inf, 1.0],
    "signed zeros": [0.0, -0.0, -1.0],
    "one": [1.5],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_equations_8_and_9(backend, name, dtype):
    # Logits, gaps and tau are exact in every dtype: equality accepts, on both sides.
    row = torch.tensor(ROWS[name], dtype=dtype)
    ranked = row.double().sort(descending=True).values
    best = int(row.double().argmax())
    gaps = {float(g) for g in ranked[0] - ranked if g < math.inf}
    taus = sorted(
        {t for g in gaps for t in (g, math.nextafter(g, 9), math.nextafter(g, -9)) if t >= 0}
    )
    for beta, tau in itertools.product(range(1, len(row) + 2), taus):
        accepted, tokens = one_token_each(backend, row, "top_beta", beta=beta, tau=tau)
        worst = ranked[min(beta, len(row)) - 1]
        expected = (row.double() >= worst) & (ranked[0] - row.double() <= tau)
        assert accepted == expected.tolist(), (beta, tau)
        assert tokens == [[x, best] if yes else [best, -1] for x, yes in enumerate(accepted)]


def test_equations_in_one_call(backend):
    # Gaps of 0, .75 and 1.5, the last of rank 4 since two tie for rank 2.
    row = torch.tensor([2.0, 1.25, 0.5, 1.25])
    for beta, tau, expected in [
        (3, 0.75, [True, True, False, True]),
        (2, math.nextafter(0.75, 0), [True, False, False, False]),
        (3, 1.5, [True, True, False, True]),
        (4, 1.5, [True] * 4),
    ]:
        accepted, _ = one_token_each(backend, row, "top_beta", beta=beta, tau=tau)
        assert accepted == expected, (beta, tau)


def test_strict_inequalities_and_ranks_that_count_ties_differ():
    # The controls of the test above: each of these mistakes shows on one of its rows.
    row, flat = torch.tensor(ROWS["distinct"]), torch.tensor(ROWS["tied below"])
    q = torch.ones(4)
    assert not torch.equal(
        top_beta(2, 0.75)(row, q).accepts, top_beta(2, 0.75, gap=torch.lt)(row, q).accepts
    )
    counted = top_beta(2, 9.0, rank=rank_that_counts_ties)(flat, torch.ones(5)).accepts
    assert not torch.equal(top_beta(2, 9.0)(flat, torch.ones(5)).accepts, counted)


@pytest.mark.parametrize("tau", [0.0, 1.0, 50.0])
def test_beta_of_one_is_greedy_where_the_top_is_not_tied(backend, tau):
    for seed in range(3):
        case = make_case(seed, batch=12, gamma=3, vocab=9, kinds="deterministic", philox=True)
        rows = case.inputs["target_logits"].sort(-1, descending=True).values
        untied = [b for b in range(12) if bool((rows[b, :, 0] > rows[b, :, 1]).all())]
        assert len(untied) > 4
        case = case.select(untied)
        greedy = backend.run(case.replace(rule="greedy"))
        one = backend.run(case.replace(rule="top_beta", beta=1, tau=tau))
        for field in ("tokens", "num_accepted", "accept_probs", "status"):
            a, b = getattr(one, field), getattr(greedy, field)
            assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)), field


def test_vanilla_verification_is_the_greedy_rule(backend):
    # Blockwise decoding (Stern et al. 2018; Xia et al., equation 2): the longest prefix of draft
    # tokens that are the target's top-1, then the target's next top-1.
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 4, 5, generator=generator)
    best = logits.argmax(-1)
    wrong = torch.randint(5, (64, 3), generator=generator)
    tokens = torch.where(torch.rand(64, 3, generator=generator) < 0.7, best[:, :3], wrong)
    n = (tokens == best[:, :3]).long().cumprod(1).sum(1)
    assert set(n.tolist()) == {0, 1, 2, 3}
    slot = torch.arange(4)
    expected = best.where(slot <= n[:, None], -1)  # accepted tokens are the top-1 themselves
    for rule, options in [("greedy", {}), ("top_beta", dict(beta=1, tau=0.0))]:
        result = backend.verify(logits, tokens, rule=rule, **options)
        assert torch.equal(result.num_accepted.long(), n)
        assert torch.equal(result.tokens, expected)


# ---- typical ------------------------------------------------------------------------------------


def test_threshold_of_typical_is_strict(backend):
    # Four equal logits: p = 1/4 to the bit, exp(-H) = 1/4 only to rounding; delta is out of reach.
    row = torch.zeros(4)
    accepted, _ = one_token_each(backend, row, "typical", epsilon=0.25, delta=9.0)
    assert accepted == [False] * 4
    below = math.nextafter(0.25, 0)
    accepted, _ = one_token_each(backend, row, "typical", epsilon=below, delta=9.0)
    assert accepted == [True] * 4


def test_entropy_of_typical_is_of_the_filtered_law_in_nats(backend):
    # top-k leaves two equal tokens: exp(-H) = 1/2, and p = 1/2 > delta / 2 for delta < 1 only.
    row = torch.tensor([1.0, 1.0, 0.0, -1.0])
    two = dict(top_k=torch.full((4,), 2), epsilon=9.0)
    assert (
        one_token_each(backend, row, "typical", delta=0.999, **two)[0] == [True] * 2 + [False] * 2
    )
    assert one_token_each(backend, row, "typical", delta=1.001, **two)[0] == [False] * 4
    # The controls: of the whole row, or in bits, both thresholds would lie below 1/2.
    p = filtered_law(row)
    assert 1.001 * math.exp(float(torch.special.xlogy(p, p).sum())) < 0.5
    assert 1.001 * math.exp(-1.0) < 0.5


def test_failure_of_typical_may_be_the_token_that_failed(backend):
    # Drawn from p, not from a residual: u chooses the rejected token again.
    row = log_probs([0.5, 0.3, 0.2])
    result = backend.verify(
        row.expand(1, 2, 3),
        torch.tensor([[1]]),
        uniforms=f64([[0.0, 0.6]]),
        rule="typical",
        epsilon=0.4,
        delta=9.0,
    )
    assert result.tokens.tolist() == [[1, -1]] and result.num_accepted.tolist() == [0]
