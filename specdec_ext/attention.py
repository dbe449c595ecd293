"""tree_attention on the CPU, composed of torch's own attention; and the merge of two attentions.

The prefix, which every node sees whole, needs no mask: the heads of a group become rows of one
attention call, so that keys and values are read once a group instead of once a head, and nothing of
size N x L is built. The tree's N keys are a second, small call under the ancestor bits. The two are
weighed by the log-sum-exp of their scores.

Beside the output this takes a copy of q and of both results, and [B, N * H / Hkv, N] of mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .contract import TreeAttentionResult

__all__ = ["merge_attention", "register", "tree_attention"]

#: Keys whose capped scores are held at once.
CAPPED_KEYS = 1024


def _visible(ancestors: Tensor) -> Tensor:
    """Unpack ancestor bits into ``[B, N, N]`` bools."""
    node = torch.arange(ancestors.shape[1])
    return (ancestors[:, :, node // 64] >> (node % 64) & 1).bool()


def _runs(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, length) of neighbours with one length: slices of them are no copies."""
    first = 0
    for b in range(1, len(lengths) + 1):
        if b == len(lengths) or lengths[b] != lengths[first]:
            yield first, b, lengths[first]
            first = b


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Give the attention of ``[B, Hkv, R, D]`` rows and the log-sum-exp ``[B, Hkv, R]``."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(rows, keys, values, attn_mask=mask, scale=scale)
    if mask is not None:  # torch's log-sum-exp of nothing is 0
        lse.masked_fill_((mask == -math.inf).all(3), -math.inf)
    return out, lse


def _attend_capped(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Give the same under a soft cap, which torch's flash attention does not have.

    The scores exist, in float32, for a block of keys at a time.
    """
    out, lse = None, None
    for begin in range(0, keys.shape[2], CAPPED_KEYS):
        block = slice(begin, begin + CAPPED_KEYS)
        scores = rows.float() @ keys[:, :, block].float().transpose(2, 3)
        scores = scores.mul_(scale / cap).tanh_().mul_(cap)
        if mask is not None:
            scores += mask[..., block]
        block_lse = scores.logsumexp(3)
        # A row that sees nothing of this block has a log-sum-exp of -inf.
        weights = (scores - block_lse.nan_to_num(neginf=0.0)[..., None]).exp_()
        block_out = weights @ values[:, :, block].float()
        out, lse = (
            (block_out, block_lse)
            if out is None or lse is None
            else _merged(out, lse, block_out, block_lse)
        )
    assert out is not None and lse is not None
    return out, lse


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


def _fill(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, length: int,
    scale: float, cap: float,
) -> None:  # fmt: skip
    """Write the attention of requests whose prefixes have one length."""
    batch, nodes, heads, size = q.shape
    groups = k.shape[2]
    rows = _packed_rows(q, groups)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    mask = torch.where(visible, 0.0, -math.inf)[:, None].repeat(1, 1, heads // groups, 1)
    parts = []
    for begin, end, bias in ((length, length + nodes, mask), (0, length, None)):
        if end > begin:
            part = (rows, keys[:, :, begin:end], values[:, :, begin:end], bias, scale)
            parts.append(_attend_capped(*part, cap) if cap > 0 else _attend(*part))
    found, log_sum = parts[0] if len(parts) == 1 else _merged(*parts[1], *parts[0])
    found = found.view(batch, groups, -1, nodes, size).permute(0, 3, 1, 2, 4)
    out.view(batch, nodes, groups, -1, size).copy_(found)
    log_sum = log_sum.view(batch, groups, -1, nodes).permute(0, 3, 1, 2)
    lse.view(batch, nodes, groups, -1).copy_(log_sum)
    padding = ~visible.any(2)
    if bool(padding.any()):
        out[padding], lse[padding] = 0.0, -math.inf


@torch.no_grad()
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `specdec_ext.tree_attention` for CPU tensors."""
    arguments = (q, k_cache, v_cache, ancestors, seq_lens)
    prepare = torch.ops.specdec._prepare_tree_attention
    outputs: tuple[Tensor, Tensor] = prepare(*arguments, scale=scale, soft_cap=soft_cap)
    out, lse = outputs
    factor = q.shape[3] ** -0.5 if scale is None else scale
    visible = _visible(ancestors)
    for first, end, length in _runs(seq_lens.tolist()):
        some = slice(first, end)
        if 0 <= length <= k_cache.shape[1] - q.shape[1]:
            parts = (q[some], k_cache[some], v_cache[some], visible[some])
            _fill(out[some], lse[some], *parts, length, factor, soft_cap)
        else:
            out[some], lse[some] = math.nan, math.nan
    return outputs


_library: Any = torch.library  # its functions are not annotated
_kept: list[Any] = []  # registrations go away with their library


def register() -> None:
    """Make it ``torch.ops.specdec.tree_attention`` of CPU tensors."""
    fragment = _library.Library("specdec", "FRAGMENT")
    _kept.append(fragment)
    fragment.impl("tree_attention", tree_attention, "CPU")
