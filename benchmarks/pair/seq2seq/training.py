"""The training of one size: resumable, ended by steps or the clock, last weights averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, T5ForConditionalGeneration

from pair.data import save_atomically
from pair.seq2seq.data import IGNORED, Batch, Batches, Copies, Pairs, batch_of
from pair.seq2seq.schedule import Pace, lr_factor
from pair.seq2seq.sizes import EMBEDDING_LR, PEAK_LR_TIMES_WIDTH

# A checkpoint is left after every hundredth of the way; the weights of the last ten are averaged.
CHECKPOINTS = 100
AVERAGED = 10

# Steps that are run before the clock starts, so that what is compiled is compiled by then.
COMPILED_AHEAD = 3

# What is trained, and its loss on a batch, at a given progress of the training.
Objective = Callable[[Any, Batch, float], Tensor]

# The embeddings of tokens, and what is added to them or stands in their place.
EMBEDDINGS = ("shared.weight", "mask_embedding", "slot_embedding.weight")

# What a training makes small: the cross-entropy to the labels; that to a teacher's law p of the
# next token, which is KL(p || q) up to a constant; or the total variation 1 - sum min(p, q), which
# is 1 - alpha (Leviathan et al., Corollary 3.6), so that its decrease is all that counts for a
# draft.
LABELS, KL, TV = "labels", "kl", "tv"
LOSSES = (LABELS, KL, TV)


@dataclass(frozen=True)
class Options:
    """What a size's weights depend on beside its shape, the data and the number of steps.

    Label smoothing, betas, epsilon, weight decay and the norm to which gradients are clipped are
    those of Xia et al. (arXiv 2203.16487), Table 7, and so are dropout (.1 there, .2 or .3 for less
    data) and the form of the schedule.
    """

    seed: int = 0
    batch_tokens: int = 2048
    dropout: float = 0.1
    label_smoothing: float = 0.1
    warmup: float = 0.06
    cooldown: float = 0.25
    weight_decay: float = 0.01
    clip_norm: float = 5.0
    lr_scale: float = 1.0
    bfloat16: bool = False
    # torch.compile: some minutes at the beginning, then steps of two thirds of the time on a CPU.
    compiled: bool = False
    # The first part of the way, in which random tokens are copied, see `Copies`.
    copying: float = 0.0
    loss: str = LABELS
    # The model whose weights it begins with; none if it is empty.
    start: str = ""

    def __post_init__(self) -> None:
        """Refuse what no training can be run with, before hours of it."""
        ranges = {
            "lr_scale": (0.0 < self.lr_scale < math.inf, "positive"),
            "copying": (0.0 <= self.copying <= 1.0, "between 0 and 1"),
            "dropout": (0.0 <= self.dropout < 1.0, "at least 0 and less than 1"),
            "batch_tokens": (self.batch_tokens > 0, "positive"),
        }
        for name, (is_right, wanted) in ranges.items():
            if not is_right:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)}")


@dataclass
class Report:
    """How a training went."""

    steps: int
    epochs: float
    seconds: float
    averaged: int
    loss: float


def build_optimizer(model: PreTrainedModel, options: Options) -> torch.optim.AdamW:
    """Return AdamW with three groups: matrices, embeddings, and what else has one dimension."""
    matrices, embeddings, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if name in EMBEDDINGS:
            embeddings.append(parameter)
        else:
            is_matrix = parameter.ndim == 2 and "relative_attention_bias" not in name
            (matrices if is_matrix else vectors).append(parameter)
    peak = options.lr_scale * PEAK_LR_TIMES_WIDTH / model.config.d_model
    groups = [
        {"params": matrices, "lr": peak, "weight_decay": options.weight_decay},
        {
            "params": embeddings,
            "lr": options.lr_scale * EMBEDDING_LR,
            "weight_decay": 0.0,
        },
        {"params": vectors, "lr": peak, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6, fused=True)


def forward_logits(model: T5ForConditionalGeneration, batch: Batch, bfloat16: bool) -> Tensor:
    """Return float32 logits ``[B, L, V]`` of the labels' positions."""
    with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=bfloat16):
        decoder_inputs = model._shift_right(batch.labels)
        logits = model(
            input_ids=batch.inputs,
            attention_mask=batch.mask,
            decoder_input_ids=decoder_inputs,
            use_cache=False,
        ).logits
    return logits.float()


def batch_loss(
    model: T5ForConditionalGeneration,
    batch: Batch,
    options: Options,
    teacher: T5ForConditionalGeneration | None = None,
) -> Tensor:
    """Return the loss of a batch, a mean over its target tokens; see `LOSSES`.

    Label smoothing is for the labels alone.
    """
    rows = batch.labels.flatten().ne(IGNORED)
    logits = forward_logits(model, batch, options.bfloat16).flatten(0, 1)[rows]
    if options.loss == LABELS:
        labels = batch.labels.flatten()[rows]
        return F.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
    if teacher is None or options.loss not in LOSSES:
        raise ValueError(
            f"loss must be one of {', '.join(LOSSES)}, and all but {LABELS} need a teacher, got "
            f"{options.loss!r} {'without' if teacher is None else 'with'} one"
        )
    with torch.no_grad():
        law = forward_logits(teacher, batch, options.bfloat16).flatten(0, 1)[rows].softmax(-1)
    if options.loss == KL:
        return F.cross_entropy(logits, law)
    return 1.0 - torch.minimum(law, logits.softmax(-1)).sum(-1).mean()


def average_weights(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of every entry, summed in float64 in the order given."""
    total: dict[str, Tensor] = {}
    number = 0
    for state in states:
        number += 1
        for name, value in state.items():
            total[name] = total[name] + value.double() if name in total else value.double()
    if not number:
        raise ValueError("an average needs at least one checkpoint, got none")
    return {name: (value / number).to(torch.float32) for name, value in total.items()}


class Checkpoints:
    """A size's files in the work folder: one to resume from, and the weights that are averaged.

    Parameters
    ----------
    folder : Path
        The size's own.
    identity : dict
        What the training depends on; a folder of another training is refused.
    """

    def __init__(self, folder: Path, identity: dict[str, object]) -> None:
        self.folder, self.identity = folder, identity
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, device: torch.device) -> dict | None:
        """Return the last state, or None where there is none.

        Raises
        ------
        ValueError
            If it was left by a training with other options.
        """
        path = self.folder / "state.pt"
        if not path.exists():
            return None
        state = torch.load(path, map_location=device)
        before = state["identity"]
        differing = [
            f"{name} was {before.get(name)!r}, is {self.identity.get(name)!r}"
            for name in sorted(before.keys() | self.identity.keys())
            if before.get(name) != self.identity.get(name)
        ]
        if differing:
            raise ValueError(
                f"{path} is of another training ({'; '.join(differing)}): "
                "give the same options to resume it, or another work folder"
            )
        return state

    def save(self, state: dict, number: int, weights: dict[str, Tensor]) -> None:
        """Save the state; of the last ten checkpoints also the weights, and those first.

        Interrupted in between, the training comes by here again and writes the same weights.
        """
        if number > CHECKPOINTS - AVERAGED:
            save_atomically(weights, self.folder / f"weights-{number:03d}.pt")
        save_atomically({**state, "identity": self.identity}, self.folder / "state.pt")

    def last_weights(self) -> list[Path]:
        """Return the files that are averaged, the oldest first."""
        return sorted(self.folder.glob("weights-*.pt"))


def train(
    name: str,
    model: PreTrainedModel,
    pairs: Pairs,
    pace: Pace,
    options: Options,
    folder: Path,
    device: torch.device,
    teacher: T5ForConditionalGeneration | None = None,
    on_step: Callable[[int], None] | None = None,
    objective: Objective | None = None,
) -> Report:
    """Train a model in place, from its last checkpoint where there is one, and average its weights.

    Every step is a function of the seed and its number alone, dropout included. With a pace by
    steps, an interrupted training therefore ends with the weights of an uninterrupted one, to the
    bit, on the same kind of machine with the same number of threads. With a pace by the clock, the
    learning rate depends on the clock; `Report.steps` says how many steps there were.

    Parameters
    ----------
    name : str
        Shown beside the progress bar.
    model : PreTrainedModel
        Trained in place; in evaluation mode and with averaged weights afterwards.
    pairs : Pairs
        The training data.
    pace : Pace
        When it ends. What earlier sessions used of its time is added; what compiling takes is not.
    options : Options
        Everything else.
    folder : Path
        For checkpoints.
    device : torch.device
        Where it runs.
    teacher : T5ForConditionalGeneration, optional
        A trained model on the same device, in evaluation mode.
    on_step : callable, optional
        Called with the number of every step that is done; what it raises ends the session.
    objective : callable, optional
        ``objective(model, batch, progress)``, the loss of another kind of model than those that
        `batch_loss` is for. What it depends on must be in the options or the model's configuration.

    Returns
    -------
    Report
        Steps, epochs, seconds, averaged checkpoints, and the training loss at the end.

    Raises
    ------
    ValueError
        If the folder holds the checkpoint of a training with other options.
    """
    batches = Batches(pairs, options.batch_tokens, options.seed)
    copies = Copies(pairs, options.batch_tokens, options.seed)
    copying_options = replace(options, loss=LABELS, label_smoothing=0.0)
    identity = {
        **asdict(options),
        "pairs": len(pairs),
        "target tokens": pairs.target_tokens(),
        "shape": str(sorted(model.config.to_diff_dict().items())),
        "steps": pace.steps,
        "seconds": pace.seconds,
    }
    checkpoints = Checkpoints(folder, identity)
    optimizer = build_optimizer(model.to(device), options)
    if options.compiled:
        model.compile(dynamic=True)
        model.get_encoder().compile(dynamic=True)  # an objective may run it by itself
    peaks = [group["lr"] for group in optimizer.param_groups]
    step, copied, loss_average = 0, 0, math.nan
    if (state := checkpoints.load(device)) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, copied, loss_average = state["step"], state["copied"], state["loss"]
        pace.used += state["seconds"]
    before = pace.progress(step)
    if state is not None and state["finished"]:
        before = 1.0

    def learn(step: int, copied: int, progress: float) -> float:
        """Leave the gradients of a step behind so many copies; return its loss."""
        torch.manual_seed(options.seed * 1_000_003 + step)
        is_copy = progress < options.copying
        # Dropout and smoothed labels only delay what has a single right answer.
        model.train(not is_copy)
        if is_copy:
            batch, own = copies.batch(step, device), copying_options
        else:
            batch, own = batch_of(pairs, batches[step - copied], device), options
        if objective is None:
            loss = batch_loss(model, batch, own, None if is_copy else teacher)
        else:
            loss = objective(model, batch, progress)
        loss.backward()
        return loss.item()

    if options.compiled and before < 1.0:
        # In minutes that count as nothing learned, the copies would be over before they began.
        for progress in sorted({before, max(before, options.copying)}):
            for trial in range(COMPILED_AHEAD):
                learn(trial, 0, progress)
        optimizer.zero_grad()
        pace.restart()
    with tqdm(
        total=CHECKPOINTS, initial=CHECKPOINTS * before, desc=name, mininterval=5.0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
    ) as bar:  # fmt: skip
        while before < 1.0:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor(before, options.warmup, options.cooldown)
            value = learn(step, copied, before)
            copied += before < options.copying
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if not math.isfinite(value):
                raise FloatingPointError(f"{name}: the loss of step {step} is {value}")
            loss_average = value if math.isnan(loss_average) else 0.98 * loss_average + 0.02 * value
            step += 1
            after = pace.progress(step)
            if int(after * CHECKPOINTS) > int(before * CHECKPOINTS):
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "copied": copied,
                    "loss": loss_average,
                    "seconds": pace.seconds_used(),
                    "finished": after >= 1.0,
                }
                checkpoints.save(state, int(after * CHECKPOINTS), state["model"])
            bar.update(CHECKPOINTS * (after - before))
            bar.set_postfix_str(f"step {step}, loss {loss_average:.3f}", refresh=False)
            before = after
            if on_step is not None:
                on_step(step)
    last = checkpoints.last_weights()
    model.load_state_dict(average_weights(torch.load(path, map_location=device) for path in last))
    model.eval()
    # A finished training that is run again only loads its weights: its time is that of the state.
    seconds = state["seconds"] if state is not None else pace.seconds_used()
    epochs = (step - copied) / batches.per_epoch
    return Report(step, epochs, seconds, len(last), loss_average)
