"""Laws of rows on the device: csrc/core/row_law.h, and how arguments reach a kernel.

Arguments travel in named tuples. A tensor that the caller did not give is None there, which Triton
knows at compile time: kernels are compiled for what is present, while sizes and strides stay run
time values (Triton tells apart only 1, multiples of 16 and the rest).

Triton 3.6 asks for four more habits. It compares no tuple with None that holds None: where a tuple
is not given, all its fields are None, and its first tensor is asked. It returns no None from a
device function: `absent()` stands for it there, which its type tells from a pointer. And a tuple
that holds others ends with a field that is always None, `end`: the type of a tuple is worked out
when one of its own constants is set, in the order of its fields. Without a last one it would be the
type of before the constants in its tuples were set: None within branches and loops.
Last, no loop sets a name to a mere copy of another, `a = b`, where both had one value before it:
the loop would not carry a, which then stays what it was, without a word (so does 3.9). The
interpreter does not show it; test_triton_compile.py looks for it.

Two habits of the kernels have their reason in the interpreter, which runs the same text in numpy: a
scalar condition meets a vector through `tl.where`, never through `&`, and loop variables, which it
makes Python ints, have no methods.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..contract import GREEDY_BELOW

# ---- what comes in ------------------------------------------------------------------------------


class Mask(NamedTuple):
    """Which tokens each row allows: bit t % 32 of word t / 32, [B, steps, words] int32."""

    words: Any
    stride_b: Any
    stride_s: Any
    num_tokens: Any  # tokens from here on are not allowed


class TokenMap(NamedTuple):
    """A reduced vocabulary: which tokens its entries stand for; see token_map.py."""

    tokens: Any  # [vocab] int32
    places: Any  # [num_tokens] int32, the entry of a token or -1; None where nothing asks for it
    broken: Any  # [1] int32, not 0: an id out of range, or a repeated one
    num_tokens: Any


class TokenLists(NamedTuple):
    """Which tokens rows of probabilities are of, where they name few; see token_lists.py."""

    tokens: Any  # int32, of each probability, ascending
    counts: Any  # int32, of each row: how many; 0: no legal list
    width: Any  # of a row in memory


class Held(NamedTuple):
    """What lies here of rows whose columns several ranks hold; see sharded.py.

    This rank works on whole tiles. The last of them may begin here and end on others: it is in a
    tensor of its own.
    """

    begin: Any  # the entry that is in the first column
    first: Any  # where the first tile begins that this rank works on, ...
    last: Any  # ... and where the last one ends; both are multiples of the tile
    tail: Any  # rows of the tile from `tail_begin` on; not read where that is not below `last`
    tail_begin: Any
    tail_stride_b: Any
    tail_stride_s: Any


class Rows(NamedTuple):
    """Rows over a vocabulary: dense [B, steps, vocab], or through an index into a table.

    Tables are [num_rows, vocab], of stride_b 0, or each request's own, [B, num_rows, vocab].
    Strides in elements.
    """

    data: Any
    vocab: Any
    steps: Any
    stride_b: Any
    stride_s: Any
    linear: Any  # not None: probabilities, not logits
    index: Any  # [B, steps] row numbers, or None
    index_stride_b: Any
    index_stride_s: Any
    num_rows: Any
    mask: Any  # Mask; NO_MASK: it hides nothing
    map: Any  # TokenMap; NO_MAP: entry i is token i
    lists: Any  # TokenLists; NO_LISTS: rows hold the whole vocabulary
    held: Any  # Held; NO_HELD: all entries are here
    end: None = None


class Row(NamedTuple):
    """One row; what its mask hides is in it as an entry of weight 0.

    Its last pointers may be absent, which is `absent()`: ask with ``.dtype.is_ptr()``.
    """

    data: Any
    entries: Any  # how many; 0: no such row
    known: Any  # tokens that the mask and `places` know
    words: Any  # of its mask; absent: it hides nothing
    tokens: Any  # token of each entry; absent: entry i is token i
    places: Any  # where each token lies; without `tokens`, entry i is token i there
    listed: Any  # the tokens of a list, whose probabilities are `data`; absent: it is none
    count: Any  # how many they are
    first: Any  # of `Held`, as are the next two; absent: all entries are here
    last: Any
    tail: Any
    tail_begin: Any


class Sampling(NamedTuple):
    """Sampling parameters, [B] each or None; `greedy` not None: all requests at T = 0."""

    greedy: Any
    temperature: Any
    temperature_stride: Any
    top_k: Any
    top_k_stride: Any
    top_p: Any
    top_p_stride: Any
    min_p: Any
    min_p_stride: Any


NO_MASK = Mask(*[None] * len(Mask._fields))
NO_MAP = TokenMap(*[None] * len(TokenMap._fields))
NO_LISTS = TokenLists(*[None] * len(TokenLists._fields))
NO_HELD = Held(*[None] * len(Held._fields))
NO_ROWS = Rows._make([*[None] * 10, NO_MASK, NO_MAP, NO_LISTS, NO_HELD, None])
#: The parameters, each of which has a stride behind it.
SAMPLING = Sampling._fields[1::2]
NO_SAMPLING = Sampling(None, *[None, 0] * len(SAMPLING))  # T = 1 without filters
ALL_GREEDY = NO_SAMPLING._replace(greedy=1)


# ---- what is made of it -------------------------------------------------------------------------


class Filters(NamedTuple):
    """Sampling parameters of one request after cleaning; see csrc/core/row_law.h."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    out_of_range: Any  # int32: 1 where something was and has been replaced


class Law(NamedTuple):
    """A row's law, with the value at its drafted token and what a relaxed rule asks of the row."""

    kind: Any
    max: Any
    cutoff: Any
    scale: Any
    z: Any
    argmax: Any  # a token, as is all that laws say of their rows
    value: Any
    extra: Any


# Kinds of laws. NO_LAW: NaN, +inf, all -inf, or no such row.
NO_LAW = tl.constexpr(0)
EXPONENTIAL = tl.constexpr(1)
POINT_MASS = tl.constexpr(2)
LINEAR = tl.constexpr(3)

#: A law in memory is this many float64, which hold each of its fields exactly.
LAW_FIELDS = tl.constexpr(8)

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
DOUBLE_MAX = tl.constexpr(1.7976931348623157e308)
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY_TEMPERATURE = tl.constexpr(GREEDY_BELOW)

#: Entries that share one maximum where filters are given; a tile is a whole number of groups.
GROUP = tl.constexpr(128)


@triton.jit
def absent():
    """Stand for an absent pointer in what a device function returns."""
    return tl.full([], 0, tl.int1)


@triton.jit
def plain_row(data, entries):
    """Describe a list as a row that hides nothing."""
    return Row(
        *(data, entries, entries, absent(), absent(), absent(), absent(), absent()),
        *(absent(), absent(), absent(), absent()),
    )


@triton.jit
def row_at(rows, b, s):
    """Point to row s of request b, int64 both; no entries where the index or map is invalid."""
    place = s
    entries = rows.vocab
    known = rows.vocab
    words = absent()
    tokens = absent()
    places = absent()
    listed = absent()
    count = absent()
    if rows.index is not None:
        index = tl.load(rows.index + b * rows.index_stride_b + s * rows.index_stride_s)
        index = index.to(tl.int64)
        present = (index >= 0) & (index < rows.num_rows)
        place = tl.where(present, index, 0)
        entries = tl.where(present, rows.vocab, 0)
    if rows.map.tokens is not None:
        entries = tl.where(tl.load(rows.map.broken) == 0, entries, 0)
        known = rows.map.num_tokens
        tokens = rows.map.tokens
        if rows.map.places is not None:
            places = rows.map.places
    if rows.mask.words is not None:
        known = rows.mask.num_tokens
        words = rows.mask.words + b * rows.mask.stride_b + s * rows.mask.stride_s
    first = absent()
    last = absent()
    tail = absent()
    tail_begin = absent()
    offset = b * rows.stride_b + place * rows.stride_s
    data = rows.data + offset
    if rows.lists.tokens is not None:
        listed = rows.lists.tokens + offset
        counts = rows.lists.counts + offset // rows.lists.width
        if rows.index is not None:
            count = tl.load(counts, mask=entries > 0, other=0)  # a table may have no rows at all
        else:
            count = tl.load(counts)
        entries = tl.where(count > 0, entries, 0)
        count = tl.where(entries > 0, count, 0)
    if rows.held.tail is not None:
        # Entries keep their numbers in the whole row.
        data -= rows.held.begin
        first = rows.held.first
        last = rows.held.last
        tail_begin = rows.held.tail_begin
        tail = rows.held.tail - tail_begin
        tail += b * rows.held.tail_stride_b + place * rows.held.tail_stride_s
    return Row(
        *(data, entries, known, words, tokens, places, listed, count),
        *(first, last, tail, tail_begin),
    )


@triton.jit
def in_token_order(source):
    """See the row of a reduced vocabulary in the order of the tokens; any other as it is."""
    found = source
    if source.places.dtype.is_ptr():
        entries = tl.where(source.entries > 0, source.known, 0)
        found = Row(
            *(source.data, entries, source.known, source.words, absent(), source.places),
            *(source.listed, source.count),
            *(source.first, source.last, source.tail, source.tail_begin),
        )
    return found


@triton.jit
def memory_of(source, start):
    """Pointer that the entries of a tile are counted from, which has `start` in it (a scalar)."""
    data = source.data
    if source.tail.dtype.is_ptr():
        if start >= source.tail_begin:
            data = source.tail
    return data


@triton.jit
def first_tile(rows, split, TILE: tl.constexpr):
    """First tile of a share of the tiles that are worked on here."""
    first = split
    if rows.held.tail is not None:
        first = split + rows.held.first // TILE
    return first


@triton.jit
def end_of_tiles(rows, tiles, TILE: tl.constexpr):
    """Tile after the last one that is worked on here."""
    end = tiles
    if rows.held.tail is not None:
        end = rows.held.last // TILE
    return end


@triton.jit
def is_allowed(source, token):
    """Whether the mask of a row, which has one, allows tokens."""
    known = (token >= 0) & (token < source.known)
    word = tl.load(source.words + (tl.where(known, token, 0) >> 5), mask=known, other=0)
    return known & (((word >> (token & 31).to(tl.int32)) & 1) != 0)


@triton.jit
def tokens_of(source, offsets):
    """Tokens of the entries at `offsets`, -1 after the row's end in a reduced vocabulary."""
    tokens = offsets
    if source.tokens.dtype.is_ptr():
        tokens = tl.load(source.tokens + offsets, mask=offsets < source.entries, other=-1)
    return tokens


@triton.jit
def hide(source, offsets, values, padding):
    """Put `padding` where the mask of a row hides its entries, whatever they are."""
    if source.words.dtype.is_ptr():
        values = tl.where(is_allowed(source, tokens_of(source, offsets)), values, padding)
    return values


@triton.jit
def listed_below(source, tokens):
    """Count the tokens of a list, 1024 at most, that are below `tokens`."""
    below = (source.count * 0 + tokens * 0).to(tl.int32)
    for halving in tl.static_range(11):
        following = below + (1024 >> halving)
        inside = following <= source.count
        last = tl.load(source.listed + following - 1, mask=inside, other=0)
        below = tl.where(inside & (last < tokens), following, below)
    return below


@triton.jit
def listed_values(source, tokens, padding):
    """Look up tokens in a list: `padding` where they are not in it."""
    place = listed_below(source, tokens)
    inside = place < source.count
    inside = inside & (tl.load(source.listed + place, mask=inside, other=-1) == tokens)
    return tl.load(source.data + place, mask=inside, other=padding)


@triton.jit
def load_listed_tile(source, tile, padding, TILE: tl.constexpr):
    """Load a tile of a list; most name no token of most tiles."""
    values = tl.full([TILE], padding, tl.float32)
    first = listed_below(source, tile * TILE)
    last = listed_below(source, tile * TILE + TILE)
    if first < last:
        values = listed_values(source, tile * TILE + tl.arange(0, TILE), padding)
    return values


@triton.jit
def load_tile(source, tile, padding, TILE: tl.constexpr):
    """Load the entries of a tile as floats, `padding` where hidden and after the row's end.

    Whole tiles go without a mask, so that an odd vocabulary does not spoil the wide loads.
    """
    offsets = tile * TILE + tl.arange(0, TILE)
    if source.listed.dtype.is_ptr():
        values = load_listed_tile(source, tile, padding, TILE)
    elif source.places.dtype.is_ptr() and not source.tokens.dtype.is_ptr():
        places = tl.load(source.places + offsets, mask=offsets < source.entries, other=-1)
        values = tl.load(source.data + places, mask=places >= 0, other=padding).to(tl.float32)
    elif tile * TILE + TILE <= source.entries:
        values = tl.load(memory_of(source, tile * TILE) + offsets).to(tl.float32)
    else:
        data = memory_of(source, tile * TILE)
        values = tl.load(data + offsets, mask=offsets < source.entries, other=padding)
        values = values.to(tl.float32)
    return hide(source, offsets, values, padding)


@triton.jit
def value_at(source, token):
    """Value of a row at a token (a scalar), -inf where the row has no such entry or hides it.

    Where ranks hold the row, -inf on those that do not work on the token's tile.
    """
    place = token
    inside = (token >= 0) & (token < source.entries)
    if source.tail.dtype.is_ptr():
        inside = inside & (token >= source.first) & (token < source.last)
    if source.places.dtype.is_ptr():
        # A row that is none has no memory to read, though the map has a place for the token.
        known = (token >= 0) & (token < tl.where(source.entries > 0, source.known, 0))
        place = tl.load(source.places + tl.where(known, token, 0), mask=known, other=-1)
        inside = place >= 0
    if source.words.dtype.is_ptr():
        inside = inside & is_allowed(source, token)
    if source.listed.dtype.is_ptr():
        value = tl.where(inside, listed_values(source, token, -INFINITY), -INFINITY)
    else:
        place = tl.where(inside, place, 0)
        data = memory_of(source, place)
        value = tl.load(data + place, mask=inside, other=-INFINITY).to(tl.float32)
    return value


# ---- sampling parameters ------------------------------------------------------------------------


@triton.jit
def filters_at(sampling, b, vocab):
    """Clean the sampling parameters of request b; see csrc/core/row_law.h."""
    temperature = tl.full([], 1.0, tl.float64)
    top_k = tl.full([], 0, tl.int64)
    top_p = tl.full([], 1.0, tl.float64)
    min_p = tl.full([], 0.0, tl.float64)
    bad = tl.full([], 0, tl.int32)
    if sampling.greedy is not None:
        temperature = tl.full([], 0.0, tl.float64)
    if sampling.temperature is not None:
        given = tl.load(sampling.temperature + b * sampling.temperature_stride).to(tl.float64)
        usable = (given >= 0.0) & (given <= DOUBLE_MAX)  # false for NaN
        temperature = tl.where(usable, given, 1.0)
        bad = tl.where(usable, bad, 1)
    if sampling.top_k is not None:
        given_k = tl.load(sampling.top_k + b * sampling.top_k_stride).to(tl.int64)
        top_k = tl.where((given_k > 0) & (given_k < vocab), given_k, 0)
    if sampling.top_p is not None:
        given = tl.load(sampling.top_p + b * sampling.top_p_stride).to(tl.float64)
        top_p = tl.where((given >= 0.0) & (given < 1.0), given, 1.0)
        bad = tl.where(given >= 0.0, bad, 1)
    if sampling.min_p is not None:
        given = tl.load(sampling.min_p + b * sampling.min_p_stride).to(tl.float64)
        min_p = tl.where((given <= 1.0) & (given > 0.0), given, 0.0)
        bad = tl.where(given <= 1.0, bad, 1)
    return Filters(temperature, top_k, top_p, min_p, bad)


@triton.jit
def is_greedy(filters):
    """Whether the law is the point mass at the arg max."""
    return filters.temperature < GREEDY_TEMPERATURE


@triton.jit
def is_greedy_at(sampling, b):
    """Whether request b is at T = 0."""
    greedy = b >= 0
    if sampling.greedy is None:
        greedy = b < 0
        if sampling.temperature is not None:
            given = tl.load(sampling.temperature + b * sampling.temperature_stride).to(tl.float64)
            greedy = (given >= 0.0) & (given < GREEDY_TEMPERATURE)
    return greedy


@triton.jit
def has_filter(filters):
    """Whether anything but the temperature shapes the law."""
    return (filters.top_k > 0) | (filters.top_p < 1.0) | (filters.min_p > 0.0)


# ---- weights ------------------------------------------------------------------------------------


@triton.jit
def round_up(x):
    """Smallest float32 that is >= x: to the nearest, a threshold could let in what lies below."""
    rounded = x.to(tl.float32)
    bits = rounded.to(tl.int32, bitcast=True)
    up = tl.where(bits >= 0, bits + 1, bits - 1)
    up = tl.where(rounded == 0.0, 1, up).to(tl.float32, bitcast=True)
    return tl.where(rounded.to(tl.float64) < x, up, rounded)


@triton.jit
def support_threshold(cutoff, reference, scale):
    """Give what `weights_of` compares with: csrc/core/row_law.h's support_threshold."""
    underflow = reference.to(tl.float64) - 87.0 / scale
    threshold = tl.maximum(cutoff.to(tl.float64), -FLOAT_MAX)
    return round_up(tl.maximum(threshold, underflow))


@triton.jit
def weights_of(x, reference, scale, threshold):
    """Unnormalised law exp(scale * (x - reference)) of entries >= threshold, else 0."""
    slope = (scale * LOG2_E).to(tl.float32)
    return tl.where(x >= threshold, tl.exp2((x - reference) * slope), 0.0)


@triton.jit
def masses_of(weights):
    """Weights in [0, 1] as integers, floor(w 2^40): exact in float32, and sums have no order."""
    return (weights * 1099511627776.0).to(tl.uint64)


# ---- laws in memory -----------------------------------------------------------------------------


@triton.jit
def store_law(laws, row, law):
    """Write a law; `row` is int64."""
    base = laws + row * LAW_FIELDS
    tl.store(base, law.kind.to(tl.float64))
    tl.store(base + 1, law.max.to(tl.float64))
    tl.store(base + 2, law.cutoff.to(tl.float64))
    tl.store(base + 3, law.scale)
    tl.store(base + 4, law.z)
    tl.store(base + 5, law.argmax.to(tl.float64))
    tl.store(base + 6, law.value.to(tl.float64))
    tl.store(base + 7, law.extra)


@triton.jit
def load_law(laws, row):
    """Read the law of one row, int64."""
    base = laws + row * LAW_FIELDS
    return Law(
        tl.load(base).to(tl.int32),
        tl.load(base + 1).to(tl.float32),
        tl.load(base + 2).to(tl.float32),
        tl.load(base + 3),
        tl.load(base + 4),
        tl.load(base + 5).to(tl.int64),
        tl.load(base + 6).to(tl.float32),
        tl.load(base + 7),
    )


@triton.jit
def load_laws(laws, rows, mask):
    """Read the laws of a vector of rows: no law where not `mask`."""
    base = laws + rows * LAW_FIELDS
    return Law(
        tl.load(base, mask=mask, other=0.0).to(tl.int32),
        tl.load(base + 1, mask=mask, other=0.0).to(tl.float32),
        tl.load(base + 2, mask=mask, other=0.0).to(tl.float32),
        tl.load(base + 3, mask=mask, other=0.0),
        tl.load(base + 4, mask=mask, other=1.0),
        tl.load(base + 5, mask=mask, other=0.0).to(tl.int64),
        tl.load(base + 6, mask=mask, other=0.0).to(tl.float32),
        tl.load(base + 7, mask=mask, other=0.0),
    )


@triton.jit
def law_threshold(law):
    """Threshold of a law's `weights_of`."""
    return support_threshold(law.cutoff, law.max, law.scale)


@triton.jit
def probability(law, value, token):
    """p(token) in float64 from its logit; csrc/core/row_law.h's law_probability."""
    difference = value.to(tl.float64) - law.max.to(tl.float64)
    p = tl.exp(law.scale * difference) / law.z
    p = tl.where(value >= law.cutoff, p, 0.0)
    p = tl.where(law.kind == LINEAR, tl.maximum(value, 0.0).to(tl.float64) / law.z, p)
    p = tl.minimum(p, 1.0)  # z is a rounded sum, and a q above 1 would reject a legal draft token
    return tl.where(law.kind == POINT_MASS, (token == law.argmax).to(tl.float64), p)


@triton.jit
def log_probability(law, value):
    """Give log p of a token in the support, in float32; 0 under a point mass."""
    difference = value.to(tl.float64) - law.max.to(tl.float64)
    found = (law.scale * difference - tl.log(law.z)).to(tl.float32)
    return tl.where(law.kind == POINT_MASS, 0.0, found)
