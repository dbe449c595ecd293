"""Speculative execution of a slow random step that is no language model: a spark that grows.

    python examples/speculative_execution.py [--gamma 8] [--quick]

Take a slow function f, whose value f(x) is a law; y is drawn from f(x), and a slow function g goes
on from y. One need not wait for f(x): draw y from a cheap law f*(x), compute g(y) beside f(x), and
let speculative sampling keep y or replace it. What comes out has the law f(x) all the same
(Leviathan et al., arXiv 2211.17192, section 6).

Here x is a figure of discharge channels on a lattice, y the site where it grows next, drawn with
probability proportional to the electric potential there to the power ETA (the dielectric breakdown
model: Niemeyer, Pietronero, Wiesmann, Physical Review Letters 52, 1984). f solves Laplace's
equation around the figure: many sweeps over the lattice, one after the other, which are too small
to fill a processor, so that several figures at once take little longer than one. g is the next
step: f again, of the figure with y. f* is one sweep over the potential that f found before. So a
round draws GAMMA sites by f*, has f solve for all the figures along the way in one batch, and one
call of `torch.ops.specdec.verify` says how many of the sites stay, and draws one more.
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import time
from typing import NamedTuple

import torch

import specdec_ext
from specdec_ext import theory
from specdec_ext.testing import joint_law

ETA = 2.0  # the larger, the fewer branches
GUESS_SWEEPS = 1
PLANTED = "guesses kept unverified"
ALPHA = 1e-6  # a p-value under this is no chance


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
    around = [row[width + step : last + step] for step in (-width, width, -1, 1)]
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


class Growth(NamedTuple):
    """Sites [runs, steps], which of them are guesses; and of all runs what they took."""

    sites: torch.Tensor
    guessed: torch.Tensor
    rounds: int
    tested: int
    accepted: int


def propose(field, figures, gamma, **where):
    """Draw sites [runs, gamma] from f*; return them, their laws and all figures along the way."""
    sites, laws, along = [], [], [figures]
    for i in range(gamma):
        laws.append(growth_logits(field, along[i]))
        sites.append(specdec_ext.sample(laws[i], draft_index=i, **where).tokens)
        along.append(grow(along[i], sites[i]))
        field = guess(field, along[i + 1])
    return torch.stack(sites, 1), torch.stack(laws, 1), torch.stack(along, 1)


def grow_by_rounds(figures, steps, seeds, gamma, rule="block", verify=torch.ops.specdec.verify):
    """Draw as many sites with the same law, in rounds of `gamma` guesses and one call of f."""
    runs, everyone = len(figures), torch.arange(len(figures))
    sites = torch.empty(runs, steps + 1, dtype=torch.int64)  # the last column: what is too much
    guessed = torch.empty(runs, steps + 1, dtype=torch.bool)
    count = torch.zeros(runs, dtype=torch.int64)  # sites so far
    size = figures.shape[-1] + 2
    field = guess(torch.ones(runs, size, size), figures)  # f has found nothing yet
    rounds, tested, accepted = 0, 0, 0
    while bool((count < steps).any()):
        where = {"seeds": seeds, "positions": count}
        guesses, laws, along = propose(field, figures, gamma, **where)
        fields = solve(along.flatten(0, 1))  # f, and g of every guess, at once
        logits = growth_logits(fields, along.flatten(0, 1)).unflatten(0, (runs, gamma + 1))
        drawn, kept, _, _, status = verify(logits, guesses, laws, rule=rule, **where)
        if bool(status.any()):
            raise RuntimeError(f"verification gave status {status.unique().tolist()}, expected 0")

        kept = kept.long()
        slots = (count[:, None] + torch.arange(gamma + 1)).masked_fill(drawn < 0, steps)
        slots.clamp_(max=steps)
        sites.scatter_(1, slots, drawn)
        guessed.scatter_(1, slots, torch.arange(gamma + 1) < kept[:, None])
        figures = grow(along[everyone, kept], drawn[everyone, kept])
        field = guess(fields.unflatten(0, (runs, gamma + 1))[everyone, kept], figures)
        count = count + kept + 1
        rounds += 1
        tested += int((kept + 1).clamp(max=gamma).sum())
        accepted += int(kept.sum())
    return Growth(sites[:, :steps], guessed[:, :steps], rounds, tested, accepted)


# --- the law of what comes out --------------------------------------------------------------------


def exact_law(size, steps):
    """Enumerate the law of the first sites, [L * L] * steps."""
    figures, conditionals = spark(size), []
    for step in range(steps):
        law = growth_logits(solve(figures), figures).double().softmax(-1)
        conditionals.append(law.unflatten(0, [size**2] * step) if step else law[0])
        every = torch.arange(size**2).repeat(len(figures))
        figures = grow(figures.repeat_interleave(size**2, 0), every)
    return joint_law(conditionals)


def p_value(sites, law):
    """Test drawn sites [runs, steps] against their law: Pearson's chi-square, rare cells as one."""
    size, runs = law.shape[0], len(sites)
    codes = (sites * torch.tensor([size**k for k in reversed(range(sites.shape[1]))])).sum(1)
    found = torch.bincount(codes, minlength=law.numel()).double()
    expected = law.flatten() * runs
    if bool(found[expected == 0].any()):
        return 0.0  # what cannot be was seen
    common = expected >= 5
    found, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (found, expected))
    cells = expected > 0
    statistic = ((found - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = torch.tensor((int(cells.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def keep_unverified(logits, guesses, laws, *, seeds, positions, rule):
    """Be the mistake that the test has to find: keep every guess, whatever f says."""
    last = specdec_ext.sample(logits[:, -1], seeds=seeds, positions=positions, domain=1).tokens
    kept = torch.full((len(guesses),), guesses.shape[1], dtype=torch.int32)
    return torch.cat([guesses, last[:, None]], 1), kept, None, None, torch.zeros_like(kept)


def check_law(size=5, steps=3, runs=50_000, gamma=2, seed=0):
    """Give the p-values of sparks on a small lattice, grown in four ways, by the way's name."""
    law, start = exact_law(size, steps), spark(size, runs)
    seeds = torch.arange(runs) + seed * runs
    ways = {f"rule {rule}": {"rule": rule} for rule in ("block", "token")}
    ways[PLANTED] = {"verify": keep_unverified}
    found = {"f step by step": p_value(grow_plainly(start, steps, seeds), law)}
    for name, options in ways.items():
        found[name] = p_value(grow_by_rounds(start, steps, seeds, gamma, **options).sites, law)
    return found


def judge(p_values):
    """Say whether every way has f's law but the planted mistake, which must be found."""
    return all((p > ALPHA) != (name == PLANTED) for name, p in p_values.items())


# --- the time it takes ----------------------------------------------------------------------------


class Timed:
    """Times calls by name, in CPU time: what a clock shows where nobody else uses the core."""

    def __init__(self):
        self.seconds = collections.defaultdict(list)

    def __call__(self, name, work, *arguments):
        """Call something; return what it returns."""
        begin = time.process_time()
        result = work(*arguments)
        self.seconds[name].append(time.process_time() - begin)
        return result

    def median(self, name):
        """Return the median of the seconds that calls of this name took."""
        return statistics.median(self.seconds[name])


def measure(size, steps, gamma, repeats):
    """Time growth in three ways; give a record of each, and of what theorem 3.8 speaks of."""
    timed, start, growths = Timed(), spark(size), {"block": [], "token": []}
    grown = grow(start, torch.tensor([size * (size // 2 - 1) + size // 2]))
    several, field = grown.repeat(gamma + 1, 1, 1), solve(grown)
    first = {"seeds": torch.tensor([0]), "positions": torch.tensor([0])}
    for seed in range(repeats):  # by turns, so that noise hits all alike
        seeds = torch.tensor([seed])
        timed("plain", grow_plainly, start, steps, seeds)
        for rule, those in growths.items():
            those.append(timed(rule, grow_by_rounds, start, steps, seeds, gamma, rule))
        for _ in range(5):
            timed("f", solve, grown)
            timed("f of several", solve, several)
            timed("guesses", lambda: propose(field, grown, gamma, **first))

    records = [{"way": "step by step", "ms a site": timed.median("plain") / steps * 1e3}]
    for rule, those in growths.items():
        records.append(
            {
                "way": f"rounds, rule {rule}",
                "ms a site": timed.median(rule) / steps * 1e3,
                "sites a call of f": steps * repeats / sum(growth.rounds for growth in those),
                "times as fast": timed.median("plain") / timed.median(rule),
            }
        )
    # Alpha is a matter of f and f* alone; what the rule "token" accepts estimates it.
    tested = sum(growth.tested for growth in growths["token"])
    alpha = sum(growth.accepted for growth in growths["token"]) / tested
    c = timed.median("guesses") / gamma / timed.median("f")
    slower = timed.median("f of several") / timed.median("f")
    theorem = {
        "alpha": alpha,
        "c": c,
        "times that f takes for all guesses": slower,
        "sites a call by equation 1": theory.expected_tokens(alpha, gamma),
        "times as fast by theorem 3.8": theory.walltime_factor(alpha, gamma, c),
        "with f's time": theory.expected_tokens(alpha, gamma) / (gamma * c + slower),
    }
    return records, theorem


def picture(size, growth):
    """Draw a spark for the terminal: "o" for a guess that was kept, "#" for a site from f."""
    sites = [" "] * size**2
    sites[size * (size // 2) + size // 2] = "@"
    for site, guessed in zip(growth.sites[0].tolist(), growth.guessed[0].tolist(), strict=True):
        sites[site] = "o" if guessed else "#"
    return "\n".join(" ".join(sites[k : k + size]).rstrip() for k in range(0, size**2, size))


def main(argv=None):
    """Grow a spark, test its law, and time it; fail if the law is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gamma", type=int, default=8, help="guesses a round")
    parser.add_argument("--size", type=int, default=41, help="sites from side to side")
    parser.add_argument("--steps", type=int, default=120, help="sites that are grown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="less of everything: a few seconds")
    options = parser.parse_args(argv)
    for name, low in (("gamma", 1), ("size", 3), ("steps", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name} must be at least {low}, got {getattr(options, name)}")
    size, steps, runs, repeats = options.size, options.steps, 50_000, 9
    if options.quick:
        size, steps, runs, repeats = min(size, 21), min(steps, 40), 20_000, 3
    room = size**2 // 4  # what grows beyond is mostly shut in by what did before
    if steps + options.gamma > room:
        parser.error(
            f"--steps and --gamma must be at most {room} together, on {size} x {size} sites"
        )
    torch.set_num_threads(1)  # so small are the lattices

    growth = grow_by_rounds(spark(size), steps, torch.tensor([options.seed]), options.gamma)
    print(f"{steps} sites, grown in rounds of {options.gamma} guesses from @ on.")
    print("o: a guess that was kept; #: a site drawn from f.\n")
    print(picture(size, growth))

    print(f"\nThe law of the first 3 sites of {runs} sparks: p-values of chi-square tests")
    p_values = check_law(runs=runs, seed=options.seed)
    for name, p in p_values.items():
        print(f"  {name:<24} {p:.3g}")
    is_right = judge(p_values)
    print("  The mistake is found, the others are right." if is_right else "  WRONG.")

    records, theorem = measure(size, steps, options.gamma, repeats)
    print(f"\n{steps} sites, medians of {repeats} sparks, one thread")
    for record in records:
        print("  " + ", ".join(shown(name, value) for name, value in record.items()))
    print("  " + ", ".join(shown(name, value) for name, value in theorem.items()))
    return 0 if is_right else 1


def shown(name, value):
    """Format an entry of a record."""
    return value if isinstance(value, str) else f"{name} {value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
