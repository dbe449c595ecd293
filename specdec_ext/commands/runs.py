"""Runs of a prompt both ways, plainly and with a draft, recorded round by round."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import GREEDY_BELOW
from ..decoding import Burst, RoundRecord, generate
from ..decoding.chain_generation import GeneratedPair
from ..decoding.tracing import RecordedRound
from .page import REPLACED
from .pair import Pair, Prompt
from .pieces import Piece, Reader, pieces_of

__all__ = ["Recording", "Written", "both_ways", "decode", "written"]

TURNS = 3


class Recording(NamedTuple):
    """One run: its rounds, and how long the whole call took, prompt included, in seconds."""

    rounds: list[RecordedRound]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [token for found in self.rounds for burst in found.bursts for token in burst.tokens]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return len(self.tokens) / self.seconds

    def calls(self, model: str) -> int:
        """Return how often a model was called."""
        return sum(call.model == model for found in self.rounds for call in found.calls)


def decode(
    pair: Pair,
    prompt: Prompt,
    draft: Any,
    args: argparse.Namespace,
    temperature: float,
    on_round: Callable[[list[Burst]], None] | None = None,
) -> GeneratedPair:
    """Complete a prompt as the options say; plainly where the draft is None."""
    return generate(
        pair.target,
        draft,
        prompt.ids,
        max_new_tokens=args.max_new_tokens,
        gamma=args.gamma,
        temperature=temperature,
        rule=args.rule if draft is not None else "block",
        seeds=args.seed,
        on_round=on_round,
    )


def _record(pair: Pair, prompt: Prompt, draft: Any, args: argparse.Namespace) -> Recording:
    with RoundRecord(pair.target, draft) as record:
        decode(pair, prompt, draft, args, args.temperature, record)
    return Recording(record.rounds, record.rounds[-1].end)


def both_ways(
    pair: Pair, prompt: Prompt, args: argparse.Namespace, turns: int = TURNS
) -> tuple[Recording, Recording]:
    """Decode plainly and speculatively in turns, each alone; give the turn of median factor.

    Both are of one turn, so that a machine whose load changes is fair to both. One more turn goes
    before, which is not counted: what is made once is made there.
    """
    runs = [
        (_record(pair, prompt, None, args), _record(pair, prompt, pair.drafter, args))
        for _ in range(turns + 1)
    ]
    return sorted(runs[1:], key=lambda turn: turn[0].seconds / turn[1].seconds)[turns // 2]


class Written(NamedTuple):
    """A token that was proposed or written.

    Attributes
    ----------
    piece : Piece
        Who wrote it, and its text.
    round : int
        From 1 on.
    position : int
        Its place among the new tokens, from 0 on; a replaced one has that of its replacement.
    target, draft : float or None
        Probability under the target's and the draft's law there; None where there is no such law.
    """

    piece: Piece
    round: int
    position: int
    target: float
    draft: float | None


def written(pair: Pair, prompt: Prompt, run: Recording, temperature: float) -> list[Written]:
    """List what a run wrote and replaced, with probabilities.

    They are found afterwards, by one call of each model on the whole text, so that no run's time
    has them in it. Where decoding was greedy they are those of temperature 1: the greedy law says
    no more than which token is the best.
    """
    reader = Reader(pair.tokenizer, prompt.ids[0].tolist())
    laws = [
        None if model is None else _laws(model, prompt, run.tokens, temperature)
        for model in (pair.target, pair.draft)
    ]

    def probability(law: Tensor | None, position: int, token: int) -> float | None:
        if law is None:
            return None
        return float(law[position, token]) if token < law.shape[1] else 0.0

    found: list[Written] = []
    position = 0
    for number, done in enumerate(run.rounds, start=1):
        for burst in done.bursts:
            for piece in pieces_of(burst, reader):
                p, q = (probability(law, position, piece.token) for law in laws)
                assert p is not None
                found.append(Written(piece, number, position, p, q))
                position += piece.kind != REPLACED
    return found


@torch.inference_mode()
def _laws(model: Any, prompt: Prompt, tokens: list[int], temperature: float) -> Tensor:
    """Return a model's law of every new token, ``[N, V]`` float32."""
    text = torch.cat([prompt.ids, prompt.ids.new_tensor([tokens[:-1]])], 1)
    logits = model(input_ids=text).logits[0, prompt.ids.shape[1] - 1 :].float()
    law: Tensor = (logits / (1.0 if temperature < GREEDY_BELOW else temperature)).softmax(-1)
    return law
