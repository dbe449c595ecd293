"""What `generate` says of arguments about beams, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from generate_models import TableModel, tables

import specdec_ext
from specdec_ext.decoding import ConfidenceStop, GenerationError, LookupDrafter, StaticTree
from specdec_ext.hf import generate_fn

IDS = torch.tensor([[1, 2, 3], [3, 2, 1]])
TREE = StaticTree.from_widths((2, 2))


class Counting:
    """A processor that keeps state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores - self.calls


REFUSED = [
    ({"num_beams": 0}, ValueError, r"num_beams must be in \[1, 64\], got 0"),
    ({"num_beams": 65}, ValueError, r"num_beams must be in \[1, 64\], got 65"),
    ({"num_beams": 2.0}, TypeError, "num_beams must be an int, got float 2.0"),
    ({"draft_beams": 1}, ValueError, "draft_beams must be at least 2, got 1"),
    ({"num_return_sequences": 3}, ValueError, "at most num_beams, 2, got 3"),
    ({"num_beams": 1, "num_return_sequences": 2}, ValueError, "must be 1 where decoding is greedy"),
    ({"num_beams": 1, "length_penalty": 2.0}, ValueError, "num_beams must be above 1"),
    ({"length_penalty": math.nan}, ValueError, "length_penalty must be"),
    ({"length_penalty": 2000.0}, ValueError, "length_penalty must be"),
    ({"early_stopping": "sometimes"}, TypeError, "early_stopping .* must be a bool, got str"),
    ({"early_stopping": 1}, TypeError, "early_stopping .* must be a bool, got int"),
    ({"temperature": 1.0}, ValueError, "temperature must be 0 in a beam search.*got 1.0"),
    ({"temperature": [0.0, 0.5]}, ValueError, "temperature must be 0 in a beam search.*got 0.5"),
    ({"top_k": 5}, ValueError, "top_k must be left out of a beam search"),
    ({"tree": TREE}, ValueError, "tree must be left out of a beam search"),
    ({"rule": "block"}, ValueError, "rule must be left out of a beam search"),
    ({"static_cache": True}, ValueError, "static_cache must be left out of a beam search"),
    ({"stop_sequences": [[1, 2]]}, ValueError, "stop_sequences must be left out"),
    ({"stopping_criteria": lambda ids, _: False}, ValueError, "stopping_criteria must be left out"),
    ({"gamma": 600}, ValueError, r"must be at most 1024, got 1202 with a gamma of up to 600"),
    ({"gamma": ConfidenceStop(512)}, ValueError, "got 1026 with a gamma of up to 512"),
    ({"gamma": ConfidenceStop}, TypeError, "gamma must be an int or a GammaPolicy, got"),
    ({"gamma": -1}, ValueError, "gamma must be in .*got -1"),
    ({"draft": LookupDrafter()}, TypeError, "draft must be a causal language model.*LookupDrafter"),
    ({"on_round": print}, ValueError, "no tokens to show before its end"),
    ({"progress": True}, ValueError, "no tokens to show before its end"),
    ({"logits_processor": Counting()}, ValueError, "Counting must be a function of its arguments"),
]  # fmt: skip


@pytest.mark.parametrize(
    "options, error, message", REFUSED, ids=[list(options)[-1] for options, *_ in REFUSED]
)
def test_refused(options, error, message):
    target, draft = tables(9)
    given = {"target": target, "draft": draft, "input_ids": IDS, "num_beams": 2, **options}
    with pytest.raises(error, match=message):
        specdec_ext.generate(**given, max_new_tokens=4)


def test_a_stream_has_no_beams():
    with pytest.raises(ValueError, match="num_beams must be 1 .* got 2 and None"):
        specdec_ext.stream(*tables(9), IDS, num_beams=2)


def test_what_comes_back():
    """Two values, as ever, and the scores beside them."""
    target, draft = tables(9)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5, "gamma": 2}
    result = specdec_ext.generate(target, draft, IDS.int(), **options)
    sequences, statistics = result
    assert sequences.shape == (4, 8) and sequences.dtype == torch.int32
    assert result.scores.shape == (4,) and result.scores.dtype == torch.float32
    assert sequences[::2, :3].tolist() == IDS.tolist()
    assert statistics.emitted == 10 and statistics.new_tokens == [5, 5]
    none = specdec_ext.generate(target, draft, IDS[:0], **options)
    assert none.sequences.shape == (0, 3) and none.scores.shape == (0,)
    prompts = specdec_ext.generate(target, draft, IDS, **{**options, "max_new_tokens": 0})
    assert prompts.sequences.tolist() == IDS.repeat_interleave(2, 0).tolist()
    assert prompts.scores.tolist() == [-1e9] * 4


def test_a_target_without_a_law():
    """What has no law for the best beam ends the search, with the request's number."""
    target, draft = tables(9)
    broken = TableModel(target.table.clone())
    broken.table[:, 5] = math.nan
    with pytest.raises(GenerationError, match="request 0: .* levels of the beam search") as found:
        specdec_ext.generate(broken, draft, IDS, num_beams=8, max_new_tokens=6, gamma=2)
    assert found.value.requests == [0, 1]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_draft_without_a_law_costs_speed_alone(broken):
    target, draft = tables(9)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6, "gamma": 3}
    expected = specdec_ext.generate(target, None, IDS, **options)
    draft.table[:, 2:6] = broken
    found = specdec_ext.generate(target, draft, IDS, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.scores, expected.scores)


def test_transformers_is_refused_what_beams_have_not():
    """`generate_fn` says it in the words of `generate`."""
    from generate_models import pair

    target, draft = pair()
    target.generation_config.pad_token_id = 0
    with pytest.raises(ValueError, match="do_sample=True with num_beams=2"):
        target.generate(
            IDS, num_beams=2, do_sample=True, custom_generate=generate_fn, draft_model=draft
        )
