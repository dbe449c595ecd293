"""`generate(grammar=...)` with xgrammar's and llguidance's matchers, here and in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from conftest import ROOT
from generate_models import pair, perturbed
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

import specdec_ext
from specdec_ext.commands.pair import load_pair
from specdec_ext.decoding import LookupDrafter, StaticTree
from specdec_ext.decoding.encoder_decoder import encoded

xgrammar = pytest.importorskip("xgrammar")
llguidance = pytest.importorskip("llguidance")
hf = import_module("xgrammar.contrib.hf")

VOCABULARY = 67  # of the tiny models: 60 pieces, the end, and padding
PIECES = [*'{}[]:,"0123456789abcdefghijklmnopqrstuvwxyz_ -.', '":', '{"', "true", "false", "ab"]
END = len(PIECES)
EBNF = 'root ::= "{" pair ("," pair)? "}"\npair ::= "\\"" [a-c] "\\":" ("true" | [1-9] [0-9])'
PROMPT = torch.tensor([[3, 4, 5]])
OPTIONS = {"max_new_tokens": 40, "eos_token_id": END, "pad_token_id": END}


def compiled(grammar=EBNF, vocabulary=VOCABULARY):
    """Compile a grammar over the pieces, in a vocabulary that is padded behind them."""
    info = xgrammar.TokenizerInfo([*PIECES, "<end>"], vocab_size=vocabulary, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info).compile_grammar(grammar)


def texts(result):
    rows = result.sequences[:, PROMPT.shape[1] :].tolist()
    return ["".join(PIECES[t] if t < END else "$" for t in row).rstrip("$") for row in rows]


@pytest.fixture(scope="module")
def models():
    return pair()


@pytest.fixture(scope="module")
def shipped():
    return load_pair()


@pytest.fixture
def example(monkeypatch):
    pytest.importorskip("jsonschema")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module("json_schema")


HOW = {
    "plain": (lambda draft: None, {}),
    "model": (lambda draft: draft, {}),
    "lookup": (lambda draft: LookupDrafter(min_match=1), {}),
    "tree": (lambda draft: draft, {"tree": StaticTree.from_widths((2, 2, 1))}),
}


@pytest.mark.parametrize("how", HOW)
def test_greedy_output_is_transformers_with_xgrammars_processor(models, how):
    target, draft = models
    expected = target.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **OPTIONS,
        logits_processor=[hf.LogitsProcessor(compiled())],
    )  # fmt: skip
    drafter, options = HOW[how]
    found = specdec_ext.generate(
        target, drafter(draft), PROMPT, grammar=compiled(), **OPTIONS, **options
    )
    assert found.sequences.tolist() == expected.tolist()
    assert json.loads(texts(found)[0]) and found.sequences[0, -1] == END


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 140])
def test_every_sample_is_json(models, how, vocabulary):
    """Also where the grammar was compiled for more tokens than the model has."""
    target, draft = models
    drafter, options = HOW[how]
    result = specdec_ext.generate(
        target, drafter(draft), PROMPT.repeat(40, 1), grammar=compiled(vocabulary=vocabulary),
        temperature=1.5, seeds=0, **OPTIONS, **options,
    )  # fmt: skip
    found = texts(result)
    assert all(isinstance(json.loads(text), dict) for text in found) and len(set(found)) > 10


def test_a_matcher_itself_and_one_for_each_request(models):
    target, draft = models
    letters = compiled('root ::= "[" [a-c] [a-c]* "]"')
    matcher = xgrammar.GrammarMatcher(compiled())
    result = specdec_ext.generate(
        target, draft, PROMPT.repeat(3, 1), grammar=[letters, None, matcher], temperature=1.0,
        seeds=2, **OPTIONS,
    )  # fmt: skip
    first, free, last = texts(result)
    assert first.startswith("[") and set(first.strip("[]")) <= set("abc")
    assert json.loads(last) and matcher.is_terminated()
    with pytest.raises(ValueError):
        json.loads(free)


def test_a_matcher_for_another_vocabulary_is_refused(models):
    target, draft = models
    matcher = xgrammar.GrammarMatcher(compiled(vocabulary=200))
    with pytest.raises(ValueError, match="(?s)refuses 3 words of .*; give the CompiledGrammar"):
        specdec_ext.generate(target, draft, PROMPT, grammar=matcher, **OPTIONS)


# ---- xgrammar's own logits processor -------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_its_processor_is_taken_for_its_grammar(models, several):
    target, draft = models
    ids = PROMPT.repeat(2, 1)
    grammars = [compiled(), compiled('root ::= "[" [a-c]* "]"')] if several else compiled()
    options = {"temperature": 1.0, "seeds": 0, **OPTIONS}
    expected = specdec_ext.generate(
        target, draft, ids, grammar=grammars,
        logits_processor=RepetitionPenaltyLogitsProcessor(1.2), **options,
    )  # fmt: skip
    processors = [RepetitionPenaltyLogitsProcessor(1.2), hf.LogitsProcessor(grammars)]
    found = specdec_ext.generate(target, draft, ids, logits_processor=processors, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.statistics.accepted > 0


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def used():
    processor = hf.LogitsProcessor(compiled())
    processor(PROMPT, torch.zeros(1, VOCABULARY))
    return processor


@pytest.mark.parametrize(
    ("processors", "options", "message"),
    [
        (lambda: [hf.LogitsProcessor(compiled()), Nothing()], {}, "must be the last .* Nothing"),
        (lambda: [used()], {}, "was used before.* as grammar="),
        (lambda: [hf.LogitsProcessor(compiled())], {"grammar": 1}, "there is another"),
        (lambda: [hf.LogitsProcessor(compiled())], {"num_beams": 2}, "Processor must be left"),
        (lambda: [hf.LogitsProcessor([compiled()] * 3)], {}, r"\[B\] = \[1\], got \[3\]"),
    ],
)  # fmt: skip
def test_processors_that_are_refused(models, processors, options, message):
    target, draft = models
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(
            target, draft, PROMPT, logits_processor=processors(), **OPTIONS, **options
        )


# ---- inside transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_inside_transformers(models, sampled):
    """As grammar= and as xgrammar's processor, batches and warpers included."""
    target, draft = models
    ids = PROMPT.repeat(3, 1)
    law = {"do_sample": True, "temperature": 0.8, "top_k": 10} if sampled else {"do_sample": False}
    shared = {
        "custom_generate": specdec_ext.hf.generate_fn, "draft_model": draft, "seeds": 1,
        "attention_mask": torch.ones_like(ids), **law, **OPTIONS,
    }  # fmt: skip
    one = target.generate(ids, grammar=compiled(), **shared)
    other = target.generate(ids, logits_processor=[hf.LogitsProcessor(compiled())], **shared)
    assert one.tolist() == other.tolist()
    expected = specdec_ext.generate(
        target, draft, ids, grammar=compiled(), seeds=1,
        **OPTIONS, **({"temperature": 0.8, "top_k": 10} if sampled else {}),
    ).sequences  # fmt: skip
    assert one.tolist() == expected.tolist()
    if not sampled:
        theirs = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **OPTIONS,
            logits_processor=[hf.LogitsProcessor(compiled())],
        )  # fmt: skip
        assert one.tolist() == theirs.tolist()


def test_encoder_decoders():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=END,
    )  # fmt: skip
    large = T5ForConditionalGeneration(config).eval()
    small = perturbed(large, 0.02)
    source = {"input_ids": torch.tensor([[5, 6, 7, 1]] * 2)}
    start = torch.zeros(2, 1, dtype=torch.int64)
    options = {"max_new_tokens": 40, "temperature": 1.0, "seeds": 0, "pad_token_id": END}
    sequences, statistics = specdec_ext.generate(
        encoded(large, **source), encoded(small, **source), start, grammar=compiled(), **options
    )
    rows = sequences[:, 1:].tolist()
    assert all(json.loads("".join(PIECES[t] for t in row if t < END)) for row in rows)
    assert statistics.accepted > 0
    found = large.generate(
        **source, custom_generate=specdec_ext.hf.generate_fn, draft_model=small,
        grammar=compiled(), max_new_tokens=40,
    )  # fmt: skip
    expected = large.generate(
        **source, logits_processor=[hf.LogitsProcessor(compiled())], max_new_tokens=40
    )
    assert found.tolist() == expected.tolist()


# ---- llguidance, over the shipped tokenizer ------------------------------------------------------


def guidance(tokenizer, grammar, vocabulary):
    llguidance_hf = import_module("llguidance.hf")
    tokens = llguidance_hf.from_tokenizer(tokenizer, n_vocab=vocabulary)
    return llguidance.LLMatcher(tokens, grammar)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_llguidance_and_xgrammar_agree(shipped, how, temperature):
    """On a regular expression, of which both engines say the same."""
    pattern = r"\{(a|b1|[c-f]{2}){1,6}\}"
    tokenizer, size = shipped.tokenizer, shipped.target.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(pattern)
    matcher = guidance(tokenizer, llguidance.LLMatcher.grammar_from_regex(pattern), size)
    ids = tokenizer("x = ", return_tensors="pt").input_ids.repeat(6, 1)
    drafter, options = HOW[how]
    both = [
        specdec_ext.generate(
            shipped.target, drafter(shipped.draft), ids, grammar=one, temperature=temperature,
            seeds=5, max_new_tokens=32, **options,
        ).sequences
        for one in (grammar, matcher)
    ]  # fmt: skip
    assert both[0].tolist() == both[1].tolist()
    assert matcher.is_stopped() and not matcher.is_error()  # the first request's own


def test_a_grammar_that_llguidance_cannot_read(shipped):
    matcher = guidance(shipped.tokenizer, "no grammar", shipped.target.config.vocab_size)
    with pytest.raises(ValueError, match="grammar: llguidance says: .*Expected token"):
        specdec_ext.generate(shipped.target, None, torch.tensor([[5]]), grammar=matcher)


# ---- examples/json_schema.py ---------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("how", HOW)
def test_the_example_writes_what_its_schema_says(example, shipped, engine, how):
    size = shipped.target.config.vocab_size
    grammar = example.grammar_of(engine, example.SCHEMA, shipped.tokenizer, size)
    ids = shipped.tokenizer(example.PROMPT, return_tensors="pt").input_ids
    drafter, options = HOW[how]
    result = specdec_ext.generate(
        shipped.target, drafter(shipped.draft), ids.repeat(20, 1), grammar=grammar,
        temperature=1.0, seeds=0, max_new_tokens=256, **options,
    )  # fmt: skip
    found = [example.text_of(row, ids, shipped.tokenizer) for row in result.sequences]
    assert all(example.is_valid(text, example.SCHEMA) for text in found) and len(set(found)) > 5
    assert not example.is_valid(found[0][:-1], example.SCHEMA)
    assert not example.is_valid(found[0].replace("line", "lime"), example.SCHEMA)


@pytest.mark.thorough
def test_the_example_as_a_program(example):
    command = [sys.executable, "examples/json_schema.py", "--runs", "2", "--engine", "llguidance"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "valid: 2 of 2" in done.stdout
