"""What drafters share that read each request's text on the host and run no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..checks import items, shown, token_ids
from ..counts import Counts
from . import Draft, Requests

__all__ = ["Reader", "TextDrafter", "deterministic_draft"]


class Reader(Protocol):
    """Reads one request's text."""

    def append(self, tokens: list[int], /) -> None:
        """Read on."""


R = TypeVar("R", bound=Reader)


class TextDrafter(ABC, Generic[R]):
    """Base of these drafters: one reader a request, which reads all that verification emits.

    Nothing is proposed into the text, so nothing is rolled back but in a hierarchy, where a request
    that loses tokens has its text read anew. The tokens that a round emitted are copied to the
    host, once a round.
    """

    calls = 0

    def __init__(self, inputs: Sequence[Sequence[int]] | None = None) -> None:
        name = type(self).__name__
        several = None if inputs is None else items(inputs)
        if inputs is not None and several is None:
            raise TypeError(
                f"{name}: inputs must be sequences of token ids or None, got {shown(inputs)}"
            )
        #: Of each request what it is to read beside, or in place of, its prompt.
        self.inputs: list[list[int]] | None = None
        if several is not None:
            self.inputs = [
                token_ids(f"{name}: ids of input {b}", ids) for b, ids in enumerate(several)
            ]
        self._requests: Requests
        self._readers: list[R]
        self._numbers: list[int]  # which request each is, as they were at the start
        self._prompts: list[list[int]]
        self._emitted: list[list[int]]

    @abstractmethod
    def _reader(self, request: int, prompt: list[int]) -> R:
        """Return the reader of a request whose prompt this is."""

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        batch = requests.input_ids.shape[0]
        if self.inputs is not None and len(self.inputs) != batch:
            raise ValueError(
                f"{type(self).__name__}: inputs must be those of {batch} requests, got "
                f"{len(self.inputs)}"
            )
        self._requests = requests
        self._prompts = requests.texts()
        self._numbers = list(range(len(self._prompts)))
        self._emitted = [[] for _ in self._prompts]
        self._readers = [self._reader(b, text) for b, text in enumerate(self._prompts)]

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Read what verification emitted."""
        self.observe(tokens, accepted + 1)

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Read the first ``gained`` of ``tokens`` ``[B, n]``, whoever proposed them."""
        rows = zip(self._readers, self._emitted, tokens.tolist(), gained.host, strict=True)
        for reader, emitted, row, n in rows:
            emitted += row[:n]
            reader.append(row[:n])

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Forget the last ``drop`` tokens, and read the one that ends ``text`` ``[B, n]``."""
        for b, (token, n) in enumerate(zip(text[:, -1].tolist(), drop.host, strict=True)):
            emitted = self._emitted[b]
            del emitted[len(emitted) - n :]
            emitted.append(token)
            if n:
                self._readers[b] = self._reader(self._numbers[b], self._prompts[b])
            self._readers[b].append(emitted if n else [token])

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self._readers = [self._readers[i] for i in indices]
        self._numbers = [self._numbers[i] for i in indices]
        self._prompts = [self._prompts[i] for i in indices]
        self._emitted = [self._emitted[i] for i in indices]


def deterministic_draft(
    tokens: list[list[int]], positions: Tensor, chances: list[list[float]] | None = None
) -> Draft:
    """Return a deterministic draft of these tokens, of any number a request."""
    width = max(map(len, tokens), default=0)
    rows = [row + [-1] * (width - len(row)) for row in tokens]
    ids = torch.tensor(rows, dtype=torch.int64, device=positions.device)
    return Draft(ids.reshape(len(tokens), width), chances=chances)
