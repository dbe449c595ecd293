"""The benchmark of a sharded vocabulary: it compares, counts and puts ranks together."""

import sys

import pytest
import torch.distributed as dist
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "python_tests" / "distributed"))

import bench_sharded as bench  # noqa: E402


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(bench, "V", 5000)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_setting_is_compared_and_counted(alone):
    found = bench.measure_all([1], rounds=1)
    assert len(found) == len(bench.SPLITS) * len(bench.SETTINGS)
    for one in found:
        assert one["wrong"] == [] and one["handed"] > 0 and one["calls"] > 3
        assert one["gather"] in (6 * 5000 * 2, 11 * 5000 * 2) and one["borders"] == 0
    rows = bench.table([found])
    assert rows[0]["setting"] == "block" and rows[0]["share"].endswith(" %")
    assert bench.formatted(rows).count("\n") == len(rows) + 1


def test_the_rank_that_hands_in_most_counts(alone):
    one = bench.measure(1, "whole tiles", "greedy", 1)
    named = dict(batch=1, split="whole tiles", setting="greedy")
    other = {**one, "handed": one["handed"] + 1, "gather": 2 * one["gather"]}
    (row,) = bench.table([[{**named, **one}], [{**named, **other}]])
    assert row["bytes handed to collectives"] == one["handed"] + 1
    assert row["bytes of the logits"] == 2 * one["gather"]


def test_tokens_that_differ_are_no_record(alone):
    one = {**bench.measure(1, "whole tiles", "greedy", 1), "wrong": ["tokens"]}
    with pytest.raises(AssertionError):
        bench.table([[dict(batch=1, split="whole tiles", setting="greedy", **one)]])
