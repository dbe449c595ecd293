"""tree_attention: a tree's nodes attend to a cached prefix and to their ancestors.

Grid: requests x key heads x blocks of rows x splits of the prefix, the tree's own keys with the
last split; then, if there are several splits, one pass that combines them. A row is a query: node
and head of the group that shares a key head, so that a tile of keys, once loaded, serves a whole
group. Reads the keys and values once a block of rows (the later times from L2), 8 bytes of bits a
node and tile of the tree; writes the output, and with several splits 4 D bytes a row and split,
which it reads again. Neither a mask nor the scores ever are in memory.

Numerics: scores, softmax and sums in float32, by exponentials of base 2; the weights of values are
rounded to the values' dtype; float32 products are exact products, not TF32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, launch

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

#: Programs that a call aims at: a few for each multiprocessor of a large GPU.
PROGRAMS = 512

#: A split is not worth its combination for fewer keys.
LEAST_KEYS = 512


#: The interpreter multiplies the bit patterns of bfloat16 (triton issue 11584, declined); products
#: of their values in float32 are what hardware computes.
WIDENS = tl.constexpr(INTERPRETED)


class Vectors(NamedTuple):
    """Vectors [B, places, heads, D] of unit stride on D."""

    data: Tensor
    stride_b: int
    stride_place: int
    stride_head: int


class Tree(NamedTuple):
    """The ancestor bits [B, N, words] and where the trees lie."""

    ancestors: Tensor
    stride_b: int
    stride_n: int
    stride_word: int
    seq_lens: Tensor
    seq_lens_stride: int
    nodes: int
    places: int


class Output(NamedTuple):
    """What a call returns, contiguous: [B, N, H, D] and the log-sum-exp [B, N, H]."""

    data: Tensor
    lse: Tensor


class Splits(NamedTuple):
    """What splits leave for the combination: [B, Hkv, splits, R, D] and [B, Hkv, splits, R]."""

    out: Tensor
    log2_sum: Tensor


@triton.jit
def seq_len_of(tree, b):
    """Give the length of the prefix, -1 where the tree is not in the cache."""
    seq_len = tl.load(tree.seq_lens + b * tree.seq_lens_stride).to(tl.int64)
    return tl.where((seq_len >= 0) & (seq_len <= tree.places - tree.nodes), seq_len, -1)


@triton.jit
def ancestor_word(tree, b, node, inside, word):
    """Load a word of the nodes' bits; bits of nodes that there are none of are 0."""
    row = tree.ancestors + b * tree.stride_b + node * tree.stride_n
    bits = tl.load(row + word * tree.stride_word, mask=inside, other=0)
    left = tree.nodes - word * 64
    known = tl.where(left >= 64, -1, (tl.full([], 1, tl.int64) << tl.minimum(left, 63)) - 1)
    return bits & known


@triton.jit
def product(a, b):
    """Multiply matrices of one dtype, in float32."""
    if WIDENS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def attend_keys(
    state, q, keys, values, first, number, bits, scale, cap,
    HAS_BITS: tl.constexpr, HAS_CAP: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Take a tile of keys into the running softmax; scores are in units of log 2."""
    largest, total, out = state
    d = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    is_key = key < number
    place = first + key
    k = tl.load(
        keys.data + place[None, :] * keys.stride_place + d[:, None],
        mask=is_key[None, :] & (d[:, None] < SIZE),
        other=0.0,
    )
    scores = product(q, k)
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = cap * (2.0 * tl.sigmoid(scores * (2.0 * scale / cap)) - 1.0) * LOG2_E
    else:
        scores = scores * (scale * LOG2_E)
    seen = is_key[None, :]
    if HAS_BITS:
        seen = seen & (((bits[:, None] >> key[None, :].to(tl.int64)) & 1) != 0)
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen nothing yet has -inf, which must not be subtracted from itself.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(
        values.data + place[:, None] * values.stride_place + d[None, :],
        mask=is_key[:, None] & (d[None, :] < SIZE),
        other=0.0,
    )
    out = out * shrink[:, None] + product(weights.to(v.dtype), v)
    return new_largest, total, out


@triton.jit
def head_of(vectors, b, head):
    """Give the vectors of one request and head."""
    data = vectors.data + b * vectors.stride_b + head * vectors.stride_head
    return Vectors(data, vectors.stride_b, vectors.stride_place, vectors.stride_head)


@triton.jit
def write(
    out, tree, b, node, head, heads, largest, total, found, seen, seq_len, inside,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write rows of the output; `found` is yet to be divided by the sum of weights."""
    largest = tl.where(seen != 0, largest + tl.log2(total), float("-inf"))
    found = tl.where((seen != 0)[:, None], found / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    is_here = seq_len >= 0
    row = (b * tree.nodes + node) * heads + head
    d = tl.arange(0, WIDTH)
    tl.store(out.lse + row, tl.where(is_here, largest * LN_2, float("nan")), mask=inside)
    tl.store(
        out.data + row[:, None] * SIZE + d[None, :],
        tl.where(is_here, found, float("nan")).to(out.data.dtype.element_ty),
        mask=inside[:, None] & (d[None, :] < SIZE),
    )


@triton.jit(do_not_specialize=["splits"])
def attend(
    q, keys, values, tree, partial, out, heads, key_heads, splits, scale, cap,
    HAS_CAP: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to a split of the keys. Grid: requests x key heads x blocks of rows x splits."""
    group = heads // key_heads
    rows = tree.nodes * group
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    split = program % splits
    block = program // splits % blocks
    key_head = program // splits // blocks % key_heads
    b = program // splits // blocks // key_heads
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    node = row // group
    head = key_head * group + row % group
    d = tl.arange(0, WIDTH)
    has_entry = inside[:, None] & (d[None, :] < SIZE)
    seq_len = seq_len_of(tree, b)
    length = tl.maximum(seq_len, 0)

    at = q.data + b * q.stride_b + node * q.stride_place + head * q.stride_head
    queries = tl.load(at[:, None] + d[None, :], mask=has_entry, other=0.0)
    own_keys = head_of(keys, b, key_head)
    own_values = head_of(values, b, key_head)
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, WIDTH], tl.float32),
    )
    bits = tl.zeros([ROWS], tl.int64)
    share = tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS
    end = tl.minimum((split + 1) * share, length)
    for first in range(split * share, end, KEYS):
        state = attend_keys(
            state, queries, own_keys, own_values, first, end - first, bits, scale, cap,
            False, HAS_CAP, SIZE, KEYS, WIDTH,
        )  # fmt: skip
    seen = tl.zeros([ROWS], tl.int64)
    if (split == splits - 1) & (seq_len >= 0):
        for below in range(0, tree.nodes, KEYS):
            word = ancestor_word(tree, b, node, inside, below // 64)
            bits = word >> (below % 64)
            seen = seen | bits
            state = attend_keys(
                state, queries, own_keys, own_values, seq_len + below, tree.nodes - below, bits,
                scale, cap, True, HAS_CAP, SIZE, KEYS, WIDTH,
            )  # fmt: skip
    largest, total, found = state
    if SPLIT:
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        place = ((b * key_heads + key_head) * splits + split) * rows + row
        log2_sum = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
        tl.store(partial.log2_sum + place, log2_sum, mask=inside)
        tl.store(partial.out + place[:, None] * SIZE + d[None, :], found, mask=has_entry)
    else:
        write(
            out, tree, b, node, head, heads, largest, total, found, seen, seq_len, inside,
            SIZE, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def combine(
    tree, partial, out, heads, key_heads, splits, words,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of rows. Grid: requests x key heads x blocks of rows."""
    group = heads // key_heads
    rows = tree.nodes * group
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    key_head = program // blocks % key_heads
    b = program // blocks // key_heads
    row = program % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    node = row // group
    d = tl.arange(0, WIDTH)
    has_entry = inside[:, None] & (d[None, :] < SIZE)
    seen = tl.zeros([ROWS], tl.int64)
    for word in range(0, words):
        seen = seen | ancestor_word(tree, b, node, inside, word)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(0, splits):
        place = ((b * key_heads + key_head) * splits + split) * rows + row
        log2_sum = tl.load(partial.log2_sum + place, mask=inside, other=float("-inf"))
        part = tl.load(partial.out + place[:, None] * SIZE + d[None, :], mask=has_entry, other=0.0)
        new_largest = tl.maximum(largest, log2_sum)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(log2_sum - base)
        total = total * shrink + weight
        found = found * shrink[:, None] + part * weight[:, None]
        largest = new_largest
    write(
        out, tree, b, node, key_head * group + row % group, heads, largest, total, found, seen,
        seq_len_of(tree, b), inside, SIZE, WIDTH,
    )  # fmt: skip


def _vectors(tensor: Tensor) -> Vectors:
    return Vectors(tensor, *tensor.stride()[:3])


def _number_of_splits(programs: int, places: int) -> int:
    """Choose the splits of the prefix by what is known without the device: the cache's size."""
    wanted = 2 if INTERPRETED else PROGRAMS // max(programs, 1)
    return max(1, min(wanted, places // LEAST_KEYS))


def tree_attention(outputs: tuple[Tensor, Tensor], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.tree_attention`."""
    q, lens, ancestors = call.q, call.seq_lens, call.ancestors
    batch, nodes, heads, size = q.shape
    places, key_heads = call.k_cache.shape[1:3]
    width = max(triton.next_power_of_2(size), 16)
    # Tiles as large as the registers and the shared memory of all targets bear.
    bytes_of_row = width * q.element_size()
    keys = 64 if bytes_of_row <= 256 else 32 if bytes_of_row <= 512 else 16
    largest = 128 if bytes_of_row <= 128 else 64 if bytes_of_row <= 512 else 32
    rows = nodes * heads // key_heads
    block = min(max(triton.next_power_of_2(rows), 16), largest)
    programs = batch * key_heads * triton.cdiv(rows, block)
    splits = _number_of_splits(programs, places)
    strides: tuple[int, int, int] = ancestors.stride()
    tree = Tree(ancestors, *strides, lens, lens.stride(0), nodes, places)
    out, partial = Output(*outputs), None
    if splits > 1:
        shape = (batch, key_heads, splits, rows)
        partial = Splits(
            q.new_empty((*shape, size), dtype=torch.float32),
            q.new_empty(shape, dtype=torch.float32),
        )
    sizes = dict(SIZE=size, WIDTH=width)
    launch(
        attend,
        programs * splits,
        *(_vectors(q), _vectors(call.k_cache), _vectors(call.v_cache), tree, partial, out),
        *(heads, key_heads, splits),
        *(float(size**-0.5 if call.scale is None else call.scale), float(call.soft_cap)),
        HAS_CAP=call.soft_cap > 0,
        SPLIT=splits > 1,
        ROWS=block,
        KEYS=keys,
        **sizes,
        num_warps=8 if block * width > 64 * 64 else 4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    if splits > 1:
        block = 16
        launch(
            combine,
            batch * key_heads * triton.cdiv(rows, block),
            *(tree, partial, out, heads, key_heads, splits, ancestors.shape[2]),
            ROWS=block,
            **sizes,
            enable_fp_fusion=True,
        )
