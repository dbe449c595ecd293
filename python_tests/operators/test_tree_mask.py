"""tree_mask: bits and depths by hand and against the reference; what host models get of them."""

from __future__ import annotations

import pytest
import torch
from conftest import REFERENCE
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import specdec_ext
from specdec_ext import STATUS_INVALID_TREE
from specdec_ext.tree_masks import LAYOUTS

TREE = torch.tensor([-1, 0, 0, 1, 3, 2, -1])


def random_parents(sizes, nodes, seed=0, reach=40):
    """Trees of these sizes, padded to `nodes`; some parents are far, some are the node before."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((len(sizes), nodes), -1)
    for b, size in enumerate(sizes):
        for v in range(1, size):
            parents[b, v] = torch.randint(max(0, v - reach), v, (), generator=generator)
    return parents


def equal(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- the operator -------------------------------------------------------------------------------


def test_by_hand(backend):
    found = backend.tree_mask(TREE[None])
    assert found.ancestors[0, :, 0].tolist() == [1, 0b11, 0b101, 0b1011, 0b11011, 0b100101, 0]
    assert found.depths.tolist() == [[0, 1, 1, 2, 3, 2, -1]]
    assert found.status.tolist() == [0]


@pytest.mark.parametrize("nodes", [1, 1024, 65, 2, 63, 64, 200])
def test_like_the_reference(operator, nodes):
    parents = random_parents([nodes, max(nodes - 3, 1), 1], nodes)
    chain = torch.arange(-1, nodes - 1)[None]
    star = torch.zeros(1, nodes, dtype=torch.int64)
    star[0, 0] = -1
    parents = torch.cat([parents, chain, star])
    expected = REFERENCE.tree_mask(parents)
    assert expected.status.tolist() == [0] * 5
    assert equal(operator.tree_mask(parents), expected)
    assert equal(operator.tree_mask(parents.int()), expected)


def test_strides(operator):
    parents = random_parents([70, 66, 1], 70)
    expected = REFERENCE.tree_mask(parents)
    assert equal(operator.tree_mask(parents.t().contiguous().t()), expected)
    wide = torch.full((3, 140), 99)
    wide[:, ::2] = parents
    assert equal(operator.tree_mask(wide[:, ::2]), expected)


def test_no_requests(backend):
    found = backend.tree_mask(torch.zeros(0, 65, dtype=torch.int64))
    assert [list(t.shape) for t in found] == [[0, 65, 2], [0, 65], [0]]


INVALID = {
    "its own parent": ([-1, 0, 2, 1], "a parent must come before its child, got 2 at node 2"),
    "a cycle": ([-1, 2, 1, 0], "a parent must come before its child, got 2 at node 1"),
    "a parent behind": ([-1, 0, 3, 0], "a parent must come before its child, got 3 at node 2"),
    "far outside": ([-1, 0, 2**40, 0], "a parent must come before its child, got 1099511627776"),
    "two roots": ([-1, -1, 0, 1], "padding must come last .*, got a parent of -1 at node 1"),
    "a hole": ([-1, 0, -1, 1], "padding must come last .*, got a parent of -1 at node 2"),
    "a root with a parent": ([0, 0, 0, 1], "node 0, the root, must have parent -1, got 0"),
    "a root with a late parent": ([3, 0, 0, 1], "node 0, the root, must have parent -1, got 3"),
    "negative": ([-1, 0, -2, 1], r"a parent must be a node or -1 \(padding\), got -2 at node 2"),
    "negative padding": ([-1, 0, 0, -5], r"a parent must be a node or -1 .*, got -5 at node 3"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_what_is_no_tree(backend, fault):
    parents = torch.tensor([[-1, 0, 1, -1], INVALID[fault][0], [-1, 0, 0, 2]])
    found = backend.tree_mask(parents)
    assert found.status.tolist() == [0, STATUS_INVALID_TREE, 0]
    # A root alone; the others in the batch are what they are.
    assert found.ancestors[..., 0].tolist() == [[1, 3, 7, 0], [1, 0, 0, 0], [1, 3, 5, 13]]
    assert found.depths.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1], [0, 1, 1, 2]]


@pytest.mark.parametrize("fault", INVALID)
def test_the_function_says_what_is_wrong(fault):
    row, message = INVALID[fault]
    for name in ("auto", "cpu", "reference"):
        with pytest.raises(ValueError, match=f"^tree_mask: parents of request 1 .*: {message}"):
            specdec_ext.tree_mask(torch.tensor([[-1, 0, 0, 0], row]), backend=name)


def test_a_trace_reports_status():
    compiled = torch.compile(specdec_ext.tree_mask, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([[-1, 1], [-1, 0]])).status.tolist() == [STATUS_INVALID_TREE, 0]


# ---- masks --------------------------------------------------------------------------------------

LENGTHS = [4, 0, 3]
WIDTH = 4


def expected_mask(parents, layout, holes=None):
    """The mask entry by entry, from parents and tokens."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, 1, nodes, WIDTH + nodes, dtype=torch.bool)
    for b in range(batch):
        length = LENGTHS[b]
        columns = {"left": range(WIDTH - length, WIDTH)}.get(layout, range(length))
        columns = columns if holes is None else holes[b].nonzero()[:, 0].tolist()
        start = length if layout == "packed" else WIDTH
        for v in range(nodes):
            if v > 0 and parents[b, v] < 0:
                mask[b, 0, v, start + v] = True
                continue
            mask[b, 0, v, list(columns)] = True
            node = v
            while node >= 0:
                mask[b, 0, v, start + node] = True
                node = int(parents[b, node])
    return mask


PARENTS = random_parents([6, 70, 1], 70)
ANCESTORS = REFERENCE.tree_mask(PARENTS).ancestors
HOLES = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_masks(layout):
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    expected = expected_mask(PARENTS, layout)
    options = dict(layout=layout)
    mask = specdec_ext.dense_tree_mask(ANCESTORS, lens, WIDTH, dtype=torch.bool, **options)
    assert torch.equal(mask, expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = specdec_ext.dense_tree_mask(ANCESTORS, lens, WIDTH, dtype=dtype, **options)
        assert mask.dtype == dtype
        assert bool((mask[expected] == 0).all())
        assert bool((mask[~expected] == torch.finfo(dtype).min).all())
    mod = specdec_ext.tree_mask_mod(ANCESTORS, lens, WIDTH, **options)
    assert torch.equal(create_mask(mod, 3, None, 70, WIDTH + 70, device="cpu"), expected)


def test_masks_with_holes():
    for holes in (HOLES, HOLES.bool(), HOLES.float()):
        mask = specdec_ext.dense_tree_mask(ANCESTORS, prefix_mask=holes, dtype=torch.bool)
        assert torch.equal(mask, expected_mask(PARENTS, "left", HOLES))
    mod = specdec_ext.tree_mask_mod(ANCESTORS, prefix_mask=HOLES)
    found = create_mask(mod, 3, None, 70, WIDTH + 70, device="cpu")
    assert torch.equal(found, expected_mask(PARENTS, "left", HOLES))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_prefix(layout):
    mask = specdec_ext.dense_tree_mask(ANCESTORS, 0, 0, layout=layout, dtype=torch.bool)
    none = specdec_ext.dense_tree_mask(ANCESTORS, prefix_mask=torch.zeros(3, 0), dtype=torch.bool)
    assert torch.equal(mask, none)
    assert torch.equal(mask[0, 0, :6].int().sum(1), REFERENCE.tree_mask(PARENTS).depths[0, :6] + 1)


def test_flex_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 16, generator=generator) for n in (70, 74, 74))
    lens = torch.tensor(LENGTHS)
    mod = specdec_ext.tree_mask_mod(ANCESTORS, lens, WIDTH)
    block_mask = create_block_mask(mod, 3, None, 70, 74, device="cpu")
    dense = specdec_ext.dense_tree_mask(ANCESTORS, lens, WIDTH, layout="packed")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        found = flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(found, expected)


def test_position_ids():
    depths = specdec_ext.tree_mask(torch.stack([TREE, TREE])).depths
    lens = torch.tensor([5, 0], dtype=torch.int32)
    expected = [[5, 6, 6, 7, 8, 7, 5], [0, 1, 1, 2, 3, 2, 0]]
    assert specdec_ext.tree_position_ids(depths, lens).tolist() == expected
    assert specdec_ext.tree_position_ids(depths, 5).tolist() == [expected[0]] * 2


@pytest.mark.thorough
def test_masks_in_one_graph():
    def step(parents, lens):
        tree = specdec_ext.tree_mask(parents)
        mask = specdec_ext.dense_tree_mask(tree.ancestors, lens, WIDTH)
        return *tree, mask, specdec_ext.tree_position_ids(tree.depths, lens)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes in (5, 70):
        args = (random_parents([nodes, 3, 1], nodes), torch.tensor(LENGTHS))
        assert equal(compiled(*args), step(*args))


A = ANCESTORS
MASK_ERRORS = [
    (ValueError, (A.int(), 0, 0), {},
     r"ancestors must be \[B, N, ceil\(N/64\)\] int64, got .*int32"),
    (ValueError, (A[0], 0, 0), {}, r"ancestors must be .*, got \[70, 2\] int64"),
    (TypeError, (None, 0, 0), {}, "ancestors must be a Tensor, got NoneType"),
    (ValueError, (A,), {}, "expected prefix_lens and prefix_width, or prefix_mask, got neither"),
    (ValueError, (A, 3), {}, "expected prefix_lens and prefix_width, or prefix_mask, got neither"),
    (ValueError, (A, 3, 4), dict(prefix_mask=HOLES), "expected .* prefix_mask, got both"),
    (ValueError, (A, 3, 4), dict(layout="top"),
     "layout must be one of left, right, packed, got 'top'"),
    (ValueError, (A, 3, -1), {}, "prefix_width must be at least 0, got -1"),
    (TypeError, (A, 3, 4.0), {}, "prefix_width must be an int, got float"),
    (TypeError, (A, 3.0, 4), {}, "prefix_lens must be a Tensor or an int, got float"),
    (ValueError, (A, torch.ones(2).long(), 4), {},
     r"prefix_lens must be \[B\] = \[3\] integers, got \[2\]"),
    (ValueError, (A, torch.ones(3), 4), {}, r"prefix_lens must be .* integers, got \[3\] float32"),
    (ValueError, (A,), dict(prefix_mask=HOLES[:2]),
     r"prefix_mask must be \[B, P\] = \[3, P\], got \[2, 4\]"),
]  # fmt: skip


@pytest.mark.parametrize("error, args, kwargs, message", MASK_ERRORS)
def test_mask_errors(error, args, kwargs, message):
    for name in ("dense_tree_mask", "tree_mask_mod"):
        with pytest.raises(error, match=f"^{name}: {message}"):
            getattr(specdec_ext, name)(*args, **kwargs)


def test_errors_of_one_function():
    with pytest.raises(ValueError, match=r"prefix_lens must be in \[0, prefix_width = 4\]"):
        specdec_ext.dense_tree_mask(A, torch.tensor([4, 5, 0]), 4)
    with pytest.raises(ValueError, match=r"prefix_lens must be in .*, got \[-1\]"):
        specdec_ext.dense_tree_mask(A, -1, 4)
    with pytest.raises(ValueError, match="dtype must be torch.bool or a floating-point type"):
        specdec_ext.dense_tree_mask(A, 3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"depths must be \[B, N\] int64, got \[2\] float32"):
        specdec_ext.tree_position_ids(torch.ones(2), 3)
