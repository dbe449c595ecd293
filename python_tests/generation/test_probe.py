"""How rows may lie in a cache is found out by asking the model: what is found, and what follows."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from generate_models import ARCHITECTURES, pair, perturbed, prompts
from test_generate_models import LIMITS, LONG, RAGGED, up_to_position_128

import specdec_ext
from specdec_ext.decoding import GrownTree, StaticTree, probe
from specdec_ext.decoding.cache import CachedModel, Traits
from specdec_ext.decoding.cache_names import own_cache_name
from specdec_ext.decoding.hosting import host_model
from specdec_ext.decoding.row_by_row import RowByRow

NEW = 16
ENDLESS = {"bos_token_id": None, "eos_token_id": None}
WIDTHS = {"vocab_size": 67, "max_position_embeddings": 128, **ENDLESS}
BERT = {
    **WIDTHS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "initializer_range": 0.3, "is_decoder": True,
}  # fmt: skip
BART = {
    **WIDTHS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "init_std": 0.3, "is_encoder_decoder": False, "is_decoder": True,
    "pad_token_id": 0,
}  # fmt: skip
DECODERS = {
    # learned positions, counted in slots
    "bart": lambda: hf.BartForCausalLM(hf.BartConfig(**BART)),
    # sinusoidal positions, counted in slots
    "roformer": lambda: hf.RoFormerForCausalLM(hf.RoFormerConfig(**BERT, embedding_size=32)),
    # a local window in every other layer, of which no cache tells
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            **WIDTHS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            window_size=8,
            attention_types=[[["global", "local"], 1]],
            initializer_range=0.3,
        )  # fmt: skip
    ),
    # positions that begin behind the padding token's
    "roberta": lambda: hf.RobertaForCausalLM(
        hf.RobertaConfig(**{**BERT, "max_position_embeddings": 130}, pad_token_id=1)
    ),
    "falcon_alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=67,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=True,
            initializer_range=0.3,
            **ENDLESS,
        )  # fmt: skip
    ),
}
EXPECTED = {
    "llama": Traits(True, True, 0),
    "mistral_window": Traits(False, True, 0),
    "qwen2": Traits(True, True, 0),
    "gpt2": Traits(True, True, 0),
    "gpt_neox": Traits(True, True, 0),
    "gemma3_alternating": Traits(False, True, 0),
    "bloom_alibi": Traits(True, True, None),
    "bart": Traits(False, False, None),
    "roformer": Traits(False, False, None),
    "gpt_neo": Traits(False, True, 0),
    "roberta": Traits(True, True, 2),
}


def build(name: str, seed: int = 0):
    """Return a random target, and a draft: the same, perturbed."""
    if name in ARCHITECTURES:
        return pair(name, seed=seed)
    torch.manual_seed(seed)
    target = DECODERS[name]().eval()
    if name != "falcon_alibi":  # its softmax is float32, and float64's smallest number overflows
        target = target.double()
    return target, perturbed(target, 0.03)


@torch.inference_mode()
def uncached(model, ids, mask, new: int = NEW) -> list[list[int]]:
    """Return the greedy continuation of each row by itself, without padding, without a cache."""
    rows = []
    for row, real in zip(ids, mask.bool(), strict=True):
        text = row[real][None]
        for _ in range(new):
            logits = model(input_ids=text, use_cache=False).logits[:, -1]
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
        rows.append(text[0, -new:].tolist())
    return rows


@torch.inference_mode()
def looks_ahead(model) -> bool:
    """Whether a token changes what is said before it, as in RoFormer of transformers 5.17."""
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    said = model(input_ids=ids, use_cache=False).logits[:, 1]
    return not torch.allclose(said[0], said[1])


def new_tokens(target, draft, ids, mask, **options) -> list[list[int]]:
    sequences, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, **options
    )
    assert statistics.accepted and statistics.rejected  # both were seen
    return sequences[:, -NEW:].tolist()


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_found(name):
    target, _ = build(name)
    if looks_ahead(target):
        pytest.skip("the model looks ahead, and is refused")
    assert probe.find_traits(target, 64, static=False) == EXPECTED[name]


@pytest.mark.parametrize("lengths", [[9, 9, 9], RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("name", DECODERS)
def test_batches_of_models_that_count_in_slots(name, lengths):
    target, draft = build(name)
    ids, mask = prompts(lengths, seed=3)
    ids = torch.where(ids == 1, 2, ids)  # RoBERTa's padding token is not for texts
    if looks_ahead(target):
        with pytest.raises(ValueError, match="gives other answers over a key-value cache"):
            new_tokens(target, draft, ids, mask, gamma=4)
        return
    expected = uncached(target, ids, mask)
    assert new_tokens(target, draft, ids, mask, gamma=4) == expected


def test_one_row_over_a_static_cache():
    ids, mask = prompts([9], seed=6)
    target, draft = build("bart")
    found = new_tokens(target, draft, ids, mask, gamma=4, static_cache=True)
    assert found == uncached(target, ids, mask)
    target, draft = build("gpt_neo")
    with pytest.raises(ValueError, match="GPTNeoForCausalLM .* static cache"):
        new_tokens(target, draft, ids, mask, gamma=4, static_cache=True)


@pytest.mark.parametrize("tree", [StaticTree.from_widths((2, 1)), GrownTree(nodes=6, depth=2)])
@pytest.mark.parametrize("name", ["bart", "gpt_neo", "falcon_alibi", "mistral_window"])
def test_trees_that_are_not_understood_are_refused(name, tree):
    target, draft = build(name)
    with pytest.raises(ValueError, match=f"{type(target).__name__} .* tree"):
        specdec_ext.generate(target, draft, torch.tensor([[3, 4, 5]]), tree=tree)


def test_trees_of_models_whose_positions_begin_elsewhere():
    target, draft = build("roberta")
    ids, mask = prompts(RAGGED, seed=4)
    ids = torch.where(ids == 1, 2, ids)
    tree = StaticTree.from_widths((2, 1, 1), "top_k")
    assert new_tokens(target, draft, ids, mask, tree=tree) == uncached(target, ids, mask)


def test_a_window_wider_than_the_text_is_none():
    target, _ = build("mistral_window")
    config = copy.deepcopy(target.config)
    config.sliding_window = 4096
    wide = type(target)(config).eval().double()
    assert probe.find_traits(wide, 64, static=False) == Traits(True, True, 0)
    probe.check_trees(wide, 64, static=False)


@pytest.mark.parametrize("name", ["mistral_window", "bart"])
def test_a_wrapper_that_hides_the_configuration(name):
    target, draft = build(name)
    ids, mask = prompts([9, 9], seed=5)
    expected = uncached(target, ids, mask)
    wrapped = torch.nn.DataParallel(target)
    assert not hasattr(wrapped, "config")
    assert new_tokens(wrapped, draft, ids, mask, gamma=4) == expected


def test_rows_apart_near_the_last_position():
    """BART has 128 positions: a row at its limit is not fed beside rows that still draft."""
    target, draft = build("bart")
    expected = uncached(target, *LONG, 28)
    for row, tokens in enumerate(up_to_position_128(target, draft)):
        assert tokens == expected[row][: LIMITS[row]]


def test_a_model_that_ignores_the_cache_is_refused():
    class Forgetful(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **kwargs):
            output = super().forward(input_ids=input_ids, use_cache=False)
            if past_key_values is not None:
                states = torch.zeros(input_ids.shape[0], 1, input_ids.shape[1], 1)
                past_key_values.update(states, states, 0)
            return output

    target, draft = build("llama")
    forgetful = Forgetful(target.config).eval()
    with pytest.raises(ValueError, match="Forgetful gives other answers over a key-value cache"):
        specdec_ext.generate(forgetful, draft, torch.tensor([[3, 4, 5]]))


def test_a_model_that_reads_the_whole_text_in_each_call_is_refused():
    """CPM-Ant: it slices the text by the cache's length, and keeps slots of its own in there."""
    config = hf.CpmAntConfig(
        vocab_size=67, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48,
        num_hidden_layers=2, prompt_length=4,
    )  # fmt: skip
    target = hf.CpmAntForCausalLM(config).eval()
    with pytest.raises(ValueError, match="CpmAntForCausalLM cannot go on behind a cache"):
        specdec_ext.generate(target, None, torch.tensor([[3, 4, 5]]))


def count_calls(model):
    """Count a model's calls from now on, in a list of one number."""
    calls = [0]

    def count(*args):
        calls[0] += 1

    model.register_forward_hook(count)
    return calls


def test_the_question_is_asked_once_for_a_class_and_a_configuration():
    target, _ = build("qwen2", seed=1)
    probe._found.clear()
    calls = count_calls(target)
    probe.find_traits(target, 64, static=False)
    asked = calls[0]
    assert 0 < asked < 30
    probe.find_traits(target, 64, static=False)
    assert calls[0] == asked
    twin = copy.deepcopy(target)
    probe.find_traits(twin, 64, static=False)
    assert calls[0] == asked
    twin.config.rope_theta = 77.0
    probe.find_traits(twin, 64, static=False)
    assert calls[0] > asked


def test_what_is_free_in_a_large_cache_is_not_asked_of_smaller_ones():
    target, _ = build("qwen2", seed=1)
    probe._found.clear()
    calls = count_calls(target)
    for ask in (probe.find_traits, probe.check_trees):
        found = ask(target, 512, static=False)
        asked = calls[0]
        assert ask(target, 64, static=False) == found and calls[0] == asked
        ask(target, 1024, static=False)  # of larger ones it is
        assert calls[0] > asked
        asked = calls[0]
        ask(target, 64, static=True)  # and of caches of one size
        assert calls[0] > asked
    probe.check_static(target, 512)
    asked = calls[0]
    probe.check_static(target, 64)
    assert calls[0] == asked


def test_a_window_in_a_large_cache_says_nothing_of_smaller_ones():
    target, _ = build("mistral_window")
    config = copy.deepcopy(target.config)
    config.sliding_window = 100
    target = type(target)(config).eval().double()
    assert not probe.find_traits(target, 256, static=False).holes
    with pytest.raises(ValueError, match="at the nodes of a tree"):
        probe.check_trees(target, 256, static=False)
    assert probe.find_traits(target, 64, static=False).holes
    probe.check_trees(target, 64, static=False)


def test_answers_that_depend_on_nothing_settle_nothing():
    """All-zero weights pass every comparison; what they pass is not kept for others."""
    target, _ = build("bart", seed=2)
    state = copy.deepcopy(target.state_dict())
    probe._found.clear()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    assert probe.find_traits(target, 64, static=False).padding
    target.load_state_dict(state)
    assert not probe.find_traits(target, 64, static=False).padding


def test_a_model_in_training_mode_is_not_asked():
    probe._found.clear()  # of its class in evaluation mode
    target, _ = build("llama")
    target.train()
    state = torch.random.get_rng_state()
    assert probe.find_traits(target, 64, static=False) == Traits(False, False, None)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ValueError, match="training mode"):
        probe.check_trees(target, 64, static=False)


def llama(kind=hf.LlamaForCausalLM, dtype=torch.float32):
    config = hf.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return kind(config).eval().to(dtype)


@torch.inference_mode()
def test_tolerance_behind_many_slots():
    """It grows with the square root of the slots, and stays far below what a context changes."""
    asked = probe._Probe(llama())
    plain = asked._plain(untried=None, insensitive=None)
    near, far = (asked._far(plain, gap).tolerance for gap in (0, 1600))
    assert near == plain.tolerance
    assert 2 * near < far < 40 * near  # the logits far away are smaller ones
    assert far < 1e-3 * plain.sensitivity
    # A bfloat16 model's own rounding covers the float32 sums of its attention.
    asked = probe._Probe(llama(dtype=torch.bfloat16))
    plain = asked._plain(untried=None, insensitive=None)
    assert asked._far(plain, 1600).tolerance < 4 * plain.tolerance


@pytest.mark.parametrize("check", [probe.check_trees, probe.check_static])
def test_control_one_slot_of_a_thousand(check):
    """A model that overlooks a single slot, and only behind many others."""

    class Overlooks(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
            if attention_mask is not None and attention_mask.shape[-1] > 900:
                attention_mask = attention_mask.clone()
                hidden = False if attention_mask.dtype == torch.bool else 0
                if attention_mask.is_floating_point():
                    hidden = torch.finfo(attention_mask.dtype).min
                attention_mask[..., 5] = hidden
            return super().forward(
                input_ids,
                attention_mask=attention_mask,
                **{own_cache_name(): past_key_values},
                **kwargs,
            )

    how = {"static": False} if check is probe.check_trees else {}
    check(llama(), 1000, **how)
    with pytest.raises(ValueError, match="Overlooks gives other answers"):
        check(llama(Overlooks), 1000, **how)


def test_rows_share_a_cache_where_they_may():
    ends = torch.tensor([20, 20])
    assert isinstance(host_model(build("gpt_neo")[0], ends), CachedModel)
    assert isinstance(host_model(build("bart")[0], ends), RowByRow)
    assert isinstance(host_model(build("bart")[0], ends[:1]), CachedModel)
    assert isinstance(host_model(build("bart")[0], ends, uneven=False), CachedModel)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bart", Traits()),
        ("bart", Traits(holes=False)),
        ("gpt_neo", Traits()),
        ("roberta", Traits()),
        ("mistral_window", Traits()),
    ],
)
def test_control_traits_that_a_model_has_not(monkeypatch, name, wrong):
    """The comparison with uncached decoding sees a wrong verdict."""
    target, draft = build(name)
    monkeypatch.setattr(probe, "find_traits", lambda *args, **how: wrong)
    ids, mask = prompts([9, 9, 9], seed=3)
    ids = torch.where(ids == 1, 2, ids)
    expected = uncached(target, ids, mask)
    sequences, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4
    )
    assert sequences[:, -NEW:].tolist() != expected
