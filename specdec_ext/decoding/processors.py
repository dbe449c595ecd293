"""Logits processors in a burst: each row is processed after the text that would lead to it.

Rows of several slots are asked for, and most of them are then discarded; a processor that keeps
state must not notice. So copies of it are called: one follows each request along its text, and is
copied again for every slot that is only a hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .evidence import (
    Refused,
    answers_alike,
    copied,
    holds_a_model,
    keeps_state,
    name_of,
)
from .texts import Texts

__all__ = ["ByRequest", "Processor", "Processors"]

#: As `transformers.LogitsProcessor`: of ids ``[1, n]`` and scores ``[1, V]``, the new scores; of
#: ids ``[B, n]`` and scores ``[B, V]`` where the whole batch is shown.
Processor = Callable[[Tensor, Tensor], Tensor]


class ByRequest:
    """A processor that is asked about one request at a time and told which.

    For those to which a text that no request has, as other rows of a batch may hold, is an error.

    Parameters
    ----------
    process : callable
        Of a request's number, ids ``[1, n]`` and scores ``[1, V]``, the new scores ``[1, V]``.
    name : str
        What errors call it.
    """

    def __init__(self, process: Callable[[int, Tensor, Tensor], Tensor], name: str) -> None:
        self.process = process
        self.__qualname__ = name

    def __call__(self, request: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the new scores of a request."""
        return self.process(request, ids, scores)


class _Slot(NamedTuple):
    """A row to process."""

    row: int  # of the logits
    column: int
    request: int
    path: tuple[int, ...]  # what stands between the request's text and the row
    above: int | None  # the column whose row says how likely the path's last token is


class _Followed:
    """Copies of the processors that keep state, at the end of one request's text and behind it."""

    def __init__(self, processors: dict[int, Any], length: int) -> None:
        self.length = length  # of the text after which they are to be called next
        self.here = processors
        self._after: dict[tuple[int, ...], dict[int, Any]] = {}  # the path's own call included
        self._drafted: dict[tuple[int, ...], dict[int, Any]] = {}

    def catch_up(self, text: Sequence[int]) -> None:
        """Go on along what was accepted."""
        if len(text) == self.length:
            return
        self.here = self._after[tuple(text[self.length : -1])]
        self.length = len(text)
        self._after, self._drafted = {}, {}

    def copy_at(self, number: int, path: tuple[int, ...]) -> Any:
        """Return a processor for its call after a path; it is kept as it will be then."""
        before = self._after[path[:-1]] if path else self.here
        processor = copied(before[number])
        self._after.setdefault(path, {})[number] = processor
        return processor

    def copy_for_a_draft(
        self, number: int, path: tuple[int, ...], step: Callable[[Any, tuple[int, ...]], None]
    ) -> Any:
        """Return a processor for its call after a drafted path; nothing remembers the call.

        What leads there are calls on rows of zeros: the law of a draft must be a function of its
        tokens, and not of which level of a hierarchy asked first.
        """
        return copied(self._before_drafted(number, path, step))

    def _before_drafted(
        self, number: int, path: tuple[int, ...], step: Callable[[Any, tuple[int, ...]], None]
    ) -> Any:
        if not path:
            return self.here[number]
        known = self._drafted.setdefault(path, {})
        if number not in known:
            processor = copied(self._before_drafted(number, path[:-1], step))
            step(processor, path[:-1])
            known[number] = processor
        return known[number]


class Processors:
    """The caller's logits processors, for rows after texts that requests have or may get.

    Parameters
    ----------
    given : iterable of callable
        In the order in which they are applied.
    texts : Texts
        Of all requests, running or not.
    whole_batch : bool
        Call them as transformers does, with all requests at once, each at its own row (those that
        ended with padding behind their text). Rows that are at the same place are then asked for in
        one call; of a request that has no row there, what comes back is not used, and what it shows
        is the text it had there, or its text and padding. Else each row is asked for by itself.
    ends : collection of int
        Tokens that end a request, behind which a processor may refuse to be asked: it is not, when
        its kind is found out. (Drafts come without them.)

    Notes
    -----
    Before the first row is processed, copies of each processor are asked twice, and rows are asked
    in the company of others: one that keeps state is followed request by request, and one whose
    rows depend on each other is refused.
    """

    def __init__(
        self,
        given: Iterable[Any],
        texts: Texts,
        *,
        whole_batch: bool,
        ends: Collection[int] = (),
    ) -> None:
        self._given = list(given)
        self._ends = ends
        self._texts = texts
        self._whole_batch = whole_batch and len(texts) > 1
        self._followed: list[_Followed] | None = None  # one a request, once it is known what keeps
        self._keep: set[int] = set()  # state: the numbers of these processors
        self._dear: set[int] = set()  # and of those among them that run a model

    def chain(
        self,
        running: Sequence[int],
        drafted: Sequence[Sequence[int]],
        logits: Tensor,
        *,
        of_draft: bool = False,
    ) -> Tensor:
        """Process the rows after each prefix of a draft.

        Parameters
        ----------
        running : sequence of int
            The request of each row.
        drafted : sequence of sequence of int
            ``[R][G]``, G of any size for each request; the draft ends at a token that is none of
            the V, or that the row before it gives no probability, which cannot be accepted; rows
            behind it stay as they are.
        logits : Tensor
            ``[R, m, V]``, rows of the last m of the G + 1 slots: slot i follows i draft tokens.
        of_draft : bool
            Whether they are a drafter's own rows: state that they lead to is then not kept, and
            processors that keep state and run a model are left out.

        Returns
        -------
        Tensor
            ``[R, m, V]`` float32.
        """
        vocabulary = range(logits.shape[2])
        slots = []
        for row, (b, draft) in enumerate(zip(running, drafted, strict=True)):
            length = next((i for i, token in enumerate(draft) if token not in vocabulary), None)
            skipped = len(draft) + 1 - logits.shape[1]
            for i in range(skipped, len(draft) + 1 if length is None else length + 1):
                column = i - skipped
                above = column - 1 if column else None
                slots.append(_Slot(row, column, b, tuple(draft[:i]), above))
        return self._process(slots, logits, of_draft)

    def tree(
        self,
        running: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        logits: Tensor,
    ) -> Tensor:
        """Process the rows of a tree, each after the path to its node.

        Parameters
        ----------
        running : sequence of int
            The request of each row; its text's last token is the root.
        tokens, parents : sequence of sequence of int
            ``[R][N]``; a node whose token is none of the V (the root's apart), or that its parent's
            row gives no probability, keeps its row, and so do those below it.
        logits : Tensor
            ``[R, N, V]``.

        Returns
        -------
        Tensor
            ``[R, N, V]`` float32.
        """
        vocabulary = range(logits.shape[2])
        slots = []
        for row, b in enumerate(running):
            paths: list[tuple[int, ...] | None] = [()]
            slots.append(_Slot(row, 0, b, (), None))
            nodes = zip(tokens[row][1:], parents[row][1:], strict=True)
            for v, (token, parent) in enumerate(nodes, 1):
                above = paths[parent] if parent >= 0 and token in vocabulary else None
                paths.append(None if above is None else (*above, token))
                if above is not None:
                    slots.append(_Slot(row, v, b, (*above, token), parent))
        return self._process(slots, logits, of_draft=False)

    def beams(
        self,
        running: Sequence[int],
        alive: Sequence[Sequence[bool]],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        rows: Tensor,
    ) -> Tensor:
        """Process the rows of trees that begin in several texts: the live beams of each request.

        Parameters
        ----------
        running : sequence of int
            The request of each row; beam j of request b is text ``b * W + j``.
        alive : sequence of sequence of bool
            ``[R][W]``, whether there is such a beam.
        tokens, parents : sequence of sequence of int
            ``[R][N]``: nodes 0 .. W-1 are the beams, whose last tokens their texts hold.
        rows : Tensor
            ``[R, N, V]``; those of nodes that cannot be reached stay as they are.

        Returns
        -------
        Tensor
            ``[R, N, V]`` float32.

        Raises
        ------
        ValueError
            A processor keeps state: texts branch, and what it saw of one is not undone.
        """
        vocabulary = range(rows.shape[2])
        slots = []
        for row, b in enumerate(running):
            width = len(alive[row])
            nodes: list[_Slot | None] = [
                _Slot(row, j, b * width + j, (), None) if real else None
                for j, real in enumerate(alive[row])
            ]
            below = zip(tokens[row][width:], parents[row][width:], strict=True)
            for v, (token, parent) in enumerate(below, width):
                above = nodes[parent] if parent >= 0 and token in vocabulary else None
                nodes.append(
                    above and _Slot(row, v, above.request, (*above.path, token), above.column)
                )
            slots += [slot for slot in nodes if slot is not None]
        processed = self._process(slots, rows, of_draft=False)
        if self._keep:
            raise ValueError(
                f"generate: logits_processor {name_of(self._given[min(self._keep)])} must be a "
                "function of its arguments where beams are searched, got one that keeps state "
                "between calls"
            )
        return processed

    def finish(self) -> None:
        """Leave what keeps state as it is behind the longest text, as plain decoding would."""
        if not self._keep or self._followed is None:
            return
        longest = self._texts.longest()
        self._followed[longest].catch_up(self._texts.text(longest))
        for number, processor in self._followed[longest].here.items():
            if processor is not self._given[number]:
                vars(self._given[number]).update(vars(processor))

    def _process(self, slots: list[_Slot], logits: Tensor, of_draft: bool) -> Tensor:
        out = logits.float().clone()
        if not slots:
            return out
        if self._followed is None:
            self._find_out(slots, logits)
        for b in {slot.request for slot in slots} if self._keep else ():
            self._followed_at(b).catch_up(self._texts.text(b))
        places: dict[int, list[_Slot]] = {}
        for slot in slots:
            places.setdefault(self._texts.length(slot.request) + len(slot.path), []).append(slot)
        shown = _Shown(self._texts, max(places), slots)
        dead: set[tuple[int, int]] = set()
        for place in sorted(places):  # what is above a slot is at the place before
            alive = _possible(places[place], out, dead)
            for together in _one_of_each(alive) if self._whole_batch else ([s] for s in alive):
                self._apply(together, shown, place, logits, out, of_draft)
        return out

    def _apply(
        self,
        slots: list[_Slot],
        shown: _Shown,
        place: int,
        logits: Tensor,
        out: Tensor,
        of_draft: bool,
    ) -> None:
        """Process rows of different requests, all behind texts of the same length."""
        ids = shown.ids(slots, place)
        if not self._whole_batch:
            row, column, request = slots[0][:3]
            scores = logits[row, column, :][None].float().clone()
            scores = self._processed(ids[request, None], scores, slots, [0], of_draft)
            out[row, column] = scores[0]
            return
        rows, columns = [slot.row for slot in slots], [slot.column for slot in slots]
        at = [slot.request for slot in slots]
        scores = logits[rows[0], columns[0]].float().expand(len(ids), -1).clone()
        scores[at] = logits[rows, columns].float()
        scores = self._processed(ids, scores, slots, at, of_draft)
        out[rows, columns] = scores[at].float()

    def _processed(
        self, ids: Tensor, scores: Tensor, slots: list[_Slot], at: list[int], of_draft: bool
    ) -> Tensor:
        """Run all processors on ids ``[B, n]`` and scores ``[B, V]``; slots are in rows ``at``."""
        for number, processor in enumerate(self._given):
            if number not in self._keep:
                scores = self._call(processor, ids, scores, slots)
            elif not (of_draft and number in self._dear):
                scores = scores.clone()  # it may be a processor's own
                for i, slot in zip(at, slots, strict=True):
                    copy = self._copy(number, slot, ids[i], scores.shape, of_draft)
                    scores[i] = self._call_on(copy, slot.request, ids[i], scores[i])
        return scores

    def _call(self, processor: Any, ids: Tensor, scores: Tensor, slots: list[_Slot]) -> Tensor:
        """Call a processor on rows ``[B, n]`` and ``[B, V]``; ids are not changed."""
        if isinstance(processor, ByRequest):
            scores = scores.clone()
            for slot in slots:
                i = slot.request if self._whole_batch else 0
                scores[i] = processor(slot.request, ids[i, None].clone(), scores[i, None])[0]
            return scores
        processed = processor(ids.clone(), scores)
        if not isinstance(processed, Tensor) or processed.shape != scores.shape:
            found = getattr(processed, "shape", type(processed).__name__)
            raise ValueError(
                f"generate: logits_processor {name_of(processor)} must return scores "
                f"{list(scores.shape)}, got {list(found) if isinstance(found, tuple) else found}"
            )
        return processed

    def _call_on(self, processor: Any, request: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Call a processor for one request: ids ``[n]``, scores ``[V]``, in every row the same."""
        if isinstance(processor, ByRequest):
            one: Tensor = processor(request, ids[None].clone(), scores[None].clone())
            return one[0]
        rows = len(self._texts) if self._whole_batch else 1
        processed: Tensor = processor(ids.expand(rows, -1).clone(), scores.expand(rows, -1).clone())
        return processed[request if self._whole_batch else 0]

    def _copy(
        self, number: int, slot: _Slot, ids: Tensor, shape: Sequence[int], of_draft: bool
    ) -> Any:
        """Return the copy of a processor that a slot's row is to be given to."""
        followed = self._followed_at(slot.request)
        if not of_draft:
            return followed.copy_at(number, slot.path)

        def step(processor: Any, path: tuple[int, ...]) -> None:
            zeros = torch.zeros(shape[-1], device=ids.device)
            before = ids[: followed.length + len(path)]
            self._call_on(processor, slot.request, before, zeros)

        return followed.copy_for_a_draft(number, slot.path, step)

    def _followed_at(self, request: int) -> _Followed:
        assert self._followed is not None, "processors are looked at before they are called"
        return self._followed[request]

    # ---- what kind of processors these are -------------------------------------------------------

    def _find_out(self, slots: list[_Slot], logits: Tensor) -> None:
        """Tell which processors keep state; refuse those that cannot be right in a burst."""
        everyone = range(len(self._texts)) if self._whole_batch else [slots[0].request]
        asked = [_Slot(0, 0, b, (), None) for b in everyone]
        row_of = {slot.request: slot.row for slot in slots}
        rows = [row_of.get(b, slots[0].row) for b in everyone]
        length = self._texts.length(asked[0].request)
        ids = self._texts.ids(length)[list(everyone)]
        scores = logits[rows, 0].float()
        for number, processor in enumerate(self._given):
            what = f"generate: logits_processor {name_of(processor)}"
            trial = _Trial(self, processor, ids, scores, asked)
            keeps = keeps_state(processor, trial.ask, what=what, ruled="ids and scores")
            if keeps:
                self._keep.add(number)
                if holds_a_model(processor):
                    self._dear.add(number)
            if len(ids) > 1 and not isinstance(processor, ByRequest):
                trial.check_that_rows_are_their_own(what, questions=2 if keeps else 1)
        keep = {number: self._given[number] for number in self._keep}
        self._followed = [_Followed(keep, n) for n in self._texts.lengths()]


class _Trial:
    """Two questions to a processor: what it makes of rows now, and one token later."""

    def __init__(
        self, of: Processors, processor: Any, ids: Tensor, scores: Tensor, slots: list[_Slot]
    ) -> None:
        self.of, self.processor, self.slots = of, processor, slots
        self.ids, self.scores = ids, scores
        self.longer: Tensor | None = None

    def _call(self, processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
        return self.of._call(processor, ids, scores.clone(), self.slots).clone()

    def ask(self, processor: Any, question: int) -> Tensor:
        """Return ``[B, V]``; what stands behind the texts in question 1, the processor allows."""
        if question:
            assert self.longer is not None, "question 0 comes first"
            return self._call(processor, self.longer, self.scores.roll(1, -1))
        found = self._call(processor, self.ids, self.scores)
        if self.longer is None:
            following = self._following(found)
            goes_on = bool((found.gather(1, following) > -torch.inf).all())
            # Where a request can but end, no text is longer that it might be asked about.
            self.longer = torch.cat([self.ids, following], 1) if goes_on else self.ids
        return found

    def _following(self, found: Tensor) -> Tensor:
        """Return the likeliest token of each row that ends no request, ``[B, 1]``."""
        ends = [token for token in self.of._ends if 0 <= token < found.shape[1]]
        hidden = torch.tensor(ends, dtype=torch.int64, device=found.device)
        return found.index_fill(1, hidden, -torch.inf).argmax(-1, keepdim=True)

    def check_that_rows_are_their_own(self, what: str, questions: int) -> None:
        """Refuse a processor of which a row depends on others: in a burst they are elsewhere.

        State may carry over to the second question what others showed in the first.
        """
        batch = len(self.ids)
        rows = torch.arange(batch, device=self.ids.device)
        known = copied_or_itself(self.processor)
        expected = [self.ask(known, question) for question in range(questions)]
        for bit in range((batch - 1).bit_length()):  # any two rows differ in some bit
            for side in (0, 1):
                others = ((rows >> bit) & 1 == side)[:, None]
                try:
                    found = self._among(others, self.ids.roll(1, 0), questions)
                except Exception:  # to it, another request's text is an error
                    found = self._among(others, self.ids, questions)
                kept = ~others[:, 0]
                for before, after in zip(expected, found, strict=True):
                    if not answers_alike(before[kept], after[kept]):
                        raise Refused(
                            f"{what} makes the scores of a request depend on the other requests of "
                            "the batch, and in speculative decoding these are not at the same "
                            "place: generate for one request at a time"
                        )

    def _among(self, others: Tensor, texts: Tensor, questions: int) -> list[Tensor]:
        """Ask the questions with other texts and other scores in some rows ``[B, 1]``."""
        assert self.longer is not None, "question 0 comes first"
        trial = copied_or_itself(self.processor)
        ids = torch.where(others, texts, self.ids)
        found = []
        for scores in (self.scores, self.scores.roll(1, -1))[:questions]:
            scores = torch.where(others, scores.flip(-1), scores)
            found.append(self._call(trial, ids, scores))
            if self.longer.shape != self.ids.shape:
                allowed = torch.where(others, self._following(found[-1]), self.longer[:, -1:])
                ids = torch.cat([ids, allowed], 1)
        return found


def copied_or_itself(thing: Any) -> Any:
    """Copy an object, or return it where that cannot be done (it keeps no state then)."""
    try:
        return copied(thing)
    except Exception:
        return thing


class _Shown:
    """The ids that processors are shown in one call of `Processors._process`."""

    def __init__(self, texts: Texts, width: int, slots: list[_Slot]) -> None:
        self._ids = texts.ids(width).clone()  # [B, width]
        self._lengths = texts.lengths()
        self._paths: dict[int, tuple[int, ...]] = {}
        longest = {slot.request: slot for slot in sorted(slots, key=lambda s: len(s.path))}
        for slot in longest.values():
            self._write(slot)

    def _write(self, slot: _Slot) -> None:
        length = self._lengths[slot.request]
        path = torch.tensor(slot.path, dtype=torch.int64, device=self._ids.device)
        self._ids[slot.request, length : length + len(slot.path)] = path
        self._paths[slot.request] = slot.path

    def ids(self, slots: list[_Slot], place: int) -> Tensor:
        """Return ``[B, place]``, the paths of these slots in their requests' rows."""
        for slot in slots:
            if self._paths[slot.request][: len(slot.path)] != slot.path:
                self._write(slot)
        return self._ids[:, :place]


def _possible(slots: list[_Slot], out: Tensor, dead: set[tuple[int, int]]) -> list[_Slot]:
    """Return the slots that can be reached: every token on the way has some probability.

    What cannot be reached is not shown to processors, to whom it may be an error.
    """
    asked = [slot for slot in slots if slot.above is not None]
    if len(asked) > 1:
        at = [(slot.row, slot.above, slot.path[-1]) for slot in asked]
        scores = out[tuple(torch.tensor(at, device=out.device).T)].tolist()  # one wait for all
    else:
        scores = [out[slot.row, slot.above, slot.path[-1]].item() for slot in asked]
    for slot, score in zip(asked, scores, strict=True):
        if score == -torch.inf or (slot.row, slot.above) in dead:
            dead.add((slot.row, slot.column))
    return [slot for slot in slots if (slot.row, slot.column) not in dead]


def _one_of_each(slots: list[_Slot]) -> Iterable[list[_Slot]]:
    """Divide slots into groups with at most one of each request."""
    of: dict[int, list[_Slot]] = {}
    for slot in slots:
        of.setdefault(slot.request, []).append(slot)
    for i in range(max(map(len, of.values()), default=0)):
        yield [some[i] for some in of.values() if i < len(some)]
