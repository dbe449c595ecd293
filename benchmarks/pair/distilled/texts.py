"""What a draft learns from: conversations that its target wrote, with the laws it drew from.

A draft is asked what the target says next *in the target's own texts*: that is where it works.
Prompts come from the target too, so that any chat model will do and no text has to be found: an
opening (openings.yaml, or prompts of the user's) is put into the chat template's user turn, the
target goes on with it until the turn ends, and answers. Of each token of an answer the likeliest
entries of its law are kept: running the target again while the draft learns would cost more than
everything else together.
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
from transformers import LogitsProcessor, LogitsProcessorList

from pair.data import save_atomically

OPENINGS = Path(__file__).with_name("openings.yaml")
TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, by turns


class Answers(NamedTuple):
    """Conversations, one behind the other.

    Attributes
    ----------
    tokens : Tensor
        ``[N]`` int32, all conversations.
    lengths : Tensor
        ``[C]`` int64, the tokens of each.
    prompts : Tensor
        ``[C]`` int64, how many of them are the prompt.
    temperatures : Tensor
        ``[C]`` float32, of the answers; the laws are those at temperature 1.
    entries : Tensor
        ``[M, k]`` int32, for each answered token in order, the likeliest tokens.
    log_probs : Tensor
        ``[M, k]`` float16, the natural logarithms of their probabilities under the target.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
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
    prompt_tokens, answer_tokens : int
        At most that many new tokens of a user's turn and of an answer.
    kept : int
        Entries of a law that are kept.
    seed : int
        Of everything; a shard is a function of it and its number.
    """

    batch: int = 64
    prompt_tokens: int = 80
    answer_tokens: int = 256
    kept: int = 24
    seed: int = 0


class _Keep(LogitsProcessor):
    """Keeps the likeliest entries of every row; makes rows of temperature 0 certain."""

    def __init__(self, temperatures: Tensor, kept: int) -> None:
        self.temperatures, self.kept = temperatures, kept
        self.entries: list[Tensor] = []
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.float()
        values, entries = logits.topk(self.kept, -1)
        self.entries.append(entries.int())
        self.log_probs.append((values - logits.logsumexp(-1, keepdim=True)).half())
        greedy = (self.temperatures == 0)[:, None]
        certain = torch.full_like(logits, -torch.inf).scatter_(1, entries[:, :1], 0.0)
        warm = torch.where(greedy, 1.0, self.temperatures[:, None])
        return torch.where(greedy, certain, logits / warm)


def openings(path: Path | None = None) -> list[str]:
    """Return how users' turns begin: ours, or a text file's lines."""
    if path is None:
        kinds = yaml.safe_load(OPENINGS.read_text(encoding="utf-8"))
        return [opening for kind in kinds.values() for opening in kind]
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} must have a prompt in some line, got none")
    return lines


def write_shard(
    target: Any, tokenizer: Any, begun: Sequence[str], plan: Plan, number: int
) -> Answers:
    """Let the target write ``plan.batch`` conversations.

    Parameters
    ----------
    target : torch.nn.Module
        A causal model, in evaluation mode.
    tokenizer : PreTrainedTokenizerBase
        With a chat template.
    begun : sequence of str
        Openings of users' turns.
    plan : Plan
        How much.
    number : int
        Of the shard.

    Returns
    -------
    Answers
        Conversations whose answer was cut at its last permitted token are kept.
    """
    chosen = random.Random(plan.seed * 1_000_003 + number).choices(begun, k=plan.batch)
    torch.manual_seed(plan.seed * 1_000_003 + number)
    ends = _end_tokens(target)
    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": opening}], tokenize=False, continue_final_message=True
        )
        for opening in chosen
    ]
    written = _generate(
        target, [tokenizer.encode(turn, add_special_tokens=False) for turn in turns],
        ends, plan.prompt_tokens, temperature=0.8, top_p=0.95,
    )  # fmt: skip
    prompts = []
    for opening, added in zip(chosen, written, strict=True):
        said = opening + tokenizer.decode(added, skip_special_tokens=True)
        messages = [{"role": "user", "content": said}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    turn = torch.arange(plan.batch) % len(TEMPERATURES)
    temperatures = torch.tensor(TEMPERATURES)[turn]
    keep = _Keep(temperatures.to(target.device), plan.kept)
    answers = _generate(target, prompts, ends, plan.answer_tokens, keep=keep)
    rows = [row for row, answer in enumerate(answers) for _ in answer]
    steps = [step for answer in answers for step in range(len(answer))]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return Answers(
        tokens=torch.tensor([token for text in whole for token in text], dtype=torch.int32),
        lengths=torch.tensor([len(text) for text in whole]),
        prompts=torch.tensor([len(prompt) for prompt in prompts]),
        temperatures=temperatures,
        entries=torch.stack(keep.entries)[steps, rows].cpu(),
        log_probs=torch.stack(keep.log_probs)[steps, rows].cpu(),
    )


def write_shards(
    target: Any, tokenizer: Any, begun: Sequence[str], plan: Plan, folder: Path,
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


@torch.no_grad()
def _generate(
    target: Any, prompts: Sequence[Sequence[int]], ends: Sequence[int], new: int,
    keep: _Keep | None = None, **law: float,
) -> list[list[int]]:  # fmt: skip
    """Return what the target adds to each prompt, its end token included where it came."""
    width = max(map(len, prompts))
    ids = torch.tensor([[ends[0]] * (width - len(text)) + list(text) for text in prompts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in prompts])
    output = target.generate(
        ids.to(target.device), attention_mask=mask.to(target.device), do_sample=True, top_k=0,
        max_new_tokens=new, pad_token_id=ends[0], eos_token_id=list(ends),
        logits_processor=LogitsProcessorList([] if keep is None else [keep]), **law,
    )  # fmt: skip
    texts = []
    for row in output[:, width:].tolist():
        stops = [i for i, token in enumerate(row) if token in ends]
        texts.append(row[: stops[0] + 1] if stops else row)
    return texts
