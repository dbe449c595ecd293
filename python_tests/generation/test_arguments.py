"""What callers give `generate`, drafters, policies and trees: right, or refused at once by name."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from generate_models import TableModel, pair, tables
from spec_drafters import spec_drafter
from torch import nn

import specdec_ext
from specdec_ext.decoding import (
    AggressiveDrafter,
    BanditDrafter,
    BlockDrafter,
    ConfidenceStop,
    Draft,
    EagleDrafter,
    EarlyExitDrafter,
    EntropyBound,
    FixedGamma,
    GradientAscent,
    GrownTree,
    HeadsDrafter,
    HeuristicGamma,
    HierarchicalDrafter,
    LookupDrafter,
    MovingThreshold,
    NgramDrafter,
    NoDrafter,
    RenewalRule,
    StackedDrafter,
    StaticTree,
    SuffixDrafter,
    UniformDrafter,
    checks,
    sequoia_tree,
)
from specdec_ext.models.eagle import EagleHead, EagleHeadConfig
from specdec_ext.models.heads import MedusaHeads, MedusaHeadsConfig

IDS = torch.tensor([[1, 2], [3, 0]])
TREE = StaticTree.from_widths((2, 1))


@pytest.fixture
def models():
    return tables(5)


def run(models, **options):
    """Sample four tokens of each prompt."""
    target, draft = models
    given = {"max_new_tokens": 4, "gamma": 2, "temperature": 1.0, "seeds": 7, **options}
    target = given.pop("target", target)
    draft = given.pop("draft", draft)
    return specdec_ext.generate(target, draft, given.pop("input_ids", IDS), **given)


# --- numbers ----------------------------------------------------------------------------------


def test_seeds_that_are_numpy_integers_differ_by_request(models):
    same_prompts = torch.tensor([[1, 2]] * 8)
    expected = run(models, seeds=7, input_ids=same_prompts, max_new_tokens=9).sequences
    assert len(set(map(tuple, expected.tolist()))) > 1  # s, s + 1, ...
    for seed in (np.int64(7), np.int32(7), np.uint8(7), np.array(7), torch.tensor(7)):
        found = run(models, seeds=seed, input_ids=same_prompts, max_new_tokens=9).sequences
        assert torch.equal(found, expected), seed


NUMBERS = {
    "seeds": [3, 9],
    "max_new_tokens": [3, 1],
    "temperature": [0.5, 2.0],
    "top_k": [2, 3],
    "top_p": [0.5, 0.75],
    "min_p": [0.5, 0.25],
    "draft_temperature": [0.5, 2.0],
    "draft_top_k": [2, 3],
    "draft_top_p": [0.5, 0.75],
    "draft_min_p": [0.5, 0.25],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_and_torch_are_those_of_python(models, name):
    one, several = NUMBERS[name][0], NUMBERS[name]
    expected = run(models, **{name: one}).sequences
    for same in (np.array(one)[()], np.array(one), torch.tensor(one)):
        assert torch.equal(run(models, **{name: same}).sequences, expected), repr(same)
    expected = run(models, **{name: several}).sequences
    elements = [torch.tensor(n) for n in several]
    for same in (tuple(several), np.array(several), torch.tensor(several), elements, iter(several)):
        assert torch.equal(run(models, **{name: same}).sequences, expected), repr(same)


OPTIONS = {
    "gamma": (3, {}),
    "lenience": (0.5, {"rule": "lenient"}),
    "beta": (2, {"rule": "top_beta"}),
    "tau": (0.5, {"rule": "top_beta"}),
    "epsilon": (0.25, {"rule": "typical"}),
    "delta": (0.5, {"rule": "typical"}),
    "eos_token_id": (4, {}),
    "pad_token_id": (4, {"eos_token_id": 0}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_number_for_all_requests(models, name):
    value, others = OPTIONS[name]
    expected = run(models, **{name: value, **others}).sequences
    for same in (np.array(value)[()], np.array(value), torch.tensor(value)):
        assert torch.equal(run(models, **{name: same, **others}).sequences, expected), repr(same)


@pytest.mark.parametrize("name", ["raw_logprobs", "padded_texts", "static_cache", "progress"])
def test_flags_of_numpy_and_torch(name):
    target, draft = pair()
    for value in (np.bool_(True), torch.tensor(True), np.bool_(False)):
        run((target, draft), **{name: value})


def test_stop_tokens(models):
    plain = run(models, eos_token_id=()).sequences
    stop = int(plain[0, 3])
    expected = run(models, eos_token_id=stop).sequences
    assert not torch.equal(expected, plain)
    both = [stop, 99]
    for same in (
        np.int64(stop), torch.tensor(stop), [np.int32(stop)], [torch.tensor(stop)], {stop},
        torch.tensor([stop]), torch.tensor([stop], dtype=torch.int32), np.array(both), iter(both),
    ):  # fmt: skip
        assert torch.equal(run(models, eos_token_id=same).sequences, expected), repr(same)
    assert torch.equal(run(models, eos_token_id=-1).sequences, plain)  # no token has that id
    target, draft = models
    for configured in (np.int64(stop), torch.tensor(stop), torch.tensor([stop]), [stop]):
        target.config.eos_token_id = configured
        assert torch.equal(run((target, draft)).sequences, expected)


def test_the_largest_and_the_smallest_seed(models):
    assert run(models, seeds=2**63 - 2).sequences.shape == (2, 6)
    assert run(models, seeds=-(2**63)).sequences.shape == (2, 6)
    with pytest.raises(
        ValueError, match="seeds must be an int of 64 bits, got 9223372036854775808"
    ):
        run(models, seeds=2**63 - 1)  # of request 1


SCALARS = [
    True, np.bool_(True), 1.5, np.float32(1.0), math.nan, math.inf, "3", b"3", 3 + 0j, {}, {3: 3},
    torch.tensor(1.5), torch.tensor(True), 2**64, -(2**64), [3], [3, 3, 3], [[3, 3]], [True, True],
    [1.5, 1.5], [3, None], ["3", "3"], torch.tensor([[3, 3]]), torch.tensor([1.5, 1.5]),
    np.array([[3, 3]]), int, object(),
]  # fmt: skip
#: What is legal for some argument, or off.
LEGAL = {
    "max_new_tokens": [],
    "seeds": [],
    "temperature": [1.5, np.float32(1.0), torch.tensor(1.5), 2**64, [1.5, 1.5],
                    torch.tensor([1.5, 1.5])],
    "top_k": [],
    "top_p": [1.5, np.float32(1.0), torch.tensor(1.5), math.inf, 2**64, [1.5, 1.5],
              torch.tensor([1.5, 1.5])],
    "min_p": [np.float32(1.0), -(2**64)],
    "gamma": [],
    "lenience": [np.float32(1.0)],
    "beta": [],
    "tau": [1.5, np.float32(1.0), torch.tensor(1.5), 2**64],
    "epsilon": [1.5, np.float32(1.0), torch.tensor(1.5), 2**64],
    "delta": [1.5, np.float32(1.0), torch.tensor(1.5), 2**64],
    "eos_token_id": [[3], [3, 3, 3]],
    "pad_token_id": [],
    "raw_logprobs": [True, np.bool_(True), torch.tensor(True)],
    "padded_texts": [True, np.bool_(True), torch.tensor(True)],
    "static_cache": [True, np.bool_(True), torch.tensor(True)],
    "progress": [True, np.bool_(True), torch.tensor(True)],
    "stop_sequences": [[[3, 3]], torch.tensor([[3, 3]]), np.array([[3, 3]])],
    "stop_strings": [],
    "stopping_criteria": [],
    "logits_processor": [],
    "tree": [],
    "rule": [],
    "generator": [],
    "on_round": [int],  # it can be called
    "attention_mask": [],
    "target": [],
    "draft": [],
}  # fmt: skip


for _name in ("temperature", "top_k", "top_p", "min_p"):
    LEGAL[f"draft_{_name}"] = LEGAL[_name]


@pytest.mark.parametrize("name", LEGAL)
def test_hostile_values_are_refused_by_name_before_a_model_runs(models, name):
    legal = [repr(value) for value in LEGAL[name]]
    more = {
        "max_new_tokens": [-1, 2**62 + 1, [3, -1]],
        "gamma": [-1, 65_535, FixedGamma, SimpleNamespace(lengths=list)],
        "temperature": [-1.0, 1e39, [1.0, math.nan]],
        "draft_temperature": [-1.0, 1e39, [1.0, math.nan]],
        "beta": [0],
        "stop_sequences": [[[]], [3, 3], ["ab"], "ab"],
        "stop_strings": [[""], ["a", 3]],
        "rule": ["nosuch"],
        "draft": [LookupDrafter, FixedGamma(2), nn.Linear(2, 2), SimpleNamespace(propose=list)],
        "target": [None, nn.Linear(2, 2), LookupDrafter(), TableModel],
        "tree": [StaticTree, (2, 1), FixedGamma(2)],
        "pad_token_id": [2**63],
        "attention_mask": [torch.full((2, 2), 2), torch.ones(2, 2, device="meta")],
    }
    options = {} if name != "generator" else {"seeds": None}
    for value in [*SCALARS, *more.get(name, [])]:
        if repr(value) in legal:
            if name == "on_round":
                continue
            run(models if name != "static_cache" else pair(), **{**options, name: value})
            continue
        for model in models:
            model.fed.clear()
        with pytest.raises((TypeError, ValueError), match=f"^generate: [^,]*{name}") as caught:
            run(models, **{**options, name: value})
        said = str(caught.value)
        assert "must" in said or "out of range" in said, said
        assert ", got " in said or "out of range" in said, said
        assert "\n" not in said, said
        assert models[0].fed == models[1].fed == [], value


def test_a_tokenizer(models):
    for tokenizer in (3, "gpt2", LookupDrafter()):
        with pytest.raises(TypeError, match="tokenizer must be a Hugging Face tokenizer, got"):
            run(models, stop_strings="x", tokenizer=tokenizer)
    run(models, stop_strings=[])  # none


def test_streaming_refuses_at_once(models):
    with pytest.raises(TypeError, match="generate: seeds must be an int, .* got bool True"):
        specdec_ext.stream(*models, IDS, seeds=True)


def test_padding_behind_the_end_fits_the_prompts_type(models):
    with pytest.raises(ValueError, match=r"pad_token_id must be in \[-2147483648, 2147483647\]"):
        run(models, input_ids=IDS.int(), pad_token_id=2**31)
    stop = run(models).sequences[0, 2].item()
    found = run(models, pad_token_id=2**40, eos_token_id=stop).sequences
    assert found[0, 3] == 2**40


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [5, -1, 2**40])
@pytest.mark.parametrize("plain", [False, True])
def test_an_id_that_is_no_token_of_the_target(models, token, plain):
    ids = IDS.clone()
    ids[1, 0] = token
    text = f"ids of the target's 5 tokens, got {token} at place 0 of request 1"
    with pytest.raises(ValueError, match=text):
        run(models, input_ids=ids, draft=None if plain else models[1])
    assert models[0].fed == []


def test_a_real_models_vocabulary_is_that_of_its_embeddings():
    target, draft = pair()
    with pytest.raises(ValueError, match="the target's 67 tokens, got 67 at place 1 of request 0"):
        run((target, draft), input_ids=torch.tensor([[1, 67]]))
    with pytest.raises(ValueError, match="the target's 67 tokens, got 67"):
        run((target, draft), input_ids=torch.tensor([[1, 67]]), tree=TREE)


@pytest.mark.parametrize("padding", [-1, -100, 2**40])
def test_padding_may_hold_any_id(models, padding):
    ids = torch.tensor([[padding, 1, 2], [3, 0, 4]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    expected = run(models, input_ids=ids.clamp(0, 4), attention_mask=mask).sequences
    found = run(models, input_ids=ids, attention_mask=mask).sequences
    assert torch.equal(found[:, 3:], expected[:, 3:])
    assert torch.equal(found[:, :3], ids)
    with pytest.raises(ValueError, match=f"got {padding} at place 0 of request 0"):
        run(models, input_ids=ids)


def test_a_draft_with_fewer_tokens_takes_the_prompts_of_its_target():
    target, _ = tables(5)
    _, small = tables(3)
    found = run((target, small), input_ids=torch.tensor([[1, 4]]), temperature=0.0).sequences
    plain = run((target, None), input_ids=torch.tensor([[1, 4]]), temperature=0.0).sequences
    assert torch.equal(found, plain)


def test_a_model_that_does_not_say_its_vocabulary_is_not_checked(models):
    target, draft = models
    del target.config
    seen = []
    forward = target.forward

    def spy(input_ids, **others):
        seen.append(input_ids)
        return forward(input_ids=input_ids.clamp(0, 4), **others)

    spy.__signature__ = __import__("inspect").signature(forward)
    target.forward = spy
    run((target, draft), input_ids=torch.tensor([[77, 1, 2]]))
    assert any(bool((ids == 77).any()) for ids in seen)


def test_values_on_the_meta_device(models):
    with pytest.raises(ValueError, match="input_ids must hold ids, got a tensor on the meta"):
        run(models, input_ids=IDS.to("meta"))


# --- models and drafters ----------------------------------------------------------------------


class Tokenizer:
    """Called, but not as a model is."""

    def __call__(self, text):
        return {"input_ids": text}


class Pipeline:
    """It has a forward that wants something else."""

    def __call__(self, text):
        return text

    def forward(self, model_inputs, **parameters):
        return model_inputs


@pytest.mark.parametrize("wrong", [3, None, "gpt2", Tokenizer(), Pipeline(), nn.Linear(2, 2), [1]])
def test_a_target_that_is_no_model(models, wrong):
    text = "target must be a causal language model, called as Hugging Face models are, got"
    with pytest.raises(TypeError, match=f"generate: {text} {checks.shown(wrong)}"):
        run(models, target=wrong)


@pytest.mark.parametrize("wrong", [3, "gpt2", Tokenizer(), Pipeline(), nn.Linear(2, 2), [1]])
def test_a_draft_that_is_neither_model_nor_drafter(models, wrong):
    said = f"must be a causal language model, heads, a Drafter or None, got {checks.shown(wrong)}"
    with pytest.raises(TypeError, match=f"generate: draft {said}"):
        run(models, draft=wrong)
    with pytest.raises(TypeError, match=f"StackedDrafter: drafter 1 {said}"):
        StackedDrafter(LookupDrafter(), wrong)
    with pytest.raises(TypeError, match=f"HierarchicalDrafter: draft {said}"):
        HierarchicalDrafter(models[0], wrong)
    with pytest.raises(TypeError, match="HierarchicalDrafter: model must be a causal language"):
        HierarchicalDrafter(wrong, models[1])
    with pytest.raises(TypeError, match="generate: draft must be a causal model, or a drafter"):
        run(models, draft=wrong, tree=TREE)


def test_a_model_without_a_head():
    target, draft = pair()
    with pytest.raises(TypeError, match="LlamaModel must return logits, .* got BaseModelOutput"):
        run((target.model, draft))
    with pytest.raises(TypeError, match="LlamaModel must return logits, .* got BaseModelOutput"):
        run((target, draft.model))


def test_what_is_refused_draws_no_seeds(models):
    state = torch.get_rng_state()
    with pytest.raises(TypeError):
        run(models, seeds=None, pad_token_id="0")
    assert torch.equal(torch.get_rng_state(), state)


def test_classes_in_place_of_objects(models):
    with pytest.raises(TypeError, match="draft must be .* got the class LookupDrafter"):
        run(models, draft=LookupDrafter)
    with pytest.raises(TypeError, match="gamma must be .* got the class FixedGamma"):
        run(models, gamma=FixedGamma)


def test_drafters_and_policies_that_lack_a_method(models):
    class Mute(NoDrafter):
        commit = None

    with pytest.raises(TypeError, match=r"generate: draft must have commit\(\), .* got Mute"):
        run(models, draft=Mute())

    class Deaf(FixedGamma):
        select = None

    with pytest.raises(TypeError, match=r"generate: gamma must have select\(\), .* got Deaf"):
        run(models, gamma=Deaf(2))


WRONG_DRAFTS = [
    (lambda ids: ids, TypeError, r"a Draft of tensors, got Tensor of shape \[1, 2\]"),
    (lambda ids: Draft(ids.tolist()), TypeError, "a Draft of tensors, got Draft of list"),
    (lambda ids: Draft(ids[0]), ValueError, r"with B = 1 and G <= 3, got \[2\] int64"),
    (lambda ids: Draft(ids.repeat(2, 1)), ValueError, r"B = 1 and G <= 3, got \[2, 2\] int64"),
    (lambda ids: Draft(ids.repeat(1, 2)), ValueError, r"B = 1 and G <= 3, got \[1, 4\] int64"),
    (lambda ids: Draft(ids.int()), ValueError, r"got \[1, 2\] int32"),
]


@pytest.mark.parametrize("wrong, error, said", WRONG_DRAFTS)
def test_what_a_drafter_of_ones_own_proposes_is_checked(models, wrong, error, said):
    class Own(NoDrafter):
        def propose(self, gamma, positions, go_on=None):
            return wrong(torch.tensor([[1, 2]]))

    with pytest.raises(error, match=f"generate: Own.propose must return .*{said}"):
        run(models, draft=Own(), gamma=3, input_ids=IDS[:1])


def test_one_object_in_two_places(models):
    lookup, target, draft = LookupDrafter(), *models
    twice = r"in one place .*, got one {} twice"
    with pytest.raises(ValueError, match=twice.format("LookupDrafter")):
        StackedDrafter(lookup, draft, lookup)
    with pytest.raises(ValueError, match=twice.format("LookupDrafter")):
        HierarchicalDrafter(target, StackedDrafter(HierarchicalDrafter(draft, lookup), lookup))
    inner = HierarchicalDrafter(draft, lookup)
    with pytest.raises(ValueError, match=twice.format("HierarchicalDrafter")):
        HierarchicalDrafter(target, StackedDrafter(inner, inner))
    # A model keeps no state: two drafters may drive it.
    StackedDrafter(LookupDrafter(), draft, draft)
    HierarchicalDrafter(draft, draft)


def test_one_policy_or_threshold_in_two_places(models):
    target, draft = models
    policy = HeuristicGamma(2)
    twice = r"in one place .*, got one {} twice"
    with pytest.raises(ValueError, match="generate: draft .*" + twice.format("HeuristicGamma")):
        run(models, draft=HierarchicalDrafter(draft, draft, gamma=policy), gamma=policy)
    with pytest.raises(ValueError, match=twice.format("HeuristicGamma")):
        HierarchicalDrafter(target, HierarchicalDrafter(draft, draft, gamma=policy), gamma=policy)
    bar = MovingThreshold()
    with pytest.raises(ValueError, match=twice.format("MovingThreshold")):
        run(
            models,
            draft=HierarchicalDrafter(draft, draft, gamma=ConfidenceStop(2, bar)),
            gamma=EntropyBound(2, bar),
        )


# --- constructors -----------------------------------------------------------------------------

NOT_INTS = (True, 2.0, "2", None, math.nan, np.float64(2.0), torch.tensor([2, 2]), [2])
NOT_NUMBERS = (True, "0.5", None, [0.5], 1j)
NOT_FINITE = (math.nan, math.inf, -math.inf, -0.1)
NOT_FLAGS = (1, 0, None, "yes", 1.0)
NOT_TEXTS = (3, "ab", [3, 4], ["ab"], [[True]], [[1.5]], [[None]], torch.tensor([3, 4]), [[-1]])
MODEL = tables(5)[0]
CONSTRUCTORS = {
    FixedGamma: {"gamma": (*NOT_INTS, -1, 65_535)},
    HeuristicGamma: {"gamma": (*NOT_INTS, 0, 21), "limit": (*NOT_INTS, 0, math.inf)},
    ConfidenceStop: {
        "gamma": (*NOT_INTS, -1),
        "threshold": (*NOT_NUMBERS, *NOT_FINITE, 1.5, FixedGamma(2)),
    },
    EntropyBound: {
        "gamma": (*NOT_INTS, -1),
        "threshold": (*NOT_NUMBERS, *NOT_FINITE, 1.5),
        "weight": (*NOT_NUMBERS, *NOT_FINITE),
    },
    GradientAscent: {
        "c": (*NOT_NUMBERS, *NOT_FINITE),
        "gamma": (*NOT_INTS, 0, 21),
        "limit": (*NOT_INTS, 0, math.inf),
        "rate": (*NOT_NUMBERS, *NOT_FINITE),
        "steps": (*NOT_INTS, -1),
    },
    RenewalRule: {
        "limit": (*NOT_INTS, 0, math.inf),
        "c": (*NOT_NUMBERS, *NOT_FINITE),
        "probe": (*NOT_INTS, 2),
        "memory": (*NOT_INTS, 1),
        "clock": (3, None),
    },
    MovingThreshold: {
        name: (*NOT_NUMBERS, *NOT_FINITE, 1.5)
        for name in ("start_at", "alpha", "beta1", "beta2", "epsilon")
    },
    LookupDrafter: {"min_match": (*NOT_INTS, 0, 17), "max_match": (*NOT_INTS, 0, 2**63)},
    SuffixDrafter: {
        "min_match": (*NOT_INTS, 0, 17),
        "max_match": (*NOT_INTS, 0, 1025),
        "least": (*NOT_NUMBERS, *NOT_FINITE, 1.5),
        "memory": (*NOT_INTS, -1),
    },
    NgramDrafter: {
        "vocab_size": (*NOT_INTS, 0, -1),
        "order": (*NOT_INTS, 0),
        "texts": (*NOT_TEXTS, None, [[5]], {1: [1]}),
        "smoothing": (*NOT_NUMBERS, *NOT_FINITE, 0),
        "sampled": NOT_FLAGS,
        "learn": NOT_FLAGS,
    },
    UniformDrafter: {"vocab_size": (*NOT_INTS, 0, -1)},
    AggressiveDrafter: {"inputs": (*NOT_TEXTS, {1: [1]})},
    EarlyExitDrafter: {"layers": (*NOT_INTS, 0, 3)},
    BlockDrafter: {
        "model": (3, None, "ab", MODEL),
        "input_ids": (3, None, [[2, 3]], torch.tensor([2, 3]), torch.tensor([[2.0, 3.0]])),
        "attention_mask": (3, [[1, 1]], torch.ones(1, 3), torch.ones(2)),
        "block_size": (*(wrong for wrong in NOT_INTS if wrong is not None), 0, 4),
    },
    HeadsDrafter: {"heads": (3, None, "ab", MODEL)},
    EagleDrafter: {"head": (3, None, "ab", MODEL)},
    HierarchicalDrafter: {
        "gamma": (*NOT_INTS, 0, 65_535, FixedGamma),
        "rule": ("coupled", None, 3),
        "refill": NOT_FLAGS,
    },
    StackedDrafter: {"continued": NOT_FLAGS},
    BanditDrafter: {
        "costs": (3, "ab", [None], [True], [-1.0], [math.nan], [], [0.1, 0.1]),
        "together": NOT_FLAGS,
        "memory": (*(wrong for wrong in NOT_INTS if wrong is not None), 1),
        "clock": (3, None),
    },
    StaticTree: {
        "parents": (3, None, "ab", (), (0,), (-1, 1), (-1, 0.0), (-1, True), (-1, None), [[-1]]),
        "children": ("nosuch", None, 3),
    },
    StaticTree.from_widths: {
        "widths": (3, None, "ab", (2, 0), (2.0,), (True,), (None,), (10**9,), (40, 40)),
        "children": ("nosuch", None),
    },
    sequoia_tree: {
        "acceptance": (3, None, "ab", *([wrong] for wrong in (*NOT_NUMBERS, *NOT_FINITE, 1.5))),
        "nodes": (*NOT_INTS, 0, 1025, 10**9),
        "max_depth": (True, 2.0, "2", -1),
    },
    GrownTree: {
        "nodes": (*NOT_INTS, 0, 1025),
        "depth": (*NOT_INTS, 0),
        "beam": (*NOT_INTS, 0),
        "children": ("iid", None),
        "min_chance": (*NOT_NUMBERS, *NOT_FINITE, -0.1, 1.5),
    },
}
REQUIRED = {
    FixedGamma: {"gamma": 2},
    GradientAscent: {"c": 0.1},
    NgramDrafter: {"vocab_size": 5},
    UniformDrafter: {"vocab_size": 5},
    BanditDrafter: {"costs": [0.0]},
    HierarchicalDrafter: {"model": MODEL, "draft": MODEL},
    BlockDrafter: {"model": spec_drafter(5, 3), "input_ids": torch.tensor([[2, 3]])},
    StaticTree: {"parents": (-1, 0)},
    StaticTree.from_widths: {"widths": (2, 1)},
    sequoia_tree: {"acceptance": [0.5, 0.2], "nodes": 4},
    GrownTree: {"nodes": 4, "depth": 2},
}


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_constructors_refuse_by_name(kind):
    required = REQUIRED.get(kind, {})
    if kind is EarlyExitDrafter:
        required = {"model": pair()[0], "layers": 1}
    first = [LookupDrafter()] if kind in (StackedDrafter, BanditDrafter) else []
    owner = {EarlyExitDrafter: "early exit", StaticTree.from_widths: "StaticTree"}
    for name, wrong in CONSTRUCTORS[kind].items():
        for value in wrong:
            with pytest.raises((TypeError, ValueError)) as caught:
                kind(*first, **{**required, name: value})
            said = str(caught.value)
            assert said.startswith(f"{owner.get(kind, kind.__name__)}: "), (name, value, said)
            assert "must" in said and "got" in said, (name, value, said)
            assert name.removesuffix("s") in said, (name, value, said)


def test_constructors_take_numbers_of_numpy_and_torch():
    """What they keep is Python's, so that nothing else meets it later."""
    for two, half in ((np.int32(2), np.float32(0.5)), (torch.tensor(2), torch.tensor(0.5))):
        made = [
            FixedGamma(two), HeuristicGamma(two, limit=two), ConfidenceStop(two, half),
            EntropyBound(two, half, half), GradientAscent(half, two, limit=two, steps=two),
            RenewalRule(two, half, memory=two, probe=two + 1), MovingThreshold(half, alpha=half),
            LookupDrafter(min_match=two, max_match=two), UniformDrafter(two),
            SuffixDrafter(min_match=two, max_match=two, least=half, memory=two),
            NgramDrafter(two, two, smoothing=half, texts=[np.array([1, 0]), torch.tensor([1])]),
            AggressiveDrafter([np.array([1, 0]), torch.tensor([1]), (two,)]),
            HierarchicalDrafter(MODEL, MODEL, two, refill=np.bool_(True)),
            BanditDrafter(LookupDrafter(), costs=np.array([half]), memory=two),
            GrownTree(two, two, two, min_chance=half), sequoia_tree([half], two),
            StaticTree(np.array([-1, 0, 0])),
            StaticTree.from_widths(np.array([2, 1])), EarlyExitDrafter(pair()[0], two),
        ]  # fmt: skip
        for thing in made:
            kept = [v for v in vars(thing).values() if hasattr(v, "tolist") and v.ndim == 0]
            assert not kept, (thing, kept)
    assert StaticTree([-1, 0, 0]) == StaticTree((-1, 0, 0))
    assert hash(StaticTree([-1, 0, 0])) == hash(StaticTree((-1, 0, 0)))


# --- no request -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "model", "none", "lookup", "suffix", "suffix tree", "ngram", "uniform", "aggressive", "stacked",
    "bandit", "hierarchy", "block", "heads", "eagle", "tree", "grown", "policy", "mask", "lists",
])  # fmt: skip
def test_an_empty_batch(name):
    target, draft = pair()
    ids = torch.zeros(0, 3, dtype=torch.long)
    width = target.config.hidden_size
    sizes = {"vocab_size": 67, "hidden_size": width}
    heads = MedusaHeads(MedusaHeadsConfig(**sizes, num_heads=2))
    head = EagleHead(EagleHeadConfig(**sizes, intermediate_size=8, num_attention_heads=2))
    options = {
        "model": {},
        "none": {"draft": None},
        "lookup": {"draft": LookupDrafter()},
        "suffix": {"draft": SuffixDrafter()},
        "suffix tree": {"draft": SuffixDrafter(), "tree": GrownTree(4, 2)},
        "ngram": {"draft": NgramDrafter(67)},
        "uniform": {"draft": UniformDrafter(67)},
        "aggressive": {"draft": AggressiveDrafter([])},
        "stacked": {"draft": StackedDrafter(LookupDrafter(), draft)},
        "bandit": {"draft": BanditDrafter(LookupDrafter(), draft, costs=None)},
        "hierarchy": {"draft": HierarchicalDrafter(draft, draft)},
        "block": {"draft": BlockDrafter(spec_drafter(67, 3), ids)},
        "heads": {"draft": HeadsDrafter(heads)},
        "eagle": {"draft": EagleDrafter(head)},
        "tree": {"tree": TREE},
        "grown": {"tree": GrownTree(4, 2)},
        "policy": {"gamma": RenewalRule()},
        "mask": {"attention_mask": ids},
        "lists": {"seeds": [], "temperature": [], "top_k": torch.tensor([]), "max_new_tokens": []},
    }[name]
    sequences, statistics = run((target, draft), **{"input_ids": ids, **options})
    assert sequences.shape == (0, 3) and sequences.dtype == torch.int64
    assert statistics.rounds == 0 and statistics.new_tokens == []
    assert list(specdec_ext.stream(target, draft, ids)) == []
