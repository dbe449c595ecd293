"""`generate(static_cache=True)`: the same tokens from caches whose size never changes."""

from __future__ import annotations

import pytest
import torch
from generate_models import ARCHITECTURES, pair, prompts, tables
from test_generate_models import RAGGED, greedy

import specdec_ext
from specdec_ext.decoding import StaticTree, probe
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.drafters.early_exit import first_layers
from specdec_ext.decoding.drafters.hierarchy import HierarchicalDrafter
from specdec_ext.decoding.layers import FixedLayer

NEW = 20


def watch_shapes(monkeypatch) -> set[tuple[int, int]]:
    """Return a set that every call adds the widths of its keys and of its mask to.

    Calls that ask a model what it understands are left out.
    """
    shapes = set()
    asking = []
    call, remembered = CachedModel._call, probe._remembered

    def watched(self, tokens, **kwargs):
        logits = call(self, tokens, **kwargs)
        if not asking:
            keys = self.cache.layers[0].keys
            shapes.add((keys.shape[2], kwargs["attention_mask"].shape[-1]))
        return logits

    def ask(*args, **options):
        asking.append(args)
        try:
            return remembered(*args, **options)
        finally:
            asking.pop()

    monkeypatch.setattr(CachedModel, "_call", watched)
    monkeypatch.setattr(probe, "_remembered", ask)
    return shapes


@pytest.mark.parametrize("lengths", [[7], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_plain_generate(monkeypatch, architecture, lengths):
    target, draft = pair(architecture)
    ids, mask = prompts(lengths)
    shapes = watch_shapes(monkeypatch)
    sequences, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4, static_cache=True
    )
    assert torch.equal(sequences, greedy(target, ids, mask, NEW))
    assert 0 < statistics.accepted_of_tested < 1
    slots = (7 + NEW + 4 + 1) * 4 // 3
    assert shapes == {(slots, slots)}


@pytest.mark.parametrize("drafting", ["none", "hierarchy", "tree"])
def test_any_drafter_and_requests_that_end_at_different_times(monkeypatch, drafting):
    target, medium = pair(noise=0.02)
    limits = [20, 5, 12, 9, 17]
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": limits, "pad_token_id": 0}
    draft = None
    if drafting == "hierarchy":
        draft = HierarchicalDrafter(medium, first_layers(target, 1), 2)
    elif drafting == "tree":
        draft = medium
        options["tree"] = StaticTree.from_widths((2, 2), "top_k")
    dense = specdec_ext.generate(target, draft, ids, **options).sequences
    shapes = watch_shapes(monkeypatch)
    static = specdec_ext.generate(target, draft, ids, **options, static_cache=True).sequences
    assert torch.equal(static, dense)
    assert len(shapes) == 1


def test_a_cache_that_is_too_small_grows(monkeypatch):
    target, draft = pair()
    ids, mask = prompts(RAGGED)
    monkeypatch.setattr(CachedModel.__init__, "__kwdefaults__", {
        **CachedModel.__init__.__kwdefaults__, "compact_above": 1.0,
    })  # fmt: skip
    shapes = watch_shapes(monkeypatch)
    sequences, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=50, gamma=4, static_cache=True
    )
    assert torch.equal(sequences, greedy(target, ids, mask, 50))
    slots = (7 + 50 + 4 + 1) * 4 // 3
    assert shapes == {(slots, slots), (2 * slots, 2 * slots)}


@pytest.mark.thorough
def test_a_compiled_model_is_compiled_once_for_every_number_of_new_tokens():
    target, draft = pair()
    target = first_layers(target, 1)
    ids, mask = prompts([5, 3])
    plain = greedy(target, ids, mask, 12)
    options = {"attention_mask": mask, "max_new_tokens": 12, "gamma": 3, "static_cache": True}
    specdec_ext.generate(target, draft, ids, **options)  # which also asks what they understand
    calls, graphs = set(), []
    eager = target.forward

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(eager, backend=backend, dynamic=False)

    def forward(**kwargs):
        calls.add((*kwargs["input_ids"].shape, "logits_to_keep" in kwargs))  # of the prompt alone
        return compiled(**kwargs)

    target.forward = forward
    sequences, statistics = specdec_ext.generate(target, draft, ids, **options)
    assert torch.equal(sequences, plain)
    assert len(graphs) == len(calls) < statistics.rounds


def test_control_slots_counted_wrong(monkeypatch):
    """A crop that does not move the number of slots shows."""
    target, draft = pair()
    ids, mask = prompts(RAGGED)
    monkeypatch.setattr(FixedLayer, "crop", lambda self, tokens_to_remove: None)
    try:
        sequences, _ = specdec_ext.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4, static_cache=True
        )
    except IndexError:
        return
    assert not torch.equal(sequences, greedy(target, ids, mask, NEW))


def test_a_model_whose_layers_nobody_knows_is_refused():
    target, draft = tables(4)
    with pytest.raises(ValueError, match="static cache needs a .* causal .*, got TableModel"):
        specdec_ext.generate(target, draft, torch.tensor([[1, 2]]), static_cache=True)
