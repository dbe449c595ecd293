"""Drafts that are hardly ever accepted: the warning, and where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
from generate_models import TableModel, tables

from specdec_ext.decoding import (
    LookupDrafter,
    RenewalRule,
    StaticTree,
    Statistics,
    generate,
    stream,
)
from specdec_ext.decoding.collapse import ENOUGH_TESTED, LEAST_ACCEPTED, warn_where_drafts_fail

IDS = torch.tensor([[1, 2, 3]])


def opposed():
    """Return a target, and a draft that likes best what the target likes least."""
    target, _ = tables(11)
    return target, TableModel(-target.table)


@pytest.fixture
def said(recwarn):
    """Give what the warnings said, and whose lines they named."""
    return lambda: [(str(w.message), w.filename) for w in recwarn]


@pytest.mark.parametrize("tree", [None, StaticTree.from_widths((2, 1))], ids=["chain", "tree"])
def test_once_a_call_with_numbers_and_remedy(said, tree):
    _, statistics = generate(*opposed(), IDS, max_new_tokens=90, tree=tree)
    ((text, file),) = said()
    tested = statistics.accepted + statistics.rejected
    assert f"accepted {statistics.accepted} of {tested} draft tokens" in text
    assert "tokenizer" in text and "RenewalRule" in text and file == __file__


def test_stream_names_its_reader(said):
    assert sum(len(burst.tokens) for burst in stream(*opposed(), IDS, max_new_tokens=90)) == 90
    ((_, file),) = said()
    assert file == __file__


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": ENOUGH_TESTED - 1},  # too little to say
        {"max_new_tokens": 300, "gamma": RenewalRule()},  # which stops drafting
        {"max_new_tokens": 90, "gamma": 0},
    ],
    ids=["short", "renewal", "none"],
)
def test_nothing_to_say(said, options):
    _, statistics = generate(*opposed(), IDS, **options)
    assert statistics.accepted == 0 and not said()


def test_a_drafter_that_is_right_or_seldom_there(said):
    target, draft = tables(11, noise=0.1)
    generate(target, draft, IDS, max_new_tokens=90)
    generate(target, LookupDrafter(min_match=5), IDS, max_new_tokens=90, temperature=1.0, seeds=0)
    assert not said()


@pytest.mark.parametrize("tested", [ENOUGH_TESTED - 1, ENOUGH_TESTED, 1000])
def test_the_threshold(tested):
    """A share at the threshold is enough, one below it is not."""
    for accepted in range(tested // 10):
        statistics = Statistics(1, request_calls=tested, tested=[tested], passed=[accepted])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_where_drafts_fail(statistics, stacklevel=1)
        below = accepted < LEAST_ACCEPTED * tested
        assert len(found) == (below and tested >= ENOUGH_TESTED), accepted
