"""tree_attention on the CPU, composed of torch's own attention; and the merge of two attentions.

The prefix, which every node sees whole, needs no mask: the heads of a group become rows of one
attention call, so that keys and values are read once a group instead of once a head, and nothing of
size N x L is built. The tree's N keys are a second, small call under the ancestor bits. The two are
weighed by the log-sum-exp of their scores.

Beside the output this takes a copy of q and of both results, and [B, N * H / Hkv, N] of mask; where
keys must be copied (out of pages) or scores exist (under a soft cap), that is done for a block of
keys at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._ops import NAMESPACE, ops
from .contract import TreeAttentionResult

__all__ = ["merge_attention", "register", "tree_attention"]

#: Keys that are copied, or whose scores are held, at once.
BLOCK_KEYS = 1024


class _Options(NamedTuple):
    """What holds for all requests of a call."""

    scale: float | Tensor  # of scores; a tensor [Hkv, 1, 1] where heads have factors of their own
    v_scale: float | Tensor
    cap: float  # 0: none
    window: int  # 0: none


class _Keys(NamedTuple):
    """The keys and values of some requests: ``[B, L, Hkv, D]``, or blocks and a table of them."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor | None


def _visible(ancestors: Tensor) -> Tensor:
    """Unpack ancestor bits into ``[B, N, N]`` bools."""
    node = torch.arange(ancestors.shape[1])
    return (ancestors[:, :, node // 64] >> (node % 64) & 1).bool()


def wrong_pages(
    block_table: Tensor, seq_lens: Tensor, cache: Tensor, nodes: int, window: int
) -> Tensor:
    """Say which entries of a table are read and name no block of the cache, ``[B, P]`` bools."""
    blocks, size = cache.shape[:2]
    page = torch.arange(block_table.shape[1])
    largest = block_table.shape[1] * size - nodes
    lens = seq_lens.long()[:, None].clamp(-1, largest + 1)  # -1 and largest + 1: not in the cache
    first = (lens - window + 1).clamp(min=0) // size if window > 0 else torch.zeros_like(lens)
    is_read = (page >= first) & (page <= (lens + nodes - 1) // size)
    is_wrong = (block_table < 0) | (block_table >= blocks)
    return is_read & is_wrong & (lens >= 0) & (lens <= largest)


def _runs(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, length) of neighbours with one length: slices of them are no copies."""
    first = 0
    for b in range(1, len(lengths) + 1):
        if b == len(lengths) or lengths[b] != lengths[first]:
            yield first, b, lengths[first]
            first = b


def _read(cache: Tensor, table: Tensor | None, begin: int, end: int) -> Tensor:
    """Give the places [begin, end) as ``[B, Hkv, end - begin, D]``: a view, but for tables."""
    if table is None:
        return cache[:, begin:end].transpose(1, 2)
    size = cache.shape[1]
    first = begin // size
    read = table[:, first : -(-end // size)]
    pages = cache.index_select(0, read.flatten()).view(*read.shape, *cache.shape[1:]).flatten(1, 2)
    return pages[:, begin - first * size : end - first * size].transpose(1, 2)


def _attend_whole(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Give the attention of ``[B, Hkv, R, D]`` rows and the log-sum-exp ``[B, Hkv, R]``."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(rows, keys, values, attn_mask=mask, scale=scale)
    if mask is not None:  # torch's log-sum-exp of nothing is 0
        lse.masked_fill_((mask == -math.inf).all(3), -math.inf)
    return out, lse


def _attend_by_scores(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | Tensor,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Give the same where torch's flash attention cannot: the scores exist, in float32."""
    scores = rows.float() @ keys.float().transpose(2, 3)
    if cap > 0:
        scores = scores.mul_(scale / cap).tanh_().mul_(cap)
    else:
        scores = scores.mul_(scale)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(3)
    # A row that sees nothing here has a log-sum-exp of -inf.
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp_()
    return weights @ values.float(), lse


def _attend(
    rows: Tensor, held: _Keys, begin: int, end: int, mask: Tensor | None, options: _Options
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield attention to blocks of the places [begin, end)."""
    same = held.k_cache.shape[3] == held.v_cache.shape[3]
    scale = options.scale
    whole = options.cap == 0 and same and not isinstance(scale, Tensor)
    copied = held.block_table is not None or held.k_cache.dtype != rows.dtype
    step = max(end - begin, 1) if whole and not copied else BLOCK_KEYS
    for first in range(begin, end, step):
        last = min(first + step, end)
        keys, values = (
            _read(cache, held.block_table, first, last).to(rows.dtype)
            for cache in (held.k_cache, held.v_cache)
        )
        bias = None if mask is None else mask[..., first - begin : last - begin]
        if whole:
            assert not isinstance(scale, Tensor)
            yield _attend_whole(rows, keys, values, bias, scale)
        else:
            yield _attend_by_scores(rows, keys, values, bias, scale, options.cap)


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys into attention over both, in float32."""
    # Where the other sees nothing, this one may see nothing either: -inf less -inf is no share.
    share = torch.where(other_lse == -math.inf, 0.0, torch.sigmoid(other_lse - lse))
    return torch.lerp(out.float(), other.float(), share[..., None]), lse.logaddexp(other_lse)


def _check_merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    op = "merge_attention"
    given = dict(out=out, lse=lse, other_out=other_out, other_lse=other_lse)
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(t).__name__}")
    heads = list(out.shape[:-1])
    shapes = dict(lse=heads, other_out=[*heads, out.shape[-1]], other_lse=heads)
    for name, shape in shapes.items():
        if list(given[name].shape) != shape:
            symbols = "[..., D]" if name == "other_out" else "[...]"
            raise ValueError(
                f"{op}: {name} must be {symbols} = {shape} for out {list(out.shape)}, "
                f"got {list(given[name].shape)}"
            )
    for name, t in given.items():
        if not t.is_floating_point():
            raise ValueError(f"{op}: {name} must be of a floating-point dtype, got {t.dtype}")


@torch.no_grad()
def merge_attention(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> TreeAttentionResult:
    """Merge attention over two disjoint sets of keys into attention over both.

    What an engine needs where a part of the keys was attended to elsewhere: a prefix that requests
    share, say, by another kernel. Plain torch, on any device; computes in float32.

    Parameters
    ----------
    out, other_out : Tensor
        ``[..., D]`` floating point: softmax-weighted means of values, ``[B, N, H, D]`` as
        `tree_attention` gives them.
    lse, other_lse : Tensor
        ``[...]`` floating point, nats: the log of the sum of exp(score) over each set; -inf where
        nothing is seen. (FlashInfer's are in units of log 2: multiply them by ``math.log(2)``.)

    Returns
    -------
    TreeAttentionResult
        ``out`` [..., D] of the dtype of `out`, ``lse`` [...] float32. 0 and -inf where neither sees
        anything, NaN where a log-sum-exp is NaN.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        A wrong dtype or shape.

    References
    ----------
    Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2 (attention states and their merge).

    Examples
    --------
    >>> import torch, specdec_ext
    >>> out, lse = torch.tensor([[1.0, 0.0]]), torch.tensor([0.0])
    >>> other, other_lse = torch.tensor([[0.0, 1.0]]), torch.tensor([3.0]).log()
    >>> merged = specdec_ext.merge_attention(out, lse, other, other_lse)  # three times the weight
    >>> merged.out, merged.lse.exp()
    (tensor([[0.2500, 0.7500]]), tensor([4.]))
    """
    _check_merged(out, lse, other_out, other_lse)
    merged, merged_lse = _merged(out, lse.float(), other_out, other_lse.float())
    return TreeAttentionResult(merged.to(out.dtype), merged_lse)


def _packed_rows(q: Tensor, groups: int) -> Tensor:
    """Lay ``[B, N, H, D]`` out as ``[B, Hkv, (H / Hkv) * N, D]``."""
    batch, nodes, heads, size = q.shape
    if heads == groups:
        return q.transpose(1, 2)
    return q.view(batch, nodes, groups, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _spans(visible: Tensor, length: int, window: int) -> Iterator[tuple[int, int, Tensor | None]]:
    """Yield ranges of places and which of them nodes see, ``[B, N, places]``: None if all do.

    A window makes a mask of no more than N places of the prefix: what lies before them nobody sees,
    what lies behind them everybody.
    """
    batch, nodes, _ = visible.shape
    begin = common = 0
    if window > 0:
        depths = visible.sum(2) - 1
        visible = visible & (depths[:, :, None] - depths[:, None] < window)
        begin = max(0, length - window + 1)
        deepest = int(depths.max()) if batch > 0 else 0
        common = min(max(begin, length + deepest - window + 1), length)
        within = torch.arange(begin, common) > length + depths[:, :, None] - window
        yield begin, common, within
    yield common, length, None
    yield length, length + nodes, visible


def _fill(
    out: Tensor, lse: Tensor, q: Tensor, held: _Keys, visible: Tensor, length: int,
    options: _Options,
) -> None:  # fmt: skip
    """Write the attention of requests whose prefixes have one length."""
    batch, nodes, heads, _ = q.shape
    groups = held.k_cache.shape[2]
    rows = _packed_rows(q, groups)
    found = None
    for begin, end, seen in _spans(visible, length, options.window):
        mask = None
        if seen is not None:
            mask = torch.where(seen, 0.0, -math.inf)[:, None].repeat(1, 1, heads // groups, 1)
        for part in _attend(rows, held, begin, end, mask, options):
            found = part if found is None else _merged(*found, *part)
    assert found is not None
    by_node = (batch, groups, -1, nodes)
    packed = (batch, nodes, groups, heads // groups)
    out.view(*packed, -1).copy_(
        (found[0] * options.v_scale).view(*by_node, out.shape[3]).permute(0, 3, 1, 2, 4)
    )
    lse.view(packed).copy_(found[1].view(by_node).permute(0, 3, 1, 2))
    padding = ~visible.any(2)
    if bool(padding.any()):
        out[padding], lse[padding] = 0.0, -math.inf


def _factor(scale: Tensor | None) -> float | Tensor:
    """Give the factor of the cache's heads, one for all or ``[Hkv, 1, 1]``."""
    if scale is None:
        return 1.0
    return float(scale) if scale.numel() == 1 else scale[:, None, None]


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
) -> tuple[Tensor, Tensor]:
    """Compute `specdec_ext.tree_attention` for CPU tensors."""
    outputs: tuple[Tensor, Tensor] = ops._prepare_tree_attention(
        *(q, k_cache, v_cache, ancestors, seq_lens),
        **dict(block_table=block_table, k_scale=k_scale, v_scale=v_scale),
        **dict(scale=scale, soft_cap=soft_cap, window=window),
    )
    out, lse = outputs
    nodes, size = q.shape[1], q.shape[3]
    factor = (size**-0.5 if scale is None else scale) * _factor(k_scale)
    options = _Options(factor, _factor(v_scale), soft_cap, window)
    visible = _visible(ancestors)
    places, lens = k_cache.shape[1], seq_lens.long()
    if block_table is not None:
        places *= block_table.shape[1]
        wrong = wrong_pages(block_table, seq_lens, k_cache, nodes, window).any(1)
        lens = lens.masked_fill(wrong, -1)
    for first, end, length in _runs(lens.tolist()):
        some = slice(first, end)
        if 0 <= length <= places - nodes:
            if block_table is None:
                held = _Keys(k_cache[some], v_cache[some], None)
            else:
                held = _Keys(k_cache, v_cache, block_table[some])
            _fill(out[some], lse[some], q[some], held, visible[some], length, options)
        else:
            out[some], lse[some] = math.nan, math.nan
    return outputs


_library: Any = torch.library  # its functions are not annotated
_kept: list[Any] = []  # registrations go away with their library


def register() -> None:
    """Make it the operator `tree_attention` of CPU tensors."""
    fragment = _library.Library(NAMESPACE, "FRAGMENT")
    _kept.append(fragment)
    fragment.impl("tree_attention", tree_attention, "CPU")
