"""tree_attention: a tree's nodes attend to a cached prefix and to their ancestors.

Grid: requests x key heads x blocks of rows x splits of the prefix, the tree's own keys with the
last split; then, if there are several splits, one pass that combines them. A row is a query: node
and head of the group that shares a key head, so that a tile of keys, once loaded, serves a whole
group. Reads the keys and values once a block of rows (the later times from L2; values that are the
beginnings of keys not at all), 8 bytes of bits a node and tile of the tree, and an entry of the
block table a key; writes the output and its log-sum-exp, and with several splits 4 Dv + 4 bytes a
row and split, which it reads again. Neither a mask nor the scores ever are in memory.

Budget, as Triton 3.6 compiles it for sm_90 (compiled, not run): at N = 64, D = 128, groups of 4 and
16 bits a program holds all 256 rows of a group, so that keys and values are read once, in 16 warps
of 128 registers and 128 KB of shared memory, one program a multiprocessor, and spills nothing in
the loop over the prefix. At D = 256 two programs share such a group: the sums of 256 rows alone
would fill the registers of a multiprocessor.

Numerics: scores, softmax and sums in float32, by exponentials of base 2; the weights of values are
rounded to the values' dtype; float32 products are exact products, not TF32.
"""

from __future__ import annotations

from functools import cache
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

#: Entries of the output that a program sums, in float32: half of a multiprocessor's registers, of
#: which scores, weights and addresses take most of the rest. So at N = 64 a program holds all rows
#: of a group of up to 8 heads of 64, 4 of 128, 2 of 256 (half as many under a window).
LARGEST_SUMS = 32768

#: Bytes of shared memory of a program on sm_90, the first whose tensor cores read it themselves.
HOPPER_SHARED = 227 * 1024

#: Of float32 tensors, by the size of queries up to which they hold: keys of a tile, and most rows.
EXACT_TILES = ((64, 64, 64), (128, 32, 64), (576, 16, 32))

#: A split is not worth its combination for fewer keys.
LEAST_KEYS = 512

#: The interpreter multiplies the bit patterns of bfloat16 (triton issue 11584, declined); products
#: of their values in float32 are what hardware computes.
WIDENS = tl.constexpr(INTERPRETED)


class Vectors(NamedTuple):
    """Vectors [B, places, heads, D] of unit stride on D, or [blocks, block size, heads, D]."""

    data: Tensor
    stride_b: int
    stride_place: int
    stride_head: int


class Pages(NamedTuple):
    """The blocks [B, P] of the caches that hold the places of a request, and how many there are."""

    table: Tensor | None
    stride_b: int
    stride_page: int
    blocks: int


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
    """What splits leave for the combination: [B, Hkv, splits, R, D] and [B, Hkv, splits, R].

    A sum of +inf marks a split that met a page which is no block of the cache.
    """

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
    row = tree.ancestors + b * tree.stride_b + node.to(tl.int64) * tree.stride_n
    bits = tl.load(row + word * tree.stride_word, mask=inside, other=0)
    left = tree.nodes - word * 64
    known = tl.where(left >= 64, -1, (tl.full([], 1, tl.int64) << tl.minimum(left, 63)) - 1)
    return bits & known


@triton.jit
def depth_of(tree, b, node, inside):
    """Count the nodes' ancestors."""
    depth = tl.full(node.shape, -1, tl.int32)
    for word in range(0, tl.cdiv(tree.nodes, 64)):
        bits = ancestor_word(tree, b, node, inside, word)
        # Sums of neighbouring bits in fields of 2, 4, then 8.
        bits = bits - ((bits >> 1) & 0x5555555555555555)
        bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
        bits += bits >> 8
        bits += bits >> 16
        bits += bits >> 32
        depth += (bits & 127).to(tl.int32)
    return depth


@triton.jit
def product(a, b):
    """Multiply matrices of one dtype, in float32."""
    if WIDENS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def as_float(x, like, FLOAT8: tl.constexpr):
    """Give numbers in the type of `like`: those of 8 bits, with so many for the exponent, or as is.

    They come as bytes, and are made of float16's bits: not all hardware knows their types.
    """
    if FLOAT8 == 0:
        return x
    bits = x.to(tl.uint16)
    if FLOAT8 == 5:
        half = (bits << 8).to(tl.float16, bitcast=True)
    else:
        # The exponent counts from -7 instead of -15; all ones are NaN.
        half = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((bits & 127) == 127, float("nan"), half).to(tl.float16)
    return half.to(like.dtype)


@triton.jit
def load_keys(keys, place, is_key, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load the entries [FROM, SIZE) of keys, [WIDTH, keys], 0 behind them."""
    d = FROM + tl.arange(0, WIDTH)
    mask = is_key[None, :]
    if FROM + WIDTH > SIZE:
        mask = mask & (d[:, None] < SIZE)
    return tl.load(keys.data + place[None, :] + d[:, None], mask=mask, other=0)


@triton.jit
def attend_keys(
    state, q, keys, values, pages, b, first, number, bits, at, lowest, scale, cap,
    HAS_BITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, SIZE: tl.constexpr, BODY: tl.constexpr, REST: tl.constexpr,
    VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Take a tile of keys into the running softmax; scores are in units of log 2.

    `at` and `lowest` are positions: where keys are, and behind which place a row's window begins.
    """
    largest, total, out, wrong = state
    q_body, q_rest = q
    key = tl.arange(0, KEYS)
    is_key = key < number
    place = first + key
    seen = is_key[None, :]
    if PAGE > 0:
        entry = pages.table + b * pages.stride_b + place // PAGE * pages.stride_page
        block = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        fits = (block >= 0) & (block < pages.blocks)
        wrong = wrong | (is_key & ~fits).to(tl.int32)
        is_key = is_key & fits
        k_place = block * keys.stride_b + place % PAGE * keys.stride_place
        v_place = block * values.stride_b + place % PAGE * values.stride_place
    else:
        k_place = b * keys.stride_b + place * keys.stride_place
        v_place = b * values.stride_b + place * values.stride_place
    k = as_float(load_keys(keys, k_place, is_key, 0, SIZE, BODY), q_body, FLOAT8)
    scores = product(q_body, k)
    if REST > 0:
        k_rest = load_keys(keys, k_place, is_key, BODY, SIZE, REST)
        scores += product(q_rest, as_float(k_rest, q_rest, FLOAT8))
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = cap * (2.0 * tl.sigmoid(scores * (2.0 * scale / cap)) - 1.0) * LOG2_E
    else:
        scores = scores * (scale * LOG2_E)
    if HAS_BITS:
        seen = seen & (((bits[:, None] >> key[None, :].to(tl.int64)) & 1) != 0)
    if HAS_WINDOW:
        seen = seen & (at[None, :] > lowest[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen nothing yet has -inf, which must not be subtracted from itself.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    if LATENT:
        v = tl.trans(k)
    else:
        d = tl.arange(0, WIDTH)
        v = tl.load(
            values.data + v_place[:, None] + d[None, :],
            mask=is_key[:, None] & (d[None, :] < VALUE_SIZE),
            other=0,
        )
        v = as_float(v, q_body, FLOAT8)
    out = out * shrink[:, None] + product(weights.to(v.dtype), v)
    return new_largest, total, out, wrong


@triton.jit
def head_of(vectors, head):
    """Give the vectors of one head."""
    data = vectors.data + head * vectors.stride_head
    return Vectors(data, vectors.stride_b, vectors.stride_place, vectors.stride_head)


@triton.jit
def write(
    out, tree, b, node, head, heads, largest, total, found, seen, is_here, inside,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write rows of the output; `found` is yet to be divided by the sum of weights."""
    largest = tl.where(seen != 0, largest + tl.log2(total), float("-inf"))
    found = tl.where((seen != 0)[:, None], found / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    row = b * tree.nodes * heads + node * heads + head
    d = tl.arange(0, WIDTH)
    tl.store(out.lse + row, tl.where(is_here, largest * LN_2, float("nan")), mask=inside)
    tl.store(
        out.data + row[:, None] * SIZE + d[None, :],
        tl.where(is_here[:, None], found, float("nan")).to(out.data.dtype.element_ty),
        mask=inside[:, None] & (d[None, :] < SIZE),
    )


@triton.jit
def load_queries(at, inside, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load the entries [FROM, SIZE) of queries, [rows, WIDTH], 0 behind them."""
    d = FROM + tl.arange(0, WIDTH)
    return tl.load(at[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < SIZE), other=0)


@triton.jit(do_not_specialize=["splits", "window"])
def attend(
    q, keys, values, pages, tree, partial, out, heads, key_heads, splits, scale, cap, window,
    k_scale, k_scale_stride, v_scale, v_scale_stride,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, BODY: tl.constexpr,
    REST: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Attend to a split of the keys. Grid: requests x key heads x blocks of rows x splits."""
    group = heads // key_heads
    rows = tree.nodes * group
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    split = program % splits
    block = (program // splits % blocks).to(tl.int32)
    key_head = program // splits // blocks % key_heads
    b = program // splits // blocks // key_heads
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    node = row // group
    head = key_head.to(tl.int32) * group + row % group
    seq_len = seq_len_of(tree, b)
    length = tl.maximum(seq_len, 0)
    start = tl.zeros_like(length)
    lowest = tl.zeros([ROWS], tl.int32)
    if HAS_WINDOW:
        # What is before the root's window nobody sees.
        start = tl.maximum(length - window + 1, 0)
        lowest = depth_of(tree, b, node, inside) - window

    at = q.data + b * q.stride_b
    at += node.to(tl.int64) * q.stride_place + head.to(tl.int64) * q.stride_head
    q_body = load_queries(at, inside, 0, SIZE, BODY)
    q_rest = q_body
    if REST > 0:
        q_rest = load_queries(at, inside, BODY, SIZE, REST)
    queries = (q_body, q_rest)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + key_head * k_scale_stride)
    own_keys = head_of(keys, key_head)
    own_values = head_of(values, key_head)
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, WIDTH], tl.float32),
        tl.zeros([KEYS], tl.int32),
    )
    key = tl.arange(0, KEYS)
    bits = tl.zeros([ROWS], tl.int64)
    share = tl.cdiv(tl.cdiv(length - start, splits), KEYS) * KEYS
    end = tl.minimum(start + (split + 1) * share, length)
    for first in range(start + split * share, end, KEYS):
        state = attend_keys(
            state, queries, own_keys, own_values, pages, b, first, end - first, bits,
            (first - length).to(tl.int32) + key, lowest, scale, cap,
            False, HAS_WINDOW, HAS_CAP, PAGE, KEYS, SIZE, BODY, REST, VALUE_SIZE, WIDTH, LATENT,
            FLOAT8,
        )  # fmt: skip
    seen = tl.zeros([ROWS], tl.int32)
    if (split == splits - 1) & (seq_len >= 0):
        for below in range(0, tree.nodes, KEYS):
            word = ancestor_word(tree, b, node, inside, below // 64)
            bits = word >> (below % 64)
            seen = seen | (bits != 0).to(tl.int32)
            depth = key
            if HAS_WINDOW:
                depth = depth_of(tree, b, below + key, below + key < tree.nodes)
            state = attend_keys(
                state, queries, own_keys, own_values, pages, b, seq_len + below,
                tree.nodes - below, bits, depth, lowest, scale, cap,
                True, HAS_WINDOW, HAS_CAP, PAGE, KEYS, SIZE, BODY, REST, VALUE_SIZE, WIDTH, LATENT,
                FLOAT8,
            )  # fmt: skip
    largest, total, found, wrong = state
    is_right = inside
    if PAGE > 0:
        is_right = inside & (tl.max(wrong, 0) == 0)
    if v_scale is not None:
        found = found * tl.load(v_scale + key_head * v_scale_stride)
    if SPLIT:
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        place = ((b * key_heads + key_head) * splits + split) * rows + row
        log2_sum = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
        log2_sum = tl.where(is_right, log2_sum, float("inf"))
        tl.store(partial.log2_sum + place, log2_sum, mask=inside)
        d = tl.arange(0, WIDTH)
        has_entry = inside[:, None] & (d[None, :] < VALUE_SIZE)
        tl.store(partial.out + place[:, None] * VALUE_SIZE + d[None, :], found, mask=has_entry)
    else:
        write(
            out, tree, b, node, head, heads, largest, total, found, seen,
            is_right & (seq_len >= 0), inside, VALUE_SIZE, WIDTH,
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
    row = (program % blocks).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    node = row // group
    d = tl.arange(0, WIDTH)
    has_entry = inside[:, None] & (d[None, :] < SIZE)
    seen = tl.zeros([ROWS], tl.int32)
    for word in range(0, words):
        seen = seen | (ancestor_word(tree, b, node, inside, word) != 0).to(tl.int32)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    is_here = inside & (seq_len_of(tree, b) >= 0)
    for split in range(0, splits):
        place = ((b * key_heads + key_head) * splits + split) * rows + row
        log2_sum = tl.load(partial.log2_sum + place, mask=inside, other=float("-inf"))
        part = tl.load(partial.out + place[:, None] * SIZE + d[None, :], mask=has_entry, other=0.0)
        is_here = is_here & (log2_sum != float("inf"))
        new_largest = tl.maximum(largest, log2_sum)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(log2_sum - base)
        total = total * shrink + weight
        found = found * shrink[:, None] + part * weight[:, None]
        largest = new_largest
    head = key_head.to(tl.int32) * group + row % group
    write(
        out, tree, b, node, head, heads, largest, total, found, seen, is_here, inside, SIZE, WIDTH,
    )  # fmt: skip


def _vectors(tensor: Tensor) -> Vectors:
    return Vectors(tensor, *tensor.stride()[:3])


def _pages(table: Tensor | None, cache: Tensor) -> Pages:
    if table is None:
        return Pages(None, 0, 0, 0)
    return Pages(table, table.stride(0), table.stride(1), cache.shape[0])


def _number_of_splits(programs: int, places: int) -> int:
    """Choose the splits of the prefix by what is known without the device: the cache's size."""
    wanted = 2 if INTERPRETED else PROGRAMS // max(programs, 1)
    return max(1, min(wanted, places // LEAST_KEYS))


def _halves(size: int) -> tuple[int, int]:
    """Cut vectors into two powers of two where that is shorter than one: 576 is 512 and 64."""
    whole = max(triton.next_power_of_2(size), 16)
    body = whole // 2
    rest = max(triton.next_power_of_2(size - body), 16)
    return (body, rest) if body >= 16 and body + rest < whole else (whole, 0)


def _are_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether values are the beginnings of the keys: those of latent attention (MLA)."""
    size = v_cache.shape[3]
    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and k_cache.stride() == v_cache.stride()
        and max(triton.next_power_of_2(size), 16) == _halves(k_cache.shape[3])[0]
    )


class Tile(NamedTuple):
    """What a program works on at once: rows of queries and keys of the cache; its warps."""

    rows: int
    keys: int
    warps: int


class Sizes(NamedTuple):
    """Entries of vectors as tiles hold them, and their bytes."""

    query: int
    value: int
    read: int  # of a place: its key, and its value unless that is a part of the key
    entry: int  # bytes of an entry of a query
    cached: int  # ... and of one of the cache


@cache
def shared_memory(device: torch.device) -> int:
    """Give the bytes of shared memory that a program can have."""
    if INTERPRETED:
        return HOPPER_SHARED
    index = device.index if device.index is not None else 0
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _shared_bytes(tile: Tile, sizes: Sizes) -> int:
    """Bound what a program holds in shared memory: its queries, and two stages of keys and values.

    What is cached in 8 bits is there once more as the queries' type. At the end the sums, float32,
    go through shared memory to be stored in order.
    """
    copies = 2 * sizes.cached + (sizes.entry if sizes.cached < sizes.entry else 0)
    loop = tile.rows * sizes.query * sizes.entry + tile.keys * sizes.read * copies
    return max(loop, tile.rows * sizes.value * 4)


def _tile(rows: int, sizes: Sizes, window: int, available: int) -> Tile:
    """Choose the largest tile that registers (see `LARGEST_SUMS`) and shared memory bear."""
    wide, sums = sizes.value > 128, LARGEST_SUMS
    # Positions need registers too, and of wide rows so do numbers that are decoded and operands
    # that do not come out of shared memory.
    if window > 0:
        sums //= 2
    if wide and (sizes.cached < sizes.entry or available < HOPPER_SHARED):
        sums //= 2
    keys, largest = 64 if sizes.query * sizes.entry <= 256 else 32, sums // sizes.value
    if sizes.entry == 4:  # exact products use no tensor cores, and registers for their operands
        keys, largest = next(e[1:] for e in EXACT_TILES if sizes.query <= e[0])
    tile = Tile(max(16, min(triton.next_power_of_2(rows), largest, 512)), keys, 4)
    while tile.rows * sizes.value * 4 > available:
        tile = tile._replace(rows=tile.rows // 2)
    while tile.keys > 16 and _shared_bytes(tile, sizes) > available:
        tile = tile._replace(keys=tile.keys // 2)
    while tile.rows > 16 and _shared_bytes(tile, sizes) > available:
        tile = tile._replace(rows=tile.rows // 2)
    sums = tile.rows * sizes.value
    if sizes.entry < 4 and sums > LARGEST_SUMS // 2:
        keys = min(tile.keys, 16 if wide else 32)
        return tile._replace(keys=keys, warps=16 if sizes.value <= 256 else 8)
    if sizes.entry < 4 and tile.rows > 128:
        return tile._replace(warps=16)
    return tile._replace(warps=8 if sums > 64 * 64 else 4)


def _bytes_of(cache: Tensor) -> tuple[Tensor, int]:
    """Give a cache as kernels read it, and the exponent's bits of 8-bit floats, 0 of others."""
    bits = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}.get(cache.dtype, 0)
    return (cache.view(torch.uint8) if bits else cache), bits


def _factor(scale: Tensor | None) -> tuple[Tensor | None, int]:
    """Give factors of the heads, and the stride from one to the next: 0 where they share one."""
    return scale, scale.stride(0) if scale is not None and scale.numel() > 1 else 0


def tree_attention(outputs: tuple[Tensor, Tensor], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.tree_attention`."""
    q, lens, ancestors, table = call.q, call.seq_lens, call.ancestors, call.block_table
    batch, nodes, heads, size = q.shape
    places, key_heads, value_size = call.v_cache.shape[1:]
    page = 0 if table is None else places
    places *= 1 if table is None else table.shape[1]
    window = call.window if call.window < places else 0
    body, rest = _halves(size)
    width = max(triton.next_power_of_2(value_size), 16)
    keys, float8 = _bytes_of(call.k_cache)
    values, _ = _bytes_of(call.v_cache)
    rows = nodes * heads // key_heads
    latent = _are_latent(call.k_cache, call.v_cache)
    read = body + rest + (0 if latent else width)
    sizes = Sizes(body + rest, width, read, q.element_size(), keys.element_size())
    tile = _tile(rows, sizes, window, shared_memory(q.device))
    programs = batch * key_heads * triton.cdiv(rows, tile.rows)
    splits = _number_of_splits(programs, min(places, window) if window > 0 else places)
    strides: tuple[int, int, int] = ancestors.stride()
    tree = Tree(ancestors, *strides, lens, lens.stride(0), nodes, places)
    out, partial = Output(*outputs), None
    if splits > 1:
        shape = (batch, key_heads, splits, rows)
        partial = Splits(
            q.new_empty((*shape, value_size), dtype=torch.float32),
            q.new_empty(shape, dtype=torch.float32),
        )
    launch(
        attend,
        programs * splits,
        *(_vectors(q), _vectors(keys), _vectors(values), _pages(table, keys), tree, partial, out),
        *(heads, key_heads, splits),
        *(float(size**-0.5 if call.scale is None else call.scale), float(call.soft_cap), window),
        *(*_factor(call.k_scale), *_factor(call.v_scale)),
        HAS_WINDOW=window > 0,
        HAS_CAP=call.soft_cap > 0,
        SPLIT=splits > 1,
        PAGE=page,
        ROWS=tile.rows,
        KEYS=tile.keys,
        SIZE=size,
        BODY=body,
        REST=rest,
        VALUE_SIZE=value_size,
        WIDTH=width,
        LATENT=latent,
        FLOAT8=float8,
        num_warps=tile.warps,
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
            SIZE=value_size,
            WIDTH=width,
            enable_fp_fusion=True,
        )
