"""A smaller causal model that drafts a tree, one call a level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...tree_masks import dense_tree_mask
from ..checks import is_model, shown
from ..counts import Counts
from ..grown_trees import GrownTree, draft_grown
from ..trees import StaticTree, TreeDraft, draft_static
from . import MaskNodes, Requests, TreeProposer, last_tokens
from .hosted import ModelHost
from .interface import made_drafter

__all__ = [
    "Branches",
    "NodeMasks",
    "TreeDrafter",
    "as_tree_proposer",
    "check_tree_draft",
    "tree_view",
]


def tree_view(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Give which nodes each node sees, ``[B, N, N]`` bool, and their depths, ``[B, N]``.

    Nodes that hold no token are run at depth 0: at -1 they would come before a text of one token,
    where tables of positions have no row.
    """
    tree = ops.tree_mask(parents)
    seen = dense_tree_mask(tree.ancestors, 0, 0, dtype=torch.bool)[:, 0]
    return seen, tree.depths.clamp(min=0)


class Branches:
    """Nodes of growing trees, in the order in which they are run: what each sees, and its depth.

    Parameters
    ----------
    root : Tensor
        ``[B]``, anything; the root is node 0.

    Attributes
    ----------
    seen : Tensor
        ``[B, t, t]`` bool, which nodes each of the t nodes sees: its ancestors and itself.
    depths : Tensor
        ``[B, t]`` int64.
    """

    def __init__(self, root: Tensor) -> None:
        self.seen = torch.ones_like(root, dtype=torch.bool)[:, None, None]
        self.depths = torch.zeros_like(root, dtype=torch.int64)[:, None]

    @classmethod
    def behind(cls, seen: Tensor, depths: Tensor) -> Branches:
        """Go on from nodes ``[B, m]`` that see ``seen`` ``[B, m, t]``, whatever t slots are."""
        branches = cls(depths[:, 0])
        branches.seen, branches.depths = seen, depths
        return branches

    def add(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Add nodes whose ``parents`` ``[B, m]`` were run before.

        Returns which nodes each sees, ``[B, m, t]`` bool, these included, and depths, ``[B, m]``.
        """
        batch, new = parents.shape
        own = torch.eye(new, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        wide = parents[:, :, None].expand(-1, -1, self.seen.shape[2])
        added = torch.cat([self.seen.gather(1, wide), own], 2)
        self.seen = torch.cat([torch.nn.functional.pad(self.seen, (0, new)), added], 1)
        depths = self.depths.gather(1, parents) + 1
        self.depths = torch.cat([self.depths, depths], 1)
        return added, depths


class NodeMasks:
    """Hides in rows of a growing tree what the caller's grammars, if any, do not allow.

    Parameters
    ----------
    mask : MaskNodes or None
        Of `Requests`.
    """

    def __init__(self, mask: MaskNodes | None) -> None:
        self._mask = mask
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []

    def hide(self, logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Mask the rows ``[B, m, V]`` of nodes ``[B, m]``; parents count those that came before."""
        if self._mask is None:
            return logits
        self._tokens.append(tokens)
        self._parents.append(parents)
        return self._mask(logits, torch.cat(self._tokens, 1), torch.cat(self._parents, 1))


class TreeDrafter(ModelHost):
    """Drafts trees with a causal model under the draft's filters.

    Nodes of the last level are never run here: nothing would read their logits. So the model lacks
    two tokens after a path to the last level was accepted, else one; the next round's first call
    takes in whichever is missing, as in `ModelDrafter`.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are, over the target's tokens.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._runs: Tensor  # [B, N]: which of the tokens run in this round a node is, -1: none

    def start(self, requests: Requests) -> None:
        """Run the prompts but their last tokens."""
        self._begin(requests, trees=True)

    def propose_tree(self, positions: Tensor) -> TreeDraft:
        """Draft a tree for each request; ``positions`` ``[B]`` is where level 1 goes."""
        assert self._cached is not None, "start() comes first"
        root = self._missing[:, -1]
        self._cached.begin_tree()
        tree = self._requests.tree
        assert tree is not None, "generate says which, where one is asked for"
        if isinstance(tree, StaticTree):
            draft = self._propose_static(tree, root, positions)
        else:
            draft = self._propose_grown(tree, root)
        self._runs = torch.where(self._runs >= 0, self._runs + self._lead, -1)
        return draft._replace(masked=self._requests.mask_nodes is not None)

    @property
    def _lead(self) -> int:
        """Tokens of the text that are run before the root, in the same call."""
        return self._missing.shape[1] - 1

    def _run(self, tokens: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
        """Run nodes that see ``seen`` ``[B, m, t]`` of the tree; the root brings its lead along.

        Returns the rows of the model's own entries, ``[B, m, Vd]``.
        """
        assert self._cached is not None
        batch, new, known = seen.shape
        lead = self._lead
        seen = torch.cat([seen.new_ones(batch, new, lead), seen], 2)
        depths = depths.expand(batch, new) + lead
        if known == 1 and lead:  # the root
            tokens = self._missing
            steps = torch.arange(lead + 1, device=tokens.device)
            seen = (steps[:, None] >= steps).expand(batch, -1, -1)
            depths = steps.expand(batch, -1)
        return self._cached.forward_nodes(tokens, seen, depths)[:, -new:]

    def _propose_static(self, tree: StaticTree, root: Tensor, positions: Tensor) -> TreeDraft:
        device = root.device
        parents = torch.tensor(tree.parents, device=device)[None]
        seen, depths = tree_view(parents)
        seen = seen.expand(root.shape[0], -1, -1)
        parents = parents.expand(root.shape[0], -1)
        masks = NodeMasks(self._requests.mask_nodes)

        def extend(tokens: Tensor, nodes: range) -> Tensor:
            level = slice(nodes.start, nodes.stop)
            rows = self._run(tokens, seen[:, level, : nodes.stop], depths[:, level])
            return masks.hide(self._over_the_target(rows), tokens, parents[:, level])

        inner = tree.levels[-1].start
        nodes = torch.arange(len(tree.parents), device=device)
        self._runs = torch.where(nodes < inner, nodes, -1).expand(root.shape[0], -1)
        return draft_static(tree, root, extend, positions=positions, **self._requests.of_trees())

    def _propose_grown(self, tree: GrownTree, root: Tensor) -> TreeDraft:
        branches: Branches | None = None
        masks = NodeMasks(self._requests.mask_nodes)
        # Masks are over the target's tokens. Without any, the model's own, fewer ones will do.
        is_masked = self._requests.mask_nodes is not None

        def extend(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal branches
            if branches is None:
                branches = Branches(root)
                rows = self._run(tokens, branches.seen, branches.depths)
            else:
                rows = self._run(tokens, *branches.add(parents))
            if not is_masked:
                return rows
            return masks.hide(self._over_the_target(rows), tokens, parents)

        filters = self._requests.of_trees()["filters"]
        own = None if is_masked else self.token_ids
        draft, self._runs = draft_grown(tree, root, extend, filters, token_ids=own)
        return draft

    def commit_path(self, tokens: Tensor, path: Tensor, accepted: Counts) -> None:
        """Keep what was accepted and note which tokens the cache lacks.

        Parameters
        ----------
        tokens : Tensor
            ``[B, N]``: the accepted draft tokens, the final token, then anything.
        path : Tensor
            ``[B, N]``: the accepted nodes, then anything.
        accepted : Counts
            How many draft tokens of each request were accepted.
        """
        assert self._cached is not None, "start() comes first"
        tree = self._requests.tree
        if tree is not None and not tree.depth:
            return  # a root alone: the model is never run
        count = accepted.device.long()
        last = path.gather(1, (count - 1).clamp(min=0)[:, None]).clamp(min=0)
        lacks = (self._runs.gather(1, last)[:, 0] < 0) & (count > 0)
        lacking: list[bool] = lacks.tolist()
        width = 2 if any(lacking) else 1
        nodes = torch.cat([torch.zeros_like(path[:, :1]), path.clamp(min=0)], 1)
        lead = torch.arange(self._lead, device=path.device).expand(path.shape[0], -1)
        runs = torch.cat([lead, self._runs.gather(1, nodes[:, :-1])], 1)
        # The lead, the root and the accepted nodes but the one that is (or may be) fed again.
        most = self._lead + 2 - width
        self._cached.keep_nodes(runs, accepted + most)
        history = torch.cat([self._missing[:, -1:], tokens], 1)
        self._missing = last_tokens(history, accepted + 1, width)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        assert self._cached is not None, "start() comes first"
        self._requests = self._requests.select(rows)
        self._cached.select(rows, indices)
        self._missing = self._missing[rows]
        if hasattr(self, "_runs"):
            self._runs = self._runs[rows]


def check_tree_draft(draft: Any, drafter: Any, batch: int) -> None:
    """Check that what a drafter proposed are trees for ``batch`` requests.

    All but the tokens is left to the operator, which looks at it anyway.

    Raises
    ------
    TypeError
        It is no `TreeDraft`, or its tokens are no tensor.
    ValueError
        Its tokens have another shape or dtype.
    """
    by = f"generate: {type(drafter).__name__}.propose_tree"
    if not isinstance(draft, TreeDraft) or not isinstance(draft.tokens, Tensor):
        raise TypeError(f"{by} must return a TreeDraft of tensors, got {shown(draft)}")
    shape, dtype = list(draft.tokens.shape), draft.tokens.dtype
    if len(shape) != 2 or shape[0] != batch or not shape[1] or dtype != torch.int64:
        raise ValueError(
            f"{by} must return int64 tokens [B, N] with B = {batch} and N >= 1, got {shape} "
            f"{str(dtype).removeprefix('torch.')}"
        )


def as_tree_proposer(draft: Any, name: str = "draft") -> TreeProposer:
    """Return the `TreeProposer` that ``draft`` is, or that drives the model or heads that it is.

    Parameters
    ----------
    draft : torch.nn.Module or TreeProposer
        What was given.
    name : str
        The argument, as errors are to say it.

    Raises
    ------
    TypeError
        Something else, or a drafter that lacks a method.
    """
    draft = made_drafter(draft)
    if hasattr(draft, "propose_tree") and not isinstance(draft, type):
        methods = ("start", "propose_tree", "commit_path", "select")
        lacking = [method for method in methods if not callable(getattr(draft, method, None))]
        if lacking:
            raise TypeError(
                f"{name} must have {lacking[0]}(), as drafters of trees do, got {shown(draft)}"
            )
        proposer: TreeProposer = draft
        return proposer
    if not is_model(draft):
        raise TypeError(
            f"{name} must be a causal model, or a drafter with propose_tree(), where a tree is "
            f"asked for, got {shown(draft)}"
        )
    return TreeDrafter(draft)
