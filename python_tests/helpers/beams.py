"""Beam search three ways: step by step, by `beam_verify`, and the rules that both are held to.

`plain_search` is beam search as transformers has it, written with nothing in common with the
package; `speculative_search` iterates the operator. Both keep the hypotheses that ended in `Ended`.
A *law* is a function from the tokens so far to a row of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from specdec_ext.contract import BeamVerifyResult

Tokens = tuple[int, ...]
Law = Callable[[Tokens], torch.Tensor]


class Scored(NamedTuple):
    """A hypothesis, its float32 score, and its index in the flattened table of its level."""

    tokens: Tokens
    score: float
    index: int = 0

    @property
    def order(self) -> tuple[float, int]:
        return -self.score, self.index


START = Scored((), 0.0)


def prefix_law(seed: int, vocab: int, step: float | None = None, spread: float = 2.0) -> Law:
    """Rows that depend on all tokens so far; multiples of `step`, so that many are equal."""
    rows: dict[Tokens, torch.Tensor] = {}

    def law(tokens: Tokens) -> torch.Tensor:
        if tokens not in rows:
            generator = torch.Generator().manual_seed(hash((seed, tokens)) % 2**40)
            row = torch.randn(vocab, generator=generator) * spread
            rows[tokens] = row if step is None else (row / step).round() * step
        return rows[tokens]

    return law


def mixture(first: Law, second: Law, share: float) -> Law:
    """A draft that is like the first law: its logits, mixed with the second's."""
    return lambda tokens: (1 - share) * first(tokens) + share * second(tokens)


def log_softmax(law: Law) -> Law:
    """The same rows as log-probabilities, computed once and so the same to the bit for everyone."""
    rows: dict[Tokens, torch.Tensor] = {}

    def found(tokens: Tokens) -> torch.Tensor:
        if tokens not in rows:
            rows[tokens] = torch.log_softmax(law(tokens).float(), 0)
        return rows[tokens]

    return found


@dataclass(frozen=True)
class Settings:
    """What a search is asked for."""

    width: int
    eos: tuple[int, ...]
    max_new: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass
class Ended:
    """The hypotheses that ended, and when the search does: transformers' rules."""

    settings: Settings
    kept: list[Scored] = field(default_factory=list)
    improvable: bool = True

    def is_full(self) -> bool:
        return len(self.kept) == self.settings.width

    def is_over(self) -> bool:
        return not self.improvable or (self.is_full() and self.settings.early_stopping is True)

    def penalised(self, score: float, length: int) -> float:
        divisor = torch.tensor(float(length) ** self.settings.length_penalty)
        return float(torch.tensor(score) / divisor)

    def add(self, level: int, live: list[Scored], ended: list[Scored]) -> bool:
        """Take in a level (from 1); whether the search is over."""
        s = self.settings
        if level == s.max_new:
            ended = sorted(ended + live, key=lambda h: h.order)[: s.width]
        for h in ended:
            self.kept.append(Scored(h.tokens, self.penalised(h.score, level)))
        self.kept = sorted(self.kept, key=lambda h: -h.score)[: s.width]
        if level == s.max_new:
            return True
        longest = s.early_stopping == "never" and s.length_penalty > 0
        best = self.penalised(live[0].score, s.max_new if longest else level)
        self.improvable = not self.is_full() or best > self.kept[-1].score
        return self.is_over()


def one_level(law: Law, live: list[Scored], s: Settings) -> tuple[list[Scored], list[Scored]]:
    """A level of plain beam search: live beams and hypotheses that ended."""
    offers = []
    for place, beam in enumerate(live):
        row = torch.log_softmax(law(beam.tokens).float(), 0) + torch.tensor(beam.score)
        offers += [
            Scored((*beam.tokens, t), score, place * len(row) + t)
            for t, score in enumerate(row.tolist())
        ]
    offers.sort(key=lambda offer: offer.order)
    ended = [offer for offer in offers[: s.width] if offer.tokens[-1] in s.eos]
    going_on = [offer for offer in offers if offer.tokens[-1] not in s.eos]
    return going_on[: s.width], ended


def plain_search(law: Law, s: Settings) -> Ended:
    """Beam search, a level at a time."""
    ended, live = Ended(s), [START]
    for level in range(1, s.max_new + 1):
        live, finished = one_level(law, live, s)
        if ended.add(level, live, finished):
            break
    return ended


@dataclass
class DraftTree:
    """The nodes of a draft, each the tokens that lead to it."""

    prefixes: list[Tokens]
    parents: list[int]

    @property
    def tokens(self) -> list[int]:
        return [prefix[-1] if prefix else 0 for prefix in self.prefixes]


def draft_tree(law: Law, live: list[Scored], s: Settings, beams: int, gamma: int) -> DraftTree:
    """Beam search by the draft, from the live beams; where those are few, empty ones follow."""
    prefixes = [beam.tokens for beam in live]
    parents = [-1] * s.width
    prefixes += [()] * (s.width - len(live))
    level = list(live)
    for _ in range(gamma):
        level = one_level(law, level, Settings(beams, s.eos, s.max_new))[0]
        places = {tokens: v for v, tokens in reversed(list(enumerate(prefixes))) if tokens}
        for beam in level:
            parents.append(places.get(beam.tokens[:-1], 0))
            prefixes.append(beam.tokens)
    return DraftTree(prefixes, parents)


@dataclass
class Run:
    """What a speculative search gave, and how many calls of the target decided how much."""

    ended: Ended
    levels: list[int] = field(default_factory=list)


def unpack(
    found: BeamVerifyResult, level: int, before: list[Scored], vocab: int
) -> tuple[list[Scored], list[Scored]]:
    """Live beams and finished hypotheses of a level of request 0, as tokens."""

    def read(*outputs: torch.Tensor) -> list[Scored]:
        rows = zip(*(output[0, level].tolist() for output in outputs), strict=True)
        return [
            Scored((*before[place].tokens, token), score, place * vocab + token)
            for token, place, score in rows
            if token >= 0
        ]

    return (
        read(found.tokens, found.parents, found.scores),
        read(found.finished_tokens, found.finished_parents, found.finished_scores),
    )


def speculative_search(
    verify: Callable[..., BeamVerifyResult],
    law: Law,
    draft: Law,
    s: Settings,
    beams: int,
    gamma: int,
    **options: Any,
) -> Run:
    """Beam search by the operator: a draft of `gamma` levels of `beams` for each call."""
    run = Run(Ended(s))
    live, level = [START], 0
    eos = torch.tensor(s.eos, dtype=torch.int64)
    while True:
        tree = draft_tree(draft, live, s, beams, gamma)
        scores = [beam.score for beam in live] + [-torch.inf] * (s.width - len(live))
        found = verify(
            torch.stack([law(tokens) for tokens in tree.prefixes])[None],
            torch.tensor([scores]),
            torch.tensor([tree.tokens]),
            torch.tensor([tree.parents]),
            gamma,
            eos_token_ids=eos,
            **options,
        )
        assert found.status.tolist() == [0]
        run.levels.append(int(found.num_levels))
        assert run.levels[-1] >= 1
        for k in range(run.levels[-1]):
            live, finished = unpack(found, k, live, len(law(())))
            level += 1
            if run.ended.add(level, live, finished):
                return run
