"""What host models take in place of ancestor bits: dense masks, position ids, a FlexAttention mask.

The keys of a tree's forward pass are a prefix and the tree. How they lie in a row of the mask, and
in the cache, is the `layout`, with P columns for prefixes of up to P tokens and N for the tree:

- "left": ``[padding | prefix | tree]``, a batch padded on its left, the tree appended.
- "right": ``[prefix | padding | tree]``, a batch padded on its right, the tree appended.
- "packed": ``[prefix | tree | free]``, every tree right behind its own prefix: what
  `specdec_ext.tree_attention` and `specdec_ext.compact_kv` work on.

Where rejected tokens were left in a cache as holes, ``prefix_mask`` says which columns count, and
the tree is appended.

A padding node sees itself alone, so that no softmax is over nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ._calls import check_type, is_number, kind

__all__ = ["LAYOUTS", "dense_tree_mask", "tree_mask_mod", "tree_position_ids"]

#: How prefix and tree lie among the keys.
LAYOUTS = ("left", "right", "packed")

#: Takes batch, head, query and key indices, gives whether the query sees the key.
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _check_ancestors(op: str, ancestors: Tensor) -> None:
    check_type(op, "ancestors", ancestors, "Tensor")
    if ancestors.dtype != torch.int64 or ancestors.dim() != 3:
        raise ValueError(
            f"{op}: ancestors must be [B, N, ceil(N/64)] int64, "
            f"got {list(ancestors.shape)} {str(ancestors.dtype).removeprefix('torch.')}"
        )


def _lengths(op: str, prefix_lens: Tensor | int, batch: int, device: torch.device) -> Tensor:
    """Make prefix lengths ``[B]`` int64."""
    if is_number(prefix_lens, integral=True):
        return torch.full((batch,), int(prefix_lens), dtype=torch.int64, device=device)
    if not isinstance(prefix_lens, Tensor):
        raise TypeError(f"{op}: prefix_lens must be a Tensor or an int, got {kind(prefix_lens)}")
    if prefix_lens.shape != (batch,) or prefix_lens.is_floating_point():
        raise ValueError(
            f"{op}: prefix_lens must be [B] = [{batch}] integers, got {list(prefix_lens.shape)} "
            f"{str(prefix_lens.dtype).removeprefix('torch.')}"
        )
    return prefix_lens.long()


def _check_prefix(
    op: str,
    batch: int,
    prefix_lens: Tensor | int | None,
    prefix_width: int | None,
    layout: str,
    prefix_mask: Tensor | None,
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if prefix_mask is None:
        if prefix_lens is None or prefix_width is None:
            raise ValueError(
                f"{op}: expected prefix_lens and prefix_width, or prefix_mask, got neither"
            )
        check_type(op, "prefix_width", prefix_width, "int")
        if prefix_width < 0:
            raise ValueError(f"{op}: prefix_width must be at least 0, got {prefix_width}")
        return
    check_type(op, "prefix_mask", prefix_mask, "Tensor")
    if prefix_lens is not None or prefix_width is not None:
        raise ValueError(f"{op}: expected prefix_lens and prefix_width, or prefix_mask, got both")
    if prefix_mask.dim() != 2 or prefix_mask.shape[0] != batch:
        raise ValueError(
            f"{op}: prefix_mask must be [B, P] = [{batch}, P], got {list(prefix_mask.shape)}"
        )


def _make_mod(
    op: str,
    ancestors: Tensor,
    prefix_lens: Tensor | int | None,
    prefix_width: int | None,
    layout: str,
    prefix_mask: Tensor | None,
) -> tuple[MaskMod, int]:
    """Make the mask, and the number of the prefix's columns."""
    _check_ancestors(op, ancestors)
    batch, nodes, _ = ancestors.shape
    _check_prefix(op, batch, prefix_lens, prefix_width, layout, prefix_mask)

    def sees_node(b: Tensor, query: Tensor, node: Tensor) -> Tensor:
        inside = (node >= 0) & (node < nodes)
        node = node.clamp(0, nodes - 1)
        return inside & ((ancestors[b, query, node // 64] >> (node % 64)) & 1).bool()

    if prefix_mask is not None:
        width = prefix_mask.shape[1]
        counts = prefix_mask.bool()

        def with_holes(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            node = key - width
            seen = sees_node(b, query, node)
            if width > 0:
                seen = seen | ((key < width) & counts[b, key.clamp(max=width - 1)])
            return torch.where(sees_node(b, query, query), seen, node == query)

        return with_holes, width

    assert prefix_lens is not None and prefix_width is not None
    width = prefix_width
    lengths = _lengths(op, prefix_lens, batch, ancestors.device)

    def mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        length = lengths[b]
        node = key - (length if layout == "packed" else width)
        if layout == "left":
            in_prefix = (key >= width - length) & (key < width)
        else:
            in_prefix = key < length
        seen = in_prefix | sees_node(b, query, node)
        return torch.where(sees_node(b, query, query), seen, node == query)

    return mod, width


def dense_tree_mask(
    ancestors: Tensor,
    prefix_lens: Tensor | int | None = None,
    prefix_width: int | None = None,
    *,
    layout: str = "left",
    prefix_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Make the 4-D attention mask of a tree's forward pass.

    The default is additive: hosts that add the mask to the scores (eager attention) would add a
    bool mask as 0 and 1, which is silently wrong.

    Parameters
    ----------
    ancestors : Tensor
        ``[B, N, ceil(N/64)]`` int64, from `specdec_ext.tree_mask`.
    prefix_lens : Tensor or int, optional
        ``[B]`` integers: the tokens before the root. At most `prefix_width`.
    prefix_width : int, optional
        P, the columns that prefixes have.
    layout : {"left", "right", "packed"}
        Where prefix and tree lie among the P + N keys; see `specdec_ext.tree_masks`.
    prefix_mask : Tensor, optional
        ``[B, P]``, not 0 where a column counts: instead of the two above, for caches with holes.
        The tree is appended.
    dtype : torch.dtype
        ``torch.bool``: True where a node sees a key. A floating-point type: 0 there, and elsewhere
        the type's lowest finite number, as in transformers.

    Returns
    -------
    Tensor
        ``[B, 1, N, P + N]``.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        A wrong dtype, shape, layout or combination; on the CPU also prefix lengths outside
        [0, prefix_width].

    Examples
    --------
    >>> import torch, specdec_ext
    >>> tree = specdec_ext.tree_mask(torch.tensor([[-1, 0, 0, 1]]))
    >>> specdec_ext.dense_tree_mask(tree.ancestors, 2, 3, dtype=torch.bool).int()[0, 0]
    tensor([[0, 1, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 1, 0, 0],
            [0, 1, 1, 1, 0, 1, 0],
            [0, 1, 1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    op = "dense_tree_mask"
    mod, width = _make_mod(op, ancestors, prefix_lens, prefix_width, layout, prefix_mask)
    if prefix_lens is not None and ancestors.device.type == "cpu":
        _check_lengths(op, prefix_lens, width)
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ValueError(f"{op}: dtype must be torch.bool or a floating-point type, got {dtype}")
    batch, nodes, _ = ancestors.shape

    def along(dim: int, size: int) -> Tensor:
        shape = [1] * 3
        shape[dim] = -1
        return torch.arange(size, device=ancestors.device).view(shape)

    requests, queries, keys = along(0, batch), along(1, nodes), along(2, width + nodes)
    seen = mod(requests, requests, queries, keys)[:, None]
    if dtype == torch.bool:
        return seen
    return additive_mask(seen, dtype)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Give 0 where a bool mask is True, elsewhere the type's lowest finite number."""
    blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros_like(blocked), blocked)


def _check_lengths(op: str, prefix_lens: Tensor | int, width: int) -> None:
    # Values are no concern of a trace, nor of a device that would have to be waited for.
    if torch.compiler.is_compiling():
        return
    lengths = prefix_lens.tolist() if isinstance(prefix_lens, Tensor) else [prefix_lens]
    if not all(0 <= n <= width for n in lengths):
        raise ValueError(f"{op}: prefix_lens must be in [0, prefix_width = {width}], got {lengths}")


def tree_mask_mod(
    ancestors: Tensor,
    prefix_lens: Tensor | int | None = None,
    prefix_width: int | None = None,
    *,
    layout: str = "packed",
    prefix_mask: Tensor | None = None,
) -> MaskMod:
    """Make the same mask as a function of indices, for FlexAttention.

    Parameters
    ----------
    ancestors, prefix_lens, prefix_width, layout, prefix_mask
        As in `dense_tree_mask`; of a "packed" layout `prefix_width` is not used and may be 0.

    Returns
    -------
    callable
        Takes batch, head, query and key indices, gives a bool: the ``mask_mod`` of
        ``torch.nn.attention.flex_attention.create_block_mask(mask_mod, B, None, N, P + N)``.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        A wrong dtype, shape, layout or combination.

    References
    ----------
    Dong et al., "Flex Attention", arXiv 2412.05496, section 3.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> from torch.nn.attention.flex_attention import create_mask
    >>> tree = specdec_ext.tree_mask(torch.tensor([[-1, 0, 0]]))
    >>> mod = specdec_ext.tree_mask_mod(tree.ancestors, 2, 2)
    >>> create_mask(mod, 1, None, 3, 5, device="cpu").int()[0, 0]
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    mod, _ = _make_mod("tree_mask_mod", ancestors, prefix_lens, prefix_width, layout, prefix_mask)
    return mod


def tree_position_ids(depths: Tensor, prefix_lens: Tensor | int) -> Tensor:
    """Give the position of every node in its sequence: tokens before the root, plus its depth.

    Parameters
    ----------
    depths : Tensor
        ``[B, N]`` int64, from `specdec_ext.tree_mask`.
    prefix_lens : Tensor or int
        ``[B]`` integers: the tokens before the root, padding not counted.

    Returns
    -------
    Tensor
        ``[B, N]`` int64. A padding node has its root's position.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor an int.
    ValueError
        A wrong dtype or shape.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> tree = specdec_ext.tree_mask(torch.tensor([[-1, 0, 0, 1, -1]]))
    >>> specdec_ext.tree_position_ids(tree.depths, 7)
    tensor([[7, 8, 8, 9, 7]])
    """
    op = "tree_position_ids"
    check_type(op, "depths", depths, "Tensor")
    if depths.dim() != 2 or depths.dtype != torch.int64:
        raise ValueError(
            f"{op}: depths must be [B, N] int64, "
            f"got {list(depths.shape)} {str(depths.dtype).removeprefix('torch.')}"
        )
    lengths = _lengths(op, prefix_lens, depths.shape[0], depths.device)
    return lengths[:, None] + depths.clamp(min=0)
