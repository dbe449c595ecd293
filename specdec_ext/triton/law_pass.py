"""Laws of logits rows: the first kernels of every operator.

Grid: rows x splits, a program a share of the tiles of a row. Reads every row once, 2 or 4 bytes an
entry; writes 12 bytes a tile, 20 for a relaxed rule, and with filters 4 bytes a group. Numerics:
float32 exponentials against the tile's own maximum, float32 tile sums; float64 across tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .laws import (
    FLOAT_MAX,
    GROUP,
    INFINITY,
    NO_ROWS,
    NO_SAMPLING,
    end_of_tiles,
    filters_at,
    first_tile,
    is_greedy,
    is_greedy_at,
    load_tile,
    row_at,
    support_threshold,
    tokens_of,
    value_at,
    weights_of,
)

# What a relaxed rule asks of the target rows beside their laws.
NOTHING = tl.constexpr(0)
RANK = tl.constexpr(1)  # how many logits are above the drafted token's
ENTROPY = tl.constexpr(2)  # in nats, of the filtered law

#: Tiles that one step of a combination takes.
TILE_STEP = tl.constexpr(64)


class Batch(NamedTuple):
    """Rows, their sampling parameters, and which of them matter."""

    rows: Any
    sampling: Any
    tokens: Any  # [B, n], the drafted token of each row, or None
    tokens_stride_b: Any
    tokens_stride_s: Any
    num_tokens: Any  # n: later rows have none
    lengths: Any  # [B]: rows of a request after its length are not wanted; or None
    lengths_stride: Any
    target: Any  # Sampling: rows of requests at T = 0 are not wanted
    wanted: Any  # [B, steps] int8: which rows are, where only the device knows; or None
    drafted: Any  # [B, steps] float32: values at the tokens, where ranks hold the rows; or None
    end: None = None  # see laws.py


NO_BATCH = Batch._make([NO_ROWS, NO_SAMPLING, *[None] * 6, NO_SAMPLING, None, None, None])


def is_given(batch: Batch) -> bool:
    """Whether a batch has rows at all."""
    return batch.rows.data is not None


class Summaries(NamedTuple):
    """One value per tile, [rows, tiles] each."""

    max: Any  # float32; NaN where an entry of the tile is NaN or +inf
    sum: Any  # float64, against the tile's own max; for probabilities NaN where they are no law
    extra: Any  # float64, or None
    group_max: Any  # float32 [rows, tiles, TILE / GROUP], or None where there are no filters


@triton.jit
def is_wanted(batch, b, s):
    """Whether row s of request b can matter at all."""
    wanted = s >= 0
    if batch.lengths is not None:
        length = tl.load(batch.lengths + b * batch.lengths_stride).to(tl.int64)
        wanted = s <= tl.maximum(length, 0)
    wanted = wanted & (is_greedy_at(batch.target, b) == 0)
    if batch.wanted is not None:
        wanted = wanted & (tl.load(batch.wanted + b * batch.rows.steps + s) != 0)
    return wanted


@triton.jit
def drafted_token(batch, b, s):
    """Token drafted at row s of request b; -1 where there is none."""
    token = tl.full([], -1, tl.int64)
    if batch.tokens is not None:
        place = batch.tokens + b * batch.tokens_stride_b + s * batch.tokens_stride_s
        token = tl.load(place, mask=s < batch.num_tokens, other=-1).to(tl.int64)
    return token


@triton.jit
def drafted_value(batch, source, b, s):
    """Value of row s of request b at its drafted token."""
    if batch.drafted is not None:
        value = tl.load(batch.drafted + b * batch.rows.steps + s)
    else:
        value = value_at(source, drafted_token(batch, b, s))
    return value


@triton.jit
def scan_logits(
    batch, summaries, source, b, s, row, tiles, split, splits,
    EXTRA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Leave maxima and sums of a row's tiles; sums only where T > 0."""
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    scale = 1.0 / tl.where(is_greedy(filters), 1.0, filters.temperature)
    value = drafted_value(batch, source, b, s)
    nothing_cut = tl.full([], -INFINITY, tl.float32)
    end = end_of_tiles(batch.rows, tiles, TILE)
    for tile in range(first_tile(batch.rows, split, TILE), end, splits):
        x = load_tile(source, tile, -INFINITY, TILE)
        top = tl.max(x, 0)
        valid = tl.min((x <= FLOAT_MAX).to(tl.int32), 0)
        reference = tl.maximum(top, -FLOAT_MAX)
        threshold = support_threshold(nothing_cut, reference, scale)
        weights = weights_of(x, reference, scale, threshold)
        place = row * tiles + tile
        tl.store(summaries.max + place, tl.where(valid != 0, top, float("nan")))
        tl.store(summaries.sum + place, tl.sum(weights, 0).to(tl.float64))
        if EXTRA == RANK:
            above = tl.sum((x > value).to(tl.int32), 0)
            tl.store(summaries.extra + place, above.to(tl.float64))
        if EXTRA == ENTROPY:
            exponents = tl.where(weights > 0.0, (x - reference) * scale.to(tl.float32), 0.0)
            tl.store(summaries.extra + place, tl.sum(weights * exponents, 0).to(tl.float64))
        if summaries.group_max is not None:
            groups = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), 1)
            inside = tl.arange(0, TILE // GROUP)
            tl.store(summaries.group_max + place * (TILE // GROUP) + inside, groups)


@triton.jit
def scan_probabilities(rows, summaries, source, row, tiles, split, splits, TILE: tl.constexpr):
    """Leave the sums of a row of probabilities."""
    end = end_of_tiles(rows, tiles, TILE)
    for tile in range(first_tile(rows, split, TILE), end, splits):
        x = load_tile(source, tile, 0.0, TILE)
        valid = tl.min(((x >= 0.0) & (x <= FLOAT_MAX)).to(tl.int32), 0)
        total = tl.sum(x, 0).to(tl.float64)
        tl.store(summaries.sum + row * tiles + tile, tl.where(valid != 0, total, float("nan")))


@triton.jit
def scan_row(
    batch, summaries, of, row, tiles, split, splits,
    EXTRA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scan row `of` of a batch; its place among all rows is `row`."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    if is_wanted(batch, b, s):
        source = row_at(batch.rows, b, s)
        if batch.rows.linear is not None:
            scan_probabilities(batch.rows, summaries, source, row, tiles, split, splits, TILE)
        else:
            scan_logits(
                batch, summaries, source, b, s, row, tiles, split, splits,
                EXTRA, TILE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_rows", "tiles", "splits"])
def law_pass(
    first, second, summaries, first_rows, tiles, splits,
    EXTRA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scan the rows of two batches (`second` may be NO_BATCH). Grid: rows x splits."""
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = (program % splits).to(tl.int32)
    if row < first_rows:
        scan_row(first, summaries, row, row, tiles, split, splits, EXTRA, TILE)
    if second.rows.data is not None:
        if row >= first_rows:
            scan_row(
                second, summaries, row - first_rows, row, tiles, split, splits,
                NOTHING, TILE,
            )  # fmt: skip


# ---- from tiles to laws -------------------------------------------------------------------------


@triton.jit
def combined_max(summaries, row, tiles):
    """Maximum over the tiles of a row; NaN where the row has NaN or +inf."""
    top = tl.full([], -INFINITY, tl.float32)
    valid = tl.full([], 1, tl.int32)
    for start in range(0, tiles, TILE_STEP):
        tile = start + tl.arange(0, TILE_STEP)
        found = tl.load(summaries.max + row * tiles + tile, mask=tile < tiles, other=-INFINITY)
        usable = found == found
        valid = tl.minimum(valid, tl.min(usable.to(tl.int32), 0))
        top = tl.maximum(top, tl.max(tl.where(usable, found, -INFINITY), 0))
    return tl.where(valid != 0, top, float("nan"))


@triton.jit
def combined_sum(summaries, row, tiles, top, scale, EXTRA: tl.constexpr):
    """Sum of exponentials against the row's maximum, and the numerator of its entropy."""
    z = tl.full([], 0.0, tl.float64)
    spread = tl.full([], 0.0, tl.float64)
    for start in range(0, tiles, TILE_STEP):
        tile = start + tl.arange(0, TILE_STEP)
        inside = tile < tiles
        place = row * tiles + tile
        sums = tl.load(summaries.sum + place, mask=inside, other=0.0)
        maxima = tl.load(summaries.max + place, mask=inside, other=0.0).to(tl.float64)
        exponents = tl.where(sums > 0.0, scale * (maxima - top.to(tl.float64)), 0.0)
        factors = tl.exp(exponents)
        z += tl.sum(sums * factors, 0)
        if EXTRA == ENTROPY:
            extras = tl.load(summaries.extra + place, mask=inside, other=0.0)
            spread += tl.sum(factors * (extras + sums * exponents), 0)
    return z, spread


@triton.jit
def summed(values, row, tiles):
    """Sum of one value a tile."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, tiles, TILE_STEP):
        tile = start + tl.arange(0, TILE_STEP)
        found = tl.load(values + row * tiles + tile, mask=tile < tiles, other=0.0)
        total += tl.sum(found, 0)
    return total


@triton.jit
def tile_of_maximum(summaries, row, tiles, top):
    """First tile whose maximum equals the row's."""
    best = tl.full([], 0, tl.int32) + tiles - 1
    for start in range(0, tiles, TILE_STEP):
        tile = start + tl.arange(0, TILE_STEP)
        found = tl.load(summaries.max + row * tiles + tile, mask=tile < tiles, other=-INFINITY)
        best = tl.minimum(best, tl.min(tl.where(found == top, tile, tiles - 1), 0))
    return best


@triton.jit
def first_maximum(summaries, source, row, tiles, top, TILE: tl.constexpr):
    """Token of the first entry whose logit equals the row's maximum."""
    best = tile_of_maximum(summaries, row, tiles, top)
    return first_equal(source, best, top, TILE)


@triton.jit
def first_equal(source, best, top, TILE: tl.constexpr):
    """Token of the first entry of a tile whose logit equals its maximum."""
    x = load_tile(source, best, -INFINITY, TILE)
    index = best * TILE + tl.arange(0, TILE)
    first = tl.min(tl.where(x == top, index, source.entries - 1), 0)
    return tokens_of(source, first).to(tl.int64)
