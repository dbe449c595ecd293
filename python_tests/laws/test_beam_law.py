"""Beam search with speculation is beam search: ids and scores, to the bit, whatever the draft."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import BACKENDS
from beams import (
    Settings,
    log_softmax,
    mixture,
    plain_search,
    prefix_law,
    speculative_search,
)
from conftest import REFERENCE

from specdec_ext.reference import beams as reference_beams

WIDTHS = (1, 2, 4, 5, 8)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


def searches(seed, ties=True):
    """A search, its laws and its draft: sizes, EOS and penalties that all come in turn."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    width, vocab = WIDTHS[seed % 5], 3 + seed % 6
    # Every token may be an EOS token; one at least is none.
    ends = [t for t in range(vocab - 1) if pick((True, False, False))]
    s = Settings(
        width,
        tuple((t + seed) % vocab for t in ends),
        max_new=pick((3, 9)),
        length_penalty=pick((1.0, 0.0, 2.0, -1.0)),
        early_stopping=pick((False, True, "never")),
    )
    law = prefix_law(seed, vocab, pick((None, 1.0, 4.0)) if ties else None, pick((2.0, 6.0)))
    draft = mixture(law, prefix_law(seed + 1000, vocab), pick((0.0, 0.1, 0.5, 1.0)))
    return s, law, draft, width * (1 + seed // 5 % 2), 1 + seed // 2 % 6


def search(verify, seed, **options):
    s, law, draft, beams, gamma = searches(seed)
    rows = log_softmax(law) if options.get("log_probs") else law
    return speculative_search(verify, rows, draft, s, beams, gamma, **options)


def expected(seed):
    s, law, *_ = searches(seed)
    return plain_search(law, s)


@pytest.mark.parametrize("rule", ["bound", "subset"])
@pytest.mark.parametrize("part", range(12))
def test_like_plain_search_to_the_bit(backend, part, rule):
    for seed in range(part * 10, part * 10 + 10):
        found = search(backend.beam_verify, seed, rule=rule, log_probs=True)
        assert found.ended.kept == expected(seed).kept, seed


# ---- negative controls: each mistake is found --------------------------------------------------


def wrong_searches(verify, seeds=range(60), **options):
    """Seeds whose hypotheses are not those of plain beam search."""
    runs = ((seed, search(verify, seed, log_probs=True, **options)) for seed in seeds)
    return [seed for seed, run in runs if run.ended.kept != expected(seed).kept]


def test_a_bound_that_is_ignored_is_found(monkeypatch):
    monkeypatch.setattr(reference_beams, "is_decided", lambda level, missing, width: True)
    assert len(wrong_searches(REFERENCE.beam_verify)) > 5


@pytest.mark.thorough
def test_a_bound_of_the_best_offer_is_found(monkeypatch):
    def is_decided(level, missing, width):
        return not missing or level.live[0].score > max(missing)

    monkeypatch.setattr(reference_beams, "is_decided", is_decided)
    assert len(wrong_searches(REFERENCE.beam_verify)) > 2


def test_a_reversed_order_of_ties_is_found(monkeypatch):
    def last_first(table):
        backwards = table.flatten().flip(0).sort(descending=True, stable=True).indices
        return table.numel() - 1 - backwards

    monkeypatch.setattr(reference_beams, "in_order", last_first)
    assert len(wrong_searches(REFERENCE.beam_verify)) > 5


def test_scores_of_the_draft_are_found():
    found = 0
    for seed in range(60):
        s, law, draft, beams, gamma = searches(seed)
        run = speculative_search(REFERENCE.beam_verify, draft, draft, s, beams, gamma)
        found += run.ended.kept != plain_search(law, s).kept
    assert found > 20


# ---- what it gives ------------------------------------------------------------------------------


def test_the_bound_rule_needs_fewer_calls():
    calls = {"bound": 0, "subset": 0}
    for seed in range(4):
        law = prefix_law(seed, 20, spread=8.0)
        draft = mixture(law, prefix_law(seed + 50, 20, spread=8.0), 0.2)
        s = Settings(4, (), max_new=16)
        for rule in calls:
            run = speculative_search(REFERENCE.beam_verify, law, draft, s, 4, 4, rule=rule)
            calls[rule] += len(run.levels)
    assert calls["bound"] < 0.95 * calls["subset"]


def test_a_draft_that_is_the_target_decides_every_level(backend):
    law = log_softmax(prefix_law(0, 7))
    s = Settings(4, (), max_new=15)
    run = speculative_search(backend.beam_verify, law, law, s, 4, 4, rule="subset", log_probs=True)
    assert run.levels == [5, 5, 5]


@pytest.mark.parametrize("rule", ["bound", "subset"])
def test_one_beam_is_greedy_decoding(backend, rule):
    for seed in range(10):
        law = prefix_law(seed, 8)
        draft = mixture(law, prefix_law(seed + 50, 8), 0.4)
        s = Settings(1, (), max_new=12)
        run = speculative_search(backend.beam_verify, law, draft, s, 1, 3, rule=rule)
        tokens = ()
        for _ in range(12):
            tokens += (int(law(tokens).argmax()),)
        assert [h.tokens for h in run.ended.kept] == [tokens]


def test_wide_beams_hold_every_hypothesis(backend):
    """With as many beams as there are hypotheses, the search is an enumeration."""
    law, eos, length = log_softmax(prefix_law(3, 4)), 2, 3
    s = Settings(48, (eos,), max_new=length, length_penalty=0.0)
    draft = prefix_law(4, 4)
    run = speculative_search(backend.beam_verify, law, draft, s, 48, 2, log_probs=True)
    hypotheses = {}
    for n in range(1, length + 1):
        for tokens in itertools.product(range(4), repeat=n):
            if eos in tokens[:-1] or (n < length and tokens[-1] != eos):
                continue
            score = sum(law(tokens[:i])[t].double() for i, t in enumerate(tokens))
            hypotheses[tokens] = float(score)
    assert len(hypotheses) == 40 == len(run.ended.kept)
    ranked = sorted(hypotheses, key=lambda tokens: -hypotheses[tokens])
    assert [h.tokens for h in run.ended.kept] == ranked
    for h in run.ended.kept:
        assert abs(h.score - hypotheses[h.tokens]) < 1e-5
