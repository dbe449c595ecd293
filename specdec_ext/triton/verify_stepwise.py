"""Rules that stop at their first failure: all but block.

Grid: a program a request. Reads 64 bytes a column and model; the tests of all columns are made at
once. Numerics: float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chain import (
    COLUMNS,
    NEVER,
    NO_DRAFT_LAW,
    coins_of,
    open_request,
    proposals_at,
    target_laws,
    task_after,
    write_verdict,
)
from .laws import NO_LAW, probability


@triton.jit
def accepts_relaxed_greedy(law, p, lenience, beta, tau, RULE: tl.constexpr):
    """Test drafted tokens at T = 0; csrc/core/relaxed.h."""
    below = law.max.to(tl.float64) - law.value.to(tl.float64)
    if RULE == "top_beta":
        accepts = (law.extra + 1.0 <= beta) & (below <= tau)
    elif RULE == "lenient":
        accepts = tl.exp(-below) >= lenience
    else:
        accepts = p > 0.0
    return accepts


@triton.jit
def accept_test(
    law, proposals, u, greedy, lenience, beta, tau, epsilon, delta,
    RULE: tl.constexpr, IGNORES_SAMPLING: tl.constexpr, RACED: tl.constexpr,
):  # fmt: skip
    """Whether a vector of drafted tokens passes its tests, and with which probability."""
    p = probability(law, law.value, proposals.token)
    certain = accepts_relaxed_greedy(law, p, lenience, beta, tau, RULE)
    if IGNORES_SAMPLING:
        accepts = certain
        chance = certain.to(tl.float64)
    elif RACED:
        wins = proposals.token.to(tl.float64) == law.extra
        accepts = tl.where(greedy, certain, wins)
        chance = accepts.to(tl.float64)
    elif RULE == "typical":
        likely = (p > epsilon) | (p > delta * tl.exp(-law.extra))  # than the smaller of the two
        accepts = tl.where(greedy, certain, likely)
        chance = accepts.to(tl.float64)
    else:
        bound = proposals.q
        if RULE == "lenient":
            bound = bound * lenience
        accepts = tl.where(greedy, certain, u * bound < p)
        chance = tl.where(p >= bound, 1.0, p / bound)
        chance = tl.where(greedy, certain.to(tl.float64), chance)
    return accepts, chance


@triton.jit(do_not_specialize=["gamma"])
def decide_stepwise(
    chain, laws, outputs, vocab, gamma,
    lenience: tl.float64, beta: tl.int64, tau: tl.float64, epsilon: tl.float64, delta: tl.float64,
    RULE: tl.constexpr, IGNORES_SAMPLING: tl.constexpr, READS_DRAFT: tl.constexpr,
    RACED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Take every request down its chain. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    request = open_request(chain, b, vocab, gamma, IGNORES_SAMPLING)
    leaf_at = tl.full([], NEVER, tl.int32)  # where the draft ends
    fail_at = tl.full([], NEVER, tl.int32)  # the first rejection
    unusable_at = tl.full([], NEVER, tl.int32)
    failed_token = tl.full([], 0, tl.int64)
    failed_sampled = tl.full([], 0, tl.int32)
    final = tl.full([], 0.0, tl.float64)
    for start in range(0, gamma + 1, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        law = target_laws(laws, b, i, gamma)
        proposals = proposals_at(chain, laws, b, i, request.drafted, gamma, READS_DRAFT)
        u = coins_of(chain, b, i, gamma)
        accepts, chance = accept_test(
            law, proposals, u, request.greedy, lenience, beta, tau, epsilon, delta,
            RULE, IGNORES_SAMPLING, RACED,
        )  # fmt: skip
        ends = (i >= request.drafted) | (law.kind == NO_LAW)
        usable = ends | tl.where(request.greedy, i >= 0, proposals.usable)
        leaf = ends | (usable == 0)
        unusable_at = tl.minimum(unusable_at, tl.min(tl.where(usable, NEVER, i), 0))
        leaf_at = tl.minimum(leaf_at, tl.min(tl.where(leaf, i, NEVER), 0))
        fail_at = tl.minimum(fail_at, tl.min(tl.where(leaf | accepts, NEVER, i), 0))
        here = i == fail_at
        failed_token += tl.sum(tl.where(here, proposals.token, 0), 0)
        failed_sampled += tl.sum((here & proposals.sampled).to(tl.int32), 0)
        final += tl.sum(tl.where(i == gamma, u, 0.0), 0)
        # What is looked at depends on nothing that a later round could find.
        last = leaf_at - 1
        if not FULL:
            last = tl.minimum(last, fail_at)
        place = outputs.accept_probs + b * gamma + i.to(tl.int64)
        tl.store(place, tl.where(i <= last, chance, float("nan")).to(tl.float32), mask=i < gamma)
    accepted = tl.minimum(leaf_at, fail_at)
    seen = accepted
    if FULL:
        seen = leaf_at
    status = tl.where(unusable_at == seen, request.status | NO_DRAFT_LAW, request.status)
    residual = tl.full([], 0, tl.int32)
    if READS_DRAFT:
        residual = ((fail_at < leaf_at) & (request.greedy == 0)).to(tl.int32)
    one = tl.full([], 1.0, tl.float64)
    task = task_after(accepted, residual, one, failed_sampled, failed_token, final)
    write_verdict(chain, laws, outputs, b, accepted, status, gamma, task)
