"""bench_lists.py: it runs, and refuses to time what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_lists as bench  # noqa: E402

TINY = "--batch 2 --listed 3 --dtype float32 --gamma 2 --vocab 40 --budget 0.01".split()


def test_smoke(tmp_path, capsys):
    assert bench.main([*TINY, "--out", str(tmp_path / "record")]) == 0
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    assert [record["rule"] for record in records] == ["block", "token"]
    assert all(record["lists ms"] > 0 for record in records)
    assert "scatter / lists" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = bench.specdec_ext.verify

    def wrong(draft_probs_ids, **inputs):
        ids = None if draft_probs_ids is None else (draft_probs_ids + 1) % 40
        return right(**inputs, draft_probs_ids=ids)

    monkeypatch.setattr(bench.specdec_ext, "verify", wrong)
    with pytest.raises(AssertionError):
        bench.main(TINY)
