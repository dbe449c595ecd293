"""What drafters that copy by evidence share: how often each continuation followed."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ..._host import Growth, SuffixTrie
from ..checks import integer
from . import Draft
from .text import deterministic_draft

__all__ = ["CountingReader", "draft_of", "match_lengths"]

_MOST_MATCHED = 1024  # the longest context that a `SuffixTrie` looks at


class CountingReader:
    """Counts what followed each piece of one request's text, and keeps the text's end.

    Parameters
    ----------
    max_match : int
        The longest context whose continuations are counted.
    """

    def __init__(self, max_match: int) -> None:
        self.trie = SuffixTrie(max_match)
        self.context: list[int] = []  # the last max_match tokens
        self._max_match = max_match

    def append(self, tokens: list[int]) -> None:
        """Read on."""
        self.trie.append(tokens)
        self.context = (self.context + tokens)[-self._max_match :]


def draft_of(chains: list[Growth], positions: Tensor) -> Draft:
    """Return a draft of one chain a request, with what each token's chances are thought to be."""
    chances = [
        [after / before for before, after in pairwise([1.0, *chain.survivals])] for chain in chains
    ]
    return deterministic_draft([chain.tokens for chain in chains], positions, chances)


def match_lengths(name: str, min_match: int, max_match: int) -> tuple[int, int]:
    """Check the least and the greatest length of a match; ``name`` is the drafter's."""
    shortest = integer(f"{name}: min_match", min_match)
    longest = integer(f"{name}: max_match", max_match, None, _MOST_MATCHED)
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"{name}: 1 <= min_match <= max_match must hold, got {min_match} and {max_match}"
        )
    return shortest, longest
