"""A drafter that cannot take tokens back, in a hierarchy or in a stack there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..counts import Counts
from . import Draft, GoOn, Requests, estimates_chances, reads_features

__all__ = ["Restarted"]


class Restarted:
    """A drafter that cannot take tokens back: it is started again on what the text is then.

    Parameters
    ----------
    draft : Drafter
        Any.
    """

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self._calls = 0  # before it was started again
        self._requests: Requests

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""
        calls: int = self._calls + self.draft.calls
        return calls

    @property
    def reads_features(self) -> bool:
        """Whether it reads the target's hidden states; then it is never started again.

        (It stands in no hierarchy: `HierarchicalDrafter` refuses it.)
        """
        return reads_features(self.draft)

    @property
    def estimates_chances(self) -> bool:
        """Whether all its drafts come with chances."""
        return estimates_chances(self.draft)

    def take_features(self, features: Tensor, tokens: Tensor, gained: Counts) -> None:
        """Pass hidden states on."""
        self.draft.take_features(features, tokens, gained)

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        self._requests = requests
        self.draft.start(requests)

    def propose(
        self, gamma: int, positions: Tensor, go_on: GoOn | None = None, **prefix: Tensor
    ) -> Draft:
        """Propose up to ``gamma`` tokens, behind those of a ``prefix`` if it can."""
        draft: Draft = self.draft.propose(gamma, positions, go_on, **prefix)
        return draft

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted."""
        self.draft.commit(tokens, accepted)

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of tokens that it did not propose, if it can stand in a stack."""
        self.draft.observe(tokens, gained)

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back that commits emitted, and take one in their place."""
        self.restart(text)

    def restart(self, text: Tensor) -> None:
        """Start again on ``text`` ``[B, n]``, left-padded with -1."""
        calls = self.draft.calls
        known = text >= 0
        self.draft.start(
            replace(
                self._requests,
                input_ids=text.clamp(min=0),
                attention_mask=None if bool(known.all()) else known.long(),
            )
        )
        self._calls += calls - self.draft.calls

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self.draft.select(rows, indices)
