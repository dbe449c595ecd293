"""Block verification (Sun et al., arXiv 2403.10444): csrc/core/recursion.h on a chain.

`flow_down` and `decide_block` take a program a request and read 64 bytes a column and model;
`node_masses`, over nodes x splits, reads target and draft rows of undecided nodes again for their
residual masses, and writes 8 bytes a tile. Numerics: float32 within a tile, else float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chain import (
    COLUMNS,
    NEVER,
    NO_DRAFT_LAW,
    coins_of,
    open_request,
    proposals_at,
    target_law,
    target_laws,
    task_after,
    write_verdict,
)
from .draw import Task, no_siblings, outer_scale, residual_weights
from .laws import NO_LAW, end_of_tiles, first_tile, probability

#: Tiles that one step of a sum over tiles takes.
MASS_STEP = tl.constexpr(64)


class Flow(NamedTuple):
    """What `flow_down` finds, and the masses at its nodes."""

    inflow: Any  # [B, G + 1] float64, w of the paper
    sampled: Any  # [B, G] int8
    length: Any  # [B] int32: the leaf
    masses: Any  # [B, G + 1, tiles] float64, of undecided nodes


@triton.jit
def child_inflow(inflow, p, q):
    """min(1, inflow p / q), and never a division where q may be zero or the quotient overflow."""
    numerator = inflow * p
    return tl.where(p > 0.0, tl.where(numerator >= q, 1.0, numerator / q), 0.0)


@triton.jit
def outflow(inflow, mass):
    """R / (R + (1 - a)), with its parentheses: the small difference must not be lost."""
    found = tl.where(mass > 0.0, mass / (mass + (1.0 - inflow)), 0.0)
    return tl.where(inflow >= 1.0, 1.0, found)


@triton.jit(do_not_specialize=["gamma"])
def flow_down(chain, laws, flow, outputs, vocab, gamma):
    """Inflows from the root to the leaf. Grid: requests.

    The leaf is where the draft ends, where a row has no law, or where the inflow is 0: below,
    nothing can be accepted.
    """
    b = tl.program_id(0).to(tl.int64)
    request = open_request(chain, b, vocab, gamma, False)
    nodes = flow.inflow + b * (gamma + 1)
    inflow = tl.full([], 1.0, tl.float64)
    tl.store(nodes, inflow)
    leaf_at = tl.full([], NEVER, tl.int32)  # where the draft ends
    dry_at = tl.full([], NEVER, tl.int32)  # the first node without inflow
    unusable_at = tl.full([], NEVER, tl.int32)
    for start in range(0, gamma + 1, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        law = target_laws(laws, b, i, gamma)
        proposals = proposals_at(chain, laws, b, i, request.drafted, gamma, True)
        p = probability(law, law.value, proposals.token)
        ends = (i >= request.drafted) | (law.kind == NO_LAW)
        usable = ends | tl.where(request.greedy, i >= 0, proposals.usable)
        sampled = tl.where(request.greedy, i < 0, proposals.sampled)
        q = tl.where(sampled, proposals.q, 1.0)
        unusable_at = tl.minimum(unusable_at, tl.min(tl.where(usable, NEVER, i), 0))
        leaf_at = tl.minimum(leaf_at, tl.min(tl.where(ends | (usable == 0), i, NEVER), 0))
        place = flow.sampled + b * gamma + i.to(tl.int64)
        tl.store(place, sampled.to(tl.int8), mask=i < gamma)
        for node in range(start, tl.minimum(start + COLUMNS, leaf_at)):
            here = i == node
            inflow = child_inflow(
                inflow, tl.sum(tl.where(here, p, 0.0), 0), tl.sum(tl.where(here, q, 0.0), 0)
            )
            tl.store(nodes + node + 1, inflow)
            if inflow == 0.0:
                dry_at = tl.minimum(dry_at, node + 1)
    unusable = (unusable_at == leaf_at) & (leaf_at < dry_at)
    status = tl.where(unusable, request.status | NO_DRAFT_LAW, request.status)
    tl.store(outputs.status + b, status)
    tl.store(flow.length + b, tl.minimum(leaf_at, dry_at))


@triton.jit(do_not_specialize=["gamma", "tiles", "splits"])
def node_masses(target, draft, laws, flow, gamma, tiles, splits, TILE: tl.constexpr):
    """Residual masses, tile by tile, at the undecided nodes. Grid: requests x (G - 1) x splits.

    The root always accepts and an inflow of 1 stays 1: neither asks for its mass.
    """
    program = tl.program_id(0).to(tl.int64)
    split = (program % splits).to(tl.int32)
    b = program // splits // (gamma - 1)
    node = program // splits % (gamma - 1) + 1
    if node < tl.load(flow.length + b):
        inflow = tl.load(flow.inflow + b * (gamma + 1) + node)
        sampled = tl.load(flow.sampled + b * gamma + node)
        if (inflow < 1.0) & (sampled != 0):
            one = tl.full([], 1.0, tl.float64)
            nothing = tl.full([], -1, tl.int64)
            task = Task(node, sampled.to(tl.int32), inflow, one, nothing, one, no_siblings())
            law = target_law(laws, b, node, gamma)
            place = flow.masses + (b * (gamma + 1) + node) * tiles
            end = end_of_tiles(target, tiles, TILE)
            for tile in range(first_tile(target, split, TILE), end, splits):
                weights = residual_weights(target, draft, laws, b, task, law, tile, TILE)
                mass = tl.sum(weights, 0).to(tl.float64)
                tl.store(place + tile, outer_scale(task, law) * mass)


@triton.jit
def thresholds(flow, laws, chain, b, i, length, gamma, tiles):
    """Thresholds h of the coins at nodes i, a vector; arbitrary after the leaf."""
    node = b * (gamma + 1) + i.to(tl.int64)
    inflow = tl.load(flow.inflow + node, mask=i <= length, other=0.0)
    place = flow.sampled + b * gamma + i.to(tl.int64)
    sampled = tl.load(place, mask=i < length, other=0) != 0
    summed = sampled & (i > 0) & (inflow < 1.0)
    mass = tl.zeros([COLUMNS], tl.float64)
    for start in range(0, tiles, MASS_STEP):
        tile = start + tl.arange(0, MASS_STEP)
        found = tl.load(
            flow.masses + node[:, None] * tiles + tile[None, :],
            mask=summed[:, None] & (tile < tiles)[None, :],
            other=0.0,
        )
        mass += tl.sum(found, 1)
    law = target_laws(laws, b, i, gamma)
    place = b * chain.tokens_stride_b + i.to(tl.int64) * chain.tokens_stride_s
    token = tl.load(chain.tokens + place, mask=i < length, other=0).to(tl.int64)
    rest = inflow * (1.0 - probability(law, law.value, token))
    h = outflow(inflow, tl.where(sampled, mass, rest))
    return tl.where(i == length, inflow, h)


@triton.jit(do_not_specialize=["gamma", "tiles"])
def decide_block(chain, laws, flow, outputs, vocab, gamma, tiles):
    """Flip all coins; the last success wins. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    request = open_request(chain, b, vocab, gamma, False)
    length = tl.load(flow.length + b)
    without_inflow = tl.load(flow.inflow + b * (gamma + 1) + length) == 0.0
    # Below a node without inflow nothing is accepted; after a leaf nothing was looked at.
    zeros = tl.where(without_inflow, request.drafted, length)
    accepted = tl.full([], 0, tl.int32)
    for start in range(0, gamma, COLUMNS):
        i = start + tl.arange(0, COLUMNS) + 1
        h = thresholds(flow, laws, chain, b, i, length, gamma, tiles)
        u = tl.where(request.greedy, 0.0, coins_of(chain, b, i - 1, gamma))
        wins = (i <= length) & (u < h)
        accepted = tl.maximum(accepted, tl.max(tl.where(wins, i, 0), 0))
        h = tl.where(i <= length, h, tl.where(i <= zeros, 0.0, float("nan")))
        place = outputs.accept_probs + b * gamma + (i - 1).to(tl.int64)
        tl.store(place, h.to(tl.float32), mask=i <= gamma)
    rejected = accepted < length
    place = b * chain.tokens_stride_b + accepted.to(tl.int64) * chain.tokens_stride_s
    token = tl.load(chain.tokens + place, mask=rejected, other=0).to(tl.int64)
    sampled = tl.load(flow.sampled + b * gamma + accepted, mask=rejected, other=0)
    inflow = tl.load(flow.inflow + b * (gamma + 1) + accepted)
    final = coins_of(chain, b, tl.full([1], 0, tl.int32) + gamma, gamma)
    final = tl.where(request.greedy, 0.0, tl.sum(final, 0))
    task = task_after(accepted, rejected, inflow, sampled, token, final)
    status = tl.load(outputs.status + b)
    write_verdict(chain, laws, outputs, b, accepted, status, gamma, task)
