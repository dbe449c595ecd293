"""Where a request ends: every condition is asked at every token of a burst, first of them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .arguments import callables
from .evidence import Refused, copied, keeps_state, name_of
from .texts import Texts

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
        padding, and None in place of scores; or with the whole batch, see `start`.
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
        self._texts: Texts | None = None
        self._whole_batch = False
        self._copies: dict[tuple[int, int], tuple[Criterion, Criterion]] = {}

    def start(self, texts: Texts, *, whole_batch: bool) -> None:
        """Take the requests; each gets copies of its own of criteria that keep state.

        Parameters
        ----------
        texts : Texts
            Of all requests, new tokens left out until a burst is kept.
        whole_batch : bool
            Ask criteria as transformers does, about all requests at once: of the answers ``[B]``
            each request reads its own. Its other rows show the texts that other requests had at
            that length, padding where they have not come so far. An answer that depends on
            these is refused: they are not where plain decoding would have them.
        """
        self._texts = texts
        self._whole_batch = whole_batch and len(texts) > 1
        prompts = texts.ids(texts.length(0))
        prompts = prompts if self._whole_batch else prompts[:1]
        again = torch.cat([prompts, prompts[:, -1:]], 1)

        def ask(criterion: Any, question: int) -> Any:
            return criterion((again if question else prompts).clone(), None)

        for number, criterion in enumerate(self.criteria):
            what = f"generate: stopping_criteria {name_of(criterion)}"
            if not isinstance(criterion, FunctionType) and keeps_state(
                criterion, ask, what=what, ruled="ids"
            ):
                for b in range(len(texts)):
                    self._copies[b, number] = (copied(criterion), copied(criterion))

    def finish(self) -> None:
        """Leave criteria that keep state as they are behind the longest text."""
        for (b, number), (copy, _) in self._copies.items():
            if self._texts is not None and b == self._texts.longest():
                vars(self.criteria[number]).update(vars(copy))

    def kept(
        self, prompt: list[int], before: list[int], burst: list[int], request: int = 0
    ) -> int | None:
        """Count the tokens of a burst up to the one at which the request ends; None: it goes on.

        Parameters
        ----------
        prompt, before, burst : list of int
            The request's prompt, its new tokens so far, and those of the burst.
        request : int
            Which, where criteria are asked.
        """
        if not self.sequences and not self.criteria and self.tokens.isdisjoint(burst):
            return None  # nearly always, and asked of every request in every round
        asked = self._criteria_asked(prompt, before, burst, request)
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
        self, prompt: list[int], before: list[int], burst: list[int], request: int
    ) -> Callable[[int], bool]:
        """Return what tells whether a criterion ends the request at the n-th token of the burst."""
        if not self.criteria:
            return lambda n: False
        known = len(prompt) + len(before)
        if self._texts is None or not self._whole_batch:
            ids = torch.tensor([prompt + before + burst], device=self.device)
            return lambda n: any(
                [
                    self._answer(number, request, 0, ids[:, : known + n], 0)
                    for number in range(len(self.criteria))
                ]
            )
        ids = self._texts.ids(known + len(burst)).clone()
        ids[request, known:] = torch.tensor(burst, device=ids.device)
        return lambda n: any(
            [
                self._ends_among(number, request, ids[:, : known + n])
                for number in range(len(self.criteria))
            ]
        )

    def _ends_among(self, number: int, request: int, ids: Tensor) -> bool:
        """Ask a criterion about a request in the company of others, and of itself alone."""
        alone = ids[request].expand(len(ids), -1)
        answers = [
            self._answer(number, request, which, rows, request)
            for which, rows in enumerate((ids, alone))
        ]
        if answers[0] != answers[1] and (request, number) not in self._copies:
            answers[0] = self._answer(number, request, 0, ids, request)  # time may have passed
        if answers[0] != answers[1]:
            raise Refused(
                f"generate: stopping_criteria {name_of(self.criteria[number])} lets other requests "
                f"of the batch decide whether request {request} ends, and in speculative decoding "
                "these are not at the same place: generate for one request at a time"
            )
        return answers[1]

    def _answer(self, number: int, request: int, which: int, ids: Tensor, row: int) -> bool:
        criterion = self.criteria[number]
        if (request, number) in self._copies:
            criterion = self._copies[request, number][which]
        answer = criterion(ids.clone(), None)
        if not isinstance(answer, torch.Tensor):
            return bool(answer)
        answers = answer.reshape(-1)
        if len(answers) not in (1, len(ids)):
            raise ValueError(
                f"generate: stopping_criteria {name_of(criterion)} must return one answer or one "
                f"for each row of ids {list(ids.shape)}, got {list(answer.shape)}"
            )
        return bool(answers[row if len(answers) == len(ids) else 0])


def _ends_in(tokens: list[int], end: int, sequence: list[int]) -> bool:
    return end >= len(sequence) and tokens[end - len(sequence) : end] == sequence


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
