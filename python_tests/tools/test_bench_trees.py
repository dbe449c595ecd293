"""bench_trees.py and tree_times.py: their expectations are means, and their checks can fail."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import baselines  # noqa: E402
import bench_trees as bench  # noqa: E402
import tree_times as times  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext import theory  # noqa: E402
from specdec_ext.commands.pair import load_pair  # noqa: E402
from specdec_ext.decoding import GrownTree, StaticTree  # noqa: E402

pytestmark = pytest.mark.thorough

TINY = ["--contexts", "4", "--search", "2", "--batch", "2", "--budget", "4"]


@pytest.fixture(scope="module")
def context():
    pair = load_pair()
    with torch.inference_mode():
        return bench.Context(pair, bench.held_out_windows(pair)[:2], 1.0, 7)


@pytest.mark.parametrize("tree", [
    StaticTree.from_widths((3, 2, 1)), StaticTree((-1, 0, 0, 1, 2, 2, 3), "rest"), GrownTree(7, 3),
], ids=["static", "rest", "grown"])  # fmt: skip
@torch.inference_mode()
def test_expected_numbers_are_means_over_coins(context, tree):
    draft = context.draft(tree, coupled=False)
    before = context.target.slots
    logits = context.score(draft)
    assert context.target.slots == before
    rules = ("traversal",) if isinstance(tree, GrownTree) else ("traversal", *bench.STEPWISE)
    methods = [bench.Method("some", tree, rule) for rule in rules]
    copies = 600
    for method, mean in zip(methods, bench.expected_accepted(context, methods), strict=True):
        inputs = bench.inputs_of(context, draft, logits, method.rule)
        inputs = {
            name: value.repeat_interleave(copies, 0) if torch.is_tensor(value) else value
            for name, value in inputs.items()
        }
        coins = torch.Generator().manual_seed(1)
        inputs["uniforms"] = torch.rand(
            inputs["uniforms"].shape, dtype=torch.float64, generator=coins
        )
        counted = specdec_ext.verify_tree(**inputs).num_accepted.double().reshape(2, copies)
        error = (mean * tree.depth / copies).sqrt()  # E[n^2] <= depth E[n]
        assert ((counted.mean(1) - mean).abs() < 4.5 * error + 1e-6).all(), method


@torch.inference_mode()
def test_a_chain_is_what_the_block_rule_makes_of_it(context):
    draft = context.draft(bench.chain(4), coupled=False)
    logits = context.score(draft)
    block = specdec_ext.verify(
        logits, draft.tokens[:, 1:], draft.logits,
        uniforms=torch.full((2, 5), 0.5, dtype=torch.float64), rule="block",
    )  # fmt: skip
    mean = bench.traversed(context, draft, logits)
    assert torch.allclose(mean, theory.expected_accepted(block.accept_probs), atol=1e-6)


def test_shapes():
    tree = bench.behind_trunk(2, StaticTree((-1, 0, 0, 1), "rest"))
    assert (tree.parents, tree.children) == ((-1, 0, 1, 2, 2, 3), "rest")
    rates = {"iid": [0.6, 0.2, 0.1]}
    for method in bench.candidates(8, rates):
        assert method.budget == 8
    assert bench.Method("grown", GrownTree(9, 3)).budget == 8


def test_smoke(tmp_path, capsys):
    temperatures = ["--temperature", "0", "1"]
    assert bench.main([*TINY, *temperatures, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    for record in payload["records"]:
        assert 1 <= record["tokens_per_call"] <= record["depth"] + 1
        assert record["contexts"] == 4
        if record["shape"] == "chain":
            assert record["over_chain_of_budget"] == record["over_chain_of_depth"] == 0
    assert {r["temperature"] for r in payload["records"]} == {0.0, 1.0}
    # Two contexts to search on may know no use for a whole budget: then no tree stands against it.
    compared = {
        r["temperature"]
        for r in payload["records"]
        if r["shape"] != "chain" and r["draft_tokens"] == 4
    }
    assert compared and len(payload["machine"]["verdict"]) == len(compared)
    with path.with_suffix(".csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(payload["records"])
    assert path.with_suffix(".md").read_text() in capsys.readouterr().out


def test_verdict():
    def result(name, tokens, over, error):
        gain = theory.Estimate(over, error, 9)
        method = bench.Method(name, StaticTree((-1, 0, 0)))
        return bench.Result(1.0, method, theory.Estimate(tokens, 0.1, 9), gain, gain)

    found = [result("chain", 2.0, 0.0, 0.0), result("a", 2.1, 0.1, 0.06), result("b", 1.9, -0.1, 0)]
    assert (
        "a (depth 1) does not beat the chain of 2: 2.10 against 2.00"
        in bench.verdict(found, [2])[0]
    )
    found.append(result("c", 2.3, 0.3, 0.1))
    assert "c (depth 1) beats the chain of 2" in bench.verdict(found, [2])[0]


# ---- times ---------------------------------------------------------------------------------------


def test_times():
    setting = times.Setting(2, 8, "float32", 64)
    records = times.measure(setting, budget=0.01, bandwidth=1e10)
    assert [r["rule"] for r in records] == ["traversal", "recursive"]
    for record in records:
        assert record["operator_ms"] > 0 and record["eager_ms"] > 0
    assert "B=2 N=8 V=64 float32" in times.table(records)


@pytest.mark.parametrize("rule", times.RULES)
def test_the_eager_verifier_is_compared(rule, monkeypatch):
    inputs = times.make_inputs(times.Setting(6, 12, "float32", 32), 3)
    times.check_operator(inputs, rule)
    times.check_baseline(inputs, rule)
    # A verifier that forgets what earlier siblings took.
    monkeypatch.setattr(baselines, "_without", lambda law, token: law)
    with pytest.raises(AssertionError, match="than the operator"):
        for seed in range(20):
            times.check_baseline(times.make_inputs(times.Setting(6, 12, "float32", 32), seed), rule)
