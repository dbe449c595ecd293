"""`generate` with trees: shapes, children and their laws, greedy equality, coupled sampling."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from generate_models import pair, prompts, tables

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding import GrownTree, StaticTree, SuffixDrafter, sequoia_tree
from specdec_ext.decoding.grown_trees import draft_grown
from specdec_ext.decoding.trees import CHILDREN, Noise, draw_children
from specdec_ext.testing import tv_bound

NEW = 24
RAGGED = [7, 4, 1, 5]
TREES = {
    "wide": StaticTree.from_widths((3, 2, 1)),
    "iid": StaticTree.from_widths((2, 2), "iid"),
    "trunk": StaticTree.from_widths((1, 1, 3), "rest"),
    "top_k": StaticTree.from_widths((4, 2), "top_k"),
    "coupled": StaticTree.from_widths((2, 2), "coupled"),
    "chain": StaticTree.from_widths((1, 1, 1, 1)),
    "uneven": StaticTree((-1, 0, 0, 0, 1, 1, 3, 4)),
    "grown": GrownTree(nodes=12, depth=4, beam=3),
    "ending": GrownTree(nodes=8, depth=5, beam=3, min_chance=0.3),
}


# ---- shapes --------------------------------------------------------------------------------------


def test_levels_of_a_static_tree():
    tree = StaticTree((-1, 0, 0, 0, 1, 1, 3, 4))
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3)
    assert [list(level) for level in tree.levels] == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert list(tree.children_of(1)) == [4, 5] and list(tree.children_of(2)) == []
    assert tree.depth == 3 and StaticTree((-1,)).depth == 0


@pytest.mark.parametrize(
    "parents", [(), (0,), (-1, 1), (-1, 0, 2), (-1, 0, 0, 2, 1), (-1, -1), (-1, 0, 1, 0)]
)
def test_what_is_no_tree_level_by_level(parents):
    with pytest.raises(ValueError, match="parents|level by level"):
        StaticTree(parents)


def test_trees_that_are_refused():
    with pytest.raises(ValueError, match="children must be one of"):
        StaticTree((-1, 0), "beam")
    with pytest.raises(ValueError, match="choosing among drawn ones would bias"):
        GrownTree(8, 3, children="iid")
    with pytest.raises(ValueError, match="nodes must be in"):
        GrownTree(0, 3)
    with pytest.raises(ValueError, match="min_chance must be in"):
        GrownTree(8, 3, min_chance=1.5)
    with pytest.raises(ValueError, match="widths must be at least 1"):
        StaticTree.from_widths((2, 0))


def _shapes(nodes: int) -> list[tuple[int, ...]]:
    """List all trees of so many nodes, parents in any order that puts them first."""
    return [(-1, *p) for p in itertools.product(*(range(v) for v in range(1, nodes)))]


def _value(parents: tuple[int, ...], rates: list[float]) -> float:
    """Tokens expected of a tree where the k-th child is accepted with rates[k]."""
    reached, seen, total = [1.0], [0] * len(parents), 1.0
    for parent in parents[1:]:
        rank = seen[parent]
        seen[parent] += 1
        reached.append(reached[parent] * (rates[rank] if rank < len(rates) else 0.0))
        total += reached[-1]
    return total


@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.1], [0.4, 0.35, 0.2], [0.9, 0.05], [0.5]])
@pytest.mark.parametrize("nodes", [1, 2, 5, 6])
def test_sequoia_finds_the_best_of_all_trees(rates, nodes):
    best = max(_value(parents, rates) for parents in _shapes(nodes))
    assert _value(sequoia_tree(rates, nodes).parents, rates) == pytest.approx(best, abs=1e-12)


def test_sequoia_keeps_to_its_depth():
    assert sequoia_tree([0.9, 0.8], 12, max_depth=2).depth == 2


# ---- trees that grow -----------------------------------------------------------------------------

LAWS = {"wide": 1.0, "sharp": 2.0}  # factors of random logits


def law_behind(request: int, path: tuple[int, ...], factor: float) -> torch.Tensor:
    """Return the logits ``[7]`` behind a path of a request's tree."""
    number = functools.reduce(lambda found, token: 8 * found + token + 1, path, request + 1)
    return factor * torch.randn(7, generator=torch.Generator().manual_seed(number)).double()


def grown_by_hand(tree: GrownTree, request: int, factor: float) -> tuple[set[tuple[int, ...]], int]:
    """Return the paths that a tree keeps, and the levels that were grown, by the definition."""
    pool, frontier, levels = [((), 1.0)], [((), 1.0)], 0
    while levels < tree.depth and (not levels or frontier[0][1] >= tree.min_chance):
        levels += 1
        children = []
        for path, chance in frontier:
            law = law_behind(request, path, factor).softmax(0)
            best = law.argsort(descending=True)[: tree.beam]
            children += [((*path, token), chance * float(law[token])) for token in best.tolist()]
        pool += children
        frontier = sorted(children, key=lambda child: -child[1])[: tree.beam]
    kept = sorted(pool, key=lambda node: -node[1])[: tree.nodes]
    return {path for path, _ in kept}, levels


def grown(tree: GrownTree, requests: list[int], factor: float) -> tuple[list[set], list[int]]:
    """Return the paths that `draft_grown` keeps of each request, and the widths of its calls."""
    paths: list[list[tuple[int, ...]]] = [[] for _ in requests]
    widths = []

    def extend(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        widths.append(tokens.shape[1])
        for own, row, above in zip(paths, tokens.tolist(), parents.tolist(), strict=True):
            own += [() if p < 0 else (*own[p], t) for t, p in zip(row, above, strict=True)]
        last = [own[-tokens.shape[1] :] for own in paths]
        return torch.stack(
            [
                torch.stack([law_behind(request, path, factor) for path in own])
                for request, own in zip(requests, last, strict=True)
            ]
        )

    draft, runs = draft_grown(tree, torch.zeros(len(requests), dtype=torch.int64), extend, {})
    found = []
    for b, run in enumerate(runs.tolist()):
        tokens, parents = draft.tokens[b].tolist(), draft.parents[b].tolist()
        own: list[tuple[int, ...] | None] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = own[parent]
            own.append(None if token < 0 or above is None else (*above, token))
        # A node that was run is where `runs` says among the nodes that `extend` was given.
        assert all(
            paths[b][place] == path
            for place, path in zip(run, own, strict=True)
            if place >= 0 and path is not None
        )
        found.append({path for path in own if path is not None})
    return found, widths


@pytest.mark.parametrize("factor", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("min_chance", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_grown_tree_ends_where_its_next_level_can_hardly_be_reached(min_chance, factor):
    """Each request's by itself; a call is saved where none goes on."""
    tree, requests = GrownTree(9, 4, beam=3, min_chance=min_chance), [*range(12)]
    expected = [grown_by_hand(tree, request, factor) for request in requests]
    levels = [its for _, its in expected]
    together, widths = grown(tree, requests, factor)
    assert together == [paths for paths, _ in expected]
    assert widths == [1, 3, 3, 3][: max(levels)]
    for request, (paths, its) in zip(requests, expected, strict=True):
        alone, widths = grown(tree, [request], factor)
        assert alone == [paths] and len(widths) == its
    if min_chance == 0.5 and factor == LAWS["sharp"]:
        assert len(set(levels)) > 2  # the test tests something
    assert min_chance not in (0.0, 1.0) or set(levels) == {4 if min_chance == 0 else 1}


def test_levels_that_are_not_grown_cost_no_call():
    target, draft = pair(noise=0.02)
    ids, _ = prompts([6])
    options = {"max_new_tokens": NEW, "temperature": 0.0}
    calls = {
        chance: specdec_ext.generate(
            target, draft, ids, tree=GrownTree(8, 5, beam=3, min_chance=chance), **options
        ).statistics
        for chance in (0.0, 0.3, 1.0)
    }
    rounds = {chance: found.rounds for chance, found in calls.items()}
    assert calls[0.0].draft_calls == 5 * rounds[0.0] and calls[1.0].draft_calls == rounds[1.0]
    assert rounds[0.3] < calls[0.3].draft_calls < 5 * rounds[0.3]


# ---- children ------------------------------------------------------------------------------------

DRAWS = 40_000


def _drawn(children: str, count: int, filters: dict) -> tuple[torch.Tensor, list[int]]:
    row = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    index = torch.arange(DRAWS)
    noise = Noise(index, torch.full_like(index, 77), torch.zeros_like(index))
    return draw_children(
        row.expand(DRAWS, -1).contiguous(),
        torch.ones_like(index),
        count,
        children,
        noise,
        {name: torch.full((DRAWS,), value) for name, value in filters.items()},
    )


def _q(filters: dict) -> torch.Tensor:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    if "top_k" in filters:
        kept = logits.topk(filters["top_k"]).values[-1]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    return (logits / filters.get("temperature", 1.0)).softmax(0)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_k": 4}], ids=["plain", "top_k"])
@pytest.mark.parametrize("children", CHILDREN)
def test_law_of_two_children(children, filters):
    """The joint law of the first two; a total variation of tv_bound has chance 1e-9."""
    tokens, kinds = _drawn(children, 2, filters)
    q = _q(filters)
    size = len(q)
    if children == "iid":
        law = q[:, None] * q
    elif children in ("without_replacement", "coupled"):  # a race draws without replacement, too
        law = q[:, None] * q / (1 - q)[:, None]
        law.fill_diagonal_(0.0)
    elif children == "top_k":
        law = torch.zeros(size, size, dtype=torch.float64)
        law[3, 1] = 1.0
    else:  # the top token, and before it one of the rest
        rest = q.clone()
        rest[3] = 0.0
        law = torch.zeros(size, size, dtype=torch.float64)
        law[:, 3] = rest / rest.sum()
    counts = torch.bincount(tokens[:, 0] * size + tokens[:, 1], minlength=size**2).double()
    distance = (counts / DRAWS - law.flatten()).abs().sum() / 2
    assert distance < tv_bound(DRAWS, size**2)
    expected = {"iid": [1, 1], "without_replacement": [2, 2], "rest": [3, 0]}
    assert kinds == expected.get(children, [0, 0])


def test_a_law_with_fewer_tokens_than_children():
    tokens, _ = _drawn("without_replacement", 3, {"top_k": 2})
    assert (tokens[:, 2] == -1).all()
    assert (tokens[:, :2].sort(1).values == torch.tensor([1, 3])).all()


@pytest.mark.parametrize("tree", [GrownTree(9, 2, beam=3), StaticTree.from_widths((3, 2), "top_k")])
def test_a_greedy_draft_is_the_same_beside_one_that_samples(tree):
    """Filters leave its likeliest tokens as they are, whatever the others of its batch do."""
    target, draft = tables(6)
    target.last_position = draft.last_position = 2 + NEW - 1
    ids, seeds = torch.tensor([[1, 2]] * 40), torch.arange(40)
    options = {"tree": tree, "temperature": 1.0, "top_p": 0.7, "max_new_tokens": NEW}
    greedy, _ = specdec_ext.generate(
        target, draft, ids, seeds=seeds, draft_temperature=0.0, **options
    )
    mixed, _ = specdec_ext.generate(
        target, draft, ids, seeds=seeds, draft_temperature=[0.0, 1.0] * 20, **options
    )
    assert torch.equal(greedy[::2], mixed[::2])


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("name", TREES)
def test_greedy_equals_plain_decoding(name, lengths):
    target, draft = pair(noise=0.02)
    ids, mask = prompts(lengths)
    limits = [NEW - 3 * i for i in range(len(lengths))]
    plain, _ = specdec_ext.generate(target, None, ids, attention_mask=mask, max_new_tokens=limits)
    found, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=limits, tree=TREES[name]
    )
    assert torch.equal(found, plain)
    assert 1.0 < statistics.tokens_per_target_call < TREES[name].depth + 1
    assert statistics.new_tokens == limits


@pytest.mark.parametrize("rule", ops.TREE_RULES)
def test_every_rule_is_greedy_at_temperature_zero(rule):
    target, draft = pair(noise=0.02)
    ids, mask = prompts(RAGGED)
    plain, _ = specdec_ext.generate(target, None, ids, attention_mask=mask, max_new_tokens=NEW)
    found, _ = specdec_ext.generate(
        *(target, draft, ids),
        attention_mask=mask,
        max_new_tokens=NEW,
        tree=TREES["wide"],
        rule=rule,
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention):
    target, draft = pair(noise=0.02)
    for model in (target, draft):
        model.float().set_attn_implementation(attention)
    ids, mask = prompts(RAGGED)
    plain, _ = specdec_ext.generate(target, None, ids, attention_mask=mask, max_new_tokens=NEW)
    found, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, tree=TREES["wide"]
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize("name", TREES)
def test_coupled_sampling_is_that_of_plain_decoding(name):
    target, draft = pair(noise=0.02)
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "temperature": 0.8, "seeds": 3}
    plain, _ = specdec_ext.generate(target, None, ids, rule="coupled", **options)
    found, statistics = specdec_ext.generate(
        target, draft, ids, tree=TREES[name], rule="coupled", **options
    )
    assert torch.equal(found, plain)
    assert statistics.tokens_per_target_call > 1.0


def test_an_end_of_text_inside_a_path():
    target, draft = pair(noise=0.02)
    ids, _ = prompts([6, 6])
    plain, _ = specdec_ext.generate(target, None, ids, max_new_tokens=NEW, eos_token_id=())
    stop = int(plain[0, ids.shape[1] + 4])
    expected, _ = specdec_ext.generate(target, None, ids, max_new_tokens=NEW, eos_token_id=stop)
    found, _ = specdec_ext.generate(
        target, draft, ids, max_new_tokens=NEW, eos_token_id=stop, tree=TREES["wide"]
    )
    assert torch.equal(found, expected)


def test_a_tree_of_its_root_alone_is_plain_decoding():
    """The draft is never run, so nothing of it is rolled back where requests end apart."""
    target, draft = pair(noise=0.02)
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": [2, 9, 5, 9], "pad_token_id": 0}
    plain, _ = specdec_ext.generate(target, None, ids, **options)
    tree = StaticTree.from_widths(())
    found, statistics = specdec_ext.generate(target, draft, ids, tree=tree, **options)
    assert torch.equal(found, plain)
    assert statistics.draft_calls == 0 and statistics.drafted == 0


def test_smaller_trees_behind_a_prompt_of_one_token():
    """Their padding nodes have a position, too: a table of positions has no row -1."""
    target, _ = pair("gpt2")
    ids, mask = prompts([6, 1])
    ids[0] = torch.tensor([1, 2, 3, 1, 2, 3])
    options = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0}
    plain = specdec_ext.generate(target, None, ids, **options).sequences
    found = specdec_ext.generate(target, SuffixDrafter(), ids, tree=GrownTree(8, 3), **options)
    assert torch.equal(found.sequences, plain)
    assert found.statistics.drafted > 0


def test_models_that_cannot_draft_trees():
    ids, _ = prompts([5])
    with pytest.raises(TypeError, match="a causal model, or a drafter with propose_tree"):
        specdec_ext.generate(pair()[0], None, ids, tree=TREES["wide"])
    with pytest.raises(
        ValueError, match="MistralForCausalLM gives other answers at the nodes of a tree"
    ):
        specdec_ext.generate(*pair("mistral_window"), ids, tree=TREES["wide"])
    with pytest.raises(ValueError, match='rule must be one of.*"traversal"'):
        specdec_ext.generate(
            *pair(), ids, tree=TREES["wide"], rule="block", temperature=1.0, max_new_tokens=2
        )


class ConstantModel(torch.nn.Module):
    """Has one law, whatever came before."""

    def __init__(self, law):
        super().__init__()
        self.law = torch.tensor(law)
        self.config = SimpleNamespace(vocab_size=len(law), eos_token_id=None)
        self.eval()

    def forward(self, input_ids, past_key_values=None, position_ids=None, **kwargs):
        states = input_ids[:, None, :, None].double()
        past_key_values.update(states, states, 0)
        return SimpleNamespace(logits=self.law.log().expand(*input_ids.shape, -1))


def test_statistics_by_rank():
    """Deterministic children, the likeliest first: the k-th is accepted with p of its token."""
    p, q = [0.1, 0.2, 0.4, 0.3], [0.4, 0.3, 0.2, 0.1]
    prompts = torch.zeros(64, 2, dtype=torch.int64)
    tree = StaticTree((-1, 0, 0, 0, 1, 2, 2), "top_k")
    found = specdec_ext.generate(
        ConstantModel(p), ConstantModel(q), prompts, max_new_tokens=200, temperature=1.0,
        tree=tree, seeds=2,
    ).statistics  # fmt: skip
    assert len(found.rank_tested) == 3  # nodes with one, two and three children
    assert found.rank_tested[0] > found.rank_tested[1] > found.rank_tested[2]
    assert sum(found.rank_passed) == found.accepted
    for rank, rate in enumerate(found.acceptance_by_rank):
        error = (p[rank] * (1 - p[rank]) / found.rank_tested[rank]) ** 0.5
        assert abs(rate - p[rank]) < 4.5 * error
    twice = found + found
    assert twice.acceptance_by_rank == found.acceptance_by_rank
    assert twice.rank_tested == [2 * n for n in found.rank_tested]
    assert sequoia_tree(found.acceptance_by_rank, nodes=4).depth <= 3


def test_statistics_by_rank_leave_out_what_the_end_cut_off():
    target, draft = ConstantModel([0.0, 1.0]), ConstantModel([0.5, 0.5])
    tree = StaticTree.from_widths((2, 2), "top_k")
    found = specdec_ext.generate(
        target, draft, torch.zeros(1, 2, dtype=torch.int64), max_new_tokens=9, tree=tree,
        eos_token_id=1,
    ).statistics  # fmt: skip
    assert found.new_tokens == [1]
    assert (found.rank_tested, found.rank_passed) == ([1, 1], [0, 1])
