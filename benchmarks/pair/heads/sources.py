"""What heads learn from and are tried on: a frozen target's states and logits, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pair.data import collect_corpus, encode, save_atomically
from pair.seq2seq.data import IGNORED, Batches, Pairs, batch_of
from pair.seq2seq.models import load_family
from specdec_ext.commands.pair import find_pair
from specdec_ext.decoding.encoder_decoder import encoded

SHIPPED = "pair"
CROP = 128  # tokens of a text in a batch
PROMPT = 48  # tokens of a text that is continued in a trial


class Rows(NamedTuple):
    """What a target computes on some texts.

    Attributes
    ----------
    tokens : Tensor
        ``[B, n]`` int64.
    features, logits : Tensor
        ``[B, n, D]`` and ``[B, n, V]``, the last hidden states at these tokens and what the
        target's head makes of them.
    mask : Tensor or None
        ``[B, n]``, zeros at padding.
    """

    tokens: Tensor
    features: Tensor
    logits: Tensor
    mask: Tensor | None


class Trial(NamedTuple):
    """A text to continue: a target that has read what it reads, and a prompt ``[1, P]``."""

    target: Any
    prompt: Tensor


@dataclass
class Source:
    """A target, and texts of its kind.

    Attributes
    ----------
    target : torch.nn.Module
        In evaluation mode, without gradients.
    inputs : dict of str to Tensor
        With what it may be called, to look at it.
    rows : callable
        Of a step's number, `Rows`: a function of it and the seed alone.
    trials : callable
        Of a number, so many `Trial` on texts that training does not see.
    """

    target: Any
    inputs: dict[str, Tensor]
    rows: Callable[[int], Rows]
    trials: Callable[[int], list[Trial]]


def open_source(
    name: str, work: Path, tasks: Path, batch_tokens: int, seed: int, device: torch.device
) -> Source:
    """Open a target by name.

    Parameters
    ----------
    name : str
        ``"pair"``: the shipped pair's target. A folder of ``tasks`` (build/seq2seq): the largest
        model of that task. Any other folder: a Hugging Face causal model with its tokenizer.
    work : Path
        Where tokens are kept.
    tasks : Path
        Where `benchmarks/pair/seq2seq` leaves its models.
    batch_tokens : int
        Tokens of a step.
    seed : int
        Of the batches.
    device : torch.device
        Where the target runs.

    Raises
    ------
    FileNotFoundError
        There is no such model.
    """
    if (tasks / name / "data.pt").exists():
        return _of_pairs(tasks / name, batch_tokens, seed, device)
    folder = find_pair() / "target" if name == SHIPPED else Path(name)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"target must be {SHIPPED}, a task of {tasks} or a model's folder, got {name!r}"
        )
    return _of_text(folder, work, batch_tokens, seed, device)


def _of_text(
    folder: Path, work: Path, batch_tokens: int, seed: int, device: torch.device
) -> Source:
    """Open a causal model on the standard library's sources, cropped."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = target.to(device).eval().requires_grad_(False)
    beside = folder.parent / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(beside if beside.is_dir() else folder)
    cache = work / "tokens.pt"
    if not cache.exists():
        work.mkdir(parents=True, exist_ok=True)
        corpus = collect_corpus()
        parts = {"train": corpus.library, "held_out": corpus.held_out}
        save_atomically({key: encode(tokenizer, texts) for key, texts in parts.items()}, cache)
    streams = torch.load(cache)

    def crops(stream: Tensor, number: int, length: int, key: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + key)
        starts = torch.randint(len(stream) - length, (number, 1), generator=generator)
        texts = stream[starts + torch.arange(length)]
        if tokenizer.bos_token_id is not None:  # as a text begins
            texts[:, 0] = tokenizer.bos_token_id
        return texts.to(device)

    @torch.no_grad()
    def rows(step: int) -> Rows:
        tokens = crops(streams["train"], max(batch_tokens // CROP, 1), CROP, step)
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return Rows(tokens, output.hidden_states[-1], output.logits, None)

    def trials(number: int) -> list[Trial]:
        prompts = crops(streams["held_out"], number, PROMPT, 0)
        return [Trial(target, prompt[None]) for prompt in prompts]

    return Source(target, {"input_ids": crops(streams["train"], 1, 8, 0)}, rows, trials)


def _of_pairs(folder: Path, batch_tokens: int, seed: int, device: torch.device) -> Source:
    """Open the largest encoder-decoder of a task on its pairs."""
    family = load_family(folder)
    target = family.models[family.largest].to(device).requires_grad_(False)
    pairs: Pairs = family.splits["train"]
    batches = Batches(pairs, batch_tokens, seed)

    def called_with(chosen: Pairs, numbers: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        batch = batch_of(chosen, numbers, device)
        given = {
            "input_ids": batch.inputs,
            "attention_mask": batch.mask,
            "decoder_input_ids": target._shift_right(batch.labels),
        }
        return given, batch.labels.ne(IGNORED)

    @torch.no_grad()
    def rows(step: int) -> Rows:
        given, mask = called_with(pairs, batches[step])
        output = target(**given, use_cache=False, output_hidden_states=True)
        states = output.decoder_hidden_states[-1]
        return Rows(given["decoder_input_ids"], states, output.logits, mask)

    def trials(number: int) -> list[Trial]:
        some = family.splits["test"].some(number)
        start = torch.full((1, 1), target.config.decoder_start_token_id, device=device)
        batches_of_one = (batch_of(some, [i], device) for i in range(len(some)))
        return [
            Trial(encoded(target, input_ids=one.inputs, attention_mask=one.mask), start)
            for one in batches_of_one
        ]

    return Source(target, called_with(pairs, [0])[0], rows, trials)
