"""One training as the command's arguments want it: options, pace, what is said and saved."""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import asdict, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, T5ForConditionalGeneration

from pair.models import multiplies_bfloat16
from pair.seq2seq.data import Batches, Pairs, load_prepared
from pair.seq2seq.models import layers_of, load_model, save_model
from pair.seq2seq.schedule import Budget, Pace, budget_of
from pair.seq2seq.sizes import COPYING, LARGEST, SIZES, build_model
from pair.seq2seq.training import Options, Report, train


def device_of(given: argparse.Namespace) -> torch.device:
    """Return where to train, and set the number of threads."""
    jobs = getattr(given, "jobs", 1)
    if given.threads or jobs > 1:
        torch.set_num_threads(given.threads or max(1, (os.cpu_count() or 1) // jobs))
    return torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def options_of(given: argparse.Namespace, budget: Budget, copying: float = 0.0) -> Options:
    """Return the training options: a budget's own, and ``copying``, where none are given."""

    def first(*options: Any) -> Any:
        return next(option for option in options if option is not None)

    return Options(
        seed=given.seed,
        batch_tokens=first(given.batch_tokens, budget.batch_tokens),
        dropout=first(given.dropout, budget.dropout),
        bfloat16=first(given.bfloat16, budget.bfloat16, multiplies_bfloat16(device_of(given))),
        compiled=given.compile,
        copying=first(getattr(given, "copying", None), copying),
    )


def train_size(given: argparse.Namespace, name: str, seconds: float) -> None:
    """Train one of the sizes, from the beginning or from the weights in another folder."""
    device = device_of(given)
    tokenizer, splits, _ = load_prepared(given.work)
    budget = budget_of(given.budget)
    copying = COPYING.get(name, 0.0) if budget.copies_first and given.start is None else 0.0
    options = options_of(given, budget, copying)
    steps = None
    if budget.epochs is not None:
        steps = budget.epochs * Batches(splits["train"], options.batch_tokens, 0).per_epoch
    shape = SIZES[name]
    if given.layers is not None and name == LARGEST:
        shape = shape | dict(zip(("num_layers", "num_decoder_layers"), given.layers, strict=True))
    model = build_model(shape, len(tokenizer), options.dropout, options.seed)
    if given.start is not None:
        options = replace(options, start=given.start.name)
        before = load_model(given.start, name)
        if (made := layers_of(before)) != (wanted := layers_of(model)):
            raise ValueError(
                f"{name} in {given.start} has {made} layers, not {wanted}: see --layers"
            )
        model.load_state_dict(before.state_dict())
    train_one(given, name, model, splits["train"], Pace(steps, seconds), options, device)


def train_one(
    given: argparse.Namespace,
    name: str,
    model: T5ForConditionalGeneration,
    pairs: Pairs,
    pace: Pace,
    options: Options,
    device: torch.device,
    teacher: T5ForConditionalGeneration | None = None,
) -> None:
    """Train one model, save it and say how it went."""
    folder = given.work / "training" / name
    report = train(name, model, pairs, pace, options, folder, device, teacher)
    facts = facts_of(given, model, report, options, device)
    save_model(model.cpu(), given.work, name, facts)
    say(name, model, report)


def facts_of(
    given: argparse.Namespace,
    model: PreTrainedModel,
    report: Report,
    options: Options,
    device: torch.device,
) -> dict[str, Any]:
    """Return how a model was trained."""
    return {
        "parameters": model.num_parameters(),
        "budget": given.budget,
        **asdict(report),
        "options": asdict(options),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def say(name: str, model: PreTrainedModel, report: Report) -> None:
    """Say how a training went."""
    print(
        f"{name}: {model.num_parameters():,} parameters, {report.steps:,} steps, "
        f"{report.epochs:.2f} epochs, {report.seconds:.0f} s, loss {report.loss:.3f}",
        flush=True,
    )
