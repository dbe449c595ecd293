"""Decoders that count positions in cache slots, told other positions: by a view of the model.

Such a decoder (BART's and its relatives') has a module that embeds the positions behind what the
cache holds. In a batch whose rows were padded, or kept different numbers of draft tokens, slots are
no positions. So each generation gets a view of the model, which shares all weights and in which
only that module is another. Nothing is hooked on the model itself: other threads may be using it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .module_views import with_part

__all__ = ["PositionTable", "ToldPositions", "embeddings_of_positions", "find_position_table"]


class PositionTable(NamedTuple):
    """Which rows of which table a decoder takes as its embeddings of positions.

    Attributes
    ----------
    path : str
        Where the module is that embeds them, as ``model.named_modules`` says it.
    attribute : str
        Its tensor ``[n, d]``.
    first : int
        The row of position 0; the next position has the next row.
    pad_token : int or None
        A token that has a row of its own wherever it stands.
    pad_row : int
        That row.
    """

    path: str
    attribute: str
    first: int
    pad_token: int | None
    pad_row: int


class ToldPositions(nn.Module):
    """Stands for a decoder's module that embeds positions: embeds those it was told.

    Parameters
    ----------
    inner : torch.nn.Module
        The module. It is not modified.
    table : PositionTable
        What is known of it.
    """

    def __init__(self, inner: nn.Module, table: PositionTable) -> None:
        super().__init__()
        # Sinusoids of any length grow when they are called; other threads may be reading theirs.
        self.inner = copy.copy(inner)
        self.inner._parameters = dict(inner._parameters)
        self.inner._buffers = dict(inner._buffers)
        self.table = table
        self.rows: Tensor | None = None  # [B, m]
        self.slots = 0

    def tell(self, tokens: Tensor, positions: Tensor, slots: int) -> None:
        """Say where the next call's tokens are.

        Parameters
        ----------
        tokens, positions : Tensor
            ``[B, m]`` int64.
        slots : int
            How many slots the cache will have then: no position reaches it.
        """
        rows = positions + self.table.first
        if self.table.pad_token is not None:
            rows = torch.where(tokens == self.table.pad_token, self.table.pad_row, rows)
        self.rows, self.slots = rows, slots

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Embed them, ``[B, m, d]``, whatever slots the decoder counts."""
        assert self.rows is not None, "tell() comes first"
        weights: Tensor = getattr(self.inner, self.table.attribute)
        # Slots may pass the end of a table that all positions are within: then look at those.
        if self.slots + self.table.first > len(weights) and int(self.rows.max()) >= len(weights):
            self.inner(*args, **kwargs)  # where tables grow they do so here; else it raises
            weights = getattr(self.inner, self.table.attribute)
        return F.embedding(self.rows, weights)


class _Recorder(nn.Module):
    """Stands for a module, and keeps what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.outputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs.append(self.inner(*args, **kwargs))
        return self.outputs[-1]


def embeddings_of_positions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model, by path, that are called as those that embed positions are."""
    return {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == "embed_positions"
    }


def find_position_table(
    model: nn.Module, run: Callable[[nn.Module, Tensor], Any], words: Tensor, pad_token: int | None
) -> PositionTable | None:
    """Find the module that embeds a decoder's positions, and its table, by running the decoder.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face encoder-decoder.
    run : callable
        Of a view of the model and ids ``[2, n]``: runs its decoder on them, without a cache.
    words : Tensor
        ``[n]``, ids that are no padding.
    pad_token : int or None
        The padding token: it may have no position.

    Returns
    -------
    PositionTable or None
        None: no module did it alone, or what it returned is in none of its own tables, row after
        row (sinusoids that are computed in every call, say).
    """
    ids = torch.stack([words, words])
    if pad_token is not None:
        ids[1, 1] = pad_token
    recorders = {path: _Recorder(each) for path, each in embeddings_of_positions(model).items()}
    try:
        view = model
        for path, recorder in recorders.items():
            view = with_part(view, path, recorder)
        run(view, ids)
    except Exception:  # no view can be made of it, or its decoder wants more than an output
        return None
    used = [(path, recorder) for path, recorder in recorders.items() if recorder.outputs]
    if len(used) != 1 or len(used[0][1].outputs) != 1:
        return None
    path, recorder = used[0]
    rows, count = recorder.outputs[0], len(words)
    if not isinstance(rows, Tensor) or rows.numel() not in (
        count * rows.shape[-1], 2 * count * rows.shape[-1]
    ):  # fmt: skip
        return None
    rows = rows.reshape(-1, count, rows.shape[-1])  # of both texts, if it looks at them
    return _table_with(rows, path, recorder.inner, pad_token)


def _table_with(
    rows: Tensor, path: str, module: nn.Module, pad_token: int | None
) -> PositionTable | None:
    """Return the table that these rows are from, of a text and of one with padding in place 1."""
    count = rows.shape[1]
    for attribute, table in _matrices(module):
        if table.dtype != rows.dtype or table.shape[1] != rows.shape[2]:
            continue
        first = [i for i in _like(table, rows[0, 0]) if torch.equal(table[i : i + count], rows[0])]
        padding = _like(table, rows[-1, 1])
        if len(first) == 1 and padding:
            apart = first[0] + 1 not in padding
            return PositionTable(
                path, attribute, first[0], pad_token if apart else None, padding[0]
            )
    return None


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a module, with their names."""
    for name, value in {**vars(module), **module._buffers, **module._parameters}.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            yield name, value


def _like(table: Tensor, row: Tensor) -> list[int]:
    """Return which rows of a table are this one."""
    found: list[int] = (table == row).all(1).nonzero()[:, 0].tolist()
    return found
