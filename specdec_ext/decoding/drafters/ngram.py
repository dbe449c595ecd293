"""Unigram, bigram and longer n-gram models as drafters: counted, not trained."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..checks import flag, integer, is_listing, number, shown, token_ids
from . import Draft, GoOn, prefix_or_drawn
from .text import TextDrafter

__all__ = ["NgramDrafter"]


class _Counts:
    """How often each token of the vocabulary occurred, and after each context of up to n - 1."""

    def __init__(self, order: int, alone: Tensor) -> None:
        self.order = order
        self.alone = alone  # [V] float64
        self.after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def add(self, text: Sequence[int], start: int = 0) -> None:
        """Count the tokens of a text from ``start`` on; those before it are context alone."""
        vocabulary = len(self.alone)
        counted = [i for i in range(start, len(text)) if 0 <= text[i] < vocabulary]
        tokens = torch.tensor(
            [text[i] for i in counted], dtype=torch.int64, device=self.alone.device
        )
        self.alone.index_add_(0, tokens, torch.ones_like(tokens, dtype=self.alone.dtype))
        for i in counted:
            for n in range(1, min(self.order, i + 1)):
                self.after[tuple(text[i - n : i])][text[i]] += 1


class _Reader:
    """One request's model: what was counted for all, and in its own text."""

    def __init__(
        self, shared: _Counts, smoothing: float, learn: bool, device: torch.device
    ) -> None:
        self._own = _Counts(shared.order, shared.alone.to(device, copy=True))
        self._tables = (shared.after, self._own.after)
        self._smoothing = smoothing
        self._learn = learn
        self.context: list[int] = []  # the last n - 1 tokens

    def append(self, tokens: list[int]) -> None:
        """Go on behind these tokens, and count them if the model learns."""
        text = self.context + tokens
        if self._learn:
            self._own.add(text, len(self.context))
        self.context = text[max(len(text) - self._own.order + 1, 0) :]

    def law(self, context: Sequence[int]) -> Tensor:
        """Return the law of the token after a context, ``[V]`` float64; every token has some."""
        alone, s = self._own.alone, self._smoothing
        law = (alone + s / len(alone)) / (alone.sum() + s)
        for n in range(1, min(self._own.order, len(context) + 1)):
            key = tuple(context[len(context) - n :])
            seen = [table[key] for table in self._tables if key in table]
            total = s + sum(counts.total() for counts in seen)
            law *= s / total
            for counts in seen:
                tokens = torch.tensor(list(counts), device=law.device)
                law[tokens] += torch.tensor(list(counts.values()), device=law.device) / total
        return law


class NgramDrafter(TextDrafter[_Reader]):
    """Draws each token from an n-gram model: what came after the last n - 1 tokens before.

    The model is counted from texts, from the request's own prompt and output, or both. A call of it
    is a table look-up (c near 0 in Leviathan et al., arXiv 2211.17192, section 3.6), so ``go_on``
    is not asked. The law of order k after a context c is smoothed by that of order k - 1 (a
    Dirichlet prior; MacKay and Peto 1995)::

        P_k(x | c) = (count(c x) + s P_{k-1}(x | c without its first token)) / (count(c) + s)

    down to P_0 = 1 / vocab_size. A request learns from its own text alone: what it emits does not
    depend on the batch. Draft tokens are counted once they are emitted, never before.

    Verification reads the rows that the tokens were drawn from, log P under the caller's logits
    processors and the request's filters; what is emitted is distributed as the target's own under
    every lossless rule. So it is with ``sampled=False``, where the token is deterministic: the
    likeliest of such a row. The host waits for the device once a draft token, twice where there are
    processors. The model's probability of such a token is taken for its chance (`Draft`).

    Parameters
    ----------
    vocab_size : int
        Tokens 0 to ``vocab_size - 1`` are drawn. Others (a target may have more) are context, but
        are not counted.
    order : int
        n: 1 for a unigram model, 2 for a bigram model.
    texts : iterable of sequence of int or Tensor
        Token ids to count from, for all requests; no context runs from one text into another.
    smoothing : float
        s, the weight of the shorter context's law, in counts.
    sampled : bool
        Whether tokens are drawn; else they are deterministic, the likeliest ones.
    learn : bool
        Whether a request's own prompt and output are counted.

    Raises
    ------
    TypeError
        An argument of another kind; texts that are no sequences of token ids.
    ValueError
        ``vocab_size`` or ``order`` under 1, ``smoothing`` not positive, an id of ``texts`` outside
        the vocabulary.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding import NgramDrafter, Requests
    >>> drafter = NgramDrafter(10, texts=[[3, 4, 5, 3, 4, 6, 3, 4, 5]], sampled=False)
    >>> ids, ends, seeds = torch.tensor([[1, 3]]), torch.tensor([20]), torch.tensor([0])
    >>> drafter.start(Requests(ids, None, ends, 0, seeds, {}, greedy=False, needs_law=True))
    >>> drafter.propose(3, positions=torch.tensor([2])).tokens
    tensor([[4, 5, 3]])
    """

    def __init__(
        self,
        vocab_size: int,
        order: int = 2,
        *,
        texts: Iterable[Sequence[int] | Tensor] = (),
        smoothing: float = 1.0,
        sampled: bool = True,
        learn: bool = True,
    ) -> None:
        super().__init__()
        vocab_size = integer("NgramDrafter: vocab_size", vocab_size, low=1)
        order = integer("NgramDrafter: order", order, low=1)
        self.smoothing = number("NgramDrafter: smoothing", smoothing)
        if not 0 < self.smoothing < math.inf:
            raise ValueError(f"NgramDrafter: smoothing must be positive, got {self.smoothing}")
        self.sampled = flag("NgramDrafter: sampled", sampled)
        self.learn = flag("NgramDrafter: learn", learn)
        self._shared = _Counts(order, torch.zeros(vocab_size, dtype=torch.float64))
        if not is_listing(texts):
            raise TypeError(
                f"NgramDrafter: texts must be sequences of token ids, got {shown(texts)}"
            )
        for k, text in enumerate(texts):
            self._shared.add(token_ids(f"NgramDrafter: ids of text {k}", text, 0, vocab_size - 1))

    @property
    def estimates_chances(self) -> bool:
        """Whether its drafts come with chances: they do unless they are drawn."""
        return not self.sampled

    def _reader(self, request: int, prompt: list[int]) -> _Reader:
        device = self._requests.ends.device
        reader = _Reader(self._shared, self.smoothing, self.learn, device)
        reader.append(prompt)
        return reader

    def propose(
        self,
        gamma: int,
        positions: Tensor,
        go_on: GoOn | None = None,
        prefix: Tensor | None = None,
    ) -> Draft:
        """Draw ``gamma`` tokens, each after the ones before it.

        Parameters
        ----------
        gamma : int
            How many.
        positions : Tensor
            ``[B]``, where the first goes.
        go_on : callable, optional
            Not asked.
        prefix : Tensor, optional
            ``[B, F]`` int64, tokens that another drafter proposes for the head, -1 behind them.
        """
        texts = [list(reader.context) for reader in self._readers]
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for i in range(gamma):
            rows = [reader.law(text) for reader, text in zip(self._readers, texts, strict=True)]
            laws.append(self._requests.processed(torch.stack(rows).log().float(), tokens))
            tokens.append(prefix_or_drawn(prefix, self._draw(laws[-1], positions, i), i))
            for text, token in zip(texts, tokens[-1].tolist(), strict=True):
                text.append(token)
        if not tokens:
            return Draft(positions.new_empty(len(texts), 0))
        drawn, law = torch.stack(tokens, 1), torch.stack(laws, 1)
        if self.sampled:
            return Draft(drawn, law if self._requests.needs_law else None)
        chances = law.softmax(-1).gather(2, drawn[..., None])[..., 0]
        return Draft(drawn, chances=chances.tolist())

    def _draw(self, logits: Tensor, positions: Tensor, i: int) -> Tensor:
        """Return draft token ``i`` (0-based) of each request, ``[B]``."""
        if self.sampled:
            return self._requests.draw(logits, positions, i)
        return logits.argmax(-1)
