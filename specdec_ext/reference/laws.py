"""Rows of logits as laws: filters, masks, reduced draft vocabularies.

See docs/design.md, "Laws from logits".
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..contract import GREEDY_BELOW
from .draws import law_weights

__all__ = [
    "DraftVocabulary",
    "Filters",
    "INF",
    "Law",
    "NAN",
    "allowed",
    "both_filters",
    "filters_of",
    "law",
    "make_law",
    "masked",
    "prob_of",
    "ratio",
    "row_at",
    "words_of",
]

NAN, INF = math.nan, math.inf


class Filters(NamedTuple):
    """The sampling parameters of one request, as float64 reads its float32 and int values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def checked(self) -> tuple[Filters, bool]:
        """Give the parameters with the bad ones replaced by T = 1 or no filter, and if any was."""
        good = Filters(
            self.temperature if 0 <= self.temperature < INF else 1.0,
            self.top_k,
            self.top_p if self.top_p >= 0 else 1.0,  # NaN compares false
            self.min_p if self.min_p <= 1 else 0.0,
        )
        return good, good != self


class Law:
    """A logits row and the scalars that make it a law: p(x) = exp(scale * (l_x - max)) / z.

    Attributes
    ----------
    logits : Tensor
        ``[V]`` float64, the raw row.
    max, argmax : float, int
        The largest logit and the lowest index that has it.
    scale : float
        1 / T; +inf for T = 0, where the law is the point mass at `argmax`.
    cutoff : float
        Raw logits below it have probability 0. A float32 value.
    z, log_z : float
        The sum of exp(scale * (l_x - max)) over what is kept, and its logarithm.
    """

    def __init__(self, logits: Tensor, filters: Filters) -> None:
        temperature, top_k, top_p, min_p = filters
        self.logits = logits
        self.max = float(logits.max())
        self.argmax = int(logits.argmax())  # the first one, by torch's contract
        self.scale = 1.0 / temperature if temperature >= GREEDY_BELOW else INF
        self.cutoff = -INF if self.scale < INF else self.max
        if self.scale < INF:
            if 0 < top_k < len(logits):
                self.cutoff = float(logits.topk(top_k).values[-1])
            if top_p < 1:
                self.cutoff = _top_p_cutoff(logits, self.weights, top_p)
                del self.weights  # a cached property: the cutoff has changed
            if min_p > 0:
                lowest = self.max + temperature * math.log(min_p)
                self.cutoff = max(self.cutoff, _float32_above(lowest))
        self.z = float(self.weights.sum())
        self.log_z = math.log(self.z)

    @cached_property
    def weights(self) -> Tensor:
        """``[V]`` float64: exp(scale * (l - max)), 0 below the cutoff. The largest is 1."""
        if self.scale == INF:
            point = torch.zeros_like(self.logits)
            point[self.argmax] = 1.0
            return point
        weights = (self.scale * (self.logits - self.max)).exp()
        return weights.masked_fill(self.logits < self.cutoff, 0.0)

    @cached_property
    def probs(self) -> Tensor:
        """``[V]`` float64 probabilities."""
        return self.weights / self.z

    def log_prob(self, token: int) -> float:
        """Log p(token) in nats."""
        if self.scale == INF:
            return 0.0 if token == self.argmax else -INF
        logit = float(self.logits[token])
        if logit < self.cutoff:
            return -INF
        return self.scale * (logit - self.max) - self.log_z


def _top_p_cutoff(logits: Tensor, weights: Tensor, top_p: float) -> float:
    """Find the lowest logit such that the mass strictly above it is below ``top_p`` of the total.

    Masses are fixed-point, so that the answer depends on no order of summation. Inside a group of
    ties `above` is too large for all but the first, which decides: the value is the group's.
    """
    order = logits.argsort(descending=True)
    mass = law_weights(weights[order])
    above = mass.cumsum(0) - mass
    bound = int(top_p * float(int(mass.sum())))
    kept = max(int((above < bound).sum()), 1)  # the top entry always stays
    return float(logits[order[kept - 1]])


def _float32(value: float) -> float:
    """Round to the nearest float32."""
    return ctypes.c_float(value).value


def _float32_above(value: float) -> float:
    """Find the smallest float32 that is >= value: a float32 logit reaches both or neither."""
    rounded = torch.tensor(_float32(value), dtype=torch.float32)
    if float(rounded) < value:
        rounded = rounded.nextafter(torch.tensor(INF))
    return float(rounded)


def make_law(logits: Tensor, filters: Filters) -> Law | None:
    """Make the law of a float64 row ``[V]``, parameters in range; None: NaN, +inf or all -inf."""
    if not bool((logits < INF).all()) or float(logits.max()) == -INF:
        return None
    return Law(logits, filters)


@torch.no_grad()
def law(
    logits_row: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Probabilities of one row under temperature, top-k, top-p, min-p, in that order.

    Parameters
    ----------
    logits_row : Tensor
        ``[V]`` raw logits, any float dtype.
    temperature, top_k, top_p, min_p
        Of the row; rounded to float32 first, since that is what operators are given.

    Returns
    -------
    Tensor
        ``[V]`` float64, sum 1. All NaN where the row has no law or a parameter is out of range.
    """
    filters, bad = Filters(
        _float32(temperature), int(top_k), _float32(top_p), _float32(min_p)
    ).checked()
    found = None if bad else make_law(logits_row.double(), filters)
    return torch.full_like(logits_row, NAN, dtype=torch.float64) if found is None else found.probs


def allowed(words: Tensor, tokens: Tensor) -> Tensor:
    """Whether each token is allowed by int32 words ``[W]``: bit j of word w is token 32 w + j.

    Parameters
    ----------
    words : Tensor
        ``[W]`` int32.
    tokens : Tensor
        int64 ids, not negative. Those of 32 W or above are not allowed.
    """
    place = (tokens >> 5).clamp(max=len(words) - 1)
    bit = (words.long()[place] >> (tokens & 31)) & 1
    return bit.bool() & (tokens < 32 * len(words))


def masked(row: Tensor, words: Tensor | None, vocab: int, to: float = -INF) -> Tensor:
    """Give a row of logits (or probabilities) with `to` in place of what is not allowed.

    `vocab` is the target's: an id above it is never allowed where there is a mask.
    """
    if words is None:
        return row
    tokens = torch.arange(len(row))
    return row.masked_fill(~allowed(words, tokens) | (tokens >= vocab), to)


def from_list(probs: Tensor, ids: Tensor, vocab: int) -> Tensor | None:
    """Give the row ``[V]`` of a list: ``probs[k]`` at token ``ids[k]``, -1 being no entry.

    None where an id is out of range or there twice.
    """
    named = ids != -1
    tokens = ids[named].long()
    if not bool(((tokens >= 0) & (tokens < vocab)).all()) or len(tokens.unique()) < len(tokens):
        return None
    return torch.zeros(vocab, dtype=probs.dtype).scatter_(0, tokens, probs[named])


class DraftVocabulary:
    """Where the draft's entries are in the target's vocabulary: entry d is token ``ids[d]``.

    `ids` None: entry d is token d.
    """

    def __init__(self, ids: Tensor | None, vocab: int) -> None:
        self.ids = None if ids is None else ids.cpu().long()
        self.vocab = vocab
        self.is_valid = self.ids is None or (
            bool(((self.ids >= 0) & (self.ids < vocab)).all())
            and len(self.ids.unique()) == len(self.ids)
        )

    def masked(self, row: Tensor, words: Tensor | None, to: float = -INF) -> Tensor:
        """Give the draft's row ``[Vd]`` with `to` where its token is not allowed."""
        if self.ids is None or words is None:
            return masked(row, words, self.vocab, to)
        return row.masked_fill(~allowed(words, self.ids), to)

    def law(self, probs: Tensor) -> Tensor:
        """Give the draft's law ``[Vd]`` as a law of target tokens: 0 where it has no entry."""
        if self.ids is None:
            return probs
        return torch.zeros(self.vocab, dtype=probs.dtype).scatter_(0, self.ids, probs)

    def law_of(
        self, row: Tensor, words: Tensor | None, parameters: Filters | None
    ) -> Tensor | None:
        """Give the law of a draft's row as one of target tokens; None: it has none.

        ``parameters`` None: the row holds probabilities.
        """
        if parameters is None:
            row = self.masked(row, words, to=0.0)
            legal = bool(((row >= 0) & (row < INF)).all()) and float(row.sum()) > 0
            return self.law(row / row.sum()) if legal else None
        found = make_law(self.masked(row, words), parameters)
        return None if found is None else self.law(found.probs)


def filters_of(
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Callable[[int], Filters]:
    """Read the parameters of request b out of [B] tensors, None being T = 1 or off."""
    given: dict[str, list[Any]] = {
        name: tensor.tolist()
        for name, tensor in zip(Filters._fields, (temperature, top_k, top_p, min_p), strict=True)
        if tensor is not None
    }
    return lambda b: Filters(**{name: values[b] for name, values in given.items()})


_Parameters: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def both_filters(
    target: _Parameters, draft: _Parameters
) -> tuple[Callable[[int], Filters], Callable[[int], Filters]]:
    """Collect the parameters of target and draft, the draft's by default the target's."""
    own = [t if d is None else d for t, d in zip(target, draft, strict=True)]
    return filters_of(*target), filters_of(*own)


def words_of(allowed_mask: Tensor | None, *index: int) -> Tensor | None:
    """Mask words of one row, on the CPU."""
    return None if allowed_mask is None else allowed_mask[index].cpu()


def row_at(table: Tensor, rows: Tensor | None, b: int, i: int) -> Tensor | None:
    """Row i of request b as float64 on the CPU; None where a packed table has no such row."""
    if rows is None:
        return table[b, i].cpu().double()
    r = int(rows[b, i])
    return table[r].cpu().double() if 0 <= r < len(table) else None


def prob_of(law_probs: Tensor, token: int) -> float:
    """Probability of a token; 0 beyond the vocabulary."""
    return float(law_probs[token]) if token < len(law_probs) else 0.0


def ratio(p: float, q: float) -> float:
    """Min(1, p / q) without the overflow of a division by almost nothing."""
    return 1.0 if p >= q else p / q
