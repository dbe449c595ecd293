"""What a drafter is made of: stacks and hierarchies hold others, and policies of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["check_distinct", "modules_of"]


def check_distinct(name: str, drafter: Any, *policies: Any) -> None:
    """Check that no drafter, policy or threshold stands in two places: each has one's state.

    Parameters
    ----------
    name : str
        The argument, as errors are to say it.
    drafter : Drafter
        One that may hold others, as stacks and hierarchies do.
    *policies : GammaPolicy
        Those used beside it.

    Raises
    ------
    ValueError
        One object comes twice.
    """
    seen: set[int] = set()
    for part in (*_parts(drafter), *(part for policy in policies for part in _learners(policy))):
        if id(part) in seen:
            raise ValueError(
                f"{name} must use each drafter, policy and threshold in one place (it keeps the "
                f"state of that place), got one {type(part).__name__} twice"
            )
        seen.add(id(part))


def modules_of(draft: Any) -> Iterator[Any]:
    """Yield a draft, the drafters in it, and the models and heads that these run."""
    for part in _parts(draft):
        yield part
        for name in ("model", "head", "heads"):
            yield getattr(part, name, None)


def _parts(drafter: Any) -> Iterator[Any]:
    """Yield a drafter, the policy that it has for others, and the drafters in it."""
    yield drafter
    yield from _learners(getattr(drafter, "policy", None))
    for inner in (*getattr(drafter, "drafters", ()), getattr(drafter, "draft", None)):
        if hasattr(inner, "propose"):
            yield from _parts(inner)


def _learners(policy: Any) -> Iterator[Any]:
    """Yield a policy, and the threshold that it moves."""
    if policy is not None:
        yield policy
        threshold = getattr(policy, "threshold", None)
        if hasattr(threshold, "commit"):
            yield threshold
