"""`GenerationConfig`, `do_sample` and `num_return_sequences` in `generate` and in `generate_fn`."""

from __future__ import annotations

import pytest
import torch
from generate_models import joint_law, pair, prompts, tables
from test_generate_law import ALPHA, chi_square
from transformers import GenerationConfig

from specdec_ext import hf
from specdec_ext.decoding import LookupDrafter, StaticTree, generate, stream

NEW = 16
IDS = torch.tensor([[1, 2], [3, 0]])


def models():
    target, draft = pair(noise=0.02)
    target.generation_config.pad_token_id = 0
    return target, draft


BEAM_ENDS = {"eos_token_id": list(range(5, 40)), "pad_token_id": 3}
CONFIGS = {
    "greedy": {"do_sample": False, "temperature": 0.7},
    "sampled": {"do_sample": True},  # top-k is 50, of 67 tokens
    "filters": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "ends": {"do_sample": True, "eos_token_id": [5, 9, 11, 30], "pad_token_id": 3},
    "length": {"do_sample": False, "max_length": 11},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.3, **BEAM_ENDS},
    "stopping": {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0, **BEAM_ENDS},
    "how": {"do_sample": True, "cache_implementation": "static", "return_dict_in_generate": True},
}


@pytest.mark.parametrize("of_model", [{}, {"temperature": 0.6, "top_k": 5}], ids=["", "own"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_as_transformers_reads_it(name, of_model):
    """Token for token: `generate_fn` is handed what ``model.generate`` makes of the same object."""
    target, draft = models()
    for field, value in of_model.items():
        setattr(target.generation_config, field, value)
    fields = CONFIGS[name]
    length = {} if "max_length" in fields else {"max_new_tokens": NEW}
    config = GenerationConfig(**fields, **length)
    ids, mask = prompts([6, 4])
    found = generate(
        target, draft, ids, attention_mask=mask, generation_config=config, gamma=3, seeds=5
    )
    expected = target.generate(
        ids, attention_mask=mask, generation_config=config, custom_generate=hf.generate_fn,
        draft_model=draft, gamma=3, seeds=5,
    )  # fmt: skip
    expected = getattr(expected, "sequences", expected)
    assert found.sequences.tolist() == expected.tolist()
    if name == "ends":  # which were met, and padded behind
        assert min(found.statistics.new_tokens) < NEW


def test_arguments_come_before_the_configuration():
    target, draft = models()
    ids, _ = prompts([5])
    config = GenerationConfig(do_sample=True, temperature=2.0, top_k=3, max_new_tokens=9)
    found = generate(
        target, draft, ids, generation_config=config, max_new_tokens=NEW, temperature=0.7, top_k=0,
        seeds=1,
    )  # fmt: skip
    expected = generate(target, draft, ids, max_new_tokens=NEW, temperature=0.7, seeds=1)
    assert torch.equal(found.sequences, expected.sequences)
    greedy = generate(target, draft, ids, generation_config=config, do_sample=False)
    assert torch.equal(greedy.sequences, generate(target, None, ids, max_new_tokens=9).sequences)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"num_beams": 4, "max_time": 3.0}, "max_time=3.0"),
        ({"output_logits": True, "max_time": 3.0}, "max_time=3.0, output_logits=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"bad_words_ids": [[3]]}, r"bad_words_ids=\[\[3\]\]"),
        ({"output_scores": True}, "output_scores=True"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields, said):
    target, draft = models()
    with pytest.raises(ValueError, match=f"generation_config asks for .*: {said}; .*generate_fn"):
        generate(target, draft, IDS, generation_config=GenerationConfig(**fields))
    for name, value in fields.items():  # the model's own, which transformers would follow
        setattr(target.generation_config, name, value)
    with pytest.raises(ValueError, match=said):
        generate(target, draft, IDS, generation_config=GenerationConfig())
    neutral = dict(repetition_penalty=1.0, num_beams=1, no_repeat_ngram_size=0, min_length=0)
    for name in fields:
        setattr(target.generation_config, name, None)
    generate(target, draft, IDS, generation_config=GenerationConfig(**neutral), max_new_tokens=2)


@pytest.mark.parametrize("wrong", [{"top_k": 3}, "greedy", 3, GenerationConfig], ids=repr)
def test_what_is_no_configuration(wrong):
    with pytest.raises(TypeError, match="generation_config must be a transformers.GenerationConf"):
        generate(*tables(5), IDS, generation_config=wrong)


# --- beams ------------------------------------------------------------------------------------

BEAMS = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "num_return_sequences": 2}


def unchecked(**fields):
    """Make a configuration whose fields transformers' constructor may refuse together."""
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_a_configuration_that_samples_at_temperature_0_is_refused():
    """As transformers refuses it; a temperature that is given goes before it."""
    target, draft = pair()
    ids, _ = prompts([5])
    config = GenerationConfig(do_sample=True, temperature=0.0, max_new_tokens=3)
    with pytest.raises(ValueError, match="temperature above 0 .* do_sample=True and temperature=0"):
        generate(target, draft, ids, generation_config=config)
    greedy = generate(target, draft, ids, generation_config=config, do_sample=False)
    given = generate(target, draft, ids, generation_config=config, temperature=0.0)
    assert torch.equal(greedy.sequences, given.sequences)


def test_beams_of_a_configuration():
    """Each field is read, an argument comes before it, and one beam makes the others void."""
    target, draft = models()
    ids, mask = prompts([6, 4])

    def run(fields, **options):
        config = unchecked(**BEAM_ENDS, max_new_tokens=NEW, **fields)
        result = generate(
            target, draft, ids, attention_mask=mask, generation_config=config, **options
        )
        return result.sequences.tolist(), getattr(result, "scores", torch.zeros(0)).tolist()

    expected = run({}, **BEAMS)
    assert len(expected[0]) == 4 and run(BEAMS) == expected
    for name in BEAMS:
        less = {field: value for field, value in BEAMS.items() if field != name}
        if name == "num_beams":
            with pytest.raises(ValueError, match="must be 1 where decoding is greedy"):
                run(less)
        else:
            assert run(less) != expected, name
        assert run(less, **{name: BEAMS[name]}) == expected
    assert run({**BEAMS, "num_beams": 2, "length_penalty": 0.1}, **BEAMS) == expected
    greedy = run({})
    assert run({"length_penalty": 2.0, "early_stopping": True}) == greedy
    assert run({**BEAMS, "num_return_sequences": 1}, num_beams=1) == greedy
    target.generation_config.num_beams = 3  # the model's own, which a configuration completes
    assert run({name: value for name, value in BEAMS.items() if name != "num_beams"}) == expected
    without = generate(target, draft, ids, attention_mask=mask, max_new_tokens=2)
    assert not hasattr(without, "scores")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"do_sample": True}, "temperature must be 0 in a beam search"),
        ({"stop_strings": ["a"]}, "stop_strings must be left out of a beam search"),
        ({"num_return_sequences": 4}, "num_return_sequences must be at most num_beams, 3, got 4"),
    ],
    ids=["do_sample", "stop_strings", "num_return_sequences"],
)
def test_beams_of_a_configuration_that_have_no_meaning(fields, said):
    config = unchecked(**{**BEAMS, **fields})
    with pytest.raises(ValueError, match=said):
        generate(*tables(5), IDS, generation_config=config)
    with pytest.raises(ValueError, match="stream: a beam search has no tokens .* got 3 and None"):
        stream(*tables(5), IDS, generation_config=GenerationConfig(**BEAMS))


# --- do_sample --------------------------------------------------------------------------------


def test_do_sample():
    target, draft = tables(5)
    sampled = generate(target, draft, IDS, do_sample=True, max_new_tokens=30, seeds=2)
    expected = generate(target, draft, IDS, temperature=1.0, max_new_tokens=30, seeds=2)
    assert torch.equal(sampled.sequences, expected.sequences)
    greedy = generate(target, draft, IDS, do_sample=False, max_new_tokens=30)
    assert torch.equal(greedy.sequences, generate(target, None, IDS, max_new_tokens=30).sequences)
    for options in (
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "rule": "greedy"},
        {"do_sample": False, "temperature": [0.0, 0.8]},
    ):
        with pytest.raises(ValueError, match=f"do_sample is {options['do_sample']}, but decoding"):
            generate(target, draft, IDS, **options)
    with pytest.raises(TypeError, match="generate: do_sample must be a bool, got int 1"):
        generate(target, draft, IDS, do_sample=1)


# --- several sequences ------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [None, StaticTree.from_widths((2, 1))], ids=["chain", "tree"])
def test_sequences_are_requests_with_seeds_of_their_own(tree):
    """The same tokens as each prompt given so often; by seed they come again."""
    target, draft = models()
    ids, mask = prompts([6, 4])
    limits, temperatures = [7, NEW], iter([0.6, 1.3])
    found = generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=limits, temperature=temperatures,
        num_return_sequences=3, seeds=11, tree=tree,
    )  # fmt: skip
    expected = generate(
        target, draft, ids.repeat_interleave(3, 0), attention_mask=mask.repeat_interleave(3, 0),
        max_new_tokens=[7] * 3 + [NEW] * 3, temperature=[0.6] * 3 + [1.3] * 3,
        seeds=torch.arange(11, 17), tree=tree,
    )  # fmt: skip
    assert torch.equal(found.sequences, expected.sequences)
    assert found.statistics.new_tokens == expected.statistics.new_tokens == [7] * 3 + [NEW] * 3
    assert len(set(map(tuple, found.sequences.tolist()))) == 6
    requests = {burst.request for burst in stream(
        target, draft, ids, attention_mask=mask, max_new_tokens=2, do_sample=True,
        num_return_sequences=3, seeds=11, tree=tree,
    )}  # fmt: skip
    assert requests == set(range(6))


@pytest.mark.parametrize("inside", [False, True], ids=["generate", "generate_fn"])
def test_seeds_of_sequences(inside):
    target, draft = models()
    ids, _ = prompts([5])
    options = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 4}

    def run(seeds):
        if not inside:
            return generate(target, draft, ids, seeds=seeds, top_k=50, **options).sequences
        return target.generate(
            ids, custom_generate=hf.generate_fn, draft_model=draft, seeds=seeds, **options
        )

    one = run(3)
    assert torch.equal(run(3), one) and torch.equal(run([3, 4, 5, 6]), one)
    assert torch.equal(run([9, 4, 8, 6])[[1, 3]], one[[1, 3]])  # each by its own seed
    with pytest.raises(ValueError, match=r"seeds must be one number or \[B\] = \[4\], got \[1\]"):
        run([3])
    torch.manual_seed(0)
    drawn = run(None)
    assert len(set(map(tuple, drawn.tolist()))) == 4 and not torch.equal(run(None), drawn)


@pytest.mark.parametrize("seeds", [0, None], ids=["in turn", "drawn"])
def test_sequences_are_independent_and_follow_the_law(seeds):
    """The joint law of both sequences of a prompt is the product of the target's own."""
    target, draft = tables(3)
    torch.manual_seed(1)
    rows = generate(
        target, draft, torch.tensor([[1, 2]]).repeat(6000, 1), max_new_tokens=2, gamma=2,
        do_sample=True, num_return_sequences=2, seeds=seeds,
    ).sequences[:, 2:]  # fmt: skip
    codes = (rows[:, 0] * 3 + rows[:, 1]).reshape(-1, 2)
    law = joint_law(target, [1, 2], 2)
    both = (law[:, None] * law).flatten()
    assert chi_square(torch.bincount(codes[:, 0] * 9 + codes[:, 1], minlength=81), both) > ALPHA


def test_greedy_sequences_would_be_equal():
    for options in ({}, {"do_sample": False}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="num_return_sequences must be 1 where decoding is gr"):
            generate(*tables(5), IDS, num_return_sequences=2, **options)
    for wrong, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="generate: num_return_sequences must be"):
            generate(*tables(5), IDS, num_return_sequences=wrong, do_sample=True)


# --- any drafter where a draft model fits -----------------------------------------------------


@pytest.mark.parametrize("name", ["draft_model", "assistant_model"])
def test_a_drafter_in_place_of_a_draft_model(name):
    target, _ = models()
    ids, _ = prompts([5])
    ids = ids.repeat(1, 4)
    options = {"max_new_tokens": 40, "do_sample": False}
    found = target.generate(
        ids, **options, custom_generate=hf.generate_fn, return_dict_in_generate=True,
        **{name: LookupDrafter()},
    )  # fmt: skip
    assert found.sequences.tolist() == target.generate(ids, **options).tolist()
    assert found.statistics.accepted > 0
