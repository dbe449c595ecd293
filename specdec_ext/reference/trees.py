"""`verify_tree`, in the words of `specdec_ext.reference`.

Node 0 of a tree is the root, the state before anything drafted; node v holds a draft token, and row
v of the target logits is the law after the tokens on the way from the root to v. The *children* of
a node are proposals for one and the same next token, looked at in index order. A child's kind says
how it was proposed: deterministic (chosen, not drawn), or drawn from the law of its parent's draft
row: independently of its siblings, without replacement, or from what the deterministic siblings
leave (rest).

A node starts from its target law p. Each rejected child takes its share away, and what remains is
[p - lambda q]+ outside the tokens tried: nested rejection residuals collapse to the scalar lambda,
since [[p - l1 q]+ - l2 q]+ = [p - (l1 + l2) q]+ (docs/design.md, "Acceptance").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import contract
from ..contract import (
    GREEDY_BELOW,
    KIND_DETERMINISTIC,
    KIND_IID,
    KIND_REST,
    KIND_WITHOUT_REPLACEMENT,
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    VerifyTreeResult,
)
from . import draws
from .caches import tree_size
from .draws import (
    clamped,
    inverse_cdf,
    law_weights,
    race,
    race_noise,
    residual_weights,
)
from .laws import (
    NAN,
    DraftVocabulary,
    Filters,
    Law,
    both_filters,
    from_list,
    make_law,
    masked,
    prob_of,
    ratio,
    row_at,
    words_of,
)

__all__ = ["TREE_RULES", "verify_tree"]

DRAWN = (KIND_IID, KIND_WITHOUT_REPLACEMENT, KIND_REST)


# -------------------------------------------------------------------------------------------------
# Topology
# -------------------------------------------------------------------------------------------------


def _children(parents: list[int], kinds: list[int]) -> list[list[int]] | None:
    """Children of every real node, in index order; None if this is no valid tree."""
    real = tree_size(parents)
    if real == 0:
        return None
    children: list[list[int]] = [[] for _ in range(real)]
    for v in range(1, real):
        children[parents[v]].append(v)
    for siblings in children:
        sampled = [kinds[c] for c in siblings if kinds[c] in DRAWN]
        if len(set(sampled)) > 1 or sampled.count(KIND_REST) > 1:
            return None
    return children


def _post_order(children: list[list[int]]) -> list[int]:
    """Nodes with all that is below a node before it, and siblings in index order."""
    order, stack = [], [0]
    while stack:
        v = stack.pop()
        order.append(v)
        stack.extend(children[v])
    return order[::-1]


# -------------------------------------------------------------------------------------------------
# A node and its children
# -------------------------------------------------------------------------------------------------


class _Child(NamedTuple):
    """A usable child. It was drawn from ``kappa q``; kappa None: it is deterministic."""

    node: int
    token: int
    q: Tensor | None
    kappa: float | None


class _Node:
    """A node between two of its children.

    Attributes
    ----------
    inflow : float
        a: the probability with which the walk has to end here or below, given that it ends at none
        of the children closed so far. After the last one it is h.
    lambda_, mass : float
        What remains for the children to come is [p - lambda q]+ outside `tried`, which sums to S.
    scale, share : float
        The same times R / S: [scale p - share q]+, with lambda = share / scale.
    tried : list of int
        X: the tokens of the children closed so far.
    """

    def __init__(self, p: Tensor, inflow: float) -> None:
        self.p, self.q = p, torch.zeros(0, dtype=p.dtype)
        self.inflow, self.mass, self.lambda_ = inflow, 1.0, 0.0
        self.scale, self.share = 1.0, 0.0
        self.tried: list[int] = []
        self.left_out: list[int] = []  # tokens of X that S does without

    def offer(self, child: _Child) -> float:
        """Give b, the probability that goes to this child out of what flows in here."""
        left = prob_of(self.p, child.token) - self.lambda_ * prob_of(self.q, child.token)
        if child.token in self.tried or left <= 0 or self.mass <= 0:
            return 0.0
        wanted = self.inflow * (left / self.mass)
        if child.kappa is None:
            return min(1.0, wanted)
        assert child.q is not None
        return ratio(wanted, child.kappa * prob_of(child.q, child.token))

    def close(self, child: _Child) -> None:
        """Take away what the child was offered."""
        if self.inflow > 0 and self.mass > 0:
            self.scale = self.inflow / self.mass
            self.share = self.scale * self.lambda_
            # A drawn token, rejected, has no residual left. It may have some where it is accepted
            # for certain: then nothing that follows here decides, and h is that of `verify`.
            if child.kappa is None:
                self.left_out = [*self.left_out, child.token]
            else:
                assert child.q is not None
                self.q = child.q
                self.share += child.kappa
                self.left_out = self.tried
            mass = float(self.residual(self.left_out).sum())  # R
            self.lambda_, self.mass = self.share / self.scale, mass / self.scale
            if self.inflow < 1:
                self.inflow = mass / (mass + (1.0 - self.inflow)) if mass > 0 else 0.0
        self.tried = [*self.tried, child.token]

    def residual(self, excluded: list[int]) -> Tensor:
        """``[V]`` float64: [scale p - share q]+ outside some tokens, not normalised."""
        positive = self.scale * self.p
        both = min(len(self.p), len(self.q))
        positive[:both] -= self.share * self.q[:both]
        positive.clamp_(min=0.0)
        positive[[token for token in excluded if token < len(positive)]] = 0.0
        return positive


# -------------------------------------------------------------------------------------------------
# What the rules read
# -------------------------------------------------------------------------------------------------


class _Verdict(NamedTuple):
    """What a rule decides: the winning node, accept_probs of nodes, and the extra token."""

    winner: int
    accept_probs: dict[int, float]
    token: int


class _Tree:
    """One request of `verify_tree`, as the rules see it. Rows are read when a rule asks for them.

    Attributes
    ----------
    children : list of list of int
        Of every real node, those that are usable as far as ids and kinds go.
    status : int
        Status bits found so far.
    """

    def __init__(
        self,
        tokens: list[int],
        kinds: list[int],
        children: list[list[int]],
        depths: list[int],
        target_row: Callable[[int], Tensor | None],
        draft_law: Callable[[int], Tensor | None],
        filters: Filters,
        coins: list[float],
        noise: Callable[[int], Tensor],
        status: int,
    ) -> None:
        self.tokens, self.kinds, self.children, self.depths = tokens, kinds, children, depths
        self.target_row, self.draft_law = target_row, draft_law
        self.filters, self.coins, self.final, self.noise = filters, coins, coins[-1], noise
        self.status = status
        self.law = cache(self._law)

    def _law(self, v: int) -> Law | None:
        row = self.target_row(v)
        return None if row is None else make_law(row, self.filters)

    def open(self, v: int, inflow: float) -> _Node:
        """Give node v before its first child. Without a law it is a leaf, and nothing is read."""
        law = self.law(v)
        return _Node(torch.zeros(0) if law is None else law.probs, inflow)

    def usable_children(self, v: int) -> Iterator[_Child]:
        """Look at the children of v one by one, as far as they are asked for.

        One that cannot have been drawn from the law that was passed is left out, and what is below
        it. A node without a target law has no children.
        """
        if self.law(v) is None:
            return
        children = self.children[v]
        deterministic = [self.tokens[c] for c in children if self.kinds[c] == KIND_DETERMINISTIC]
        q = self.draft_law(v) if len(deterministic) < len(children) else None
        drawn_from = 1.0  # the part of q that the next drawn child comes from
        if q is not None and any(self.kinds[c] == KIND_REST for c in children):
            q = q.clone()
            q[[token for token in deterministic if token < len(q)]] = 0.0
            drawn_from = float(q.sum())
        for c in children:
            x, kind = self.tokens[c], self.kinds[c]
            if kind == KIND_DETERMINISTIC:
                yield _Child(c, x, None, None)
            elif q is None or prob_of(q, x) <= 0 or drawn_from <= 0:
                self.status |= STATUS_NO_DRAFT_LAW
            else:
                kappa = 1.0 / drawn_from
                if kind == KIND_WITHOUT_REPLACEMENT:
                    drawn_from -= prob_of(q, x)
                yield _Child(c, x, q, kappa)

    def draw(self, v: int, node: _Node | None = None) -> int:
        """Draw from what is left of node v; from its law where it is new or nothing is left."""
        law = self.law(v)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        if node is not None and node.tried:
            weights = residual_weights(node.residual(node.tried))
            if int(weights.sum()) > 0:
                return inverse_cdf(weights, self.final)
        return inverse_cdf(law_weights(law.weights), self.final)

    def argmax(self, v: int) -> int:
        """Give the arg max of row v; token 0 where it has no law."""
        law = self.law(v)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return law.argmax

    def race(self, v: int) -> int:
        """Race for the token after node v, on the noise of its depth; token 0: no law."""
        law = self.law(v)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return race(law.weights, self.noise(self.depths[v]))


# -------------------------------------------------------------------------------------------------
# One function per rule
# -------------------------------------------------------------------------------------------------

_Decide: TypeAlias = Callable[[_Tree], _Verdict]

#: What each rule decides, by its name.
TREE_RULES: dict[str, _Decide] = {}


def _rule(name: str) -> Callable[[_Decide], _Decide]:
    """Make the function below it what `verify_tree` does under a rule."""

    def enter(decide: _Decide) -> _Decide:
        TREE_RULES[name] = decide
        return decide

    return enter


@_rule("traversal")
def _traversal(tree: _Tree) -> _Verdict:
    """All coins are flipped; the first success in post-order wins. Block verification on a chain.

    h(v), the threshold of v's coin, depends on no coin: inflows go down the tree, and what flows
    into a node and is left after its children decides there.
    """
    inflows = {0: 1.0}
    h: dict[int, float] = {}
    nodes: dict[int, _Node] = {}
    for v in range(len(tree.children)):  # parents come before their children
        if v not in inflows:
            continue  # unusable, or below what is, or below a row without a law
        if inflows[v] == 0.0:  # h = 0 in all that follows, and no row is looked at
            h[v] = 0.0
            inflows.update((c, 0.0) for c in tree.children[v])
            continue
        nodes[v] = tree.open(v, inflows[v])
        for child in tree.usable_children(v):
            inflows[child.node] = nodes[v].offer(child)
            nodes[v].close(child)
        h[v] = nodes[v].inflow
    order = _post_order(tree.children)
    winner = next(v for v in order if v == 0 or (v in h and tree.coins[v - 1] < h[v]))
    return _Verdict(winner, h, tree.draw(winner, nodes[winner]))


@_rule("target_only")
@_rule("recursive")
def _recursive(tree: _Tree) -> _Verdict:
    """Flip a child's coin at once: go down with a fresh start, or on to its next sibling.

    Where all kinds are deterministic this is `target_only`.
    """
    v, accept_probs = 0, {0: 1.0}
    while True:
        node = tree.open(v, 1.0)
        for child in tree.usable_children(v):
            accept_probs[child.node] = node.offer(child)
            if tree.coins[child.node - 1] < accept_probs[child.node]:
                v = child.node
                break
            node.close(child)
        else:
            return _Verdict(v, accept_probs, tree.draw(v, node))


def _follow(tree: _Tree, choose: Callable[[int], int]) -> _Verdict:
    """Go to the first child that holds the token which the target chooses, as long as one does."""
    v, accept_probs = 0, {0: 1.0}
    while True:
        token = choose(v)
        for child in tree.usable_children(v):
            accept_probs[child.node] = float(child.token == token)
            if child.token == token:
                v = child.node
                break
        else:
            return _Verdict(v, accept_probs, token)


@_rule("greedy")
def _greedy(tree: _Tree) -> _Verdict:
    """Follow the arg max. Reads neither q nor a coin."""
    return _follow(tree, tree.argmax)


@_rule("coupled")
def _coupled(tree: _Tree) -> _Verdict:
    """Follow what the target itself draws by races (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    return _follow(tree, tree.race)


# -------------------------------------------------------------------------------------------------
# verify_tree
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_probs_ids: Tensor | None = None,
    target_rows: Tensor | None = None,
    children_rows: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    kinds: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    rule: str = "traversal",
    raw_logprobs: bool = False,
) -> VerifyTreeResult:
    """Verify trees of draft tokens; see `specdec_ext.verify_tree`."""
    if rule not in contract.TREE_RULES:
        names = ", ".join(contract.TREE_RULES)
        raise ValueError(f"verify_tree: rule must be one of {names}, got {rule!r}")
    traits = contract.RULES[rule]
    batch, size = tokens.shape
    vocab = target_logits.shape[-1]
    draft = draft_logits if draft_logits is not None else draft_probs
    entries = DraftVocabulary(draft_token_ids if traits.reads_draft_law else None, vocab)
    ids = vocab  # draft tokens are below it
    if draft is not None and draft_token_ids is None and draft_probs_ids is None:
        ids = max(vocab, draft.shape[-1])

    target_filters, draft_filters = both_filters(
        (temperature, top_k, top_p, min_p),
        (draft_temperature, draft_top_k, draft_top_p, draft_min_p),
    )
    if seeds is not None:
        assert positions is not None
        uniforms = draws.uniforms(seeds, positions, size, stream=stream)

    out_tokens = torch.full((batch, size), -1, dtype=torch.int64)
    path = torch.full((batch, size), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    logprobs = torch.full((batch, size), NAN, dtype=torch.float32)
    accept_probs = torch.full((batch, size), NAN, dtype=torch.float32)
    status = torch.zeros(batch, dtype=torch.int32)

    for b in range(batch):
        bits = 0 if entries.is_valid else STATUS_PARAMETER_OUT_OF_RANGE

        def target_row(v: int, b: int = b) -> Tensor | None:
            row = row_at(target_logits, target_rows, b, v)
            return None if row is None else masked(row, words_of(allowed_mask, b, v), vocab)

        def noise(depth: int, b: int = b) -> Tensor:
            assert seeds is not None and positions is not None
            position = int(positions[b]) + depth
            return race_noise(int(seeds[b]), position, torch.arange(vocab), stream)

        # The parameters.
        filters, draft_parameters = Filters(), Filters()
        if rule == "greedy":
            filters = Filters(temperature=0.0)
        else:
            filters, bad = target_filters(b).checked()
            draft_parameters, draft_bad = draft_filters(b).checked()
            if bad or (draft_bad and draft_logits is not None):
                bits |= STATUS_PARAMETER_OUT_OF_RANGE
        is_greedy = filters.temperature < GREEDY_BELOW

        # The tree, without the nodes whose ids or kinds are no good, and what is below them.
        ids_read, parents_read = tokens[b].tolist(), parents[b].tolist()
        kinds_read = [int(draft is not None)] * size if kinds is None else kinds[b].tolist()
        given = _children(parents_read, kinds_read)
        is_valid = given is not None
        if given is None:
            bits |= STATUS_INVALID_TREE
            given = [[]]  # the root alone
        children: list[list[int]] = [[] for _ in given]
        depths = [0] * len(given)
        used = [0]
        for v in used:  # grows as it goes
            for c in given[v]:
                if ids_read[c] == -1:
                    continue
                if (
                    not 0 <= ids_read[c] < ids
                    or not KIND_DETERMINISTIC <= kinds_read[c] <= KIND_REST
                ):
                    bits |= STATUS_INVALID_DRAFT_TOKEN
                    continue
                children[v].append(c)
                depths[c] = depths[v] + 1
                used.append(c)
        if is_greedy or not traits.reads_draft_law:
            kinds_read = [KIND_DETERMINISTIC] * size

        def draft_law(v: int, b: int = b, parameters: Filters = draft_parameters) -> Tensor | None:
            if draft is None or not entries.is_valid:
                return None
            r = v if children_rows is None else int(children_rows[b, v])
            if not 0 <= r < draft.shape[1]:
                return None
            row = row_at(draft, None, b, r)
            if row is not None and draft_probs_ids is not None:
                row = from_list(row, draft_probs_ids[b, r].cpu(), vocab)
            if row is None:
                return None
            words = words_of(allowed_mask, b, v)
            return entries.law_of(row, words, None if draft_probs is not None else parameters)

        # The coins: those of the usable nodes, and the last slot for the final draw.
        coins = [0.0] * size
        if traits.takes_coins and not is_greedy:
            assert uniforms is not None
            drawn = uniforms[b].tolist()
            for slot in [*(v - 1 for v in used[1:]), size - 1]:
                coins[slot] = clamped(drawn[slot])
                if coins[slot] != drawn[slot]:
                    bits |= STATUS_PARAMETER_OUT_OF_RANGE

        tree = _Tree(
            ids_read,
            kinds_read,
            children,
            depths,
            target_row,
            draft_law,
            filters,
            coins,
            noise,
            bits,
        )
        winner, probs, extra = TREE_RULES[rule](tree)
        nodes = [winner]
        while nodes[-1] != 0:
            nodes.append(parents_read[nodes[-1]])
        nodes.reverse()
        emitted = [*(ids_read[v] for v in nodes[1:]), extra]
        out_tokens[b, : len(emitted)] = torch.tensor(emitted)
        path[b, : len(nodes) - 1] = torch.tensor(nodes[1:], dtype=torch.int64)
        num_accepted[b] = len(nodes) - 1
        for k, (v, token) in enumerate(zip(nodes, emitted, strict=True)):
            logprobs[b, k] = _log_prob(target_row(v), Filters() if raw_logprobs else filters, token)
        if is_valid:
            accept_probs[b, list(probs)] = torch.tensor(
                list(probs.values()), dtype=torch.float64
            ).float()
        status[b] = tree.status

    device = target_logits.device
    return VerifyTreeResult(
        out_tokens.to(device),
        path.to(device),
        num_accepted.to(device),
        logprobs.to(device),
        accept_probs.to(device),
        status.to(device),
    )


def _log_prob(row: Tensor | None, filters: Filters, token: int) -> float:
    """Log-probability to report for a token that a row emitted; NaN where the row has no law."""
    law = None if row is None else make_law(row, filters)
    return NAN if law is None else law.log_prob(token)
