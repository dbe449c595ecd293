"""`verify`: the mathematics of a chain, then one function per rule.

See docs/design.md, "Acceptance".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import contract
from ..contract import (
    CHAIN_RULES,
    GREEDY_BELOW,
    KIND_DETERMINISTIC,
    KIND_SAMPLED,
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    Rule,
    VerifyResult,
)
from . import draws
from .draws import (
    clamped,
    inverse_cdf,
    law_weights,
    race,
    race_noise,
    residual_weights,
)
from .laws import (
    INF,
    NAN,
    DraftVocabulary,
    Filters,
    Law,
    both_filters,
    from_list,
    make_law,
    masked,
    prob_of,
    ratio,
    row_at,
    words_of,
)

__all__ = [
    "RULES",
    "chain_acceptance",
    "chain_inflow",
    "residual",
    "verify",
]


# -------------------------------------------------------------------------------------------------
# The mathematics of a chain
# -------------------------------------------------------------------------------------------------


def residual(p: Tensor, q: Tensor | None, w: float, excluded: Sequence[int] = ()) -> Tensor:
    """Positive part of ``w p - q`` with the excluded tokens set to 0, not normalised.

    Parameters
    ----------
    p : Tensor
        ``[V]`` float64, the target law.
    q : Tensor or None
        ``[Vd]`` float64, the draft law; None is q = 0 (a deterministic draft token).
    w : float
        The inflow: 1 for the token rule.
    excluded : sequence of int
        Tokens already tried. An id of V or above has nothing to exclude.

    Returns
    -------
    Tensor
        ``[V]`` float64, not negative. May be all 0: then the extra token is drawn from p.
    """
    positive = w * p
    if q is not None:
        both = min(len(p), len(q))
        positive[:both] -= q[:both]
        positive.clamp_(min=0.0)
    for token in excluded:
        if token < len(positive):
            positive[token] = 0.0
    return positive


def _next_inflow(w: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """Inflow of the child: min(1, w p/q) at a sampled token, w p at a deterministic one."""
    inflow = w * prob_of(p, token)
    if q is None:
        return inflow
    return ratio(inflow, prob_of(q, token))


def _threshold(w: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """Give h of an inner node: R / (R + (1 - w)), R the mass that its residual can emit."""
    if w == 1.0:
        return 1.0
    mass = w * (1.0 - prob_of(p, token)) if q is None else float(residual(p, q, w).sum())
    return mass / (mass + (1.0 - w))


def chain_inflow(
    target_probs: Sequence[Tensor], draft_probs: Sequence[Tensor | None], tokens: Sequence[int]
) -> list[float]:
    """Inflows ``w_0 .. w_L`` of a chain: w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)).

    Parameters
    ----------
    target_probs : sequence of Tensor
        At least L laws ``[V]``; law i is the target's after i draft tokens.
    draft_probs : sequence of Tensor or None
        L laws ``[Vd]``; law i is the one that token i was drawn from, with q(x) > 0 there. None is
        a deterministic token: w_i = w_{i-1} p(x_i).
    tokens : sequence of int
        L draft tokens.
    """
    inflows = [1.0]
    for p, q, token in zip(target_probs, draft_probs, tokens, strict=False):
        inflows.append(_next_inflow(inflows[-1], p, q, token))
    return inflows


def chain_acceptance(
    target_probs: Sequence[Tensor], draft_probs: Sequence[Tensor | None], tokens: Sequence[int]
) -> list[float]:
    """Thresholds ``h_1 .. h_L`` of block verification (Sun et al., arXiv 2403.10444).

    The number of accepted tokens is the largest i with u_i < h_i, 0 if there is none. Parameters as
    for `chain_inflow`.
    """
    inflows = chain_inflow(target_probs, draft_probs, tokens)
    inner = [
        0.0 if w == 0.0 else _threshold(w, p, q, token)
        for w, p, q, token in zip(
            inflows[1:-1], target_probs[1:], draft_probs[1:], tokens[1:], strict=False
        )
    ]
    return inner + inflows[1:][-1:]


# -------------------------------------------------------------------------------------------------
# What the rules read
# -------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What decides about one draft token: the target law, the draft law (None: none), the token."""

    law: Law
    q: Tensor | None
    token: int


class _Verdict(NamedTuple):
    """What a rule decides: accepted tokens, h of positions it looked at, and the extra token."""

    accepted: int
    accept_probs: list[float]
    token: int


class _Chain:
    """One request of `verify`, as the rules see it. Rows are read when a rule asks for them.

    Attributes
    ----------
    length : int
        L, the number of usable draft tokens. Shrinks when a rule reaches a row that ends the draft.
    status : int
        Status bits found so far.
    """

    def __init__(
        self,
        tokens: list[int],
        kinds: list[int],
        target_row: Callable[[int], Tensor | None],
        draft_law: Callable[[int], Tensor | None],
        filters: Filters,
        coins: list[float],
        noise: Callable[[int], Tensor],
        status: int,
        rule: Rule,
        options: _Options,
    ) -> None:
        self.tokens, self.kinds, self.rule = tokens, kinds, rule
        self.target_row, self.draft_law = target_row, cache(draft_law)
        self.filters, self.coins, self.final = filters, coins[:-1], coins[-1]
        self.noise = noise
        self.greedy = filters.temperature < GREEDY_BELOW
        self.length, self.status, self.options = len(tokens), status, options
        self.law = cache(self._law)
        self.raw_law = cache(self._raw_law)

    def _law(self, i: int) -> Law | None:
        """Law of row i under the request's parameters; None: the row has no law."""
        row = self.target_row(i)
        return None if row is None else make_law(row, self.filters)

    def _raw_law(self, i: int) -> Law | None:
        """Law of row i at T = 1 without filters."""
        row = self.target_row(i)
        return None if row is None else make_law(row, Filters())

    def step(self, i: int) -> _Step | None:
        """Read what decides about draft token i + 1; None: node i is a leaf, the chain ends there.

        A chain ends at its last token, at a target row without a law, and where a sampled token
        has no draft law or q(x) = 0: nothing was sampled from q there. T = 0 never reads q, nor do
        rules without a use for it.
        """
        law = self.law(i)
        if law is not None and i < self.length:
            reads_draft = self.rule.reads_draft_law and not self.greedy
            if not reads_draft or self.kinds[i] == KIND_DETERMINISTIC:
                return _Step(law, None, self.tokens[i])
            q = self.draft_law(i)
            if q is not None and prob_of(q, self.tokens[i]) > 0:
                return _Step(law, q, self.tokens[i])
            self.status |= STATUS_NO_DRAFT_LAW
        self.length = i
        return None

    def draw(self, i: int) -> int:
        """Draw from the target law of row i; token 0 where it has none."""
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return inverse_cdf(law_weights(law.weights), self.final)

    def draw_extra(self, i: int, w: float = 1.0) -> int:
        """Draw the token after i accepted ones: bonus at the end, else [w p - q]+ without x."""
        if i == self.length:
            return self.draw(i)
        step = self.step(i)
        assert step is not None
        p, q, x = step.law.probs, step.q, step.token
        weights = residual_weights(residual(p, q, 1.0 if q is None else w, [x]))
        # p and q can be equal to the last bit, or p all on x: then any token of p is as good.
        return inverse_cdf(weights, self.final) if int(weights.sum()) > 0 else self.draw(i)

    def race(self, i: int) -> int:
        """Race for the token after i accepted ones, on noise of that place; token 0: no law.

        T = 0 needs no case of its own: only the arg max takes part.
        """
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return race(law.weights, self.noise(i))

    def argmax(self, i: int) -> int:
        """Give the arg max of row i; token 0 where it has no law."""
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return law.argmax

    def logprob(self, i: int, token: int) -> float:
        """Log-probability to report for a token that row i emitted."""
        law = self.raw_law(i) if self.options.raw_logprobs else self.law(i)
        if law is None:
            return NAN
        # T = 0 reports 0 for any token: the lenient rule also accepts others than the arg max.
        return 0.0 if law.scale == INF else law.log_prob(token)


def _first_failure(
    chain: _Chain, test: Callable[[int, _Step], tuple[bool, float]]
) -> tuple[int, list[float]]:
    """Accept tokens one by one, stop at the first that fails `test`.

    `test` gives the decision about one token and the probability of accepting it. Returns the
    number of accepted tokens and the probabilities of those looked at (`full_accept_probs` looks at
    all).
    """
    accepted: int | None = None
    probs: list[float] = []
    i = 0
    while (step := chain.step(i)) is not None:
        accept, prob = test(i, step)
        probs.append(prob)
        if not accept and accepted is None:
            accepted = i
        if not accept and not chain.options.full_accept_probs:
            break
        i += 1
    return chain.length if accepted is None else accepted, probs


# -------------------------------------------------------------------------------------------------
# One function per rule
# -------------------------------------------------------------------------------------------------

_Decide: TypeAlias = Callable[[_Chain], _Verdict]

#: What each rule decides, by its name.
RULES: dict[str, _Decide] = {}


def _rule(name: str) -> Callable[[_Decide], _Decide]:
    """Make the function below it what `verify` does under a rule."""

    def enter(decide: _Decide) -> _Decide:
        RULES[name] = decide
        return decide

    return enter


@_rule("block")
def _block(chain: _Chain) -> _Verdict:
    """Block verification: all coins are flipped, the last success wins (Sun et al., 2403.10444).

    T = 0 needs no case of its own: p is a point mass, q is not read, so w and h are 0 or 1.
    """
    inflows: list[float] = [1.0]
    thresholds: list[float] = []
    for i in range(chain.length + 1):
        w = inflows[i]
        if w == 0.0:  # no inflow: h = 0 in all that follows, and no row is looked at
            thresholds.append(0.0)
            inflows.append(0.0)
        elif (step := chain.step(i)) is None:
            thresholds.append(w)
            break
        else:
            p, q, x = step.law.probs, step.q, step.token
            thresholds.append(_threshold(w, p, q, x))
            inflows.append(_next_inflow(w, p, q, x))
    heads = [i for i in range(1, len(thresholds)) if chain.coins[i - 1] < thresholds[i]]
    accepted = max(heads, default=0)
    return _Verdict(accepted, thresholds[1:], chain.draw_extra(accepted, inflows[accepted]))


@_rule("token")
def _token(chain: _Chain) -> _Verdict:
    """Token-wise rejection (Leviathan et al., arXiv 2211.17192, Algorithm 1)."""

    def test(i: int, step: _Step) -> tuple[bool, float]:
        p, u = prob_of(step.law.probs, step.token), chain.coins[i]
        if step.q is None:
            return u < p, p
        q = prob_of(step.q, step.token)
        return u * q < p, ratio(p, q)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.draw_extra(accepted))


@_rule("greedy")
def _greedy(chain: _Chain) -> _Verdict:
    """Accept what the arg max would have emitted. Reads neither q nor a coin."""

    def test(i: int, step: _Step) -> tuple[bool, float]:
        accept = step.token == step.law.argmax
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.argmax(accepted))


@_rule("lenient")
def _lenient(chain: _Chain) -> _Verdict:
    """Token-wise with l q in place of q (Leviathan et al., appendix A.5): not lossless.

    At T = 0: accept p(x) >= l max p on the raw softmax, correct by the arg max.
    """
    lenience = chain.options.lenience

    def test(i: int, step: _Step) -> tuple[bool, float]:
        if chain.greedy:
            law, x = step.law, step.token
            accept = x < len(law.logits) and math.exp(float(law.logits[x]) - law.max) >= lenience
            return accept, float(accept)
        p, u = prob_of(step.law.probs, step.token), chain.coins[i]
        q = lenience * (1.0 if step.q is None else prob_of(step.q, step.token))
        return u * q < p, ratio(p, q)

    accepted, probs = _first_failure(chain, test)
    if chain.greedy:
        return _Verdict(accepted, probs, chain.argmax(accepted))
    return _Verdict(accepted, probs, chain.draw_extra(accepted))


@_rule("top_beta")
def _top_beta(chain: _Chain) -> _Verdict:
    """Accept near the top of the raw row (Xia et al., eq. 8-10), else the top-1: not lossless."""
    beta, tau = chain.options.beta, chain.options.tau

    def test(i: int, step: _Step) -> tuple[bool, float]:
        law, x = step.law, step.token
        if x >= len(law.logits):
            return False, 0.0
        rank = 1 + int((law.logits > law.logits[x]).sum())
        accept = rank <= beta and law.max - float(law.logits[x]) <= tau
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.argmax(accepted))


@_rule("typical")
def _typical(chain: _Chain) -> _Verdict:
    """Accept p(x) > min(epsilon, delta exp(-H(p))) (Medusa, arXiv 2401.10774): not lossless."""
    if chain.greedy:
        return _greedy(chain)
    epsilon, delta = chain.options.epsilon, chain.options.delta

    def test(i: int, step: _Step) -> tuple[bool, float]:
        p = step.law.probs
        entropy = -float(torch.special.xlogy(p, p).sum())
        accept = prob_of(p, step.token) > min(epsilon, delta * math.exp(-entropy))
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.draw(accepted))


@_rule("coupled")
def _coupled(chain: _Chain) -> _Verdict:
    """Accept what the target's own race would have emitted (Daliri, Musco, Suresh 2024).

    The noise belongs to the place in the sequence, so that the tokens are those of plain sampling
    by the same race, whatever was drafted. Reads neither q nor a coin.
    """

    def test(i: int, step: _Step) -> tuple[bool, float]:
        accept = step.token == chain.race(i)
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.race(accepted))


# -------------------------------------------------------------------------------------------------
# verify
# -------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The scalar arguments of `verify`."""

    lenience: float
    beta: int
    tau: float
    epsilon: float
    delta: float
    full_accept_probs: bool
    raw_logprobs: bool


@torch.no_grad()
def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_probs_ids: Tensor | None = None,
    target_rows: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    draft_kinds: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    rule: str = "block",
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    full_accept_probs: bool = False,
    raw_logprobs: bool = False,
) -> VerifyResult:
    """Verify chains of draft tokens; see `specdec_ext.verify`."""
    if rule not in CHAIN_RULES:
        raise ValueError(f"verify: rule must be one of {', '.join(CHAIN_RULES)}, got {rule!r}")
    traits = contract.RULES[rule]
    batch, gamma = draft_tokens.shape
    vocab = target_logits.shape[-1]
    draft = draft_logits if draft_logits is not None else draft_probs
    # A map that is not read cannot be wrong.
    entries = DraftVocabulary(draft_token_ids if traits.reads_draft_law else None, vocab)
    ids = vocab  # draft tokens are below it
    if draft is not None and draft_token_ids is None and draft_probs_ids is None:
        ids = max(vocab, draft.shape[-1])
    raw_logprobs = raw_logprobs or traits.raw_logprobs
    options = _Options(lenience, beta, tau, epsilon, delta, full_accept_probs, raw_logprobs)

    target_filters, draft_filters = both_filters(
        (temperature, top_k, top_p, min_p),
        (draft_temperature, draft_top_k, draft_top_p, draft_min_p),
    )
    if seeds is not None:
        assert positions is not None
        uniforms = draws.uniforms(seeds, positions, gamma + 1, stream=stream)

    tokens = torch.full((batch, gamma + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    logprobs = torch.full((batch, gamma + 1), NAN, dtype=torch.float32)
    accept_probs = torch.full((batch, gamma), NAN, dtype=torch.float32)
    status = torch.zeros(batch, dtype=torch.int32)

    for b in range(batch):
        bits = 0 if entries.is_valid else STATUS_PARAMETER_OUT_OF_RANGE

        def target_row(i: int, b: int = b) -> Tensor | None:
            row = row_at(target_logits, target_rows, b, i)
            return None if row is None else masked(row, words_of(allowed_mask, b, i), vocab)

        def noise(i: int, b: int = b) -> Tensor:
            assert seeds is not None and positions is not None
            position = int(positions[b]) + i
            return race_noise(int(seeds[b]), position, torch.arange(vocab), stream)

        # The columns that can be used at all: before the end, before the first -1 or invalid id.
        given_length = gamma if draft_lengths is None else int(draft_lengths[b])
        if not 0 <= given_length <= gamma:
            bits |= STATUS_PARAMETER_OUT_OF_RANGE
        ids_read: list[int] = []
        kinds: list[int] = []
        for i in range(min(max(given_length, 0), gamma)):
            token = int(draft_tokens[b, i])
            if token == -1:
                break
            kind = int(draft is not None) if draft_kinds is None else int(draft_kinds[b, i])
            if not 0 <= token < ids or kind not in (KIND_DETERMINISTIC, KIND_SAMPLED):
                bits |= STATUS_INVALID_DRAFT_TOKEN
                break
            ids_read.append(token)
            kinds.append(kind)

        # The parameters.
        filters, draft_parameters = Filters(), Filters()
        if rule == "greedy":
            filters = Filters(temperature=0.0)
        elif not traits.ignores_sampling:
            filters, bad = target_filters(b).checked()
            draft_parameters, draft_bad = draft_filters(b).checked()
            if bad or (draft_bad and draft_logits is not None):
                bits |= STATUS_PARAMETER_OUT_OF_RANGE

        def draft_law(i: int, b: int = b, parameters: Filters = draft_parameters) -> Tensor | None:
            row = None if draft is None else row_at(draft, draft_rows, b, i)
            if row is not None and draft_probs_ids is not None:
                place = (b, i) if draft_rows is None else int(draft_rows[b, i])
                row = from_list(row, draft_probs_ids[place].cpu(), vocab)
            if row is None or not entries.is_valid:
                return None
            words = words_of(allowed_mask, b, i)
            return entries.law_of(row, words, None if draft_probs is not None else parameters)

        # The coins: those of the usable columns, and the last slot for the final draw.
        coins = [0.0] * (gamma + 1)
        if traits.takes_coins and filters.temperature >= GREEDY_BELOW:
            assert uniforms is not None
            given = uniforms[b].tolist()
            for slot in [*range(len(ids_read)), gamma]:
                coins[slot] = clamped(given[slot])
                if coins[slot] != given[slot]:
                    bits |= STATUS_PARAMETER_OUT_OF_RANGE

        chain = _Chain(
            ids_read, kinds, target_row, draft_law, filters, coins, noise, bits, traits, options
        )
        accepted, probs, extra = RULES[rule](chain)
        emitted = ids_read[:accepted] + [extra]
        tokens[b, : accepted + 1] = torch.tensor(emitted)
        num_accepted[b] = accepted
        accept_probs[b, : len(probs)] = torch.tensor(probs, dtype=torch.float64)
        for i, token in enumerate(emitted):
            logprobs[b, i] = chain.logprob(i, token)
        status[b] = chain.status

    device = target_logits.device
    return VerifyResult(
        tokens.to(device),
        num_accepted.to(device),
        logprobs.to(device),
        accept_probs.to(device),
        status.to(device),
    )
