"""Losslessness of trees as an equality, and wrong verifiers that must fail it.

`specdec_ext.testing.exact_tree_law` integrates out drafts, coins and final draws; nothing
here is sampled. Each control makes one known mistake (FIELD_NOTES A.6, A.14, and those that the
kinds of children invite), and must come out biased by far more than the operators may be.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from backends import FIBRES32
from conftest import REFERENCE

from specdec_ext.contract import rule_names
from specdec_ext.ops import VerifyTreeResult
from specdec_ext.testing import (
    draft_trees,
    exact_tree_law,
    post_order,
    toy_models,
)

RULES = rule_names(trees=True, takes_coins=True)

# Parents and kinds: 0 deterministic, 1 i.i.d., 2 without replacement, 3 from the rest.
SMALL = {
    "one child": ([-1, 0], [0, 1]),
    "two i.i.d.": ([-1, 0, 0], [0, 1, 1]),
    "two without replacement": ([-1, 0, 0], [0, 2, 2]),
    "two deterministic": ([-1, 0, 0], [0, 0, 0]),
    "rest first": ([-1, 0, 0], [0, 3, 0]),
    "rest last": ([-1, 0, 0, 0], [0, 0, 0, 3]),
    "deterministic, then i.i.d.": ([-1, 0, 0], [0, 0, 1]),
    "i.i.d. around a deterministic one": ([-1, 0, 0, 0], [0, 1, 0, 1]),
    "a chain": ([-1, 0, 1], [0, 1, 1]),
    "i.i.d., one goes on": ([-1, 0, 0, 1], [0, 1, 1, 1]),
    "all without replacement": ([-1, 0, 0, 0], [0, 2, 2, 2]),
}
LARGE = {
    "two and two": ([-1, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]),
    "three deep": ([-1, 0, 0, 1, 2, 3, 3], [0, 2, 2, 1, 0, 3, 0]),
    "three wide": ([-1, 0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 3, 0]),
    "mixed kinds": ([-1, 0, 0, 0, 1, 1, 2], [0, 0, 2, 2, 1, 0, 1]),
    "index order against depth": ([-1, 0, 1, 0, 2, 3], [0, 2, 1, 2, 3, 1]),
}


def depth_of(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def law_of(verify_tree, shape, rule, vocab=3, seed=0, models=None, **kwargs):
    parents, kinds = shape
    target, draft = models or toy_models(seed + 7 * len(parents), vocab, depth_of(parents))
    return exact_tree_law(verify_tree, parents, kinds, target, draft, rule=rule, bits=34, **kwargs)


def check(backend, law):
    assert law.tv < backend.tv
    assert law.threshold_gap < 1e-6
    assert abs(float(law.num_accepted.sum()) - 1) < 1e-9
    assert law.status == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SMALL)
def test_emitted_law_is_the_targets(backend, shape, rule):
    # The reference takes milliseconds a tree.
    vocab = 2 if shape == "i.i.d., one goes on" and backend is REFERENCE else 3
    check(backend, law_of(backend.verify_tree, SMALL[shape], rule, vocab=vocab))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", LARGE)
def test_larger_trees(operator, shape, rule):
    # Of three tokens, the stand-in for CUDA takes minutes a tree, and it has SMALL ones of three.
    vocab = 2 if operator is FIBRES32 or len(LARGE[shape][0]) > 6 else 3
    check(operator, law_of(operator.verify_tree, LARGE[shape], rule, vocab=vocab))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.6, top_p=0.8),
        dict(top_k=2, draft_temperature=1.5, draft_top_k=3),
        dict(min_p=0.2, draft_temperature=0.5, draft_min_p=0.05),
        dict(temperature=0.0),
        dict(draft_temperature=0.0),
    ],
    ids=str,
)
def test_with_filters(operator, rule, options):
    # Filters of the draft can leave nothing to draw without replacement: then nothing is there.
    for shape in ("i.i.d., one goes on", "all without replacement", "rest last"):
        law = law_of(operator.verify_tree, SMALL[shape], rule, seed=3, **options)
        check(operator, law)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_vocab", [2, 4])
def test_other_draft_vocabularies(operator, rule, draft_vocab):
    models = toy_models(5, 3, 2, draft_vocab=draft_vocab)
    for kinds in ([0, 1, 1, 1], [0, 2, 2, 0], [0, 3, 0, 1]):
        check(
            operator,
            law_of(operator.verify_tree, ([-1, 0, 0, 1], kinds), rule, models=models),
        )


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_in_a_batch_with_greedy_requests_and_padding(operator, rule):
    # Every call has other trees at T = 0 beside it, and two nodes of padding in every request.
    other = {"tokens": 1, "parents": 0, "temperature": 0.0, "uniforms": 0.25}

    def crowded(name, value):
        if name == "uniforms":  # the last slot stays the final draw's
            value = torch.cat([value[:, :-1], 0 * value[:, :2], value[:, -1:]], 1)
        elif value.dim() > 1:
            fill = torch.full_like(value[:, :1], -1 if name == "parents" else 0)
            value = torch.cat([value, fill, fill], 1)
        beside = value[:1].clone()
        if name in other:
            beside.fill_(other[name])
        if name == "parents":
            beside[:, [0, -1]] = -1
        return torch.cat([beside, value, beside])

    def verify_tree(**inputs):
        count, size = inputs["tokens"].shape
        rule = inputs.pop("rule")
        inputs = {"temperature": torch.ones(count), **inputs}
        out = operator.verify_tree(**{k: crowded(k, v) for k, v in inputs.items()}, rule=rule)
        assert all(bool((t[1:-1, size:] == -1).all()) for t in (out.tokens, out.path))
        return VerifyTreeResult(*(t[1:-1, :size] if t.dim() > 1 else t[1:-1] for t in out))

    check(operator, law_of(verify_tree, SMALL["i.i.d., one goes on"], rule))
    check(operator, law_of(verify_tree, SMALL["rest last"], rule))


def test_target_only_is_lossless_however_the_tree_was_drafted():
    # Tokens drawn without replacement, and no draft law that says so.
    def verify_tree(**inputs):
        del inputs["draft_logits"], inputs["kinds"]
        return REFERENCE.verify_tree(**inputs)

    check(REFERENCE, law_of(verify_tree, SMALL["two without replacement"], "target_only"))


# ---- traversal against recursive ----------------------------------------------------------------


def expected_accepted(parents, tokens, probs, rule):
    """Expected number of accepted tokens, given what was drafted, from accept_probs."""
    if rule == "traversal":
        mean, nothing_yet = 0.0, 1.0
        for v in post_order(parents):
            h = 1.0 if v == 0 else probs[v]
            mean += 0.0 if math.isnan(h) else nothing_yet * h * depth_of_node(parents, v)
            nothing_yet *= 1.0 if math.isnan(h) else 1.0 - h
        return mean

    def below(v):
        mean, left = 0.0, 1.0
        for c in range(1, len(parents)):
            if parents[c] == v and not math.isnan(probs[c]):
                mean += left * probs[c] * (1 + below(c))
                left *= 1.0 - probs[c]
        return mean

    return below(0)


def depth_of_node(parents, v):
    return 0 if v == 0 else 1 + depth_of_node(parents, parents[v])


@cache
def accepted_by_rule(shape, seed, vocab=3):
    """Mean accepted tokens under both rules, over the same drafts, from the reference's thresholds.

    Under "recursive" a coin is asked for by accepting what is above it and rejecting the rest.
    """
    from specdec_ext.testing.tree_exact import _tree_inputs

    parents, kinds = {**SMALL, **LARGE}[shape]
    target, draft = toy_models(seed, vocab, depth_of(parents))
    trees = draft_trees(parents, kinds, [table.double().softmax(-1) for table in draft])
    inputs = _tree_inputs(trees, parents, kinds, target, draft)
    size = len(parents)
    weights = [w for _, w in trees]

    def run(uniforms, rule):
        u = torch.tensor([[*uniforms, 0.5]] * len(trees), dtype=torch.float64)
        return REFERENCE.verify_tree(**inputs, uniforms=u, rule=rule).accept_probs.tolist()

    found = {"traversal": run([0.5] * (size - 1), "traversal")}
    walked = [[math.nan] * size for _ in trees]
    for v in range(1, size):
        above = {v}
        while 0 not in above:
            above.add(parents[min(above)])
        u = [0.0 if c in above and c != v else 1 - 2.0**-53 for c in range(1, size)]
        for row, probs in zip(walked, run(u, "recursive"), strict=True):
            row[v] = probs[v]
    found["recursive"] = walked
    return {
        rule: sum(
            w * expected_accepted(parents, tokens, p, rule)
            for (tokens, _), w, p in zip(trees, weights, probs, strict=True)
        )
        for rule, probs in found.items()
    }


@pytest.mark.parametrize("shape", [*SMALL, "index order against depth"])
def test_traversal_never_accepts_less(shape):
    gains = []
    for seed in range(2):
        mean = accepted_by_rule(shape, seed, vocab=2 if shape in LARGE else 3)
        gains.append(mean["traversal"] - mean["recursive"])
    assert min(gains) > -1e-6
    if depth_of({**SMALL, **LARGE}[shape][0]) > 1:
        assert max(gains) > 1e-3  # the comparison can tell them apart


def test_means_are_those_of_the_exact_law():
    mean = accepted_by_rule("i.i.d., one goes on", 1, vocab=2)
    models = toy_models(1, 2, 2)
    for rule, value in mean.items():
        law = law_of(REFERENCE.verify_tree, SMALL["i.i.d., one goes on"], rule, models=models)
        assert abs(law.mean_accepted - value) < 1e-6


# ---- wrong verifiers ----------------------------------------------------------------------------


class Naive:
    """The recursive rule over explicit residual laws, in plain Python; subclasses override."""

    def law(self, row, temperature):
        top = max(row)
        weights = [math.exp((x - top) / temperature) for x in row]
        return [w / sum(weights) for w in weights]

    def proposal(self, q, kind, token, siblings):
        """Law that a child was drawn from; `siblings`: (kind, token, comes before)."""
        law = list(q)
        if kind == 0:
            return [float(x == token) for x in range(len(q))]
        for other, x, before in siblings:
            if (kind == 2 and other == 2 and before) or (kind == 3 and other == 0):
                law[x] = 0.0
        return [s / sum(law) for s in law]

    def drops(self, token, kind, tried, p, q):
        return False

    def accept_prob(self, r, s, x, p, tried):
        return min(1.0, r[x] / s[x])

    def after(self, r, s, x, p):
        left = [max(a - b, 0.0) for a, b in zip(r, s, strict=True)]
        return [a / sum(left) for a in left] if sum(left) > 0 else left

    def walk(self, parents, tokens, kinds, p, q, coins):
        """Path and the law of the extra token."""
        v, path = 0, []
        while True:
            r, tried, following = p[v], [], None
            children = [c for c in range(1, len(parents)) if parents[c] == v and tokens[c] >= 0]
            for c in children:
                siblings = [(kinds[d], tokens[d], d < c) for d in children if d != c]
                if self.drops(tokens[c], kinds[c], tried, p[v], q[v]):
                    continue
                s = self.proposal(q[v], kinds[c], tokens[c], siblings)
                if coins[c - 1] < self.accept_prob(r, s, tokens[c], p[v], tried):
                    following = c
                    break
                r = self.after(r, s, tokens[c], p[v])
                tried.append(tokens[c])
            if following is None:
                return path, r if sum(r) > 0 else p[v]
            path.append(following)
            v = following

    def __call__(
        self,
        *,
        target_logits,
        tokens,
        parents,
        draft_logits,
        kinds,
        uniforms,
        rule,
        temperature=None,
    ):
        batch, size = tokens.shape
        out = torch.full((2, batch, size), -1)
        count = torch.zeros(batch, dtype=torch.int32)
        for b in range(batch):
            t = 1.0 if temperature is None else float(temperature[b])
            p = [self.law(row, t) for row in target_logits[b].double().tolist()]
            q = [self.law(row, t) for row in draft_logits[b].double().tolist()]
            u = uniforms[b].tolist()
            x, above, kind = tokens[b].tolist(), parents[b].tolist(), kinds[b].tolist()
            path, law = self.walk(above, x, kind, p, q, u)
            n = count[b] = len(path)
            prefix, total = 0.0, u[-1] * sum(law)
            extra = next(
                (y for y, w in enumerate(law) if w > 0 and (prefix := prefix + w) > total),
                max(y for y, w in enumerate(law) if w > 0),
            )
            out[0, b, : n + 1] = torch.tensor([*(x[v] for v in path), extra])
            out[1, b, :n] = torch.tensor(path, dtype=torch.int64)
        nothing = torch.full((batch, size), math.nan)
        return VerifyTreeResult(
            out[0], out[1], count, nothing, nothing, torch.zeros(batch, dtype=torch.int32)
        )


class NoResidualUpdate(Naive):
    """A.6: p / q for every sibling, as if none had been rejected; the residual is the last one's"""

    def accept_prob(self, r, s, x, p, tried):
        return min(1.0, p[x] / s[x])

    def after(self, r, s, x, p):
        return super().after(p, s, x, p)


class LongestPathWins(Naive):
    """A.6: independent coins for each path, the longest accepted one wins."""

    def walk(self, parents, tokens, kinds, p, q, coins):
        def accepted(v):
            above = parents[v]
            ok = coins[v - 1] * q[above][tokens[v]] < p[above][tokens[v]]
            return ok and (above == 0 or accepted(above))

        def nodes(v):
            return [] if v == 0 else [*nodes(parents[v]), v]

        end = max(range(len(parents)), key=lambda v: (v == 0 or accepted(v)) * len(nodes(v)))
        children = [c for c in range(1, len(parents)) if parents[c] == end]
        if not children:
            return nodes(end), p[end]
        return nodes(end), self.after(p[end], q[end], tokens[children[0]], p[end])


class DuplicatesCountedTwice(Naive):
    """A.6: a token that a sibling has tried already is accepted as if it were fresh."""

    def accept_prob(self, r, s, x, p, tried):
        return min(1.0, (p if x in tried else r)[x] / s[x])


class WrongKappaOfTheRest(Naive):
    """The rest child tested against q without the deterministic siblings, but not normalised."""

    def proposal(self, q, kind, token, siblings):
        law = super().proposal(q, kind, token, siblings)
        return [a if s > 0 else 0.0 for a, s in zip(q, law, strict=True)] if kind == 3 else law


class DeterministicZeroedInQ(Naive):
    """q without the deterministic tokens where no child was drawn from that law."""

    def proposal(self, q, kind, token, siblings):
        return super().proposal(q, 3 if kind == 1 else kind, token, siblings)

    def accept_prob(self, r, s, x, p, tried):
        return min(1.0, r[x] / s[x]) if s[x] > 0 else 0.0


class DropsRepeatedTokens(Naive):
    """A.14: a drawn child left out because a sibling has its token."""

    def drops(self, token, kind, tried, p, q):
        return token in tried


class DropsUnlikelyTokens(Naive):
    """A.14: a drawn child left out because the target finds it unlikely."""

    def drops(self, token, kind, tried, p, q):
        return kind != 0 and p[token] < 0.2


class ResidualOfTheRoot(Naive):
    """A.6: the correction not from the node's own residual."""

    def walk(self, parents, tokens, kinds, p, q, coins):
        path, law = super().walk(parents, tokens, kinds, p, q, coins)
        return path, law if not path else super().walk([-1], [-1], [0], p[:1], q[:1], [])[1]


class WithoutReplacementAsIid(Naive):
    """Siblings drawn without replacement, tested against q itself."""

    def proposal(self, q, kind, token, siblings):
        return super().proposal(q, min(kind, 1), token, siblings)


def twice(prefix, n):
    """The same token for all deterministic siblings."""
    return [0] * n


CONTROLS = [
    (NoResidualUpdate, "two i.i.d.", {}),
    (NoResidualUpdate, "two deterministic", {}),
    (LongestPathWins, "two i.i.d.", {}),
    (LongestPathWins, "i.i.d., one goes on", {}),
    (DuplicatesCountedTwice, "two deterministic", dict(deterministic=twice)),
    (WrongKappaOfTheRest, "rest first", {}),
    (DeterministicZeroedInQ, "deterministic, then i.i.d.", {}),
    (DropsRepeatedTokens, "deterministic, then i.i.d.", {}),
    (DropsUnlikelyTokens, "one child", {}),
    (ResidualOfTheRoot, "a chain", {}),
    (WithoutReplacementAsIid, "two without replacement", {}),
]
BIAS = 0.01


@pytest.mark.parametrize("shape", SMALL)
def test_the_harness_passes_what_is_right(shape):
    law = law_of(Naive(), SMALL[shape], "recursive")
    assert law.tv < 1e-9


@pytest.mark.parametrize(
    "control, shape, options", CONTROLS, ids=[f"{c.__name__}, {shape}" for c, shape, _ in CONTROLS]
)
def test_a_wrong_verifier_fails(control, shape, options):
    worst = max(
        law_of(control(), SMALL[shape], "recursive", seed=seed, **options).tv for seed in range(2)
    )
    assert worst > BIAS
