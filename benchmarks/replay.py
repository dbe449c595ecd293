"""Drafters on texts that a model wrote before: how many tokens a call they would have made.

    python benchmarks/replay.py record texts.json --target smollm2 --prompts prompts/*.yaml
    python benchmarks/replay.py play texts.json --drafters lookup suffix --gamma 5 10

Under greedy decoding a draft token is accepted if it is the text's next one. So a recorded text
says exactly which drafts a drafter would have made and what would have become of them, and a change
of a drafter is judged in seconds, without a model. `record` decodes prompts plainly and greedily;
`play` gives the tokens a call of drafters and of transformers' prompt lookup, kind by kind (a kind
is a prompt file's name), with standard errors over prompts, and the draft tokens a call that it
took.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec_ext.commands.pair import Prompt, as_prompt, left_padded, load_pair
from specdec_ext.commands.prompt_files import read_prompts
from specdec_ext.decoding import Requests
from specdec_ext.decoding.counts import Counts

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from contestants import DRAFTERS, Setting, ends, ours  # noqa: E402

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
    """What a drafter made of a text: calls of the target, and draft tokens in them."""

    tokens: int
    calls: int
    drafted: int


#: Given the tokens so far (the prompt alone at first) and how many may be drafted, proposes some.
Propose = Callable[[list[int], int], list[int]]


def play(text: Text, propose: Propose) -> Played:
    """Decode a text again, with drafts."""
    output, done, calls, drafted = text.output, 0, 0, 0
    while done < len(output):
        draft = propose(output[:done], text.limit - done - 1)
        accepted = 0
        for token, next_one in zip(draft, output[done:], strict=False):
            if token != next_one:
                break
            accepted += 1
        done = min(done + accepted + 1, len(output))
        calls, drafted = calls + 1, drafted + len(draft)
    return Played(len(output), calls, drafted)


def ours_on(text: Text, drafter: Any, gamma: int) -> Propose:
    """Start a drafter on a text's prompt, and tell it what was emitted since it was asked last."""
    start = len(text.prompt)
    drafter.start(
        Requests(
            torch.tensor([text.prompt]), None, torch.tensor([start + text.limit]), 0, None, {},
            greedy=True, needs_law=False,
        )
    )  # fmt: skip
    known = 0

    def propose(written: list[int], most: int) -> list[int]:
        nonlocal known
        if new := written[known:]:
            drafter.commit(torch.tensor([new]), Counts.on(CPU, [len(new) - 1]))
            known = len(written)
        if most < 1:
            return []
        row: list[int] = drafter.propose(
            min(gamma, most), torch.tensor([start + known])
        ).tokens[0].tolist()  # fmt: skip
        return row[: row.index(-1)] if -1 in row else row

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
    pair = load_pair(options.target, device=options.device, alone=True)
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
        plain = ours(pair, Setting(len(some), 0.0), options.tokens, stops=True)
        outputs = plain(ids, mask, 0).tokens
        for (kind, prompt), output in zip(some, outputs, strict=True):
            asked = prompt.ids[0].tolist()
            text = Text(kind, prompt.name, asked, output, list(ends(pair)), options.tokens)
            found.append(text)
        options.file.write_text(json.dumps([text._asdict() for text in found]))
        print(f"{len(found)} of {len(prompts)} texts", flush=True)


def contestants(options: argparse.Namespace) -> dict[str, Callable[[Text], Propose]]:
    """List who plays."""
    found: dict[str, Callable[[Text], Propose]] = {}
    for gamma in options.gamma:
        found[f"transformers, lookup {gamma}"] = lambda text, g=gamma: theirs_on(text, g)
        for name in options.drafters:
            found[f"{name}, gamma {gamma}"] = lambda text, g=gamma, n=name: ours_on(
                text, DRAFTERS[n](None), g
            )
    return found


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
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Format tokens a call, with standard errors, and draft tokens a call, by kind."""
    kinds = list(dict.fromkeys(r["kind"] for r in records))
    rows: dict[str, list[str]] = {}
    for r in records:
        drafted = r["drafted"] / r["calls"]
        cell = f"{r['tokens_per_call']:.2f} ({r['tokens_per_call_se']:.2f}), {drafted:.1f}"
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
    recording.add_argument("--device", default="cpu")
    playing = commands.add_parser("play")
    playing.add_argument("file", type=Path)
    playing.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=["lookup", "suffix"])
    playing.add_argument("--gamma", type=int, nargs="+", default=[5, 10])
    playing.add_argument("--output", type=Path, help="a record's name, without the suffix")
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options)
        return 0
    texts = [Text(**item) for item in json.loads(options.file.read_text())]
    kinds = dict.fromkeys(text.kind for text in texts)
    played = {
        name: {kind: [play(t, start(t)) for t in texts if t.kind == kind] for kind in kinds}
        for name, start in contestants(options).items()
    }
    records = summarize(played)
    text = table(records)
    print(text)
    if options.output is not None:
        facts = common.machine_facts()
        facts["command"] = " ".join(["replay.py", *(arguments or sys.argv[1:])])
        common.write_record(options.output, facts, records, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
