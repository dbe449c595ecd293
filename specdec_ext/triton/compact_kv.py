"""compact_kv: the accepted path's keys and values move behind the root's, in place.

Grid: a cache's layers x requests x blocks of elements of a row (H, D). Reads and writes the
accepted nodes' rows. A program moves its elements of every node, in the path's order: nothing that
another program moves is touched, and no node is overwritten before it has moved. Of a request with
a status nothing moves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import STATUS_INVALID_TREE, STATUS_PARAMETER_OUT_OF_RANGE
from .launch import launch

PARAMETER_OUT_OF_RANGE = tl.constexpr(STATUS_PARAMETER_OUT_OF_RANGE)
INVALID_TREE = tl.constexpr(STATUS_INVALID_TREE)

#: Steps of a path that are checked at once.
STEPS = tl.constexpr(64)

LARGEST_BLOCK = 2048

#: What carries an element's bits.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Paths(NamedTuple):
    """The accepted paths, and where they lie."""

    path: Tensor
    stride_b: int
    stride_k: int
    steps: int
    num_accepted: Tensor
    num_accepted_stride: int
    seq_lens: Tensor
    seq_lens_stride: int


class Cache(NamedTuple):
    """A cache [Y, B, L, H, D]; strides in elements."""

    data: Tensor
    layer_stride: int
    request_stride: int
    place_stride: int
    head_stride: int
    unit_stride: int


@triton.jit
def path_status(paths, b, accepted, seq_len, places):
    """Give the status of a request: 0 where its nodes may move."""
    in_range = (accepted >= 0) & (accepted <= paths.steps) & (seq_len >= 0) & (seq_len <= places)
    illegal = b.to(tl.int32) * 0
    if in_range:
        row = paths.path + b * paths.stride_b
        for start in range(0, accepted, STEPS):
            k = start + tl.arange(0, STEPS)
            inside = k < accepted
            node = tl.load(row + k * paths.stride_k, mask=inside, other=0).to(tl.int64)
            before = tl.load(row + (k - 1) * paths.stride_k, mask=inside & (k > 0), other=0)
            wrong = inside & ((node <= before.to(tl.int64)) | (node >= places - seq_len))
            illegal += tl.sum(wrong.to(tl.int32), 0)
    return tl.where(in_range, tl.where(illegal > 0, INVALID_TREE, 0), PARAMETER_OUT_OF_RANGE)


@triton.jit(do_not_specialize=["batch", "places"])
def compact(
    paths, cache, status, batch, places, heads, width, chunks,
    WRITES_STATUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the nodes of a request. Grid: layers x requests x blocks of elements."""
    program = tl.program_id(0).to(tl.int64)
    b = program // chunks % batch
    layer = program // chunks // batch
    accepted = tl.load(paths.num_accepted + b * paths.num_accepted_stride).to(tl.int64)
    seq_len = tl.load(paths.seq_lens + b * paths.seq_lens_stride).to(tl.int64)
    found = path_status(paths, b, accepted, seq_len, places)
    if WRITES_STATUS:
        tl.store(status + b, found)
    if found == 0:
        unit = program % chunks * BLOCK + tl.arange(0, BLOCK)
        inside = unit < heads * width
        root = cache.data + layer * cache.layer_stride + b * cache.request_stride
        root += seq_len * cache.place_stride
        root += unit // width * cache.head_stride + unit % width * cache.unit_stride
        row = paths.path + b * paths.stride_b
        for k in range(0, accepted):
            node = tl.load(row + k * paths.stride_k).to(tl.int64)
            if node != k + 1:
                held = tl.load(root + node * cache.place_stride, mask=inside)
                # The place was an earlier node's, which other threads may still be reading.
                tl.debug_barrier()
                tl.store(root + (k + 1) * cache.place_stride, held, mask=inside)


def compact_kv(status: Tensor, call: SimpleNamespace) -> None:
    """Do what `specdec_ext.compact_kv` does, and fill its status."""
    path, accepted, lens = call.path, call.num_accepted, call.seq_lens
    paths = Paths(
        *(path, path.stride(0), path.stride(1), path.shape[1]),
        *(accepted, accepted.stride(0), lens, lens.stride(0)),
    )
    for cache in (call.k_cache, call.v_cache):
        data = cache.view(WORDS[cache.element_size()])
        layers = data if data.dim() == 5 else data[None]
        number, batch, places, heads, width = layers.shape
        heads = heads if layers.numel() else 0
        block = min(triton.next_power_of_2(max(heads * width, 16)), LARGEST_BLOCK)
        # A row of no elements has a status all the same.
        chunks = max(triton.cdiv(heads * width, block), 1)
        launch(
            compact,
            max(number, 1) * batch * chunks,
            *(paths, Cache(layers, *layers.stride()), status),
            *(batch, places, heads, max(width, 1), chunks),
            WRITES_STATUS=cache is call.k_cache,
            BLOCK=block,
        )
