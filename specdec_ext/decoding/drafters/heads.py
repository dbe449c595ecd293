"""Decoding heads as the drafter: laws of the next tokens from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import shown
from ..counts import Counts
from ..grown_trees import GrownTree, draft_grown
from ..trees import StaticTree, TreeDraft, draft_nothing, draft_static, draft_top_k
from . import Draft, GoOn, Requests
from .hosted import reduced_vocabulary
from .interface import over_the_target

__all__ = ["HeadsDrafter"]


class HeadsDrafter:
    """Drafts chains and trees with decoding heads, one call of all heads a round.

    The heads read the target's last hidden state at the token before the last one, which the call
    that verified the round before has computed: see `FeatureDrafter`. Head i gives the law of the
    i-th draft token, whatever the tokens before it are.

    **Chains.** Every token is drawn from its head's law under the draft's filters, and that law is
    passed on, so the output follows the target's law under every lossless rule, however good the
    heads are. At temperature 0 tokens are the heads' likeliest. There are no more draft tokens than
    heads, whatever gamma asks for.

    Heads over a reduced vocabulary propose its tokens alone, and their laws are passed on with
    `Draft.token_ids` (rows of trees over the target's vocabulary).

    **Trees** (``generate(..., tree=...)``). The children of every node of a level are taken or
    drawn from the same head's law. Medusa's own tree is deterministic:
    ``StaticTree(..., children="top_k")``, which is lossless under every rule of trees, under
    ``rule="target_only"`` for one. Drawn children and a `GrownTree` work as well.

    **The first round.** Where a prompt has only one token (an encoder-decoder's start token), no
    hidden state is there before the first call of the target: that round drafts nothing.

    Typical acceptance, with which the Medusa paper trades the target's law for speed, is
    ``generate(..., rule="typical")``.

    Parameters
    ----------
    heads : specdec_ext.models.heads.DecodingHeads or callable
        Called with hidden states ``[B, D]`` and ``count``, it returns logits ``[B, count, Vd]``;
        its ``num_heads`` is the largest count. Heads over a reduced vocabulary have the target's
        token of each entry in ``draft_token_ids`` ``[Vd]``, and V in ``config.vocab_size``.

    Raises
    ------
    TypeError
        Something else.

    References
    ----------
    Cai et al., "Medusa", arXiv 2401.10774; Stern et al., "Blockwise Parallel Decoding for Deep
    Autoregressive Models", arXiv 1811.03115.

    Examples
    --------
    >>> import torch, transformers
    >>> import specdec_ext
    >>> from specdec_ext.decoding import HeadsDrafter
    >>> from specdec_ext.models.heads import MedusaHeads
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    >>> target = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> heads = MedusaHeads.from_target(target, 4, inputs={"input_ids": ids})
    >>> found = specdec_ext.generate(target, HeadsDrafter(heads), ids, max_new_tokens=6)
    >>> plain = specdec_ext.generate(target, None, ids, max_new_tokens=6)
    >>> torch.equal(found.sequences, plain.sequences)
    True
    """

    reads_features = True

    def __init__(self, heads: Any) -> None:
        if not callable(heads) or not isinstance(getattr(heads, "num_heads", None), int):
            raise TypeError(
                "HeadsDrafter: heads must be decoding heads (a callable with num_heads), as those "
                f"of specdec_ext.models.heads are, got {shown(heads)}"
            )
        self.heads = heads
        self.calls = 0
        self._requests: Requests
        self._state: Tensor | None = None  # [B, D], before each row's last token
        self._known: Tensor | None = None  # [B] bool, which rows have one; None: all

    @property
    def _token_ids(self) -> Tensor | None:
        return reduced_vocabulary(self.heads)

    def start(self, requests: Requests) -> None:
        """Take the prompts, and the hidden states before their last tokens."""
        tree = requests.tree
        if tree is not None and tree.depth > self.heads.num_heads:
            raise ValueError(
                f"HeadsDrafter: tree must be at most as deep as there are heads, "
                f"{self.heads.num_heads}, got depth {tree.depth}"
            )
        self.calls = 0
        self._state = self._known = None
        if requests.features is not None:
            self._state = requests.features[:, -1]
            mask = requests.attention_mask
            if mask is not None:
                self._known = mask[:, -2].bool()
                self._state = self._state.masked_fill(~self._known[:, None], 0)
        self._requests = replace(requests, features=None)

    def take_features(self, features: Tensor, tokens: Tensor, gained: Counts) -> None:
        """Take the hidden state that the last token came from: the next round's heads read it."""
        rows = torch.arange(len(features), device=features.device)
        self._state = features[rows, gained.device.long() - 1]
        self._known = None

    def _laws(self, count: int) -> Tensor | None:
        """Evaluate so many heads, ``[B, count, Vd]``; None where no row has a hidden state yet."""
        if self._state is None or not count:
            return None
        self.calls += 1
        logits: Tensor = self.heads(self._state, count=count)
        return logits.float() if logits.dtype == torch.float64 else logits

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Draw up to ``gamma`` tokens, each from its own head's law."""
        laws = self._laws(min(gamma, self.heads.num_heads))
        if laws is None:
            return Draft(positions.new_empty(len(positions), 0))
        ids = self._token_ids
        tokens, rows = self._requests.draw_independent(laws, positions, go_on, self._known, ids)
        if not self._requests.needs_law:
            return Draft(torch.stack(tokens, 1))
        return Draft(torch.stack(tokens, 1), torch.stack(rows, 1), token_ids=ids)

    def propose_tree(self, positions: Tensor) -> TreeDraft:
        """Draft a tree for each request; a level's children come from its head's law."""
        tree = self._requests.tree
        assert tree is not None, "generate says which, where one is asked for"
        laws = self._laws(tree.depth)
        if laws is None:
            return draft_nothing(positions)
        if self._token_ids is not None:
            laws = over_the_target(laws, self._token_ids, self.heads.config.vocab_size)
        draft = self._tree_of(tree, laws, positions)
        if self._known is None:
            return draft
        return draft._replace(tokens=torch.where(self._known[:, None], draft.tokens, -1))

    def _tree_of(self, tree: StaticTree | GrownTree, laws: Tensor, positions: Tensor) -> TreeDraft:
        """Draft a tree whose nodes of level d have children by row d of ``laws``."""
        root = torch.zeros_like(positions)
        drawing = self._requests.of_trees()
        if isinstance(tree, GrownTree):
            levels = iter(laws.unbind(1))
            draft, _ = draft_grown(
                tree,
                root,
                lambda tokens, parents: next(levels)[:, None].expand(-1, tokens.shape[1], -1),
                drawing["filters"],
            )
            return draft
        if tree.children == "top_k":
            return draft_top_k(tree, root, laws, drawing["filters"])
        return draft_static(
            tree,
            root,
            lambda tokens, nodes: laws[:, tree.depths[nodes.start], None].expand(
                -1, len(nodes), -1
            ),
            positions=positions,
            **drawing,
        )

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted: `take_features` has said it."""

    def commit_path(self, tokens: Tensor, path: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted: `take_features` has said it."""

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of what other drafters' rounds added: `take_features` has said it."""

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self._state = None if self._state is None else self._state[rows]
        self._known = None if self._known is None else self._known[rows]
