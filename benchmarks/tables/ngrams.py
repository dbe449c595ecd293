"""Unigram and bigram models counted from the training split: rows at every place of a text.

The law is that of `specdec_ext.decoding.NgramDrafter` (a Dirichlet prior: counts of the longer
context, and s counts shared out by the law of the shorter one), of all places of a batch at once.
Two things differ: the start token is a context but never drawn, and nothing is learned on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.decoding import NgramDrafter
from tables.decode import Drafting
from tables.forced import Batch
from tables.shared import Bench

SMOOTHING = 1.0


class Ngrams:
    """Counts of tokens and of pairs of them.

    Parameters
    ----------
    texts : sequence of sequence of int
        Texts to count from, without the start token.
    start : int
        The decoder's start token, the context of every first token.
    vocabulary : int
        Number of tokens, V; the pairs take 4 V^2 bytes.
    """

    def __init__(self, texts: Sequence[Sequence[int]], start: int, vocabulary: int) -> None:
        tokens = torch.tensor([token for text in texts for token in text])
        before = torch.tensor([token for text in texts for token in (start, *text[:-1])])
        counts = torch.bincount(tokens, minlength=vocabulary).double()
        self.alone = (counts + SMOOTHING / vocabulary) / (counts.sum() + SMOOTHING)
        pairs = torch.bincount(before * vocabulary + tokens, minlength=vocabulary**2)
        self.pairs = pairs.reshape(vocabulary, vocabulary).float()

    def unigram(self, batch: Batch) -> Tensor:
        """Return log-probabilities ``[B, L, V]`` float32, the same at every place."""
        shape = (*batch.decoder_ids.shape, len(self.alone))
        return self.alone.log().float().expand(shape)

    def bigram(self, batch: Batch) -> Tensor:
        """Return log-probabilities ``[B, L, V]`` float32 after each token."""
        seen = self.pairs[batch.decoder_ids.cpu()]
        law = (seen + SMOOTHING * self.alone.float()) / (seen.sum(-1, keepdim=True) + SMOOTHING)
        return law.log()


def ngrams_of(bench: Bench) -> Ngrams:
    """Count the targets of the training split."""
    start = bench.target.config.decoder_start_token_id
    return Ngrams(bench.family.splits["train"].targets, start, bench.target.config.vocab_size)


def by_bigram(bench: Bench) -> Drafting:
    """Draft with a bigram model of the training split; one drafter for all sentences."""
    start = bench.target.config.decoder_start_token_id
    texts = [[start, *text] for text in bench.family.splits["train"].targets]
    drafter = NgramDrafter(
        bench.target.config.vocab_size, 2, texts=texts, smoothing=SMOOTHING, learn=False
    )
    return lambda reading: drafter
