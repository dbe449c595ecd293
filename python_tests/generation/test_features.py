"""Hidden states that drafters are handed: those of the accepted path, from no call of their own."""

from __future__ import annotations

import functools

import pytest
import torch
from generate_models import FLOAT32_ONLY, pair, prompts, tables
from recurrent_models import small
from test_encoder_decoder import encoded, inputs_of, models
from test_probe import build

import specdec_ext
from specdec_ext.decoding import HierarchicalDrafter, LookupDrafter, StackedDrafter, StaticTree
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafters.tree import TreeDrafter
from specdec_ext.decoding.tree_generation import TreeGeneration
from specdec_ext.decoding.trees import TreeDraft

NEW = 14
RAGGED = [6, 3, 1, 5]
LIMITS = [NEW, NEW - 5, NEW - 1, NEW - 3]
TREE = StaticTree.from_widths((3, 2, 1))
EXACT = 1e-9  # of float64 models, whose states are about 1 apart


class Recorder:
    """Remembers the hidden states that it is handed, and the tokens that they belong to."""

    reads_features = True

    def start(self, requests):
        ids, mask = requests.input_ids, requests.attention_mask
        mask = torch.ones_like(ids) if mask is None else mask
        self.rows = list(range(len(ids)))
        self.texts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        self.states = [[] for _ in self.rows]
        if requests.features is not None:
            assert requests.features.shape[:2] == (len(ids), ids.shape[1] - 1)
            self.states = [
                [row[real[:-1].bool()]] for row, real in zip(requests.features, mask, strict=True)
            ]
        super().start(requests)

    def take_features(self, features, tokens, gained):
        assert torch.equal(gained.device, torch.tensor(gained.host))
        for i, b in enumerate(self.rows):
            self.states[b].append(features[i, : gained.host[i]])
            self.texts[b] += tokens[i, : gained.host[i]].tolist()

    def select(self, rows, indices):
        self.rows = [self.rows[i] for i in indices]
        super().select(rows, indices)


class RecordingDrafter(Recorder, ModelDrafter):
    """A model that drafts chains, and records."""


class RecordingTreeDrafter(Recorder, TreeDrafter):
    """A model that drafts trees, and records."""


def recorder(draft, tree):
    """Return a drafter that records, and what `generate` is told of trees."""
    if tree:
        return RecordingTreeDrafter(draft), {"tree": TREE}
    return RecordingDrafter(draft), {"gamma": 3}


def check_states(recorded, found, ids, mask, recompute, exact=EXACT):
    """All states are those of one pass over the whole text of each row, none is missing."""
    assert len({len(row) for row in recorded.states}) > 1 or len(recorded.states) == 1
    for b, states in enumerate(recorded.states):
        text = ids[b, mask[b].bool()].tolist() + found[b, ids.shape[1] :].tolist()
        known = recorded.texts[b]
        assert known == text[: len(known)] and len(known) > mask[b].sum()
        handed = torch.cat(states)
        whole = recompute(b, torch.tensor([known]))[0]
        assert handed.shape == (len(known) - 1, whole.shape[1])  # none for the last token
        assert (handed - whole[:-1]).abs().max() < exact
        assert (whole[1:] - whole[:-1]).abs().amax(1).min() > 1e-3  # a row beside it would show


def run_causal(name, tree, static, lengths=RAGGED, exact=EXACT):
    """Generate with a recorder and hold what it was handed against the whole texts."""
    target, draft = build(name)
    recorded, options = recorder(draft, tree)
    ids, mask = prompts(lengths)
    found, statistics = specdec_ext.generate(
        target, recorded, ids, attention_mask=mask, max_new_tokens=LIMITS[: len(lengths)],
        static_cache=static, **options,
    )  # fmt: skip
    assert statistics.accepted > 0 and statistics.rejected > 0
    with torch.inference_mode():
        check_states(
            recorded, found, ids, mask,
            lambda b, text: target(input_ids=text, output_hidden_states=True).hidden_states[-1],
            exact,
        )  # fmt: skip


@pytest.mark.every("tree")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [RAGGED, [5], [1]], ids=["ragged", "one", "one token"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_states_are_those_of_the_accepted_path(name, lengths, tree, static):
    run_causal(name, tree, static, lengths)


@pytest.mark.parametrize("name", ["bart", "mistral_window", "bloom_alibi"])
def test_states_of_rows_that_cannot_share_a_cache_as_they_are(name):
    """Windows and ALiBi count slots: holes are closed at once, or rows run one by one."""
    run_causal(name, False, False, exact=1e-4 if name in FLOAT32_ONLY else EXACT)


PROMPTS = torch.tensor([[0, 1, 9], [0, 0, 1], [1, 30, 31]])  # of the decoder
REAL = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("prompt", [PROMPTS, PROMPTS[:, :1] * 0 + 1], ids=["ragged", "start token"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_states_of_an_encoder_decoder(name, prompt, tree):
    target, draft = models(name)
    inputs = inputs_of(name)
    recorded, options = recorder(encoded(draft, **inputs), tree)
    mask = REAL[:, : prompt.shape[1]] if prompt.shape[1] > 1 else torch.ones_like(prompt)
    found, _ = specdec_ext.generate(
        encoded(target, **inputs), recorded, prompt, attention_mask=mask,
        max_new_tokens=LIMITS[:3], eos_token_id=(), **options,
    )  # fmt: skip

    def recompute(b, text):
        row = {key: value[b : b + 1] for key, value in inputs.items()}
        return target(
            **row, decoder_input_ids=text, output_hidden_states=True
        ).decoder_hidden_states[-1]

    with torch.inference_mode():
        check_states(recorded, found, prompt, mask, recompute)


def test_states_are_what_the_head_turned_into_logits():
    target, draft = pair()
    recorded, options = recorder(draft, False)
    ids, _ = prompts([5])
    specdec_ext.generate(target, recorded, ids, max_new_tokens=NEW, **options)
    states = torch.cat(recorded.states[0])
    logits = target(input_ids=torch.tensor([recorded.texts[0]])).logits[0, :-1]
    assert (target.get_output_embeddings()(states) - logits).abs().max() < EXACT


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_control_states_of_the_row_beside(monkeypatch, tree):
    """Nodes or draft tokens that were rejected, in place of the accepted ones."""
    call = CachedModel._call

    def shifted(self, *args, **kwargs):
        logits = call(self, *args, **kwargs)
        if self.features is not None and self.features.shape[1] > 1:
            self.features = self.features.roll(1, 1)
        return logits

    run_causal("llama", tree, False)  # what the model can do is known from here on
    monkeypatch.setattr(CachedModel, "_call", shifted)
    with pytest.raises(AssertionError):
        run_causal("llama", tree, False)


def test_control_states_of_the_nodes_in_their_order(monkeypatch):
    """The first nodes of a tree, whichever were accepted."""

    def in_order(self, tokens, path, accepted, bursts, original=TreeGeneration._commit_path):
        nodes = self.target.features
        take = self.drafter.take_features
        self.drafter.take_features = lambda features, tokens, gained: take(
            nodes[: len(features), : features.shape[1]], tokens, gained
        )
        original(self, tokens, path, accepted, bursts)
        self.drafter.take_features = take

    monkeypatch.setattr(TreeGeneration, "_commit_path", in_order)
    with pytest.raises(AssertionError):
        run_causal("llama", True, False, [5])


# ---- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_no_second_pass_of_the_target(name, tree, monkeypatch):
    """The target runs as many tokens as for a drafter that reads no states, in the same rounds.

    States of the prompts must be there before the first draft: so those do not ride on its round.
    """
    if name == "llama":
        target, draft = pair()
        ids, mask = prompts(RAGGED)
        inner = target
        options = {"attention_mask": mask, "max_new_tokens": LIMITS}
    else:
        models_of, inputs = models(name), inputs_of(name)
        inner = models_of[0]
        target, draft = (encoded(model, **inputs) for model in models_of)
        ids, options = torch.ones(3, 1, dtype=torch.int64), {"max_new_tokens": LIMITS[:3]}
    head, kind, calls = inner.get_output_embeddings(), type(inner), []

    @functools.wraps(kind.forward)
    def counting(self, *args, forward=kind.forward, **kwargs):
        if self.get_output_embeddings() is head:
            tokens = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
            calls.append((tuple(tokens.shape), kwargs.get("output_hidden_states", False)))
        return forward(self, *args, **kwargs)

    recorded, more = recorder(draft, tree)
    silent = TreeDrafter(draft) if tree else ModelDrafter(draft)
    specdec_ext.generate(target, recorded, ids, **options, **more)  # what it can do is known
    monkeypatch.setattr(kind, "forward", counting)
    found = []
    for drafter in (recorded, silent):
        calls.clear()
        _, statistics = specdec_ext.generate(target, drafter, ids, **options, **more)
        alone = drafter is recorded and ids.shape[1] > 1
        assert len(calls) == statistics.rounds + alone
        assert {asked for _, asked in calls} == {drafter is recorded}  # asked for by none but it
        shapes = [shape for shape, _ in calls]
        if alone:
            (batch, prompt), (_, nodes), *rest = shapes
            shapes = [(batch, prompt + nodes), *rest]
        found.append(shapes)
    assert found[0] == found[1]


# ---- in other drafters, and what is refused ------------------------------------------------------


def test_a_stack_hands_states_on_whichever_drafted():
    target, draft = pair()
    recorded = RecordingDrafter(draft)
    ids, mask = prompts(RAGGED)
    found, _ = specdec_ext.generate(
        target, StackedDrafter(LookupDrafter(), recorded), ids, attention_mask=mask,
        max_new_tokens=LIMITS, gamma=3,
    )  # fmt: skip
    with torch.inference_mode():
        check_states(
            recorded, found, ids, mask,
            lambda b, text: target(input_ids=text, output_hidden_states=True).hidden_states[-1],
        )  # fmt: skip


def test_a_hierarchy_refuses_a_drafter_that_reads_states():
    target, draft = pair()
    for inner in (
        RecordingDrafter(draft),
        StackedDrafter(LookupDrafter(), RecordingDrafter(draft)),
    ):
        with pytest.raises(TypeError, match="HierarchicalDrafter: draft must be one that reads no"):
            HierarchicalDrafter(target, inner)


def test_models_without_states_are_refused():
    ids = torch.tensor([[1, 2]])
    target, draft = tables(4)
    with pytest.raises(ValueError, match="TableModel does not return the hidden states"):
        specdec_ext.generate(target, RecordingDrafter(draft), ids, max_new_tokens=2)
    mamba = small("mamba")
    with pytest.raises(ValueError, match="MambaForCausalLM keeps more .* reads none"):
        specdec_ext.generate(mamba, RecordingDrafter(mamba), ids, max_new_tokens=2)


# ---- trees from any drafter ----------------------------------------------------------------------


class FixedTree:
    """Proposes the same tokens in every round, as deterministic children; no model at all."""

    calls = 0

    def start(self, requests):
        self.tree = requests.tree

    def propose_tree(self, positions):
        batch, count = len(positions), len(self.tree.parents)
        return TreeDraft(
            torch.arange(count).expand(batch, -1),
            torch.tensor(self.tree.parents).expand(batch, -1),
            torch.zeros(batch, count, dtype=torch.int8),
            None,
            None,
        )

    def commit_path(self, tokens, path, accepted):
        assert path.shape == tokens.shape

    def select(self, rows, indices):
        pass


def test_a_tree_from_a_drafter_of_ones_own():
    target, _ = pair()
    ids, mask = prompts(RAGGED, vocabulary=12)
    tree = StaticTree.from_widths((20, 1), "top_k")
    plain, _ = specdec_ext.generate(target, None, ids, attention_mask=mask, max_new_tokens=NEW)
    found, statistics = specdec_ext.generate(
        target, FixedTree(), ids, attention_mask=mask, max_new_tokens=NEW, tree=tree
    )
    assert torch.equal(found, plain) and statistics.accepted > 0


def test_drafters_that_propose_no_trees_are_refused():
    target, draft = pair()
    ids, _ = prompts([3])
    with pytest.raises(TypeError, match="drafter with propose_tree.*got LookupDrafter"):
        specdec_ext.generate(target, LookupDrafter(), ids, tree=TREE)
    with pytest.raises(TypeError, match="a Drafter or None, got TreeDrafter"):
        specdec_ext.generate(target, TreeDrafter(draft), ids)

    class Bad(FixedTree):
        def propose_tree(self, positions):
            return self.make(super().propose_tree(positions))

    for make, error, said in (
        (lambda draft: draft.tokens, TypeError, "must return a TreeDraft of tensors, got Tensor"),
        (lambda draft: draft._replace(tokens=draft.tokens[0]), ValueError, r"B = 1 .* got \[16\]"),
        (lambda draft: draft._replace(tokens=draft.tokens.int()), ValueError, "int32"),
    ):
        bad = Bad()
        bad.make = make
        with pytest.raises(error, match=f"Bad.propose_tree.*{said}"):
            specdec_ext.generate(target, bad, ids, tree=TREE)

    class Lacking(FixedTree):
        commit_path = None

    with pytest.raises(TypeError, match=r"must have commit_path\(\), as drafters of trees do"):
        specdec_ext.generate(target, Lacking(), ids, tree=TREE)
