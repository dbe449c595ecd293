"""Families of encoder-decoders that differ in how positions, masks and encoders' outputs work."""

from __future__ import annotations

import pytest
import torch
import transformers
from generate_models import perturbed
from test_encoder_decoder import IDS, SMALL, inputs_of
from torch import nn

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import decoder_trials
from specdec_ext.decoding.cache_names import cache_of, own_cache_name
from specdec_ext.decoding.decoder_positions import ToldPositions
from specdec_ext.decoding.encoder_decoder import encoded

pytestmark = pytest.mark.thorough

VOCABULARY = 67
NEW = 12
PROMPTS = [[1, 9, 20], [1, 30, 31, 32, 33], [1]]  # of the decoder, to be left-padded
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {
    "vocab_size": VOCABULARY, **TOKENS, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {**IDS, **SMALL, "eos_token_id": 2, "max_position_embeddings": 64}
T5 = {**IDS, "eos_token_id": 2, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
T5 = {**T5, "num_decoder_layers": 2, "num_heads": 2}


def conditional(name, config, model=None):
    """Return what makes a model of this family."""
    kind = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, model or f"{name}ForConditionalGeneration")(kind(**config))


def of_two(kind, encoder, decoder):
    """Return what puts a model together."""

    def make():
        model = getattr(transformers, kind)(encoder=encoder(), decoder=decoder())
        model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
        return model

    return make


def decoder(name, model, **config):
    """Return what makes a decoder with cross attention."""
    given = {"is_decoder": True, "add_cross_attention": True, **config}
    return conditional(name, given, model)


def moonshine_streaming():
    wide = {**WIDE, "num_key_value_heads": 2}
    inner = {name: wide[name] for name in wide if name not in (*TOKENS, "vocab_size")}
    kind = transformers.MoonshineStreamingEncoderConfig
    config = transformers.MoonshineStreamingConfig(
        encoder_config=kind(**inner, sliding_windows=[[16, 4], [16, 4]]), **wide
    )
    return transformers.MoonshineStreamingForConditionalGeneration(config)


def t5gemma():
    wide = {
        **WIDE, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8,
        "sliding_window": 5,
    }  # fmt: skip
    parts = {part: transformers.T5GemmaModuleConfig(**wide) for part in ("encoder", "decoder")}
    config = transformers.T5GemmaConfig(**parts, vocab_size=VOCABULARY, **TOKENS)
    return transformers.T5GemmaForConditionalGeneration(config)


SPEECH = {
    "max_source_positions": 64, "max_target_positions": 64, "num_conv_layers": 2,
    "conv_kernel_sizes": [3, 3], "conv_channels": 16, "input_feat_per_channel": 8,
}  # fmt: skip
LED = {
    "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    "attention_window": 4,
}  # fmt: skip
VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "expert_capacity": 64}
FSMT = {name: value for name, value in PLAIN.items() if name != "vocab_size"}
FSMT = {
    **FSMT, "langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY,
}  # fmt: skip
PROPHET = {
    **IDS, "eos_token_id": 2, "hidden_size": 16, "max_position_embeddings": 64, "ngram": 2,
    **{f"num_{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"num_{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}  # fmt: skip
BERT = conditional("Bert", WIDE, "BertModel")
GPT2 = {
    "vocab_size": VOCABULARY, **TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
}  # fmt: skip
ROBERTA = decoder("Roberta", "RobertaForCausalLM", **WIDE)

#: name: (what makes it, how its decoder is told positions)
FAMILIES = {
    # Sinusoids of any length, and tokens of padding that have no position.
    "m2m_100": (conditional("M2M100", PLAIN), "_PositionedModel"),
    # The same behind an encoder of audio, whose mask is of frames.
    "speech_to_text": (conditional("Speech2Text", {**PLAIN, **SPEECH}), "_PositionedModel"),
    # Sinusoids computed in every call: in no table.
    "pegasus_x": (conditional("PegasusX", {**PLAIN, "block_size": 8}), "EncodedModel"),
    # Masks are ignored in calls of one token.
    "led": (conditional("LED", {**PLAIN, **LED}), "EncodedModel"),
    # With a mask, the last row's padding keeps other rows' tokens from their experts.
    "nllb_moe": (
        conditional("NllbMoe", {**PLAIN, **EXPERTS, "decoder_sparse_step": 2}), "EncodedModel",
    ),
    # The model reads more of the encoder's output than its states.
    "switch_transformers": (
        conditional("SwitchTransformers", {**T5, **EXPERTS}), "_DistancedModel",
    ),
    # The same, and the decoder adds to the states, in place.
    "moonshine_streaming": (moonshine_streaming, "_NumberedModel"),
    # A window in every second layer; NaN behind padding, in float64.
    "t5gemma": (t5gemma, "_NumberedModel"),
    # Put together: position ids are handed on unnamed, and RoBERTa's begin behind the padding's.
    "bert to roberta": (of_two("EncoderDecoderModel", BERT, ROBERTA), "_NumberedModel"),
    "bert to bart": (
        of_two("EncoderDecoderModel", BERT, decoder("Bart", "BartForCausalLM", **PLAIN)),
        "_PositionedModel",
    ),
    # Images, and a decoder of other widths.
    "vit to gpt2": (
        of_two(
            "VisionEncoderDecoderModel", conditional("ViT", VIT, "ViTModel"),
            decoder("GPT2", "GPT2LMHeadModel", **GPT2),
        ),
        "_NumberedModel",
    ),
}  # fmt: skip
REFUSED = {
    # Older versions of transformers run the last token of a call alone.
    "fsmt": (conditional("FSMT", FSMT), "(has no causal mask|gives logits for 2 of 5 tokens)"),
    "prophetnet": (conditional("ProphetNet", PROPHET), "fails where several token ids"),
}


def models(make):
    """A random target in float64, whose weights all matter, and a draft: the same, perturbed."""
    torch.manual_seed(0)
    target = make().double().eval()
    head = target.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # sinusoids stay what they are
                parameter.normal_(0, 0.3)
        head.weight[0] = 0  # no padding in texts: some decoders count it in one way, or another
    target.generation_config = transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=1
    )
    return target, perturbed(target, 0.03)


def read(target):
    """Give three rows of what its encoder reads, of different lengths where it has a mask."""
    generator = torch.Generator().manual_seed(4)

    def randn(*shape):
        return torch.randn(3, *shape, generator=generator, dtype=torch.float64)

    name = target.main_input_name
    if name == "input_features":
        mask = (torch.arange(24) < torch.tensor([24, 11, 17])[:, None]).long()
        return {name: randn(24, 8), "attention_mask": mask}
    if name == "pixel_values":
        return {name: randn(3, 8, 8)}
    return {name: randn(4000)} if name == "input_values" else inputs_of("text")


@torch.inference_mode()
def plain(target, inputs, prompt, b):
    """What a row's text is alone, without a cache."""
    row = {name: value[b : b + 1] for name, value in inputs.items()}
    masks = {name: value for name, value in row.items() if name == "attention_mask"}
    ids = torch.tensor([prompt])
    for _ in range(NEW):
        out = target(
            encoder_outputs=target.get_encoder()(**row), decoder_input_ids=ids, use_cache=False,
            **masks,
        )  # fmt: skip
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
    text = ids[0].tolist()[len(prompt) :]
    assert 0 not in text
    return text


def left_padded(texts):
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    return ids, torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])


def check(make, kind):
    """Ragged prompts, drafts that are rejected here and there, limits of each row."""
    target, draft = models(make)
    inputs = read(target)
    expected = [plain(target, inputs, prompt, b) for b, prompt in enumerate(PROMPTS)]
    assert len(set(map(tuple, expected))) == 3 and max(len(set(row)) for row in expected) > 1
    ids, mask = left_padded(PROMPTS)
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    assert type(wrapped[0]).__name__ == kind
    limits = [NEW, NEW - 2, NEW - 5]
    for gamma in (3, 0):  # a call of one token is another case
        found, statistics = specdec_ext.generate(
            wrapped[0], wrapped[1] if gamma else None, ids, attention_mask=mask,
            max_new_tokens=limits, gamma=gamma, eos_token_id=(),
        )  # fmt: skip
        for row, right, limit in zip(found.tolist(), expected, limits, strict=True):
            assert row[ids.shape[1] :][:limit] == right[:limit]
        assert statistics.rejected > 0 or not gamma


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_what_they_are_alone(name):
    check(*FAMILIES[name])


@pytest.mark.parametrize("name", ["led", "nllb_moe"])
def test_control_told_but_not_rightly(monkeypatch, name):
    """Of these, rows told their positions come out wrong: that is why they are not told."""
    monkeypatch.setattr(decoder_trials, "_right_when_told", lambda _: True)
    with pytest.raises(AssertionError):
        check(FAMILIES[name][0], "_PositionedModel")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, message = REFUSED[name]
    target, _ = models(make)
    with pytest.raises(ValueError, match=f"the decoder of {type(target).__name__} {message}"):
        encoded(target, **read(target))


@pytest.mark.parametrize("name", ["m2m_100", "speech_to_text", "vit to gpt2", "bert to bart"])
def test_inside_generate(name):
    target, draft = models(FAMILIES[name][0])
    inputs = read(target)
    ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected = target.generate(**inputs, **options)
    assert target.generate(**inputs, **options, **ours).tolist() == expected.tolist()


def test_an_encoders_output_is_read_as_it_was():
    target, draft = models(moonshine_streaming)
    inputs = read(target)
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    before = wrapped[0].states.clone()
    ids, mask = left_padded(PROMPTS)
    found = [
        specdec_ext.generate(*wrapped, ids, attention_mask=mask, max_new_tokens=5).sequences
        for _ in range(2)
    ]
    assert torch.equal(*found) and torch.equal(wrapped[0].states, before)


# ---- tables of positions -------------------------------------------------------------------------


@torch.inference_mode()
def test_padding_inside_a_text_counts_as_in_plain_decoding():
    """Such tokens have no position of their own; one at a time, as transformers runs them."""
    target, _ = models(FAMILIES["m2m_100"][0])
    inputs = {name: value[:1] for name, value in read(target).items()}
    text = torch.tensor([[1, 9, 0, 12, 13, 0, 14]])
    encoder = target.get_encoder()(**inputs)
    answers, cache = [], None
    for token in text.split(1, 1):
        out = target(
            encoder_outputs=encoder, attention_mask=inputs["attention_mask"],
            decoder_input_ids=token, use_cache=True, **{own_cache_name(): cache},
        )  # fmt: skip
        cache = cache_of(out)
        answers.append(out.logits)
    run = encoded(target, **inputs).begin()
    mine = transformers.DynamicCache()
    logits = [run(part, past_key_values=mine).logits for part in text.split([2, 5], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), torch.cat(answers, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, more", [("M2M100", 6), ("Bart", 0)])
def test_slots_behind_the_end_of_a_table(monkeypatch, name, more):
    """Rejected tokens take slots: these pass the end of a table that no position passes.

    Sinusoids grow, and those of the model itself, which other threads may be reading, stay.
    """
    places = 32
    target, draft = models(conditional(name, {**PLAIN, "max_position_embeddings": places}))
    inputs = read(target)
    said = []
    tell = ToldPositions.tell

    def recorded(self, tokens, positions, slots):
        said.append((slots, int(positions.max())))
        tell(self, tokens, positions, slots)

    ids, mask = left_padded(PROMPTS)
    limits = [places + more - len(prompt) for prompt in PROMPTS]
    options = {"eos_token_id": ()}
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    for _ in range(2):  # the first time, the models are tried far behind what is asked for
        found = specdec_ext.generate(
            *wrapped, ids, attention_mask=mask, max_new_tokens=limits, gamma=5, **options
        ).sequences
        monkeypatch.setattr(ToldPositions, "tell", recorded)
    assert max(slots for slots, _ in said) > places + more > max(place for _, place in said)
    for b, prompt in enumerate(PROMPTS):
        row = encoded(target, **{key: value[b : b + 1] for key, value in inputs.items()})
        alone = specdec_ext.generate(
            row, None, torch.tensor([prompt]), max_new_tokens=limits[b], **options
        ).sequences[0, len(prompt) :]
        assert torch.equal(found[b, ids.shape[1] :][: limits[b]], alone)
    table = target.get_decoder().embed_positions
    assert len(table.weights if more else table.weight) == places + 2
