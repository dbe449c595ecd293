"""Beam search as transformers has it: what is asked for, and what is kept of decided levels.

`specdec_ext.beam_verify` decides levels: live beams, and the hypotheses that ended in each. The
rest of a search is here, request by request and on the host: length penalties, which hypotheses
are kept, and when a search is over. All of it looks at decided levels only, and does with them
what transformers 5.23 does (``_update_finished_beams``, ``_check_early_stop_heuristic``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import arguments
from .checks import flag, integer, items, number, number_in, shown
from .evidence import name_of
from .matchers import is_grammar_processor
from .policies import FixedGamma, GammaPolicy, as_policy

__all__ = ["BeamOptions", "Hypothesis", "Level", "Search", "beam_options", "check_unsampled"]

NO_HYPOTHESIS = -1e9  # the score that transformers gives to places without one
MOST_BEAMS = 64  # of `specdec_ext.beam_verify`
MOST_NODES = 1024

#: Arguments of `generate` that beam search has no use for.
OTHERS = (
    "top_k", "top_p", "min_p", "draft_temperature", "draft_top_k", "draft_top_p", "draft_min_p",
    "tree", "rule", "raw_logprobs", "stop_sequences", "stop_strings", "stopping_criteria",
    "static_cache", "measure_alpha",
)  # fmt: skip


@dataclass(frozen=True)
class BeamOptions:
    """What a beam search is asked for; `specdec_ext.generate` says what each means.

    Attributes
    ----------
    width : int
        Live beams, ``num_beams``.
    draft_width : int
        The draft's, ``draft_beams``.
    policy : GammaPolicy
        Says how many levels the draft searches ahead.
    length_penalty : float
        Exponent of the length by which scores are divided.
    early_stopping : bool or "never"
        When a search is over.
    returned : int
        Hypotheses of each request, ``num_return_sequences``.
    """

    width: int
    draft_width: int
    policy: GammaPolicy
    length_penalty: float
    early_stopping: bool | str
    returned: int


def beam_options(given: Any) -> BeamOptions | None:
    """Check the arguments of `generate` that are about beams; None: it is asked for no beams.

    Raises
    ------
    TypeError
        An argument of another kind.
    ValueError
        One out of range, or one that beam search has no use for.
    """
    width = integer("generate: num_beams", given.num_beams, 1, MOST_BEAMS)
    # So that no length to this power is more than a float holds.
    penalty = number_in("generate: length_penalty", given.length_penalty, -50, 50)
    returned = given.num_return_sequences
    returned = 1 if returned is None else integer("generate: num_return_sequences", returned, 1)
    stopping = given.early_stopping
    if stopping != "never" or not isinstance(stopping, str):
        stopping = flag('generate: early_stopping (where it is not "never")', stopping)
    if width == 1 and given.draft_beams is None:
        if penalty != 1.0 or stopping is not False:
            raise ValueError(
                "generate: length_penalty and early_stopping are of beam search; num_beams must be "
                "above 1 where they are given, got 1"
            )
        return None
    if returned > width:
        raise ValueError(
            f"generate: num_return_sequences must be at most num_beams, {width}, got {returned}"
        )
    draft_width = width
    if given.draft_beams is not None:
        draft_width = integer("generate: draft_beams", given.draft_beams, width)
    _refuse_others(given)
    _refuse_grammars(given)
    policy = _policy(given, width, draft_width)
    # With one beam, transformers and `generate` decode greedily: the first end token is the end.
    stopping = True if width == 1 else stopping
    return BeamOptions(width, draft_width, policy, penalty, stopping, returned)


def _refuse_others(given: Any) -> None:
    """Refuse what beam search would have to ignore."""
    for name in OTHERS:
        value = getattr(given, name)
        if value is not None and value is not False and items(value) != []:
            raise ValueError(
                f"generate: {name} must be left out of a beam search (num_beams, draft_beams), got "
                f"{shown(value)}"
            )


def _refuse_grammars(given: Any) -> None:
    """Refuse grammars: beams of a request are several texts, and a matcher follows one."""
    processors = arguments.callables("logits_processor", given.logits_processor)
    named = ["grammar"] if given.grammar is not None else []
    named += [f"logits_processor {name_of(p)}" for p in processors if is_grammar_processor(p)]
    if named:
        raise ValueError(
            f"generate: {named[0]} must be left out of a beam search (num_beams, draft_beams): a "
            "matcher follows one text, and beams are several, which branch"
        )


def _policy(given: Any, width: int, draft_width: int) -> GammaPolicy:
    """Return what says how far the draft searches ahead; refuse more nodes than are verified."""
    policy = as_policy("generate: gamma", given.gamma)
    if given.draft is None:
        return FixedGamma(0)
    nodes = width + draft_width * policy.limit
    if nodes > MOST_NODES:
        raise ValueError(
            f"generate: num_beams + gamma * draft_beams must be at most {MOST_NODES}, got {nodes} "
            f"with a gamma of up to {policy.limit}"
        )
    return policy


def check_unsampled(temperature: Any, batch: int) -> None:
    """Refuse any temperature but 0, of all ``batch`` requests or of each."""
    given = arguments.per_request("temperature", temperature, batch, number, "a number")
    if any(given):
        raise ValueError(
            "generate: temperature must be 0 in a beam search, which samples nothing, got "
            f"{next(filter(None, given))}"
        )


class Hypothesis(NamedTuple):
    """A text that ended: its new tokens, and its score with the length penalty."""

    tokens: list[int]
    score: float


class Level(NamedTuple):
    """A level as `specdec_ext.beam_verify` decided it, of one request: lists ``[W]``, -1 for none.

    Attributes
    ----------
    tokens, parents : list of int
        Each live beam's last token, and the place of the beam before it.
    scores : list of float
        Its score.
    finished_tokens, finished_parents, finished_scores
        The same of the hypotheses that ended.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    finished_tokens: list[int]
    finished_parents: list[int]
    finished_scores: list[float]


class _Offer(NamedTuple):
    """A beam that goes on by a token, or ends with it."""

    token: int
    place: int
    score: float


class Search:
    """One request's search: its live beams and the hypotheses that are kept.

    Parameters
    ----------
    options : BeamOptions
        What is asked for.
    limit : int
        New tokens at most.

    Attributes
    ----------
    live : list of list of int
        The new tokens of each live beam, best first.
    levels : int
        How many were decided: each live beam has as many new tokens.
    kept : list of Hypothesis
        At most W, best first.
    over : bool
        Whether nothing can change `kept` any more.
    """

    def __init__(self, options: BeamOptions, limit: int) -> None:
        self.options, self.limit = options, limit
        self.live: list[list[int]] = [[]]
        self.levels = 0
        self.kept: list[Hypothesis] = []
        self.over = limit == 0

    def take(self, level: Level) -> None:
        """Go on by a decided level."""
        live = _offers(level.tokens, level.parents, level.scores)
        ended = _offers(level.finished_tokens, level.finished_parents, level.finished_scores)
        self.levels += 1
        if self.levels == self.limit:  # all of the best W end, whatever their tokens
            ended = sorted(live + ended, key=lambda o: (-o.score, o.place, o.token))
            ended = ended[: self.options.width]
        found = [
            Hypothesis([*self.live[offer.place], offer.token], self._penalised(offer.score))
            for offer in ended
        ]
        # Of equal scores the one that came first is kept (`sorted` is stable).
        kept = sorted(self.kept + found, key=lambda h: -h.score)
        self.kept = kept[: self.options.width]
        self.live = [[*self.live[offer.place], offer.token] for offer in live]
        self.over = self.levels == self.limit or not live or self._is_settled(live[0].score)

    def _is_settled(self, best: float) -> bool:
        """Whether the search ends here, where the best live beam has this score."""
        options = self.options
        if len(self.kept) < options.width:
            return False
        if options.early_stopping is True:
            return True
        to_the_limit = options.early_stopping == "never" and options.length_penalty > 0
        possible = self._penalised(best, self.limit if to_the_limit else self.levels)
        return not possible > self.kept[-1].score

    def _penalised(self, score: float, length: int | None = None) -> float:
        """Divide a score by a power of the length, in float32 as transformers does."""
        divisor = (self.levels if length is None else length) ** self.options.length_penalty
        return float(torch.tensor(score, dtype=torch.float32) / divisor)

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses asked for; where there are fewer, the others have no tokens."""
        missing = [Hypothesis([], NO_HYPOTHESIS)] * self.options.returned
        return (self.kept + missing)[: self.options.returned]


def _offers(tokens: list[int], places: list[int], scores: list[float]) -> list[_Offer]:
    rows = zip(tokens, places, scores, strict=True)
    return [_Offer(*row) for row in rows if row[0] >= 0]
