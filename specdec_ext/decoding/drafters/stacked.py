"""Several drafters in order of preference: the first that has a proposal for a request drafts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import flag
from ..counts import Counts
from . import (
    Draft,
    Drafter,
    GoOn,
    Requests,
    as_drafter,
    asked_for_some,
    check_distinct,
)
from .restarted import Restarted

__all__ = ["StackableDrafter", "StackedDrafter"]


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


class _Share(NamedTuple):
    """What one drafter proposed in a round, and how much of it went into the draft."""

    draft: Draft
    used: Counts  # how many of its tokens, from the first, are in each request's draft

    def select(self, rows: Tensor, indices: Sequence[int]) -> _Share:
        return _Share(Draft(self.draft.tokens[rows]), self.used.select(rows, indices))


class StackedDrafter:
    """Asks several drafters in order; the first that has a proposal for a request drafts for it.

    A drafter is asked only while some request has no draft yet: a small model after a lookup costs
    nothing in rounds in which the lookup serves every request. All drafters are told of every token
    that is emitted. One draft may hold deterministic tokens and sampled ones; each is verified as
    what it is (``Draft.kinds``).

    The output keeps the target's law under every lossless rule: which drafter serves a request
    depends on whether there is a proposal, never on the value of a sampled token. The host waits
    for the device once for every drafter that is asked.

    As a level of a hierarchy each drafter takes tokens back by its own `RevisableDrafter.revise`,
    so that a model's cache is rolled back instead of being filled again. A drafter without that
    method is started again on the text.

    Parameters
    ----------
    *drafters : torch.nn.Module or Drafter
        In order of preference. A model stands for the `ModelDrafter` that drives it.
    continued : bool
        Whether the last drafter continues the others' proposals up to gamma tokens, for every
        request. It then runs over their tokens as if they were its own. It must be a model or a
        `NgramDrafter`.

    Raises
    ------
    TypeError
        A drafter without ``observe``, or, if ``continued``, a last one that cannot continue the
        tokens of others.
    ValueError
        No drafter, or one of them twice.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import LookupDrafter, NgramDrafter, Requests, StackedDrafter
    >>> drafter = StackedDrafter(LookupDrafter(), NgramDrafter(10))
    >>> ids, ends = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), torch.tensor([20, 20])
    >>> seeds = torch.tensor([0, 1])
    >>> drafter.start(Requests(ids, None, ends, 0, seeds, {}, greedy=False, needs_law=True))
    >>> drafter.propose(3, positions=torch.tensor([5, 5])).kinds
    tensor([[0, 0, 0],
            [1, 1, 1]], dtype=torch.int8)
    """

    def __init__(self, *drafters: Any, continued: bool = False) -> None:
        if not drafters:
            raise ValueError("StackedDrafter: give at least one drafter")
        self.continued = flag("StackedDrafter: continued", continued)
        self.drafters: list[Any] = [
            as_drafter(drafter, f"StackedDrafter: drafter {k}")
            for k, drafter in enumerate(drafters)
        ]
        check_distinct("StackedDrafter: drafters", self)
        for drafter in self.drafters:
            if not callable(getattr(drafter, "observe", None)):
                raise TypeError(
                    f"StackedDrafter: {type(drafter).__name__} has no observe(), which tells it of "
                    "rounds in which others drafted"
                )
        last = self.drafters[-1]
        if self.continued and "prefix" not in inspect.signature(last.propose).parameters:
            raise TypeError(
                f"StackedDrafter: {type(last).__name__} cannot go on behind others' tokens: its "
                "propose() takes no prefix"
            )
        self.drafters = [
            drafter if hasattr(drafter, "revise") else Restarted(drafter)
            for drafter in self.drafters
        ]
        self._shares: dict[int, _Share] = {}  # of the drafters that were asked in this round

    @property
    def calls(self) -> int:
        """Model calls so far, of all drafters, prefill excluded."""
        return sum(drafter.calls for drafter in self.drafters)

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        self._shares = {}
        for drafter in self.drafters:
            drafter.start(requests)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose up to ``gamma`` tokens a request; the drafters that sample ask ``go_on``."""
        self._shares = {}
        without = torch.ones_like(positions, dtype=torch.bool)
        ahead = len(self.drafters) - self.continued
        for k, drafter in enumerate(self.drafters[:ahead]):
            asked = None if go_on is None else asked_for_some(go_on, without)
            draft = drafter.propose(gamma, positions, asked)
            proposed = (draft.tokens >= 0).long().cumprod(1).sum(1)
            used = torch.where(without, proposed, 0)
            self._shares[k] = _Share(draft, Counts(used.tolist(), used))
            without = without & (proposed == 0)
            if self._served() == positions.shape[0]:
                break
        merged = self._merged(positions)
        if self.continued and not _is_full(merged.tokens, gamma):
            draft = self.drafters[-1].propose(gamma, positions, go_on, prefix=merged.tokens)
            every = Counts.full(positions.shape[0], draft.tokens.shape[1], positions.device)
            self._shares[ahead] = _Share(draft, every)
            merged = self._merged(positions)
        return merged

    def _served(self) -> int:
        """Return how many requests have a draft."""
        return sum(
            map(any, zip(*(share.used.host for share in self._shares.values()), strict=True))
        )

    def _merged(self, positions: Tensor) -> Draft:
        """Return one draft: at each place the token of the first drafter that has one there."""
        batch = positions.shape[0]
        shares = self._shares.values()
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
        return Draft(tokens, logits, kinds) if sizes else Draft(tokens)

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
        """Pass on tokens that were emitted in rounds of drafters outside the stack."""
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


def _is_full(tokens: Tensor, gamma: int) -> bool:
    return tokens.shape[1] == gamma and bool((tokens >= 0).all())
