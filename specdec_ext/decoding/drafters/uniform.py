"""Tokens at random, all equally likely: the least that a drafter can know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...contract import GREEDY_BELOW
from ..checks import integer
from ..counts import Counts
from . import Draft, GoOn, Requests

__all__ = ["UniformDrafter"]


class UniformDrafter:
    """Draws every token uniformly from the vocabulary.

    Any target accepts some of them (Leviathan et al., arXiv 2211.17192, section 3.6): a baseline,
    and a hard test of a verifier. The rows passed on are constant, which no filter changes: all
    entries tie. The caller's logits processors make them what they make of constant rows: what is
    masked is not drawn, the filters bind the rest, and the host waits for the device once a draft
    token. At temperature 0 the tokens are drawn as well, at temperature 1; no law is read there.
    Tokens cost next to nothing, so ``go_on`` is not asked.

    Parameters
    ----------
    vocab_size : int
        Tokens 0 to ``vocab_size - 1`` are drawn.

    Raises
    ------
    ValueError
        ``vocab_size`` under 1.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import Requests, UniformDrafter
    >>> drafter = UniformDrafter(100)
    >>> ids, ends, seeds = torch.tensor([[1, 2]]), torch.tensor([20]), torch.tensor([0])
    >>> drafter.start(Requests(ids, None, ends, 0, seeds, {}, greedy=False, needs_law=True))
    >>> draft = drafter.propose(3, positions=torch.tensor([2]))
    >>> draft.tokens.shape, draft.logits.shape
    (torch.Size([1, 3]), torch.Size([1, 3, 100]))
    """

    calls = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = integer("UniformDrafter: vocab_size", vocab_size, low=1)
        self._requests: Requests

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        seeds = requests.seeds
        if seeds is None:  # greedy verification needs none, and this does
            seeds = torch.zeros_like(requests.ends)
        filters = dict(requests.filters)
        if "temperature" in filters:
            given = filters["temperature"]
            filters["temperature"] = given.masked_fill(given < GREEDY_BELOW, 1.0)
        self._requests = replace(requests, seeds=seeds, filters=filters, greedy=False)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Draw ``gamma`` tokens."""
        batch = positions.shape[0]
        constant = torch.zeros(self.vocab_size, device=positions.device).expand(batch, -1)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for i in range(gamma):
            laws.append(self._requests.processed(constant, tokens))
            tokens.append(self._requests.draw(laws[-1], positions, i))
        if not tokens:
            return Draft(positions.new_empty(batch, 0))
        if not self._requests.needs_law:
            return Draft(torch.stack(tokens, 1))
        if self._requests.process is None:  # a view, whatever the vocabulary
            return Draft(torch.stack(tokens, 1), constant[:, None].expand(-1, gamma, -1))
        return Draft(torch.stack(tokens, 1), torch.stack(laws, 1))

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted: nothing is learnt from it."""

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of what other drafters' rounds added: nothing is learnt from it."""

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back: nothing was learnt from them."""

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
