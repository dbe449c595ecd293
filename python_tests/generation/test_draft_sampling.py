"""Sampling parameters of the draft's own: they change what is accepted, never the law."""

from __future__ import annotations

import pytest
import torch
from generate_models import tables
from test_generate_law import ALPHA, DRAWS, PROMPT, chi_square, p_value
from test_generate_tree import ConstantModel

import specdec_ext
from specdec_ext.decoding import HierarchicalDrafter, LookupDrafter, StaticTree
from specdec_ext.decoding.sampling_laws import SamplingLaws

OWN = [
    {"draft_temperature": 0.0},
    {"draft_temperature": 0.4},
    {"draft_temperature": 2.5, "draft_top_k": 3},
    {"draft_top_p": 0.5},
    {"draft_min_p": 0.3, "draft_temperature": 1.0},
]
names = lambda options: "-".join(f"{key[6:]}{value}" for key, value in options.items())  # noqa: E731


def run(target, draft, **options):
    prompts = torch.tensor([PROMPT, PROMPT[::-1]])
    given = {"max_new_tokens": 12, "seeds": 3, "eos_token_id": (), "gamma": 2, **options}
    return specdec_ext.generate(target, draft, prompts, **given)


@pytest.mark.parametrize("own", OWN, ids=names)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_law_is_the_targets(rule, own):
    target, draft = tables(4)
    assert p_value(target, draft, 0.8, rule=rule, gamma=2, **own) > ALPHA


def tree_p_value(own):
    """Of three tokens that a tree's verification emits, at temperature 0.8."""
    p, q = [0.1, 0.2, 0.4, 0.3], [0.5, 0.3, 0.1, 0.1]
    prompts = torch.zeros(DRAWS, 2, dtype=torch.int64)
    given = {"temperature": 0.8, "tree": StaticTree((-1, 0, 0, 1, 2)), "seeds": 5}
    found = specdec_ext.generate(
        ConstantModel(p), ConstantModel(q), prompts, max_new_tokens=3, **given, **own
    )
    law = torch.tensor(p, dtype=torch.float64).pow(1 / 0.8)
    law = law / law.sum()
    joint = (law[:, None, None] * law[:, None] * law).flatten()
    codes = (found.sequences[:, 2:] * torch.tensor([16, 4, 1])).sum(1)
    return chi_square(torch.bincount(codes, minlength=64), joint)


@pytest.mark.parametrize("own", OWN[1:3], ids=names)
def test_the_law_is_the_targets_with_trees_and_hierarchies(own):
    assert tree_p_value(own) > ALPHA
    target, draft = tables(4)
    _, small = tables(4, seed=1)
    drafter = HierarchicalDrafter(draft, small, gamma=1)
    assert p_value(target, drafter, 0.8, gamma=2, **own) > ALPHA


def test_control_verification_that_takes_the_targets_parameters_for_the_drafts(monkeypatch):
    target, draft = tables(4)
    monkeypatch.setattr(SamplingLaws, "compared", lambda laws, logits: dict(laws.target))
    assert p_value(target, draft, 0.8, gamma=2, **OWN[1]) < ALPHA
    assert tree_p_value(OWN[1]) < ALPHA


def test_the_drafts_own_law_is_what_is_measured():
    """Alpha is the mean of sum min(p, q) with q under the draft's parameters."""
    target, draft = tables(4)
    found = {}
    for temperature in (0.0, 0.5, 1.0, 3.0):
        own = {"draft_temperature": temperature}
        _, statistics = run(target, target, temperature=1.0, measure_alpha=True, **own)
        found[temperature] = statistics.alpha
    assert found[1.0] == pytest.approx(1.0, abs=1e-6)  # the same model, the same law
    assert all(found[t] < 0.99 for t in (0.0, 0.5, 3.0)), found


def test_what_is_given_as_it_is_anyway_changes_nothing():
    target, draft = tables(4)
    law = {"temperature": 0.7, "top_k": 3, "top_p": 0.95, "min_p": 0.01}
    same = {f"draft_{name}": value for name, value in law.items()}
    plain, given = run(target, draft, **law), run(target, draft, **law, **same)
    assert torch.equal(plain.sequences, given.sequences)
    assert plain.statistics.accepted == given.statistics.accepted > 0


def test_a_filter_may_be_off_for_the_draft_alone():
    """By its own words, off: not as the target's is."""
    target, draft = tables(4)
    cut, off = (
        run(target, draft, temperature=1.0, top_k=1, measure_alpha=True, **own)[1].alpha
        for own in ({}, {"draft_top_k": 0})
    )
    assert off != cut  # one token of each law, or all of the draft's
    each = run(target, draft, temperature=1.0, top_k=1, draft_top_k=[0, 1], max_new_tokens=9)
    assert each.sequences.shape == (2, 11)


def test_greedy_texts_do_not_depend_on_how_the_draft_is_sampled():
    target, draft = tables(4)
    plain = run(target, None).sequences
    for own in OWN:
        assert torch.equal(run(target, draft, **own).sequences, plain), own
    models, tree = (
        (ConstantModel([0.2, 0.5, 0.3]), ConstantModel([0.6, 0.1, 0.3])),
        (-1, 0, 0, 1, 2),
    )
    found = run(*models, tree=StaticTree(tree), draft_temperature=1.0).sequences
    assert torch.equal(found, run(models[0], None).sequences)


def test_drafts_of_a_greedy_target_are_drawn_where_that_is_asked_for():
    """From seeds, so that other seeds propose other tokens."""
    target, draft = tables(4)
    accepted = {
        run(target, draft, draft_temperature=1.0, seeds=seed)[1].accepted for seed in range(12)
    }
    assert len(accepted) > 1
    assert len({run(target, draft, seeds=seed)[1].accepted for seed in range(12)}) == 1


def test_coupled_texts_do_not_depend_on_how_the_draft_is_sampled():
    target, draft = tables(4)
    plain = run(target, None, temperature=0.9, rule="coupled").sequences
    for own in OWN[1:]:
        found = run(target, draft, temperature=0.9, rule="coupled", **own)
        assert torch.equal(found.sequences, plain), own


def test_drafters_without_a_law_sample_nothing():
    target, _ = tables(4)
    plain, given = (
        run(target, LookupDrafter(), temperature=0.9, **own).sequences for own in ({}, OWN[1])
    )
    assert torch.equal(plain, given)


@pytest.mark.parametrize(
    "own, said",
    [
        ({"draft_temperature": -1.0}, "draft_temperature is out of range for request 0: -1.0"),
        ({"draft_top_p": [0.5]}, "draft_top_p"),
        ({"draft_min_p": 1.5}, "draft_min_p is out of range"),
    ],
)
def test_errors_name_the_drafts_parameter(own, said):
    target, draft = tables(4)
    with pytest.raises(ValueError, match=said):
        run(target, draft, **own)


def test_kinds_are_checked():
    target, draft = tables(4)
    with pytest.raises(TypeError, match="draft_top_k"):
        run(target, draft, draft_top_k="3")
