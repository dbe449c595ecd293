"""compact_kv: what moves and what does not, in every layout; nothing outside or when wrong."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from conftest import REFERENCE

import specdec_ext
from specdec_ext import STATUS_INVALID_TREE, STATUS_PARAMETER_OUT_OF_RANGE

BATCH, PLACES = 3, 21
SEQ_LENS = torch.tensor([2, 0, 11])
PATH = torch.tensor([[1, 2, 5, 8, 9, 12, -1], [1, 2, -1, -1, -1, -1, -1], [3, 4, 5, 6, 7, 8, 9]])
NUM_ACCEPTED = torch.tensor([6, 2, 7], dtype=torch.int32)

# Rows (H, D) of a layer's cache, how many layers (0: no such dimension).
ROWS = {
    "heads of 16 bytes": (2, 8, 0),
    "odd heads, two layers": (3, 5, 2),
    "one element": (1, 1, 0),
    "longer than a block": (3, 300, 0),
    "no elements": (2, 0, 2),
    "no layers": None,
}
DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.complex64]  # 1, 2, 4, 8 bytes


def shape_of(rows):
    if ROWS[rows] is None:
        return (0, BATCH, PLACES, 2, 4)
    heads, size, layers = ROWS[rows]
    return (*([layers] if layers else []), BATCH, PLACES, heads, size)


def numbered(shape, dtype, first=1):
    """Elements that differ, so that one in the wrong place shows."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    if dtype == torch.bool:
        return numbers * 7919 % 1009 % 2 == 0
    return (numbers * 7 % 251 - 125 + first).to(dtype)


def as_given(values):
    return values.clone()


def as_transformers_has_it(values):
    return values.transpose(-3, -2).contiguous().transpose(-3, -2)


def with_gaps(values):
    """Every second element of something larger, off the alignment."""
    wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1] + 1, dtype=values.dtype)
    view = wide[..., 1::2]
    return view.copy_(values)


def in_a_larger_cache(values):
    """Heads and places of a larger allocation: rows are dense, but not next to each other."""
    shape = list(values.shape)
    shape[-2] += 1
    shape[-3] += 3
    whole = torch.zeros(shape, dtype=values.dtype)
    return whole[..., 2:-1, 1:, :].copy_(values)


LAYOUTS = [as_given, as_transformers_has_it, with_gaps, in_a_larger_cache]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", ROWS)
def test_like_the_reference(operator, rows, layout, dtype):
    keys, values = (numbered(shape_of(rows), dtype, first) for first in (1, 2))
    expected = [keys.clone(), values.clone()]
    status = REFERENCE.compact_kv(*expected, PATH, NUM_ACCEPTED, SEQ_LENS)
    found = [layout(keys), layout(values)]
    assert torch.equal(operator.compact_kv(*found, PATH, NUM_ACCEPTED, SEQ_LENS), status)
    assert status.tolist() == [0, 0, 0]
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


def test_by_hand(backend):
    keys = torch.arange(10.0).view(1, 10, 1, 1)
    values = -keys
    arguments = (torch.tensor([[2, 3, 6, -1]]), torch.tensor([3]), torch.tensor([3]))
    assert backend.compact_kv(keys, values, *arguments).tolist() == [0]
    # The root is at place 3; nodes 2, 3 and 6 come behind it; the rest stays.
    assert keys.flatten().tolist() == [0, 1, 2, 3, 5, 6, 9, 7, 8, 9]
    assert torch.equal(values, -keys)


def test_caches_of_different_rows(operator):
    # As in multi-query or latent attention: keys and values differ in all but Y, B and L.
    keys = numbered((2, BATCH, PLACES, 1, 24), torch.float16)
    values = with_gaps(numbered((2, BATCH, PLACES, 3, 5), torch.int8))
    expected = [keys.clone(), values.clone()]
    REFERENCE.compact_kv(*expected, PATH, NUM_ACCEPTED, SEQ_LENS)
    ids = (PATH.int(), NUM_ACCEPTED.long(), SEQ_LENS.int())
    assert operator.compact_kv(keys, values, *ids).tolist() == [0, 0, 0]
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_halves_of_one_buffer(operator):
    both = numbered((BATCH, PLACES, 2, 2, 8), torch.bfloat16)
    expected = [both[:, :, i].clone() for i in (0, 1)]
    REFERENCE.compact_kv(*expected, PATH, NUM_ACCEPTED, SEQ_LENS)
    operator.compact_kv(both[:, :, 0], both[:, :, 1], PATH, NUM_ACCEPTED, SEQ_LENS)
    assert torch.equal(both, torch.stack(expected, 2))


def test_a_latent_cache(operator):
    # Its values are a part of its keys, which move once.
    keys = numbered((BATCH, PLACES, 1, 24), torch.float16)
    expected = keys.clone()
    REFERENCE.compact_kv(expected, expected.clone(), PATH, NUM_ACCEPTED, SEQ_LENS)
    arguments = (PATH, NUM_ACCEPTED, SEQ_LENS)
    with pytest.raises(ValueError, match="v_cache must not share elements with k_cache"):
        operator.compact_kv(keys, keys[..., :16], *arguments)
    assert operator.compact_kv(keys, keys[..., :0], *arguments).tolist() == [0, 0, 0]
    assert torch.equal(keys, expected)


def views_of(memory, generator):
    """Two caches of one B and L somewhere in the same memory, of elements of 2 bytes."""

    def numbers(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    batch, places = numbers(1, 4, 2)
    for _ in range(2):
        sizes = [batch, places, *numbers(1, 4, 2)]
        strides = numbers(1, 9, 4)
        spread = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        yield memory.as_strided(sizes, strides, *numbers(0, len(memory) - spread, 1))


def test_caches_in_one_memory_share_no_element():
    generator = torch.Generator().manual_seed(0)
    memory = torch.zeros(100, dtype=torch.bfloat16)
    places = torch.arange(len(memory))
    seen = {True: 0, False: 0}
    for _ in range(300):
        keys, values = views_of(memory, generator)
        taken = [
            set(places.as_strided(c.shape, c.stride(), c.storage_offset()).flatten().tolist())
            for c in (keys, values)
        ]
        shared = bool(taken[0] & taken[1])
        seen[shared] += 1
        none = torch.zeros(len(keys), dtype=torch.int64)
        with pytest.raises(ValueError, match="share elements") if shared else nullcontext():
            specdec_ext.compact_kv(keys, values, none.view(-1, 1), none, none)
    assert min(seen.values()) > 50


L = PLACES
FAULTS = {
    "accepted below 0": ([1, 2], -1, 3, STATUS_PARAMETER_OUT_OF_RANGE),
    "accepted above N": ([1, 2], 3, 3, STATUS_PARAMETER_OUT_OF_RANGE),
    "accepted far above": ([1, 2], 2**40, 3, STATUS_PARAMETER_OUT_OF_RANGE),
    "place below 0": ([1, 3], 2, -1, STATUS_PARAMETER_OUT_OF_RANGE),
    "place behind the cache": ([1, 3], 2, L + 1, STATUS_PARAMETER_OUT_OF_RANGE),
    "place far behind": ([1, 3], 2, 2**62, STATUS_PARAMETER_OUT_OF_RANGE),
    "node 0": ([0, 3], 2, 3, STATUS_INVALID_TREE),
    "the end of a path": ([3, -1], 2, 3, STATUS_INVALID_TREE),
    "a node twice": ([3, 3], 2, 3, STATUS_INVALID_TREE),
    "a node before its parent": ([3, 2], 2, 3, STATUS_INVALID_TREE),
    "a node behind the cache": ([3, L - 3], 2, 3, STATUS_INVALID_TREE),
    "a node far behind": ([3, 2**62], 2, 3, STATUS_INVALID_TREE),
    "no room behind the root": ([1, 2], 1, L, STATUS_INVALID_TREE),
}
VALID = {
    "the last place": ([3, L - 4], 2, 3),
    "nothing accepted, nothing read": ([-9, 2**62], 0, 3),
    "nothing accepted, at the end": ([1, 2], 0, L),
    "what follows the path": ([4, -1], 1, 3),
}


@pytest.mark.parametrize("case", [*FAULTS, *VALID])
def test_status(backend, case):
    path, accepted, start, status = (*VALID[case], 0) if case in VALID else FAULTS[case]
    keys, values = (numbered((2, 3, L, 2, 3), torch.float32, first) for first in (1, 2))
    expected = [keys.clone(), values.clone()]
    paths = torch.tensor([[2, 4], path, [1, 5]])
    counts, starts = torch.tensor([2, accepted, 2]), torch.tensor([0, start, 7])
    # The neighbours move as ever. Of a request with a status, nothing does.
    for b in (0, 1, 2):
        if b != 1 or status == 0:
            for cache in expected:
                for k in range(int(counts[b])):
                    at = int(starts[b])
                    cache[:, b, at + 1 + k] = cache[:, b, at + int(paths[b, k])].clone()
    assert backend.compact_kv(keys, values, paths, counts, starts).tolist() == [0, status, 0]
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_nothing_to_do(backend):
    none = torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 5, 2, 4)
    assert backend.compact_kv(empty, empty.clone(), none.view(0, 3), none, none).shape == (0,)
    nowhere = torch.zeros(1, 0, 2, 4).expand(2, -1, -1, -1)  # no elements: it overlaps nothing
    some = torch.zeros(2, dtype=torch.int64)
    assert backend.compact_kv(nowhere, nowhere, some[:, None], some, some).tolist() == [0, 0]
    keys = numbered((2, 5, 2, 4), torch.float32)
    before = keys.clone()
    no_steps, zeros = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert backend.compact_kv(keys, keys.clone(), no_steps, zeros, zeros).tolist() == [0, 0]
    assert torch.equal(keys, before)
    no_places = torch.zeros(2, 0, 2, 4)
    found = backend.compact_kv(no_places, no_places.clone(), zeros[:, None] + 1, zeros + 1, zeros)
    assert found.tolist() == [STATUS_INVALID_TREE] * 2


FENCED = """
import torch, specdec_ext
from guard import fenced
path = torch.tensor([[1, 3, 6, 7], [2, 3, 2**40, 1], [5, -1, 2, 9]])
for dtype, row in ((torch.bfloat16, (2, 8)), (torch.int8, (3, 5)), (torch.float64, (1, 3))):
    for side in ("start", "end"):
        # The first and the last place of the cache are read; wrong paths point outside.
        for start, accepted in ((0, 4), (2, 3), (9, 4), (10, 1), (-1, 2), (2**40, 2), (2, -7)):
            keys, values = (fenced(torch.zeros(3, 10, *row).to(dtype), side) for _ in range(2))
            small = (torch.full((3,), accepted), torch.full((3,), start))
            torch.ops.specdec.compact_kv(
                keys, values, fenced(path, side), *(fenced(t, side) for t in small)
            )
print("unharmed")
"""


def test_nothing_is_touched_outside(run_python):
    done = run_python(FENCED)
    assert done.returncode == 0 and "unharmed" in done.stdout, done.stderr


def test_autograd_notices():
    cache = torch.randn(BATCH, PLACES, 1, 2)
    weight = torch.ones_like(cache).requires_grad_()
    loss = (cache * weight).sum()
    specdec_ext.compact_kv(cache, cache.clone(), PATH, NUM_ACCEPTED, SEQ_LENS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled():
    def step(keys, values, path, accepted, starts):
        doubled = keys * 2  # read before the cache changes
        status = specdec_ext.compact_kv(keys, values, path, accepted, starts)
        return doubled, keys + values, status

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for places in (PLACES, PLACES + 9):
        caches = [numbered((BATCH, places, 2, 8), torch.float32, first) for first in (1, 2)]
        own, other = ([as_transformers_has_it(c) for c in caches] for _ in range(2))
        expected = step(*own, PATH, NUM_ACCEPTED, SEQ_LENS)
        found = compiled(*other, PATH, NUM_ACCEPTED, SEQ_LENS)
        for a, b in zip((*expected, *own), (*found, *other), strict=True):
            assert torch.equal(a, b)
