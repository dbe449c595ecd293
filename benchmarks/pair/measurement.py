"""The finished pair: written to a folder, measured, and described in a card."""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pair.data import BOS, EOS, HELD_OUT, POSITIONS, VOCABULARY, Data, collect_corpus, encode
from pair.training import DRAFT_SHAPE, TARGET_SHAPE
from specdec_ext.decoding.cache_names import cache_of, own_cache_name

# At T = 1, on held-out text.
WANTED_ALPHA = 0.6
# Completed in the card.
PROMPTS = (
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self',
    "import os\nimport sys\n\ndef read_lines(path",
)


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
    cache = cache_of(model(input_ids=inputs, use_cache=True))
    given = {own_cache_name(): cache, "use_cache": True}
    times = []
    for _ in range(200):
        start = time.perf_counter()
        model(input_ids=inputs[:, :new_tokens], **given)
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

`python benchmarks/pair/train.py --threads {trained["threads"]} --target-steps \
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
