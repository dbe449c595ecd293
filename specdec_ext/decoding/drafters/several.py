"""What drafters share that hold several others: one draft of theirs all, and who is told what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..counts import Counts
from . import (
    Draft,
    Drafter,
    Requests,
    as_drafter,
    check_distinct,
    estimates_chances,
    reads_features,
)
from .interface import over_the_target
from .restarted import Restarted

__all__ = ["SeveralDrafters", "Share", "StackableDrafter"]


class StackableDrafter(Drafter, Protocol):
    """A drafter that can be told of tokens which came out of rounds of other drafters."""

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of tokens that it did not propose.

        This may come without a `propose` before it, and several times in a round.

        Parameters
        ----------
        tokens : Tensor
            ``[B, n]``: ``gained`` tokens, then anything.
        gained : Counts
            How many tokens each request gained; 0 is among them.
        """


class Share(NamedTuple):
    """What one drafter proposed in a round, and how much of it went into the draft.

    Attributes
    ----------
    draft : Draft
        What it proposed.
    used : Counts
        How many of its tokens, from the first, are in each request's draft.
    """

    draft: Draft
    used: Counts

    @classmethod
    def of(cls, draft: Draft, rows: Tensor, most: Sequence[int] | None = None) -> Share:
        """Use a draft for the requests ``rows`` ``[B]`` bool, and nothing for the others.

        Of each request all of it is used, or the ``most`` that is allowed.
        """
        proposed = (draft.tokens >= 0).long().cumprod(1).sum(1)
        if most is not None and min(most) < draft.tokens.shape[1]:
            proposed = proposed.minimum(torch.tensor(most, device=rows.device))
        used = torch.where(rows, proposed, 0)
        return cls(draft, Counts(used.tolist(), used))

    def over_the_target(self) -> Share:
        """Give the rows of a reduced vocabulary the places of its tokens: one draft has one."""
        logits, token_ids = self.draft.logits, self.draft.token_ids
        if logits is None or token_ids is None:
            return self
        whole = over_the_target(logits, token_ids)
        return self._replace(draft=self.draft._replace(logits=whole, token_ids=None))

    def select(self, rows: Tensor, indices: Sequence[int]) -> Share:
        """Keep only these requests."""
        return Share(Draft(self.draft.tokens[rows]), self.used.select(rows, indices))


class SeveralDrafters:
    """Base of drafters that hold others, of which some are asked in a round.

    Those that were asked are told how many of their own tokens were accepted; all are told of every
    token that is emitted.

    Parameters
    ----------
    drafters : sequence of torch.nn.Module or Drafter
        A model stands for the `ModelDrafter` that drives it.
    """

    def __init__(self, drafters: Sequence[Any]) -> None:
        name = type(self).__name__
        if not drafters:
            raise ValueError(f"{name}: give at least one drafter")
        self.drafters: list[Any] = [
            as_drafter(drafter, f"{name}: drafter {k}") for k, drafter in enumerate(drafters)
        ]
        check_distinct(f"{name}: drafters", self)
        for drafter in self.drafters:
            if not callable(getattr(drafter, "observe", None)):
                raise TypeError(
                    f"{name}: {type(drafter).__name__} has no observe(), which tells it of "
                    "rounds in which others drafted"
                )
        self.drafters = [
            drafter if hasattr(drafter, "revise") else Restarted(drafter)
            for drafter in self.drafters
        ]
        self._shares: dict[int, Share] = {}  # of the drafters that were asked in this round

    @property
    def calls(self) -> int:
        """Model calls so far, of all drafters, prefill excluded."""
        return sum(drafter.calls for drafter in self.drafters)

    @property
    def reads_features(self) -> bool:
        """Whether one of them reads the target's hidden states."""
        return any(map(reads_features, self.drafters))

    @property
    def estimates_chances(self) -> bool:
        """Whether all its drafts come with chances: those of all drafters do."""
        return all(map(estimates_chances, self.drafters))

    def take_features(self, features: Tensor, tokens: Tensor, gained: Counts) -> None:
        """Pass hidden states on, whichever drafter's tokens they belong to: `FeatureDrafter`."""
        for drafter in self.drafters:
            if reads_features(drafter):
                drafter.take_features(features, tokens, gained)

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        self._shares = {}
        for drafter in self.drafters:
            drafter.start(requests)

    def _merged(self, positions: Tensor) -> Draft:
        """Return one draft: at each place the token of the first drafter that has one there."""
        batch = positions.shape[0]
        shares = [share.over_the_target() for share in self._shares.values()]
        width = max((share.draft.tokens.shape[1] for share in shares), default=0)
        sizes = [share.draft.logits.shape[2] for share in shares if share.draft.logits is not None]
        tokens = positions.new_full((batch, width), -1)
        kinds = torch.zeros_like(tokens, dtype=torch.int8)
        logits = torch.zeros(batch, width, max(sizes, default=0), device=positions.device)
        for draft, used in shares:
            columns = slice(draft.tokens.shape[1])
            places = torch.arange(draft.tokens.shape[1], device=positions.device)
            here = (places < used.device[:, None]) & (tokens[:, columns] < 0)
            tokens[:, columns] = torch.where(here, draft.tokens, tokens[:, columns])
            if draft.logits is None:
                continue
            own = torch.ones_like(draft.tokens) if draft.kinds is None else draft.kinds
            kinds[:, columns] = torch.where(here, own.to(kinds), kinds[:, columns])
            part = logits[:, columns, : draft.logits.shape[2]]
            part.copy_(torch.where(here[..., None], draft.logits.float(), part))
            logits[:, columns, draft.logits.shape[2] :].masked_fill_(here[..., None], -torch.inf)
        if sizes:
            return Draft(tokens, logits, kinds)
        return Draft(tokens, chances=self._chances(batch))

    def _chances(self, batch: int) -> list[list[float]] | None:
        """Return the chances of the merged tokens, if every drafter estimates them."""
        if not self.estimates_chances:
            return None
        found: list[list[float]] = [[] for _ in range(batch)]
        for draft, used in self._shares.values():
            for row, chances, n in zip(found, draft.chances or found, used.host, strict=True):
                row += chances[len(row) : n]
        return found

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Tell each drafter how many of its own tokens were accepted, and what came after them."""
        for k, drafter in enumerate(self.drafters):
            if k not in self._shares:
                drafter.observe(tokens, accepted + 1)
                continue
            draft, used = self._shares[k]
            own = accepted.minimum(used)
            width = draft.tokens.shape[1] + 1
            missing = max(width - tokens.shape[1], 0)
            wide = torch.nn.functional.pad(tokens, (0, missing), value=-1)
            drafter.commit(wide[:, :width], own)
            more = accepted - own
            if any(more.host):
                columns = torch.arange(1, tokens.shape[1], device=tokens.device)
                index = (own.device[:, None] + columns).clamp(max=tokens.shape[1] - 1)
                drafter.observe(tokens.gather(1, index), more)
        self._shares = {}

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Pass on tokens that were emitted in rounds of drafters that are none of these."""
        for drafter in self.drafters:
            drafter.observe(tokens, gained)

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Have each drafter take tokens back, and take one in their place."""
        for drafter in self.drafters:
            drafter.revise(text, drop)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._shares = {k: share.select(rows, indices) for k, share in self._shares.items()}
        for drafter in self.drafters:
            drafter.select(rows, indices)
