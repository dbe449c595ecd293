"""Where a request ends: every condition is asked at every token of a burst, first of them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from specdec_ext.decoding.arguments import callables

__all__ = ["Criterion", "Stops", "find_stops"]

#: As `transformers.StoppingCriteria`: of ids ``[1, n]`` and None, whether the request ends there.
Criterion = Callable[..., Any]


class Stops:
    """Tells where a request ends.

    Parameters
    ----------
    tokens : iterable of int
        A request ends at any of these.
    sequences : sequence of sequence of int
        A request ends where its new tokens end in one of these.
    criteria : sequence of callable
        As `transformers.StoppingCriteria`. Asked with the request's own text, ``[1, n]`` without
        padding, and None in place of scores.
    device : torch.device
        Where criteria get their ids.

    Examples
    --------
    >>> stops = Stops([2], [[5, 6]])
    >>> stops.kept([9], [5, 1], [5, 6, 7]), stops.kept([9], [], [5, 7]), stops.kept([5], [], [6])
    (2, None, None)
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        sequences: Sequence[Sequence[int]] = (),
        criteria: Sequence[Criterion] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.tokens = frozenset(tokens)
        self.sequences = [list(sequence) for sequence in sequences]
        self._reach = max(map(len, self.sequences), default=1) - 1  # into the text before a burst
        self.criteria = criteria
        self.device = device

    def kept(self, prompt: list[int], before: list[int], burst: list[int]) -> int | None:
        """Count the tokens of a burst up to the one at which the request ends; None: it goes on.

        Parameters
        ----------
        prompt, before, burst : list of int
            The request's prompt, its new tokens so far, and those of the burst.
        """
        asked = self._criteria_asked(prompt, before, burst)
        recent = before[len(before) - min(self._reach, len(before)) :] + burst
        for n, token in enumerate(burst, 1):
            end = len(recent) - len(burst) + n
            if (
                token in self.tokens
                or any(_ends_in(recent, end, sequence) for sequence in self.sequences)
                or asked(n)
            ):
                return n
        return None

    def _criteria_asked(
        self, prompt: list[int], before: list[int], burst: list[int]
    ) -> Callable[[int], bool]:
        """Return what tells whether a criterion ends the request at the n-th token of the burst."""
        if not self.criteria:
            return lambda n: False
        ids = torch.tensor([prompt + before + burst], device=self.device)
        known = len(prompt) + len(before)
        return lambda n: any(_is_true(c(ids[:, : known + n], None)) for c in self.criteria)


def _ends_in(tokens: list[int], end: int, sequence: list[int]) -> bool:
    return end >= len(sequence) and tokens[end - len(sequence) : end] == sequence


def _is_true(answer: Any) -> bool:
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)


def find_stops(
    tokens: Iterable[int],
    stop_sequences: Iterable[Sequence[int]],
    stop_strings: Sequence[str],
    tokenizer: Any,
    stopping_criteria: Criterion | Iterable[Criterion] | None,
    device: torch.device,
) -> Stops:
    """Put together what `arguments` made of the arguments of `generate`."""
    sequences = [list(sequence) for sequence in stop_sequences]
    if not all(sequences):
        raise ValueError("generate: stop_sequences must hold at least one token each, got []")
    criteria: list[Criterion] = callables("stopping_criteria", stopping_criteria)
    if stop_strings:
        from transformers import StopStringCriteria

        criteria.append(StopStringCriteria(tokenizer, list(stop_strings)))
    return Stops(tokens, sequences, criteria, device)
