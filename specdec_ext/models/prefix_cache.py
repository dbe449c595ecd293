"""Keys and values of the prefixes that a block drafter has read, and what sees which of them.

Rows may be of unequal length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..decoding.counts import Counts

__all__ = ["PrefixCache", "block_mask"]


class PrefixCache(Cache):
    """Self-attention keys and values of prefixes; slot t of a row holds those of its token t.

    A call of the decoder runs, in this order, the tokens that were accepted since the last call and
    the [MASK] slots of a block. Only the former are kept: a block is attended to in its own call,
    and nothing of it is there in the next one. So there is never anything to roll back, and since a
    slot's number is its token's position, rows of a batch may have unequal lengths.

    A row that has fewer new tokens than another is given padding behind them. What the padding
    gives is written behind the row's end, where attention does not look; the row's next tokens take
    its place.

    Parameters
    ----------
    layers : int
        Decoder layers.
    batch : int
        Rows.
    device : torch.device
        Where.
    room : int
        Slots to allocate at first; they double when it is used up.
    """

    def __init__(self, layers: int, batch: int, device: torch.device, room: int = 0) -> None:
        super().__init__(layers=[])
        #: Tokens in the cache, of each row.
        self.lengths = Counts.full(batch, 0, device)
        self._room = room
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._new = self.lengths  # of the call that is running
        self._width = 0  # columns of it that are tokens: the most new ones of a row

    def begin(self, new: Counts, width: int) -> int:
        """Begin a call on ``new`` tokens of each row, in ``width`` columns.

        Returns
        -------
        int
            How many slots of the prefix attention will see, those of the new tokens included: the
            longest row's length.
        """
        self._new, self._width = new, width
        return max((self.lengths + new).host, default=0)

    def end(self) -> None:
        """End a call: its tokens are part of the prefixes."""
        self.lengths = self.lengths + self._new

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Keep what the call's tokens gave; return prefix and block.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``[B, heads, width + k, size]``.
        layer_idx : int
            Which layer.

        Returns
        -------
        tuple of Tensor
            ``[B, heads, t + k, size]`` each, t what `begin` returned.
        """
        buffers = self._reserved(key_states, value_states, layer_idx)
        seen = max((self.lengths + self._new).host)
        start = self.lengths.host[0]
        is_even = all(length == start for length in self.lengths.host)
        found = []
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            tokens, block = states[:, :, : self._width], states[:, :, self._width :]
            if is_even:
                buffer[:, :, start : start + self._width] = tokens
            else:
                columns = torch.arange(self._width, device=buffer.device)
                slots = self.lengths.device[:, None] + columns
                buffer.scatter_(2, slots[:, None, :, None].expand_as(tokens), tokens)
            found.append(torch.cat([buffer[:, :, :seen], block], 2))
        return found[0], found[1]

    def _reserved(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, with room for the call's tokens."""
        known = self._buffers[layer]
        slots = max(self.lengths.host) + self._width
        if known is not None and known[0].shape[2] >= slots:
            return known
        room = max(slots, self._room if known is None else 2 * known[0].shape[2])
        batch, heads, _, size = keys.shape
        # Zeros: a slot that attention gives no weight must hold a number all the same.
        grown = keys.new_zeros(batch, heads, room, size), values.new_zeros(batch, heads, room, size)
        if known is not None:
            for buffer, before in zip(grown, known, strict=True):
                buffer[:, :, : before.shape[2]] = before
        self._buffers[layer] = grown
        return grown

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest row's number of tokens."""
        return max(self.lengths.host, default=0)

    def shorten(self, lengths: Counts) -> None:
        """Forget what lies behind the first ``lengths`` tokens of each row."""
        self.lengths = self.lengths.minimum(lengths)

    def select(self, rows: Tensor, indices: list[int]) -> None:
        """Keep only these rows, given on the device and on the host."""
        self.lengths = self.lengths.select(rows, indices)
        self._buffers = [
            None if both is None else (both[0][rows], both[1][rows]) for both in self._buffers
        ]


def block_mask(known: Tensor, lengths: Tensor, new: int, block: int, width: int) -> Tensor:
    """Say what attends to what in a call of the decoder.

    The tokens of a prefix are causal: each sees the prefix up to itself, and no slot of a block, so
    that what they give can be cached. A slot sees the whole prefix of its row and every slot of the
    block, itself and those behind it included.

    Parameters
    ----------
    known : Tensor
        ``[b]`` int64, the tokens of each row that were run in earlier calls.
    lengths : Tensor
        ``[b]`` int64, the tokens of each row's prefix, those of this call included.
    new : int
        Columns of this call that are tokens; a row with fewer has padding behind them.
    block : int
        k, the slots.
    width : int
        Columns of keys that belong to prefixes: column t is token t of its row.

    Returns
    -------
    Tensor
        ``[b, new + k, width + k]`` bool.

    Examples
    --------
    One token is known, one is new, and there are two slots:

    >>> block_mask(torch.tensor([1]), torch.tensor([2]), new=1, block=2, width=2).int()
    tensor([[[1, 1, 0, 0],
             [1, 1, 1, 1],
             [1, 1, 1, 1]]], dtype=torch.int32)
    """
    columns = torch.arange(width, device=known.device)
    last_seen = known[:, None] + torch.arange(new, device=known.device)  # by a token: itself
    of_tokens = columns <= last_seen[..., None]
    of_slots = (columns < lengths[:, None, None]).expand(-1, block, -1)
    prefix = torch.cat([of_tokens, of_slots], 1)
    slots = torch.arange(new + block, device=known.device) >= new
    return torch.cat([prefix, slots[:, None].expand(len(known), -1, block)], 2)
