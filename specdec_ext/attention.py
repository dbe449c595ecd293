"""tree_attention on the CPU, composed of torch's own attention.

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

__all__ = ["register", "tree_attention"]

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
    found: tuple[Tensor, Tensor] = flash(rows, keys, values, attn_mask=mask, scale=scale)
    return found


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
            (block_out, block_lse) if out is None else _merged(out, lse, block_out, block_lse)
        )
    assert out is not None and lse is not None
    return out, lse


def _merged(out: Tensor, lse: Tensor | None, other: Tensor, other_lse: Tensor) -> Any:
    """Combine attention over two disjoint sets of keys into attention over both, in float32."""
    assert lse is not None
    share = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)  # NaN: neither sees anything
    return torch.lerp(out.float(), other.float(), share[..., None]), lse.logaddexp(other_lse)


def _packed_rows(q: Tensor, groups: int) -> Tensor:
    """Lay ``[B, N, H, D]`` out as ``[B, Hkv, (H / Hkv) * N, D]``."""
    batch, nodes, heads, size = q.shape
    if heads == groups:
        return q.transpose(1, 2)
    return q.view(batch, nodes, groups, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _fill(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, length: int,
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
    found = parts[0][0] if len(parts) == 1 else _merged(*parts[1], *parts[0])[0]
    found = found.view(batch, groups, -1, nodes, size).permute(0, 3, 1, 2, 4)
    out.view(batch, nodes, groups, -1, size).copy_(found)
    padding = ~visible.any(2)
    if bool(padding.any()):
        out[padding] = 0.0


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
) -> Tensor:
    """Compute `specdec_ext.tree_attention` for CPU tensors."""
    arguments = (q, k_cache, v_cache, ancestors, seq_lens)
    prepare = torch.ops.specdec._prepare_tree_attention
    out: Tensor = prepare(*arguments, scale=scale, soft_cap=soft_cap)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    visible = _visible(ancestors)
    for first, end, length in _runs(seq_lens.tolist()):
        some = slice(first, end)
        if 0 <= length <= k_cache.shape[1] - q.shape[1]:
            parts = (out[some], q[some], k_cache[some], v_cache[some], visible[some])
            _fill(*parts, length, factor, soft_cap)
        else:
            out[some] = math.nan
    return out


_library: Any = torch.library  # its functions are not annotated
_kept: list[Any] = []  # registrations go away with their library


def register() -> None:
    """Make it ``torch.ops.specdec.tree_attention`` of CPU tensors."""
    fragment = _library.Library("specdec", "FRAGMENT")
    _kept.append(fragment)
    fragment.impl("tree_attention", tree_attention, "CPU")
