"""Time `specdec_ext.verify_tree` against an eager tree verifier; run by ``bench_trees.py --times``.

Before anything is timed, on the very inputs: the operator is compared with the float64 reference,
and the eager verifier, given the same coins, with the operator, but for last tokens whose place in
the cumulative law rounding decides. *Of floor* is how near traversal comes to reading every row
once at the bandwidth of a plain read (above 100 %: out of cache); the other rule reads the rows on
its way alone.

Bar: 10 times as fast as the eager verifier of the same rule on a CPU. The eager verifier stops at
the winner; the operator reports the acceptance of every node.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext import reference
from specdec_ext.decoding import StaticTree
from specdec_ext.decoding.trees import draft_static
from specdec_ext.testing import TreeCase, assert_trees_match

sys.path.insert(0, str(Path(__file__).resolve().parent))

import baselines  # noqa: E402
import common  # noqa: E402

BAR = 10.0
VOCAB = 128_256
RULES = ("traversal", "recursive")
SETS = 3  # of inputs, by turns
#: Of unit normal logits: E[sum min(p, q)] is then about 0.6 at the scale below.
NOISE, LOGIT_SCALE = 1.05, 2.0
#: How far in the cumulative law a last token of the eager verifier may be off.
CDF_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    batch: int
    nodes: int
    dtype: str
    vocab: int = VOCAB

    def label(self) -> str:
        """Say it on one line."""
        return f"B={self.batch} N={self.nodes} V={self.vocab} {self.dtype}"


class Inputs(NamedTuple):
    """One set of inputs: children are drawn without replacement."""

    target: Tensor
    draft: Tensor
    tokens: Tensor
    parents: Tensor
    kinds: Tensor
    uniforms: Tensor

    def arguments(self, rule: str) -> dict[str, Any]:
        """Give the operator's arguments."""
        return dict(
            target_logits=self.target, tokens=self.tokens, parents=self.parents,
            draft_logits=self.draft, kinds=self.kinds, uniforms=self.uniforms, rule=rule,
        )  # fmt: skip


def shape(nodes: int) -> StaticTree:
    """Give the first nodes of a tree with four branches that fork once or twice."""
    whole = StaticTree.from_widths((4, 2, 2 if nodes > 32 else 1, 1, 1, 1))
    return StaticTree(whole.parents[:nodes], "without_replacement")


def make_inputs(setting: Setting, seed: int) -> Inputs:
    """Draw one set of inputs; the draft's laws resemble the target's."""
    generator = torch.Generator().manual_seed(seed)
    size = (setting.batch, setting.nodes, setting.vocab)
    dtype = getattr(torch, setting.dtype)
    target = torch.randn(size, generator=generator).mul_(LOGIT_SCALE)
    draft = torch.randn(size, generator=generator).mul_(NOISE).add_(target).to(dtype)
    drafted = draft_static(
        shape(setting.nodes),
        torch.zeros(setting.batch, dtype=torch.int64),
        lambda _, nodes: draft[:, nodes.start : nodes.stop],
        seed + torch.arange(setting.batch),
        torch.zeros(setting.batch, dtype=torch.int64),
        {},
    )
    uniforms = torch.rand(size[:2], generator=generator, dtype=torch.float64)
    return Inputs(
        target.to(dtype), draft, drafted.tokens, drafted.parents.contiguous(), drafted.kinds,
        uniforms,
    )  # fmt: skip


def check_operator(inputs: Inputs, rule: str) -> None:
    """Compare the operator with the float64 reference, on the first two requests."""
    found = specdec_ext.verify_tree(**inputs.arguments(rule))
    case = TreeCase(inputs.arguments(rule), f"{rule} benchmark")
    case = case.select(range(min(case.batch, 2)))
    first = specdec_ext.VerifyTreeResult(*(output[: case.batch] for output in found))
    assert_trees_match(first, case.run(reference.verify_tree), case)


def check_baseline(inputs: Inputs, rule: str) -> None:
    """Compare the eager verifier, given the same coins, with the operator."""
    laws: list[Tensor] = []

    def draw(weights: Tensor) -> Tensor:
        laws.append(weights[0])
        last = inputs.uniforms[len(laws) - 1, -1:]
        return baselines.inverse_cdf(weights, last)

    verdict = eager(inputs, rule, draw)
    found = specdec_ext.verify_tree(**inputs.arguments(rule))
    if not torch.equal(verdict.num_accepted, found.num_accepted.long()):
        raise AssertionError(f"eager {rule} accepts other numbers of tokens than the operator")
    for b, accepted in enumerate(verdict.num_accepted.tolist()):
        if verdict.tokens[b, :accepted].tolist() != found.tokens[b, :accepted].tolist():
            raise AssertionError(f"eager {rule} accepts another path than the operator")
        prefix = laws[b].double().cumsum(0) / laws[b].double().sum()
        token, u = int(found.tokens[b, accepted]), float(inputs.uniforms[b, -1])
        before = float(prefix[token - 1]) if token else 0.0
        if not before - CDF_TOLERANCE <= u <= float(prefix[token]) + CDF_TOLERANCE:
            raise AssertionError(f"eager {rule} draws from another law than the operator")


def eager(inputs: Inputs, rule: str, draw: baselines.Draw | None = None) -> baselines.Verdict:
    """Run the eager verifier."""
    return baselines.verify_tree(
        inputs.target, inputs.tokens, inputs.parents, inputs.draft, inputs.uniforms[:, :-1],
        rule, draw=draw,
    )  # fmt: skip


def measure(setting: Setting, budget: float, bandwidth: float) -> list[dict[str, Any]]:
    """Check and time one setting, both rules; ``bandwidth`` in bytes per second."""
    sets = [make_inputs(setting, seed) for seed in range(SETS)]
    inner = len(set(shape(setting.nodes).parents) - {-1})
    row = sets[0].target.nbytes / setting.nodes
    floor = row * (setting.nodes + inner) / bandwidth
    records = []
    for rule in RULES:
        for inputs in sets:
            check_operator(inputs, rule)
            check_baseline(inputs, rule)

        def ours(call: int, rule: str = rule) -> object:
            return specdec_ext.verify_tree(**sets[call % SETS].arguments(rule))

        def theirs(call: int, rule: str = rule) -> object:
            return eager(sets[call % SETS], rule)

        load = common.Load()
        found = common.measure({"operator": ours, "eager": theirs}, budget=budget, min_rounds=SETS)
        records.append(
            {
                **asdict(setting),
                "rule": rule,
                "operator_ms": found["operator"].median * 1e3,
                "operator_min_ms": found["operator"].min * 1e3,
                "eager_ms": found["eager"].median * 1e3,
                "eager_min_ms": found["eager"].min * 1e3,
                "ratio": found["eager"].median / found["operator"].median,
                "floor_percent": (
                    100 * floor / found["operator"].min if rule == "traversal" else None
                ),
                "others": load.share(),
            }
        )
    return records


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format what was measured."""
    rows = [
        [
            Setting(*(r[name] for name in ("batch", "nodes", "dtype", "vocab"))).label(),
            r["rule"],
            f"{r['operator_ms']:.2f}",
            f"{r['eager_ms']:.1f}",
            f"{r['ratio']:.1f}x",
            "PASS" if r["ratio"] >= BAR else "FAIL",
            "-" if r["floor_percent"] is None else f"{r['floor_percent']:.0f} %",
            "-" if r["others"] is None else f"{r['others']:.0%}",
        ]
        for r in records
    ]
    header = ["setting", "rule", "operator ms", "eager ms", "ratio", f"bar {BAR:.0f}x", "of floor"]
    return common.markdown_table([*header, "others"], rows)


def run(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    """Measure the grid and write the record."""
    dtypes = ("float32",) if options.quick else ("float32", "bfloat16")
    grid = itertools.product(dtypes, (1,) if options.quick else (1, 8), (8, 28, 64))
    vocab = 4096 if options.quick else VOCAB
    bandwidth = common.read_bandwidth()
    print(f"a plain read takes {bandwidth / 1e9:.1f} GB/s")
    records = []
    for dtype, batch, nodes in grid:
        setting = Setting(batch, nodes, dtype, vocab)
        print(setting.label(), flush=True)
        records += measure(setting, options.seconds, bandwidth)
    text = table(records)
    print(text)
    name = f"tree-times-cpu-{time.strftime('%Y-%m-%d', time.gmtime())}"
    stem = options.output / (name + ("-quick" if options.quick else "") + options.suffix)
    facts["read_gb_per_s"] = round(bandwidth / 1e9, 2)
    common.write_record(stem, facts, records, text)
    print(f"\nwritten: {stem}.json, .csv, .md")
    return 0
