"""python -m specdec_ext simulate: what it predicts is what happens."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import specdec_ext
from specdec_ext import theory
from specdec_ext.commands import simulate

GAMMA = 3


def options(path, *arguments):
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return parser.parse_args([str(path), *arguments])


def chains(batch, temperature=1.0, seed=0):
    """Random laws, every chain's tokens drawn from its draft."""
    generator = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(batch, GAMMA + 1, 7, generator=generator)
    draft = target[:, :-1] + torch.randn(batch, GAMMA, 7, generator=generator)
    u = torch.rand(batch * GAMMA, dtype=torch.float64, generator=generator)
    tokens = specdec_ext.sample(draft.flatten(0, 1), u, temperature=temperature).tokens
    return simulate.Chains(target, tokens.view(batch, GAMMA), draft)


@pytest.mark.parametrize("rule", simulate.RULES)
@pytest.mark.parametrize("gamma", [1, GAMMA])
def test_predictions_are_means_over_coins(rule, gamma):
    found = chains(400)
    filters = {"temperature": 0.8} if rule != "top_beta" else {}
    (predicted,) = simulate.simulate(found, rules=[rule], gammas=[gamma], costs=[0.1], **filters)
    some = found.first(gamma)
    counts = [
        specdec_ext.verify(
            *some, rule=rule, seeds=torch.arange(400) + 1000 * k,
            positions=torch.zeros(400, dtype=torch.int64), **filters,
        ).num_accepted.double()
        for k in range(20)
    ]  # fmt: skip
    counted = 1 + torch.stack(counts).mean()
    error = gamma / (400 * 20) ** 0.5
    assert abs(predicted.tokens.mean - counted) < 4 * error + 1e-6
    assert predicted.speed == pytest.approx(predicted.tokens.mean / (gamma * 0.1 + 1))


def test_chains_that_are_iid_give_theorem_8():
    p, q = torch.tensor([0.3, 0.7]).log(), torch.tensor([0.8, 0.2]).log()
    every = torch.cartesian_prod(*[torch.tensor([0, 0, 0, 0, 1])] * GAMMA)
    found = simulate.Chains(
        p.expand(len(every), GAMMA + 1, 2), every, q.expand(len(every), GAMMA, 2)
    )
    for predicted in simulate.simulate(found, rules=["token"], gammas=[1, 2, 3], costs=[0.0, 0.3]):
        assert predicted.speed == pytest.approx(predicted.iid, abs=1e-5)
        expected = theory.walltime_factor(0.5, predicted.gamma, predicted.c)
        assert predicted.iid == pytest.approx(expected, abs=1e-5)


def test_command(tmp_path, capsys):
    path = tmp_path / "chains.pt"
    torch.save(chains(50)._asdict(), path)
    assert simulate.run(options(path, "--rule", "block", "lenient", "--lenience", "0.8")) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + 2 * GAMMA + 3
    assert "lenient (not lossless)" in said[4] and "best lossless is block" in said[-1]
    assert simulate.run(options(path, "--json", "--gamma", "2", "--cost", "0.1")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["rule"], r["gamma"], r["c"]) for r in report] == [
        ("block", 2, 0.1), ("token", 2, 0.1),
    ]  # fmt: skip
    assert report[0]["tokens"]["mean"] >= report[1]["tokens"]["mean"]


def test_deterministic_tokens(tmp_path, capsys):
    path = tmp_path / "chains.pt"
    saved = chains(50)._asdict()
    del saved["draft_logits"]
    torch.save(saved, path)
    assert simulate.run(options(path, "--top-k", "3")) == 0
    assert "i.i.d." in capsys.readouterr().out
    assert simulate.simulate(simulate.load(path), gammas=[1])[0].iid is None


@pytest.mark.parametrize("saved, message", [
    ([1], "must hold a dict with target_logits and draft_tokens, got list"),
    ({"draft_tokens": torch.zeros(1, 1)}, "got ['draft_tokens']"),
    ({"target_logits": torch.zeros(2, 2, 3), "draft_tokens": torch.zeros(2, 2).long()},
     "got [[2, 2, 3], [2, 2], None]"),
    ({"target_logits": torch.zeros(2, 3), "draft_tokens": torch.zeros(2, 2).long()},
     "must hold [B, G+1, V]"),
])  # fmt: skip
def test_other_files(saved, message, tmp_path, capsys):
    path = tmp_path / "other.pt"
    torch.save(saved, path)
    assert simulate.run(options(path)) == 2
    assert message in capsys.readouterr().err
    assert simulate.run(options(tmp_path / "none.pt")) == 2


def test_parameters_out_of_range():
    with pytest.raises(ValueError, match=r"gamma must be in \[1, 3\]"):
        simulate.simulate(chains(4), gammas=[4])
    with pytest.raises(ValueError, match="at least 0"):
        simulate.simulate(chains(4), gammas=[1], costs=[-0.1])
