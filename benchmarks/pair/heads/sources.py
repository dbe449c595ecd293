"""What heads learn from and are tried on: a frozen target's states and logits, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from pair.data import collect_corpus, encode, save_atomically
from pair.distilled.texts import read_shards
from pair.distilled.training import batch_of as side_by_side
from pair.distilled.training import conversations, frequent_tokens, orders
from pair.models import model_folder
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
        target's head makes of them; ``[B, n, Vd]`` where only the logits of Vd tokens were asked
        for.
    mask : Tensor or None
        ``[B, n]``, zeros at padding, and where what comes next was not the target's to say.
    """

    tokens: Tensor
    features: Tensor
    logits: Tensor
    mask: Tensor | None


class RowsOf(Protocol):
    """Of a step's number, `Rows`: a function of it and the seed alone."""

    def __call__(self, step: int, among: Tensor | None = None) -> Rows:
        """Return a step's rows, with the logits of the tokens ``among`` alone, ``[Vd]``."""


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
    rows : RowsOf
        What a step learns from.
    trials : callable
        Of a number, so many `Trial` on texts that training does not see.
    frequent : callable, optional
        Of a number, so many tokens that the target finds likeliest in its texts, in order, where
        that is known without running it.
    """

    target: Any
    inputs: dict[str, Tensor]
    rows: RowsOf
    trials: Callable[[int], list[Trial]]
    frequent: Callable[[int], Tensor] | None = None


def open_source(
    name: str, work: Path, tasks: Path, batch_tokens: int, seed: int, device: torch.device,
    shards: Path | None = None, dtype: torch.dtype = torch.float32,
) -> Source:  # fmt: skip
    """Open a target by name.

    Parameters
    ----------
    name : str
        ``"pair"``: the shipped pair's target. A folder of ``tasks`` (build/seq2seq): the largest
        model of that task. Any other folder, or the name of a model that was fetched: a Hugging
        Face causal model with its tokenizer.
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
    shards : Path, optional
        A folder of conversations that a causal target wrote (`benchmarks/pair/distilled texts`), of
        which the first shard is held out. Without it causal targets read the standard library.
    dtype : torch.dtype
        Of a causal target.

    Raises
    ------
    FileNotFoundError
        There is no such model, or there are no such conversations.
    ValueError
        ``shards`` or another dtype for an encoder-decoder, a single shard, or with ``shards`` a
        target whose logits are not its output head's of its last states.
    """
    if (tasks / name / "data.pt").exists():
        if shards is not None or dtype != torch.float32:
            raise ValueError(
                f"conversations and bfloat16 are for causal targets, got the task {name}"
            )
        return _of_pairs(tasks / name, batch_tokens, seed, device)
    try:
        folder = find_pair() / "target" if name == SHIPPED else model_folder(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, which is no task of {tasks} either") from None
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    target = target.to(device).eval().requires_grad_(False)
    if shards is not None:
        return _of_conversations(target, shards, batch_tokens, seed)
    return _of_text(target, folder, work, batch_tokens, seed)


def _some(logits: Tensor, among: Tensor | None) -> Tensor:
    """Return the logits of some tokens."""
    return logits if among is None else logits[..., among]


def _of_conversations(target: Any, shards: Path, batch_tokens: int, seed: int) -> Source:
    """Open a chat model on its own conversations; only what it answered counts.

    There are few enough of them that a training reads each several times, and the target costs more
    than most heads: its states, of each text alone, are computed once and kept, its logits made of
    them anew.
    """
    held_out, *rest = read_shards(shards)
    if not rest:
        raise ValueError(f"{shards} must have 2 shards at least (one is held out), got 1")
    texts = conversations(rest)
    length = sum(len(text.tokens) for text in texts) // len(texts)
    chosen = orders(texts, max(batch_tokens // length, 1), seed)
    head = target.get_output_embeddings()

    @cache
    @torch.no_grad()
    def states(number: int) -> Tensor:
        tokens = texts[number].tokens[None].to(target.device)
        found: Tensor = target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return found[0].cpu()

    def logits_of(features: Tensor, among: Tensor | None) -> Tensor:
        if among is None:
            return head(features)
        bias = None if head.bias is None else head.bias[among]
        return F.linear(features, head.weight[among], bias)

    @torch.no_grad()
    def rows(step: int, among: Tensor | None = None) -> Rows:
        numbers = chosen(step)
        batch = side_by_side([texts[number] for number in numbers])
        features = pad_sequence([states(number) for number in numbers], batch_first=True)
        # A state counts where the target's own words stand behind it.
        mask = F.pad(batch.answered, (0, 1))
        tokens, features, mask = (part.to(target.device) for part in (batch.tokens, features, mask))
        return Rows(tokens, features, logits_of(features, among), mask)

    first = texts[0].tokens[None, :8].to(target.device)
    with torch.no_grad():
        last = target.base_model(input_ids=first, use_cache=False).last_hidden_state
        expected = target(input_ids=first, use_cache=False).logits
    if not torch.allclose(logits_of(last, None), expected, rtol=1e-2, atol=1e-2):
        raise ValueError(
            "heads learn from conversations of targets whose logits are their output head's of "
            f"their last hidden states, unscaled; got {type(target).__name__}, whose are not"
        )

    def trials(number: int) -> list[Trial]:
        some = conversations([held_out])[:number]
        prompts = [text.tokens[: int(text.answered.int().argmax())] for text in some]
        return [Trial(target, prompt[None].to(target.device)) for prompt in prompts]

    def frequent(number: int) -> Tensor:
        return frequent_tokens(texts, number, target.config.get_text_config().vocab_size)

    return Source(target, {"input_ids": first}, rows, trials, frequent)


def _of_text(target: Any, folder: Path, work: Path, batch_tokens: int, seed: int) -> Source:
    """Open a causal model on the standard library's sources, cropped."""
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
        return texts.to(target.device)

    @torch.no_grad()
    def rows(step: int, among: Tensor | None = None) -> Rows:
        tokens = crops(streams["train"], max(batch_tokens // CROP, 1), CROP, step)
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return Rows(tokens, output.hidden_states[-1], _some(output.logits, among), None)

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
    def rows(step: int, among: Tensor | None = None) -> Rows:
        given, mask = called_with(pairs, batches[step])
        output = target(**given, use_cache=False, output_hidden_states=True)
        states = output.decoder_hidden_states[-1]
        return Rows(given["decoder_input_ids"], states, _some(output.logits, among), mask)

    def trials(number: int) -> list[Trial]:
        some = family.splits["test"].some(number)
        start = torch.full((1, 1), target.config.decoder_start_token_id, device=device)
        batches_of_one = (batch_of(some, [i], device) for i in range(len(some)))
        return [
            Trial(encoded(target, input_ids=one.inputs, attention_mask=one.mask), start)
            for one in batches_of_one
        ]

    return Source(target, called_with(pairs, [0])[0], rows, trials)
