"""Complete standard-library modules that the models have never seen, and show who wrote what.

Prints one completion with every token's origin, then a table of plain against speculative decoding
on several prompts, and whether greedy output is identical with and without the draft. Both ways run
through the same loop and are counted alike.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..contract import GREEDY_BELOW, rule_names
from ..theory import acceptance_rate, walltime_factor
from .frame import (
    add_generation_arguments,
    add_json_argument,
    add_pair_arguments,
    check_gamma,
    check_generation,
    command,
    print_json,
)
from .page import ACCEPTED, REPLACED, TARGET, Page
from .pair import Pair, Prompt, find_pair, load_named, size_of
from .pieces import Piece, Reader, pieces_of, shown
from .prompt_files import HELP, read_prompts

if TYPE_CHECKING:
    from ..decoding import Burst, Statistics

__all__ = ["add_arguments", "run"]

SECONDS = 12.0  # begin no further turn after this long at one temperature
TURNS = 3  # of each way on each prompt; the one of median time counts
LOSSLESS = rule_names(chains=True, lossless=True)
SHOWN_LINES = 10  # of the prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext demo``."""
    add_pair_arguments(parser)
    parser.add_argument(
        "--gamma", type=int, default=3, help="draft tokens a round (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="of the completion and of the table's second half (default: %(default)s; 0: greedy)",
    )
    parser.add_argument(
        "--rule",
        default="block",
        help="verification rule: block, token, ... (default: %(default)s)",
    )
    add_generation_arguments(parser, max_new_tokens=128)
    parser.add_argument("--prompts", metavar="FILE", nargs="+", type=Path, help=HELP)
    parser.add_argument(
        "--chat", action="store_true", help="put each of these into the tokenizer's chat template"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--race",
        action="store_true",
        help="show plain and speculative decoding of one prompt side by side instead",
    )
    kinds.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with every token and round of one prompt's decoding instead",
    )
    add_json_argument(kinds)


@command("demo")
def run(args: argparse.Namespace) -> int:
    """Run the demo: status 1 if greedy output differs and rounding does not explain it."""
    check_gamma(args.gamma)
    check_generation(args.temperature, args.seed, args.max_new_tokens)
    given = None if args.prompts is None else read_prompts(*args.prompts)
    pair, prompts = load_named(args, texts=given, needs_draft=False)
    if not prompts:
        raise ValueError("there are no prompts in the files of --prompts")
    if args.race or args.html is not None:
        return _show_one(pair, prompts[0], args)
    _warm_up(pair, prompts[0], args)
    return _show(pair, prompts, args)


def _show_one(pair: Pair, prompt: Prompt, args: argparse.Namespace) -> int:
    """Show one prompt's decoding, as a race or on a page of its own; return the exit status."""
    from .html_page import write_page
    from .race import race

    out = Page(sys.stdout)
    _heading(out, pair, args)
    if args.race:
        return race(pair, prompt, args)
    models = f"{prompt.name}, {' · '.join(_models(pair))} · {_settings(pair, args)}"
    out.line(write_page(pair, prompt, args, models), "strong")
    out.line(f"wrote {args.html}")
    return 0


def _show(pair: Pair, prompts: list[Prompt], args: argparse.Namespace) -> int:
    """Generate, measure, print, and return the exit status."""
    out = Page(sys.stdout, quiet=args.json)
    _heading(out, pair, args)
    pieces = _completion(out, pair, prompts[0], args)
    temperatures = [0.0] if args.temperature < GREEDY_BELOW else [0.0, args.temperature]
    out.status("measuring ...")
    runs = [_compare(pair, prompts, temperature, args) for temperature in temperatures]
    beside = runs[0].transformers
    assert beside is not None  # the first is greedy
    greedy = _greedy_check(pair, prompts, runs[0], lossless=args.rule in LOSSLESS)
    out.status("")
    _table(out, runs, beside)
    _verdict(out, greedy)
    if args.json:
        print_json(_report(args, pair, prompts, pieces, runs, beside, greedy))
    return 0 if greedy.explained else 1


# --- measuring --------------------------------------------------------------------------------


class Timed(NamedTuple):
    """One call: its tokens, its time from outside, and its statistics, where it has some."""

    tokens: list[int]
    seconds: float
    statistics: Statistics | None = None


class Beside(NamedTuple):
    """Plain decoding here and by transformers' own ``generate``: same prompts, in turns, greedy.

    Attributes
    ----------
    theirs, ours : float
        Tokens a second of whole calls, prompts included.
    same : int
        Prompts on which the tokens are the same.
    prompts : int
        Of how many.
    """

    theirs: float
    ours: float
    same: int
    prompts: int


@dataclass
class Comparison:
    """Plain against speculative decoding at one temperature."""

    temperature: float
    gamma: int
    plain: Statistics
    speculative: Statistics
    alpha: float = math.nan
    plain_tokens: list[list[int]] = field(default_factory=list)
    speculative_tokens: list[list[int]] = field(default_factory=list)
    transformers: Beside | None = None

    @property
    def speedup(self) -> float:
        """How many times more tokens a second, prompts included on both sides."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def draft_cost(self) -> float:
        """The formula's c: a call of the draft over a call of the target on one token."""
        draft = self.speculative.seconds["draft"] / max(self.speculative.draft_calls, 1)
        return draft * self.plain.rounds / self.plain.seconds["target"]

    @property
    def block_cost(self) -> float:
        """A call of the target on gamma + 1 tokens over one on one token (the formula says 1)."""
        block = self.speculative.seconds["target"] / self.speculative.rounds
        return block * self.plain.rounds / self.plain.seconds["target"]

    @property
    def formula(self) -> float:
        """What `theory.walltime_factor` makes of the measured alpha and c."""
        return walltime_factor(self.alpha, self.gamma, self.draft_cost)


def _generate(
    pair: Pair,
    prompt: Prompt,
    args: argparse.Namespace,
    *,
    draft: bool,
    temperature: float,
    on_round: Callable[[list[Burst]], None] | None = None,
) -> tuple[list[int], Statistics]:
    """Return the new tokens and their statistics."""
    from .runs import decode

    drafter = pair.drafter if draft else None
    sequences, statistics = decode(pair, prompt, drafter, args, temperature, on_round)
    return sequences[0, prompt.ids.shape[1] :].tolist(), statistics


def _warm_up(pair: Pair, prompt: Prompt, args: argparse.Namespace) -> None:
    short = argparse.Namespace(**{**vars(args), "max_new_tokens": 4 * (args.gamma + 1)})
    for draft in (False, True):
        _generate(pair, prompt, short, draft=draft, temperature=args.temperature)


def _compare(
    pair: Pair, prompts: list[Prompt], temperature: float, args: argparse.Namespace
) -> Comparison:
    """Run every prompt every way, taking turns, so that a busy machine is fair to all.

    Of several turns, the one of median time counts. Transformers' own ``generate`` takes part where
    decoding is greedy: sampled, it would write another text.
    """
    ways: dict[str, Callable[[Prompt], Timed]] = {
        "plain": lambda prompt: _timed(pair, prompt, args, draft=False, temperature=temperature),
        "speculative": lambda prompt: _timed(
            pair, prompt, args, draft=True, temperature=temperature
        ),
    }
    if temperature < GREEDY_BELOW:
        ways["transformers"] = lambda prompt: _by_transformers(pair, prompt, args)
    runs: dict[str, list[Timed]] = {name: [] for name in ways}
    begin = time.perf_counter()
    for prompt in prompts:
        turns: dict[str, list[Timed]] = {name: [] for name in ways}
        for _ in range(TURNS):
            if time.perf_counter() - begin > SECONDS:
                break
            for name, decode in ways.items():
                turns[name].append(decode(prompt))
        for name, found in turns.items():
            if found:
                median = sorted(found, key=lambda run: run.seconds)[len(found) // 2]
                runs[name].append(median)
    tokens = {name: [run.tokens for run in found] for name, found in runs.items()}
    return Comparison(
        temperature,
        args.gamma,
        _together(runs["plain"]),
        _together(runs["speculative"]),
        mean_overlap(pair, prompts, tokens["speculative"], temperature),
        tokens["plain"],
        tokens["speculative"],
        _beside(runs["transformers"], runs["plain"]) if "transformers" in runs else None,
    )


def _timed(
    pair: Pair, prompt: Prompt, args: argparse.Namespace, *, draft: bool, temperature: float
) -> Timed:
    begin = time.perf_counter()
    tokens, statistics = _generate(pair, prompt, args, draft=draft, temperature=temperature)
    return Timed(tokens, time.perf_counter() - begin, statistics)


def _by_transformers(pair: Pair, prompt: Prompt, args: argparse.Namespace) -> Timed:
    """Run the target's own ``generate``, greedy."""
    begin = time.perf_counter()
    found = pair.target.generate(
        prompt.ids,
        attention_mask=torch.ones_like(prompt.ids),
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
    )
    tokens = found[0, prompt.ids.shape[1] :].tolist()  # waits for the device
    return Timed(tokens, time.perf_counter() - begin)


def _together(runs: list[Timed]) -> Statistics:
    """Count runs together."""
    found = [run.statistics for run in runs if run.statistics is not None]
    return sum(found[1:], start=found[0])


def _beside(theirs: list[Timed], ours: list[Timed]) -> Beside:
    def speed(runs: list[Timed]) -> float:
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)

    same = sum(a.tokens == b.tokens for a, b in zip(theirs, ours, strict=True))
    return Beside(speed(theirs), speed(ours), same, len(ours))


def mean_overlap(
    pair: Pair, prompts: list[Prompt], tokens: list[list[int]], temperature: float
) -> float:
    """Return alpha: the mean of sum_x min(p(x), q(x)) over the contexts of texts.

    Measured afterwards, on what was generated, so that no time of the comparison goes into it, and
    whatever the rule: the share of the tested tokens that the rule accepts is another number.

    Parameters
    ----------
    pair : Pair
        The models.
    prompts : list of Prompt
        What the texts began with; more of them than texts are ignored.
    tokens : list of list of int
        What came behind each prompt.
    temperature : float
        Of both laws.

    Returns
    -------
    float
        NaN for a pair without a draft, where there is no q.
    """

    def rows(prompt: Prompt, new: list[int]) -> tuple[Tensor, Tensor]:
        text = torch.cat([prompt.ids, prompt.ids.new_tensor([new[:-1]])], 1)
        first = prompt.ids.shape[1] - 1
        models = (pair.target, pair.draft)
        target, draft = (model(input_ids=text).logits[0, first:] for model in models)
        return target, draft

    if pair.draft is None:
        return math.nan
    texts = zip(prompts, tokens, strict=False)
    with torch.inference_mode():
        return acceptance_rate((rows(*text) for text in texts), temperature=temperature).mean


class Difference(NamedTuple):
    """Where greedy output differs."""

    prompt: str
    position: int
    gap: float  # between the target's two best logits there
    near_tie: bool


@dataclass
class Greedy:
    """Whether greedy output is the same with and without a draft."""

    prompts: int
    tokens: int
    lossless: bool
    differences: list[Difference]

    @property
    def explained(self) -> bool:
        """Whether rounding, or a rule that is not lossless, explains every difference."""
        return not self.lossless or all(difference.near_tie for difference in self.differences)


def _greedy_check(
    pair: Pair, prompts: list[Prompt], greedy: Comparison, *, lossless: bool
) -> Greedy:
    """Compare the greedy outputs; where they differ, look at how close the target's choice was."""
    differences = []
    pairs = zip(prompts, greedy.plain_tokens, greedy.speculative_tokens, strict=False)
    for prompt, plain, speculative in pairs:
        if plain == speculative:
            continue
        same = zip(plain, speculative, strict=False)
        index = next(
            (i for i, (a, b) in enumerate(same) if a != b), min(len(plain), len(speculative))
        )
        context = torch.cat([prompt.ids, torch.tensor([plain[:index]], device=pair.device)], 1)
        with torch.inference_mode():
            logits = pair.target(context.long()).logits[0, -1]
        best = logits.float().topk(2).values
        gap = (best[0] - best[1]).item()
        # A call on one token and a call on several round differently in the last bits.
        rounding = 64 * torch.finfo(logits.dtype).eps * best.abs().max().item()
        differences.append(Difference(prompt.name, index, gap, gap <= rounding))
    compared = greedy.plain_tokens
    return Greedy(len(compared), sum(map(len, compared)), lossless, differences)


# --- what the page says -----------------------------------------------------------------------


def _models(pair: Pair) -> tuple[str, str]:
    return f"target  {size_of(pair.target)}", f"draft   {pair.drafts_with}"


def _settings(pair: Pair, args: argparse.Namespace) -> str:
    count = torch.get_num_threads()
    threads = f", {count} thread{_s(count)}" if pair.device.type == "cpu" else ""
    return (
        f"rule {args.rule}, gamma {args.gamma}, temperature {args.temperature:g}, "
        f"{pair.device.type}{threads}"
    )


def _heading(out: Page, pair: Pair, args: argparse.Namespace) -> None:
    out.line()
    for line in _models(pair):
        out.line(line, "strong")
    out.line(_settings(pair, args), "faint")
    if pair.mismatch is not None:
        out.line(pair.mismatch, "strong")


def _completion(out: Page, pair: Pair, prompt: Prompt, args: argparse.Namespace) -> list[Piece]:
    """Complete one prompt before the reader's eyes; return its pieces."""
    out.line()
    unseen = (
        ""
        if args.prompt is not None or args.prompts or args.target
        else ", which the models have never seen"
    )
    out.line(f"{prompt.name}{unseen}:")
    out.rule()
    lines = prompt.text.splitlines(keepends=True)
    if len(lines) > SHOWN_LINES:
        out.text("...\n", "faint")
    out.text("".join(lines[-SHOWN_LINES:]), "faint")
    reader = Reader(pair.tokenizer, prompt.ids[0].tolist())
    pieces: list[Piece] = []

    def show(bursts: list[Burst]) -> None:
        for burst in bursts:
            for piece in pieces_of(burst, reader):
                pieces.append(piece)
                out.text(shown(piece.text) if piece.kind == REPLACED else piece.text, piece.kind)
        out.flush()

    _generate(pair, prompt, args, draft=True, temperature=args.temperature, on_round=show)
    out.rule()
    out.text("accepted draft tokens", ACCEPTED)
    out.text("   ")
    out.text("replaced draft tokens", REPLACED)
    out.text("   ")
    out.text("the target's own tokens", TARGET)
    out.line()
    return pieces


def _table(out: Page, runs: list[Comparison], beside: Beside) -> None:
    label, first, second = 28, 11, 13

    def row(name: str, cells: Iterable[tuple[str, str]]) -> None:
        columns = "".join(f"{plain:>{first}}{spec:>{second}}" for plain, spec in cells)
        out.line(f"{name:<{label}}{columns}")

    def both(name: str, value: Callable[[Statistics], str]) -> None:
        row(name, ((value(run.plain), value(run.speculative)) for run in runs))

    def one(name: str, value: Callable[[Comparison], str], plain: str = "") -> None:
        row(name, ((plain, value(run)) for run in runs))

    def share(phase: str) -> Callable[[Statistics], str]:
        return lambda statistics: f"{statistics.seconds[phase] / statistics.decode_seconds:.1%}"

    def title(run: Comparison) -> str:
        return f"temperature {run.temperature:g}" + ("" if run.temperature else " (greedy)")

    rule = out.dash * (label + (first + second) * len(runs))
    out.line(" " * label + "".join(f"{title(run):>{first + second}}" for run in runs), "strong")
    row("", [("plain", "speculative")] * len(runs))
    out.line(rule, "faint")
    both("tokens per second", lambda found: f"{found.tokens_per_second:.1f}")
    both("tokens per target call", lambda found: f"{found.tokens_per_target_call:.2f}")
    one("acceptance rate (alpha)", lambda run: _number(run.alpha))
    both("time in the draft", share("draft"))
    both("time in the target", share("target"))
    both("time in verification", share("verify"))
    both("time in the rest", share("rest"))
    out.line(rule, "faint")
    one("faster, measured", lambda run: f"{run.speedup:.2f} x")
    one("faster, by the formula *", lambda run: f"{_number(run.formula, 2)} x")
    one("  draft call, in target calls", lambda run: _number(run.draft_cost))
    one("  target call on gamma + 1", lambda run: _number(run.block_cost), "1")
    out.line()
    count, emitted = len(runs[0].plain.new_tokens), runs[0].plain.emitted
    for note in (
        "* (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)), c the cost of a draft call:",
        "  Leviathan et al. 2023, Theorem 3.8, where a target call costs 1 on any length.",
        f"  {count} prompt{_s(count)}, {emitted} greedy tokens each way, prompts included.",
        "  For comparison, greedy, same prompts, in turns: generate() of transformers makes",
        f"  {beside.theirs:.1f} tokens/s, plain decoding here {beside.ours:.1f}; "
        f"the same tokens on {beside.same} of {beside.prompts}.",
    ):
        out.line(note, "faint")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _verdict(out: Page, greedy: Greedy) -> None:
    out.line()
    compared = f"{greedy.tokens} tokens of {greedy.prompts} prompt{_s(greedy.prompts)} compared"
    if not greedy.differences:
        out.line(f"Greedy output is identical to plain greedy decoding: {compared}.", "strong")
    for found in greedy.differences:
        if not greedy.lossless:
            why = "This rule is not lossless."
        elif found.near_tie:
            why = "A tie to within rounding: calls on one and on several tokens round differently."
        else:
            why = "That is no tie: a defect."
        out.line(
            f"Greedy output differs from plain greedy decoding at token {found.position} of "
            f"{found.prompt}.",
            "strong",
        )
        out.line(f"The target's two best logits are {found.gap:.1e} apart there. {why}")
    out.line()


def _report(
    args: argparse.Namespace,
    pair: Pair,
    prompts: list[Prompt],
    pieces: list[Piece],
    runs: list[Comparison],
    beside: Beside,
    greedy: Greedy,
) -> dict[str, Any]:
    """Return what the page says, for programs."""
    return {
        "settings": {
            "target": args.target or str(find_pair() / "target"),
            "draft": args.draft
            or ("SuffixDrafter()" if args.target else str(find_pair() / "draft")),
            "rule": args.rule,
            "gamma": args.gamma,
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "seed": args.seed,
            "device": str(pair.device),
            "threads": torch.get_num_threads(),
            "tokenizers": pair.mismatch,
        },
        "completion": {
            "prompt": prompts[0].text,
            "pieces": [piece._asdict() for piece in pieces],
        },
        "prompts": [prompt.name for prompt in prompts],
        "comparisons": [
            {
                "temperature": run.temperature,
                "plain": run.plain.as_dict(),
                "speculative": run.speculative.as_dict(),
                "speedup": run.speedup,
                "formula_speedup": run.formula,
                "alpha": run.alpha,
                "c": run.draft_cost,
                "target_call_cost_on_gamma_plus_1": run.block_cost,
            }
            for run in runs
        ],
        "transformers_generate_tokens_per_second": beside.theirs,
        "beside_transformers": beside._asdict(),
        "greedy": {
            "identical": not greedy.differences,
            "prompts": greedy.prompts,
            "tokens": greedy.tokens,
            "differences": [difference._asdict() for difference in greedy.differences],
        },
    }
