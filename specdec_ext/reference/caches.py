"""Draft trees in a target model: `tree_mask`, `compact_kv` and `tree_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract import (
    STATUS_INVALID_TREE,
    STATUS_PARAMETER_OUT_OF_RANGE,
    TreeAttentionResult,
    TreeMaskResult,
)
from .laws import INF, NAN

__all__ = [
    "compact_kv",
    "tree_attention",
    "tree_mask",
    "tree_size",
]


def tree_size(parents: Sequence[int]) -> int:
    """Count the nodes that are no padding; 0 where parents are no tree (docs/trees.md)."""
    size = next((v for v, parent in enumerate(parents) if v > 0 and parent == -1), len(parents))
    legal = parents[0] == -1 and all(0 <= parents[v] < v for v in range(1, size))
    return size if legal and all(parent == -1 for parent in parents[size:]) else 0


@torch.no_grad()
def tree_mask(parents: Tensor) -> TreeMaskResult:
    """Ancestor bits and depths; see `specdec_ext.tree_mask`."""
    batch, nodes = parents.shape
    seen = torch.zeros(batch, nodes, (nodes + 63) // 64 * 64, dtype=torch.bool)
    depths = torch.full((batch, nodes), -1, dtype=torch.int64)
    status = torch.zeros(batch, dtype=torch.int32)
    for b, row in enumerate(parents.tolist()):
        size = tree_size(row)
        if size == 0:
            status[b], size = STATUS_INVALID_TREE, 1
        for v in range(size):
            if v > 0:
                seen[b, v] = seen[b, row[v]]
            seen[b, v, v] = True
            depths[b, v] = seen[b, v].sum() - 1
    place = torch.ones(64, dtype=torch.int64) << torch.arange(64)  # the last one is negative
    words = (seen.unflatten(2, (-1, 64)) * place).sum(3)
    return TreeMaskResult(*(t.to(parents.device) for t in (words, depths, status)))


@torch.no_grad()
def compact_kv(
    k_cache: Tensor, v_cache: Tensor, path: Tensor, num_accepted: Tensor, seq_lens: Tensor
) -> Tensor:
    """Move the accepted path's keys and values, in place; see `specdec_ext.compact_kv`."""
    status = []
    places = k_cache.shape[-3]
    for b, (nodes, accepted, start) in enumerate(
        zip(path.tolist(), num_accepted.tolist(), seq_lens.tolist(), strict=True)
    ):
        if not (0 <= accepted <= len(nodes) and 0 <= start <= places):
            status.append(STATUS_PARAMETER_OUT_OF_RANGE)
            continue
        kept = [0, *nodes[:accepted]]
        ascending = all(v < later for v, later in zip(kept, kept[1:], strict=False))
        if not ascending or (accepted > 0 and kept[-1] >= places - start):
            status.append(STATUS_INVALID_TREE)
            continue
        for moving in (k_cache, v_cache):
            rows = moving.select(-4, b)
            moved = rows[..., [start + v for v in kept[1:]], :, :]
            rows[..., start + 1 : start + 1 + accepted, :, :] = moved
        status.append(0)
    return torch.tensor(status, dtype=torch.int32, device=k_cache.device)


def _cached(cache: Tensor, b: int, block_table: Tensor | None, begin: int, end: int) -> Tensor:
    """Give the places [begin, end) of a request, float64; IndexError: a page is no block."""
    if block_table is None:
        return cache[b, begin:end].double()
    blocks, size = cache.shape[:2]
    table = block_table[b].tolist()
    found = cache.new_empty((end - begin, *cache.shape[2:]), dtype=torch.float64)
    for place in range(begin, end):
        block = table[place // size]
        if not 0 <= block < blocks:
            raise IndexError(f"page {place // size} must be in [0, {blocks}), got {block}")
        found[place - begin] = cache[block, place % size].double()
    return found


@torch.no_grad()
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
) -> TreeAttentionResult:
    """Softmax over the prefix and the ancestors; see `specdec_ext.tree_attention`."""
    nodes, heads, size = q.shape[1:]
    node = torch.arange(nodes, device=q.device)
    out = torch.full((*q.shape[:3], v_cache.shape[3]), NAN, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], NAN, dtype=torch.float32, device=q.device)
    places = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    for b, start in enumerate(seq_lens.tolist()):
        if not 0 <= start <= places - nodes:
            continue
        group = heads // k_cache.shape[2]
        first = max(0, start - window + 1) if window > 0 else 0
        try:
            keys, values = (
                (
                    _cached(held, b, block_table, first, start + nodes)
                    * (1.0 if factor is None else factor.double()[..., None])
                ).repeat_interleave(group, dim=1)
                for held, factor in ((k_cache, k_scale), (v_cache, v_scale))
            )
        except IndexError:
            continue
        scores = torch.einsum("nhd,lhd->hnl", q[b].double(), keys)
        scores *= size**-0.5 if scale is None else scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen = (ancestors[b][:, node // 64] >> (node % 64) & 1).bool()
        scores[:, :, start - first :].masked_fill_(~seen, -INF)
        scores[:, ~seen.any(1)] = -INF  # padding
        if window > 0:
            depth = seen.sum(1) - 1
            position = torch.cat([torch.arange(first, start, device=q.device), start + depth])
            scores.masked_fill_((start + depth)[:, None] - position >= window, -INF)
        log_sum = scores.logsumexp(2)
        weights = (scores - log_sum.nan_to_num(neginf=0.0)[..., None]).exp()
        out[b] = torch.einsum("hnl,lhd->nhd", weights, values).to(q.dtype)
        lse[b] = log_sum.T
    return TreeAttentionResult(out, lse)
