"""`group_queries`: rows against eager attention, what it leaves to transformers, the loop."""

from __future__ import annotations

import copy

import pytest
import torch
from generate_models import pair, prompts
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations import sdpa_attention

import specdec_ext
from specdec_ext.decoding import StaticTree, group_queries, grouped_queries

NEW = 12
TREE = [-1, 0, 0, 1, 1, 2]


@pytest.fixture
def model():
    """A model whose two heads of keys and values serve two heads of queries each."""
    return pair("llama")[0].float()


def logits_behind_a_cache(model, tokens: int, length: int = 7, rows: int = 2) -> torch.Tensor:
    """The logits of ``tokens`` tokens behind ``length`` others, the first row padded by 2."""
    torch.manual_seed(1)
    ids = torch.randint(0, 60, (rows, length + tokens))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for part in (slice(0, length), slice(length, None)):
            found = model(
                ids[:, part], attention_mask=mask[:, : part.stop], use_cache=True, cache=cache,
                position_ids=positions[:, part],
            )  # fmt: skip
    return found.logits


@pytest.fixture
def attended(monkeypatch):
    """Shapes of the keys that torch's attention gets from the grouped implementation."""
    seen = []
    kernel = grouped_queries.scaled_dot_product_attention

    def watched(query, key, value, **kwargs):
        seen.append((tuple(query.shape), tuple(key.shape)))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(grouped_queries, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma3_alternating", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_rows_are_those_of_eager_attention(family, tokens):
    model = pair(family)[0].float()
    group_queries(model)
    found = logits_behind_a_cache(model, tokens)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, logits_behind_a_cache(model, tokens), rtol=1e-4, atol=1e-4)


def test_keys_are_not_repeated(model, attended):
    group_queries(model)
    logits_behind_a_cache(model, 3)
    layers, size = model.config.num_hidden_layers, model.config.head_dim
    expected = ((2, 2, 2 * 3, size), (2, 2, 10, size))
    assert attended.count(expected) == layers  # of the call behind the cache


def test_long_calls_and_prompts_are_transformers(model, attended):
    group_queries(model)
    with torch.no_grad():
        model(torch.arange(20)[None])  # causal by nature, without a mask
    assert not attended
    logits_behind_a_cache(model, 64, length=1)
    assert len(attended) == 2 * model.config.num_hidden_layers
    attended.clear()
    logits_behind_a_cache(model, 65, length=1)
    assert len(attended) == model.config.num_hidden_layers  # of the one token before


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias", "dropout"])
def test_what_it_does_not_know_is_transformers(option, attended, monkeypatch):
    asked = []
    monkeypatch.setattr(
        sdpa_attention, "sdpa_attention_forward", lambda *given, **options: asked.append(options)
    )
    name = grouped_queries._registered()
    query, keys = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    attention = AttentionInterface()[name]
    attention(nn.Identity(), query, keys, keys, None)
    assert len(attended) == 1 and not asked
    attention(nn.Identity(), query, keys, keys, None, **{option: 0.5})
    assert len(attended) == 1 and asked[0][option] == 0.5


@pytest.mark.parametrize("tree", [None, StaticTree(TREE)], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [[6], [6, 3, 5]], ids=["one", "ragged"])
def test_tokens_of_the_loop(tree, lengths, attended):
    target, draft = (model.float() for model in pair(noise=0.02))
    grouped = copy.deepcopy(target)
    group_queries(grouped)
    ids, mask = prompts(lengths)
    shape = {"gamma": 3} if tree is None else {"tree": tree}
    options = {"attention_mask": mask, "max_new_tokens": NEW, "temperature": 0.8, "seeds": 3}
    expected = specdec_ext.generate(target, draft, ids, **shape, **options)
    assert not attended
    found = specdec_ext.generate(grouped, draft, ids, **shape, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert any(query[2] > 2 for query, _ in attended)  # calls on several tokens, too


def test_refusals(model):
    group_queries(model)
    group_queries(model)  # twice is once
    assert model.config._attn_implementation == grouped_queries.NAME
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="group_queries: attention must be 'sdpa', got 'eager'"):
        group_queries(model)
    with pytest.raises(TypeError, match="group_queries: model must be a model of transformers"):
        group_queries(nn.Linear(2, 2))
