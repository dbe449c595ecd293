"""Rows of the report's and the article's tables: quality, acceptance and speed of ways to decode.

Every row is a way to decode the same sentences, by turns with all others of its temperature. At
temperature 0 each text is compared with plain decoding's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contestants import Run

from tables import quality
from tables.costs import clocked
from tables.decode import (
    PLAIN,
    Drafting,
    Way,
    accepted_of_drafted,
    accepted_of_tested,
    decode,
    greedy_bar,
    greedy_faults,
    merged,
    plain_way,
    speculative,
    speedup,
    tokens_a_call,
)
from tables.shared import Bench, Column, Sentence, with_estimate

# Tasks whose texts are English, which ROUGE is made for.
ENGLISH = ("summarisation", "correction")

COLUMNS = (
    Column("way", "decoding"),
    Column("temperature", "T", "g"),
    Column("bleu", "BLEU", ".1f"),
    Column("chrf", "chrF", ".1f"),
    Column("alpha", "accepted / tested"),
    Column("share", "accepted / drafted"),
    Column("tokens_a_call", "tokens a call"),
    Column("speed", "speed"),
)
ROUGE_COLUMNS = [
    Column("rouge1", "ROUGE-1", ".1f"),
    Column("rouge2", "ROUGE-2", ".1f"),
    Column("rougeL", "ROUGE-L", ".1f"),
]
QUALITY = (
    "BLEU and chrF are sacreBLEU's of all sentences together, in percent; the error of BLEU is the "
    "jackknife's."
)
COUNTS = [
    "Standard errors over texts in parentheses. *Speed*: tokens a second against plain decoding's "
    "in the same loop at the same T, whole calls, encoders included.",
    "*Accepted / tested* leaves out draft tokens behind a rejection and estimates Leviathan et "
    "al.'s alpha; *accepted / drafted* counts them, and falls as gamma grows. *Tokens a call* "
    "counts the token that the target adds itself.",
]
MEANING = [*COUNTS, QUALITY]


@dataclass
class Measured:
    """What came out of some ways to decode at one temperature."""

    runs: dict[str, list[Run]]
    records: list[dict[str, Any]]
    bars: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def size(bench: Bench, name: str) -> Any:
    """Return the draft of a size by its name; a table that wants another one would be another."""
    if name not in bench.drafts:
        raise ValueError(
            f"this table drafts with the size {name!r}; smaller than the target there are "
            f"{', '.join(bench.drafts) or 'none'}"
        )
    return bench.drafts[name]


def texts(bench: Bench, rows: Sequence[Sequence[int]]) -> list[str]:
    """Turn rows of tokens into texts, end tokens left out."""
    return list(bench.family.tokenizer.batch_decode(rows, skip_special_tokens=True))


def quality_of(
    bench: Bench, runs: Sequence[Run], sentences: Sequence[Sentence]
) -> dict[str, float]:
    """Score the first run of each sentence against its reference."""
    hypotheses = texts(bench, [run.tokens[0] for run in runs[: len(sentences)]])
    references = texts(bench, [sentence.reference for sentence in sentences])
    whole = quality.bleu(hypotheses, references)
    average = quality.mean_sentence_bleu(hypotheses, references)
    found = {
        "bleu": whole.value,
        "bleu_se": whole.error,
        "sentence_bleu": average.value,
        "sentence_bleu_se": average.error,
        "chrf": quality.chrf(hypotheses, references),
    }
    if bench.task in ENGLISH:
        for kind, score in quality.rouge(hypotheses, references).items():
            found |= {kind: score.value, f"{kind}_se": score.error}
    return found


def seconds_a_sentence(runs: Sequence[Run], sentences: int) -> quality.Score:
    """Return the mean over sentences of the median over repeats of a call's seconds."""
    return quality.mean_of(
        [statistics.median(run.seconds for run in runs[k::sentences]) for k in range(sentences)]
    )


def record(
    bench: Bench, name: str, runs: Mapping[str, Sequence[Run]], temperature: float,
    sentences: Sequence[Sentence],
) -> dict[str, Any]:  # fmt: skip
    """Reduce the runs of one way to what tables show and what the CSV has beside that."""
    own, count = runs[name], len(sentences)
    seconds = seconds_a_sentence(own, count)
    found: dict[str, Any] = {"way": name, "temperature": temperature}
    found |= quality_of(bench, own, sentences)
    found |= {"seconds": seconds.value, "seconds_se": seconds.error}
    found |= with_estimate("speed", speedup(runs[PLAIN], own, count))
    if own[0].statistics is None:
        return found
    found |= with_estimate("tokens_a_call", tokens_a_call(own, count))
    if any(s.drafted for s in merged(own, count)):
        found |= with_estimate("alpha", accepted_of_tested(own, count))
        found |= with_estimate("share", accepted_of_drafted(own, count))
    return found


def measure(
    bench: Bench, ways: Mapping[str, Way], temperature: float,
    sentences: Sequence[Sentence] | None = None, others: Mapping[str, Way] | None = None,
) -> Measured:  # fmt: skip
    """Decode all sentences in all ways, and check and reduce what comes out.

    Parameters
    ----------
    bench : Bench
        Its largest model is the target.
    ways : mapping
        Under lossless rules, `PLAIN` among them: at temperature 0 all texts have to be the same.
    temperature : float
        That they decode at.
    sentences : sequence of Sentence, optional
        By default the bench's.
    others : mapping, optional
        Ways whose texts are their own (beams, other models): run and scored, not compared.

    Returns
    -------
    Measured
    """
    chosen = bench.sentences if sentences is None else sentences
    runs = decode(bench, {**ways, **(others or {})}, sentences=chosen)
    found = Measured(runs, [record(bench, name, runs, temperature, chosen) for name in runs])
    if temperature == 0 and len(ways) > 1:
        alike = {name: runs[name] for name in ways}
        faults, ties = greedy_faults(bench, alike, chosen)
        found.faults += faults
        found.bars.append(greedy_bar(alike, faults, ties))
    return found


def cost_ratio(bench: Bench, draft: Drafting, gamma: int = 3) -> float:
    """Measure c on a few sentences of the validation split, decoded greedily, see `costs.clocked`.

    Parameters
    ----------
    bench : Bench
        Its largest model is the target.
    draft : callable
        Makes the drafter for a sentence.
    gamma : int
        Draft tokens a round while c is measured.

    Returns
    -------
    float
    """
    ways = {PLAIN: plain_way(bench, 0.0), "draft": speculative(bench, draft, gamma, 0.0)}
    runs = decode(bench, ways, sentences=bench.some("valid", 5))
    return clocked(runs[PLAIN], runs["draft"]).c


def by_temperature(
    bench: Bench, ways: Callable[[float], Mapping[str, Way]], temperatures: Sequence[float]
) -> Measured:
    """Measure the ways at each temperature and put everything into one."""
    found = Measured({}, [])
    for temperature in temperatures:
        own = measure(bench, ways(temperature), temperature)
        found.runs |= {f"{name}, T {temperature:g}": runs for name, runs in own.runs.items()}
        found.records += own.records
        found.bars += own.bars
        found.faults += own.faults
    return found
