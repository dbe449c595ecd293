"""`benchmarks/bench_block_drafting.py`: its table, its record, what it refuses to time."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_block_drafting as command  # noqa: E402
import common  # noqa: E402

from specdec_ext.decoding import packed as packed_layers  # noqa: E402


@pytest.mark.parametrize(
    "entries, packed", [(None, False), (300, False), (300, True)], ids=["whole", "part", "packed"]
)
def test_the_command(tmp_path, capsys, monkeypatch, entries, packed):
    """Blocks of all sizes, of a whole vocabulary and of a part, whose tokens they are then."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    proposed = []
    round_of = command.round_of
    monkeypatch.setattr(
        command, "round_of", lambda *given: proposed.append(round_of(*given)) or proposed[-1]
    )
    part = [] if entries is None else ["--draft-vocabulary", str(entries)]
    options = ["--quick", "--vocabulary", "2000", "--device", "cpu", "--record", "block", *part]
    if packed:
        monkeypatch.setattr(packed_layers, "_SMALLEST", 1)
        options.append("--packed")
    assert command.main(options) == 0
    shown = capsys.readouterr().out
    assert "| 25 |" in shown and "25 tokens cost" in shown and "at most 1.5" in shown
    said = (tmp_path / "block.md").read_text()
    assert f"V = 2,000, of which it proposes {entries or 2_000:,}, batch 1" in said
    assert ("float32 packed" in said) == packed
    rows = json.loads((tmp_path / "block.json").read_text())["records"]
    assert [row["block"] for row in rows] == list(command.SIZES)
    assert {len(tokens[0]) for tokens in proposed} == set(command.SIZES)
    assert max(int(tokens.max()) for tokens in proposed) < (entries or 2_000)


def test_a_cache_that_is_wrong_is_not_timed(capsys, monkeypatch):
    real = command.SpecDrafter.draft_block

    def wrong(*given, **options):
        return real(*given, **options) + torch.tensor([0.0, 1.0]).repeat(1_000)

    monkeypatch.setattr(command.SpecDrafter, "draft_block", wrong)
    assert command.main(["--quick", "--vocabulary", "2000", "--device", "cpu"]) == 1
    assert "the cache changes logits" in capsys.readouterr().err
