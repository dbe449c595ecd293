"""sample: one token per row from its law.

Grid and traffic: the laws (law_pass.py, cutoff.py, finish.py), then draw.py: the row once more, and
one tile; or race.py: the row once more. Writes 12 bytes a row.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw import draw_from_law, needs_draw, sum_law
from .launch import batch_of, coins_of, compute_laws, launch, mask_of, rows_of, sampling_of, tiling
from .laws import NO_LAW, POINT_MASS, filters_at, load_law, log_probability, row_at, tokens_of
from .philox import COUPLED, counter_uniform, is_uniform
from .race import find_winners
from .token_map import token_map_of

#: Tokens of a reduced vocabulary are kept in 32 bits.
MAX_TOKENS = 2**31


@triton.jit(do_not_specialize=["tiles", "splits"])
def sum_sampled(rows, laws, sums, tiles, splits, TILE: tl.constexpr):
    """Write the tiles' sums of the laws that are drawn from. Grid: rows x splits."""
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    law = load_law(laws, row)
    if needs_draw(law):
        source = row_at(rows, row, 0)
        split = (program % splits).to(tl.int32)
        sum_law(source, law, sums + row * tiles, tiles, split, splits, TILE)


@triton.jit
def sample_uniform(coins, b, draft_index, domain):
    """Give the uniform of row b."""
    if coins.uniforms is not None:
        u = tl.load(coins.uniforms + b * coins.uniforms_stride_b)
    else:
        seed = tl.load(coins.seeds + b * coins.seeds_stride)
        position = tl.load(coins.positions + b * coins.positions_stride)
        u = counter_uniform(seed, position, domain, b * 0 + draft_index, coins.stream)
    return u


@triton.jit(do_not_specialize=["draft_index", "tiles"])
def draw_sampled(
    rows, sampling, coins, laws, sums, tokens, logprobs, draft_index, domain, tiles,
    RACED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draw the tokens; RACED: they have won a race. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    law = load_law(laws, row)
    source = row_at(rows, row, 0)
    legal = (law.kind != NO_LAW) & (filters_at(sampling, row, rows.vocab).out_of_range == 0)
    token = tl.full([], -1, tl.int64)
    logprob = tl.full([], float("nan"), tl.float32)
    if legal:
        if law.kind == POINT_MASS:
            token = law.argmax
            logprob = tl.full([], 0.0, tl.float32)
        else:
            entry = token
            if RACED:
                entry = law.extra.to(tl.int64)
            else:
                u = sample_uniform(coins, row, draft_index, domain)
                if is_uniform(u):
                    entry = draw_from_law(source, law, sums + row * tiles, tiles, u, TILE)
            if entry >= 0:
                token = tokens_of(source, entry).to(tl.int64)
                logprob = log_probability(law, tl.load(source.data + entry).to(tl.float32))
    tl.store(tokens + row, token)
    tl.store(logprobs + row, logprob)


def sample(outputs: tuple[Tensor, Tensor], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.sample`."""
    batch, vocab = call.logits.shape
    tiles = tiling(vocab)
    token_map = token_map_of(call.draft_token_ids, MAX_TOKENS, with_places=False)
    # How many tokens there are is not known here; the words of a mask say which may be drawn.
    reduced = call.draft_token_ids is not None and call.allowed_mask is not None
    known = 32 * call.allowed_mask.shape[1] if reduced else vocab
    rows = rows_of(call.logits, mask=mask_of(call.allowed_mask, known), token_map=token_map)
    sampling = sampling_of(call)
    coins = coins_of(call.uniforms, call.seeds, call.positions, call.stream)
    laws = compute_laws(tiles, batch_of(rows, sampling), batch)
    raced = call.domain == COUPLED.value
    sums = None
    if raced:
        find_winners(tiles, rows, coins, laws, call.draft_index)
    else:
        sums = call.logits.new_empty((batch, tiles.number), dtype=torch.int64)
        splits = tiles.splits(batch)
        launch(
            sum_sampled,
            batch * splits,
            *(rows, laws, sums, tiles.number, splits),
            TILE=tiles.size,
            num_warps=8,
        )
    launch(
        draw_sampled,
        batch,
        *(rows, sampling, coins, laws, sums, *outputs, call.draft_index, call.domain, tiles.number),
        RACED=raced,
        TILE=tiles.size,
        num_warps=8,
    )
