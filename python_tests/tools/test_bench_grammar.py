"""bench_grammar.py: it runs, counts what is not valid, and refuses to time what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_grammar as bench  # noqa: E402

TINY = "--runs 3 --batch 2 --timed 2".split()


@pytest.mark.thorough
def test_smoke(tmp_path, capsys):
    assert bench.main([*TINY, "--out", str(tmp_path / "record")]) == 0
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    found = {record["contestant"]: record for record in records}
    assert found["judged by jsonschema"]["valid"] == 3
    assert found["draft"]["tokens a call"] > 1.5 and found["no draft"]["tokens a call"] == 1
    assert "3 of 3 texts valid" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed():
    def writer(*tokens):
        return lambda seed, temperature: bench.Written(list(tokens), 1.0, 1, 0, 0)

    bench.check_greedy({"a": writer(1, 2), "b": writer(1, 2)})
    with pytest.raises(AssertionError, match="differ from those without a draft: b"):
        bench.check_greedy({"a": writer(1, 2), "b": writer(1, 3)})


@pytest.mark.thorough
def test_texts_that_are_not_valid_are_counted(monkeypatch):
    monkeypatch.setattr(bench.example, "is_valid", lambda text, schema: False)
    assert bench.main("--runs 1 --timed 2".split()) == 1
