"""Tree verification: what the trees are, laws of their rows, the rule, then the last draws.

Launches: the opening (1), the laws (2, with filters 4), the rule (1; coupled 3), the draws (3;
coupled 1), the log-probabilities (1; raw ones 3), and the map of a reduced draft vocabulary (1 and
two fills). Traffic: rows of the nodes that tokens lead to once for their laws, and tree_visit.py;
the winner's two rows twice more for its residual, or its target row once. Workspace is O(rows x
tiles).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import RULES
from .chain import Laws
from .draw import TASK_FIELDS, Children
from .launch import (
    INTERPRETED,
    batch_of,
    compute_laws,
    launch,
    mask_of,
    rows_of,
    sampling_of,
    stride_of,
    tiling,
)
from .law_pass import NO_BATCH, Batch, is_given
from .laws import (
    ALL_GREEDY,
    NO_LAW,
    NO_SAMPLING,
    TokenMap,
    load_laws,
    log_probability,
    row_at,
    value_at,
)
from .race import find_winners
from .token_lists import DraftRows, draft_of, draft_rows_of
from .token_map import token_map_of
from .tree import Flow, Trees, open_trees
from .tree_visit import TreeOutputs, visit_trees
from .verify import NO_COINS, Shape, draw_tokens, given_coins

#: Nodes that the opening compares with all nodes of a request at once.
STEP = 128 if INTERPRETED else 8


@triton.jit(do_not_specialize=["nodes"])
def write_logprobs(target, laws, outputs, nodes, NODES: tl.constexpr):
    """Write log p of what was emitted, under laws [B, N]. Grid: requests."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, NODES)
    place = b * nodes + k
    emitted = k <= tl.load(outputs.num_accepted + b)
    node = tl.load(outputs.path + place - 1, mask=emitted & (k > 0), other=0)
    token = tl.load(outputs.tokens + place, mask=emitted, other=-1)
    law = load_laws(laws, b * nodes + node, emitted)
    logprob = log_probability(law, value_at(row_at(target, b, node), token))
    logprob = tl.where(law.kind != NO_LAW, logprob, float("nan"))
    tl.store(outputs.logprobs + place, logprob, mask=k < nodes)


def _trees_of(call: SimpleNamespace, vocab: int, token_map: TokenMap, draft: DraftRows) -> Trees:
    tokens, parents, kinds = call.tokens, call.parents, call.kinds
    greedy = RULES[call.rule].ignores_sampling
    filtered = call.draft_logits is not None and not greedy
    return Trees(
        *(tokens, tokens.stride(0), tokens.stride(1)),
        *(parents, parents.stride(0), parents.stride(1)),
        *(kinds, stride_of(kinds), stride_of(kinds, 1)),
        None if draft.tensor is None else 1,
        max(vocab, draft.vocab),
        token_map.broken,
        ALL_GREEDY if greedy else sampling_of(call),
        sampling_of(call, "draft_") if filtered else NO_SAMPLING,
        NO_COINS if RULES[call.rule].races else given_coins(call),
    )


def _batches(
    call: SimpleNamespace, trees: Trees, flow: Flow, token_map: TokenMap, draft: DraftRows
) -> tuple[Batch, Batch]:
    """Target rows, and the draft's where the rule reads them: row v is what node v asks for."""
    mask = mask_of(call.allowed_mask, call.target_logits.shape[-1])
    rows = rows_of(call.target_logits, call.target_rows, mask=mask)
    target = batch_of(rows, trees.target, wanted=flow.wanted)
    if draft.tensor is None or not RULES[call.rule].reads_draft_law:
        return target, NO_BATCH
    rows = draft_rows_of(draft, call.children_rows, mask, token_map)
    return target, batch_of(rows, trees.draft, wanted=flow.wanted_draft)


def _scratch(call: SimpleNamespace) -> tuple[Children, Flow]:
    batch, nodes = call.tokens.shape

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        # One by one: aligned whatever the shape is, for the sake of few compiled variants.
        made: Tensor = call.target_logits.new_empty(shape or (batch, nodes), dtype=dtype)
        return made

    f64, i32, i8 = torch.float64, torch.int32, torch.int8
    children = Children(
        new(torch.int64, batch, nodes + 1),
        nodes,
        *(new(i32), new(i32), new(i8)),
        *(new(i32), new(i32), new(i32)),
    )
    flow = Flow(new(f64), new(f64), new(f64), new(f64), new(i32), new(i8), new(i8), new(i8))
    return children, flow


def _write_logprobs(
    call: SimpleNamespace, shape: Shape, target: Batch, laws: Tensor, outputs: TreeOutputs
) -> None:
    batch, nodes = call.tokens.shape
    if call.raw_logprobs:
        raw = target._replace(sampling=NO_SAMPLING)
        laws = compute_laws(shape.tiles, raw, batch * nodes)
    launch(
        write_logprobs,
        batch,
        *(target.rows, laws, outputs, nodes),
        NODES=triton.next_power_of_2(nodes),
    )


def verify_tree(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], call: SimpleNamespace
) -> None:
    """Fill the outputs of `specdec_ext.verify_tree`."""
    batch, nodes = call.tokens.shape
    vocab = call.target_logits.shape[-1]
    traits = RULES[call.rule]
    token_map = token_map_of(call.draft_token_ids if traits.reads_draft_law else None, vocab)
    drafted = draft_of(call, vocab)
    trees = _trees_of(call, vocab, token_map, drafted)
    children, flow = _scratch(call)
    target, draft = _batches(call, trees, flow, token_map, drafted)
    tiles = tiling(vocab, draft.rows.vocab or 1)
    shape = Shape(batch, nodes - 1, vocab, tiles)
    tasks = call.target_logits.new_empty((batch, TASK_FIELDS.value), dtype=torch.float64)
    outputs = TreeOutputs(*results, tasks)
    padded = triton.next_power_of_2(nodes)
    launch(
        open_trees,
        batch,
        *(trees, children, flow, outputs.status, vocab, nodes),
        READS_DRAFT=traits.reads_draft_law,
        NODES=padded,
        STEP=STEP,
        num_warps=8,
    )
    rows = batch * nodes
    data = compute_laws(tiles, target, rows, draft, rows if is_given(draft) else 0)
    laws = Laws(data, data[rows:] if is_given(draft) else None)
    if traits.races:
        find_winners(tiles, target.rows, given_coins(call), data, depths=flow.depth)
    launch(
        visit_trees,
        batch,
        *(trees, children, flow, target.rows, draft.rows, laws, outputs),
        *(nodes, tiles.number),
        STEPWISE=traits.stepwise,
        READS_DRAFT=is_given(draft),
        RACED=traits.races,
        NODES=padded,
        TILE=tiles.size,
        num_warps=8,
    )
    draw_tokens(shape, target, draft, laws, outputs, children=children, raced=traits.races)
    _write_logprobs(call, shape, target, data, outputs)
