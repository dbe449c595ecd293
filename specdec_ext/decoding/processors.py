"""Logits processors in a burst: each row is processed after the text that would lead to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Processor", "process_chain", "process_tree"]

#: As `transformers.LogitsProcessor`: of ids ``[1, n]`` and scores ``[1, V]``, the new scores.
Processor = Callable[[Tensor, Tensor], Tensor]


def _apply(processors: Sequence[Processor], ids: Tensor, row: Tensor) -> Tensor:
    """Process one row ``[V]`` after ``ids`` ``[n]``; neither is changed."""
    scores = row[None].float().clone()
    for processor in processors:
        scores = processor(ids[None].clone(), scores)
    return scores[0]


def process_chain(
    processors: Sequence[Processor],
    texts: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    logits: Tensor,
) -> Tensor:
    """Process the rows after each prefix of a draft.

    Parameters
    ----------
    processors : sequence of callable
        As `transformers.LogitsProcessor`. They must be functions of their arguments: rows are asked
        for that are then discarded.
    texts : sequence of sequence of int
        Each request's tokens so far, prompt included, without padding.
    drafted : sequence of sequence of int
        ``[B][G]``, G of any size for each request; the draft ends at a token that is none of the V,
        which cannot be accepted; rows behind it stay as they are.
    logits : Tensor
        ``[B, m, V]``, rows of the last m of the G + 1 slots: slot i follows i draft tokens.

    Returns
    -------
    Tensor
        ``[B, m, V]`` float32.
    """
    out = logits.float().clone()
    for b, (text, draft) in enumerate(zip(texts, drafted, strict=True)):
        known = range(logits.shape[2])
        length = next((i for i, token in enumerate(draft) if token not in known), len(draft))
        ids = torch.tensor([*text, *draft[:length]], device=logits.device)
        skipped = len(draft) + 1 - logits.shape[1]
        for slot in range(skipped, length + 1):
            row = logits[b, slot - skipped]
            out[b, slot - skipped] = _apply(processors, ids[: len(text) + slot], row)
    return out


def process_tree(
    processors: Sequence[Processor],
    texts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    logits: Tensor,
) -> Tensor:
    """Process the rows of a tree, each after the path to its node.

    Parameters
    ----------
    processors, texts : sequence
        As in `process_chain`; a text's last token is the root.
    tokens, parents : sequence of sequence of int
        ``[B][N]``; a node whose token is none of the V (the root's apart) keeps its row, and so do
        those below it.
    logits : Tensor
        ``[B, N, V]``.

    Returns
    -------
    Tensor
        ``[B, N, V]`` float32.
    """
    out = logits.float().clone()
    for b, text in enumerate(texts):
        paths: list[list[int] | None] = [list(text)]
        for token, parent in zip(tokens[b][1:], parents[b][1:], strict=True):
            known = parent >= 0 and token in range(logits.shape[2])
            above = paths[parent] if known else None
            paths.append(None if above is None else [*above, token])
        for v, path in enumerate(paths):
            if path is not None:
                ids = torch.tensor(path, device=logits.device)
                out[b, v] = _apply(processors, ids, logits[b, v])
    return out
