"""From tensors to kernels: named tuples, grids, workspace, and the launches that operators share.

Nothing here looks at a value on the device, and workspace comes from torch's allocator: a call
can be captured in a CUDA graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from .cutoff import MAX_CANDIDATES, NO_WORK, Work, collect, find_floors
from .finish import finish_laws
from .law_pass import NO_BATCH, NOTHING, Batch, Summaries, law_pass
from .laws import (
    GROUP,
    LAW_FIELDS,
    NO_HELD,
    NO_LISTS,
    NO_MAP,
    NO_MASK,
    NO_SAMPLING,
    SAMPLING,
    Mask,
    Rows,
    Sampling,
    TokenLists,
    TokenMap,
)
from .philox import Coins

#: Whether kernels are interpreted on the CPU: TRITON_INTERPRET as it was when they were defined.
INTERPRETED = not isinstance(law_pass, triton.JITFunction)

#: Entries of the vocabulary that are reduced at once. Smaller vocabularies have one smaller tile.
LARGEST_TILE = 4096

#: Programs that a pass over the vocabulary aims at, so that few rows fill a large chip too. How
#: rows are split never changes a bit of a result.
PROGRAMS = 1 if INTERPRETED else 2048


class Tiling(NamedTuple):
    """How a call cuts its vocabulary."""

    size: int
    number: int

    def splits(self, rows: int) -> int:
        """Give the number of programs that share a row."""
        return max(1, min(self.number, PROGRAMS // max(rows, 1)))


def tiling(*vocabularies: int) -> Tiling:
    """Choose the tiles of rows as long as the longest vocabulary."""
    entries = max(vocabularies)
    size = min(max(triton.next_power_of_2(entries), GROUP.value), LARGEST_TILE)
    return Tiling(size, triton.cdiv(entries, size))


def launch(kernel: Any, programs: int, *args: Any, num_warps: int = 4, **meta: Any) -> None:
    """Run a kernel, unless there is nothing to do.

    Products and differences are rounded one by one: where p = q, p - q is exactly 0. A kernel may
    ask for ``enable_fp_fusion``.
    """
    if programs > 0:
        # The interpreter meets infinities and NaN where kernels do, in numpy, which would warn.
        quiet = np.errstate(all="ignore") if INTERPRETED else nullcontext()
        with quiet:
            kernel[(programs,)](*args, num_warps=num_warps, **{"enable_fp_fusion": False, **meta})


# ---- arguments ----------------------------------------------------------------------------------


def stride_of(tensor: Tensor | None, dim: int = 0) -> int:
    """Give a stride in elements, 0 of what is not there."""
    return tensor.stride(dim) if tensor is not None else 0


def mask_of(words: Tensor | None, num_tokens: int) -> Mask:
    """Describe a mask [R, W] or [B, S, W] over so many tokens."""
    if words is None:
        return NO_MASK
    return Mask(words, words.stride(0), words.stride(1) if words.dim() == 3 else 0, num_tokens)


def rows_of(
    tensor: Tensor,
    index: Tensor | None = None,
    *,
    linear: bool = False,
    mask: Mask = NO_MASK,
    token_map: TokenMap = NO_MAP,
    lists: TokenLists = NO_LISTS,
    vocab: int | None = None,
) -> Rows:
    """Describe [R, V], [B, S, V], or with an index [B, S] a table [R, V] or [B, R, V].

    Lists are over a vocabulary that their rows do not tell.
    """
    if tensor.dim() == 3:
        stride_b, stride_s, number = tensor.stride(0), tensor.stride(1), tensor.shape[1]
    elif index is not None:
        stride_b, stride_s, number = 0, tensor.stride(0), tensor.shape[0]
    else:
        stride_b, stride_s, number = tensor.stride(0), 0, 1
    return Rows(
        tensor,
        tensor.shape[-1] if vocab is None else vocab,
        number if index is None else index.shape[1],
        stride_b,
        stride_s,
        1 if linear else None,
        index,
        stride_of(index),
        stride_of(index, 1),
        number,
        mask,
        token_map,
        lists,
        NO_HELD,
    )


def sampling_of(call: SimpleNamespace, prefix: str = "") -> Sampling:
    """Describe sampling parameters, [B] each: what stands behind the prefix, else the target's."""
    given = []
    for name in SAMPLING:
        own = getattr(call, prefix + name)
        tensor = own if own is not None else getattr(call, name)
        given += [tensor, stride_of(tensor)]
    return Sampling(None, *given)


def coins_of(
    uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None, stream: int
) -> Coins:
    """Describe where uniforms [B] or [B, n], or seeds and positions [B], lie."""
    two = uniforms is not None and uniforms.dim() == 2
    return Coins(
        uniforms,
        stride_of(uniforms),
        stride_of(uniforms, 1) if two else 0,
        seeds,
        stride_of(seeds),
        positions,
        stride_of(positions),
        stream,
    )


def batch_of(
    rows: Rows,
    sampling: Sampling,
    tokens: Tensor | None = None,
    lengths: Tensor | None = None,
    target: Sampling = NO_SAMPLING,
    wanted: Tensor | None = None,
) -> Batch:
    """Describe rows, their parameters, the tokens [B, n] drafted at them, and which rows matter."""
    number = 0 if tokens is None else tokens.shape[1]
    strides = (stride_of(tokens), stride_of(tokens, 1))
    return Batch(
        *(rows, sampling, tokens, *strides, number, lengths, stride_of(lengths), target, wanted),
        None,
    )


def has_filters(sampling: Sampling) -> bool:
    """Whether a call may need selections: what only the device knows is which rows do."""
    given = (sampling.top_k, sampling.top_p, sampling.min_p)
    return sampling.greedy is None and any(tensor is not None for tensor in given)


# ---- laws ---------------------------------------------------------------------------------------


def compute_laws(
    tiles: Tiling,
    first: Batch,
    first_rows: int,
    second: Batch = NO_BATCH,
    second_rows: int = 0,
    *,
    extra: Any = NOTHING,
    want_argmax: bool = False,
    ranks: Any = None,
) -> Tensor:
    """Compute the laws of the rows of two batches, [rows, LAW_FIELDS] float64.

    With `sharded.Ranks`, each has a part of the rows, and all compute all laws.
    """
    rows = first_rows + second_rows
    second = second if second_rows > 0 else NO_BATCH
    if ranks is not None:
        first, second = ranks.values(first, first_rows, second, second_rows)
    new = first.rows.data.new_empty
    per_tile = (rows, tiles.number)
    filters = has_filters(first.sampling) or has_filters(second.sampling)
    groups = tiles.size // GROUP.value
    summaries = Summaries(
        new(per_tile, dtype=torch.float32),
        new(per_tile, dtype=torch.float64),
        new(per_tile, dtype=torch.float64) if extra.value != NOTHING.value else None,
        new((rows, tiles.number, groups), dtype=torch.float32) if filters else None,
    )
    splits = tiles.splits(rows)
    passes = dict(TILE=tiles.size, num_warps=8)
    launch(
        law_pass,
        rows * splits,
        *(first, second, summaries, first_rows, tiles.number, splits),
        EXTRA=extra.value,
        **passes,
    )
    if ranks is not None:
        ranks.share(tiles, *(values for values in summaries if values is not None))
    work = NO_WORK
    if filters:
        work = Work(
            new(rows, dtype=torch.float32),
            new(rows, dtype=torch.int32),
            new((rows, MAX_CANDIDATES.value), dtype=torch.float32),
            new(per_tile, dtype=torch.int64),
            *(None, None, None),
        )
        if ranks is not None:
            work.masses.zero_()  # each rank sums those of its own tiles
        launch(
            find_floors, rows, first, second, summaries, work, first_rows, tiles.number, **passes
        )
        launch(
            collect,
            rows * splits,
            *(first, second, summaries, work, first_rows, tiles.number, splits),
            **passes,
        )
        if ranks is not None:
            work = ranks.narrow(tiles, first, second, first_rows, summaries, work, extra)
    if ranks is not None:
        work = ranks.argmax(tiles, first, second, first_rows, summaries, work)
    laws: Tensor = new((rows, LAW_FIELDS.value), dtype=torch.float64)
    launch(
        finish_laws,
        rows,
        *(first, second, summaries, work, laws, first_rows, tiles.number),
        EXTRA=extra.value,
        WANT_ARGMAX=want_argmax,
        **passes,
    )
    return laws
