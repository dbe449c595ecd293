"""bench_outside_text.py: it runs, and times nothing whose law is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_outside_text as bench  # noqa: E402

pytestmark = pytest.mark.thorough


def test_smoke(tmp_path, capsys):
    arguments = ["--quick", "--gamma", "3", "--cache", str(tmp_path)]
    assert bench.main([*arguments, "--out", str(tmp_path / "record")]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    ways = [entry.get("way") for entry in record["records"]]
    assert ways[:4] == ["step by step", "rounds, rule block", "rounds, rule token", "predicted"]
    greedy = record["records"][-1]
    assert greedy["temperature"] == 0 and greedy["pictures as without"] == 10
    text = (tmp_path / "record.md").read_text()
    assert capsys.readouterr().out.strip().endswith(text.strip().splitlines()[-1])
    assert record["machine"]["commit"] in text


@pytest.mark.parametrize("way", ["rule block", "guesses kept unverified"])
def test_a_wrong_law_is_not_timed(monkeypatch, way):
    p_values = {"rule block": 0.5, "guesses kept unverified": 0.0}
    p_values[way] = 0.5 - p_values[way]
    monkeypatch.setattr(bench.sparks, "check_law", lambda runs: p_values)
    with pytest.raises(AssertionError, match="not f's, or the test is blind"):
        bench.main(["--quick"])
