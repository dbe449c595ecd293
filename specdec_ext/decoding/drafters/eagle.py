"""An EAGLE-style head as the drafter: autoregressive over the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..checks import shown
from ..counts import Counts
from ..grown_trees import draft_grown
from ..trees import StaticTree, TreeDraft, draft_nothing, draft_static
from . import Draft, GoOn, Requests
from .interface import over_the_target
from .rows import columns_in_use
from .tree import Branches, NodeMasks

if TYPE_CHECKING:
    from ..cache import CachedModel

__all__ = ["EagleDrafter"]


class _Elements(NamedTuple):
    """What the head reads: tokens, the states before them, and how many of each row count."""

    tokens: Tensor  # [B, n]
    states: Tensor  # [B, n, D]
    counts: Counts


def _joined(parts: Sequence[_Elements]) -> _Elements:
    """Put the elements that count, of all parts, behind one another."""
    if len(parts) == 1:
        return parts[0]
    widths = [part.tokens.shape[1] for part in parts]
    columns, counts = columns_in_use(widths, [part.counts for part in parts])
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    return _Elements(
        torch.cat([part.tokens for part in parts], 1).gather(1, columns),
        torch.cat([part.states for part in parts], 1)[rows, columns],
        counts,
    )


class _FedHead:
    """A head as a causal model: the hidden states that it reads are laid out before each call."""

    def __init__(self, head: Any) -> None:
        self.head, self.config, self.dtype = head, head.config, head.dtype
        self.features: Tensor  # [B, m, D]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        output_hidden_states: bool = True,
    ) -> Any:
        return self.head(
            input_ids,
            self.features,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )

    __call__ = forward


class EagleDrafter:
    """Drafts chains and trees with an `EagleHead`, one call of its layer a token or a level.

    The head reads the target's hidden states of all text, which come with the prompts and with each
    round (`FeatureDrafter`), and behind them its own estimates. What it made of its estimates is
    forgotten after the round: the first call of the next one reads the target's own states of the
    tokens that were accepted. Its law is passed on over its own vocabulary, by `Draft.token_ids`,
    so the output follows the target's law under every lossless rule. (Rows of trees whose nodes are
    drawn, and rows that grammars mask, are passed on over the target's vocabulary.)

    **Trees** (``generate(..., tree=...)``) are those of `StaticTree`, with children of every kind,
    and of `GrownTree`, which is EAGLE-2's.

    Where a prompt has only one token, the first round has no hidden state and drafts nothing.

    Parameters
    ----------
    head : specdec_ext.models.eagle.EagleHead
        The head.

    Raises
    ------
    TypeError
        Something else.

    References
    ----------
    Li et al., "EAGLE", arXiv 2401.15077; "EAGLE-2", arXiv 2406.16858.

    Examples
    --------
    >>> import torch, transformers
    >>> import specdec_ext
    >>> from specdec_ext.decoding import EagleDrafter
    >>> from specdec_ext.models.eagle import EagleHead
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    >>> target = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> head = EagleHead.from_target(target, torch.tensor([0, 2, 4, 6]))
    >>> found = specdec_ext.generate(target, EagleDrafter(head), ids, max_new_tokens=6)
    >>> plain = specdec_ext.generate(target, None, ids, max_new_tokens=6)
    >>> torch.equal(found.sequences, plain.sequences)
    True
    """

    reads_features = True

    def __init__(self, head: Any) -> None:
        if not callable(head) or not hasattr(head, "draft_token_ids"):
            raise TypeError(
                "EagleDrafter: head must be an EagleHead (of specdec_ext.models.eagle), got "
                f"{shown(head)}"
            )
        self.head = head
        self._cached: CachedModel | None = None
        self._requests: Requests
        self._missing: list[_Elements] = []  # that the cache lacks, in their order
        self._drafted = 0  # elements in the cache that read the head's own estimates

    @property
    def calls(self) -> int:
        """Calls of the layer so far, prefill excluded."""
        return 0 if self._cached is None else self._cached.calls

    def start(self, requests: Requests) -> None:
        """Run the elements of the prompts but the last ones."""
        from ..cache import CachedModel, Traits

        self._requests = replace(requests, features=None)
        self._fed = _FedHead(self.head)
        # A position is that of an element: of token t + 1 it is t.
        self._cached = CachedModel(
            self._fed,
            requests.ends,
            room=requests.room,
            static=requests.static_cache,
            traits=Traits(),
            reads_features=True,
        )
        self._missing, self._drafted = [], 0
        if requests.features is None:
            return
        ids, states, mask = requests.input_ids[:, 1:], requests.features, requests.attention_mask
        last = Counts.full(len(ids), 1, ids.device)
        if mask is not None:
            states = states.masked_fill(mask[:, :-1, None] == 0, 0)
            last = Counts.on(ids.device, mask[:, -2].tolist())
        if ids.shape[1] > 1:
            self._fed.features = states[:, :-1]
            self._cached.prefill(ids[:, :-1], None if mask is None else mask[:, :-2])
        self._missing = [_Elements(ids[:, -1:], states[:, -1:], last)]

    def take_features(self, features: Tensor, tokens: Tensor, gained: Counts) -> None:
        """Take the target's states on the accepted path, in place of the head's own.

        The layer runs over them when it drafts again: rounds without a draft cost no call of it.
        """
        assert self._cached is not None, "start() comes first"
        if self._drafted:
            self._cached.rollback(Counts.full(len(tokens), self._drafted, tokens.device))
            self._drafted = 0
        self._missing.append(_Elements(tokens, features, gained))

    def _take_in(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Run the elements that the cache lacks.

        Returns the last one's row ``[B, Vd]`` and state ``[B, D]``, and which rows have one,
        ``[B]`` bool (None: all); None where none has.
        """
        assert self._cached is not None
        if not self._missing:
            return None
        tokens, self._fed.features, counts = _joined(self._missing)
        self._missing = []
        logits = self._cached.forward(tokens)
        states = self._cached.features
        assert states is not None
        self._cached.rollback(tokens.shape[1] - counts)
        rows = torch.arange(len(tokens), device=tokens.device)
        last = (counts.device.long() - 1).clamp(min=0)
        known = None if min(counts.host) > 0 else counts.device > 0
        return logits[rows, last], states[rows, last], known

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Draw up to ``gamma`` tokens, each from the law after the ones before it."""
        assert self._cached is not None, "start() comes first"
        found = self._take_in() if gamma else None
        if found is None:
            return Draft(positions.new_empty(len(positions), 0))
        row, state, going = found
        token_ids = self._token_ids
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        for i in range(gamma):
            rows.append(self._requests.processed(row, tokens, token_ids))
            drawn = self._requests.draw(rows[-1], positions, i, token_ids)
            tokens.append(drawn if going is None else torch.where(going, drawn, -1))
            if i == gamma - 1:
                break
            if go_on is not None:
                wanted = go_on(tokens[-1], self._over_the_target(rows[-1]))
                going = wanted if going is None else going & wanted
                if not bool(going.any()):
                    break
            self._fed.features = state[:, None]
            row = self._cached.forward(drawn[:, None])[:, 0]
            self._drafted += 1
            assert self._cached.features is not None
            state = self._cached.features[:, 0]
        if not self._requests.needs_law:
            return Draft(torch.stack(tokens, 1))
        return Draft(torch.stack(tokens, 1), torch.stack(rows, 1), token_ids=token_ids)

    def _over_the_target(self, rows: Tensor) -> Tensor:
        """Give entries of rows ``[..., Vd]`` the places of their tokens, ``[..., V]``."""
        return over_the_target(rows, self._token_ids, self.head.config.vocab_size)

    @property
    def _token_ids(self) -> Tensor | None:
        ids: Tensor | None = self.head.draft_token_ids
        return ids

    def propose_tree(self, positions: Tensor) -> TreeDraft:
        """Draft a tree for each request; the layer runs all nodes of a level in one call."""
        assert self._cached is not None, "start() comes first"
        tree = self._requests.tree
        assert tree is not None, "generate says which, where one is asked for"
        root = torch.zeros_like(positions)
        found = self._take_in() if tree.depth else None
        if found is None:
            return draft_nothing(root)
        row, state, known = found
        # As in `TreeDrafter`: masks are over the target's tokens, and so are laws of drawn nodes.
        spreads = isinstance(tree, StaticTree) or self._requests.mask_nodes is not None
        extend = self._growing(row, state, self._over_the_target if spreads else lambda rows: rows)
        drawing = self._requests.of_trees()
        if isinstance(tree, StaticTree):
            parents = torch.tensor(tree.parents, device=root.device).expand(len(root), -1)
            draft = draft_static(
                tree,
                root,
                lambda tokens, nodes: extend(tokens, parents[:, nodes.start : nodes.stop]),
                positions=positions,
                **drawing,
            )
        else:
            own = None if spreads else self._token_ids
            draft, _ = draft_grown(tree, root, extend, drawing["filters"], token_ids=own)
        draft = draft._replace(masked=self._requests.mask_nodes is not None)
        if known is None:
            return draft
        return draft._replace(tokens=torch.where(known[:, None], draft.tokens, -1))

    def _growing(
        self, row: Tensor, state: Tensor, passed_on: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what runs nodes ``[B, m]`` with parents that were run before, from the root on.

        It returns what ``passed_on`` makes of their rows ``[B, m, Vd]``, masked.
        The root, which is the text's last token, has been run: ``row`` ``[B, Vd]`` and ``state``
        ``[B, D]`` are what came of it.
        """
        assert self._cached is not None
        cached, branches = self._cached, Branches(row[:, 0])
        masks = NodeMasks(self._requests.mask_nodes)
        states, has_run = state[:, None], False  # of the nodes; whether the root's turn has come
        cached.begin_tree()

        def extend(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states, has_run
            if not has_run:
                has_run = True
                return masks.hide(passed_on(row[:, None]), tokens, parents)
            seen, depths = branches.add(parents)
            self._fed.features = states.gather(
                1, parents[:, :, None].expand(-1, -1, states.shape[2])
            )
            logits = cached.forward_nodes(tokens, seen[:, :, 1:], depths - 1)
            assert cached.features is not None
            states = torch.cat([states, cached.features], 1)
            self._drafted += tokens.shape[1]
            return masks.hide(passed_on(logits), tokens, parents)

        return extend

    def commit_path(self, tokens: Tensor, path: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted: `take_features` has said it."""

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted: `take_features` has said it."""

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of what other drafters' rounds added: `take_features` has said it."""

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        assert self._cached is not None, "start() comes first"
        self._requests = self._requests.select(rows)
        self._cached.select(rows, indices)
        self._missing = [
            _Elements(tokens[rows], states[rows], counts.select(rows, indices))
            for tokens, states, counts in self._missing
        ]
