"""Scratch memory of a reduced vocabulary's map, checked while it is turned round.

Grid: blocks of entries. Reads 4 or 8 bytes an entry, writes 4 and, for the way back, 4 at the token
it stands for, after a fill of 4 bytes a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .laws import NO_MAP, TokenMap

BLOCK = 1024


@triton.jit(do_not_specialize=["entries", "num_tokens"])
def turn_map(ids, ids_stride, tokens, places, broken, entries, num_tokens, BLOCK: tl.constexpr):
    """Write the token of each entry and, unless `places` is None, the way back. Grid: blocks.

    Without a way back ids may repeat.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    token = tl.load(ids + entry.to(tl.int64) * ids_stride, mask=inside, other=0).to(tl.int64)
    known = inside & (token >= 0) & (token < num_tokens)
    token = tl.where(known, token, 0)
    tl.store(tokens + entry, token.to(tl.int32), mask=inside)
    wrong = inside & (known == 0)
    if places is not None:
        before = tl.atomic_xchg(places + token, entry, mask=known)
        wrong = wrong | (known & (before >= 0))
    if tl.max(wrong.to(tl.int32), 0) > 0:
        tl.store(broken, 1)  # whoever writes it, it is the same


def token_map_of(ids: Tensor | None, num_tokens: int, *, with_places: bool = True) -> TokenMap:
    """Describe the map of a draft's entries [Vd] into so many tokens."""
    if ids is None:
        return NO_MAP
    entries = ids.shape[0]
    tokens = ids.new_empty(entries, dtype=torch.int32)
    places = ids.new_full((num_tokens,), -1, dtype=torch.int32) if with_places else None
    broken = ids.new_zeros(1, dtype=torch.int32)
    launch(
        turn_map,
        triton.cdiv(entries, BLOCK),
        *(ids, ids.stride(0), tokens, places, broken, entries, num_tokens),
        BLOCK=BLOCK,
    )
    return TokenMap(tokens, places, broken, num_tokens)
