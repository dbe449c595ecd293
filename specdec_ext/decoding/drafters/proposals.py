"""What one call of a hierarchy's `propose` gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..counts import Counts
from . import GoOn

__all__ = ["Proposals"]


class Proposals:
    """Tokens of a medium model, round by round; the requests of a batch fill up at their own pace.

    Parameters
    ----------
    wanted : list of int
        Tokens that each request is to propose; fewer where it is told to stop.
    device : torch.device
        Where the tokens are.
    keep_rows : bool
        Whether the rows that tokens were drawn from are asked for.
    """

    def __init__(self, wanted: list[int], device: torch.device, keep_rows: bool = False) -> None:
        self.wanted = wanted
        self.keep_rows = keep_rows
        self.emitted: list[list[int]] = [[] for _ in wanted]  # by the medium model, cut off or not
        #: How many tokens the medium model emitted, of each request.
        self.lengths = Counts.full(len(wanted), 0, device)
        self.tokens = self.lengths.device.new_full((len(wanted), max(wanted)), -1)
        self.rows: Tensor | None = None  # [B, G, V], the law of each token, if it is kept
        self._asked = 0  # tokens of each request that go_on has seen

    @property
    def unfinished(self) -> list[bool]:
        """Which requests lack tokens."""
        return [n < wanted for n, wanted in zip(self.lengths.host, self.wanted, strict=True)]

    @property
    def complete(self) -> bool:
        """Whether every request has its tokens."""
        return not any(self.unfinished)

    def add(self, tokens: Tensor, logits: Tensor, bursts: Sequence[Sequence[int]]) -> None:
        """Add bursts, ``[B, n]`` tokens drawn from ``[B, n, V]``; cut what is too much.

        Parameters
        ----------
        tokens, logits : Tensor
            The bursts, then anything.
        bursts : sequence of sequence of int
            The same tokens on the host, as many as there are.
        """
        if self.keep_rows and self.rows is None:
            self.rows = logits.new_zeros(*self.tokens.shape, logits.shape[2])
        places = [
            (b, known + i, i)
            for b, (burst, known) in enumerate(zip(bursts, self.lengths.host, strict=True))
            for i in range(min(len(burst), self.wanted[b] - known))
        ]
        b, to, i = torch.tensor(places, device=tokens.device).T
        self.tokens[b, to] = tokens[b, i]
        if self.rows is not None:
            self.rows[b, to] = logits[b, i]
        for text, burst in zip(self.emitted, bursts, strict=True):
            text += burst
        self.lengths = Counts.on(tokens.device, [len(text) for text in self.emitted])

    def ask(self, go_on: GoOn) -> None:
        """Ask about each token but the last, when every request that has it to propose has it."""
        assert self.rows is not None, "add() comes first"
        while self._asked < max(self.wanted) - 1 and self._has(self._asked):
            seen = self._asked + 1
            more = go_on(self.tokens[:, self._asked], self.rows[:, self._asked])
            self.tokens[:, seen:].masked_fill_(~more[:, None], -1)
            self.wanted = [
                n if goes else min(n, seen)
                for n, goes in zip(self.wanted, more.tolist(), strict=True)
            ]
            self._asked = seen

    def _has(self, i: int) -> bool:
        """Tell whether token ``i`` is there, of each request that is to propose it."""
        return all(
            n > i or wanted <= i for n, wanted in zip(self.lengths.host, self.wanted, strict=True)
        )

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep what the medium model emitted of these requests."""
        self.emitted = [self.emitted[i] for i in indices]
        self.lengths = self.lengths.select(rows, indices)
