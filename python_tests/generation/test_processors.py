"""Logits processors and stopping criteria in bursts: as `model.generate` calls them, or refused."""

from __future__ import annotations

import inspect
import threading
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from generate_models import pair, prompts, tables
from test_encoder_decoder import inputs_of
from test_encoder_decoder import models as encoder_decoders
from test_generate_edges import p_value
from transformers import (
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import HierarchicalDrafter, LookupDrafter, StaticTree
from specdec_ext.decoding.evidence import Refused
from specdec_ext.decoding.processors import Processors
from specdec_ext.decoding.texts import Texts

NEW = 10
TREE = StaticTree.from_widths((2, 1))
KEYS = [654, 400, 836, 123, 340, 443]


@pytest.fixture(scope="module")
def models():
    target, draft = pair(noise=0.05)
    target.generation_config.pad_token_id = 0
    return target, draft


def allowed_by_request(request, ids):
    """Each request has tokens of its own, and alternates between two halves of them."""
    mine = torch.arange(1 + 20 * request, 21 + 20 * request)
    return mine[ids.shape[0] % 2 :: 2].tolist()


class Trie:
    """Texts must stay in a trie; to ask about any other text is an error."""

    def __init__(self, width):
        self.width = width

    def __call__(self, request, ids):
        for before, token in zip(ids[self.width :], ids[self.width + 1 :], strict=False):
            if token not in self.children(request, before):
                raise KeyError(f"request {request}: {ids.tolist()}")
        return self.children(request, ids[-1]) if len(ids) > self.width else range(1, 60)

    def children(self, request, token):
        return [(int(token) * (request + 2) + i) % 66 + 1 for i in range(4)]


def synth_id(**options):
    return SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=3, **options)


#: What `model.generate` makes processors of that act on greedy decoding, too.
OPTIONS = {
    "guidance": lambda ids: {"guidance_scale": 1.7},
    "guidance against a prompt": lambda ids: {
        "guidance_scale": 1.7, "negative_prompt_ids": ids.flip(1),
        "negative_prompt_attention_mask": torch.ones_like(ids),
    },
    "guidance without a cache": lambda ids: {"guidance_scale": 1.7, "use_cache": False},
    "sequence bias": lambda ids: {"sequence_bias": [[[5], 3.0], [[9, 7], 9.0], [[40], 2.0]]},
    "encoder repetition": lambda ids: {"encoder_repetition_penalty": 3.0},
    "repetition": lambda ids: {"repetition_penalty": 1.6},
    "n-grams": lambda ids: {"no_repeat_ngram_size": 1},
    "encoder n-grams": lambda ids: {"encoder_no_repeat_ngram_size": 1},
    "bad words": lambda ids: {"bad_words_ids": [[n] for n in range(2, 60, 2)] + [[7, 9]]},
    "prefixes": lambda ids: {"prefix_allowed_tokens_fn": allowed_by_request},
    "a trie": lambda ids: {"prefix_allowed_tokens_fn": Trie(ids.shape[1])},
    "forced end": lambda ids: {"forced_eos_token_id": 13},
    "invalid values": lambda ids: {"remove_invalid_values": True, "suppress_tokens": [5, 6]},
    "length decay": lambda ids: {
        "exponential_decay_length_penalty": (3, 1.6), "eos_token_id": [11, 12],
    },
    "suppressed": lambda ids: {"suppress_tokens": list(range(1, 40))},
    "green list": lambda ids: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "self hash": lambda ids: {
        "watermarking_config": WatermarkingConfig(
            bias=4.0, seeding_scheme="selfhash", context_width=2
        )
    },
    "SynthID": lambda ids: {"watermarking_config": synth_id()},
    "SynthID that waits": lambda ids: {
        "watermarking_config": synth_id(skip_first_ngram_calls=True, context_history_size=4)
    },
    "several": lambda ids: {
        "watermarking_config": synth_id(), "repetition_penalty": 1.4, "renormalize_logits": True,
        "prefix_allowed_tokens_fn": allowed_by_request, "guidance_scale": 1.3,
    },
}  # fmt: skip
#: Processors that are given as objects.
OBJECTS = {
    "time stamps": lambda width: WhisperTimeStampLogitsProcessor(
        SimpleNamespace(
            no_timestamps_token_id=40, eos_token_id=39, bos_token_id=1,
            max_initial_timestamp_index=9,
        ),
        begin_index=width,
    ),
    "ignored prompts": lambda width: RepetitionPenaltyLogitsProcessor(
        1.6, prompt_ignore_length=width
    ),
    "limit by row": lambda width: ForbidsByRow(),
    "counter": lambda width: CountsCalls(),
    "delayed counter": lambda width: CountsCalls(late=5),
    "what it saw": lambda width: PenalizesWhatItSaw(),
    "with a lock": lambda width: HoldsALock(),
}  # fmt: skip


class ForbidsByRow:
    """A batch-indexed processor: row b may not hold tokens of residue b."""

    def __call__(self, ids, scores):
        for b in range(len(ids)):
            scores[b, b::3] = -torch.inf
        return scores


class CountsCalls:
    """Prefers another token at every call, from some call on."""

    def __init__(self, late=0):
        self.calls, self.late = 0, late

    def __call__(self, ids, scores):
        self.calls += 1
        scores = scores.clone()
        if self.calls > self.late:
            scores[:, 3 * self.calls % scores.shape[1]] += 50.0
        return scores


class PenalizesWhatItSaw:
    """Keeps a penalty for each token and request; changes it in place."""

    def __call__(self, ids, scores):
        if not hasattr(self, "seen"):
            self.seen = torch.zeros_like(scores)
        self.seen.scatter_add_(1, ids[:, -1:], torch.full_like(scores[:, :1], 2.5))
        return scores - self.seen


class HoldsALock:
    """Cannot be copied, and need not be."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, ids, scores):
        with self.lock:
            return scores.roll(1, -1)


LENGTHS = {"one": [5], "equal": [4, 4], "padded": [6, 3, 5]}


@cache
def plainly(target, lengths):
    """What `generate` gives without any processor."""
    ids, mask = prompts(list(lengths))
    return target.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False).tolist()


def both(models, lengths, options, tree=None, processors=None, criteria=None):
    """Return what `generate` gives without processors, with them, and ours; and what we drafted."""
    target, draft = models
    ids, mask = prompts(lengths)
    given = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    without = plainly(target, tuple(lengths))

    def run(**ours):
        lists = {}
        if processors is not None:
            lists["logits_processor"] = LogitsProcessorList([processors(ids.shape[1])])
        if criteria is not None:
            lists["stopping_criteria"] = StoppingCriteriaList([criteria(ids.shape[1])])
        return target.generate(ids, **given, **options(ids), **lists, **ours)

    expected = run().tolist()
    bursts = []
    found = run(
        custom_generate=hf.generate_fn, draft_model=draft, gamma=3, tree=tree,
        on_round=bursts.extend,
    ).tolist()  # fmt: skip
    return without, expected, found, bursts


def check(models, options=lambda ids: {}, tree=None, **given):
    accepted = several = 0
    changed = False
    for lengths in LENGTHS.values():
        without, expected, found, bursts = both(models, lengths, options, tree, **given)
        assert found == expected
        changed |= expected != without
        accepted += sum(burst.accepted for burst in bursts)
        several += sum(burst.accepted < 3 for burst in bursts)
    assert changed and several > 0
    return accepted


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_generate(models, name):
    accepted = check(models, OPTIONS[name])
    assert accepted > 0 or "guidance" in name or name in ("several", "forced end")


@pytest.mark.parametrize("name", ["guidance", "repetition", "prefixes", "a trie", "SynthID"])
def test_options_of_generate_with_a_tree(models, name):
    check(models, OPTIONS[name], TREE)


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_objects(models, name, tree):
    check(models, tree=tree, processors=OBJECTS[name])


#: Of the encoder's ids, or of the first token.
OF_ENCODER_DECODERS = {
    "encoder repetition": {"encoder_repetition_penalty": 3.0},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 1},
    "first token": {"forced_bos_token_id": 7, "begin_suppress_tokens": [5, 6]},
    "prefixes": {"prefix_allowed_tokens_fn": allowed_by_request},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("name", OF_ENCODER_DECODERS)
def test_options_of_encoder_decoders(name):
    target, draft = encoder_decoders("bart")
    given = {**inputs_of("bart"), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    options = OF_ENCODER_DECODERS[name]
    expected = target.generate(**given, **options).tolist()
    assert expected != target.generate(**given).tolist()
    ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
    assert target.generate(**given, **options, **ours).tolist() == expected


def test_several_sequences_of_each_prompt(models):
    """Encoder ids have a row for each prompt, processors are made before those are repeated."""
    target, _ = models
    ids, mask = prompts([6, 3])
    options = {
        "attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "top_k": 1,
        "encoder_repetition_penalty": 3.0, "num_return_sequences": 2, "eos_token_id": None,
    }  # fmt: skip
    expected = target.generate(ids, **options).tolist()
    ours = {"custom_generate": hf.generate_fn, "draft_model": models[1], "gamma": 3}
    assert target.generate(ids, **options, **ours).tolist() == expected


# ---- rows by themselves --------------------------------------------------------------------------


def warpers():
    """What `do_sample` makes of its options, and what they may be followed by."""
    made = logits_process
    return [
        made.TemperatureLogitsWarper(0.7), made.TopHLogitsWarper(0.4), made.TopKLogitsWarper(9),
        made.TopPLogitsWarper(0.6), made.MinPLogitsWarper(0.2), made.TypicalLogitsWarper(0.5),
        made.EpsilonLogitsWarper(0.02), made.EtaLogitsWarper(0.1), made.LogitNormalization(),
        made.SuppressTokensAtBeginLogitsProcessor([3, 4], 6), made.ForcedBOSTokenLogitsProcessor(3),
        made.MinLengthLogitsProcessor(8, 5), made.MinNewTokensLengthLogitsProcessor(4, 3, 5),
        made.WatermarkLogitsProcessor(30, "cpu"), made.InfNanRemoveLogitsProcessor(),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(15), ids=[type(w).__name__ for w in warpers()])
def test_rows_are_those_of_a_batch_in_step(number):
    """Of requests that are at different places, each row as if all were where it is."""
    generator = torch.Generator().manual_seed(number)
    texts = torch.randint(0, 30, (3, 12), generator=generator)
    logits = 3 * torch.randn(3, 4, 30, generator=generator)
    lengths = [6, 4, 7]
    known = [row[:n].tolist() for row, n in zip(texts, lengths, strict=True)]
    drafted = [row[n : n + 3].tolist() for row, n in zip(texts, lengths, strict=True)]
    new = [[], [], []]
    processors = Processors([warpers()[number]], Texts(texts[:, :4].tolist(), new, 0),
                            whole_batch=True)  # fmt: skip
    processors.chain(range(3), [[]] * 3, logits[:, :1])
    for b in range(3):
        new[b] += known[b][4:]
    found = processors.chain([2, 0], [drafted[2], drafted[0]], logits[[2, 0]])
    asked = 0
    for row, b in enumerate((2, 0)):
        for i in range(4):
            if i and found[row, i - 1, drafted[b][i - 1]] == -torch.inf:
                break
            expected = warpers()[number](texts[:, : lengths[b] + i], logits[:, i].clone())
            assert torch.equal(found[row, i], expected[b])
            asked += 1
    assert asked >= 2


def test_rows_at_one_place_are_asked_for_together():
    shapes = []

    def record(ids, scores):
        shapes.append((tuple(ids.shape), tuple(scores.shape)))
        return scores

    new = [[], [], [], []]
    texts = Texts([[1, 2]] * 4, new, pad=0)
    processors = Processors([record], texts, whole_batch=True)
    logits = torch.zeros(4, 3, 10)
    processors.chain(range(4), [[3, 4]] * 4, logits)
    shapes.clear()
    processors.chain(range(4), [[3, 4]] * 4, logits)
    assert shapes == [((4, n), (4, 10)) for n in (2, 3, 4)]
    new[1].append(7)
    shapes.clear()
    processors.chain([1, 3], [[3, 4]] * 2, logits[:2])
    assert shapes == [((4, n), (4, 10)) for n in (2, 3, 4, 5)]


def test_what_other_rows_show():
    """Their text at that place; padding where they ended or have not come so far."""
    shown = []

    def record(ids, scores):
        shown.append(ids.tolist())
        return scores

    new = [[], [], []]
    processors = Processors([record], Texts([[1, 2]] * 3, new, pad=0), whole_batch=True)
    processors.chain(range(3), [[], [], []], torch.zeros(3, 1, 10))
    new[0] += [3, 4, 5, 6]
    new[1] += [7]
    shown.clear()
    processors.chain([0, 1], [[8], [9]], torch.zeros(2, 2, 10))
    assert shown == [
        [[1, 2, 3], [1, 2, 7], [1, 2, 0]],
        [[1, 2, 3, 4], [1, 2, 7, 9], [1, 2, 0, 0]],
        [[1, 2, 3, 4, 5, 6], [1, 2, 7, 9, 0, 0], [1, 2, 0, 0, 0, 0]],
        [[1, 2, 3, 4, 5, 6, 8], [1, 2, 7, 9, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0]],
    ]


@pytest.mark.parametrize("whole_batch", [False, True])
def test_nothing_is_asked_behind_a_token_that_cannot_be(whole_batch):
    seen = []

    def no_fives(ids, scores):
        assert not (ids[0] == 5).any()
        seen.append(ids[0].tolist())
        scores[:, 5] = -torch.inf
        return scores

    texts = Texts([[1, 2]] * 2, [[], []], pad=0)
    processors = Processors([no_fives], texts, whole_batch=whole_batch)
    processors.chain([0], [[]], torch.zeros(1, 1, 10))
    seen.clear()
    out = processors.chain([0], [[3, 5, 4, 6]], torch.ones(1, 5, 10))
    assert seen == [[1, 2], [1, 2, 3]] and (out[0, :, 5] == 1).tolist() == [False] * 2 + [True] * 3
    seen.clear()
    tree = ([[2, 5, 3, 4, 6]], [[-1, 0, 0, 1, 2]])
    out = processors.tree([0], *tree, torch.ones(1, 5, 10))
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3, 6]]
    assert (out[0, :, 5] == 1).tolist() == [False, True, False, True, False]


# ---- state ---------------------------------------------------------------------------------------


class Alternates:
    """By a counter, what `alternates` does by the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return bent(scores, self.calls)


def alternates(ids, scores):
    return bent(scores, ids.shape[1] - 1)  # the prompts of these tests have two tokens


def bent(scores, calls):
    scores = scores.clone()
    scores[:, calls % scores.shape[1]] += 1.5
    return scores


@pytest.mark.parametrize("kind", ["model", "hierarchy", "lookup"])
def test_the_law_under_a_processor_that_counts(kind, monkeypatch):
    target, draft = tables(4)
    medium = tables(4, seed=3)[1]
    drafter = {
        "model": draft, "hierarchy": HierarchicalDrafter(medium, draft, 2),
        "lookup": LookupDrafter(min_match=1),
    }[kind]  # fmt: skip
    counts = {}

    def counting(*given, **options):
        processors = options.pop("logits_processor")
        counts["kept"] = specdec_ext_generate(*given, logits_processor=Alternates(), **options)
        assert processors == [alternates]
        return counts["kept"]

    specdec_ext_generate = specdec_ext.generate
    monkeypatch.setattr(specdec_ext, "generate", counting)
    assert p_value(target, drafter, [alternates], 3, gamma=2, draws=600) > 1e-6
    if kind != "lookup":
        assert counts["kept"].statistics.accepted_of_tested > 0.5


def test_a_draft_under_a_watermark_is_accepted_as_often_as_without(models):
    """It draws from watermarked rows itself."""
    target, draft = models
    ids, _ = prompts([5])
    rates = []
    for processors in ([], [SynthIDTextWatermarkLogitsProcessor(
        keys=KEYS, ngram_len=3, sampling_table_size=2**10, sampling_table_seed=0,
        context_history_size=64, device="cpu",
    )]):  # fmt: skip
        _, statistics = specdec_ext.generate(
            target, draft, ids, temperature=0.7, max_new_tokens=60, gamma=3, seeds=3,
            logits_processor=processors,
        )  # fmt: skip
        rates.append(statistics.accepted_of_tested)
    assert rates[1] > rates[0] - 0.1


def test_state_is_left_as_plain_decoding_leaves_it(models):
    target, draft = models
    ids, mask = prompts([6, 3, 5])
    states = []
    for ours in ({}, {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}):
        processor = CountsCalls()
        target.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **ours,
            logits_processor=LogitsProcessorList([processor]),
        )  # fmt: skip
        states.append(vars(processor))
    assert states[0] == states[1] == {"calls": NEW, "late": 0}


def test_one_processor_follows_each_request_alone():
    """Given to `generate` itself, it is to each request as if that were alone."""
    target, draft = pair(noise=0.05)
    ids, mask = prompts([6, 3, 5])
    given = {"max_new_tokens": NEW, "gamma": 3, "eos_token_id": ()}
    found, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, logits_processor=PenalizesWhatItSaw(), **given
    )
    for b, length in enumerate([6, 3, 5]):
        alone, _ = specdec_ext.generate(
            target, None, ids[b : b + 1, -length:], logits_processor=PenalizesWhatItSaw(), **given
        )
        assert found[b, 6:].tolist() == alone[0, length:].tolist()


class Locked(CountsCalls):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Noisy:
    def __call__(self, ids, scores):
        return scores + torch.rand_like(scores)


class Diverse:
    """A token that another request would take is less likely."""

    def __call__(self, ids, scores):
        taken = torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        return scores - 5.0 * (taken.sum(0) - taken)


class LooksAround:
    """Keeps the last tokens of all requests; one step later, what follows them is likely."""

    def __call__(self, ids, scores):
        if hasattr(self, "last"):
            scores[:, (self.last + 1) % scores.shape[1]] += 50.0
        self.last = ids[:, -1].clone()
        return scores


def by_closure():
    calls = 0

    def count(ids, scores):
        nonlocal calls
        calls += 1
        return bent(scores, calls)

    return count


@pytest.mark.parametrize("make, lengths, message", [
    (Locked, [5], "Locked keeps state between calls and cannot be copied"),
    (Noisy, [5], "Noisy must be a function of ids and scores and of state that a copy takes along"),
    (by_closure, [5], "count must be a function of ids and scores; asked twice"),
    (Diverse, [5, 4, 5], "Diverse makes the scores of a request depend on the other requests"),
    (LooksAround, [5, 4, 5], "LooksAround makes the scores of a request depend on the other"),
])  # fmt: skip
def test_refused_processors(models, make, lengths, message):
    target, draft = models
    ids, mask = prompts(lengths)
    with pytest.raises(Refused, match=message):
        target.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, draft_model=draft,
            logits_processor=LogitsProcessorList([make()]), custom_generate=hf.generate_fn,
        )  # fmt: skip


def test_rows_that_depend_on_each_other_are_right_alone(models):
    check_one = both(models, [5], lambda ids: {}, processors=lambda width: LooksAround())
    assert check_one[1] == check_one[2] != check_one[0]


def test_every_processor_of_transformers_is_tested():
    """A new version's new processors must be looked at."""
    tested, base = inspect.getsource(inspect.getmodule(check)), logits_process.LogitsProcessor
    made_by_options = {
        "UnbatchedClassifierFreeGuidance", "SequenceBias", "EncoderRepetitionPenalty",
        "NoRepeatNGram", "EncoderNoRepeatNGram", "NoBadWords", "PrefixConstrained",
        "ForcedEOSToken", "ExponentialDecayLengthPenalty", "SuppressTokens",
    }  # fmt: skip
    of_other_models = {  # which generate_fn does not run, or in calls that it refuses
        "WhisperNoSpeechDetection", "ClassifierFreeGuidance", "AlternatingCodebooks",
        "BarkEosPrioritizer", "DiaClassifierFreeGuidance", "DiaEOSChannelFilter",
        "DiaEOSDelayPattern",
    }  # fmt: skip
    for name, kind in vars(logits_process).items():
        if isinstance(kind, type) and kind.__module__ == logits_process.__name__:
            short = name.removesuffix("LogitsProcessor")
            known = made_by_options | of_other_models | {"LogitsProcessor", "LogitsProcessorList"}
            assert name in tested or short in known or not issubclass(kind, base), name


# ---- criteria ------------------------------------------------------------------------------------


class LimitByRow:
    def __call__(self, ids, scores, **options):
        return ids.shape[1] >= torch.tensor([9, 12, 10])[: len(ids)]


class EndsAtEvenTokens:
    def __call__(self, ids, scores, **options):
        return (ids[:, -1] % 2 == 0) & (ids.shape[1] > 8)


class AfterSoManyCalls:
    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores, **options):
        self.calls += 1
        return torch.full((len(ids),), self.calls >= 6)


class AfterSoManySmallTokens:
    def __call__(self, ids, scores, **options):
        if not hasattr(self, "left"):
            self.left = torch.full((len(ids),), 3)
        self.left -= (ids[:, -1] < 40).long()
        return self.left <= 0


@pytest.mark.parametrize(
    "criterion", [LimitByRow, EndsAtEvenTokens, AfterSoManyCalls, AfterSoManySmallTokens]
)
def test_criteria(models, criterion):
    end = {"eos_token_id": 66}  # without one, transformers goes on writing to rows that ended
    check(models, lambda ids: end, criteria=lambda width: criterion())


def test_criteria_that_read_a_flag_from_outside(models):
    """They are asked themselves, not copies of them."""
    target, draft = models
    ids, _ = prompts([5])
    stop = threading.Event()

    class OnEvent:
        def __call__(self, ids, scores, **options):
            return stop.is_set()

    class OnAttribute:
        stop = False

        def __init__(self):
            self.stop = False

        def __call__(self, ids, scores, **options):
            return self.stop

    flag = OnAttribute()
    for criterion, set_it in ((OnEvent(), stop.set), (flag, lambda: setattr(flag, "stop", True))):
        rounds = []

        def on_round(bursts, rounds=rounds, set_it=set_it):
            rounds.append(bursts)
            if len(rounds) == 2:
                set_it()

        target.generate(
            ids, max_new_tokens=40, do_sample=False, custom_generate=hf.generate_fn,
            draft_model=draft, on_round=on_round,
            stopping_criteria=StoppingCriteriaList([criterion]),
        )  # fmt: skip
        assert len(rounds) == 3


class WhenAllAreEven:
    def __call__(self, ids, scores, **options):
        return bool((ids[:, -1] % 2 == 0).all())


class WrongShape:
    def __call__(self, ids, scores, **options):
        return torch.zeros(len(ids) + 1, dtype=torch.bool)


@pytest.mark.parametrize("criterion, message", [
    (WhenAllAreEven, "lets other requests of the batch decide whether request . ends"),
    (WrongShape, r"WrongShape must return one answer or one for each row of ids \[3, .\], got"),
])  # fmt: skip
def test_refused_criteria(models, criterion, message):
    target, draft = models
    ids, mask = prompts([6, 3, 5])
    with pytest.raises(ValueError, match=message):
        target.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, draft_model=draft,
            stopping_criteria=StoppingCriteriaList([criterion()]), custom_generate=hf.generate_fn,
        )  # fmt: skip


# ---- masks with holes ----------------------------------------------------------------------------


def test_prompts_are_shown_without_what_their_masks_leave_out():
    """A zero inside a prompt is left out like those before it."""
    target, draft = tables(8)
    ids = torch.tensor([[7, 1, 2, 3, 4], [1, 5, 6, 2, 3]])
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 1]])
    processed, asked = [], []
    specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=4, gamma=2, eos_token_id=(),
        logits_processor=lambda ids, scores: processed.append(ids[0].tolist()) or scores,
        stopping_criteria=lambda ids, scores: asked.append(ids[0].tolist()) or False,
    )  # fmt: skip
    starts = ([1, 2, 4], [1, 6, 2, 3])
    assert all(any(text[: len(s)] == s for s in starts) for text in processed + asked)
    assert all(start in processed for start in starts)


def test_batches_of_one_request_or_none():
    target, draft = tables(8)
    ids = torch.tensor([[1, 2], [3, 4]])
    found, _ = specdec_ext.generate(
        target, draft, ids, max_new_tokens=[0, 5], eos_token_id=(), padded_texts=True,
        logits_processor=ForbidsByRow(),
    )  # fmt: skip
    assert len(found[1]) == 7 and not any(token % 3 == 1 for token in found[1, 2:].tolist())
    nothing, _ = specdec_ext.generate(
        target, draft, ids, max_new_tokens=0, logits_processor=ForbidsByRow()
    )
    assert nothing.tolist() == ids.tolist()
