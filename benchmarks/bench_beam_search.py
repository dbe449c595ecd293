"""Compare speculative beam search with transformers' own, on sources or prompts.

    python benchmarks/bench_beam_search.py build/seq2seq/translation --sentences 1000 \
        --beams 5 --draft-beams 5 10 --gamma 2 4
    python benchmarks/bench_beam_search.py pair --beams 2 --gamma 0 2 renewal  # shipped
    python benchmarks/bench_beam_search.py --target smollm2 --draft build/distilled/smollm2/draft

Every text is decoded alone, in float32: by transformers' beam search, and by
`generate(num_beams=...)` with the smaller models of a trained family, or the pair's draft. A gamma
of 0 is our search without a draft; "renewal" is a `RenewalRule` with the largest of the other
gammas, which keeps what it learns from text to text. Compared are the ids and the scores of all
beams; a difference is counted, and the scores around it are kept, since two texts whose scores
differ by less than float32 carries may change places. Recorded are levels a target call, the share
of levels behind a call's first that the subset rule and that the bound rule alone decided, and wall
time, encoder included; all ways take turns on every source, each time another one first. Speed-ups
are against transformers: of all texts together, and the median over them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext.commands.pair import find_prompts, load_pair
from specdec_ext.decoding import RenewalRule
from specdec_ext.decoding.beam_generation import ops
from specdec_ext.decoding.cache_names import own_cache_name
from specdec_ext.decoding.encoder_decoder import encoded

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from pair.seq2seq.distillation import growing_cache  # noqa: E402
from pair.seq2seq.models import load_family  # noqa: E402

SHIPPED = "pair"
RENEWAL = "renewal"
ALIKE = 1e-4  # of scores: what a sum of float32 log-probabilities loses


class Beams(NamedTuple):
    """All beams of one source: texts up to their ends, scores, and the seconds they took."""

    texts: list[list[int]]
    scores: list[float]
    seconds: float
    levels: int = 0
    calls: int = 0
    by_rule: tuple[int, int] = (0, 0)  # levels by the subset rule, and by the bound rule alone


#: Searches a source.
Way = Callable[[Tensor], Beams]


class Levels:
    """Counts by which rule levels were decided, where it stands in for `beam_verify`."""

    def __init__(self) -> None:
        self.verify = ops.beam_verify
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator and keep what it found."""
        self.calls.append(self.verify(*args, **kwargs))
        return self.calls[-1]

    def count(self) -> tuple[int, int]:
        """Return levels behind a call's first: by the subset rule, by the bound alone; forget."""
        subset = bound = 0
        for found in self.calls:
            missing = ((found.tokens >= 0) & (found.nodes < 0)).any(2)[:, :-1]
            decided = torch.arange(1, missing.shape[1] + 1) < found.num_levels[:, None]
            subset += int((decided & ~missing).sum())
            bound += int((decided & missing).sum())
        self.calls = []
        return subset, bound


LEVELS = Levels()


@contextlib.contextmanager
def counted_levels() -> Iterator[None]:
    """Let `LEVELS` see what `generate` decides."""
    ops.beam_verify = LEVELS
    try:
        yield
    finally:
        ops.beam_verify = LEVELS.verify


def ends_of(model: Any) -> list[int]:
    """Return the tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def cut(row: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens up to the first end."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


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
    """Open the shipped pair, one that is named, or a trained family with its test split."""
    if arguments.target is not None or str(arguments.family) == SHIPPED:
        pair = load_pair(arguments.target, arguments.draft, needs_draft=arguments.draft is not None)
        prompts = [prompt.ids for prompt in find_prompts(pair)[: arguments.sentences]]
        drafts = {} if pair.draft is None else {arguments.draft or "the pair's draft": pair.draft}
        return Task(arguments.target or "the pair's target", pair.target, drafts, prompts, None)
    family = load_family(Path(arguments.family))
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
    texts = [cut(row, ends_of(task.target)) for row in rows]
    return Beams(texts, found.sequences_scores.tolist(), seconds)


def ours(
    task: Task, draft: Any, ids: Tensor, width: int, gamma: Any, arguments: argparse.Namespace
) -> Beams:
    """Search by `generate`."""
    start = time.perf_counter()
    result: Any = specdec_ext.generate(
        task.asked(task.target, ids),
        None if draft is None else task.asked(draft, ids),
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
    texts = [cut(row, ends_of(task.target)) for row in rows]
    counts = result.statistics
    return Beams(
        texts,
        result.scores.tolist(),
        seconds,
        counts.emitted,
        counts.request_calls,
        LEVELS.count(),
    )


def ways_of(task: Task, arguments: argparse.Namespace) -> dict[str, Way]:
    """Return what is compared, transformers first."""
    ways: dict[str, Way] = {f"transformers, {task.name}": lambda ids: theirs(task, ids, arguments)}

    def add(name: str, draft: Any, width: int, gamma: Any) -> None:
        ways[name] = lambda ids: ours(task, draft, ids, width, gamma, arguments)

    if 0 in arguments.gamma or not task.drafts:
        add("no draft", None, arguments.beams, 0)
    fixed = [gamma for gamma in arguments.gamma if gamma != RENEWAL]
    for draft, model in task.drafts.items():
        for width in arguments.draft_beams or [arguments.beams, 2 * arguments.beams]:
            for gamma in arguments.gamma:
                if gamma == RENEWAL:
                    policy = RenewalRule(max(fixed, default=0) or 4)
                    add(f"{draft}, u = {width}, renewal", model, width, policy)
                elif gamma > 0:
                    add(f"{draft}, u = {width}, gamma = {gamma}", model, width, gamma)
    return ways


def record_of(way: str, expected: list[Beams], found: list[Beams]) -> dict[str, Any]:
    """Sum up what a way gave on all sources, beside transformers."""
    pairs = list(zip(expected, found, strict=True))
    gaps = [
        abs(a - b) for one, other in pairs for a, b in zip(one.scores, other.scores, strict=True)
    ]
    seconds = sum(beams.seconds for beams in found)
    subset, bound = (sum(beams.by_rule[i] for beams in found) for i in (0, 1))
    levels = max(sum(beams.levels for beams in found), 1)
    return {
        "way": way,
        "sources": len(pairs),
        "same_ids": sum(one.texts == other.texts for one, other in pairs),
        "same_best": sum(one.texts[0] == other.texts[0] for one, other in pairs),
        "largest_score_difference": max(gaps),
        "faults": sum(gap > ALIKE for gap in gaps),
        "levels_a_call": sum(b.levels for b in found) / max(sum(b.calls for b in found), 1),
        "subset_percent": 100 * subset / levels,
        "bound_percent": 100 * bound / levels,
        "milliseconds": 1000 * seconds / len(pairs),
        "speed_up": sum(beams.seconds for beams in expected) / seconds,
        "median_speed_up": statistics.median(one.seconds / other.seconds for one, other in pairs),
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode all sources in all ways."""
    task = task_of(arguments)
    ways = ways_of(task, arguments)
    names = list(ways)
    found: dict[str, list[Beams]] = {name: [] for name in names}
    for name in names:  # models are looked at, and warm up
        ways[name](task.sources[0])
    for turn, ids in enumerate(task.sources):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name](ids))
    return [record_of(name, found[names[0]], beams) for name, beams in found.items()]


def gamma_of(text: str) -> int | str:
    """Read a gamma: a number of levels, or the policy."""
    return text if text == RENEWAL else int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; 1 where scores differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "family",
        nargs="?",
        default=SHIPPED,
        help=f"what `benchmarks/pair/seq2seq train` left, or {SHIPPED} (the default)",
    )
    parser.add_argument("--target", help="a causal model in place of it: a folder, or smollm2")
    parser.add_argument("--draft", help="its draft's folder")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--draft-beams", type=int, nargs="+", help="default: beams, and twice that")
    parser.add_argument(
        "--gamma", type=gamma_of, nargs="+", default=[0, 2, RENEWAL], help="levels, or renewal"
    )
    parser.add_argument("--drafts", nargs="+", help="by name (all but the largest)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write OUT.json, .csv and .md")
    arguments = parser.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with torch.inference_mode(), counted_levels():
        records = run(arguments)
    names = list(records[0])
    rows = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in record.values()]
        for record in records
    ]
    table = common.markdown_table(names, rows)
    print(table)
    if arguments.out is not None:
        facts = {**common.machine_facts(), "command": sys.argv}
        common.write_record(arguments.out, facts, records, table)
    return int(any(record["faults"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
