"""tree_mask: the ancestors of every node as bits, and its depth.

Grid: requests x blocks of nodes. A program looks at all parents of its request, to know that they
are a tree, then walks from its nodes to the root at once; the nodes on the way descend, so that one
word is filled after the other. Reads a parent, writes 8 + 8 ceil(N/64) bytes a node.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from torch import Tensor

from ..contract import STATUS_INVALID_TREE
from .launch import INTERPRETED, launch

#: Nodes of a program. Interpreted programs follow each other: one takes all.
BLOCK = 1024 if INTERPRETED else 64
INVALID_TREE = tl.constexpr(STATUS_INVALID_TREE)


@triton.jit
def tree_size(parents, stride_n, nodes, NODES: tl.constexpr):
    """Count the nodes that are no padding; 0 where parents are no tree."""
    node = tl.arange(0, NODES).to(tl.int64)
    parent = tl.load(parents + node * stride_n, mask=node < nodes, other=-1).to(tl.int64)
    illegal = tl.sum(((parent < -1) | (parent >= node)).to(tl.int32), 0)
    is_child = parent >= 0
    children = tl.sum(is_child.to(tl.int32), 0)
    last = tl.max(tl.where(is_child, node, 0), 0)
    return tl.where((illegal == 0) & (children == last), children + 1, 0)


@triton.jit
def write_tree(
    parents, stride_b, stride_n, ancestors, depths, status, nodes, words,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the bits and the depths of a block of nodes. Grid: requests x blocks of nodes."""
    blocks = tl.cdiv(nodes, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    parents += b * stride_b
    size = tree_size(parents, stride_n, nodes, NODES)
    tl.store(status + b, tl.where(size > 0, 0, INVALID_TREE))
    own = first + tl.arange(0, BLOCK).to(tl.int64)
    # Of what is no tree, the root alone is left, whatever its parent.
    node = tl.where(own < tl.maximum(size, 1), own, -1)
    depth = tl.full([BLOCK], -1, tl.int64)
    out = ancestors + (b * nodes + own) * words
    for turn in range(0, words):
        word = words - 1 - turn
        bits = tl.zeros([BLOCK], tl.int64)
        while tl.max(node, 0) >= word * 64:
            here = node >= word * 64
            bits |= tl.where(here, tl.full([BLOCK], 1, tl.int64) << (node % 64), 0)
            depth += here.to(tl.int64)
            above = tl.load(parents + node * stride_n, mask=here & (node > 0), other=-1)
            node = tl.where(here, above.to(tl.int64), node)
        tl.store(out + word, bits, mask=own < nodes)
    tl.store(depths + b * nodes + own, depth, mask=own < nodes)


def tree_mask(outputs: tuple[Tensor, Tensor, Tensor], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.tree_mask`."""
    batch, nodes, words = outputs[0].shape
    launch(
        write_tree,
        batch * triton.cdiv(nodes, BLOCK),
        *(call.parents, call.parents.stride(0), call.parents.stride(1), *outputs, nodes, words),
        NODES=triton.next_power_of_2(nodes),
        BLOCK=BLOCK,
    )
