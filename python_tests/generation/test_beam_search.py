"""`generate(num_beams=...)` gives the ids and the scores of transformers' beam search."""

from __future__ import annotations

import functools

import pytest
import torch
from generate_models import ARCHITECTURES, perturbed, prompts
from transformers import T5Config, T5ForConditionalGeneration

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import EarlyExitDrafter, GenerationError, HeuristicGamma, RenewalRule
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.encoder_decoder import encoded

NEW = 10
LENGTHS = [6, 3, 1]
WIDTHS = [(w, times * w) for w in (2, 4, 5, 8) for times in (1, 2)]
ENDS = ([3], [2, 5, 9, 11, 17, 23, 31, 40, 50, 60], [7, 8])


def t5():
    """Weights are large and the head its own: else it repeats tokens, and texts all but tie."""
    config = T5Config(
        vocab_size=67, pad_token_id=0, decoder_start_token_id=1, eos_token_id=2, d_model=16,
        d_kv=8, d_ff=24, num_layers=2, num_heads=2,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


@functools.cache
def models(name, noise=0.01):
    """A random target in float32, and a draft that is like it."""
    torch.manual_seed(0)
    target = t5() if name == "t5" else ARCHITECTURES[name]()
    target = target.eval()
    target.generation_config.pad_token_id = 0
    return target, perturbed(target, noise)


def inputs_of(name, lengths=LENGTHS):
    """A padded batch of prompts, or of sources."""
    ids, mask = prompts(lengths)
    if name != "t5":
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}  # padded on the right


def cut(row, ends):
    """The tokens up to the first end."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def theirs(name, inputs, ends, **options):
    """The texts and scores of transformers, every beam returned."""
    target, _ = models(name)
    found = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends,
        num_return_sequences=options["num_beams"], return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    start = 1 if name == "t5" else inputs["input_ids"].shape[1]
    return [cut(row, ends) for row in found.sequences[:, start:].tolist()], found.sequences_scores


def ours(name, inputs, ends, draft=None, **options):
    """The same of `generate`."""
    target, small = models(name)
    small = small if draft is None else draft
    given = dict(inputs)
    if name == "t5":
        target, small = (encoded(model, **inputs) for model in (target, small))
        given = {"input_ids": torch.ones(len(inputs["input_ids"]), 1, dtype=torch.int64)}
    found = specdec_ext.generate(
        target, small, **given, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0,
        num_return_sequences=options["num_beams"], **options,
    )  # fmt: skip
    start = given["input_ids"].shape[1]
    texts = [cut(row, ends) for row in found.sequences[:, start:].tolist()]
    return texts, found.scores, found.statistics


def check(name, inputs, ends, drafting, draft=None, **options):
    expected, scores = theirs(name, inputs, ends, **options)
    texts, found, statistics = ours(name, inputs, ends, draft, **drafting, **options)
    assert texts == expected
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5)
    return statistics


@pytest.mark.parametrize("gamma", range(1, 7))
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_ids_and_scores(name, widths, gamma):
    width, draft_width = widths
    case = gamma + width + draft_width
    check(
        name,
        inputs_of(name),
        ENDS[case % 3],
        {"draft_beams": draft_width, "gamma": gamma},
        num_beams=width,
        length_penalty=(1.0, 0.0, 2.0, -0.5)[case % 4],
        early_stopping=(False, True, "never")[case // 2 % 3],
    )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
def test_length_penalties_and_early_stopping(penalty, early_stopping):
    """The nearest drafts, so that searches end in the middle of what a call decides."""
    name, ends = "llama", ENDS[1]
    statistics = check(
        name,
        inputs_of(name, [4, 2]),
        ends,
        {"gamma": 5, "draft_beams": 8},
        models(name)[0],
        num_beams=4,
        length_penalty=penalty,
        early_stopping=early_stopping,
    )
    assert statistics.tokens_per_target_call > 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_perfect_draft_decides_all_levels(name):
    """Of gamma levels and the one behind them; its last level is fed again where beams go on."""
    target, _ = models(name)
    inputs = inputs_of(name)
    statistics = check(name, inputs, [66], {"gamma": 4}, target, num_beams=3)
    assert statistics.rounds == 2
    assert statistics.histogram == [0, 0, 0, 0, 2 * len(LENGTHS)]
    assert statistics.draft_calls == 2 * 4


def test_no_draft_and_drafters_with_a_model():
    name = "gpt2"
    target, _ = models(name)
    inputs = inputs_of(name)
    expected, scores = theirs(name, inputs, ENDS[0], num_beams=3)
    early, small = EarlyExitDrafter(target, 1), models(name)[1]
    for draft, gamma in ((None, 5), (early, 2), (ModelDrafter(small), 2), (small, 0)):
        found = specdec_ext.generate(
            target, draft, **inputs, max_new_tokens=NEW, eos_token_id=ENDS[0], num_beams=3,
            num_return_sequences=3, gamma=gamma,
        )  # fmt: skip
        start = inputs["input_ids"].shape[1]
        texts = [cut(row, ENDS[0]) for row in found.sequences[:, start:].tolist()]
        assert texts == expected
        torch.testing.assert_close(found.scores, scores, rtol=1e-5, atol=1e-5)
        if gamma != 2:
            assert found.statistics.tokens_per_target_call == 1
            assert found.statistics.draft_calls == 0


@pytest.mark.parametrize(
    "policy", [RenewalRule(4, probe=3), HeuristicGamma(2)], ids=["renewal", "heuristic"]
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_policy_chooses_the_levels(name, policy):
    """A rule that goes by the clock drafts now and then; each draft takes in what it missed."""
    for length in (1, 3):
        inputs = inputs_of(name, [length, 4])
        drafting = {"gamma": policy, "draft_beams": 6}
        found = check(name, inputs, ENDS[1], drafting, num_beams=3, length_penalty=0.5)
        assert found.gamma == policy.limit


@pytest.mark.parametrize("limits", [[9, 2, 5], [1, 1, 1], [0, 4, 0]], ids=str)
def test_each_request_has_its_limit(limits):
    """Requests leave the batch one after another; each is as if it were alone."""
    name = "llama"
    target, draft = models(name)
    ids, mask = prompts(LENGTHS)
    options = {"num_beams": 3, "num_return_sequences": 2, "gamma": 3, "eos_token_id": ENDS[1]}
    together = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=limits, pad_token_id=0, **options
    )
    for b, (limit, length) in enumerate(zip(limits, LENGTHS, strict=True)):
        alone = specdec_ext.generate(
            target, draft, ids[b : b + 1, -length:], max_new_tokens=limit, pad_token_id=0, **options
        )
        rows = slice(2 * b, 2 * b + 2)
        new = alone.sequences[:, length:]
        found = together.sequences[rows, ids.shape[1] :]
        assert found[:, : new.shape[1]].tolist() == new.tolist()
        assert not found[:, new.shape[1] :].any()
        torch.testing.assert_close(together.scores[rows], alone.scores)


OPTIONS = [
    {},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 9]]},
    {"min_new_tokens": 4, "length_penalty": 0.0, "early_stopping": True},
    {"forced_eos_token_id": 3, "num_return_sequences": 3},
    {"prefix_allowed_tokens_fn": lambda b, text: list(range(3 + 10 * b, 40 + 10 * b))},
    {"sequence_bias": [[[12], 6.0], [[20, 21], 3.0]], "num_return_sequences": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_custom_generate(name, options):
    """With every argument of ``model.generate``; processors see each beam's own text."""
    target, draft = models(name)
    options = {
        **inputs_of(name), "max_new_tokens": NEW, "do_sample": False, "num_beams": 4,
        "eos_token_id": ENDS[1], "return_dict_in_generate": True, **options,
    }  # fmt: skip
    expected = target.generate(**options, output_scores=True)
    found = target.generate(
        **options, custom_generate=hf.generate_fn, draft_model=draft, draft_beams=6,
        gamma=3 if name == "t5" else HeuristicGamma(3),
    )  # fmt: skip
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(
        found.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5
    )
    plain = target.generate(
        **{**options, "return_dict_in_generate": False}, custom_generate=hf.generate_fn
    )
    assert plain.tolist() == expected.sequences.tolist()


def dead_ends(every, least):
    """A processor that lets no token follow every so many one, behind texts of some length."""

    def processor(ids, scores):
        dead = (ids[:, -1] % every == 0) & (ids.shape[1] >= least)
        return scores.masked_fill(dead[:, None], -torch.inf)

    return processor


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize(
    ("every", "ends", "width"), [(3, [3], 4), (7, [66], 4), (2, ENDS[1], 5), (1, ENDS[1], 4)]
)
def test_beams_that_cannot_go_on_drop_out(every, ends, width, gamma):
    """And what has ended is the result where all of them do."""
    target, small = models("gpt2")
    inputs = inputs_of("gpt2", [4, 4])
    processor = dead_ends(every, 7 if every == 1 else 5)
    given = {
        **inputs, "max_new_tokens": NEW, "num_beams": width, "num_return_sequences": width,
        "eos_token_id": ends, "logits_processor": [processor],
    }  # fmt: skip
    expected = target.generate(
        **given, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    found = specdec_ext.generate(target, small, **given, gamma=gamma, pad_token_id=0)
    kept = expected.sequences_scores > -1e9  # else there is no hypothesis
    assert kept.any() and (every == 1) == (not kept.all())
    torch.testing.assert_close(found.scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
    texts, wanted = (
        [cut(row, ends) for row in each.sequences[kept, 4:].tolist()] for each in (found, expected)
    )
    assert texts == wanted
    if every == 1:
        assert not found.sequences[~kept, 4:].any()


def test_no_beam_can_go_on_and_nothing_has_ended():
    target, small = models("gpt2")
    with pytest.raises(GenerationError, match="request 0: no beam is left .* after 2 levels"):
        specdec_ext.generate(
            target, small, **inputs_of("gpt2", [3, 4]), gamma=3, num_beams=3, max_new_tokens=NEW,
            eos_token_id=[], logits_processor=[dead_ends(1, 5)],
        )  # fmt: skip
