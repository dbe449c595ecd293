"""Pairs of texts as tokens of one BPE, and batches of pairs of like length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pair.data import EOS, PAD, save_atomically, train_byte_bpe

PAD_ID, EOS_ID = 0, 1
VOCABULARY = 4096
SPLITS = ("train", "valid", "test")
# Pairs longer than the last one, in tokens of either side, are left out, and counted.
BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
IGNORED = -100


@dataclass
class Pairs:
    """Token ids of sources and of their targets, each ended by ``</s>``."""

    sources: list[list[int]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sources)

    def some(self, number: int) -> Pairs:
        """Return at most so many pairs, evenly spread, so that every document keeps its part."""
        number = min(number, len(self))
        chosen = [k * len(self) // number for k in range(number)]
        return Pairs([self.sources[k] for k in chosen], [self.targets[k] for k in chosen])

    def target_tokens(self) -> int:
        """Return the number of target tokens."""
        return sum(len(target) for target in self.targets)


# -------------------------------------------------------------------------------------------------
# From texts to tokens
# -------------------------------------------------------------------------------------------------


def read_records(path: Path, permissive_only: bool) -> list[tuple[str, str]]:
    """Read ``(source, target)`` from a file of benchmarks/tasks."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `python benchmarks/tasks` first")
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        (record["source"], record["target"])
        for record in records
        if record["permissive"] or not permissive_only
    ]


def train_tokenizer(pairs: list[tuple[str, str]], folder: Path) -> PreTrainedTokenizerFast:
    """Train one BPE on both languages and save it as Hugging Face files in ``folder``."""
    core = train_byte_bpe((text for pair in pairs for text in pair), VOCABULARY, [PAD, EOS])
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=BUCKETS[-1],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[Pairs, int]:
    """Return the pairs that are short enough, and the number of those that are not."""
    sides = (
        [tokenizer([pair[k] for pair in texts]).input_ids for k in (0, 1)] if texts else [[], []]
    )
    pairs = Pairs()
    for source, target in zip(*sides, strict=True):
        if max(len(source), len(target)) <= BUCKETS[-1]:
            pairs.sources.append(source)
            pairs.targets.append(target)
    return pairs, len(texts) - len(pairs)


def prepare(
    task_folder: Path, work_folder: Path, permissive_only: bool, reverse: bool = False
) -> dict[str, object]:
    """Train the tokenizer and write all splits as tokens, which is all that training needs.

    Parameters
    ----------
    task_folder : Path
        A task's folder from ``python benchmarks/tasks``, with a JSON-lines file for each split.
    work_folder : Path
        Gets ``tokenizer/`` and ``data.pt``.
    permissive_only : bool
        Leave out texts whose licence does not let weights learned from them be shipped.
    reverse : bool
        Turn every pair around: what was the target is the source.

    Returns
    -------
    dict
        What was written: pairs and target tokens of each split, and pairs left out as too long.
    """
    texts = {name: read_records(task_folder / f"{name}.jsonl", permissive_only) for name in SPLITS}
    if empty := [name for name, pairs in texts.items() if not pairs]:
        raise ValueError(f"no records for {', '.join(empty)} in {task_folder}")
    if reverse:
        texts = {name: [pair[::-1] for pair in pairs] for name, pairs in texts.items()}
    tokenizer = train_tokenizer(texts["train"], work_folder / "tokenizer")
    state: dict[str, object] = {}
    facts: dict[str, object] = {
        "permissive only": permissive_only,
        "reverse": reverse,
        "vocabulary": len(tokenizer),
    }
    for name in SPLITS:
        pairs, dropped = encode(tokenizer, texts[name])
        state[name] = vars(pairs)
        facts[name] = {
            "pairs": len(pairs),
            "target tokens": pairs.target_tokens(),
            "too long": dropped,
        }
    save_atomically({"splits": state, "facts": facts}, work_folder / "data.pt")
    return facts


def load_prepared(
    work_folder: Path,
) -> tuple[PreTrainedTokenizerFast, dict[str, Pairs], dict[str, object]]:
    """Return the tokenizer, the splits and the facts that `prepare` wrote."""
    path = work_folder / "data.pt"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `prepare` first")
    saved = torch.load(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work_folder / "tokenizer")
    splits = {name: Pairs(**state) for name, state in saved["splits"].items()}
    return tokenizer, splits, saved["facts"]


# -------------------------------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------------------------------


def padded(rows: list[list[int]], value: int) -> Tensor:
    """Return rows as ``[B, L]`` int64, filled up at the right."""
    length = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=torch.int64)


@dataclass
class Batch:
    """Sources and their mask ``[B, S]``, and labels ``[B, L]`` (-100 where there is none)."""

    inputs: Tensor
    mask: Tensor
    labels: Tensor


def batch_of(pairs: Pairs, rows: list[int], device: torch.device) -> Batch:
    """Put pairs into one batch."""
    inputs = padded([pairs.sources[row] for row in rows], PAD_ID)
    labels = padded([pairs.targets[row] for row in rows], IGNORED)
    return Batch(inputs.to(device), inputs.ne(PAD_ID).to(device), labels.to(device))


class Batches:
    """Batches of pairs of like length; batch number ``step`` depends on it and the seed alone.

    A pair belongs to the first of `BUCKETS` that both of its sides fit into. A batch is of one
    bucket and has as many rows as fit into ``tokens`` at the bucket's length, one at least. Each
    epoch sees every pair once; an epoch's number of batches is always the same.
    """

    def __init__(self, pairs: Pairs, tokens: int, seed: int) -> None:
        if not len(pairs):
            raise ValueError("batches need at least one pair, got none")
        self.seed = seed
        self._buckets: dict[int, list[int]] = {}
        for row, sides in enumerate(zip(pairs.sources, pairs.targets, strict=True)):
            length = max(map(len, sides))
            bound = next((bound for bound in BUCKETS if length <= bound), None)
            if bound is None:
                raise ValueError(f"pairs must have at most {BUCKETS[-1]} tokens, got {length}")
            self._buckets.setdefault(bound, []).append(row)
        self._rows = {bound: max(1, tokens // bound) for bound in self._buckets}
        self.per_epoch = sum(
            -(-len(rows) // self._rows[bound]) for bound, rows in self._buckets.items()
        )
        self._epoch, self._batches = -1, [[0]]

    def __getitem__(self, step: int) -> list[int]:
        """Return the rows of a batch."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[index]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        batches = []
        for bound, rows in sorted(self._buckets.items()):
            order = torch.randperm(len(rows), generator=generator).tolist()
            size = self._rows[bound]
            batches += [[rows[k] for k in order[i : i + size]] for i in range(0, len(rows), size)]
        return [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]


class Copies:
    """Batches of random tokens to be copied: the source is the target.

    A small model that reads little text takes long to find out that the source says what comes
    next: what the target's own words say is learned first. Random tokens say nothing of each other,
    so that their loss falls only as far as the decoder finds its place in the source (compare
    Currey et al. 2017, "Copied monolingual data improves low-resource neural machine translation").
    Tokens come as often as in the pairs' targets; all rows of a batch are of one length.

    Parameters
    ----------
    pairs : Pairs
        Whose target tokens are drawn.
    tokens : int
        Of a batch, at most.
    seed : int
        Batch number ``step`` depends on it and the seed alone.
    """

    # Longer ones teach nothing new at first, and take longer to be learned.
    LENGTHS = (2, 16)

    def __init__(self, pairs: Pairs, tokens: int, seed: int) -> None:
        kept = [token for row in pairs.targets for token in row if token not in (PAD_ID, EOS_ID)]
        self._kept = torch.tensor(kept)
        self._tokens, self._seed = tokens, seed

    def batch(self, step: int, device: torch.device) -> Batch:
        """Return a batch, every row ended by ``</s>``."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        low, high = self.LENGTHS
        length = int(torch.randint(low, high + 1, (), generator=generator))
        shape = max(1, self._tokens // (length + 1)), length
        drawn = self._kept[torch.randint(len(self._kept), shape, generator=generator)]
        rows = torch.nn.functional.pad(drawn, (0, 1), value=EOS_ID).to(device)
        return Batch(rows, torch.ones_like(rows, dtype=torch.bool), rows)


def in_order(pairs: Pairs, rows: int) -> Iterator[list[int]]:
    """Yield batches of all pairs, the longest source first: for measuring and translating."""
    order = sorted(range(len(pairs)), key=lambda row: -len(pairs.sources[row]))
    for first in range(0, len(order), rows):
        yield order[first : first + rows]
