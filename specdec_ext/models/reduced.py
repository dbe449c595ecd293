"""Reduced vocabularies: what models share that can propose a part of a target's tokens only.

Text uses few of a vocabulary's tokens often, and the vocabulary projection is the larger part of a
small model (FR-Spec, arXiv 2502.14856; EAGLE-3, arXiv 2503.01840). Such a model keeps in
``draft_token_ids`` ``[Vd]`` which of the target's tokens each entry of its rows stands for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..decoding.checks import integer

__all__: list[str] = []


def vocabulary_entries(owner: str, config: Any) -> int:
    """Return Vd, the entries of a model's rows: ``draft_vocab_size``, or ``vocab_size`` for None.

    Raises
    ------
    ValueError
        Not in [1, V].
    """
    given = config.draft_vocab_size
    size = config.vocab_size if given is None else given
    return integer(f"{owner}: draft_vocab_size", size, low=1, high=config.vocab_size)


def checked_tokens(owner: str, draft_token_ids: Tensor, size: int, vocab_size: int) -> Tensor:
    """Return ``draft_token_ids`` as int64 on the CPU.

    Raises
    ------
    ValueError
        Not ``size`` distinct tokens in ``[0, vocab_size)``.
    """
    ids = draft_token_ids.cpu().long()
    known = len(ids.unique())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if ids.shape != (size,) or known < size or not inside:
        raise ValueError(
            f"{owner}: draft_token_ids must be {size} distinct tokens in [0, {vocab_size}), got "
            f"{known} distinct ones in a tensor of shape {list(ids.shape)}"
            + ("" if inside else ", some of them outside")
        )
    return ids


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
