"""Suffix decoding: continuations weighted by how often they followed, as long as that pays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ..._host import CopyReader, Growth, SuffixTrie
from ..checks import integer, number_in, token_ids
from ..counts import Counts
from ..grown_trees import GrownTree
from ..trees import StaticTree, TreeDraft
from . import Draft, GoOn, Requests
from .counted import CountingReader, draft_of, match_lengths
from .text import TextDrafter

__all__ = ["SuffixDrafter"]


class _Store:
    """Earlier outputs, the least recently used one first; a bounded number of tokens in all."""

    def __init__(self, max_match: int, memory: int) -> None:
        self.trie = SuffixTrie(max_match)
        self._memory = memory
        self._texts: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: list[int]) -> None:
        """Take in a text, of a longer one the end; forget as many old ones as that needs."""
        if not tokens or not self._memory:
            return
        self.trie.append(tokens[-self._memory :])
        self._texts[self.trie.close()] = None
        while len(self.trie) > self._memory:
            oldest, _ = self._texts.popitem(last=False)
            self.trie.drop(oldest)

    def use(self, text: int) -> None:
        """Note that this text was copied from, if it is still held."""
        if text in self._texts:
            self._texts.move_to_end(text)


class _Reader(CountingReader):
    """Counts what followed each piece of a request's text, and follows what it copies."""

    def __init__(self, max_match: int, inputs: list[int], prompt: list[int]) -> None:
        super().__init__(max_match)
        self.copies = CopyReader()
        super().append(inputs)
        super().append(prompt)
        self.copies.append_input(inputs + prompt)

    def append(self, tokens: list[int]) -> None:
        """Read on."""
        super().append(tokens)
        self.copies.append(tokens)


class SuffixDrafter(TextDrafter[_Reader]):
    """Proposes what most often followed the text's end, as far as it is likely to be accepted.

    It looks in the request's own text (its input, its prompt and all that was generated) and in a
    store of earlier outputs, and proposes a chain or, for ``generate(..., tree=...)``, a tree. The
    *survival* of a draft token estimates the probability that it and those before it are accepted:
    the product, along the path, of m^2 / (m^2 + 2), where m is the number of tokens that agreed by
    then (1/3 behind one, 2/3 behind two, 0.97 behind eight: as measured on texts of a small
    instruct model), and of each token's share of what followed its context. Tokens are proposed
    while their survival is at least ``least``.

    A chain is the best of three, by the tokens that are expected to be accepted, the sum of the
    survivals:

    - a copy in reading order: of the places where the text's longest suffix occurred before, the
      next one in the input behind what was copied last, as texts that repeat their input mostly do
      so from its beginning to its end; where there is none, the one that came last. It is one
      continuation, and no share is taken;
    - what most often followed one of the text's suffixes of ``min_match`` to ``max_match`` tokens,
      in its own text;
    - the same in the store.

    Of equals the first one, and the longer suffix. Trees are the better of the last two. Equally
    frequent tokens come in the order in which they were seen last, the latest first.

    The store holds what earlier generations of this drafter emitted (but for a request's last
    round, which no drafter is told of) and what `remember` was given, ``memory`` tokens in all; for
    more, the text is forgotten that was least recently added or copied from. Outputs of a
    generation join the store when the next one begins, so that what a request drafts does not
    depend on the rest of its batch. Proposals cost next to nothing, so ``go_on`` is not asked;
    every token of a chain comes with its estimate, for policies to cut by (`RenewalRule`).

    Tokens are deterministic, not drawn: verification takes each as a point mass, and what is
    emitted is distributed as the target's own under every lossless rule.

    Parameters
    ----------
    inputs : sequence of sequence of int, optional
        As in `LookupDrafter`: texts that are read before the prompts, one a request.
    min_match, max_match : int
        Lengths of the suffixes that are looked for.
    least : float
        The least survival of a draft token, in [0, 1]. A token that adds a share c of a call's time
        pays while it survives with at least c times the tokens that a call makes.
    memory : int
        Tokens that the store holds at most; 0: no store. A token takes about 100 bytes, and up to
        100 more for each of its ``max_match`` contexts that occurred before.

    Raises
    ------
    TypeError
        An argument of another kind; inputs that are no sequences of token ids.
    ValueError
        ``min_match`` under 1 or over ``max_match``, ``least`` outside [0, 1], ``memory`` or an id
        under 0; at the start, if there is not one input a request.

    Notes
    -----
    A stored output is proposed to requests that it must be independent of: a generation must not
    draw with seeds that stored outputs were drawn with. (Where none are given, they are fresh.) At
    temperature 0 and under the rule "coupled" nothing of that matters.

    References
    ----------
    Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications",
    arXiv 2411.04975. Its drafts have at most a number of tokens in proportion to the match.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import Requests, SuffixDrafter
    >>> drafter = SuffixDrafter()
    >>> for text in ([7, 8, 9, 5], [1, 8, 9, 4, 3], [2, 8, 9, 4], [3, 8, 9, 4]):
    ...     drafter.remember(text)
    >>> ids, ends = torch.tensor([[6, 8, 9]]), torch.tensor([20])
    >>> drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    >>> drafter.propose(5, positions=torch.tensor([3])).tokens
    tensor([[4, 3]])
    """

    estimates_chances = True

    def __init__(
        self,
        inputs: Sequence[Sequence[int]] | None = None,
        *,
        min_match: int = 1,
        max_match: int = 16,
        least: float = 0.15,
        memory: int = 65_536,
    ) -> None:
        super().__init__(inputs)
        self.min_match, self.max_match = match_lengths("SuffixDrafter", min_match, max_match)
        self.least = number_in("SuffixDrafter: least", least, 0, 1)
        self.memory = integer("SuffixDrafter: memory", memory, low=0)
        self._store = _Store(self.max_match, self.memory)
        self._emitted = []
        self._ended: list[list[int]] = []  # outputs of requests that ended since the start

    def remember(self, tokens: Sequence[int] | Tensor) -> None:
        """Add a text to the store: an output of another engine, say, or a document."""
        self._store.add(token_ids("SuffixDrafter: ids to remember", tokens))

    def start(self, requests: Requests) -> None:
        """Take the prompts; what the last generation emitted joins the store."""
        for text in self._ended + self._emitted:
            self._store.add(text)
        self._ended, self._emitted = [], []
        super().start(requests)

    def _reader(self, request: int, prompt: list[int]) -> _Reader:
        inputs = [] if self.inputs is None else self.inputs[request]
        return _Reader(self.max_match, inputs, prompt)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose up to ``gamma`` tokens a request, fewer where more would hardly survive."""
        return draft_of([self._chain(reader, gamma) for reader in self._readers], positions)

    def _chain(self, reader: _Reader, gamma: int) -> Growth:
        """Copy in reading order, or what most often followed if that promises more."""
        copy = reader.copies.copy(most=gamma, min_match=self.min_match, least=self.least)
        return self._grow(reader, gamma, gamma, 1, copy)

    def propose_tree(self, positions: Tensor) -> TreeDraft:
        """Propose a tree a request: `Requests.tree` says how large, deep and broad at most."""
        tree = self._requests.tree
        assert tree is not None, "generate says which, where one is asked for"
        size, breadth = _extent(tree)
        grown = [self._grow(reader, size - 1, tree.depth, breadth) for reader in self._readers]
        return _deterministic_tree(grown, positions)

    def _grow(
        self, reader: _Reader, nodes: int, depth: int, breadth: int, best: Growth | None = None
    ) -> Growth:
        """Grow what promises most, behind a request's text; ``best``, if that promises as much."""
        own, stored = (
            trie.grow(
                reader.context,
                nodes=nodes,
                depth=depth,
                breadth=breadth,
                min_match=self.min_match,
                least=self.least,
                any_length=True,
            )
            for trie in (reader.trie, self._store.trie)
        )
        if best is None or own.expected > best.expected:
            best = own
        if stored.expected <= best.expected:
            return best
        self._store.use(stored.text)
        return stored

    def commit_path(self, tokens: Tensor, path: Tensor, accepted: Counts) -> None:
        """Read what verification of a tree emitted."""
        self.observe(tokens, accepted + 1)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests; what the others emitted is kept for the store."""
        going = set(indices)
        ended = [b not in going for b in range(len(self._emitted))]
        self._ended += compress(self._emitted, ended)
        super().select(rows, indices)


def _extent(tree: StaticTree | GrownTree) -> tuple[int, int]:
    """Return how many nodes a tree has at most, the root included, and children of each."""
    if isinstance(tree, GrownTree):
        return tree.nodes, tree.beam
    return len(tree.parents), max(tree.ranks) + 1


def _deterministic_tree(grown: list[Growth], positions: Tensor) -> TreeDraft:
    """Return trees of these nodes below a root, of any number a request."""
    width = max(len(growth.tokens) for growth in grown)
    tokens = [[-1, *growth.tokens] + [-1] * (width - len(growth.tokens)) for growth in grown]
    parents = [
        [-1, *(parent + 1 for parent in growth.parents)] + [-1] * (width - len(growth.parents))
        for growth in grown
    ]
    ids = torch.tensor(tokens, dtype=torch.int64, device=positions.device)
    return TreeDraft(
        ids,
        torch.tensor(parents, dtype=torch.int64, device=positions.device),
        torch.zeros_like(ids, dtype=torch.int8),
        None,
        None,
    )
