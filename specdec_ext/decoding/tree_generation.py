"""The rounds of `generate` with a tree in place of a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .chain_generation import Burst, ChainGeneration
from .counts import Counts
from .drafters import last_tokens
from .drafters.tree import check_tree_draft, tree_view
from .grammar_masks import hidden
from .transfer import Transfer, TreeOutcome
from .trees import TreeDraft

__all__ = ["TreeGeneration"]


class TreeGeneration(ChainGeneration):
    """As `ChainGeneration`, whose loop it shares; a round drafts and verifies a tree.

    Its drafter is a `TreeProposer`.
    """

    trees = True

    def step(self) -> list[Burst]:
        """One round: every running request gains between 1 and depth + 1 tokens."""
        self.clock.start("draft")
        draft = self.drafter.propose_tree(self.positions)
        check_tree_draft(draft, self.drafter, len(self.last))
        draft = draft._replace(tokens=torch.cat([self.last, draft.tokens[:, 1:]], 1))
        nodes: tuple[list[list[int]], list[list[int]]] = ([], [])
        if self.looks_at_drafts:  # before the target runs
            nodes = (draft.tokens.tolist(), draft.parents.tolist())

        self.clock.start("target")
        seen, depths = tree_view(draft.parents)
        self.target.begin_tree()
        logits = self.target.forward_nodes(draft.tokens, seen, depths)  # [B, N, V]

        self.clock.start("rest")
        logits, masks = self._process_nodes(logits, draft, *nodes)

        self.clock.start("verify")
        verified = ops.verify_tree(
            logits,
            draft.tokens,
            draft.parents,
            draft.logits,
            allowed_mask=masks,
            kinds=draft.kinds,
            children_rows=draft.children_rows,
            seeds=self.seeds,
            positions=self.positions,
            rule=self.rule.name,
            raw_logprobs=self.settings.rule_options["raw_logprobs"],
            **self.laws.compared(draft.logits),
        )

        self.clock.start("rest")
        outcomes = [
            TreeOutcome(*row)
            for row in Transfer.pack(
                verified.tokens,
                verified.path,
                torch.where(draft.tokens >= 0, draft.parents, -1),
                verified.logprobs,
                verified.num_accepted,
                verified.status,
            ).unpack()  # the round's one host synchronisation (and the draft's: it lacks tokens)
        ]
        self.statistics.rounds += 1
        bursts = [self._append_path(i, outcome) for i, outcome in enumerate(outcomes)]
        self._raise_if_fatal([outcome.status for outcome in outcomes])
        accepted = Counts([outcome.accepted for outcome in outcomes], verified.num_accepted)
        self._commit_path(verified.tokens, verified.path, accepted, bursts)
        return bursts

    def _process_nodes(
        self, logits: Tensor, draft: TreeDraft, tokens: list[list[int]], parents: list[list[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Do what `_process` does to the rows of a tree's nodes, ``[B, N, V]``."""
        size, tokens = logits.shape[2], self._without_ends(tokens)
        if self.processors is not None:
            shown = tokens
            if self.grammars is not None:
                shown = self.grammars.legal_nodes(self.running, tokens, parents)
            logits = self.processors.tree(self.running, shown, parents, logits)
        if self.grammars is None:
            return logits, None
        masks = self.grammars.tree(self.running, tokens, parents, size)
        if draft.logits is not None and not draft.masked:
            return hidden(logits, masks), None
        return logits, masks

    def _append_path(self, i: int, outcome: TreeOutcome) -> Burst:
        """Add to running request ``i`` what the round emitted, up to its end; count it."""
        b, accepted = self.running[i], outcome.accepted
        tokens = self._gain(b, outcome)
        visits = _visits(outcome.path[:accepted], outcome.parents)
        rejected = visits[-1][0] > 0 and len(tokens) == accepted + 1
        accepted = min(accepted, len(tokens))
        self.statistics.record(
            b,
            drafted=sum(parent >= 0 for parent in outcome.parents),
            accepted=accepted,
            emitted=len(tokens),
            rejected=rejected,
        )
        self.statistics.record_ranks(visits[: accepted + rejected])
        return Burst(b, tokens, accepted, None, outcome.logprobs[: len(tokens)])

    def _commit_path(
        self, tokens: Tensor, path: Tensor, accepted: Counts, bursts: list[Burst]
    ) -> None:
        """Drop the requests that ended; of both caches keep what the others accepted."""
        going = self._going(bursts)
        if not going:
            self.running = []
            return
        features = self.target.features  # [B, N, D], of all nodes
        if len(going) < len(bursts):
            kept = self._keep(going)
            tokens, path, accepted = tokens[kept], path[kept], accepted.select(kept, going)
            features = None if features is None else features[kept]
            self.running = [self.running[i] for i in going]
        nodes = torch.cat([torch.zeros_like(path[:, :1]), path[:, :-1]], 1)
        if features is not None:
            gained = accepted + 1
            longest = max(gained.host)
            rows = torch.arange(len(nodes), device=nodes.device)[:, None]
            on_path = features[rows, nodes[:, :longest].clamp(min=0)]
            self.drafter.take_features(on_path, tokens[:, :longest], gained)
        self.target.keep_nodes(nodes, accepted + 1)
        self.drafter.commit_path(tokens, path, accepted)
        self.last = last_tokens(tokens, accepted, 1)
        self.positions = self.positions + accepted.device + 1


def _visits(path: list[int], parents: list[int]) -> list[tuple[int, int | None]]:
    """Return the number of children of each node on a path, root first, and the rank of the next.

    Parameters
    ----------
    path : list of int
        The accepted nodes.
    parents : list of int
        Parent of each node, -1 of those that hold no token.
    """
    visits: list[tuple[int, int | None]] = []
    for node, taken in zip([0, *path], [*path, None], strict=True):
        children = [v for v, parent in enumerate(parents) if parent == node]
        visits.append((len(children), None if taken is None else children.index(taken)))
    return visits
