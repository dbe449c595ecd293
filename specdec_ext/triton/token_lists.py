"""Scratch memory of draft laws that name a few tokens each: their lists, sorted and checked.

Torch's own operators, on the rows as they were given: 8 bytes an entry, and a sort.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import RULES
from .launch import rows_of
from .laws import NO_LISTS, Mask, Rows, TokenLists, TokenMap


class DraftRows(NamedTuple):
    """The rows of a draft's laws, if it has any."""

    tensor: Tensor | None
    vocab: int  # 0 where there are none
    linear: bool
    lists: TokenLists


def draft_of(call: SimpleNamespace, vocab: int) -> DraftRows:
    """Describe the draft's rows of a call over a target's vocabulary."""
    if call.draft_probs_ids is not None:
        if RULES[call.rule].reads_draft_law:
            return _sorted_lists(call.draft_probs, call.draft_probs_ids, vocab)
        return DraftRows(call.draft_probs, vocab, True, NO_LISTS)  # read by nobody
    linear = call.draft_probs is not None
    tensor = call.draft_probs if linear else call.draft_logits
    return DraftRows(tensor, 0 if tensor is None else tensor.shape[-1], linear, NO_LISTS)


def draft_rows_of(draft: DraftRows, index: Tensor | None, mask: Mask, token_map: TokenMap) -> Rows:
    """Describe those rows for kernels."""
    assert draft.tensor is not None
    return rows_of(
        draft.tensor,
        index,
        linear=draft.linear,
        mask=mask,
        token_map=token_map,
        lists=draft.lists,
        vocab=draft.vocab,
    )


def _sorted_lists(probs: Tensor, ids: Tensor, vocab: int) -> DraftRows:
    named = ids != -1
    known = (ids >= 0) & (ids < vocab)
    tokens, order = torch.where(known, ids, vocab).to(torch.int32).sort(-1)
    twice = (tokens[..., 1:] == tokens[..., :-1]) & (tokens[..., 1:] < vocab)
    wrong = (named & ~known).any(-1) | twice.any(-1)
    counts = torch.where(wrong, 0, known.sum(-1)).to(torch.int32)
    lists = TokenLists(tokens.contiguous(), counts.contiguous(), tokens.shape[-1])
    return DraftRows(probs.to(torch.float32).gather(-1, order).contiguous(), vocab, True, lists)
