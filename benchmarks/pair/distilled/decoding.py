"""Many conversations written at once by one model, at what its matrix products cost.

Every row of the batch takes one token a step: one that is given where there is one (of the chat
template, of an opening), else one that the target draws. So all rows stand at the same position
from the first token to the last, and there is neither padding nor a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from specdec_ext.decoding import group_queries
from specdec_ext.decoding.cache import cache_argument
from specdec_ext.decoding.layers import GrowingLayer

ENDED = 1 / 8  # of the rows in the cache, before they are taken out: that copies the cache


class Part(NamedTuple):
    """A piece of a conversation: tokens that are given, and what the target draws behind them.

    The target draws until it ends its turn, but at most ``most`` tokens.
    """

    given: Sequence[int]
    most: int
    temperature: float
    answers: bool  # whether the laws of what is drawn are kept


class Written(NamedTuple):
    """Conversations in the order of their parts.

    Attributes
    ----------
    tokens : list of Tensor
        ``[n]`` int32 each.
    answered : list of Tensor
        ``[n]`` bool each: which tokens answer, so that their laws are known.
    entries, log_probs : Tensor
        ``[M, k]`` int32 and float16, for each answered token of one conversation after the other,
        the likeliest tokens and the natural logarithms of their probabilities at temperature 1.
    """

    tokens: list[Tensor]
    answered: list[Tensor]
    entries: Tensor
    log_probs: Tensor


class _Row:
    """Where a conversation stands."""

    def __init__(self, parts: Sequence[Part], ends: Collection[int]) -> None:
        self.parts, self.ends, self.done = list(parts), ends, False
        self.tokens: list[int] = []
        self.answered: list[bool] = []
        self._begin(ended=False)

    def _begin(self, ended: bool) -> None:
        """Begin the next part, behind an end token or not: it is not given twice."""
        if not self.parts:
            self.done = True
            return
        self.part = self.parts.pop(0)
        given = list(self.part.given)
        self.given = given[1:] if ended and given[0] in self.ends else given
        self.left = self.part.most

    def take(self, drawn: int) -> None:
        """Take the next token: a given one, or the one that was drawn; none behind the end."""
        if self.done:
            return
        self.answered.append(not self.given and self.part.answers)
        if self.given:
            self.tokens.append(self.given.pop(0))
            return
        self.tokens.append(drawn)
        self.left -= 1
        if drawn in self.ends or self.left == 0:
            self._begin(drawn in self.ends)


def likeliest(logits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row, ``[B, k]``, and their log-probabilities, float32."""
    values, entries = logits.topk(kept, -1)
    # A few rows at a time: in float32 all of them would not stay in the processor's cache.
    total = torch.cat([rows.float().logsumexp(-1) for rows in logits.split(8)])
    return entries, values.float() - total[:, None]


def draw(log_probs: Tensor, temperatures: Tensor) -> Tensor:
    """Draw one of the kept entries of each row, ``[B]``; at temperature 0 the first."""
    warm = temperatures.clamp(min=1e-3)[:, None]
    drawn = (log_probs / warm).softmax(-1).multinomial(1)[:, 0]
    return torch.where(temperatures == 0, 0, drawn)


def _cache(target: Any, room: int) -> DynamicCache:
    """Return a cache of the target's own layers, which do not copy themselves for every token."""
    cache = DynamicCache(config=target.config)
    layers: Any = [
        GrowingLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    cache.layers = layers
    return cache


@torch.inference_mode()
def write(
    target: Any, conversations: Sequence[Sequence[Part]], kept: int, ends: Collection[int]
) -> Written:
    """Let the target write conversations.

    Parameters
    ----------
    target : torch.nn.Module
        A causal model of transformers, in evaluation mode.
    conversations : sequence of sequence of Part
        What is given, and what is to be drawn. A conversation begins with a given token.
    kept : int
        Entries of a law that are kept, and that tokens are drawn from.
    ends : collection of int
        Tokens that end a turn.

    Returns
    -------
    Written
        What came of it.
    """
    if target.config._attn_implementation == "sdpa":
        group_queries(target)
    device, name = target.device, cache_argument(target)
    rows = [_Row(parts, ends) for parts in conversations]
    room = max(sum(len(part.given) + part.most for part in parts) for parts in conversations)
    cache = _cache(target, room)
    entries = torch.zeros(len(rows), room + 1, kept, dtype=torch.int32)
    log_probs = torch.zeros(len(rows), room + 1, kept, dtype=torch.float16)
    held = list(range(len(rows)))  # rows in the cache
    drawn = [0] * len(held)
    for step in range(1, room + 1):
        for row, token in zip(held, drawn, strict=True):
            rows[row].take(token)
        held = _without_ended(cache, rows, held, device)
        if not held:
            break
        fed = torch.tensor([[rows[row].tokens[-1]] for row in held], device=device)
        logits = target(input_ids=fed, use_cache=True, **{name: cache}).logits[:, -1]
        found, its = likeliest(logits, kept)
        entries[held, step], log_probs[held, step] = found.int().cpu(), its.half().cpu()
        warm = torch.tensor([rows[row].part.temperature for row in held], device=device)
        drawn = found.gather(1, draw(its, warm)[:, None])[:, 0].tolist()
    answered = [torch.tensor(row.answered) for row in rows]
    tokens = [torch.tensor(row.tokens, dtype=torch.int32) for row in rows]
    known = pad_sequence(answered, batch_first=True)
    known = F.pad(known, (0, room + 1 - known.shape[1]))
    return Written(tokens, answered, entries[known], log_probs[known])


def _without_ended(
    cache: DynamicCache, rows: Sequence[_Row], held: list[int], device: torch.device
) -> list[int]:
    """Take rows that have ended out of the cache once there are many; return those in it."""
    running = [place for place, row in enumerate(held) if not rows[row].done]
    if len(running) > (1 - ENDED) * len(held):
        return held
    if running:
        cache.batch_select_indices(torch.tensor(running, device=device))
    return [held[place] for place in running]
