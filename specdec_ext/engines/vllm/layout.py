"""Which rows of vLLM's packed tensors belong to which slot of which request.

vLLM packs the rows of a batch: a request with n draft tokens has n + 1 rows of logits, one after
the other, and n entries in every tensor of draft tokens. `specdec_ext.verify` takes packed rows and
the index tensors ``[B, G+1]`` and ``[B, G]`` that find them, and these depend on the numbers of
draft tokens alone: they are made on the host, in one piece, and kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Kept", "Layout", "Layouts", "make_layout"]


class Layout(NamedTuple):
    """Index tensors of a batch of B requests with up to G draft tokens.

    Attributes
    ----------
    target_rows : Tensor
        ``[B, G+1]`` int64, rows of the packed logits; slots behind a request's last one repeat it.
    draft_slots : Tensor
        ``[B, G]`` int64, entries of the packed draft tokens; behind a request's last one any.
    lengths : Tensor
        ``[B]`` int64, how many draft tokens there are.
    owners : Tensor
        ``[R]`` int64, the request of each row of the packed logits.
    """

    target_rows: Tensor
    draft_slots: Tensor
    lengths: Tensor
    owners: Tensor


def make_layout(counts: Sequence[int], device: torch.device) -> Layout:
    """Make the index tensors of requests with these numbers of draft tokens.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.engines.vllm.layout import make_layout
    >>> layout = make_layout([2, 0], torch.device("cpu"))
    >>> layout.target_rows, layout.draft_slots
    (tensor([[0, 1, 2],
            [3, 3, 3]]), tensor([[0, 1],
            [1, 1]]))
    >>> layout.owners
    tensor([0, 0, 0, 1])
    """
    gamma, last = max(counts, default=0), sum(counts) - 1
    flat: list[int] = []  # of each request: its target rows, its draft slots, its length
    first = 0
    for b, count in enumerate(counts):
        flat.extend(first + b + min(i, count) for i in range(gamma + 1))
        flat.extend(min(first + i, last) for i in range(gamma))
        flat.append(count)
        first += count
    flat.extend(b for b, count in enumerate(counts) for _ in range(count + 1))
    whole = torch.tensor(flat, dtype=torch.int64)
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    size = len(counts) * (2 * gamma + 2)
    table = whole[:size].view(len(counts), 2 * gamma + 2)
    return Layout(
        table[:, : gamma + 1], table[:, gamma + 1 : 2 * gamma + 1], table[:, -1], whole[size:]
    )


T = TypeVar("T")


class Kept(Generic[T]):
    """What was made for a key, the last used ones kept."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[tuple[int, ...], T] = OrderedDict()

    def of(self, key: tuple[int, ...], make: Callable[[], T]) -> T:
        """Find what was made for a key, or make it."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found


class Layouts:
    """Layouts by the numbers of draft tokens."""

    def __init__(self, capacity: int = 64) -> None:
        self._kept: Kept[Layout] = Kept(capacity)

    def of(self, counts: Sequence[int], device: torch.device) -> Layout:
        """Find or make the layout of requests with these numbers of draft tokens."""
        key = tuple(counts)
        return self._kept.of(key, lambda: make_layout(key, device))
