"""Where a request ends: every condition is asked at every token of a burst, first of them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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
        self.criteria = criteria
        self.device = device

    def kept(self, prompt: list[int], before: list[int], burst: list[int]) -> int | None:
        """Count the tokens of a burst up to the one at which the request ends; None: it goes on.

        Parameters
        ----------
        prompt, before, burst : list of int
            The request's prompt, its new tokens so far, and those of the burst.
        """
        new = before + burst
        ids = torch.tensor(prompt + new if self.criteria else [], device=self.device)[None]
        for n in range(1, len(burst) + 1):
            end = len(before) + n
            if (
                burst[n - 1] in self.tokens
                or any(_ends_in(new, end, sequence) for sequence in self.sequences)
                or any(_is_true(c(ids[:, : len(prompt) + end], None)) for c in self.criteria)
            ):
                return n
        return None


def _ends_in(tokens: list[int], end: int, sequence: list[int]) -> bool:
    return end >= len(sequence) and tokens[end - len(sequence) : end] == sequence


def _is_true(answer: Any) -> bool:
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)


def find_stops(
    tokens: Iterable[int],
    stop_sequences: Iterable[Sequence[int]] | None,
    stop_strings: str | Sequence[str] | None,
    tokenizer: Any,
    stopping_criteria: Criterion | Iterable[Criterion] | None,
    device: torch.device,
) -> Stops:
    """Bring the arguments of `generate` to one form."""
    sequences = [[int(token) for token in sequence] for sequence in stop_sequences or ()]
    if not all(sequences):
        raise ValueError("generate: stop_sequences must hold at least one token each, got []")
    criteria: list[Criterion] = []
    if stopping_criteria is not None:
        # A StoppingCriteriaList is both a list and callable.
        listed: Any = stopping_criteria
        criteria += list(listed) if isinstance(listed, Iterable) else [listed]
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("generate: stop_strings need a tokenizer")
        from transformers import StopStringCriteria

        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        criteria.append(StopStringCriteria(tokenizer, strings))
    for criterion in criteria:
        if not callable(criterion):
            raise TypeError(
                "generate: stopping_criteria must be callables of (ids, scores), got "
                f"{type(criterion).__name__}"
            )
    return Stops(tokens, sequences, criteria, device)
