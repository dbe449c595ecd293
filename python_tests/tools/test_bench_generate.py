"""bench_generate.py: it runs, verdicts follow from records, and wrong output is not timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_generate as bench  # noqa: E402

from specdec_ext.commands.pair import find_pair, find_prompts, load_pair  # noqa: E402

pytestmark = pytest.mark.thorough


def test_smoke(tmp_path, capsys):
    assert bench.main(["--quick", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    for record in payload["records"]:
        assert record["tokens_per_second"] > 0 and record["speedup"] > 0
        if record["contestant"] == bench.PLAIN:
            assert record["speedup"] == 1 and record["tokens_per_target_call"] == 1
    names = {(r["batch"], r["temperature"], r["contestant"]) for r in payload["records"]}
    assert (1, 0.8, "transformers, gamma 3") in names
    assert (2, 0.0, bench.RENEWAL) in names and (2, 0.0, "transformers, gamma 3") not in names
    assert len(payload["machine"]["bars"]) == 8
    assert path.with_suffix(".md").read_text() in capsys.readouterr().out


def test_drafters_take_a_target_alone(tmp_path):
    target = ["--target", str(find_pair() / "target"), "--output", str(tmp_path)]
    assert bench.main(["--quick", "--drafters", "lookup", *target]) == 0
    (path,) = tmp_path.glob("*.json")
    names = {record["contestant"] for record in json.loads(path.read_text())["records"]}
    assert any("lookup" in name for name in names)
    with pytest.raises(ValueError, match="go together"):
        bench.main(["--quick", *target])


def test_what_differs_is_not_timed(monkeypatch):
    pair = load_pair()
    prompts = find_prompts(pair)[:1]
    contestants = bench.contestants

    def with_a_wrong_one(*args):
        found = contestants(*args)
        right = found["gamma 3"]

        def wrong(ids, mask, seed):
            run = right(ids, mask, seed)
            return run._replace(tokens=[[(t + 1) % 2048 for t in row] for row in run.tokens])

        return {**found, "wrong": wrong}

    monkeypatch.setattr(bench, "contestants", with_a_wrong_one)
    options = bench.parse(["--quick"])
    runs, wrong = bench.measure(pair, prompts, bench.Setting(1, 0.0), options)
    assert "wrong" not in runs and "bug" in wrong["wrong"]
    assert "gamma 3" in runs and len(wrong) == 1


def test_batches_are_left_padded_and_filled_up():
    prompts = [bench.Prompt(str(n), "", torch.full((1, n), n)) for n in (2, 3, 1)]
    (first, ids, mask), (second, _, _) = bench.batches(prompts, 2)
    assert [p.name for p in first + second] == ["2", "3", "1", "2"]
    assert ids.tolist() == [[0, 2, 2], [3, 3, 3]] and mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_bars():
    def record(name, speedup, loop=None):
        return {
            "batch": 1, "temperature": 0.8, "contestant": name, "speedup": speedup,
            "loop_percent": loop,
        }  # fmt: skip

    lines = bench.bars(
        [
            record(bench.PLAIN, 1.0, 9.0),
            record("gamma 2", 1.5, 12.0),
            record("gamma 4", 1.8, 8.0),
            record(bench.RENEWAL, 1.7, 9.0),
            record("transformers, gamma 2", 1.1),
            record("transformers, gamma 4", 1.0),
        ],
        [2, 4],
    )
    assert [line.rpartition(" ")[2] for line in lines] == ["PASS", "FAIL", "PASS", "FAIL", "PASS"]
    assert "renewal policy over gamma 4: 0.94x (0.97x asked)" in lines[3]
