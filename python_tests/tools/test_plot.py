"""The figures' data, and that they are written."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch
from generate_models import tables

from specdec_ext import theory
from specdec_ext.__main__ import COMMANDS
from specdec_ext.commands import pair, plot


def here(*options: str) -> int:
    """Run the command in this process."""
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.run(parser.parse_args(options))


@pytest.fixture
def table_pair(monkeypatch):
    """A table model and its draft in place of the shipped pair."""
    target, draft = tables(5)
    prompt = pair.Prompt("a prompt", "", torch.tensor([[1, 2, 3]]))
    monkeypatch.setattr(pair, "load_pair", lambda *_, **__: pair.Pair(target, draft, None, []))
    monkeypatch.setattr(pair, "find_prompts", lambda *_: [prompt])
    return target, draft


def points(chart: plot.Chart, label: str) -> dict[float, float]:
    curve = next(curve for curve in chart.curves if curve.label == label)
    assert len(curve.x) == len(curve.y) > 100
    return dict(zip(curve.x, curve.y, strict=True))


def test_the_curves_pass_through_the_papers_numbers():
    # Table 1's alpha 0.8, gamma 5 and alpha 0.9, gamma 10; section 3.6's bigram model.
    factors = plot.CHARTS["leviathan-4"]()
    assert f"{points(factors, 'speed, γ = 5')[0.8]:.2f}" == "3.69"
    assert f"{points(factors, 'operations, γ = 5')[0.8]:.2f}" == "1.63"
    assert f"{points(factors, 'operations, γ = 10')[0.9]:.2f}" == "1.60"
    assert f"{points(plot.CHARTS['leviathan-2'](), 'γ = 3')[0.2]:.2f}" == "1.25"


def test_tokens_stay_below_the_oracle_and_end_at_gamma_plus_1():
    chart = plot.CHARTS["leviathan-2"]()
    bound = points(chart, "γ = ∞")
    for gamma in (1, 3, 5, 7, 10):
        tokens = points(chart, f"γ = {gamma}")
        assert tokens[1.0] == gamma + 1
        assert all(tokens[alpha] <= bound[alpha] + 1e-12 for alpha in bound)


def test_the_best_gamma_lies_on_the_wall_time_curves_maximum():
    whole, real = plot.CHARTS["leviathan-3"](), plot.CHARTS["report-2"]()
    walltime = plot.CHARTS["report-1"]()
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9):
        curve = points(walltime, f"α = {alpha}")
        top = max(curve, key=curve.get)
        assert points(real, "c = 0.05")[alpha] == pytest.approx(top, abs=0.1)
        best = max((n for n in curve if n == int(n)), key=curve.get)
        assert points(whole, "c = 0.05")[alpha] == best
    for c in (0.01, 0.1):
        drafted = points(whole, f"c = {c}")
        assert all((n > 0) == theory.improves(alpha, c) for alpha, n in drafted.items())


def test_a_trace_of_recorded_runs():
    target, draft = tables(5)
    trace = plot.record(target, draft, torch.tensor([[1, 2, 3]]), gamma=2, tokens=12)
    assert [call.model for call in trace.calls[:4]] == ["draft", "draft", "target", "draft"]
    assert [call.prefill for call in trace.calls[:3]] == [True, False, True]  # prompts ride
    assert sum(call.prefill for call in trace.calls) == 2
    assert trace.calls[0].begin == 0.0
    ends = [call.end for call in trace.calls]
    assert all(call.begin < call.end for call in trace.calls)
    assert all(a <= call.begin for a, call in zip(ends, trace.calls[1:], strict=False))
    plain = plot.record(target, draft, torch.tensor([[1]]), gamma=0, tokens=6)
    assert [call[:2] for call in plain.calls] == [("target", False)] * 6
    assert not target._forward_hooks and not draft._forward_pre_hooks


def test_hooks_do_not_outlive_an_error():
    target, draft = tables(5)
    target.table[:] = torch.nan
    with pytest.raises(RuntimeError):
        plot.record(target, draft, torch.tensor([[1, 2]]), gamma=2, tokens=3)
    assert not target._forward_hooks and not draft._forward_hooks


@pytest.mark.parametrize("form, begins", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files_are_written(form, begins, table_pair, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "figures"
    names = plot.FIGURES if form == "png" else ["leviathan-5", "report-1"]
    status = here(f"--output={folder}", f"--format={form}", "--tokens=8", *names)
    assert status == 0
    written = [folder / f"{name}.{form}" for name in names]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert sorted(folder.iterdir()) == sorted(written)
    assert all(path.read_bytes().startswith(begins) for path in written)


def test_what_is_drawn_is_the_data(table_pair):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    chart = plot.CHARTS["leviathan-4"]()
    axes = Figure().add_subplot()
    plot.draw_chart(axes, chart)
    assert [line.get_label() for line in axes.lines] == [curve.label for curve in chart.curves]
    assert all(list(a.get_ydata()) == b.y for a, b in zip(axes.lines, chart.curves, strict=True))
    assert axes.lines[0].get_color() == axes.lines[1].get_color() != axes.lines[2].get_color()
    traces = [plot.record(*table_pair, torch.tensor([[1, 2]]), n, tokens=9) for n in (3, 0)]
    axes = Figure().add_subplot()
    plot.draw_traces(axes, traces)
    bars = sum(len(bars.get_paths()) for bars in axes.collections)
    assert bars == sum(len(trace.calls) for trace in traces)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "γ = 3"]


def test_without_matplotlib(monkeypatch, capsys, tmp_path, table_pair):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert here(f"--output={tmp_path / 'new'}") == 2
    assert "pip install 'specdec_ext[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert here("--json", "--tokens=5") == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(data) == plot.FIGURES
    assert data["report-1"]["curves"][0]["label"] == "α = 0.5"
    assert [trace["gamma"] for trace in data["leviathan-5"]] == [7, 3, 0]


@pytest.mark.parametrize(
    "options, says",
    [
        (["leviathan-9"], "no figure leviathan-9; there are leviathan-2"),
        (["--tokens=0"], "--tokens must be at least 1, got 0"),
        (["leviathan-5", "--json", "--target=nowhere"], "--target and --draft go together"),
        (["leviathan-5", "--json", "--target=nowhere", "--draft=x"], "no checkpoint at nowhere"),
    ],
)
def test_errors(options, says, capsys):
    assert here(*options) == 2
    assert says in capsys.readouterr().err


def test_the_command_is_there():
    assert COMMANDS["plot"][0] is plot
