"""Drafts of one domain on texts of another (article 004): n-grams, a tuned model, other texts.

A domain is an origin of `benchmarks/tasks`: help pages, manual pages, dialogs ... Needs the task's
records as text (``--data``), since prepared data no longer says where a pair is from.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pair.seq2seq.data import Pairs, encode
from pair.seq2seq.schedule import Pace
from pair.seq2seq.training import Options, train

from specdec_ext.decoding import NgramDrafter
from tables.decode import PLAIN, Way, by_model, plain_way, speculative, tokens_a_call
from tables.rows import COLUMNS, MEANING, Measured, measure
from tables.shared import Bench, Column, Result, Sentence

GAMMA, ORDER = 4, 3
DOMAINS = 4  # the largest ones
LEAST = 8  # test texts of a domain that is looked at
TEXTS = 3000  # of a domain, for an n-gram model
STEPS, QUICK_STEPS, BATCH_TOKENS = 200, 4, 512  # of tuning the smallest model to a domain
GENERAL = "all texts of its training"


class Domain(NamedTuple):
    """An origin: its training pairs, its test sentences, and whether the models have read it."""

    train: Pairs
    test: list[Sentence]
    seen: bool


def read_domains(bench: Bench) -> dict[str, Domain]:
    """Return the largest origins of the task, the largest first.

    Raises
    ------
    FileNotFoundError
        The records are not there.
    ValueError
        Fewer than two origins have test texts enough.
    """
    tokenizer = bench.family.tokenizer
    permissive_only = bool(bench.family.facts["data"]["permissive only"])
    test = _by_origin(bench.options.data / "test.jsonl")
    learnt = _by_origin(bench.options.data / "train.jsonl")
    found: dict[str, Domain] = {}
    for origin in sorted(test, key=lambda origin: -len(test[origin])):
        if len(found) == DOMAINS:
            break
        fitting = encode(tokenizer, _texts(test[origin]))[0]
        records = learnt.get(origin, [])
        # Some are too long: twice as many as are wanted, evenly spread.
        pairs = encode(tokenizer, _texts(records[:: max(len(records) // (2 * TEXTS), 1)]))[0]
        if min(len(fitting), len(pairs)) < LEAST:
            continue
        some = fitting.some(max(bench.options.sentences // 2, 1))
        sentences = [Sentence(*p) for p in zip(some.sources, some.targets, strict=True)]
        seen = not permissive_only or all(record["permissive"] for record in records)
        found[origin] = Domain(pairs.some(TEXTS), sentences, seen)
    if len(found) < 2:
        raise ValueError(
            f"{bench.options.data} must have at least 2 origins with {LEAST} texts for training "
            f"and for tests, got {len(found)} of {len(test)}"
        )
    return found


def _by_origin(path: Path) -> dict[str, list[dict[str, Any]]]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `python benchmarks/tasks`, or give --data")
    found: dict[str, list[dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            found.setdefault(record["origin"], []).append(record)
    return found


def _texts(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(record["source"], record["target"]) for record in records]


def tuned(bench: Bench, pairs: Pairs) -> Any:
    """Return a copy of the smallest model, trained further on some pairs alone."""
    model = copy.deepcopy(next(iter(bench.drafts.values())))
    pace = Pace(steps=QUICK_STEPS if bench.options.quick else STEPS)
    options = Options(seed=bench.options.seed, batch_tokens=BATCH_TOKENS, lr_scale=0.3)
    with tempfile.TemporaryDirectory() as folder:
        train("tuning", model, pairs, pace, options, Path(folder), bench.device)
    return model


def drafts(bench: Bench, domains: Mapping[str, Domain]) -> dict[tuple[str, str], Any]:
    """Return what drafts, by its kind and by the domain that it learnt from."""
    vocabulary = bench.target.config.vocab_size
    smallest = next(iter(bench.drafts))
    found: dict[tuple[str, str], Any] = {
        (f"model {name}", GENERAL): by_model(draft) for name, draft in bench.drafts.items()
    }
    for origin, domain in domains.items():
        counted = NgramDrafter(vocabulary, ORDER, texts=domain.train.targets, learn=False)
        found["trigram", origin] = lambda reading, counted=counted: counted
    for origin in list(domains)[:2]:
        found[f"model {smallest}, tuned", origin] = by_model(tuned(bench, domains[origin].train))
    return found


def make(bench: Bench) -> Result:
    """Make the table."""
    domains = read_domains(bench)
    drafting = drafts(bench, domains)
    names = {key: f"{key[0]}, of {key[1]}" for key in drafting}
    records: list[dict[str, Any]] = []
    measured: dict[str, Measured] = {}
    for origin, domain in domains.items():
        ways: dict[str, Way] = {PLAIN: plain_way(bench, 0.0)}
        for key, draft in drafting.items():
            ways[names[key]] = speculative(bench, draft, GAMMA, 0.0)
        own = measured[origin] = measure(bench, ways, 0.0, sentences=domain.test)
        labels = {names[key]: key for key in drafting} | {PLAIN: (PLAIN, "")}
        for record in own.records:
            kind, learnt = labels[record["way"]]
            seen = "yes" if domain.seen else "no"
            records.append({"texts": origin, "seen": seen, "draft": kind, "from": learnt} | record)
    return Result(
        f"Domains of drafts and texts (article 004), {bench.task}",
        [
            Column("texts", "texts"),
            Column("seen", "in the models' training"),
            Column("draft", "draft"),
            Column("from", "learnt from"),
            *COLUMNS[4:],
            Column("bleu", "BLEU", ".1f"),
        ],
        records,
        notes=[
            f"gamma {GAMMA}, T 0. Trigrams are counted in at most {TEXTS} texts of a domain and "
            f"not in the output; *tuned* is the smallest model after {STEPS} more steps on the "
            "domain's training texts. The article has no figures: it says that a general draft on "
            "a target that is tuned to a domain is accepted rarely.",
            "Drafts follow what the target writes, which on texts of origins that no model has "
            "read may be in the manner of those that it has.",
            *(
                _comparison(measured, names, kind)
                for kind in dict.fromkeys(key[0] for key in drafting if key[1] != GENERAL)
            ),
            *MEANING,
        ],
        bars=[f"{origin}: {bar}" for origin, own in measured.items() for bar in own.bars],
        faults=[fault for own in measured.values() for fault in own.faults],
        draw=lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def _comparison(
    measured: Mapping[str, Measured], names: Mapping[tuple[str, str], str], kind: str
) -> str:
    """Say what drafts of a kind come to on texts of the domain that they learnt from, and others.

    Only on domains that one of them learnt from: every domain counts as often as any other.
    """
    learnt = [key[1] for key in names if key[0] == kind]
    own, other = [], []
    for origin in learnt:
        for source in learnt:
            runs = measured[origin].runs[names[kind, source]]
            place = own if source == origin else other
            place.append(tokens_a_call(runs, len(runs)).mean)
    means = [sum(values) / len(values) for values in (own, other)]
    return (
        f"{kind}: {means[0]:.2f} tokens a call on texts of the domain that it learnt from, "
        f"{means[1]:.2f} on those of another, means over {', '.join(learnt)}."
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw tokens a call of every draft on every domain."""
    rows = [record for record in records if record["draft"] != PLAIN]
    drafts = list(dict.fromkeys(f"{record['draft']}, of {record['from']}" for record in rows))
    texts = list(dict.fromkeys(record["texts"] for record in rows))
    figure, axes = pyplot.subplots(figsize=(3 + 1.3 * len(texts), 1.5 + 0.35 * len(drafts)))
    grid = [[0.0] * len(texts) for _ in drafts]
    for record in rows:
        row = drafts.index(f"{record['draft']}, of {record['from']}")
        column = texts.index(record["texts"])
        grid[row][column] = record["tokens_a_call"]
        axes.text(column, row, f"{record['tokens_a_call']:.2f}", ha="center", va="center")
    axes.imshow(grid, cmap="Blues", vmin=1, aspect="auto", alpha=0.6)
    axes.set_xticks(range(len(texts)), texts, rotation=20, ha="right", fontsize=8)
    axes.set_yticks(range(len(drafts)), drafts, fontsize=8)
    axes.set_title("tokens a call", fontsize=10)
    return figure
