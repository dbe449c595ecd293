"""Several drafters in order of preference: the first that has a proposal for a request drafts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_ext.decoding.checks import flag
from specdec_ext.decoding.drafters import (
    Draft,
    Drafter,
    GoOn,
    Requests,
    as_drafter,
    check_distinct,
    only,
)
from specdec_ext.decoding.drafters.restarted import Restarted

__all__ = ["StackableDrafter", "StackedDrafter"]


class StackableDrafter(Drafter, Protocol):
    """A drafter that can be told of tokens which came out of rounds of other drafters."""

    def hear(self, tokens: Tensor, gained: Sequence[int], num_gained: Tensor) -> None:
        """Take in tokens that it did not propose.

        May be called without a `propose` before it, and several times in a round.

        Parameters
        ----------
        tokens : Tensor
            ``[B, n]``: ``gained[b]`` tokens, then anything.
        gained : sequence of int
            How many tokens each request gained, 0 or more.
        num_gained : Tensor
            ``[B]``, the same numbers on the device.
        """


class _Share(NamedTuple):
    """What one drafter proposed in a round, and how much of it went into the draft."""

    draft: Draft
    used: list[int]  # how many of its tokens, from the first, are in each request's draft
    num_used: Tensor  # [B], the same numbers on the device

    def select(self, rows: Tensor, indices: Sequence[int]) -> _Share:
        draft = Draft(self.draft.tokens[rows])
        return _Share(draft, [self.used[i] for i in indices], self.num_used[rows])


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
        A drafter without ``hear``, or, if ``continued``, a last one that cannot continue the
        tokens of others (its ``propose`` takes no ``begun``).
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
            if not callable(getattr(drafter, "hear", None)):
                raise TypeError(
                    f"StackedDrafter: {type(drafter).__name__} has no hear(), which tells it of "
                    "rounds in which others drafted"
                )
        last = self.drafters[-1]
        if self.continued and "begun" not in inspect.signature(last.propose).parameters:
            raise TypeError(
                f"StackedDrafter: {type(last).__name__} cannot go on behind others' tokens: its "
                "propose() takes no begun"
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
            asked = None if go_on is None else only(without, go_on)
            draft = drafter.propose(gamma, positions, asked)
            proposed = (draft.tokens >= 0).long().cumprod(1).sum(1)
            num_used = torch.where(without, proposed, 0)
            self._shares[k] = _Share(draft, num_used.tolist(), num_used)
            without = without & (proposed == 0)
            if self._served() == positions.shape[0]:
                break
        merged = self._merged(positions)
        if self.continued and not _is_full(merged.tokens, gamma):
            draft = self.drafters[-1].propose(gamma, positions, go_on, begun=merged.tokens)
            width = draft.tokens.shape[1]
            every = torch.full_like(positions, width)
            self._shares[ahead] = _Share(draft, [width] * positions.shape[0], every)
            merged = self._merged(positions)
        return merged

    def _served(self) -> int:
        """Return how many requests have a draft."""
        return sum(map(any, zip(*(share.used for share in self._shares.values()), strict=True)))

    def _merged(self, positions: Tensor) -> Draft:
        """Return one draft: at each place the token of the first drafter that has one there."""
        batch = positions.shape[0]
        shares = self._shares.values()
        width = max((share.draft.tokens.shape[1] for share in shares), default=0)
        sizes = [share.draft.logits.shape[2] for share in shares if share.draft.logits is not None]
        tokens = positions.new_full((batch, width), -1)
        kinds = torch.zeros_like(tokens, dtype=torch.int8)
        logits = torch.zeros(batch, width, max(sizes, default=0), device=positions.device)
        for draft, _, num_used in shares:
            columns = slice(draft.tokens.shape[1])
            places = torch.arange(draft.tokens.shape[1], device=positions.device)
            here = (places < num_used[:, None]) & (tokens[:, columns] < 0)
            tokens[:, columns] = torch.where(here, draft.tokens, tokens[:, columns])
            if draft.logits is None:
                continue
            own = torch.ones_like(draft.tokens) if draft.kinds is None else draft.kinds
            kinds[:, columns] = torch.where(here, own.to(kinds), kinds[:, columns])
            part = logits[:, columns, : draft.logits.shape[2]]
            part.copy_(torch.where(here[..., None], draft.logits.float(), part))
            logits[:, columns, draft.logits.shape[2] :].masked_fill_(here[..., None], -torch.inf)
        return Draft(tokens, logits, kinds) if sizes else Draft(tokens)

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Tell each drafter how many of its own tokens were accepted, and what came after them."""
        for k, drafter in enumerate(self.drafters):
            if k not in self._shares:
                drafter.hear(tokens, [n + 1 for n in accepted], num_accepted + 1)
                continue
            draft, used, num_used = self._shares[k]
            own = [min(n, m) for n, m in zip(accepted, used, strict=True)]
            num_own = torch.minimum(num_accepted.long(), num_used)
            width = draft.tokens.shape[1] + 1
            missing = max(width - tokens.shape[1], 0)
            wide = torch.nn.functional.pad(tokens, (0, missing), value=-1)
            drafter.commit(wide[:, :width], own, num_own)
            more = [n - m for n, m in zip(accepted, own, strict=True)]
            if any(more):
                columns = torch.arange(1, tokens.shape[1], device=tokens.device)
                index = (num_own[:, None] + columns).clamp(max=tokens.shape[1] - 1)
                drafter.hear(tokens.gather(1, index), more, num_accepted - num_own)
        self._shares = {}

    def hear(self, tokens: Tensor, gained: Sequence[int], num_gained: Tensor) -> None:
        """Pass on tokens that were emitted in rounds of drafters outside the stack."""
        for drafter in self.drafters:
            drafter.hear(tokens, gained, num_gained)

    def revise(self, text: Tensor, drop: Sequence[int], drop_tensor: Tensor) -> None:
        """Have each drafter take tokens back, and take one in their place."""
        for drafter in self.drafters:
            drafter.revise(text, drop, drop_tensor)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._shares = {k: share.select(rows, indices) for k, share in self._shares.items()}
        for drafter in self.drafters:
            drafter.select(rows, indices)


def _is_full(tokens: Tensor, gamma: int) -> bool:
    return tokens.shape[1] == gamma and bool((tokens >= 0).all())
