"""Cutoffs of rows whose columns several ranks hold: cutoff.py with sums over ranks in between.

The maxima of groups have been gathered, so that `find_floors` finds one floor everywhere; `collect`
has made a list of what reaches it in each rank's own tiles. A selection then finds a key of 32 bits
digit by digit: every rank sums the counts, or masses, of its list at or above each value of the
next digit (of its own tiles, where the list did not fit), the ranks add these sums up, and all
choose the same digit.

Grid: a program a row, in every kernel. Reads a rank's list, in cache, once a digit and once before
and after; exchanged, a row: 128 bytes a digit, of which top-k and top-p take 8 each, 8 bytes before
top-p, 16 at the end. Numerics: exact integers, as in cutoff.py; nothing is decided on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cutoff import (
    MAX_CANDIDATES,
    SELECT_BLOCK,
    Work,
    descend,
    is_selected,
    key_value,
    mass_in_row,
    min_p_cutoff,
    needs_row_mass,
    pivots_of,
    reached_in_row,
    row_mass,
    top_p_bound,
)
from .launch import launch
from .law_pass import ENTROPY, NOTHING, Batch, Summaries, combined_max
from .laws import INFINITY, filters_at, plain_row, row_at, support_threshold

#: Bits of a key that the ranks find with one exchange: fewer cost more exchanges, more cost bytes.
BITS = tl.constexpr(4)
PIVOTS = tl.constexpr(1 << BITS.value)
LEVELS = tl.constexpr(32 // BITS.value)

#: Logits that meet every pivot in one step.
PIVOT_BLOCK = tl.constexpr(256)

#: What has been selected by, or is being.
NOT_YET = tl.constexpr(0)
COUNT = tl.constexpr(1)
MASS = tl.constexpr(2)


class Search(NamedTuple):
    """How far the selections of all rows are, the same on every rank.

    A launch reads one and writes another: warps of a program read at their own pace.
    """

    keys: Any  # [rows] int64: without the digit that `reached` decides
    reached: Any  # [rows, PIVOTS] int64
    cutoffs: Any  # [rows] float32
    totals: Any  # [rows] int64: masses that top-p compares with


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def takes_part(filters, BY: tl.constexpr):
    """Whether a row is selected in by count, or by mass."""
    if BY == COUNT:
        wanted = filters.top_k > 0
    else:
        wanted = filters.top_p < 1.0
    return wanted


@triton.jit
def bound_of(search, filters, row, BY: tl.constexpr):
    """Give what the selection in a row compares with, uint64."""
    if BY == COUNT:
        bound = filters.top_k.to(tl.uint64)
    else:
        bound = top_p_bound(filters.top_p, tl.load(search.totals + row).to(tl.uint64))
    return bound


@triton.jit
def key_before(search, filters, row, level, BY: tl.constexpr):
    """Key that the levels before `level` have found."""
    key = tl.full([], 0, tl.uint32)
    if level > 0:
        key = tl.load(search.keys + row).to(tl.uint32)
        reached = tl.load(search.reached + row * PIVOTS + tl.arange(0, PIVOTS)).to(tl.uint64)
        bound = bound_of(search, filters, row, BY)
        key = descend(key, 32 - BITS * level, reached, bound, BITS)
    return key


@triton.jit
def reach_row(
    batch, summaries, work, search, keys, reached, of, row, tiles, level,
    BY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum this rank's weights at or above the pivots of a level, in row `of` of a batch."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    if is_selected(batch, filters, b, s) & takes_part(filters, BY):
        top = combined_max(summaries, row, tiles)
        if top > -INFINITY:
            BLOCK: tl.constexpr = min(TILE, PIVOT_BLOCK)
            scale = 1.0 / filters.temperature
            threshold = support_threshold(tl.load(search.cutoffs + row), top, scale)
            key = key_before(search, filters, row, level, BY)
            pivots, _ = pivots_of(key, level, BITS)
            count = tl.load(work.counts + row)
            if count <= MAX_CANDIDATES:
                found = plain_row(work.candidates + row * MAX_CANDIDATES, count)
                sums = reached_in_row(found, pivots, top, scale, threshold, BY == MASS, BITS, BLOCK)
            else:
                source = row_at(batch.rows, b, s)
                sums = reached_in_row(
                    source, pivots, top, scale, threshold, BY == MASS, BITS, BLOCK
                )
            tl.store(keys + row, key.to(tl.int64))
            tl.store(reached + row * PIVOTS + tl.arange(0, PIVOTS), sums.to(tl.int64))


@triton.jit(do_not_specialize=["first_rows", "tiles", "level"])
def reach_pivots(
    first, second, summaries, work, search, keys, reached, first_rows, tiles, level,
    BY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Do so for the rows of two batches that are selected in. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        reach_row(first, summaries, work, search, keys, reached, row, row, tiles, level, BY, TILE)
    if second.rows.data is not None:
        if second.rows.linear is None:
            if row >= first_rows:
                reach_row(
                    second, summaries, work, search, keys, reached, row - first_rows, row, tiles,
                    level, BY, TILE,
                )  # fmt: skip


@triton.jit
def mass_here(work, source, top, scale, cutoff, row, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    """Mass that this rank has of what reaches a cutoff, and of its entropy."""
    threshold = support_threshold(cutoff, top, scale)
    count = tl.load(work.counts + row)
    if count <= MAX_CANDIDATES:
        found = plain_row(work.candidates + row * MAX_CANDIDATES, count)
        kept, spread = mass_in_row(found, top, scale, threshold, EXTRA == ENTROPY, BLOCK)
    else:
        kept, spread = mass_in_row(source, top, scale, threshold, EXTRA == ENTROPY, BLOCK)
    return kept, spread


@triton.jit
def total_here(work, source, filters, top, scale, cutoff, row, tiles, BLOCK: tl.constexpr):
    """Mass that this rank has of what top-p compares with."""
    total = tl.full([], 0, tl.uint64)
    if needs_row_mass(filters):
        total = row_mass(work.masses, row, tiles)
    elif filters.top_p < 1.0:
        total, _ = mass_here(work, source, top, scale, cutoff, row, NOTHING, BLOCK)
    return total


@triton.jit
def weigh_row(
    batch, summaries, work, search, cutoffs, masses, of, row, tiles,
    AFTER: tl.constexpr, LAST: tl.constexpr, EXTRA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """End the selection AFTER in row `of` of a batch, and write the mass of what is left here."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    filters = filters_at(batch.sampling, b, batch.rows.vocab)
    if is_selected(batch, filters, b, s):
        top = combined_max(summaries, row, tiles)
        if top > -INFINITY:
            BLOCK: tl.constexpr = min(TILE, SELECT_BLOCK)
            source = row_at(batch.rows, b, s)
            scale = 1.0 / filters.temperature
            cutoff = tl.load(search.cutoffs + row)
            if AFTER != NOT_YET:
                if takes_part(filters, AFTER):
                    found = key_value(key_before(search, filters, row, LEVELS, AFTER))
                    cutoff = tl.maximum(cutoff, found)
            if LAST:
                if filters.min_p > 0.0:
                    cutoff = tl.maximum(cutoff, min_p_cutoff(top, filters))
                kept, spread = mass_here(work, source, top, scale, cutoff, row, EXTRA, BLOCK)
                tl.store(masses + row * 2 + 1, spread.to(tl.int64))
            else:
                kept = total_here(work, source, filters, top, scale, cutoff, row, tiles, BLOCK)
            tl.store(cutoffs + row, cutoff)
            tl.store(masses + row * 2, kept.to(tl.int64))


@triton.jit(do_not_specialize=["first_rows", "tiles"])
def weigh_rows(
    first, second, summaries, work, search, cutoffs, masses, first_rows, tiles,
    AFTER: tl.constexpr, LAST: tl.constexpr, EXTRA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Do so for the rows of two batches that have filters. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        weigh_row(
            first, summaries, work, search, cutoffs, masses, row, row, tiles,
            AFTER, LAST, EXTRA, TILE,
        )  # fmt: skip
    if second.rows.data is not None:
        if second.rows.linear is None:
            if row >= first_rows:
                weigh_row(
                    second, summaries, work, search, cutoffs, masses, row - first_rows, row, tiles,
                    AFTER, LAST, NOTHING, TILE,
                )  # fmt: skip


# ---- launches -----------------------------------------------------------------------------------


class Selections:
    """The selections in all rows of a call.

    Parameters
    ----------
    total : callable
        Sums an int64 tensor over ranks.
    first, second, summaries, work
        As of `launch.compute_laws`.
    """

    def __init__(
        self,
        total: Callable[[Tensor], Tensor],
        first: Batch,
        second: Batch,
        first_rows: int,
        summaries: Summaries,
        work: Work,
    ) -> None:
        self.total = total
        self.sources = (first, second, summaries, work)
        self.first_rows = first_rows
        self.rows, self.tiles = summaries.max.shape
        self.new_zeros = summaries.max.new_zeros
        self.search = Search(
            self.new_zeros(self.rows, dtype=torch.int64),
            self.new_zeros((self.rows, PIVOTS.value), dtype=torch.int64),
            summaries.max.new_full((self.rows,), -torch.inf),
            self.new_zeros(self.rows, dtype=torch.int64),
        )

    def select(self, by: Any, size: int) -> None:
        """Find the keys of all rows that are selected in by count, or by mass."""
        for level in range(LEVELS.value):
            keys = self.new_zeros(self.rows, dtype=torch.int64)
            reached = self.new_zeros((self.rows, PIVOTS.value), dtype=torch.int64)
            launch(
                reach_pivots,
                self.rows,
                *(*self.sources, self.search, keys, reached, self.first_rows, self.tiles, level),
                BY=by.value,
                TILE=size,
                num_warps=8,
            )
            self.search = self.search._replace(keys=keys, reached=self.total(reached))

    def weigh(self, after: Any, size: int, *, last: bool, extra: Any) -> Tensor:
        """End a selection, and sum what it has left; returns masses [rows, 2]."""
        cutoffs = torch.full_like(self.search.cutoffs, -torch.inf)
        masses = self.new_zeros((self.rows, 2), dtype=torch.int64)
        launch(
            weigh_rows,
            self.rows,
            *(*self.sources, self.search, cutoffs, masses, self.first_rows, self.tiles),
            AFTER=after.value,
            LAST=last,
            EXTRA=extra.value,
            TILE=size,
            num_warps=8,
        )
        self.search = self.search._replace(cutoffs=cutoffs)
        return self.total(masses)


def narrow(selections: Selections, size: int, extra: Any) -> tuple[Tensor, Tensor]:
    """Find the cutoffs of all rows with filters, and the masses of what they keep."""
    first, second = selections.sources[:2]
    samplings = (first.sampling, second.sampling)
    done = NOT_YET
    if any(sampling.top_k is not None for sampling in samplings):
        selections.select(COUNT, size)
        done = COUNT
    if any(sampling.top_p is not None for sampling in samplings):
        totals = selections.weigh(done, size, last=False, extra=NOTHING)
        selections.search = selections.search._replace(totals=totals[:, 0].contiguous())
        selections.select(MASS, size)
        done = MASS
    kept = selections.weigh(done, size, last=True, extra=extra)
    return selections.search.cutoffs, kept
