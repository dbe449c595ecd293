"""Drafters on texts that a model wrote before: how many tokens a call they would have made.

    python benchmarks/replay.py record texts.json --target smollm2 --prompts prompts/*.yaml
    python benchmarks/replay.py times times.json --target smollm2
    python benchmarks/replay.py play texts.json --drafters lookup suffix --gamma 5 10
    python benchmarks/replay.py play texts.json --times times.json

Under greedy decoding a draft token is accepted if it is the text's next one. So a recorded text
says exactly which drafts a drafter would have made and what would have become of them, and a change
of a drafter is judged in seconds, without a model. A sampled text says it as well: drafters that
copy propose tokens, not laws, and such a token x is accepted with the probability p(x) that the
target gives it, which is how often x is what plain decoding draws; where it is not, the token that
takes its place follows the law of the other draws. `record` decodes prompts plainly, greedily or
with ``--temperature``; `play` gives the tokens a call of drafters and of transformers' prompt
lookup, kind by kind (a kind is a prompt file's name), with standard errors over prompts, and the
draft tokens a call that it took.

`times` measures what a call of the target takes by its number of tokens. With those, `play` also
gives each drafter's speed over plain decoding, the geometric mean over texts, as if nothing but the
target took time, and lets `RenewalRule` play, one that goes on learning from text to text, a text
of each kind by turns, and one that begins anew with each. Its clock shows these times, each with
some noise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec_ext.commands.pair import Prompt, as_prompt, left_padded, load_pair
from specdec_ext.commands.prompt_files import read_prompts
from specdec_ext.decoding import RenewalRule, Requests
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafting import allowed, draft_allowed
from specdec_ext.decoding.hosting import host_model
from specdec_ext.decoding.policies import as_policy

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from contestants import DRAFTERS, Setting, ends, ours, timed  # noqa: E402

CPU = torch.device("cpu")


class Text(NamedTuple):
    """What a model wrote.

    Attributes
    ----------
    kind, name : str
        The prompt's.
    prompt, output : list of int
        Tokens; the output ends with one of ``ends`` unless it was cut off after ``limit`` tokens.
    """

    kind: str
    name: str
    prompt: list[int]
    output: list[int]
    ends: list[int]
    limit: int


class Played(NamedTuple):
    """What a drafter made of a text: calls of the target, draft tokens in them, and the speed."""

    tokens: int
    calls: int
    drafted: int
    speed: float = math.nan


#: Given the tokens so far (the prompt alone at first) and how many may be drafted, proposes some.
Propose = Callable[[list[int], int], list[int]]


class CallTimes:
    """A clock that shows what calls of the target have taken, by their number of tokens.

    Parameters
    ----------
    seconds : mapping of int to float
        Of calls of so many tokens; of others the times are interpolated.
    noise : float
        Standard deviation of a time's logarithm.
    """

    def __init__(self, seconds: Mapping[int, float], noise: float) -> None:
        self._known, self._noise = sorted(seconds.items()), noise
        self._random, self.now = random.Random(0), 0.0

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def of(self, rows: int) -> float:
        """Return what a call of so many tokens takes."""
        (low, before), (high, after) = next(
            (pair for pair in pairwise(self._known) if rows <= pair[1][0]),
            (self._known[-2], self._known[-1]),
        )
        return before + (after - before) * (rows - low) / (high - low)

    def spend(self, rows: int) -> None:
        """Let the time of a call go by."""
        self.now += self.of(rows) * math.exp(self._random.gauss(0, self._noise))


def play(text: Text, propose: Propose, times: CallTimes | None = None) -> Played:
    """Decode a text again, with drafts."""
    output, done, calls, drafted = text.output, 0, 0, 0
    begun = 0.0 if times is None else times.now
    while done < len(output):
        draft = propose(output[:done], text.limit - done - 1)
        if times is not None:
            times.spend(len(draft) + 1)
        accepted = 0
        for token, next_one in zip(draft, output[done:], strict=False):
            if token != next_one:
                break
            accepted += 1
        done = min(done + accepted + 1, len(output))
        calls, drafted = calls + 1, drafted + len(draft)
    speed = math.nan
    if times is not None:
        speed = len(output) * times.of(1) / (times.now - begun)
    return Played(len(output), calls, drafted, speed)


def ours_on(text: Text, drafter: Any, gamma: Any) -> Propose:
    """Start a drafter on a text's prompt, and tell it what was emitted since it was asked last.

    A policy for gamma is told as well.
    """
    policy = as_policy("gamma", gamma)
    policy.start(1)
    start = len(text.prompt)
    drafter.start(
        Requests(
            torch.tensor([text.prompt]), None, torch.tensor([start + text.limit]), 0, None, {},
            greedy=True, needs_law=False,
        )
    )  # fmt: skip
    known = drafted = 0

    def propose(written: list[int], most: int) -> list[int]:
        nonlocal known, drafted
        if new := written[known:]:
            policy.commit([drafted], [len(new) - 1])
            drafter.commit(torch.tensor([new]), Counts.on(CPU, [len(new) - 1]))
            known = len(written)
        room = allowed(policy, drafter, [max(most, 0)])
        draft = draft_allowed(policy, drafter, room, torch.tensor([start + known]), None)
        row: list[int] = draft.tokens[0].tolist()
        row = row[: row.index(-1)] if -1 in row else row
        drafted = len(row)
        return row

    return propose


def theirs_on(text: Text, gamma: int) -> Propose:
    """Let transformers' prompt lookup propose."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(text.ends) if text.ends else None,
        num_output_tokens=gamma,
        max_length=len(text.prompt) + text.limit,
    )

    def propose(written: list[int], most: int) -> list[int]:
        ids = torch.tensor([text.prompt + written])
        found: list[int] = generator.get_candidates(ids)[0][0, ids.shape[1] :].tolist()
        return found[: max(most, 0)]

    return propose


def record(options: argparse.Namespace) -> None:
    """Decode prompts plainly, some at a time, and write the texts after each batch."""
    pair = load_pair(options.target, device=options.device, needs_draft=False)
    prompts: list[tuple[str, Prompt]] = [
        (path.stem, as_prompt(pair, given, chat=True))
        for path in options.prompts
        for given in read_prompts(path)
    ]
    found: list[Text] = []
    # Prompts of like lengths together: little padding.
    prompts.sort(key=lambda item: item[1].ids.shape[1])
    for begin in range(0, len(prompts), options.batch):
        some = prompts[begin : begin + options.batch]
        ids, mask = left_padded([prompt.ids[0] for _, prompt in some])
        setting = Setting(len(some), options.temperature)
        plain = ours(pair, setting, options.tokens, stops=True)
        outputs = plain(ids, mask, options.seed).tokens
        for (kind, prompt), output in zip(some, outputs, strict=True):
            asked = prompt.ids[0].tolist()
            text = Text(kind, prompt.name, asked, output, list(ends(pair)), options.tokens)
            found.append(text)
        options.file.write_text(json.dumps([text._asdict() for text in found]))
        print(f"{len(found)} of {len(prompts)} texts", flush=True)


def contestants(options: argparse.Namespace) -> dict[str, Callable[[Text], Propose]]:
    """List who plays."""
    found: dict[str, Callable[[Text], Propose]] = {}
    times = options.clock
    for name in options.drafters if times is not None else ():
        policy = RenewalRule(clock=times.clock)
        found[f"{name}, renewal"] = lambda text, n=name, p=policy: ours_on(
            text, DRAFTERS[n](None), p
        )
        found[f"{name}, renewal anew"] = lambda text, n=name: ours_on(
            text, DRAFTERS[n](None), RenewalRule(clock=times.clock)
        )
    for gamma in options.gamma:
        found[f"transformers, lookup {gamma}"] = lambda text, g=gamma: theirs_on(text, g)
        for name in options.drafters:
            found[f"{name}, gamma {gamma}"] = lambda text, g=gamma, n=name: ours_on(
                text, DRAFTERS[n](None), g
            )
    return found


def in_turn(texts: Sequence[Text]) -> list[Text]:
    """Order texts so that one of each kind comes, then the next ones: users' texts are mixed."""
    by_kind: dict[str, list[Text]] = {}
    for text in texts:
        by_kind.setdefault(text.kind, []).append(text)
    return [text for row in zip_longest(*by_kind.values()) for text in row if text is not None]


def summarize(played: dict[str, dict[str, list[Played]]]) -> list[dict[str, Any]]:
    """Make a record a contestant and kind."""
    records = []
    for name, by_kind in played.items():
        for kind, runs in by_kind.items():
            mean, error = common.ratio([(run.tokens, run.calls) for run in runs])
            records.append(
                {
                    "contestant": name,
                    "kind": kind,
                    "texts": len(runs),
                    "tokens": sum(run.tokens for run in runs),
                    "calls": sum(run.calls for run in runs),
                    "drafted": sum(run.drafted for run in runs),
                    "tokens_per_call": mean,
                    "tokens_per_call_se": error,
                    **speeds(runs),
                }
            )
    return records


def speeds(runs: Sequence[Played]) -> dict[str, float]:
    """Give the geometric mean of the speeds over plain decoding, if they are known."""
    logs = [math.log(run.speed) for run in runs if not math.isnan(run.speed)]
    if len(logs) < 2:
        return {}
    mean = math.exp(statistics.mean(logs))
    error = mean * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"speed": mean, "speed_se": error, "least_speed": math.exp(min(logs))}


def measure_times(options: argparse.Namespace) -> None:
    """Time calls of the target behind a prompt, of 1 token and more, by turns."""
    pair = load_pair(
        options.target, device=options.device, needs_draft=False, packed=options.packed
    )
    ids = torch.arange(1, options.prompt + 1)[None].to(pair.device)
    found: dict[int, list[float]] = {rows: [] for rows in options.rows}
    with torch.inference_mode():
        target = host_model(pair.target, ids[:, -1], room=512, static=False, uneven=False)
        target.prefill(ids, None, rides=False)
        for rows in options.rows * (options.repeats + 1):
            _, seconds = timed(lambda n=rows: target.forward(ids[:, :n]), pair.device)
            target.rollback(Counts.on(ids.device, [rows]))
            found[rows].append(seconds)
    medians = {rows: statistics.median(taken[1:]) for rows, taken in found.items()}
    options.file.write_text(json.dumps(medians))
    plain = medians[1]
    for rows, seconds in medians.items():
        print(f"{rows} tokens: {1e3 * seconds:.1f} ms, {seconds / plain:.2f} times that of one")


def table(records: list[dict[str, Any]]) -> str:
    """Format tokens a call, with standard errors, draft tokens a call and speed, by kind."""
    kinds = list(dict.fromkeys(r["kind"] for r in records))
    rows: dict[str, list[str]] = {}
    for r in records:
        drafted = r["drafted"] / r["calls"]
        cell = f"{r['tokens_per_call']:.2f} ({r['tokens_per_call_se']:.2f}), {drafted:.1f}"
        if "speed" in r:
            cell += f", {r['speed']:.2f}x ({r['speed_se']:.2f}, least {r['least_speed']:.2f})"
        rows.setdefault(r["contestant"], [r["contestant"]]).append(cell)
    return common.markdown_table(["tokens a call (se), drafted", *kinds], list(rows.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--target", required=True)
    recording.add_argument("--prompts", type=Path, nargs="+", required=True)
    recording.add_argument("--tokens", type=int, default=96, help="new tokens a prompt at most")
    recording.add_argument("--batch", type=int, default=8)
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("--seed", type=int, default=0, help="of the sampling")
    recording.add_argument("--device", default="cpu")
    timing = commands.add_parser("times")
    timing.add_argument("file", type=Path)
    timing.add_argument("--target", required=True)
    timing.add_argument("--prompt", type=int, default=200, help="tokens before the calls")
    timing.add_argument("--rows", type=int, nargs="+", default=[*range(1, 18)])
    timing.add_argument("--repeats", type=int, default=15)
    timing.add_argument("--device", default="cpu")
    timing.add_argument("--packed", action="store_true", help="see pack_linears")
    playing = commands.add_parser("play")
    playing.add_argument("files", type=Path, nargs="+", metavar="file")
    playing.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=["lookup", "suffix"])
    playing.add_argument("--gamma", type=int, nargs="+", default=[5, 10])
    playing.add_argument("--times", type=Path, help="what `times` wrote")
    playing.add_argument("--noise", type=float, default=0.05, help="of a time's logarithm")
    playing.add_argument("--output", type=Path, help="a record's name, without the suffix")
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options)
        return 0
    if options.command == "times":
        measure_times(options)
        return 0
    options.clock = None
    if options.times is not None:
        known = {int(n): s for n, s in json.loads(options.times.read_text()).items()}
        options.clock = CallTimes(known, options.noise)
    texts = in_turn(
        [Text(**item) for file in options.files for item in json.loads(file.read_text())]
    )
    played: dict[str, dict[str, list[Played]]] = {}
    for name, start in contestants(options).items():
        by_kind = played.setdefault(name, {})
        for text in texts:
            found = play(text, start(text), options.clock)
            by_kind.setdefault(text.kind, []).append(found)
    records = summarize(played)
    shown = table(records)
    print(shown)
    if options.output is not None:
        facts = common.machine_facts()
        facts["command"] = " ".join(["replay.py", *(arguments or sys.argv[1:])])
        common.write_record(options.output, facts, records, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
