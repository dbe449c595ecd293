"""The sampling parameters of a generation: the target's, and the draft's own where it has some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import GREEDY_BELOW
from .arguments import per_request
from .checks import integer, number

__all__ = ["SAMPLING", "SamplingLaws", "sampling_laws"]


@dataclass(frozen=True)
class SamplingLaws:
    """What target and draft are sampled with, in one form for all requests.

    Attributes
    ----------
    target : mapping of str to Tensor
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``[B]`` each; absent: off.
    draft : mapping of str to Tensor
        The draft's. If they are its own, each parameter is there that either has.
    greedy : bool
        Whether every request is decoded greedily.
    draft_greedy : bool
        Whether every draft token is its row's likeliest.
    own : bool
        Whether the draft has parameters of its own; else its are the target's.
    """

    target: Mapping[str, Tensor]
    draft: Mapping[str, Tensor]
    greedy: bool
    draft_greedy: bool
    own: bool = False

    def compared(self, draft_logits: Tensor | None) -> dict[str, Any]:
        """Give the sampling arguments of an operator that compares target and draft.

        Parameters
        ----------
        draft_logits : Tensor or None
            The rows that it is given of the draft; without any there is no law to describe.
        """
        if draft_logits is None or not self.own:
            return dict(self.target)
        return {**self.target, **{f"draft_{name}": value for name, value in self.draft.items()}}

    def of_greedy_target(self) -> SamplingLaws:
        """Give those under the rule "greedy", which has no sampling parameters of the target."""
        if self.own:
            return replace(self, target={}, greedy=True)
        return SamplingLaws({}, {}, greedy=True, draft_greedy=True)

    def select(self, rows: Tensor) -> SamplingLaws:
        """Keep only these requests."""
        target, draft = (
            {name: value[rows] for name, value in law.items()} for law in (self.target, self.draft)
        )
        return replace(self, target=target, draft=draft)


class _Filter(NamedTuple):
    """What a sampling parameter may be."""

    is_legal: Callable[[float], bool]
    is_off: Callable[[float], bool]
    wanted: str


_LARGEST = torch.finfo(torch.float32).max  # operators take float32
_FILTERS = {
    "temperature": _Filter(
        lambda t: 0 <= t <= _LARGEST, lambda t: t == 1, "a finite float32 of at least 0"
    ),
    "top_k": _Filter(lambda k: True, lambda k: k <= 0, "an int"),
    "top_p": _Filter(lambda p: p >= 0, lambda p: p >= 1, "at least 0"),
    "min_p": _Filter(lambda p: p <= 1, lambda p: p <= 0, "at most 1"),
}


#: Their names as arguments of `generate`.
SAMPLING = tuple(prefix + name for prefix in ("", "draft_") for name in _FILTERS)


def _values(batch: int, given: Mapping[str, Any], prefix: str) -> dict[str, list[float]]:
    """Return the sampling parameters that were given, a number for each request."""
    found = {}
    for name, law in _FILTERS.items():
        value = given[prefix + name]
        if value is None:
            continue
        one, kind = (integer, "an int") if name == "top_k" else (number, "a number")
        found[name] = per_request(prefix + name, value, batch, one, kind)
        for b, number_given in enumerate(found[name]):
            if not law.is_legal(number_given):
                raise ValueError(
                    f"generate: {prefix}{name} is out of range for request {b}: {number_given}; "
                    f"it must be {law.wanted}"
                )
    return found


def sampling_laws(
    batch: int, device: torch.device, given: Mapping[str, Any], *, greedy: bool
) -> SamplingLaws:
    """Return what target and draft are sampled with; ``greedy``: the rule ignores the target's.

    A parameter that is off for all requests is left out, unless it is off for the draft alone.
    """
    of_target = _values(batch, given, "")
    own = _values(batch, given, "draft_")
    of_draft = {**of_target, **own}

    def is_off(name: str, values: Mapping[str, list[float]]) -> bool:
        return all(_FILTERS[name].is_off(value) for value in values.get(name, ()))

    def is_greedy(values: Mapping[str, list[float]]) -> bool:
        return "temperature" in values and all(t < GREEDY_BELOW for t in values["temperature"])

    def tensors(values: Mapping[str, list[float]], names: Iterable[str]) -> dict[str, Tensor]:
        return {
            name: torch.tensor(
                values[name],
                dtype=torch.int64 if name == "top_k" else torch.float32,
                device=device,
            )
            for name in names
        }

    used = [name for name in of_target if not is_off(name, of_target)]
    target, target_greedy = tensors(of_target, used), greedy or is_greedy(of_target)
    if not own:
        return SamplingLaws(target, target, target_greedy, target_greedy)
    either = [name for name in of_draft if name in used or not is_off(name, of_draft)]
    return SamplingLaws(
        target, tensors(of_draft, either), target_greedy, is_greedy(of_draft), own=True
    )
