"""`beam_verify`: levels of a beam search by the target, as far as a tree of rows decides them.

Nodes 0 .. W - 1 are the live beams, the others draft tokens behind their parents. A beam offers
every token, with its own score plus the token's log-probability. The best W offers that are no EOS
token are the next live beams; one that is not in the tree is *missing*: its row is not known, and
the next level is decided only if no offer of a missing beam can matter (docs/design.md,
"Beam search").

Scores are float32, computed as transformers computes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import (
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    BeamVerifyResult,
)
from .laws import INF

__all__ = ["beam_verify"]

MISSING = -1


class Beam(NamedTuple):
    """A live beam: its score, and its node or `MISSING`."""

    score: float
    node: int


class Offer(NamedTuple):
    """What a beam may become: one more token behind the beam at a place."""

    score: float
    place: int
    token: int


class Level(NamedTuple):
    """A decided level: the live beams after it, and the hypotheses that ended in it."""

    live: list[Offer]
    finished: list[Offer]


class Tree:
    """The draft tokens of one request below its `width` beams."""

    def __init__(self, tokens: list[int], parents: list[int], width: int, vocab: int) -> None:
        self.status = 0
        roots, below = parents[:width], parents[width:]
        self.children: dict[tuple[int, int], int] = {}
        legal = all(-1 <= parent < width + i for i, parent in enumerate(below))
        if not legal or any(parent != -1 for parent in roots):
            self.status = STATUS_INVALID_TREE
            return
        for v, (parent, token) in enumerate(zip(below, tokens[width:], strict=True), width):
            if parent == -1:
                continue
            if 0 <= token < vocab:
                self.children.setdefault((parent, token), v)
            elif token != -1:
                self.status = STATUS_INVALID_DRAFT_TOKEN

    def child(self, node: int, token: int) -> int:
        return self.children.get((node, token), MISSING)


def has_law(row: Tensor) -> bool:
    """Whether a row has neither NaN nor +inf, and something but -inf."""
    return bool((row < INF).all()) and float(row.max()) > -INF


def scores_of(row: Tensor, score: float, log_probs: bool) -> Tensor:
    """Score what a beam offers, ``[V]`` float32."""
    row = row.float()
    return (row if log_probs else torch.log_softmax(row, 0)) + score


def in_order(table: Tensor) -> Tensor:
    """Sort the entries of ``[places, V]``, flattened: the best first, the lowest of equal ones."""
    return table.flatten().sort(descending=True, stable=True).indices


def best_offers(rows: dict[int, Tensor], width: int, eos: set[int]) -> Level:
    """Choose among what the beams at some places offer, ``[V]`` scores each."""
    places, table = list(rows), torch.stack(list(rows.values()))
    vocab = table.shape[1]
    level = Level([], [])
    for rank, index in enumerate(in_order(table).tolist()):
        score = float(table.flatten()[index])
        offer = Offer(score, places[index // vocab], index % vocab)
        if score == -INF or len(level.live) == width:
            break
        if offer.token not in eos:
            level.live.append(offer)
        elif rank < width:
            level.finished.append(offer)
    return level


def is_decided(level: Level, missing: list[float], width: int) -> bool:
    """Whether no offer of missing beams of these scores could be among the best `width`."""
    if not missing:
        return True
    return len(level.live) == width and level.live[-1].score > max(missing)


class _Request:
    """One request: its rows, its tree and what holds for all levels."""

    def __init__(
        self, rows: Tensor, tree: Tree, width: int, eos: set[int], rule: str, log_probs: bool
    ) -> None:
        self.rows, self.tree, self.width, self.eos = rows, tree, width, eos
        self.rule, self.log_probs = rule, log_probs
        self.status = tree.status

    def next_level(self, beams: list[Beam]) -> Level | None:
        """Decide a level; None if there is nothing to decide, or no way to."""
        live = {place: beam for place, beam in enumerate(beams) if beam.score > -INF}
        known = {place: beam for place, beam in live.items() if beam.node != MISSING}
        missing = [beam.score for beam in live.values() if beam.node == MISSING]
        if not known or (missing and self.rule == "subset"):
            return None
        if not all(has_law(self.rows[beam.node]) for beam in known.values()):
            self.status |= STATUS_NO_TARGET_LAW
            return None
        offers = {
            place: scores_of(self.rows[beam.node], beam.score, self.log_probs)
            for place, beam in known.items()
        }
        level = best_offers(offers, self.width, self.eos)
        return level if is_decided(level, missing, self.width) else None

    def after(self, beams: list[Beam], level: Level) -> list[Beam]:
        """Find the live beams of a level in the tree."""
        return [
            Beam(offer.score, self.tree.child(beams[offer.place].node, offer.token))
            for offer in level.live
        ]


@torch.no_grad()
def beam_verify(
    target_logits: Tensor,
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    gamma: int,
    *,
    eos_token_ids: Tensor | None = None,
    rule: str = "bound",
    log_probs: bool = False,
) -> BeamVerifyResult:
    """Levels of a beam search; see `specdec_ext.beam_verify`."""
    batch, width = scores.shape
    vocab = target_logits.shape[2]
    eos = set() if eos_token_ids is None else set(eos_token_ids.tolist())
    whole = (batch, gamma + 1, width)
    ids = [torch.full(whole, -1, dtype=torch.int64) for _ in range(5)]
    found_scores, finished_scores = (torch.full(whole, -INF) for _ in range(2))
    found_tokens, found_parents, found_nodes, finished_tokens, finished_parents = ids
    num_levels = torch.zeros(batch, dtype=torch.int32)
    status = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        tree = Tree(tokens[b].tolist(), parents[b].tolist(), width, vocab)
        request = _Request(target_logits[b].cpu(), tree, width, eos, rule, log_probs)
        beams = [Beam(score, node) for node, score in enumerate(scores[b].tolist())]
        if any(not beam.score < INF for beam in beams):
            request.status |= STATUS_PARAMETER_OUT_OF_RANGE
            beams = [beam if beam.score < INF else Beam(-INF, beam.node) for beam in beams]
        for k in range(gamma + 1):
            level = request.next_level(beams)
            if level is None:
                break
            beams = request.after(beams, level)
            for j, (offer, beam) in enumerate(zip(level.live, beams, strict=True)):
                found_tokens[b, k, j], found_parents[b, k, j] = offer.token, offer.place
                found_scores[b, k, j], found_nodes[b, k, j] = offer.score, beam.node
            for j, offer in enumerate(level.finished):
                finished_tokens[b, k, j], finished_parents[b, k, j] = offer.token, offer.place
                finished_scores[b, k, j] = offer.score
            num_levels[b] = k + 1
        status[b] = request.status
    results = (*ids[:3], found_scores, *ids[3:], finished_scores, num_levels, status)
    return BeamVerifyResult(*(t.to(target_logits.device) for t in results))
