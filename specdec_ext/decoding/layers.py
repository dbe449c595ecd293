"""Layers of a key-value cache that roll back, and whose slots can be gathered.

Transformers' own layers either copy everything for every token or cannot roll back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from .. import ops

__all__ = ["FixedLayer", "GrowingLayer"]


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with room: appending writes new slots, cropping moves a number.

    `DynamicLayer` copies the whole layer for every token; this one, when the room runs out.

    Parameters
    ----------
    room : int
        Slots to allocate at first.
    """

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room
        self.slots = 0
        self._keys: Tensor
        self._values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys and values of this kind."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys = self._allocate(key_states, self.room)
        self._values = self._allocate(value_states, self.room)
        self.is_initialized = True

    @staticmethod
    def _allocate(like: Tensor, room: int) -> Tensor:
        batch, heads, _, size = like.shape
        return like.new_empty(batch, heads, room, size)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, m, size]`` keys and values; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, new = self.slots, key_states.shape[-2]
        if start + new > self._keys.shape[-2]:
            room = max(start + new, 2 * self._keys.shape[-2])
            grown = self._allocate(key_states, room), self._allocate(value_states, room)
            grown[0].narrow(2, 0, start).copy_(self._keys.narrow(2, 0, start))
            grown[1].narrow(2, 0, start).copy_(self._values.narrow(2, 0, start))
            self._keys, self._values = grown
        self._keys.narrow(2, start, new).copy_(key_states)
        self._values.narrow(2, start, new).copy_(value_states)
        return self._resize(start + new)

    def _resize(self, slots: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys.narrow(2, 0, slots), self._values.narrow(2, 0, slots)
        self.slots, self.keys, self.values = slots, keys, values
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many slots are in use."""
        return self.slots

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` slots (transformers' sign: at most 0)."""
        if self.is_initialized:
            self._resize(self.slots + tokens_to_remove)

    def gather(self, index: Tensor, first: int = 0) -> None:
        """Keep the first slots, and ``index`` ``[B, n]`` of each row behind them, in that order."""
        if self.is_initialized:
            _gather_slots(self._keys, index, first)
            _gather_slots(self._values, index, first)
            self._resize(first + index.shape[1])

    def keep_path(self, path: Tensor, accepted: Tensor, starts: Tensor) -> None:
        """Move nodes ``path`` of the tree at slot ``starts`` behind its root: `compact_kv`."""
        if self.is_initialized:
            keys, values = self._keys.transpose(1, 2), self._values.transpose(1, 2)
            ops.compact_kv(keys, values, path, accepted, starts)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        if self.is_initialized:
            self._keys, self._values = self._keys[indices], self._values[indices]
            self._resize(self.slots)


class FixedLayer(StaticLayer):
    """Keys and values in a buffer of one size, all of which attention sees: shapes never change.

    What `StaticLayer` lacks: it rolls back and grows where it must.

    Parameters
    ----------
    max_cache_len : int
        Slots to allocate.
    """

    keys: Any
    values: Any

    def reserve(self, slots: int) -> None:
        """Have at least this many slots."""
        extra = slots - self.max_cache_len
        if extra <= 0:
            return
        self.max_cache_len = slots
        if self.is_initialized:
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` slots (transformers' sign: at most 0)."""
        if self.is_initialized:
            self.cumulative_length.add_(tokens_to_remove)

    def gather(self, index: Tensor, first: int = 0) -> None:
        """Keep the first slots, and ``index`` ``[B, n]`` of each row behind them, in that order."""
        if self.is_initialized:
            _gather_slots(self.keys, index, first)
            _gather_slots(self.values, index, first)
            self.cumulative_length.fill_(first + index.shape[1])

    def keep_path(self, path: Tensor, accepted: Tensor, starts: Tensor) -> None:
        """Move nodes ``path`` of the tree at slot ``starts`` behind its root: `compact_kv`."""
        if self.is_initialized:
            keys, values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
            ops.compact_kv(keys, values, path, accepted, starts)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.batch_size = len(indices)


def _gather_slots(buffer: Tensor, index: Tensor, first: int) -> None:
    """Move slots ``index`` [B, n] of ``[B, heads, slots, size]`` to slot ``first``, in order."""
    wide = index[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    buffer.narrow(2, first, index.shape[1]).copy_(buffer.gather(2, wide))
