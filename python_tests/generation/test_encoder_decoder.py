"""Encoder-decoders: output is that of transformers' own generate, row by row."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from generate_models import pair, perturbed
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import (
    AggressiveDrafter,
    BanditDrafter,
    EarlyExitDrafter,
    GrownTree,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    StaticTree,
)
from specdec_ext.decoding.decoder_distances import ToldDistances
from specdec_ext.decoding.decoder_positions import ToldPositions
from specdec_ext.decoding.drafters.early_exit import first_layers
from specdec_ext.decoding.encoder_decoder import EncodedModel, encoded

NEW = 20
LENGTHS = [9, 4, 6]
SMALL = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip
IDS = {"vocab_size": 67, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}


def t5():
    return T5ForConditionalGeneration(
        T5Config(**IDS, eos_token_id=2, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    )


def bart():
    return BartForConditionalGeneration(
        BartConfig(
            **IDS, **SMALL, eos_token_id=2, forced_eos_token_id=None, max_position_embeddings=64
        )
    )


def marian():
    return MarianMTModel(
        MarianConfig(
            **IDS, **SMALL, eos_token_id=2, forced_eos_token_id=None, max_position_embeddings=64
        )
    )


def whisper():
    return WhisperForConditionalGeneration(
        WhisperConfig(
            **IDS, **SMALL, eos_token_id=2, max_source_positions=10, max_target_positions=64,
            num_mel_bins=8, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip


MODELS = {"t5": t5, "bart": bart, "marian": marian, "whisper": whisper}


def models(name):
    """A random target in float64, and a draft: the same, perturbed.

    Weights are large, and the head is no copy of the embeddings: else these models repeat one token
    whatever the encoder read, and no mistake about rows or positions would show.
    """
    torch.manual_seed(0)
    target = MODELS[name]().double().eval()
    head = target.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    draft = perturbed(target, 0.03)
    for model in (target, draft):
        model.generation_config.pad_token_id = 0
        model.generation_config.forced_eos_token_id = None
    return target, draft


def inputs_of(name, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(4)
    if name == "whisper":
        features = torch.randn(len(lengths), 8, 20, generator=generator, dtype=torch.float64)
        return {"input_features": features}
    width = max(lengths)
    ids = torch.randint(3, 67, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def start(batch):
    return torch.ones(batch, 1, dtype=torch.int64)


def plain(target, inputs, b, prompt=(1,)):
    """What transformers generates greedily for one row alone."""
    row = {name: value[b : b + 1] for name, value in inputs.items()}
    encoder = target.get_encoder()(**row)
    ids, mask = torch.tensor([prompt]), row.get("attention_mask")
    for _ in range(NEW):
        given = {} if mask is None else {"attention_mask": mask}
        out = target(encoder_outputs=encoder, decoder_input_ids=ids, use_cache=False, **given)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        if int(ids[0, -1]) == 2:
            break
    return ids[0].tolist()


@torch.inference_mode()
def check_greedy(name, lengths, wrapped=None):
    """Rows with limits of their own are those that are decoded alone, without a cache."""
    target, draft = models(name)
    inputs = inputs_of(name, lengths)
    wrapped = wrapped or (encoded(target, **inputs), encoded(draft, **inputs))
    limits = [NEW - 2 * b for b in range(len(lengths))]
    expected = [plain(target, inputs, b)[: 1 + limit] for b, limit in enumerate(limits)]
    assert len(set(map(tuple, expected))) == len(lengths)  # the encoder's input matters
    assert max(len(set(row)) for row in expected) > 2  # so does the text
    for _ in range(2):  # an encoded model can be used again
        found, statistics = specdec_ext.generate(
            *wrapped, start(len(lengths)), max_new_tokens=limits, gamma=3
        )
        assert statistics.accepted > 0 and statistics.rejected > 0
        for row, right in zip(found.tolist(), expected, strict=True):
            assert row[: len(right)] == right and not any(row[len(right) :])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[7], LENGTHS], ids=["one", "batch"])
def test_greedy_equals_plain_decoding(name, lengths):
    check_greedy(name, lengths)


PROMPTS = [[1, 9, 20], [1], [1, 30, 31, 32]]  # of the decoder
DRAFTING = {  # of the encoded target and draft, and what the rows become
    "plain": lambda target, draft, texts: None,
    "model": lambda target, draft, texts: draft,
    "early exit": lambda target, draft, texts: EarlyExitDrafter(target, 1),
    "hierarchy": lambda target, draft, texts: HierarchicalDrafter(
        draft, EarlyExitDrafter(draft, 1), 2
    ),
    "n-gram": lambda target, draft, texts: NgramDrafter(67, 2, texts=texts),
    "lookup": lambda target, draft, texts: LookupDrafter([text[3:] for text in texts]),
    "aggressive": lambda target, draft, texts: AggressiveDrafter([text[:2] for text in texts]),
    "bandit": lambda target, draft, texts: BanditDrafter(
        LookupDrafter([text[3:] for text in texts]), draft, EarlyExitDrafter(target, 1),
        costs=[0.0, 0.3, 0.5],
    ),
    "tree": lambda target, draft, texts: draft,
    "grown tree": lambda target, draft, texts: draft,
}  # fmt: skip
TREES = {"tree": StaticTree.from_widths((3, 2, 1)), "grown tree": GrownTree(7, 3)}


@functools.cache
def rows_alone(name):
    """Give models, encoder's inputs, padded decoder prompts, and each row's text when alone."""
    target, draft = models(name)
    inputs = inputs_of(name)
    with torch.inference_mode():
        texts = [plain(target, inputs, b, p)[len(p) :] for b, p in enumerate(PROMPTS)]
    width = max(map(len, PROMPTS))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    assert len({tuple(text[:8]) for text in texts}) == 3 and max(len(set(t)) for t in texts) > 2
    return target, draft, inputs, ids, mask, texts


def check_rows(name, drafting, static):
    """Padded inputs and prompts, limits of each row: every row is what it is when alone."""
    target, draft, inputs, ids, mask, texts = rows_alone(name)
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    limits = [NEW, NEW - 6, NEW - 2]
    found, statistics = specdec_ext.generate(
        wrapped[0], DRAFTING[drafting](*wrapped, texts), ids, attention_mask=mask,
        max_new_tokens=limits, gamma=3, tree=TREES.get(drafting), static_cache=static,
    )  # fmt: skip
    for row, text, limit in zip(found[:, ids.shape[1] :].tolist(), texts, limits, strict=True):
        right = text[:limit]
        assert row[: len(right)] == right and not any(row[len(right) :])
    assert drafting == "plain" or (statistics.accepted > 0 and statistics.rejected > 0)


@pytest.mark.every("drafting")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_what_they_are_alone(name, drafting, static):
    check_rows(name, drafting, static)


@pytest.mark.parametrize("drafting", ["model", "tree"])
def test_control_distances_by_cache_slots(monkeypatch, drafting):
    """T5 is told how many slots back a token lies, as it counts itself: holes and nodes count."""

    def tell(self, mask, past, new):
        slots = torch.arange(mask.shape[-1])
        self.distances = (slots[past : past + new, None] - slots).clamp(min=0).expand(
            len(mask), -1, -1
        )  # fmt: skip

    check_rows("t5", drafting, False)  # what the model can do is known from here on
    monkeypatch.setattr(ToldDistances, "tell", tell)
    with pytest.raises(AssertionError):
        check_rows("t5", drafting, False)


def test_a_wrapped_forward_leaves_distances_to_the_slots():
    """No view can be made of such a T5: chains are right all the same, and trees are refused."""
    target, draft = models("t5")
    for model in (target, draft):
        model.forward = functools.partial(model.forward)
    inputs = inputs_of("t5")
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    assert type(wrapped[0]) is EncodedModel
    check_greedy("t5", LENGTHS, wrapped)
    with pytest.raises(ValueError, match="other answers at the nodes of a tree"):
        specdec_ext.generate(*wrapped, start(3), max_new_tokens=3, tree=TREES["tree"])


@torch.inference_mode()
def test_first_layers_of_what_was_encoded():
    """They are the decoder's, over all that the encoder gave; the model stays whole."""
    for name in MODELS:
        target, _, inputs, ids, *_ = rows_alone(name)
        one = first_layers(encoded(target, **inputs), 1)
        layers = target.get_submodule(one.layers)
        assert len(layers) == 2 and len(one.model.get_submodule(one.layers)) == 1
        both = encoded(target, **inputs).begin()(ids).logits
        first = one.begin()(ids).logits
        whole = first_layers(encoded(target, **inputs), 2).begin()(ids).logits
        assert torch.equal(whole, both) and not torch.allclose(first, both)


@pytest.mark.parametrize("drafter", [AggressiveDrafter, LookupDrafter])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
@torch.inference_mode()
def test_drafters_that_read_the_encoders_input(name, drafter):
    """Each is told a source that the output repeats; another row's is of less use."""
    target, _ = models(name)
    inputs = inputs_of(name)
    expected = [plain(target, inputs, b)[:13] for b in range(len(LENGTHS))]
    sources = [row[1:] for row in expected]

    def run(draft):
        found, statistics = specdec_ext.generate(
            encoded(target, **inputs), draft, start(len(LENGTHS)), max_new_tokens=12, gamma=12
        )
        for row, right in zip(found.tolist(), expected, strict=True):
            assert row[: len(right)] == right and not any(row[len(right) :])
        return statistics

    told, others = (run(drafter(s)) for s in (sources, sources[1:] + sources[:1]))
    assert told.accepted > others.accepted
    if drafter is AggressiveDrafter:
        assert told.rounds == 1


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_control_positions_by_cache_slots(monkeypatch, name):
    """Where a row rejected, these decoders count too far if they are told what they count."""

    def tell(self, tokens, positions, slots):
        slots_of = torch.arange(slots - tokens.shape[1], slots).expand_as(tokens)
        said(self, tokens, slots_of, slots)

    said = ToldPositions.tell
    target, draft = models(name)
    inputs = inputs_of(name)
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    check_greedy(name, LENGTHS, wrapped)  # what the models can do is known from here on
    monkeypatch.setattr(ToldPositions, "tell", tell)
    with pytest.raises(AssertionError):
        check_greedy(name, LENGTHS, wrapped)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_control_what_was_encoded_stays_where_it_was(monkeypatch, name):
    """The last request ends first; here the first encoded input is dropped instead."""
    target, draft = models(name)
    inputs = inputs_of(name)
    wrapped = encoded(target, **inputs), encoded(draft, **inputs)
    select = EncodedModel.select
    monkeypatch.setattr(
        EncodedModel, "select",
        lambda self, rows: select(self, torch.arange(len(self.states))[-len(rows) :]),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        check_greedy(name, LENGTHS, wrapped)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_coupled_sampling_is_that_of_plain_decoding(name):
    target, draft = models(name)
    inputs = inputs_of(name)
    options = {"max_new_tokens": NEW, "temperature": 0.8, "seeds": 3, "rule": "coupled"}
    one = encoded(target, **inputs)
    found, _ = specdec_ext.generate(one, encoded(draft, **inputs), start(3), gamma=3, **options)
    alone, _ = specdec_ext.generate(one, None, start(3), **options)
    assert torch.equal(found, alone)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_inside_generate(name):
    target, draft = models(name)
    inputs = inputs_of(name)
    ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(**inputs, **options)
    assert target.generate(**inputs, **options, **ours).tolist() == expected.tolist()
    several = target.generate(
        **inputs, max_new_tokens=4, do_sample=True, num_return_sequences=2, **ours
    )
    assert several.shape[0] == 6
    static = target.generate(**inputs, **options, **ours, cache_implementation="static")
    assert static.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="cache_implementation='offloaded'"):
        target.generate(**inputs, **options, **ours, cache_implementation="offloaded")


WHISPER = {  # its own generate() asks for these: a threshold and a second temperature, a prefix
    "plain": {},
    "fallback": {"temperature": (0.0, 0.0), "compression_ratio_threshold": 0.5},
    "first tokens": {"begin_suppress_tokens": [8], "suppress_tokens": [60]},
    "long": {"return_timestamps": True},
    "long, conditioned": {"return_timestamps": True, "condition_on_prev_tokens": True},
}


@pytest.mark.parametrize("kind", WHISPER)
def test_inside_whispers_own_generate(kind):
    """It wraps `GenerationMixin.generate`: segments, fallbacks and processors are its own."""
    target, draft = models("whisper")
    inputs = inputs_of("whisper")
    if "long" in kind:  # three segments of audio, and timestamps to cut them by
        features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(1)).double()
        inputs = {"input_features": features, "attention_mask": torch.ones(2, 60).long()}
        for model in (target, draft):
            model.generation_config.no_timestamps_token_id = 50
            model.generation_config.prev_sot_token_id = 49
    rounds = []
    ours = {
        "custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3,
        "on_round": rounds.append,
    }  # fmt: skip
    options = {"max_new_tokens": 12, "do_sample": False, **WHISPER[kind]}
    expected = target.generate(**inputs, **options)
    assert target.generate(**inputs, **options, **ours).tolist() == expected.tolist()
    bursts = [burst for round_ in rounds for burst in round_]
    assert any(burst.accepted for burst in bursts)
    assert any(burst.replaced is not None for burst in bursts)
    assert len({tuple(row) for row in expected.tolist()}) == len(expected)
    assert (expected.shape[1] > 12) == ("long" in kind)  # several segments


def test_whisper_sampled_and_several():
    target, draft = models("whisper")
    ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
    found = target.generate(
        **inputs_of("whisper"), **ours, max_new_tokens=9, temperature=0.7, do_sample=True,
        num_return_sequences=2,
    )  # fmt: skip
    assert found.shape[0] == 6 and len(set(map(tuple, found.tolist()))) > 3


@pytest.mark.parametrize("options, message", [
    ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"temperature": (0.0, 0.5), "logprob_threshold": -1.0}, "output_scores"),
])  # fmt: skip
def test_what_is_refused_in_whispers_generate(options, message):
    target, draft = models("whisper")
    ours = {"custom_generate": hf.generate_fn, "draft_model": draft}
    with pytest.raises(ValueError, match=f"asked for what speculative decoding.*{message}"):
        target.generate(**inputs_of("whisper"), max_new_tokens=4, **options, **ours)


@pytest.mark.thorough
def test_the_example(tmp_path):
    from specdec_ext.commands.pair import load_pair

    tokenizer = load_pair().tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=2048, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id, d_model=16, d_kv=8, d_ff=24, num_layers=2,
        num_heads=2,
    )  # fmt: skip
    folders = [tmp_path / "target", tmp_path / "draft"]
    for folder in folders:
        T5ForConditionalGeneration(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, root / "examples" / "translate.py", *folders, "one text", "two"]
    environment = {**os.environ, "PYTHONPATH": str(Path(specdec_ext.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    assert "tokens a target call" in done.stderr


def test_the_models_stay_as_they_were():
    target, draft = models("bart")
    inputs = inputs_of("bart")
    ids = start(3)
    before = target(**inputs, decoder_input_ids=ids).logits
    specdec_ext.generate(encoded(target, **inputs), encoded(draft, **inputs), ids, max_new_tokens=9)
    assert not target.get_decoder().embed_positions._forward_hooks
    assert torch.equal(target(**inputs, decoder_input_ids=ids).logits, before)


def test_refused():
    target, draft = models("t5")
    causal, _ = pair()
    with pytest.raises(TypeError, match="is no encoder-decoder"):
        encoded(causal, input_ids=start(1))
    with pytest.raises(ValueError, match=r"encoded\(\)"):
        specdec_ext.generate(target, draft, start(1))
    inputs = inputs_of("t5")
    with pytest.raises(TypeError, match="early exit: model must be .*encoded.*got T5ForCond"):
        EarlyExitDrafter(target, 1)
    with pytest.raises(ValueError, match=r"layers must be in \[1, 2\] for this T5ForCond.*got 3"):
        EarlyExitDrafter(encoded(target, **inputs), 3)
    unknown = encoded(target, **inputs)
    unknown.layers = None
    del unknown.config.num_hidden_layers
    with pytest.raises(TypeError, match="decoder of T5ForConditionalGeneration must have one list"):
        EarlyExitDrafter(unknown, 1)
    with pytest.raises(ValueError, match="a static cache needs .* one list of layers"):
        specdec_ext.generate(unknown, None, start(3), max_new_tokens=3, static_cache=True)
    with pytest.raises(ValueError, match="3 inputs were encoded, but there are 2 requests"):
        specdec_ext.generate(encoded(target, **inputs), None, start(2), max_new_tokens=3)
