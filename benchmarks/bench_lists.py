"""Time `specdec_ext.verify` with draft laws as lists of tokens, and as rows over the vocabulary.

    python benchmarks/bench_lists.py --out benchmarks/results/lists-cpu
    python benchmarks/bench_lists.py --batch 1 --listed 64

``lists``: ``draft_probs`` and ``draft_probs_ids`` ``[B, G, K]``. ``rows``: the same laws as
``draft_probs`` ``[B, G, V]`` in float32, which are there already. ``scatter``: zeros, a scatter of
the lists into them, and ``rows``; what a caller without lists has to do.

Before anything is timed, the lists' outcome must be that of the rows to the bit, and that of the
float64 reference, but for ties that float64 sees, on the first requests of the batch. Contestants
take turns over several sets of inputs; medians in milliseconds, and their ratios to ``lists``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import specdec_ext
from specdec_ext import reference
from specdec_ext.testing import VerifyCase, VerifyOutcome, assert_tokens_match

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402

LOGIT_SCALE = 3.0  # of randn: about the spread of a language model's logits
NOISE = 1.0  # of randn, on the draft's logits
CHECKED = 2  # requests that are compared with the reference
TOLERANCE = 1e-5  # of decisions
CONTESTANTS = ("lists", "rows", "scatter")


class Setting(NamedTuple):
    """One point of the grid."""

    rule: str
    batch: int
    listed: int
    dtype: torch.dtype


def make_case(setting: Setting, gamma: int, vocab: int, seed: int) -> VerifyCase:
    """Draw a call: a draft near the target, its largest probabilities as lists, tokens of them."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(setting.batch, gamma + 1, vocab, generator=generator) * LOGIT_SCALE
    noise = torch.randn(setting.batch, gamma, vocab, generator=generator)
    top = (target[:, :gamma] + NOISE * noise).topk(setting.listed, -1)
    probs = top.values.softmax(-1)
    drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    tokens = top.indices.gather(-1, drawn.view(setting.batch, gamma, 1))[..., 0]
    uniforms = torch.rand(setting.batch, gamma + 1, generator=generator, dtype=torch.float64)
    return VerifyCase(
        dict(
            target_logits=target.to(setting.dtype),
            draft_tokens=tokens,
            draft_probs=probs,
            draft_probs_ids=top.indices,
            uniforms=uniforms,
            rule=setting.rule,
        ),
        str(setting),
    )


def scattered(inputs: dict[str, Any]) -> dict[str, Any]:
    """Give a call with rows over the whole vocabulary."""
    vocab = inputs["target_logits"].shape[-1]
    probs, ids = inputs["draft_probs"], inputs["draft_probs_ids"]
    rows = torch.zeros(*probs.shape[:-1], vocab).scatter_(-1, ids, probs)
    return {**inputs, "draft_probs": rows, "draft_probs_ids": None}


def check(case: VerifyCase) -> None:
    """Compare with rows, to the bit, and with the reference."""
    lists = case.run(specdec_ext.verify)
    rows = VerifyOutcome(*specdec_ext.verify(**scattered(dict(case.inputs))))
    for got, expected in zip(lists, rows, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    few = case.select(range(min(CHECKED, case.batch)))
    expected = VerifyOutcome(*few.run(reference.verify))
    assert_tokens_match(few.run(specdec_ext.verify), expected, few, TOLERANCE)


def run(setting: Setting, gamma: int, vocab: int, sets: int, budget: float) -> dict[str, Any]:
    """Check and time one setting."""
    cases = [make_case(setting, gamma, vocab, seed) for seed in range(sets)]
    for case in cases:
        check(case)
    lists = [dict(case.inputs) for case in cases]
    rows = [scattered(inputs) for inputs in lists]
    load = common.Load()
    times = common.measure(
        {
            "lists": lambda k: specdec_ext.verify(**lists[k % sets]),
            "rows": lambda k: specdec_ext.verify(**rows[k % sets]),
            "scatter": lambda k: specdec_ext.verify(**scattered(lists[k % sets])),
        },
        budget=budget,
    )
    record: dict[str, Any] = {
        **setting._asdict(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        **dict(gamma=gamma, vocab=vocab, others=round(load.share() or 0.0, 3)),
    }
    for name in CONTESTANTS:
        record[f"{name} ms"] = round(times[name].median * 1e3, 4)
        record[f"{name} min ms"] = round(times[name].min * 1e3, 4)
    for name in CONTESTANTS[1:]:
        record[f"{name} / lists"] = round(times[name].median / times["lists"].median, 2)
    return record


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format medians and ratios."""
    header = ["rule", "dtype", "B", "K", *(f"{name} ms" for name in CONTESTANTS)]
    header += [f"{name} / lists" for name in CONTESTANTS[1:]]
    names = ["rule", "dtype", "batch", "listed", *header[4:]]
    return common.markdown_table(header, [[str(r[name]) for name in names] for r in records])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rule", nargs="+", default=["block", "token"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--listed", nargs="+", type=int, default=[8, 64, 1024], help="K")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="the target's")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--sets", type=int, default=2, help="of inputs")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a setting is timed")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    records = []
    grid = itertools.product(options.rule, options.batch, options.listed, options.dtype)
    for rule, batch, listed, dtype in grid:
        setting = Setting(rule, batch, listed, getattr(torch, dtype))
        record = run(setting, options.gamma, options.vocab, options.sets, options.budget)
        print(record, flush=True)
        records.append(record)
    print(table(records))
    if options.out is not None:
        facts = {**common.machine_facts(), "command": sys.argv}
        common.write_record(options.out, facts, records, table(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
