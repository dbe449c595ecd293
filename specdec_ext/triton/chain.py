"""What the chain rules share: csrc/core/chain.h, a program a request.

Columns of a draft are looked at COLUMNS at a time, as vectors; drafts are rarely longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import contract
from .draw import Task, no_siblings, store_task
from .laws import (
    NO_LAW,
    POINT_MASS,
    filters_at,
    is_greedy,
    load_law,
    load_laws,
    log_probability,
    probability,
)
from .philox import coins_at, is_uniform

COLUMNS = tl.constexpr(16)

#: An index after every column.
NEVER = tl.constexpr(2147483647)

# Bits of `status`.
NO_TARGET_LAW = tl.constexpr(contract.STATUS_NO_TARGET_LAW)
INVALID_DRAFT_TOKEN = tl.constexpr(contract.STATUS_INVALID_DRAFT_TOKEN)
NO_DRAFT_LAW = tl.constexpr(contract.STATUS_NO_DRAFT_LAW)
PARAMETER_OUT_OF_RANGE = tl.constexpr(contract.STATUS_PARAMETER_OUT_OF_RANGE)


class Chain(NamedTuple):
    """The drafts of a call, and the sampling parameters of both models."""

    tokens: Any  # [B, G]
    tokens_stride_b: Any
    tokens_stride_s: Any
    kinds: Any  # [B, G] int8, or None
    kinds_stride_b: Any
    kinds_stride_s: Any
    sampled: Any  # not None: drawn from a law, where there are no kinds
    lengths: Any  # [B], or None
    lengths_stride: Any
    ids: Any  # max(V, Vd)
    broken: Any  # [1] int32, not 0: the draft's vocabulary is no map; or None
    target: Any  # Sampling
    draft: Any  # Sampling; NO_SAMPLING where no draft logits are given
    coins: Any
    end: None = None  # see laws.py


class Laws(NamedTuple):
    """Laws of all rows."""

    target: Any  # [B, G + 1, LAW_FIELDS]
    draft: Any  # [B, G, LAW_FIELDS], or None where the rule reads none


class Outputs(NamedTuple):
    """What verify returns, contiguous, and the draws that are left to do."""

    tokens: Any  # [B, G + 1]
    num_accepted: Any  # [B]
    logprobs: Any  # [B, G + 1]
    accept_probs: Any  # [B, G]
    status: Any  # [B]
    tasks: Any  # [B, TASK_FIELDS]


class Request(NamedTuple):
    """One request, once its parameters and ids have been looked at."""

    greedy: Any
    drafted: Any  # int32: usable columns by their ids alone; columns after are never read
    status: Any


class Proposals(NamedTuple):
    """How the tokens of a vector of columns were proposed."""

    token: Any
    usable: Any  # false: nothing can have been sampled from q here, the draft ends
    sampled: Any  # drawn from q; a sample of a point mass counts as deterministic
    q: Any


@triton.jit
def count_drafted(chain, b, gamma):
    """Count the columns up to the draft's length, the first -1 or the first invalid id."""
    status = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int64) + gamma
    if chain.lengths is not None:
        given = tl.load(chain.lengths + b * chain.lengths_stride).to(tl.int64)
        length = tl.minimum(tl.maximum(given, 0), length)
        status = tl.where(given == length, 0, PARAMETER_OUT_OF_RANGE)
    drafted = length.to(tl.int32)
    for start in range(0, gamma, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        inside = i < drafted
        place = b * chain.tokens_stride_b + i.to(tl.int64) * chain.tokens_stride_s
        token = tl.load(chain.tokens + place, mask=inside, other=0).to(tl.int64)
        wrong = (token < 0) | (token >= chain.ids)
        if chain.kinds is not None:
            place = b * chain.kinds_stride_b + i.to(tl.int64) * chain.kinds_stride_s
            kind = tl.load(chain.kinds + place, mask=inside, other=0)
            wrong = wrong | (kind < 0) | (kind > 1)
        stop = tl.min(tl.where(inside & wrong, i, NEVER), 0)
        invalid = tl.sum(((i == stop) & (token != -1)).to(tl.int32), 0)
        status = tl.where(invalid > 0, status | INVALID_DRAFT_TOKEN, status)
        drafted = tl.minimum(drafted, stop)
    return drafted, status


@triton.jit
def has_uniform_out_of_range(coins, b, drafted, gamma):
    """Whether a uniform that may be used lies outside [0, 1)."""
    out_of_range = tl.full([], 0, tl.int32)
    for start in range(0, gamma + 1, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        place = b * coins.uniforms_stride_b + i.to(tl.int64) * coins.uniforms_stride_s
        u = tl.load(coins.uniforms + place, mask=(i < drafted) | (i == gamma), other=0.0)
        out_of_range += tl.sum((is_uniform(u) == 0).to(tl.int32), 0)
    return out_of_range > 0


@triton.jit
def begin_request(call, b, vocab):
    """Whether request b is at T = 0, and whether a parameter of it is out of range."""
    filters = filters_at(call.target, b, vocab)
    bad = (filters.out_of_range > 0) | (filters_at(call.draft, b, vocab).out_of_range > 0)
    if call.broken is not None:
        bad = bad | (tl.load(call.broken) != 0)
    return is_greedy(filters), bad


@triton.jit
def open_request(chain, b, vocab, gamma, IGNORES_SAMPLING: tl.constexpr):
    """Look at the parameters and ids of request b."""
    drafted, status = count_drafted(chain, b, gamma)
    greedy = drafted >= 0
    if not IGNORES_SAMPLING:
        greedy, bad = begin_request(chain, b, vocab)
        if chain.coins.uniforms is not None:
            bad = bad | ((greedy == 0) & has_uniform_out_of_range(chain.coins, b, drafted, gamma))
        status = tl.where(bad, status | PARAMETER_OUT_OF_RANGE, status)
    return Request(greedy, drafted, status)


@triton.jit
def target_laws(laws, b, i, gamma):
    """Laws of target rows i, a vector; none after row gamma."""
    return load_laws(laws.target, b * (gamma + 1) + i.to(tl.int64), i <= gamma)


@triton.jit
def target_law(laws, b, i, gamma):
    """Law of target row i."""
    return load_law(laws.target, b * (gamma + 1) + i)


@triton.jit
def proposals_at(chain, laws, b, i, drafted, gamma, READS_DRAFT: tl.constexpr):
    """Look up how columns i, a vector, were proposed; what is after `drafted` is arbitrary."""
    inside = i < drafted
    place = b * chain.tokens_stride_b + i.to(tl.int64) * chain.tokens_stride_s
    token = tl.load(chain.tokens + place, mask=inside, other=0).to(tl.int64)
    usable = i >= 0
    sampled = i < 0
    q = tl.full([COLUMNS], 1.0, tl.float64)
    if READS_DRAFT:
        if chain.kinds is not None:
            place = b * chain.kinds_stride_b + i.to(tl.int64) * chain.kinds_stride_s
            drawn = tl.load(chain.kinds + place, mask=inside, other=0) != 0
        elif chain.sampled is not None:
            drawn = i >= 0
        else:
            drawn = i < 0
        if laws.draft is not None:
            law = load_laws(laws.draft, b * gamma + i.to(tl.int64), inside & drawn)
            found = probability(law, law.value, token)
            has_mass = (law.kind != NO_LAW) & (found > 0.0)
            usable = tl.where(drawn, has_mass, usable)
            sampled = drawn & (law.kind != POINT_MASS)
            q = tl.where(sampled, found, 1.0)
        else:
            usable = tl.where(drawn, sampled, usable)
    return Proposals(token, usable, sampled, q)


@triton.jit
def coins_of(chain, b, i, gamma):
    """Coins of columns i, a vector; the final draw's uniform at column gamma."""
    return coins_at(chain.coins, b, tl.minimum(i, gamma).to(tl.int64), gamma)


@triton.jit
def write_emitted(chain, laws, outputs, b, accepted, gamma):
    """Write the accepted tokens and their log-probabilities, and nothing after them."""
    for start in range(0, gamma + 1, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        kept = i < accepted
        place = b * chain.tokens_stride_b + i.to(tl.int64) * chain.tokens_stride_s
        token = tl.load(chain.tokens + place, mask=kept, other=-1).to(tl.int64)
        law = target_laws(laws, b, i, gamma)
        logprob = tl.where(kept, log_probability(law, law.value), float("nan"))
        place = b * (gamma + 1) + i.to(tl.int64)
        tl.store(outputs.tokens + place, token, mask=i <= gamma)
        tl.store(outputs.logprobs + place, logprob, mask=i <= gamma)


@triton.jit
def write_verdict(chain, laws, outputs, b, accepted, status, gamma, task):
    """Write the outcome of request b but for its last token, which `task` says how to draw."""
    lawless = target_law(laws, b, accepted, gamma).kind == NO_LAW
    status = tl.where(lawless, status | NO_TARGET_LAW, status)
    tl.store(outputs.num_accepted + b, accepted)
    tl.store(outputs.status + b, status)
    store_task(outputs.tasks, b, task)
    write_emitted(chain, laws, outputs, b, accepted, gamma)


@triton.jit
def task_after(row, residual, inflow, sampled, token, u):
    """Draw from the residual of a rejected token at a node with this inflow, or from the target."""
    draft = tl.where(sampled > 0, 1.0, 0.0).to(tl.float64)
    return Task(row.to(tl.int64), residual.to(tl.int32), inflow, draft, token, u, no_siblings())
