"""Structured output: JSON by the schema of examples/json_schema.py, with drafts and without.

    python benchmarks/bench_grammar.py --out benchmarks/results/grammar-cpu-DATE

First a number of texts, sampled with the draft in batches, are judged by jsonschema. Then
contestants write by turns, one request each: the loop without a draft, with the draft drawn under
the masks, with the draft drawn without them, and transformers' generate with xgrammar's own logits
processor. Nothing is timed before all of them agree greedily. Needs xgrammar and jsonschema.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import xgrammar.contrib.hf

import specdec_ext
from specdec_ext.commands.pair import Pair, load_pair
from specdec_ext.decoding.drafters.model import ModelDrafter

sys.path.insert(0, str(common.ROOT / "examples"))

import json_schema as example  # noqa: E402

NEW = 256


class Unmasked(ModelDrafter):
    """Draws from the model's own rows: what a drafter does that does not ask for masks."""

    def start(self, requests: Any) -> None:
        super().start(replace(requests, process=None))


class Written(NamedTuple):
    """What a contestant made of a seed."""

    tokens: list[int]  # the new ones, the end token included
    seconds: float
    calls: int  # of the target
    accepted: int
    tested: int  # draft tokens


def contestants(
    pair: Pair, grammar: Any, ids: torch.Tensor, gamma: int
) -> dict[str, Callable[[int, float], Written]]:
    """Give what writes one text, of a seed and a temperature."""

    def ours(draft: Any) -> Callable[[int, float], Written]:
        def write(seed: int, temperature: float) -> Written:
            begin = time.perf_counter()
            result = specdec_ext.generate(
                pair.target, draft, ids, grammar=grammar, gamma=gamma, seeds=seed,
                temperature=temperature, max_new_tokens=NEW,
            )  # fmt: skip
            seconds = time.perf_counter() - begin
            found = result.statistics
            new = result.sequences[0, ids.shape[1] :].tolist()
            tested = found.accepted + found.rejected
            return Written(new, seconds, found.rounds, found.accepted, tested)

        return write

    def theirs(seed: int, temperature: float) -> Written:
        torch.manual_seed(seed)
        law = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        begin = time.perf_counter()
        masks = xgrammar.contrib.hf.LogitsProcessor(grammar)
        out = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=[masks],
            max_new_tokens=NEW, **law,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        new = out[0, ids.shape[1] :].tolist()
        return Written(new, seconds, len(new), 0, 0)

    return {
        "no draft": ours(None),
        "draft": ours(pair.draft),
        "draft drawn without masks": ours(Unmasked(pair.draft)),
        "transformers, xgrammar's processor": theirs,
    }


def count_valid(pair: Pair, grammar: Any, ids: torch.Tensor, given: argparse.Namespace) -> int:
    """Write texts with the draft, in batches, and count those that the schema describes."""
    valid = 0
    for first in range(0, given.runs, given.batch):
        rows = min(given.batch, given.runs - first)
        result = specdec_ext.generate(
            pair.target, pair.draft, ids.repeat(rows, 1), grammar=grammar, gamma=given.gamma,
            temperature=given.temperature, seeds=first, max_new_tokens=NEW,
        )  # fmt: skip
        texts = [example.text_of(row, ids, pair.tokenizer) for row in result.sequences]
        valid += sum(example.is_valid(text, example.SCHEMA) for text in texts)
    return valid


def check_greedy(writers: dict[str, Callable[[int, float], Written]]) -> None:
    """Refuse to time contestants that do not write the same text at temperature 0."""
    texts = {name: write(0, 0.0).tokens for name, write in writers.items()}
    first = next(iter(texts.values()))
    wrong = [name for name, tokens in texts.items() if tokens != first]
    if wrong:
        raise AssertionError(f"greedy texts differ from those without a draft: {', '.join(wrong)}")


def timed(
    writers: dict[str, Callable[[int, float], Written]], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Let contestants write by turns; speeds, and their ratio to the loop without a draft."""
    written: dict[str, list[Written]] = {name: [] for name in writers}
    for seed in range(given.timed):
        for name, write in writers.items():
            written[name].append(write(seed, given.temperature))
    rates = {
        name: [len(one.tokens) / one.seconds for one in each] for name, each in written.items()
    }
    records = []
    for name, each in written.items():
        ratios = [a / b for a, b in zip(rates[name], rates["no draft"], strict=True)]
        tokens, calls = sum(len(one.tokens) for one in each), sum(one.calls for one in each)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        tested = sum(one.tested for one in each)
        share = round(sum(one.accepted for one in each) / tested, 3) if tested else ""
        records.append(
            {
                "contestant": name,
                "texts": len(each),
                "tokens": tokens,
                "tokens a call": round(tokens / calls, 3),
                "accepted of tested": share,
                "tokens a second": round(tokens / sum(one.seconds for one in each), 1),
                "speed ratio": round(statistics.fmean(ratios), 3),
                "its standard error": round(error, 3),
            }
        )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format what was timed."""
    header = list(records[0])
    return common.markdown_table(header, [[str(r[name]) for name in header] for r in records])


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, check, time and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="texts that are judged")
    parser.add_argument("--batch", type=int, default=25, help="of them in a batch")
    parser.add_argument("--timed", type=int, default=40, help="texts of each, at least 2")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--target", help="folder of a model, or smollm2; default: the shipped pair")
    parser.add_argument("--draft", help="folder of a smaller one over the same tokens")
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    given = parser.parse_args(argv)
    pair = load_pair(given.target, given.draft)
    size = pair.target.config.vocab_size
    grammar = example.grammar_of("xgrammar", example.SCHEMA, pair.tokenizer, size)
    ids = pair.tokenizer(example.PROMPT, return_tensors="pt").input_ids
    load = common.Load()
    writers = contestants(pair, grammar, ids, given.gamma)
    check_greedy(writers)
    records = timed(writers, given)
    valid = count_valid(pair, grammar, ids, given)
    text = (
        f"{valid} of {given.runs} texts valid, drafted with gamma {given.gamma} at temperature "
        f"{given.temperature} in batches of {given.batch}.\n\n{table(records)}\n\n"
        f"Contestants took turns; {round(100 * (load.share() or 0))} % of the machine's time went "
        "to other processes."
    )
    print(text)
    if given.out is not None:
        judged = {"contestant": "judged by jsonschema", "texts": given.runs, "valid": valid}
        facts = {**common.machine_facts(), "command": sys.argv}
        common.write_record(given.out, facts, [*records, judged], text)
    return int(valid < given.runs)


if __name__ == "__main__":
    raise SystemExit(main())
