"""The text that the pair is trained and measured on: the standard library's sources, as tokens."""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Present from Python 3.10 to 3.14. Neither the models nor the tokenizer see these or their tests.
HELD_OUT = (
    "bisect",
    "calendar",
    "colorsys",
    "csv",
    "fnmatch",
    "fractions",
    "getopt",
    "graphlib",
    "heapq",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)
# Tables, not code; `config-*` and `_sysconfigdata*` would leak the build machine's paths.
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data")
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
SKIPPED_FILES = ("html/entities.py", "re/_casefix.py", "this.py")
TEST_FOLDERS = ("test", "tests", "idle_test")

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = 2048
POSITIONS = 1024


@dataclass
class Corpus:
    """Source texts: library modules, tests, and the modules held out from both."""

    library: list[str]
    tests: list[str]
    held_out: list[str]


def read_source(path: Path) -> str:
    """Return a file's text, or nothing where it is no UTF-8 (tests of bad sources)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def is_skipped(relative: Path) -> bool:
    """Tell whether a path below the standard library is left out altogether."""
    return (
        any(part in SKIPPED_FOLDERS for part in relative.parts)
        or any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts)
        or relative.as_posix() in SKIPPED_FILES
    )


def collect_corpus() -> Corpus:
    """Read the running Python's standard library, in the order of its paths."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = Corpus([], [], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        relative = path.relative_to(root)
        if is_skipped(relative):
            continue
        text = read_source(path)
        if relative.as_posix() in {f"{name}.py" for name in HELD_OUT}:
            corpus.held_out.append(text)
        elif relative.stem.removeprefix("test_") in HELD_OUT:
            continue
        elif any(part in TEST_FOLDERS for part in relative.parts):
            corpus.tests.append(text)
        else:
            corpus.library.append(text)
    return corpus


def train_byte_bpe(texts: Iterable[str], vocabulary: int, special_tokens: list[str]) -> Tokenizer:
    """Train a byte-level BPE, which spells whatever it never saw; special tokens come first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on ``texts`` and save it as Hugging Face files in ``folder``."""
    core = train_byte_bpe(texts, VOCABULARY, [BOS, EOS, PAD])
    bos = core.token_to_id(BOS)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Encode texts as one stream ``[N]`` of ``<s> file </s>``."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.int64)


@dataclass
class Data:
    """Token streams; the training stream is the library followed by the tests."""

    train: torch.Tensor
    library_tokens: int
    held_out: torch.Tensor
    held_out_bytes: int
    bos: int


def prepare_data(args: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, Data]:
    """Return the tokenizer and the token streams, from the work folder where they are there."""
    folder, cache = args.work_dir / "tokenizer", args.work_dir / "tokens.pt"
    if cache.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer, Data(**torch.load(cache))
    corpus = collect_corpus()
    tokenizer = train_tokenizer(corpus.library, folder)
    library = encode(tokenizer, corpus.library)
    data = Data(
        train=torch.cat([library, encode(tokenizer, corpus.tests)]),
        library_tokens=len(library),
        held_out=encode(tokenizer, corpus.held_out),
        held_out_bytes=sum(len(text.encode()) for text in corpus.held_out),
        bos=tokenizer.bos_token_id,
    )
    save_atomically(vars(data), cache)
    return tokenizer, data


def save_atomically(state: object, path: Path) -> None:
    """Save so that an interruption leaves the old file or the new one, never a part."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def sample_batch(data: Data, args: argparse.Namespace, key: int, length: int) -> torch.Tensor:
    """Return random crops ``[rows, length + 1]``, a function of the seed and ``key`` alone.

    A crop's first token is replaced by ``<s>``: a prompt from the middle of a file then looks as
    it did in training.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + key)
    rows = args.batch_tokens // length
    place, is_test = torch.rand(2, rows, dtype=torch.float64, generator=generator)
    from_tests = is_test < args.test_share
    first = torch.where(from_tests, data.library_tokens, 0)
    last = torch.where(from_tests, len(data.train), data.library_tokens) - length - 1
    start = first + (place * (last - first)).to(torch.int64)
    crops = data.train[start[:, None] + torch.arange(length + 1)]
    crops[:, 0] = data.bos
    return crops.to(args.device)
