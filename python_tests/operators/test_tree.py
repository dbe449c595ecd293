"""verify_tree: tables checked by hand, topology, status, invariances, parity, export, memory."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import REFERENCE, f64, log_probs
from test_threads import run_variant
from torch.library import opcheck

import specdec_ext
from specdec_ext.ops import TREE_RULES
from specdec_ext.testing import (
    TreeCase,
    assert_trees_match,
    chain_as_tree,
    explain_tree_outcome,
    make_case,
    make_tree_case,
)

NAN = math.nan
NEARLY_ONE = 1 - 2.0**-53
STOCHASTIC = ["traversal", "recursive", "target_only"]

P = [0.5, 0.3, 0.2]
Q = [0.2, 0.3, 0.5]


def same(a, b, atol=0.0):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, equal_nan=True)


def one_tree(parents, tokens, kinds=None, p=P, q=Q, uniforms=None, **options):
    """A request whose nodes all have the laws p and q."""
    size = len(parents)
    inputs = {
        "target_logits": log_probs(p).expand(1, size, -1).contiguous(),
        "tokens": torch.tensor([tokens]),
        "parents": torch.tensor([parents]),
        **options,
    }
    if kinds is not None:
        inputs["kinds"] = torch.tensor([kinds], dtype=torch.int8)
        inputs["draft_logits"] = log_probs(q).expand(1, size, -1).contiguous()
    if uniforms is not None:
        inputs["uniforms"] = f64([uniforms])
    return TreeCase(inputs)


def quiet(size):
    """Coins that reject whatever can be rejected."""
    return [NEARLY_ONE] * (size - 1) + [0.5]


@pytest.mark.parametrize(
    "tokens, kinds",
    [
        ([-1, 0, 0, 1], [0, 1, 0, 1]),
        ([-1, 0, 1, 0, 2], [0, 2, 0, 0, 2]),
        ([-1, 0, 0, 0, 1], [0, 1, 0, 0, 1]),
        ([-1, 0, 0, 1, 0, 2], [0, 1, 1, 0, 0, 1]),
    ],
    ids=str,
)
def test_a_deterministic_sibling_after_a_child_that_is_certain(backend, tokens, kinds):
    """Nothing decides by what comes after it; accept_probs are the same everywhere all the same."""
    parents = [-1] + [0] * (len(tokens) - 1)
    p, q = [0.6, 0.2, 0.2], [0.2, 0.5, 0.3]
    case = one_tree(parents, tokens, kinds, p, q, uniforms=quiet(len(tokens)))
    found, expected = backend.run_tree(case), REFERENCE.run_tree(case)
    assert found.accept_probs[0, 1] == 1.0
    assert torch.allclose(found.accept_probs, expected.accept_probs, atol=1e-6, equal_nan=True)


# ---- tables -------------------------------------------------------------------------------------

# parents, tokens, kinds, accept_probs under "traversal", and what the root leaves: a law
TABLE = {
    "deterministic: p(0), then p(1) of what is left": (
        [-1, 0, 0], [-1, 0, 1], [0, 0, 0], [1, 0.5, 0.6], [0, 0, 1],
    ),
    "deterministic twice": ([-1, 0, 0], [-1, 0, 0], [0, 0, 0], [1, 0.5, 0.0], [0, 0.6, 0.4]),
    # [p - q]+ = (.3, 0, 0): token 0 is all that is left.
    "i.i.d.": ([-1, 0, 0], [-1, 2, 0], [0, 1, 1], [1, 0.4, 1.0], [1, 0, 0]),
    "i.i.d., repeated": ([-1, 0, 0], [-1, 2, 2], [0, 1, 1], [1, 0.4, 0.0], [1, 0, 0]),
    # The second is drawn from (.4, .6, 0), and what is left is all on token 0.
    "without replacement": ([-1, 0, 0], [-1, 2, 1], [0, 2, 2], [1, 0.4, 0.0], [1, 0, 0]),
    # Drawn from (0, .375, .625); left (.5, 0, 0), which is token 0 for certain.
    "rest, then deterministic": ([-1, 0, 0], [-1, 2, 0], [0, 3, 0], [1, 0.32, 1.0], [1, 0, 0]),
    # Deterministic first: left (0, .6, .4); of that .4 / .625.
    "deterministic, then rest": ([-1, 0, 0], [-1, 0, 2], [0, 0, 3], [1, 0.5, 0.64], [0, 1, 0]),
    # The draft law keeps token 0 where no child was drawn from the rest: left (0, .6, .4).
    "deterministic, then i.i.d.": ([-1, 0, 0], [-1, 0, 2], [0, 0, 1], [1, 0.5, 0.8], [0, 1, 0]),
    # Block verification: w = .4; then S = sum [.4 p - q]+ = 0, h = 0; then w = .4 * .4.
    "a chain": ([-1, 0, 1], [-1, 2, 2], [0, 1, 1], [1, 0.0, 0.16], [1, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_accept_probs_and_residual(backend, row):
    parents, tokens, kinds, probs, left = TABLE[row]
    case = one_tree(parents, tokens, kinds)
    accepting = {c for c, h in enumerate(probs) if h == 1.0} - {0}
    for x, (low, mass) in enumerate(zip(torch.tensor(left).cumsum(0), left, strict=True)):
        if mass == 0 or accepting:
            continue
        u = float(low) - mass / 2
        out = backend.run_tree(case.replace(uniforms=f64([quiet(3)[:-1] + [u]])))
        assert out.tokens.tolist() == [[x, -1, -1]] and out.path.tolist() == [[-1, -1, -1]]
        assert out.num_accepted.tolist() == [0] and out.status.tolist() == [0]
    out = backend.run_tree(case.replace(uniforms=f64([quiet(3)])))
    torch.testing.assert_close(out.accept_probs, torch.tensor([probs]).float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.logprobs[0, 0], log_probs(P)[out.tokens[0, 0]])


@pytest.mark.parametrize("rule", STOCHASTIC)
@pytest.mark.parametrize("u, path", [(0.49, [1]), (0.51, [])])
def test_coin_of_a_node(backend, rule, u, path):
    case = one_tree([-1, 0, 0], [-1, 0, 1], rule=rule, uniforms=[u, NEARLY_ONE, 0.5])
    out = backend.run_tree(case)
    assert out.path.tolist() == [[*path, *[-1] * (3 - len(path))]]
    assert out.num_accepted.tolist() == [len(path)]


def test_first_success_in_post_order_wins(backend):
    # 0 - (1 - (3, 4), 2): post-order 3 4 1 2. Everything is deterministic, with p(0) = .5.
    parents, tokens = [-1, 0, 0, 1, 1], [-1, 0, 1, 0, 1]
    for coins, path in [
        ([0.0] * 4, [1, 3]),
        ([0.0, 0.0, NEARLY_ONE, 0.0], [1, 4]),
        ([0.0, 0.0, NEARLY_ONE, NEARLY_ONE], [1]),
        ([NEARLY_ONE, 0.0, NEARLY_ONE, NEARLY_ONE], [2]),
        ([NEARLY_ONE] * 4, []),
        ([NEARLY_ONE, 0.0, 0.0, 0.0], [1, 3]),  # a node's coin says nothing of those below it
    ]:
        out = backend.run_tree(one_tree(parents, tokens, uniforms=[*coins, 0.5]))
        assert out.path[0, : len(path)].tolist() == path
        assert out.num_accepted.tolist() == [len(path)]
        assert out.tokens[0, : len(path)].tolist() == [tokens[v] for v in path]


def test_recursive_reports_the_children_it_tries(backend):
    parents, tokens = [-1, 0, 0, 1, 1], [-1, 0, 1, 0, 1]

    def probs(coins):
        case = one_tree(parents, tokens, rule="recursive", uniforms=[*coins, 0.5])
        return backend.run_tree(case).accept_probs[0]

    for coins, expected in [
        ([0.0, 0.0, 0.0, 0.0], [1, 0.5, NAN, 0.5, NAN]),
        ([0.0, 0.0, NEARLY_ONE, 0.0], [1, 0.5, NAN, 0.5, 0.6]),
        ([NEARLY_ONE, 0.0, 0.0, 0.0], [1, 0.5, 0.6, NAN, NAN]),
    ]:
        torch.testing.assert_close(probs(coins), torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_rules_that_follow_the_target(backend, rule):
    # Both follow token 0 at the root; greedy at T = 0, coupled on noise with this winner.
    noise = dict(seeds=torch.tensor([0]), positions=torch.tensor([0]))
    p = [0.98, 0.01, 0.01]
    parents, tokens = [-1, 0, 0, 0, 2, 2], [-1, 1, 0, 0, 2, 1]
    case = one_tree(parents, tokens, p=p, rule=rule, **noise)
    out = backend.run_tree(case)
    assert out.tokens.tolist() == [[0, 0, -1, -1, -1, -1]]
    assert out.path.tolist() == [[2, -1, -1, -1, -1, -1]]
    same(out.accept_probs, torch.tensor([[1.0, 0.0, 1.0, NAN, 0.0, 0.0]]))


# ---- topology -----------------------------------------------------------------------------------

BAD_TREES = {
    "the root has a parent": ([0, 0, 1, -1], [0, 1, 1, 0]),
    "a parent of its own": ([-1, 1, 0, -1], [0, 1, 1, 0]),
    "a parent that comes later": ([-1, 2, 0, -1], [0, 1, 1, 0]),
    "a parent that does not exist": ([-1, 0, 9, -1], [0, 1, 1, 0]),
    "a negative parent": ([-1, -2, 0, -1], [0, 1, 1, 0]),
    "a node after padding": ([-1, 0, -1, 0], [0, 1, 0, 1]),
    "mixed kinds": ([-1, 0, 0, -1], [0, 1, 2, 0]),
    "mixed kinds beside a deterministic one": ([-1, 0, 0, 0], [0, 2, 0, 3]),
    "two rest children": ([-1, 0, 0, -1], [0, 3, 3, 0]),
}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("tree", BAD_TREES)
def test_invalid_trees(backend, tree, rule):
    parents, kinds = BAD_TREES[tree]
    noise = dict(seeds=torch.tensor([5]), positions=torch.tensor([2]))
    bad = one_tree(parents, [-1, 0, 1, 2], kinds, rule=rule, **noise)
    good = bad.replace(parents=torch.tensor([[-1, 0, 1, 2]]))
    both = TreeCase({k: torch.cat([v, good.inputs[k], v]) if isinstance(v, torch.Tensor) else v
                     for k, v in bad.inputs.items()})  # fmt: skip
    out = backend.run_tree(both)
    alone = backend.run_tree(bad.replace(parents=torch.tensor([[-1, -1, -1, -1]])))
    for b in (0, 2):  # the token that the root alone emits
        assert out.status[b] == 16 and out.num_accepted[b] == 0
        assert bool(out.accept_probs[b].isnan().all()) and bool((out.path[b] == -1).all())
        same((out.tokens[b], out.logprobs[b]), (alone.tokens[0], alone.logprobs[0]))
    same((t[1] for t in out), (t[0] for t in backend.run_tree(good)))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_padding_changes_nothing(backend, rule):
    case = make_tree_case(3, nodes=6, philox=True, rule=rule)
    expected = backend.run_tree(case)
    wide = {}
    for name, value in case.inputs.items():
        wide[name] = value
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            fill = NAN if value.is_floating_point() else 7  # what is not read
            extra = torch.full_like(value[:, :3], -1 if name == "parents" else fill)
            wide[name] = torch.cat([value, extra], 1)
    out = backend.run_tree(TreeCase(wide))
    same((t[:, :6] if t.dim() > 1 else t for t in out), expected)
    for t in (out.tokens, out.path):
        assert bool((t[:, 6:] == -1).all())
    for t in (out.logprobs, out.accept_probs):
        assert bool(t[:, 6:].isnan().all())


@pytest.mark.parametrize("rule", TREE_RULES)
def test_the_root_alone(backend, rule):
    noise = dict(seeds=torch.tensor([3, 4]), positions=torch.tensor([1, 1]))
    logits = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0))
    none = torch.tensor([[-1], [-1]])
    out = backend.verify_tree(logits, none, none, **noise, rule=rule)
    assert out.tokens.shape == (2, 1) and out.num_accepted.tolist() == [0, 0]
    assert out.accept_probs.tolist() == [[1.0], [1.0]] and out.path.tolist() == [[-1], [-1]]
    domain = 3 if rule == "coupled" else 1
    drawn = backend.sample(logits[:, 0], **noise, domain=domain)
    expected = logits[:, 0].argmax(-1) if rule == "greedy" else drawn.tokens
    assert torch.equal(out.tokens[:, 0], expected)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_empty_batches(backend, rule):
    ints = torch.zeros(0, 5, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    rows = torch.zeros(0, 5, 7)
    out = backend.verify_tree(rows, ints, ints, rows, seeds=empty, positions=empty, rule=rule)
    assert [tuple(t.shape) for t in out] == [
        (0, 5),
        (0, 5),
        (0,),
        (0, 5),
        (0, 5),
        (0,),
    ]


# ---- what is left out ---------------------------------------------------------------------------


def left_out(backend, case, node, status, **changes):
    """The outcome with a node that is no good: that without the node, but for the status."""
    tokens = case.inputs["tokens"].clone()
    tokens[0, node] = -1
    expected = backend.run_tree(case.replace(tokens=tokens))
    assert expected.status.tolist() == [0]
    out = backend.run_tree(case.replace(**changes))
    assert out.status.tolist() == [status]
    same(out[:-1], expected[:-1])
    return out


TREE = ([-1, 0, 0, 1, 1, 3], [-1, 2, 1, 2, 0, 1])  # 0 - (1 - (3 - 5, 4), 2)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("token", [3, -2, 2**31 - 1, -(2**31)])
def test_ids_out_of_range(backend, rule, token):
    parents, tokens = TREE
    noise = dict(seeds=torch.tensor([8]), positions=torch.tensor([0]))
    case = one_tree(parents, tokens, [0, 1, 1, 1, 1, 1], rule=rule, **noise)
    changed = torch.tensor([tokens])
    changed[0, 3] = token
    out = left_out(backend, case, 3, 2, tokens=changed)
    assert bool(out.accept_probs[0, [3, 5]].isnan().all())
    changed[0, 5] = token  # below what is not there: nobody looks
    changed[0, 3] = -1
    assert backend.run_tree(case.replace(tokens=changed)).status.tolist() == [0]


@pytest.mark.parametrize("kind", [4, -1, 127])
def test_unknown_kinds(backend, kind):
    parents, tokens = TREE
    case = one_tree(parents, tokens, [0, 2, 2, 1, 1, 1], uniforms=quiet(6))
    kinds = case.inputs["kinds"].clone()
    kinds[0, 2] = kind
    left_out(backend, case, 2, 2, kinds=kinds)


def test_children_that_cannot_have_been_drawn(backend):
    parents, tokens = TREE
    case = one_tree(parents, tokens, [0, 1, 1, 1, 1, 1], uniforms=quiet(6))
    draft = case.inputs["draft_logits"]

    def with_row(table, row):
        changed = table.clone()
        changed[0, 3] = torch.tensor(row)
        return changed

    # Node 3 has one child, 5, with token 1.
    for row in ([0.0, -math.inf, 0.0], [NAN, 0.0, 0.0], [math.inf, 0.0, 0.0], [-math.inf] * 3):
        left_out(backend, case, 5, 4, draft_logits=with_row(draft, row))
    for r in (-1, -7, 6, 2**31 - 1):
        rows = torch.tensor([[0, 1, 2, r, 4, 5]])
        left_out(backend, case, 5, 4, children_rows=rows)
    probs = case.replace(draft_logits=None, draft_probs=draft.exp())
    for row in ([0.5, 0.0, 0.5], [-1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [NAN, 1.0, 1.0]):
        left_out(backend, probs, 5, 4, draft_probs=with_row(draft.exp(), row))
    # Drawn, and no draft law was given at all.
    bare = case.replace(draft_logits=None)
    assert backend.run_tree(bare).status.tolist() == [4]


def test_nothing_left_to_draw_from(backend):
    # The deterministic tokens have all of q; a law on two tokens, and three without replacement.
    q = [0.5, 0.5, 0.0]
    case = one_tree([-1, 0, 0, 0], [-1, 2, 0, 1], [0, 3, 0, 0], q=q, uniforms=quiet(4))
    left_out(backend, case, 1, 4)
    case = one_tree([-1, 0, 0, 0], [-1, 0, 1, 0], [0, 2, 2, 2], q=q, uniforms=quiet(4))
    out = left_out(backend, case, 3, 4)
    torch.testing.assert_close(out.accept_probs[0, 1], torch.tensor(1.0))
    # A rest child with the token of a deterministic one.
    case = one_tree([-1, 0, 0], [-1, 0, 0], [0, 3, 0], uniforms=quiet(3))
    left_out(backend, case, 1, 4)


@pytest.mark.parametrize("given", ["logits", "probs", "reduced", "masked"])
def test_without_replacement_beside_deterministic(backend, given):
    # What is taken before the third drawn child is q of the drawn ones, and nearly all: .95.
    q = [0.6, 0.35, 0.04, 0.01]
    p = [0.1, 0.2, 0.3, 0.4]
    ids = [2, 0, 3, 1]
    if given == "reduced":
        q = [q[x] for x in ids]
    if given == "masked":  # the last token is hidden
        p, q = [*p, 5.0], [*q, 9.0]
    case = one_tree(
        [-1, 0, 0, 0, 0], [-1, 0, 2, 1, 3], [0, 2, 0, 2, 2], p=p, q=q, uniforms=quiet(5)
    )
    if given == "probs":
        draft = case.inputs["draft_logits"].exp() * 1.25
        case = case.replace(draft_logits=None, draft_probs=draft)
    if given == "reduced":
        case = case.replace(draft_token_ids=torch.tensor(ids))
    if given == "masked":
        case = case.replace(allowed_mask=torch.full((1, 5, 1), 0b01111, dtype=torch.int32))
    probs = backend.run_tree(case).accept_probs[0]
    # Left after 0: [p - q]+ = (0, 0, .26, .39); token 2 deterministic: .4; left .39 / .65 = .6, all
    # on token 3; drawn from (0, .875, .1, .025): none at 1; left [1 - .025]; from .05: .2.
    torch.testing.assert_close(probs, torch.tensor([1, 1 / 6, 0.4, 0.0, 1.0]), rtol=0, atol=1e-5)


def test_status_is_of_what_was_looked_at(backend):
    parents, tokens = TREE
    draft = log_probs(Q).expand(1, 6, -1).clone()
    draft[0, 3] = NAN  # of node 5
    for rule, coins, status in [
        ("traversal", quiet(6), 4),
        ("recursive", quiet(6), 0),
        ("recursive", [0.0] * 6, 4),
        ("target_only", [0.0] * 6, 0),
    ]:
        case = one_tree(parents, tokens, [0, 1, 1, 1, 1, 1], rule=rule, uniforms=coins)
        out = backend.run_tree(case.replace(draft_logits=draft))
        assert out.status.tolist() == [status], rule
    # p = 0 before it: nothing flows in, and nobody looks.
    case = one_tree(parents, tokens, [0, 1, 1, 1, 1, 1], p=[0.5, 0.5, 0.0], uniforms=quiet(6))
    out = backend.run_tree(case.replace(draft_logits=draft))
    assert out.status.tolist() == [0]
    assert out.accept_probs[0, [1, 3, 4, 5]].tolist() == [0.0] * 4


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_rows_without_a_law(backend, rule, value):
    # 0 - (1 - 3, 2 - 4), node 1 has no law; token 0 is nearly certain, or token 1.
    parents, tokens = [-1, 0, 0, 1, 2], [-1, 0, 1, 0, 0]
    noise = dict(seeds=torch.tensor([1]), positions=torch.tensor([0]))
    case = one_tree(parents, tokens, p=[1.0, 0.0, 0.0], rule=rule, **noise)
    rows = case.inputs["target_logits"].clone()
    rows[0, 1] = value
    out = backend.run_tree(case.replace(target_logits=rows))
    assert out.status.tolist() == [1] and out.num_accepted.tolist() == [1]
    assert out.path[0].tolist() == [1, -1, -1, -1, -1]
    assert out.tokens[0].tolist() == [0, 0, -1, -1, -1]
    assert out.logprobs[0, 0] == 0 and bool(out.logprobs[0, 1:].isnan().all())
    assert math.isnan(out.accept_probs[0, 3])
    # Where it does not decide, no bit is set.
    rows = log_probs([0.0, 1.0, 0.0]).expand(1, 5, -1).clone()
    rows[0, 1] = value
    out = backend.run_tree(case.replace(target_logits=rows))
    assert out.status.tolist() == [0] and out.path[0, 0] == 2
    # Nothing at all: the root has none.
    rows[0, 0] = value
    out = backend.run_tree(case.replace(target_logits=rows))
    assert out.status.tolist() == [1] and out.tokens[0].tolist() == [0, -1, -1, -1, -1]


@pytest.mark.parametrize("parents", [[-1, 0, 0], [-1, 0, 1]])  # of a leaf, or a child asks for it
def test_rows_of_a_packed_table_that_are_not_there(backend, parents):
    case = one_tree(parents, [-1, 0, 1], p=[1.0, 0.0, 0.0], uniforms=[0.0, 0.0, 0.5])
    table = case.inputs["target_logits"][0]
    for row in (-1, 3, 2**31 - 1):
        packed = case.replace(target_logits=table, target_rows=torch.tensor([[0, row, 2]]))
        out = backend.run_tree(packed)
        assert out.status.tolist() == [1] and out.path.tolist() == [[1, -1, -1]]


def test_parameters_out_of_range(backend):
    parents, tokens = TREE
    case = one_tree(parents, tokens, [0, 1, 1, 1, 1, 1], uniforms=quiet(6))
    for name, value in [
        ("temperature", -1.0), ("temperature", NAN), ("top_p", NAN), ("top_p", -0.1),
        ("min_p", 1.5), ("draft_temperature", math.inf), ("draft_min_p", NAN),
    ]:  # fmt: skip
        out = backend.run_tree(case.replace(**{name: torch.tensor([value])}))
        same(out[:-1], backend.run_tree(case)[:-1])
        assert out.status.tolist() == [8], name
    for slot, status in [(0, 8), (4, 8), (5, 8)]:
        uniforms = f64([quiet(6)])
        uniforms[0, slot] = 1.0
        assert backend.run_tree(case.replace(uniforms=uniforms)).status.tolist() == [status]
    # The coins of padding, and below what is not there, are never read.
    short = case.replace(
        parents=torch.tensor([[-1, 0, 0, 1, -1, -1]]), tokens=torch.tensor([[-1, -1, 1, 0, 0, 0]])
    )
    assert backend.run_tree(short.replace(uniforms=f64([[NAN, 0.5, NAN, 2, -1, 0.5]]))).status == 0


# ---- T = 0, chains, rows, masks, maps -----------------------------------------------------------


@pytest.mark.parametrize("rule", TREE_RULES)
def test_temperature_zero(backend, rule):
    # Everything follows the arg max, whatever the coins; no draft law is read.
    for seed in range(3):
        case = make_tree_case(seed, vocab=3, philox=True, stray=False, filters=False)
        case = case.replace(temperature=torch.zeros(case.batch), rule=rule)
        bare = case.replace(draft_logits=case.inputs["draft_logits"] * NAN)
        out = backend.run_tree(bare)
        greedy = backend.run_tree(case.replace(rule="greedy"))
        assert out.status.tolist() == [0] * case.batch
        for name in ("tokens", "path", "num_accepted", "logprobs"):
            same([getattr(out, name)], [getattr(greedy, name)])
        assert set(out.accept_probs.nan_to_num(1.0).flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kinds="mixed", draft_filters=True),
        dict(dtype=torch.bfloat16, draft_vocab=11, philox=True),
        dict(draft_vocab=23, kinds="mixed", raw_logprobs=True),
        dict(draft="probs", gamma=6),
        dict(draft="none"),
        dict(vocab=9001, filters=False, greedy_rows=False, batch=3, draft_vocab=5000),
        dict(vocab=9001, dtype=torch.bfloat16, batch=3, kinds="mixed"),
    ],
    ids=str,
)
def test_a_chain_is_block_verification_to_the_bit(backend, options):
    for seed in range(1 if "vocab" in options else 5):
        case = make_case(seed, **{"gamma": 4, **options})
        chain, tree = backend.run(case), backend.run_tree(chain_as_tree(case))
        # The reference sums what a deterministic token leaves, where `verify` subtracts.
        same([tree.accept_probs[:, 1:]], [chain.accept_probs], 1e-7 * (backend is REFERENCE))
        for name in ("tokens", "num_accepted", "logprobs", "status"):
            same([getattr(tree, name)], [getattr(chain, name)])
        depth = torch.arange(tree.path.shape[1])
        path = torch.where(depth < tree.num_accepted[:, None], depth + 1, -1)
        assert torch.equal(tree.path, path)


@pytest.mark.parametrize("rule", STOCHASTIC)
def test_packed_and_shared_rows(backend, rule):
    case = make_tree_case(5, rule=rule, packed=True, shared_rows=True)
    rows, shared = case.inputs["target_rows"], case.inputs["children_rows"]
    index = shared[..., None].expand(-1, -1, case.inputs["draft_logits"].shape[-1])
    dense = case.replace(
        target_logits=case.inputs["target_logits"][rows],
        target_rows=None,
        draft_logits=case.inputs["draft_logits"].gather(1, index),
        children_rows=None,
    )
    same(backend.run_tree(case), backend.run_tree(dense))


def random_mask(shape, vocab, seed=0):
    """Two thirds of the tokens allowed, token 0 always; words and booleans."""
    allowed = torch.rand(*shape, vocab, generator=torch.Generator().manual_seed(seed)) < 0.66
    allowed[..., 0] = True
    bits = torch.nn.functional.pad(allowed, (0, -vocab % 32)).unflatten(-1, (-1, 32))
    words = (bits.long() << torch.arange(32)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32), allowed


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("draft", ["logits", "probs"])
def test_masks(backend, rule, draft):
    case = make_tree_case(6, rule=rule, draft=draft, vocab=70, philox=True, draft_vocab=65)
    shape = case.inputs["tokens"].shape
    words, allowed = random_mask(shape, 70)
    hidden = case.inputs["target_logits"].masked_fill(~allowed, -math.inf)
    name, nothing = f"draft_{draft}", -math.inf if draft == "logits" else 0.0
    theirs = case.inputs[name].masked_fill(~allowed[..., :65], nothing)
    expected = backend.run_tree(case.replace(**{"target_logits": hidden, name: theirs}))
    strange = case.inputs["target_logits"].masked_fill(~allowed, NAN)
    for target in (case.inputs["target_logits"], strange):
        masked = case.replace(target_logits=target, allowed_mask=words)
        same(backend.run_tree(masked), expected)


@pytest.mark.parametrize("rule", ["traversal", "recursive"])
@pytest.mark.parametrize("draft", ["logits", "probs"])
def test_reduced_draft_vocabularies(backend, rule, draft):
    entries, vocab = 9, 17
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:entries]
    for seed in range(2):
        case = make_tree_case(seed, rule=rule, draft=draft, draft_vocab=entries)
        tokens = case.inputs["tokens"]
        tokens = torch.where((tokens >= 0) & (tokens < entries), ids[tokens % entries], tokens)
        name, nothing = f"draft_{draft}", -math.inf if draft == "logits" else 0.0
        rows = case.inputs[name]
        wide = torch.full((*rows.shape[:2], vocab), nothing).index_copy(2, ids, rows)
        dense = case.replace(tokens=tokens, **{name: wide})
        mapped = case.replace(tokens=tokens, draft_token_ids=ids)
        for k in ("top_k", "top_p"):  # the target's are the draft's: ties are none here
            assert k in case.inputs
        out = backend.run_tree(mapped)
        assert assert_trees_match(out, REFERENCE.run_tree(dense), dense) == 0
    broken = ids.clone()
    broken[2] = broken[3]
    out = backend.run_tree(mapped.replace(draft_token_ids=broken))
    assert bool((out.status & 8 == 8).all())
    relaxed = mapped.replace(draft_token_ids=broken, rule="target_only")
    assert bool((backend.run_tree(relaxed).status & 8 == 0).all())


# ---- randomness, invariance ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", STOCHASTIC)
def test_seeds_are_their_uniforms(backend, rule):
    case = make_tree_case(7, rule=rule, philox=True, stream=9)
    coins = backend.uniforms(case.inputs["seeds"], case.inputs["positions"], 8, stream=9)
    given = case.replace(seeds=None, positions=None, uniforms=coins)
    same(backend.run_tree(case), backend.run_tree(given))


def test_coupled_is_sampling_without_speculation(backend):
    # The target's own draws, one position after the other, whatever the tree: a perfect binary one,
    # which holds them all, or any other.
    logits = torch.randn(6, 1, 2, generator=torch.Generator().manual_seed(0))
    noise = dict(seeds=torch.arange(6) - 3, positions=torch.arange(6) * 2**31 - 1)
    params = dict(temperature=torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0, 2.0]))
    steps = range(4)
    drawn = torch.stack(
        [
            backend.sample(
                logits[:, 0], **noise, **params, draft_index=depth, domain=3, stream=2
            ).tokens
            for depth in steps
        ],
        1,
    )
    perfect = (
        [-1, *((v - 1) // 2 for v in range(1, 15))],
        [-1, *((v + 1) % 2 for v in range(1, 15))],
    )
    for parents, tokens in (perfect, ([-1, 0, 0, 1, 1, 4], [-1, 0, 0, 1, 0, 1])):
        size = len(parents)
        out = backend.verify_tree(
            logits.expand(-1, size, -1),
            torch.tensor([tokens] * 6),
            torch.tensor([parents] * 6),
            **noise,
            **params,
            rule="coupled",
            stream=2,
        )
        if size == 15:
            assert out.num_accepted.tolist() == [3] * 6
        for b, n in enumerate(out.num_accepted.tolist()):
            assert out.tokens[b, : n + 1].tolist() == drawn[b, : n + 1].tolist()


@pytest.mark.parametrize("rule", TREE_RULES)
def test_batch_and_order_do_not_matter(operator, rule):
    case = make_tree_case(9, batch=12, rule=rule, philox=True)
    expected = operator.run_tree(case)
    order = [11, 3, 3, 0, 7]
    same(operator.run_tree(case.select(order)), (t[order] for t in expected))
    for b in range(4):
        same(operator.run_tree(case.select([b])), (t[b : b + 1] for t in expected))


def test_strides_do_not_matter(operator):
    case = make_tree_case(10, philox=True)
    strange = {}
    for name, value in case.inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            pad = torch.full_like(value[..., :3], NAN)
            strange[name] = torch.cat([pad, value, pad], -1)[..., 3:-3]
        elif isinstance(value, torch.Tensor):
            strange[name] = value.t().contiguous().t() if value.dim() == 2 else value
    same(operator.run_tree(case.replace(**strange)), operator.run_tree(case))


def test_raw_logprobs(backend):
    case = make_tree_case(11, stray=False)
    raw = backend.run_tree(case.replace(raw_logprobs=True))
    plain = backend.run_tree(case)
    same([raw.tokens, raw.path, raw.accept_probs], [plain.tokens, plain.path, plain.accept_probs])
    table = case.inputs["target_logits"].log_softmax(-1)
    for b, n in enumerate(raw.num_accepted.tolist()):
        nodes = [0, *raw.path[b, :n].tolist()]
        expected = torch.stack([table[b, v, x] for v, x in zip(nodes, raw.tokens[b], strict=False)])
        torch.testing.assert_close(raw.logprobs[b, : n + 1], expected, rtol=1e-5, atol=1e-5)
        assert bool(raw.logprobs[b, n + 1 :].isnan().all())


def test_a_deep_tree(backend):
    size = 1024  # Python's own recursion would not get there
    parents = torch.arange(size)[None] - 1
    rows = torch.zeros(1, 1, 2).expand(1, size, 2)
    tokens = torch.zeros(1, size, dtype=torch.int64)
    coins = torch.zeros(1, size, dtype=torch.float64)
    if backend is REFERENCE:
        rows, tokens, parents, coins = (t[:, :1024] for t in (rows, tokens, parents, coins))
    out = backend.verify_tree(rows, tokens, parents, uniforms=coins, rule="recursive")
    assert out.num_accepted.tolist() == [size - 1]
    assert torch.equal(out.path[0, :-1], torch.arange(1, size))


# ---- parity -------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "float16": dict(dtype=torch.float16),
    "packed int32": dict(packed=True, id_dtype=torch.int32),
    "draft filters": dict(draft_filters=True),
    "draft probs": dict(draft="probs"),
    "draft probs bfloat16": dict(draft="probs", dtype=torch.bfloat16),
    "no draft law": dict(draft="none"),
    "smaller draft vocabulary": dict(draft_vocab=11),
    "larger draft vocabulary": dict(draft_vocab=23, draft_filters=True),
    "philox stream": dict(philox=True, stream=7),
    "shared rows": dict(shared_rows=True),
    "raw logprobs": dict(raw_logprobs=True),
    "no filters": dict(filters=False, greedy_rows=False),
    "sixteen nodes": dict(nodes=16, batch=3),
    "vocabulary 1": dict(vocab=1),
    "vocabulary 2": dict(vocab=2),
    "several tiles": dict(vocab=9001, batch=2),
    "several tiles, bfloat16": dict(vocab=9001, batch=2, dtype=torch.bfloat16, filters=False),
}


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parity(operator, variant, rule):
    options = {**VARIANTS[variant], **(dict(philox=True) if rule == "coupled" else {})}
    for seed in range(2):
        case = make_tree_case(20 + seed, rule=rule, **options)
        expected = REFERENCE.run_tree(case)
        excused = assert_trees_match(
            operator.run_tree(case), expected, case, tolerance=operator.tolerance
        )
        assert excused <= 1


@pytest.mark.parametrize("rule", STOCHASTIC)
@pytest.mark.parametrize("variant", ["plain", "draft filters", "draft probs", "sixteen nodes"])
def test_reference_is_admissible_in_every_decision(variant, rule):
    case = make_tree_case(40, rule=rule, **VARIANTS[variant])
    result = REFERENCE.run_tree(case)
    for b in range(case.batch):
        assert explain_tree_outcome(result, case, b, tolerance=1e-9) == ""


def test_what_is_wrong_is_not_excused():
    case = make_tree_case(41, greedy_rows=False)
    right = REFERENCE.run_tree(case)
    size = case.inputs["tokens"].shape[1]
    wrong = {
        "accept_probs": right._replace(accept_probs=right.accept_probs * 0.999),
        "logprobs": right._replace(logprobs=right.logprobs + 1e-3),
        "status": right._replace(status=right.status + 1),
        "node|extra": REFERENCE.run_tree(
            case.replace(uniforms=case.inputs["uniforms"].flip(1).contiguous())
        ),
        "path": right._replace(num_accepted=(right.num_accepted + 1) % size),
    }
    for words, result in wrong.items():
        reasons = [explain_tree_outcome(result, case, b) for b in range(case.batch)]
        assert any(re.search(words, reason) for reason in reasons), (words, reasons)
        with pytest.raises(AssertionError):
            assert_trees_match(result, right, case)


# ---- errors -------------------------------------------------------------------------------------

B, N, V = 2, 3, 5


def ints(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def floats(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def arguments():
    return dict(
        target_logits=floats(B, N, V),
        tokens=ints(B, N),
        parents=ints(B, N),
        draft_logits=floats(B, N, V),
        uniforms=floats(B, N, dtype=torch.float64),
    )


SEEDS = dict(seeds=ints(B), positions=ints(B), uniforms=None)
PROBS = dict(draft_logits=None, draft_probs=floats(B, N, V))

# (changed arguments, everything that the message must contain, between bars)
VALUE_ERRORS = [
    (dict(target_logits=floats(B, N + 1, V)), "target_logits | [B, N, V] | [2, 4, 5] float32"),
    (dict(target_logits=floats(B, N, V, dtype=torch.float64)), "target_logits | float64"),
    (dict(target_logits=floats(B, N, 0)), "target_logits | at least one vocabulary entry"),
    (dict(target_logits=floats(B, N, V, 2)[..., 0]), "target_logits | unit stride | stride 2"),
    (dict(target_rows=ints(B, N)), "target_logits | [R, V] | [2, 3, 5]"),
    (dict(target_rows=ints(B, N + 1), target_logits=floats(7, V)), "target_rows | [B, N] | [2, 4]"),
    (dict(tokens=ints(N)), "tokens | [B, N] int32 or int64 | [3] int64"),
    (dict(tokens=floats(B, N)), "tokens | int32 or int64 | float32"),
    (dict(tokens=ints(B, 0)), "tokens | 1 to 1024 nodes | [2, 0]"),
    (dict(tokens=ints(B, 1025)), "tokens | 1 to 1024 nodes | [2, 1025]"),
    (dict(parents=ints(B, N - 1)), "parents | [B, N] = [2, 3] int32 or int64 | [2, 2] int64"),
    (dict(parents=floats(B, N)), "parents | int32 or int64 | float32"),
    (dict(kinds=ints(B, N)), "kinds | [B, N] = [2, 3] int8 | [2, 3] int64"),
    (dict(kinds=ints(B, N + 1, dtype=torch.int8)), "kinds | [B, N] = [2, 3] int8 | [2, 4] int8"),
    (dict(draft_logits=floats(B, N + 1, V)), "draft_logits | [B, N, Vd] | [2, 4, 5]"),
    (dict(draft_logits=floats(B + 1, 1, V), children_rows=ints(B, N)),
     "draft_logits | [B, R, Vd] | [3, 1, 5]"),
    (dict(children_rows=ints(B, N + 1)), "children_rows | [B, N] | [2, 4]"),
    (dict(children_rows=ints(B, N), draft_logits=None),
     "children_rows | draft_logits or draft_probs"),
    (dict(draft_probs=floats(B, N, V)), "draft_logits | draft_probs | both"),
    ({**PROBS, "draft_top_k": ints(B)}, "draft_top_k | draft_probs"),
    (dict(draft_logits=None, draft_temperature=floats(B)), "draft_logits or draft_probs"),
    (dict(draft_logits=None, draft_token_ids=ints(V)), "draft_token_ids | neither"),
    (dict(draft_logits=floats(B, N, V + 1), draft_token_ids=ints(V + 1)), "draft_token_ids"),
    (dict(allowed_mask=ints(B, N, 2, dtype=torch.int32)), "allowed_mask | [B, N, ceil(V/32)]"),
    (dict(uniforms=floats(B, N + 1, dtype=torch.float64)), "uniforms | [B, N] | [2, 4]"),
    (dict(uniforms=floats(B, N)), "uniforms | float64 | float32"),
    (dict(uniforms=None), "uniforms | seeds | positions"),
    ({**SEEDS, "positions": None}, "seeds | positions"),
    ({**SEEDS, "uniforms": floats(B, N, dtype=torch.float64)}, "uniforms | seeds"),
    (dict(rule="coupled"), "coupled | seeds and positions | uniforms"),
    (dict(rule="block"), "traversal | recursive | target_only | greedy | coupled | block"),
    (dict(stream=256), "stream | 256"),
    (dict(temperature=floats(B + 1)), "temperature | [B] | [3]"),
    (dict(top_k=floats(B)), "top_k | int32 or int64 | float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS, ids=lambda v: str(v)[:50])
def test_value_errors(operator, changes, message):
    with pytest.raises(ValueError) as raised:
        operator.verify_tree(**{**arguments(), **changes})
    text = str(raised.value)
    assert text.startswith("verify_tree: ")
    for part in message.split(" | "):
        assert part in text, text


TYPE_ERRORS = [
    (dict(tokens=[[1]]), "tokens must be a Tensor, got list"),
    (dict(parents=None), "parents must be a Tensor, got NoneType"),
    (dict(kinds=[[0]]), "kinds must be a Tensor or None, got list"),
    (dict(rule=None), "rule must be a str, got NoneType"),
    (dict(stream=1.0), "stream must be an int, got float"),
    (dict(raw_logprobs=1), "raw_logprobs must be a bool, got int"),
    (dict(top_k=2.0), "top_k must be a Tensor, an int, a list"),
]


@pytest.mark.parametrize(("changes", "message"), TYPE_ERRORS, ids=lambda v: str(v)[:40])
def test_type_errors(changes, message):
    with pytest.raises(TypeError, match=f"^verify_tree: {re.escape(message)}"):
        specdec_ext.verify_tree(**{**arguments(), **changes})


def test_the_public_function():
    case = make_tree_case(12, filters=False, greedy_rows=False, batch=4)
    inputs = {k: v for k, v in case.inputs.items() if k not in ("uniforms", "temperature")}
    first = specdec_ext.verify_tree(
        **inputs, temperature=0.7, generator=torch.Generator().manual_seed(5)
    )
    again = specdec_ext.verify_tree(
        **inputs, temperature=[0.7] * 4, generator=torch.Generator().manual_seed(5)
    )
    assert isinstance(first, specdec_ext.VerifyTreeResult)
    same(first, again)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    specdec_ext.verify_tree(**{**inputs, "rule": "greedy"})
    assert torch.equal(torch.get_rng_state(), before)  # no randomness is needed
    specdec_ext.verify_tree(**inputs)
    assert not torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="generator must be None where uniforms are given"):
        specdec_ext.verify_tree(**case.inputs, generator=torch.Generator())
    slow = specdec_ext.verify_tree(**case.inputs, backend="reference")
    assert assert_trees_match(specdec_ext.verify_tree(**case.inputs), slow, case) <= 1


# ---- opcheck, compile, export -------------------------------------------------------------------

POSITIONAL = ("target_logits", "tokens", "parents", "draft_logits")


def split(case):
    args = tuple(case.inputs.get(name) for name in POSITIONAL)
    return args, {k: v for k, v in case.inputs.items() if k not in POSITIONAL}


@pytest.mark.parametrize("rule", TREE_RULES)
def test_opcheck(rule):
    case = make_tree_case(13, batch=2, nodes=5, vocab=9, rule=rule, philox=True, packed=True)
    args, kwargs = split(case)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.specdec.verify_tree.default, args, kwargs, test_utils=checks)
    # The fourth check compares without equal_nan: a chain of arg maxes at T = 0 has no NaN.
    rows = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.int64), rows.argmax(-1)[:, :-1]], 1)
    parents = torch.tensor([[-1, 0, 1]] * 2)
    seeds = torch.arange(2)
    noise = dict(seeds=seeds, positions=seeds, temperature=torch.zeros(2), rule=rule)
    opcheck(torch.ops.specdec.verify_tree.default, (rows, tokens, parents, rows), noise)
    out = torch.ops.specdec.verify_tree(rows, tokens, parents, rows, **noise)
    assert not any(t.requires_grad or bool(t.isnan().any()) for t in out)


def call(target_logits, tokens, parents, draft_logits, kinds, seeds, positions, temperature):
    return specdec_ext.verify_tree(
        target_logits,
        tokens,
        parents,
        draft_logits,
        kinds=kinds,
        seeds=seeds,
        positions=positions,
        temperature=temperature,
    )


NAMES = (*POSITIONAL, "kinds", "seeds", "positions", "temperature")


def tensors(seed, batch, nodes, vocab):
    inputs = make_tree_case(seed, batch=batch, nodes=nodes, vocab=vocab, philox=True).inputs
    return tuple(inputs[name] for name in NAMES)


def test_compiled_whole():
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, nodes, vocab in ((3, 5, 9), (4, 7, 33)):
        args = tensors(14, batch, nodes, vocab)
        same(compiled(*args), call(*args))


class Verifier(torch.nn.Module):
    def forward(self, *args):
        return tuple(call(*args))


def test_export():
    args = tensors(15, 3, 5, 9)
    program = torch.export.export(Verifier(), args)
    same(program.module()(*args), call(*args))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.specdec.verify_tree.default in targets


# ---- memory -------------------------------------------------------------------------------------

FENCED = """
import torch
import specdec_ext
from guard import fenced
from specdec_ext.testing import make_tree_case

variants = [
    dict(vocab=4097), dict(vocab=1), dict(vocab=31, draft_vocab=17), dict(vocab=97, nodes=1),
    dict(vocab=777, draft_filters=True), dict(vocab=4099, dtype=torch.bfloat16),
    dict(vocab=4111, dtype=torch.float16, id_dtype=torch.int32), dict(vocab=63, packed=True),
    dict(vocab=9, nodes=16, shared_rows=True), dict(vocab=503, draft="probs", raw_logprobs=True),
]
ops = torch.ops.specdec
for seed, variant in enumerate(variants):
    case = make_tree_case(seed, **{"batch": 3, "nodes": 7, "philox": True, **variant})
    # Parents, ids and rows that lead out of bounds, if they are followed.
    wild = case.replace(
        parents=case.inputs["parents"].roll(1, 1) * 1000, tokens=case.inputs["tokens"] + 10**6
    )
    for inputs in (case.inputs, wild.inputs):
        for side in ("end", "start"):
            beside = {
                k: fenced(v.contiguous(), side) if isinstance(v, torch.Tensor) else v
                for k, v in inputs.items()
            }
            for rule in specdec_ext.ops.TREE_RULES:
                expected = ops.verify_tree(**{**inputs, "rule": rule})
                got = ops.verify_tree(**{**beside, "rule": rule})
                for a, b in zip(got, expected):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
print("unharmed")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["avx512", "avx2", "baseline"])
def test_nothing_is_read_beside_the_tensors(run_python, variant):
    run_variant(run_python, FENCED, variant, "unharmed")
