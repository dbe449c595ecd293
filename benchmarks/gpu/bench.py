"""Time verification on a GPU: raw bf16 logits to emitted tokens, ours against other people's.

    python benchmarks/gpu/bench.py --quick --budget-s 300      # what the project's targets need
    python benchmarks/gpu/bench.py --budget-s 3600             # the whole grid
    python benchmarks/gpu/bench.py --device cpu --quick ...    # the same, tried without a GPU

Nothing is timed before it was checked. Our operators: all outputs of the cell's own inputs against
the CPU operators, the first requests against the float64 reference as well (`assert_tokens_match`).
Peers have coins of their own: the law of their first token and of the number of accepted tokens
over many requests (`tv_bound`), and at the cell's own shape the mean number accepted.

A call is one step of a decoding loop. All calls over all input sets, together several times the
L2, go into one CUDA graph; its replays are timed with events and divided by the number of sets.
What a graph cannot hold is timed as it is, with ``graph`` false.

Columns: ``us`` median of a call; ``GB/s`` the bytes that the rule must read (target rows, the
draft's rows if there is a draft law, and the rows of the last draw again if so) over that time;
percentages of the copy and of the read bandwidth measured in the same run; ``launches`` kernels,
copies and fills of one call; in the records, ``kernels`` the microseconds of each in the replays,
and ``sm_mhz`` the clock meanwhile. Acceptance ``0.7``: sum min(p, q) near 0.7 for a dense draft,
p(x) = 0.7 before filters for a deterministic one. ``full``: (nearly) everything is accepted.

Only where ``--contestants`` names them: the rule ``coupled``, which reads no draft law, and a rule
of ours with ``masked`` (every other token allowed, at random, and those that were drafted) or
``reduced`` (a dense draft over about a quarter of the vocabulary) behind it, or ``block`` with
``tree`` (the chain given to `verify_tree`). What they read is counted as that of the plain rule.

Results are written after each contestant. Work is done in a process of its own: if one crashes or
hangs, that contestant is marked, and a new process goes on with the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_ext import reference
from specdec_ext.backend import absences, resolve
from specdec_ext.contract import rule_names
from specdec_ext.testing import (
    VerifyCase,
    VerifyOutcome,
    assert_tokens_match,
    chain_as_tree,
    tv_bound,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

from gpu import peers, replays, tables  # noqa: E402
from gpu.peers import Inputs, Sampling  # noqa: E402
from gpu.tables import (  # noqa: E402
    ALL_RULES,
    PACKAGES,
    PEERS,
    RULES,
    SAMPLING,
    Cell,
    backend_of,
)

LOGIT_SCALE = 3.0  # of randn: about the spread of a language model's logits
ALPHA = 0.7
FULL = 0.999
DRAFTERS = ("dense", "deterministic")
GPU_BACKENDS = ("cuda", "triton")
READ = "read"  # of the rows that the rule must read, and nothing else
EXIT_AGAIN = 75  # of a worker that wants a fresh process
OUT_OF_TIME = "a kill at the end of the budget"


# -------------------------------------------------------------------------------------------------
# Inputs
# -------------------------------------------------------------------------------------------------


def law_of(sampling: Sampling) -> Callable[[Tensor], Tensor]:
    """Give the fastest eager law: what inputs are made with."""
    law = list(peers.eager_laws(sampling).values())[-1]
    return lambda logits: law(logits, sampling)


@cache
def noise_for(alpha: float, vocab: int, filters: str, device: torch.device) -> float:
    """Find the noise on the draft's logits that gives this acceptance, by bisection."""
    generator = torch.Generator(device).manual_seed(0)
    target, noise = (torch.randn(16, vocab, generator=generator, device=device) for _ in range(2))
    law = law_of(SAMPLING[filters])
    p = law((target * LOGIT_SCALE).bfloat16())
    low, high = 0.0, 4.0
    for _ in range(10):
        middle = (low + high) / 2
        q = law((target * LOGIT_SCALE + middle * noise).bfloat16())
        if float(torch.minimum(p, q).sum(-1).mean()) > alpha:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def favour(logits: Tensor, tokens: Tensor, share: float, temperature: float) -> None:
    """Set the drafted tokens' logits so that each has this probability before filters."""
    index = tokens[..., None]
    others = (logits.float() / temperature).scatter_(-1, index, -torch.inf).logsumexp(-1)
    odds = torch.tensor(share / (1 - share)).log().item()
    value = (others + odds) * temperature
    logits.scatter_(-1, index, value[..., None].to(logits.dtype))


def make_inputs(cell: Cell, generator: torch.Generator, device: torch.device) -> Inputs:
    """Draw one set of inputs on the device."""
    shape = (cell.batch, cell.gamma + 1, cell.vocab)
    target = torch.randn(shape, generator=generator, device=device).mul_(LOGIT_SCALE).bfloat16()
    draft = None
    if cell.drafter == "dense":
        draft = target[:, :-1].contiguous()
        if cell.acceptance != "full":
            noise = torch.randn(draft.shape, generator=generator, device=device)
            draft.add_(noise.mul_(noise_for(ALPHA, cell.vocab, cell.filters, device)))
        weights = law_of(cell.sampling)(draft).flatten(0, 1)
        noise = torch.empty_like(weights).exponential_(generator=generator)
        tokens = weights.div_(noise).argmax(-1).view(cell.batch, cell.gamma)
    else:
        size = (cell.batch, cell.gamma)
        tokens = torch.randint(cell.vocab, size, generator=generator, device=device)
        share = FULL if cell.acceptance == "full" else ALPHA
        favour(target[:, :-1], tokens, share, cell.sampling.temperature)
    size = (cell.batch, cell.gamma + 1)
    uniforms = torch.rand(size, generator=generator, device=device, dtype=torch.float64)
    seed = torch.randint(2**62, (1,), generator=generator, device=device)
    return Inputs(target, draft, tokens, tokens.int(), uniforms, seed)


def number_of_sets(cell: Cell, device: torch.device) -> int:
    """Choose how many sets to rotate over: several times the last cache, but at least 2."""
    rows = cell.batch * (cell.gamma + 1 + (cell.gamma if cell.drafter == "dense" else 0))
    wanted = 4 * replays.l2_bytes(device)
    return min(max(-(-wanted // (rows * cell.vocab * 2)), 2), 512 if device.type == "cuda" else 3)


# -------------------------------------------------------------------------------------------------
# Ours
# -------------------------------------------------------------------------------------------------


def ours(device: torch.device) -> list[str]:
    """List the backends to time; on a CPU the CPU's, to try the rest."""
    if device.type != "cuda":
        return ["cpu"]
    return [name for name in GPU_BACKENDS if absences()[name] is None]


def parameters(sampling: Sampling, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Make [B] tensors of what is not off."""
    found = {}
    if sampling.temperature != 1:
        found["temperature"] = torch.full((batch,), sampling.temperature, device=device)
    if sampling.top_k > 0:
        found["top_k"] = torch.full((batch,), sampling.top_k, device=device)
    if sampling.top_p < 1:
        found["top_p"] = torch.full((batch,), sampling.top_p, device=device)
    return found


def mask_of(inputs: Inputs) -> Tensor:
    """Allow half of the tokens, and all that were drafted."""
    tokens = inputs.tokens
    shape = (*inputs.target.shape[:2], -(-inputs.target.shape[2] // 32))
    generator = torch.Generator(tokens.device).manual_seed(0)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, device=tokens.device)
    index = tokens[..., None] // 32
    drafted = words[:, :-1].gather(-1, index) | (1 << tokens[..., None] % 32)
    words[:, :-1].scatter_(-1, index, drafted)
    return words.int()


def ids_of(inputs: Inputs) -> Tensor:
    """Choose a quarter of the vocabulary at random, and all that was drafted."""
    generator = torch.Generator(inputs.tokens.device).manual_seed(0)
    vocab = inputs.target.shape[2]
    chosen = torch.rand(vocab, generator=generator, device=inputs.tokens.device) < 0.25
    chosen[inputs.tokens.flatten()] = True
    return chosen.nonzero()[:, 0]


def case_of(cell: Cell, inputs: Inputs, rule: str, feature: str = "") -> VerifyCase:
    """Give what `verify` is called with."""
    device = inputs.target.device
    arguments: dict[str, Any] = {
        "target_logits": inputs.target,
        "draft_tokens": inputs.tokens,
        "rule": rule,
        **parameters(cell.sampling, cell.batch, device),
    }
    if rule in rule_names(races=True):
        arguments["positions"] = torch.arange(cell.batch, device=device)
        arguments["seeds"] = inputs.seed + arguments["positions"]
    else:
        arguments["uniforms"] = inputs.uniforms
    if inputs.draft is not None:
        arguments["draft_logits"] = inputs.draft
    if feature == "masked":
        arguments["allowed_mask"] = mask_of(inputs)
    if feature == "reduced" and inputs.draft is not None:
        ids = arguments["draft_token_ids"] = ids_of(inputs)
        arguments["draft_logits"] = inputs.draft[..., ids]
    return VerifyCase(arguments, f"{rule} {feature}, {cell.label()}")


def to_cpu(case: VerifyCase) -> VerifyCase:
    """Copy a case to the CPU."""
    moved = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
    return VerifyCase(moved, case.name)


def check_ours(verify: Callable[..., Any], case: VerifyCase, requests: int) -> str:
    """Compare all requests with the CPU operator, the first ones with the reference.

    Raises
    ------
    AssertionError
        An outcome differs, and not by a near-tie.
    """
    there, found = to_cpu(case), VerifyOutcome(*(t.cpu() for t in case.run(verify)))
    excused = assert_tokens_match(found, there.run(torch.ops.specdec.verify), there)
    first = there.select(range(min(requests, case.batch)))
    some = VerifyOutcome(*(t[: first.batch] for t in found))
    excused += assert_tokens_match(some, first.run(reference.verify), first)
    if excused > 1 + case.batch // 16:
        raise AssertionError(f"{excused} near-ties of {case.batch} requests are too many")
    return f"equal to cpu ({case.batch} requests) and reference ({first.batch}), {excused} ties"


# -------------------------------------------------------------------------------------------------
# Peers
# -------------------------------------------------------------------------------------------------


def lengths(tokens: Tensor) -> Tensor:
    """Count accepted tokens of ``[B, G+1]``, -1 after the end."""
    return (tokens >= 0).sum(-1) - 1


def law_inputs(
    drafter: str, sampling: Sampling, requests: int, vocab: int, device: torch.device
) -> tuple[Inputs, Tensor, Tensor]:
    """Make many requests of one law: inputs, p [V] and the acceptance of each of two positions.

    The logits are spaced so that no two are equal in bfloat16: implementations treat ties at a
    threshold differently.
    """
    generator = torch.Generator().manual_seed(1)
    rungs = torch.linspace(-5, 5, vocab)
    p_row, q_row = (rungs[torch.randperm(vocab, generator=generator)] for _ in range(2))
    q_row = rungs[(p_row + 0.5 * q_row).argsort().argsort()]
    law = law_of(sampling)
    p = law(p_row.bfloat16()[None])[0].double()
    target = p_row.bfloat16().to(device).expand(requests, 3, vocab).contiguous()
    if drafter == "dense":
        q = law(q_row.bfloat16()[None])[0].double()
        draft = q_row.bfloat16().to(device).expand(requests, 2, vocab).contiguous()
        tokens = torch.multinomial(q, requests * 2, True, generator=generator).view(-1, 2)
        alpha = torch.minimum(p, q).sum()
    else:
        draft, likely = None, int(p.argmax())
        tokens = torch.full((requests, 2), likely)
        alpha = p[likely]
    tokens = tokens.to(device)
    uniforms = torch.rand(requests, 3, generator=generator, dtype=torch.float64).to(device)
    seed = torch.tensor([7], device=device)
    return Inputs(target, draft, tokens, tokens.int(), uniforms, seed), p, alpha


def check_law(verify: peers.Verifier, inputs: Inputs, p: Tensor, alpha: Tensor) -> str:
    """Compare the laws of the first token and of the number accepted with what they must be.

    Raises
    ------
    AssertionError
        A law is off by more than chance (1e-9) explains.
    """
    tokens = verify(inputs).long().cpu()
    n = len(tokens)
    lengths_law = torch.stack([1 - alpha, alpha * (1 - alpha), alpha * alpha])
    said = []
    for what, found, wanted in (
        ("first token", tokens[:, 0], p),
        ("accepted", lengths(tokens), lengths_law),
    ):
        if int(found.min()) < 0 or int(found.max()) >= len(wanted):
            raise AssertionError(f"{what}: values outside [0, {len(wanted)})")
        law = torch.bincount(found, minlength=len(wanted)).double() / n
        tv, bound = 0.5 * float((law - wanted).abs().sum()), tv_bound(n, len(wanted))
        if tv > bound:
            raise AssertionError(f"{what}: total variation {tv:.4f} over {n} draws > {bound:.4f}")
        said.append(f"{what} TV {tv:.4f} < {bound:.4f}")
    return f"law of {n} requests: {', '.join(said)}"


def check_accepted(verify: peers.Verifier, cell: Cell, sets: Sequence[Inputs]) -> str:
    """Compare the mean number accepted at the cell's own shape with its expectation.

    Raises
    ------
    AssertionError
        It is further off than chance explains (six standard deviations).
    """
    found = expected = variance = 0.0
    for inputs in sets:
        case = to_cpu(case_of(cell, inputs, "token").replace(full_accept_probs=True))
        probs = VerifyOutcome(*case.run(torch.ops.specdec.verify)).accept_probs.double()
        reach = probs.cumprod(-1)
        mean = reach.sum(-1)
        square = (reach * (2 * torch.arange(cell.gamma) + 1)).sum(-1)
        expected, variance = (
            expected + float(mean.sum()),
            variance + float((square - mean**2).sum()),
        )
        found += float(lengths(verify(inputs)).sum())
    slack = 6 * max(variance, 0.0) ** 0.5 + 0.02 * cell.batch * len(sets)
    said = f"{found:.0f} accepted, {expected:.1f} +- {slack:.1f} expected"
    if abs(found - expected) > slack:
        raise AssertionError(said)
    return said


# -------------------------------------------------------------------------------------------------
# One contestant in one cell
# -------------------------------------------------------------------------------------------------


class State:
    """Everything that is known so far, on disk after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.laws: dict[str, str] = {}
        self.ungraphable: list[str] = []
        self.started: dict[str, Any] | None = None
        if path.exists():
            self.__dict__.update(json.loads(path.read_text()), path=path)

    def save(self) -> None:
        """Write it, all or nothing."""
        draft = self.path.with_suffix(".tmp")
        draft.parent.mkdir(parents=True, exist_ok=True)
        known = {k: v for k, v in self.__dict__.items() if k != "path"}
        draft.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(draft, self.path)

    def done(self) -> set[tuple[Cell, str]]:
        """List what needs no further work."""
        return {(Cell(**r["cell"]), r["contestant"]) for r in self.records}

    def finish(self, cell: Cell, contestant: str, **found: Any) -> None:
        """Record what came of a contestant."""
        self.records.append({"cell": asdict(cell), "contestant": contestant, **found})
        self.started = None
        self.save()


def contestants(cell: Cell, options: argparse.Namespace) -> list[str]:
    """List what is timed in a cell: ours, the peers, a plain read."""
    names = [name for b in ours(options.device) for name in named(b, cell)]
    absent = {name for name, reason in peers.absences(options.device).items() if reason is not None}
    names += [*peers.eager_laws(cell.sampling), *(n for n in PACKAGES if n not in absent)]
    wanted = set(options.contestants) - set(options.without)
    return [name for name in [*names, READ] if name in wanted]


def named(backend: str, cell: Cell | None = None) -> list[str]:
    """List what a backend of ours can be asked for, in a cell or at all."""
    plain = [f"{backend} {rule}" for rule in ALL_RULES]
    dense = cell is None or cell.drafter == "dense"
    more = [f"{name} masked" for name in plain] + [f"{backend} block tree"]
    return plain + more + [f"{backend} {rule} reduced" for rule in RULES if dense]


def through_trees(verify_tree: Callable[..., Any]) -> Callable[..., VerifyOutcome]:
    """Give what verifies chains as trees."""

    def verify(**inputs: Any) -> VerifyOutcome:
        out = chain_as_tree(VerifyCase(inputs)).run(verify_tree)
        return VerifyOutcome(
            out.tokens, out.num_accepted, out.logprobs, out.accept_probs[:, 1:], out.status
        )

    return verify


def calls_of(
    contestant: str, cell: Cell, sets: Sequence[Inputs], device: torch.device
) -> list[replays.Work]:
    """Give one call a set."""
    if contestant == READ:
        parts = [[x.target] if x.draft is None else [x.target, x.draft] for x in sets]
        readers = [[replays.reader(t) for t in tensors] for tensors in parts]
        return [lambda works=works: [work() for work in works] for works in readers]
    mine = backend_of(contestant)
    if mine is not None:
        backend, rule, feature = mine
        cases = [case_of(cell, inputs, rule, feature) for inputs in sets]
        if feature == "tree":
            verify_tree = resolve("verify_tree", backend, device).verify_tree
            trees = [chain_as_tree(case) for case in cases]
            return [lambda tree=tree: tree.run(verify_tree) for tree in trees]
        verify = resolve("verify", backend, device).verify
        return [lambda case=case: case.run(verify) for case in cases]
    shape = (cell.batch, cell.gamma, cell.vocab)
    verifier = peers.verifier(contestant, cell.sampling, shape, device)
    return [lambda inputs=inputs: verifier(inputs) for inputs in sets]


def check(
    contestant: str, cell: Cell, sets: Sequence[Inputs], state: State, options: argparse.Namespace
) -> str:
    """Check a contestant before it is timed.

    Raises
    ------
    AssertionError
        It emits something else.
    """
    device = options.device
    if contestant == READ:
        return ""
    mine = backend_of(contestant)
    if mine is not None:
        verify = resolve("verify", mine[0], device).verify
        if mine[2] == "tree":
            verify = through_trees(resolve("verify_tree", mine[0], device).verify_tree)
        return check_ours(verify, case_of(cell, sets[0], *mine[1:]), options.check_requests)
    key = f"{contestant}, {cell.drafter}, {cell.filters}"
    if key not in state.laws:
        requests = 200_000 if device.type == "cuda" else 20_000
        inputs, p, alpha = law_inputs(cell.drafter, cell.sampling, requests, 128, device)
        verifier = peers.verifier(contestant, cell.sampling, (requests, 2, 128), device)
        state.laws[key] = check_law(verifier, inputs, p, alpha)
        state.save()
    shape = (cell.batch, cell.gamma, cell.vocab)
    verifier = peers.verifier(contestant, cell.sampling, shape, device)
    return f"{state.laws[key]}; {check_accepted(verifier, cell, sets[:8])}"


def run_contestant(
    contestant: str, cell: Cell, sets: Sequence[Inputs], state: State, options: argparse.Namespace
) -> dict[str, Any]:
    """Check, count launches and time; gives the fields of a record."""
    device = options.device
    calls = calls_of(contestant, cell, sets, device)
    checked = check(contestant, cell, sets, state, options)

    def everything() -> None:
        for call in calls:
            call()

    graphable = contestant not in state.ungraphable
    if graphable:
        run = replays.record(everything, device)
    else:
        replays.warm_up(everything, device)
        run = everything
    timing = replays.time_run(run, len(calls), device, options.cell_s)
    return {
        "status": "ok",
        "checked": checked,
        **acceptance_seen(cell, sets[0]),
        "graph": graphable and device.type == "cuda",
        "sets": len(calls),
        "us": round(timing.median * 1e6, 3),
        "us_min": round(timing.min * 1e6, 3),
        "us_p90": round(timing.p90 * 1e6, 3),
        "samples": timing.calls,
        "launches": profiled(lambda: replays.launches(calls[0], device)),
        "kernels": profiled(lambda: replays.durations(run, len(calls), device)),
        "sm_mhz": replays.sm_clock(run, device),
    }


def acceptance_seen(cell: Cell, inputs: Inputs) -> dict[str, float]:
    """Say how much of the draft the token rule accepts of a set, by eager PyTorch."""
    law = list(peers.eager_laws(cell.sampling).values())[-1]
    n = lengths(peers.eager(law, cell.sampling, inputs)).double()
    return {
        "mean_accepted": round(float(n.mean()), 3),
        "full_share": round(float((n == cell.gamma).double().mean()), 3),
    }


def profiled(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read a trace; a profiler that does not work here costs what it says, not the timing."""
    try:
        return read()
    except Exception as error:
        print(f"nothing was profiled: {type(error).__name__}: {error}", flush=True)
        return {}


def is_fatal(error: BaseException) -> bool:
    """Say whether the device is unusable from here on in this process."""
    text = f"{type(error).__name__}: {error}"
    return "AcceleratorError" in text or "CUDA error" in text


def attempt(
    contestant: str, cell: Cell, sets: Sequence[Inputs], state: State, options: argparse.Namespace
) -> bool:
    """Run a contestant and record what came of it; False asks for a fresh process."""
    state.started = {"cell": asdict(cell), "contestant": contestant}
    state.save()
    try:
        state.finish(cell, contestant, **run_contestant(contestant, cell, sets, state, options))
    except AssertionError as error:
        state.finish(cell, contestant, status="unequal", reason=str(error)[:2000])
    except replays.CaptureFailed as error:
        if is_fatal(error.__cause__ or error) and "captur" not in str(error):
            state.finish(cell, contestant, status="failed", reason=str(error)[:2000])
        else:
            state.ungraphable.append(contestant)
            state.facts.setdefault("ungraphable", {})[contestant] = str(error)[:500]
            state.started = None
            state.save()
        return False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:2000]
        print(traceback.format_exc(limit=4), flush=True)
        state.finish(cell, contestant, status="failed", reason=text)
        return not is_fatal(error)
    return True


# -------------------------------------------------------------------------------------------------
# What to run
# -------------------------------------------------------------------------------------------------

Job = tuple[Cell, tuple[str, ...]]


def quick_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """List what the targets need first, then one step along each axis; torch.compile comes late."""
    vocab, gamma = options.vocab[-1], 5 if 5 in options.gamma else options.gamma[0]
    central = 32 if 32 in options.batch else options.batch[-1]
    kinds = list(itertools.product(options.drafter, options.filters))

    def cells(batch: int, columns: int, entries: int, acceptance: str = "0.7") -> Iterator[Cell]:
        for drafter, filters in kinds:
            yield Cell(drafter, filters, batch, columns, entries, acceptance)

    points = [(central, gamma, vocab), (options.batch[0], gamma, vocab)]
    points += [(batch, gamma, vocab) for batch in options.batch]
    points += [(central, gamma, entries) for entries in options.vocab]
    points += [(central, columns, vocab) for columns in options.gamma]
    points = list(dict.fromkeys(points))
    late = ("compile",)  # a compilation takes as long as all others of a cell together
    plain = [
        (cell, tuple(name for name in contestants(cell, options) if name not in late))
        for cell in itertools.chain(
            *(cells(*point) for point in points), cells(central, gamma, vocab, "full")
        )
    ]
    compiled = [(cell, late) for point in points for cell in cells(*point)]
    if "compile" not in options.contestants:
        compiled = []
    early = 2 * len(kinds)
    yield from plain[:early]
    yield from compiled[: len(kinds)]
    yield from plain[early:]
    yield from compiled[len(kinds) :]


def grid_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """List the whole grid, the largest vocabulary and the central batch first."""
    for point in itertools.product(
        reversed(options.vocab),
        sorted(options.batch, key=lambda batch: (batch != 32, batch)),
        sorted(options.gamma, key=lambda gamma: (gamma != 5, gamma)),
        options.filters,
        options.drafter,
        options.acceptance,
    ):
        vocab, batch, gamma, filters, drafter, acceptance = point
        cell = Cell(drafter, filters, batch, gamma, vocab, acceptance)
        yield cell, tuple(contestants(cell, options))


def jobs_of(options: argparse.Namespace) -> Iterable[Job]:
    """List cells with their contestants, most wanted first."""
    return quick_jobs(options) if options.quick else grid_jobs(options)


def ceilings(device: torch.device) -> dict[str, Any]:
    """Measure what the memory can do."""
    nbytes = 2 << 30 if device.type == "cuda" else 32 << 20
    reads = replays.read_ceiling(device, nbytes)
    return {
        "copy_gb_s": round(replays.copy_ceiling(device, nbytes) / 1e9, 1),
        "read_gb_s": round(max(reads.values()) / 1e9, 1),
        "read_ways_gb_s": {name: round(speed / 1e9, 1) for name, speed in reads.items()},
    }


def work(options: argparse.Namespace, state: State) -> int:
    """Do what is left, in this process; gives its exit code."""
    device: torch.device = options.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "copy_gb_s" not in state.facts:
        state.facts |= {**replays.facts(device), **ceilings(device), "seed": options.seed}
        state.facts["peers"] = {k: v or "present" for k, v in peers.absences(device).items()}
        state.facts["backends"] = {k: v or "present" for k, v in absences().items()}
        state.save()
        print(json.dumps(state.facts), flush=True)
    for cell, names in jobs_of(options):
        left = [name for name in names if (cell, name) not in state.done()]
        if not left:
            continue
        generator = torch.Generator(device).manual_seed(options.seed)
        sets = [make_inputs(cell, generator, device) for _ in range(number_of_sets(cell, device))]
        for name in left:
            if time.time() > options.until:
                return 0
            completed = attempt(name, cell, sets, state, options)
            if state.records:
                print(tables.line(state.records[-1], state.facts), flush=True)
            if not completed:
                return EXIT_AGAIN
    return 0


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="what the targets need and a bit more")
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--gamma", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256, 151_936])
    filters = ["temperature", "top_k+top_p"]
    parser.add_argument("--filters", nargs="+", choices=SAMPLING, default=filters)
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--acceptance", nargs="+", choices=["0.7", "full"], default=["0.7"])
    everyone = [f"{b} {rule}" for b in ("cpu", *GPU_BACKENDS) for rule in RULES] + [*PEERS, READ]
    on_demand = [name for b in ("cpu", *GPU_BACKENDS) for name in named(b)]
    choices = list(dict.fromkeys([*everyone, *on_demand]))
    parser.add_argument("--contestants", nargs="+", choices=choices, default=everyone)
    parser.add_argument("--without", nargs="+", choices=choices, default=[], help="of these, none")
    parser.add_argument("--cell-s", type=float, default=0.25, help="seconds of timing a contestant")
    parser.add_argument("--check-requests", type=int, default=2, help="that the reference checks")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds without progress")
    parser.add_argument("--seed", type=int, help="of the inputs; fresh by default")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder")
    parser.add_argument("--stem", default="gpu-bench", help="of the files' names")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # a worker's deadline
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(4), "little")
    if options.device.type == "cuda" and options.device.index is None:
        options.device = torch.device("cuda", 0)
    return options


def supervise(options: argparse.Namespace, arguments: Sequence[str]) -> State:
    """Run workers until everything is done or the budget is spent; marks who crashed or hung."""
    path = options.out / f"{options.stem}.json"
    path.unlink(missing_ok=True)
    until = time.time() + options.budget_s
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    command += ["--until", str(until), "--seed", str(options.seed)]
    barren = 0  # workers in a row that recorded nothing
    while time.time() < until and barren < 2:
        before = len(State(path).records)
        code = watch(command, path, options.patience, until + 30)
        state = State(path)
        if state.started is not None:
            name, cell = state.started["contestant"], Cell(**state.started["cell"])
            status = "cut off" if code == OUT_OF_TIME else "crashed"
            state.finish(cell, name, status=status, reason=f"the process ended with {code}")
            print(tables.line(state.records[-1], state.facts), flush=True)
        if code == 0:
            break
        learnt = len(state.records) > before or code == EXIT_AGAIN
        barren = 0 if learnt else barren + 1
    return State(path)


def watch(command: Sequence[str], path: Path, patience: float, until: float) -> int | str:
    """Wait for a worker; kill it where nothing is recorded for too long."""
    worker = subprocess.Popen(command)
    begin = time.time()
    while True:
        try:
            return worker.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            written = path.stat().st_mtime if path.exists() else begin
            silent = time.time() - max(written, begin)
            if silent > patience or time.time() > until:
                worker.kill()
                worker.wait()
                late = silent <= patience
                return OUT_OF_TIME if late else f"a kill after {silent:.0f} s without progress"


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.until is not None:
        return work(options, State(options.out / f"{options.stem}.json"))
    state = supervise(options, arguments)
    if not state.facts:
        print("no worker got as far as measuring anything")
        return 2
    report = tables.markdown(vars(state))
    (options.out / f"{options.stem}.md").write_text(report)
    print(f"\n{tables.targets_table(vars(state))}\n\nwrote {options.out / options.stem}.json, .md")
    mine = [r["status"] for r in state.records if backend_of(r["contestant"]) is not None]
    return 0 if mine and set(mine) <= {"ok", "cut off"} else 1


if __name__ == "__main__":
    sys.exit(main())
