"""Decoding of sentences in several ways, by turns: tokens, calls, seconds, and their errors.

A *way* to decode is a function of a sentence and a seed that returns a `Run`; `way` makes one from
a target, a drafter and the options of `specdec_ext.generate`. One sentence at a time, and a run's
seconds are those of the whole call, encoders included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from bench_generate import by_turns
from contestants import Run, timed
from pair.seq2seq.data import PAD_ID, padded
from torch import Tensor

import specdec_ext
from specdec_ext.commands import check
from specdec_ext.commands.pair import Pair, Prompt
from specdec_ext.decoding import Statistics
from specdec_ext.decoding.encoder_decoder import EncodedModel, encoded
from specdec_ext.theory import Estimate, ratio
from tables.shared import Bench, Sentence

Way = Callable[[Sentence, int], Run]

# The name under which all ways of a table are compared with plain decoding.
PLAIN = "plain"


class Reading:
    """A batch of sentences as models read it, most often of one: what a drafter is made from.

    Parameters
    ----------
    sentences : sequence of Sentence
        The pairs.
    device : torch.device
        Where the models are.

    Attributes
    ----------
    sources : list of list of int
        What the encoders read, a row each.
    input_ids : Tensor
        The same, ``[B, S]`` int64, filled up at the right.
    """

    def __init__(self, sentences: Sequence[Sentence], device: torch.device) -> None:
        self.sources = [sentence.source for sentence in sentences]
        self.input_ids = padded(self.sources, PAD_ID).to(device)
        self._inputs = {"input_ids": self.input_ids}
        if len(sentences) > 1:
            self._inputs["attention_mask"] = self.input_ids.ne(PAD_ID)
        self._encoded: dict[int, EncodedModel] = {}

    def by(self, model: Any) -> EncodedModel:
        """Encode the sentences with a model, once; what comes back is a target or a draft."""
        if id(model) not in self._encoded:
            self._encoded[id(model)] = encoded(model, **self._inputs)
        return self._encoded[id(model)]


Drafting = Callable[[Reading], Any]


def start_ids(model: Any, batch: int = 1) -> Tensor:
    """Return the decoder's prompt, ``[B, 1]`` int64: its start token."""
    start = model.config.decoder_start_token_id
    return torch.full((batch, 1), start, dtype=torch.int64, device=model.device)


def by_model(model: Any) -> Drafting:
    """Draft with a smaller encoder-decoder."""
    return lambda reading: reading.by(model)


def way(bench: Bench, draft: Drafting | None, **options: Any) -> Way:
    """Return a way to decode.

    Parameters
    ----------
    bench : Bench
        Its largest model is the target.
    draft : callable or None
        Makes the drafter for a sentence (`by_model`, or any function of a `Reading` that returns a
        `specdec_ext.decoding.Drafter`). None: plain decoding.
    **options
        Of `specdec_ext.generate`.

    Returns
    -------
    callable
        Decodes a sentence under a seed.
    """
    start = start_ids(bench.target)
    options = {"max_new_tokens": bench.options.tokens, **options}

    def run(sentence: Sentence, seed: int) -> Run:
        def call() -> Any:
            reading = Reading([sentence], bench.device)
            drafter = None if draft is None else draft(reading)
            target = reading.by(bench.target)
            return specdec_ext.generate(target, drafter, start, seeds=seed, **options)

        found, seconds = timed(call, bench.device)
        return Run(found.sequences[:, 1:].tolist(), seconds, found.statistics)

    return run


def plain_way(bench: Bench, temperature: float) -> Way:
    """Return plain decoding in the same loop."""
    return way(bench, None, temperature=temperature)


def speculative(
    bench: Bench, draft: Drafting, gamma: Any, temperature: float, **options: Any
) -> Way:
    """Return speculative decoding by Leviathan et al.'s Algorithm 1, at temperature 0 greedily."""
    return way(bench, draft, gamma=gamma, temperature=temperature, rule="token", **options)


def model_way(bench: Bench, draft: Any, gamma: Any, temperature: float) -> Way:
    """Return `speculative` decoding with a smaller model."""
    return speculative(bench, by_model(draft), gamma, temperature)


def decode(
    bench: Bench, ways: Mapping[str, Way], seed: int | None = None,
    sentences: Sequence[Sentence] | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Decode every sentence in every way, by turns in a random order, as often as was asked for.

    Parameters
    ----------
    bench : Bench
        Its options say how often.
    ways : mapping
        Name to way; each is called once before anything counts.
    seed : int, optional
        Of the first sentence; by default the command line's.
    sentences : sequence of Sentence, optional
        What is decoded; by default the bench's.

    Returns
    -------
    dict
        Name to runs, all sentences once, then all once more, and so on.
    """
    seed = bench.options.seed if seed is None else seed
    sentences = bench.sentences if sentences is None else sentences
    for one in ways.values():  # what happens once is not timed
        one(sentences[0], seed)
    inputs = [(sentence,) for sentence in sentences] * bench.options.repeats
    return by_turns(ways, inputs, seed)


# ---- is it right? --------------------------------------------------------------------------------


def greedy_faults(
    bench: Bench, runs: Mapping[str, Sequence[Run]], sentences: Sequence[Sentence] | None = None
) -> tuple[list[str], list[str]]:
    """Compare greedy output with plain decoding's, on every sentence.

    Parameters
    ----------
    bench : Bench
        Its largest model is asked again where two texts part.
    runs : mapping
        Runs at temperature 0 under lossless rules, those of `PLAIN` among them.
    sentences : sequence of Sentence, optional
        What was decoded; by default the bench's.

    Returns
    -------
    tuple of list
        A line for every text that is wrong, and one for every text that differs where the target's
        two choices are closer together than its own answers in calls on one and several tokens.
    """
    sentences = bench.sentences if sentences is None else sentences
    faults, ties = [], []
    for name, own in runs.items():
        for number, (expected, found) in enumerate(zip(runs[PLAIN], own, strict=True)):
            if expected.tokens == found.tokens:
                continue
            sentence = number % len(sentences)
            reading = Reading([sentences[sentence]], bench.device)
            pair = Pair(reading.by(bench.target), None, bench.family.tokenizer, [])
            prompt = Prompt(f"sentence {sentence}", "", start_ids(bench.target))
            finding = check.compare_tokens(
                pair, prompt, expected.tokens[0], found.tokens[0], 0.0, 0, name
            )
            (faults if finding.verdict == check.BUG else ties).append(check.line(finding))
    return faults, ties


def greedy_bar(runs: Mapping[str, Sequence[Run]], faults: list[str], ties: list[str]) -> str:
    """Say in a line that ends in PASS or FAIL whether greedy output is plain decoding's."""
    texts = sum(map(len, runs.values())) - len(runs[PLAIN])
    verdict = "FAIL" if faults else "PASS"
    return (
        f"T 0: {texts - len(faults) - len(ties)} of {texts} texts are plain decoding's, "
        f"{len(ties)} differ at a tie, {len(faults)} are wrong: {verdict}"
    )


class Decoded(NamedTuple):
    """Runs of each way, and at temperature 0 whether their texts are plain decoding's."""

    runs: dict[str, list[Run]]
    faults: list[str]
    bars: list[str]


def decode_at(bench: Bench, temperature: float, ways: Mapping[str, Way]) -> Decoded:
    """Decode plainly and in other ways; at temperature 0 compare all texts with the plain ones.

    Parameters
    ----------
    bench : Bench
        Its largest model is the target.
    temperature : float
        That all ways decode at.
    ways : mapping
        Name to way, all under lossless rules.
    """
    runs = decode(bench, {PLAIN: plain_way(bench, temperature), **ways})
    if temperature > 0:
        return Decoded(runs, [], [])
    faults, ties = greedy_faults(bench, runs)
    return Decoded(runs, faults, [greedy_bar(runs, faults, ties)])


# ---- what was measured ---------------------------------------------------------------------------


def merged(runs: Sequence[Run], sentences: int) -> list[Statistics]:
    """Return the statistics of each sentence, its repeats together."""
    found = []
    for number in range(sentences):
        own = [run.statistics for run in runs[number::sentences] if run.statistics is not None]
        found.append(sum(own[1:], own[0]))
    return found


def counted(
    runs: Sequence[Run], sentences: int, above: Callable[[Statistics], float],
    below: Callable[[Statistics], float],
) -> Estimate:  # fmt: skip
    """Estimate a ratio of two counts, with its standard error over sentences."""
    own = merged(runs, sentences)
    sums = torch.tensor([float(above(s)) for s in own], dtype=torch.float64)
    return ratio(sums, torch.tensor([float(below(s)) for s in own], dtype=torch.float64))


def tokens_a_call(runs: Sequence[Run], sentences: int) -> Estimate:
    """Estimate the tokens that a target call emits, the target's own at its end included."""
    return counted(runs, sentences, lambda s: s.emitted, lambda s: s.request_calls)


def accepted_of_tested(runs: Sequence[Run], sentences: int) -> Estimate:
    """Estimate accepted / (accepted + rejected): draft tokens after a rejection do not count."""
    return counted(runs, sentences, lambda s: s.accepted, lambda s: s.accepted + s.rejected)


def accepted_of_drafted(runs: Sequence[Run], sentences: int) -> Estimate:
    """Estimate accepted / drafted, the share of draft tokens that are kept."""
    return counted(runs, sentences, lambda s: s.accepted, lambda s: s.drafted)


def whole_call(run: Run) -> float:
    """Return a run's seconds, encoders included."""
    return run.seconds


def loop_only(run: Run) -> float:
    """Return a run's seconds from the first round on."""
    return math.nan if run.statistics is None else run.statistics.decode_seconds


def speedup(
    plain: Sequence[Run], own: Sequence[Run], sentences: int,
    seconds: Callable[[Run], float] = whole_call,
) -> Estimate:  # fmt: skip
    """Estimate how many times as many tokens a second as plain decoding a way gives.

    A sentence's seconds are the median over its repeats. Tokens count because sampled texts are of
    different lengths. The standard error is over sentences, by linearization of the logarithm.

    Parameters
    ----------
    plain, own : sequence of Run
        Runs on the same sentences in the same order.
    sentences : int
        How many; the runs are these once, then once more, and so on.
    seconds : callable
        Which time of a run.

    Returns
    -------
    Estimate
    """
    residuals = torch.zeros(sentences, dtype=torch.float64)
    value = 1.0
    for runs, sign in ((own, 1.0), (plain, -1.0)):
        times = torch.tensor(
            [statistics.median(map(seconds, runs[k::sentences])) for k in range(sentences)],
            dtype=torch.float64,
        )
        counts = torch.tensor(
            [sum(run.num_tokens for run in runs[k::sentences]) for k in range(sentences)],
            dtype=torch.float64,
        )
        value *= float(counts.sum() / times.sum()) ** sign
        residuals += sign * (counts / counts.sum() - times / times.sum())
    if sentences < 2:
        return Estimate(value, math.nan, sentences)
    spread = float((residuals**2).sum()) * sentences / (sentences - 1)
    return Estimate(value, value * math.sqrt(spread), sentences)
