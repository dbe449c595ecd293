"""A batch whose rows are run one at a time, for models whose rows cannot share a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .counts import Counts

if TYPE_CHECKING:
    from .hosting import HostedModel

__all__ = ["RowByRow"]


class RowByRow:
    """Runs every request as a batch of its own, without padding and without holes.

    This is right for every model that is right at batch 1, and costs a model call a row.

    Parameters
    ----------
    open_row : callable
        Of a row's number and its end ``[1]``: a `HostedModel` for one row.
    ends : Tensor
        ``[B]`` int64, the position at which each request must stop.
    """

    def __init__(self, open_row: Callable[[int, Tensor], HostedModel], ends: Tensor) -> None:
        self._rows = [open_row(b, ends[b : b + 1]) for b in range(ends.shape[0])]
        self._ends: list[int] = ends.tolist()
        self._unfed = [0] * len(self._rows)  # tokens behind a row's end, which it was spared
        self._calls_of_others = 0  # of rows that have left
        self.features: Tensor | None = None  # see `HostedModel.features`

    @property
    def calls(self) -> int:
        """Model calls since `prefill`."""
        return self._calls_of_others + sum(row.calls for row in self._rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row's cache, those that it was spared counted in."""
        return [row.lengths[0] + n for row, n in zip(self._rows, self._unfed, strict=True)]

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, rides: bool = False
    ) -> None:
        """Run all of the prompts but their last tokens, without their padding."""
        for b, row in enumerate(self._rows):
            ids = input_ids[b : b + 1]
            ids = ids if attention_mask is None else ids[:, attention_mask[b].bool()]
            row.prefill(ids, None, rides=rides)
        states = [row.features for row in self._rows]
        like = next((found for found in states if found is not None), None)
        if like is None:
            return
        self.features = like.new_zeros(*input_ids.shape, like.shape[2])
        for b, found in enumerate(states):
            if found is not None:  # left-padded, as the prompts are
                self.features[b, input_ids.shape[1] - found.shape[1] :] = found[0]

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Append tokens to every row: `HostedModel.forward`.

        A row is not fed past its end, where it may have no positions; such logits are unused, and
        its last ones stand in for them.
        """
        answers, states = [], []
        for b, row in enumerate(self._rows):
            room = max(self._ends[b] - self.lengths[b], 0)
            fed = tokens[b : b + 1, :room]
            self._unfed[b] += tokens.shape[1] - fed.shape[1]
            answers.append(row.forward(fed, last_only=last_only) if room else None)
            states.append(row.features if room else None)
        if any(found is not None for found in states):
            self.features = _stacked(states, tokens.shape[1])
        return _stacked(answers, 1 if last_only else tokens.shape[1])

    def rollback(self, drop: Counts, *, across_holes: bool = False) -> None:
        """Forget the last tokens of each row: `HostedModel.rollback`."""
        for b, row in enumerate(self._rows):
            spared = min(self._unfed[b], drop.host[b])
            self._unfed[b] -= spared
            if drop.host[b] > spared:
                row.rollback(drop.row(b) - spared, across_holes=across_holes)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        gone = set(range(len(self._rows))) - set(indices)
        self._calls_of_others += sum(self._rows[b].calls for b in gone)
        self._rows = [self._rows[b] for b in indices]
        self._ends = [self._ends[b] for b in indices]
        self._unfed = [self._unfed[b] for b in indices]

    def begin_tree(self) -> None:
        """Begin a tree."""
        for row in self._rows:
            row.begin_tree()

    def forward_nodes(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> Tensor:
        """Append nodes of a tree to every row: `HostedModel.forward_nodes`."""
        depths = depths.expand(tokens.shape)
        rows = [slice(b, b + 1) for b in range(len(self._rows))]
        logits = torch.cat(
            [
                row.forward_nodes(tokens[b], visible[b], depths[b])
                for row, b in zip(self._rows, rows, strict=True)
            ]
        )
        states = [row.features for row in self._rows if row.features is not None]
        self.features = torch.cat(states) if states else None
        return logits

    def keep_nodes(self, nodes: Tensor, kept: Counts) -> None:
        """End a tree: `HostedModel.keep_nodes`."""
        for b, row in enumerate(self._rows):
            row.keep_nodes(nodes[b : b + 1], kept.row(b))

    def keep_tree(self, nodes: Tensor, first: int) -> None:
        """Drop nodes of a tree that goes on: `HostedModel.keep_tree`."""
        for b, row in enumerate(self._rows):
            row.keep_tree(nodes[b : b + 1], first)


def _stacked(answers: list[Any], width: int) -> Tensor:
    """Give every row's answers ``[1, n, V]`` the same width, ``[B, width, V]``; None: not run."""
    like = next(answer for answer in answers if answer is not None)
    rows = [like.new_zeros(1, 1, like.shape[2]) if row is None else row for row in answers]
    return torch.cat([row[:, torch.arange(width).clamp(max=row.shape[1] - 1)] for row in rows])
