"""Chain verification where several ranks hold the vocabulary: verify.py with exchanges in between.

The kernels are those of one rank. Those that go over the vocabulary do so over the tiles that their
rank works on (`Held`, in laws.py), and what they leave of each tile is gathered before the next
launch reads it; all that decides runs on every rank, on the same numbers. What lies on one rank
alone has kernels here: values at tokens, an arg max and the last token are found by the rank that
has them and summed with the zeros of the others; selections are in cutoff_ranks.py.

Nothing here looks at a value on the device: no collective waits for the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._ops import ops
from . import guard
from .chain import target_law
from .cutoff import NO_WORK, Work
from .cutoff_ranks import Selections, narrow
from .draw import (
    draw_threshold,
    find_entry,
    find_tile,
    law_masses,
    load_task,
    needs_draw,
    residual_masses,
    residual_weights,
    total_of,
)
from .launch import Tiling, launch
from .law_pass import (
    Batch,
    Summaries,
    combined_max,
    drafted_token,
    first_equal,
    is_wanted,
    tile_of_maximum,
)
from .laws import (
    INFINITY,
    NO_LAW,
    POINT_MASS,
    Held,
    filters_at,
    is_greedy,
    log_probability,
    row_at,
    value_at,
)
from .verify import verify

#: The bits of -inf as float32: what every rank knows of a token that nobody has.
NO_VALUE = tl.constexpr(-8388608)


class Collectives(Protocol):
    """What a group of ranks can do together."""

    rank: int
    size: int

    def gather(self, mine: Tensor) -> Tensor:
        """Give every rank what each has: ``[W, n]`` of ``[n]``."""

    def total(self, mine: Tensor) -> Tensor:
        """Give every rank the sums over ranks."""


class Part(NamedTuple):
    """Rows of which each rank has some columns, as `specdec_ext.distributed` describes them."""

    rows: Tensor
    bounds: list[int]
    tail: Tensor | None


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def find_value(batch, found, of, row):
    """Write the bits of row `of` of a batch at its drafted token, less those of -inf."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    if is_wanted(batch, b, s):
        value = value_at(row_at(batch.rows, b, s), drafted_token(batch, b, s))
        tl.store(found + row, value.to(tl.int32, bitcast=True) - NO_VALUE)


@triton.jit(do_not_specialize=["first_rows"])
def find_values(first, second, found, first_rows):
    """Write the values that this rank has of the rows of two batches. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        find_value(first, found, row, row)
    if second.rows.data is not None:
        if row >= first_rows:
            find_value(second, found, row - first_rows, row)


@triton.jit
def find_argmax_of(batch, summaries, found, of, row, tiles, TILE: tl.constexpr):
    """Write the arg max of row `of` of a batch, if its request is at T = 0 and it lies here."""
    b = of // batch.rows.steps
    s = of % batch.rows.steps
    greedy = is_greedy(filters_at(batch.sampling, b, batch.rows.vocab))
    if is_wanted(batch, b, s) & greedy:
        top = combined_max(summaries, row, tiles)
        if top > -INFINITY:
            source = row_at(batch.rows, b, s)
            best = tile_of_maximum(summaries, row, tiles, top)
            if (best * TILE >= source.first) & (best * TILE < source.last):
                tl.store(found + row, first_equal(source, best, top, TILE))


@triton.jit(do_not_specialize=["first_rows", "tiles"])
def find_argmax(first, second, summaries, found, first_rows, tiles, TILE: tl.constexpr):
    """Write the arg max that this rank has of the rows of two batches. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if row < first_rows:
        find_argmax_of(first, summaries, found, row, row, tiles, TILE)
    if second.rows.data is not None:
        if second.rows.linear is None:
            if row >= first_rows:
                find_argmax_of(second, summaries, found, row - first_rows, row, tiles, TILE)


@triton.jit
def draw_here(target, draft, laws, task, law, sums, law_sums, b, tiles, TILE: tl.constexpr):
    """Draw the token of a task, as `draw_task` does; -1 where another rank has its tile."""
    source = row_at(target, b, task.row)
    residual = task.residual > 0
    own = sums + b * tiles
    if residual & (total_of(own, tiles) == 0):
        # It is empty, by rounding or because p = q: what is left is the target's own law.
        residual = task.residual < 0
        own = law_sums + b * tiles
    tile, left = find_tile(own, tiles, draw_threshold(task.u, total_of(own, tiles)))
    tile = tl.minimum(tile, tiles - 1)
    token = tl.full([], -1, tl.int64)
    if (tile * TILE >= source.first) & (tile * TILE < source.last):
        if residual:
            taken = residual_weights(target, draft, laws, b, task, law, tile, TILE)
            weights = residual_masses(task, law, taken)
        else:
            weights = law_masses(source, law, tile, TILE)
        token = find_entry(weights, source.entries, tile, left, TILE)
    return token


@triton.jit(do_not_specialize=["gamma", "tiles"])
def find_last_tokens(
    target, draft, laws, tasks, children, sums, law_sums, found, gamma, tiles,
    RACED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the last token of a request and its logit's bits, if this rank has it. Grid: requests.

    RACED: it has won a race.
    """
    b = tl.program_id(0).to(tl.int64)
    task = load_task(tasks, children, b)
    law = target_law(laws, b, task.row, gamma)
    source = row_at(target, b, task.row)
    token = tl.full([], -1, tl.int64)
    if law.kind == POINT_MASS:
        token = law.argmax
    if needs_draw(law):
        if RACED:
            token = law.extra.to(tl.int64)
        else:
            token = draw_here(target, draft, laws, task, law, sums, law_sums, b, tiles, TILE)
    if (token >= source.first) & (token < source.last):
        bits = value_at(source, token).to(tl.int32, bitcast=True)
        tl.store(found + b * 2, token)
        tl.store(found + b * 2 + 1, bits.to(tl.int64))


@triton.jit(do_not_specialize=["gamma"])
def write_last_tokens(laws, tasks, children, found, num_accepted, tokens, logprobs, gamma):
    """Write the last token of every request, once all ranks know it. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    law = target_law(laws, b, load_task(tasks, children, b).row, gamma)
    logprob = tl.full([], float("nan"), tl.float32)
    if law.kind != NO_LAW:
        value = tl.load(found + b * 2 + 1).to(tl.int32).to(tl.float32, bitcast=True)
        logprob = log_probability(law, value)
    place = b * (gamma + 1) + tl.load(num_accepted + b)
    tl.store(tokens + place, tl.load(found + b * 2))
    tl.store(logprobs + place, logprob)


# ---- exchanges ----------------------------------------------------------------------------------


def _tiles_of(bounds: list[int], tiles: Tiling) -> list[int]:
    """Give the first tile that each rank works on, and where the last rank's end."""
    return [min(-(-bound // tiles.size), tiles.number) for bound in bounds]


class Ranks:
    """The ranks that hold a call's vocabulary: what lies here, and what verify.py exchanges.

    Parameters
    ----------
    collectives : Collectives
    target : Part
    draft : Part or None
    """

    def __init__(self, collectives: Collectives, target: Part, draft: Part | None) -> None:
        self.collectives = collectives
        self.parts = (target, draft)
        self.vocab = target.bounds[-1]
        self.draft_vocab = 0 if draft is None else draft.bounds[-1]
        # The target's parts end where the draft's do, but for the last one's.
        self.bounds = [*target.bounds[:-1], max(self.vocab, self.draft_vocab)]

    # ---- what lies here

    def hold(self, tiles: Tiling, target: Batch, draft: Batch) -> tuple[Batch, Batch]:
        """Tell the rows of two batches which of their tiles this rank works on."""
        first, last = _tiles_of(self.bounds, tiles)[self.collectives.rank :][:2]
        held = []
        for batch, part in zip((target, draft), self.parts, strict=True):
            if part is None or batch.rows.data is None:
                held.append(batch)
                continue
            begin, end = part.bounds[self.collectives.rank :][:2]
            tail = batch.rows.data if part.tail is None else part.tail
            here = Held(
                begin,
                first * tiles.size,
                last * tiles.size,
                tail,
                last * tiles.size if part.tail is None else end // tiles.size * tiles.size,
                tail.stride(0) if tail.dim() == 3 else 0,
                tail.stride(-2),
            )
            held.append(batch._replace(rows=batch.rows._replace(held=here)))
        return held[0], held[1]

    # ---- what is exchanged

    def total(self, mine: Tensor) -> Tensor:
        """Sum integers over ranks."""
        return self.collectives.total(mine) if mine.numel() > 0 else mine

    def share(self, tiles: Tiling, *values: Tensor) -> None:
        """Complete tensors ``[n, tiles, ...]``, of which this rank has filled its own tiles."""
        values = tuple(value for value in values if value.numel() > 0)
        if not values:
            return
        starts = _tiles_of(self.bounds, tiles)
        counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        rank, most = self.collectives.rank, max(counts)
        packed = []
        for value in values:
            mine = value.new_zeros((value.shape[0], most, *value.shape[2:]))
            mine[:, : counts[rank]] = value[:, starts[rank] : starts[rank + 1]]
            packed.append(mine.view(-1).view(torch.uint8))
        gathered = self.collectives.gather(torch.cat(packed))
        pieces = gathered.split([piece.numel() for piece in packed], 1)
        for value, piece in zip(values, pieces, strict=True):
            shape = (self.collectives.size, value.shape[0], most, *value.shape[2:])
            aligned = piece.clone(memory_format=torch.contiguous_format)
            theirs = aligned.view(value.dtype).view(shape)
            torch.cat([theirs[r, :, :n] for r, n in enumerate(counts)], 1, out=value)

    # ---- what compute_laws asks for

    def values(self, first: Batch, first_rows: int, second: Batch, second_rows: int) -> list[Batch]:
        """Give batches the values at their drafted tokens."""
        found = first.rows.data.new_zeros(first_rows + second_rows, dtype=torch.int32)
        launch(find_values, found.numel(), first, second, found, first_rows, num_warps=1)
        values = (self.total(found) + NO_VALUE.value).view(torch.float32)
        own = values.split([first_rows, second_rows])
        given = zip((first, second), own, strict=True)
        return [batch._replace(drafted=v) if v.numel() else batch for batch, v in given]

    def narrow(
        self,
        tiles: Tiling,
        first: Batch,
        second: Batch,
        first_rows: int,
        summaries: Summaries,
        work: Work,
        extra: Any,
    ) -> Work:
        """Find the cutoffs of rows with filters."""
        selections = Selections(self.total, first, second, first_rows, summaries, work)
        cutoffs, kept = narrow(selections, tiles.size, extra)
        return work._replace(cutoffs=cutoffs, kept=kept)

    def argmax(
        self,
        tiles: Tiling,
        first: Batch,
        second: Batch,
        first_rows: int,
        summaries: Summaries,
        work: Work = NO_WORK,
    ) -> Work:
        """Find the arg max of the rows of requests at T = 0, where there may be any."""
        samplings = (first.sampling, second.sampling)
        if all(s.greedy is None and s.temperature is None for s in samplings):
            # Nobody reads it, but kernels must not look for it in a row.
            return work._replace(argmax=first.rows.data.new_empty(1, dtype=torch.int64))
        rows = summaries.max.shape[0]
        found = first.rows.data.new_zeros(rows, dtype=torch.int64)
        sources = (first, second, summaries, found, first_rows, tiles.number)
        launch(find_argmax, rows, *sources, TILE=tiles.size, num_warps=8)
        return work._replace(argmax=self.total(found))

    # ---- what draw_tokens asks for

    def draw(
        self,
        sources: tuple[Any, ...],
        sums: tuple[Tensor | None, ...],
        outputs: Any,
        gamma: int,
        tiles: Tiling,
        raced: bool,
    ) -> None:
        """Find the last token of every request, and write it."""
        batch = outputs.num_accepted.shape[0]
        found = outputs.tokens.new_zeros((batch, 2))
        launch(
            find_last_tokens,
            batch,
            *(*sources, *sums, found, gamma, tiles.number),
            RACED=raced,
            TILE=tiles.size,
            num_warps=8,
        )
        launch(
            write_last_tokens,
            batch,
            *(*sources[2:], self.total(found)),
            *(outputs.num_accepted, outputs.tokens, outputs.logprobs, gamma),
            num_warps=1,
        )


# ---- the call -----------------------------------------------------------------------------------


def _whole(rows: Tensor, vocab: int) -> Tensor:
    """Stand for whole rows where only shapes are looked at: all of them are one, never written."""
    return rows.new_empty(max(vocab, 1)).expand(*rows.shape[:-1], max(vocab, 1))


def verify_parts(
    collectives: Collectives, arguments: dict[str, Any], target: Part, draft: Part | None
) -> tuple[Tensor, ...]:
    """Run `specdec_ext.verify` on ranks that each hold a part of the vocabulary.

    Parameters
    ----------
    collectives : Collectives
        On tensors of the device that the rows are on.
    arguments : dict
        Of the operator `verify`, the same on every rank but for the rows, of which each has its
        columns (at least one: none of an empty part's is read).
    target, draft : Part
        Those rows, and how they are split; tiles of 4,096 that a border cuts are with their first
        rank.

    Returns
    -------
    tuple of Tensor
        As of the operator.
    """
    named = "draft_logits" if arguments["draft_logits"] is not None else "draft_probs"
    whole = {"target_logits": _whole(target.rows, target.bounds[-1])}
    if draft is not None:
        whole[named] = _whole(draft.rows, draft.bounds[-1])
    outputs = ops._prepare_verify(**{**arguments, **whole})
    with guard(target.rows.device):
        verify(outputs, SimpleNamespace(**arguments), Ranks(collectives, target, draft))
    results: tuple[Tensor, ...] = outputs
    return results
