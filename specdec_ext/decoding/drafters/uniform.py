"""Tokens at random, all equally likely: the least that a drafter can know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec_ext.decoding.drafters import Draft, GoOn, Requests

__all__ = ["UniformDrafter"]


class UniformDrafter:
    """Draws every token uniformly from the vocabulary.

    Any target accepts some of them (Leviathan et al., arXiv 2211.17192, section 3.6): a baseline,
    and a hard test of a verifier. The rows passed on are constant, which no filter changes: all
    entries tie. At temperature 0 the tokens are drawn as well; no law is read there. Tokens cost
    next to nothing, so ``go_on`` is not asked.

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
        if vocab_size < 1:
            raise ValueError(f"UniformDrafter: vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self._requests: Requests

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        seeds = requests.seeds
        if seeds is None:  # greedy verification needs none, and this does
            seeds = torch.zeros_like(requests.ends)
        self._requests = replace(requests, seeds=seeds, filters={}, greedy=False)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Draw ``gamma`` tokens."""
        batch = positions.shape[0]
        rows = torch.zeros(self.vocab_size, device=positions.device).expand(batch, gamma, -1)
        tokens = [self._requests.draw(rows[:, i], positions, i) for i in range(gamma)]
        if not tokens:
            return Draft(positions.new_empty(batch, 0))
        return Draft(torch.stack(tokens, 1), rows if self._requests.needs_law else None)

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Hear what was emitted: nothing is learnt from it."""

    def hear(self, tokens: Tensor, gained: Sequence[int], num_gained: Tensor) -> None:
        """Hear what other drafters' rounds added: nothing is learnt from it."""

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
