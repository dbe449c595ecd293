"""Chain verification: laws of all rows, the rule, then the last draw of every request.

Launches: the laws (2, with filters 4), the rule (1; block 3, coupled 3), the draws (2; coupled 1;
raw log-probabilities 3 more), and the map of a reduced draft vocabulary (1 and two fills). Traffic:
draft and target rows for the laws, a rejected token's two rows once more for its residual, or an
accepted draft's last row; block: see verify_block.py, coupled: race.py. Workspace is
O(rows x tiles), and of a map O(V).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import RULES
from .chain import COLUMNS, Chain, Laws, Outputs, target_law
from .draw import (
    NO_CHILDREN,
    TASK_FIELDS,
    Children,
    draw_from_law,
    draw_threshold,
    find_entry,
    find_tile,
    load_task,
    needs_draw,
    residual_masses,
    residual_weights,
    sum_law,
    total_of,
)
from .launch import (
    Tiling,
    batch_of,
    coins_of,
    compute_laws,
    launch,
    mask_of,
    rows_of,
    sampling_of,
    stride_of,
    tiling,
)
from .law_pass import ENTROPY, NO_BATCH, NOTHING, RANK, Batch, is_given
from .laws import (
    ALL_GREEDY,
    NO_LAW,
    NO_SAMPLING,
    POINT_MASS,
    Rows,
    TokenMap,
    end_of_tiles,
    first_tile,
    load_laws,
    log_probability,
    row_at,
    value_at,
)
from .philox import Coins
from .race import find_winners
from .token_lists import DraftRows, draft_of, draft_rows_of
from .token_map import token_map_of
from .tree_visit import TreeOutputs
from .verify_block import Flow, decide_block, flow_down, node_masses
from .verify_stepwise import decide_stepwise

# ---- the last draw ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["gamma", "tiles", "splits"])
def sum_draws(
    target, draft, laws, tasks, children, sums, gamma, tiles, splits,
    RESIDUALS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the tiles' sums of integer weights. Grid: requests x splits.

    RESIDUALS: where a task asks for one; else all are drawn from the target's laws.
    """
    program = tl.program_id(0).to(tl.int64)
    b = program // splits
    split = (program % splits).to(tl.int32)
    task = load_task(tasks, children, b)
    law = target_law(laws, b, task.row, gamma)
    if needs_draw(law):
        first = first_tile(target, split, TILE)
        end = end_of_tiles(target, tiles, TILE)
        if RESIDUALS & (task.residual > 0):
            for tile in range(first, end, splits):
                weights = residual_weights(target, draft, laws, b, task, law, tile, TILE)
                total = tl.sum(residual_masses(task, law, weights), 0)
                tl.store(sums + b * tiles + tile, total.to(tl.int64))
        else:
            source = row_at(target, b, task.row)
            sum_law(source, law, sums + b * tiles, end, first, splits, TILE)


@triton.jit
def draw_task(target, draft, laws, task, law, sums, b, tiles, TILE: tl.constexpr):
    """Draw the token of a task."""
    source = row_at(target, b, task.row)
    residual = task.residual > 0
    total = total_of(sums, tiles)
    if residual & (total == 0):
        # It is empty, by rounding or because p = q: what is left is the target's own law.
        residual = task.residual < 0
        # One thread overwrites what all have summed, and will load again.
        tl.debug_barrier()
        sum_law(source, law, sums, tiles, 0, 1, TILE)
        tl.debug_barrier()
    if residual:
        tile, left = find_tile(sums, tiles, draw_threshold(task.u, total))
        tile = tl.minimum(tile, tiles - 1)
        weights = residual_weights(target, draft, laws, b, task, law, tile, TILE)
        token = find_entry(residual_masses(task, law, weights), source.entries, tile, left, TILE)
    else:
        token = draw_from_law(source, law, sums, tiles, task.u, TILE)
    return token


@triton.jit(do_not_specialize=["gamma", "tiles"])
def draw_last_tokens(
    target, draft, laws, tasks, children, sums, num_accepted, tokens, logprobs,
    gamma, tiles, RACED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the last token of every request. Grid: requests. Token 0 where there is no law.

    RACED: it has won a race.
    """
    b = tl.program_id(0).to(tl.int64)
    task = load_task(tasks, children, b)
    law = target_law(laws, b, task.row, gamma)
    token = tl.full([], 0, tl.int64)
    if law.kind == POINT_MASS:
        token = law.argmax
    if needs_draw(law):
        if RACED:
            token = law.extra.to(tl.int64)
        else:
            own = sums + b * tiles
            token = draw_task(target, draft, laws, task, law, own, b, tiles, TILE)
    logprob = tl.full([], float("nan"), tl.float32)
    if law.kind != NO_LAW:
        logprob = log_probability(law, value_at(row_at(target, b, task.row), token))
    place = b * (gamma + 1) + tl.load(num_accepted + b)
    tl.store(tokens + place, token)
    tl.store(logprobs + place, logprob)


# ---- raw log-probabilities ----------------------------------------------------------------------


@triton.jit(do_not_specialize=["gamma"])
def write_raw_logprobs(laws, num_accepted, logprobs, gamma):
    """Write log softmax of the raw rows at the emitted tokens. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    accepted = tl.load(num_accepted + b)
    for start in range(0, gamma + 1, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        place = b * (gamma + 1) + i.to(tl.int64)
        law = load_laws(laws, place, i <= accepted)
        found = tl.where(law.kind != NO_LAW, log_probability(law, law.value), float("nan"))
        tl.store(logprobs + place, found, mask=i <= accepted)


# ---- the operator -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Sizes of a call; of a tree, gamma counts its nodes but the root."""

    batch: int
    gamma: int
    vocab: int
    tiles: Tiling


#: What some rules ask of the target rows beside their laws.
EXTRAS = {"top_beta": RANK, "typical": ENTROPY}

#: A race brings its own noise.
NO_COINS = coins_of(None, None, None, 0)


def _decide_block(
    call: SimpleNamespace,
    shape: Shape,
    target: Batch,
    draft: Batch,
    chain: Chain,
    laws: Laws,
    outputs: Outputs,
    ranks: Any,
) -> None:
    batch, gamma, vocab, tiles = shape
    new = call.target_logits.new_empty
    flow = Flow(
        new((batch, gamma + 1), dtype=torch.float64),
        new((batch, gamma), dtype=torch.int8),
        new(batch, dtype=torch.int32),
        new((batch, gamma + 1, tiles.number), dtype=torch.float64),
    )
    launch(flow_down, batch, chain, laws, flow, outputs, vocab, gamma, num_warps=1)
    nodes = batch * max(gamma - 1, 0) if is_given(draft) else 0
    splits = tiles.splits(nodes)
    launch(
        node_masses,
        nodes * splits,
        *(target.rows, draft.rows, laws, flow, gamma, tiles.number, splits),
        TILE=tiles.size,
        num_warps=8,
    )
    if ranks is not None and nodes > 0:
        ranks.share(tiles, flow.masses.flatten(0, 1))
    launch(decide_block, batch, chain, laws, flow, outputs, vocab, gamma, tiles.number, num_warps=4)


def _decide_stepwise(
    call: SimpleNamespace, shape: Shape, chain: Chain, laws: Laws, outputs: Outputs
) -> None:
    launch(
        decide_stepwise,
        shape.batch,
        *(chain, laws, outputs, shape.vocab, shape.gamma),
        *(call.lenience, call.beta, call.tau, call.epsilon, call.delta),
        RULE=call.rule,
        IGNORES_SAMPLING=RULES[call.rule].ignores_sampling,
        READS_DRAFT=RULES[call.rule].reads_draft_law,
        RACED=RULES[call.rule].races,
        FULL=call.full_accept_probs,
        num_warps=1,
    )


def draw_tokens(
    shape: Shape,
    target: Batch,
    draft: Batch,
    laws: Laws,
    outputs: Outputs | TreeOutputs,
    *,
    children: Children = NO_CHILDREN,
    raced: bool,
    ranks: Any = None,
) -> None:
    """Draw the last token of every request."""
    batch, gamma, _, tiles = shape
    sources = (target.rows, draft.rows, laws, outputs.tasks, children)
    tile = dict(TILE=tiles.size, num_warps=8)
    sums = law_sums = None
    if not raced:
        sums = laws.target.new_empty((batch, tiles.number), dtype=torch.int64)
        splits = tiles.splits(batch)
        passes = (gamma, tiles.number, splits)
        launch(sum_draws, batch * splits, *sources, sums, *passes, RESIDUALS=True, **tile)
        if ranks is not None:
            # For requests whose residual weights all come out as 0: it shows only in the sums of
            # all ranks; to ask then would take the host or one exchange more.
            law_sums = torch.empty_like(sums)
            grid = batch * splits
            launch(sum_draws, grid, *sources, law_sums, *passes, RESIDUALS=False, **tile)
            ranks.share(tiles, sums, law_sums)
    if ranks is not None:
        ranks.draw(sources, (sums, law_sums), outputs, gamma, tiles, raced)
        return
    launch(
        draw_last_tokens,
        batch,
        *(*sources, sums, outputs.num_accepted, outputs.tokens, outputs.logprobs),
        *(gamma, tiles.number),
        RACED=raced,
        **tile,
    )


def _rewrite_logprobs(call: SimpleNamespace, shape: Shape, outputs: Outputs, ranks: Any) -> None:
    rows = _target_rows(call, shape.vocab)
    batch = batch_of(rows, NO_SAMPLING, outputs.tokens, outputs.num_accepted)
    if ranks is not None:
        batch, _ = ranks.hold(shape.tiles, batch, NO_BATCH)
    laws = compute_laws(shape.tiles, batch, shape.batch * (shape.gamma + 1), ranks=ranks)
    launch(
        write_raw_logprobs,
        shape.batch,
        *(laws, outputs.num_accepted, outputs.logprobs, shape.gamma),
        num_warps=1,
    )


def given_coins(call: SimpleNamespace) -> Coins:
    """Describe the randomness of a call."""
    return coins_of(call.uniforms, call.seeds, call.positions, call.stream)


def _chain_of(call: SimpleNamespace, vocab: int, token_map: TokenMap, draft: DraftRows) -> Chain:
    tokens, kinds = call.draft_tokens, call.draft_kinds
    lengths = call.draft_lengths
    own = sampling_of(call)
    return Chain(
        tokens,
        tokens.stride(0),
        tokens.stride(1),
        kinds,
        stride_of(kinds),
        stride_of(kinds, 1),
        None if draft.tensor is None else 1,
        lengths,
        stride_of(lengths),
        max(vocab, draft.vocab),
        token_map.broken,
        own,
        sampling_of(call, "draft_") if call.draft_logits is not None else NO_SAMPLING,
        NO_COINS if RULES[call.rule].races else given_coins(call),
    )


def _target_rows(call: SimpleNamespace, vocab: int) -> Rows:
    mask = mask_of(call.allowed_mask, vocab)
    return rows_of(call.target_logits, call.target_rows, mask=mask, vocab=vocab)


def _batches(
    call: SimpleNamespace, vocab: int, chain: Chain, token_map: TokenMap, draft: DraftRows
) -> tuple[Batch, Batch]:
    """Target rows, and the draft's where the rule reads them."""
    greedy = RULES[call.rule].ignores_sampling
    drafted = (call.draft_tokens, call.draft_lengths)
    rows = _target_rows(call, vocab)
    target = batch_of(rows, ALL_GREEDY if greedy else chain.target, *drafted)
    reads_draft = RULES[call.rule].reads_draft_law
    if draft.tensor is None or not reads_draft or call.draft_tokens.shape[1] == 0:
        return target, NO_BATCH
    rows = draft_rows_of(draft, call.draft_rows, rows.mask, token_map)
    return target, batch_of(rows, chain.draft, *drafted, chain.target)


def verify(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    call: SimpleNamespace,
    ranks: Any = None,
) -> None:
    """Fill the outputs of `specdec_ext.verify`.

    With `sharded.Ranks`, the call has a part of the rows of each model.
    """
    batch, gamma = call.draft_tokens.shape
    vocab = call.target_logits.shape[-1] if ranks is None else ranks.vocab
    traits = RULES[call.rule]
    ids = call.draft_token_ids if traits.reads_draft_law else None
    token_map = token_map_of(ids, vocab)
    drafted = draft_of(call, vocab)
    if ranks is not None:
        drafted = drafted._replace(vocab=ranks.draft_vocab)
    chain = _chain_of(call, vocab, token_map, drafted)
    target, draft = _batches(call, vocab, chain, token_map, drafted)
    shape = Shape(batch, gamma, vocab, tiling(vocab, draft.rows.vocab or 1))
    if ranks is not None:
        target, draft = ranks.hold(shape.tiles, target, draft)
    first_draft = batch * (gamma + 1)
    data = compute_laws(
        shape.tiles,
        target,
        first_draft,
        draft,
        batch * gamma if is_given(draft) else 0,
        extra=EXTRAS.get(call.rule, NOTHING),
        ranks=ranks,
    )
    laws = Laws(data, data[first_draft:] if is_given(draft) else None)
    if traits.races:
        find_winners(shape.tiles, target.rows, given_coins(call), data, ranks=ranks)
    outputs = Outputs(*results, data.new_empty((batch, TASK_FIELDS.value)))
    if call.rule == "block":
        _decide_block(call, shape, target, draft, chain, laws, outputs, ranks)
    else:
        _decide_stepwise(call, shape, chain, laws, outputs)
    draw_tokens(shape, target, draft, laws, outputs, raced=traits.races, ranks=ranks)
    if call.raw_logprobs or traits.raw_logprobs:
        _rewrite_logprobs(call, shape, outputs, ranks)
