"""A draft with a reduced vocabulary: the law of what is emitted, greedy equality, its files."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import wrong_laws
from enumerated_drafts import Round, check_lossless
from generate_models import pair, prompts, tables
from test_generate_law import ALPHA, PROMPT, p_value

import specdec_ext
from specdec_ext.decoding import (
    ConfidenceStop,
    GrownTree,
    HierarchicalDrafter,
    LookupDrafter,
    RenewalRule,
    StackedDrafter,
    StaticTree,
    UniformDrafter,
)
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.models.draft_llama import DraftLlama, DraftLlamaConfig

LENGTH, DRAWS, NEW = 3, 3_000, 16
REDUCED = torch.tensor([3, 0, 2])  # in no order, and token 1 is never proposed


# ---- the law of what is emitted ------------------------------------------------------------------


@functools.cache
def table_and_draft():
    """Return a target over four tokens, and a random draft over three of them."""
    target = copy.deepcopy(tables(4)[0])
    target.last_position = len(PROMPT) + LENGTH - 1
    torch.manual_seed(5)
    config = DraftLlamaConfig(
        hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=4, draft_vocab_size=3,
    )  # fmt: skip
    draft = DraftLlama(config).with_tokens(REDUCED).eval()
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    torch.nn.init.constant_(draft.layers.norm.weight, 0.8)  # laws that depend on the text
    return target, draft


def law_of(drafter, **options) -> float:
    """Return the p-value of the law of a few tokens."""
    return p_value(table_and_draft()[0], drafter, length=LENGTH, draws=DRAWS, **options)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("gamma", [2, 1, 4])
def test_joint_law(gamma, rule):
    assert law_of(table_and_draft()[1], temperature=0.8, rule=rule, gamma=gamma) > ALPHA


@pytest.mark.parametrize("options", [{"draft_top_k": 2}, {"rule": "coupled"}], ids=str)
def test_joint_law_under_other_draft_laws(options):
    assert law_of(table_and_draft()[1], gamma=2, **options) > ALPHA


def test_joint_law_in_a_stack_and_under_a_policy():
    draft = table_and_draft()[1]
    assert law_of(StackedDrafter(LookupDrafter(min_match=2), draft), gamma=2) > ALPHA
    assert law_of(draft, gamma=ConfidenceStop(3, 0.4)) > ALPHA


TREES = {
    "top_k": (StaticTree.from_widths((2, 2), "top_k"), "target_only"),
    "drawn": (StaticTree.from_widths((2, 1)), "traversal"),
    "grown": (GrownTree(6, 3, beam=2), "traversal"),
    "ending": (GrownTree(6, 3, beam=2, min_chance=0.5), "traversal"),
}


@pytest.mark.parametrize("name", TREES)
def test_joint_law_of_trees(name):
    tree, rule = TREES[name]
    assert law_of(table_and_draft()[1], tree=tree, rule=rule) > ALPHA


class AnotherMap(wrong_laws.AnotherMap, ModelDrafter):
    """Says of its law that its entries are other tokens than were drawn."""


class AnotherRow(wrong_laws.AnotherRow, ModelDrafter):
    """Passes on the row of another token than each was drawn from."""


@pytest.mark.every("wrong")
@pytest.mark.parametrize("wrong", [AnotherMap, AnotherRow])
def test_control_a_law_that_was_not_drawn_from(wrong):
    assert law_of(wrong(table_and_draft()[1]), gamma=2) < ALPHA


def enumerated(drafter, **options) -> Round:
    """Return a round of the draft, to be enumerated."""
    draft = copy.deepcopy(table_and_draft()[1]).double()
    return Round(lambda rows: drafter(draft), 4, token_ids=REDUCED, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_law(monkeypatch, rule, temperature):
    check_lossless(enumerated(ModelDrafter, temperature=temperature).law(monkeypatch, rule))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_control_exact_law_with_a_law_that_was_not_drawn_from(monkeypatch, rule):
    assert enumerated(AnotherRow).law(monkeypatch, rule).tv > 1e-2


# ---- greedy decoding -----------------------------------------------------------------------------


@functools.cache
def taught():
    """Return a random target, and a draft that has learned what it says of the tests' prompts."""
    target, _ = pair("llama")
    ids, mask = prompts([6, 1, 3, 5])
    texts = [
        specdec_ext.generate(target, None, row[real.bool()][None], max_new_tokens=2 * NEW).sequences
        for row, real in zip(ids, mask, strict=True)
    ]
    torch.manual_seed(3)
    known = torch.cat([text[0] for text in texts]).unique()
    draft = DraftLlama.from_target(
        target, known, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    ).requires_grad_(True)  # fmt: skip
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(40):
        for text in texts:
            logits = draft(text[:, :-1]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, draft.entries[text[0, 1:]])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return target, draft.eval().requires_grad_(False)


COMPANY = {
    "chain": lambda draft: (draft, {"gamma": 4}),
    "renewal": lambda draft: (draft, {"gamma": RenewalRule()}),
    "stack": lambda draft: (StackedDrafter(LookupDrafter(), draft), {"gamma": 4}),
    "static": lambda draft: (draft, {"tree": StaticTree.from_widths((2, 2, 1), "top_k"),
                                     "rule": "target_only"}),
    "grown": lambda draft: (draft, {"tree": GrownTree(8, 4, beam=2)}),
    "small": lambda draft: (HierarchicalDrafter(pair("llama")[1], draft, 2), {"gamma": 4}),
}  # fmt: skip


@pytest.mark.parametrize("company", COMPANY)
def test_tokens_of_plain_decoding(company):
    target, draft = taught()
    ids, mask = prompts([6, 1, 3, 5])
    drafter, options = COMPANY[company](draft)
    told = {"attention_mask": mask, "max_new_tokens": NEW, "temperature": 0.0}
    plain = specdec_ext.generate(target, None, ids, **told)
    found = specdec_ext.generate(target, drafter, ids, **told, **options)
    assert torch.equal(found.sequences, plain.sequences)
    if company == "chain":  # or nothing was tried: what it was taught comes out
        assert found.statistics.alpha > 0.5


def test_logits_processors_bind_the_target_alone():
    target, draft = taught()
    ids, mask = prompts([6, 1, 3, 5])

    def ban(input_ids, scores):
        return scores.index_fill(1, draft.draft_token_ids[:3], -torch.inf)

    told = {"attention_mask": mask, "max_new_tokens": NEW, "logits_processor": [ban]}
    plain = specdec_ext.generate(target, None, ids, **told)
    found = specdec_ext.generate(target, draft, ids, gamma=3, **told)
    assert torch.equal(found.sequences, plain.sequences)


# ---- the model -----------------------------------------------------------------------------------


def test_a_token_that_is_not_known_is_read_as_another():
    _, draft = table_and_draft()
    known, unknown = torch.tensor([[0, 3, 2]]), torch.tensor([[0, 1, 2]])
    rows = draft(torch.cat([known, unknown])).logits
    torch.testing.assert_close(rows[0, 0], rows[1, 0])
    assert (rows[0, 1:] - rows[1, 1:]).abs().max() > 0.01
    assert draft.entries.tolist() == [1, 3, 2, 0]


def test_unknown_tokens_share_an_embedding():
    config = DraftLlamaConfig(
        hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=6, draft_vocab_size=3,
    )  # fmt: skip
    draft = DraftLlama(config).with_tokens(REDUCED).eval()
    embedded = draft.layers.embed_tokens(torch.tensor([1, 4, 5, 0]))
    assert torch.equal(embedded[0], embedded[1]) and torch.equal(embedded[0], embedded[2])
    assert not torch.equal(embedded[0], embedded[3])


def test_logits_by_the_embedding():
    """The output head is the embedding without the row that unknown tokens share."""
    _, draft = table_and_draft()
    ids = torch.tensor([[0, 1, 3]])
    states = draft.layers(input_ids=ids).last_hidden_state
    expected = states @ draft.layers.embed_tokens.weight[:3].T
    torch.testing.assert_close(draft(ids).logits, expected)
    torch.testing.assert_close(draft(ids, logits_to_keep=1).logits, expected[:, -1:])


def test_begins_with_the_directions_of_the_targets_embedding():
    target, _ = pair("llama")
    weight = target.get_input_embeddings().weight
    ids = torch.arange(0, len(weight), 2)
    draft = DraftLlama.from_target(
        target, ids, hidden_size=weight.shape[1], intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    own = draft.layers.embed_tokens.weight[:-1]
    vectors = weight[ids] - weight[ids].mean(0)
    # All directions are kept here: distances are the target's, up to the scale.
    ratio = torch.cdist(own, own) / torch.cdist(vectors, vectors).fill_diagonal_(1.0)
    off = ratio[~torch.eye(len(ids), dtype=torch.bool)]
    torch.testing.assert_close(off, off[0].expand_as(off), rtol=1e-3, atol=0)


def test_saved_and_loaded(tmp_path):
    _, draft = table_and_draft()
    draft.save_pretrained(tmp_path)
    again = DraftLlama.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[0, 1, 2, 3]])
    assert torch.equal(again.draft_token_ids, REDUCED)
    assert torch.equal(again(ids).logits, draft(ids).logits)


@pytest.mark.parametrize("tree", [None, StaticTree.from_widths((2, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [[6], [6, 3, 5]], ids=["one", "ragged"])
def test_compiled_once_for_all_lengths(tree, lengths):
    """By torch.compile, whole: a prompt, one token and several tokens are a graph each."""
    torch.compiler.reset()
    target = pair("llama")[0]
    known = torch.arange(0, target.config.vocab_size, 2)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    draft = DraftLlama.from_target(target, known, num_hidden_layers=1, **sizes)
    shape = {"gamma": 3} if tree is None else {"tree": tree}
    options = {**shape, "max_new_tokens": 12, "temperature": 0.8, "seeds": 3}

    def written(lengths):
        ids, mask = prompts(lengths)
        return specdec_ext.generate(target, draft, ids, attention_mask=mask, **options).sequences

    longer = [length + 2 for length in lengths]
    expected, expected_longer = written(lengths), written(longer)
    graphs = []
    draft.compile(
        dynamic=True, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    assert torch.equal(written(lengths), expected)
    before = len(graphs)
    assert torch.equal(written(longer), expected_longer)
    # Requests of a batch end one by one: each size is another shape. Beyond 8, torch gives up.
    assert 2 <= before <= len(graphs) <= 8
    assert len(lengths) > 1 or len(graphs) == before


def test_what_is_refused():
    _, draft = table_and_draft()
    draft = copy.deepcopy(draft)
    for ids in ([0, 1], [0, 1, 1], [0, 1, 4], [-1, 0, 1]):
        with pytest.raises(ValueError, match="3 distinct tokens in"):
            draft.with_tokens(torch.tensor(ids))
    for wrong in ([0, 1, 2], torch.tensor([0.0, 1.0, 2.5]), torch.tensor([True, False, True])):
        with pytest.raises(TypeError, match="draft_token_ids must be an int64 tensor"):
            draft.with_tokens(wrong)
        with pytest.raises(TypeError, match="DraftLlama: draft_token_ids must be an int64 tensor"):
            DraftLlama.from_target(pair("llama")[0], wrong)
    with pytest.raises(ValueError, match="must know all of the target's tokens"):
        HierarchicalDrafter(draft, UniformDrafter(4))
    with pytest.raises(ValueError, match="must be at most the width"):
        DraftLlama.from_target(pair("llama")[0], torch.arange(4), hidden_size=4096)
    with pytest.raises(TypeError, match="must have an embedding"):
        DraftLlama.from_target(torch.nn.Identity(), torch.arange(4))
