"""Integers of which there is one for each row of a batch, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Counts"]


@dataclass(frozen=True)
class Counts:
    """One integer for each row of a batch, known to the host and to the device.

    The host needs it to choose shapes, the device to choose entries. Both are kept, so that neither
    waits for a copy from the other.

    Attributes
    ----------
    host : sequence of int
        ``[B]``.
    device : Tensor
        ``[B]`` of an integer dtype, the same integers.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import Counts
    >>> accepted = Counts([2, 0], torch.tensor([2, 0]))
    >>> (5 - accepted).host, (accepted + 1).device
    ([3, 5], tensor([3, 1]))
    """

    host: Sequence[int]
    device: Tensor

    @classmethod
    def on(cls, device: torch.device, host: Sequence[int]) -> Counts:
        """Copy integers of the host to a device."""
        return cls(host, torch.tensor(host, dtype=torch.int64, device=device))

    @classmethod
    def full(cls, batch: int, value: int, device: torch.device) -> Counts:
        """Give every row the same integer, without a copy."""
        return cls([value] * batch, torch.full((batch,), value, device=device))

    def __add__(self, other: int | Counts) -> Counts:
        """Add a number, or each row's."""
        if isinstance(other, int):
            return Counts([n + other for n in self.host], self.device + other)
        both = zip(self.host, other.host, strict=True)
        return Counts([n + m for n, m in both], self.device + other.device)

    def __sub__(self, other: int | Counts) -> Counts:
        """Subtract a number, or each row's."""
        if isinstance(other, int):
            return Counts([n - other for n in self.host], self.device - other)
        both = zip(self.host, other.host, strict=True)
        return Counts([n - m for n, m in both], self.device - other.device)

    def __rsub__(self, other: int) -> Counts:
        """Subtract each row's from a number."""
        return Counts([other - n for n in self.host], other - self.device)

    def minimum(self, other: Counts) -> Counts:
        """Give the smaller integer of each row."""
        both = zip(self.host, other.host, strict=True)
        return Counts([min(n, m) for n, m in both], torch.minimum(self.device, other.device))

    def row(self, b: int) -> Counts:
        """Give row ``b`` alone."""
        return Counts(self.host[b : b + 1], self.device[b : b + 1])

    def select(self, rows: Tensor, indices: Sequence[int]) -> Counts:
        """Give these rows, named on the device and on the host."""
        return Counts([self.host[i] for i in indices], self.device[rows])
