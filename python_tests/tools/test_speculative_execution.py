"""examples/speculative_execution.py: its slow step, the law of what grows, mistakes."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from conftest import ROOT

import specdec_ext
from specdec_ext.testing import VerifyOutcome, exact_law

ALPHA = 1e-9
RUNS = 20_000
SIZE, STEPS, GAMMA = 5, 3, 2


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "speculative_execution.py"
    spec = importlib.util.spec_from_file_location("speculative_execution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grown(example, size, steps):
    """A figure of some sites, and the potential around it."""
    start = example.spark(size)
    sites = example.grow_by_rounds(start, steps, torch.tensor([3]), gamma=4).sites
    for site in sites.unbind(1):
        start = example.grow(start, site)
    return start, example.solve(start)


# --- f and f* -------------------------------------------------------------------------------------


def test_the_potential_solves_laplaces_equation(example):
    figures, field = grown(example, 15, 20)
    inside = field[:, 1:-1, 1:-1]
    mean = torch.stack(example.neighbours(field)).mean(0)
    torch.testing.assert_close(inside[~figures], mean[~figures], rtol=0, atol=1e-5)
    assert (inside[figures] == 0).all()
    rim = torch.ones_like(field, dtype=torch.bool)
    rim[:, 1:-1, 1:-1] = False
    assert (field[rim] == 1).all()
    assert not torch.allclose(example.guess(torch.ones_like(field), figures), field, atol=0.1)


def test_a_batch_changes_nothing(example):
    """f is a function of the figure alone: its law must not depend on the guesses beside it."""
    several = torch.cat([grown(example, 9, steps)[0] for steps in (1, 5, 12)])
    together = example.solve(several)
    for k in range(3):
        assert torch.equal(together[k], example.solve(several[k : k + 1])[0])


def test_only_the_rim_of_a_figure_grows(example):
    figures, field = grown(example, 15, 30)
    law = example.growth_logits(field, figures).softmax(-1).view(15, 15)
    around = torch.nn.functional.max_pool2d(figures.float(), (3, 1), 1, (1, 0))
    around = around.maximum(torch.nn.functional.max_pool2d(figures.float(), (1, 3), 1, (0, 1)))
    assert (law[(around[0] == 0) | figures[0]] == 0).all()
    first = example.growth_logits(example.solve(example.spark(5)), example.spark(5)).softmax(-1)
    assert sorted(first[0].tolist())[-4:] == pytest.approx([0.25] * 4, abs=1e-5)


# --- the exact law --------------------------------------------------------------------------------


def tables(example, size, gamma):
    """Logits of f and of f* after every prefix of sites: [size^2] * d + [size^2]."""
    sites = size**2
    figures, near = example.spark(size), torch.ones(1, size + 2, size + 2)
    target, draft = [], []
    for depth in range(gamma + 1):
        near, shape = example.guess(near, figures), [sites] * (depth + 1)
        target.append(example.growth_logits(example.solve(figures), figures).view(shape))
        draft.append(example.growth_logits(near, figures).view(shape))
        figures = figures.repeat_interleave(sites, 0)
        figures = example.grow(figures, torch.arange(sites).repeat(len(figures) // sites))
        near = near.repeat_interleave(sites, 0)
    return target, draft[:-1]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_round_is_lossless(example, rule):
    target, draft = tables(example, 4, GAMMA)
    law = exact_law(specdec_ext.verify, target, draft, rule=rule)
    assert law.tv < 1e-6 and law.status == 0
    assert 0.5 < law.mean_accepted < GAMMA - 0.1  # guesses are good and not perfect


def test_control_guesses_kept_unverified(example):
    def keep(target_logits, draft_tokens, draft_logits, *, uniforms, **_):
        batch, gamma = draft_tokens.shape
        drawn = specdec_ext.sample(target_logits[:, -1], uniforms[:, -1].contiguous()).tokens
        rest = torch.zeros(batch, gamma + 1)
        kept, status = torch.tensor([[gamma]] * batch).int()[:, 0], torch.zeros(batch).int()
        tokens = torch.cat([draft_tokens, drawn[:, None]], 1)
        return VerifyOutcome(tokens, kept, rest, rest[:, 1:] + 1, status)

    target, draft = tables(example, 4, GAMMA)
    assert exact_law(keep, target, draft).tv > 0.05


# --- the law of the loop --------------------------------------------------------------------------


def p_value(example, verify=torch.ops.specdec.verify, rule="block"):
    start, seeds = example.spark(SIZE, RUNS), torch.arange(RUNS) * 7919
    growth = example.grow_by_rounds(start, STEPS, seeds, GAMMA, rule, verify)
    return example.p_value(growth.sites, example.exact_law(SIZE, STEPS))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_law_of_what_grows(example, rule):
    assert p_value(example, rule=rule) > ALPHA


def test_law_of_growth_step_by_step(example):
    seeds = torch.arange(RUNS) * 7919
    sites = example.grow_plainly(example.spark(SIZE, RUNS), STEPS, seeds)
    assert example.p_value(sites, example.exact_law(SIZE, STEPS)) > ALPHA


def laws_not_sampled(logits, guesses, laws, **options):
    """Pass f's laws as those that the guesses were drawn from."""
    return torch.ops.specdec.verify(logits, guesses, logits[:, :-1], **options)


def next_row(logits, guesses, laws, **options):
    """Hand over the laws one step late: the slip of an index."""
    return torch.ops.specdec.verify(logits.roll(-1, 1), guesses, laws, **options)


@pytest.mark.parametrize("mistake", [laws_not_sampled, next_row])
def test_control_mistakes_are_found(example, mistake):
    assert p_value(example, mistake) < ALPHA


# --- the command ----------------------------------------------------------------------------------


def test_the_command(example, capsys):
    assert example.main(["--quick"]) == 0
    output = capsys.readouterr().out
    assert "The mistake is found" in output and "times as fast by theorem 3.8" in output
    picture = output.partition("\n\n")[2].partition("The law")[0]
    assert set(picture.split()) == {"@", "o", "#"} and len(picture.split()) == 41


def test_a_test_without_power_is_no_test(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "keep_unverified", torch.ops.specdec.verify)
    assert example.main(["--quick", "--steps=4"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--gamma=0", "--size=2", "--steps=0"])
def test_what_is_out_of_range_is_said(example, capsys, argument):
    with pytest.raises(SystemExit) as stopped:
        example.main([argument])
    assert stopped.value.code == 2
    name, value = argument.split("=")
    assert f"{name} must be at least {int(value) + 1}, got {value}" in capsys.readouterr().err


def test_a_full_lattice_is_said(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--size=9", "--steps=15", "--gamma=6"])
    assert "must be at most 20 together" in capsys.readouterr().err


def test_a_row_without_a_law_is_said(example):
    def broken(logits, *arguments, **options):
        return torch.ops.specdec.verify(logits * torch.nan, *arguments, **options)

    with pytest.raises(RuntimeError, match=r"status \[1\], expected 0"):
        example.grow_by_rounds(example.spark(9), 3, torch.tensor([0]), 2, verify=broken)
