"""`specdec_ext.generate` against plain decoding and transformers' assisted generation.

    python benchmarks/bench_generate.py                                  # the pair shipped here
    python benchmarks/bench_generate.py --target FOLDER --draft FOLDER   # local checkpoints
    python benchmarks/bench_generate.py --target smollm2 --drafters lookup suffix    # no draft
    python benchmarks/bench_generate.py --quick                          # does it run?

Every contestant completes the same prompts, one after another in an order drawn anew for each
prompt, so that a busy machine is fair to all; a time is that of the whole call, prefill included.
Before anything counts, greedy output of all is compared with plain decoding: what differs by more
than a tie is not timed, and the exit code is 1. A contestant's seconds are the sum over the prompts
of the median over the repeats; *speed-up* is plain decoding's over the contestant's. *Loop* is the
share of a decoding step that is neither model: verification, cache rollback, bookkeeping.

Bars, on 2 CPU cores with the shipped pair at batch 1: faster than plain decoding; 1.5 times as fast
as transformers' assisted generation at equal gamma; the loop under 10 %; the renewal policy at
least 0.97 times as fast as the best fixed gamma.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec_ext.commands import check
from specdec_ext.commands.frame import add_pair_arguments
from specdec_ext.commands.pair import Pair, Prompt, find_prompts, left_padded, load_given
from specdec_ext.decoding import RenewalRule

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from contestants import DRAFTERS, Contestant, Run, Setting, ours, theirs  # noqa: E402

PLAIN, RENEWAL, TRANSFORMERS = "plain", "renewal policy", "transformers, plain"


def contestants(pair: Pair, setting: Setting, options: argparse.Namespace) -> dict[str, Contestant]:
    """List who takes part."""
    new, drafts = options.tokens, {}
    if pair.draft is not None:
        drafts[""] = lambda pair: pair.draft
    drafts |= {f"{name}, ": DRAFTERS[name] for name in options.drafters}
    found = {PLAIN: ours(pair, setting, new)}
    for name, draft in drafts.items():
        fixed = {
            f"{name}gamma {g}": ours(pair, setting, new, g, draft=draft) for g in options.gamma
        }
        # One object: it goes on learning from prompt to prompt.
        policy = RenewalRule(limit=max(options.gamma) + 2)
        found |= {**fixed, name + RENEWAL: ours(pair, setting, new, policy, draft=draft)}
    found[TRANSFORMERS] = theirs(pair, setting, new, 0)
    if setting.batch > 1:  # that is not supported there
        return found
    for g in options.gamma:
        if pair.draft is not None:
            found[f"transformers, gamma {g}"] = theirs(pair, setting, new, g)
        if options.drafters:
            found[f"transformers, lookup {g}"] = theirs(pair, setting, new, g, lookup=True)
    return found


# ---- running -------------------------------------------------------------------------------------


def batches(prompts: Sequence[Prompt], size: int) -> list[tuple[list[Prompt], Tensor, Tensor]]:
    """Put prompts together, left-padded; a last batch is filled up from the first."""
    found = []
    for begin in range(0, len(prompts), size):
        some = [prompts[(begin + i) % len(prompts)] for i in range(size)]
        found.append((some, *left_padded([prompt.ids[0] for prompt in some])))
    return found


def faults(pair: Pair, runs: Mapping[str, Run], some: Sequence[Prompt]) -> dict[str, str]:
    """Say whose greedy output differs from plain decoding's by more than a tie."""
    found = {}
    for name, run in runs.items():
        for prompt, expected, tokens in zip(some, runs[PLAIN].tokens, run.tokens, strict=True):
            compared = check.compare_tokens(pair, prompt, expected, tokens, 0.0, 0, name)
            if compared.verdict == check.BUG:
                found[name] = check.line(compared)
    return found


def measure(
    pair: Pair, prompts: Sequence[Prompt], setting: Setting, options: argparse.Namespace
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Run all contestants on all batches by turns; give the runs, and who was left out and why."""
    playing = contestants(pair, setting, options)
    groups = batches(prompts, setting.batch)
    some, ids, mask = groups[0]
    first = {name: contestant(ids, mask, options.seed) for name, contestant in playing.items()}
    wrong = faults(pair, first, some) if setting.temperature == 0 else {}
    staying = {name: playing[name] for name in playing if name not in wrong}
    inputs = [(ids, mask) for _, ids, mask in groups * options.repeats]
    return by_turns(staying, inputs, options.seed), wrong


def by_turns(
    playing: Mapping[str, Callable[..., Run]], inputs: Sequence[tuple[Any, ...]], seed: int
) -> dict[str, list[Run]]:
    """Run everybody on every input, in an order drawn anew for each; the last argument is a seed.

    Parameters
    ----------
    playing : mapping
        Name to contestant.
    inputs : sequence of tuple
        What contestants are called with; input number i has the seed ``seed + i``.
    seed : int
        Of the inputs, and of the orders.

    Returns
    -------
    dict
        Name to one run an input.
    """
    order = random.Random(seed)
    runs: dict[str, list[Run]] = {name: [] for name in playing}
    for number, given in enumerate(inputs):
        for name in order.sample(list(runs), len(runs)):
            runs[name].append(playing[name](*given, seed + number))
    return runs


# ---- results -------------------------------------------------------------------------------------


def summarize(
    setting: Setting, runs: Mapping[str, Sequence[Run]], prompts: int
) -> list[dict[str, Any]]:
    """Reduce the runs of a setting, ``prompts`` to a repeat, to a record a contestant."""
    records = []
    plain = seconds(runs[PLAIN], prompts)
    for name, own in runs.items():
        kept = [r.statistics for r in own if r.statistics is not None]
        total = sum(kept[1:], kept[0]) if kept else None
        loop = None
        if total is not None:
            loop = 1 - (total.seconds["draft"] + total.seconds["target"]) / total.decode_seconds
        records.append(
            {
                "batch": setting.batch,
                "temperature": setting.temperature,
                "contestant": name,
                "runs": len(own),
                "tokens_per_second": sum(r.num_tokens for r in own[:prompts])
                / seconds(own, prompts),
                "speedup": plain / seconds(own, prompts),
                "speedup_se": ratio_error(runs[PLAIN], own),
                "tokens_per_target_call": sum(r.num_tokens for r in own)
                / sum(r.calls for r in own),
                "accepted_of_tested": (
                    None if total is None or not total.drafted else total.accepted_of_tested
                ),
                "loop_percent": None if loop is None else 100 * loop,
            }
        )
    return records


def seconds(runs: Sequence[Run], prompts: int) -> float:
    """Return the sum over the prompts of the median over the repeats."""
    return sum(statistics.median(r.seconds for r in runs[i::prompts]) for i in range(prompts))


def ratio_error(above: Sequence[Run], below: Sequence[Run]) -> float | None:
    """Return the standard error of a ratio of sums over paired runs, by linearization."""
    n = len(above)
    if n < 2:
        return None
    ratio = sum(r.seconds for r in above) / sum(r.seconds for r in below)
    pairs = zip(above, below, strict=True)
    squares = sum((a.seconds - ratio * b.seconds) ** 2 for a, b in pairs)
    return (squares * n / (n - 1)) ** 0.5 / sum(r.seconds for r in below)


def bars(records: Sequence[Mapping[str, Any]], gammas: Sequence[int]) -> list[str]:
    """Hold the measurements against the bars at batch 1, temperature by temperature."""
    lines = []
    for t in sorted({r["temperature"] for r in records}):
        of = {r["contestant"]: r for r in records if r["temperature"] == t and r["batch"] == 1}
        fixed = [of[f"gamma {g}"] for g in gammas if f"gamma {g}" in of]
        if not fixed:
            continue
        best = max(fixed, key=lambda r: r["speedup"])
        compared = [(f"{best['contestant']} over plain decoding", best["speedup"], 1.0)]
        for g in gammas:
            rival = of.get(f"transformers, gamma {g}")
            if rival is not None and f"gamma {g}" in of:
                ours = of[f"gamma {g}"]
                ratio = ours["speedup"] / rival["speedup"]
                most = ratio / (1 - ours["loop_percent"] / 100)
                what = f"gamma {g} over transformers, assisted (a loop at no cost: {most:.2f}x)"
                compared.append((what, ratio, 1.5))
        if RENEWAL in of:
            ratio = of[RENEWAL]["speedup"] / best["speedup"]
            compared.append((f"renewal policy over {best['contestant']}", ratio, 0.97))
        for what, value, bar in compared:
            verdict = "PASS" if value >= bar else "FAIL"
            lines.append(f"T {t:g}: {what}: {value:.2f}x ({bar:g}x asked) {verdict}")
        loop = best["loop_percent"]
        verdict = "PASS" if loop < 10 else "FAIL"
        lines.append(f"T {t:g}: loop, {best['contestant']}: {loop:.1f} % (under 10 %) {verdict}")
    return lines


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format records."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            str(r["batch"]),
            f"{r['temperature']:g}",
            r["contestant"],
            f"{r['tokens_per_second']:.0f}",
            f"{r['speedup']:.2f} ({cell(r['speedup_se'], '.2f')})",
            cell(r["tokens_per_target_call"], ".2f"),
            cell(r["accepted_of_tested"], ".2f"),
            cell(r["loop_percent"], ".1f"),
        ]
        for r in records
    ]
    header = ["batch", "T", "contestant", "tokens/s", "speed-up (se)", "tokens a call"]
    return common.markdown_table([*header, "accepted of tested", "loop %"], rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="does it run?")
    add_pair_arguments(parser)
    parser.add_argument(
        "--drafters", choices=DRAFTERS, nargs="+", default=[], help="beside the draft, if any"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gamma", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--suffix", default="", help="of the records' names")
    options = parser.parse_args(arguments)
    if options.quick:
        options.gamma, options.tokens, options.prompts, options.repeats = [3], 8, 2, 1
        options.batch = [1, 2]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    facts, load = common.machine_facts(), common.Load()
    facts["command"] = " ".join(["bench_generate.py", *(arguments or sys.argv[1:])])
    for name, value in facts.items():
        print(f"{name}: {value}")
    needs_draft = not options.drafters or options.draft is not None
    pair = load_given(options, needs_draft=needs_draft)
    prompts = find_prompts(pair)[: options.prompts]
    records, wrong = [], {}
    for batch in options.batch:
        for temperature in options.temperature:
            setting = Setting(batch, temperature)
            runs, found = measure(pair, prompts, setting, options)
            records += summarize(setting, runs, -(-len(prompts) // batch))
            wrong |= {f"batch {batch}, {name}": fault for name, fault in found.items()}
            print(f"batch {batch}, T {temperature:g} done", flush=True)
    facts["others_cpu_share"] = load.share()
    facts["bars"] = bars(records, options.gamma)
    text = "\n".join([table(records), "", *facts["bars"], *wrong.values()])
    print(f"\n{text}")
    name = f"generate-{options.device}-{time.strftime('%Y-%m-%d', time.gmtime())}"
    stem = options.output / (name + ("-quick" if options.quick else "") + options.suffix)
    common.write_record(stem, facts, records, text)
    print(f"\nwritten: {stem}.json, .csv, .md")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
