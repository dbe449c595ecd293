"""What drafters share that read each request's text on the host and run no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specdec_ext.decoding.drafters import Draft, Requests

__all__ = ["Reader", "TextDrafter", "put"]


class Reader(Protocol):
    """Reads one request's text."""

    def append(self, tokens: list[int], /) -> None:
        """Read on."""


R = TypeVar("R", bound=Reader)


class TextDrafter(ABC, Generic[R]):
    """Base of these drafters: one reader a request, which hears all tokens that verification emits.

    Nothing is proposed into the text, so nothing is ever rolled back. The tokens that a round
    emitted are copied to the host, once a round.
    """

    calls = 0

    def __init__(self) -> None:
        self._requests: Requests
        self._readers: list[R]

    @abstractmethod
    def _reader(self, request: int, prompt: list[int]) -> R:
        """Return the reader of a request whose prompt this is."""

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        self._requests = requests
        self._readers = [self._reader(b, text) for b, text in enumerate(requests.texts())]

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Read what verification emitted."""
        self.hear(tokens, [n + 1 for n in accepted], num_accepted + 1)

    def hear(self, tokens: Tensor, gained: Sequence[int], num_gained: Tensor) -> None:
        """Read the first ``gained[b]`` of ``tokens`` ``[B, n]``, whoever proposed them."""
        for reader, row, n in zip(self._readers, tokens.tolist(), gained, strict=True):
            reader.append(row[:n])

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self._readers = [self._readers[i] for i in indices]


def put(tokens: list[list[int]], positions: Tensor) -> Draft:
    """Return a deterministic draft of these tokens, of any number a request."""
    width = max(map(len, tokens), default=0)
    rows = [row + [-1] * (width - len(row)) for row in tokens]
    ids = torch.tensor(rows, dtype=torch.int64, device=positions.device)
    return Draft(ids.reshape(len(tokens), width))
