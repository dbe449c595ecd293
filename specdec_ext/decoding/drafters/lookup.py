"""Prompt lookup: what came after the text's end when it last occurred is the draft."""

from __future__ import annotations

from torch import Tensor

from specdec_ext._host import RepeatFinder
from specdec_ext.decoding.checks import integer
from specdec_ext.decoding.drafters import Draft, GoOn
from specdec_ext.decoding.drafters.text import TextDrafter, deterministic_draft

__all__ = ["LookupDrafter"]


class LookupDrafter(TextDrafter[RepeatFinder]):
    """Copies what followed the latest earlier occurrence of the longest suffix of the text so far.

    The text is the prompt and all that was generated. Where the copy reaches the end of the text,
    it goes on in itself, so a period is continued. Reading a token and looking up are amortised
    O(1), through a suffix automaton (``csrc/host/text_search.h``), about 200 bytes a token.
    Proposals cost next to nothing, so ``go_on`` is not asked. (Copying what followed a matching
    n-gram of the prompt: Saxena 2023, "Prompt Lookup Decoding"; the automaton: Blumer et al. 1985.)

    Tokens are deterministic, not drawn: verification takes each as a point mass, and what is
    emitted is distributed as the target's own under every lossless rule.

    Parameters
    ----------
    min_match : int
        Propose only where the matching suffix has at least this many tokens.
    max_match : int
        Where longer suffixes match, this many tokens decide: their latest occurrence is copied. A
        token read costs at most so many steps, on a periodic text.

    Raises
    ------
    ValueError
        ``min_match`` under 1 or over ``max_match``.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import LookupDrafter, Requests
    >>> drafter = LookupDrafter(min_match=2)
    >>> ids, ends = torch.tensor([[7, 8, 9, 5, 7, 8]]), torch.tensor([20])
    >>> drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    >>> drafter.propose(3, positions=torch.tensor([6])).tokens
    tensor([[9, 5, 7]])
    """

    def __init__(self, *, min_match: int = 1, max_match: int = 16) -> None:
        super().__init__()
        self.min_match = integer("LookupDrafter: min_match", min_match)
        self.max_match = integer("LookupDrafter: max_match", max_match)
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"LookupDrafter: 1 <= min_match <= max_match must hold, got {min_match} and "
                f"{max_match}"
            )

    def _reader(self, request: int, prompt: list[int]) -> RepeatFinder:
        finder = RepeatFinder(self.max_match)
        finder.append(prompt)
        return finder

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Copy up to ``gamma`` tokens; none where nothing matches."""
        copies = [finder.continuation(gamma, self.min_match) for finder in self._readers]
        return deterministic_draft(copies, positions)
