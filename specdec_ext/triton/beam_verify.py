"""beam_verify: levels of beam search by the target, as far as the rows of a tree decide them.

Grid: the laws of all rows first (law_pass.py); then for each level a program a beam, which chooses
its offers, and a program a request, which decides the level. Nothing waits for the host, so there
are as many launches as levels could be decided; programs of beams that are no more return at once.
Reads every row once for its law, and those of live beams once more, 2 or 4 bytes an entry. Writes
16 bytes for each offer that is chosen, 48 for each beam of a level. Numerics: law_pass.py; scores
in float32, operation by operation those of csrc/core/beam.h.

The live beams after a level are read from its outputs: a level that is not decided leaves none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import (
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
)
from .launch import batch_of, compute_laws, launch, rows_of, stride_of, tiling
from .laws import INFINITY, NO_LAW, NO_SAMPLING, load_law, load_laws, load_tile, row_at, value_at

INVALID_DRAFT_TOKEN = tl.constexpr(STATUS_INVALID_DRAFT_TOKEN)
INVALID_TREE = tl.constexpr(STATUS_INVALID_TREE)
NO_TARGET_LAW = tl.constexpr(STATUS_NO_TARGET_LAW)
PARAMETER_OUT_OF_RANGE = tl.constexpr(STATUS_PARAMETER_OUT_OF_RANGE)

#: Above every token, node and index of the flattened table.
NONE = tl.constexpr(1 << 60)


class Tree(NamedTuple):
    """Nodes [B, N] of requests, the first `width` of them their beams."""

    tokens: Any
    tokens_stride_b: Any
    tokens_stride_n: Any
    parents: Any
    parents_stride_b: Any
    parents_stride_n: Any
    nodes: Any
    width: Any
    vocab: Any


class Ends(NamedTuple):
    """EOS tokens [E]."""

    tokens: Any
    stride: Any
    number: Any


class Beams(NamedTuple):
    """The live beams of a level, [B, W] each: scores, -inf where there is none, and nodes or -1."""

    scores: Any
    nodes: Any
    stride_b: Any


class Offers(NamedTuple):
    """What each beam offers: [B, W, WIDTH] tokens that do not end, and [B, W, ENDS] that do."""

    scores: Any
    tokens: Any
    end_scores: Any


class Level(NamedTuple):
    """Outputs of a level, [B, W] each at one stride between requests."""

    tokens: Any
    parents: Any
    nodes: Any
    scores: Any
    finished_tokens: Any
    finished_parents: Any
    finished_scores: Any
    stride_b: Any


@triton.jit
def begin_search(
    given, stride_b, stride_w, tree, beams, status, NODES: tl.constexpr, WIDTH: tl.constexpr
):
    """Check tree and scores, and write the first beams. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES).to(tl.int64)
    inside = node < tree.nodes
    parents = tree.parents + b * tree.parents_stride_b + node * tree.parents_stride_n
    parent = tl.load(parents, mask=inside, other=-1).to(tl.int64)
    tokens = tree.tokens + b * tree.tokens_stride_b + node * tree.tokens_stride_n
    token = tl.load(tokens, mask=inside, other=-1).to(tl.int64)
    illegal = tl.where(node < tree.width, parent != -1, (parent < -1) | (parent >= node)) & inside
    unknown = inside & (parent >= 0) & ((token < -1) | (token >= tree.vocab))
    found = tl.where(tl.max(unknown.to(tl.int32), 0) != 0, INVALID_DRAFT_TOKEN, 0)
    found = tl.where(tl.max(illegal.to(tl.int32), 0) != 0, INVALID_TREE, found)
    place = tl.arange(0, WIDTH).to(tl.int64)
    there = place < tree.width
    score = tl.load(given + b * stride_b + place * stride_w, mask=there, other=-INFINITY)
    usable = score < INFINITY
    wrong = tl.max((usable == 0).to(tl.int32), 0)
    tl.store(status + b, found | tl.where(wrong != 0, PARAMETER_OUT_OF_RANGE, 0))
    at = b * beams.stride_b + place
    tl.store(beams.scores + at, tl.where(usable, score, -INFINITY), mask=there)
    tl.store(beams.nodes + at, place, mask=there)


@triton.jit
def is_end(ends, token):
    """Whether tokens end a hypothesis."""
    found = token < 0
    for j in range(0, ends.number):
        found = found | (token == tl.load(ends.tokens + j * ends.stride).to(tl.int64))
    return found


@triton.jit
def score_of(x, top, log_z, score):
    """Score of an offer, each step rounded to float32."""
    return ((x - top) - log_z) + score


@triton.jit(do_not_specialize=["tiles"])
def choose_offers(
    rows, laws, tree, ends, beams, offers, tiles,
    TILE: tl.constexpr, WIDTH: tl.constexpr, ENDS: tl.constexpr, LOG_PROBS: tl.constexpr,
):  # fmt: skip
    """Choose the best offers of a live beam, in no order. Grid: requests x places."""
    program = tl.program_id(0).to(tl.int64)
    b = program // tree.width
    at = b * beams.stride_b + program % tree.width
    score = tl.load(beams.scores + at)
    node = tl.load(beams.nodes + at)
    slot = tl.arange(0, WIDTH).to(tl.int64)
    best = tl.full([WIDTH], -INFINITY, tl.float32)
    chosen = NONE + slot
    end = tl.arange(0, ENDS).to(tl.int64)
    end_scores = tl.full([ENDS], -INFINITY, tl.float32)
    if (score > -INFINITY) & (node >= 0):
        law = load_law(laws, b * tree.nodes + node)
        if law.kind != NO_LAW:
            source = row_at(rows, b, node)
            top = law.max
            log_z = tl.log(law.z).to(tl.float32)
            if LOG_PROBS:
                top = top * 0.0
                log_z = log_z * 0.0
            for tile in range(0, tiles):
                x = load_tile(source, tile, -INFINITY, TILE)
                token = tile * TILE + tl.arange(0, TILE).to(tl.int64)
                value = score_of(x, top, log_z, score)
                value = tl.where(is_end(ends, token), -INFINITY, value)
                worst = tl.min(best, 0)
                most = tl.max(value, 0)
                # Later tokens of the same score lose, and so does the last one of those chosen.
                while most > worst:
                    first = tl.min(tl.where(value == most, token, NONE), 0)
                    last = tl.max(tl.where(best == worst, chosen, -1), 0)
                    replaced = chosen == last
                    best = tl.where(replaced, most, best)
                    chosen = tl.where(replaced, first, chosen)
                    value = tl.where(token == first, -INFINITY, value)
                    worst = tl.min(best, 0)
                    most = tl.max(value, 0)
            ids = tl.load(ends.tokens + end * ends.stride, mask=end < ends.number, other=-1)
            x = value_at(source, ids.to(tl.int64))
            end_scores = score_of(x, top, log_z, score)
    tl.store(offers.scores + program * WIDTH + slot, best)
    tl.store(offers.tokens + program * WIDTH + slot, chosen)
    tl.store(offers.end_scores + program * ENDS + end, end_scores)


@triton.jit
def take_best(values, keys):
    """Find the highest score, the lowest key that has it, and what is left without that key."""
    most = tl.max(values, 0)
    first = tl.min(tl.where(values == most, keys, NONE), 0)
    return most, first, tl.where(keys == first, -INFINITY, values)


@triton.jit
def child_of(tree, b, parent, token, NODES: tl.constexpr):
    """Find the lowest child of a node that has a token; -1 if there is none."""
    node = tl.arange(0, NODES).to(tl.int64)
    drafted = (node >= tree.width) & (node < tree.nodes)
    parents = tree.parents + b * tree.parents_stride_b + node * tree.parents_stride_n
    tokens = tree.tokens + b * tree.tokens_stride_b + node * tree.tokens_stride_n
    fits = drafted & (tl.load(parents, mask=drafted, other=-1).to(tl.int64) == parent)
    fits = fits & (tl.load(tokens, mask=drafted, other=-1).to(tl.int64) == token)
    found = tl.min(tl.where(fits, node, NONE), 0)
    return tl.where(found < NONE, found, -1)


@triton.jit
def write_live(
    tree, b, beams, scores, keys, level, status,
    NODES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the live beams after a level, given in order, and where they lie in the tree."""
    place = tl.arange(0, WIDTH).to(tl.int64)
    there = scores > -INFINITY
    parent = tl.where(there, keys // tree.vocab, 0)
    token = tl.where(there, keys % tree.vocab, -1)
    before = tl.load(beams.nodes + b * beams.stride_b + parent, mask=there, other=-1)
    nodes = tl.full([WIDTH], -1, tl.int64)
    if (tl.load(status + b) & INVALID_TREE) == 0:
        for rank in range(0, tree.width):
            own = place == rank
            of = tl.max(tl.where(own & there, before, -1), 0)
            by = tl.max(tl.where(own & there, token, -1), 0)
            child = child_of(tree, b, tl.where(of < 0, NONE, of), by, NODES)
            nodes = tl.where(own & there, child, nodes)
    at = b * level.stride_b + place
    tl.store(level.tokens + at, token, mask=there)
    tl.store(level.parents + at, parent, mask=there)
    tl.store(level.nodes + at, nodes, mask=there)
    tl.store(level.scores + at, scores, mask=there)


@triton.jit
def write_finished(
    tree, ends, b, scores, keys, offers, level,
    WIDTH: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Write the hypotheses that end among the best of all; the live ones are given in order."""
    index = tl.arange(0, WIDTH * ENDS).to(tl.int64)
    place = index // ENDS
    end = index % ENDS
    there = (place < tree.width) & (end < ends.number)
    token = tl.load(ends.tokens + end * ends.stride, mask=there, other=-1).to(tl.int64)
    at = (b * tree.width + place) * ENDS + end
    values = tl.load(offers.end_scores + at, mask=there, other=-INFINITY)
    own = tl.where(there, place * tree.vocab + token, NONE + index)
    for rank in range(0, tree.width):
        most, first, values = take_best(values, own)
        before = (scores > most) | ((scores == most) & (keys < first))
        ahead = tl.sum(before.to(tl.int32), 0) + rank
        ended = (most > -INFINITY) & (ahead < tree.width)
        out = b * level.stride_b + rank
        tl.store(level.finished_tokens + out, first % tree.vocab, mask=ended)
        tl.store(level.finished_parents + out, first // tree.vocab, mask=ended)
        tl.store(level.finished_scores + out, most, mask=ended)


@triton.jit(do_not_specialize=["number"])
def decide_level(
    laws, tree, ends, beams, offers, level, num_levels, status, number,
    NODES: tl.constexpr, WIDTH: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Decide level `number` (from 1) if it can be. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH).to(tl.int64)
    inside = place < tree.width
    score = tl.load(beams.scores + b * beams.stride_b + place, mask=inside, other=-INFINITY)
    node = tl.load(beams.nodes + b * beams.stride_b + place, mask=inside, other=-1)
    known = (score > -INFINITY) & (node >= 0)
    missing = tl.max(tl.where((score > -INFINITY) & (node < 0), score, -INFINITY), 0)
    looked_at = tl.max(known.to(tl.int32), 0) != 0
    if not BOUND:
        looked_at = looked_at & (missing == -INFINITY)
    if looked_at:
        rows = load_laws(laws, b * tree.nodes + tl.where(known, node, 0), known)
        lawless = tl.max((known & (rows.kind == NO_LAW)).to(tl.int32), 0)
        index = tl.arange(0, WIDTH * WIDTH).to(tl.int64)
        of = index // WIDTH
        there = of < tree.width
        at = b * tree.width * WIDTH + index
        values = tl.load(offers.scores + at, mask=there, other=-INFINITY)
        tokens = tl.load(offers.tokens + at, mask=there, other=0)
        own = tl.where(values > -INFINITY, of * tree.vocab + tokens, NONE + index)
        scores = tl.full([WIDTH], -INFINITY, tl.float32)
        keys = NONE + place
        for rank in range(0, tree.width):
            most, first, values = take_best(values, own)
            scores = tl.where(place == rank, most, scores)
            keys = tl.where(place == rank, first, keys)
        lowest = tl.min(tl.where(inside, scores, INFINITY), 0)
        if lawless != 0:
            tl.store(status + b, tl.load(status + b) | NO_TARGET_LAW)
        elif (missing == -INFINITY) | (lowest > missing):
            write_live(tree, b, beams, scores, keys, level, status, NODES, WIDTH)
            write_finished(tree, ends, b, scores, keys, offers, level, WIDTH, ENDS)
            tl.store(num_levels + b, number)


def beam_verify(outputs: tuple[Tensor, ...], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.beam_verify`."""
    *by_level, num_levels, status = outputs
    batch, levels, width = by_level[0].shape
    nodes, vocab = call.target_logits.shape[1:]
    for output in by_level:
        output.fill_(-torch.inf if output.is_floating_point() else -1)
    num_levels.zero_()
    ids = [(t, stride_of(t), stride_of(t, 1)) for t in (call.tokens, call.parents)]
    tree = Tree(*ids[0], *ids[1], nodes, width, vocab)
    eos = call.eos_token_ids
    ends = Ends(call.tokens, 0, 0) if eos is None else Ends(eos, eos.stride(0), eos.shape[0])
    sizes = dict(WIDTH=triton.next_power_of_2(width), NODES=triton.next_power_of_2(nodes))
    widths = dict(WIDTH=sizes["WIDTH"], ENDS=triton.next_power_of_2(max(ends.number, 1)))
    new = call.target_logits.new_empty
    beams = Beams(
        new((batch, width), dtype=torch.float32), new((batch, width), dtype=torch.int64), width
    )
    launch(begin_search, batch, call.scores, *call.scores.stride(), tree, beams, status, **sizes)
    tiles = tiling(vocab)
    rows = rows_of(call.target_logits)
    laws = compute_laws(tiles, batch_of(rows, NO_SAMPLING), batch * nodes)
    offers = Offers(
        new((batch, width, widths["WIDTH"]), dtype=torch.float32),
        new((batch, width, widths["WIDTH"]), dtype=torch.int64),
        new((batch, width, widths["ENDS"]), dtype=torch.float32),
    )
    for k in range(levels):
        level = Level._make([*(output[:, k] for output in by_level), levels * width])
        launch(
            choose_offers,
            batch * width,
            *(rows, laws, tree, ends, beams, offers, tiles.number),
            TILE=tiles.size,
            LOG_PROBS=call.log_probs,
            **widths,
        )
        launch(
            decide_level,
            batch,
            *(laws, tree, ends, beams, offers, level, num_levels, status, k + 1),
            NODES=sizes["NODES"],
            BOUND=call.rule == "bound",
            **widths,
        )
        beams = Beams(level.scores, level.nodes, level.stride_b)
