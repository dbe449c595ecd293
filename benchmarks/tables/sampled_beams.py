"""The report's Algorithm 2, "Speculative Decoding with Beam Search", in a reading that works.

As printed it begins with one beam, and every beam makes one candidate, so that there never is more
than one beam: it is speculative sampling by another name, and its scores decide nothing. They also
add the log-probability of a round's last token alone.

Repaired: k copies of the prefix begin; each of k beams makes k candidates a round, each by drafts
and coins of its own; a score is the sum of the target's log-probabilities of all tokens; of the
candidates that differ the k best live on, ended ones among them. This samples texts and keeps the
likelier ones. It is neither beam search nor the target's law, and nothing here says that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from contestants import timed

from specdec_ext import stream
from specdec_ext.decoding import Burst, Statistics
from specdec_ext.decoding.encoder_decoder import encoded, rows_of
from tables.decode import Run, Way
from tables.shared import Bench, Sentence

# Between the seeds of a sentence's rounds: more than there are candidates in one.
SEEDS_A_ROUND = 4096


class Hypothesis(NamedTuple):
    """A text, its score in nats, and whether it goes on."""

    tokens: tuple[int, ...]
    score: float
    ended: bool


class Encoded(NamedTuple):
    """A model, and what its encoder gave for one sentence."""

    model: Any
    outputs: Any

    def rows(self, number: int) -> Any:
        """Return the sentence as so many requests."""
        return encoded(
            self.model, encoder_outputs=rows_of(self.outputs, torch.zeros(number, dtype=torch.long))
        )


def best(candidates: Sequence[Hypothesis], width: int) -> list[Hypothesis]:
    """Return the best candidates that differ; equal scores go by their tokens."""
    distinct = {candidate.tokens: candidate for candidate in candidates}
    return sorted(distinct.values(), key=lambda one: (-one.score, one.tokens))[:width]


def one_round(
    target: Encoded,
    draft: Encoded,
    parents: Sequence[Hypothesis],
    gamma: int,
    limit: int,
    seed: int,
) -> list[Hypothesis]:
    """Draft behind every parent and verify once (Leviathan et al., Algorithm 1, at T = 1)."""
    config, count = target.model.config, len(parents)
    texts = [(config.decoder_start_token_id, *parent.tokens) for parent in parents]
    width = max(map(len, texts))
    ids = torch.full((count, width), config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = torch.tensor(text)
        mask[row, width - len(text) :] = 1
    rounds = stream(
        target.rows(count), draft.rows(count), ids, attention_mask=mask, gamma=gamma, rule="token",
        temperature=1.0, seeds=[seed + row for row in range(count)],
        max_new_tokens=[limit - len(parent.tokens) for parent in parents],
    )  # fmt: skip
    found: list[Burst] = list(islice(rounds, count))
    rounds.close()
    candidates = []
    for burst in found:
        parent = parents[burst.request]
        tokens = (*parent.tokens, *burst.tokens)
        ended = tokens[-1] == config.eos_token_id or len(tokens) >= limit
        candidates.append(Hypothesis(tokens, parent.score + sum(burst.logprobs), ended))
    return candidates


def search(
    target: Encoded, draft: Encoded, width: int, gamma: int, limit: int, seed: int
) -> tuple[Hypothesis, int]:
    """Search with ``width`` beams; return the best text, and how many rounds it took."""
    beams, rounds = [Hypothesis((), 0.0, False)] * width, 0
    while not all(beam.ended for beam in beams):
        parents = [beam for beam in beams if not beam.ended for _ in range(width)]
        first = seed + SEEDS_A_ROUND * rounds
        candidates = one_round(target, draft, parents, gamma, limit, first)
        beams = best([*(beam for beam in beams if beam.ended), *candidates], width)
        rounds += 1
    return beams[0], rounds


def way(bench: Bench, draft: Any, width: int, gamma: int) -> Way:
    """Return the search as a way to decode; of its counts, target calls and tokens are known."""

    def run(sentence: Sentence, seed: int) -> Run:
        ids = torch.tensor([sentence.source], device=bench.device)

        def call() -> tuple[Hypothesis, int]:
            with torch.inference_mode():
                both = [Encoded(model, model.get_encoder()(ids)) for model in (bench.target, draft)]
            return search(*both, width, gamma, bench.options.tokens, seed)

        (found, rounds), seconds = timed(call, bench.device)
        counts = Statistics(0, rounds, rounds, new_tokens=[len(found.tokens)])
        return Run([list(found.tokens)], seconds, counts)

    return run
