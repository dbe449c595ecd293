"""specdec_ext.hf: model.generate with our loop inside, and transformers' own with our operator."""

from __future__ import annotations

import copy

import pytest
import tokenizers
import torch
from generate_models import pair, prompts
from test_generate_law import ALPHA, chi_square
from test_generate_static import watch_shapes
from transformers import (
    DynamicCache,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextStreamer,
    set_seed,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import utils as generation_utils
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_ext import hf
from specdec_ext.decoding import Burst, StaticTree, generate
from specdec_ext.decoding.cache_names import own_cache_name

NEW = 20
OURS = {"custom_generate": hf.generate_fn, "gamma": 3}
TREE = StaticTree.from_widths((2, 2))


def models(noise=0.02):
    target, draft = pair(noise=noise)
    target.generation_config.pad_token_id = 0
    return target, draft


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("options", [
    {}, {"repetition_penalty": 1.3}, {"bad_words_ids": [[5], [7, 9]], "min_new_tokens": 5},
    {"no_repeat_ngram_size": 2}, {"eos_token_id": [11, 23, 40]}, {"max_length": 9},
], ids=str)  # fmt: skip
def test_greedy_is_that_of_generate(options, tree):
    target, draft = models()
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    for length in (4, 7):
        ids, _ = prompts([length])
        expected = target.generate(ids, **options)
        found = target.generate(ids, **options, **OURS, draft_model=draft, tree=tree)
        assert found.tolist() == expected.tolist()


def test_left_padding_and_several_sequences():
    target, draft = models()
    ids, mask = prompts([6, 3, 5])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(ids, **options)
    found = target.generate(ids, **options, **OURS, draft_model=draft)
    assert found.tolist() == expected.tolist()
    several = target.generate(
        ids, **{**options, "do_sample": True}, num_return_sequences=2, **OURS, draft_model=draft
    )
    assert several.shape[0] == 6 and (several[0] != several[1]).any()


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("option", ["min_new_tokens", "begin_suppress_tokens", "min_length"])
def test_processors_that_count_from_the_end_of_padded_prompts(option, shared, tree):
    """As `generate` does: the limit is the batch's, not that of each text without its padding."""
    target, draft = models()
    ids, mask = (torch.nn.functional.pad(t, (shared, 0)) for t in prompts([6, 3, 5]))
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(ids, **options)[:, ids.shape[1] :]
    options["eos_token_id"] = plain[1, 2].item()
    value = {
        "min_new_tokens": 4, "min_length": 10 + shared, "begin_suppress_tokens": [plain[1, 0]],
    }[option]  # fmt: skip
    without = target.generate(ids, **options)
    expected = target.generate(ids, **options, **{option: value})
    assert expected.tolist() != without.tolist()
    found = target.generate(ids, **options, **{option: value}, **OURS, draft_model=draft, tree=tree)
    assert found.tolist() == expected.tolist()


def test_criteria_see_the_padding():
    target, draft = models()
    ids, mask = prompts([6, 3, 5])
    asked = []

    def criterion(ids, scores):
        asked.append(ids[0].tolist())
        return torch.tensor([ids.shape[1] >= 10])

    found = target.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **OURS, draft_model=draft,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )  # fmt: skip
    assert found.shape == (3, 10) and max(map(len, asked)) == 10
    assert [0, 0, 0, *ids[1, 3:].tolist()] in [text[:6] for text in asked]


def law_after(target, ids, **filters):
    """The law of the next token under temperature 0.8, top-k 12, top-p 0.9."""
    with torch.no_grad():
        row = target(input_ids=ids).logits[0, -1].double() / 0.8
    row = row.masked_fill(row < row.topk(12).values[-1], -torch.inf)
    p = row.softmax(-1)
    above = torch.stack([p[p > value].sum() for value in p])
    p = torch.where(above < 0.9, p, 0.0)
    return p / p.sum()


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}


def test_first_token_follows_the_law_of_generate():
    target, draft = models(noise=0.3)
    ids, _ = prompts([5])
    many = ids.repeat(4000, 1)
    set_seed(5)
    found = target.generate(
        many, max_new_tokens=2, **SAMPLING, **OURS, draft_model=draft, eos_token_id=None
    )
    law = law_after(target, ids)
    counts = torch.bincount(found[:, 5], minlength=len(law))
    assert counts[law == 0].sum() == 0
    assert chi_square(counts[law > 0], law[law > 0]) > ALPHA
    first = int(counts.argmax())
    second = torch.bincount(found[found[:, 5] == first, 6], minlength=len(law))
    law = law_after(target, torch.cat([ids, torch.tensor([[first]])], 1))
    assert chi_square(second[law > 0], law[law > 0]) > ALPHA and second[law == 0].sum() == 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_static_cache_keeps_its_size(monkeypatch, kind):
    target, draft = models()
    ids, mask = prompts([6, 3, 5])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(ids, **options)
    shapes = watch_shapes(monkeypatch)
    found = target.generate(ids, **options, cache_implementation=kind, **OURS, draft_model=draft)
    assert found.tolist() == expected.tolist()
    assert (len(shapes) == 1) == (kind == "static")


def test_seeds_come_from_torch():
    target, draft = models()
    ids, _ = prompts([5])
    options = {**SAMPLING, **OURS, "draft_model": draft, "max_new_tokens": NEW}

    def sample(seed):
        set_seed(seed)
        return target.generate(ids, **options).tolist()

    assert sample(1) == sample(1) != sample(2)


def test_what_is_left_to_the_kernel():
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    temperature, top_k = TemperatureLogitsWarper(0.5), TopKLogitsWarper(7)
    top_p, min_p = TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)
    split = hf._split
    assert split([penalty, temperature, top_k, top_p, min_p], sampled=True) == (
        [penalty], {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    )  # fmt: skip
    assert split([top_p, temperature], sampled=True) == ([top_p], {"temperature": 0.5})
    assert split([top_p, top_k], sampled=True) == ([top_p], {"temperature": 1.0, "top_k": 7})
    assert split([temperature, penalty], sampled=True)[0] == [temperature, penalty]
    keeps_two = TopPLogitsWarper(0.9, min_tokens_to_keep=2)
    assert split([keeps_two], sampled=True) == ([keeps_two], {"temperature": 1.0})
    assert split([penalty], sampled=False) == ([penalty], {"temperature": 0.0})


def test_statistics_and_rounds():
    target, draft = models()
    ids, _ = prompts([5])
    rounds = []
    found = target.generate(
        ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **OURS,
        draft_model=draft, on_round=rounds.append,
        stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(60.0)]),
    )  # fmt: skip
    assert found.statistics.rounds == len(rounds) < NEW
    assert found.sequences.shape == (1, 5 + NEW)
    assert found.logprobs.tolist() == [[0.0] * NEW]  # greedy: nothing else could have come


@pytest.mark.parametrize("options, message", [
    ({"num_beams": 2, "do_sample": True}, "do_sample=True with num_beams=2"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ({"token_type_ids": torch.zeros(1, 5, dtype=torch.int64)}, "token_type_ids"),
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
])  # fmt: skip
def test_what_is_refused(options, message):
    target, draft = models()
    ids, _ = prompts([5])
    target._validate_model_kwargs = lambda kwargs: None
    with pytest.raises(ValueError, match=message):
        target.generate(ids, max_new_tokens=4, **OURS, draft_model=draft, **options)


def test_a_cache_that_is_not_empty_is_refused():
    target, draft = models()
    ids, _ = prompts([5])
    cache = DynamicCache(config=target.config)
    target(input_ids=ids[:, :-1], **{own_cache_name(): cache})
    with pytest.raises(ValueError, match="not empty"):
        target.generate(ids, **{own_cache_name(): cache}, **OURS, draft_model=draft)


# ---- what transformers' own assisted generation takes ------------------------------------------


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, tokens):
        self.given.append(tokens.flatten().tolist())

    def end(self):
        self.ended += 1


ASSISTED = {
    "assistant_model": lambda draft: {"assistant_model": draft},
    "prompt lookup": lambda draft: {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2},
    "early exit": lambda draft: {"assistant_early_exit": 1},
}


@pytest.mark.parametrize("how", ASSISTED)
def test_drafts_by_transformers_own_names(how):
    """Each drafts: fewer target calls than tokens, the same tokens."""
    target, draft = models(noise=0.002)
    ids, _ = prompts([5])
    ids = ids.repeat(1, 4)
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(ids, **options).sequences
    named = ASSISTED[how](draft)
    found = target.generate(ids, **options, custom_generate=hf.generate_fn, **named)
    assert found.sequences.tolist() == expected.tolist()
    assert found.statistics.accepted > 0
    gamma = named.get("prompt_lookup_num_tokens", 5)
    assert found.statistics.gamma == gamma
    plain = target.generate(ids, **options, custom_generate=hf.generate_fn)
    assert plain.statistics.drafted == 0
    with pytest.raises(ValueError, match=f"one draft at most, got draft_model and {[*named][0]}"):
        target.generate(ids, **options, **OURS, draft_model=draft, **named)


@pytest.mark.parametrize("how", ["another frame", "other names"])
def test_a_release_that_keeps_its_arguments_elsewhere_is_not_silent(monkeypatch, how):
    target, draft = models()
    ids, _ = prompts([5])
    options = {"max_new_tokens": NEW, "do_sample": False, **OURS}
    expected = target.generate(ids, **options)
    if how == "another frame":
        monkeypatch.setattr(hf, "_GENERATE", None)
    else:
        monkeypatch.setattr(hf, "_KEPT_BACK", ("assistant_model", "shower"))
    missing = "assistant_model and streamer" if how == "another frame" else "shower"
    with pytest.warns(UserWarning, match=f"cannot see {missing} of LlamaForCausalLM.generate"):
        found = target.generate(ids, **options, assistant_model=draft)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_streamer_gets_prompt_and_tokens(wrapped):
    target, draft = models()
    ids, _ = prompts([5])
    function = hf.generate_fn
    if wrapped:

        def function(model, *args, **kwargs):
            return hf.generate_fn(model, *args, draft_model=draft, **kwargs)

    streamer, rounds = Recorder(), []
    options = {} if wrapped else {"draft_model": draft, "on_round": rounds.append}
    found = target.generate(
        ids, max_new_tokens=NEW, do_sample=False, streamer=streamer, custom_generate=function,
        **options,
    )  # fmt: skip
    assert streamer.given[0] == ids[0].tolist() and streamer.ended == 1
    assert sum(streamer.given[1:], []) == found[0, 5:].tolist()
    assert len(streamer.given) - 1 < NEW  # bursts, not single tokens
    assert wrapped or len(rounds) == len(streamer.given) - 1
    with pytest.raises(ValueError, match="a streamer shows one request, got 2"):
        target.generate(
            ids.repeat(2, 1), max_new_tokens=4, streamer=streamer, custom_generate=hf.generate_fn
        )


def test_streaming_beside_our_generate():
    """Characters of several bytes come whole, which text decoded burst by burst does not."""
    target, draft = models()
    ids, _ = prompts([5])
    streamer = Recorder()
    with hf.streaming(streamer, ids) as on_round:
        found = generate(target, draft, ids, max_new_tokens=NEW, on_round=on_round)
        assert streamer.ended == 0
    assert streamer.ended == 1
    assert sum(streamer.given, []) == found.sequences[0].tolist()
    streamer = Recorder()
    with pytest.raises(ValueError, match="one request, got tokens of request 1"):  # noqa: SIM117
        with hf.streaming(streamer, None) as on_round:
            generate(target, draft, ids.repeat(2, 1), max_new_tokens=4, on_round=on_round)
    assert streamer.ended == 1  # whoever reads it does not wait for more


def test_text_comes_in_whole_characters(capsys):
    vocabulary = {bytes_to_unicode()[byte]: byte for byte in range(256)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    core.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    text = "größer – 速い"
    tokens = list(text.encode())
    bursts = [tokens[i : i + 3] for i in range(0, len(tokens), 3)]
    assert "".join(map(tokenizer.decode, bursts)) != text  # the control
    with hf.streaming(TextStreamer(tokenizer), None) as on_round:
        for burst in bursts:
            on_round([Burst(0, burst, 2, None, [0.0] * 3)])
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("options", [{"assistant_ensemble_weight": 0.3}, {"use_mtp": True}])
def test_assisted_generation_of_other_kinds_is_refused(options):
    target, draft = models()
    ids, _ = prompts([5])
    config = copy.deepcopy(target.generation_config)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=next(iter(options))):
        hf._refuse_what_is_missing(target, config, {})


# ---- transformers' own loop ----------------------------------------------------------------------


def assisted(target, draft, ids, seed, new=2):
    set_seed(seed)
    return target.generate(
        ids, assistant_model=draft, do_sample=True, temperature=0.8, top_k=12, max_new_tokens=new,
        eos_token_id=None,
    )[0, ids.shape[1] :].tolist()  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["block", "token"])
def test_assisted_generation_verifies_with_the_operator(rule, monkeypatch):
    target, draft = models(noise=0.3)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    ids, _ = prompts([5])
    calls = []
    verify = hf.ops.verify
    monkeypatch.setattr(
        hf.ops, "verify", lambda *a, **k: (calls.append(k["rule"]), verify(*a, **k))[1]
    )
    theirs = generation_utils._speculative_sampling
    with hf.assisted_generation(rule):
        found = [assisted(target, draft, ids, seed) for seed in range(120)]
    assert generation_utils._speculative_sampling is theirs
    assert len(calls) >= 120 and set(calls) == {rule}
    with torch.no_grad():
        row = target(input_ids=ids).logits[0, -1].double() / 0.8
    law = row.masked_fill(row < row.topk(12).values[-1], -torch.inf).softmax(-1)
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in found]), minlength=len(law))
    assert counts[law == 0].sum() == 0
    assert chi_square(counts[law > 0], law[law > 0]) > 1e-6


@pytest.mark.parametrize("is_done, kept, told", [(True, [4, 9], 1), (False, [4, 9, 2], 2)])
def test_candidates_that_end_the_text(is_done, kept, told, monkeypatch):
    # transformers 5.17 says whether they do: then no token follows the last one, if all are kept.
    def theirs(
        candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done_candidate,
        assistant_ensemble_weight=None,
    ):  # fmt: skip
        return "theirs", assistant_ensemble_weight

    monkeypatch.setattr(generation_utils, "_speculative_sampling", theirs)
    ids = torch.tensor([[7, 4, 9]])
    certain = torch.full((1, 3, 12), -torch.inf)
    certain[0, [0, 1, 2], [4, 9, 2]] = 0.0
    with hf.assisted_generation():
        patched = generation_utils._speculative_sampling
        tokens, matches = patched(ids, certain[:, :2], 2, certain, is_done)
        assert tokens.tolist() == [kept] and int(matches) == told
        other = torch.full((1, 2, 12), 0.0)
        certain[0, 0] = certain[0, 2]
        tokens, matches = patched(ids, other, 2, certain, is_done)
        assert tokens.tolist() == [[2]] and int(matches) == 0
        tokens, matches = patched(ids, other[:, :0], 0, certain[:, :1], is_done)
        assert tokens.tolist() == [[2]] and int(matches) == 0
        weighted = patched(ids, other, 2, certain, is_done, assistant_ensemble_weight=0.5)
        assert weighted == ("theirs", 0.5)


def test_assisted_generation_restores_after_an_error_and_knows_its_rules():
    theirs = generation_utils._speculative_sampling
    with pytest.raises(RuntimeError, match="stop"), hf.assisted_generation():
        raise RuntimeError("stop")
    assert generation_utils._speculative_sampling is theirs
    with pytest.raises(ValueError, match="'block' or 'token'"), hf.assisted_generation("typical"):
        pass


def test_empty_processor_lists():
    target, draft = models()
    ids, _ = prompts([5])
    found = target.generate(
        ids, max_new_tokens=4, do_sample=False, logits_processor=LogitsProcessorList(), **OURS,
        draft_model=draft,
    )  # fmt: skip
    assert found.shape == (1, 9)
