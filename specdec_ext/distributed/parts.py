"""Parts of a vocabulary: where they begin, and tiles that lie in several of them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import Exchange

#: The function, in messages.
NAME = "verify_sharded"

#: Entries of a vocabulary that are summed in one place. A part that begins between two multiples of
#: it costs an exchange of the logits up to the next one.
TILE = 4096


def even_bounds(vocab: int, ranks: int) -> list[int]:
    """Split a vocabulary into parts of whole tiles, as even as they can be.

    Parts that begin at multiples of `TILE` spare `verify_sharded` the exchange of logits at their
    borders.

    Parameters
    ----------
    vocab : int
        V, at least 1.
    ranks : int
        W, at least 1.

    Returns
    -------
    list of int
        W + 1 numbers: rank r has the entries from the r-th up to the next one.

    Raises
    ------
    ValueError
        A number below 1.

    Examples
    --------
    >>> from specdec_ext.distributed import even_bounds
    >>> even_bounds(128256, 4)
    [0, 32768, 65536, 98304, 128256]
    """
    if vocab < 1 or ranks < 1:
        raise ValueError(f"even_bounds: vocab and ranks must be at least 1, got {vocab}, {ranks}")
    tiles = -(-vocab // TILE)
    return [min(vocab, -(-tiles * r // ranks) * TILE) for r in range(ranks + 1)]


class Part(NamedTuple):
    """Rows of which each rank has some columns."""

    rows: Tensor  # [..., width] of this rank
    bounds: list[int]  # [W + 1]

    def head(self, rank: int) -> tuple[int, int]:
        """Give the rank that works on the first columns of a rank, and how many these are."""
        begin, end = self.bounds[rank : rank + 2]
        if begin == end or begin % TILE == 0:
            return rank, 0
        tile = begin // TILE * TILE
        return bisect_right(self.bounds, tile) - 1, min(end, tile + TILE) - begin

    def bytes_of(self, columns: int) -> int:
        """Give the bytes of some of the columns."""
        rows = self.rows.shape[:-1].numel()
        return rows * columns * self.rows.element_size()


def as_bytes(rows: Tensor) -> Tensor:
    """Give values as a row of bytes."""
    return rows.contiguous().flatten().view(torch.uint8)


def complete_tiles(exchange: Exchange, parts: list[Part]) -> list[Tensor | None]:
    """Complete the tile that begins in this rank's part and ends in others, of each of the parts.

    Parameters
    ----------
    exchange : Exchange
    parts : list of Part
        The target's rows, and the draft's.

    Returns
    -------
    list of Tensor or None
        ``[..., n]``, n <= 4,096, in rank order; None where no tile goes on elsewhere.
    """
    rank, ranks = exchange.rank, range(exchange.size)
    heads = [[part.head(r) for r in ranks] for part in parts]
    pieces = _swap_heads(exchange, parts, heads)
    tails: list[Tensor | None] = []
    for part, theirs, received in zip(parts, heads, pieces, strict=True):
        begin, end = part.bounds[rank : rank + 2]
        tile = end // TILE * TILE
        if not begin <= tile < end < part.bounds[-1]:
            tails.append(None)
            continue
        shapes = [(*part.rows.shape[:-1], columns) for _, columns in theirs]
        others = [
            received[r].clone().view(part.rows.dtype).view(shapes[r])  # a clone is aligned
            for r in ranks
            if theirs[r][0] == rank and theirs[r][1] > 0
        ]
        tails.append(torch.cat([part.rows[..., tile - begin :], *others], -1).contiguous())
    return tails


def _swap_heads(
    exchange: Exchange, parts: list[Part], heads: list[list[tuple[int, int]]]
) -> list[list[Tensor]]:
    """Send each rank the columns that it works on; gives what came, by part and by rank."""
    ranks = range(exchange.size)
    both = list(zip(parts, heads, strict=True))
    nothing = parts[0].rows.new_empty(0, dtype=torch.uint8)
    if not any(part.bytes_of(columns) for part, theirs in both for _, columns in theirs):
        return [[nothing for _ in ranks] for _ in parts]
    sent: list[list[Tensor]] = [[nothing] for _ in ranks]
    for part, theirs in both:
        owner, columns = theirs[exchange.rank]
        sent[owner].append(as_bytes(part.rows[..., :columns]))
    sizes = [
        [part.bytes_of(h[r][1]) if h[r][0] == exchange.rank else 0 for part, h in both]
        for r in ranks
    ]
    received = exchange.swap([torch.cat(pieces) for pieces in sent], [sum(s) for s in sizes])
    by_rank = [piece.split(size) for piece, size in zip(received, sizes, strict=True)]
    return [[by_rank[r][i] for r in ranks] for i in range(len(parts))]


def target_bounds(starts: list[int], widths: list[int]) -> list[int]:
    """Give where the target's parts begin, and V."""
    bounds = [0, *itertools.accumulate(widths)]
    for rank, (start, expected) in enumerate(zip(starts, bounds, strict=False)):
        if start not in (-1, expected):
            raise ValueError(
                f"{NAME}: vocab_start must be {expected} on rank {rank}, where the parts of the "
                f"ranks before it end: they must neither overlap nor leave a gap, got {start}"
            )
    if bounds[-1] < 1:
        raise ValueError(f"{NAME}: target_logits must have at least one column on some rank")
    return bounds


def draft_bounds(bounds: list[int], widths: list[int]) -> list[int]:
    """Give where the draft's parts begin, which end where the target's do, and Vd."""
    vocab = sum(widths)
    expected = [*(min(bound, vocab) for bound in bounds[:-1]), vocab]
    for rank, width in enumerate(widths):
        wanted = expected[rank + 1] - expected[rank]
        if width != wanted:
            raise ValueError(
                f"{NAME}: the draft's rows must be split as the target's: rank {rank} holds "
                f"target entries {bounds[rank]} to {bounds[rank + 1]}, and of the draft's {vocab} "
                f"it must hold {expected[rank]} to {expected[rank + 1]}, got {width} columns"
            )
    return expected
