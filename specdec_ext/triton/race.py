"""Exponential races (Daliri, Musco, Suresh 2024): csrc/core/race.h, the entry with the least E / p.

Two launches after the laws: rows x splits for the winners of tiles, rows for those of rows. Reads a
row once more, 2 or 4 bytes an entry; writes 16 bytes a tile, 8 a row. Numerics: weights in float32;
noise, from 64 bits an entry, and quotients in float64. A tile in which nothing has weight, as most
have under top-k or top-p, takes no noise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Tiling, launch
from .laws import (
    EXPONENTIAL,
    INFINITY,
    LAW_FIELDS,
    Rows,
    end_of_tiles,
    first_tile,
    law_threshold,
    load_law,
    load_tile,
    row_at,
    tokens_of,
    weights_of,
)
from .philox import BELOW_ONE, COUPLED, WORD, Coins, philox4x32_10

#: Tiles that one step of a combination takes.
TILE_STEP = tl.constexpr(64)

#: A winner after every entry.
NOBODY = tl.constexpr(2147483647)

#: Where a law in memory has its `extra`.
EXTRA_FIELD = tl.constexpr(7)


# ---- noise --------------------------------------------------------------------------------------


@triton.jit
def exponential_noise(words):
    """E = -log1p(-u), u = (words + 0.5) / 2^64 < 1, in float64 to a few ulp however small u is.

    The logarithm of the rounded 1 - u is put right by the rounding (Kahan), as no log1p is in
    `triton.language`.
    """
    u = (words.to(tl.float64) + 0.5) * 5.421010862427522e-20
    u = tl.minimum(u, tl.full([], BELOW_ONE, tl.float64))
    rest = 1.0 - u
    return tl.where(rest < 1.0, -tl.log(rest) * (u / (1.0 - rest)), u)


@triton.jit
def neighbours_words(seed, position, stream, pair):
    """64 random bits each of tokens 2 pair and 2 pair + 1: the counter that they share."""
    pair = pair.to(tl.uint64)
    zero = (pair * 0).to(tl.int64)
    last = ((zero + (COUPLED << 16)) + ((zero + stream) << 24)).to(tl.uint64)
    w0, w1, w2, w3 = philox4x32_10(seed, pair, position & WORD, position >> 32, last)
    return w1 << 32 | w0, w3 << 32 | w2


@triton.jit
def noise_words(source, seed, position, stream, tile, TILE: tl.constexpr):
    """64 random bits of each entry of a tile: those of its token."""
    if not source.tokens.dtype.is_ptr():
        pairs = tile * (TILE // 2) + tl.arange(0, TILE // 2)
        even, odd = neighbours_words(seed, position, stream, pairs)
        words = tl.interleave(even, odd)
    else:
        tokens = tl.maximum(tokens_of(source, tile * TILE + tl.arange(0, TILE)), 0)
        even, odd = neighbours_words(seed, position, stream, tokens >> 1)
        words = tl.where((tokens & 1) == 0, even, odd)
    return words


# ---- races --------------------------------------------------------------------------------------


@triton.jit
def run_tile(source, law, seed, position, stream, tile, TILE: tl.constexpr):
    """Time and entry of the winner of a tile, the lowest entry if several arrive at once."""
    x = load_tile(source, tile, -INFINITY, TILE)
    weights = weights_of(x, law.max, law.scale, law_threshold(law))
    best = tl.full([], INFINITY, tl.float64)
    winner = tl.full([], NOBODY, tl.int32)
    if tl.max(weights, 0) > 0.0:
        words = noise_words(source, seed, position, stream, tile, TILE)
        times = exponential_noise(words) / weights.to(tl.float64)
        times = tl.where(weights > 0.0, times, INFINITY)
        best = tl.min(times, 0)
        entry = tile * TILE + tl.arange(0, TILE)
        winner = tl.min(tl.where(times == best, entry, NOBODY), 0)
    return best, winner


@triton.jit(do_not_specialize=["first", "tiles", "splits"])
def run_races(rows, coins, laws, depths, times, winners, first, tiles, splits, TILE: tl.constexpr):
    """Write the tiles' winners of all rows that are raced. Grid: rows x splits.

    Row s of a request races with the noise of `first` + s positions after the call's; with
    `depths` [rows], of `first` + its depth.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = (program % splits).to(tl.int32)
    law = load_law(laws, row)
    if law.kind == EXPONENTIAL:
        b = row // rows.steps
        s = row % rows.steps
        source = row_at(rows, b, s)
        seed = tl.load(coins.seeds + b * coins.seeds_stride).to(tl.uint64)
        position = tl.load(coins.positions + b * coins.positions_stride).to(tl.uint64)
        after = s
        if depths is not None:
            after = tl.load(depths + row).to(tl.int64)
        position += (after + first).to(tl.uint64)
        end = end_of_tiles(rows, tiles, TILE)
        for tile in range(first_tile(rows, split, TILE), end, splits):
            time, winner = run_tile(source, law, seed, position, coins.stream, tile, TILE)
            tl.store(times + row * tiles + tile, time)
            tl.store(winners + row * tiles + tile, winner)


@triton.jit(do_not_specialize=["tiles"])
def finish_races(laws, times, winners, tiles):
    """Make the entry that wins a row its law's `extra`. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if load_law(laws, row).kind == EXPONENTIAL:
        best = tl.full([], INFINITY, tl.float64)
        winner = tl.full([], NOBODY, tl.int32)
        for start in range(0, tiles, TILE_STEP):
            tile = start + tl.arange(0, TILE_STEP)
            inside = tile < tiles
            place = row * tiles + tile
            time = tl.load(times + place, mask=inside, other=INFINITY)
            fastest = tl.min(time, 0)
            entry = tl.load(winners + place, mask=inside, other=NOBODY)
            first = tl.min(tl.where(time == fastest, entry, NOBODY), 0)
            winner = tl.where(fastest < best, first, winner)
            best = tl.minimum(best, fastest)
        tl.store(laws + row * LAW_FIELDS + EXTRA_FIELD, winner.to(tl.float64))


def find_winners(
    tiles: Tiling,
    rows: Rows,
    coins: Coins,
    laws: Tensor,
    first: int = 0,
    depths: Tensor | None = None,
    ranks: Any = None,
) -> None:
    """Let the rows of laws [rows, LAW_FIELDS] race; each law's `extra` becomes its winner."""
    number = laws.shape[0]
    times = laws.new_empty((number, tiles.number))
    winners = laws.new_empty((number, tiles.number), dtype=torch.int32)
    splits = tiles.splits(number)
    launch(
        run_races,
        number * splits,
        *(rows, coins, laws, depths, times, winners, first, tiles.number, splits),
        TILE=tiles.size,
        num_warps=8,
    )
    if ranks is not None:
        ranks.share(tiles, times, winners)
    launch(finish_races, number, laws, times, winners, tiles.number, num_warps=1)
