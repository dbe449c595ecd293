"""Final draws by inverse CDF in integers: csrc/core/fixed_point.h and csrc/cpu/draw.cpp.

A draw reads the weights of its law, or of its residual, tile by tile for their sums (a launch over
requests x splits), and one tile again for the search (a launch over requests). Writes 8 bytes a
tile. Numerics: weights in float32, summed as uint64, so that no order matters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .laws import (
    INFINITY,
    NO_LAW,
    POINT_MASS,
    absent,
    in_token_order,
    law_threshold,
    load_law,
    load_tile,
    masses_of,
    row_at,
    weights_of,
)

#: Of `draft_lift`: 2^100, and 2^-64.
LIFT = tl.constexpr(1267650600228229401496703205376.0)
LEAST_SUM = tl.constexpr(5.421010862427522e-20)

#: The largest float32.
LARGEST = tl.constexpr(3.4028234663852886e38)

#: Tile sums that one step of a search takes.
SUM_STEP = tl.constexpr(64)


class Children(NamedTuple):
    """The usable children of all nodes of trees, those of a node in adjacent slots, in their order.

    `tried`, `fixed` and `drawn` are lists: a slot's token, or -1 where it is not of them.
    """

    first: Any  # [B, N + 1] int64: the slot of a node's first child, and where the last node's end
    nodes: Any  # N
    node: Any  # [B, N] int32 by slot, as all that follow
    token: Any  # int32
    kind: Any  # int8
    tried: Any  # int32, looked at: not in the residual
    fixed: Any  # int32, deterministic beside a child from the rest: the draft's law is 0 there
    drawn: Any  # int32, drawn without replacement


NO_CHILDREN = Children(*[None] * len(Children._fields))


class Siblings(NamedTuple):
    """The children of one node of a tree; on a chain its pointers are absent, see `laws.Row`."""

    first: Any  # slots, int64
    last: Any  # the one after them
    tried: Any
    fixed: Any


class Task(NamedTuple):
    """What is to be drawn for one request."""

    row: Any  # of the request's target rows, int64
    residual: Any  # int32: [target * p - draft * q]+ without `excluded` or what `siblings` list
    target: Any  # float64
    draft: Any  # float64; 0: no draft law in the residual
    excluded: Any  # int64, -1: nothing
    u: Any  # float64
    siblings: Any  # Siblings


#: A task in memory is this many float64, which hold each of its fields but the last exactly.
TASK_FIELDS = tl.constexpr(6)


@triton.jit
def store_task(tasks, b, task):
    """Write a task."""
    base = tasks + b * TASK_FIELDS
    tl.store(base, task.row.to(tl.float64))
    tl.store(base + 1, task.residual.to(tl.float64))
    tl.store(base + 2, task.target)
    tl.store(base + 3, task.draft)
    tl.store(base + 4, task.excluded.to(tl.float64))
    tl.store(base + 5, task.u)


@triton.jit
def siblings_at(children, b, node):
    """Find the children of a node of request b, int64 both."""
    first = children.first + b * (children.nodes + 1) + node
    return Siblings(tl.load(first), tl.load(first + 1), children.tried, children.fixed)


@triton.jit
def no_siblings():
    """Stand for the children of a node of a chain."""
    return Siblings(absent(), absent(), absent(), absent())


@triton.jit
def load_task(tasks, children, b):
    """Read the task of request b; `children` is NO_CHILDREN where it is no tree."""
    base = tasks + b * TASK_FIELDS
    row = tl.load(base).to(tl.int64)
    siblings = no_siblings()
    if children.first is not None:
        siblings = siblings_at(children, b, row)
    return Task(
        row,
        tl.load(base + 1).to(tl.int32),
        tl.load(base + 2),
        tl.load(base + 3),
        tl.load(base + 4).to(tl.int64),
        tl.load(base + 5),
        siblings,
    )


@triton.jit
def needs_draw(law):
    """Whether there is something to draw: a law, and one that is not a point mass."""
    return (law.kind != NO_LAW) & (law.kind != POINT_MASS)


# ---- weights of a tile --------------------------------------------------------------------------


@triton.jit
def law_masses(source, law, tile, TILE: tl.constexpr):
    """Integer weights of a tile of a law."""
    x = load_tile(source, tile, -INFINITY, TILE)
    return masses_of(weights_of(x, law.max, law.scale, law_threshold(law)))


@triton.jit
def without(values, padding, tokens, first, last, tile, TILE: tl.constexpr):
    """Put `padding` in a tile, in the order of the tokens, where slots of a list say so."""
    index = tile * TILE + tl.arange(0, TILE)
    for slot in range(first, last):
        values = tl.where(index == tl.load(tokens + slot), padding, values)
    return values


@triton.jit
def draft_lift(draft, law):
    """Give what weights of the draft's law are multiplied by: csrc/core/draw_task.h."""
    lift = 1.0
    if draft.linear is not None:
        lift = tl.where(law.z < LEAST_SUM, LIFT, 1.0)
    return lift


@triton.jit
def draft_weights(draft, law, b, task, tile, TILE: tl.constexpr):
    """Weights of a tile of the draft's law, lifted, without what a residual leaves to it."""
    source = in_token_order(row_at(draft, b, task.row))
    if draft.linear is not None:
        found = tl.maximum(load_tile(source, tile, 0.0, TILE), 0.0) * draft_lift(draft, law)
    else:
        x = load_tile(source, tile, -INFINITY, TILE)
        found = weights_of(x, law.max, law.scale, law_threshold(law))
    if task.siblings.fixed.dtype.is_ptr():
        siblings = task.siblings
        found = without(found, 0.0, siblings.fixed, siblings.first, siblings.last, tile, TILE)
    return found


@triton.jit
def outer_scale(task, law):
    """Give t / z, which all weights of a residual [t p - d q]+ have in common."""
    return task.target / law.z


@triton.jit
def residual_weights(target, draft, laws, b, task, law, tile, TILE: tl.constexpr):
    """Weights of a tile of a residual, in units of its outer scale: [w - ratio v]+."""
    source = row_at(target, b, task.row)
    x = load_tile(source, tile, -INFINITY, TILE)
    if task.siblings.tried.dtype.is_ptr():
        siblings = task.siblings
        x = without(x, -INFINITY, siblings.tried, siblings.first, siblings.last, tile, TILE)
    else:
        index = tile * TILE + tl.arange(0, TILE)
        x = tl.where(index == task.excluded, -INFINITY, x)
    weights = weights_of(x, law.max, law.scale, law_threshold(law))
    if draft.data is not None:
        if task.draft > 0.0:
            of_draft = load_law(laws.draft, b * draft.steps + task.row)
            # Of equal laws it is 1, and nothing is left. Not infinite: 0 * inf is NaN.
            z = of_draft.z * draft_lift(draft, of_draft)
            ratio = task.draft / z / tl.maximum(outer_scale(task, law), 1e-200)
            ratio = tl.minimum(ratio, LARGEST).to(tl.float32)
            taken = ratio * draft_weights(draft, of_draft, b, task, tile, TILE)
            weights = tl.maximum(weights - taken, 0.0)
    return weights


@triton.jit
def residual_masses(task, law, weights):
    """Integer weights of a residual: they sum to 2^62 at most (csrc/core/fixed_point.h)."""
    unit = tl.where(task.target > 0.0, 4611686018427387904.0 / law.z, 0.0).to(tl.float32)
    return (weights * unit).to(tl.uint64)


# ---- search -------------------------------------------------------------------------------------


@triton.jit
def draw_threshold(u, total):
    """Give t for a u in [0, 1): the draw is the lowest index with an inclusive prefix sum > t."""
    u53 = (u * 9007199254740992.0).to(tl.uint64)
    return tl.umulhi(u53 << 11, total)


@triton.jit
def total_of(sums, tiles):
    """Sum of the tiles' sums."""
    total = tl.full([], 0, tl.uint64)
    for start in range(0, tiles, SUM_STEP):
        tile = start + tl.arange(0, SUM_STEP)
        total += tl.sum(tl.load(sums + tile, mask=tile < tiles, other=0).to(tl.uint64), 0)
    return total


@triton.jit
def find_tile(sums, tiles, t):
    """Find the tile that holds the draw, and what of t is left for it."""
    found = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.uint64)
    total = tl.full([], 0, tl.uint64)
    for start in range(0, tiles, SUM_STEP):
        tile = start + tl.arange(0, SUM_STEP)
        inside = tile < tiles
        here = tl.load(sums + tile, mask=inside, other=0).to(tl.uint64)
        prefix = total + tl.cumsum(here, 0)
        passed = inside & (prefix <= t)
        found += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, prefix, 0), 0))
        total += tl.sum(here, 0)
    return found, t - before


@triton.jit
def find_entry(masses, entries, tile, t, TILE: tl.constexpr):
    """Find the entry of a tile that the draw lands on, within the row whatever the logits do."""
    prefix = tl.cumsum(masses, 0)
    passed = tl.sum((prefix <= t).to(tl.int32), 0)
    return tl.minimum(tile * TILE + passed, entries - 1).to(tl.int64)


@triton.jit
def draw_from_law(source, law, sums, tiles, u, TILE: tl.constexpr):
    """Draw an entry from a law whose tiles' sums are known."""
    t = draw_threshold(u, total_of(sums, tiles))
    tile, left = find_tile(sums, tiles, t)
    tile = tl.minimum(tile, tiles - 1)
    return find_entry(law_masses(source, law, tile, TILE), source.entries, tile, left, TILE)


@triton.jit
def sum_law(source, law, sums, end, first, step, TILE: tl.constexpr):
    """Write the sums of a law's tiles from `first` to before `end`."""
    for tile in range(first, end, step):
        masses = law_masses(source, law, tile, TILE)
        tl.store(sums + tile, tl.sum(masses, 0).to(tl.int64))
