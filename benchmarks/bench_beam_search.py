"""Compare speculative beam search with transformers' own, on sources or prompts.

    python benchmarks/bench_beam_search.py build/seq2seq/translation --sentences 1000 \
        --beams 5 --draft-beams 5 10 --gamma 2 4
    python benchmarks/bench_beam_search.py pair --beams 2 --draft-beams 4   # the pair shipped here

Every text is decoded alone, in float32: by transformers' beam search, and by
`generate(num_beams=...)` with the smaller models of a trained family, or the pair's draft. Compared
are the ids and the scores of all beams; a difference is counted, and the scores around it are kept,
since two texts whose scores differ by less than float32 carries may change places. Recorded are
levels a target call and wall time, encoder included; both ways take turns on every source.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext.commands.pair import find_prompts, load_pair
from specdec_ext.decoding.cache_names import own_cache_name
from specdec_ext.decoding.encoder_decoder import encoded

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from pair.seq2seq.distillation import growing_cache  # noqa: E402
from pair.seq2seq.models import load_family  # noqa: E402

SHIPPED = "pair"
ALIKE = 1e-4  # of scores: what a sum of float32 log-probabilities loses


class Beams(NamedTuple):
    """All beams of one source: texts up to their ends, scores, and the seconds they took."""

    texts: list[list[int]]
    scores: list[float]
    seconds: float
    levels: int = 0
    calls: int = 0


def cut(row: list[int], end: int) -> list[int]:
    """Return the tokens up to the first end."""
    return row[: row.index(end) + 1] if end in row else row


class Task(NamedTuple):
    """Models, and what they are asked."""

    name: str  # of the target
    target: Any
    drafts: dict[str, Any]
    sources: list[Tensor]  # [1, S]: what encoders read, or prompts
    start: int | None  # what decoders begin with; None: these models are causal

    def asked(self, model: Any, ids: Tensor) -> Any:
        """Return a model that has read a source."""
        return model if self.start is None else encoded(model, input_ids=ids)

    def prompt(self, ids: Tensor) -> Tensor:
        """Return what is continued."""
        return ids if self.start is None else torch.full((1, 1), self.start)


def task_of(arguments: argparse.Namespace) -> Task:
    """Open the shipped pair, or a trained family with its test split."""
    if str(arguments.family) == SHIPPED:
        pair = load_pair()
        prompts = [prompt.ids for prompt in find_prompts(pair)[: arguments.sentences]]
        return Task(
            "the pair's target", pair.target, {"the pair's draft": pair.draft}, prompts, None
        )
    family = load_family(arguments.family)
    name, target = list(family.models.items())[-1]  # the largest
    chosen = arguments.drafts or [draft for draft in family.models if draft != name]
    sources = family.splits["test"].some(arguments.sentences).sources
    return Task(
        name,
        target,
        {draft: family.models[draft] for draft in chosen},
        [torch.tensor([source]) for source in sources],
        target.config.decoder_start_token_id,
    )


def theirs(task: Task, ids: Tensor, arguments: argparse.Namespace) -> Beams:
    """Search by transformers."""
    # That of transformers' own choosing has as many layers as the encoder.
    cache = {} if task.start is None else {own_cache_name(): growing_cache()}
    start = time.perf_counter()
    found = task.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=arguments.beams,
        num_return_sequences=arguments.beams,
        max_new_tokens=arguments.tokens,
        length_penalty=arguments.length_penalty,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **cache,
    )
    seconds = time.perf_counter() - start
    rows = found.sequences[:, task.prompt(ids).shape[1] :].tolist()
    end = task.target.generation_config.eos_token_id
    return Beams([cut(row, end) for row in rows], found.sequences_scores.tolist(), seconds)


def ours(
    task: Task, draft: Any, ids: Tensor, width: int, gamma: int, arguments: argparse.Namespace
) -> Beams:
    """Search by `generate`."""
    start = time.perf_counter()
    result: Any = specdec_ext.generate(
        task.asked(task.target, ids),
        task.asked(draft, ids),
        task.prompt(ids),
        num_beams=arguments.beams,
        num_return_sequences=arguments.beams,
        draft_beams=width,
        gamma=gamma,
        max_new_tokens=arguments.tokens,
        length_penalty=arguments.length_penalty,
    )
    seconds = time.perf_counter() - start
    rows = result.sequences[:, task.prompt(ids).shape[1] :].tolist()
    end = task.target.generation_config.eos_token_id
    texts = [cut(row, end) for row in rows]
    counts = result.statistics
    return Beams(texts, result.scores.tolist(), seconds, counts.emitted, counts.request_calls)


def record_of(way: str, expected: list[Beams], found: list[Beams]) -> dict[str, Any]:
    """Sum up what a way gave on all sources, beside transformers."""
    pairs = list(zip(expected, found, strict=True))
    gaps = [
        abs(a - b) for one, other in pairs for a, b in zip(one.scores, other.scores, strict=True)
    ]
    seconds = sum(beams.seconds for beams in found)
    return {
        "way": way,
        "sources": len(pairs),
        "same_ids": sum(one.texts == other.texts for one, other in pairs),
        "same_best": sum(one.texts[0] == other.texts[0] for one, other in pairs),
        "largest_score_difference": max(gaps),
        "faults": sum(gap > ALIKE for gap in gaps),
        "levels_a_call": sum(b.levels for b in found) / max(sum(b.calls for b in found), 1),
        "milliseconds": 1000 * seconds / len(pairs),
        "speed_up": sum(beams.seconds for beams in expected) / seconds,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode all sources in all ways."""
    task = task_of(arguments)
    ways = {
        f"{draft}, u = {width}, gamma = {gamma}": (model, width, gamma)
        for draft, model in task.drafts.items()
        for width in arguments.draft_beams
        for gamma in arguments.gamma
    }
    expected: list[Beams] = []
    found: dict[str, list[Beams]] = {way: [] for way in ways}
    for ids in task.sources:
        expected.append(theirs(task, ids, arguments))
        for way, (draft, width, gamma) in ways.items():
            found[way].append(ours(task, draft, ids, width, gamma, arguments))
    records = [record_of(f"transformers, {task.name}", expected, expected)]
    return records + [record_of(way, expected, beams) for way, beams in found.items()]


def main() -> int:
    """Run, print and write; 1 where scores differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "family", type=Path, help=f"what `benchmarks/pair/seq2seq train` left, or {SHIPPED}"
    )
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--draft-beams", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--gamma", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--drafts", nargs="+", help="by name (all but the largest)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="write OUT.json, .csv and .md")
    arguments = parser.parse_args()
    with torch.inference_mode():
        records = run(arguments)
    names = list(records[0])
    rows = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in record.values()]
        for record in records
    ]
    table = common.markdown_table(names, rows)
    print(table)
    if arguments.out is not None:
        common.write_record(arguments.out, common.machine_facts(), records, table)
    return int(any(record["faults"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
