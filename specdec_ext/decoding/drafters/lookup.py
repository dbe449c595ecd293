"""Prompt lookup: what came after the text's end when it last occurred is the draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import Draft, GoOn
from .counted import CountingReader, draft_of, match_lengths
from .text import TextDrafter

__all__ = ["LookupDrafter"]


class LookupDrafter(TextDrafter[CountingReader]):
    """Copies what followed the longest suffix of the text so far that occurred in it before.

    The text is the prompt and all that was generated, behind its input if it has one. Of several
    continuations each next token is the most frequent one, and of equally frequent ones that which
    came last. Where the copy reaches the end of the text, it goes on in itself, so a period is
    continued. Reading a token takes at most ``max_match + 1`` steps, on most texts few
    (``csrc/host/suffix_trie.h``).
    Proposals cost next to nothing, so ``go_on`` is not asked; every token comes with an estimate of
    its chances, as in a `SuffixDrafter`, for policies to cut by. (Copying what followed a matching
    n-gram of the prompt: Saxena 2023, "Prompt Lookup Decoding".)

    Tokens are deterministic, not drawn: verification takes each as a point mass, and what is
    emitted is distributed as the target's own under every lossless rule.

    Parameters
    ----------
    inputs : sequence of sequence of int, optional
        Texts that are searched as well, one a request, in the order of the batch, each read before
        its prompt: what an encoder-decoder's encoder reads, in ids of the decoder, where the prompt
        is no more than the token that starts the decoder. None: the prompts alone.
    min_match : int
        Propose only where the matching suffix has at least this many tokens. (Behind a single token
        that occurred before, a copy is rarely right: on free text it costs more than it brings.)
    max_match : int
        Where longer suffixes match, this many tokens decide.

    Raises
    ------
    TypeError
        Inputs that are no sequences of token ids.
    ValueError
        ``min_match`` under 1 or over ``max_match``; an id under 0; at the start, if there is not
        one input a request.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import LookupDrafter, Requests
    >>> drafter = LookupDrafter(min_match=2)
    >>> ids, ends = torch.tensor([[7, 8, 9, 5, 7, 8]]), torch.tensor([20])
    >>> drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    >>> drafter.propose(3, positions=torch.tensor([6])).tokens
    tensor([[9, 5, 7]])

    What an encoder has read is copied where the output agrees with it:

    >>> drafter = LookupDrafter([[7, 8, 9, 5]])
    >>> ids = torch.tensor([[7, 8]])
    >>> drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    >>> drafter.propose(2, positions=torch.tensor([2])).tokens
    tensor([[9, 5]])
    """

    estimates_chances = True

    def __init__(
        self,
        inputs: Sequence[Sequence[int]] | None = None,
        *,
        min_match: int = 2,
        max_match: int = 16,
    ) -> None:
        super().__init__(inputs)
        self.min_match, self.max_match = match_lengths("LookupDrafter", min_match, max_match)

    def _reader(self, request: int, prompt: list[int]) -> CountingReader:
        reader = CountingReader(self.max_match)
        reader.append([] if self.inputs is None else self.inputs[request])
        reader.append(prompt)
        return reader

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Copy up to ``gamma`` tokens; none where nothing matches."""
        copies = [
            reader.trie.grow(
                reader.context,
                nodes=gamma,
                depth=gamma,
                breadth=1,
                min_match=self.min_match,
                least=0.0,
                any_length=False,
            )
            for reader in self._readers
        ]
        return draft_of(copies, positions)
