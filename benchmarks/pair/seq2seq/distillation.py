"""Drafts that learn from the target instead of the text, or from what the target writes.

A draft is to agree with its target, not with the text. Three things can be changed, alone and
together: the loss (`training.LOSSES`), the weights it begins with, and the targets of the pairs,
which are the text's or the teacher's own ones, greedy or of a beam (sequence-level distillation,
Kim and Rush 2016). A draft that goes on learning from the text for the same time is the control.
"""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm
from transformers import DynamicCache, EncoderDecoderCache, T5ForConditionalGeneration

from pair.seq2seq.data import BUCKETS, EOS_ID, Pairs, batch_of, in_order
from specdec_ext.decoding.cache_names import own_cache_name

ROWS = 32

# A text to learn from has at most so many tokens more than A times its batch's longest source. What
# goes on is a loop of a briefly trained target: it would take half of the time to write, and teach
# a draft to loop. (fairseq, with which Xia et al. worked, has the same two numbers.)
MAX_LENGTH_A, MAX_LENGTH_B = 1.5, 10


def growing_cache() -> EncoderDecoderCache:
    """Return an empty cache for ``generate``, which grows to as many layers as the decoder has.

    The one that transformers makes has as many as the *encoder*: it asks a T5 configuration for
    ``num_hidden_layers``, and a deeper decoder runs out of its list.
    """
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def write_targets(
    model: T5ForConditionalGeneration,
    pairs: Pairs,
    beams: int = 1,
    *,
    cut: bool = False,
    no_repeat_ngram: int = 0,
) -> list[list[int]]:
    """Return what a model writes for all sources, by transformers, in the pairs' order.

    Greedily, or the best text that a search with several beams finds.

    A text ends with ``</s>`` or has as many tokens as the longest bucket; with ``cut``, as
    `MAX_LENGTH_A` and `MAX_LENGTH_B` allow. With ``no_repeat_ngram`` of n > 0, no n tokens in a row
    occur in it twice.
    """
    written: list[list[int]] = [[] for _ in pairs.sources]
    how = "greedy" if beams == 1 else f"beam {beams}"
    with tqdm(total=len(pairs), desc=how, mininterval=5.0, file=sys.stderr) as bar:
        for rows in in_order(pairs, ROWS):
            batch = batch_of(pairs, rows, torch.device(model.device))
            most = BUCKETS[-1]
            if cut:
                most = min(most, int(MAX_LENGTH_A * batch.inputs.shape[1]) + MAX_LENGTH_B)
            found = model.generate(
                batch.inputs,
                attention_mask=batch.mask,
                max_new_tokens=most,
                do_sample=False,
                num_beams=beams,
                no_repeat_ngram_size=no_repeat_ngram,
                **{own_cache_name(): growing_cache()},
            )
            for row, tokens in zip(rows, found[:, 1:].tolist(), strict=True):
                end = tokens.index(EOS_ID) + 1 if EOS_ID in tokens else len(tokens)
                written[row] = tokens[:end]
            bar.update(len(rows))
    return written


def rewrite(model: T5ForConditionalGeneration, pairs: Pairs, number: int, beams: int = 1) -> Pairs:
    """Return some pairs with the model's targets, cut off, in place of the text's."""
    chosen = pairs.some(number)
    return Pairs(chosen.sources, write_targets(model, chosen, beams, cut=True))


def distilled_name(start: str, loss: str, written: bool) -> str:
    """Return the name of a draft: whence it begins, the loss, and whose targets it saw."""
    return "-".join([start, loss, *(["written"] if written else [])])
