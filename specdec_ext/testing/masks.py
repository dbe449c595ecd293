"""Masks of allowed tokens and reduced draft vocabularies, one boolean or probability a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack_mask(allowed: Tensor, beyond: Tensor | bool = False) -> Tensor:
    """Pack booleans as ``allowed_mask`` wants them: bit j of word w is token 32 w + j.

    Parameters
    ----------
    allowed : Tensor
        ``[..., V]`` bool.
    beyond : bool or Tensor
        Bits of the last word that no token has; ``[..., 32 * ceil(V/32) - V]`` bool or one value.

    Returns
    -------
    Tensor
        ``[..., ceil(V/32)]`` int32.

    Examples
    --------
    >>> pack_mask(torch.tensor([True, False, True])).tolist()
    [5]
    >>> allowed = torch.zeros(40, dtype=torch.bool)
    >>> allowed[31] = allowed[33] = True
    >>> pack_mask(allowed).tolist()
    [-2147483648, 2]
    """
    *lead, vocab = allowed.shape
    bits = torch.zeros(*lead, (vocab + 31) // 32 * 32, dtype=torch.bool)
    bits[..., :vocab] = allowed
    bits[..., vocab:] = beyond
    words = (bits.unflatten(-1, (-1, 32)) * 2 ** torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack_mask(words: Tensor, vocab: int) -> Tensor:
    """Booleans ``[V]`` of words ``[W]``."""
    text = "".join(f"{word % 2**32:032b}"[::-1] for word in words.tolist())
    return torch.tensor([bit == "1" for bit in text[:vocab]])


def forbid(
    values: Tensor, allowed: Tensor | None, ids: Tensor | None, fill: float = -math.inf
) -> Tensor:
    """Values of tokens (or of entries that `ids` names), `fill` where the token is not allowed.

    `values` are ``[..., V or Vd]``, `allowed` ``[..., V]``: an entry beyond V is never allowed.
    """
    if allowed is None:
        return values
    if ids is None:
        missing = max(values.shape[-1] - allowed.shape[-1], 0)
        allowed = torch.nn.functional.pad(allowed, (0, missing))[..., : values.shape[-1]]
    else:
        allowed = allowed[..., ids.long()]
    return values.masked_fill(~allowed, fill)


def of_tokens(probs: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Probabilities ``[..., Vd]`` of draft entries as ``[..., V]`` of target tokens."""
    if ids is None:
        return probs
    found = torch.zeros(*probs.shape[:-1], vocab, dtype=probs.dtype)
    return found.index_add_(-1, ids.long().cpu(), probs)
