"""bench_beam.py: it runs, and refuses to time what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_beam as bench  # noqa: E402

TINY = "--batch 2 --beams 3 --gamma 2 --vocab 40 --budget 0.01".split()


def test_smoke(tmp_path, capsys):
    assert bench.main([*TINY, "--out", str(tmp_path / "record")]) == 0
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    assert [record["dtype"] for record in records] == ["float32", "bfloat16"]
    assert all(record["beam_verify ms"] > 0 and record["floor %"] > 0 for record in records)
    assert "eager / beam_verify" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = bench.specdec_ext.beam_verify

    def wrong(logits, scores, *others):
        return right(logits, scores.flip(1), *others)

    monkeypatch.setattr(bench.specdec_ext, "beam_verify", wrong)
    with pytest.raises(AssertionError):
        bench.main(TINY)
