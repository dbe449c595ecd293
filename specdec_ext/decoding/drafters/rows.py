"""Rows of tokens of different lengths, side by side in one tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..counts import Counts

__all__ = ["columns_in_use", "last_tokens", "lengthened", "prefix_or_drawn", "without_padding"]


def last_tokens(history: Tensor, last: Counts, width: int) -> Tensor:
    """Return the ``width`` tokens of each row that end at its column ``last``, ``[B, width]``.

    Parameters
    ----------
    history : Tensor
        ``[B, n]`` tokens.
    last : Counts
        Which column.
    width : int
        How many.
    """
    end = max(last.host) + 1
    if min(last.host) + 1 == end:
        return history[:, end - width : end]
    columns = torch.arange(1 - width, 1, device=history.device)
    return history.gather(1, last.device.long()[:, None] + columns)


def without_padding(tokens: Tensor, real: Tensor) -> Tensor:
    """Return each row's ``real`` tokens, in order, then the others.

    Parameters
    ----------
    tokens : Tensor
        ``[B, n]``.
    real : Tensor
        ``[B, n]``, zeros at padding.
    """
    return tokens.gather(1, _real_first(real))


def columns_in_use(widths: Sequence[int], counts: Sequence[Counts]) -> tuple[Tensor, Counts]:
    """Find what counts in tensors that are laid side by side.

    Parameters
    ----------
    widths : sequence of int
        Columns of each tensor.
    counts : sequence of Counts
        How many of them count, from the first, in each row of each tensor.

    Returns
    -------
    columns : Tensor
        ``[B, n]`` int64: of each row, where its elements lie that count, in order, then anything.
    counts : Counts
        How many they are.
    """
    device = counts[0].device.device
    real = torch.cat(
        [
            torch.arange(width, device=device) < count.device[:, None]
            for width, count in zip(widths, counts, strict=True)
        ],
        1,
    )
    total = functools.reduce(Counts.__add__, counts)
    return _real_first(real)[:, : max(total.host)], total


def _real_first(real: Tensor) -> Tensor:
    return real.bool().sort(dim=1, descending=True, stable=True).indices


def lengthened(
    tokens: Tensor, lengths: Counts, more: Tensor, gained: Counts
) -> tuple[Tensor, Counts]:
    """Return rows of tokens with others behind them, and how many each row has then.

    Parameters
    ----------
    tokens, more : Tensor
        ``[B, n]`` and ``[B, m]``: so many tokens of each row, then anything.
    lengths, gained : Counts
        How many.

    Examples
    --------
    >>> import torch
    >>> tokens, more = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[4, 0], [5, 6]])
    >>> both, lengths = lengthened(
    ...     tokens, Counts.on(tokens.device, [2, 1]), more, Counts.on(tokens.device, [1, 2])
    ... )
    >>> both.tolist(), lengths.host
    ([[1, 2, 4], [3, 5, 6]], [3, 3])
    """
    columns, total = columns_in_use((tokens.shape[1], more.shape[1]), (lengths, gained))
    return torch.cat([tokens, more], 1).gather(1, columns), total


def prefix_or_drawn(prefix: Tensor | None, drawn: Tensor, i: int) -> Tensor:
    """Return token ``i`` of ``prefix`` ``[B, F]`` where there is one, else ``drawn`` ``[B]``."""
    if prefix is None or i >= prefix.shape[1]:
        return drawn
    return torch.where(prefix[:, i] >= 0, prefix[:, i], drawn)
