"""Trees before they are verified: csrc/core/tree.h's opening, a program a request.

What is a valid tree, which of its nodes tokens lead to, and the children of every node. Nodes are
looked at as a vector, pairs of them STEP columns at a time, and ancestors one level after the other
for all nodes at once. Reads 8 to 17 bytes a node, writes 68.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import contract
from .chain import INVALID_DRAFT_TOKEN, PARAMETER_OUT_OF_RANGE, begin_request
from .philox import is_uniform
from .tree_mask import INVALID_TREE, tree_size

# Kinds of children.
IID = tl.constexpr(contract.KIND_IID)
WITHOUT_REPLACEMENT = tl.constexpr(contract.KIND_WITHOUT_REPLACEMENT)
REST = tl.constexpr(contract.KIND_REST)

# Instead of an inflow, of nodes that have none.
NOT_LOOKED_AT = tl.constexpr(-1.0)
UNREACHABLE = tl.constexpr(-2.0)  # it, or a node above it, is no token


class Trees(NamedTuple):
    """The trees of a call, and the sampling parameters of both models."""

    tokens: Any  # [B, N]
    tokens_stride_b: Any
    tokens_stride_s: Any
    parents: Any  # [B, N]
    parents_stride_b: Any
    parents_stride_s: Any
    kinds: Any  # [B, N] int8, or None
    kinds_stride_b: Any
    kinds_stride_s: Any
    sampled: Any  # not None: drawn from a law, where there are no kinds
    ids: Any  # max(V, Vd)
    broken: Any  # [1] int32, not 0: the draft's vocabulary is no map; or None
    target: Any  # Sampling
    draft: Any  # Sampling; NO_SAMPLING where no draft logits are given
    coins: Any
    end: None = None  # see laws.py


class Flow(NamedTuple):
    """What is known of the nodes, [B, N] each."""

    inflow: Any  # float64; where a rule is stepwise, the chance that it went down to the node
    acceptance: Any  # float64: h
    target: Any  # float64: what is left of a node is [target * p - draft * q]+; 0: it is untouched
    draft: Any  # float64
    depth: Any  # int32
    leads: Any  # int8: whether a coin accepts here or below
    wanted: Any  # int8: whether its target row is asked for
    wanted_draft: Any  # int8: whether the law that its children were drawn from is


@triton.jit
def token_at(trees, b, v, mask):
    """Tokens of nodes v, a vector; -1 where not `mask`."""
    place = b * trees.tokens_stride_b + v.to(tl.int64) * trees.tokens_stride_s
    return tl.load(trees.tokens + place, mask=mask, other=-1).to(tl.int64)


@triton.jit
def kind_at(trees, b, v, mask):
    """Kinds of nodes v, a vector, as the caller gave them."""
    kind = v * 0
    if trees.kinds is not None:
        place = b * trees.kinds_stride_b + v.to(tl.int64) * trees.kinds_stride_s
        kind = tl.load(trees.kinds + place, mask=mask, other=0).to(tl.int32)
    elif trees.sampled is not None:
        kind = v * 0 + IID
    return kind


@triton.jit
def parent_at(trees, b, v, mask):
    """Parents of nodes v, a vector; -1 where not `mask`."""
    place = b * trees.parents_stride_b + v.to(tl.int64) * trees.parents_stride_s
    return tl.load(trees.parents + place, mask=mask, other=-1).to(tl.int32)


@triton.jit
def is_known(trees, b, v, token, mask):
    """Whether nodes v, a vector, hold tokens, of kinds that there are."""
    kind = kind_at(trees, b, v, mask)
    return (token >= 0) & (token < trees.ids) & (kind >= 0) & (kind <= REST)


@triton.jit
def clashing_kinds(trees, b, v, parent, size, STEP: tl.constexpr):
    """Count siblings, both drawn, of kinds that do not go together; v is a vector of all nodes."""
    kind = kind_at(trees, b, v, v < size)
    drawn = (kind > 0) & (kind <= REST)
    clashes = tl.full([], 0, tl.int32)
    for start in range(0, size, STEP):
        w = start + tl.arange(0, STEP)
        other = kind_at(trees, b, w, w < size)
        siblings = parent_at(trees, b, w, (w > 0) & (w < size))[None, :] == parent[:, None]
        both = drawn[:, None] & ((other > 0) & (other <= REST))[None, :] & siblings
        apart = (kind[:, None] != other[None, :]) | (kind[:, None] == REST)
        clash = both & apart & (w[None, :] < v[:, None]) & (parent >= 0)[:, None]
        clashes += tl.sum(tl.sum(clash.to(tl.int32), 1), 0)
    return clashes


@triton.jit
def look_up(trees, b, v, parent):
    """Whether the ancestors of nodes v, a vector, all hold tokens, the root apart; and depths."""
    known = v >= 0
    depth = v * 0
    at = tl.where(parent >= 0, v, 0)
    while tl.max(at, 0) > 0:
        inside = at > 0
        depth += inside.to(tl.int32)
        at = tl.where(inside, parent_at(trees, b, at, inside), 0)
        token = token_at(trees, b, at, at > 0)
        known = known & ((at == 0) | is_known(trees, b, at, token, at > 0))
    return known, depth


@triton.jit
def has_coin_out_of_range(coins, b, v, reachable, nodes):
    """Whether the uniform of a node that tokens lead to, or the last, lies outside [0, 1)."""
    slot = tl.where(v > 0, v - 1, nodes - 1).to(tl.int64)
    place = b * coins.uniforms_stride_b + slot * coins.uniforms_stride_s
    u = tl.load(coins.uniforms + place, mask=reachable, other=0.0)
    return tl.max((is_uniform(u) == 0).to(tl.int32), 0) > 0


@triton.jit
def list_children(
    trees, children, flow, b, v, parent, is_child, greedy, count, nodes,
    READS_DRAFT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Give every usable child its slot: those before it have lower parents, or are siblings."""
    slot = v * 0
    first = v * 0
    fixed = v < 0
    asks = v < 0
    for start in range(0, count, STEP):
        w = start + tl.arange(0, STEP)
        inflow = tl.load(flow.inflow + b * nodes + w, mask=w < count, other=UNREACHABLE)
        usable = (w > 0) & (inflow == NOT_LOOKED_AT)
        above = tl.where(usable, parent_at(trees, b, w, usable), nodes)[None, :]
        siblings = above == parent[:, None]
        before = (above < parent[:, None]) | (siblings & (w[None, :] < v[:, None]))
        slot += tl.sum(before.to(tl.int32), 1)
        first += tl.sum((above < v[:, None]).to(tl.int32), 1)
        if READS_DRAFT:
            other = kind_at(trees, b, w, usable)
            rest = siblings & (other == REST)[None, :]
            fixed = fixed | (tl.max(rest.to(tl.int32), 1) > 0)
            drawn = (above == v[:, None]) & (other > 0)[None, :]
            asks = asks | (tl.max(drawn.to(tl.int32), 1) > 0)
    token = token_at(trees, b, v, is_child).to(tl.int32)
    kind = v * 0
    if READS_DRAFT:
        kind = tl.where(greedy, 0, kind_at(trees, b, v, is_child))
    fixed = tl.where(greedy, v < 0, fixed & (kind == 0))
    asks = tl.where(greedy, v < 0, asks)
    place = b * nodes + slot.to(tl.int64)
    tl.store(children.node + place, v, mask=is_child)
    tl.store(children.token + place, token, mask=is_child)
    tl.store(children.kind + place, kind.to(tl.int8), mask=is_child)
    tl.store(children.tried + place, v * 0 - 1, mask=is_child)
    tl.store(children.fixed + place, tl.where(fixed, token, -1), mask=is_child)
    tl.store(children.drawn + place, v * 0 - 1, mask=is_child)
    begins = children.first + b * (nodes + 1)
    tl.store(begins + v, b * nodes + first.to(tl.int64), mask=v < nodes)
    tl.store(begins + nodes, b * nodes + tl.sum(is_child.to(tl.int32), 0))
    tl.store(flow.wanted_draft + b * nodes + v, asks.to(tl.int8), mask=v < nodes)


@triton.jit(do_not_specialize=["nodes"])
def open_trees(
    trees, children, flow, status, vocab, nodes,
    READS_DRAFT: tl.constexpr, NODES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Look at the parameters and nodes of every request. Grid: requests.

    Of what is no tree, the root alone is left.
    """
    b = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, NODES)
    own = trees.parents + b * trees.parents_stride_b
    size = tree_size(own, trees.parents_stride_s, nodes, NODES)
    if trees.kinds is not None:
        parent = parent_at(trees, b, v, (v > 0) & (v < size))
        size = tl.where(clashing_kinds(trees, b, v, parent, size, STEP) > 0, 0, size)
    count = tl.maximum(size, 1).to(tl.int32)
    parent = parent_at(trees, b, v, (v > 0) & (v < count))
    token = token_at(trees, b, v, parent >= 0)
    above, depth = look_up(trees, b, v, parent)
    met = above & (parent >= 0) & (token != -1)
    known = is_known(trees, b, v, token, parent >= 0)
    is_child = met & known
    reachable = is_child | (v == 0)
    greedy, bad = begin_request(trees, b, vocab)
    if trees.coins.uniforms is not None:
        bad = bad | ((greedy == 0) & has_coin_out_of_range(trees.coins, b, v, reachable, nodes))
    invalid = tl.max((met & (known == 0)).to(tl.int32), 0) > 0
    found = tl.where(size > 0, 0, INVALID_TREE)
    found = tl.where(bad, found | PARAMETER_OUT_OF_RANGE, found)
    tl.store(status + b, tl.where(invalid, found | INVALID_DRAFT_TOKEN, found))

    place = b * nodes + v
    inside = v < nodes
    inflow = tl.where(v == 0, 1.0, tl.where(reachable, NOT_LOOKED_AT, UNREACHABLE))
    nothing = (v * 0).to(tl.float64)
    tl.store(flow.inflow + place, inflow.to(tl.float64), mask=inside)
    tl.store(flow.acceptance + place, nothing + NOT_LOOKED_AT, mask=inside)
    tl.store(flow.target + place, nothing, mask=inside)
    tl.store(flow.draft + place, nothing, mask=inside)
    tl.store(flow.depth + place, depth, mask=inside)
    tl.store(flow.leads + place, (v * 0).to(tl.int8), mask=inside)
    tl.store(flow.wanted + place, reachable.to(tl.int8), mask=inside)
    tl.debug_barrier()  # list_children reads inflows that other threads have written
    list_children(
        trees, children, flow, b, v, parent, is_child, greedy, count, nodes,
        READS_DRAFT, STEP,
    )  # fmt: skip
