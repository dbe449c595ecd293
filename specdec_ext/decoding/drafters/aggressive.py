"""Input-guided Aggressive Decoding: the rest of the input is the draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..._host import InputMatcher
from . import Draft, GoOn
from .text import TextDrafter, deterministic_draft

__all__ = ["AggressiveDrafter"]


class _Alignment:
    """Where in the input an output stands."""

    def __init__(self, source: list[int]) -> None:
        self.source = source
        self._matcher = InputMatcher(source)
        self._next: int | None = 0  # the input token expected now; None: not aligned

    def rest(self, most: int) -> list[int]:
        """Return what is left of the input, up to so many tokens."""
        return [] if self._next is None else self.source[self._next : self._next + most]

    def append(self, tokens: list[int]) -> None:
        """Go on where the output does as the input; else align it anew, if it can be."""
        self._matcher.append(tokens)
        if self._next is not None and self.rest(len(tokens)) == tokens:
            self._next += len(tokens)
            return
        end = self._matcher.unique_end
        self._next = None if end < 0 else end + 1


class AggressiveDrafter(TextDrafter[_Alignment]):
    """Proposes that the output go on as the input does.

    The source is Sun et al. 2021 ("Instantaneous Grammatical Error Correction with Shallow
    Aggressive Decoding", arXiv 2106.04970, section 3.1), for tasks whose output repeats most of the
    input. At first the whole input is the draft. Behind a bifurcation, where the output differs
    from the input, nothing is proposed until some suffix of the output occurs in the input exactly
    once; what follows there is the draft from then on. Every round proposes all that is left, so
    give `specdec_ext.generate` a gamma as large as the input: tokens cost nothing, and ``go_on`` is
    not asked.

    Tokens are deterministic, not drawn: verification takes each as a point mass, and what is
    emitted is distributed as the target's own under every lossless rule (the paper: greedy
    decoding).

    Parameters
    ----------
    inputs : sequence of sequence of int, optional
        The input of each request, in the order of the batch: the sentence to correct, say, without
        the instruction around it, or what an encoder-decoder's encoder reads, in ids of the
        decoder. None: its prompt.

    Raises
    ------
    TypeError
        Inputs that are no sequences of token ids.
    ValueError
        An id under 0; at the start, if there is not one input a request.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import AggressiveDrafter, Counts, Requests
    >>> drafter = AggressiveDrafter([[4, 5, 6, 7, 8]])
    >>> ids, ends = torch.tensor([[1, 2]]), torch.tensor([20])
    >>> drafter.start(Requests(ids, None, ends, 0, None, {}, greedy=True, needs_law=False))
    >>> drafter.propose(9, positions=torch.tensor([2])).tokens
    tensor([[4, 5, 6, 7, 8]])
    >>> one = Counts.on(ids.device, [1])
    >>> drafter.commit(torch.tensor([[4, 9, 0, 0, 0, 0]]), one)  # 9 in the place of 5
    >>> drafter.propose(9, positions=torch.tensor([4])).tokens
    tensor([], size=(1, 0), dtype=torch.int64)
    >>> drafter.commit(torch.tensor([[6]]), one - 1)
    >>> drafter.propose(9, positions=torch.tensor([5])).tokens
    tensor([[7, 8]])
    """

    def __init__(self, inputs: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(inputs)

    def _reader(self, request: int, prompt: list[int]) -> _Alignment:
        return _Alignment(prompt if self.inputs is None else self.inputs[request])

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose up to ``gamma`` tokens of what is left; none where output and input differ."""
        return deterministic_draft(
            [alignment.rest(gamma) for alignment in self._readers], positions
        )
