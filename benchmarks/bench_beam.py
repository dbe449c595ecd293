"""Time `specdec_ext.beam_verify` and what a loop in plain PyTorch does in its place.

    python benchmarks/bench_beam.py --out benchmarks/results/beam-cpu
    python benchmarks/bench_beam.py --beams 5 --gamma 4 --dtype float32

A draft's beams, as many as the target's (u = w), are the target's own best at every node, so that
every level is decided: gamma + 1 a call.

``eager``: for each of these levels, transformers' steps: rows of the live beams in float32,
log_softmax, a sum with the scores, `torch.topk` of 2 w of the flattened table. ``eager, all``:
log_softmax and topk of w of all the tree's rows at once, which is what needs no wait for the level
before; its merge of levels is not even counted. Both hold ``[rows, V]`` floats.

Before anything is timed, the operator's tokens, parents and scores are compared with those of the
reference and of ``eager`` with a stable sort in the place of `torch.topk`, which promises no order
of equal values; scores up to what a float32 sum over the vocabulary loses. Contestants take turns
over several sets of inputs; medians in milliseconds, and their ratios to ``beam_verify``. The
*floor* is a plain read of the rows that it decides by, once, at the bandwidth that threads of this
number have from memory, and what is printed is its share of the operator's time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext import reference

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402

LOGIT_SCALE = 3.0  # of randn: about the spread of a language model's logits
TOLERANCE = 1e-4  # of scores: torch's log_softmax of 128,256 floats is off by 4e-6, level for level
CONTESTANTS = ("beam_verify", "eager", "eager, all")


class Setting(NamedTuple):
    """One point of the grid."""

    batch: int
    beams: int
    gamma: int
    dtype: torch.dtype


class Call(NamedTuple):
    """What `beam_verify` takes."""

    target_logits: Tensor
    scores: Tensor
    tokens: Tensor
    parents: Tensor
    gamma: int


class Levels(NamedTuple):
    """By level: the live beams' tokens, the places of their parents, their scores."""

    tokens: list[Tensor]
    parents: list[Tensor]
    scores: list[Tensor]


TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def stable_topk(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Order equal values by their indices."""
    values, indices = table.sort(descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def level_of(
    log_probs: Tensor, scores: Tensor, beams: int, topk: TopK = torch.topk
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what transformers does with the log-probabilities ``[B, w, V]`` of a level."""
    values, indices = topk((log_probs + scores[..., None]).flatten(1), 2 * beams)
    places, tokens = indices // log_probs.shape[-1], indices % log_probs.shape[-1]
    return values[:, :beams], places[:, :beams], tokens[:, :beams]


def make_call(setting: Setting, vocab: int, seed: int) -> Call:
    """Draw rows, and the tree that beam search goes through on them."""
    generator = torch.Generator().manual_seed(seed)
    batch, beams, gamma = setting.batch, setting.beams, setting.gamma
    nodes = beams * (gamma + 1)
    logits = torch.randn(batch, nodes, vocab, generator=generator).mul_(LOGIT_SCALE)
    logits = logits.to(setting.dtype)
    start = -torch.rand(batch, beams, generator=generator).cumsum(1)
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    parents = torch.full((batch, nodes), -1)
    scores = start
    for level in range(gamma):
        at = slice(level * beams, (level + 1) * beams)
        rows = torch.log_softmax(logits[:, at].float(), -1)
        scores, places, chosen = level_of(rows, scores, beams, stable_topk)
        below = slice(at.stop, at.stop + beams)
        tokens[:, below], parents[:, below] = chosen, places + at.start
    return Call(logits, start, tokens, parents, gamma)


def eager(call: Call, topk: TopK = torch.topk) -> Levels:
    """Decide level by level; node (level, place) is the beam there, as make_call laid them out."""
    beams = call.scores.shape[1]
    scores, found = call.scores, Levels([], [], [])
    for level in range(call.gamma + 1):
        rows = call.target_logits[:, level * beams : (level + 1) * beams]
        log_probs = torch.log_softmax(rows.float(), -1)
        scores, places, tokens = level_of(log_probs, scores, beams, topk)
        found.tokens.append(tokens)
        found.parents.append(places)
        found.scores.append(scores)
    return found


def eager_all(call: Call) -> Any:
    """Find the best of every row of the tree, at once."""
    beams = call.scores.shape[1]
    return torch.log_softmax(call.target_logits.float(), -1).topk(beams)


def check(call: Call) -> None:
    """Compare with both, and see that every level is decided."""
    found = specdec_ext.beam_verify(*call)
    expected = reference.beam_verify(*call)
    plain = eager(call, stable_topk)
    for name in ("tokens", "parents", "nodes", "num_levels", "status"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=TOLERANCE)
    assert bool((found.num_levels == call.gamma + 1).all())
    for name in ("tokens", "parents"):
        assert torch.equal(getattr(found, name), torch.stack(getattr(plain, name), 1)), name
    torch.testing.assert_close(found.scores, torch.stack(plain.scores, 1), rtol=0, atol=TOLERANCE)


def floor(setting: Setting, vocab: int, bandwidth: float) -> float:
    """Return the seconds of a plain read: every node of these trees is a live beam."""
    rows = setting.batch * setting.beams * (setting.gamma + 1)
    return rows * vocab * setting.dtype.itemsize / bandwidth


def run(setting: Setting, vocab: int, sets: int, budget: float, bandwidth: float) -> dict[str, Any]:
    """Check and time one setting; ``bandwidth`` in bytes per second."""
    calls = [make_call(setting, vocab, seed) for seed in range(sets)]
    for call in calls:
        check(call)
    load = common.Load()
    times = common.measure(
        {
            "beam_verify": lambda k: specdec_ext.beam_verify(*calls[k % sets]),
            "eager": lambda k: eager(calls[k % sets]),
            "eager, all": lambda k: eager_all(calls[k % sets]),
        },
        budget=budget,
    )
    record: dict[str, Any] = {
        **setting._asdict(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        **dict(vocab=vocab, others=round(load.share() or 0.0, 3)),
    }
    for name in CONTESTANTS:
        record[f"{name} ms"] = round(times[name].median * 1e3, 4)
        record[f"{name} min ms"] = round(times[name].min * 1e3, 4)
    record["floor %"] = round(
        100 * floor(setting, vocab, bandwidth) / times["beam_verify"].median, 1
    )
    for name in CONTESTANTS[1:]:
        ratio = times[name].median / times["beam_verify"].median
        record[f"{name} / beam_verify"] = round(ratio, 2)
    return record


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format medians and ratios."""
    header = ["dtype", "B", "w", "gamma", *(f"{name} ms" for name in CONTESTANTS)]
    header += ["floor %", *(f"{name} / beam_verify" for name in CONTESTANTS[1:])]
    names = ["dtype", "batch", "beams", "gamma", *header[4:]]
    return common.markdown_table(header, [[str(r[name]) for name in names] for r in records])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--beams", nargs="+", type=int, default=[4, 8], help="w and u")
    parser.add_argument("--gamma", nargs="+", type=int, default=[4])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--sets", type=int, default=2, help="of inputs")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a setting is timed")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bandwidth = common.read_bandwidth()
    records = []
    for sizes in itertools.product(options.batch, options.beams, options.gamma, options.dtype):
        setting = Setting(*sizes[:3], getattr(torch, sizes[3]))
        record = run(setting, options.vocab, options.sets, options.budget, bandwidth)
        print(record, flush=True)
        records.append(record)
    print(table(records))
    if options.out is not None:
        facts = {**common.machine_facts(), "read_bandwidth": bandwidth, "command": sys.argv}
        common.write_record(options.out, facts, records, table(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
