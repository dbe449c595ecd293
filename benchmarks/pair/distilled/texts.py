"""What a draft learns from: conversations that its target wrote, with the laws it drew from.

A draft is asked what the target says next *in the target's own texts*: that is where it works.
Users' turns come from the target too, so that any chat model will do and no text has to be found:
an opening (openings.yaml, or prompts of the user's) is put into the chat template's user turn, the
target goes on with it until the turn ends, and answers; then it is told to go on with something
that refers to its answer (follow_ups.yaml), and answers again. Of each token of an answer the
likeliest entries of its law are kept: running the target again while the draft learns would cost
more than everything else together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from pair.data import save_atomically
from pair.distilled.decoding import Part, write

OPENINGS = Path(__file__).with_name("openings.yaml")
FOLLOW_UPS = Path(__file__).with_name("follow_ups.yaml")
# Of the answers, by turns: most users decode greedily or coolly.
TEMPERATURES = (0.0, 0.7, 0.0, 0.7, 1.0)
USER_TEMPERATURE = 0.8
SINGLE = 0.2  # of the conversations have one turn


class Answers(NamedTuple):
    """Conversations, one behind the other.

    Attributes
    ----------
    tokens : Tensor
        ``[N]`` int32, all conversations.
    answered : Tensor
        ``[N]`` bool, which of them the target said in an answer.
    lengths : Tensor
        ``[C]`` int64, the tokens of each.
    temperatures : Tensor
        ``[C]`` float32, of the answers; the laws are those at temperature 1.
    entries : Tensor
        ``[M, k]`` int32, for each answered token in order, the likeliest tokens.
    log_probs : Tensor
        ``[M, k]`` float16, the natural logarithms of their probabilities under the target.
    """

    tokens: Tensor
    answered: Tensor
    lengths: Tensor
    temperatures: Tensor
    entries: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes
    ----------
    batch : int
        Conversations written at a time.
    prompt_tokens, follow_up_tokens, answer_tokens : int
        At most that many tokens of the target's own in a user's first and second turn and in an
        answer.
    kept : int
        Entries of a law that are kept; tokens are drawn from these.
    seed : int
        Of everything; a shard is a function of it and its number.
    """

    batch: int = 128
    prompt_tokens: int = 80
    follow_up_tokens: int = 24
    answer_tokens: int = 192
    kept: int = 24
    seed: int = 0


class Start(NamedTuple):
    """How a user's first turn may begin, and how the second may."""

    opening: str
    follow_ups: Sequence[str]


class Template(NamedTuple):
    """What a chat template puts before the user's first turn, behind it, and behind an answer."""

    head: str
    to_answer: str
    to_user: str


def starts(path: Path | None = None) -> list[Start]:
    """Return how users' turns begin: ours, or a text file's lines with the follow-ups for all."""
    said = yaml.safe_load(FOLLOW_UPS.read_text(encoding="utf-8"))
    if path is None:
        kinds = yaml.safe_load(OPENINGS.read_text(encoding="utf-8"))
        return [
            Start(opening, said["any"] + said[kind])
            for kind, openings in kinds.items()
            for opening in openings
        ]
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} must have a prompt in some line, got none")
    return [Start(line, said["any"]) for line in lines]


def template_of(tokenizer: Any) -> Template:
    """Take a chat template apart.

    Raises
    ------
    ValueError
        It does not write the three turns that it is given as they are, in their order.
    """
    turns = ["(question)", "(answer)", "(comment)"]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces, rest = [], text
    for turn in turns:
        piece, found, rest = rest.partition(turn)
        if not found:
            raise ValueError(f"the chat template must write {turn} as it is, got {text!r}")
        pieces.append(piece)
    return Template(*pieces)


def scripts(
    tokenizer: Any, begun: Sequence[Start], plan: Plan, chance: random.Random
) -> list[list[Part]]:
    """Choose what is given of ``plan.batch`` conversations."""
    template = template_of(tokenizer)

    def part(given: str, most: int, temperature: float, answers: bool) -> Part:
        return Part(tokenizer.encode(given, add_special_tokens=False), most, temperature, answers)

    written = []
    for number, start in enumerate(chance.choices(begun, k=plan.batch)):
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        answer = part(template.to_answer, plan.answer_tokens, temperature, True)
        said = template.head + start.opening
        parts = [part(said, plan.prompt_tokens, USER_TEMPERATURE, False), answer]
        if chance.random() >= SINGLE:
            said = template.to_user + chance.choice(start.follow_ups)
            parts += [part(said, plan.follow_up_tokens, USER_TEMPERATURE, False), answer]
        written.append(parts)
    return written


def write_shard(
    target: Any, tokenizer: Any, begun: Sequence[Start], plan: Plan, number: int
) -> Answers:
    """Let the target write ``plan.batch`` conversations.

    Parameters
    ----------
    target : torch.nn.Module
        A causal model of transformers, in evaluation mode.
    tokenizer : PreTrainedTokenizerBase
        With a chat template.
    begun : sequence of Start
        How users' turns begin.
    plan : Plan
        How much.
    number : int
        Of the shard.

    Returns
    -------
    Answers
        Conversations whose answers were cut at the last permitted token are kept.
    """
    seed = plan.seed * 1_000_003 + number
    torch.manual_seed(seed)
    parts = scripts(tokenizer, begun, plan, random.Random(seed))
    written = write(target, parts, plan.kept, _end_tokens(target))
    return Answers(
        tokens=torch.cat(written.tokens),
        answered=torch.cat(written.answered),
        lengths=torch.tensor([len(text) for text in written.tokens]),
        temperatures=torch.tensor([own[1].temperature for own in parts]),
        entries=written.entries,
        log_probs=written.log_probs,
    )


def write_shards(
    target: Any, tokenizer: Any, begun: Sequence[Start], plan: Plan, folder: Path,
    job: int, jobs: int, seconds: float, shards: int | None = None,
) -> int:  # fmt: skip
    """Write shards ``job``, ``job + jobs``, ... that are not there yet, while there is time.

    Returns how many of this job's there are then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, longest, number, done = time.monotonic() + seconds, 0.0, job, 0
    while shards is None or number < shards:
        path = folder / f"{number:05d}.pt"
        if not path.exists():
            start = time.monotonic()
            if start + longest > end:
                break
            save_atomically(write_shard(target, tokenizer, begun, plan, number)._asdict(), path)
            longest = max(longest, time.monotonic() - start)
        number, done = number + jobs, done + 1
    return done


def read_shards(folder: Path) -> list[Answers]:
    """Return all shards of a folder, in order.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    paths = sorted(folder.glob("*.pt"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no conversations: run `texts` first")
    return [Answers(**torch.load(path)) for path in paths]


def _end_tokens(target: Any) -> list[int]:
    ends = target.generation_config.eos_token_id
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]
