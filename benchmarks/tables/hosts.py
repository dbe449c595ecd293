"""Decoding by transformers itself: greedy, beams, and prompt lookup that is given the source.

One sentence a call, as everything in these tables. Calls of the decoder are counted by a hook, the
same way for every loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from contestants import Run
from pair.seq2seq.distillation import growing_cache
from torch import Tensor
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from specdec_ext.decoding import Statistics
from specdec_ext.decoding.cache_names import own_cache_name
from tables.decode import Way
from tables.shared import Sentence


class Decoded(NamedTuple):
    """One sentence decoded by transformers."""

    tokens: list[int]  # new tokens, the end token included
    calls: int  # of the decoder
    seconds: float  # of the whole call, encoder included


class _Counter:
    """How often a module ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1


@contextmanager
def counted(model: Any) -> Iterator[_Counter]:
    """Count the calls of an encoder-decoder's decoder."""
    counter = _Counter()
    handle = model.get_decoder().register_forward_hook(counter)
    try:
        yield counter
    finally:
        handle.remove()


@torch.inference_mode()
def decode(model: Any, source: Sequence[int], new: int, **options: Any) -> Decoded:
    """Decode one source by ``model.generate``.

    Parameters
    ----------
    model : T5ForConditionalGeneration
        In evaluation mode.
    source : sequence of int
        What the encoder reads, its end token included.
    new : int
        Limit on new tokens.
    **options
        Of ``generate``: nothing for greedy decoding, ``num_beams=5`` ...

    Returns
    -------
    Decoded
    """
    ids = torch.tensor([list(source)], device=model.device)
    with counted(model) as counter:
        begin = time.perf_counter()
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            **{own_cache_name(): growing_cache()}, **options,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    return Decoded(_new_tokens(written[0], model.generation_config), counter.calls, seconds)


def _new_tokens(row: Tensor, config: Any) -> list[int]:
    """Return the tokens behind the decoder's start, up to the first end token."""
    tokens = row.tolist()[1:]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    place = next((k for k, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


class _BehindSource(CandidateGenerator):
    """A prompt lookup that searches the source, too: it sees it in front of the decoder's ids."""

    def __init__(self, lookup: PromptLookupCandidateGenerator, source: Tensor) -> None:
        self._lookup, self._source = lookup, source
        lookup.max_length += source.shape[1]  # it counts what it is shown

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the decoder's ids and what is proposed to follow them."""
        shown = torch.cat((self._source, input_ids), dim=1)
        candidates, _ = self._lookup.get_candidates(shown)
        return candidates[:, self._source.shape[1] :], None


@contextmanager
def _lookup_behind(model: Any, source: Tensor) -> Iterator[None]:
    """Have the model's prompt lookup search the source as well as what the decoder wrote."""
    original = model._get_candidate_generator

    def with_source(*args: Any, **kwargs: Any) -> CandidateGenerator:
        lookup = original(*args, **kwargs)
        if not isinstance(lookup, PromptLookupCandidateGenerator):
            raise TypeError(f"prompt lookup was asked for, got {type(lookup).__name__}")
        return _BehindSource(lookup, source)

    model._get_candidate_generator = with_source
    try:
        yield
    finally:
        del model._get_candidate_generator


def prompt_lookup(model: Any, source: Sequence[int], new: int, gamma: int) -> Decoded:
    """Decode greedily with transformers' prompt lookup, which is given the encoder's source.

    By itself it searches the decoder's ids alone, which hold nothing of the source.

    Parameters
    ----------
    model : T5ForConditionalGeneration
        In evaluation mode.
    source : sequence of int
        What the encoder reads, its end token included.
    new : int
        Limit on new tokens.
    gamma : int
        Most tokens it proposes, ``prompt_lookup_num_tokens``.

    Returns
    -------
    Decoded
    """
    with _lookup_behind(model, torch.tensor([list(source)], device=model.device)):
        return decode(model, source, new, prompt_lookup_num_tokens=gamma)


def as_run(decoded: Decoded) -> Run:
    """Return what was decoded as the other ways of a table do; only its calls are known."""
    calls = decoded.calls
    counts = Statistics(0, calls, calls, new_tokens=[len(decoded.tokens)])
    return Run([decoded.tokens], decoded.seconds, counts)


def way(model: Any, new: int, **options: Any) -> Way:
    """Return greedy decoding (or that of ``options``) by transformers, as a way to decode.

    Beams have no tokens a call: their calls go on behind the end of the text that is chosen.
    """

    def run(sentence: Sentence, seed: int) -> Run:
        found = as_run(decode(model, sentence.source, new, **options))
        return found._replace(statistics=None) if "num_beams" in options else found

    return run


def prompt_lookup_way(model: Any, new: int, gamma: int) -> Way:
    """Return transformers' prompt lookup that is given the source, as a way to decode."""

    def run(sentence: Sentence, seed: int) -> Run:
        return as_run(prompt_lookup(model, sentence.source, new, gamma))

    return run
