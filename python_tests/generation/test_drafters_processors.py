"""Logits processors in drafters: what is drawn, behind which prefix, and the law that holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generate_models import prompts, tables
from test_generate_edges import never_the_next, p_value, seldom_again
from test_generate_law import ALPHA

import specdec_ext
from specdec_ext.decoding import (
    ConfidenceStop,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    StackedDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.drafters.model import ModelDrafter

V = 5
TEXT = [0, 1, 2, 3, 4, 3, 2, 1, 0] * 3


def levels(vocabulary=V):
    """Return a medium, a small and a tiny model."""
    return [tables(vocabulary, seed=seed)[1] for seed in (1, 3, 4)]


def two():
    medium, small, _ = levels()
    return HierarchicalDrafter(medium, small, 2)


def ragged():
    """Its drafts end where the small model is unsure: requests of a batch drift apart."""
    medium, small, _ = levels()
    return HierarchicalDrafter(medium, small, ConfidenceStop(3, threshold=0.4))


def three():
    medium, small, tiny = levels()
    return HierarchicalDrafter(medium, HierarchicalDrafter(small, tiny, 1), 2)


def refill():
    medium, small, _ = levels()
    return HierarchicalDrafter(medium, small, 2, refill=True)


#: All draw each token from a processed row.
DRAW = {
    "model": lambda: ModelDrafter(levels()[0]),
    "bigram": lambda: NgramDrafter(V, 2, texts=[TEXT]),
    "uniform": lambda: UniformDrafter(V),
    "two levels": two,
    "ragged levels": ragged,
    "three levels": three,
    "refill": refill,
    "over a bigram model": lambda: HierarchicalDrafter(levels()[0], NgramDrafter(V), 2),
    "over uniform tokens": lambda: HierarchicalDrafter(levels()[0], UniformDrafter(V), 2),
}
DETERMINISTIC = {"likeliest": lambda: NgramDrafter(V, 2, texts=[TEXT], sampled=False)}
MIXED = {
    "over a stack": lambda: HierarchicalDrafter(
        levels()[0], StackedDrafter(LookupDrafter(), levels()[1], continued=True), 2
    ),
    "another vocabulary between": lambda: HierarchicalDrafter(levels(V + 2)[0], levels()[1], 2),
}


# --- the law of what is emitted -------------------------------------------------------------------


FILTERS = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, FILTERS) for name in [*DRAW, *DETERMINISTIC, *MIXED]]
    + [(name, {"rule": "token"}) for name in ("bigram", "uniform", "three levels")],
    ids=str,
)
def test_joint_law(name, options):
    """Three tokens: drafts of two, whose second row is processed behind the first token."""
    target, _ = tables(V)
    drafter = {**DRAW, **DETERMINISTIC, **MIXED}[name]()
    processors = [seldom_again, never_the_next]
    assert p_value(target, drafter, processors, 3, gamma=2, draws=800, **options) > ALPHA


class PassesRawRows(HierarchicalDrafter):
    """Draws from processed rows and passes on what the medium model said."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        if draft.logits is None:
            return draft
        raw = [self.model.table[1, 2].expand(len(positions), -1)]
        before = torch.full_like(positions, 2)
        for token in draft.tokens[:, :-1].unbind(1):
            raw.append(self.model.table[before, token.clamp(min=0)])
            before = token.clamp(min=0)
        return draft._replace(logits=torch.stack(raw, 1))


def test_control_rows_that_were_not_drawn_from():
    """One round from one text, so that the raw rows can be written down."""
    target, _ = tables(V)
    medium, small, _ = levels()
    drafter = PassesRawRows(medium, small, 2)
    processors = [seldom_again, never_the_next]
    assert p_value(target, drafter, processors, gamma=1, draws=1000) < ALPHA


# --- behind which prefix --------------------------------------------------------------------------


def decided_by_the_text(ids, scores):
    """A row that depends on nothing but the whole text, so that one wrong token shows."""
    seed = hash(tuple(ids[0].tolist())) % 2**62
    return 1.5 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))


def run(drafter, temperature=0.8, **options):
    ids, mask = prompts([1, 4, 2, 4], vocabulary=V)
    return specdec_ext.generate(
        tables(V)[0], drafter, ids, attention_mask=mask, max_new_tokens=[23, 14, 23, 5], gamma=5,
        temperature=temperature, seeds=4, eos_token_id=(), pad_token_id=0,
        logits_processor=decided_by_the_text, **options,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["block", "coupled"])
@pytest.mark.parametrize("name", [*DRAW, *DETERMINISTIC])
def test_every_row_is_processed_behind_its_own_prefix(name, rule):
    """Then target and drafter have the same rows, to the bit, and no token is ever rejected."""
    drafter = {**DRAW, **DETERMINISTIC}[name]()
    options = {"temperature": 0.0} if name in DETERMINISTIC else {"top_k": 3, "rule": rule}
    sequences, statistics = run(drafter, **options)
    assert statistics.accepted_of_tested == 1.0 and statistics.accepted > 40
    if hasattr(drafter, "calls_by_level") and name not in ("ragged levels", "three levels"):
        bursts = 4 if name == "refill" else 2  # three tokens, then one by one; or three a burst
        assert drafter.calls_by_level[0] <= bursts * statistics.rounds  # it rejects nothing either
    plain = run(None, **options).sequences
    assert name not in DETERMINISTIC or torch.equal(sequences, plain)


def forgetful(drafter, forget):
    """Have a drafter process its rows behind less than their prefix."""
    start = drafter.start

    def wrong(requests):
        def process(logits, drafted, emitted=None):
            return requests.process(logits, *forget(drafted, emitted))

        start(replace(requests, process=process))

    drafter.start = wrong
    return drafter


@pytest.mark.parametrize("name", [*DRAW, *DETERMINISTIC])
def test_control_rows_processed_behind_a_wrong_prefix(name):
    """What was drafted is forgotten; in a hierarchy, what its last rounds emitted."""
    drafter = {**DRAW, **DETERMINISTIC}[name]()

    def forget(drafted, emitted):
        return (drafted,) if isinstance(drafter, HierarchicalDrafter) else (drafted[:, :0],)

    options = {"temperature": 0.0} if name in DETERMINISTIC else {"top_k": 3}
    assert run(forgetful(drafter, forget), **options).statistics.accepted_of_tested < 0.9


def test_what_inner_levels_draft_is_accepted_by_the_level_above():
    """Control of the calls: with a wrong prefix below, the medium model rejects."""
    calls = []
    for shorter in (0, 1):
        drafter = two()
        inner = forgetful(drafter.draft, lambda drafted, _, n=shorter: (drafted[:, n:],))
        assert inner is drafter.draft
        statistics = run(drafter, top_k=3).statistics
        assert statistics.accepted_of_tested == 1.0  # whatever is below
        calls.append(drafter.calls_by_level[0] / statistics.rounds)
    assert calls[0] <= 2 < 2.2 < calls[1]


# --- what is not proposed -------------------------------------------------------------------------


def only_even(ids, scores):
    scores[:, 1::2] = -torch.inf
    return scores


def proposals(drafter, processed, **options):
    """Generate under a mask; return what was proposed to the target, and the statistics."""
    seen = set()
    start, propose = drafter.start, drafter.propose

    def started(requests):
        start(requests if processed else replace(requests, process=None))

    def recorded(*args, **kwargs):
        draft = propose(*args, **kwargs)
        seen.update(draft.tokens.flatten().tolist())
        return draft

    drafter.start, drafter.propose = started, recorded
    _, statistics = specdec_ext.generate(
        tables(V)[0], drafter, torch.tensor([[1, 2]] * 20), max_new_tokens=30, seeds=1, gamma=3,
        eos_token_id=(), logits_processor=only_even, **options,
    )  # fmt: skip
    return seen - {-1}, statistics


@pytest.mark.parametrize("temperature", [1.0, [0.0, 0.7] * 10, 0.0], ids=["one", "mixed", "zero"])
@pytest.mark.parametrize("name", [*DRAW, *DETERMINISTIC])
def test_banned_tokens_are_not_proposed(name, temperature):
    proposed, _ = proposals({**DRAW, **DETERMINISTIC}[name](), True, temperature=temperature)
    assert proposed <= {0, 2, 4} and len(proposed) > 1


@pytest.mark.parametrize("name", [*DRAW, *DETERMINISTIC])
def test_more_is_accepted_than_of_rows_as_they_are(name):
    make = {**DRAW, **DETERMINISTIC}[name]
    _, processed = proposals(make(), True, temperature=1.0)
    proposed, raw = proposals(make(), False, temperature=1.0)
    assert proposed & {1, 3}
    assert processed.accepted_of_tested > raw.accepted_of_tested + 0.05


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_uniform_tokens_under_filters_and_processors(rule):
    """The rows are constant no longer: filters bind them, in the draw as in verification."""
    target, _ = tables(V)
    drafter = UniformDrafter(V)

    def bend(ids, scores):  # to one law, whatever the model says
        return torch.tensor([[0.0, 1.0, 2.0, 3.0, -torch.inf]])

    _, statistics = specdec_ext.generate(
        target, drafter, torch.tensor([[1]] * 20), max_new_tokens=12, gamma=3, seeds=1, rule=rule,
        temperature=[0.5, 0.9] * 10, top_k=3, top_p=0.9, logits_processor=bend, eos_token_id=(),
    )  # fmt: skip
    assert statistics.accepted_of_tested == 1.0
