"""Several drafters in order of preference: the first that has a proposal for a request drafts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..checks import flag
from ..counts import Counts
from . import ByChance, Draft, GoOn, as_drafter, asked_for_some, estimates_chances
from .several import SeveralDrafters, Share

__all__ = ["StackedDrafter"]


class StackedDrafter(SeveralDrafters):
    """Asks several drafters in order; the first that has a proposal for a request drafts for it.

    A drafter is asked only while some request has no draft yet: a small model after a lookup costs
    nothing in rounds in which the lookup serves every request. All drafters are told of every token
    that is emitted. One draft may hold deterministic tokens and sampled ones; each is verified as
    what it is (``Draft.kinds``).

    The output keeps the target's law under every lossless rule: which drafter serves a request
    depends on whether there is a proposal, never on the value of a sampled token. The host waits
    for the device once for every drafter that is asked.

    **Policies.** A policy that cuts drafts by their tokens' chances (`RenewalRule`) decides for
    drafters that estimate them (a `SuffixDrafter`, say) and for the others apart: a copy is taken
    where it is worth the target's longer call, and a model behind it drafts where that pays for its
    own calls, too. A request of whose copy nothing is kept is the next drafter's.

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
        self.continued = flag("StackedDrafter: continued", continued)
        super().__init__(drafters)
        last = as_drafter(drafters[-1])
        if self.continued and "prefix" not in inspect.signature(last.propose).parameters:
            raise TypeError(
                f"StackedDrafter: {type(last).__name__} cannot go on behind others' tokens: its "
                "propose() takes no prefix"
            )

    @property
    def estimates_some_chances(self) -> bool:
        """Whether some of its drafters estimate chances and some do not, see `ByChance`.

        Where the last one continues the others' proposals, its tokens are in every draft.
        """
        some = any(map(estimates_chances, self.drafters)) and not self.estimates_chances
        return some and not self.continued

    def propose(
        self,
        gamma: int,
        positions: Tensor,
        go_on: GoOn | None = None,
        by_chance: ByChance | None = None,
    ) -> Draft:
        """Propose up to ``gamma`` tokens a request; the drafters that sample ask ``go_on``."""
        self._shares = {}
        without = torch.ones_like(positions, dtype=torch.bool)
        ahead = len(self.drafters) - self.continued
        for k, drafter in enumerate(self.drafters[:ahead]):
            asked = None if go_on is None else asked_for_some(go_on, without)
            if by_chance is None:
                share = Share.of(drafter.propose(gamma, positions, asked), without)
            elif estimates_chances(drafter):
                draft = _of_some(drafter.propose(gamma, positions, asked), self._is_served)
                share = Share.of(by_chance.weigh(draft), without)
            elif any(by_chance.unestimated):
                most = by_chance.unestimated
                share = Share.of(drafter.propose(max(most), positions, asked), without, most)
            else:
                continue
            self._shares[k] = share
            without = without & (share.used.device == 0)
            if all(self._is_served):
                break
        merged = self._merged(positions)
        if self.continued and not _is_full(merged.tokens, gamma):
            draft = self.drafters[-1].propose(gamma, positions, go_on, prefix=merged.tokens)
            every = Counts.full(positions.shape[0], draft.tokens.shape[1], positions.device)
            self._shares[ahead] = Share(draft, every)
            merged = self._merged(positions)
        return merged

    @property
    def _is_served(self) -> list[bool]:
        """Whether each request has a draft; of no requests before a drafter was asked."""
        return list(
            map(any, zip(*(share.used.host for share in self._shares.values()), strict=True))
        )


def _of_some(draft: Draft, is_served: list[bool]) -> Draft:
    """Return a draft with chances without those of requests that have one already."""
    if not any(is_served):
        return draft
    rows = zip(draft.chances or (), is_served, strict=True)
    return draft._replace(chances=[[] if served else row for row, served in rows])


def _is_full(tokens: Tensor, gamma: int) -> bool:
    return tokens.shape[1] == gamma and bool((tokens >= 0).all())
