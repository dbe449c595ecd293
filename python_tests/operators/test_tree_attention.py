"""tree_attention: equal to attention under the dense mask; whole models that run on trees."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from conftest import CPU, REFERENCE, TRITON, Backend
from test_tree_mask import random_parents
from torch.nn.functional import scaled_dot_product_attention

import specdec_ext
from specdec_ext import attention
from specdec_ext.decoding.cache_names import own_cache_name

# Triton's interpreter does bfloat16 products in float32, which is what hardware does.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def make(nodes, heads, key_heads, size, places, dtype=torch.float32, batch=3):
    """A call: trees of several sizes behind prefixes of several lengths."""
    generator = torch.Generator().manual_seed(nodes * 1000 + size)
    sizes = [nodes, max(nodes - 2, 1), 1][:batch]
    lens = torch.tensor([places - nodes, (places - nodes) // 2, 0])[:batch]
    q, k, v = (
        torch.randn(batch, n, h, size, generator=generator).to(dtype)
        for n, h in ((nodes, heads), (places, key_heads), (places, key_heads))
    )
    tree = specdec_ext.tree_mask(random_parents(sizes, nodes))
    return dict(q=q, k_cache=k, v_cache=v, ancestors=tree.ancestors, seq_lens=lens)


def dense(q, k_cache, v_cache, ancestors, seq_lens, scale=None, window=0):
    """The same by torch, in float64 under a dense mask; padding nodes are zeroed."""
    nodes, places = q.shape[1], k_cache.shape[1]
    mask = specdec_ext.dense_tree_mask(
        ancestors, seq_lens, places - nodes, layout="packed", dtype=torch.bool
    )
    if window > 0:
        mask &= in_window(ancestors, seq_lens, places, window)
    q, keys, values = (t.transpose(1, 2).double() for t in (q, k_cache, v_cache))
    out = scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    scores = q @ keys.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    lse = scores.masked_fill(~mask, -math.inf).logsumexp(3)
    padding = (ancestors == 0).all(2)[..., None]
    return specdec_ext.TreeAttentionResult(
        out.transpose(1, 2).masked_fill(padding[..., None], 0.0),
        lse.transpose(1, 2).masked_fill(padding, -math.inf),
    )


def in_window(ancestors, seq_lens, places, window):
    """Which keys are within the window of which queries, [B, 1, N, L], place by place."""
    batch, nodes = ancestors.shape[:2]
    mask = torch.zeros(batch, 1, nodes, places, dtype=torch.bool)
    for b, length in enumerate(seq_lens.tolist()):
        depths = [sum(int(w).bit_count() for w in row) - 1 for row in ancestors[b].tolist()]
        position = [*range(length), *(length + depth for depth in depths)]
        for v, depth in enumerate(depths):
            for place, key in enumerate(position[:places]):
                mask[b, 0, v, place] = key > length + depth - window
    return mask


def paged(call, size, layout="blocks", dtype=torch.int32):
    """The call with its caches in pages, shuffled; what is not attended to holds NaN."""
    generator = torch.Generator().manual_seed(size)
    batch, places = call["k_cache"].shape[:2]
    nodes, pages = call["q"].shape[1], -(-places // size) + 1
    table = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages]
    table = table.view(batch, pages)
    caches = {}
    for name in ("k_cache", "v_cache"):
        shape = (batch * pages + 3, size, *call[name].shape[2:])
        if layout == "heads first":
            shape = (shape[0], shape[2], size, shape[3])
        cache = torch.full((shape[0], 2, *shape[1:]), math.nan, dtype=call[name].dtype)
        cache = cache[:, 1] if layout == "pairs" else cache[:, 0].clone()
        cache = cache.transpose(1, 2) if layout == "heads first" else cache
        for b, length in enumerate(call["seq_lens"].tolist()):
            for place in range(length + nodes):
                cache[table[b, place // size], place % size] = call[name][b, place]
        caches[name] = cache
    for b, length in enumerate(call["seq_lens"].tolist()):
        behind = table[b, (length + nodes - 1) // size + 1 :]
        behind.copy_(torch.tensor([-1, 2**31 - 1, 10**6, -(2**31)])[torch.arange(len(behind)) % 4])
    return {**call, **caches, "block_table": table.to(dtype)}


def assert_close(found, expected, dtype):
    """Close in units of the largest output, as sums of rounded values are; scores are float32.

    Torch's flash attention on CPUs has coarser exponentials for the smaller types.
    """
    error = (found.out.double() - expected.out.double()).abs().max()
    bound = TOLERANCE[dtype] * max(1.0, float(expected.out.abs().max()))
    assert found.out.dtype == dtype and float(error) <= bound, float(error)
    assert found.lse.dtype == torch.float32
    bound = 1e-5 if dtype == torch.float32 else 2e-4
    torch.testing.assert_close(found.lse.double(), expected.lse.double(), rtol=bound, atol=bound)


def assert_equal(found, expected):
    """Equal to the bit."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(params=[CPU, TRITON], ids=lambda b: b.name)
def attending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backends that have it; Triton's with splits, few keys as there are."""
    if request.param is TRITON:
        pytest.importorskip("triton")
        monkeypatch.setattr(
            importlib.import_module("specdec_ext.triton.tree_attention"), "LEAST_KEYS", 32
        )
    else:
        monkeypatch.setattr(attention, "BLOCK_KEYS", 40)
    return request.param


SHAPES = {
    "grouped heads": (6, 4, 2, 64, 90),
    "two words of bits": (70, 2, 2, 80, 120),
    "one key head": (9, 6, 1, 96, 30),
    "no split": (12, 2, 2, 128, 31),
    "wide heads": (4, 2, 1, 256, 70),
    "one node": (1, 1, 1, 64, 40),
    "three words, no prefix": (140, 2, 1, 16, 140),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_like_a_dense_mask(attending, shape, dtype):
    call = make(*SHAPES[shape], dtype=dtype)
    expected = dense(**call)
    assert_close(REFERENCE.tree_attention(**call), expected, dtype)
    assert_close(attending.tree_attention(**call), expected, dtype)


@pytest.mark.parametrize("options", [dict(scale=0.02), dict(scale=-1.5), dict(scale=0.0)], ids=str)
def test_scale(attending, options):
    call = make(6, 4, 2, 64, 60)
    assert_close(
        attending.tree_attention(**call, **options), dense(**call, **options), torch.float32
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [dict(soft_cap=2.0), dict(soft_cap=30.0, scale=5.0)], ids=str)
def test_soft_cap(attending, options, dtype):
    call = make(9, 4, 2, 32, 100, dtype=dtype)
    expected = REFERENCE.tree_attention(**call, **options)
    assert_close(attending.tree_attention(**call, **options), expected, dtype)
    # The control: the cap matters here.
    uncapped = REFERENCE.tree_attention(**call, scale=options.get("scale")).out
    assert float((uncapped.double() - expected.out.double()).abs().max()) > 0.05


def test_the_soft_cap_by_hand(attending):
    # Scores 2 atanh(w) / 2 under a cap of 1 are logits w.
    logits = torch.tensor([0.1, 0.7, -0.4])
    keys = torch.atanh(logits).view(1, 3, 1, 1)
    values = torch.eye(3).view(1, 3, 1, 3)
    q = torch.ones(1, 1, 1, 1)
    bits = torch.ones(1, 1, 1, dtype=torch.int64)
    call = dict(ancestors=bits, seq_lens=torch.tensor([2]), scale=1.0, soft_cap=1.0)
    found = [attending.tree_attention(q, keys, values[..., i : i + 1], **call) for i in range(3)]
    out = torch.cat([one.out for one in found]).flatten()
    torch.testing.assert_close(out, logits.softmax(0))
    torch.testing.assert_close(found[0].lse.flatten(), logits.logsumexp(0)[None])


# ---- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 7, 40, 63, 10**9])
def test_window(attending, window):
    call = make(12, 4, 2, 16, 75)
    expected = dense(**call, window=window)
    assert_close(REFERENCE.tree_attention(**call, window=window), expected, torch.float32)
    assert_close(attending.tree_attention(**call, window=window), expected, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_window_of_deep_trees(attending, dtype):
    # Depths of more than a word's bits; a chain is causal attention in a band.
    call = make(140, 2, 1, 16, 300, dtype=dtype, batch=2)
    chain = torch.arange(-1, 139).repeat(2, 1)
    call["ancestors"] = specdec_ext.tree_mask(chain).ancestors
    for options in (dict(window=100), dict(window=5, soft_cap=4.0)):
        expected = REFERENCE.tree_attention(**call, **options)
        assert_close(attending.tree_attention(**call, **options), expected, dtype)
    place = torch.arange(300)
    query = call["seq_lens"][:, None] + torch.arange(140)
    band = (place <= query[..., None]) & (place > query[..., None] - 5)
    heads = (call[name].transpose(1, 2).double() for name in ("q", "k_cache", "v_cache"))
    out = scaled_dot_product_attention(*heads, attn_mask=band[:, None], enable_gqa=True)
    found = attending.tree_attention(**call, window=5).out
    assert float((found - out.transpose(1, 2)).abs().max()) <= 2 * TOLERANCE[dtype]


def test_what_lies_before_the_window_is_not_read(attending):
    call = make(6, 4, 2, 32, 90)
    expected = attending.tree_attention(**call, window=10)
    for b, length in enumerate(call["seq_lens"].tolist()):
        for name in ("k_cache", "v_cache"):
            call[name][b, : max(length - 9, 0)] = math.nan
    assert_close(attending.tree_attention(**call, window=10), expected, torch.float32)


# ---- pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["blocks", "pairs", "heads first"])
@pytest.mark.parametrize("size", [1, 16, 24])
def test_pages(attending, size, layout):
    call = make(9, 4, 2, 32, 70)
    expected = REFERENCE.tree_attention(**call)
    pages = paged(call, size, layout)
    assert_equal(REFERENCE.tree_attention(**pages), expected)
    assert_close(attending.tree_attention(**pages), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pages_with_all_else(attending, dtype):
    call = make(40, 4, 1, 64, 130, dtype=dtype)
    options = dict(window=50, soft_cap=3.0, scale=0.3)
    expected = REFERENCE.tree_attention(**call, **options)
    pages = paged(call, 16, dtype=torch.int64)
    assert_close(attending.tree_attention(**pages, **options), expected, dtype)
    turned = pages["block_table"].t().contiguous().t()
    found = attending.tree_attention(**{**pages, "block_table": turned}, **options)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("block", [-1, 21, 2**31 - 1, -(2**31)])
def test_a_page_that_is_no_block(attending, block, window):
    call = paged(make(9, 4, 2, 32, 70), 16)
    assert call["k_cache"].shape[0] == 21
    expected = attending.tree_attention(**call, window=window)
    # Request 0 has 61 places before its tree and reads pages up to 4, of the last 20 places from 2.
    good, call["block_table"][0, 2] = int(call["block_table"][0, 2]), block
    found = attending.tree_attention(**call, window=window)
    reference = REFERENCE.tree_attention(**call, window=window)
    for a, b, c in zip(found, expected, reference, strict=True):
        assert bool(a[0].isnan().all()) and bool(c[0].isnan().all())
        assert torch.equal(a[1:], b[1:]) and not a[1:].isnan().any()
    message = rf"block_table must name blocks in \[0, 21\), got {block} for page 2 of request 0"
    with pytest.raises(ValueError, match=f"^tree_attention: {message}"):
        specdec_ext.tree_attention(**call, window=window)
    call["block_table"][0, 1:3] = torch.tensor([block, good])
    wrong = attending.tree_attention(**call, window=window).out[0].isnan()
    assert bool(wrong.all()) == (window == 0)


def test_a_tree_outside_the_pages(attending):
    call = paged(make(9, 4, 2, 32, 70), 16)
    for length in (-1, 96 - 8, 2**40):
        call["seq_lens"][1] = length
        for result in (attending, REFERENCE):
            assert bool(result.tree_attention(**call).out[1].isnan().all())
        assert bool(specdec_ext.tree_attention(**call)[1].isnan().all())  # as without pages


# ---- sizes, and caches of 8 bits ----------------------------------------------------------------

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def make_latent(dtype, heads=16, places=50):
    """A call of latent attention: one key head of 576, whose first 512 are the values."""
    call = make(5, heads, 1, 576, places, dtype=dtype)
    return {**call, "v_cache": call["k_cache"][..., :512]}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_latent_attention(attending, dtype):
    call = make_latent(dtype)
    expected = REFERENCE.tree_attention(**call)
    apart = {**call, "v_cache": call["v_cache"].clone()}
    assert_close(expected, dense(**call), dtype)
    for given in (call, apart, paged(apart, 16)):
        found = attending.tree_attention(**given)
        assert found.out.shape == (3, 5, 16, 512)
        assert_close(found, expected, dtype)
    pages = paged(call, 16)
    pages["v_cache"] = pages["k_cache"][..., :512]
    options = dict(window=20, soft_cap=5.0)
    expected = REFERENCE.tree_attention(**call, **options)
    assert_close(attending.tree_attention(**pages, **options), expected, dtype)


@pytest.mark.parametrize("sizes", [(192, 128), (80, 16), (24, 40), (16, 512), (576, 1)], ids=str)
def test_keys_and_values_of_other_sizes(attending, sizes):
    call = make(6, 4, 2, sizes[0], 60)
    call["v_cache"] = make(6, 4, 2, sizes[1], 60)["v_cache"]
    expected = dense(**call)
    assert_close(REFERENCE.tree_attention(**call), expected, torch.float32)
    assert_close(attending.tree_attention(**call), expected, torch.float32)


@pytest.mark.parametrize("cached", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_caches_of_8_bits(attending, dtype, cached):
    call = make(9, 4, 2, 32, 70, dtype=dtype)
    scales = dict(k_scale=torch.tensor(0.7), v_scale=torch.tensor([2.5]))
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].to(cached)
    wide = {n: call[n].double() * float(scales[f"{n[0]}_scale"]) for n in ("k_cache", "v_cache")}
    expected = dense(**{**call, **wide})
    assert_close(REFERENCE.tree_attention(**call, **scales), expected, dtype)
    assert_close(attending.tree_attention(**call, **scales), expected, dtype)
    own = dict(k_scale=torch.tensor([0.7, 0.2]), v_scale=torch.tensor([2.5, -1.0]), soft_cap=9.0)
    expected = REFERENCE.tree_attention(**call, **own)
    assert_close(attending.tree_attention(**paged(call, 16), **own), expected, dtype)


@pytest.mark.parametrize("cached", FLOAT8, ids=str)
def test_every_number_of_8_bits(attending, cached):
    # One place each: the output is the number that stands there.
    numbers = torch.arange(256, dtype=torch.uint8).view(cached)
    values = numbers.view(16, 2, 1, 8).clone()
    q, keys = torch.ones(16, 1, 1, 1), torch.zeros(16, 2, 1, 1).to(cached)
    bits, lens = torch.ones(16, 1, 1, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    for place in (0, 1):
        found = attending.tree_attention(
            q, keys[:, place:], values[:, place:], bits, lens, v_scale=torch.tensor(0.5)
        )
        expected = values[:, place].double().flatten() * 0.5
        torch.testing.assert_close(
            found.out.double().flatten(), expected, rtol=0, atol=0, equal_nan=True
        )


def test_scales_are_numbers_too(attending):
    call = make(5, 4, 2, 16, 30)
    expected = REFERENCE.tree_attention(**call, scale=0.25 * 0.3)
    tensors = dict(k_scale=torch.tensor([0.3]), v_scale=torch.tensor([2.0]))
    found = attending.tree_attention(**call, **tensors)
    assert_close(found, expected._replace(out=expected.out * 2), torch.float32)
    numbers = dict(k_scale=0.3, v_scale=2)
    assert torch.equal(
        specdec_ext.tree_attention(**call, **numbers), specdec_ext.tree_attention(**call, **tensors)
    )


# ---- what may be passed --------------------------------------------------------------------------


def test_any_strides(attending):
    call = make(6, 4, 2, 32, 60)
    expected = attending.tree_attention(**call)
    for name in ("q", "k_cache", "v_cache"):
        t = call[name].transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.full((*t.shape[:-1], 40), math.nan)
        for other in (t, wide[..., 3:35].copy_(t)):
            found = attending.tree_attention(**{**call, name: other})
            torch.testing.assert_close(found, expected)
    turned = call["ancestors"].transpose(0, 1).contiguous().transpose(0, 1)
    narrow = torch.stack([call["seq_lens"]] * 2, 1).int()[:, 1]
    found = attending.tree_attention(**{**call, "ancestors": turned, "seq_lens": narrow})
    assert_equal(found, expected)


def test_what_lies_behind_the_tree_is_not_read(attending):
    call = make(6, 4, 2, 32, 60)
    expected = attending.tree_attention(**call)
    for b, length in enumerate(call["seq_lens"].tolist()):
        for name in ("k_cache", "v_cache"):
            call[name][b, length + 6 :] = math.nan
    assert_equal(attending.tree_attention(**call), expected)


@pytest.mark.parametrize("length", [-1, 55, 2**40, -(2**60)])
def test_a_tree_outside_the_cache(attending, length):
    call = make(6, 4, 2, 32, 60)
    expected = attending.tree_attention(**call)
    call["seq_lens"][1] = length
    found = attending.tree_attention(**call)
    for a, b in zip(found, expected, strict=True):
        assert bool(a[1].isnan().all())
        assert torch.equal(a[::2], b[::2])


def test_bits_are_what_is_seen(attending):
    # Not only trees: any node may see any other; bits of nodes that there are none of do nothing.
    call = make(5, 2, 2, 16, 20)
    bits = torch.tensor([[31, 4, 0, 1, 16], [2, 2, 2, 2, 2], [0, 0, 0, 0, 8]])
    call["ancestors"] = bits[..., None]
    expected = REFERENCE.tree_attention(**call)
    assert_close(attending.tree_attention(**call), expected, torch.float32)
    call["ancestors"] = bits[..., None] | -(2**5)
    assert_close(attending.tree_attention(**call), expected, torch.float32)
    assert not expected.out[0, 2].any() and expected.out[0, 3].any()
    assert (expected.lse[0] == -math.inf).all(1).tolist() == [False, False, True, False, False]


def test_nothing_to_attend(attending):
    call = make(5, 4, 2, 16, 20)
    none = {name: value[:0] for name, value in call.items()}
    found = attending.tree_attention(**none)
    assert found.out.shape == (0, 5, 4, 16) and found.lse.shape == (0, 5, 4)


def test_scores_of_any_size(attending):
    # Nothing overflows: the softmax is shifted, over splits and over prefix and tree.
    call = make(6, 2, 2, 16, 90)
    call["q"] *= 200
    found = attending.tree_attention(**call)
    assert_close(found, dense(**call), torch.float32)


def test_outputs_do_not_require_grad():
    call = make(5, 4, 2, 16, 20)
    call["q"].requires_grad_()
    call["v_cache"].requires_grad_()
    assert not specdec_ext.tree_attention(**call).requires_grad
    assert not specdec_ext.tree_attention(**call, return_lse=True).lse.requires_grad


def test_memory_does_not_grow_with_the_mask():
    # Nothing that a call allocates grows with L, the blocks of scores under a soft cap included.
    call = make(64, 2, 1, 16, 40_064, batch=1)
    given = {t.untyped_storage().data_ptr() for t in call.values()}
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    table = torch.arange(40_064 // 16)[None]
    pages = {n: call[n].view(-1, 16, 1, 16) for n in ("k_cache", "v_cache")}
    for options in ({}, dict(soft_cap=3.0), dict(window=30_000), dict(**pages, block_table=table)):
        with Watch():
            attention.tree_attention(**{**call, **options})
    scores = 64 * 2 * attention.BLOCK_KEYS * 4
    assert 0 < largest <= scores < 64 * 40_064


# ---- merging ------------------------------------------------------------------------------------


def beginning_with(call, first, end):
    """The call on the places from `first` to `end` of the caches alone."""
    caches = {name: call[name][:, first:end] for name in ("k_cache", "v_cache")}
    return {**call, **caches, "seq_lens": call["seq_lens"] - first}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_prefix_attended_to_elsewhere(attending, dtype):
    call = make(9, 4, 2, 32, 100, dtype=dtype, batch=2)
    expected, shared = REFERENCE.tree_attention(**call), 40
    own = attending.tree_attention(**beginning_with(call, shared, None))
    q, keys, values = (call[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))
    keys, values = (t[:, :, :shared].repeat_interleave(2, 1) for t in (keys, values))
    scores = (q.double() @ keys.double().transpose(2, 3)) * 32**-0.5
    elsewhere = (scores.softmax(3) @ values.double()).to(dtype).transpose(1, 2)
    there = specdec_ext.TreeAttentionResult(elsewhere, scores.logsumexp(3).float().transpose(1, 2))
    real = (call["ancestors"] != 0).any(2)
    for both in ((own, there), (there, own)):
        merged = specdec_ext.merge_attention(*both[0], *both[1])
        seen = specdec_ext.TreeAttentionResult(*(t[real] for t in merged))
        assert_close(seen, specdec_ext.TreeAttentionResult(*(t[real] for t in expected)), dtype)
        # A padding node sees nothing in the tree: all of it is what was seen elsewhere.
        assert_equal([t[~real] for t in merged], [t[~real] for t in there])


def test_merging_by_hand():
    nothing, nan = -math.inf, math.nan
    out, other = torch.tensor([[1.0], [2.0], [0.0], [0.0], [5.0]]), torch.full((5, 1), 3.0)
    lse = torch.tensor([0.0, 1.0, nothing, nothing, nan])
    other_lse = torch.tensor([0.0, nothing, 2.0, nothing, 1.0])
    found = specdec_ext.merge_attention(
        out, lse, other * (other_lse[:, None] != nothing), other_lse
    )
    assert found.out.flatten().tolist()[:4] == [2.0, 2.0, 3.0, 0.0] and found.out[4].isnan()
    expected = torch.tensor([math.log(2), 1.0, 2.0, nothing, nan])
    torch.testing.assert_close(found.lse, expected, equal_nan=True)
    # Scores of any size, in any order of the two.
    large = specdec_ext.merge_attention(out[:1], lse[:1] - 1e30, other[:1], lse[:1] + 1e30)
    assert large.out.item() == 3.0 and large.lse.item() == pytest.approx(1e30)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(lse=torch.zeros(2, 4)), r"lse must be \[...\] = \[2, 3\] .*, got \[2, 4\]"),
        (dict(other_out=torch.zeros(2, 3)), r"other_out must be .* = \[2, 3, 4\] .* got \[2, 3\]"),
        (dict(other_lse=torch.zeros(3)), r"other_lse must be .* = \[2, 3\] .*, got \[3\]"),
        (
            dict(lse=torch.zeros(2, 3, dtype=torch.int64)),
            "lse must be .*floating.*, got torch.int64",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_errors_of_merging(changes, message):
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    call = dict(out=out, lse=lse, other_out=out, other_lse=lse)
    specdec_ext.merge_attention(**call)
    with pytest.raises(ValueError, match=f"^merge_attention: {message}"):
        specdec_ext.merge_attention(**{**call, **changes})
    with pytest.raises(TypeError, match="^merge_attention: lse must be a Tensor, got NoneType"):
        specdec_ext.merge_attention(**{**call, "lse": None})


# ---- in models ----------------------------------------------------------------------------------


def compiled_step(call):
    tree = specdec_ext.tree_attention(**call)
    capped = specdec_ext.tree_attention(**call, soft_cap=3.0, return_lse=True)
    caches = {n: call[n].unflatten(1, (-1, 8)).flatten(0, 1) for n in ("k_cache", "v_cache")}
    table = torch.arange(caches["k_cache"].shape[0]).view(call["q"].shape[0], -1)
    paged = specdec_ext.tree_attention(
        **{**call, **caches}, block_table=table, window=3, k_scale=0.5
    )
    merged = specdec_ext.merge_attention(*capped, tree, capped.lse)
    return tree * 2, *capped, paged, *merged


def test_compiled():
    compiled = torch.compile(compiled_step, fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes in (5, 9):
        call = make(nodes, 4, 2, 16, 40)
        for a, b in zip(compiled(call), compiled_step(call), strict=True):
            assert torch.equal(a, b)


class Layer(torch.nn.Module):
    def forward(self, parents, q, k_cache, v_cache, path, accepted, seq_lens):
        tree = torch.ops.specdec.tree_mask(parents)
        out = specdec_ext.tree_attention(q, k_cache, v_cache, tree[0], seq_lens)
        status = specdec_ext.compact_kv(k_cache, v_cache, path, accepted, seq_lens)
        return out, status, k_cache + v_cache


def test_export():
    call = make(5, 4, 2, 16, 40)
    small = (torch.tensor([[1, 3, -1]] * 3), torch.tensor([2, 2, 1]), call["seq_lens"])

    def arguments():
        caches = (call["k_cache"].clone(), call["v_cache"].clone())
        return random_parents([5, 3, 1], 5), call["q"], *caches, *small

    program = torch.export.export(Layer(), arguments())
    for a, b in zip(program.module()(*arguments()), Layer()(*arguments()), strict=True):
        assert torch.equal(a, b)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {f"specdec.{name}.default" for name in ("tree_mask", "compact_kv")} <= targets


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


PREFIXES = [[3, 14, 15, 9, 26], [5, 35, 8]]
PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1, -1, -1, -1]])
TOKENS = torch.tensor([[7, 11, 12, 13, 14, 15, 16], [8, 21, 22, 23, 0, 0, 0]])


def plain_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def tokens_to(b, v):
    """The tokens from the root to a node."""
    path = []
    while v >= 0:
        path.insert(0, int(TOKENS[b, v]))
        v = int(PARENTS[b, v])
    return path


@torch.no_grad()
def tree_forward(model, layout, mask_of):
    """Prefill a padded batch, then run the trees in one call."""
    from transformers import DynamicCache

    width = max(map(len, PREFIXES))
    counts = torch.zeros(2, width, dtype=torch.int64)
    ids = torch.zeros(2, width, dtype=torch.int64)
    for b, prefix in enumerate(PREFIXES):
        where = slice(width - len(prefix), None) if layout == "left" else slice(len(prefix))
        counts[b, where], ids[b, where] = 1, torch.tensor(prefix)
    cache = DynamicCache(config=model.config)
    positions = (counts.cumsum(1) - 1).clamp(min=0)
    given = {own_cache_name(): cache}
    model(ids, attention_mask=counts, position_ids=positions, **given)
    tree = specdec_ext.tree_mask(PARENTS)
    lens = counts.sum(1)
    logits = model(
        TOKENS,
        attention_mask=mask_of(tree.ancestors, lens, width, counts),
        position_ids=specdec_ext.tree_position_ids(tree.depths, lens),
        **given,
    ).logits
    return logits, cache, counts


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["left", "right", "holes"])
def test_a_model_run_on_trees(llama, layout, implementation):
    def mask_of(ancestors, lens, width, counts):
        if layout == "holes":
            return specdec_ext.dense_tree_mask(ancestors, prefix_mask=counts)
        return specdec_ext.dense_tree_mask(ancestors, lens, width, layout=layout)

    llama.set_attn_implementation(implementation)
    logits, _, _ = tree_forward(llama, "left" if layout == "left" else "right", mask_of)
    for b, prefix in enumerate(PREFIXES):
        for v in range(7 if b == 0 else 4):
            expected = plain_logits(llama, prefix + tokens_to(b, v))
            torch.testing.assert_close(logits[b, v], expected, rtol=1e-4, atol=1e-4)


def test_decoding_goes_on_after_compaction(llama):
    # Left-padded prefixes end in one column: all trees begin at the same place of the cache.
    def mask_of(ancestors, lens, width, counts):
        return specdec_ext.dense_tree_mask(ancestors, lens, width)

    llama.set_attn_implementation("sdpa")
    _, cache, counts = tree_forward(llama, "left", mask_of)
    width = counts.shape[1]
    path, accepted = torch.tensor([[2, 4, 6], [1, 3, -1]]), torch.tensor([3, 2])
    starts = torch.full((2,), width)
    for layer in cache.layers:
        kept = (t.transpose(1, 2) for t in (layer.keys, layer.values))
        assert specdec_ext.compact_kv(*kept, path, accepted, starts).tolist() == [0, 0]
    # The root and the accepted nodes count; what lies behind them does not.
    held = torch.arange(7)[None] <= accepted[:, None]
    counts = torch.cat([counts, held.long(), torch.ones(2, 1, dtype=torch.int64)], 1)
    with torch.no_grad():
        logits = llama(
            torch.tensor([[40], [41]]),
            attention_mask=counts,
            position_ids=counts.sum(1, keepdim=True) - 1,
            **{own_cache_name(): cache},
        ).logits[:, 0]
    for b, (node, token) in enumerate(((6, 40), (3, 41))):
        expected = plain_logits(llama, PREFIXES[b] + tokens_to(b, node) + [token])
        torch.testing.assert_close(logits[b], expected, rtol=1e-4, atol=1e-4)
