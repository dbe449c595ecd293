"""Make a small draft for a chat model out of the model's own conversations.

    python -m specdec_ext fetch smollm2
    python benchmarks/pair/distilled texts smollm2 --budget 40      # it writes conversations
    python benchmarks/pair/distilled train smollm2 --budget 60      # a draft learns from them
    python benchmarks/pair/distilled evaluate smollm2               # alpha on what it did not see
    python -m specdec_ext bench --target smollm2 --draft build/distilled/smollm2/draft

The target is a folder with a causal chat model, or the name of one that was fetched. Nothing else
is needed: no text, no network. `texts` and `train` given again go on where they were interrupted;
`texts` may run several times at once, one ``--job`` of ``--jobs`` each, which suits a CPU, where
one thread each writes more than several together. The first shard of conversations is kept for
`evaluate`. docs/drafts.md tells what to expect.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import common  # noqa: E402

from pair.distilled.induction import begin_copying  # noqa: E402
from pair.distilled.measurement import measure, table  # noqa: E402
from pair.distilled.texts import Plan, read_shards, starts, write_shards  # noqa: E402
from pair.distilled.training import (  # noqa: E402
    Conversation,
    batches,
    conversations,
    distillation_loss,
    frequent_tokens,
    optimizers,
)
from pair.heads.training import Options, train  # noqa: E402
from pair.models import model_folder, multiplies_bfloat16  # noqa: E402
from pair.seq2seq.schedule import Pace  # noqa: E402
from specdec_ext.models.draft_llama import DraftLlama, DraftLlamaConfig  # noqa: E402

BUILD = HERE.parents[2] / "build" / "distilled"
CARD = "training.json"  # beside the weights: how they were made
VOCABULARY = 8192
# 3.4 M parameters with 8,192 tokens, 6.9 MB in bfloat16: few layers, since a call's time on a CPU
# goes with their number.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "attention_bias": True,  # see induction.py
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}


def work_of(given: argparse.Namespace) -> Path:
    """Return where this target's conversations and draft lie."""
    return given.work / Path(given.target).name


def device_of(given: argparse.Namespace) -> torch.device:
    """Return the device, and set the number of threads."""
    if given.threads:
        torch.set_num_threads(given.threads)
    return torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def run_texts(given: argparse.Namespace) -> int:
    """Let the target write conversations."""
    if not 0 <= given.job < given.jobs:
        raise ValueError(f"--job must be in [0, {given.jobs}), got {given.job}")
    device, folder = device_of(given), model_folder(given.target)
    # In bfloat16 greedy choices tie now and then; a draft does not care which way.
    dtype = torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise ValueError(f"{folder} must have a chat template, got a tokenizer without one")
    plan = Plan(given.batch, answer_tokens=given.tokens, seed=given.seed)
    shards = work_of(given) / "texts"
    done = write_shards(
        target, tokenizer, starts(given.prompts), plan, shards, given.job, given.jobs,
        60.0 * given.budget, given.shards,
    )  # fmt: skip
    print(f"{shards}: {done} shards of {plan.batch} conversations by this job")
    return 0


def run_train(given: argparse.Namespace) -> int:
    """Train a draft and save it in bfloat16."""
    if given.start is not None and given.vocabulary is not None:
        raise ValueError("--vocabulary is for a fresh draft; that of --start has its own")
    device = device_of(given)
    shards = read_shards(work_of(given) / "texts")
    if len(shards) < 2:
        raise ValueError(f"training needs at least 2 shards (one is held out), got {len(shards)}")
    texts = conversations(shards[1:])
    target = AutoModelForCausalLM.from_pretrained(model_folder(given.target), dtype=torch.float32)
    torch.manual_seed(given.seed)
    known = VOCABULARY if given.vocabulary is None else given.vocabulary
    draft = fresh_draft(target, texts, known) if given.start is None else (
        started_draft(given.start, target)
    )  # fmt: skip
    draft.to(device).requires_grad_(True)
    del target
    pace = Pace(given.steps, None if given.steps else 60.0 * given.budget)
    begun = {} if given.start is None else {"start": card_of(given.start)}
    options = Options(
        given.target, "distilled", given.seed, given.batch, warmup=0.05,
        details=json.dumps(begun) if begun else "",
    )  # fmt: skip
    folder = work_of(given) / "draft"
    rows = batches(texts, given.batch, given.seed, device)
    report = train(
        draft, rows, distillation_loss, pace, options, work_of(given) / "training",
        optimizers=optimizers,
    )  # fmt: skip
    draft.to(torch.bfloat16).save_pretrained(folder)
    tokens = sum(len(text.tokens) for text in texts)
    facts = {
        **common.machine_facts(), **asdict(report), "conversations": len(texts), "tokens": tokens,
        "epochs": round(report.steps * given.batch / len(texts), 2), **begun,
    }  # fmt: skip
    (folder / CARD).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    entropy, acceptance = report.parts
    print(
        f"{folder}: {report.steps:,} steps, {facts['epochs']} epochs of {tokens:,} tokens, "
        f"{report.seconds:.0f} s; on the last batches a cross entropy of {entropy:.2f} nats, alpha "
        f"{acceptance:.2f} at T = 1"
    )
    return 0


def fresh_draft(target: Any, texts: Sequence[Conversation], tokens: int) -> DraftLlama:
    """Make a draft that knows the tokens which the target expects most often, and copies."""
    vocabulary = target.config.get_text_config().vocab_size
    known = frequent_tokens(texts, min(tokens, vocabulary), vocabulary)
    draft = DraftLlama.from_target(target, known, **SHAPE)
    begin_copying(draft)
    return draft


def started_draft(folder: Path, target: Any) -> DraftLlama:
    """Load a draft that was trained before, in float32."""
    own = DraftLlamaConfig.from_pretrained(folder).vocab_size
    vocabulary = target.config.get_text_config().vocab_size
    if own != vocabulary:
        raise ValueError(
            f"--start {folder}: the draft must be over the target's {vocabulary} tokens, got {own}"
        )
    draft: DraftLlama = DraftLlama.from_pretrained(folder, dtype=torch.float32)
    return draft


def card_of(folder: Path) -> dict[str, Any]:
    """Return how the draft in a folder was made.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    if not (folder / CARD).is_file():
        raise FileNotFoundError(f"{folder} has no draft that `train` made")
    card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
    return card


def run_evaluate(given: argparse.Namespace) -> int:
    """Say how often the draft and the target agree on conversations that it did not see."""
    device, folder = device_of(given), work_of(given) / "draft"
    card = card_of(folder)
    draft = DraftLlama.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    texts = conversations(read_shards(work_of(given) / "texts")[:1])
    records = measure(draft, texts, device)
    shown = table(records)
    print(shown)
    if given.record:
        first = card.get("start")
        begun = f", behind {first['steps']:,} on {first['tokens']:,} other tokens" if first else ""
        head = (
            f"# A draft for {Path(given.target).name}, distilled\n\n{card['conversations']:,} "
            f"conversations of the target's ({card['tokens']:,} tokens), {card['epochs']} epochs, "
            f"{card['steps']:,} steps in {card['seconds'] / 60:.0f} minutes{begun}. Measured on "
            f"{len(texts)} others."
        )
        facts = {**common.machine_facts(), "training": card}
        common.write_record(given.record, facts, records, f"{head}\n\n{shown}")
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="texts | train | evaluate")
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("target", help="the folder of a causal chat model, or the name of one that was fetched")
    add("--seed", type=int, default=0)
    add("--work", type=Path, default=BUILD)
    add("--device", help="default: cuda where there is one")
    add("--threads", type=int, help="default: torch's own")

    command = commands.add_parser("texts", parents=[shared])
    command.set_defaults(run=run_texts)
    add = command.add_argument
    add("--budget", type=float, default=40.0, help="minutes (40)")
    add("--shards", type=int, help="stop at so many shards in all")
    add("--batch", type=int, default=Plan.batch, help="conversations of a shard (128)")
    add("--tokens", type=int, default=Plan.answer_tokens, help="of an answer at most (192)")
    add("--prompts", type=Path, help="a file with a prompt, or its opening, in each line")
    add("--job", type=int, default=0, help="this process, of --jobs that run at once")
    add("--jobs", type=int, default=1)

    command = commands.add_parser("train", parents=[shared])
    command.set_defaults(run=run_train)
    add = command.add_argument
    add("--budget", type=float, default=60.0, help="minutes (60)")
    add("--steps", type=int, help="steps in place of minutes: repeatable to the bit")
    add("--batch", type=int, default=8, help="conversations of a step (8)")
    add("--vocabulary", type=int, help=f"tokens that a fresh draft knows ({VOCABULARY})")
    add("--start", type=Path, metavar="FOLDER", help="a trained draft to go on with, on new texts")

    command = commands.add_parser("evaluate", parents=[shared])
    command.set_defaults(run=run_evaluate)
    command.add_argument("--record", type=Path, help="stem of the files that keep the figures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = parse_arguments(arguments)
    try:
        return given.run(given)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
