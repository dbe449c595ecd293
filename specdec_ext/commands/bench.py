"""Which draft to use for the texts at hand, how far it should draft, and how much faster that is.

Plain decoding and every contestant complete the same prompts, in an order drawn anew for each
prompt, so that a busy machine is fair to all; times are those of whole calls, prefill included. The
fastest is then timed against plain decoding once more, since the best of several looks better than
it is, and the advice is by this second time: use it if it is faster by more than twice the standard
error over prompts, else leave it off. Before anything counts, greedy output of all is compared with
plain decoding: status 1 if there is a bug.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .check import BUG, compare_tokens, line
from .frame import (
    add_generation_arguments,
    add_json_argument,
    add_pair_arguments,
    check_gamma,
    check_generation,
    command,
    print_json,
)
from .page import Page
from .pair import Pair, Prompt, load_named, size_of
from .prompt_files import HELP, Given, read_prompts

__all__ = ["add_arguments", "run"]

#: What is completed where no prompts are given and the target is not the pair's.
PROMPTS = (
    "def fibonacci(n):\n    ",
    "Summarise in one sentence: The meeting was moved from Monday to Thursday, since the report "
    "that it was to discuss will not be ready before Wednesday evening.\n",
    "Correct the spelling: Teh quick brown fox jmups over teh lazy dog, which does not mnid.\n",
    "The three things that I like most about winter are",
    'Turn into JSON: name Ada Lovelace, born 1815 in London.\n{"name": ',
    "Question: Why is the sky blue?\nAnswer:",
    "Once upon a time, in a village by the sea,",
    "import os\n\n\nclass Reader:\n",
)
CHECKED = 2  # prompts whose greedy output is compared before anything is timed
PLAIN = "plain"
DRAFTERS = {"model": "the draft", "lookup": "LookupDrafter()", "suffix": "SuffixDrafter()"}
TREES: dict[str, Any] = {"depth": 4, "beam": 3, "min_chance": 0.4}
SURE = 2.0  # standard errors


class Contestant(NamedTuple):
    """A way to decode."""

    name: str
    draft: Callable[[], Any]
    shape: dict[str, Any]  # ``gamma`` or ``tree`` of `generate`
    code: str  # the call of `generate` that it stands for


class Run(NamedTuple):
    """One call."""

    tokens: list[int]
    seconds: float
    tokens_per_target_call: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return len(self.tokens) / self.seconds


class Speed(NamedTuple):
    """How many times as fast as plain decoding: geometric mean over prompts, standard error."""

    mean: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.standard_error:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext bench``."""
    add_pair_arguments(parser)
    parser.add_argument(
        "--drafter",
        choices=[*DRAFTERS],
        help="the draft model or heads, or copies of the text's own continuations (default: what "
        "there is)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        nargs="+",
        type=Path,
        help=f"{HELP} (default: short ones)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the tokenizer's chat template"
    )
    parser.add_argument("--gamma", type=int, nargs="+", default=[2, 4, 8], help="(default: 2 4 8)")
    parser.add_argument(
        "--tree",
        type=int,
        nargs="+",
        default=[],
        metavar="NODES",
        help="let the draft model or heads draft trees of so many nodes, too, the root included",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="(default: %(default)s, greedy)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the last comparison (default: %(default)s)"
    )
    add_generation_arguments(parser, max_new_tokens=64, prompt=False)
    add_json_argument(parser)


@command("bench")
def run(args: argparse.Namespace) -> int:
    """Measure and advise: status 1 if greedy output differs and no tie explains it."""
    for gamma in args.gamma:
        check_gamma(gamma)
    check_generation(args.temperature, args.seed, args.max_new_tokens)
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    given = None if args.prompts is None else read_prompts(*args.prompts)
    if given is None and (args.chat or args.target is not None):
        given = [Given(f"prompt {n}", text) for n, text in enumerate(PROMPTS, start=1)]
    needs_draft = args.drafter == "model" and args.draft is None
    pair, prompts = load_named(args, texts=given, needs_draft=needs_draft)
    if len(prompts) < 2:
        raise ValueError(f"a standard error is over prompts: give 2 at least, got {len(prompts)}")
    return _report(pair, prompts, args)


def _report(pair: Pair, prompts: list[Prompt], args: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    out = Page(sys.stdout, quiet=args.json)
    field = contestants(pair, args)
    _heading(out, pair, prompts, args)
    out.status("comparing greedy output ...")
    bugs = compare_greedy(pair, prompts[:CHECKED], field, args)
    out.status("")
    if bugs:
        if args.json:
            print_json({"bugs": bugs})
        for found in bugs:
            out.line(found, "strong")
        return 1
    screened = time_all(pair, prompts, field, args, out.status)
    _table(out, field, screened)
    best = max(field[1:], key=lambda found: speed_over(screened, PLAIN, found.name).mean)
    timed = time_all(pair, prompts, [field[0], best], args, out.status, args.repeats)
    speed = speed_over(timed, PLAIN, best.name)
    use = speed.mean - SURE * speed.standard_error > 1
    plain = statistics.fmean(found.speed for found in timed[PLAIN])
    _advice(out, best, speed, use=use, plain=plain, repeats=args.repeats)
    if args.json:
        print_json(
            {
                "prompts": [prompt.name for prompt in prompts],
                "tokenizers": pair.mismatch,
                "plain_tokens_per_second": plain,
                "contestants": [
                    {
                        "name": found.name,
                        "tokens_per_target_call": _calls(screened[found.name]),
                        "speed": speed_over(screened, PLAIN, found.name)._asdict(),
                    }
                    for found in field[1:]
                ],
                "best": best.name,
                "call": best.code,
                "speed": speed._asdict(),
                "use": use,
            }
        )
    return 0


# --- who takes part -----------------------------------------------------------------------------


def contestants(pair: Pair, args: argparse.Namespace) -> list[Contestant]:
    """List plain decoding, then each drafter at each length, under the renewal rule, in trees."""
    from ..decoding import GrownTree, LookupDrafter, RenewalRule, SuffixDrafter

    drafts: dict[str, Callable[[], Any]] = {
        "model": lambda: pair.drafter,
        "lookup": LookupDrafter,
        "suffix": SuffixDrafter,
    }
    codes = {**DRAFTERS, "model": "draft"}
    there = [name for name in drafts if name != "model" or pair.has_draft]
    there = there if args.drafter is None else [args.drafter]
    if args.tree and not (pair.has_draft and "model" in there):
        raise ValueError("--tree needs a draft model or heads (--draft), and no other --drafter")
    field = [Contestant(PLAIN, lambda: None, {}, "generate(target, None, input_ids)")]
    for name in there:
        shapes: list[dict[str, Any]] = [{"gamma": gamma} for gamma in dict.fromkeys(args.gamma)]
        # One object: it goes on learning from prompt to prompt.
        shapes.append({"gamma": RenewalRule()})
        if name == "model":
            shapes += [{"tree": GrownTree(nodes, **TREES)} for nodes in dict.fromkeys(args.tree)]
        for shape in shapes:
            ((kind, value),) = shape.items()
            said = "RenewalRule()" if isinstance(value, RenewalRule) else str(value)
            label = f"tree of {value.nodes}" if kind == "tree" else f"gamma {said}"
            code = f"generate(target, {codes[name]}, input_ids, {kind}={said})"
            field.append(Contestant(f"{DRAFTERS[name]}, {label}", drafts[name], shape, code))
    return field


# --- measuring ----------------------------------------------------------------------------------


def decode(
    pair: Pair, prompt: Prompt, contestant: Contestant, temperature: float, args: Any, seed: int
) -> Run:
    """Complete a prompt, and time the whole call; its last step waits for the device."""
    from ..decoding import generate

    begin = time.perf_counter()
    with warnings.catch_warnings():  # that a draft fails is what is to be found out
        warnings.filterwarnings("ignore", "generate: the target accepted")
        sequences, found = generate(
            pair.target,
            contestant.draft(),
            prompt.ids,
            max_new_tokens=args.max_new_tokens,
            **contestant.shape,
            temperature=temperature,
            seeds=seed,
        )
    tokens = sequences[0, prompt.ids.shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    return Run(tokens, seconds, found.tokens_per_target_call)


def compare_greedy(
    pair: Pair, prompts: Sequence[Prompt], field: Sequence[Contestant], args: argparse.Namespace
) -> list[str]:
    """Say where greedy output is not that of plain decoding, and no tie; warms everything up."""
    bugs = []
    for prompt in prompts:
        plain, *others = (decode(pair, prompt, c, 0.0, args, args.seed).tokens for c in field)
        for contestant, tokens in zip(field[1:], others, strict=True):
            found = compare_tokens(pair, prompt, plain, tokens, 0.0, args.seed, contestant.name)
            if found.verdict == BUG:
                bugs.append(line(found))
    return bugs


def time_all(
    pair: Pair,
    prompts: Sequence[Prompt],
    field: Sequence[Contestant],
    args: argparse.Namespace,
    status: Callable[[str], None],
    repeats: int = 1,
) -> dict[str, list[Run]]:
    """Time all on each prompt, in turns; of several repeats the one of median time."""
    order = random.Random(args.seed)
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in field}
    for number, prompt in enumerate(prompts):
        status(f"measuring, prompt {number + 1} of {len(prompts)} ...")
        found: dict[str, list[Run]] = {contestant.name: [] for contestant in field}
        for repeat in range(repeats):
            for contestant in order.sample(list(field), len(field)):
                seed = args.seed + repeat
                found[contestant.name].append(
                    decode(pair, prompt, contestant, args.temperature, args, seed)
                )
        for name, several in found.items():
            runs[name].append(sorted(several, key=lambda run: run.speed)[len(several) // 2])
    status("")
    return runs


def speed_over(runs: dict[str, list[Run]], base: str, name: str) -> Speed:
    """Compare two contestants' tokens a second, prompt by prompt."""
    pairs = zip(runs[name], runs[base], strict=True)
    logs = [math.log(mine.speed / its.speed) for mine, its in pairs]
    mean = math.exp(statistics.fmean(logs))
    return Speed(mean, mean * statistics.stdev(logs) / math.sqrt(len(logs)))


def _calls(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.tokens_per_target_call for run in runs)


# --- the text -----------------------------------------------------------------------------------


def _heading(out: Page, pair: Pair, prompts: list[Prompt], args: argparse.Namespace) -> None:
    out.line()
    out.line(f"target  {size_of(pair.target)}", "strong")
    if pair.has_draft:
        out.line(f"draft   {pair.drafts_with}", "strong")
    if pair.mismatch is not None:
        out.line(pair.mismatch, "strong")
    lengths = [prompt.ids.shape[1] for prompt in prompts]
    threads = f", threads: {torch.get_num_threads()}" if pair.device.type == "cpu" else ""
    out.line(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {args.max_new_tokens} "
        f"more each, temperature {args.temperature:g}, {pair.device.type}{threads}",
        "faint",
    )
    out.line()


def _table(out: Page, field: Sequence[Contestant], runs: dict[str, list[Run]]) -> None:
    width = max(len(contestant.name) for contestant in field)
    out.line(f"{'':<{width}}  tokens a target call  times as fast", "strong")
    for contestant in field[1:]:
        speed = speed_over(runs, PLAIN, contestant.name)
        calls = f"{_calls(runs[contestant.name]):.2f}"
        out.line(f"{contestant.name:<{width}}  {calls:>20}  {str(speed):>13}")
    out.line()


def _advice(
    out: Page, best: Contestant, speed: Speed, *, use: bool, plain: float, repeats: int
) -> None:
    again = f"{speed} times as fast as plain decoding ({plain:.1f} tokens a second)"
    if use:
        out.line(f"Use {best.name}: {again}, timed again {repeats} x.", "strong")
        out.line(f"  {best.code}")
    else:
        out.line(f"Leave it off: the best was {best.name}, {again}, timed again.", "strong")
    out.line()
