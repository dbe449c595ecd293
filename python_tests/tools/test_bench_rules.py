"""bench_rules.py: it runs, it counts what it says, and its verdict follows from the records."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_rules as bench  # noqa: E402

from specdec_ext import theory  # noqa: E402
from specdec_ext.commands.pair import find_prompts, load_pair  # noqa: E402
from specdec_ext.decoding import generate  # noqa: E402

pytestmark = pytest.mark.thorough

TINY = (
    "--prompts 2 --tokens 6 --replicas 2 --gamma 2 --threads 1 --seed 3 --beta 3 --tau 1 2".split()
)


@pytest.fixture(scope="module")
def pair():
    return load_pair()


def test_smoke(tmp_path, capsys):
    threads = torch.get_num_threads()
    rules = ["--rule", "block", "coupled", "greedy", "top_beta", "--temperature", "0", "1"]
    try:
        assert bench.main([*TINY, *rules, "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    records, machine = payload["records"], payload["machine"]
    assert machine["seed"] == 3 and len(machine["prompts"]) == 2
    found = {(r["table"], r["rule"], r["temperature"]) for r in records}
    at_zero = {("rules", rule, 0.0) for rule in ("plain", "greedy", "top_beta")}
    at_one = {("rules", rule, 1.0) for rule in ("plain", "block", "coupled", "top_beta")}
    assert found == at_zero | at_one | {("table 4", "top_beta", 0.0)}
    for record in records:
        plain = record["rule"] == "plain"
        assert 1 <= record["tokens_per_call"] <= (1 if plain else 9)
        assert record["ms_per_token"] > 0 and record["nats"] < 0
        assert (record["accepted_of_tested"] is None) == plain
    with path.with_suffix(".csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(records)
    out = capsys.readouterr().out
    assert "vanilla (beta 1)" in out and "best default over all temperatures: rule" in out
    assert path.with_suffix(".md").read_text() in out
    assert path.with_suffix(".png").exists() or "matplotlib is missing" in out


@torch.inference_mode()
def test_counts_do_not_depend_on_the_batch(pair):
    prompts = find_prompts(pair)[:3]
    setting = bench.Setting("rules", "token", 1.0, 2)
    counts = bench.count(pair, prompts, setting, bench.parse(TINY))
    for k, prompt in enumerate(prompts):
        calls, logprob = 0, 0.0
        for seed in (3 + 2 * k, 4 + 2 * k):
            sequences, found = generate(
                pair.target, pair.draft, prompt.ids, gamma=2, temperature=1.0, rule="token",
                max_new_tokens=6, seeds=seed, eos_token_id=(),
            )  # fmt: skip
            calls += found.rounds
            start = prompt.ids.shape[1]
            law = pair.target(input_ids=sequences).logits[0].log_softmax(-1)
            emitted = sequences[0, start:].tolist()
            logprob += sum(float(law[start - 1 + i, x]) for i, x in enumerate(emitted))
        assert (int(counts.tokens[k]), int(counts.calls[k])) == (12, calls)
        assert float(counts.logprob[k]) == pytest.approx(logprob, abs=1e-3)


def result(rule, temperature, gamma, speedup):
    one = theory.Estimate(2.0, 0.1, 8)
    setting = bench.Setting("rules", rule, temperature, gamma)
    return bench.Result(setting, one, 0.6, 5.0, speedup, 0.1, one)


def test_verdict():
    results = [
        result("plain", 0.0, 0, 1.0),
        result("greedy", 0.0, 2, 1.5),
        result("greedy", 0.0, 4, 1.6),
        result("top_beta", 0.0, 4, 2.5),
        result("block", 1.0, 2, 1.9),
        result("block", 1.0, 4, 1.7),
        result("token", 1.0, 4, 1.95),
        result("typical", 1.0, 4, 9.0),
    ]
    lines = bench.verdict(results)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines[:4]] == [
        "greedy", "top_beta", "token", "typical",
    ]  # fmt: skip
    # token: sqrt(1.6 x 1.95) = 1.77; block: sqrt(1.5 x 1.9) = 1.69, sqrt(1.6 x 1.7) = 1.65.
    assert "rule token, gamma 4 (geometric mean of the speed-ups 1.77x)" in lines[4]


def test_block_and_token_are_compared_prompt_by_prompt():
    def counts(*tokens):
        ones = torch.ones(len(tokens))
        return bench.Counts(torch.tensor(tokens) * 10.0, 10 * ones, -ones, 0.5)

    block = bench.Setting("rules", "block", 1.0, 4)
    found = bench.block_over_token(
        {block: counts(2.0, 3.0, 4.0), block._replace(rule="token"): counts(1.5, 2.5, 3.5)}
    )
    # The prompts differ, their differences do not.
    assert found == ["T 1.0, gamma 4: block - token = +0.500 (0.000) tokens a call"]
