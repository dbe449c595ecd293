"""Spec-Drafter: what attends to what, caches, saving, moving, making one from a target."""

from __future__ import annotations

import copy

import pytest
import torch
from spec_drafters import spec_drafter
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec_ext.decoding import Counts, pack_linears, packed
from specdec_ext.models import spec_drafter as module
from specdec_ext.models.prefix_cache import block_mask
from specdec_ext.models.spec_drafter import (
    MASKED,
    SpecDrafter,
    SpecDrafterConfig,
)

SOURCE = torch.tensor([[7, 8, 9, 3, 1], [4, 5, 1, 0, 0], [6, 2, 3, 1, 0]])
SOURCE_MASK = (SOURCE != 0).long()
PREFIX = torch.tensor([[0, 7, 8, 9], [0, 5, 9, 9], [0, 6, 2, 9]])
LENGTHS = torch.tensor([4, 2, 3])
V, K = 30, 4


@pytest.fixture(scope="module")
def model():
    return spec_drafter(V, block_size=K)


@torch.inference_mode()
def predicted(model, prefix=PREFIX, lengths=LENGTHS, block=None, rows=slice(None)):
    return model(
        SOURCE[rows], SOURCE_MASK[rows], prefix_ids=prefix[rows], prefix_lengths=lengths[rows],
        block_ids=block,
    ).logits  # fmt: skip


# --- masks ----------------------------------------------------------------------------------------


def test_masks_of_a_block():
    """By hand: the prefix is causal and sees no slot; slots see their prefix and each other."""
    found = block_mask(torch.tensor([0, 0]), torch.tensor([2, 1]), new=2, block=3, width=2)
    assert found.int().tolist() == [
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1],
        ],
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],  # padding behind the prefix: what it sees nobody reads
            [1, 0, 1, 1, 1],
            [1, 0, 1, 1, 1],
            [1, 0, 1, 1, 1],
        ],
    ]


def test_masks_behind_a_cache():
    """Rows know 3 and 1 tokens and gain 1 and 2: the second has a free slot, the first padding."""
    found = block_mask(torch.tensor([3, 1]), torch.tensor([4, 3]), new=2, block=1, width=4)
    assert found.int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]],
    ]


# --- what a prediction depends on -----------------------------------------------------------------


def test_what_stands_behind_a_prefix_does_not_matter(model):
    other = PREFIX.clone()
    other[1, 2:], other[2, 3] = 17, 17
    assert torch.equal(predicted(model), predicted(model, other))
    other[1, 1] = 17
    assert not torch.allclose(predicted(model)[1], predicted(model, other)[1])


def test_rows_are_what_they_are_alone(model):
    together = predicted(model)
    for b in range(3):
        source = SOURCE[b : b + 1, SOURCE_MASK[b].bool()]
        with torch.inference_mode():
            alone = model(source, prefix_ids=PREFIX[b : b + 1, : LENGTHS[b]]).logits
        torch.testing.assert_close(together[b : b + 1], alone)


def test_slots_have_queries_of_their_own_and_see_each_other(model):
    """A token that one slot shows changes what all others predict, before it and behind it."""
    masked = predicted(model)
    assert torch.pdist(masked[0]).min() > 1e-3  # no two slots predict the same
    block = torch.full((3, K), MASKED)
    block[:, 1] = 17
    shown = predicted(model, block=block)
    for slot in (0, 2, 3):
        assert not torch.allclose(masked[:, slot], shown[:, slot])


def test_the_prefix_does_not_see_the_block(model):
    """What is cached of a prefix is the same whatever slots stood behind it, and how many."""
    caches = []
    for slots in (1, K):
        state = model.read(SOURCE, SOURCE_MASK)
        model.draft_block(state, PREFIX, Counts(LENGTHS.tolist(), LENGTHS), slots)
        caches.append(state.prefix._buffers)
    for one, other in zip(*caches, strict=True):
        for a, b in zip(one, other, strict=True):
            for row, length in enumerate(LENGTHS.tolist()):
                torch.testing.assert_close(a[row, :, :length], b[row, :, :length])


@pytest.mark.parametrize("wanted", [1, 5, 6])
def test_slots_that_are_not_wanted_are_not_projected(wanted, monkeypatch):
    """The decoder runs all slots, so that what the others give is what they give among all."""
    model = spec_drafter(V, block_size=6)
    projected, project = [], model._project
    monkeypatch.setattr(model, "_project", lambda h: projected.append(h.shape[1]) or project(h))
    found = [
        model.draft_block(
            model.read(SOURCE, SOURCE_MASK), PREFIX, Counts(LENGTHS.tolist(), LENGTHS), 6, slots
        )
        for slots in (None, wanted)
    ]
    assert projected == [6, max(wanted, module._FEWEST_SLOTS)]
    assert found[1].shape == (3, wanted, V)
    torch.testing.assert_close(found[0][:, :wanted], found[1], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"wanted must be in \[1, 6\], got 7"):
        model.draft_block(model.read(SOURCE), PREFIX[:, :1], Counts.full(3, 1, "cpu"), 6, 7)


@torch.inference_mode()
def test_a_large_output_layer_in_parts(model, monkeypatch):
    """Logits do not say in how many parts they were computed."""
    single, hidden = copy.deepcopy(model).float(), torch.randn(2, 5, model.config.d_model)
    assert single.shared.weight.numel() < module._LARGE
    whole = single._project(hidden)
    monkeypatch.setattr(module, "_LARGE", 0)
    monkeypatch.setattr(module, "_PART", 7)
    sizes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w: sizes.append(len(w)) or linear(x, w)
    )
    torch.testing.assert_close(single._project(hidden), whole)
    assert max(sizes) == 7 and sum(sizes) == model.config.vocab_size
    single._project(hidden[:1, :1])
    assert sizes[-1] == model.config.vocab_size  # one row: nothing is gained


def test_distances_are_those_of_the_text_on_both_sides(model):
    """A slot's bias tells k behind it from k before it, and every distance in a block apart."""
    config = SpecDrafterConfig(vocab_size=9, d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=1)
    decoder = SpecDrafter(config).decoder
    bias = decoder._position_bias(torch.arange(-26, 26)[None, None])[0, :, 0]  # [heads, 52]
    assert len(bias.T.unique(dim=0)) == 52


def decode_in_parts(model, parts, rows=slice(None)):
    """Feed each row's prefix in parts of these lengths, ``[parts][rows]``; give all logits."""
    state = model.read(SOURCE[rows], SOURCE_MASK[rows])
    done = torch.zeros(3, dtype=torch.int64)[rows]
    found = []
    for lengths in parts:
        new = torch.tensor(lengths)
        width = max(lengths)
        columns = (done[:, None] + torch.arange(width)).clamp(max=PREFIX.shape[1] - 1)
        tokens = PREFIX[rows].gather(1, columns)
        found.append(model.draft_block(state, tokens, Counts(lengths, new)))
        done = done + new
    assert state.calls == len(parts)
    return found


@pytest.mark.parametrize(
    "parts",
    [
        [[4, 2, 3]],
        [[1, 1, 1], [1, 1, 1], [2, 0, 1]],
        [[3, 1, 1], [1, 1, 2]],
        [[1, 2, 1], [3, 0, 2]],
        [[2, 2, 2], [0, 0, 0], [2, 0, 1]],
    ],
    ids=str,
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_cache_gives_what_a_whole_call_gives(model, attention, parts):
    """Rows of unequal length that grow by unequal numbers, none at all included."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    found = decode_in_parts(model, parts)
    done = torch.zeros(3, dtype=torch.int64)
    for lengths, logits in zip(parts, found, strict=True):
        done = done + torch.tensor(lengths)
        torch.testing.assert_close(logits, predicted(model, lengths=done))


def test_control_a_cache_that_forgets_where_a_row_ends(model, monkeypatch):
    """Padding taken for tokens: a row that gained less than another sees what it has not read."""
    from specdec_ext.models.prefix_cache import PrefixCache

    def end(self):
        self.lengths = self.lengths + Counts.full(3, self._width, self.lengths.device.device)

    parts = [[3, 1, 1], [1, 1, 2]]
    expected = decode_in_parts(model, parts)[-1]
    monkeypatch.setattr(PrefixCache, "end", end)
    assert not torch.allclose(decode_in_parts(model, parts)[-1], expected)


def test_rows_leave(model):
    state = model.read(SOURCE, SOURCE_MASK)
    first = Counts([2, 1, 1], torch.tensor([2, 1, 1]))
    model.draft_block(state, PREFIX[:, :2], first)
    rows = torch.tensor([2, 0])
    state.select(rows, [2, 0])
    tokens, new = torch.tensor([[6, 2], [8, 9]]), Counts([2, 2], torch.tensor([2, 2]))
    found = model.draft_block(state, tokens, new)
    torch.testing.assert_close(found, predicted(model)[rows])


def test_room_grows(model):
    """One token a call, past the room that was allocated, gives what a whole call gives."""
    state = model.read(SOURCE[:1], room=2)
    one = Counts.full(1, 1, SOURCE.device)
    text = torch.randint(2, V, (1, 9), generator=torch.Generator().manual_seed(0))
    for token in text.T:
        found = model.draft_block(state, token[None], one)
    with torch.inference_mode():
        torch.testing.assert_close(found, model(SOURCE[:1], prefix_ids=text).logits)
    assert state.prefix.get_seq_length() == 9


@pytest.mark.parametrize("slots", [0, K + 1])
def test_blocks_of_another_size_are_refused(model, slots):
    message = rf"1 to block_size = {K} slots, got {slots}"
    with pytest.raises(ValueError, match=message):
        predicted(model, block=torch.full((3, slots), MASKED))
    with pytest.raises(ValueError, match=message):
        model.draft_block(
            model.read(SOURCE), PREFIX[:, :1], Counts.full(3, 1, SOURCE.device), slots
        )


def test_new_weights_are_as_t5_initialises_them():
    """Encoder and decoder alike; with others (order 1, say) nothing is learned in any time."""
    config = SpecDrafterConfig(vocab_size=300, d_model=64, d_kv=32, d_ff=128, num_layers=1)
    torch.manual_seed(0)
    model = SpecDrafter(config)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_decoder_layers=2)
    )
    expected = dict(t5.named_parameters())
    for name, parameter in model.named_parameters():
        if name in ("mask_embedding", "slot_embedding.weight"):
            assert 0.7 < parameter.std() < 1.3  # as embeddings of tokens
        elif parameter.std() > 0 and "relative" not in name:
            assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=0.2), (
                name
            )


# --- saved, moved ---------------------------------------------------------------------------------


def test_saved_and_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = SpecDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    assert not loaded.training and loaded.config.block_size == K
    found, expected = loaded.config.to_diff_dict(), model.config.to_diff_dict()
    assert {**found, "_name_or_path": ""} == {**expected, "_name_or_path": ""}
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert loaded.encoder.embed_tokens.weight is loaded.shared.weight
    torch.testing.assert_close(predicted(loaded), predicted(model))


def test_default_is_the_papers():
    config = SpecDrafterConfig()
    sizes = (config.d_model, config.d_ff, config.num_heads, config.block_size)
    assert sizes == (512, 2048, 8, 25)
    with torch.device("meta"):
        model = SpecDrafter(config)
    assert len(model.encoder.block) == 12 and len(model.decoder.block) == 2
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 9}
    for changes, said in (
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        (
            {"decoder_relative_attention_num_buckets": 2},
            r"num_buckets must be in \[4, 511\], got 2",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            SpecDrafter(SpecDrafterConfig(**sizes, **changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moved_to_another_dtype(model, dtype):
    moved = copy.deepcopy(model).to(dtype)
    whole = predicted(moved)
    assert whole.dtype == dtype and whole.isfinite().all()
    state = moved.read(SOURCE, SOURCE_MASK)
    found = moved.draft_block(state, PREFIX, Counts(LENGTHS.tolist(), LENGTHS))
    tolerance = 1e-4 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(found, whole, atol=tolerance, rtol=tolerance)


def run_on(model, device, mask=None):
    """Run both ways of calling on a device, from inputs that are there."""
    model = copy.deepcopy(model).float().to(device)
    source, prefix, lengths = (tensor.to(device) for tensor in (SOURCE, PREFIX, LENGTHS))
    whole = model(source, mask, prefix_ids=prefix, prefix_lengths=lengths).logits
    state = model.read(source, mask)
    found = model.draft_block(state, prefix, Counts(LENGTHS.tolist(), lengths))
    return whole, found


def test_moved_to_another_device(model):
    """On the device without memory every tensor of another one would be refused.

    (There T5's encoder takes no mask: it looks whether anything is masked.)
    """
    for found in run_on(model, "meta"):
        assert found.device.type == "meta" and found.shape == (3, K, V)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moved_to_a_gpu(model):
    for found in run_on(model, "cuda", SOURCE_MASK.cuda()):
        torch.testing.assert_close(found.cpu(), predicted(model).float(), atol=1e-3, rtol=1e-3)


# --- reduced vocabularies -------------------------------------------------------------------------


SOME = torch.tensor([17, 1, 4, 29, 8])


@pytest.mark.parametrize("large", [0, 1 << 20], ids=["in parts", "at once"])
def test_some_of_the_vocabulary(model, monkeypatch, large, tmp_path):
    """The laws of the whole drafter, of these tokens: in training, behind a cache, loaded again."""
    monkeypatch.setattr(module, "_LARGE", large)
    monkeypatch.setattr(module, "_PART", 2)
    whole = copy.deepcopy(model).float()
    fewer = whole.with_vocabulary(SOME)
    assert fewer.dtype == torch.float32 and not fewer.training
    assert whole.train().with_vocabulary(SOME).training
    fewer.save_pretrained(tmp_path)
    expected = predicted(whole.eval())[..., SOME]
    for drafter in (fewer, SpecDrafter.from_pretrained(tmp_path)):
        assert drafter.config.draft_vocab_size == len(SOME)
        assert torch.equal(drafter.draft_token_ids, SOME)
        torch.testing.assert_close(predicted(drafter), expected)
        state = drafter.read(SOURCE, SOURCE_MASK)
        found = drafter.draft_block(state, PREFIX, Counts(LENGTHS.tolist(), LENGTHS))
        torch.testing.assert_close(found, expected)
    with torch.no_grad():  # its output layer is its own
        fewer.projection.weight.zero_()
    torch.testing.assert_close(predicted(whole)[..., SOME], expected)
    assert predicted(fewer).abs().max() == 0


def test_packed_weights(model, monkeypatch):
    """`pack_linears` reaches the output layer of a reduced vocabulary, and a layer of others."""
    monkeypatch.setattr(packed, "_SMALLEST", 1)
    whole = copy.deepcopy(model).float()
    fewer = whole.with_vocabulary(SOME)
    pack_linears(fewer)
    used = []
    monkeypatch.setattr(packed, "_rows_of", lambda x, weight: used.append(id(weight)) or 8)
    found = predicted(fewer)
    for layer in (fewer.projection, fewer.decoder.block[0].layer[0].SelfAttention.q):
        assert id(layer.weight) in used
    torch.testing.assert_close(found, predicted(whole)[..., SOME], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_reduced_drafter_is_made_where_the_whole_one_is(model, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    moved = copy.deepcopy(model).to(device).with_vocabulary(SOME)
    assert {value.device.type for value in moved.state_dict().values()} == {device}
    assert moved.projection.weight.shape == (len(SOME), model.config.d_model)


def test_vocabularies_that_do_not_fit(model):
    for wrong, said in (
        ([3, 3, 1], r"3 distinct tokens in \[0, 30\), got 2 distinct"),
        ([3, 30], "some of them outside"),
        ([-1, 3], "some of them outside"),
        ([[3, 1]], r"shape \[1, 2\]"),
        ([], r"draft_vocab_size must be in \[1, 30\], got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            model.with_vocabulary(torch.tensor(wrong, dtype=torch.int64))
    for wrong, said in (
        ([3, 1], "list"),
        (None, "NoneType"),
        (torch.ones(2), "one of torch.float32"),
    ):
        with pytest.raises(TypeError, match=f"must be an int64 tensor .Vd., got {said}"):
            model.with_vocabulary(wrong)
    with pytest.raises(ValueError, match="over the target's vocabulary, got one over 5 tokens"):
        model.with_vocabulary(SOME).with_vocabulary(SOME)


# --- from a target --------------------------------------------------------------------------------

SIZES = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 3}


def target_of(**changes):
    torch.manual_seed(1)
    return T5ForConditionalGeneration(T5Config(**{**SIZES, **changes})).eval()


def test_from_a_target():
    target = target_of(feed_forward_proj="gated-gelu", num_decoder_layers=5, dropout_rate=0.3)
    drafter = SpecDrafter.from_target(target, block_size=6, num_decoder_layers=1)
    assert (drafter.config.num_layers, drafter.config.num_decoder_layers) == (3, 1)
    assert (drafter.config.block_size, drafter.config.dropout_rate) == (6, 0.3)
    drafter.eval()
    with torch.inference_mode():
        expected = target.get_encoder()(SOURCE, attention_mask=SOURCE_MASK).last_hidden_state
        found = drafter.get_encoder()(SOURCE, attention_mask=SOURCE_MASK).last_hidden_state
    torch.testing.assert_close(found, expected)
    with torch.no_grad():  # a copy: the target stays as it is
        drafter.shared.weight.zero_()
    assert target.shared.weight.abs().sum() > 0


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_layers": 2}, "must have num_layers=3, as this drafter's has, got num_layers=2"),
        (
            {"d_ff": 32, "vocab_size": 31},
            "have vocab_size=30, d_ff=24,.*vocab_size=31, d_ff=32",
        ),
        ({"num_heads": 4, "d_kv": 4}, "must have d_kv=8, num_heads=2"),  # the same shapes
        ({"feed_forward_proj": "gated-gelu"}, "must have feed_forward_proj=relu"),
    ],
)
def test_a_target_that_does_not_fit(changes, said):
    drafter = SpecDrafter(SpecDrafterConfig(**SIZES))
    before = copy.deepcopy(drafter.state_dict())
    with pytest.raises(ValueError, match=said):
        drafter.init_encoder_from(target_of(**changes))
    for name, value in before.items():
        assert torch.equal(value, drafter.state_dict()[name])
    if "num_layers" in changes:
        with pytest.raises(ValueError, match="must have num_layers=12"):
            SpecDrafter.from_target(target_of(), num_layers=12)


def test_from_a_targets_decoder():
    """With all its layers, a slot that shows the last token says what the target does there."""
    target = target_of(num_decoder_layers=3)
    drafter = SpecDrafter.from_target(target, block_size=2, num_decoder_layers=3).eval()
    drafter.init_decoder_from(target)
    with torch.inference_mode():
        drafter.slot_embedding.weight.zero_()
        text = torch.tensor([[0, 7, 5, 9, 4], [0, 3, 3, 8, 6]])
        wanted = target(
            input_ids=SOURCE[:2], attention_mask=SOURCE_MASK[:2], decoder_input_ids=text
        ).logits[:, -1]
        given = {"prefix_ids": text[:, :-1], "block_ids": text[:, -1:]}
        found = drafter(SOURCE[:2], SOURCE_MASK[:2], **given).logits[:, 0]
    torch.testing.assert_close(found, wanted)


def test_some_layers_of_a_targets_decoder():
    """The first, the last, and evenly spaced ones; biases to the right stay as they were."""
    target = target_of(num_decoder_layers=7)
    drafter = SpecDrafter.from_target(target, num_decoder_layers=3)
    biases = drafter.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    before = biases.detach().clone()
    drafter.init_decoder_from(target)
    for own, other in ((0, 0), (1, 3), (2, 6)):
        weights = target.decoder.block[other].state_dict()
        for name, weight in drafter.decoder.block[own].state_dict().items():
            assert "relative" in name or torch.equal(weight, weights[name]), (own, name)
    half = len(before) // 2
    assert torch.equal(biases[half:], before[half:])
    assert (biases[:half] != before[:half]).any(1).all()
    one = SpecDrafter.from_target(target, num_decoder_layers=1)
    one.init_decoder_from(target)
    own, other = one.decoder.block[0].layer[2], target.decoder.block[0].layer[2]
    assert torch.equal(own.DenseReluDense.wo.weight, other.DenseReluDense.wo.weight)
    with pytest.raises(ValueError, match="must have at least 3 layers, .* got 2"):
        drafter.init_decoder_from(target_of(num_decoder_layers=2))
    with pytest.raises(ValueError, match="the target's decoder must have num_heads=2"):
        drafter.init_decoder_from(target_of(num_decoder_layers=7, num_heads=4))


def test_a_target_of_another_kind():
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
            decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2,
        )
    )  # fmt: skip
    with pytest.raises(TypeError, match="must be a T5 encoder-decoder.*got BartForConditional"):
        SpecDrafter.from_target(bart)
    with pytest.raises(TypeError, match="must be a T5 encoder-decoder.*got SimpleModel"):
        SpecDrafter(SpecDrafterConfig(**SIZES)).init_encoder_from(type("SimpleModel", (), {})())
