"""From tile summaries to laws.

Grid: a program a row. Reads 12 to 20 bytes a tile and, for an arg max, one tile of the row; where
filters are given see cutoff.py. Writes 64 bytes a row. Numerics: float64, tiles in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cutoff import filtered_law, found_law
from .law_pass import (
    ENTROPY,
    NOTHING,
    RANK,
    combined_max,
    combined_sum,
    drafted_value,
    first_maximum,
    is_wanted,
    summed,
)
from .laws import (
    EXPONENTIAL,
    INFINITY,
    LAW_FIELDS,
    LINEAR,
    NO_LAW,
    POINT_MASS,
    Law,
    filters_at,
    has_filter,
    is_greedy,
    row_at,
    store_law,
)


@triton.jit
def linear_law(summaries, row, tiles, value):
    """Law of a row of probabilities."""
    zero = tl.full([], 0.0, tl.float64)
    z = summed(summaries.sum, row, tiles)
    kind = tl.where(z > 0.0, LINEAR, NO_LAW)  # false for NaN
    top = tl.full([], 0.0, tl.float32)
    return Law(kind, top, top, zero, z, tl.full([], -1, tl.int64), value, zero)


@triton.jit
def exponential_law(
    batch, summaries, work, source, b, row, tiles, value,
    EXTRA: tl.constexpr, WANT_ARGMAX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Law of a row of logits."""
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    greedy = is_greedy(filters)
    top = combined_max(summaries, row, tiles)
    valid = top > -INFINITY  # false for NaN
    cutoff = tl.full([], -INFINITY, tl.float32)
    scale = 1.0 / tl.where(greedy, 1.0, filters.temperature)
    z = tl.full([], 1.0, tl.float64)
    extra = tl.full([], 0.0, tl.float64)
    argmax = tl.full([], -1, tl.int64)
    if valid:
        if greedy | WANT_ARGMAX:
            if work.argmax is not None:
                argmax = tl.load(work.argmax + row)
            else:
                argmax = first_maximum(summaries, source, row, tiles, top, TILE)
        if EXTRA == RANK:
            extra = summed(summaries.extra, row, tiles)
        if greedy == 0:
            z, spread = combined_sum(summaries, row, tiles, top, scale, EXTRA)
            if work.floors is not None:
                if has_filter(filters):
                    if work.kept is not None:
                        cutoff, z, spread = found_law(work, row)
                    else:
                        cutoff, z, spread = filtered_law(
                            work, source, filters, top, scale, row, tiles, EXTRA == ENTROPY, TILE
                        )
            if EXTRA == ENTROPY:
                extra = tl.log(z) - spread / z
    kind = tl.where(valid, tl.where(greedy, POINT_MASS, EXPONENTIAL), NO_LAW)
    scale = tl.where(greedy, INFINITY, scale)
    cutoff = tl.where(greedy, top, cutoff)
    return Law(kind, top, cutoff, scale, z, argmax, value, extra)


@triton.jit
def finish_row(
    batch, summaries, work, laws, of, row, tiles,
    EXTRA: tl.constexpr, WANT_ARGMAX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the law of row `of` of a batch; no law where it is not wanted."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    if is_wanted(batch, b, s):
        source = row_at(batch.rows, b, s)
        value = drafted_value(batch, source, b, s)
        if batch.rows.linear is not None:
            law = linear_law(summaries, row, tiles, value)
        else:
            law = exponential_law(
                batch, summaries, work, source, b, row, tiles, value,
                EXTRA, WANT_ARGMAX, TILE,
            )  # fmt: skip
        store_law(laws, row, law)
    else:
        tl.store(laws + row * LAW_FIELDS, 0.0)


@triton.jit(do_not_specialize=["first_rows", "tiles"])
def finish_laws(
    first, second, summaries, work, laws, first_rows, tiles,
    EXTRA: tl.constexpr, WANT_ARGMAX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the laws of the rows of two batches. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        finish_row(first, summaries, work, laws, row, row, tiles, EXTRA, WANT_ARGMAX, TILE)
    if second.rows.data is not None:
        if row >= first_rows:
            finish_row(
                second, summaries, work, laws, row - first_rows, row, tiles,
                NOTHING, False, TILE,
            )  # fmt: skip
