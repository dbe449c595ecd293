"""Trees verified: csrc/core/tree.h's visits and its end, a program a request.

Children come after their parents, so that visits in the order of the nodes need no stack: a node's
inflow is known before its turn. Traversal visits every node that something flows into; the other
rules go from the root down to where nothing accepts. Reads the target's and the draft's row of a
node once for each child that was drawn (none for the last one where nothing can be lost), all by
one program: which sums a node waits for, the host cannot know. Numerics: float32 within a tile,
else float64, tiles in their order, as verify_block.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chain import NO_DRAFT_LAW, NO_TARGET_LAW
from .draw import (
    Task,
    draft_lift,
    draft_weights,
    no_siblings,
    outer_scale,
    residual_weights,
    siblings_at,
    store_task,
    without,
)
from .laws import (
    EXPONENTIAL,
    NO_LAW,
    POINT_MASS,
    is_greedy_at,
    load_law,
    probability,
    row_at,
    value_at,
)
from .philox import coins_at
from .tree import IID, REST, UNREACHABLE, WITHOUT_REPLACEMENT, parent_at
from .tree_mask import INVALID_TREE
from .verify_block import child_inflow, outflow

#: Above this, 1 - taken has lost too many digits.
MAX_TAKEN = tl.constexpr(0.9375)

#: Slots of a list that one step of a search takes.
LIST_STEP = tl.constexpr(32)


class TreeOutputs(NamedTuple):
    """What verify_tree returns, contiguous, and the draws that are left to do."""

    tokens: Any  # [B, N]
    path: Any  # [B, N]
    num_accepted: Any  # [B]
    logprobs: Any  # [B, N]
    accept_probs: Any  # [B, N]
    status: Any  # [B]
    tasks: Any  # [B, TASK_FIELDS]


# ---- a node's children --------------------------------------------------------------------------


@triton.jit
def store_shared(pointer, value):
    """Store a scalar that the program loads again.

    One thread stores what all load: none may be late for the old value, or early for the new one.
    """
    tl.debug_barrier()
    tl.store(pointer, value)
    tl.debug_barrier()


@triton.jit
def is_listed(tokens, first, last, token):
    """Whether slots of a list hold a token."""
    found = tl.full([], 0, tl.int32)
    for start in range(first, last, LIST_STEP):
        slot = start + tl.arange(0, LIST_STEP)
        listed = tl.load(tokens + slot, mask=slot < last, other=-1)
        found = tl.maximum(found, tl.max((listed == token).to(tl.int32), 0))
    return found > 0


@triton.jit
def has_rest(children, siblings):
    """Whether a node has a child from the rest."""
    found = tl.full([], 0, tl.int32)
    for start in range(siblings.first, siblings.last, LIST_STEP):
        slot = start + tl.arange(0, LIST_STEP)
        kind = tl.load(children.kind + slot, mask=slot < siblings.last, other=0)
        found = tl.maximum(found, tl.max((kind == REST).to(tl.int32), 0))
    return found > 0


@triton.jit
def draft_probability(draft, law, b, v, siblings, token):
    """Give q of a token as the children that were drawn saw it; 0 without a law."""
    q = probability(law, value_at(row_at(draft, b, v), token), token)
    fixed = is_listed(siblings.fixed, siblings.first, siblings.last, token)
    return tl.where((law.kind == NO_LAW) | fixed, 0.0, q)


@triton.jit
def fixed_mass(draft, law, b, v, children, siblings):
    """Sum q over the fixed tokens of a node, each taken once."""
    mass = tl.full([], 0.0, tl.float64)
    if has_rest(children, siblings) & (law.kind != NO_LAW):
        for slot in range(siblings.first, siblings.last):
            token = tl.load(siblings.fixed + slot)
            q = probability(law, value_at(row_at(draft, b, v), token), token)
            repeated = is_listed(siblings.fixed, siblings.first, slot, token)
            mass += tl.where((token < 0) | repeated, 0.0, q)
    return mass


@triton.jit
def target_probability(target, law, b, v, token, RACED: tl.constexpr):
    """Give p of a token; of a race, whether it has won."""
    if RACED:
        winner = tl.where(law.kind == EXPONENTIAL, law.extra.to(tl.int64), law.argmax)
        p = (token == winner).to(tl.float64)
    else:
        p = probability(law, value_at(row_at(target, b, v), token), token)
    return p


@triton.jit
def sum_residual(target, draft, laws, b, task, tiles, TILE: tl.constexpr):
    """Sum what a task's residual weighs."""
    law = load_law(laws.target, b * target.steps + task.row)
    mass = tl.full([], 0.0, tl.float64)
    for tile in range(0, tiles):
        weights = residual_weights(target, draft, laws, b, task, law, tile, TILE)
        mass += tl.sum(weights, 0).to(tl.float64)
    return outer_scale(task, law) * mass


@triton.jit
def sum_rest(draft, laws, b, task, drawn, tiles, TILE: tl.constexpr):
    """Sum the draft's law without fixed tokens, or those of earlier siblings."""
    siblings = task.siblings
    law = load_law(laws.draft, b * draft.steps + task.row)
    mass = tl.full([], 0.0, tl.float64)
    for tile in range(0, tiles):
        weights = draft_weights(draft, law, b, task, tile, TILE)
        weights = without(weights, 0.0, drawn, siblings.first, siblings.last, tile, TILE)
        mass += tl.sum(weights, 0).to(tl.float64)
    return mass / (law.z * draft_lift(draft, law))


@triton.jit
def proposal_mass(
    draft, law, laws, b, v, children, siblings, kind, q, taken, rest_mass, tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """Give what a child's law has of q, 1 / kappa; and `rest_mass`, summed if that was needed."""
    reduced = (kind > IID) & (q > 0.0) & (law.kind != POINT_MASS)
    if reduced & (rest_mass < 0.0) & (taken > MAX_TAKEN):
        zero = tl.full([], 0.0, tl.float64)
        nothing = tl.full([], -1, tl.int64)
        task = Task(v, 1, zero, zero + 1.0, nothing, zero, siblings)
        rest_mass = sum_rest(draft, laws, b, task, children.drawn, tiles, TILE)
    left = tl.where(rest_mass >= 0.0, rest_mass, 1.0 - taken)
    return tl.where(kind > IID, left, 1.0), rest_mass


@triton.jit
def visit_node(
    trees, children, flow, target, draft, laws, b, v, inflow, nodes, tiles,
    STEPWISE: tl.constexpr, READS_DRAFT: tl.constexpr, RACED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Look at the children of node v: csrc/core/tree.h's advance.

    The results are the child that a stepwise rule goes down to, or -1; what of the inflow is left,
    h; and whether some child cannot have been drawn from the draft's law.
    """
    v = tl.full([], 0, tl.int64) + v
    place = b * nodes + v
    law = load_law(laws.target, place)
    siblings = siblings_at(children, b, v)
    zero = tl.full([], 0.0, tl.float64)
    nothing = tl.full([], -1, tl.int64)
    lambda_ = zero  # the residual is [p - lambda q]+
    mass = zero + 1.0  # what it sums to
    scale = zero  # the same times inflow / mass: [scale p - share q]+
    share = zero
    taken = zero  # q that cannot be drawn: earlier siblings', or that of fixed tokens
    rest_mass = zero - 1.0  # 1 - taken as a sum, where the difference would cancel
    kept = nothing  # the token of the last drawn child, while `mass` still has it
    exhausted = inflow <= 0.0  # no residual mass is left: no further child is accepted
    unusable = inflow < 0.0
    chosen = tl.full([], -1, tl.int32)
    slot = siblings.first
    if law.kind == NO_LAW:
        slot = siblings.last
    if READS_DRAFT:
        draft_law = load_law(laws.draft, place)
        if slot < siblings.last:
            taken = fixed_mass(draft, draft_law, b, v, children, siblings)
    while slot < siblings.last:
        node = tl.load(children.node + slot)
        token = tl.load(children.token + slot).to(tl.int64)
        kind = tl.load(children.kind + slot).to(tl.int32)
        sampled = kind > 0
        q = zero
        drawn_from = zero + 1.0
        if READS_DRAFT:
            q = draft_probability(draft, draft_law, b, v, siblings, token)
            drawn_from, rest_mass = proposal_mass(
                draft, draft_law, laws, b, v, children, siblings, kind, q, taken, rest_mass, tiles,
                TILE,
            )  # fmt: skip
        if sampled & (((q > 0.0) & (drawn_from > 0.0)) == 0):
            unusable = unusable | sampled
        else:
            if READS_DRAFT:
                if kind == WITHOUT_REPLACEMENT:
                    store_shared(children.drawn + slot, token.to(tl.int32))
                    taken += q
                    rest_mass = zero - 1.0
                sampled = sampled & (draft_law.kind != POINT_MASS)
            kappa = 1.0 / drawn_from
            p = target_probability(target, law, b, v, token, RACED)
            residual = p - lambda_ * q
            repeated = is_listed(siblings.tried, siblings.first, slot, token)
            flowing = child_inflow(inflow, residual / mass, tl.where(sampled, kappa * q, 1.0))
            flowing = tl.where(repeated | exhausted, 0.0, flowing)
            store_shared(flow.inflow + b * nodes + node, flowing)
            tl.store(flow.acceptance + b * nodes + node, flowing)  # of a leaf
            if STEPWISE:
                coin = coins_at(trees.coins, b, node.to(tl.int64) - 1, nodes - 1)
                coin = tl.where(is_greedy_at(trees.target, b), 0.0, coin)
                chosen = tl.where(coin < flowing, node, chosen)
            if (chosen < 0) & (exhausted == 0):
                scale = inflow / mass
                share = scale * lambda_ + tl.where(sampled, kappa, 0.0)
                # An inflow of 1 stays 1, and nobody asks for the residual of the last child.
                asked = (sampled == 0) | (inflow < 1.0) | (slot + 1 < siblings.last)
                in_mass = ((repeated == 0) | (token == kept)) & (residual > 0.0)
                lost = tl.where(in_mass, residual, 0.0)
                left = scale * tl.maximum(mass - lost, 0.0)
                if READS_DRAFT:
                    if sampled & asked:
                        # The child drew its own token's residual down to 0, unless it was
                        # accepted anyway: it is not among the tried yet.
                        task = Task(v, 1, scale, share, nothing, zero, siblings)
                        left = sum_residual(target, draft, laws, b, task, tiles, TILE)
                if asked:
                    unscale = mass / inflow
                    lambda_ = share * unscale
                    mass = left * unscale
                    inflow = outflow(inflow, left)
                    exhausted = ((mass > 0.0) & (inflow > 0.0)) == 0
                gone = tl.where(sampled, repeated, token == kept)
                kept = tl.where(gone, nothing, tl.where(sampled, token, kept))
            store_shared(children.tried + slot, token.to(tl.int32))
        slot = tl.where(chosen < 0, slot + 1, siblings.last)
    tl.store(flow.target + place, scale)
    tl.store(flow.draft + place, share)
    return chosen, inflow, unusable


@triton.jit
def has_children(children, flow, b, v, nodes):
    """Whether a node has usable children that something can flow into."""
    siblings = siblings_at(children, b, v)
    inflow = tl.load(flow.inflow + b * nodes + v)
    return (siblings.first < siblings.last) & (inflow > 0.0), inflow


# ---- the end ------------------------------------------------------------------------------------


@triton.jit
def mark_ancestors(trees, flow, b, v, acceptance, wins, nodes):
    """Give h = 0 to what is below a node without inflow; mark what is above a success."""
    inflow = tl.load(flow.inflow + b * nodes + v, mask=v < nodes, other=UNREACHABLE)
    without_inflow = inflow == 0.0
    at = tl.where(inflow != UNREACHABLE, v, 0)
    while tl.max(at, 0) > 0:
        tl.store(flow.leads + b * nodes + at, (v * 0 + 1).to(tl.int8), mask=wins & (at > 0))
        at = tl.where(at > 0, parent_at(trees, b, at, at > 0), 0)
        without_inflow = without_inflow | (tl.load(flow.inflow + b * nodes + at) == 0.0)
    return tl.where(without_inflow, 0.0, acceptance)


@triton.jit
def find_winner(trees, flow, b, v, acceptance, nodes):
    """Find the first node in post-order whose coin accepts, the root if none does; and all h."""
    slot = tl.minimum(tl.maximum(v - 1, 0), nodes - 1).to(tl.int64)
    coin = coins_at(trees.coins, b, slot, nodes - 1)
    coin = tl.where(is_greedy_at(trees.target, b), 0.0, coin)
    wins = (v > 0) & (v < nodes) & (coin < acceptance)
    acceptance = mark_ancestors(trees, flow, b, v, acceptance, wins, nodes)
    tl.debug_barrier()  # any thread may have marked what another loads
    leads = tl.load(flow.leads + b * nodes + v, mask=v < nodes, other=0) != 0
    parent = parent_at(trees, b, v, (v > 0) & (v < nodes))
    # The first child with a success below it comes first; one without any is the success itself.
    winner = tl.full([], 0, tl.int32)
    below = tl.min(tl.where(leads & (parent == 0), v, nodes), 0)
    while below < nodes:
        winner = below
        below = tl.min(tl.where(leads & (parent == winner), v, nodes), 0)
    return winner, acceptance


@triton.jit
def write_verdict(trees, flow, laws, outputs, b, v, winner, acceptance, status, nodes):
    """Write the outcome of request b but for its last token, which a task says how to draw."""
    place = b * nodes + v
    depth = tl.load(flow.depth + b * nodes + winner)
    path = v * 0 - 1
    emits = v == 0
    at = winner
    for turn in range(0, depth):
        path = tl.where(v == depth - 1 - turn, at, path)
        emits = emits | (v == at)
        own = trees.parents + b * trees.parents_stride_b
        at = tl.load(own + at.to(tl.int64) * trees.parents_stride_s).to(tl.int32)
    given = b * trees.tokens_stride_b + path.to(tl.int64) * trees.tokens_stride_s
    token = tl.load(trees.tokens + given, mask=v < depth, other=-1).to(tl.int64)
    valid = (status & INVALID_TREE) == 0
    known = tl.where(valid, (v == 0) | (acceptance >= 0.0), v < 0)
    probs = tl.where(known, tl.where(v == 0, 1.0, acceptance), float("nan"))
    inside = v < nodes
    tl.store(outputs.tokens + place, token, mask=inside)
    tl.store(outputs.path + place, path.to(tl.int64), mask=inside)
    tl.store(outputs.accept_probs + place, probs.to(tl.float32), mask=inside)
    tl.store(flow.wanted + place, emits.to(tl.int8), mask=inside)
    tl.store(outputs.num_accepted + b, depth)
    law = load_law(laws.target, b * nodes + winner)
    tl.store(outputs.status + b, tl.where(law.kind == NO_LAW, status | NO_TARGET_LAW, status))
    scale = tl.load(flow.target + b * nodes + winner)
    share = tl.load(flow.draft + b * nodes + winner)
    last = tl.full([], 0, tl.int64) + nodes - 1
    u = coins_at(trees.coins, b, last, nodes - 1)
    nothing = tl.full([], -1, tl.int64)
    residual = (scale > 0.0).to(tl.int32)
    store_task(outputs.tasks, b, Task(winner, residual, scale, share, nothing, u, no_siblings()))


@triton.jit(do_not_specialize=["nodes", "tiles"])
def visit_trees(
    trees, children, flow, target, draft, laws, outputs, nodes, tiles,
    STEPWISE: tl.constexpr, READS_DRAFT: tl.constexpr, RACED: tl.constexpr,
    NODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the winner of every request, and what is left of it. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, NODES)
    inside = v < nodes
    one = tl.full([], 1.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    failed = winner < 0
    # Before the barriers below, and so before write_verdict's store to it.
    status = tl.load(outputs.status + b)
    if STEPWISE:
        goes_on = winner == 0
        while goes_on:
            child, _, unusable = visit_node(
                trees, children, flow, target, draft, laws, b, winner, one, nodes, tiles,
                STEPWISE, READS_DRAFT, RACED, TILE,
            )  # fmt: skip
            failed = failed | unusable
            goes_on = child >= 0
            winner = tl.where(goes_on, child, winner)  # no mere copy: see laws.py
        tl.debug_barrier()  # one thread has stored what others load
        acceptance = tl.load(flow.inflow + b * nodes + v, mask=inside, other=UNREACHABLE)
    else:
        for node in range(0, nodes):
            goes_on, inflow = has_children(children, flow, b, node, nodes)
            if goes_on:
                _, h, unusable = visit_node(
                    trees, children, flow, target, draft, laws, b, node, inflow, nodes, tiles,
                    STEPWISE, READS_DRAFT, RACED, TILE,
                )  # fmt: skip
                tl.store(flow.acceptance + b * nodes + node, h)
                failed = failed | unusable
        tl.debug_barrier()  # as above
        acceptance = tl.load(flow.acceptance + b * nodes + v, mask=inside, other=UNREACHABLE)
        winner, acceptance = find_winner(trees, flow, b, v, acceptance, nodes)
    status = tl.where(failed, status | NO_DRAFT_LAW, status)
    write_verdict(trees, flow, laws, outputs, b, v, winner, acceptance, status, nodes)
