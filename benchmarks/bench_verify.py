"""Time `specdec_ext.verify` against eager PyTorch, torch.compile and transformers, side by side.

    python benchmarks/bench_verify.py --bars     # the targets of the project, PASS or FAIL
    python benchmarks/bench_verify.py --quick    # the same and a few more, under four minutes
    python benchmarks/bench_verify.py            # the whole grid: hours

Everything that is timed has first been compared with the float64 reference on the same fresh
random inputs: the operator and every baseline must emit the reference's tokens from the same coins
(or differ only where float64 sees a tie); what does not is not timed, and the exit code is 1. What
is timed draws the last token with ``torch.multinomial``; for the comparison that is replaced by an
inverse CDF (`baselines.GivenRandomness`). Compiled baselines are compared with their eager form
under the same torch seed.

Inputs rotate over several sets, together larger than most caches. Columns: ``min`` and ``median``
in milliseconds; ``ratio`` = baseline / operator; ``floor %`` = the time of reading every row that
the rule needs, and once more what the last draw reads, over the operator's median: at the speed of
a plain read (``amax``) of the same memory, taken by turns with the rest; ``x exp`` = the operator's
median over one `row_law` of all 2 gamma + 1 rows, a vectorised sum of exponentials; ``others %`` =
the share of the CPUs that other processes used while a setting was timed (it is timed again, up to
``--retries`` times, if that is not small).

Acceptance: ``full``: draft logits = target logits, so that every row is read (a block then needs no
residual masses: its inflow stays 1). ``0.7``: noise on the draft such that sum min(p, q) is near
0.7, tokens drawn from the (filtered) draft law. ``masses``: the same with draft tokens of p/q just
below 1, so that a block needs every residual mass.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext import reference
from specdec_ext.testing import VerifyCase, VerifyOutcome, assert_tokens_match

sys.path.insert(0, str(Path(__file__).resolve().parent))

import baselines  # noqa: E402
import common  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGIT_SCALE = 3.0  # of randn: about the spread of a language model's logits
ALPHA = 0.7
TOP_K, TOP_P = 50, 0.9
BASELINE_TOLERANCE = 3e-5  # of decisions: they sum and subtract fp32 probabilities
CALM = 0.04  # share of the CPUs that others may use without another attempt

#: What the operator is given.
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k+top_p": {"top_k": TOP_K, "top_p": TOP_P},
    "top_p": {"top_p": TOP_P},
}
#: The laws of the eager baselines with these filters, by baseline.
LAWS: dict[str, dict[str, baselines.Probs]] = {
    "none": {"eager": baselines.softmax_probs},
    "top_k+top_p": {
        "eager sort": partial(baselines.sort_probs, top_k=TOP_K, top_p=TOP_P),
        "eager topk": partial(baselines.topk_probs, top_k=TOP_K, top_p=TOP_P),
    },
    "top_p": {"eager sort": partial(baselines.sort_probs, top_p=TOP_P)},
}
OURS, EXPONENTIALS, READ = "specdec_ext", "row_law", "read"
BASELINES = ("eager", "eager sort", "eager topk", "compile", "transformers", "logsumexp")


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    rule: str
    batch: int
    gamma: int
    vocab: int
    dtype: str
    filters: str
    acceptance: str

    def label(self) -> str:
        """Say it on one line."""
        filters = "" if self.filters == "none" else f" {self.filters}"
        return (
            f"{self.rule}{filters} B={self.batch} gamma={self.gamma} V={self.vocab} "
            f"{self.dtype} acceptance={self.acceptance}"
        )


def bar(setting: Setting, baseline: str) -> float | None:
    """Give the ratio that the project asks for, None where it asks for none."""
    if setting.filters == "none" and baseline == "eager":
        return 8.0 if setting.rule == "block" else 12.0 if setting.batch >= 8 else 10.0
    wanted = {
        ("top_k+top_p", "eager sort"): 100.0,
        ("top_k+top_p", "eager topk"): 5.0,
        ("top_p", "eager sort"): 30.0,
    }
    return wanted.get((setting.filters, baseline))


# -------------------------------------------------------------------------------------------------
# Inputs
# -------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """One set of inputs; `target` and `draft` are contiguous parts of `rows`."""

    rows: Tensor  # [B * (2G+1), V]
    target: Tensor  # [B, G+1, V]
    draft: Tensor  # [B, G, V]
    tokens: Tensor  # [B, G]
    uniforms: Tensor  # [B, G+1]
    parameters: dict[str, Any]  # [B] tensors

    def arguments(self, rule: str) -> dict[str, Any]:
        """Give what `specdec_ext.verify` is called with."""
        return {
            "target_logits": self.target,
            "draft_tokens": self.tokens,
            "draft_logits": self.draft,
            "uniforms": self.uniforms,
            "rule": rule,
            **self.parameters,
        }

    def baseline_arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give what a baseline is called with."""
        return self.target, self.tokens, self.draft, self.uniforms


def parameter_tensors(filters: str, batch: int) -> dict[str, Any]:
    """Make [B] tensors of the filters."""
    dtypes = {"top_k": torch.int64}
    return {
        name: torch.full((batch,), value, dtype=dtypes.get(name, torch.float32))
        for name, value in FILTERS[filters].items()
    }


def mean_acceptance(target: Tensor, draft: Tensor, filters: str) -> float:
    """Average sum min(p, q) over rows [R, V]."""
    parameters = parameter_tensors(filters, len(target))
    return float(specdec_ext.acceptance(target, draft, **parameters).mean())


@cache
def noise_for(alpha: float, vocab: int, dtype: torch.dtype, filters: str) -> float:
    """Find the noise on the draft's logits that gives this acceptance, by bisection."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(32, vocab, generator=generator) * LOGIT_SCALE
    noise = torch.randn(32, vocab, generator=generator)
    low, high = 0.0, 4.0
    for _ in range(10):
        middle = (low + high) / 2
        draft = (target + middle * noise).to(dtype)
        if mean_acceptance(target.to(dtype), draft, filters) > alpha:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def near_misses(target: Tensor, draft: Tensor, filters: str, generator: torch.Generator) -> Tensor:
    """Draw 32 tokens a row [R, V] from the draft's law, keep the one of p/q closest below 1."""
    q_law, p_law = (
        specdec_ext.row_law(t, **parameter_tensors(filters, len(t))) for t in (draft, target)
    )
    draws = []
    for _ in range(32):
        u = torch.rand(len(draft), dtype=torch.float64, generator=generator)
        draws.append(specdec_ext.sample(draft, u, **parameter_tensors(filters, len(u))).tokens)
    tokens = torch.stack(draws, -1)
    log_ratio = (target.gather(-1, tokens).double() - p_law.max[:, None] - p_law.log_z[:, None]) - (
        draft.gather(-1, tokens).double() - q_law.max[:, None] - q_law.log_z[:, None]
    )
    best = log_ratio.masked_fill(log_ratio > -1e-3, -torch.inf).argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)


def make_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    """Draw one set of inputs."""
    s, dtype = setting, DTYPES[setting.dtype]
    rows = torch.randn(s.batch * (2 * s.gamma + 1), s.vocab, generator=generator)
    rows = rows.mul_(LOGIT_SCALE).to(dtype)
    target = rows[: s.batch * (s.gamma + 1)].view(s.batch, s.gamma + 1, s.vocab)
    draft = rows[s.batch * (s.gamma + 1) :].view(s.batch, s.gamma, s.vocab)
    draft.copy_(target[:, :-1])
    if s.acceptance != "full":
        noise = torch.randn(draft.shape, generator=generator)
        draft.add_(noise.mul_(noise_for(ALPHA, s.vocab, dtype, s.filters)).to(dtype))
    flat = draft.reshape(-1, s.vocab)
    if s.acceptance == "masses":
        tokens = near_misses(target[:, :-1].reshape(flat.shape), flat, s.filters, generator)
    else:
        u = torch.rand(len(flat), dtype=torch.float64, generator=generator)
        tokens = specdec_ext.sample(flat, u, **parameter_tensors(s.filters, len(u))).tokens
    uniforms = torch.rand(s.batch, s.gamma + 1, dtype=torch.float64, generator=generator)
    tokens = tokens.view(s.batch, s.gamma)
    return Inputs(rows, target, draft, tokens, uniforms, parameter_tensors(s.filters, s.batch))


def number_of_sets(setting: Setting) -> int:
    """Choose how many sets to rotate over: about 64 MB, 3 to 8 of them."""
    row_bytes = setting.vocab * DTYPES[setting.dtype].itemsize
    set_bytes = setting.batch * (2 * setting.gamma + 1) * row_bytes
    return min(max((64 << 20) // set_bytes, 3), 8)


# -------------------------------------------------------------------------------------------------
# Equality first
# -------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The float64 reference of the first requests of a set."""

    case: VerifyCase
    outcome: VerifyOutcome  # with the accept_probs of all positions

    def until(self, accepted: Tensor) -> VerifyOutcome:
        """Give the outcome with the accept_probs that an outcome of so many accepted reports."""
        if self.case.inputs["rule"] == "block":
            return self.outcome
        place = torch.arange(self.case.gamma)
        probs = self.outcome.accept_probs.where(place <= accepted[:, None], torch.nan)
        return self.outcome._replace(accept_probs=probs)


def expect(inputs: Inputs, rule: str, requests: int | None) -> Expected:
    """Ask the reference; the number of requests bounds its cost (None: all)."""
    case = VerifyCase(inputs.arguments(rule), f"{rule} benchmark")
    if requests is not None and requests < case.batch:
        case = case.select(range(requests))
    return Expected(case, case.replace(full_accept_probs=True).run(reference.verify))


def check_operator(inputs: Inputs, rule: str, expected: Expected) -> int:
    """Compare the operator with the reference; gives the number of ties excused."""
    found = specdec_ext.verify(**inputs.arguments(rule))
    first = VerifyOutcome(*(t[: expected.case.batch] for t in found))
    wanted = expected.until(expected.outcome.num_accepted)
    return assert_tokens_match(first, wanted, expected.case)


def check_baseline(baseline: baselines.Baseline, inputs: Inputs, expected: Expected) -> int:
    """Compare a baseline, given the same randomness; gives the number of ties excused."""
    with baselines.GivenRandomness(inputs.uniforms):
        verdict = baseline(*inputs.baseline_arguments())
    wanted = expected.until(expected.outcome.num_accepted)
    found = _outcome(verdict, expected)
    return assert_tokens_match(found, wanted, expected.case, BASELINE_TOLERANCE)


def _outcome(verdict: baselines.Verdict, expected: Expected) -> VerifyOutcome:
    """Complete a verdict: what a baseline does not report is right by definition."""
    case, wanted = expected
    n = case.batch
    tokens, accepted = verdict.tokens[:n], verdict.num_accepted[:n].to(torch.int32)
    logprobs = wanted.logprobs.clone()
    for b in (tokens != wanted.tokens).any(-1).nonzero().flatten().tolist():
        logprobs[b] = torch.nan
        for i, token in enumerate(tokens[b, : int(accepted[b]) + 1].tolist()):
            logprobs[b, i] = _law(case, b, i)[token].log()
    return expected.until(accepted)._replace(
        tokens=tokens, num_accepted=accepted, logprobs=logprobs
    )


def _law(case: VerifyCase, request: int, row: int) -> Tensor:
    names = [n for n in ("top_k", "top_p") if n in case.inputs]
    parameters = {name: case.inputs[name][request].item() for name in names}
    return reference.law(case.inputs["target_logits"][request, row], **parameters)


def check_compiled(compiled: baselines.Baseline, eager: baselines.Baseline, x: Inputs) -> None:
    """Compare compiled with eager: same coins, same torch seed, so the same tokens."""
    outcomes = []
    for verifier in (compiled, eager):
        torch.manual_seed(0)
        outcomes.append(verifier(*x.baseline_arguments()))
    if not all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)):
        raise AssertionError("torch.compile changes the tokens")


# -------------------------------------------------------------------------------------------------
# Running
# -------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What was seen at one setting."""

    setting: Setting
    timings: dict[str, common.Timing]
    alpha: float
    accepted: float
    reads: float  # what must be read, in units of all 2G+1 rows of all requests
    excused: int
    others: float | None

    def ratio(self, baseline: str) -> tuple[float, float]:
        """Give (by medians, by minima)."""
        ours, theirs = self.timings[OURS], self.timings[baseline]
        return theirs.median / ours.median, theirs.min / ours.min

    def floor(self) -> float:
        """Give the seconds of reading alone."""
        return self.reads * self.timings[READ].median

    def floor_percent(self) -> float:
        """Say how close to reading alone."""
        return 100 * self.floor() / self.timings[OURS].median

    def over_exponentials(self) -> float:
        """Say how far from one sum of exponentials of every row."""
        return self.timings[OURS].median / self.timings[EXPONENTIALS].median

    def mark(self, baseline: str) -> str:
        """PASS, FAIL, or which of the two statistics passes; empty where nothing is asked."""
        wanted = bar(self.setting, baseline)
        if wanted is None:
            return ""
        median, minimum = (ratio >= wanted for ratio in self.ratio(baseline))
        return {(True, True): "PASS", (False, False): "FAIL"}.get(
            (median, minimum), "pass by median" if median else "pass by minimum"
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """Give one flat record a contestant."""
        for name, timing in self.timings.items():
            median, minimum = self.ratio(name)
            yield {
                **asdict(self.setting),
                "contestant": name,
                "calls": timing.calls,
                "min_ms": round(timing.min * 1e3, 5),
                "median_ms": round(timing.median * 1e3, 5),
                "p90_ms": round(timing.p90 * 1e3, 5),
                "ratio_median": round(median, 3),
                "ratio_min": round(minimum, 3),
                "bar": bar(self.setting, name),
                "mark": self.mark(name),
                "floor_ms": round(self.floor() * 1e3, 5),
                "floor_percent": round(100 * self.floor() / timing.median, 2),
                "alpha": round(self.alpha, 4),
                "mean_accepted": round(self.accepted, 3),
                "ties_excused": self.excused,
                "others_cpu_share": None if self.others is None else round(self.others, 3),
            }


@cache
def compiled_rule(rule: str, law: baselines.Probs) -> baselines.Baseline:
    """Compile an eager verifier, for static shapes (the fastest code)."""
    return torch.compile(partial(baselines.RULES[rule], probs=law), dynamic=False)


def eager_baselines(setting: Setting, wanted: Sequence[str]) -> dict[str, baselines.Baseline]:
    """List the baselines that run as they are, by name."""
    rule = baselines.RULES[setting.rule]
    found: dict[str, baselines.Baseline] = {
        name: partial(rule, probs=law)
        for name, law in LAWS[setting.filters].items()
        if name in wanted
    }
    plain_token = setting.rule == "token" and setting.filters == "none"
    if "transformers" in wanted and plain_token and setting.batch == 1:
        found["transformers"] = baselines.verify_transformers
    return found


def compiled_baselines(setting: Setting, wanted: Sequence[str]) -> dict[str, baselines.Baseline]:
    """Compile the fastest eager law of the setting."""
    if "compile" not in wanted:
        return {}
    law = list(LAWS[setting.filters].values())[-1]
    return {"compile": compiled_rule(setting.rule, law)}


def rows_to_read(accepted: Tensor, setting: Setting) -> float:
    """Count the rows that must be read, per call: laws, and the last draw's once more."""
    gamma = setting.gamma
    n = accepted.double()
    if setting.rule == "block":
        laws = torch.full_like(n, 2 * gamma + 1)
    else:
        laws = (n + 1) + (n + 1).clamp(max=gamma)
    again = torch.where(n == gamma, 1.0, 2.0)
    return float((laws + again).sum())


def check_all(
    setting: Setting,
    inputs: Inputs,
    eager: dict[str, baselines.Baseline],
    compiled: dict[str, baselines.Baseline],
    requests: int | None,
) -> int:
    """Compare everything that will be timed; gives the number of ties excused."""
    expected = expect(inputs, setting.rule, requests)
    excused = check_operator(inputs, setting.rule, expected)
    for baseline in eager.values():
        excused += check_baseline(baseline, inputs, expected)
    for baseline in compiled.values():
        law = list(LAWS[setting.filters].values())[-1]
        check_compiled(baseline, partial(baselines.RULES[setting.rule], probs=law), inputs)
    return excused


def contestants(
    setting: Setting, sets: Sequence[Inputs], verifiers: dict[str, baselines.Baseline], lse: bool
) -> dict[str, common.Contestant]:
    """Make what is timed; call i works on set i modulo their number."""
    arguments = [inputs.arguments(setting.rule) for inputs in sets]
    given = [inputs.baseline_arguments() for inputs in sets]
    plain = [common.as_words(inputs.rows) for inputs in sets]
    n = len(sets)

    def turns(verifier: baselines.Baseline) -> common.Contestant:
        return lambda i: verifier(*given[i % n])

    found: dict[str, common.Contestant] = {
        OURS: lambda i: specdec_ext.verify(**arguments[i % n]),
        EXPONENTIALS: lambda i: torch.ops.specdec.row_law(sets[i % n].rows),
        READ: lambda i: plain[i % n].amax(),
        **{name: turns(verifier) for name, verifier in verifiers.items()},
    }
    if lse and setting.filters == "none":
        found["logsumexp"] = lambda i: torch.logsumexp(sets[i % n].rows, -1)
    return found


def measure_calmly(
    timed: dict[str, common.Contestant], options: argparse.Namespace
) -> tuple[dict[str, common.Timing], float | None]:
    """Time them; again while others use the machine, to keep the calmest of a few attempts."""
    attempts = []
    for _ in range(1 + options.retries):
        common.wait_until_calm(CALM, options.patience)
        load = common.Load()
        timings = common.measure(timed, budget=options.budget, min_rounds=options.min_rounds)
        attempts.append((timings, load.share()))
        if (attempts[-1][1] or 0.0) < CALM:
            break
    return min(attempts, key=lambda attempt: attempt[1] or 0.0)


def run_setting(
    setting: Setting,
    wanted: Sequence[str],
    options: argparse.Namespace,
    generator: torch.Generator,
) -> Result:
    """Check, then time, one setting."""
    sets = [make_inputs(setting, generator) for _ in range(number_of_sets(setting))]
    eager = eager_baselines(setting, wanted)
    compiled = compiled_baselines(setting, wanted)
    excused = check_all(setting, sets[0], eager, compiled, options.check_requests)

    rows, accepted, alphas = 0.0, 0.0, []
    for inputs in sets:
        found = specdec_ext.verify(**inputs.arguments(setting.rule)).num_accepted
        rows += rows_to_read(found, setting) / len(sets)
        accepted += float(found.double().mean()) / len(sets)
        target = inputs.target[:, :-1].flatten(0, 1)
        alphas.append(mean_acceptance(target, inputs.draft.flatten(0, 1), setting.filters))

    timings, others = measure_calmly(
        contestants(setting, sets, {**eager, **compiled}, "logsumexp" in wanted), options
    )
    return Result(
        setting,
        timings,
        sum(alphas) / len(alphas),
        accepted,
        rows / len(sets[0].rows),
        excused,
        others,
    )


# -------------------------------------------------------------------------------------------------
# What to run
# -------------------------------------------------------------------------------------------------

Job = tuple[Setting, tuple[str, ...]]
EAGER = ("eager", "eager sort", "eager topk", "logsumexp")


def bar_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """List the settings of the bars."""
    shapes = itertools.product(options.dtype, options.batch, options.gamma, options.vocab)
    for dtype, batch, gamma, vocab in shapes:
        for rule, filters, acceptance in (
            ("token", "none", "full"),
            ("token", "none", "0.7"),
            ("block", "none", "full"),
            ("block", "none", "0.7"),
            ("block", "none", "masses"),
            ("token", "top_k+top_p", "full"),
            ("token", "top_k+top_p", "0.7"),
            ("token", "top_p", "full"),
            ("token", "top_p", "0.7"),
        ):
            setting = Setting(rule, batch, gamma, vocab, dtype, filters, acceptance)
            yield setting, tuple(b for b in EAGER if b in options.baselines)


def quick_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Add torch.compile (float32, no filters) and transformers (B = 1) to the bars."""
    for setting, wanted in bar_jobs(options):
        more = []
        if setting.filters == "none" and setting.acceptance == "0.7":
            if setting.dtype == "float32":
                more.append("compile")
            more.append("transformers")
        yield setting, (*wanted, *(b for b in more if b in options.baselines))


def grid_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """List the whole grid."""
    for point in itertools.product(
        options.dtype,
        options.filters,
        options.rule,
        options.vocab,
        options.gamma,
        options.batch,
        options.acceptance,
    ):
        dtype, filters, rule, vocab, gamma, batch, acceptance = point
        setting = Setting(rule, batch, gamma, vocab, dtype, filters, acceptance)
        yield setting, tuple(options.baselines)


MODES: dict[str, Callable[[argparse.Namespace], Iterable[Job]]] = {
    "bars": bar_jobs,
    "quick": quick_jobs,
    "grid": grid_jobs,
}


# -------------------------------------------------------------------------------------------------
# Reports
# -------------------------------------------------------------------------------------------------


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def comparisons(result: Result) -> list[str]:
    """List the contestants that the operator is compared with."""
    return [name for name in result.timings if name not in (OURS, EXPONENTIALS, READ, "logsumexp")]


def report_line(result: Result) -> str:
    """Say what was seen at one setting, while it runs."""
    ours = result.timings[OURS]
    parts = [f"{result.setting.label()}: {_ms(ours.min)}/{_ms(ours.median)} ms"]
    for name in comparisons(result):
        median, minimum = result.ratio(name)
        parts.append(f"{name} x{minimum:.1f}/{median:.1f} {result.mark(name)}".rstrip())
    parts.append(f"{result.over_exponentials():.2f} x exp, floor {result.floor_percent():.0f} %")
    if result.others is not None and result.others > 0.02:
        parts.append(f"others used {100 * result.others:.0f} % of the CPU")
    return "; ".join(parts)


def bars_table(results: Sequence[Result]) -> str:
    """Make the table of the bars: one row a setting and baseline."""
    header = (
        ["rule, filters", "acceptance", "dtype", "B", "specdec ms min", "median"]
        + ["baseline", "ms min", "median", "ratio min", "median", "bar", "mark"]
        + ["x exp", "floor %", "alpha", "accepted", "others %"]
    )
    rows = []
    for result in results:
        s, ours = result.setting, result.timings[OURS]
        for name in comparisons(result):
            wanted = bar(s, name)
            theirs = result.timings[name]
            median, minimum = result.ratio(name)
            rows.append(
                [
                    s.rule if s.filters == "none" else f"{s.rule}, {s.filters}",
                    *(s.acceptance, s.dtype, str(s.batch), _ms(ours.min), _ms(ours.median)),
                    *(name, _ms(theirs.min), _ms(theirs.median)),
                    *(f"{minimum:.1f}", f"{median:.1f}"),
                    "" if wanted is None else f"{wanted:.0f}",
                    result.mark(name),
                    f"{result.over_exponentials():.2f}",
                    f"{result.floor_percent():.0f}",
                    *(f"{result.alpha:.2f}", f"{result.accepted:.2f}"),
                    "" if result.others is None else f"{100 * result.others:.0f}",
                ]
            )
    return common.markdown_table(header, rows)


def readme_table(results: Sequence[Result]) -> str:
    """Make the short table for the README: medians at acceptance 0.7, one row a setting."""
    header = ["rule, filters, dtype, B", "specdec_ext ms"]
    names = [n for n in BASELINES if any(n in comparisons(r) for r in results)]
    header += [f"{name} ms (ratio)" for name in names] + ["% of the read floor"]
    rows = []
    for result in results:
        s = result.setting
        if s.acceptance != "0.7":
            continue
        rule = s.rule if s.filters == "none" else f"{s.rule}, {s.filters}"
        cells = [f"{rule}, {s.dtype}, {s.batch}", _ms(result.timings[OURS].median)]
        for name in names:
            timing = result.timings.get(name)
            found = "" if timing is None else f"{_ms(timing.median)} ({result.ratio(name)[0]:.1f}x)"
            cells.append(found)
        rows.append([*cells, f"{result.floor_percent():.0f}"])
    return common.markdown_table(header, rows)


def plot(path: Path, results: Sequence[Result], title: str) -> bool:
    """Draw the medians of up to 40 settings, the operator's and the baselines'."""
    chosen = results[:: len(results) // 40 + 1]
    names = [OURS, *(n for n in BASELINES if any(n in r.timings for r in chosen))]
    series: dict[str, list[float | None]] = {
        name: [r.timings[name].median * 1e3 if name in r.timings else None for r in chosen]
        for name in names
    }
    series["read floor"] = [r.floor() * 1e3 for r in chosen]
    return common.plot_times(path, [r.setting.label() for r in chosen], series, title)


def write_results(
    options: argparse.Namespace, facts: dict[str, Any], results: Sequence[Result]
) -> None:
    """Write JSON, CSV and, with matplotlib, a plot."""
    mode = "" if options.mode == "grid" else f"-{options.mode}"
    stem = options.output / f"verify-cpu-{facts['time'][:10]}{mode}{options.suffix}"
    records = [record for result in results for record in result.records()]
    common.write_record(stem, facts, records)
    title = f"verify, {facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}"
    if not results:
        print(f"\nwrote {stem}.json, .csv")
    elif plot(stem.with_suffix(".png"), results, title):
        print(f"\nwrote {stem}.json, .csv, .png")
    else:
        print(f"\nwrote {stem}.json, .csv; no plot: matplotlib is missing (the extra `bench`)")


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is not given depends on the mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    mode = parser.add_mutually_exclusive_group()
    for name in ("bars", "quick"):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    parser.set_defaults(mode="grid")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--gamma", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, nargs="+")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--rule", nargs="+", choices=baselines.RULES, default=["token", "block"])
    parser.add_argument("--filters", nargs="+", choices=FILTERS, default=list(FILTERS))
    acceptances = ["full", "0.7", "masses"]
    parser.add_argument("--acceptance", nargs="+", choices=acceptances, default=["0.7"])
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--threads", type=int, default=common.cores())
    parser.add_argument("--budget", type=float, default=0.4, help="seconds of timing a setting")
    parser.add_argument("--retries", type=int, default=2, help="where others use the CPU meanwhile")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a calm")
    parser.add_argument("--min-rounds", type=int, default=5)
    parser.add_argument("--check-requests", type=int, help="compare only the first ones")
    parser.add_argument("--seed", type=int, help="of the inputs; fresh by default")
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--suffix", default="", help="of the files' names")
    options = parser.parse_args(arguments)
    whole = options.mode == "grid"
    defaults = {
        "batch": [1, 8, 32] if whole else [1, 8],
        "gamma": [1, 5, 8] if whole else [5],
        "vocab": [32_000, 128_256, 151_936] if whole else [128_256],
        "dtype": list(DTYPES) if whole else ["float32", "bfloat16"],
        "check_requests": 2 if whole else None,
        "seed": int.from_bytes(os.urandom(4), "little"),
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if "transformers" in options.baselines and find_spec("transformers") is None:
        print("transformers is missing (the extra `hf`): going on without it")
        options.baselines = [name for name in options.baselines if name != "transformers"]
    return options


def run_all(options: argparse.Namespace, jobs: Sequence[Job]) -> tuple[list[Result], list[str]]:
    """Run settings one after the other, saying what was seen; Ctrl-C keeps what there is.

    Returns
    -------
    results : list of Result
    refused : list of str
        The settings that were not timed because something there emits wrong tokens.
    """
    generator = torch.Generator().manual_seed(options.seed)
    results: list[Result] = []
    refused: list[str] = []
    try:
        for setting, wanted in jobs:
            try:
                results.append(run_setting(setting, wanted, options, generator))
                print(report_line(results[-1]), flush=True)
            except AssertionError as error:
                refused.append(setting.label())
                print(f"{setting.label()}: NOT EQUAL, not timed: {error}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} of {len(jobs)} settings")
    return results, refused


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; see the module's text."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    load, begin = common.Load(), time.perf_counter()
    common.wait_until_calm(CALM, options.patience)
    bandwidth = common.read_bandwidth()
    facts = {**common.machine_facts(), "seed": options.seed}
    facts["read_bandwidth_gb_s"] = round(bandwidth / 1e9, 2)
    facts["command"] = " ".join(["bench_verify.py", *(arguments or sys.argv[1:])])
    for name, value in facts.items():
        print(f"{name}: {value}")
    print("per setting: operator min/median; baselines by ratio of min/median\n", flush=True)

    jobs = list(MODES[options.mode](options))
    results, refused = run_all(options, jobs)
    facts["refused"] = refused
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    facts["others_cpu_share"] = load.share()
    if options.mode != "grid":
        print(f"\n{bars_table(results)}")
    print(f"\n{readme_table(results)}")
    marks = [result.mark(name) for result in results for name in comparisons(result)]
    asked = [mark for mark in marks if mark]
    print(f"\n{asked.count('PASS')} of {len(asked)} bars pass by minimum and by median")
    write_results(options, facts, results)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
