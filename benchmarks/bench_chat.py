"""A chat model on prompts of four kinds: which drafter, how many tokens a call, how much faster.

    python -m specdec_ext fetch smollm2
    python benchmarks/bench_chat.py --target smollm2
    python benchmarks/bench_chat.py --target smollm2 --temperature 0.7 --batch 4

The prompts are those of benchmarks/prompts, put into the model's chat template: code to edit, texts
to summarise or to extract from, conversations, and free writing, where there is nothing to copy.
Contestants: plain decoding, ours and transformers'; transformers' prompt lookup, and its assisted
generation where it takes the draft model that is given; ours with each drafter, at each gamma and
under `RenewalRule`, in chains and trees, and, where a draft model or decoding heads are given, the
suffix drafter before it. ``--contestants`` picks some of them by parts of their names.
All complete a prompt in turn, in an order drawn anew for each, before the next prompt comes, so
that a busy machine is fair to all. With ``--by-turns`` ours even go a round at a time, so that a
machine whose speed changes within seconds slows all of them down alike; transformers' complete the
prompt before. A drafter is made anew for each text and knows nothing of earlier ones. Texts end
where the model ends them. *Tokens a call* is a ratio of sums; *speed* is that of whole calls,
prefill included, over plain decoding's, the geometric mean over the prompts. Standard errors are
over prompts (over batches, for batches).

A batch of sampled texts takes as long as its longest text, and every contestant samples others: its
tokens a second are a matter of luck. With ``--full-length`` texts do not end where the model ends
them: all have ``--tokens`` tokens, and contestants differ in what they do alone. Of 8 prompts there
are two batches of 4, which know their standard error badly: ``--repeats`` completes all prompts
several times, with other seeds.

Greedy output of all is compared with plain decoding's, on every prompt: a difference that is no tie
in float32 makes the exit code 1.

Bars: nothing under `RenewalRule` is slower than 0.97 times plain decoding on any kind. For greedy
decoding at batch 1, also: the suffix drafter makes at least as many tokens a call as transformers'
prompt lookup at the same gamma on every kind, and is 1.15 times as fast over the three kinds with
something to copy; a draft model, in its best setting, is 1.5 times as fast as plain decoding on
conversations; our plain decoding is no slower than transformers'.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from specdec_ext.commands import check
from specdec_ext.commands.bench import speed_over
from specdec_ext.commands.frame import add_pair_arguments
from specdec_ext.commands.pair import Pair, Prompt, as_prompt, load_given
from specdec_ext.commands.prompt_files import read_prompts
from specdec_ext.decoding import GrownTree, RenewalRule, StackedDrafter, SuffixDrafter

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from bench_generate import PLAIN, batches  # noqa: E402
from contestants import (  # noqa: E402
    DRAFTERS,
    Contestant,
    Ours,
    Run,
    Setting,
    by_turns,
    ours,
    theirs,
)

PROMPTS = Path(__file__).resolve().parent / "prompts"
KINDS = ("edit", "extract", "chat", "free")
COPYING = KINDS[:3]
ALL = "copying kinds"
RENEWAL = "renewal"
GROWING = ("suffix", "model")  # drafters that propose trees
FASTER, NOT_SLOWER, DISTILLED = 1.15, 0.97, 1.5
THEIR_PLAIN = "transformers, plain"
MODEL = "model"
STACK = "suffix, else model"  # copies where it can, asks the draft model where not


class Outcome(NamedTuple):
    """What a setting gave: runs of each contestant, in the order of ``kinds``, and what differs."""

    setting: Setting
    kinds: list[str]
    runs: dict[str, list[Run]]
    ties: list[str]
    bugs: list[str]


def drafters(pair: Pair, options: argparse.Namespace) -> dict[str, Callable[[Pair], Any]]:
    """List what drafts for ours, by name."""
    found = {name: DRAFTERS[name] for name in options.drafters}
    if pair.has_draft:
        found[MODEL] = lambda pair: pair.drafter
        if "suffix" in found:
            found[STACK] = lambda pair: StackedDrafter(SuffixDrafter(), pair.drafter)
    return found


def contestants(pair: Pair, setting: Setting, options: argparse.Namespace) -> dict[str, Contestant]:
    """List who takes part."""
    new, stops = options.tokens, not options.full_length
    found = {PLAIN: ours(pair, setting, new, stops=stops)}
    for name, draft in drafters(pair, options).items():
        gammas = options.model_gamma if name == MODEL else options.gamma
        for g in gammas:
            label = f"{name}, gamma {g}"
            found[label] = ours(pair, setting, new, g, draft=draft, stops=stops)
        # One object: it goes on learning from prompt to prompt.
        policy = RenewalRule()
        found[f"{name}, {RENEWAL}"] = ours(pair, setting, new, policy, draft=draft, stops=stops)
        if name in GROWING and options.tree:
            # A draft model needs a call for each level, a suffix drafter none.
            depth = max(gammas) if options.depth is None else options.depth
            tree = GrownTree(options.tree, depth, options.beam, min_chance=options.min_chance)
            label = f"{name}, tree of {options.tree}"
            found[label] = ours(pair, setting, new, draft=draft, stops=stops, tree=tree)
    found |= rivals(pair, setting, options)
    wanted = options.contestants
    return {
        name: play
        for name, play in found.items()
        if name == PLAIN or not wanted or any(part in name for part in wanted)
    }


def rivals(pair: Pair, setting: Setting, options: argparse.Namespace) -> dict[str, Contestant]:
    """List how transformers takes part: in batches by plain decoding alone."""
    new, stops = options.tokens, not options.full_length
    found = {THEIR_PLAIN: theirs(pair, setting, new, 0, stops=stops)}
    if setting.batch > 1:
        return found
    for g in options.gamma:
        found[f"transformers, lookup {g}"] = theirs(pair, setting, new, g, lookup=True, stops=stops)
    # transformers' assisted generation takes no draft with a reduced vocabulary.
    if pair.draft is not None and not hasattr(pair.draft, "draft_token_ids"):
        for g in options.model_gamma:
            found[f"transformers, model {g}"] = theirs(pair, setting, new, g, stops=stops)
    return found


def read(pair: Pair, count: int) -> dict[str, list[Prompt]]:
    """Read the first so many prompts of each kind."""
    return {
        kind: [
            as_prompt(pair, given, chat=True) for given in read_prompts(PROMPTS / f"{kind}.yaml")
        ][:count]
        for kind in KINDS
    }


def measure(
    pair: Pair,
    prompts: Mapping[str, Sequence[Prompt]],
    setting: Setting,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Outcome:
    """Run all contestants on all prompts, by turns."""
    playing, order = contestants(pair, setting, options), random.Random(options.seed)
    found = Outcome(setting, [], {name: [] for name in playing}, [], [])
    groups = [(kind, *group) for kind in prompts for group in batches(prompts[kind], setting.batch)]
    # One of each kind, then the next ones: what is cut short is fair to all kinds.
    turns = len(groups) // len(prompts)
    groups = [group for i in range(turns) for group in groups[i::turns]] * options.repeats
    # The longest prompts: what is found out about caches as large holds for all smaller ones.
    warm_up = max((group[2:] for group in groups), key=lambda given: given[0].shape[1])
    for contestant in playing.values():
        contestant(*warm_up, options.seed)
    begun = time.perf_counter()
    for number, (kind, some, ids, mask) in enumerate(groups):
        if time.perf_counter() - begun > 60 * options.minutes and number >= 2 * len(prompts):
            say(f"stopped after {number} of {len(groups)}: {options.minutes:g} minutes are over")
            break
        found.kinds.append(kind)
        shuffled = {name: playing[name] for name in order.sample(list(playing), len(playing))}
        runs = complete(shuffled, ids, mask, options.seed + number, options.by_turns)
        for name, run in runs.items():
            found.runs[name].append(run)
        if setting.temperature == 0:
            compare(pair, some, found)
        say(f"{kind}: {', '.join(prompt.name for prompt in some)}")
    return found


def complete(
    playing: Mapping[str, Contestant], ids: Tensor, mask: Tensor, seed: int, turns: bool
) -> dict[str, Run]:
    """Complete prompts with each contestant, with ``turns`` all of ours a round at a time."""
    mine = {name: play for name, play in playing.items() if turns and isinstance(play, Ours)}
    runs = {name: play(ids, mask, seed) for name, play in playing.items() if name not in mine}
    return runs | by_turns(mine, ids, mask, seed)


def compare(pair: Pair, some: Sequence[Prompt], found: Outcome) -> None:
    """Hold everybody's last output against plain decoding's."""
    for name, runs in found.runs.items():
        plain = found.runs[PLAIN][-1].tokens
        for prompt, expected, tokens in zip(some, plain, runs[-1].tokens, strict=True):
            compared = check.compare_tokens(pair, prompt, expected, tokens, 0.0, 0, name)
            if compared.verdict == check.BUG:
                found.bugs.append(check.line(compared))
            elif compared.verdict == check.PRECISION:
                found.ties.append(check.line(compared))


# ---- results -------------------------------------------------------------------------------------


def of_kind(found: Outcome, kind: str) -> dict[str, list[Run]]:
    """Take the runs of a kind, or of all that copy."""
    wanted = COPYING if kind == ALL else (kind,)
    return {
        name: [run for run, its in zip(runs, found.kinds, strict=True) if its in wanted]
        for name, runs in found.runs.items()
    }


def summarize(found: Outcome) -> list[dict[str, Any]]:
    """Make a record a kind and contestant."""
    records = []
    for kind in (*KINDS, ALL):
        runs = of_kind(found, kind)
        for name, own in runs.items():
            calls, error = common.ratio([(run.num_tokens, run.calls) for run in own])
            speed = speed_over(runs, PLAIN, name)
            records.append(
                {
                    "batch": found.setting.batch,
                    "temperature": found.setting.temperature,
                    "kind": kind,
                    "contestant": name,
                    "texts": sum(len(run.tokens) for run in own),
                    "tokens": sum(run.num_tokens for run in own),
                    "tokens_per_call": calls,
                    "tokens_per_call_se": error,
                    "speed": speed.mean,
                    "speed_se": speed.standard_error,
                    "seconds": sum(run.seconds for run in own),
                }
            )
    return records


def bars(found: Outcome, gammas: Sequence[int]) -> list[str]:
    """Hold a setting against the bars; most of them are on greedy decoding at batch 1."""
    by = {(r["kind"], r["contestant"]): r for r in summarize(found)}
    greedy = found.setting.temperature == 0
    alone = greedy and found.setting.batch == 1
    judged = on_copies(found, by, gammas) if alone else []
    for kind in KINDS:
        for name in found.runs:
            if name.endswith(RENEWAL):
                record = by[kind, name]
                what = (
                    f"{name}, {kind}: {record['speed']:.2f} ± {record['speed_se']:.2f} times plain"
                )
                what += f" decoding ({NOT_SLOWER:g} asked)"
                judged.append((what, record["speed"] >= NOT_SLOWER))
    if not greedy:
        return list(map(verdict, judged))
    judged += of_the_rest(found, by) if alone else []
    texts = sum(len(run.tokens) for run in found.runs[PLAIN])
    what = (
        f"greedy output of {len(found.runs)} contestants on {texts} texts: {len(found.bugs)} differ"
    )
    what += f", {len(found.ties)} at a tie in float32"
    judged.append((what, not found.bugs))
    return [*map(verdict, judged), *found.bugs, *found.ties]


def verdict(judged: tuple[str, bool]) -> str:
    """Say whether a bar was reached."""
    what, passed = judged
    return f"{'PASS' if passed else 'FAIL'}  {what}"


def on_copies(
    found: Outcome, by: Mapping[tuple[str, str], Mapping[str, Any]], gammas: Sequence[int]
) -> list[tuple[str, bool]]:
    """Judge the suffix drafter against transformers' prompt lookup."""
    judged = []
    for g in gammas:
        mine, rival = f"suffix, gamma {g}", f"transformers, lookup {g}"
        if not {mine, rival} <= set(found.runs):
            continue
        for kind in KINDS:
            a, b = (by[kind, name]["tokens_per_call"] for name in (mine, rival))
            judged.append((f"{mine}, {kind}: {a:.2f} tokens a call; {rival}: {b:.2f}", a >= b))
        speed = speed_over(of_kind(found, ALL), rival, mine)
        what = f"{mine}, {ALL}: {speed} times as fast as {rival} ({FASTER:g} asked)"
        judged.append((what, speed.mean >= FASTER))
    return judged


def of_the_rest(
    found: Outcome, by: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[tuple[str, bool]]:
    """Judge a draft model on conversations, and our plain decoding against transformers'."""
    judged = []
    settings = [name for name in found.runs if name.startswith(f"{MODEL}, ")]
    if settings:
        best = max(settings, key=lambda name: by["chat", name]["speed"])
        record = by["chat", best]
        what = f"{best}, chat: {record['speed']:.2f} ± {record['speed_se']:.2f} times plain"
        what += f" decoding ({DISTILLED:g} asked)"
        judged.append((what, record["speed"] >= DISTILLED))
    if THEIR_PLAIN in found.runs:
        speed = speed_over(found.runs, THEIR_PLAIN, PLAIN)
        what = f"plain, all kinds: {speed} times as fast as {THEIR_PLAIN} (1 asked)"
        judged.append((what, speed.mean + speed.standard_error >= 1))
    return judged


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the records of a setting: tokens a call and speed, by kind."""
    of = {(r["contestant"], r["kind"]): r for r in records}
    cell = "{tokens_per_call:.2f} ({tokens_per_call_se:.2f}), {speed:.2f}x ({speed_se:.2f})"
    rows = [
        [name, *(cell.format(**of[name, kind]) for kind in (*KINDS, ALL))]
        for name in dict.fromkeys(r["contestant"] for r in records)
    ]
    return common.markdown_table(["tokens a call (se), speed (se)", *KINDS, ALL], rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_pair_arguments(parser)
    parser.add_argument("--drafters", choices=DRAFTERS, nargs="+", default=[*DRAFTERS])
    parser.add_argument("--gamma", type=int, nargs="+", default=[10])
    parser.add_argument(
        "--model-gamma", type=int, nargs="+", default=[3], help="draft lengths of the draft model"
    )
    parser.add_argument(
        "--contestants", nargs="+", default=[], metavar="PART", help="those with this in their name"
    )
    parser.add_argument("--tree", type=int, default=16, help="nodes of trees; 0: no trees")
    parser.add_argument("--beam", type=int, default=3, help="nodes of a level that go on (3)")
    parser.add_argument("--depth", type=int, help="of trees (default: the largest draft length)")
    parser.add_argument(
        "--min-chance", type=float, default=0.0, help="of trees, see `GrownTree` (0: not looked at)"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt at most")
    parser.add_argument(
        "--full-length", action="store_true", help="texts end at --tokens alone, see above"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, at least 2 batches")
    parser.add_argument("--repeats", type=int, default=1, help="times that each is completed (1)")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no prompt after these, a setting"
    )
    parser.add_argument(
        "--by-turns", action="store_true", help="ours go by turns, a round at a time"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--suffix", default="", help="of the records' names")
    options = parser.parse_args(arguments)
    if options.prompts < 2 * max(options.batch):
        parser.error(f"--prompts must be at least {2 * max(options.batch)} for a standard error")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    facts, load = common.machine_facts(), common.Load()
    facts["command"] = " ".join(["bench_chat.py", *(arguments or sys.argv[1:])])
    for name, value in facts.items():
        print(f"{name}: {value}")
    pair = load_given(options, needs_draft=False)
    prompts = read(pair, options.prompts)
    records: list[dict[str, Any]] = []
    parts, status = [], 0
    for batch in options.batch:
        for temperature in options.temperature:
            setting = Setting(batch, temperature)
            found = measure(pair, prompts, setting, options, lambda said: print(said, flush=True))
            records += (own := summarize(found))
            lines = bars(found, options.gamma)
            texts = sum(len(run.tokens) for run in found.runs[PLAIN])
            title = f"Batch {batch}, temperature {temperature:g}, {texts} texts"
            parts.append("\n\n".join([title, table(own), "\n".join(lines)]).strip())
            status |= bool(found.bugs)
    facts["others_cpu_share"] = load.share()
    text = "\n\n".join(parts)
    print(f"\n{text}")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    stem = options.output / f"chat-{options.device}-{day}{options.suffix}"
    common.write_record(stem, facts, records, text)
    print(f"\nwritten: {stem}.json, .csv, .md")
    return status


if __name__ == "__main__":
    sys.exit(main())
