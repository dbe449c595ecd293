"""Train the target and draft models that ship with specdec_ext.

Both are Hugging Face ``LlamaForCausalLM`` models over one 2,048-entry byte-level BPE, trained on
the sources of the running Python's standard library. The draft is distilled from the target with a
loss that contains the total variation distance itself: 1 - TV is the acceptance rate.

    python benchmarks/train_pair.py                  # everything; run it again to resume
    python benchmarks/train_pair.py --evaluate-only  # measure the exported pair, rewrite its card

Every batch is a function of (seed, step) alone and nothing depends on the clock, so that an
interrupted run ends where an uninterrupted one does. The learning rate is constant until the last
``--target-decay-share`` of the steps: until then ``--target-steps`` may be changed on resuming.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[1]

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
TARGET_SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 3,
}
DRAFT_SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 448,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
}
# At T = 1, on held-out text.
WANTED_ALPHA = 0.6
# Completed in the card.
PROMPTS = (
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self',
    "import os\nimport sys\n\ndef read_lines(path",
)


# --- text -------------------------------------------------------------------------------------


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


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on ``texts`` and save it as Hugging Face files in ``folder``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
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


# --- training ---------------------------------------------------------------------------------


def build_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def build_optimizers(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(step: int, steps: int, warmup_steps: int, decay_share: float) -> float:
    """Warm up linearly, stay at 1, then decay linearly to 0 over the last ``decay_share``."""
    return min(1.0, (step + 1) / warmup_steps, (steps - step) / (decay_share * steps))


def sequence_length(step: int, steps: int, args: argparse.Namespace) -> int:
    """Return the crop length: short first, because attention costs; the full context at the end."""
    return POSITIONS if step >= (1.0 - args.long_share) * steps else args.short_length


def save_atomically(state: object, path: Path) -> None:
    """Save so that an interruption leaves the old file or the new one, never a part."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def forward_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, args: argparse.Namespace
) -> torch.Tensor:
    """Return float32 logits ``[rows * length, V]`` of ``inputs [rows, length]``, autocast."""
    with torch.autocast(args.device.type, torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return logits.flatten(0, 1).float()


LossFunction = Callable[[LlamaForCausalLM, torch.Tensor, float], torch.Tensor]


def train(
    name: str,
    model: LlamaForCausalLM,
    data: Data,
    loss_function: LossFunction,
    steps: int,
    decay_share: float,
    key: int,
    args: argparse.Namespace,
) -> None:
    """Train ``model`` in place, resuming from the checkpoint ``name`` and leaving one at the end.

    Parameters
    ----------
    name : str
        The checkpoint's name in the work folder.
    model : LlamaForCausalLM
        Trained in place.
    data : Data
        Token streams.
    loss_function : callable
        ``(model, crops [rows, length + 1], progress in [0, 1)) -> scalar``.
    steps : int
        Number of steps.
    decay_share : float
        The last share of the steps, over which the learning rates decay.
    key : int
        First key of the batches, so that the phases see different crops.
    args : argparse.Namespace
        The options.
    """
    optimizers = build_optimizers(model, args)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    path = args.work_dir / f"{name}.pt"
    first, loss_average = 0, float("nan")
    if path.exists():
        state = torch.load(path, map_location=args.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, loss_average = state["step"], state["loss"]
    model.train()
    bar = tqdm(range(first, steps), desc=name, initial=first, total=steps, mininterval=5.0)
    for step in bar:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * lr_factor(
                step, steps, args.warmup_steps, decay_share
            )
        crops = sample_batch(data, args, key + step, sequence_length(step, steps, args))
        loss = loss_function(model, crops, step / steps)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        loss_average = value if math.isnan(loss_average) else 0.98 * loss_average + 0.02 * value
        bar.set_postfix(loss=f"{loss_average:.4f}", refresh=False)
        if (step + 1) % args.checkpoint_steps == 0 or step + 1 == steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
                "loss": loss_average,
            }
            save_atomically(state, path)
    model.eval()


def text_loss(args: argparse.Namespace) -> LossFunction:
    """Return the cross-entropy of the text itself."""

    def loss(model: LlamaForCausalLM, crops: torch.Tensor, progress: float) -> torch.Tensor:
        logits = forward_logits(model, crops[:, :-1], args)
        return F.cross_entropy(logits, crops[:, 1:].flatten())

    return loss


def distillation_loss(target: LlamaForCausalLM, args: argparse.Namespace) -> LossFunction:
    """Return a mixture of KL(p || q) and the total variation distance 1 - sum min(p, q).

    The second is what speculative decoding pays for, but its gradient is flat where the draft is
    far off; the KL term leads at first and keeps ``--final-kl`` of the weight at the end.
    """

    def loss(draft: LlamaForCausalLM, crops: torch.Tensor, progress: float) -> torch.Tensor:
        with torch.no_grad():
            target_law = forward_logits(target, crops[:, :-1], args).softmax(-1)
        draft_log = forward_logits(draft, crops[:, :-1], args).log_softmax(-1)
        total_variation = 0.5 * (target_law - draft_log.exp()).abs().sum(-1).mean()
        # Up to p's entropy, which does not depend on the draft.
        cross_entropy = -(target_law * draft_log).sum(-1).mean()
        weight = 1.0 - (1.0 - args.final_kl) * min(1.0, 2.0 * progress)
        return weight * cross_entropy + (1.0 - weight) * total_variation

    return loss


def train_target(
    tokenizer: PreTrainedTokenizerFast, data: Data, args: argparse.Namespace
) -> LlamaForCausalLM:
    """Train the target on the text, or load it where it is finished."""
    torch.manual_seed(args.seed)
    target = build_model(TARGET_SHAPE, tokenizer).to(args.device)
    steps, decay = args.target_steps, args.target_decay_share
    train("target", target, data, text_loss(args), steps, decay, 0, args)
    return target


def train_draft(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: Data,
    args: argparse.Namespace,
) -> LlamaForCausalLM:
    """Train the draft on the text, then distil it from the target."""
    torch.manual_seed(args.seed + 1)
    draft = build_model(DRAFT_SHAPE, tokenizer).to(args.device)
    steps, decay = args.draft_text_steps, args.draft_decay_share
    train("draft-text", draft, data, text_loss(args), steps, decay, 10_000_000, args)
    loss = distillation_loss(target, args)
    train("draft", draft, data, loss, args.draft_steps, decay, 20_000_000, args)
    return draft


# --- export and measurement -------------------------------------------------------------------


def count_parameters(model: LlamaForCausalLM) -> int:
    """Return the number of parameters; the tied embedding counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def training_facts(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, data: Data, args: argparse.Namespace
) -> dict[str, object]:
    """Return what is needed to train the pair again."""
    options = ("seed", "batch_tokens", "short_length", "long_share", "test_share", "muon_lr")
    options += ("adam_lr", "weight_decay", "warmup_steps", "target_decay_share")
    options += ("draft_decay_share", "final_kl")
    return {
        "target_parameters": count_parameters(target),
        "draft_parameters": count_parameters(draft),
        "target_steps": args.target_steps,
        "draft_text_steps": args.draft_text_steps,
        "draft_steps": args.draft_steps,
        "options": {name: getattr(args, name) for name in options},
        "device": args.device.type,
        "threads": torch.get_num_threads(),
        "library_tokens": data.library_tokens,
        "test_tokens": len(data.train) - data.library_tokens,
        "held_out_modules": list(HELD_OUT),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def export_pair(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    facts: dict[str, object],
    folder: Path,
) -> None:
    """Write both models in bfloat16, the tokenizer and the training facts below ``folder``."""
    for name, model in (("target", target), ("draft", draft)):
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder / name)
        # safetensors writes files that only their owner may read.
        (folder / name / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_facts({"training": facts}, folder)


def write_facts(facts: dict[str, object], folder: Path) -> None:
    """Write ``pair.json``."""
    (folder / "pair.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


MassFunction = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def acceptance_mass(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return ``sum min(p, q)`` of each row by the operator: ``[R, V], [R, V] -> [R]``."""
    from specdec_ext import acceptance

    return acceptance(target_logits, draft_logits, temperature=temperature)


def plain_acceptance_mass(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the same in plain PyTorch, for an environment without the built operators."""
    if temperature == 0.0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
    target_law = (target_logits / temperature).softmax(-1)
    draft_law = (draft_logits / temperature).softmax(-1)
    return torch.minimum(target_law, draft_law).sum(-1)


MASS_NAMES = {acceptance_mass: "`specdec_ext.acceptance`", plain_acceptance_mass: "plain PyTorch"}


def held_out_windows(tokens: torch.Tensor, length: int, bos: int) -> torch.Tensor:
    """Cut a stream into windows ``[W, length + 1]`` whose first token becomes ``<s>``."""
    windows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1).clone()
    windows[:, 0] = bos
    return windows


@torch.no_grad()
def measure_rows(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    windows: torch.Tensor,
    first: int,
    mass: MassFunction,
) -> dict[str, float]:
    """Average losses and acceptance over the positions from ``first`` on.

    Parameters
    ----------
    target, draft : LlamaForCausalLM
        The pair, in float32.
    windows : Tensor ``[W, L]``
        Token ids.
    first : int
        The first position whose token is predicted; everything before it is context only.
    mass : callable
        :func:`acceptance_mass` or its stand-in.

    Returns
    -------
    dict
        ``target_loss`` and ``draft_loss`` in nats a token, ``alpha_t1`` and ``alpha_t0``.
    """
    totals: dict[str, float] = {}
    rows = 0
    for batch in windows.split(8):
        labels = batch[:, first:].flatten()
        logits = {
            name: model(input_ids=batch, use_cache=False).logits[:, first - 1 : -1].flatten(0, 1)
            for name, model in (("target", target), ("draft", draft))
        }
        sums = {
            f"{name}_loss": F.cross_entropy(value, labels, reduction="sum")
            for name, value in logits.items()
        }
        for temperature in (1.0, 0.0):
            masses = mass(logits["target"], logits["draft"], temperature)
            sums[f"alpha_t{temperature:.0f}"] = masses.double().sum()
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        rows += len(labels)
    return {name: total / rows for name, total in totals.items()}


def measure_completions(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: torch.Tensor, mass: MassFunction
) -> dict[str, float]:
    """Measure acceptance along the target's own completions, at T = 1 and greedy.

    Speculative decoding drafts from these contexts, not from the text's.
    """
    prompts = windows[:: max(1, len(windows) // 32), :128]
    torch.manual_seed(0)
    alphas = {}
    for name, sampling in (("t1", {"do_sample": True, "top_k": 0}), ("t0", {"do_sample": False})):
        completed = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=128,
            max_new_tokens=128,
            **sampling,
        )
        measured = measure_rows(target, draft, completed, first=128, mass=mass)
        alphas[name] = measured[f"alpha_{name}"]
    return alphas


@torch.no_grad()
def forward_seconds(model: LlamaForCausalLM, new_tokens: int, context: int = 128) -> float:
    """Return the least time of a forward pass of ``new_tokens`` on a cache of ``context``.

    The least of many, because a median says how busy the machine was.
    """
    inputs = torch.zeros(1, context, dtype=torch.int64)
    cache = model(input_ids=inputs, use_cache=True).past_key_values
    times = []
    for _ in range(200):
        start = time.perf_counter()
        model(input_ids=inputs[:, :new_tokens], past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - start)
        cache.crop(-new_tokens)
    return min(times)


def measure_pair(folder: Path, mass: MassFunction) -> dict[str, object]:
    """Measure the exported pair on the held-out modules, on the CPU in float32."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    held_out = collect_corpus().held_out
    tokens = encode(tokenizer, held_out)
    windows = held_out_windows(tokens, 512, tokenizer.bos_token_id)
    measured = measure_rows(target, draft, windows, first=1, mass=mass)
    tokens_per_byte = len(tokens) / sum(len(text.encode()) for text in held_out)
    own = measure_completions(target, draft, windows, mass)
    milliseconds = {
        "target_1": 1e3 * forward_seconds(target, 1),
        "target_5": 1e3 * forward_seconds(target, 5),
        "draft_1": 1e3 * forward_seconds(draft, 1),
    }
    return {
        "held_out_tokens": windows[:, 1:].numel(),
        "alpha_by": MASS_NAMES[mass],
        **{name: round(value, 4) for name, value in measured.items()},
        "target_bits_per_byte": round(measured["target_loss"] * tokens_per_byte / math.log(2.0), 4),
        "completion_alpha_t1": round(own["t1"], 4),
        "completion_alpha_t0": round(own["t0"], 4),
        "milliseconds": {name: round(value, 3) for name, value in milliseconds.items()},
        "cost_ratio": round(milliseconds["draft_1"] / milliseconds["target_1"], 3),
        "cpu_threads": torch.get_num_threads(),
        "completions": sample_completions(target, tokenizer),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def sample_completions(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, object]]:
    """Complete the card's prompts, greedily and at T = 0.8."""
    samples = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        for temperature in (0.0, 0.8):
            torch.manual_seed(0)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0}
                if temperature
                else {"do_sample": False}
            )
            completed = target.generate(**inputs, max_new_tokens=96, **sampling)
            text = tokenizer.decode(completed[0], skip_special_tokens=True)
            samples.append({"temperature": temperature, "text": text})
    return samples


def write_card(folder: Path) -> None:
    """Write the model card from ``pair.json``."""
    facts = json.loads((folder / "pair.json").read_text(encoding="utf-8"))
    trained, measured = facts["training"], facts["measured"]
    sizes = {
        name: (folder / name / "model.safetensors").stat().st_size / 1e6
        for name in ("target", "draft")
    }
    tokens = {
        name: trained[f"{name}_steps"] * trained["options"]["batch_tokens"] / 1e6
        for name in ("target", "draft_text", "draft")
    }
    shapes = {
        name: f"{shape['hidden_size']} wide x {shape['num_hidden_layers']}"
        for name, shape in (("target", TARGET_SHAPE), ("draft", DRAFT_SHAPE))
    }
    ratio = trained["target_parameters"] / trained["draft_parameters"]
    milliseconds = measured["milliseconds"]
    samples = "\n\n".join(
        f"T = {sample['temperature']}:\n\n```python\n{sample['text'].rstrip()}\n```"
        for sample in measured["completions"]
    )
    verdict = (
        f"The pair was meant to have {WANTED_ALPHA} at T = 1. The second row is what decoding "
        "meets: contexts that the target itself wrote."
    )
    options = ", ".join(f"{name} {value}" for name, value in trained["options"].items())
    card = f"""---
library_name: transformers
license: psf-2.0
tags: [speculative-decoding, llama, python]
---

# stdlib-pair: a target and a draft to try speculative decoding with

Two Hugging Face `LlamaForCausalLM` models over one {VOCABULARY:,}-entry byte-level BPE, trained on
the sources of Python's standard library. They complete text that looks like Python and know nothing
else. They are for demonstrations and tests: do not use what they write.

| | target | draft |
|---|---|---|
| shape | {shapes["target"]} | {shapes["draft"]} |
| parameters | {trained["target_parameters"]:,} | {trained["draft_parameters"]:,} |
| file, bfloat16 | {sizes["target"]:.2f} MB | {sizes["draft"]:.2f} MB |
| held-out loss, nats a token | {measured["target_loss"]:.3f} | {measured["draft_loss"]:.3f} |

The target has {ratio:.1f} times the draft's parameters. Context: {POSITIONS:,} positions. A text
starts with `{BOS}`, which the tokenizer adds; a file ends with `{EOS}`.

## Acceptance

alpha = E[sum min(p, q)], by {measured["alpha_by"]}:

| contexts | T = 1 | T = 0 |
|---|---|---|
| held-out text | {measured["alpha_t1"]:.3f} | {measured["alpha_t0"]:.3f} |
| the target's own completions | {measured["completion_alpha_t1"]:.3f} | \
{measured["completion_alpha_t0"]:.3f} |

{verdict}

Held-out text: {measured["held_out_tokens"]:,} tokens of windows of 512 from
{", ".join(f"`{name}`" for name in trained["held_out_modules"])} (Python {measured["python"]}),
which neither the models nor the tokenizer were trained on, nor on their tests. The target's loss is
{measured["target_bits_per_byte"]:.3f} bits a byte. Own completions: 128 tokens after 128-token
prompts from the same text, sampled at T = 1 and greedy. At T = 0, alpha is the share of rows where
both models have the same first choice. All in float32 from the bfloat16 weights.

Least time of a forward pass, batch 1, 128 tokens of context, float32, {measured["cpu_threads"]} CPU
threads: target {milliseconds["target_1"]:.2f} ms for 1 token and {milliseconds["target_5"]:.2f} ms
for 5, draft {milliseconds["draft_1"]:.2f} ms: cost ratio c = {measured["cost_ratio"]:.3f}.

## How it was made

`python benchmarks/train_pair.py --threads {trained["threads"]} --target-steps \
{trained["target_steps"]} --draft-text-steps {trained["draft_text_steps"]} --draft-steps \
{trained["draft_steps"]}`
on one {trained["device"].upper()} with Python {trained["python"]}, torch {trained["torch"]},
transformers {trained["transformers"]}. The text is that Python's own library:
{trained["library_tokens"]:,} tokens of modules and {trained["test_tokens"]:,} of tests.

1. Target: {tokens["target"]:.1f} M tokens of random crops, Muon for the layers' matrices and AdamW
   for the rest.
2. Draft: {tokens["draft_text"]:.1f} M tokens of the same text, then {tokens["draft"]:.1f} M
   distilled from the target with KL(p || q) giving way to the total variation distance, 1 - alpha.

Options: {options}. The same options, thread count and library versions give the same weights on the
same kind of machine; another Python has another standard library and so another pair.

The training text is under the Python Software Foundation License.

## What the target writes

The first lines are the prompt.

{samples}
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


def evaluate(folder: Path, mass: MassFunction) -> None:
    """Measure the exported pair and write the result into ``pair.json`` and the card."""
    facts = json.loads((folder / "pair.json").read_text(encoding="utf-8"))
    facts["measured"] = measure_pair(folder, mass)
    write_facts(facts, folder)
    write_card(folder)
    shown = {name: value for name, value in facts["measured"].items() if name != "completions"}
    print(json.dumps(shown, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=REPOSITORY / "build/train_pair", help="checkpoints")
    add("--output-dir", type=Path, default=REPOSITORY / "specdec_ext/assets/stdlib-pair")
    add("--evaluate-only", action="store_true", help="measure the exported pair, rewrite its card")
    add("--plain-alpha", action="store_true", help="measure alpha without the built operators")
    add("--stop-after", choices=("data", "target"), help="leave out what follows")
    add("--seed", type=int, default=0)
    add("--device", type=torch.device, default=None, help="default: cuda where there is one")
    add("--threads", type=int, default=None, help="default: torch's own")
    add("--target-steps", type=int, default=700)
    add("--draft-text-steps", type=int, default=5000)
    add("--draft-steps", type=int, default=1800)
    add("--batch-tokens", type=int, default=4096, help="tokens a step")
    add("--short-length", type=int, default=256, help="crop length in the first steps")
    add("--long-share", type=float, default=0.15, help="last share of the steps, at full context")
    add("--test-share", type=float, default=0.25, help="share of the crops that are test code")
    add("--muon-lr", type=float, default=0.02)
    add("--adam-lr", type=float, default=2e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--warmup-steps", type=int, default=40)
    add("--target-decay-share", type=float, default=0.25)
    add("--draft-decay-share", type=float, default=0.4)
    add("--final-kl", type=float, default=0.02, help="weight of KL at the end of distillation")
    add("--checkpoint-steps", type=int, default=100)
    args = parser.parse_args()
    if args.device is None:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


def main() -> None:
    """Run the stages that are asked for."""
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Read by cuBLAS when it starts; without it, deterministic algorithms are refused on GPUs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    mass = plain_acceptance_mass if args.plain_alpha else acceptance_mass
    if args.evaluate_only:
        evaluate(args.output_dir, mass)
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    (args.work_dir / "pid").write_text(f"{os.getpid()}\n")
    tokenizer, data = prepare_data(args)
    if args.stop_after == "data":
        print(f"{data.library_tokens} library, {len(data.train)} training tokens")
        print(f"{len(data.held_out)} held-out tokens, {data.held_out_bytes} bytes")
        return
    target = train_target(tokenizer, data, args)
    if args.stop_after == "target":
        return
    draft = train_draft(target, tokenizer, data, args)
    facts = training_facts(target, draft, data, args)
    export_pair(target, draft, tokenizer, facts, args.output_dir)
    evaluate(args.output_dir, mass)


if __name__ == "__main__":
    main()
