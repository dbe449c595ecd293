"""Calls of `specdec_ext.verify_tree`: what is passed, chains as trees, and random trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import VerifyTreeResult
from .cases import Case, VerifyCase, random_params
from .laws import Params, candidate_laws, params_of

TreeVerifier = Callable[..., Any]


class TreeCase(Case):
    """A call of `verify_tree`."""

    @property
    def batch(self) -> int:
        """Number of requests."""
        return int(self.inputs["tokens"].shape[0])

    def run(self, verify_tree: TreeVerifier) -> VerifyTreeResult:
        """Call a verifier on the case."""
        return VerifyTreeResult(*verify_tree(**self.inputs))

    def select(self, requests: Sequence[int]) -> TreeCase:
        """Give the case with only these requests, in this order (repeats allowed).

        Packed target logits and draft_token_ids, shared by all requests, stay as they are.
        """
        index = torch.tensor(list(requests), dtype=torch.int64)
        shared = {"draft_token_ids"} | ({"target_logits"} & self._packed())
        return self.replace(
            **{
                name: value.index_select(0, index.to(value.device))
                for name, value in self.inputs.items()
                if isinstance(value, Tensor) and name not in shared
            }
        )

    def _packed(self) -> set[str]:
        return {"target_logits"} if "target_rows" in self.inputs else set()


def chain_as_tree(case: VerifyCase) -> TreeCase:
    """Give the chains of a case as trees, under the rule "traversal".

    What `verify_tree` makes of them is what the rule "block" makes of the chains, bit for bit; its
    ``accept_probs`` have the root's 1 before them.

    Parameters
    ----------
    case : VerifyCase
        Arguments of `specdec_ext.verify`.

    Returns
    -------
    TreeCase
        With N = G + 1 nodes.

    Examples
    --------
    >>> from specdec_ext.testing import make_case
    >>> tree = chain_as_tree(make_case(1, batch=1, gamma=3, ragged=False))
    >>> tree.inputs["parents"].tolist(), tree.inputs["children_rows"].tolist()
    ([[-1, 0, 1, 2]], [[0, 1, 2, -1]])
    """
    inputs = dict(case.inputs)
    drafted = inputs.pop("draft_tokens")
    batch, gamma = drafted.shape
    lengths = inputs.pop("draft_lengths", drafted.new_full((batch,), gamma))
    steps = torch.arange(gamma, device=drafted.device)
    root = drafted.new_full((batch, 1), -1)
    inputs["tokens"] = torch.cat([root, drafted], 1)
    inputs["parents"] = torch.cat(
        [root.long(), torch.where(steps < lengths[:, None], steps, -1)], 1
    )
    kinds = inputs.pop("draft_kinds", None)
    if kinds is not None:
        inputs["kinds"] = torch.cat([root.to(kinds.dtype), kinds], 1)
    if "draft_logits" in inputs or "draft_probs" in inputs:
        inputs["children_rows"] = torch.cat([steps, steps.new_tensor([-1])]).expand(batch, -1)
    return TreeCase({**inputs, "rule": "traversal"}, case.name)


def post_order(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree, those below a node before it, siblings in index order; padding left out.

    Examples
    --------
    >>> post_order([-1, 0, 0, 1, 1, -1])
    [3, 4, 1, 2, 0]
    """
    below: dict[int, list[int]] = {}
    for v, parent in enumerate(parents[1:], 1):
        below.setdefault(parent, []).append(v)

    def closed(v: int) -> list[int]:
        return [u for c in below.get(v, []) for u in closed(c)] + [v]

    return closed(0)


def path_to(parents: Sequence[int], v: int) -> list[int]:
    """Nodes on the way from the root to v, the root left out."""
    return [] if v == 0 else [*path_to(parents, parents[v]), v]


def make_tree_case(
    seed: int,
    *,
    batch: int = 6,
    nodes: int = 8,
    vocab: int = 17,
    draft_vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    draft: str = "logits",
    shared_rows: bool = False,
    stray: bool = True,
    filters: bool = True,
    draft_filters: bool = False,
    greedy_rows: bool = True,
    philox: bool = False,
    id_dtype: torch.dtype = torch.int64,
    rule: str = "traversal",
    **options: Any,
) -> TreeCase:
    """Draw the inputs of one call of `verify_tree`, reproducibly: valid trees of all kinds.

    Parameters
    ----------
    seed : int
        Everything follows from it.
    batch, nodes, vocab, draft_vocab : int
        B, N, V, Vd. Trees have 1 to N nodes, the rest is padding.
    dtype : torch.dtype
        Of the logits.
    packed : bool
        Target logits as ``[R, V]`` with ``target_rows``, in shuffled order.
    draft : {"logits", "probs", "none"}
        How the draft's law is given; "none": every child is deterministic.
    shared_rows : bool
        One draft row for every two nodes, through ``children_rows``.
    stray : bool
        Now and then a token of -1, out of range, repeated, or without a draft probability.
    filters, draft_filters, greedy_rows : bool
        As in `specdec_ext.testing.make_case`.
    philox : bool
        ``seeds`` and ``positions`` in place of ``uniforms``.
    id_dtype : torch.dtype
        Of ids and rows.
    rule : str
        Passed on.
    **options
        Passed on as they are.

    Returns
    -------
    TreeCase

    Examples
    --------
    >>> case = make_tree_case(1, batch=2, nodes=5, vocab=7)
    >>> case.inputs["target_logits"].shape, case.inputs["parents"].tolist()
    (torch.Size([2, 5, 7]), [[-1, 0, 0, 0, 2], [-1, 0, 0, 2, 0]])
    """
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    width = vocab if draft_vocab is None else draft_vocab
    params = random_params(generator, batch, vocab, filters, greedy_rows)
    if draft_filters and draft == "logits":
        theirs = random_params(generator, batch, width, True, True)
        params |= {f"draft_{name}": value for name, value in theirs.items()}
    spread = torch.tensor([0.3, 2.0, 4.0])[torch.randint(3, (batch, 1, 1), generator=generator)]
    target = torch.randn(batch, nodes, vocab, generator=generator) * spread
    count = (nodes + 1) // 2 if shared_rows else nodes
    owner = torch.arange(nodes) // 2 if shared_rows else torch.arange(nodes)
    drafted = torch.randn(batch, count, width, generator=generator)
    both = min(vocab, width)
    drafted[..., :both] += target[:, :: nodes // count if shared_rows else 1, :both][:, :count]
    target, drafted = target.to(dtype), drafted.to(dtype)

    parents = torch.full((batch, nodes), -1, dtype=torch.int64)
    kinds = torch.zeros(batch, nodes, dtype=torch.int8)
    tokens = torch.full((batch, nodes), -1, dtype=torch.int64)
    for b in range(batch):
        scalars = Params()
        if draft != "probs":
            scalars = params_of(params, "", b, scalars)
            scalars = params_of(params, "draft_", b, scalars).cleaned()
        size = nodes if b % 2 == 0 else integer(1, nodes + 1)
        for v in range(1, size):
            parents[b, v] = integer(max(0, v - 4), v) if v > 2 else 0
        for v in range(size):
            children = (parents[b] == v).nonzero().flatten().tolist()
            law = candidate_laws(drafted[b, owner[v]], scalars, 0.0)[0].probs
            kind = 0 if draft == "none" else integer(0, 4)
            chosen = [kind if kind and integer(0, 4) else 0 for _ in children]
            if kind == 3:
                chosen = [3 * (c == children[0]) for c in children]
            best = law.argsort(descending=True).tolist()
            deterministic = [c for c, k in zip(children, chosen, strict=True) if k == 0]
            for c, x in zip(deterministic, best, strict=False):
                tokens[b, c] = x
            gone = [int(tokens[b, c]) for c in deterministic] if kind == 3 else []
            for c, k in zip(children, chosen, strict=True):
                kinds[b, c] = k
                row = law.clone()
                row[[x for x in gone if x >= 0]] = 0.0
                if k and float(row.sum()) > 0:
                    tokens[b, c] = int(torch.multinomial(row, 1, generator=generator))
                if k == 2:
                    gone.append(int(tokens[b, c]))
                if stray and k != 2 and integer(0, 12) == 0:
                    anything = [-1, integer(0, max(vocab, width)), max(vocab, width) + 3]
                    tokens[b, c] = [*anything, int(tokens[b, children[0]])][integer(0, 4)]

    inputs: dict[str, Any] = {"rule": rule, "parents": parents, "tokens": tokens, **params}
    if draft != "none":
        inputs["kinds"] = kinds
        values = drafted.float().softmax(-1) * 1.25 if draft == "probs" else drafted
        inputs[f"draft_{draft}"] = values.to(dtype)
        if shared_rows:
            inputs["children_rows"] = owner.expand(batch, -1).to(id_dtype)
    inputs["target_logits"] = target
    if packed:
        order = torch.randperm(batch * nodes, generator=generator)
        table = torch.empty(batch * nodes, vocab, dtype=dtype)
        table[order] = target.flatten(0, 1)
        inputs["target_logits"] = table
        inputs["target_rows"] = order.reshape(batch, nodes).to(id_dtype)
    for name in ("parents", "tokens"):
        inputs[name] = inputs[name].to(id_dtype)
    if philox:
        inputs["seeds"] = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
        inputs["positions"] = torch.randint(0, 2**40, (batch,), generator=generator)
    else:
        inputs["uniforms"] = torch.rand(batch, nodes, generator=generator, dtype=torch.float64)
    inputs.update(options)
    shape = f"B={batch} N={nodes} V={vocab} Vd={width} {dtype}".replace("torch.", "")
    return TreeCase(inputs, f"seed {seed}, {shape}, {rule}, draft {draft}")
