"""Beam search in `generate` on tables, where everything is enumerated, and what must be noticed.

A table's law depends on the last two tokens; it gives NaN to a node that does not see its own text,
so that a wrong slot, mask or position does not pass.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from beams import Settings, plain_search
from generate_models import TableModel, tables

import specdec_ext
from specdec_ext import reference
from specdec_ext.decoding import beam_generation
from specdec_ext.reference import beams as reference_beams

PROMPTS = torch.tensor([[0, 0, 2, 1], [3, 1, 0, 2], [0, 0, 0, 2]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])


def law_of(model, prompt):
    """The rows of a table after a prompt; before its first token there is a 0."""

    def law(tokens):
        text = [0, *prompt, *tokens]
        return model.table[text[-2], text[-1]]

    return law


def searched(model, settings):
    """What plain beam search keeps for each prompt, step by step."""
    rows = [prompt[mask.bool()].tolist() for prompt, mask in zip(PROMPTS, MASK, strict=True)]
    found = [plain_search(law_of(model, row), settings).kept for row in rows]
    return [(h.tokens, h.score) for kept in found for h in kept]


def found_by(target, draft, settings, **options):
    """What `generate` keeps."""
    target.last_position = None
    result = specdec_ext.generate(
        target, draft, PROMPTS, attention_mask=MASK, max_new_tokens=settings.max_new,
        num_beams=settings.width, num_return_sequences=settings.width,
        length_penalty=settings.length_penalty, early_stopping=settings.early_stopping,
        eos_token_id=settings.eos, pad_token_id=0, **options,
    )  # fmt: skip
    rows = result.sequences[:, PROMPTS.shape[1] :].tolist()
    return [
        (cut(row, settings.eos), score)
        for row, score in zip(rows, result.scores.tolist(), strict=True)
    ]


def cut(row, ends):
    return tuple(row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))])


def same(found, expected):
    """Whether tokens are the same, and scores up to what a sum over the vocabulary loses."""
    return [tokens for tokens, _ in found] == [tokens for tokens, _ in expected] and all(
        abs(score - other) < 1e-5 for (_, score), (_, other) in zip(found, expected, strict=True)
    )


def settings_of(case, width):
    return Settings(
        width,
        eos=((2,), (0, 5), (7, 3, 11))[case % 3],
        max_new=(7, 11, 1, 16)[case % 4],
        length_penalty=(1.0, 0.0, 2.0, -0.5)[case // 2 % 4],
        early_stopping=(False, True, "never")[case // 3 % 3],
    )


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("gamma", range(1, 7))
@pytest.mark.parametrize("width", [2, 4, 5, 8])
def test_as_plain_beam_search(width, gamma, noise):
    for case in range(2):
        target, draft = tables(14, noise, seed=case)
        settings = settings_of(case + gamma + width, width)
        draft_width = width * (1 + case % 2)
        found = found_by(target, draft, settings, gamma=gamma, draft_beams=draft_width)
        assert same(found, searched(target, settings)), case


@pytest.mark.parametrize("gamma", [1, 3])
def test_as_many_beams_as_there_are_texts(gamma):
    """Then nothing is pruned, and the best texts of all are found: enumerated, scored, sorted."""
    target, draft = tables(4, 0.5)
    settings = Settings(64, eos=(), max_new=3, length_penalty=0.0)
    found = found_by(target, draft, settings, gamma=gamma)
    for b, (prompt, mask) in enumerate(zip(PROMPTS, MASK, strict=True)):
        law = law_of(target, prompt[mask.bool()].tolist())
        scores = {
            text: sum(law(text[:i]).log_softmax(0)[token].item() for i, token in enumerate(text))
            for text in itertools.product(range(4), repeat=3)
        }
        best = sorted(scores.items(), key=lambda item: -item[1])
        assert same(found[64 * b : 64 * (b + 1)], best)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("draft_beams", [1, 2, 4])
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_one_beam_is_greedy_speculative_decoding(gamma, draft_beams, noise):
    target, draft = tables(14, noise)
    options = {
        "attention_mask": MASK, "max_new_tokens": 13, "gamma": gamma, "eos_token_id": [2, 7],
        "pad_token_id": 0,
    }  # fmt: skip
    greedy = specdec_ext.generate(target, draft, PROMPTS, **options)
    found = specdec_ext.generate(target, draft, PROMPTS, draft_beams=draft_beams, **options)
    assert found.sequences.tolist() == greedy.sequences.tolist()
    if draft_beams == 1:
        options["eos_token_id"] = ()  # which chains draft, and beams do not
        greedy = specdec_ext.generate(target, draft, PROMPTS, **options)
        found = specdec_ext.generate(target, draft, PROMPTS, draft_beams=1, **options)
        assert found.statistics.rounds == greedy.statistics.rounds


def rounded(model):
    """Logits that are multiples of 1: many are equal, in a row and between rows."""
    return TableModel(model.table.round())


def as_they_are(ids, scores):
    """A processor: rows are then torch's log-probabilities, the same bits for everyone."""
    return scores


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_ties(width, gamma):
    """By place, then by token: uniform rows, and rounded ones."""
    uniform, other = TableModel(torch.zeros(14, 14, 14)), tables(14)[1]
    target, near = tables(14, 0.5)
    for law, draft in ((uniform, other), (uniform, uniform), (rounded(target), rounded(near))):
        settings = Settings(width, eos=(2,), max_new=6)
        found = found_by(
            law, draft, settings, gamma=gamma, logits_processor=as_they_are, draft_beams=2 * width
        )
        assert found == searched(law, settings)


# ---- what these tests would notice -------------------------------------------------------------


def control(draft_noise=1.0, **options):
    """How many of several searches are right."""
    right = 0
    for seed in range(6):
        target, draft = tables(14, draft_noise, seed=seed)
        settings = Settings(4, eos=(2,), max_new=9)
        found = found_by(target, draft, settings, gamma=4, **options)
        right += same(found, searched(target, settings))
    return right


@pytest.fixture
def by_the_reference(monkeypatch):
    """Let the reference decide levels: its parts can be replaced."""
    monkeypatch.setattr(beam_generation.ops, "beam_verify", reference.beam_verify)
    return monkeypatch


def test_control_all_is_right(by_the_reference):
    assert control() == 6


def test_control_bound_ignored(by_the_reference):
    by_the_reference.setattr(reference_beams, "is_decided", lambda *_: True)
    assert control() < 3


def test_control_order_of_ties_reversed(by_the_reference):
    def last_first(table):
        flat = table.flatten()
        return len(flat) - 1 - flat.flip(0).sort(descending=True, stable=True).indices

    by_the_reference.setattr(reference_beams, "in_order", last_first)
    uniform, settings = TableModel(torch.zeros(14, 14, 14)), Settings(4, eos=(2,), max_new=6)
    assert found_by(uniform, uniform, settings) != searched(uniform, settings)


def test_control_scores_of_the_draft(monkeypatch):
    """Live beams go on with the draft's scores in place of the target's."""
    propose = beam_generation.BeamDrafter.propose
    verify = beam_generation.ops.beam_verify
    seen = {}

    def watched(self, live, gamma, go_on):
        tree = propose(self, live, gamma, go_on)
        seen["scores"] = self._best(torch.zeros(len(live.scores), 4, 14), live.scores)[0][:, :4]
        return tree

    def replaced(rows, scores, tokens, parents, gamma, **options):
        if gamma:  # else nothing was drafted, and the draft's scores are of the round before
            scores = torch.where(scores > -torch.inf, seen["scores"], scores)
        return verify(rows, scores, tokens, parents, gamma, **options)

    monkeypatch.setattr(beam_generation.BeamDrafter, "propose", watched)
    monkeypatch.setattr(beam_generation.ops, "beam_verify", replaced)
    assert control() == 0


def test_control_a_beam_sees_anothers_text(monkeypatch):
    """The table gives NaN where a beam's node does not see its own text."""
    keep = beam_generation.BeamSlots.keep

    def swapped(self, nodes, alive):
        keep(self, nodes.flip(1), alive)

    monkeypatch.setattr(beam_generation.BeamSlots, "keep", swapped)
    assert control(0.0) == 0
