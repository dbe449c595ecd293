"""What the decoder of an encoder-decoder can be asked to do, found out by running it.

Whether it runs several tokens over a cache, and how it can be told positions, no signature tells.
So it is run on a handful of tokens, in a few calls; what was found is kept for as long as the model
lives.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .decoder_distances import biases_by_distance
from .decoder_positions import (
    PositionTable,
    embeddings_of_positions,
    find_position_table,
)
from .probe import ROUNDING, SAME

if TYPE_CHECKING:
    from .encoder_decoder import EncodedModel

__all__ = ["Manner", "find_manner"]

COUNT = 5  # tokens of the text that it is run on
PADDING = 2  # slots of padding before it
SCATTERED = [0, 2, 5, 9, 14]  # positions that no shift makes of 0, 1, 2, 3, 4


class Manner(NamedTuple):
    """How a decoder is to be run.

    Attributes
    ----------
    fault : str or None
        Why it cannot be.
    table : PositionTable or None
        Where its embeddings of positions are, if it counts them in cache slots.
    distances : bool
        Whether its attentions count distances in cache slots, and can be told others.
    heeds : bool
        Whether ``decoder_position_ids`` change what it says.
    writes : bool
        Whether it adds to what the encoder gave, in place, so that it needs a copy in every call.
    """

    fault: str | None = None
    table: PositionTable | None = None
    distances: bool = False
    heeds: bool = False
    writes: bool = False


#: Makes a model that is told positions by a table, or distances where there is none.
Tell = Callable[["PositionTable | None"], "EncodedModel"]

_found: weakref.WeakKeyDictionary[Any, tuple[list[int], Manner]] = weakref.WeakKeyDictionary()


def find_manner(encoded: EncodedModel, tell: Tell) -> Manner:
    """Find out how a decoder is to be run.

    Parameters
    ----------
    encoded : EncodedModel
        The model, with one input at least.
    tell : callable
        Makes an `EncodedModel` that is told positions by a table; of None: distances.
    """
    model = encoded.model
    if encoded.training:  # dropout: answers differ in any case
        return Manner()
    embeddings = [id(module) for module in embeddings_of_positions(model).values()]
    if model not in _found or _found[model][0] != embeddings:
        _found[model] = embeddings, _find(encoded, tell)
    return _found[model][1]


def _find(encoded: EncodedModel, tell: Tell) -> Manner:
    twice = _repeated(encoded, 2)
    read = twice.states.clone()
    fault = _fault(twice)
    manner = Manner(fault, writes=not torch.equal(read, twice.states))
    if fault is not None:
        return manner
    if _uses_position_ids(encoded):
        return manner._replace(heeds=True)
    if _can_be_told_distances(encoded, tell):
        return manner._replace(distances=True)
    table = find_position_table(
        encoded.model, _repeated(encoded, 2)._run, _words(encoded), encoded.config.pad_token_id
    )
    if table is not None and _right_when_told(tell(table)):
        return manner._replace(table=table)
    return manner


def _can_be_told_distances(encoded: EncodedModel, tell: Tell) -> bool:
    """Tell whether a decoder biases attention by distance, and is right when it is told some."""
    if not biases_by_distance(encoded.model):
        return False
    try:
        told = tell(None)
    except TypeError:  # no view can be made of it: its forward is wrapped
        return False
    return _right_when_told(told, positions=False)


def _right_when_told(encoded: EncodedModel, *, positions: bool = True) -> bool:
    """Tell whether a row behind padding, told its positions or distances, is what it is alone.

    Some decoders ignore the mask in calls of one token (LED); in others a mask hides tokens of
    other rows (NLLB's mixture of experts).
    """
    words = _words(encoded)
    longer = torch.cat([words.flip(0)[:PADDING], words])
    alone = _run(_repeated(encoded, 1), words[None], [2, 2, 1])
    other = _run(_repeated(encoded, 1), words[None], [3, 1, 1])
    alone_longer = _run(_repeated(encoded, 1), longer[None], [PADDING + 2, 2, 1])
    ids = longer.repeat(3, 1)
    mask = torch.ones_like(ids)
    ids[1:, :PADDING] = mask[1:, :PADDING] = 0
    told = (mask.cumsum(1) - 1).clamp(min=0) if positions else None
    try:
        rows = _run(_repeated(encoded, 3), ids, [PADDING + 2, 2, 1], mask, told)
    except Exception:  # then it cannot be told; how it says so is its own business
        return False
    difference = max(_apart(rows[0], alone_longer[0]), _apart(rows[1:, PADDING:], alone))
    return difference <= max(SAME * _apart(alone, other), _rounding(alone))


def _fault(twice: EncodedModel) -> str | None:
    """Say what is wrong with the decoder's answers where several tokens are run in one call."""
    words = _words(twice)
    ids = torch.stack([words, words])
    ids[1, -1] = words[0]
    try:
        rows = _run(twice, ids, [2, COUNT - 2])
    except Exception as error:
        said = (str(error) or repr(error)).splitlines()[0]
        return (
            "fails where several token ids, [B, m], are run over a key-value cache, as "
            f"verification needs it ({type(error).__name__}: {said})"
        )
    if rows.shape[:2] != ids.shape:
        return (
            f"gives logits for {rows.shape[1]} of {COUNT} tokens where several are run in one call "
            "over a key-value cache, as verification needs it"
        )
    # The texts are the same but for the last token.
    difference = _apart(rows[0, :-1], rows[1, :-1])
    if difference <= _rounding(rows):
        return None
    return (
        "has no causal mask where several tokens are run in one call over a key-value cache: what "
        f"comes behind a token changes its logits by {difference:.2g}"
    )


def _uses_position_ids(encoded: EncodedModel) -> bool:
    """Tell whether ``decoder_position_ids`` change what the model's decoder says.

    Models that are put together from two (BERT to GPT-2, say) hand it on without naming it; others
    take any argument, and do nothing about it.
    """
    words = _words(encoded)
    positions = torch.tensor([list(range(COUNT)), SCATTERED], device=words.device)
    twice = _repeated(encoded, 2)
    try:
        logits = twice._run(
            encoded.model, torch.stack([words, words]), decoder_position_ids=positions
        ).logits
    except Exception:  # it does not know the argument; how it says so is its own business
        return False
    return _apart(logits[0], logits[1]) > _rounding(logits)


def _words(encoded: EncodedModel) -> Tensor:
    """Return ids of a text without padding, ``[COUNT]``."""
    size = max(encoded.config.vocab_size, 2)
    ids = [(7 * i + 5) % size for i in range(COUNT)]
    ids = [(i + 1) % size if i == encoded.config.pad_token_id else i for i in ids]
    return torch.tensor(ids, device=encoded.states.device)


def _repeated(encoded: EncodedModel, times: int) -> EncodedModel:
    """Return the first input this many times."""
    fresh = encoded.begin()
    fresh.select(torch.zeros(times, dtype=torch.int64, device=encoded.states.device))
    return fresh


def _run(
    encoded: EncodedModel,
    ids: Tensor,
    calls: list[int],
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Run ids ``[B, n]``, so many of them in each call; return logits ``[B, n, V]``."""
    cache = DynamicCache()
    answers = []
    end = 0
    for count in calls:
        start, end = end, end + count
        told: dict[str, Any] = (
            {} if positions is None else {"position_ids": positions[:, start:end]}
        )
        seen = None if mask is None else mask[:, :end]
        answers.append(encoded.forward(ids[:, start:end], cache, seen, **told).logits)
    return torch.cat(answers, 1)


def _apart(some: Tensor, others: Tensor) -> float:
    """Return the largest difference of logits; infinite where it is no number."""
    difference = float((some - others).abs().max())
    return difference if math.isfinite(difference) else math.inf


def _rounding(logits: Tensor) -> float:
    """Return by how much rounding may change logits; parts of models are float32 in any case."""
    eps = max(torch.finfo(torch.float32).eps, torch.finfo(logits.dtype).eps)
    return ROUNDING * eps * float(logits.abs().max())
