"""bench_beam_search.py: all ways run on the shipped pair, and find the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_beam_search as bench  # noqa: E402

TINY = "pair --sentences 1 --beams 2 --draft-beams 4 --tokens 6 --gamma 0 2 renewal".split()


def test_smoke(tmp_path, capsys):
    verify = bench.ops.beam_verify
    assert bench.main([*TINY, "--out", str(tmp_path / "record")]) == 0
    assert bench.ops.beam_verify is verify
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    names = [record["way"].rpartition(", ")[2] for record in records]
    assert names == ["the pair's target", "no draft", "gamma = 2", "renewal"]
    assert all(record["same_ids"] == 1 and record["faults"] == 0 for record in records)
    plain, drafted = records[1], records[2]
    assert plain["levels_a_call"] == 1 and plain["subset_percent"] == plain["bound_percent"] == 0
    by_rule = drafted["subset_percent"] + drafted["bound_percent"]
    # All levels but the first of each call, and perhaps some behind the end.
    assert by_rule >= 100 * (1 - 1 / drafted["levels_a_call"]) - 1e-9
    assert "median_speed_up" in capsys.readouterr().out


def test_texts_end_with_their_first_end():
    assert bench.cut([5, 2, 7, 2], [7, 9]) == [5, 2, 7]
    assert bench.cut([5, 2], []) == [5, 2]
