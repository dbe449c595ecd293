"""What every verification rule gives on the pair shipped here: tokens a target call, wall time.

    python benchmarks/bench_rules.py             # all rules, gamma 2 to 12, T in {0, 0.6, 1}
    python benchmarks/bench_rules.py --quick     # does it run?

Every setting completes the same prompts with the same seeds. Times are of one prompt at a time, the
settings in an order drawn anew for each prompt, so that a busy machine is fair to all; plain
decoding takes its turn too, and prompts are included. Counts come from all prompts in one batch,
each with several seeds: what a request emits does not depend on its batch. Standard errors are over
prompts: the rounds of a prompt are no independent observations.

At temperature 0, block, token, typical and coupled are greedy by contract, so that only greedy,
lenient and top_beta are run there. The second table is Xia et al.'s table 4 (arXiv 2203.16487):
top_beta over beta and tau at temperature 0. *nats* is the mean log-probability that the target at
T = 1 gives to what was emitted: what a rule that is not lossless costs (or, near the top, gains).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import torch.nn.functional as F
from torch import Tensor

import specdec_ext
from specdec_ext import ops, theory
from specdec_ext.commands.pair import Pair, Prompt, find_prompts, left_padded, load_pair
from specdec_ext.contract import rule_names
from specdec_ext.decoding import Burst, Statistics

LOSSLESS = rule_names(chains=True, lossless=True)
#: At T = 0 every other rule is greedy.
AT_ZERO = ("greedy", "lenient", "top_beta")
#: What a rule is run with, beside the defaults of `specdec_ext.generate`.
PARAMETERS = {"lenient": {"lenience": 0.7}}
PLAIN = "plain"


class Setting(NamedTuple):
    """One line of a table; gamma 0 is plain decoding."""

    table: str
    rule: str
    temperature: float
    gamma: int
    parameters: tuple[tuple[str, Any], ...] = ()

    def label(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in self.parameters)
        return f"{self.rule} ({given})" if given else self.rule


class Counts(NamedTuple):
    """What one setting did, all seeds of a prompt together: ``[prompts]`` each."""

    tokens: Tensor
    calls: Tensor
    logprob: Tensor  # sum over the tokens
    acceptance: float


class Result(NamedTuple):
    """A setting on all prompts."""

    setting: Setting
    tokens_per_call: theory.Estimate
    acceptance: float
    ms_per_token: float  # median over prompts
    speedup: float  # median over prompts of plain decoding's time over this one's
    speedup_error: float  # standard error of the mean of the same
    nats: theory.Estimate

    def record(self) -> dict[str, Any]:
        table, rule, temperature, gamma, parameters = self.setting
        numbers = {
            "tokens_per_call": self.tokens_per_call.mean,
            "tokens_per_call_se": self.tokens_per_call.standard_error,
            "accepted_of_tested": self.acceptance,
            "ms_per_token": self.ms_per_token,
            "speedup": self.speedup,
            "speedup_se": self.speedup_error,
            "nats": self.nats.mean,
            "nats_se": self.nats.standard_error,
        }
        return {
            "table": table,
            "rule": rule,
            "temperature": temperature,
            "gamma": gamma,
            **dict(parameters),
            "prompts": self.tokens_per_call.units,
            # JSON has no NaN.
            **{k: round(v, 4) if math.isfinite(v) else None for k, v in numbers.items()},
        }


# ---- settings ------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """List what is run: plain decoding, every rule, and table 4."""
    found = [Setting("rules", PLAIN, t, 0) for t in options.temperature]
    for t, gamma, rule in itertools.product(options.temperature, options.gamma, options.rule):
        if (rule in AT_ZERO) if t == 0 else (rule != "greedy"):
            found.append(Setting("rules", rule, t, gamma, (*PARAMETERS.get(rule, {}).items(),)))
    if "top_beta" in options.rule and 0.0 in options.temperature:
        # beta = 1 is vanilla verification whatever tau.
        pairs = [(1, 1.0), *itertools.product(options.beta, options.tau)]
        found += [
            Setting("table 4", "top_beta", 0.0, options.table_gamma, (("beta", b), ("tau", t)))
            for b, t in pairs
        ]
    return found


# ---- running -------------------------------------------------------------------------------------


def complete(
    pair: Pair, ids: Tensor, mask: Tensor | None, setting: Setting, **options: Any
) -> tuple[Tensor, Statistics]:
    """Generate under a setting; nothing stops a request before its limit."""
    return specdec_ext.generate(
        pair.target,
        pair.draft if setting.gamma else None,
        ids,
        attention_mask=mask,
        gamma=max(setting.gamma, 1),
        temperature=setting.temperature,
        rule=setting.rule if setting.gamma else "block",
        eos_token_id=(),
        **options,
        **dict(setting.parameters),
    )


def count(
    pair: Pair, prompts: Sequence[Prompt], setting: Setting, options: argparse.Namespace
) -> Counts:
    """Complete all prompts, at T > 0 with several seeds each, in one batch."""
    copies = options.replicas if setting.temperature > 0 else 1
    rows = [prompt.ids[0] for prompt in prompts for _ in range(copies)]
    ids, mask = left_padded(rows)
    calls = torch.zeros(len(rows))

    def on_round(bursts: Sequence[Burst]) -> None:
        for burst in bursts:
            calls[burst.request] += 1

    sequences, found = complete(
        pair, ids, mask, setting, max_new_tokens=options.tokens, seeds=options.seed,
        on_round=on_round,
    )  # fmt: skip
    shape = (len(prompts), copies)
    return Counts(
        torch.tensor(found.new_tokens).reshape(shape).sum(1),
        calls.reshape(shape).sum(1),
        logprobs(pair.target, sequences, mask).reshape(shape).sum(1),
        found.accepted_of_tested,
    )


def logprobs(target: Any, sequences: Tensor, mask: Tensor) -> Tensor:
    """Sum of the target's log-probabilities, at T = 1, of all tokens after the prompts ``[B]``."""
    start = mask.shape[1]
    mask = F.pad(mask, (0, sequences.shape[1] - start - 1), value=1)
    logits = target(
        input_ids=sequences[:, :-1],
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
    ).logits[:, start - 1 :]
    emitted = sequences[:, start:, None]
    return logits.float().log_softmax(-1).gather(-1, emitted).sum((1, 2))


def time_all(
    pair: Pair, prompts: Sequence[Prompt], settings: Sequence[Setting], options: argparse.Namespace
) -> dict[Setting, list[float]]:
    """Seconds a token of every setting, prompt by prompt; Ctrl-C keeps whole prompts."""
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    order = random.Random(options.seed)

    def seconds_per_token(prompt: Prompt, setting: Setting, tokens: int, seed: int) -> float:
        found = complete(pair, prompt.ids, None, setting, max_new_tokens=tokens, seeds=seed)[1]
        return found.decode_seconds / found.emitted

    for setting in settings:  # nothing counts: first calls are slow
        seconds_per_token(prompts[0], setting, setting.gamma + 2, options.seed)
    begin = time.perf_counter()
    try:
        for number, prompt in enumerate(prompts):
            done = {
                setting: seconds_per_token(prompt, setting, options.tokens, options.seed + number)
                for setting in order.sample(settings, len(settings))
            }
            for setting, value in done.items():
                seconds[setting].append(value)
            passed = time.perf_counter() - begin
            print(
                f"timed {prompt.name}: {number + 1} of {len(prompts)}, {passed:.0f} s", flush=True
            )
    except KeyboardInterrupt:
        print(f"interrupted after {len(seconds[settings[0]])} prompts")
    return seconds


# ---- results -------------------------------------------------------------------------------------


def summarize(
    counts: Mapping[Setting, Counts], seconds: Mapping[Setting, Sequence[float]]
) -> list[Result]:
    """Reduce all runs, each beside plain decoding of the same prompts at its temperature."""
    plain = {s.temperature: found for s, found in seconds.items() if s.rule == PLAIN}
    results = []
    for setting, found in counts.items():
        own = seconds[setting]
        ratios = [p / s for p, s in zip(plain[setting.temperature], own, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
        results.append(
            Result(
                setting,
                theory.ratio(found.tokens, found.calls),
                found.acceptance,
                1e3 * statistics.median(own),
                statistics.median(ratios),
                error,
                theory.ratio(found.logprob, found.tokens),
            )
        )
    return results


def block_over_token(counts: Mapping[Setting, Counts]) -> list[str]:
    """Compare the two on the same prompts: block accepts more if any lossless rule does."""
    lines = []
    for setting, block in counts.items():
        token = counts.get(setting._replace(rule="token"))
        if setting.rule != "block" or token is None:
            continue
        a, b = (found.tokens / found.calls for found in (block, token))
        gain = theory.ratio(a - b, torch.ones(len(a)))
        lines.append(
            f"T {setting.temperature}, gamma {setting.gamma}: block - token = {gain.mean:+.3f} "
            f"({gain.standard_error:.3f}) tokens a call"
        )
    return lines


def verdict(results: Sequence[Result]) -> list[str]:
    """Say which default is best: the lossless rule and gamma with the best speed-up."""
    lines = []
    scores: dict[tuple[str, int], list[float]] = {}
    of_rules = [r for r in results if r.setting.table == "rules" and r.setting.gamma]
    temperatures = sorted({r.setting.temperature for r in of_rules})
    for t in temperatures:
        found = [r for r in of_rules if r.setting.temperature == t]
        lossless = [r for r in found if r.setting.rule in LOSSLESS]
        for result in lossless:
            # Greedy is what every lossless rule is at temperature 0.
            rules = LOSSLESS if result.setting.rule == "greedy" else (result.setting.rule,)
            for rule in rules:
                scores.setdefault((rule, result.setting.gamma), []).append(result.speedup)
        for name, group in (("lossless", lossless), ("of all", found)):
            if group:
                best = max(group, key=lambda r: r.speedup)
                lines.append(
                    f"T {t}, best {name}: {best.setting.label()}, gamma {best.setting.gamma}: "
                    f"{best.speedup:.2f}x plain decoding, {best.tokens_per_call.mean:.2f} tokens a "
                    f"call, {best.nats.mean:.2f} nats"
                )
    whole = {
        k: statistics.geometric_mean(v) for k, v in scores.items() if len(v) == len(temperatures)
    }
    if whole:
        rule, gamma = max(whole, key=lambda k: whole[k])
        lines.append(
            f"best default over all temperatures: rule {rule}, gamma {gamma} "
            f"(geometric mean of the speed-ups {whole[rule, gamma]:.2f}x)"
        )
    return lines


def with_error(estimate: theory.Estimate) -> str:
    return f"{estimate.mean:.2f} ({estimate.standard_error:.2f})"


def rules_table(results: Sequence[Result]) -> str:
    """All rules: one line a setting."""
    header = [
        "rule",
        "T",
        "gamma",
        "tokens a call (se)",
        "accepted of tested",
        "ms a token",
        "speed-up (se)",
        "nats (se)",
    ]
    rows = [
        [
            r.setting.label(),
            str(r.setting.temperature),
            str(r.setting.gamma),
            with_error(r.tokens_per_call),
            f"{r.acceptance:.2f}",
            f"{r.ms_per_token:.2f}",
            f"{r.speedup:.2f} ({r.speedup_error:.2f})",
            with_error(r.nats),
        ]
        for r in results
        if r.setting.table == "rules"
    ]
    return common.markdown_table(header, rows)


def beta_table(results: Sequence[Result]) -> str:
    """Table 4 of Xia et al.: tokens a call, speed-up and nats of each beta and tau."""
    cells = {
        (dict(r.setting.parameters)["beta"], dict(r.setting.parameters)["tau"]): (
            f"{with_error(r.tokens_per_call)}, {r.speedup:.2f}x, {r.nats.mean:.2f}"
        )
        for r in results
        if r.setting.table == "table 4"
    }
    betas = sorted({beta for beta, _ in cells} - {1})
    taus = sorted({tau for beta, tau in cells if beta != 1})
    rows = [["vanilla (beta 1)", *[cells[1, 1.0]] * len(betas)]] if betas else []
    rows += [[str(tau), *(cells[beta, tau] for beta in betas)] for tau in taus]
    return common.markdown_table(["tau", *(f"beta {beta}" for beta in betas)], rows)


def plot(path: Path, results: Sequence[Result]) -> bool:
    """Draw tokens a call and speed-up over gamma, a column a temperature; then table 4."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in results if r.setting.table == "rules" and r.setting.gamma]
    temperatures = sorted({r.setting.temperature for r in shown})
    betas: dict[str, list[tuple[float, Result]]] = {}
    for r in results:
        if r.setting.table == "table 4":
            given = dict(r.setting.parameters)
            betas.setdefault(f"beta {given['beta']}", []).append((given["tau"], r))
    columns = len(temperatures) + bool(betas)
    figure, axes = pyplot.subplots(2, columns, figsize=(4 * columns, 7), squeeze=False)

    def lines(column: int, title: str, xlabel: str, groups: Mapping[str, Sequence[Any]]) -> None:
        """Each group: (x, result) points."""
        top, bottom = axes[0][column], axes[1][column]
        for name, points in groups.items():
            x = [at for at, _ in points]
            found = [result for _, result in points]
            top.errorbar(
                x,
                [r.tokens_per_call.mean for r in found],
                [r.tokens_per_call.standard_error for r in found],
                marker="o",
                ms=4,
                capsize=2,
                label=name,
            )
            bottom.errorbar(
                x,
                [r.speedup for r in found],
                [r.speedup_error for r in found],
                marker="o",
                ms=4,
                capsize=2,
                label=name,
            )
        top.set_title(title, fontsize=10)
        top.set_ylabel("tokens a target call")
        bottom.set_ylabel("speed-up over plain decoding")
        bottom.set_xlabel(xlabel)
        bottom.axhline(1.0, color="0.6", lw=0.8)
        for each in (top, bottom):
            each.grid(alpha=0.3)
        top.legend(fontsize=7)

    for column, t in enumerate(temperatures):
        groups: dict[str, list[tuple[float, Result]]] = {}
        for r in shown:
            if r.setting.temperature == t:
                groups.setdefault(r.setting.label(), []).append((r.setting.gamma, r))
        lines(column, f"T = {t}", "gamma", groups)
    if betas:
        lines(columns - 1, "top_beta, T = 0", "tau", betas)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


# ---- the command ---------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is not given depends on the mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two prompts, few tokens and settings")
    parser.add_argument("--prompts", type=int, help="how many held-out modules are begun")
    parser.add_argument("--tokens", type=int, help="new tokens of each")
    parser.add_argument("--replicas", type=int, help="seeds of each prompt, for the counts")
    parser.add_argument("--gamma", type=int, nargs="+")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--rule", nargs="+", choices=ops.RULES, default=list(ops.RULES))
    parser.add_argument("--beta", type=int, nargs="+")
    parser.add_argument("--tau", type=float, nargs="+")
    parser.add_argument("--table-gamma", type=int, default=8, help="of table 4")
    parser.add_argument("--threads", type=int, default=common.cores())
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a calm")
    parser.add_argument("--seed", type=int, help="of the tokens; fresh by default")
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--suffix", default="", help="of the files' names")
    options = parser.parse_args(arguments)
    quick = options.quick
    defaults = {
        "prompts": 2 if quick else 8,
        "tokens": 12 if quick else 40,
        "replicas": 2 if quick else 4,
        "gamma": [2, 4] if quick else [2, 4, 8, 12],
        "beta": [3] if quick else [3, 5],
        "tau": [1.0, 3.0] if quick else [1.0, 2.0, 3.0, 4.0, 5.0],
        "seed": int.from_bytes(os.urandom(3), "little"),
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module's text."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    common.wait_until_calm(0.1, options.patience)
    load, begin = common.Load(), time.perf_counter()
    facts = {**common.machine_facts(), "seed": options.seed}
    facts["command"] = " ".join(["bench_rules.py", *(arguments or sys.argv[1:])])
    for name, value in facts.items():
        print(f"{name}: {value}")
    pair = load_pair()
    prompts = find_prompts(pair)[: options.prompts]
    settings = settings_of(options)
    print(
        f"{len(settings)} settings, {len(prompts)} prompts, {options.tokens} tokens\n", flush=True
    )
    counts = {setting: count(pair, prompts, setting, options) for setting in settings}
    print(f"counted after {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time_all(pair, prompts, settings, options)
    if not seconds[settings[0]]:
        return 1
    results = summarize(counts, seconds)
    facts |= {
        "prompts": [prompt.name for prompt in prompts],
        "tokens": options.tokens,
        "replicas": options.replicas,
        "verdict": [*verdict(results), *block_over_token(counts)],
        "seconds": round(time.perf_counter() - begin, 1),
        "others_cpu_share": load.share(),
    }
    tables = rules_table(results)
    if any(r.setting.table == "table 4" for r in results):
        caption = f"top_beta, T 0, gamma {options.table_gamma}: tokens a call (se), speed-up, nats"
        tables += f"\n\n{caption}\n\n{beta_table(results)}"
    text = "\n".join([tables, "", *facts["verdict"]])
    print(f"\n{text}")
    write_results(options, facts, results, text)
    return 0


def write_results(
    options: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[Result], text: str
) -> None:
    """Write the record: JSON and CSV, the tables, the plot."""
    name = f"rules-cpu-{time.strftime('%Y-%m-%d', time.gmtime())}"
    stem = options.output / (name + ("-quick" if options.quick else "") + options.suffix)
    records = [result.record() for result in results]
    common.write_record(stem, facts, records, text)
    plotted = plot(stem.with_suffix(".png"), results)
    print(f"\nwritten: {stem}.json, .csv, .md{', .png' if plotted else ' (matplotlib is missing)'}")


if __name__ == "__main__":
    sys.exit(main())
