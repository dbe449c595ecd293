"""Cutoffs without sorting: which logits top-k, top-p and min-p keep.

Three kernels between `law_pass` and `finish_laws`' selection, on rows that have a filter:

`find_floors`, a program a row, reads the maxima of the row's groups of 128 entries and finds a
floor that no cutoff lies below: the k-th largest group maximum (at least k logits reach it), the
one down to which the maxima alone hold top_p of the mass, or min-p's cutoff itself.
`collect`, a program a share of a row's tiles, reads the row a second time, appends what reaches the
floor to the row's list and sums the masses that top-p compares with.
`filtered_law`, inside `finish_laws`, selects in that list. Where it does not fit (flat rows), it
selects in the row itself: exact all the same, but a pass over the row by one program for each of
the 16 digits of a key, per filter.

Traffic beside `law_pass`: 2 or 4 bytes an entry, 4 bytes a group, 8 KiB a row for the list.
Numerics: counts, and masses in 2^-40 fixed point, are exact integers, and so is z of a filtered
law; lists are in no particular order, and nothing depends on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .law_pass import NOTHING, combined_max, combined_sum, is_wanted
from .laws import (
    GROUP,
    INFINITY,
    end_of_tiles,
    filters_at,
    first_tile,
    has_filter,
    hide,
    is_greedy,
    load_tile,
    masses_of,
    memory_of,
    plain_row,
    round_up,
    row_at,
    support_threshold,
    weights_of,
)

#: Logits that a row's list holds.
MAX_CANDIDATES = tl.constexpr(2048)

#: Bits of a key that one step of a selection finds, keys being compared with so many pivots. Few
#: keep a step in registers; the interpreter is faster with few steps.
DIGIT_BITS = tl.constexpr(8 if triton.knobs.runtime.interpret else 2)
LEVELS = tl.constexpr(32 // DIGIT_BITS.value)

#: The interpreter shifts no int by a constant.
ONE = tl.constexpr(1)

#: Logits that one step of a selection in a row takes: each meets every pivot.
SELECT_BLOCK = tl.constexpr(1024)

#: The key of -inf: the lowest key of a logit.
LOWEST_KEY = tl.constexpr(0x007FFFFF)

ONE_MASS = tl.constexpr(1099511627776.0)


class Work(NamedTuple):
    """What the filters' kernels hand to each other, one entry a row (or a tile)."""

    floors: Any  # [rows] float32
    counts: Any  # [rows] int32: logits that reach the floor
    candidates: Any  # [rows, MAX_CANDIDATES] float32
    masses: Any  # [rows, tiles] int64, of rows with top-p over the whole row
    # Found over several ranks, see cutoff_ranks.py and sharded.py; else None.
    cutoffs: Any  # [rows] float32
    kept: Any  # [rows, 2] int64: masses of what is kept and of its entropy
    argmax: Any  # [rows] int64


NO_WORK = Work(*[None] * len(Work._fields))


# ---- selection ----------------------------------------------------------------------------------


@triton.jit
def order_key(x):
    """Keys, uint32, that order as the floats do; equal logits have equal keys (-0 and +0 too)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, -1, -2147483648)
    return (bits ^ flipped).to(tl.uint32, bitcast=True)


@triton.jit
def key_value(key):
    """Float of a key (a scalar), at least -inf: where all weights together stay below a bound."""
    bits = tl.maximum(key, LOWEST_KEY).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, -2147483648, -1)
    return (bits ^ flipped).to(tl.float32, bitcast=True)


@triton.jit
def pivots_of(key, level, BITS: tl.constexpr):
    """Keys that one more digit may give, and how far up that digit is."""
    shift = 32 - BITS * (level + 1)
    return key | (tl.arange(0, ONE << BITS).to(tl.uint32) << shift), shift


@triton.jit
def descend(key, shift, reached, bound, BITS: tl.constexpr):
    """Choose the largest digit at or above whose pivot the weights reach the bound."""
    digits = tl.arange(0, ONE << BITS).to(tl.uint32)
    return key | (tl.max(tl.where(reached >= bound, digits, 0), 0) << shift)


@triton.jit
def weights_reaching(keys, weights, pivots):
    """Sum the weights at or above each pivot."""
    above = keys[None, :] >= pivots[:, None]
    return tl.sum(tl.where(above, weights[None, :], 0), 1)


@triton.jit
def select_in_list(keys, weights, bound):
    """Find the largest logit at or above which the weights of a vector reach `bound`, uint64."""
    key = tl.full([], 0, tl.uint32)
    for level in range(0, LEVELS):
        pivots, shift = pivots_of(key, level, DIGIT_BITS)
        key = descend(key, shift, weights_reaching(keys, weights, pivots), bound, DIGIT_BITS)
    return key_value(key)


@triton.jit
def load_block(source, start, BLOCK: tl.constexpr):
    """Load the entries of a row or list from `start`, -inf after its end; also which exist."""
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < source.entries
    x = tl.load(memory_of(source, start) + offsets, mask=inside, other=-INFINITY).to(tl.float32)
    return hide(source, offsets, x, -INFINITY), inside


@triton.jit
def span_of(source):
    """Where the entries begin and end that are worked on here."""
    first = tl.full([], 0, tl.int32)
    last = source.entries
    if source.tail.dtype.is_ptr():
        first = source.first
        last = tl.minimum(source.last, source.entries)
    return first, last


@triton.jit
def reached_in_row(
    source, pivots, reference, scale, threshold,
    WEIGHTED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the weights at or above each pivot over memory; weights are counts or masses."""
    reached = tl.zeros([ONE << BITS], tl.uint64)
    first, last = span_of(source)
    for start in range(first, last, BLOCK):
        x, inside = load_block(source, start, BLOCK)
        if WEIGHTED:
            weights = masses_of(weights_of(x, reference, scale, threshold))
        else:
            weights = inside.to(tl.uint64)
        reached += weights_reaching(order_key(x), weights, pivots)
    return reached


@triton.jit
def select_in_row(
    source, bound, reference, scale, threshold, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Do what `select_in_list` does over memory, LEVELS times; weights are counts or masses."""
    key = tl.full([], 0, tl.uint32)
    for level in range(0, LEVELS):
        pivots, shift = pivots_of(key, level, DIGIT_BITS)
        reached = reached_in_row(
            source, pivots, reference, scale, threshold, WEIGHTED, DIGIT_BITS, BLOCK
        )
        key = descend(key, shift, reached, bound, DIGIT_BITS)
    return key_value(key)


@triton.jit
def spread_of(x, weights, reference, scale):
    """-w log w of weights w."""
    return weights * tl.where(weights > 0.0, (reference - x) * scale.to(tl.float32), 0.0)


@triton.jit
def mass_in_row(source, reference, scale, threshold, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of what reaches a threshold, and with ENTROPY that of -w log w, in fixed point."""
    total = tl.full([], 0, tl.uint64)
    spread = tl.full([], 0, tl.uint64)
    first, last = span_of(source)
    for start in range(first, last, BLOCK):
        x, _ = load_block(source, start, BLOCK)
        weights = weights_of(x, reference, scale, threshold)
        total += tl.sum(masses_of(weights), 0)
        if ENTROPY:
            spread += tl.sum(masses_of(spread_of(x, weights, reference, scale)), 0)
    return total, spread


@triton.jit
def top_p_bound(top_p, total):
    """Mass that the kept set may have strictly above its lowest member; the top entry stays."""
    bound = (top_p * total.to(tl.float64)).to(tl.uint64)
    return tl.where(bound > 0, bound, 1)


@triton.jit
def min_p_cutoff(top, filters):
    """Give min-p's bound as a raw logit."""
    return round_up(top.to(tl.float64) + filters.temperature * tl.log(filters.min_p))


@triton.jit
def needs_row_mass(filters):
    """Whether top-p compares with the mass of the whole row."""
    return (filters.top_p < 1.0) & (filters.top_k == 0)


@triton.jit
def is_selected(batch, filters, b, s):
    """Whether the law of this row takes a selection."""
    return is_wanted(batch, b, s) & has_filter(filters) & (is_greedy(filters) == 0)


# ---- floors -------------------------------------------------------------------------------------


@triton.jit
def floor_of(maxima, filters, top, scale, z, BLOCK: tl.constexpr):
    """Find a logit that no cutoff of this row lies below."""
    floor = tl.full([], -INFINITY, tl.float32)
    threshold = support_threshold(floor, top, scale)
    if filters.top_k > 0:
        if filters.top_k <= maxima.entries:
            bound = filters.top_k.to(tl.uint64)
            floor = select_in_row(maxima, bound, top, scale, threshold, False, BLOCK)
    elif filters.top_p < 1.0:
        # A hair more than top_p of the mass, because z is a rounded sum.
        bound = (filters.top_p * z * (ONE_MASS * 1.0001)).to(tl.uint64) + 1
        total, _ = mass_in_row(maxima, top, scale, threshold, False, BLOCK)
        if total >= bound:
            floor = select_in_row(maxima, bound, top, scale, threshold, True, BLOCK)
    else:
        floor = min_p_cutoff(top, filters)
    return floor


@triton.jit
def find_floor(batch, summaries, work, of, row, tiles, TILE: tl.constexpr):
    """Write the floor of row `of` of a batch and empty its list."""
    b = of // batch.rows.steps
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    if is_selected(batch, filters, b, of % batch.rows.steps):
        top = combined_max(summaries, row, tiles)
        if top > -INFINITY:
            scale = 1.0 / filters.temperature
            z, _ = combined_sum(summaries, row, tiles, top, scale, NOTHING)
            groups = tiles * (TILE // GROUP)
            maxima = plain_row(summaries.group_max + row * groups, groups)
            BLOCK: tl.constexpr = min(TILE, SELECT_BLOCK)
            floor = floor_of(maxima, filters, top, scale, z, BLOCK)
            tl.store(work.floors + row, floor)
            tl.store(work.counts + row, 0)


@triton.jit(do_not_specialize=["first_rows", "tiles"])
def find_floors(first, second, summaries, work, first_rows, tiles, TILE: tl.constexpr):
    """Write the floors of the rows of two batches. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        find_floor(first, summaries, work, row, row, tiles, TILE)
    if second.rows.data is not None:
        if second.rows.linear is None:
            if row >= first_rows:
                find_floor(second, summaries, work, row - first_rows, row, tiles, TILE)


# ---- collection ---------------------------------------------------------------------------------


@triton.jit
def collect_tile(work, x, floor, row):
    """Append what reaches the floor to the row's list; what does not fit is only counted."""
    reaches = (x >= floor) & (x > -INFINITY)
    found = tl.sum(reaches.to(tl.int32), 0)
    if found > 0:
        place = tl.atomic_add(work.counts + row, found) - 1
        place += tl.cumsum(reaches.to(tl.int32), 0)
        fits = reaches & (place < MAX_CANDIDATES)
        tl.store(work.candidates + row * MAX_CANDIDATES + place, x, mask=fits)


@triton.jit
def collect_row(batch, summaries, work, of, row, tiles, split, splits, TILE: tl.constexpr):
    """Collect the candidates of row `of` of a batch."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    if is_selected(batch, filters, b, s):
        top = combined_max(summaries, row, tiles)
        if top > -INFINITY:
            source = row_at(batch.rows, b, s)
            scale = 1.0 / filters.temperature
            floor = tl.load(work.floors + row)
            threshold = support_threshold(tl.full([], -INFINITY, tl.float32), top, scale)
            weigh = needs_row_mass(filters)
            end = end_of_tiles(batch.rows, tiles, TILE)
            for tile in range(first_tile(batch.rows, split, TILE), end, splits):
                place = row * tiles + tile
                if weigh | (tl.load(summaries.max + place) >= floor):
                    x = load_tile(source, tile, -INFINITY, TILE)
                    collect_tile(work, x, floor, row)
                    if weigh:
                        masses = masses_of(weights_of(x, top, scale, threshold))
                        tl.store(work.masses + place, tl.sum(masses, 0).to(tl.int64))


@triton.jit(do_not_specialize=["first_rows", "tiles", "splits"])
def collect(first, second, summaries, work, first_rows, tiles, splits, TILE: tl.constexpr):
    """Collect the candidates of the rows of two batches. Grid: rows x splits."""
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = (program % splits).to(tl.int32)
    if row < first_rows:
        collect_row(first, summaries, work, row, row, tiles, split, splits, TILE)
    if second.rows.data is not None:
        if second.rows.linear is None:
            if row >= first_rows:
                collect_row(
                    second, summaries, work, row - first_rows, row, tiles, split, splits, TILE
                )


# ---- the law ------------------------------------------------------------------------------------


@triton.jit
def row_mass(masses, row, tiles):
    """Mass of a whole row."""
    total = tl.full([], 0, tl.uint64)
    for start in range(0, tiles, 64):
        tile = start + tl.arange(0, 64)
        found = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0)
        total += tl.sum(found.to(tl.uint64), 0)
    return total


@triton.jit
def narrow_list(source, total, filters, top, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Cutoff, mass and entropy mass from a list, in registers, of all that may be kept."""
    x, inside = load_block(source, 0, BLOCK)
    keys = order_key(x)
    cutoff = tl.full([], -INFINITY, tl.float32)
    if filters.top_k > 0:
        cutoff = select_in_list(keys, inside.to(tl.uint64), filters.top_k.to(tl.uint64))
    if filters.top_p < 1.0:
        masses = masses_of(weights_of(x, top, scale, support_threshold(cutoff, top, scale)))
        if filters.top_k > 0:
            total = tl.sum(masses, 0)
        found = select_in_list(keys, masses, top_p_bound(filters.top_p, total))
        cutoff = tl.maximum(cutoff, found)
    if filters.min_p > 0.0:
        cutoff = tl.maximum(cutoff, min_p_cutoff(top, filters))
    weights = weights_of(x, top, scale, support_threshold(cutoff, top, scale))
    spread = tl.full([], 0, tl.uint64)
    if ENTROPY:
        spread = tl.sum(masses_of(spread_of(x, weights, top, scale)), 0)
    return cutoff, tl.sum(masses_of(weights), 0), spread


@triton.jit
def narrow_row(source, total, filters, top, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Cutoff, mass and entropy mass from the row itself, read again and again."""
    cutoff = tl.full([], -INFINITY, tl.float32)
    threshold = support_threshold(cutoff, top, scale)
    if filters.top_k > 0:
        bound = filters.top_k.to(tl.uint64)
        cutoff = select_in_row(source, bound, top, scale, threshold, False, BLOCK)
        threshold = support_threshold(cutoff, top, scale)
    if filters.top_p < 1.0:
        if filters.top_k > 0:
            total, _ = mass_in_row(source, top, scale, threshold, False, BLOCK)
        bound = top_p_bound(filters.top_p, total)
        found = select_in_row(source, bound, top, scale, threshold, True, BLOCK)
        cutoff = tl.maximum(cutoff, found)
    if filters.min_p > 0.0:
        cutoff = tl.maximum(cutoff, min_p_cutoff(top, filters))
    threshold = support_threshold(cutoff, top, scale)
    kept, spread = mass_in_row(source, top, scale, threshold, ENTROPY, BLOCK)
    return cutoff, kept, spread


@triton.jit
def filtered_law(
    work, source, filters, top, scale, row, tiles,
    ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cutoff, z and entropy numerator of a row with filters, T > 0."""
    LIST: tl.constexpr = min(TILE, MAX_CANDIDATES)
    BLOCK: tl.constexpr = min(TILE, SELECT_BLOCK)
    total = tl.full([], 0, tl.uint64)
    if needs_row_mass(filters):
        total = row_mass(work.masses, row, tiles)
    count = tl.load(work.counts + row)
    if count <= LIST:
        found = plain_row(work.candidates + row * MAX_CANDIDATES, count)
        cutoff, kept, spread = narrow_list(found, total, filters, top, scale, ENTROPY, LIST)
    else:
        cutoff, kept, spread = narrow_row(source, total, filters, top, scale, ENTROPY, BLOCK)
    return cutoff, kept.to(tl.float64) / ONE_MASS, -(spread.to(tl.float64) / ONE_MASS)


@triton.jit
def found_law(work, row):
    """Give what `filtered_law` does where ranks have found it together."""
    kept = tl.load(work.kept + row * 2).to(tl.float64)
    spread = tl.load(work.kept + row * 2 + 1).to(tl.float64)
    return tl.load(work.cutoffs + row), kept / ONE_MASS, -(spread / ONE_MASS)
