"""The rounds of `generate` with a tree in place of a chain."""

from __future__ import annotations

from typing import Any

import torch

from specdec_ext import ops
from specdec_ext.contract import rule_names
from specdec_ext.decoding.chain_generation import (
    Burst,
    ChainGeneration,
    as_integers,
    from_integers,
)
from specdec_ext.decoding.drafters import last_tokens
from specdec_ext.decoding.drafters.tree import TreeDrafter, tree_view

__all__ = ["TreeGeneration"]


class TreeGeneration(ChainGeneration):
    """As `ChainGeneration`, whose loop it shares; a round drafts and verifies a tree."""

    lossless = rule_names(trees=True, lossless=True)
    trees = True
    drafter: Any

    def step(self) -> list[Burst]:
        """One round: every running request gains between 1 and depth + 1 tokens."""
        assert isinstance(self.drafter, TreeDrafter)
        self.clock.start("draft")
        draft = self.drafter.propose(self.positions)

        self.clock.start("target")
        seen, depths = tree_view(draft.parents)
        self.target.begin_tree()
        logits = self.target.forward_nodes(draft.tokens, seen, depths)  # [B, N, V]

        self.clock.start("rest")
        if self.processors is not None:
            logits = self.processors.tree(
                self.running, draft.tokens.tolist(), draft.parents.tolist(), logits
            )

        self.clock.start("verify")
        verified = ops.verify_tree(
            logits,
            draft.tokens,
            draft.parents,
            draft.logits,
            kinds=draft.kinds,
            draft_rows=draft.rows,
            seeds=self.seeds,
            positions=self.positions,
            rule=self.rule,
            raw_logprobs=self.rule_options["raw_logprobs"],
            **self.filters,
        )

        self.clock.start("rest")
        rows = torch.cat(
            [
                verified.tokens,
                verified.path,
                torch.where(draft.tokens >= 0, draft.parents, -1),
                as_integers(verified.logprobs),
                verified.num_accepted[:, None],
                verified.status[:, None],
            ],
            1,
        ).tolist()  # the round's one host synchronisation (and the draft's, where it lacks tokens)
        self.statistics.rounds += 1
        bursts = [self._append_path(i, row) for i, row in enumerate(rows)]
        self._raise_if_fatal([row[-1] for row in rows])
        self._commit_path(verified, [row[-2] for row in rows], bursts)
        return bursts

    def _append_path(self, i: int, row: list[int]) -> Burst:
        """Add to running request ``i`` what the round emitted, up to its end; count it."""
        b, accepted, status = self.running[i], row[-2], row[-1]
        nodes = (len(row) - 2) // 4
        path, parents = row[nodes : nodes + accepted], row[2 * nodes : 3 * nodes]
        tokens = self._emitted(b, row, accepted, status)
        visits = _visits(path, parents)
        rejected = visits[-1][0] > 0 and len(tokens) == accepted + 1
        accepted = min(accepted, len(tokens))
        self.new[b] += tokens
        self.statistics.record(
            b,
            drafted=sum(parent >= 0 for parent in parents),
            accepted=accepted,
            emitted=len(tokens),
            rejected=rejected,
        )
        self.statistics.record_ranks(visits[: accepted + rejected])
        logprobs = from_integers(row[3 * nodes :][: len(tokens)])
        return Burst(b, tokens, accepted, None, logprobs)

    def _commit_path(
        self, verified: ops.VerifyTreeResult, accepted: list[int], bursts: list[Burst]
    ) -> None:
        """Drop the requests that ended; of both caches keep what the others accepted."""
        tokens, path, num_accepted = verified.tokens, verified.path, verified.num_accepted
        going = self._going(bursts)
        if not going:
            self.running = []
            return
        if len(going) < len(bursts):
            kept = self._keep(going)
            tokens, path, num_accepted = tokens[kept], path[kept], num_accepted[kept]
            accepted = [accepted[i] for i in going]
            self.running = [self.running[i] for i in going]
        nodes = torch.cat([torch.zeros_like(path[:, :1]), path[:, :-1]], 1)
        self.target.keep_nodes(nodes, [n + 1 for n in accepted], num_accepted + 1)
        self.drafter.commit(tokens, path, accepted, num_accepted)
        self.last = last_tokens(tokens, accepted, num_accepted, 1)
        self.positions = self.positions + num_accepted + 1


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
