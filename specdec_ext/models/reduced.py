"""What models share that propose the tokens of a reduced vocabulary, a part of their target's.

Such a model keeps in ``draft_token_ids`` ``[Vd]`` which of the target's tokens each entry of its
rows stands for. Why: see `specdec_ext.models.draft_llama`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..decoding.checks import integer, shown

__all__: list[str] = []


def vocabulary_entries(model: Any) -> int:
    """Return Vd, the entries of a model's rows: ``draft_vocab_size``, or ``vocab_size`` for None.

    Raises
    ------
    ValueError
        Not in [1, V].
    """
    given, most = model.config.draft_vocab_size, model.config.vocab_size
    name = f"{type(model).__name__}: draft_vocab_size"
    return integer(name, most if given is None else given, low=1, high=most)


def number_of_tokens(owner: str, draft_token_ids: Tensor) -> int:
    """Return how many tokens of the target are named.

    Raises
    ------
    TypeError
        Something else than an integer tensor.
    """
    dtype = draft_token_ids.dtype if isinstance(draft_token_ids, Tensor) else None
    if dtype not in (torch.int64, torch.int32):
        given = shown(draft_token_ids) if dtype is None else f"one of {dtype}"
        raise TypeError(f"{owner}: draft_token_ids must be an int64 tensor [Vd], got {given}")
    return draft_token_ids.numel()


def keep_tokens(model: Any, draft_token_ids: Tensor) -> Tensor:
    """Copy the target's tokens of a model's entries into ``model.draft_token_ids``.

    Returns
    -------
    Tensor
        They, int64, on the CPU.

    Raises
    ------
    TypeError
        Something else than an integer tensor.
    ValueError
        Not as many distinct tokens of the target as the model has entries.
    """
    number_of_tokens(type(model).__name__, draft_token_ids)
    own, most = model.draft_token_ids, model.config.vocab_size
    ids = draft_token_ids.cpu().long()
    known = len(ids.unique())
    inside = bool(((ids >= 0) & (ids < most)).all())
    if ids.shape != own.shape or known < len(own) or not inside:
        raise ValueError(
            f"{type(model).__name__}: draft_token_ids must be {len(own)} distinct tokens in "
            f"[0, {most}), got {known} distinct ones in a tensor of shape {list(ids.shape)}"
            + ("" if inside else ", some of them outside")
        )
    own.copy_(ids)
    return ids


def entries_of_tokens(
    tokens: Tensor, draft_token_ids: Tensor | None, vocab_size: int, none: int
) -> Tensor:
    """Return which entries of a model's rows tokens are.

    Parameters
    ----------
    tokens : Tensor
        int64, the target's tokens, and ``none`` where there is none.
    draft_token_ids : Tensor or None
        ``[Vd]``. None: entry i is token i.
    vocab_size : int
        V.
    none : int
        Negative: what tokens become that are not among the model's.

    Returns
    -------
    Tensor
        As ``tokens``.

    Examples
    --------
    >>> entries_of_tokens(torch.tensor([4, 7, -1, 2]), torch.tensor([2, 4]), 8, none=-1)
    tensor([ 1, -1, -1,  0])
    """
    if draft_token_ids is None:
        return tokens
    entries = torch.full((vocab_size,), none, device=tokens.device)
    entries[draft_token_ids] = torch.arange(len(draft_token_ids), device=tokens.device)
    return torch.where(tokens == none, none, entries[tokens.clamp(min=0)])


def logits_of_tokens(
    owner: str, target_logits: Tensor, draft_token_ids: Tensor | None, vocab_size: int
) -> Tensor:
    """Return the target's logits of the tokens that a model knows.

    Parameters
    ----------
    owner : str
        Who asks, for errors.
    target_logits : Tensor
        ``[..., V]``, or ``[..., Vd]``, which is what is returned.
    draft_token_ids : Tensor or None
        ``[Vd]``. None: all tokens.
    vocab_size : int
        V.

    Raises
    ------
    ValueError
        Logits of another width.
    """
    given = target_logits.shape[-1]
    size = vocab_size if draft_token_ids is None else len(draft_token_ids)
    if given == size:
        return target_logits
    if given == vocab_size and draft_token_ids is not None:
        return target_logits[..., draft_token_ids]
    raise ValueError(
        f"{owner}: target_logits must be [B, n, V] with V = {vocab_size} or [B, n, Vd] with Vd = "
        f"{size}, got {list(target_logits.shape)}"
    )
