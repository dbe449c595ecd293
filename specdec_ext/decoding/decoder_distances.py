"""Decoders that bias attention by distance in cache slots, told distances in the text instead.

T5 and its relatives add to every attention score a learnt number that depends on how many slots lie
between query and key. In a batch whose rows kept different numbers of draft tokens, and in a tree,
whose nodes lie side by side, slots are no distances. But what a token sees is its own past and
nothing else: so the distance from a query to a key is the number of slots behind the key that the
query sees as well. As for positions (`decoder_positions`), each generation gets a view of the
model, which shares all weights and in which only those attentions are copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .module_views import with_copies

__all__ = ["ToldDistances", "biases_by_distance", "distances", "visible_slots"]


def biases_by_distance(model: Any) -> list[str]:
    """Return where a decoder's attentions with such a bias are, as ``named_modules`` says it."""
    within = {id(module) for module in model.get_decoder().modules()}
    return [
        path
        for path, module in model.named_modules()
        if id(module) in within
        and isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding)
        and callable(getattr(module, "compute_bias", None))
    ]


def visible_slots(mask: Tensor, past: int, new: int) -> Tensor:
    """Return which slots each new token sees, ``[B, new, S]`` bool.

    Parameters
    ----------
    mask : Tensor
        ``[B, S]``, zeros at masked slots, under which a token sees no later slot than its own; or
        ``[B, 1, new, S]``, 0 where a slot is seen and less elsewhere, as it is added to scores.
    past : int
        Slots before the new ones.
    new : int
        How many tokens.

    Examples
    --------
    >>> import torch
    >>> visible_slots(torch.tensor([[1, 0, 1, 1]]), past=2, new=2).long()
    tensor([[[1, 0, 1, 0],
             [1, 0, 1, 1]]])
    """
    if mask.dim() == 4:
        return mask[:, 0] >= 0
    slots = torch.arange(mask.shape[1], device=mask.device)
    return mask[:, None].bool() & (slots <= slots[past : past + new, None])


def distances(visible: Tensor) -> Tensor:
    """Return how many tokens back each seen slot is, ``[B, m, S]``: 0 for the token itself.

    Parameters
    ----------
    visible : Tensor
        ``[B, m, S]`` bool. A token sees its own slot, and none of its later ones. What is returned
        for a slot that is not seen means nothing.

    Examples
    --------
    >>> import torch
    >>> distances(torch.tensor([[[1, 0, 1, 1, 0]]]).bool())
    tensor([[[2, 1, 1, 0, 0]]])
    """
    from_end = visible.flip(-1).cumsum(-1).flip(-1)
    return (from_end - 1).clamp(min=0)


class ToldDistances:
    """A view of a model whose attentions take their biases from distances that it is told.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face encoder-decoder. It is not modified.
    """

    def __init__(self, model: Any) -> None:
        self.view, copies = with_copies(model, biases_by_distance(model))
        self.distances: Tensor | None = None  # [B, m, S] of the next call
        for part in copies.values():
            vars(part)["compute_bias"] = partial(self._bias, part.compute_bias)

    def tell(self, mask: Tensor, past: int, new: int) -> None:
        """Say what the tokens of the next call see: see `visible_slots`."""
        self.distances = distances(visible_slots(mask, past, new))

    def _bias(self, compute: Any, query_length: int, key_length: int, **kwargs: Any) -> Tensor:
        """Return the biases of all heads, ``[B, heads, m, S]``."""
        assert self.distances is not None, "tell() comes first"
        kwargs["past_seen_tokens"] = key_length - 1
        of_slots: Tensor = compute(1, key_length, **kwargs)  # [1, heads, 1, S], the farthest first
        return of_slots[0, :, 0].flip(1)[:, self.distances].transpose(0, 1)
