"""Speculative execution of a slow random step that is no language model: a spark that grows.

    python examples/speculative_execution.py [--gamma 8] [--quick]

Take a slow function f, whose value f(x) is a law; y is drawn from f(x), and a slow function g goes
on from y. One need not wait for f(x): draw y from a cheap law f*(x), compute g(y) beside f(x), and
let speculative sampling keep y or replace it. What comes out has the law f(x) all the same (Leviathan
et al., arXiv 2211.17192, section 6).

Here x is a figure of discharge channels on a lattice, y the site where it grows next, drawn with
probability proportional to the electric potential there to the power ETA (the dielectric breakdown
model: Niemeyer, Pietronero, Wiesmann, Physical Review Letters 52, 1984). f solves Laplace's equation
around the figure: many sweeps over the lattice, one after the other, in which a few figures at once
take little longer than one. g is the next step: f again, of the figure with y. f* is one sweep over
the potential that f found before. So a round draws GAMMA sites by f*, has f solve for all the figures
along the way in one batch, and `torch.ops.specdec.verify` says how many sites stay and draws one more.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import NamedTuple

import torch

import specdec_ext
from specdec_ext import theory
from specdec_ext.testing import joint_law, tv_bound

ETA = 2.0  # 1 gives bushes, 4 hardly branches
GUESS_SWEEPS = 1


def neighbours(field):
    """Give views of the four neighbours of a lattice's sites: [n, L+2, L+2] to [n, L, L] each."""
    return field[:, :-2, 1:-1], field[:, 2:, 1:-1], field[:, 1:-1, :-2], field[:, 1:-1, 2:]


def relax(field, figures, sweeps, overrelaxation=1.0):
    """Move a potential [n, L+2, L+2] towards Laplace's equation, in place: Gauss-Seidel sweeps.

    ``figures`` [n, L, L] bool are at potential 0 and the lattice's rim at 1; both stay there.
    """
    width = field.shape[-1]
    parity = torch.arange(width - 2) % 2
    chessboard = parity[:, None] == parity  # a black site's neighbours are white
    weights = [
        torch.nn.functional.pad((~figures & colour) * overrelaxation, (1, 1, 1, 1)).view(-1)
        for colour in (chessboard, ~chessboard)
    ]
    # All lattices as one row of sites: the longer the rows, the faster. Weights are 0 at the rims,
    # so that no lattice feels the next one.
    row = field.view(-1)
    last = len(row) - width
    here = row[width:last]
    around = row[: -2 * width], row[2 * width :], row[width - 1 : last - 1], row[width + 1 : last + 1]
    for weight in weights * sweeps:
        change = around[0] + around[1]
        change.add_(around[2]).add_(around[3]).mul_(0.25).sub_(here)
        here.addcmul_(change, weight[width:last])
    return field


def solve(figures):
    """Be f's slow part: the potential [n, L+2, L+2] around each figure, from nothing."""
    size = figures.shape[-1]
    field = torch.ones(len(figures), size + 2, size + 2)
    field[:, 1:-1, 1:-1].masked_fill_(figures, 0.0)
    return relax(field, figures, 2 * size, 2 / (1 + math.sin(math.pi / (size + 1))))


def guess(field, figures):
    """Be f*'s: the potential around grown figures, from that ``field`` around what they were."""
    field = field.clone()
    field[:, 1:-1, 1:-1].masked_fill_(figures, 0.0)
    return relax(field, figures, GUESS_SWEEPS)


def growth_logits(field, figures):
    """Make a potential the law of the next site: [n, L * L], sites by rows."""
    padded = torch.nn.functional.pad(figures, (1, 1, 1, 1))
    up, down, left, right = neighbours(padded)
    rim = (up | down | left | right) & ~figures
    potential = field[:, 1:-1, 1:-1].clamp(min=0.0)  # rounding goes below 0 where nothing can grow
    return (ETA * potential.log()).masked_fill(~rim, -math.inf).flatten(1)


def grow(figures, sites):
    """Add a site [n] to each figure."""
    return figures.flatten(1).scatter(1, sites[:, None], True).view_as(figures)


def spark(size, runs=1):
    """Start figures [runs, L, L]: the site in the middle."""
    figures = torch.zeros(runs, size, size, dtype=torch.bool)
    figures[:, size // 2, size // 2] = True
    return figures


# --- growth, step by step and by rounds -----------------------------------------------------------


def grow_plainly(figures, steps, seeds):
    """Draw each site [runs, steps] from f, one after the other."""
    grown = []
    for step in range(steps):
        logits = growth_logits(solve(figures), figures)
        position = torch.full_like(seeds, step)
        grown.append(specdec_ext.sample(logits, seeds=seeds, positions=position, domain=1).tokens)
        figures = grow(figures, grown[-1])
    return torch.stack(grown, 1)


class Counts(NamedTuple):
    """What happened, over all runs: `rounds` calls of f, `tested` guesses, `accepted` ones."""

    rounds: int
    tested: int
    accepted: int


def grow_by_rounds(figures, steps, seeds, gamma, verify=torch.ops.specdec.verify, rule="block"):
    """Draw sites [runs, steps] with the same law by rounds of guesses; return them and `Counts`."""
    runs, everyone = len(figures), torch.arange(len(figures))
    grown = torch.empty(runs, steps + 1, dtype=torch.int64)  # the last column: what is too much
    count = torch.zeros(runs, dtype=torch.int64)  # sites so far
    field = solve(figures)  # a call of f for f* to begin with
    rounds, tested, accepted = 1, 0, 0
    while bool((count < steps).any()):
        where = {"seeds": seeds, "positions": count}
        along, guesses, laws, near = [figures], [], [], field
        for i in range(gamma):
            laws.append(growth_logits(near, along[i]))
            guesses.append(specdec_ext.sample(laws[i], draft_index=i, **where).tokens)
            along.append(grow(along[i], guesses[i]))
            near = guess(near, along[i + 1])

        along = torch.stack(along, 1)  # [runs, gamma + 1, L, L]
        fields = solve(along.flatten(0, 1))  # f and g, of all the guesses at once
        logits = growth_logits(fields, along.flatten(0, 1)).unflatten(0, (runs, gamma + 1))
        sites, kept, *_ = verify(
            logits, torch.stack(guesses, 1), torch.stack(laws, 1), **where, rule=rule
        )

        kept = kept.long()
        slots = (count[:, None] + torch.arange(gamma + 1)).masked_fill(sites < 0, steps)
        grown.scatter_(1, slots.clamp(max=steps), sites)
        figures = grow(along[everyone, kept], sites[everyone, kept])
        field = guess(fields.unflatten(0, (runs, -1))[everyone, kept], figures)
        count = count + kept + 1
        rounds += 1
        tested += int((kept + 1).clamp(max=gamma).sum())
        accepted += int(kept.sum())
    return grown[:, :steps], Counts(rounds, tested, accepted)
