"""acceptance: sum_x min(p(x), q(x)) per row.

Grid: rows x splits for the sums, rows for their total. Reads both rows for their laws and once
more, together. Writes 8 bytes a tile, 4 a row. Numerics: float32 tile sums, float64 across tiles.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    batch_of,
    compute_laws,
    launch,
    mask_of,
    rows_of,
    sampling_of,
    tiling,
)
from .law_pass import summed
from .laws import (
    EXPONENTIAL,
    INFINITY,
    NO_LAW,
    POINT_MASS,
    filters_at,
    in_token_order,
    law_threshold,
    load_law,
    load_tile,
    probability,
    row_at,
    value_at,
    weights_of,
)
from .token_map import token_map_of


@triton.jit
def tile_probabilities(source, law, tile, TILE: tl.constexpr):
    """Probabilities of a tile of a law, float32."""
    x = load_tile(source, tile, -INFINITY, TILE)
    weights = weights_of(x, law.max, law.scale, law_threshold(law))
    return (1.0 / law.z).to(tl.float32) * weights


@triton.jit(do_not_specialize=["rows", "tiles", "splits"])
def sum_overlaps(target, draft, laws, sums, rows, tiles, splits, TILE: tl.constexpr):
    """Write the tiles' overlaps of two laws that are no point masses. Grid: rows x splits."""
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = (program % splits).to(tl.int32)
    p = load_law(laws, row)
    q = load_law(laws, rows + row)
    if (p.kind == EXPONENTIAL) & (q.kind == EXPONENTIAL):
        target_row = row_at(target, row, 0)
        draft_row = in_token_order(row_at(draft, row, 0))
        for tile in range(split, tiles, splits):
            both = tl.minimum(
                tile_probabilities(target_row, p, tile, TILE),
                tile_probabilities(draft_row, q, tile, TILE),
            )
            tl.store(sums + row * tiles + tile, tl.sum(both, 0).to(tl.float64))


@triton.jit
def probability_in(rows, row, law, token):
    """p(token) of a row, 0 for an id that it does not have."""
    return probability(law, value_at(row_at(rows, row, 0), token), token)


@triton.jit(do_not_specialize=["rows", "tiles"])
def write_acceptance(
    target, draft, target_sampling, draft_sampling, laws, sums, found, rows, tiles
):
    """Write the overlap of each row. Grid: rows.

    Where one of the laws is a point mass, the overlap is the other's probability there.
    """
    row = tl.program_id(0).to(tl.int64)
    p = load_law(laws, row)
    q = load_law(laws, rows + row)
    wild = filters_at(target_sampling, row, target.vocab).out_of_range
    wild = wild + filters_at(draft_sampling, row, draft.vocab).out_of_range
    overlap = tl.full([], float("nan"), tl.float64)
    if (p.kind != NO_LAW) & (q.kind != NO_LAW) & (wild == 0):
        if p.kind == POINT_MASS:
            overlap = probability_in(draft, row, q, p.argmax)
        elif q.kind == POINT_MASS:
            overlap = probability_in(target, row, p, q.argmax)
        else:
            overlap = tl.minimum(summed(sums, row, tiles), 1.0)
    tl.store(found + row, overlap.to(tl.float32))


def acceptance(output: Tensor, call: SimpleNamespace) -> None:
    """Fill the output of `specdec_ext.acceptance`."""
    rows, vocab = call.target_logits.shape
    tiles = tiling(vocab, call.draft_logits.shape[1])
    mask = mask_of(call.allowed_mask, vocab)
    target = rows_of(call.target_logits, mask=mask)
    token_map = token_map_of(call.draft_token_ids, vocab)
    draft = rows_of(call.draft_logits, mask=mask, token_map=token_map)
    own = sampling_of(call)
    theirs = sampling_of(call, "draft_")
    laws = compute_laws(tiles, batch_of(target, own), rows, batch_of(draft, theirs), rows)
    sums = laws.new_empty((rows, tiles.number))
    splits = tiles.splits(rows)
    launch(
        sum_overlaps,
        rows * splits,
        *(target, draft, laws, sums, rows, tiles.number, splits),
        TILE=tiles.size,
        num_warps=8,
    )
    launch(
        write_acceptance,
        rows,
        *(target, draft, own, theirs, laws, sums, output, rows, tiles.number),
        num_warps=2,
    )
