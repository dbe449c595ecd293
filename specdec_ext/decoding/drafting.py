"""What a round drafts: a policy allows, a drafter proposes, a policy keeps what is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .drafters import ByChance, Draft, GoOn, check_draft, estimates_chances, estimates_some_chances
from .policies import GammaPolicy

__all__ = ["Allowed", "allowed", "draft_allowed", "weighed"]


class Allowed(NamedTuple):
    """How many tokens each request may draft in a round.

    Attributes
    ----------
    lengths : list of int
        At most.
    unestimated : list of int
        At most, by drafters that estimate no chances (``Draft.chances``).
    """

    lengths: list[int]
    unestimated: list[int]


def allowed(policy: GammaPolicy, drafter: Any, rooms: Sequence[int]) -> Allowed:
    """Ask a policy for a round's lengths; no request may draft more than its ``rooms`` say.

    Tokens whose chances are estimated are proposed up to the policy's limit, where it has a
    ``keep`` that cuts them.
    """
    lengths = [min(n, room) for n, room in zip(policy.lengths(), rooms, strict=True)]
    if not (_cuts(policy) and (estimates_chances(drafter) or estimates_some_chances(drafter))):
        return Allowed(lengths, lengths)
    return Allowed([min(policy.limit, room) for room in rooms], lengths)


def draft_allowed(
    policy: GammaPolicy,
    drafter: Any,
    most: Allowed,
    positions: Tensor,
    go_on: GoOn | None,
) -> Draft:
    """Have a drafter propose what is allowed, and leave out what the policy does not keep."""
    options = {}
    if _cuts(policy) and estimates_some_chances(drafter):
        options["by_chance"] = ByChance(
            lambda draft: weighed(policy, draft, most.lengths), most.unestimated
        )
    draft = drafter.propose(max(most.lengths), positions, go_on, **options)
    check_draft(draft, drafter, len(most.lengths), max(most.lengths))
    return weighed(policy, draft, most.lengths)


def _cuts(policy: GammaPolicy) -> bool:
    return hasattr(policy, "keep")


def weighed(policy: GammaPolicy, draft: Draft, lengths: Sequence[int]) -> Draft:
    """Cut a draft that says what the chances of its tokens are, where the policy wants to.

    Parameters
    ----------
    policy : GammaPolicy
        Any; one without ``keep`` cuts nothing.
    draft : Draft
        What was proposed.
    lengths : sequence of int
        How many tokens of each request count.

    Returns
    -------
    Draft
        Its first tokens; all of them where it holds drawn tokens, which must not be left out.
    """
    if not _cuts(policy) or draft.chances is None or draft.logits is not None:
        return draft
    chances = [row[:n] for row, n in zip(draft.chances, lengths, strict=True)]
    kept = policy.keep(chances)  # type: ignore[attr-defined]
    if kept == [len(row) for row in draft.chances]:
        return draft
    tokens = draft.tokens[:, : max(kept)]
    if min(kept) < max(kept):
        places = torch.arange(max(kept), device=tokens.device)
        ends = torch.tensor(kept, device=tokens.device)
        tokens = tokens.masked_fill(places >= ends[:, None], -1)
    return Draft(tokens, chances=[row[:n] for row, n in zip(chances, kept, strict=True)])
