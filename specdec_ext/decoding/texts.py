"""The texts of a batch on the device, as processors and criteria are shown them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Texts", "on_the_host"]


def on_the_host(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return prompts ``[B, P]`` as lists, without what their mask leaves out."""
    rows: list[list[int]] = ids.tolist()
    if mask is None:
        return rows
    masks: list[list[int]] = mask.tolist()
    return [
        [token for token, real in zip(row, reals, strict=True) if real]
        for row, reals in zip(rows, masks, strict=True)
    ]


class Texts:
    """Prompts and new tokens of every request, each from the first column on, then padding.

    Parameters
    ----------
    prompts, new : sequence of list of int
        One list a request. ``new`` grows from outside.
    pad : int
        Stands behind each text.
    device : torch.device
        Where.

    Examples
    --------
    >>> new = [[], []]
    >>> texts = Texts([[1, 2], [3]], new, pad=0)
    >>> new[1] += [4, 5, 6]
    >>> texts.ids(4).tolist(), texts.lengths()
    ([[1, 2, 0, 0], [3, 4, 5, 6]], [2, 4])
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        new: Sequence[list[int]],
        pad: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.prompts, self.new, self._pad = prompts, new, pad
        self._known = [0] * len(prompts)  # how many tokens of each text the tensor holds
        self._ids = torch.full((len(prompts), 0), pad, device=device, dtype=torch.int64)

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self.prompts)

    def text(self, request: int) -> list[int]:
        """Return a request's text."""
        return self.prompts[request] + self.new[request]

    def length(self, request: int) -> int:
        """Return how many tokens a request's text has."""
        return len(self.prompts[request]) + len(self.new[request])

    def lengths(self) -> list[int]:
        """Return how many tokens each text has."""
        return [self.length(b) for b in range(len(self))]

    def longest(self) -> int:
        """Return the request with the longest text."""
        lengths = self.lengths()
        return lengths.index(max(lengths))

    def forget(self) -> None:
        """Read all new tokens again: they are no longer those before with others behind them."""
        self._known = [
            min(known, len(prompt)) for known, prompt in zip(self._known, self.prompts, strict=True)
        ]

    def ids(self, width: int) -> Tensor:
        """Return the first ``width`` columns, ``[B, width]`` int64: not to be written to."""
        lengths = self.lengths()
        wanted = max(*lengths, width)
        if wanted > self._ids.shape[1]:
            more = self._ids.new_full((len(self), 2 * wanted - self._ids.shape[1]), self._pad)
            self._ids = torch.cat([self._ids, more], 1)
        for b, (known, length) in enumerate(zip(self._known, lengths, strict=True)):
            if known < length:
                tail = (self.text(b) if known < len(self.prompts[b]) else self.new[b])[
                    known - length :
                ]
                self._ids[b, known:length] = torch.tensor(tail, device=self._ids.device)
                self._known[b] = length
        return self._ids[:, :width]
